// The inner loop of products of many rows: a tile of sums that stays in registers. Included inside a per-ISA namespace
// after vector_math-inl.h.

inline constexpr int kProductRows = 6;
inline constexpr int kProductVectors = W == 8 ? 2 : 4;  // 12 of AVX2's 16 registers, 24 of 32
inline constexpr int kPanelColumns = kProductVectors * W;

// sums[r] += Σ_d rows[r][d] · columns[d * stride ..]
template <int V>
[[gnu::always_inline]] static inline void add_products(const float* const* rows, const float* columns, int64_t stride,
                                                       int64_t depth, F (&sums)[kProductRows][V]) {
  for (int64_t d = 0; d < depth; ++d) {
    F column[V];
    for (int v = 0; v < V; ++v) column[v] = f_load(columns + d * stride + v * W);
    for (int r = 0; r < kProductRows; ++r) {
      const F x = f_set1(rows[r][d]);
      for (int v = 0; v < V; ++v) sums[r][v] = f_fma(x, column[v], sums[r][v]);
    }
  }
}
