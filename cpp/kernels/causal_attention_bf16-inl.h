// What attend_causal() multiplies with where the CPU has dot products of bf16 (AVX512-BF16): pairs of neighbouring
// numbers in one word. Softmax weights are rounded to bf16, as FlashAttention does. Included inside a per-ISA namespace
// after causal_attention-inl.h. head_dim must be a multiple of 32.

struct PairProducts : RegisterProducts<PairProducts, Bf16, uint32_t> {
  using Item = Bf16;
  using Weight = Bf16;
  using Packed = uint32_t;
  static constexpr int kVectors = kProductVectors;
  static constexpr bool kConverts = false;
  static int64_t packed_items(int64_t num_keys, int64_t head_dim) { return num_keys * head_dim / 2; }

  // Words [n / kPanel][head_dim / 2][kPanel keys], each two neighbouring columns of a key; n rounded up, with zeros.
  static void pack_keys(const Bf16* keys, int64_t row, int64_t n, int64_t head_dim, uint32_t* packed) {
    for (int64_t first = 0; first < n; first += 16) {
      uint32_t* panel = packed + first / kPanel * kPanel * (head_dim / 2) + first % kPanel;
      for (int64_t d = 0; d < head_dim; d += 32) {
        __m512i block[16];
        for (int i = 0; i < 16; ++i) {
          block[i] = first + i < n ? _mm512_loadu_si512(keys + (first + i) * row + d) : _mm512_setzero_si512();
        }
        transpose(block);
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(panel + (d / 2 + i) * kPanel, block[i]);
      }
    }
  }

  // Words [n / 2][head_dim], each a column of two neighbouring values; n rounded up to whole panels, with zeros.
  static void pack_values(const Bf16* values, int64_t row, int64_t n, int64_t head_dim, uint32_t* packed) {
    for (int64_t t = 0; t < n; t += 2) {
      for (int64_t d = 0; d < head_dim; d += 16) {
        const auto half = [&](int64_t of) {
          return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(values + of * row + d)));
        };
        const __m512i odd = t + 1 < n ? _mm512_slli_epi32(half(t + 1), 16) : _mm512_setzero_si512();
        _mm512_storeu_si512(packed + t / 2 * head_dim + d, _mm512_or_si512(half(t), odd));
      }
    }
    for (int64_t t = (n + 1) / 2; t < (n + kPanel - 1) / kPanel * (kPanel / 2); ++t) {
      for (int64_t d = 0; d < head_dim; d += 16) _mm512_storeu_si512(packed + t * head_dim + d, _mm512_setzero_si512());
    }
  }

  static const Bf16* query_row(const Bf16* query, int64_t, Bf16*) { return query; }

  static void store_weights(Bf16* to, F low, F high) {
    _mm512_storeu_si512(to, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
  }

  // sums[r] += Σ_p rows[r][2p .. 2p + 1] · columns[p * stride ..]
  template <int V>
  [[gnu::always_inline]] static inline void add(const Bf16* const* rows, const uint32_t* columns, int64_t stride,
                                                int64_t depth, F (&sums)[kProductRows][V]) {
    for (int64_t p = 0; p < depth / 2; ++p) {
      __m512bh column[V];
      for (int v = 0; v < V; ++v) {
        column[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(columns + p * stride + v * 16));
      }
      for (int r = 0; r < kProductRows; ++r) {
        int pair;
        __builtin_memcpy(&pair, rows[r] + 2 * p, sizeof pair);
        const auto factor = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
        for (int v = 0; v < V; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], factor, column[v]);
      }
    }
  }
};
