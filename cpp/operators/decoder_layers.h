// A decode step on the CPU from the embeddings to before the final norm, in one call: between the operators of small
// models Python takes as long as they do.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention/decode_attention.h"
#include "operators/linear.h"
#include "attention/step_rows.h"

namespace offload {

struct NormWeight {
  const void* weight;  // [hidden_size]
  float eps;
};

// RMSNorm per head before the rotation (Qwen3); null weights: none.
struct HeadNorms {
  const void* query;  // [head_dim]
  const void* key;
  float eps;
};

// RoPE of a step's new tokens, and their keys and values into the pages of one layer. Of each row qkv [num_qo_heads + 2
// * num_kv_heads, head_dim], whose query heads are rotated in place; cos, sin [head_dim].
void rope_append(const DecodeAttention& attention, int64_t layer_idx, const StepRows& rows, char* qkv, const char* cos,
                 const char* sin, const HeadNorms& norms);

struct DecoderLayer {
  NormWeight input_norm;
  const Linear* qkv;
  HeadNorms head_norms;
  const Linear* o_proj;
  NormWeight mlp_norm;
  const Linear* gate_up;
  const Linear* down;
  bool sparse;  // the policy has a say in it
};

// The memory of one step over at most kMaxLinearRows rows; all of it in the model's dtype.
struct DecoderStep {
  char* hidden;     // [num_rows, hidden_size], in and out
  const char* cos;  // [num_rows, head_dim] of the layers that run
  const char* sin;
  char* qkv;       // scratch [num_rows, (num_qo_heads + 2 * num_kv_heads) * head_dim] of the widest layer
  char* attended;  // scratch [num_rows, num_qo_heads * head_dim] likewise
  char* gate_up;   // scratch [num_rows, 2 * intermediate_size]
  // [num_layers, num_rows, num_qo_heads * head_dim], for those of all layers, whose heads are alike; or null.
  char* kept_queries;
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
  std::string attend(int64_t layer_idx, const DecoderStep& step);

  DecodeAttention& attention_;
  const KernelTable& kernels_;
  std::vector<DecoderLayer> layers_;
  std::vector<QueryRow> rows_;  // scratch
};

}  // namespace offload
