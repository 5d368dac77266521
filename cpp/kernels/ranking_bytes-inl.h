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
    for (; r + kTileRows <= n; r += kTileRows) {
      for (int i = 0; i < kTileRows * head_dim; i += 64) prefetch_l1(ahead + r * head_dim + i);
      dot_tile<G, D>(g, head_dim, rows + r * head_dim, sums + r, widths + r);
    }
    if (r < n) {
      int8_t last[kTileRows * kMaxHeadDim] = {};
      std::memcpy(last, rows + r * head_dim, static_cast<size_t>((n - r) * head_dim));
      dot_tile<G, 0>(g, head_dim, last, sums + r, widths + r);
    }
  }

  // 16 bytes of each of four rows: a lane's sums are of one row, and few are left to add up in the end.
  [[gnu::always_inline]] static inline __m512i load_rows(const int8_t* rows, int head_dim) {
    const auto load = [&](int r) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + r * head_dim)); };
    __m512i quad = _mm512_castsi128_si512(load(0));
    quad = _mm512_mask_broadcast_i32x4(quad, 0x00f0, load(1));
    quad = _mm512_mask_broadcast_i32x4(quad, 0x0f00, load(2));
    return _mm512_mask_broadcast_i32x4(quad, 0xf000, load(3));
  }

  static inline __m512i broadcast(const int8_t* bytes) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
  }

  // Of four heads' sums x[h] of four rows: lane r has those of row r.
  [[gnu::always_inline]] static inline __m512i add_up(const __m512i* x) {
    const __m512i low = _mm512_add_epi32(_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[0], x[1]));
    const __m512i high = _mm512_add_epi32(_mm512_unpacklo_epi32(x[2], x[3]), _mm512_unpackhi_epi32(x[2], x[3]));
    return _mm512_add_epi32(_mm512_unpacklo_epi64(low, high), _mm512_unpackhi_epi64(low, high));
  }

  // sums[h * kRankTile + r] of eight rows, of x[4 * (r / 4) + h].
  template <int G>
  [[gnu::always_inline]] static inline void store_sums(const __m512i* x, float* sums) {
    const __m512i first = add_up(x), second = add_up(x + 4);
    const __m512i heads = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    const F of_two = f_from_ints(_mm512_permutex2var_epi32(first, heads, second));
    _mm256_storeu_ps(sums, _mm512_castps512_ps256(of_two));
    if (G > 1) _mm256_storeu_ps(sums + kRankTile, _mm512_extractf32x8_ps(of_two, 1));
    if (G <= 2) return;
    const __m512i later = _mm512_add_epi32(heads, _mm512_set1_epi32(2));
    const F of_others = f_from_ints(_mm512_permutex2var_epi32(first, later, second));
    _mm256_storeu_ps(sums + 2 * kRankTile, _mm512_castps512_ps256(of_others));
    if (G > 3) _mm256_storeu_ps(sums + 3 * kRankTile, _mm512_extractf32x8_ps(of_others, 1));
  }

  // Eight rows. D: head_dim if it is known.
  template <int G, int D>
  void dot_tile(int g, int head_dim, const int8_t* rows, float* sums, float* widths) const {
    if (D > 0) head_dim = D;
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i squares =
        _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 9, 16, 25, 36, 49, 64, 81, 100, 121, static_cast<char>(144),
                                             static_cast<char>(169), static_cast<char>(196), static_cast<char>(225)));
    __m512i products[8], of_high[8], of_low[8];
    for (int i = 0; i < 8; ++i) {
      products[i] = of_high[i] = of_low[i] = _mm512_setzero_si512();
      if (i % 4 < G) products[i] = _mm512_maskz_set1_epi32(0x1111, corrections[g + i % 4]);
    }
#pragma GCC unroll 8
    for (int d = 0; d < head_dim; d += 16) {
      __m512i centres[2], squared[2];
      for (int q = 0; q < 2; ++q) {
        const __m512i row = load_rows(rows + 4 * q * head_dim + d, head_dim);
        centres[q] = _mm512_xor_si512(_mm512_and_si512(row, nibble), _mm512_set1_epi8(8));
        squared[q] = _mm512_shuffle_epi8(squares, _mm512_and_si512(_mm512_srli_epi16(row, 4), nibble));
      }
      for (int h = 0; h < G; ++h) {
        const __m512i number = broadcast(numbers[g + h] + d);
        const __m512i upper = broadcast(high[g + h] + d), lower = broadcast(low[g + h] + d);
        for (int q = 0; q < 2; ++q) {
          products[4 * q + h] = _mm512_dpbusd_epi32(products[4 * q + h], centres[q], number);
          of_high[4 * q + h] = _mm512_dpbusd_epi32(of_high[4 * q + h], squared[q], upper);
          of_low[4 * q + h] = _mm512_dpbusd_epi32(of_low[4 * q + h], squared[q], lower);
        }
      }
    }
    store_sums<G>(products, sums);
    for (int i = 0; i < 8; ++i) of_low[i] = _mm512_add_epi32(of_low[i], _mm512_slli_epi32(of_high[i], 7));
    store_sums<G>(of_low, widths);
  }

  static constexpr int kTileRows = 8;
};
