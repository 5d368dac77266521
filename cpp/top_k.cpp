// Exact top-k by threshold: a sampled guess of the k-th largest value, one SIMD pass that keeps what reaches it,
// then an exact selection among those few. Falls back to lower guesses until enough are kept.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "policy.h"

namespace offload {
namespace {

constexpr int64_t kSamples = 2048;

// A value that a little more than k of n elements probably reach.
float guess_threshold(const float* x, int64_t n, int64_t k, std::vector<float>& sample) {
  if (n <= 2 * kSamples || k * 2 >= n) return -std::numeric_limits<float>::infinity();
  sample.clear();
  const double stride = static_cast<double>(n) / kSamples;
  for (int64_t i = 0; i < kSamples; ++i) sample.push_back(x[static_cast<int64_t>(static_cast<double>(i) * stride)]);
  const double expected = static_cast<double>(k) / stride;
  const auto rank = static_cast<int64_t>(expected + 3.0 * std::sqrt(expected) + 8.0);
  if (rank >= kSamples) return -std::numeric_limits<float>::infinity();
  std::nth_element(sample.begin(), sample.begin() + rank, sample.end(), std::greater<float>());
  return sample[static_cast<size_t>(rank)];
}

}  // namespace

int64_t top_k(const KernelTable& kernels, const float* x, int64_t n, int64_t k, int32_t* positions) {
  k = std::min(k, n);
  if (k <= 0) return 0;
  if (k == n) {
    for (int64_t i = 0; i < n; ++i) positions[i] = static_cast<int32_t>(i);
    return n;
  }
  static thread_local std::vector<float> values;
  static thread_local std::vector<int32_t> kept;
  float threshold = guess_threshold(x, n, k, values);
  kept.resize(static_cast<size_t>(n));
  int64_t count = kernels.filter_at_least(x, n, threshold, kept.data(), n);
  if (count < k) {
    threshold = -std::numeric_limits<float>::infinity();
    count = kernels.filter_at_least(x, n, threshold, kept.data(), n);
  }
  if (count < k) return -1;  // fewer than k comparable values: some are NaN
  values.resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) values[static_cast<size_t>(i)] = x[kept[static_cast<size_t>(i)]];
  std::nth_element(values.begin(), values.begin() + (k - 1), values.end(), std::greater<float>());
  const float kth = values[static_cast<size_t>(k - 1)];
  int64_t above = 0;
  for (int64_t i = 0; i < k - 1; ++i) above += values[static_cast<size_t>(i)] > kth;
  int64_t ties = k - above;
  int64_t written = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int32_t position = kept[static_cast<size_t>(i)];
    const float value = x[position];
    if (value > kth || (value == kth && ties-- > 0)) positions[written++] = position;
  }
  return written;
}

}  // namespace offload
