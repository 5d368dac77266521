// RoPE of new tokens, and their keys and values into the pages of the KV store.
#pragma once

#include <cstdint>

#include "attention/decode_attention.h"

namespace offload {

// RMSNorm per head before the rotation (Qwen3); null weights: none.
struct HeadNorms {
  const void* query;  // [head_dim]
  const void* key;
  float eps;
};

// One row: qkv [num_qo_heads + 2 * num_kv_heads, head_dim]; cos, sin [head_dim]. Rotates the query heads in place and
// writes the rotated keys and the values to token `position` of `pages`.
void rope_append(const KernelTable& kernels, const AttentionShape& shape, void* qkv, const void* cos, const void* sin,
                 const HeadNorms& norms, const int64_t* pages, int64_t position);

}  // namespace offload
