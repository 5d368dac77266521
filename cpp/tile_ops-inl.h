// The two inner loops of attention over a tile of rows, for any dtype that f_load_as reads:
// score (query · key rows) and accumulate (weights · value rows). Included inside a per-ISA namespace.
// A Bf16 specialisation with dot-product instructions replaces them in tile_ops_bf16-inl.h.

inline constexpr int kMaxTile = 64;   // rows of one tile
inline constexpr int kHeadBlock = 4;  // query heads computed together; each row is loaded once for the block

template <class T>
struct TileOps {
  // What score() multiplies with: the queries as they are.
  using Query = float;
  static void pack_query(const float* query, int64_t n, Query* packed) {
    for (int64_t i = 0; i < n; ++i) packed[i] = query[i];
  }

  // out[g * out_stride + r] = scale * <query[g], rows[r]>; after each row, prefetch `next[r]`.
  template <int G>
  static void score(const Query* query, int64_t head_dim, const T* const* rows, int num_rows, const T* const* next,
                    float scale, float* out, int64_t out_stride) {
    const int64_t row_bytes = head_dim * static_cast<int64_t>(sizeof(T));
    int r = 0;
    for (; r + kRowTile <= num_rows; r += kRowTile) {
      if (next != nullptr) {
        for (int j = 0; j < kRowTile; ++j) prefetch_row(next[r + j], row_bytes);
      }
      score_block<G, kRowTile>(query, head_dim, rows + r, scale, out + r, out_stride);
    }
    for (; r < num_rows; ++r) {
      if (next != nullptr) prefetch_row(next[r], row_bytes);
      score_block<G, 1>(query, head_dim, rows + r, scale, out + r, out_stride);
    }
  }

  // acc[g * acc_stride + d] += Σ_r weights[g * weight_stride + r] * rows[r][d]
  template <int G>
  static void accumulate(float* weights, int64_t weight_stride, const T* const* rows, int num_rows,
                         const T* const* next, int64_t head_dim, float* acc, int64_t acc_stride) {
    const int64_t row_bytes = head_dim * static_cast<int64_t>(sizeof(T));
    int64_t d = 0;
    for (; d + kValueTile * W <= head_dim; d += kValueTile * W) {
      accumulate_block<G, kValueTile>(weights, weight_stride, rows, num_rows, d == 0 ? next : nullptr, row_bytes, d,
                                      acc, acc_stride);
    }
    for (; d < head_dim; d += W) {
      accumulate_block<G, 1>(weights, weight_stride, rows, num_rows, d == 0 ? next : nullptr, row_bytes, d, acc,
                             acc_stride);
    }
  }

  // accumulate() may keep acc in an order of its own; this restores [group, head_dim].
  static void finish(float*, int, int64_t) {}
  // The value of a weight as accumulate() uses it, so that the row sum matches what was added up.
  static F weight_as_used(F weight) { return weight; }

 private:
  template <int G, int R>
  static void score_block(const Query* query, int64_t head_dim, const T* const* rows, float scale, float* out,
                          int64_t out_stride) {
    F sums[R * G];
    for (int i = 0; i < R * G; ++i) sums[i] = f_zero();
    for (int64_t d = 0; d < head_dim; d += W) {
      F key[R];
      for (int r = 0; r < R; ++r) key[r] = f_load_as(rows[r] + d);
      for (int g = 0; g < G; ++g) {
        const F q = f_load(query + g * head_dim + d);
        for (int r = 0; r < R; ++r) sums[g * R + r] = f_fma(q, key[r], sums[g * R + r]);
      }
    }
    float totals[R * G];
    f_sum_lanes<R * G>(sums, totals);
    for (int g = 0; g < G; ++g) {
      for (int r = 0; r < R; ++r) out[g * out_stride + r] = totals[g * R + r] * scale;
    }
  }

  template <int G, int V>
  static void accumulate_block(const float* weights, int64_t weight_stride, const T* const* rows, int num_rows,
                               const T* const* next, int64_t row_bytes, int64_t d, float* acc, int64_t acc_stride) {
    F sums[G * V];
    for (int g = 0; g < G; ++g) {
      for (int v = 0; v < V; ++v) sums[g * V + v] = f_load(acc + g * acc_stride + d + v * W);
    }
    for (int r = 0; r < num_rows; ++r) {
      if (next != nullptr) prefetch_row(next[r], row_bytes);
      F value[V];
      for (int v = 0; v < V; ++v) value[v] = f_load_as(rows[r] + d + v * W);
      for (int g = 0; g < G; ++g) {
        const F w = f_set1(weights[g * weight_stride + r]);
        for (int v = 0; v < V; ++v) sums[g * V + v] = f_fma(w, value[v], sums[g * V + v]);
      }
    }
    for (int g = 0; g < G; ++g) {
      for (int v = 0; v < V; ++v) f_store(acc + g * acc_stride + d + v * W, sums[g * V + v]);
    }
  }
};
