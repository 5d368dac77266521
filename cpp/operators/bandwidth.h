// What the machine's memory gives: the yardstick of every attention benchmark, measured in the same run.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"
#include "pool/worker_pool.h"

namespace offload {

// Reads num_bytes once, sequentially, split over all threads. Returns seconds.
double time_sequential_read(const KernelTable& kernels, WorkerPool& pool, const void* data, int64_t num_bytes);
// Reads rows[0..num_rows) of row_bytes each, split over all threads in order. Returns seconds.
double time_row_gather(const KernelTable& kernels, WorkerPool& pool, const void* data, const int32_t* rows,
                       int64_t num_rows, int64_t row_bytes);

}  // namespace offload
