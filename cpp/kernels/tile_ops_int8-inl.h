// What TileOps of int8 rows (see Int8) are made of. Keys are multiplied as whole numbers with a query of 15 bits;
// values become floats in registers. Included inside a per-ISA namespace after tile_ops-inl.h.

static inline const Half* scales_of(const Int8* row, int64_t head_dim) {
  return reinterpret_cast<const Half*>(row + num_codes(head_dim));
}

template <>
inline F f_exp_fast<Int8>(F x) {
  return f_exp_fast<Bf16>(x);
}

struct Int8Ops {
  using Session = NoSession;
  using Query = int16_t;
  static constexpr int64_t kMostGroups = kMaxHeadDim / kRowGroup;
  // Floats, behind the heads of a block; the next one begins at a multiple of 64 bytes.
  static constexpr int64_t kScaleItems = (kHeadBlock * kMostGroups * 2 + 31) & -32;
  static constexpr int64_t block_stride(int64_t head_dim) { return kHeadBlock * num_codes(head_dim) + kScaleItems; }

  // To 15 bits: whole numbers take less than half of the time that floats do. NaN where a query is not finite.
  static void pack_heads(const float* query, int group_size, int64_t head_dim, Query* packed) {
    const int64_t width = num_codes(head_dim);
    for (int g = 0; g < group_size; ++g) {
      Query* block = packed + g / kHeadBlock * block_stride(head_dim);
      for (int64_t first = 0; first < head_dim; first += kRowGroup) {
        const float* x = query + g * head_dim + first;
        const int64_t n = head_dim - first < kRowGroup ? head_dim - first : kRowGroup;
        const float scale = top_of(x, n) / 32767.0f;
        float codes[kRowGroup] = {};
        const F inverse = f_set1(1.0f / scale);
        for (int64_t d = 0; scale > kSmallestInput && d < n; d += W) {
          f_store(codes + d, f_round(f_mul(f_load(x + d), inverse)));
        }
        Query* to = block + g % kHeadBlock * width + first;
        const int64_t padded = num_codes(n);
        for (int64_t d = 0; d < padded; ++d) to[d] = static_cast<Query>(static_cast<int32_t>(codes[d]));
        std::memcpy(block + kHeadBlock * width + (g % kHeadBlock * kMostGroups + first / kRowGroup) * 2, &scale,
                    sizeof scale);
      }
    }
  }

  // Of the numbers of a group the largest magnitude; NaN if one is not finite.
  static float top_of(const float* x, int64_t n) {
    F top = f_zero(), zeros = f_zero();
    for (int64_t d = 0; d < n; d += W) {
      const F v = f_load(x + d);
      top = f_max(f_max(v, f_sub(f_zero(), v)), top);
      zeros = f_fma(v, f_zero(), zeros);
    }
    return f_max_lane(top) + f_sum(zeros);
  }

  template <int G, class Rows>
  static void score(const Query* query, int64_t head_dim, const Rows& rows, int num_rows, const Prefetch<Int8>& ahead,
                    float scale, float* out, int64_t out_stride) {
    if (head_dim == 64) return score_all<G, 64>(query, head_dim, rows, num_rows, ahead, scale, out, out_stride);
    if (head_dim == 128) return score_all<G, 128>(query, head_dim, rows, num_rows, ahead, scale, out, out_stride);
    score_all<G, 0>(query, head_dim, rows, num_rows, ahead, scale, out, out_stride);
  }

  template <int G, class Rows>
  static void accumulate(const float* weights, int64_t weight_stride, const Rows& rows, int num_rows,
                         const Prefetch<Int8>& ahead, int64_t head_dim, float* acc, int64_t acc_stride) {
    constexpr bool kWhole = G * kGroupVectors <= kAccumulators;  // one pass over whole groups
    constexpr int kHeads = kWhole || G < kValueHeads ? G : kValueHeads;
    constexpr int kTiles = kWhole ? kGroupVectors : kValueTiles[kHeads - 1];
    constexpr int V = kTiles < kGroupVectors ? kTiles : kGroupVectors;
    int64_t d = 0;
    for (; d + V * W <= head_dim; d += V * W) {
      accumulate_block<kHeads, V>(weights, weight_stride, rows, num_rows, ahead, d, head_dim, acc, acc_stride);
    }
    for (; d < head_dim; d += W) {
      accumulate_block<kHeads, 1>(weights, weight_stride, rows, num_rows, ahead, d, head_dim, acc, acc_stride);
    }
    if constexpr (G > kHeads) {
      accumulate<G - kHeads>(weights + kHeads * weight_stride, weight_stride, rows, num_rows, Prefetch<Int8>(),
                             head_dim, acc + kHeads * acc_stride, acc_stride);
    }
  }

  static void finish(float*, int, int64_t) {}

 protected:
  static constexpr int kGroupVectors = static_cast<int>(kRowGroup) / W;
  static constexpr int kAccumulators = kValueTiles[kValueHeads - 1] * kValueHeads;

  // D: head_dim, where the loop over it is to be unrolled, or 0.
  template <int G, int D, class Rows>
  static void score_all(const Query* query, int64_t head_dim, const Rows& rows, int num_rows,
                        const Prefetch<Int8>& ahead, float scale, float* out, int64_t out_stride) {
    if (D > 0) head_dim = D;
    int r = 0;
    for (; r + kRowTile <= num_rows; r += kRowTile) {
      score_rows<G, kRowTile>(query, head_dim, rows.from(r), ahead.from(r), scale, out + r, out_stride);
    }
    for (; r < num_rows; ++r)
      score_rows<G, 1>(query, head_dim, rows.from(r), ahead.from(r), scale, out + r, out_stride);
  }

  template <int G, int R, class Rows>
  [[gnu::always_inline]] static inline void score_rows(const Query* query, int64_t head_dim, const Rows& rows,
                                                       const Prefetch<Int8>& ahead, float scale, float* out,
                                                       int64_t out_stride) {
    constexpr int64_t kPairs = W == 1 ? 1 : 2 * W;  // of whole numbers that are loaded at once
    const int64_t width = num_codes(head_dim);
    float scales_of_query[kHeadBlock * kMostGroups];
    std::memcpy(scales_of_query, query + kHeadBlock * width, sizeof scales_of_query);
    F sums[R * G];
    for (int r = 0; r < R; ++r) {
      ahead.row(r, row_bytes(head_dim, DType::i8));
      ahead.next_in_stream(rows[r] + stream_ahead_bytes, head_dim);
      const Half* scales = scales_of(rows[r], head_dim);
      for (int g = 0; g < G; ++g) sums[g * R + r] = f_zero();
      for (int64_t first = 0; first < head_dim; first += kRowGroup) {
        I part[G];
        for (int g = 0; g < G; ++g) part[g] = i_zero();
        const int64_t stop = first + kRowGroup < width ? first + kRowGroup : width;
        for (int64_t d = first; d < stop; d += kPairs) {
          const auto key = i_load_pairs(&rows[r][d].code);
          for (int g = 0; g < G; ++g) part[g] = i_add_products(part[g], key, query + g * width + d);
        }
        const F of_group = f_set1_as(scales + first / kRowGroup);
        for (int g = 0; g < G; ++g) {
          const F factor = f_mul(of_group, f_set1(scales_of_query[g * kMostGroups + first / kRowGroup]));
          sums[g * R + r] = f_fma(f_from_ints(part[g]), factor, sums[g * R + r]);
        }
      }
    }
    f_store_sums<G, R>(sums, scale, out, out_stride);
  }

  template <int G, int V, class Rows>
  static void accumulate_block(const float* weights, int64_t weight_stride, const Rows& rows, int num_rows,
                               const Prefetch<Int8>& ahead, int64_t d, int64_t head_dim, float* acc,
                               int64_t acc_stride) {
    F sums[G * V];
    for (int g = 0; g < G; ++g) {
      for (int v = 0; v < V; ++v) sums[g * V + v] = f_load(acc + g * acc_stride + d + v * W);
    }
    const int64_t bytes = row_bytes(head_dim, DType::i8);
    for (int r = 0; r < num_rows; ++r) {
      if (d == 0) ahead.row(r, bytes);
      ahead.next_in_stream(rows[0] + num_rows * bytes + d * num_rows + r * V * W, V * W);
      const F of_group = f_set1_as(scales_of(rows[r], head_dim) + d / kRowGroup);
      F value[V];
      for (int v = 0; v < V; ++v) value[v] = f_load_as(rows[r] + d + v * W);
      for (int g = 0; g < G; ++g) {
        const F w = f_mul(f_set1(weights[g * weight_stride + r]), of_group);
        for (int v = 0; v < V; ++v) sums[g * V + v] = f_fma(w, value[v], sums[g * V + v]);
      }
    }
    for (int g = 0; g < G; ++g) {
      for (int v = 0; v < V; ++v) f_store(acc + g * acc_stride + d + v * W, sums[g * V + v]);
    }
  }
};
