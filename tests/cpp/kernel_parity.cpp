// Every kernel of every ISA against the scalar table, on heap buffers of exactly the size it may touch.
// usage: kernel_parity [isa ...]; without names, all that run here, the scalar one included (for its own reads).
// One file, longer than others: a check for each kernel, called by one loop over dtypes and ISAs.
#include <algorithm>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "check.h"
#include "kernels/dispatch.h"
#include "kernels/kernels.h"
#include "kernels/number_formats.h"
#include "attention/policy.h"

namespace offload::test {
namespace {

template <class T>
constexpr DType kTypeOf = DType::f32;
template <>
constexpr DType kTypeOf<Half> = DType::f16;
template <>
constexpr DType kTypeOf<Bf16> = DType::bf16;
template <>
constexpr DType kTypeOf<Int8> = DType::i8;

template <class T>
constexpr double kTolerance = 1e-5;  // relative L2 of what was summed in another order
template <>
constexpr double kTolerance<Bf16> = 6e-3;  // weights of values may be rounded to bf16
template <>
constexpr double kTolerance<Int8> = 5e-4;  // or to 15 bits, and so may be the query

template <class T>
constexpr double kStep = 0.0;  // of neighbouring values, relative: a rounding may fall to the other side
template <>
constexpr double kStep<Half> = 0x1p-10;
template <>
constexpr double kStep<Bf16> = 0x1p-7;

template <class T>
T random_value() {
  return from_float<T>(normal());
}

// A query as the dtype has it; of int8 rows it is of any.
template <class T>
float rounded(float x) {
  return to_float(from_float<T>(x));
}
template <>
float rounded<Int8>(float x) {
  return x;
}

template <>
Int8 random_value<Int8>() {
  return {static_cast<int8_t>(uniform(-127, 127))};
}

// Keys or values of one head: one allocation per page, the last one cut off after the last token.
template <class T>
class Rows {
 public:
  Rows(int64_t n, int head_dim, int page_shift, int64_t skip) : skip_(skip), head_dim_(head_dim), shift_(page_shift) {
    const int64_t page_tokens = int64_t{1} << page_shift;
    for (int64_t first = 0; first < n; first += page_tokens) {
      const int64_t rows = std::min(page_tokens, n - first);
      pages_.emplace_back(rows * row_items(), skip);
      pages_.back().fill(random_value<T>);
      for (int64_t r = 0; std::is_same_v<T, Int8> && r < rows; ++r) {
        for (int64_t group = 0; group < head_dim / kRowGroup; ++group) {
          const Half scale = from_float<Half>(0.005f + 0.02f * std::fabs(normal()));
          std::memcpy(&pages_.back()[r * row_items() + head_dim + group * 2], &scale, sizeof scale);
        }
      }
      addresses_.push_back(reinterpret_cast<int64_t>(pages_.back().data() - skip));
    }
  }
  RowSource source() const {
    const auto item = static_cast<int64_t>(sizeof(T));
    return {addresses_.data(), skip_ * item, row_items() * item, shift_};
  }

 private:
  int64_t row_items() const { return row_bytes(head_dim_, kTypeOf<T>) / static_cast<int64_t>(sizeof(T)); }

  int64_t skip_;
  int head_dim_;
  int shift_;
  std::vector<Exact<T>> pages_;
  std::vector<int64_t> addresses_;
};

struct Attended {
  std::vector<double> out;
  std::vector<double> lse;
  std::vector<double> scores;
};

struct Problem {
  int group;
  int head_dim;
  const float* query;
  RowSource keys;
  RowSource values;
};

// The partial softmax after attend() as an output and its log-sum-exp.
void finish(const Problem& problem, const Exact<float>& acc, const Exact<float>& row_max, const Exact<float>& row_sum,
            Attended* result) {
  for (int g = 0; g < problem.group; ++g) {
    for (int d = 0; d < problem.head_dim; ++d) {
      result->out.push_back(static_cast<double>(acc[g * problem.head_dim + d]) / static_cast<double>(row_sum[g]));
    }
    result->lse.push_back(static_cast<double>(row_max[g]) + std::log(static_cast<double>(row_sum[g])));
  }
}

std::vector<double> score(const KernelTable& table, DType type, const Problem& problem, const TokenSpan& tokens) {
  Exact<float> scores(problem.group * tokens.n);
  scores.fill([] { return NAN; });
  table.score[static_cast<int>(type)]({.query = problem.query,
                                       .group_size = problem.group,
                                       .head_dim = problem.head_dim,
                                       .keys = problem.keys,
                                       .tokens = tokens,
                                       .scale = 0.125f,
                                       .scores = scores.data(),
                                       .score_stride = tokens.n});
  return {scores.data(), scores.data() + scores.size()};
}

// `spans` are attended one after the other into one accumulator.
Attended attend(const KernelTable& table, DType type, const Problem& problem, const std::vector<TokenSpan>& spans,
                bool weighted, bool scored = false) {
  Exact<float> acc(problem.group * problem.head_dim), row_max(problem.group), row_sum(problem.group);
  const std::vector<int64_t> unreadable(64, 64);  // page addresses
  Attended result;
  for (size_t i = 0; i < spans.size(); ++i) {
    const int64_t n = spans[i].n;
    Exact<float> weights(weighted ? problem.group * n : 0), scores(weighted || scored ? 0 : problem.group * n);
    Exact<float> tile(scored ? problem.group * kScoreTile : 0);
    for (int64_t j = 0; j < weights.size(); ++j) weights[j] = static_cast<float>(1 + j * 37 % 101) / 101.0f;
    AttendArgs args{};
    args.query = problem.query;
    args.group_size = problem.group;
    args.head_dim = problem.head_dim;
    args.keys = problem.keys;
    args.values = problem.values;
    args.tokens = spans[i];
    args.scale = 0.125f;
    if (weighted) {
      args.weights = weights.data();
      args.weight_stride = n;
      args.keys.pages = unreadable.data();
    } else if (scored) {
      const std::vector<double> known = score(table, type, problem, spans[i]);
      for (int g = 0; g < problem.group; ++g) {
        for (int64_t j = 0; j < n; ++j)
          tile[g * kScoreTile + j] = static_cast<float>(known[static_cast<size_t>(g * n + j)]);
      }
      args.scored = tile.data();
    } else {
      args.scores = scores.data();
      args.score_stride = n;
    }
    args.acc = acc.data();
    args.row_max = row_max.data();
    args.row_sum = row_sum.data();
    args.continues = i > 0;
    args.ends = i + 1 == spans.size();
    table.attend[static_cast<int>(type)](args);
    result.scores.insert(result.scores.end(), scores.data(), scores.data() + scores.size());
  }
  finish(problem, acc, row_max, row_sum, &result);
  return result;
}

// Some kernels meet int8 rows with a query of 15 bits.
template <class T>
constexpr double kScoreTolerance = kTypeOf<T> == DType::i8 ? 5e-5 : 2e-6;

template <class T>
void compare(const KernelTable& table, const Attended& actual, const Attended& expected, const Problem& problem,
             int64_t n, const char* what) {
  const double error = relative_error(actual.out, expected.out);
  CHECK(error_of_sums(actual.scores, expected.scores, problem.head_dim) < kScoreTolerance<T>, "%s: scores", table.name);
  CHECK(error < kTolerance<T>, "%s, dtype %d, %s: group %d, head_dim %d, %lld tokens: error %g", table.name,
        static_cast<int>(kTypeOf<T>), what, problem.group, problem.head_dim, static_cast<long long>(n), error);
  for (size_t g = 0; g < expected.lse.size(); ++g) {
    CHECK(std::fabs(actual.lse[g] - expected.lse[g]) < 50 * kScoreTolerance<T>, "%s, %s: lse %g instead of %g",
          table.name, what, actual.lse[g], expected.lse[g]);
  }
}

template <class T>
void check_attention(const KernelTable& table, int group, int head_dim, int64_t n, int page_shift, int64_t skip) {
  const KernelTable& scalar = *scalar_table();
  constexpr DType type = kTypeOf<T>;
  const Rows<T> keys(n, head_dim, page_shift, skip), values(n, head_dim, page_shift, skip);
  Exact<float> query(group * head_dim, skip);
  query.fill([] { return rounded<T>(2.0f * normal()); });
  const Problem problem{group, head_dim, query.data(), keys.source(), values.source()};

  Exact<int32_t> indices(n / 2 + 1);
  std::vector<int32_t> all(static_cast<size_t>(n));
  for (int64_t t = 0; t < n; ++t) all[static_cast<size_t>(t)] = static_cast<int32_t>(t);
  std::shuffle(all.begin(), all.end(), generator());
  std::sort(all.begin(), all.begin() + indices.size());
  std::copy_n(all.begin(), indices.size(), indices.data());

  const int64_t first = uniform(0, n - 1);
  const int64_t cut = uniform(0, n);
  const TokenSpan whole{nullptr, 0, n}, tail{nullptr, first, n - first}, chosen{indices.data(), 0, indices.size()};
  for (const TokenSpan& span : {whole, tail, chosen}) {
    const double error = error_of_sums(score(table, type, problem, span), score(scalar, type, problem, span), head_dim);
    CHECK(error < kScoreTolerance<T>, "%s, dtype %d, score: group %d, head_dim %d, %lld tokens: error %g", table.name,
          static_cast<int>(type), group, head_dim, static_cast<long long>(span.n), error);
    const char* what = span.indices != nullptr ? "sparse" : "dense";
    compare<T>(table, attend(table, type, problem, {span}, false), attend(scalar, type, problem, {span}, false),
               problem, span.n, what);
    compare<T>(table, attend(table, type, problem, {span}, true), attend(scalar, type, problem, {span}, true), problem,
               span.n, "with weights given");
  }
  if (cut > 0) {
    const std::vector<TokenSpan> spans{{nullptr, 0, cut}, {nullptr, cut, n - cut}};
    compare<T>(table, attend(table, type, problem, spans, false), attend(scalar, type, problem, spans, false), problem,
               n, "continued");
  }
  const int64_t in_page = std::min<int64_t>({n, int64_t{1} << page_shift, kScoreTile});
  const std::vector<TokenSpan> page{{nullptr, 0, in_page}};
  compare<T>(table, attend(table, type, problem, page, false, true), attend(scalar, type, problem, page, false, true),
             problem, in_page, "with scores given");
}

template <class T>
void check_linear(const KernelTable& table, int num_rows, int64_t in_features, int64_t out_features) {
  constexpr int type = static_cast<int>(kTypeOf<T>);
  const int64_t first = out_features / 3;
  Exact<T> weight(out_features * in_features, 1);
  weight.fill(random_value<T>);
  Exact<float> x(num_rows * in_features, 1);
  x.fill([] { return to_float(random_value<T>()); });
  const auto run = [&](const KernelTable& kernels) {
    Exact<float> packed(num_rows * in_features), y(num_rows * (out_features - first));
    y.fill([] { return NAN; });
    kernels.pack_input[type](x.data(), x.size(), packed.data());
    kernels.linear[type](packed.data(), num_rows, in_features, weight.data(), first, out_features, y.data(),
                         out_features - first);
    return y;
  };
  const double error = error_of_sums(run(table), run(*scalar_table()), in_features);
  CHECK(error < 2e-6, "%s, dtype %d, linear: %d rows of %lld, %lld outputs: error %g", table.name, type, num_rows,
        static_cast<long long>(in_features), static_cast<long long>(out_features - first), error);
}

template <class T>
void check_elementwise(const KernelTable& table, int64_t n) {
  constexpr int type = static_cast<int>(kTypeOf<T>);
  Exact<T> x(n, 1), y(n, 1);
  x.fill(random_value<T>);
  y.fill(random_value<T>);
  Exact<float> wide(n, 1);
  wide.fill([] { return 3.0f * normal(); });
  const auto run = [&](const KernelTable& kernels, int what) {
    Exact<float> out(n);
    Exact<T> narrow(n, 1);
    switch (what) {
      case 0:
        kernels.to_float[type](x.data(), n, out.data());
        return out;
      case 1:
        kernels.rms_norm[type](x.data(), y.data(), 1e-5f, n, out.data());
        return out;
      case 2:
        kernels.silu_mul[type](x.data(), y.data(), n, out.data());
        return out;
      case 3:
        kernels.from_float[type](wide.data(), n, narrow.data());
        break;
      case 4:
        kernels.add_residual[type](wide.data(), x.data(), n, narrow.data());
        break;
      default:
        std::copy_n(x.data(), n, narrow.data());
    }
    if (what >= 5 && n % kHeadDimMultiple == 0 && n <= kMaxHeadDim) {
      kernels.rope_head[type](narrow.data(), y.data(), y.data(), what == 5 ? nullptr : y.data(), 1e-6f, n);
    }
    for (int64_t i = 0; i < n; ++i) out[i] = to_float(narrow[i]);
    return out;
  };
  for (int what = 0; what < 7; ++what) {
    const Exact<float> actual = run(table, what), expected = run(*scalar_table(), what);
    for (int64_t i = 0; i < n; ++i) {
      // Sums of products may cancel: relative to the terms, which are about one. A norm rounds twice, so that a sum in
      // another order may move it by two steps.
      const double steps = what == 1 || what == 6 ? 2.0 : 1.0;
      const double allowed = steps * kStep<T> * std::fabs(expected[i]) + (what >= 4 ? kStep<T> : 0.0) +
                             2e-6 * (1.0 + std::fabs(expected[i]));
      CHECK(std::fabs(actual[i] - expected[i]) <= allowed, "%s, dtype %d, operator %d of %lld: %g instead of %g",
            table.name, type, what, static_cast<long long>(n), static_cast<double>(actual[i]),
            static_cast<double>(expected[i]));
    }
  }
}

// Conversions must agree in every bit, ties and subnormal numbers included; NaN may differ in payload.
template <class T>
void check_conversions(const KernelTable& table) {
  constexpr int type = static_cast<int>(kTypeOf<T>);
  constexpr int64_t n = 1 << 16;
  Exact<T> bits(n);
  for (int64_t i = 0; i < n; ++i) bits[i].bits = static_cast<uint16_t>(i);
  Exact<float> wide(n), edges(n);
  table.to_float[type](bits.data(), n, wide.data());
  for (int64_t i = 0; i < n; ++i) {
    const float expected = to_float(bits[i]);
    CHECK(std::isnan(expected) ? std::isnan(wide[i]) : float_to_bits(wide[i]) == float_to_bits(expected),
          "%s, dtype %d: 0x%llx", table.name, type, static_cast<long long>(i));
    const uint32_t nearby = float_to_bits(expected) + static_cast<uint32_t>(uniform(-0x1800, 0x1800));
    edges[i] = bits_to_float(i % 3 == 0 ? float_to_bits(expected) | (type == 1 ? 0x1000u : 0x8000u) : nearby);
  }
  Exact<T> narrow(n);
  table.from_float[type](edges.data(), n, narrow.data());
  for (int64_t i = 0; i < n; ++i) {
    const T expected = from_float<T>(edges[i]);
    CHECK(narrow[i].bits == expected.bits || (std::isnan(to_float(expected)) && std::isnan(to_float(narrow[i]))),
          "%s, dtype %d: 0x%x became 0x%x instead of 0x%x", table.name, type, float_to_bits(edges[i]), narrow[i].bits,
          expected.bits);
  }
}

void check_selection(const KernelTable& table, int64_t n) {
  const KernelTable& scalar = *scalar_table();
  Exact<float> x(n, 1);
  x.fill([] { return std::round(4.0f * normal()) / 4.0f; });
  for (const float threshold : {-INFINITY, -0.5f, 0.0f, 0.25f, 9.0f, NAN}) {
    const int64_t count = scalar.count_at_least(x.data(), n, threshold);
    CHECK(table.count_at_least(x.data(), n, threshold) == count, "%s", table.name);
    for (const int64_t capacity : {int64_t{0}, count / 2, count}) {
      Exact<int32_t> actual(capacity), expected(capacity);
      CHECK(table.filter_at_least(x.data(), n, threshold, actual.data(), capacity) == count, "%s", table.name);
      scalar.filter_at_least(x.data(), n, threshold, expected.data(), capacity);
      CHECK(std::equal(actual.data(), actual.data() + capacity, expected.data()), "%s", table.name);
    }
  }
  for (const int64_t hole : {int64_t{-1}, int64_t{0}, n - 1}) {  // a NaN is no extreme
    if (hole >= 0) x[hole] = NAN;
    float ends[2], expected[2];
    table.extremes(x.data(), n, ends, ends + 1);
    scalar.extremes(x.data(), n, expected, expected + 1);
    CHECK(ends[0] == expected[0] && ends[1] == expected[1], "%s: %g, %g", table.name, static_cast<double>(ends[0]),
          static_cast<double>(ends[1]));
    if (hole >= 0) x[hole] = 0.0f;
  }
  const int64_t k = uniform(1, n);
  Exact<int32_t> actual(k), expected(k);
  CHECK(top_k(table, x.data(), n, k, actual.data()) == k, "%s", table.name);
  top_k(scalar, x.data(), n, k, expected.data());
  CHECK(std::equal(actual.data(), actual.data() + k, expected.data()), "%s", table.name);

  Exact<float> a(n, 1), b(n, 1);
  for (int64_t i = 0; i < n; ++i) a[i] = b[i] = 50.0f * x[i];
  float sum_a = 0.0f, sum_b = 0.0f;
  const float max_a = table.exp_shifted(a.data(), n, &sum_a), max_b = scalar.exp_shifted(b.data(), n, &sum_b);
  CHECK(max_a == max_b && std::fabs(sum_a - sum_b) <= 1e-5f * sum_b, "%s: %g, %g", table.name,
        static_cast<double>(sum_a), static_cast<double>(sum_b));
  for (int64_t i = 0; i < n; ++i) CHECK(std::fabs(a[i] - b[i]) <= 2e-5f * b[i] + 1e-37f, "%s", table.name);
  // Weights too small for a float are 0, of all lanes and of the rest.
  for (const float far : {-104.0f, -3000.0f, -3.0e38f, -INFINITY}) {
    for (int64_t i = 0; i < n; ++i) a[i] = i == n / 2 ? 0.0f : far;
    CHECK(table.exp_shifted(a.data(), n, &sum_a) == 0.0f && sum_a == 1.0f, "%s: %g", table.name,
          static_cast<double>(sum_a));
    for (int64_t i = 0; i < n; ++i) CHECK(a[i] == (i == n / 2 ? 1.0f : 0.0f), "%s: exp(%g)", table.name, double{far});
  }
  for (int64_t i = 0; i < n; ++i) a[i] = i == n - 1 ? NAN : 0.0f;
  table.exp_shifted(a.data(), n, &sum_a);
  CHECK(std::isnan(a[n - 1]) && std::isnan(sum_a), "%s: a NaN is lost", table.name);
  table.scale_add(x.data(), 0.5f, n, false, a.data());
  table.scale_add(x.data(), 2.0f, n, true, a.data());
  for (int64_t i = 0; i < n; ++i) CHECK(std::fabs(a[i] - 2.5f * x[i]) < 1e-5f, "%s", table.name);
}

void check_reads(const KernelTable& table) {
  Exact<uint64_t> data(4096 + 64, 1);
  data.fill([] { return generator()(); });
  const int64_t bytes = data.size() * 8;
  CHECK(table.read_bytes(data.data(), bytes) == scalar_table()->read_bytes(data.data(), bytes), "%s", table.name);
  Exact<int32_t> rows(100);
  rows.fill([&] { return static_cast<int32_t>(uniform(0, bytes / 256 - 1)); });
  CHECK(table.read_rows(data.data(), rows.data(), 100, 256) ==
            scalar_table()->read_rows(data.data(), rows.data(), 100, 256),
        "%s", table.name);
}

void check_ranks(const KernelTable& table, int group, int head_dim, int64_t n) {
  Exact<float> query(group * head_dim, 1), actual(n + 1), expected(n + 1);
  query.fill(normal);
  Exact<int8_t> rows(n * head_dim, 1);
  rows.fill([] { return static_cast<int8_t>(uniform(-127, 127)); });
  Exact<Bf16> scales(n, 1), spreads(n, 1);
  for (Exact<Bf16>* given : {&scales, &spreads}) given->fill([] { return from_float<Bf16>(normal()); });
  const auto end = static_cast<int32_t>(n);
  const int32_t ranges[] = {end / 2, end, 0, end / 2, end - 1, end};  // the last row twice
  const auto run = [&](const KernelTable& kernels, Exact<float>& ranks) {
    kernels.rank_rows(
        {query.data(), group, head_dim, rows.data(), scales.data(), spreads.data(), 0.4f, ranges, 3, ranks.data()});
  };
  run(table, actual);
  run(*scalar_table(), expected);
  for (int64_t i = 0; i <= n; ++i) {
    CHECK(std::fabs(actual[i] - expected[i]) < 1e-5 * 127 * head_dim, "%s, head_dim %d, rank %lld: %g instead of %g",
          table.name, head_dim, static_cast<long long>(i), static_cast<double>(actual[i]),
          static_cast<double>(expected[i]));
  }
}

void check_codes(const KernelTable& table, int group, int head_dim, int bits, int64_t n) {
  const int64_t blocks = (n + kCodeBlock - 1) / kCodeBlock;
  Exact<float> query(group * head_dim, 1), offsets(group, 1), scales(blocks * kCodeBlock, 1);
  for (Exact<float>* given : {&query, &offsets, &scales}) given->fill(normal);
  Exact<uint8_t> codes(blocks * kCodeBlock * head_dim * bits / 8, 1);
  codes.fill([] { return static_cast<uint8_t>(uniform(0, 255)); });
  const float levels[] = {-1.5f, bits == 1 ? 1.0f : -0.5f, 0.5f, 1.5f};
  Exact<float> actual(n, 1), expected(n, 1);
  const auto run = [&](const KernelTable& kernels, Exact<float>& scores) {
    kernels.score_codes(
        {query.data(), group, head_dim, bits, levels, offsets.data(), codes.data(), scales.data(), n, scores.data()});
  };
  run(table, actual);
  run(*scalar_table(), expected);
  for (int64_t i = 0; i < n; ++i) {  // the same tables and whole numbers, but for fused multiplications
    CHECK(std::fabs(actual[i] - expected[i]) < 1e-4 * head_dim,
          "%s, head_dim %d, %d bits, score %lld: %g instead of %g", table.name, head_dim, bits,
          static_cast<long long>(i), static_cast<double>(actual[i]), static_cast<double>(expected[i]));
  }
}

// Small whole numbers: products are exact in every order of summation, and there are ties.
void check_nearest(const KernelTable& table, int64_t num_points, int64_t num_centroids, int64_t width) {
  Exact<float> points(num_points * width, 1), centroids(num_centroids * width, 1);
  const auto small = [] { return static_cast<float>(uniform(-2, 2)); };
  points.fill(small);
  centroids.fill(small);
  const auto run = [&](const KernelTable& kernels, Exact<int32_t>& labels, Exact<float>& products) {
    const int64_t blocks = (num_centroids + kernels.centroid_block - 1) / kernels.centroid_block;
    Exact<float> packed(blocks * kernels.centroid_block * width);
    kernels.pack_centroids(centroids.data(), num_centroids, width, packed.data());
    kernels.nearest_centroids(points.data(), num_points, width, packed.data(), num_centroids, labels.data(),
                              products.data());
  };
  Exact<int32_t> actual(num_points), expected(num_points);
  Exact<float> products(num_points), expected_products(num_points);
  run(table, actual, products);
  run(*scalar_table(), expected, expected_products);
  for (int64_t i = 0; i < num_points; ++i) {
    CHECK(actual[i] == expected[i] && products[i] == expected_products[i], "%s, point %lld: centroid %d instead of %d",
          table.name, static_cast<long long>(i), actual[i], expected[i]);
  }
}

void check_packed(const KernelTable& table, WeightFormat format, int num_rows, int64_t in_features,
                  int64_t out_features) {
  const bool has_table = format == WeightFormat::table4 || format == WeightFormat::table4_of_16;
  const bool has_nibbles = has_table || format == WeightFormat::q4;
  const bool has_minimums = format == WeightFormat::q4 || format == WeightFormat::q8_min;
  const int scales_each = format == WeightFormat::q8_of_16 || format == WeightFormat::table4_of_16 ? 2 : 1;
  const int type = static_cast<int>(format);
  const int64_t groups = (in_features + kPackedGroup - 1) / kPackedGroup, first = out_features / 3;
  const int64_t padded = (groups + kPackedScales - 1) / kPackedScales * kPackedScales;
  Exact<uint8_t> codes(out_features * groups * (has_nibbles ? kPackedGroup / 2 : kPackedGroup));
  codes.fill([] { return static_cast<uint8_t>(uniform(0, 255)); });
  Exact<Half> scales(out_features * groups * scales_each), minimums(has_minimums ? out_features * groups : 0);
  for (Exact<Half>* given : {&scales, &minimums}) given->fill([] { return from_float<Half>(normal()); });
  Exact<int8_t> table_of_codes(has_table ? 16 : 0);
  table_of_codes.fill([] { return static_cast<int8_t>(uniform(-128, 127)); });
  const PackedWeights weights{codes.data(), scales.data(), has_minimums ? minimums.data() : nullptr, groups,
                              has_table ? table_of_codes.data() : nullptr};
  Exact<float> x(num_rows * in_features);
  x.fill(normal);
  const auto run = [&](const KernelTable& kernels) {
    Exact<int8_t> x_codes(num_rows * padded * kPackedGroup);
    Exact<float> x_scales(num_rows * padded), x_sums(num_rows * padded), y(num_rows * (out_features - first));
    y.fill([] { return NAN; });
    const PackedInput input{x_codes.data(), x_scales.data(), x_sums.data(), padded};
    for (int row = 0; row < num_rows; ++row) {
      kernels.quantise_row(x.data() + row * in_features, in_features, input, row);
    }
    kernels.packed_linear[type](input, num_rows, weights, first, out_features, y.data(), out_features - first);
    return y;
  };
  // Where a number of x lies between two steps it may go to either.
  const double error = error_of_sums(run(table), run(*scalar_table()), in_features);
  CHECK(error < 2e-4, "%s, format %d, packed: %d rows of %lld, %lld outputs: error %g", table.name, type, num_rows,
        static_cast<long long>(in_features), static_cast<long long>(out_features - first), error);
  Exact<float> unpacked(in_features), expected(in_features);
  table.unpack_row[type](weights, out_features - 1, in_features, unpacked.data());
  scalar_table()->unpack_row[type](weights, out_features - 1, in_features, expected.data());
  for (int64_t i = 0; i < in_features; ++i) {
    CHECK(std::fabs(unpacked[i] - expected[i]) <= 1e-5f * std::fabs(expected[i]) + 1e-5f, "%s, format %d, element %lld",
          table.name, type, static_cast<long long>(i));
  }
}

template <class T>
void check_dtype(const KernelTable& table) {
  const std::vector<int64_t> lengths{1, 2, 31, 32, 33, 255, 257, 515};
  int i = 0;
  for (const int head_dim : {16, 32, 48, 64, 80, 96, 128, 256, kMaxHeadDim}) {
    for (const int group : {1, 2, 3, 4, 5, 8, 9, kMaxGroupSize}) {
      ++i;  // walks through the combinations instead of multiplying them out
      check_attention<T>(table, group, head_dim, lengths[static_cast<size_t>(i) % lengths.size()], i % 3 == 0 ? 4 : 8,
                         i % 2);
      if (group <= 5)
        check_attention<T>(table, group, head_dim, lengths[static_cast<size_t>(i / 8 + i) % lengths.size()], 8, i % 2);
    }
  }
  for (const int rows : {1, 2, 3, 4, 5, 7, 16}) {
    for (const int64_t width : {1, 16, 31, 48, 64, 127, 128, 577})
      check_linear<T>(table, rows, width, 1 + uniform(0, 12));
  }
  for (const int64_t n : {1, 7, 8, 15, 16, 17, 31, 32, 48, 64, 80, 100, 256, 300}) check_elementwise<T>(table, n);
}

// Rows that were written must be the same bytes; read, they are what they stand for.
void check_int8(const KernelTable& table) {
  constexpr int type = static_cast<int>(DType::i8);
  const std::vector<int64_t> lengths{1, 2, 31, 32, 33, 255, 257, 515};
  int i = 0;
  for (const int head_dim : {64, 128, 192, 256, kMaxHeadDim}) {
    for (const int group : {1, 2, 3, 4, 5, 8, kMaxGroupSize}) {
      for (int more = 0; more < 3; ++more, ++i) {
        check_attention<Int8>(table, group, head_dim, lengths[static_cast<size_t>(i) % lengths.size()],
                              i % 3 == 0 ? 4 : 8, i % 2 * 2);
      }
    }
    for (const float factor : {0.0f, 1e-7f, 1e-3f, 1.0f, 1e6f}) {
      Exact<float> x(head_dim, 1), read(head_dim), expected_read(head_dim);
      x.fill([&] { return factor * normal(); });
      const int64_t bytes = row_bytes(head_dim, DType::i8);
      Exact<Int8> row(bytes, 2), expected(bytes, 2);
      table.from_float[type](x.data(), head_dim, row.data());
      scalar_table()->from_float[type](x.data(), head_dim, expected.data());
      CHECK(std::memcmp(row.data(), expected.data(), static_cast<size_t>(bytes)) == 0, "%s: a row of %g", table.name,
            static_cast<double>(factor));
      table.to_float[type](row.data(), head_dim, read.data());
      for (int d = 0; d < head_dim; ++d) {
        const float allowed = 0.51f * 5.0f * factor / 127.0f + 4e-6f;
        CHECK(std::fabs(read[d] - x[d]) <= allowed, "%s: %g for %g", table.name, static_cast<double>(read[d]),
              static_cast<double>(x[d]));
      }
    }
  }
}

void check_isa(const KernelTable& table) {
  check_int8(table);
  check_dtype<float>(table);
  check_dtype<Half>(table);
  check_dtype<Bf16>(table);
  check_conversions<Half>(table);
  check_conversions<Bf16>(table);
  for (const int64_t n : {1, 7, 8, 15, 16, 17, 63, 64, 65, 100, 16385, 20000}) check_selection(table, n);
  check_reads(table);
  for (const int head_dim : {16, 48, 64, 128}) {
    for (const int64_t n : {1, 3, 4, 5, 33, 150}) check_ranks(table, static_cast<int>(uniform(1, 8)), head_dim, n);
    for (const int64_t n : {1, 63, 64, 65, 200}) check_codes(table, static_cast<int>(uniform(1, 9)), head_dim, 1, n);
    check_codes(table, kMaxGroupSize, 2 * head_dim, 2, 100);
    check_ranks(table, kMaxGroupSize, 2 * head_dim, 65);
  }
  check_codes(table, kMaxGroupSize, kMaxHeadDim, 2, 100);
  check_ranks(table, kMaxGroupSize, kMaxHeadDim, 65);
  for (const int64_t n : {1, 5, 6, 7, 100}) {
    for (const int64_t k : {1, 3, 4, 15, 16, 17, 63, 64, 65, 130}) check_nearest(table, n, k, uniform(1, 3) * 16);
  }
  for (const int rows : {1, 2, 3, 4, 5, 16}) {
    for (const int64_t width : {1, 31, 32, 64, 96, 480, 512, 545, 576, 1120}) {
      for (int format = 1; format < kNumWeightFormats; ++format) {
        check_packed(table, static_cast<WeightFormat>(format), rows, width, 1 + uniform(0, 12));
      }
    }
  }
  std::printf("%s: ok\n", table.name);
}

}  // namespace
}  // namespace offload::test

int main(int argc, char** argv) {
  std::vector<std::string> isas(argv + 1, argv + argc);
  if (isas.empty()) isas = offload::available_isas();
  for (const std::string& isa : isas) offload::test::check_isa(offload::kernels_for(isa));
}
