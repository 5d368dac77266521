// What TileOps for bf16 are made of with dot-product instructions (AVX512-BF16): two products and an add per lane and
// instruction. Included inside a per-ISA namespace after tile_ops-inl.h. Weights of values are rounded to bf16, as
// FlashAttention does. head_dim must be a multiple of 32.

struct PairOps {
  using Query = Bf16;
  using Session = NoSession;
  static constexpr int64_t block_stride(int64_t head_dim) { return kHeadBlock * head_dim; }

  static void pack_heads(const float* query, int group_size, int64_t head_dim, Query* packed) {
    pack_input(query, group_size * head_dim, packed);
  }
  static void pack_input(const float* x, int64_t n, Query* packed) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(packed + i),
                          reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(_mm512_loadu_ps(x + i))));
    }
    for (; i < n; ++i) packed[i] = from_float<Bf16>(x[i]);
  }

  template <int G, class Rows>
  static void score(const Query* query, int64_t head_dim, const Rows& rows, int num_rows, const Prefetch<Bf16>& ahead,
                    float scale, float* out, int64_t out_stride) {
    switch (head_dim / 32) {  // with a known width the queries stay in registers
      case 2:
        return score_rows<G, 2>(query, head_dim, rows, num_rows, ahead, scale, out, out_stride);
      case 4:
        return score_rows<G, 4>(query, head_dim, rows, num_rows, ahead, scale, out, out_stride);
      default:
        return score_rows<G, 0>(query, head_dim, rows, num_rows, ahead, scale, out, out_stride);
    }
  }

  template <int G, int R>
  static void project(const Query* x, int64_t width, const Bf16* rows, float* out, int64_t out_stride) {
    constexpr int U = G == 1 ? 4 : G == 2 ? 2 : 1;
    F sums[G * R];
    const int64_t whole = width / (U * 32) * (U * 32);
    for (int r = 0; r < R; ++r) {
      const Bf16* row = rows + r * width;
      F part[G * U];
      for (int i = 0; i < G * U; ++i) part[i] = f_zero();
      int64_t d = 0;
      for (; d < whole; d += U * 32) {
        for (int u = 0; u < U; ++u) {
          prefetch_l2(row + d + u * 32 + kProjectAhead / 2);
          const __m512bh w = load_32(row + d + u * 32);
          for (int g = 0; g < G; ++g) {
            part[g * U + u] = _mm512_dpbf16_ps(part[g * U + u], load_32(x + g * width + d + u * 32), w);
          }
        }
      }
      for (; d < width; d += 32) {
        const __mmask32 live = width - d >= 32 ? ~__mmask32{0} : (__mmask32{1} << (width - d)) - 1;
        const auto w = reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(live, row + d));
        for (int g = 0; g < G; ++g) {
          const auto q = reinterpret_cast<__m512bh>(_mm512_maskz_loadu_epi16(live, x + g * width + d));
          part[g * U] = _mm512_dpbf16_ps(part[g * U], q, w);
        }
      }
      for (int g = 0; g < G; ++g) {
        for (int u = 1; u < U; ++u) part[g * U] = f_add(part[g * U], part[g * U + u]);
        sums[g * R + r] = part[g * U];
      }
    }
    f_store_sums<G, R>(sums, 1.0f, out, out_stride);
  }

  template <int G, class Rows>
  static void accumulate(const float* weights, int64_t weight_stride, const Rows& rows, int num_rows,
                         const Prefetch<Bf16>& ahead, int64_t head_dim, float* acc, int64_t acc_stride) {
    // Row pairs (r, r + 1) interleave lane by lane; their weights sit side by side in one 32-bit word.
    alignas(64) uint32_t pairs[G][kSubTile / 2];
    for (int g = 0; g < G; ++g) {
      const float* w = weights + g * weight_stride;
      _mm512_store_si512(pairs[g],
                         reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_loadu_ps(w + 16), _mm512_loadu_ps(w))));
    }
    switch (head_dim / 32) {
      case 2:
        return accumulate_rows<G, 2>(pairs, rows, num_rows, ahead, acc, acc_stride);
      case 3:
        return accumulate_rows<G, 3>(pairs, rows, num_rows, ahead, acc, acc_stride);
      case 4:
        return accumulate_rows<G, 4>(pairs, rows, num_rows, ahead, acc, acc_stride);
      case 8:
        return accumulate_rows<G, 8>(pairs, rows, num_rows, ahead, acc, acc_stride);
      default:
        break;
    }
    for (int64_t d = 0; d < head_dim; d += 32) {
      accumulate_block<G, 1, true>(pairs, rows, num_rows, d == 0 ? ahead : Prefetch<Bf16>(), d, acc, acc_stride);
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

 protected:
  // A load the compiler may neither reorder nor fold into its use: memory must see a row's lines in ascending order.
  static __m512i load_in_order(const Bf16* p) {
    __m512i x = _mm512_loadu_si512(p);
    asm volatile("" : "+v"(x));
    return x;
  }
  // A stream's line to come, where the CPU's own prefetchers need help (see stream_ahead_bytes).
  template <class Rows>
  [[gnu::always_inline]] static void prefetch_stream(const Bf16* p) {
    if constexpr (std::is_same_v<Rows, ContiguousRows<Bf16>>) {
      if (stream_ahead_bytes != 0) prefetch_l2(reinterpret_cast<const char*>(p) + stream_ahead_bytes);
    }
  }
  static __m512bh load_32(const Bf16* p) { return reinterpret_cast<__m512bh>(_mm512_loadu_si512(p)); }

  // C vectors of 32 columns a row, or head_dim / 32 of them if C is 0. Rows are read strictly one after the other.
  template <int G, int C, class Rows>
  static void score_rows(const Query* query, int64_t head_dim, const Rows& rows, int num_rows,
                         const Prefetch<Bf16>& ahead, float scale, float* out, int64_t out_stride) {
    __m512bh held[G * C + 1];
    for (int i = 0; i < G * C; ++i) held[i] = load_32(query + i * 32);
    const int chunks = C != 0 ? C : static_cast<int>(head_dim / 32);
    for (int r = 0; r < num_rows; r += 4) {
      F quads[4];
      for (int j = 0; j < 4; ++j) {
        const int at = r + j < num_rows ? r + j : num_rows - 1;  // a short last group repeats its last row
        ahead.row(at, head_dim * 2);
        F sums[4];
        for (int g = 0; g < 4; ++g) sums[g] = f_zero();
        for (int c = 0; c < chunks; ++c) {
          prefetch_stream<Rows>(rows[at] + c * 32);
          const auto key = reinterpret_cast<__m512bh>(load_in_order(rows[at] + c * 32));
          for (int g = 0; g < G; ++g) {
            const __m512bh q = C != 0 ? held[g * C + c] : load_32(query + g * head_dim + c * 32);
            sums[g] = _mm512_dpbf16_ps(sums[g], q, key);
          }
        }
        quads[j] = f_sum_quads(sums);
      }
      store_scores<G>(quads, scale, out + r, out_stride, num_rows - r);
    }
  }

  // Element g of 128-bit lane i of quads[j] is a part of the score of head g and row j: add the lanes, transpose,
  // store.
  template <int G>
  static void store_scores(const F* quads, float scale, float* out, int64_t stride, int live_rows) {
    const F a =
        _mm512_add_ps(_mm512_shuffle_f32x4(quads[0], quads[1], 0x44), _mm512_shuffle_f32x4(quads[0], quads[1], 0xee));
    const F b =
        _mm512_add_ps(_mm512_shuffle_f32x4(quads[2], quads[3], 0x44), _mm512_shuffle_f32x4(quads[2], quads[3], 0xee));
    const F by_row = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    const F by_head = _mm512_mul_ps(_mm512_permutexvar_ps(order, by_row), _mm512_set1_ps(scale));
    const __mmask8 live = live_rows >= 4 ? 0xf : static_cast<__mmask8>((1 << live_rows) - 1);
    _mm_mask_storeu_ps(out, live, _mm512_castps512_ps128(by_head));
    if constexpr (G > 1) _mm_mask_storeu_ps(out + stride, live, _mm512_extractf32x4_ps(by_head, 1));
    if constexpr (G > 2) _mm_mask_storeu_ps(out + 2 * stride, live, _mm512_extractf32x4_ps(by_head, 2));
    if constexpr (G > 3) _mm_mask_storeu_ps(out + 3 * stride, live, _mm512_extractf32x4_ps(by_head, 3));
  }

  // Whole rows of V * 32 columns, kFirst in the first pass over them, as many heads at a time as the registers hold.
  // Every pass reads its rows in memory order: by column blocks instead, a stream from DRAM runs at half the speed.
  template <int G, int V, bool kFirst = true, class Rows>
  static void accumulate_rows(const uint32_t (*pairs)[kSubTile / 2], const Rows& rows, int num_rows,
                              const Prefetch<Bf16>& ahead, float* acc, int64_t acc_stride) {
    constexpr int kHeads = V >= 8 ? 1 : V >= 3 ? 2 : 4;
    if constexpr (G <= kHeads) {
      accumulate_block<G, V, kFirst>(pairs, rows, num_rows, ahead, 0, acc, acc_stride);
    } else {
      accumulate_block<kHeads, V, kFirst>(pairs, rows, num_rows, ahead, 0, acc, acc_stride);
      accumulate_rows<G - kHeads, V, false>(pairs + kHeads, rows, num_rows, Prefetch<Bf16>(), acc + kHeads * acc_stride,
                                            acc_stride);
    }
  }

  template <int G, int V, bool kFirst, class Rows>
  static void accumulate_block(const uint32_t (*pairs)[kSubTile / 2], const Rows& rows, int num_rows,
                               const Prefetch<Bf16>& ahead, int64_t d, float* acc, int64_t acc_stride) {
    F sums[G * V * 2];
    for (int g = 0; g < G; ++g) {
      for (int v = 0; v < 2 * V; ++v) sums[g * 2 * V + v] = f_load(acc + g * acc_stride + d + v * 16);
    }
    for (int r = 0; r < num_rows; r += 2) {
      const int odd = r + 1 < num_rows ? r + 1 : r;  // an odd last row pairs with itself at weight zero
      ahead.row(r, V * 64);
      ahead.row(odd, V * 64);
      for (int v = 0; kFirst && v < V; ++v) prefetch_stream<Rows>(rows[r] + d + v * 32);
      for (int v = 0; kFirst && v < V; ++v) prefetch_stream<Rows>(rows[odd] + d + v * 32);
      __m512i even_row[V], odd_row[V];
      for (int v = 0; v < V; ++v) even_row[v] = load_in_order(rows[r] + d + v * 32);
      for (int v = 0; v < V; ++v) odd_row[v] = load_in_order(rows[odd] + d + v * 32);
      __m512bh weight[G];
      for (int g = 0; g < G; ++g) {
        weight[g] = reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(pairs[g][r / 2])));
      }
      for (int v = 0; v < V; ++v) {
        const auto low = reinterpret_cast<__m512bh>(_mm512_unpacklo_epi16(even_row[v], odd_row[v]));
        const auto high = reinterpret_cast<__m512bh>(_mm512_unpackhi_epi16(even_row[v], odd_row[v]));
        for (int g = 0; g < G; ++g) {
          sums[(g * V + v) * 2] = _mm512_dpbf16_ps(sums[(g * V + v) * 2], weight[g], low);
          sums[(g * V + v) * 2 + 1] = _mm512_dpbf16_ps(sums[(g * V + v) * 2 + 1], weight[g], high);
        }
      }
    }
    for (int g = 0; g < G; ++g) {
      for (int v = 0; v < 2 * V; ++v) f_store(acc + g * acc_stride + d + v * 16, sums[g * 2 * V + v]);
    }
  }
};
