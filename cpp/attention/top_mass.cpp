// The fewest of some positions whose values sum to a wanted mass. Values are counted in bins of an eighth of an octave;
// only those of the bin in which the sum gets there are sorted.
#include <algorithm>
#include <iterator>
#include <vector>

#include "attention/policy.h"
#include "kernels/number_formats.h"

namespace offload {
namespace {

constexpr int kBinShift = 20;                // of a float's bits: its exponent and three bits below
constexpr int kLowestBin = (127 - 40) << 3;  // 2^-40 and less share a bin
constexpr int kBins = (40 + 24) << 3;        // up to 2^24
constexpr uint32_t kNegative = 0x80000000u;  // counts as 0

int bin_of(float x) {
  const uint32_t bits = float_to_bits(x);
  if ((bits & kNegative) != 0) return 0;
  return std::clamp(static_cast<int>(bits >> kBinShift) - kLowestBin, 0, kBins - 1);
}

}  // namespace

int64_t top_mass(const float* x, int32_t* positions, int64_t n, double mass) {
  double masses[kBins] = {};
  for (int64_t i = 0; i < n; ++i) masses[bin_of(x[positions[i]])] += x[positions[i]];
  int bin = kBins;
  while (!(mass <= 0.0) && bin > 0) mass -= masses[--bin];
  if (!(mass <= 0.0)) return n;
  if (bin == kBins) return 0;
  // Of this bin, the largest until the sum is there.
  mass += masses[bin];
  static thread_local std::vector<int32_t> of_bin;
  of_bin.clear();
  std::copy_if(positions, positions + n, std::back_inserter(of_bin), [&](int32_t p) { return bin_of(x[p]) == bin; });
  std::sort(of_bin.begin(), of_bin.end(), [x](int32_t a, int32_t b) { return x[a] != x[b] ? x[a] > x[b] : a < b; });
  size_t last = 0;
  for (mass -= x[of_bin[0]]; mass > 0.0 && last + 1 < of_bin.size();) mass -= x[of_bin[++last]];
  const int32_t lowest = of_bin[last];
  int64_t kept = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t p = positions[i];
    positions[kept] = p;
    kept += x[p] > x[lowest] || (x[p] == x[lowest] && p <= lowest);
  }
  return kept;
}

}  // namespace offload
