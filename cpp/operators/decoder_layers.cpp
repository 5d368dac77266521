#include "operators/decoder_layers.h"

#include <cstring>

namespace offload {

namespace {

void norm_in_place(const KernelTable& kernels, DType dtype, const NormWeight& norm, int64_t width, char* x) {
  static thread_local std::vector<float> normed;
  normed.resize(static_cast<size_t>(width));
  kernels.rms_norm[static_cast<int>(dtype)](x, norm.weight, norm.eps, width, normed.data());
  kernels.from_float[static_cast<int>(dtype)](normed.data(), width, x);
}

void scale_in_place(const KernelTable& kernels, DType dtype, float scale, int64_t size, char* x) {
  static thread_local std::vector<float> scaled;
  scaled.resize(static_cast<size_t>(size));
  kernels.to_float[static_cast<int>(dtype)](x, size, scaled.data());
  for (float& element : scaled) element *= scale;
  kernels.from_float[static_cast<int>(dtype)](scaled.data(), size, x);
}

}  // namespace

void rope_append(const DecodeAttention& attention, int64_t layer_idx, const StepRows& rows, char* qkv, Rope rope,
                 const HeadNorms& norms, const char* query_scale) {
  const AttentionShape& shape = attention.shape(layer_idx);
  const auto rope_head = attention.kernels().rope_head[static_cast<int>(shape.dtype)];
  const int64_t head_bytes = shape.head_bytes();
  // A head of which a part is rotated is normed as a whole before.
  const bool apart = norms.whole || rope.dim < shape.head_dim;
  const void* const of_query_head = apart ? nullptr : norms.query;
  const void* const of_key_head = apart ? nullptr : norms.key;
  const int64_t query_width = norms.whole ? shape.num_qo_heads * shape.head_dim : shape.head_dim;
  const int64_t key_width = norms.whole ? shape.num_kv_heads * shape.head_dim : shape.head_dim;
  const int64_t item = dtype_bytes(shape.dtype);
  const int64_t rope_bytes = rope.dim * dtype_bytes(shape.dtype);
  const char *cos = rope.cos, *sin = rope.sin;
  char* head = qkv;
  for (int64_t r = 0; r < rows.num_rows; ++r, cos += rope_bytes, sin += rope_bytes) {
    const QueryRow row = rows.row(r, layer_idx, shape.num_kv_heads);
    if (apart && norms.query != nullptr) {
      char *x = head, *const keys = head + shape.num_qo_heads * head_bytes;
      for (; x < keys; x += query_width * item) {
        norm_in_place(attention.kernels(), shape.dtype, {norms.query, norms.eps}, query_width, x);
      }
      for (; x < keys + shape.num_kv_heads * head_bytes; x += key_width * item) {
        norm_in_place(attention.kernels(), shape.dtype, {norms.key, norms.eps}, key_width, x);
      }
    }
    for (int h = 0; h < shape.num_qo_heads; ++h, head += head_bytes) {
      rope_head(head, cos, sin, of_query_head, norms.eps, rope.dim);
    }
    if (query_scale != nullptr) {
      float scale;
      attention.kernels().to_float[static_cast<int>(shape.dtype)](query_scale + r * item, 1, &scale);
      const int64_t width = shape.num_qo_heads * shape.head_dim;
      scale_in_place(attention.kernels(), shape.dtype, scale, width, head - width * item);
    }
    char* value = head + shape.num_kv_heads * head_bytes;
    for (int h = 0; h < shape.num_kv_heads; ++h, head += head_bytes, value += head_bytes) {
      rope_head(head, cos, sin, of_key_head, norms.eps, rope.dim);
      if (norms.value != nullptr) {
        norm_in_place(attention.kernels(), shape.dtype, {norms.value, norms.eps}, shape.head_dim, value);
      }
      const int64_t newest = row.num_tokens(h) - 1;
      shape.write(attention.kernels(), row.keys(shape, h), newest, head);
      if (!shape.keys_only) shape.write(attention.kernels(), row.values(shape, h), newest, value);
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
  layer.qkv->run(kernels_, attention_.pool(), {step.hidden, n, norm.weight, norm.eps, Gate::none}, nullptr, step.qkv);
  rope_append(attention_, layer_idx, step.rows, step.qkv, step.ropes[layer.rope_idx], layer.head_norms,
              step.query_scale);
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
  add(*layer.o_proj, {step.attended, n, nullptr, 0.0f, Gate::none}, layer.attention_out_norm, step);
  if (layer.routed != nullptr) {
    add_experts(layer, step);
  } else {
    layer.gate_up->run(kernels_, pool, {step.hidden, n, norm.weight, norm.eps, Gate::none}, nullptr, step.gate_up);
    add(*layer.down, {step.gate_up, n, nullptr, 0.0f, layer.gate}, layer.mlp_out_norm, step);
  }
  if (layer.out_scale != 1.0f) {
    const int64_t size = step.rows.num_rows * layer.o_proj->out_features();
    scale_in_place(kernels_, attention_.shape().dtype, layer.out_scale, size, step.hidden);
  }
}

void DecoderLayers::add(const Linear& linear, const LinearInput& x, const NormWeight& norm, const DecoderStep& step) {
  if (norm.weight == nullptr) return linear.run(kernels_, attention_.pool(), x, step.hidden, step.hidden);
  linear.run(kernels_, attention_.pool(), x, nullptr, step.added);
  add_rows(norm, linear.out_features(), step);
}

void DecoderLayers::add_rows(const NormWeight& norm, int64_t width, const DecoderStep& step) {
  const DType dtype = attention_.shape().dtype;
  const int type = static_cast<int>(dtype);
  const int64_t row_bytes = width * dtype_bytes(dtype);
  normed_.resize(static_cast<size_t>(width));
  for (int64_t r = 0; r < step.rows.num_rows; ++r) {
    char* const row = step.hidden + r * row_bytes;
    const char* const added = step.added + r * row_bytes;
    if (norm.weight == nullptr) {
      kernels_.to_float[type](added, width, normed_.data());
    } else {
      kernels_.rms_norm[type](added, norm.weight, norm.eps, width, normed_.data());
    }
    kernels_.add_residual[type](normed_.data(), row, width, row);
  }
}

void DecoderLayers::add_experts(const DecoderLayer& layer, const DecoderStep& step) {
  const RoutedMlp& mlp = *layer.routed;
  const DType dtype = attention_.shape().dtype;
  const int type = static_cast<int>(dtype);
  const auto n = static_cast<int>(step.rows.num_rows);
  const int64_t width = mlp.down->columns(), row_bytes = width * dtype_bytes(dtype);
  const NormWeight& norm = layer.mlp_norm;
  const char* rows = step.hidden;
  if (norm.weight != nullptr) {
    normed_.resize(static_cast<size_t>(width));
    routed_rows_.resize(static_cast<size_t>(n * row_bytes));
    for (int r = 0; r < n; ++r) {
      kernels_.rms_norm[type](rows + r * row_bytes, norm.weight, norm.eps, width, normed_.data());
      kernels_.from_float[type](normed_.data(), width, routed_rows_.data() + r * row_bytes);
    }
    rows = routed_rows_.data();
  }
  mlp.run(kernels_, attention_.pool(), rows, n, step.added);
  add_rows(layer.mlp_out_norm, width, step);
}

}  // namespace offload
