// What a selection policy is to the worker pool: a few C functions, usually compiled by Numba from one Python file
// (offload/policies/), called without the GIL, one call per query row and selection unit. A unit is a KV head with its
// group of query heads, or one query head where the policy selects per query head.
#pragma once

#include <cstdint>

#include "kernels.h"

namespace offload {

inline constexpr int kMaxPolicyArrays = 8;

// Mirrored field for field by offload/policies/context.py; all fields are 8 bytes wide.
struct PolicyContext {
  int64_t layer_idx;
  int64_t unit;  // KV head, or query head
  int64_t kv_head;
  int64_t group_size;  // query heads of this unit
  int64_t head_dim;
  int64_t kv_len;  // tokens in the cache, the newest included
  int64_t first;   // the policy chooses tokens in [first, last): sinks and recent tokens are the runtime's
  int64_t last;
  int64_t budget_tokens;  // how many it may choose
  double sm_scale;
  const float* query;       // [group_size, head_dim]; null in prepare
  const float* importance;  // [kv_len] exact attention weights summed over the group, if the policy scans keys
  int32_t* indices;         // select writes budget_tokens of them; observe reads num_indices
  int64_t num_indices;
  const float* weights;            // observe: [group_size, num_indices] normalised attention weights
  void* arrays[kMaxPolicyArrays];  // the policy's own arrays of this (sequence, layer)
  // SIMD primitives, as function pointers so that Numba code can call them.
  void (*score_tokens)(const PolicyContext*, const int32_t* indices, int64_t n, float* scores);
  int64_t (*top_k)(const PolicyContext*, const float* x, int64_t n, int64_t k, int32_t* positions);
  // For the primitives only.
  const void* kernels;
  int64_t dtype;
  RowSource keys;
};

struct PolicyFunctions {
  int64_t budget_tokens = 0;  // tokens attended, sinks and recent ones included
  int64_t sink_tokens = 0;
  int64_t recent_tokens = 0;
  bool per_query_head = false;
  bool scans_keys = false;                      // the runtime scores every key first and hands over `importance`
  void (*prepare)(PolicyContext*) = nullptr;    // before the query is known
  int64_t (*select)(PolicyContext*) = nullptr;  // writes sorted unique indices in [first, last), returns how many
  void (*observe)(PolicyContext*) = nullptr;    // sees the attention weights of what was attended
  void (*append)(PolicyContext*) = nullptr;     // the newest token is in the cache
};

// The k largest of x[0..n), as ascending positions; equal values prefer lower positions. Returns min(k, n).
int64_t top_k(const KernelTable& kernels, const float* x, int64_t n, int64_t k, int32_t* positions);

}  // namespace offload
