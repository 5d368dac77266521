// Scores of int8 rows where AVX-512 has VNNI: products of bytes, four to a lane. Queries are rounded to 15 bits, in two
// digits with a sign; rows lose theirs by 128 on top, which is taken off the sums. Included inside a per-ISA namespace
// after tile_ops_int8_pairs-inl.h.

template <>
struct TileOps<Int8> : Int8PairOps {
  static constexpr float kLargest = 127 * 256;
  // A head of a block: [groups, 2, kRowGroup] bytes, of high digits and low ones. Behind the heads, of each group: its
  // scale, and 128 times its sum.
  static constexpr int64_t block_stride(int64_t head_dim) {
    return Int8Ops::block_stride(head_dim) + (head_dim == kRowGroup ? kScaleItems : 0);
  }

  static void pack_heads(const float* query, int group_size, int64_t head_dim, Query* packed) {
    if (head_dim != kRowGroup) return Int8Ops::pack_heads(query, group_size, head_dim, packed);
    for (int g = 0; g < group_size; ++g) {
      Query* block = packed + g / kHeadBlock * block_stride(head_dim);
      for (int64_t first = 0; first < head_dim; first += kRowGroup) {
        const float* x = query + g * head_dim + first;
        const float top = top_of(x, kRowGroup);
        const F inverse = f_set1(top > kSmallestInput ? kLargest / top : 0.0f);
        auto* digits = reinterpret_cast<int8_t*>(block + g % kHeadBlock * head_dim + first);
        I sum = i_zero();
        for (int64_t d = 0; d < kRowGroup; d += W) {
          sum = _mm512_add_epi32(sum, store_digits(f_mul(f_load(x + d), inverse), digits + d, digits + kRowGroup + d));
        }
        const OfGroup of_group{top / kLargest, 128 * _mm512_reduce_add_epi32(sum)};
        std::memcpy(block + kHeadBlock * head_dim + (g % kHeadBlock * kMostGroups + first / kRowGroup) * 4, &of_group,
                    sizeof of_group);
      }
    }
  }

  // Of rows of one group; longer ones come sooner from DRAM by Int8Ops. Four at a time are transposed in 128-bit lanes,
  // so that a lane of 32 bits has four columns of one row.
  template <int G, class Rows>
  static void score(const Query* query, int64_t head_dim, const Rows& rows, int num_rows, const Prefetch<Int8>& ahead,
                    float scale, float* out, int64_t out_stride) {
    if (head_dim != kRowGroup) {
      return Int8Ops::score<G>(query, head_dim, rows, num_rows, ahead, scale, out, out_stride);
    }
    OfGroup of_query[kHeadBlock * kMostGroups];
    std::memcpy(of_query, query + kHeadBlock * head_dim, sizeof of_query);
    const int64_t num_groups = head_dim / kRowGroup;
    I high[kMostGroups][G][4], low[kMostGroups][G][4];
    for (int64_t i = 0; i < num_groups; ++i) {
      for (int g = 0; g < G; ++g) {
        spread(query + g * head_dim + i * kRowGroup, high[i][g]);
        spread(query + g * head_dim + i * kRowGroup + kRowGroup / 2, low[i][g]);
      }
    }
    for (int r = 0; r < num_rows; r += W) {
      const int left = num_rows - r < W ? num_rows - r : W;
      const Int8* at[W];
      for (int j = 0; j < left; ++j) at[j] = rows[r + j];
      for (int j = left; j < W; ++j) at[j] = at[left - 1];
      for (int j = 0; ahead.rows != nullptr && j < left; ++j) ahead.row(r + j, row_bytes(head_dim, DType::i8));
      for (int j = 0; ahead.streams && j < left; ++j) ahead.next_in_stream(at[j] + stream_ahead_bytes, head_dim);
      F scores[G];
      for (int g = 0; g < G; ++g) scores[g] = f_zero();
      for (int64_t i = 0; i < num_groups; ++i) {
        I sums[G][4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          I x[4];
          for (int k = 0; k < 4; ++k) x[k] = load_above(at[j * 4 + k] + i * kRowGroup);
          transpose_quads(x);
          for (int g = 0; g < G; ++g) {
            sums[g][j] = i_zero();
            for (int c = 0; c < 4; ++c) add_products(sums[g][j], x[c], high[i][g][c]);
            sums[g][j] = _mm512_slli_epi32(sums[g][j], 8);
            for (int c = 0; c < 4; ++c) add_products(sums[g][j], x[c], low[i][g][c]);
          }
        }
        const F of_rows = load_scales(at, head_dim, i);
        for (int g = 0; g < G; ++g) {
          const OfGroup& of_group = of_query[g * kMostGroups + i];
          const I whole = _mm512_sub_epi32(sum_lanes(sums[g]), _mm512_set1_epi32(of_group.excess));
          scores[g] = f_fma(f_from_ints(whole), f_mul(of_rows, f_set1(scale * of_group.scale)), scores[g]);
        }
      }
      const auto live = static_cast<__mmask16>((1 << left) - 1);
      for (int g = 0; g < G; ++g) _mm512_mask_storeu_ps(out + g * out_stride + r, live, scores[g]);
    }
  }

 private:
  struct OfGroup {
    float scale;
    int32_t excess;
  };

  // 64 codes, each with 128 added.
  static I load_above(const Int8* row) {
    I x = _mm512_loadu_si512(row);
    asm volatile("" : "+v"(x));  // in the order of memory: see PairOps
    return _mm512_xor_si512(x, _mm512_set1_epi8(static_cast<char>(0x80)));
  }
  // Of 16 rows the scale of a group. Inserted one by one: a vector does not load what words have just stored.
  static F load_scales(const Int8* const* at, int64_t head_dim, int64_t group) {
    __m128i halves[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i, at += 8) {
      __m128i x = _mm_setzero_si128();
      x = _mm_insert_epi16(x, scales_of(at[0], head_dim)[group].bits, 0);
      x = _mm_insert_epi16(x, scales_of(at[1], head_dim)[group].bits, 1);
      x = _mm_insert_epi16(x, scales_of(at[2], head_dim)[group].bits, 2);
      x = _mm_insert_epi16(x, scales_of(at[3], head_dim)[group].bits, 3);
      x = _mm_insert_epi16(x, scales_of(at[4], head_dim)[group].bits, 4);
      x = _mm_insert_epi16(x, scales_of(at[5], head_dim)[group].bits, 5);
      x = _mm_insert_epi16(x, scales_of(at[6], head_dim)[group].bits, 6);
      halves[i] = _mm_insert_epi16(x, scales_of(at[7], head_dim)[group].bits, 7);
    }
    return _mm512_cvtph_ps(_mm256_set_m128i(halves[1], halves[0]));
  }
  // Four codes of a lane times four digits. By the intrinsic GCC 12 copies every sum, twice.
  [[gnu::always_inline]] static void add_products(I& sums, I codes, I digits) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "vm"(digits));
  }
  // Of the 64 digits of a group, every fourth four of them in all lanes of their 128 bits.
  static void spread(const Query* digits, I* out) {
    const I all = _mm512_loadu_si512(digits);
    out[0] = _mm512_shuffle_epi32(all, _MM_PERM_AAAA);
    out[1] = _mm512_shuffle_epi32(all, _MM_PERM_BBBB);
    out[2] = _mm512_shuffle_epi32(all, _MM_PERM_CCCC);
    out[3] = _mm512_shuffle_epi32(all, _MM_PERM_DDDD);
  }
  // Of each 128 bits: x[i], lane j <-> x[j], lane i
  static void transpose_quads(I* x) {
    const I a = _mm512_unpacklo_epi32(x[0], x[1]), b = _mm512_unpackhi_epi32(x[0], x[1]);
    const I c = _mm512_unpacklo_epi32(x[2], x[3]), d = _mm512_unpackhi_epi32(x[2], x[3]);
    x[0] = _mm512_unpacklo_epi64(a, c);
    x[1] = _mm512_unpackhi_epi64(a, c);
    x[2] = _mm512_unpacklo_epi64(b, d);
    x[3] = _mm512_unpackhi_epi64(b, d);
  }
  // The sum of the 128-bit lanes of each of four vectors.
  static I sum_lanes(const I* x) {
    const I a = _mm512_add_epi32(_mm512_shuffle_i32x4(x[0], x[1], 0x44), _mm512_shuffle_i32x4(x[0], x[1], 0xee));
    const I b = _mm512_add_epi32(_mm512_shuffle_i32x4(x[2], x[3], 0x44), _mm512_shuffle_i32x4(x[2], x[3], 0xee));
    return _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
  }
  // x, at most kLargest, rounded to 256 * high + low; returns it so.
  static I store_digits(F x, int8_t* high, int8_t* low) {
    const I whole = _mm512_cvtps_epi32(x);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(low), _mm512_cvtepi32_epi8(whole));
    const I rounded = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(high), _mm512_cvtepi32_epi8(rounded));
    return whole;
  }
};
