// What ranking-inl.h's WordBoxes do, in dot products of bytes: half of the time. Included inside a namespace whose
// target has AVX-512 and VNNI, after avx512_primitives-inl.h.

struct ByteBoxes {
  // Of each query, its numbers and its squares: 128 high + low. Zeros beyond head_dim.
  alignas(64) int8_t numbers[kMaxGroupSize][kMaxHeadDim];
  alignas(64) int8_t high[kMaxGroupSize][kMaxHeadDim];
  alignas(64) int8_t low[kMaxGroupSize][kMaxHeadDim];
  int corrections[kMaxGroupSize];  // of centres that count from 0 to 15, not from -8 to 7

  void set(int g, const int16_t* rounded, const int16_t* squares) {
    int sum = 0;
    for (int d = 0; d < kMaxHeadDim; ++d) {
      numbers[g][d] = static_cast<int8_t>(rounded[d]);
      high[g][d] = static_cast<int8_t>(squares[d] >> 7);
      low[g][d] = static_cast<int8_t>(squares[d] & 127);
      sum += rounded[d];
    }
    corrections[g] = -8 * sum;
  }

  void dot(int g, int num_queries, int head_dim, const int8_t* rows, int n, const int8_t* ahead, float* sums,
           float* widths) const {
    if (num_queries == 4) dot_rows<4>(g, head_dim, rows, n, ahead, sums, widths);
    if (num_queries == 3) dot_rows<3>(g, head_dim, rows, n, ahead, sums, widths);
    if (num_queries == 2) dot_rows<2>(g, head_dim, rows, n, ahead, sums, widths);
    if (num_queries == 1) dot_rows<1>(g, head_dim, rows, n, ahead, sums, widths);
  }

 private:
  template <int G>
  void dot_rows(int g, int head_dim, const int8_t* rows, int n, const int8_t* ahead, float* sums, float* widths) const {
    if (head_dim == 64) return dot_rows_of<G, 64>(g, head_dim, rows, n, ahead, sums, widths);
    if (head_dim == 128) return dot_rows_of<G, 128>(g, head_dim, rows, n, ahead, sums, widths);
    dot_rows_of<G, 0>(g, head_dim, rows, n, ahead, sums, widths);
  }

  template <int G, int D>
  void dot_rows_of(int g, int head_dim, const int8_t* rows, int n, const int8_t* ahead, float* sums,
                   float* widths) const {
    int r = 0;
    for (; r + 4 <= n; r += 4) {
      for (int i = 0; i < 4 * head_dim; i += 64) prefetch_l1(ahead + r * head_dim + i);
      dot_tile<G, D>(g, head_dim, rows + r * head_dim, sums + r, widths + r);
    }
    if (r < n) {
      int8_t last[4 * kMaxHeadDim] = {};
      std::memcpy(last, rows + r * head_dim, static_cast<size_t>((n - r) * head_dim));
      dot_tile<G, 0>(g, head_dim, last, sums + r, widths + r);
    }
  }

  static __m512i load(const int8_t* row, int left) {
    const __mmask64 there = left >= 64 ? ~__mmask64{0} : (__mmask64{1} << left) - 1;
    return _mm512_maskz_loadu_epi8(there, row);
  }

  static inline __m512i add_lanes(__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
  }

  // sums[h * kRankTile + r] = the sum of the lanes of x[h * 4 + r]: 16 vectors reduce together.
  template <int G>
  [[gnu::always_inline]] static inline void store_sums(const __m512i* x, float* sums) {
    __m512i pairs[8], quads[4];
    for (int i = 0; i < 8; ++i) {
      const __m512i a = 2 * i < 4 * G ? x[2 * i] : _mm512_setzero_si512();
      const __m512i b = 2 * i < 4 * G ? x[2 * i + 1] : _mm512_setzero_si512();
      pairs[i] = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    }
    for (int i = 0; i < 4; ++i) {
      quads[i] = _mm512_add_epi32(_mm512_unpacklo_epi64(pairs[2 * i], pairs[2 * i + 1]),
                                  _mm512_unpackhi_epi64(pairs[2 * i], pairs[2 * i + 1]));
    }
    const F all = f_from_ints(add_lanes(add_lanes(quads[0], quads[1]), add_lanes(quads[2], quads[3])));
    _mm_storeu_ps(sums, _mm512_castps512_ps128(all));
    if (G > 1) _mm_storeu_ps(sums + kRankTile, _mm512_extractf32x4_ps(all, 1));
    if (G > 2) _mm_storeu_ps(sums + 2 * kRankTile, _mm512_extractf32x4_ps(all, 2));
    if (G > 3) _mm_storeu_ps(sums + 3 * kRankTile, _mm512_extractf32x4_ps(all, 3));
  }

  // products[h * 4 + r] += of a query's digits and the squares of the widths of four rows.
  template <int G, int D>
  [[gnu::always_inline]] static inline void add_squares(const int8_t (*digits)[kMaxHeadDim], int head_dim,
                                                        const int8_t* rows, __m512i* products) {
    if (D > 0) head_dim = D;
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i squares =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 9, 16, 25, 36, 49, 64, 81, 100, 121, static_cast<char>(144),
                                             static_cast<char>(169), static_cast<char>(196), static_cast<char>(225)));
#pragma GCC unroll 2
    for (int d = 0; d < head_dim; d += 64) {
      for (int r = 0; r < 4; ++r) {
        __m512i row = load(rows + r * head_dim + d, head_dim - d);
        row = _mm512_shuffle_epi8(squares, _mm512_and_si512(_mm512_srli_epi16(row, 4), nibble));
        for (int h = 0; h < G; ++h) {
          products[4 * h + r] = _mm512_dpbusd_epi32(products[4 * h + r], row, _mm512_load_si512(digits[h] + d));
        }
      }
    }
  }

  // Four rows. D: head_dim if it is known.
  template <int G, int D>
  void dot_tile(int g, int head_dim, const int8_t* rows, float* sums, float* widths) const {
    if (D > 0) head_dim = D;
    const __m512i nibble = _mm512_set1_epi8(15);
    __m512i products[4 * G];
    for (int i = 0; i < 4 * G; ++i) products[i] = _mm512_zextsi128_si512(_mm_cvtsi32_si128(corrections[g + i / 4]));
#pragma GCC unroll 2
    for (int d = 0; d < head_dim; d += 64) {
      for (int r = 0; r < 4; ++r) {
        __m512i row = _mm512_and_si512(load(rows + r * head_dim + d, head_dim - d), nibble);
        row = _mm512_xor_si512(row, _mm512_set1_epi8(8));
        for (int h = 0; h < G; ++h) {
          products[4 * h + r] = _mm512_dpbusd_epi32(products[4 * h + r], row, _mm512_load_si512(numbers[g + h] + d));
        }
      }
    }
    store_sums<G>(products, sums);
    for (int i = 0; i < 4 * G; ++i) products[i] = _mm512_setzero_si512();
    add_squares<G, D>(high + g, head_dim, rows, products);
    for (int i = 0; i < 4 * G; ++i) products[i] = _mm512_slli_epi32(products[i], 7);
    add_squares<G, D>(low + g, head_dim, rows, products);
    store_sums<G>(products, widths);
  }
};
