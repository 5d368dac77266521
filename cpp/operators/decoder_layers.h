// A decode step on the CPU from the embeddings to before the final norm, in one call: between the operators of small
// models Python takes as long as they do.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention/decode_attention.h"
#include "operators/linear.h"
#include "operators/routed_linear.h"
#include "attention/step_rows.h"

namespace offload {

struct NormWeight {
  const void* weight;  // [hidden_size]
  float eps;
};

// RMSNorm before the rotation, per head (Qwen3) or over all heads at once (OLMo 2), and of the heads of values (Gemma
// 4); null weights: none.
struct HeadNorms {
  const void* query;  // [head_dim], or of all query heads
  const void* key;
  float eps;
  bool whole = false;
  const void* value = nullptr;  // [head_dim]
};

// The tables of one rotary embedding: [num_rows, dim], of the first elements of each head, the others of which stay as
// they are.
struct Rope {
  const char* cos;
  const char* sin;
  int64_t dim;
};

// RoPE of a step's new tokens, and their keys and values into the pages of one layer. Of each row qkv [num_qo_heads + 2
// * num_kv_heads, head_dim], whose query heads are rotated in place. `query_scale`: as of DecoderStep.
void rope_append(const DecodeAttention& attention, int64_t layer_idx, const StepRows& rows, char* qkv, Rope rope,
                 const HeadNorms& norms, const char* query_scale = nullptr);

// A norm without a weight is none: input_norm and mlp_norm are of what a block reads, the others of what it adds.
struct DecoderLayer {
  NormWeight input_norm;
  const Linear* qkv;
  HeadNorms head_norms;
  const Linear* o_proj;
  NormWeight mlp_norm;
  const Linear* gate_up;  // null where the MLP is routed
  const Linear* down;
  const RoutedMlp* routed;
  NormWeight attention_out_norm;
  NormWeight mlp_out_norm;
  size_t rope_idx;  // into the ropes of a step
  bool sparse;      // the policy has a say in it
  Gate gate;        // of the MLP
  float out_scale;  // multiplies what the layer returns
};

// The memory of one step over at most kMaxLinearRows rows; all of it in the model's dtype.
struct DecoderStep {
  char* hidden;  // [num_rows, hidden_size], in and out
  std::vector<Rope> ropes;
  char* qkv;       // scratch [num_rows, (num_qo_heads + 2 * num_kv_heads) * head_dim] of the widest layer
  char* attended;  // scratch [num_rows, num_qo_heads * head_dim] likewise
  char* gate_up;   // scratch [num_rows, 2 * intermediate_size]
  char* added;     // scratch [num_rows, hidden_size], for layers with norms of what they add, or with experts
  // [num_layers, num_rows, num_qo_heads * head_dim], for those of all layers, whose heads are alike; or null.
  char* kept_queries;
  const char* query_scale;  // [num_rows], multiply rotated queries; or null
  StepRows rows;
};

class DecoderLayers {
 public:
  explicit DecoderLayers(DecodeAttention& attention) : attention_(attention), kernels_(attention.kernels()) {}

  void add(const DecoderLayer& layer) { layers_.push_back(layer); }

  // All layers. Returns an empty string, or what was wrong with the numbers; the step is then unusable.
  std::string run(const DecoderStep& step);

  // The same of one layer: the hot path.
  std::string decode_layer(int64_t layer_idx, const DecoderStep& step);

  // A layer in parts, for callers that attend by themselves: from hidden to rotated queries in qkv and K/V in the
  // pages; from attended to hidden.
  void project(int64_t layer_idx, const DecoderStep& step);
  void finish(int64_t layer_idx, const DecoderStep& step);

 private:
  // hidden += the projection of x, or its norm.
  void add(const Linear& linear, const LinearInput& x, const NormWeight& norm, const DecoderStep& step);
  // hidden += added, or its norm.
  void add_rows(const NormWeight& norm, int64_t width, const DecoderStep& step);
  void add_experts(const DecoderLayer& layer, const DecoderStep& step);
  std::string attend(int64_t layer_idx, const DecoderStep& step);

  DecodeAttention& attention_;
  const KernelTable& kernels_;
  std::vector<DecoderLayer> layers_;
  std::vector<QueryRow> rows_;     // scratch
  std::vector<float> normed_;      // scratch
  std::vector<char> routed_rows_;  // likewise: what experts read
};

}  // namespace offload
