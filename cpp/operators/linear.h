// The linear layers of a decode step on the CPU: y = f(x) · concat(weights)ᵀ + bias (+ residual) for a few rows of x,
// where f is RMSNorm, SwiGLU or nothing. Weights are read once, from where the checkpoint put them.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernels.h"
#include "pool/worker_pool.h"

namespace offload {

inline constexpr int kMaxLinearRows = 16;

struct WeightBlock {
  const void* weight;  // [out_features, in_features], row-major
  const void* bias;    // [out_features] or null
  int64_t out_features;
};

struct LinearInput {
  const void* x;  // [num_rows, in_features], or [num_rows, 2 * in_features] = gate ++ up with silu_mul
  int num_rows;
  const void* norm_weight;  // RMSNorm first, unless null
  float norm_eps;
  bool silu_mul;
};

class Linear {
 public:
  Linear(DType dtype, int64_t in_features, std::vector<WeightBlock> blocks);

  // out: [num_rows, out_features]; residual: the same shape or null. More rows than kMaxLinearRows need
  // `kernels.multiply`.
  void run(const KernelTable& kernels, WorkerPool& pool, const LinearInput& input, const void* residual,
           void* out) const;

 private:
  void run_many(const KernelTable& kernels, WorkerPool& pool, const LinearInput& input, const void* residual,
                void* out) const;

  const DType dtype_;
  const int64_t in_features_;
  const std::vector<WeightBlock> blocks_;
  int64_t out_features_ = 0;
};

}  // namespace offload
