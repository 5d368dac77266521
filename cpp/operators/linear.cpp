#include "operators/linear.h"

#include <algorithm>

namespace offload {
namespace {

constexpr int64_t kOutputTile = 64;
constexpr int64_t kTasksPerThread = 6;

struct OutputTile {
  const WeightBlock* block;
  int64_t first;  // output feature inside the block
  int64_t last;
  int64_t column;  // of `first` in the concatenated output
};

}  // namespace

Linear::Linear(DType dtype, int64_t in_features, std::vector<WeightBlock> blocks)
    : dtype_(dtype), in_features_(in_features), blocks_(std::move(blocks)) {
  for (const WeightBlock& block : blocks_) out_features_ += block.out_features;
}

void Linear::run(const KernelTable& kernels, WorkerPool& pool, const LinearInput& input, const void* residual,
                 void* out) const {
  const int type = static_cast<int>(dtype_);
  const int64_t item = dtype_bytes(dtype_);
  // Of the calling thread; workers only read them.
  static thread_local std::vector<float> x;
  static thread_local std::vector<float> packed;
  x.resize(static_cast<size_t>(input.num_rows * in_features_));
  packed.resize(x.size());
  for (int r = 0; r < input.num_rows; ++r) {
    const char* row = static_cast<const char*>(input.x) + r * in_features_ * item * (input.silu_mul ? 2 : 1);
    float* to = x.data() + r * in_features_;
    if (input.silu_mul) {
      kernels.silu_mul[type](row, row + in_features_ * item, in_features_, to);
    } else if (input.norm_weight != nullptr) {
      kernels.rms_norm[type](row, input.norm_weight, input.norm_eps, in_features_, to);
    } else {
      kernels.to_float[type](row, in_features_, to);
    }
  }
  const int64_t tile =
      std::max(kOutputTile, out_features_ / (pool.num_threads() * kTasksPerThread) / kOutputTile * kOutputTile);
  std::vector<OutputTile> tiles;
  int64_t column = 0;
  for (const WeightBlock& block : blocks_) {
    for (int64_t first = 0; first < block.out_features; first += tile) {
      tiles.push_back({&block, first, std::min(first + tile, block.out_features), column + first});
    }
    column += block.out_features;
  }
  kernels.pack_input[type](x.data(), input.num_rows * in_features_, packed.data());
  const void* input_rows = packed.data();
  pool.parallel_for(static_cast<int64_t>(tiles.size()), [&](int64_t task, int) {
    const OutputTile& t = tiles[static_cast<size_t>(task)];
    alignas(64) float y[kMaxLinearRows * kOutputTile];
    alignas(64) float bias[kOutputTile];
    for (int64_t first = t.first; first < t.last; first += kOutputTile) {
      const int64_t n = std::min(kOutputTile, t.last - first);
      kernels.linear[type](input_rows, input.num_rows, in_features_, t.block->weight, first, first + n, y, kOutputTile);
      if (t.block->bias != nullptr) {
        kernels.to_float[type](static_cast<const char*>(t.block->bias) + first * item, n, bias);
        for (int r = 0; r < input.num_rows; ++r) {
          for (int64_t i = 0; i < n; ++i) y[r * kOutputTile + i] += bias[i];
        }
      }
      for (int r = 0; r < input.num_rows; ++r) {
        const int64_t offset = (r * out_features_ + t.column + first - t.first) * item;
        char* to = static_cast<char*>(out) + offset;
        if (residual != nullptr) {
          kernels.add_residual[type](y + r * kOutputTile, static_cast<const char*>(residual) + offset, n, to);
        } else {
          kernels.from_float[type](y + r * kOutputTile, n, to);
        }
      }
    }
  });
}

}  // namespace offload
