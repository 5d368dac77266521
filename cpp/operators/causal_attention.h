// Causal attention of a whole prefill slice on the worker pool.
#pragma once

#include "kernels/kernels.h"
#include "pool/worker_pool.h"

namespace offload {

bool has_causal_attention(const KernelTable& kernels, DType dtype, int64_t head_dim);

// Only where has_causal_attention().
void causal_attention(const KernelTable& kernels, WorkerPool& pool, DType dtype, int64_t num_kv_heads,
                      const CausalArgs& args);

}  // namespace offload
