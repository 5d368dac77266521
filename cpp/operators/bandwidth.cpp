#include "operators/bandwidth.h"

#include <algorithm>
#include <atomic>
#include <chrono>

namespace offload {
namespace {

std::atomic<uint64_t> checksum_sink{0};  // keeps the reads alive

template <class Body>
double time_pieces(WorkerPool& pool, int64_t pieces, Body&& body) {
  const auto start = std::chrono::steady_clock::now();
  pool.parallel_for(pieces,
                    [&](int64_t piece, int) { checksum_sink.fetch_add(body(piece), std::memory_order_relaxed); });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double time_sequential_read(const KernelTable& kernels, WorkerPool& pool, const void* data, int64_t num_bytes) {
  const int64_t pieces = pool.num_threads() * 4;
  return time_pieces(pool, pieces, [&](int64_t piece) {
    const int64_t begin = num_bytes / pieces * piece & ~int64_t{63};
    const int64_t end = piece + 1 == pieces ? num_bytes : num_bytes / pieces * (piece + 1) & ~int64_t{63};
    return kernels.read_bytes(static_cast<const char*>(data) + begin, end - begin);
  });
}

double time_row_gather(const KernelTable& kernels, WorkerPool& pool, const void* data, const int32_t* rows,
                       int64_t num_rows, int64_t row_bytes) {
  const int64_t pieces = std::min<int64_t>(pool.num_threads() * 4, num_rows);
  return time_pieces(pool, pieces, [&](int64_t piece) {
    const int64_t begin = num_rows * piece / pieces;
    const int64_t end = num_rows * (piece + 1) / pieces;
    return kernels.read_rows(data, rows + begin, end - begin, row_bytes);
  });
}

}  // namespace offload
