// VNNI on top of AVX-512: only the dot products of bytes, and of int8 keys and values, change. Cascade Lake and Ice
// Lake have it without bf16.
#include "kernels/kernels.h"
#include "kernels/number_formats.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")
namespace offload::avx512_vnni {

#include "kernels/isa/avx512_primitives-inl.h"
static inline I i_add_products(I sums, I row, const int16_t* query) {
  return _mm512_dpwssd_epi32(sums, row, _mm512_loadu_si512(query));
}
static inline I i_add_products(I sums, I pairs, int32_t pair) {
  return _mm512_dpwssd_epi32(sums, pairs, _mm512_set1_epi32(pair));
}
static inline I i_dot_nibbles(C w, const int8_t* x) { return _mm512_dpbusd_epi32(i_zero(), w, _mm512_loadu_si512(x)); }
static inline I i_dot_bytes(C w, const int8_t* x) {
  return _mm512_dpbusd_epi32(i_zero(), _mm512_abs_epi8(w), i_signed(w, x));
}
static inline F f_add_halves(C w, const int8_t* x, const float* factors, F part) {
  return f_fma(f_from_ints(i_dot_bytes(w, x)), f_spread_halves(factors), part);
}

#include "kernels/tile_ops-inl.h"
// clang-format off
#include "kernels/ranking-inl.h"
#include "kernels/ranking_bytes-inl.h"
#include "kernels/packed-inl.h"
#include "kernels/tile_ops_int8-inl.h"
#include "kernels/tile_ops_int8_pairs-inl.h"
#include "kernels/tile_ops_int8_vnni-inl.h"
#include "kernels/attention-inl.h"
// clang-format on

}  // namespace offload::avx512_vnni
#pragma GCC pop_options

const offload::KernelTable* offload::avx512_vnni_table() {
  static const KernelTable table = [] {
    KernelTable improved = *avx512_table();
    improved.name = "avx512_vnni";
    improved.rank_rows = avx512_vnni::rank_rows<avx512_vnni::ByteBoxes>;
    avx512_vnni::add_packed(&improved);
    improved.score[static_cast<int>(DType::i8)] = avx512_vnni::score<Int8>;
    improved.attend[static_cast<int>(DType::i8)] = avx512_vnni::attend<Int8>;
    return improved;
  }();
  return &table;
}
#endif
