// AVX-512 F, BW, DQ, VL: 16 lanes, 32 registers.
#include "kernels/kernels.h"
#include "kernels/number_formats.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
namespace offload::avx512 {

#include "kernels/isa/avx512_primitives-inl.h"
static inline I i_add_products(I sums, I row, const int16_t* query) {
  return _mm512_add_epi32(sums, _mm512_madd_epi16(row, _mm512_loadu_si512(query)));
}
static inline I i_add_products(I sums, I pairs, int32_t pair) {
  return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi32(pair)));
}

// Codes of kByteLanes tokens, entries looked up by their nibbles, and 16-bit sums of those: `odd` of the odd tokens,
// `all` of the even ones and, 256 times, of the odd ones.
inline constexpr int kByteLanes = 64;
using B = __m512i;
struct ByteSums {
  __m512i all, odd;
};
static inline B b_load(const uint8_t* p) { return _mm512_loadu_si512(p); }
static inline B b_low_nibbles(B x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
static inline B b_high_nibbles(B x) { return b_low_nibbles(_mm512_srli_epi16(x, 4)); }
static inline B b_look_up(const uint8_t* entries, B at) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(entries))), at);
}
static inline B b_add(B a, B b) { return _mm512_add_epi8(a, b); }
static inline ByteSums b_no_sums() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
static inline void b_add_to(ByteSums* sums, B x) {
  sums->all = _mm512_add_epi16(sums->all, x);
  sums->odd = _mm512_add_epi16(sums->odd, _mm512_srli_epi16(x, 8));
}
static inline void b_store_sums(const ByteSums& sums, uint16_t* out) {
  const __m512i even = _mm512_sub_epi16(sums.all, _mm512_slli_epi16(sums.odd, 8));
  const __m512i low = _mm512_unpacklo_epi16(even, sums.odd);  // of each 128-bit lane the first 8 tokens
  const __m512i high = _mm512_unpackhi_epi16(even, sums.odd);
  const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
                second = _mm512_add_epi64(first, _mm512_set1_epi64(4));
  _mm512_storeu_si512(out, _mm512_permutex2var_epi64(low, first, high));
  _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi64(low, second, high));
}

static inline I i_dot(C w, __m512i x) { return _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1)); }
static inline I i_dot_nibbles(C w, const int8_t* x) { return i_dot(w, _mm512_loadu_si512(x)); }
static inline I i_dot_bytes(C w, const int8_t* x) { return i_dot(_mm512_abs_epi8(w), i_signed(w, x)); }
static inline F f_add_halves(C w, const int8_t* x, const float* factors, F part) {
  return f_fma(f_from_ints(i_dot_bytes(w, x)), f_spread_halves(factors), part);
}

static inline void f_transpose(F* x) {
  __m512i words[16];
  for (int i = 0; i < 16; ++i) words[i] = _mm512_castps_si512(x[i]);
  transpose(words);
  for (int i = 0; i < 16; ++i) x[i] = _mm512_castsi512_ps(words[i]);
}

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

}  // namespace offload::avx512
#pragma GCC pop_options

const offload::KernelTable* offload::avx512_table() {
  static const KernelTable table = [] {
    KernelTable whole = avx512::make_table("avx512");
    avx512::add_products_of_floats(&whole);
    return whole;
  }();
  return &table;
}
#endif
