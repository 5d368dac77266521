// Int8 rows where AVX-512 has VNNI, values as whole numbers, too: two rows interleave lane by lane, and so do their
// weights, times the rows' scales, rounded to 15 bits of the largest of a tile and head. Included inside a per-ISA
// namespace after tile_ops_int8-inl.h.

template <>
struct TileOps<Int8> : Int8Ops {
  // A group alone is all of a row: four rows' sums are reduced as whole numbers, then meet their scales.
  template <int G, class Rows>
  static void score(const Query* query, int64_t head_dim, const Rows& rows, int num_rows, const Prefetch<Int8>& ahead,
                    float scale, float* out, int64_t out_stride) {
    if (head_dim != kRowGroup) {
      return Int8Ops::score<G>(query, head_dim, rows, num_rows, ahead, scale, out, out_stride);
    }
    float of_query[kHeadBlock * kMostGroups];
    std::memcpy(of_query, query + kHeadBlock * head_dim, sizeof of_query);
    I held[G * 2];
    for (int i = 0; i < G * 2; ++i) held[i] = _mm512_loadu_si512(query + i * 32);
    for (int r = 0; r < num_rows; r += 4) {
      I sums[G * 4];
      alignas(16) uint16_t halves[8];
      for (int j = 0; j < 4; ++j) {
        const int at = r + j < num_rows ? r + j : num_rows - 1;  // a short last group repeats its last row
        ahead.row(at, row_bytes(head_dim, DType::i8));
        ahead.next_in_stream(rows[at] + stream_ahead_bytes, head_dim);
        const I low = i_load_pairs(&rows[at]->code), high = i_load_pairs(&rows[at][32].code);
        halves[j] = scales_of(rows[at], head_dim)->bits;
        for (int g = 0; g < G; ++g) {
          const I half = _mm512_dpwssd_epi32(i_zero(), low, held[g * 2]);
          sums[g * 4 + j] = _mm512_dpwssd_epi32(half, high, held[g * 2 + 1]);
        }
      }
      const __m128 of_rows = _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(halves)));
      const __mmask8 live = num_rows - r >= 4 ? 0xf : static_cast<__mmask8>((1 << (num_rows - r)) - 1);
      for (int g = 0; g < G; ++g) {
        const __m128 factors = _mm_mul_ps(of_rows, _mm_set1_ps(scale * of_query[g * kMostGroups]));
        const __m128 scores = _mm_mul_ps(_mm_cvtepi32_ps(sum_quads(sums + g * 4)), factors);
        _mm_mask_storeu_ps(out + g * out_stride + r, live, scores);
      }
    }
  }

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
    alignas(64) uint16_t halves[kSubTile] = {};
    const int64_t bytes = row_bytes(head_dim, DType::i8);
    for (int r = 0; r < num_rows; ++r) {
      halves[r] = scales_of(rows[r], head_dim)[first / kRowGroup].bits;
      if (first == 0) ahead.row(r, bytes);
      ahead.next_in_stream(rows[0] + num_rows * bytes + first * num_rows + r * kRowGroup, kRowGroup);
    }
    const F low_scales = f_load_as(reinterpret_cast<const Half*>(halves)),
            high_scales = f_load_as(reinterpret_cast<const Half*>(halves + 16));
    alignas(64) uint32_t pairs[G][kSubTile / 2];
    float units[G];
    for (int g = 0; g < G; ++g) {
      const float* w = weights + g * weight_stride;
      const F low = f_mul(f_load(w), low_scales), high = f_mul(f_load(w + 16), high_scales);
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

  // Of four vectors the sum of each.
  static __m128i sum_quads(const I* x) {
    const I a = _mm512_add_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    const I b = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    const I lanes = _mm512_add_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    const __m256i halved = _mm256_add_epi32(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64(lanes, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(halved), _mm256_extracti128_si256(halved, 1));
  }
};
