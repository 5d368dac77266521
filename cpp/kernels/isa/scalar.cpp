// The baseline every machine has, and the meaning of every other ISA's kernels.
#include "kernels/kernels.h"
#include "kernels/number_formats.h"

// For machines without any of the others: -O3 takes the compiler three times as long.
#pragma GCC optimize("O2")

namespace offload::scalar {

inline constexpr int W = 1;
inline constexpr int kRowTile = 4;  // key rows scored together
inline constexpr int kValueTiles[] = {16, 16, 16,
                                      16};  // vectors of a value row accumulated together for 1, 2, .. heads
using F = float;

static inline F f_set1(float x) { return x; }
static inline F f_load(const float* p) { return *p; }
static inline void f_store(float* p, F x) { *p = x; }
static inline F f_fma(F a, F b, F c) { return a * b + c; }
static inline F f_max(F a, F b) { return a > b ? a : b; }
static inline F f_round(F x) { return std::nearbyint(x); }
// x * 2^n; 0 where n is below -126, whatever x is: exp(-inf) comes with a NaN for x.
static inline F f_scale2(F x, F n) {
  if (n != n) return n;
  return n < -126.0f ? 0.0f : x * bits_to_float(static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23);
}
static inline float f_sum(F x) { return x; }
static inline float f_max_lane(F x) { return x; }
template <class T>
static inline F f_load_as(const T* p) {
  return to_float(*p);
}
static inline F f_load_as(const Int8* p) { return static_cast<float>(p->code); }
static inline F f_set1_as(const Half* p) { return to_float(*p); }
template <class T>
static inline void f_store_as(T* p, F x) {
  *p = from_float<T>(x);
}
using I = int32_t;
static inline I i_zero() { return 0; }
static inline I i_load_pairs(const int8_t* p) { return *p; }
static inline I i_add_products(I sums, I row, const int16_t* query) { return sums + row * *query; }
static inline I i_low_nibbles(I pairs) { return ((pairs & 15) ^ 8) - 8; }
static inline I i_high_squares(I pairs) { return (pairs >> 4 & 15) * (pairs >> 4 & 15); }
static inline F f_from_ints(I x) { return static_cast<F>(x); }
static inline F f_sqrt(F x) { return std::sqrt(x); }
template <int G, int R>
static inline void f_store_sums(const F* sums, float scale, float* out, int64_t stride) {
  for (int g = 0; g < G; ++g) {
    for (int r = 0; r < R; ++r) out[g * stride + r] = scale * f_sum(sums[g * R + r]);
  }
}

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

static inline int64_t count_at_least(const float* x, int64_t n, float threshold) {
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) count += x[i] >= threshold;
  return count;
}

// Codes of kByteLanes tokens, entries looked up by their nibbles, and 16-bit sums of those.
inline constexpr int kByteLanes = 1;
using B = uint8_t;
using ByteSums = uint16_t;
static inline B b_load(const uint8_t* p) { return *p; }
static inline B b_low_nibbles(B x) { return x & 15; }
static inline B b_high_nibbles(B x) { return x >> 4; }
static inline B b_look_up(const uint8_t* entries, B at) { return entries[at]; }
static inline B b_add(B a, B b) { return static_cast<B>(a + b); }
static inline ByteSums b_no_sums() { return 0; }
static inline void b_add_to(ByteSums* sums, B x) { *sums = static_cast<ByteSums>(*sums + x); }
static inline void b_store_sums(ByteSums sums, uint16_t* out) { *out = sums; }

// Codes of a group of packed weights, and their products with int8.
inline constexpr int kDotGroups = 1;
struct C {
  int8_t codes[kPackedGroup];
};
static inline C c_load(const int8_t* p) {
  C w;
  std::memcpy(w.codes, p, sizeof w.codes);
  return w;
}
static inline C c_load_nibbles(const uint8_t* p) {
  C w;
  for (int i = 0; i < 16; ++i) {
    w.codes[i] = static_cast<int8_t>(p[i] & 15);
    w.codes[i + 16] = static_cast<int8_t>(p[i] >> 4);
  }
  return w;
}
static inline I i_dot_bytes(const C& w, const int8_t* x) {
  I sum = 0;
  for (int i = 0; i < kPackedGroup; ++i) sum += w.codes[i] * x[i];
  return sum;
}
static inline I i_dot_nibbles(const C& w, const int8_t* x) { return i_dot_bytes(w, x); }
static inline F f_spread(const float* factor) { return *factor; }
static inline F f_add_halves(const C& w, const int8_t* x, const float* factors, F part) {
  constexpr int kHalf = kPackedGroup / 2;
  I first = 0, second = 0;
  for (int i = 0; i < kHalf; ++i) first += w.codes[i] * x[i];
  for (int i = kHalf; i < kPackedGroup; ++i) second += w.codes[i] * x[i];
  return part + static_cast<F>(first) * factors[0] + static_cast<F>(second) * factors[1];
}
using T = const int8_t*;
static inline T t_load(const int8_t* table) { return table; }
static inline C c_look_up(T table, C w) {
  for (int8_t& code : w.codes) code = table[code];
  return w;
}

#include "kernels/tile_ops-inl.h"
#include "kernels/tile_ops_int8-inl.h"
template <>
struct TileOps<Int8> : Int8Ops {};
#include "kernels/bodies-inl.h"

}  // namespace offload::scalar

const offload::KernelTable* offload::scalar_table() {
  static const KernelTable table = scalar::make_table("scalar");
  return &table;
}
