// AVX2, FMA and F16C: 8 lanes, 16 registers.
#include "kernels/kernels.h"
#include "kernels/number_formats.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,popcnt")
namespace offload::avx2 {

inline constexpr int W = 8;
inline constexpr int kRowTile = 4;
inline constexpr int kValueTiles[] = {8, 4, 4, 2};  // vectors of a value row accumulated together for 1, 2, .. heads
using F = __m256;

static inline F f_set1(float x) { return _mm256_set1_ps(x); }
static inline F f_load(const float* p) { return _mm256_loadu_ps(p); }
static inline void f_store(float* p, F x) { _mm256_storeu_ps(p, x); }
static inline F f_fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
static inline F f_max(F a, F b) { return _mm256_max_ps(a, b); }
static inline F f_round(F x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// x * 2^n; 0 where n is below -126, whatever x is. A NaN n is not, and its x is NaN, too.
static inline F f_scale2(F x, F n) {
  const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  const F scaled = _mm256_mul_ps(x, _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23)));
  return _mm256_andnot_ps(_mm256_cmp_ps(n, _mm256_set1_ps(-126.0f), _CMP_LT_OQ), scaled);
}
static inline float f_sum(F x) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline float f_max_lane(F x) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}
static inline F f_load_as(const Bf16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
static inline F f_load_as(const Half* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline F f_load_as(const Int8* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
static inline F f_set1_as(const Half* p) { return _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(p->bits))); }
static inline void f_store_as(Half* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline void f_store_as(Bf16* p, F x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded =
      _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
  const __m256i quiet = _mm256_or_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(0x40));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i words = _mm256_blendv_epi8(rounded, quiet, nan);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}
// 8 sums of whole numbers, and how products of int8 rows with int16 queries are added: two neighbours to a lane.
using I = __m256i;
static inline I i_zero() { return _mm256_setzero_si256(); }
static inline I i_load_pairs(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline I i_add_products(I sums, I row, const int16_t* query) {
  const __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(query));
  return _mm256_add_epi32(sums, _mm256_madd_epi16(row, q));
}
static inline I i_add_products(I sums, I pairs, int32_t pair) {
  return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi32(pair)));
}
// Of two vectors of whole numbers of 16 bits, lane by lane of 128 bits: pairs of their first halves, and of the others;
// and two vectors of what became of these, in order.
static inline I i_pair_low(I a, I b) { return _mm256_unpacklo_epi16(a, b); }
static inline I i_pair_high(I a, I b) { return _mm256_unpackhi_epi16(a, b); }
static inline void f_unpair(F* low, F* high) {
  const F first = _mm256_permute2f128_ps(*low, *high, 0x20);
  *high = _mm256_permute2f128_ps(*low, *high, 0x31);
  *low = first;
}
static inline void i_store_short(int16_t* p, F x) {
  const __m256i words = _mm256_cvtps_epi32(x);
  const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), shorts);
}
static inline I i_low_nibbles(I pairs) { return _mm256_srai_epi16(_mm256_slli_epi16(pairs, 12), 12); }
static inline I i_high_squares(I pairs) {
  const I high = _mm256_and_si256(_mm256_srli_epi16(pairs, 4), _mm256_set1_epi16(15));
  return _mm256_mullo_epi16(high, high);
}
static inline F f_from_ints(I x) { return _mm256_cvtepi32_ps(x); }
static inline F f_sqrt(F x) { return _mm256_sqrt_ps(x); }
// x[i], lane j <-> x[j], lane i
static inline void f_transpose(F* x) {
  F y[8];
  for (int i = 0; i < 8; i += 2) {
    y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
    y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {  // x[i + j]: column j of each 128-bit lane, rows i to i + 3
    x[i] = _mm256_shuffle_ps(y[i], y[i + 2], 0x44);
    x[i + 1] = _mm256_shuffle_ps(y[i], y[i + 2], 0xee);
    x[i + 2] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0x44);
    x[i + 3] = _mm256_shuffle_ps(y[i + 1], y[i + 3], 0xee);
  }
  for (int j = 0; j < 4; ++j) {
    const F low = x[j], high = x[j + 4];
    x[j] = _mm256_permute2f128_ps(low, high, 0x20);
    x[j + 4] = _mm256_permute2f128_ps(low, high, 0x31);
  }
}
template <int G, int R>
static inline void f_store_sums(const F* sums, float scale, float* out, int64_t stride) {
  for (int g = 0; g < G; ++g) {
    const F* s = sums + g * R;
    if constexpr (R == 4) {
      const F halves = _mm256_hadd_ps(_mm256_hadd_ps(s[0], s[1]), _mm256_hadd_ps(s[2], s[3]));
      const __m128 whole = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
      _mm_storeu_ps(out + g * stride, _mm_mul_ps(whole, _mm_set1_ps(scale)));
    } else {
      for (int r = 0; r < R; ++r) out[g * stride + r] = scale * f_sum(s[r]);
    }
  }
}

static inline int64_t filter_at_least(const float* x, int64_t n, float threshold, int32_t* positions,
                                      int64_t capacity) {
  int64_t count = 0;
  const __m256 limit = _mm256_set1_ps(threshold);
  for (int64_t i = 0; i < n; i += 8) {
    unsigned hit = 0;
    if (n - i >= 8) {
      hit = static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(x + i), limit, _CMP_GE_OQ)));
    } else {
      for (int64_t b = 0; b < n - i; ++b) hit |= static_cast<unsigned>(x[i + b] >= threshold) << b;
    }
    for (; hit != 0; hit &= hit - 1) {
      if (count < capacity) positions[count] = static_cast<int32_t>(i + __builtin_ctz(hit));
      ++count;
    }
  }
  return count;
}

static inline int64_t count_at_least(const float* x, int64_t n, float threshold) {
  const __m256 limit = _mm256_set1_ps(threshold);
  int64_t count = 0;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 hit = _mm256_cmp_ps(_mm256_loadu_ps(x + i), limit, _CMP_GE_OQ);
    count += __builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(hit)));
  }
  for (; i < n; ++i) count += x[i] >= threshold;
  return count;
}

// Codes of kByteLanes tokens, entries looked up by their nibbles, and 16-bit sums of those: `odd` of the odd tokens,
// `all` of the even ones and, 256 times, of the odd ones.
inline constexpr int kByteLanes = 32;
using B = __m256i;
struct ByteSums {
  __m256i all, odd;
};
static inline B b_load(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
static inline B b_low_nibbles(B x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
static inline B b_high_nibbles(B x) { return b_low_nibbles(_mm256_srli_epi16(x, 4)); }
static inline B b_look_up(const uint8_t* entries, B at) {
  return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(entries))),
                             at);
}
static inline B b_add(B a, B b) { return _mm256_add_epi8(a, b); }
static inline ByteSums b_no_sums() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline void b_add_to(ByteSums* sums, B x) {
  sums->all = _mm256_add_epi16(sums->all, x);
  sums->odd = _mm256_add_epi16(sums->odd, _mm256_srli_epi16(x, 8));
}
static inline void b_store_sums(const ByteSums& sums, uint16_t* out) {
  const __m256i even = _mm256_sub_epi16(sums.all, _mm256_slli_epi16(sums.odd, 8));
  const __m256i low = _mm256_unpacklo_epi16(even, sums.odd);  // of each 128-bit lane the first 8 tokens
  const __m256i high = _mm256_unpackhi_epi16(even, sums.odd);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permute2x128_si256(low, high, 0x20));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 16), _mm256_permute2x128_si256(low, high, 0x31));
}

// Codes of a group of packed weights, and their products with int8. maddubs takes one side without a sign, and adds two
// products in 16 bits, which 2 * 128 * 127 fit.
inline constexpr int kDotGroups = 1;
using C = __m256i;
static inline C c_load(const int8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
static inline C c_load_nibbles(const uint8_t* p) {
  const __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return b_low_nibbles(_mm256_srlv_epi64(both, _mm256_setr_epi64x(0, 0, 4, 4)));
}
static inline I i_dot_nibbles(C w, const int8_t* x) {
  return _mm256_madd_epi16(_mm256_maddubs_epi16(w, c_load(x)), _mm256_set1_epi16(1));
}
static inline I i_dot_bytes(C w, const int8_t* x) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(c_load(x), w));
  return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}
static inline F f_spread(const float* factor) { return _mm256_broadcast_ss(factor); }
static inline F f_add_halves(C w, const int8_t* x, const float* factors, F part) {
  const F of_halves = _mm256_set_m128(_mm_broadcast_ss(factors + 1), _mm_broadcast_ss(factors));
  return f_fma(f_from_ints(i_dot_bytes(w, x)), of_halves, part);
}
using T = __m256i;
static inline T t_load(const int8_t* table) {
  return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
}
static inline C c_look_up(T table, C w) { return _mm256_shuffle_epi8(table, w); }

// A word has two bf16, either of which is the upper half of a float: cheaper than widening.
template <class T>
struct Columns;
template <>
struct Columns<Bf16> {
  static constexpr int kVectors = 2;
  static void load(const Bf16* p, F* vectors) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    vectors[0] = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
    vectors[1] = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
  }
};

// clang-format off
#include "kernels/tile_ops-inl.h"
#include "kernels/tile_ops_int8-inl.h"
#include "kernels/tile_ops_int8_pairs-inl.h"
template <>
struct TileOps<Int8> : Int8PairOps {};
#include "kernels/bodies-inl.h"
#include "kernels/causal_attention-inl.h"
#include "kernels/products-inl.h"
// clang-format on

}  // namespace offload::avx2
#pragma GCC pop_options

const offload::KernelTable* offload::avx2_table() {
  static const KernelTable table = [] {
    KernelTable whole = avx2::make_table("avx2");
    avx2::add_products_of_floats(&whole);
    return whole;
  }();
  return &table;
}
#endif
