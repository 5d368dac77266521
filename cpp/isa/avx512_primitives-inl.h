// The vector of 16 floats that the shared bodies are written in. Included inside a namespace whose target has AVX-512.

inline constexpr int W = 16;
inline constexpr int kRowTile = 4;
inline constexpr int kValueTile = 4;
using F = __m512;

static inline F f_zero() { return _mm512_setzero_ps(); }
static inline F f_set1(float x) { return _mm512_set1_ps(x); }
static inline F f_load(const float* p) { return _mm512_loadu_ps(p); }
static inline void f_store(float* p, F x) { _mm512_storeu_ps(p, x); }
static inline F f_add(F a, F b) { return _mm512_add_ps(a, b); }
static inline F f_sub(F a, F b) { return _mm512_sub_ps(a, b); }
static inline F f_mul(F a, F b) { return _mm512_mul_ps(a, b); }
static inline F f_div(F a, F b) { return _mm512_div_ps(a, b); }
static inline F f_fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
static inline F f_max(F a, F b) { return _mm512_max_ps(a, b); }
static inline F f_round(F x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline F f_scale2(F x, F n) { return _mm512_scalef_ps(x, n); }
static inline float f_sum(F x) { return _mm512_reduce_add_ps(x); }
static inline float f_max_lane(F x) { return _mm512_reduce_max_ps(x); }

static inline F f_load_as(const float* p) { return _mm512_loadu_ps(p); }
static inline F f_load_as(const Bf16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
static inline F f_load_as(const Half* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline void f_store_as(float* p, F x) { _mm512_storeu_ps(p, x); }
static inline void f_store_as(Half* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline void f_store_as(Bf16* p, F x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, nan, _mm512_srli_epi32(bits, 16), _mm512_set1_epi32(0x40));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(rounded));
}

// 16 sums at once: a transposing tree costs 45 operations where 16 separate reductions would cost 112.
static inline void f_sum_lanes_16(const F* x, float* out) {
  F half[8], quarter[4], pair[2];
  for (int i = 0; i < 8; ++i) {
    half[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0x44),
                            _mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0xee));
  }
  for (int i = 0; i < 4; ++i) {  // 128-bit lanes: vectors 4i, 4i+1, 4i+2, 4i+3
    quarter[i] = _mm512_add_ps(_mm512_shuffle_f32x4(half[2 * i], half[2 * i + 1], 0x88),
                               _mm512_shuffle_f32x4(half[2 * i], half[2 * i + 1], 0xdd));
  }
  for (int i = 0; i < 2; ++i) {
    pair[i] = _mm512_add_ps(_mm512_shuffle_ps(quarter[2 * i], quarter[2 * i + 1], 0x88),
                            _mm512_shuffle_ps(quarter[2 * i], quarter[2 * i + 1], 0xdd));
  }
  const F all = _mm512_add_ps(_mm512_shuffle_ps(pair[0], pair[1], 0x88), _mm512_shuffle_ps(pair[0], pair[1], 0xdd));
  // Lane 4j + i holds the sum of vector 4i + j.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_ps(out, _mm512_permutexvar_ps(order, all));
}

template <int N>
static inline void f_sum_lanes(const F* x, float* out) {
  if constexpr (N == 12 || N == 16) {
    F all[16];
    for (int i = 0; i < 16; ++i) all[i] = i < N ? x[i < N ? i : 0] : _mm512_setzero_ps();
    float sums[16];
    f_sum_lanes_16(all, sums);
    for (int i = 0; i < N; ++i) out[i] = sums[i];
  } else {
    for (int i = 0; i < N; ++i) out[i] = _mm512_reduce_add_ps(x[i]);
  }
}

static inline void prefetch_row(const void* row, int64_t row_bytes) {
  for (int64_t i = 0; i < row_bytes; i += 64) _mm_prefetch(static_cast<const char*>(row) + i, _MM_HINT_T0);
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
      const __m512i found = _mm512_maskz_compress_epi32(hit, _mm512_add_epi32(_mm512_set1_epi32(static_cast<int>(i)), lane));
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

static inline uint64_t read_chunk(const void* p, int64_t num_bytes) {
  const char* bytes = static_cast<const char*>(p);
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  int64_t i = 0;
  for (; i + 256 <= num_bytes; i += 256) {
    a = _mm512_add_epi64(a, _mm512_loadu_si512(bytes + i));
    b = _mm512_add_epi64(b, _mm512_loadu_si512(bytes + i + 64));
    c = _mm512_add_epi64(c, _mm512_loadu_si512(bytes + i + 128));
    d = _mm512_add_epi64(d, _mm512_loadu_si512(bytes + i + 192));
  }
  for (; i + 64 <= num_bytes; i += 64) a = _mm512_add_epi64(a, _mm512_loadu_si512(bytes + i));
  const __m512i sum = _mm512_add_epi64(_mm512_add_epi64(a, b), _mm512_add_epi64(c, d));
  return static_cast<uint64_t>(_mm512_reduce_add_epi64(sum));
}
