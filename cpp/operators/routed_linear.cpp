#include "operators/routed_linear.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace offload {
namespace {

constexpr int64_t kColumns = 64;                // of the result that are computed together
constexpr int64_t kTileOutputs = 2 * kColumns;  // of a matrix, where two make a column
constexpr int64_t kTasksPerRoutedThread = 6;
constexpr int64_t kSummedAtOnce = 1 << 16;  // numbers that one thread adds up faster than two are told to

// `body` over blocks of at most kMaxLinearRows rows; what is one block runs here.
template <class Body>
void for_blocks(WorkerPool& pool, int64_t num_rows, const Body& body) {
  const auto block = [&](int64_t task, int) {
    body(task * kMaxLinearRows, std::min<int64_t>((task + 1) * kMaxLinearRows, num_rows));
  };
  if (num_rows <= kMaxLinearRows) return block(0, 0);
  pool.parallel_for(parts_of(num_rows, kMaxLinearRows), block);
}

}  // namespace

void Routing::set(const int64_t* experts, int64_t num_pairs, int64_t num_experts) {
  begins_.assign(static_cast<size_t>(num_experts + 1), 0);
  for (int64_t p = 0; p < num_pairs; ++p) {
    if (experts[p] < 0) throw std::invalid_argument("expert must be at least 0, got " + std::to_string(experts[p]));
    if (experts[p] < num_experts) ++begins_[static_cast<size_t>(experts[p] + 1)];
  }
  runs_.clear();
  for (int64_t e = 0; e < num_experts; ++e) {
    const int64_t begin = begins_[static_cast<size_t>(e)];
    int64_t& end = begins_[static_cast<size_t>(e + 1)];
    end += begin;
    if (end > begin) runs_.push_back({e, begin, end});
  }
  order_.resize(static_cast<size_t>(begins_.back()));
  for (int64_t p = 0; p < num_pairs; ++p) {
    if (experts[p] < num_experts) order_[static_cast<size_t>(begins_[static_cast<size_t>(experts[p])]++)] = p;
  }
}

struct RoutedLinear::Tile {
  const Routing::Run* run;
  int64_t first;  // column
  int64_t last;
};

// kMaxLinearRows pairs of one expert, or the last ones.
struct RoutedLinear::Block {
  const Routing::Run* run;
  int64_t first;
  int64_t last;
};

struct RoutedLinear::Inputs {
  PackedInput quantised;  // rows of x
  const char* sorted;     // pairs, those of a run as `multiply` takes them, or as `linear` does
  int64_t sorted_bytes;   // of a pair's place
  const int64_t* order;
  int64_t pairs_per_row;
};

RoutedLinear::RoutedLinear(DType dtype, int64_t in_features, const WeightBlock& block, int64_t num_experts,
                           ExpertActivation activation)
    : dtype_(dtype),
      in_features_(in_features),
      block_(block),
      num_experts_(num_experts),
      activation_(activation),
      out_features_(block.out_features / num_experts),
      columns_(activation.gate == ExpertGate::none ? out_features_ : out_features_ / 2) {}

void RoutedLinear::run(const KernelTable& kernels, WorkerPool& pool, const void* x, int64_t num_rows,
                       int64_t pairs_per_row, const Routing& routing, void* out) const {
  const int type = static_cast<int>(dtype_);
  const int64_t row_bytes = in_features_ * dtype_bytes(dtype_);
  const auto* rows = static_cast<const char*>(x);
  const int64_t* order = routing.order().data();
  // Of the calling thread; workers share them.
  static thread_local QuantisedRows quantised_rows;
  static thread_local std::vector<char> sorted;
  static thread_local std::vector<Tile> tiles;
  Inputs inputs{{}, nullptr, 0, order, pairs_per_row};
  const bool is_dense = block_.format == WeightFormat::dense;
  int64_t num_few = 0, num_many = 0;
  for (const Routing::Run& run : routing.runs()) ++(run.is_few() ? num_few : num_many);
  if (num_few > 0 && !is_dense) {
    inputs.quantised = quantised_rows.make(num_rows, in_features_);
    for_blocks(pool, num_rows, [&](int64_t first, int64_t last) {
      static thread_local std::vector<float> row;
      row.resize(static_cast<size_t>(in_features_));
      for (int64_t r = first; r < last; ++r) {
        kernels.to_float[type](rows + r * row_bytes, in_features_, row.data());
        kernels.quantise_row(row.data(), in_features_, inputs.quantised, r);
      }
    });
  }
  if (num_many > 0 || is_dense) {
    const bool multiplies = kernels.multiply[type] != nullptr;
    const int64_t bytes = multiplies && !is_dense ? row_bytes : in_features_ * static_cast<int64_t>(sizeof(float));
    sorted.resize(routing.order().size() * static_cast<size_t>(bytes));
    char* const all_sorted = sorted.data();
    inputs.sorted = all_sorted;
    inputs.sorted_bytes = bytes;
    static thread_local std::vector<Block> blocks;
    blocks.clear();
    for (const Routing::Run& run : routing.runs()) {
      for (int64_t i = run.begin; i < run.end && (is_dense || !run.is_few()); i += kMaxLinearRows) {
        blocks.push_back({&run, i, std::min(i + kMaxLinearRows, run.end)});
      }
    }
    const Block* const all_blocks = blocks.data();
    const auto sort = [&](int64_t task, int) {
      const auto [run, first, last] = all_blocks[task];
      static thread_local std::vector<float> floats;
      floats.resize(static_cast<size_t>(kMaxLinearRows * in_features_));
      const bool is_raw = multiplies && !run->is_few();
      char* const to = all_sorted + run->begin * bytes;
      for (int64_t i = first; i < last; ++i) {
        const char* row = rows + order[i] / pairs_per_row * row_bytes;
        if (is_raw) {
          std::memcpy(to + (i - run->begin) * row_bytes, row, static_cast<size_t>(row_bytes));
        } else {
          kernels.to_float[type](row, in_features_, floats.data() + (i - first) * in_features_);
        }
      }
      if (!is_raw) {
        kernels.pack_input[type](floats.data(), (last - first) * in_features_, to + (first - run->begin) * bytes);
      }
    };
    const auto num_blocks = static_cast<int64_t>(blocks.size());
    if (static_cast<int64_t>(routing.order().size()) * in_features_ <= kSummedAtOnce) {
      for (int64_t task = 0; task < num_blocks; ++task) sort(task, 0);
    } else {
      pool.parallel_for(num_blocks, sort);
    }
  }
  const int64_t wanted =
      static_cast<int64_t>(routing.runs().size()) * columns_ / (pool.num_threads() * kTasksPerRoutedThread);
  const int64_t tile = std::max(kColumns, wanted / kColumns * kColumns);
  tiles.clear();
  for (const Routing::Run& run : routing.runs()) {
    for (int64_t first = 0; first < columns_; first += tile) {
      tiles.push_back({&run, first, std::min(first + tile, columns_)});
    }
  }
  const Tile* all = tiles.data();
  pool.parallel_for(static_cast<int64_t>(tiles.size()),
                    [&](int64_t task, int) { run_tile(kernels, all[task], inputs, out); });
}

void RoutedLinear::run_tile(const KernelTable& kernels, const Tile& tile, const Inputs& inputs, void* out) const {
  static thread_local QuantisedRows gathered;
  static thread_local std::vector<char> unpacked;
  static thread_local std::vector<char> rounded;
  static thread_local std::vector<float> scratch;
  const int type = static_cast<int>(dtype_);
  const int64_t item = dtype_bytes(dtype_);
  const Routing::Run& run = *tile.run;
  const int64_t* pairs = inputs.order + run.begin;
  const bool is_few = run.is_few(), multiplies = kernels.multiply[type] != nullptr;
  const bool is_dense = block_.format == WeightFormat::dense;
  const char* const sorted = inputs.sorted + run.begin * inputs.sorted_bytes;  // null where no run needs it
  const PackedWeights weights = packed_weights(block_, in_features_);
  PackedInput x = inputs.quantised;
  const auto row_at = [&](int64_t i) { return pairs[i] / inputs.pairs_per_row; };
  if (is_dense) {
    // What it reads is sorted.
  } else if (is_few && run.size() == 1) {
    x.codes += row_at(0) * x.codes_stride();
    x.scales += row_at(0) * x.padded_groups;
    x.sums += row_at(0) * x.padded_groups;
  } else if (is_few) {
    x = gathered.make(run.size(), in_features_);
    const auto groups = static_cast<size_t>(x.padded_groups);
    for (int64_t i = 0; i < run.size(); ++i) {
      const int64_t from = row_at(i);
      std::memcpy(x.codes + i * x.codes_stride(), inputs.quantised.codes + from * x.codes_stride(),
                  groups * kPackedGroup);
      std::memcpy(x.scales + i * x.padded_groups, inputs.quantised.scales + from * x.padded_groups,
                  groups * sizeof(float));
      std::memcpy(x.sums + i * x.padded_groups, inputs.quantised.sums + from * x.padded_groups, groups * sizeof(float));
    }
  }
  const int64_t most_rows = is_few ? run.size() : multiplies ? kMultiplyRows : kMaxLinearRows;
  alignas(64) float y[kMaxLinearRows * kTileOutputs];
  alignas(64) float bias[kTileOutputs];
  alignas(64) float bias_items[kTileOutputs];  // of the dtype
  rounded.resize(static_cast<size_t>(most_rows * kTileOutputs * item));
  for (int64_t first = tile.first; first < tile.last; first += kColumns) {
    const int64_t columns = std::min(kColumns, tile.last - first);
    // Its outputs are one piece of the expert's rows, or a gate's and another.
    const bool is_halved = activation_.gate == ExpertGate::silu, is_paired = activation_.gate == ExpertGate::clamped;
    const int64_t begin = run.expert * out_features_ + first * (is_paired ? 2 : 1);
    const int64_t size = columns * (is_paired ? 2 : 1), num_pieces = is_halved ? 2 : 1, n = num_pieces * size;
    if (block_.bias != nullptr) {
      for (int64_t piece = 0; piece < num_pieces; ++piece) {
        const char* from = static_cast<const char*>(block_.bias) + (begin + piece * columns_) * item;
        std::memcpy(reinterpret_cast<char*>(bias_items) + piece * size * item, from, static_cast<size_t>(size * item));
      }
      kernels.to_float[type](bias_items, n, bias);
    }
    if (!is_few && !is_dense) {
      unpacked.resize(static_cast<size_t>(n * in_features_ * item));
      for (int64_t piece = 0; piece < num_pieces; ++piece) {
        unpack_rows(kernels, dtype_, block_, in_features_, begin + piece * columns_, begin + piece * columns_ + size,
                    unpacked.data() + piece * size * in_features_ * item);
      }
    }
    for (int64_t row = 0; row < run.size(); row += most_rows) {
      const int64_t num_rows = std::min(most_rows, run.size() - row);
      // Dense weights are read where they are, a piece at a time.
      const auto* weight = static_cast<const char*>(block_.weight);
      if (!is_few && multiplies) {
        const int64_t num_products = is_dense ? num_pieces : 1, outputs = n / num_products;
        for (int64_t piece = 0; piece < num_products; ++piece) {
          const ProductArgs args{
              sorted + row * in_features_ * item,
              num_rows,
              in_features_,
              is_dense ? weight + (begin + piece * columns_) * in_features_ * item : unpacked.data(),
              block_.bias ? reinterpret_cast<const char*>(bias_items) + piece * size * item : nullptr,
              nullptr,
              rounded.data() + piece * size * item,
              n,
              0,
              outputs};
          scratch.resize(static_cast<size_t>(args.scratch_items()));
          kernels.multiply[type](args, scratch.data());
        }
      } else {
        const char* from = sorted + row * in_features_ * static_cast<int64_t>(sizeof(float));
        if (!is_few && !is_dense) {
          kernels.linear[type](from, static_cast<int>(num_rows), in_features_, unpacked.data(), 0, n, y, n);
        }
        for (int64_t piece = 0; piece < num_pieces && (is_few || is_dense); ++piece) {
          const int64_t at = begin + piece * columns_;
          if (is_dense) {
            kernels.linear[type](from, static_cast<int>(num_rows), in_features_, weight, at, at + size,
                                 y + piece * size, n);
          } else {
            kernels.packed_linear[static_cast<int>(block_.format)](x, static_cast<int>(num_rows), weights, at,
                                                                   at + size, y + piece * size, n);
          }
        }
        for (int64_t r = 0; block_.bias != nullptr && r < num_rows; ++r) {
          for (int64_t i = 0; i < n; ++i) y[r * n + i] += bias[i];
        }
        kernels.from_float[type](y, num_rows * n, rounded.data());
      }
      finish_rows(kernels, pairs + row, num_rows, rounded.data(), first, columns, out);
    }
  }
}

void RoutedLinear::finish_rows(const KernelTable& kernels, const int64_t* pairs, int64_t num_rows, const char* y,
                               int64_t first, int64_t columns, void* out) const {
  const int type = static_cast<int>(dtype_);
  const int64_t item = dtype_bytes(dtype_);
  alignas(64) float gated[kTileOutputs];
  alignas(64) float halves[kTileOutputs];
  alignas(64) float items[kTileOutputs];  // of the dtype
  for (int64_t r = 0; r < num_rows; ++r) {
    char* to = static_cast<char*>(out) + (pairs[r] * columns_ + first) * item;
    if (activation_.gate == ExpertGate::none) {
      std::memcpy(to, y + r * columns * item, static_cast<size_t>(columns * item));
      continue;
    }
    const char* row = y + r * 2 * columns * item;
    if (activation_.gate == ExpertGate::silu) {
      kernels.silu_mul[type](row, row + columns * item, columns, gated);
    } else {
      kernels.to_float[type](row, 2 * columns, gated);
      for (int64_t i = 0; i < columns; ++i) {
        halves[i] = gated[2 * i];
        halves[columns + i] = gated[2 * i + 1];
      }
      kernels.from_float[type](halves, 2 * columns, items);
      const char* gate = reinterpret_cast<const char*>(items);
      kernels.clamped_glu[type](gate, gate + columns * item, activation_.alpha, activation_.limit, columns, gated);
    }
    kernels.from_float[type](gated, columns, to);
  }
}

void choose_experts(const KernelTable& kernels, DType dtype, const void* logits, int64_t num_rows, int64_t num_experts,
                    const ExpertChoice& choice, int64_t* experts, float* weights) {
  static thread_local std::vector<float> p;
  static thread_local std::vector<int64_t> order;
  static thread_local std::vector<char> rounded;
  const int type = static_cast<int>(dtype);
  const int64_t k = choice.per_token, item = dtype_bytes(dtype);
  p.resize(static_cast<size_t>(num_experts));
  order.resize(p.size());
  rounded.resize(static_cast<size_t>(k * item));
  for (int64_t r = 0; r < num_rows; ++r, experts += k, weights += k) {
    kernels.to_float[type](static_cast<const char*>(logits) + r * num_experts * item, num_experts, p.data());
    const float largest = *std::max_element(p.begin(), p.end());
    float sum = 0.0f;
    for (float& each : p) sum += each = std::exp(each - largest);
    for (int64_t e = 0; e < num_experts; ++e) order[static_cast<size_t>(e)] = e;
    const bool is_finite = std::isfinite(sum);
    if (is_finite) {
      for (float& each : p) each /= sum;
      std::partial_sort(order.begin(), order.begin() + k, order.end(), [](int64_t a, int64_t b) {
        const float of_a = p[static_cast<size_t>(a)], of_b = p[static_cast<size_t>(b)];
        return of_a > of_b || (of_a == of_b && a < b);
      });
    }
    float total = 0.0f;
    for (int64_t j = 0; j < k; ++j) {
      experts[j] = order[static_cast<size_t>(j)];
      weights[j] = is_finite ? p[static_cast<size_t>(experts[j])] : std::numeric_limits<float>::quiet_NaN();
      total += weights[j];
    }
    for (int64_t j = 0; j < k && choice.normalises; ++j) weights[j] /= total;
    if (choice.rounds) {
      kernels.from_float[type](weights, k, rounded.data());
      kernels.to_float[type](rounded.data(), k, weights);
    }
  }
}

void run_experts(const KernelTable& kernels, WorkerPool& pool, const RoutedLinear& up, const RoutedLinear& down,
                 const RoutedInput& input, void* out) {
  static thread_local Routing routing;
  static thread_local std::vector<char> inner;
  static thread_local std::vector<char> found;
  const int type = static_cast<int>(down.dtype());
  const int64_t item = dtype_bytes(down.dtype()), k = input.per_token, num_pairs = input.num_tokens * k;
  const int64_t width = down.columns();
  routing.set(input.experts, num_pairs, up.num_experts());
  inner.resize(static_cast<size_t>(num_pairs * up.columns() * item));
  found.resize(static_cast<size_t>(num_pairs * width * item));
  up.run(kernels, pool, input.x, input.num_tokens, k, routing, inner.data());
  down.run(kernels, pool, inner.data(), num_pairs, 1, routing, found.data());
  const char* of_pairs = found.data();
  const auto sum = [&](int64_t first, int64_t last) {
    static thread_local std::vector<float> total;
    static thread_local std::vector<float> part;
    total.resize(static_cast<size_t>(width));
    part.resize(static_cast<size_t>(width));
    for (int64_t t = first; t < last; ++t) {
      std::fill(total.begin(), total.end(), 0.0f);
      for (int64_t p = t * k; p < (t + 1) * k; ++p) {
        if (input.experts[p] >= up.num_experts()) continue;
        kernels.to_float[type](of_pairs + p * width * item, width, part.data());
        kernels.scale_add(part.data(), input.weights[p], width, true, total.data());
      }
      kernels.from_float[type](total.data(), width, static_cast<char*>(out) + t * width * item);
    }
  };
  if (num_pairs * width <= kSummedAtOnce) return sum(0, input.num_tokens);
  for_blocks(pool, input.num_tokens, sum);
}

void RoutedMlp::run(const KernelTable& kernels, WorkerPool& pool, const void* x, int64_t num_rows, void* out) const {
  static thread_local std::vector<char> logits;
  static thread_local std::vector<int64_t> experts;
  static thread_local std::vector<float> weights;
  const int64_t num_experts = router->out_features(), k = choice.per_token, item = dtype_bytes(down->dtype());
  logits.resize(static_cast<size_t>(num_rows * num_experts * item));
  for (int64_t first = 0; first < num_rows; first += kMaxLinearRows) {
    const char* rows = static_cast<const char*>(x) + first * down->columns() * item;
    const auto n = static_cast<int>(std::min<int64_t>(kMaxLinearRows, num_rows - first));
    router->run(kernels, pool, {rows, n, nullptr, 0.0f, Gate::none}, nullptr,
                logits.data() + first * num_experts * item);
  }
  experts.resize(static_cast<size_t>(num_rows * k));
  weights.resize(experts.size());
  choose_experts(kernels, down->dtype(), logits.data(), num_rows, num_experts, choice, experts.data(), weights.data());
  run_experts(kernels, pool, *up, *down, {x, num_rows, experts.data(), weights.data(), k}, out);
}

}  // namespace offload
