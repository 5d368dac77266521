// Exact top-k without sorting: close in on the k-th largest value by counting, which SIMD does at a few cycles per 16
// values. Long inputs are first cut down by a sampled threshold that a little more than k values reach.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/number_formats.h"
#include "attention/policy.h"

namespace offload {
namespace {

constexpr int64_t kDirect = 16384;  // up to here counting over everything is cheaper than sampling
constexpr int64_t kSamples = 2048;

// Floats in the order of unsigned integers, and back.
uint32_t order_of(float x) {
  const uint32_t bits = float_to_bits(x);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
float value_of(uint32_t order) { return bits_to_float((order & 0x80000000u) != 0 ? order & 0x7fffffffu : ~order); }

// Grows with a count as its logarithm does, about.
int64_t log_like(int64_t count) { return float_to_bits(static_cast<float>(count) + 0.5f); }

// What to try between two values, given how many of n reach each: where k would, if the odds of reaching a value
// changed evenly with it; among values of one sign with the order of their bits, about their logarithm.
uint32_t guess_between(uint32_t low, uint32_t high, int64_t reach_low, int64_t reach_above, int64_t k, int64_t n) {
  const auto odds = [n](int64_t count) { return log_like(count) - log_like(n - count); };
  const auto range = static_cast<double>(std::max<int64_t>(1, odds(reach_low) - odds(reach_above)));
  const double share = std::clamp(static_cast<double>(odds(reach_low) - odds(k)) / range, 0.0, 1.0);
  if (((low ^ high) & 0x80000000u) != 0) {
    const double value = value_of(low) + share * (static_cast<double>(value_of(high)) - value_of(low));
    return std::clamp(order_of(static_cast<float>(value)), low + 1, high);
  }
  return low + std::clamp(static_cast<uint32_t>(share * (high - low)), 1u, high - low);
}

struct Threshold {
  float value;    // the largest that at least k of x[0..n) reach; NaN if fewer than k are comparable
  int64_t reach;  // how many do
};

// Closes in on it from both sides.
Threshold kth_largest(const KernelTable& kernels, const float* x, int64_t n, int64_t k) {
  float lowest = 0.0f, highest = 0.0f;
  kernels.extremes(x, n, &lowest, &highest);
  if (!(lowest <= highest)) return {std::numeric_limits<float>::quiet_NaN(), 0};
  // Invariant: at least k reach value_of(low), but for NaN; fewer than k reach anything above value_of(high).
  uint32_t low = order_of(lowest), high = order_of(highest);
  int64_t reach_low = n, reach_above = 0;
  bool counted = false;
  for (int step = 0; low < high; ++step) {
    // Every third step halves what is left, in case values are spread in another way.
    const uint32_t middle =
        step % 3 == 2 ? low + (high - low + 1) / 2 : guess_between(low, high, reach_low, reach_above, k, n);
    const int64_t count = kernels.count_at_least(x, n, value_of(middle));
    if (count == k) return {value_of(middle), k};
    if (count > k) {
      low = middle;
      reach_low = count;
      counted = true;
    } else {
      high = middle - 1;
      reach_above = count;
    }
  }
  if (!counted) reach_low = kernels.count_at_least(x, n, value_of(low));
  return {reach_low < k ? std::numeric_limits<float>::quiet_NaN() : value_of(low), reach_low};
}

// Keeps the first k of `count` ascending positions whose values reach `threshold`, dropping the last of those that
// only equal the k-th largest value.
void drop_ties(const float* x, float kth, int64_t count, int64_t k, int32_t* positions) {
  int64_t above = 0;
  for (int64_t i = 0; i < count; ++i) above += x[positions[i]] > kth;
  int64_t ties = k - above;
  int64_t written = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t position = positions[i];
    if (x[position] > kth || ties-- > 0) positions[written++] = position;
  }
}

// A value that a little more than k of x[0..n) probably reach.
float guess_threshold(const KernelTable& kernels, const float* x, int64_t n, int64_t k) {
  static thread_local std::vector<float> sample(kSamples);
  const double stride = static_cast<double>(n) / kSamples;
  for (int64_t i = 0; i < kSamples; ++i)
    sample[static_cast<size_t>(i)] = x[static_cast<int64_t>(static_cast<double>(i) * stride)];
  const double expected = static_cast<double>(k) / stride;
  const auto rank = static_cast<int64_t>(expected + 3.0 * std::sqrt(expected) + 8.0);
  if (rank >= kSamples) return -std::numeric_limits<float>::infinity();
  return kth_largest(kernels, sample.data(), kSamples, rank).value;
}

}  // namespace

int64_t top_k(const KernelTable& kernels, const float* x, int64_t n, int64_t k, int32_t* positions) {
  k = std::min(k, n);
  if (k <= 0) return 0;
  static thread_local std::vector<int32_t> kept;
  static thread_local std::vector<float> values;
  kept.resize(static_cast<size_t>(std::max<int64_t>(n, static_cast<int64_t>(kept.size()))));
  float kth = std::numeric_limits<float>::quiet_NaN();
  int64_t count = 0;
  if (n > kDirect) {
    count = kernels.filter_at_least(x, n, guess_threshold(kernels, x, n, k), kept.data(), n);
    if (count >= k) {
      values.resize(static_cast<size_t>(count));
      for (int64_t i = 0; i < count; ++i) values[static_cast<size_t>(i)] = x[kept[static_cast<size_t>(i)]];
      kth = kth_largest(kernels, values.data(), count, k).value;
      int64_t reached = 0;
      for (int64_t i = 0; i < count; ++i) {
        if (values[static_cast<size_t>(i)] >= kth) kept[static_cast<size_t>(reached++)] = kept[static_cast<size_t>(i)];
      }
      count = reached;
    }
  }
  if (count < k) {
    const Threshold threshold = kth_largest(kernels, x, n, k);
    kth = threshold.value;
    if (std::isnan(kth)) return -1;
    if (threshold.reach == k) return kernels.filter_at_least(x, n, kth, positions, k);
    count = kernels.filter_at_least(x, n, kth, kept.data(), n);
  }
  if (count > k) drop_ties(x, kth, count, k, kept.data());
  std::copy_n(kept.data(), k, positions);
  return k;
}

}  // namespace offload
