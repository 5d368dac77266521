// Values of int8 rows as whole numbers, too, where AVX-512 has VNNI: two rows interleave lane by lane, and so do their
// weights, times the rows' scales, rounded to 15 bits of the largest of a tile and head. Included inside a per-ISA
// namespace after tile_ops_int8-inl.h.

template <>
struct TileOps<Int8> : Int8Ops {
  template <int G, class Rows>
  static void accumulate(const float* weights, int64_t weight_stride, const Rows& rows, int num_rows,
                         const Prefetch<Int8>& ahead, int64_t head_dim, float* acc, int64_t acc_stride) {
    for (int64_t first = 0; first < head_dim; first += kRowGroup) {
      accumulate_group<G>(weights, weight_stride, rows, num_rows, ahead, first, head_dim, acc + first, acc_stride);
    }
  }

  // accumulate() leaves each 32 columns as (low halves, high halves) of the 128-bit lanes; put them back in order.
  static void finish(float* acc, int group_size, int64_t head_dim) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int64_t i = 0; i < group_size * head_dim; i += 32) {
      const __m512 low = _mm512_loadu_ps(acc + i);
      const __m512 high = _mm512_loadu_ps(acc + i + 16);
      _mm512_storeu_ps(acc + i, _mm512_permutex2var_ps(low, first, high));
      _mm512_storeu_ps(acc + i + 16, _mm512_permutex2var_ps(low, second, high));
    }
  }

 private:
  template <int G, class Rows>
  static void accumulate_group(const float* weights, int64_t weight_stride, const Rows& rows, int num_rows,
                               const Prefetch<Int8>& ahead, int64_t first, int64_t head_dim, float* acc,
                               int64_t acc_stride) {
    alignas(64) float scales[kSubTile];
    const int64_t bytes = row_bytes(head_dim, DType::i8);
    for (int r = 0; r < num_rows; ++r) {
      scales[r] = to_float_of(scales_of(rows[r], head_dim) + first / kRowGroup);
      if (first == 0) ahead.row(r, bytes);
      ahead.next_in_stream(rows[0] + num_rows * bytes + first * num_rows + r * kRowGroup, kRowGroup);
    }
    for (int r = num_rows; r < kSubTile; ++r) scales[r] = 0.0f;
    alignas(64) uint32_t pairs[G][kSubTile / 2];
    float units[G];
    for (int g = 0; g < G; ++g) {
      const float* w = weights + g * weight_stride;
      const F low = f_mul(f_load(w), f_load(scales)), high = f_mul(f_load(w + 16), f_load(scales + 16));
      const F zeros = f_fma(low, f_zero(), f_mul(high, f_zero()));
      const float top = f_max_lane(f_max(_mm512_abs_ps(low), _mm512_abs_ps(high))) + f_sum(zeros);
      units[g] = top / 32767.0f;  // NaN where a weight or a scale is no number
      const F inverse = f_set1(top > kSmallestInput ? 32767.0f / top : 0.0f);
      const __m256i first_half = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(f_mul(low, inverse)));
      const __m256i second_half = _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(f_mul(high, inverse)));
      _mm512_store_si512(pairs[g], _mm512_inserti64x4(_mm512_castsi256_si512(first_half), second_half, 1));
    }
    I sums[G * 4];
    for (int i = 0; i < G * 4; ++i) sums[i] = i_zero();
    for (int r = 0; r < num_rows; r += 2) {
      const Int8* even = rows[r] + first;
      const Int8* odd = (r + 1 < num_rows ? rows[r + 1] : rows[r]) + first;  // at weight zero
      I columns[4];
      for (int v = 0; v < 2; ++v) {
        const I a = i_load_pairs(&even[v * 32].code), b = i_load_pairs(&odd[v * 32].code);
        columns[v * 2] = _mm512_unpacklo_epi16(a, b);
        columns[v * 2 + 1] = _mm512_unpackhi_epi16(a, b);
      }
      for (int g = 0; g < G; ++g) {
        const I w = _mm512_set1_epi32(static_cast<int>(pairs[g][r / 2]));
        for (int v = 0; v < 4; ++v) sums[g * 4 + v] = _mm512_dpwssd_epi32(sums[g * 4 + v], w, columns[v]);
      }
    }
    for (int g = 0; g < G; ++g) {
      for (int v = 0; v < 4; ++v) {
        float* to = acc + g * acc_stride + v * 16;
        f_store(to, f_fma(f_from_ints(sums[g * 4 + v]), f_set1(units[g]), f_load(to)));
      }
    }
  }

  static float to_float_of(const Half* scale) { return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(scale->bits))); }
};
