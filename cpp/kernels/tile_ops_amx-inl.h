// TileOps for bf16 with AMX, for blocks of four query heads; blocks of fewer go the way of AVX512-BF16. Rows of keys
// and values may be anywhere, so 16 or 32 of them are copied side by side first: that costs less than half of what the
// dot products of vectors do. Included inside a namespace after tile_ops_bf16-inl.h.

inline constexpr int kTileRows = 16;

// What a tile configuration is in memory: palette, first row, and of each tile its bytes a row and its rows.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// Tiles 0, 1: 16 keys, or 16 pairs of values, of 32 columns; 2: queries, 4, 5: scores; 6: weights, 3, 7: sums of
// values.
inline constexpr TileConfig kHeadTiles{.row_bytes = {64, 64, 16, 64, 16, 16, 64, 64},
                                       .rows = {16, 16, 16, 4, 16, 16, 4, 4}};

// GCC's tile loads and stores do not tell the compiler what they do to memory.
[[gnu::always_inline]] static inline void tile_fence() { asm volatile("" ::: "memory"); }

template <>
struct TileOps<Bf16> : PairOps {
  struct Session {
    Session() { _tile_loadconfig(&kHeadTiles); }
    ~Session() { _tile_release(); }  // tiles in use are 8 KB more to save at every context switch
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  // A block of four heads is [pair of columns][head], which is how a tile multiplies.
  static void pack_heads(const float* query, int group_size, int64_t head_dim, Query* packed) {
    const int whole = group_size / kHeadBlock * kHeadBlock;
    alignas(64) Bf16 plain[kHeadBlock * kMaxHeadDim];
    for (int g = 0; g < whole; g += kHeadBlock) {
      pack_input(query + g * head_dim, kHeadBlock * head_dim, plain);
      Bf16* block = packed + g * head_dim;
      for (int64_t d = 0; d < head_dim; d += 2) {
        for (int h = 0; h < kHeadBlock; ++h, block += 2) {
          block[0] = plain[h * head_dim + d];
          block[1] = plain[h * head_dim + d + 1];
        }
      }
    }
    if (whole < group_size) {
      pack_input(query + whole * head_dim, (group_size - whole) * head_dim, packed + whole * head_dim);
    }
  }

  template <int G, class Rows>
  static void score(const Query* query, int64_t head_dim, const Rows& rows, int num_rows, const Prefetch<Bf16>& ahead,
                    float scale, float* out, int64_t out_stride) {
    if constexpr (G < kHeadBlock) {
      return PairOps::score<G>(query, head_dim, rows, num_rows, ahead, scale, out, out_stride);
    } else {
      alignas(64) Bf16 keys[2 * kTileRows * kMaxHeadDim];
      alignas(64) float sums[2 * kTileRows * kHeadBlock];
      for (int r = 0; r < num_rows; r += 2 * kTileRows) {
        const bool two = num_rows - r > kTileRows;
        for (int i = 0; i < (two ? 2 : 1) * kTileRows; ++i) {
          const int at = r + i < num_rows ? r + i : num_rows - 1;  // a short last tile repeats its last row
          ahead.row(at, head_dim * 2);
          for (int64_t d = 0; d < head_dim; d += 32) {
            prefetch_stream<Rows>(rows[at] + d);
            _mm512_store_si512(keys + i * head_dim + d, load_in_order(rows[at] + d));
          }
        }
        tile_fence();
        _tile_zero(4);
        _tile_zero(5);
        for (int64_t d = 0; d < head_dim; d += 32) {
          _tile_loadd(2, query + d * kHeadBlock, 16);
          _tile_loadd(0, keys + d, head_dim * 2);
          _tile_dpbf16ps(4, 0, 2);
          if (!two) continue;
          _tile_loadd(1, keys + kTileRows * head_dim + d, head_dim * 2);
          _tile_dpbf16ps(5, 1, 2);
        }
        _tile_stored(4, sums, 16);
        if (two) _tile_stored(5, sums + kTileRows * kHeadBlock, 16);
        tile_fence();
        store_by_head(sums, scale, out + r, out_stride, num_rows - r);
        if (two) store_by_head(sums + 64, scale, out + r + kTileRows, out_stride, num_rows - r - kTileRows);
      }
    }
  }

  template <int G, class Rows>
  static void accumulate(const float* weights, int64_t weight_stride, const Rows& rows, int num_rows,
                         const Prefetch<Bf16>& ahead, int64_t head_dim, float* acc, int64_t acc_stride) {
    if constexpr (G < kHeadBlock) {
      return PairOps::accumulate<G>(weights, weight_stride, rows, num_rows, ahead, head_dim, acc, acc_stride);
    } else {
      static_assert(kSubTile == 32);
      alignas(64) Bf16 by_head[kHeadBlock * kSubTile];
      // Of 16 columns each: pairs of rows, column by column.
      alignas(64) Bf16 values[kMaxHeadDim / 16][kTileRows][32];
      for (int g = 0; g < kHeadBlock; ++g) {
        const float* w = weights + g * weight_stride;
        _mm512_store_si512(by_head + g * kSubTile,
                           reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_loadu_ps(w + 16), _mm512_loadu_ps(w))));
      }
      for (int r = 0; r < kSubTile; r += 2) {
        const int even = r < num_rows ? r : num_rows - 1;  // rows beyond the last have a weight of zero
        const int odd = r + 1 < num_rows ? r + 1 : num_rows - 1;
        ahead.row(even, head_dim * 2);
        ahead.row(odd, head_dim * 2);
        for (int64_t d = 0; d < head_dim; d += 32) {
          prefetch_stream<Rows>(rows[even] + d);
          prefetch_stream<Rows>(rows[odd] + d);
          const __m512i a = load_in_order(rows[even] + d);
          const __m512i b = load_in_order(rows[odd] + d);
          _mm512_store_si512(values[d / 16][r / 2], _mm512_unpacklo_epi16(a, b));
          _mm512_store_si512(values[d / 16 + 1][r / 2], _mm512_unpackhi_epi16(a, b));
        }
      }
      tile_fence();
      _tile_loadd(6, by_head, 64);
      for (int64_t d = 0; d < head_dim; d += 32) {
        _tile_loadd(3, acc + d, acc_stride * 4);
        _tile_loadd(0, values[d / 16], 64);
        _tile_dpbf16ps(3, 6, 0);
        _tile_stored(3, acc + d, acc_stride * 4);
        _tile_loadd(7, acc + d + 16, acc_stride * 4);
        _tile_loadd(1, values[d / 16 + 1], 64);
        _tile_dpbf16ps(7, 6, 1);
        _tile_stored(7, acc + d + 16, acc_stride * 4);
      }
      tile_fence();
    }
  }

 private:
  // sums [16 rows, 4 heads] -> out [4 heads, live rows]
  static void store_by_head(const float* sums, float scale, float* out, int64_t stride, int live_rows) {
    const F factor = _mm512_set1_ps(scale);
    F x[4];
    for (int i = 0; i < 4; ++i) x[i] = _mm512_load_ps(sums + i * 16);
    const __mmask16 live = live_rows >= kTileRows ? 0xffff : static_cast<__mmask16>((1 << live_rows) - 1);
    for (int g = 0; g < kHeadBlock; ++g) {
      const __m512i first = _mm512_add_epi32(
          _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28), _mm512_set1_epi32(g));
      const F low = _mm512_permutex2var_ps(x[0], first, x[1]);
      const F high = _mm512_permutex2var_ps(x[2], first, x[3]);
      const F by_row = _mm512_mask_blend_ps(0xff00, low, high);
      _mm512_mask_storeu_ps(out + g * stride, live, _mm512_mul_ps(by_row, factor));
    }
  }
};
