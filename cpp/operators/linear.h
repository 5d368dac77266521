// The linear layers of a decode step on the CPU: y = f(x) · concat(weights)ᵀ + bias (+ residual) for a few rows of x,
// where f is RMSNorm, SwiGLU or nothing. Weights are read once, from where the checkpoint put them.
// Where they are packed, few rows of f(x) are rounded to int8, and many rows meet weights that are unpacked tile by
// tile.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/kernels.h"
#include "pool/worker_pool.h"

namespace offload {

inline constexpr int kMaxLinearRows = 16;

struct WeightBlock {
  const void* weight;  // [out_features, in_features], row-major; or packed codes
  const void* bias;    // [out_features] or null
  int64_t out_features;
  const Half* scales = nullptr;  // of packed codes, as PackedWeights has them
  const Half* minimums = nullptr;
  WeightFormat format = WeightFormat::dense;
  const int8_t* table = nullptr;
};

// Of a block of packed weights.
PackedWeights packed_weights(const WeightBlock& block, int64_t in_features);

// out: [last - first, in_features] rows of a block of packed weights, as numbers of the dtype.
void unpack_rows(const KernelTable& kernels, DType dtype, const WeightBlock& block, int64_t in_features, int64_t first,
                 int64_t last, void* out);

inline int64_t parts_of(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Memory of rows of inputs in groups; each is filled by KernelTable::quantise_row.
class QuantisedRows {
 public:
  PackedInput make(int64_t num_rows, int64_t in_features);

 private:
  std::vector<int8_t> codes_;
  std::vector<float> scales_;
  std::vector<float> sums_;
};

// What comes before a projection of gate ++ up: f(gate) * up.
enum class Gate : int32_t { none = 0, silu = 1, gelu_tanh = 2 };

struct LinearInput {
  const void* x;  // [num_rows, in_features], or [num_rows, 2 * in_features] = gate ++ up with a gate
  int num_rows;
  const void* norm_weight;  // RMSNorm first, unless null
  float norm_eps;
  Gate gate;
};

class Linear {
 public:
  // All blocks are dense, or all packed, of whatever format each.
  Linear(DType dtype, int64_t in_features, std::vector<WeightBlock> blocks);

  // out: [num_rows, out_features]; residual: the same shape or null. More rows than kMaxLinearRows need
  // `kernels.multiply`.
  void run(const KernelTable& kernels, WorkerPool& pool, const LinearInput& input, const void* residual,
           void* out) const;

  // out: [last - first, in_features] rows of packed weights, as numbers of the dtype.
  void unpack(const KernelTable& kernels, WorkerPool& pool, int64_t first, int64_t last, void* out) const;

  int64_t out_features() const { return out_features_; }

 private:
  void run_many(const KernelTable& kernels, WorkerPool& pool, const LinearInput& input, const void* residual,
                void* out) const;

  const DType dtype_;
  const int64_t in_features_;
  const std::vector<WeightBlock> blocks_;
  int64_t out_features_ = 0;
};

}  // namespace offload
