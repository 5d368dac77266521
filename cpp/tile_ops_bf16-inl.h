// TileOps for bf16 with dot-product instructions (AVX512-BF16): two products and an add per lane and instruction.
// Included inside a per-ISA namespace after tile_ops-inl.h. Weights are rounded to bf16 (as FlashAttention does) and
// the row sum adds the rounded weights, so the rounding does not bias the output. head_dim must be a multiple of 32.

template <>
struct TileOps<Bf16> {
  using Query = Bf16;
  static void pack_query(const float* query, int64_t n, Query* packed) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(packed + i),
                          reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(query + i))));
    }
    for (; i < n; ++i) packed[i] = from_float<Bf16>(query[i]);
  }

  template <int G>
  static void score(const Query* query, int64_t head_dim, const Bf16* const* rows, int num_rows,
                    const Bf16* const* next, float scale, float* out, int64_t out_stride) {
    const int64_t row_bytes = head_dim * 2;
    int r = 0;
    for (; r + 4 <= num_rows; r += 4) {
      if (next != nullptr) {
        for (int j = 0; j < 4; ++j) prefetch_row(next[r + j], row_bytes);
      }
      score_block<G, 4>(query, head_dim, rows + r, scale, out + r, out_stride);
    }
    for (; r < num_rows; ++r) {
      if (next != nullptr) prefetch_row(next[r], row_bytes);
      score_block<G, 1>(query, head_dim, rows + r, scale, out + r, out_stride);
    }
  }

  template <int G>
  static void accumulate(float* weights, int64_t weight_stride, const Bf16* const* rows, int num_rows,
                         const Bf16* const* next, int64_t head_dim, float* acc, int64_t acc_stride) {
    // Row pairs (r, r + 1) interleave lane by lane; their weights sit side by side in one 32-bit word.
    alignas(64) uint32_t pairs[G][kMaxTile / 2];
    for (int g = 0; g < G; ++g) {
      for (int r = 0; r < num_rows; r += 32) {
        const float* w = weights + g * weight_stride + r;
        _mm512_store_si512(&pairs[g][r / 2], reinterpret_cast<__m512i>(
                                                 _mm512_cvtne2ps_pbh(_mm512_loadu_ps(w + 16), _mm512_loadu_ps(w))));
      }
    }
    int64_t d = 0;
    for (; d + 64 <= head_dim; d += 64) {
      accumulate_block<G, 2>(pairs, rows, num_rows, d == 0 ? next : nullptr, head_dim * 2, d, acc, acc_stride);
    }
    for (; d < head_dim; d += 32) {
      accumulate_block<G, 1>(pairs, rows, num_rows, d == 0 ? next : nullptr, head_dim * 2, d, acc, acc_stride);
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

  static F weight_as_used(F weight) {
    const __m256i rounded = reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(weight));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16));
  }

 private:
  static __m512bh load_32(const Bf16* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }

  template <int G, int R>
  static void score_block(const Query* query, int64_t head_dim, const Bf16* const* rows, float scale, float* out,
                          int64_t out_stride) {
    F sums[R * G];
    for (int i = 0; i < R * G; ++i) sums[i] = f_zero();
    int64_t d = 0;
    for (; d + 32 <= head_dim; d += 32) {
      __m512bh key[R];
      for (int r = 0; r < R; ++r) key[r] = load_32(rows[r] + d);
      for (int g = 0; g < G; ++g) {
        const __m512bh q = load_32(query + g * head_dim + d);
        for (int r = 0; r < R; ++r) sums[g * R + r] = _mm512_dpbf16_ps(sums[g * R + r], q, key[r]);
      }
    }
    if (d < head_dim) {  // linear layers whose width is no multiple of 32
      const __mmask32 live = (__mmask32{1} << (head_dim - d)) - 1;
      for (int g = 0; g < G; ++g) {
        const auto q = reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(live, query + g * head_dim + d));
        for (int r = 0; r < R; ++r) {
          const auto key = reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(live, rows[r] + d));
          sums[g * R + r] = _mm512_dpbf16_ps(sums[g * R + r], q, key);
        }
      }
    }
    float totals[R * G];
    f_sum_lanes<R * G>(sums, totals);
    for (int g = 0; g < G; ++g) {
      for (int r = 0; r < R; ++r) out[g * out_stride + r] = totals[g * R + r] * scale;
    }
  }

  template <int G, int V>
  static void accumulate_block(const uint32_t (*pairs)[kMaxTile / 2], const Bf16* const* rows, int num_rows,
                               const Bf16* const* next, int64_t row_bytes, int64_t d, float* acc, int64_t acc_stride) {
    F sums[G * V * 2];
    for (int g = 0; g < G; ++g) {
      for (int v = 0; v < 2 * V; ++v) sums[g * 2 * V + v] = f_load(acc + g * acc_stride + d + v * 16);
    }
    for (int r = 0; r < num_rows; r += 2) {
      const int odd = r + 1 < num_rows ? r + 1 : r;  // an odd last row pairs with itself at weight zero
      if (next != nullptr) {
        prefetch_row(next[r], row_bytes);
        prefetch_row(next[odd], row_bytes);
      }
      __m512bh low[V], high[V];
      for (int v = 0; v < V; ++v) {
        const __m512i a = _mm512_loadu_si512(rows[r] + d + v * 32);
        const __m512i b = _mm512_loadu_si512(rows[odd] + d + v * 32);
        low[v] = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(a, b));
        high[v] = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(a, b));
      }
      for (int g = 0; g < G; ++g) {
        const auto w = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(pairs[g][r / 2])));
        for (int v = 0; v < V; ++v) {
          sums[(g * V + v) * 2] = _mm512_dpbf16_ps(sums[(g * V + v) * 2], w, low[v]);
          sums[(g * V + v) * 2 + 1] = _mm512_dpbf16_ps(sums[(g * V + v) * 2 + 1], w, high[v]);
        }
      }
    }
    for (int g = 0; g < G; ++g) {
      for (int v = 0; v < 2 * V; ++v) f_store(acc + g * acc_stride + d + v * 16, sums[g * 2 * V + v]);
    }
  }
};
