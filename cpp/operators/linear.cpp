#include "operators/linear.h"

#include <algorithm>

namespace offload {
namespace {

constexpr int64_t kOutputTile = 64;
constexpr int64_t kTasksPerThread = 6;
constexpr int64_t kPreparedRows = 1152;  // of many rows those that are normed or gated at one time
constexpr int64_t kFewestRows = 96;      // of a task: converting its weights is then a tenth of it

struct OutputTile {
  const WeightBlock* block;
  int64_t first;  // output feature inside the block
  int64_t last;
  int64_t column;  // of `first` in the concatenated output
};

// KernelTable::silu_mul or gelu_mul.
const auto& gated_mul(const KernelTable& kernels, Gate gate) {
  return gate == Gate::gelu_tanh ? kernels.gelu_mul : kernels.silu_mul;
}

}  // namespace

PackedInput QuantisedRows::make(int64_t num_rows, int64_t in_features) {
  const int64_t padded = parts_of(parts_of(in_features, kPackedGroup), kPackedScales) * kPackedScales;
  codes_.resize(static_cast<size_t>(num_rows * padded * kPackedGroup));
  scales_.resize(static_cast<size_t>(num_rows * padded));
  sums_.resize(scales_.size());
  return {codes_.data(), scales_.data(), sums_.data(), padded};
}

PackedWeights packed_weights(const WeightBlock& block, int64_t in_features) {
  return {static_cast<const uint8_t*>(block.weight), block.scales, block.minimums, parts_of(in_features, kPackedGroup),
          block.table};
}

void unpack_rows(const KernelTable& kernels, DType dtype, const WeightBlock& block, int64_t in_features, int64_t first,
                 int64_t last, void* out) {
  static thread_local std::vector<float> row;
  row.resize(static_cast<size_t>(in_features));
  const PackedWeights weights = packed_weights(block, in_features);
  for (int64_t o = first; o < last; ++o) {
    kernels.unpack_row[static_cast<int>(block.format)](weights, o, in_features, row.data());
    char* to = static_cast<char*>(out) + (o - first) * in_features * dtype_bytes(dtype);
    kernels.from_float[static_cast<int>(dtype)](row.data(), in_features, to);
  }
}

Linear::Linear(DType dtype, int64_t in_features, std::vector<WeightBlock> blocks)
    : dtype_(dtype), in_features_(in_features), blocks_(std::move(blocks)) {
  for (const WeightBlock& block : blocks_) out_features_ += block.out_features;
}

void Linear::run(const KernelTable& kernels, WorkerPool& pool, const LinearInput& input, const void* residual,
                 void* out) const {
  if (input.num_rows > kMaxLinearRows) return run_many(kernels, pool, input, residual, out);
  const int type = static_cast<int>(dtype_);
  const int64_t item = dtype_bytes(dtype_);
  const bool is_dense = blocks_.front().format == WeightFormat::dense;
  // Of the calling thread; workers only read them.
  static thread_local std::vector<float> x;
  static thread_local std::vector<float> dense_rows;
  static thread_local QuantisedRows quantised_rows;
  x.resize(static_cast<size_t>(input.num_rows * in_features_));
  for (int r = 0; r < input.num_rows; ++r) {
    const char* row = static_cast<const char*>(input.x) + r * in_features_ * item * (input.gate == Gate::none ? 1 : 2);
    float* to = x.data() + r * in_features_;
    if (input.gate != Gate::none) {
      gated_mul(kernels, input.gate)[type](row, row + in_features_ * item, in_features_, to);
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
  PackedInput quantised{};
  if (is_dense) {
    dense_rows.resize(x.size());
    kernels.pack_input[type](x.data(), input.num_rows * in_features_, dense_rows.data());
  } else {
    quantised = quantised_rows.make(input.num_rows, in_features_);
    for (int r = 0; r < input.num_rows; ++r) {
      kernels.quantise_row(x.data() + r * in_features_, in_features_, quantised, r);
    }
  }
  const void* input_rows = dense_rows.data();
  pool.parallel_for(static_cast<int64_t>(tiles.size()), [&](int64_t task, int) {
    const OutputTile& t = tiles[static_cast<size_t>(task)];
    alignas(64) float y[kMaxLinearRows * kOutputTile];
    alignas(64) float bias[kOutputTile];
    for (int64_t first = t.first; first < t.last; first += kOutputTile) {
      const int64_t n = std::min(kOutputTile, t.last - first);
      if (is_dense) {
        kernels.linear[type](input_rows, input.num_rows, in_features_, t.block->weight, first, first + n, y,
                             kOutputTile);
      } else {
        kernels.packed_linear[static_cast<int>(t.block->format)](
            quantised, input.num_rows, packed_weights(*t.block, in_features_), first, first + n, y, kOutputTile);
      }
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

void Linear::unpack(const KernelTable& kernels, WorkerPool& pool, int64_t first, int64_t last, void* out) const {
  pool.parallel_for(parts_of(last - first, kOutputTile), [&](int64_t task, int) {
    int64_t at = first + task * kOutputTile;
    const int64_t end = std::min(at + kOutputTile, last);
    int64_t column = 0;
    for (const WeightBlock& block : blocks_) {
      const int64_t stop = std::min(end, column + block.out_features);
      if (at < stop) {
        char* to = static_cast<char*>(out) + (at - first) * in_features_ * dtype_bytes(dtype_);
        unpack_rows(kernels, dtype_, block, in_features_, at - column, stop - column, to);
        at = stop;
      }
      column += block.out_features;
    }
  });
}

void Linear::run_many(const KernelTable& kernels, WorkerPool& pool, const LinearInput& input, const void* residual,
                      void* out) const {
  const int type = static_cast<int>(dtype_);
  const int64_t item = dtype_bytes(dtype_), x_bytes = in_features_ * item * (input.gate == Gate::none ? 1 : 2);
  std::vector<OutputTile> tiles;
  int64_t column = 0;
  for (const WeightBlock& block : blocks_) {
    for (int64_t first = 0; first < block.out_features; first += kMultiplyColumns) {
      tiles.push_back({&block, first, std::min(first + kMultiplyColumns, block.out_features), column});
    }
    column += block.out_features;
  }
  const auto num_tiles = static_cast<int64_t>(tiles.size());
  static thread_local std::vector<char> prepared;  // of the calling thread; workers share it
  for (int64_t begin = 0; begin < input.num_rows; begin += kPreparedRows) {
    const int64_t num_rows = std::min<int64_t>(kPreparedRows, input.num_rows - begin);
    const char* x = static_cast<const char*>(input.x) + begin * x_bytes;
    if (input.gate != Gate::none || input.norm_weight != nullptr) {
      prepared.resize(static_cast<size_t>(num_rows * in_features_ * item));
      char* rows = prepared.data();
      pool.parallel_for(parts_of(num_rows, kMaxLinearRows), [&](int64_t task, int) {
        static thread_local std::vector<float> values;
        values.resize(static_cast<size_t>(in_features_));
        const int64_t last = std::min<int64_t>((task + 1) * kMaxLinearRows, num_rows);
        for (int64_t r = task * kMaxLinearRows; r < last; ++r) {
          const char* row = x + r * x_bytes;
          if (input.gate != Gate::none) {
            gated_mul(kernels, input.gate)[type](row, row + in_features_ * item, in_features_, values.data());
          } else {
            kernels.rms_norm[type](row, input.norm_weight, input.norm_eps, in_features_, values.data());
          }
          kernels.from_float[type](values.data(), in_features_, rows + r * in_features_ * item);
        }
      });
      x = rows;
    }
    const int64_t wanted = parts_of(pool.num_threads() * kTasksPerThread, num_tiles);
    const int64_t num_parts = std::max(parts_of(num_rows, kMultiplyRows), std::min(wanted, num_rows / kFewestRows));
    const int64_t rows_each = parts_of(parts_of(num_rows, num_parts), 6) * 6;
    pool.parallel_for(parts_of(num_rows, rows_each) * num_tiles, [&](int64_t task, int) {
      static thread_local std::vector<float> scratch;
      const OutputTile& t = tiles[static_cast<size_t>(task % num_tiles)];
      const int64_t first = task / num_tiles * rows_each;
      const int64_t offset = ((begin + first) * out_features_ + t.column) * item;
      ProductArgs args{x + first * in_features_ * item,
                       std::min(rows_each, num_rows - first),
                       in_features_,
                       t.block->weight,
                       t.block->bias,
                       residual == nullptr ? nullptr : static_cast<const char*>(residual) + offset,
                       static_cast<char*>(out) + offset,
                       out_features_,
                       t.first,
                       t.last};
      if (t.block->format != WeightFormat::dense) {
        static thread_local std::vector<char> unpacked;  // the tile's rows: they are all that `args` sees
        unpacked.resize(static_cast<size_t>((t.last - t.first) * in_features_ * item));
        unpack_rows(kernels, dtype_, *t.block, in_features_, t.first, t.last, unpacked.data());
        args.weight = unpacked.data();
        if (args.bias != nullptr) args.bias = static_cast<const char*>(args.bias) + t.first * item;
        if (args.residual != nullptr) args.residual = static_cast<const char*>(args.residual) + t.first * item;
        args.out = static_cast<char*>(args.out) + t.first * item;
        args.first = 0;
        args.last = t.last - t.first;
      }
      scratch.resize(static_cast<size_t>(args.scratch_items()));
      kernels.multiply[type](args, scratch.data());
    });
  }
}

}  // namespace offload
