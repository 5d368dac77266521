#include "operators/rms_norm.h"

#include <algorithm>
#include <vector>

namespace offload {

void rms_norm(const KernelTable& kernels, WorkerPool& pool, DType dtype, const void* x, const void* weight, float eps,
              int64_t num_rows, int64_t width, void* out) {
  constexpr int64_t kRows = 64;
  const int type = static_cast<int>(dtype);
  const int64_t row_bytes = width * dtype_bytes(dtype);
  pool.parallel_for((num_rows + kRows - 1) / kRows, [&](int64_t task, int) {
    static thread_local std::vector<float> normed;
    normed.resize(static_cast<size_t>(width));
    for (int64_t row = task * kRows; row < std::min((task + 1) * kRows, num_rows); ++row) {
      const int64_t at = row * row_bytes;
      kernels.rms_norm[type](static_cast<const char*>(x) + at, weight, eps, width, normed.data());
      kernels.from_float[type](normed.data(), width, static_cast<char*>(out) + at);
    }
  });
}

}  // namespace offload
