// The vector of 16 floats that the shared bodies are written in. Included inside a namespace whose target has AVX-512.

inline constexpr int W = 16;
inline constexpr int kRowTile = 4;
inline constexpr int kValueTiles[] = {8, 8};  // vectors of a value row accumulated together for 1, 2, .. heads
using F = __m512;

static inline F f_set1(float x) { return _mm512_set1_ps(x); }
static inline F f_load(const float* p) { return _mm512_loadu_ps(p); }
static inline void f_store(float* p, F x) { _mm512_storeu_ps(p, x); }
static inline F f_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
static inline F f_max(F a, F b) { return _mm512_max_ps(a, b); }
static inline F f_round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline F f_scale2(F x, F n) { return _mm512_scalef_ps(x, n); }
static inline float f_sum(F x) { return _mm512_reduce_add_ps(x); }
static inline float f_max_lane(F x) { return _mm512_reduce_max_ps(x); }

static inline F f_load_as(const Bf16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
static inline F f_load_as(const Half* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline F f_load_as(const Int8* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
static inline F f_set1_as(const Half* p) { return _mm512_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(p->bits))); }
static inline void f_store_as(Half* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline void f_store_as(Bf16* p, F x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, _mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}

// 16 sums of whole numbers, of int8 rows and int16 queries: products of two neighbours go to one lane.
using I = __m512i;
static inline I i_zero() { return _mm512_setzero_si512(); }
static inline I i_load_pairs(const int8_t* p) {
  return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
// Of two vectors of whole numbers of 16 bits, lane by lane of 128 bits: pairs of their first halves, and of the others;
// and two vectors of what became of these, in order.
static inline I i_pair_low(I a, I b) { return _mm512_unpacklo_epi16(a, b); }
static inline I i_pair_high(I a, I b) { return _mm512_unpackhi_epi16(a, b); }
static inline void f_unpair(F* low, F* high) {
  const __m512i to_low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const F first = _mm512_permutex2var_ps(*low, to_low, *high);
  *high = _mm512_permutex2var_ps(*low, _mm512_add_epi32(to_low, _mm512_set1_epi32(8)), *high);
  *low = first;
}
static inline void i_store_short(int16_t* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
}
static inline I i_low_nibbles(I pairs) { return _mm512_srai_epi16(_mm512_slli_epi16(pairs, 12), 12); }
static inline I i_high_squares(I pairs) {
  const I high = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), _mm512_set1_epi16(15));
  return _mm512_mullo_epi16(high, high);
}
static inline F f_from_ints(I x) { return _mm512_cvtepi32_ps(x); }
static inline F f_sqrt(F x) { return _mm512_sqrt_ps(x); }

// Codes of two groups of packed weights. The ISA has i_dot_nibbles: their products with int8, of codes without a sign.
inline constexpr int kDotGroups = 2;
using C = __m512i;
static inline C c_load(const int8_t* p) { return _mm512_loadu_si512(p); }
static inline C c_load_nibbles(const uint8_t* p) {
  const __m512i pairs = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  const __m512i twice = _mm512_shuffle_i64x2(pairs, pairs, 0x50);
  const __m512i shifted = _mm512_srlv_epi64(twice, _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4));
  return _mm512_and_si512(shifted, _mm512_set1_epi8(15));
}
// Lanes 0 to 7 <- factors[0], the others factors[1].
static inline F f_spread(const float* factors) {
  int64_t both;
  std::memcpy(&both, factors, sizeof both);
  const __m512i group = _mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
  return _mm512_permutexvar_ps(group, _mm512_castsi512_ps(_mm512_set1_epi64(both)));
}
// Lanes 4i to 4i + 3 <- factors[i]: a factor to each half of a group.
static inline F f_spread_halves(const float* factors) {
  const __m512i half = _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  return _mm512_permutexvar_ps(half, _mm512_broadcast_f32x4(_mm_loadu_ps(factors)));
}
using T = __m512i;
static inline T t_load(const int8_t* table) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
}
static inline C c_look_up(T table, C w) { return _mm512_shuffle_epi8(table, w); }
// x with the sign of w turned around, for i_dot_nibbles(|w|, x).
static inline __m512i i_signed(C w, const int8_t* x) {
  const __m512i of_x = _mm512_loadu_si512(x);
  return _mm512_mask_sub_epi8(of_x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), of_x);
}

// Lane 4i + j of the result is the sum of 128-bit lane i of x[j]: four vectors reduce together in 9 operations.
static inline F f_sum_quads(const F* x) {
  const F a = _mm512_add_ps(_mm512_shuffle_ps(x[0], x[1], 0x88), _mm512_shuffle_ps(x[0], x[1], 0xdd));
  const F b = _mm512_add_ps(_mm512_shuffle_ps(x[2], x[3], 0x88), _mm512_shuffle_ps(x[2], x[3], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
}

// out[g * stride + r] = scale * sum of the lanes of sums[g * R + r]
template <int G, int R>
static inline void f_store_sums(const F* sums, float scale, float* out, int64_t stride) {
  for (int g = 0; g < G; ++g) {
    if constexpr (R == 4) {
      F quads = f_sum_quads(sums + g * 4);
      quads = _mm512_add_ps(quads, _mm512_shuffle_f32x4(quads, quads, 0xb1));
      quads = _mm512_add_ps(quads, _mm512_shuffle_f32x4(quads, quads, 0x4e));
      _mm_storeu_ps(out + g * stride, _mm_mul_ps(_mm512_castps512_ps128(quads), _mm_set1_ps(scale)));
    } else {
      for (int r = 0; r < R; ++r) out[g * stride + r] = scale * _mm512_reduce_add_ps(sums[g * R + r]);
    }
  }
}

static inline int64_t filter_at_least(const float* x, int64_t n, float threshold, int32_t* positions,
                                      int64_t capacity) {
  int64_t count = 0;
  const __m512 limit = _mm512_set1_ps(threshold);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  for (int64_t i = 0; i < n; i += 16) {
    const __mmask16 live = n - i >= 16 ? 0xffff : static_cast<__mmask16>((1u << (n - i)) - 1);
    const __mmask16 hit = _mm512_mask_cmp_ps_mask(live, _mm512_maskz_loadu_ps(live, x + i), limit, _CMP_GE_OQ);
    if (hit == 0) continue;
    const int hits = __builtin_popcount(hit);
    if (count + hits <= capacity) {
      // A register compress and one masked store: compressing straight to memory is microcoded on Zen 4.
      const __m512i found =
          _mm512_maskz_compress_epi32(hit, _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(i)), lane));
      _mm512_mask_storeu_epi32(positions + count, static_cast<__mmask16>((1u << hits) - 1), found);
    } else {
      int64_t at = count;
      for (int b = 0; b < 16 && at < capacity; ++b) {
        if (hit >> b & 1) positions[at++] = static_cast<int32_t>(i + b);
      }
    }
    count += hits;
  }
  return count;
}

static inline int64_t count_at_least(const float* x, int64_t n, float threshold) {
  const __m512 limit = _mm512_set1_ps(threshold);
  int64_t count = 0;
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    const auto hits = [&](int64_t at) {
      return static_cast<uint64_t>(_mm512_cmp_ps_mask(_mm512_loadu_ps(x + at), limit, _CMP_GE_OQ));
    };
    count += __builtin_popcountll(hits(i) | hits(i + 16) << 16 | hits(i + 32) << 32 | hits(i + 48) << 48);
  }
  for (; i < n; ++i) count += x[i] >= threshold;
  return count;
}

// x[i], lane j <-> x[j], lane i
static inline void transpose(__m512i* x) {
  __m512i y[16];
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {  // x[i + j]: column j of each 128-bit lane, rows i to i + 3
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
  for (int j = 0; j < 4; ++j) {
    const __m512i even_low = _mm512_shuffle_i32x4(x[j], x[j + 4], 0x88);
    const __m512i odd_low = _mm512_shuffle_i32x4(x[j], x[j + 4], 0xdd);
    const __m512i even_high = _mm512_shuffle_i32x4(x[j + 8], x[j + 12], 0x88);
    const __m512i odd_high = _mm512_shuffle_i32x4(x[j + 8], x[j + 12], 0xdd);
    y[j] = _mm512_shuffle_i32x4(even_low, even_high, 0x88);
    y[j + 4] = _mm512_shuffle_i32x4(odd_low, odd_high, 0x88);
    y[j + 8] = _mm512_shuffle_i32x4(even_low, even_high, 0xdd);
    y[j + 12] = _mm512_shuffle_i32x4(odd_low, odd_high, 0xdd);
  }
  for (int i = 0; i < 16; ++i) x[i] = y[i];
}
