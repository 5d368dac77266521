#include "operators/decoder_layers.h"

#include <cstring>

namespace offload {

void rope_append(const DecodeAttention& attention, int64_t layer_idx, const StepRows& rows, char* qkv, const char* cos,
                 const char* sin, const HeadNorms& norms) {
  const AttentionShape& shape = attention.shape(layer_idx);
  const auto rope_head = attention.kernels().rope_head[static_cast<int>(shape.dtype)];
  const int64_t head_bytes = shape.head_bytes();
  char* head = qkv;
  for (int64_t r = 0; r < rows.num_rows; ++r, cos += head_bytes, sin += head_bytes) {
    const QueryRow row = rows.row(r, layer_idx, shape.num_kv_heads);
    for (int h = 0; h < shape.num_qo_heads; ++h, head += head_bytes) {
      rope_head(head, cos, sin, norms.query, norms.eps, shape.head_dim);
    }
    const char* value = head + shape.num_kv_heads * head_bytes;
    for (int h = 0; h < shape.num_kv_heads; ++h, head += head_bytes, value += head_bytes) {
      rope_head(head, cos, sin, norms.key, norms.eps, shape.head_dim);
      const int64_t newest = row.num_tokens(h) - 1;
      shape.write(attention.kernels(), row.keys(shape, h), newest, head);
      shape.write(attention.kernels(), row.values(shape, h), newest, value);
    }
    head += shape.num_kv_heads * head_bytes;  // past the values
  }
}

std::string DecoderLayers::run(const DecoderStep& step) {
  for (int64_t layer_idx = 0; layer_idx < static_cast<int64_t>(layers_.size()); ++layer_idx) {
    const std::string failure = decode_layer(layer_idx, step);
    if (!failure.empty()) return failure;
  }
  return {};
}

std::string DecoderLayers::decode_layer(int64_t layer_idx, const DecoderStep& step) {
  project(layer_idx, step);
  const std::string failure = attend(layer_idx, step);
  if (failure.empty()) finish(layer_idx, step);
  return failure;
}

void DecoderLayers::project(int64_t layer_idx, const DecoderStep& step) {
  const DecoderLayer& layer = layers_[static_cast<size_t>(layer_idx)];
  const auto n = static_cast<int>(step.rows.num_rows);
  const NormWeight& norm = layer.input_norm;
  layer.qkv->run(kernels_, attention_.pool(), {step.hidden, n, norm.weight, norm.eps, false}, nullptr, step.qkv);
  rope_append(attention_, layer_idx, step.rows, step.qkv, step.cos, step.sin, layer.head_norms);
}

std::string DecoderLayers::attend(int64_t layer_idx, const DecoderStep& step) {
  const bool sparse = layers_[static_cast<size_t>(layer_idx)].sparse;
  const AttentionShape& shape = attention_.shape(layer_idx);
  const int64_t query_bytes = shape.num_qo_heads * shape.head_bytes();
  const int64_t qkv_bytes = query_bytes + 2 * shape.num_kv_heads * shape.head_bytes();
  step.rows.of_layer(layer_idx, shape.num_kv_heads, rows_);
  for (int64_t r = 0; r < step.rows.num_rows; ++r) {
    QueryRow& row = rows_[static_cast<size_t>(r)];
    row.query = step.qkv + r * qkv_bytes;
    row.output = step.attended + r * query_bytes;
    if (step.kept_queries != nullptr) {
      std::memcpy(step.kept_queries + (layer_idx * step.rows.num_rows + r) * query_bytes, row.query,
                  static_cast<size_t>(query_bytes));
    }
  }
  // prepare() comes right before: on a CPU there is nothing that it could overlap.
  return attention_.attend(layer_idx, rows_, sparse, 0, true);
}

void DecoderLayers::finish(int64_t layer_idx, const DecoderStep& step) {
  const DecoderLayer& layer = layers_[static_cast<size_t>(layer_idx)];
  const auto n = static_cast<int>(step.rows.num_rows);
  const NormWeight& norm = layer.mlp_norm;
  WorkerPool& pool = attention_.pool();
  layer.o_proj->run(kernels_, pool, {step.attended, n, nullptr, 0.0f, false}, step.hidden, step.hidden);
  layer.gate_up->run(kernels_, pool, {step.hidden, n, norm.weight, norm.eps, false}, nullptr, step.gate_up);
  layer.down->run(kernels_, pool, {step.gate_up, n, nullptr, 0.0f, true}, step.hidden, step.hidden);
}

}  // namespace offload
