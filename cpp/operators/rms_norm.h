// RMSNorm of many rows on the worker pool, for a prefill.
#pragma once

#include "kernels/kernels.h"
#include "pool/worker_pool.h"

namespace offload {

// x, out: [num_rows, width], which may be one; weight: [width].
void rms_norm(const KernelTable& kernels, WorkerPool& pool, DType dtype, const void* x, const void* weight, float eps,
              int64_t num_rows, int64_t width, void* out);

}  // namespace offload
