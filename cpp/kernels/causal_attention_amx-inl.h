// What attend_causal() multiplies with where the CPU has AMX: tiles of bf16, over keys and values packed as for
// AVX512-BF16, whose pairs are what a tile multiplies. Included inside a per-ISA namespace after tile_ops_amx-inl.h and
// causal_attention_bf16-inl.h. head_dim must be a multiple of 32.

// Tiles 0 to 3: sums [16 rows, 16 columns] of a block of 32 by 32; 4, 5: its rows, 32 deep; 6, 7: its columns, 16 pairs
// deep.
inline constexpr TileConfig kCausalTiles{.row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                                         .rows = {16, 16, 16, 16, 16, 16, 16, 16}};

struct TileProducts : PairProducts {
  static constexpr int kRows = 2 * kTileRows;
  static constexpr int kDepth = 32, kColumns = 32;
  static constexpr bool kConverts = true;  // rows at one distance from each other
  struct Session {
    Session() { _tile_loadconfig(&kCausalTiles); }
    ~Session() { _tile_release(); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
  };

  static const Bf16* query_row(const Bf16* query, int64_t head_dim, Bf16* copy) {
    std::memcpy(copy, query, static_cast<size_t>(head_dim) * sizeof(Bf16));
    return copy;
  }

  // scores[r] <- scale * queries[r] · keys, of `width` packed keys
  static void score(const Bf16* const* queries, const uint32_t* keys, int64_t width, int64_t head_dim, float scale,
                    float (*scores)[kCausalKeys]) {
    for (int64_t key = 0; key < width; key += kColumns) {
      const uint32_t* columns = keys + packed_items(key / kPanel * kPanel, head_dim) + key % kPanel;
      multiply(queries, columns, kPanel, head_dim, scores[0] + key, kCausalKeys);
      for (int r = 0; r < kRows; ++r) {
        for (int i = 0; i < kColumns; i += W) {
          float* to = scores[r] + key + i;
          f_store(to, f_mul(f_load(to), f_set1(scale)));
        }
      }
    }
  }

  // acc[r] <- acc[r] * factors[r] + weights[r] · values, of `width` packed values
  static void accumulate(const Bf16* const* weights, const float* factors, int num_rows, const uint32_t* values,
                         int64_t width, int64_t head_dim, float* acc) {
    alignas(64) float sums[kRows][kColumns];
    for (int64_t d = 0; d < head_dim; d += kColumns) {
      multiply(weights, values + d, head_dim, width, sums[0], kColumns);
      for (int r = 0; r < num_rows; ++r) {
        for (int i = 0; i < kColumns; i += W) {
          float* to = acc + r * head_dim + d + i;
          f_store(to, f_fma(f_load(to), f_set1(factors[r]), f_load(sums[r] + i)));
        }
      }
    }
  }

 private:
  // out [kRows, kColumns] <- Σ_p rows[r][2p .. 2p + 1] · columns[p * stride ..]
  [[gnu::always_inline]] static inline void multiply(const Bf16* const* rows, const uint32_t* columns, int64_t stride,
                                                     int64_t depth, float* out, int64_t out_stride) {
    const int64_t row_bytes = (rows[1] - rows[0]) * static_cast<int64_t>(sizeof(Bf16)), pair_bytes = stride * 4;
    tile_fence();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t d = 0; d < depth; d += kDepth) {
      const uint32_t* pairs = columns + d / 2 * stride;
      _tile_loadd(6, pairs, pair_bytes);
      _tile_loadd(4, rows[0] + d, row_bytes);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, pairs + kColumns / 2, pair_bytes);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, rows[kTileRows] + d, row_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    float* low = out + kTileRows * out_stride;
    _tile_stored(0, out, out_stride * 4);
    _tile_stored(1, out + kColumns / 2, out_stride * 4);
    _tile_stored(2, low, out_stride * 4);
    _tile_stored(3, low + kColumns / 2, out_stride * 4);
    tile_fence();
  }
};
