// The baseline every machine has, and the meaning of every other ISA's kernels.
#include <cmath>
#include <cstring>
#include <new>

#include "../kernels.h"
#include "../number_formats.h"

namespace offload::scalar {

inline constexpr int W = 1;
inline constexpr int kRowTile = 4;     // key rows scored together
inline constexpr int kValueTile = 16;  // vectors of one value row accumulated together
using F = float;

static inline F f_zero() { return 0.0f; }
static inline F f_set1(float x) { return x; }
static inline F f_load(const float* p) { return *p; }
static inline void f_store(float* p, F x) { *p = x; }
static inline F f_add(F a, F b) { return a + b; }
static inline F f_sub(F a, F b) { return a - b; }
static inline F f_mul(F a, F b) { return a * b; }
static inline F f_div(F a, F b) { return a / b; }
static inline F f_fma(F a, F b, F c) { return a * b + c; }
static inline F f_max(F a, F b) { return a > b ? a : b; }
static inline F f_round(F x) { return std::nearbyint(x); }
static inline F f_scale2(F x, F n) {
  return n != n ? n : x * bits_to_float(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
}
static inline float f_sum(F x) { return x; }
static inline float f_max_lane(F x) { return x; }
template <class T>
static inline F f_load_as(const T* p) {
  return to_float(*p);
}
template <class T>
static inline void f_store_as(T* p, F x) {
  *p = from_float<T>(x);
}
template <int N>
static inline void f_sum_lanes(const F* x, float* out) {
  for (int i = 0; i < N; ++i) out[i] = x[i];
}
static inline void prefetch_row(const void*, int64_t) {}

static inline int64_t filter_at_least(const float* x, int64_t n, float threshold, int32_t* positions,
                                      int64_t capacity) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (!(x[i] >= threshold)) continue;
    if (count < capacity) positions[count] = static_cast<int32_t>(i);
    ++count;
  }
  return count;
}

static inline uint64_t read_chunk(const void* p, int64_t num_bytes) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < num_bytes; i += 8) {
    uint64_t word;
    std::memcpy(&word, static_cast<const char*>(p) + i, sizeof word);
    sum += word;
  }
  return sum;
}

#include "../vector_math-inl.h"
// clang-format off
#include "../tile_ops-inl.h"
#include "../attention-inl.h"
#include "../elementwise-inl.h"
// clang-format on

}  // namespace offload::scalar

namespace offload {

const KernelTable* scalar_table() {
  static const KernelTable table = scalar::make_table("scalar");
  return &table;
}

}  // namespace offload
