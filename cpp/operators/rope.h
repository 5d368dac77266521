// The rotary embedding of many tokens on the worker pool, for a prefill.
#pragma once

#include "kernels/kernels.h"
#include "pool/worker_pool.h"

namespace offload {

struct RopeArgs {
  const void* x;  // [num_tokens, num_heads, head_dim], a row of heads contiguous
  int64_t token;  // elements from one token's heads to the next's
  int64_t num_tokens;
  int64_t num_heads;
  int64_t head_dim;
  int64_t rotary_dim;  // elements of a head that are rotated: the first
  const void* cos;     // [num_tokens, rotary_dim]
  const void* sin;     // the same
  void* out;           // [num_heads, num_tokens, head_dim]
};

void rotate_heads(const KernelTable& kernels, WorkerPool& pool, DType dtype, const RopeArgs& args);

}  // namespace offload
