// Products of a few rows with packed weights: whole numbers in groups of kPackedGroup, a scale to each, and to those of
// some formats a minimum. Rows of x become whole numbers, too, so a group is one integer dot product; sums of groups
// are float32. Included inside a per-ISA namespace after vector_math-inl.h. The ISA has f_store_sums, and C, the codes
// of kDotGroups groups: c_load and c_load_nibbles load one, c_look_up has nibbles looked up in a T; i_dot_nibbles and
// i_dot_bytes give W sums that together are their products with int8, i_zero and f_from_ints go with those; f_spread
// gives each group's lanes its factor. f_add_halves adds products where each half of a group has a factor of its own.

// Groups of int8 with a scale to each, of one row; the rest of whole kPackedScales is zero. A group that holds NaN or
// infinity has a NaN for a scale.
static void quantise_row(const float* x, int64_t n, const PackedInput& to, int64_t row) {
  int8_t* codes = to.codes + row * to.codes_stride();
  float* scales = to.scales + row * to.padded_groups;
  float* sums = to.sums + row * to.padded_groups;
  alignas(64) float values[kPackedGroup];
  for (int64_t g = 0; g < to.padded_groups; ++g, codes += kPackedGroup) {
    const int64_t first = g * kPackedGroup, count = n - first < kPackedGroup ? n - first : kPackedGroup;
    scales[g] = sums[g] = 0.0f;
    const float* from = x + first;
    if (count < kPackedGroup) {
      for (int64_t i = 0; i < kPackedGroup; ++i) values[i] = i < count ? from[i] : 0.0f;
      from = values;
    }
    F highest = f_zero(), nothing = f_zero();  // the latter: NaN where a number is not finite
    for (int64_t i = 0; i < kPackedGroup; i += W) {
      const F v = f_load(from + i);
      highest = f_max(highest, f_max(v, f_sub(f_zero(), v)));
      nothing = f_add(nothing, f_sub(v, v));
    }
    const float largest = f_max_lane(highest), spoilt = f_sum(nothing);
    if (spoilt != 0.0f || !(largest > kSmallestInput)) {  // spoilt is 0 or NaN
      std::memset(codes, 0, kPackedGroup);
      scales[g] = sums[g] = spoilt;
      continue;
    }
    const F inverse = f_set1(127.0f / largest);
    F total = f_zero();
    for (int64_t i = 0; i < kPackedGroup; i += W) {
      const F rounded = f_round(f_mul(f_load(from + i), inverse));
      f_store(values + i, rounded);
      total = f_add(total, rounded);
    }
    for (int64_t i = 0; i < kPackedGroup; ++i) codes[i] = static_cast<int8_t>(static_cast<int32_t>(values[i]));
    scales[g] = largest / 127.0f;
    sums[g] = scales[g] * f_sum(total);
  }
}

template <bool HasMinimum, int Scales>
struct PackedBytes {
  static constexpr int64_t kGroupBytes = kPackedGroup;
  static constexpr bool kHasMinimum = HasMinimum;
  static constexpr int kScales = Scales;  // of a group
  explicit PackedBytes(const PackedWeights&) {}
  [[gnu::always_inline]] inline C load(const uint8_t* p) const { return c_load(reinterpret_cast<const int8_t*>(p)); }
  [[gnu::always_inline]] static inline I dot(const C& w, const int8_t* x) { return i_dot_bytes(w, x); }
  static int number(const PackedWeights&, const uint8_t* codes, int64_t i) { return static_cast<int8_t>(codes[i]); }
};

// The low halves of 16 bytes are the first 16 elements, the high ones the rest.
[[gnu::always_inline]] static inline int nibble(const uint8_t* codes, int64_t i) {
  return i < kPackedGroup / 2 ? codes[i] & 15 : codes[i - kPackedGroup / 2] >> 4;
}

struct PackedQ4 {
  static constexpr int64_t kGroupBytes = kPackedGroup / 2;
  static constexpr bool kHasMinimum = true;
  static constexpr int kScales = 1;
  explicit PackedQ4(const PackedWeights&) {}
  [[gnu::always_inline]] inline C load(const uint8_t* p) const { return c_load_nibbles(p); }
  [[gnu::always_inline]] static inline I dot(const C& w, const int8_t* x) { return i_dot_nibbles(w, x); }
  static int number(const PackedWeights&, const uint8_t* codes, int64_t i) { return nibble(codes, i); }
};

template <int Scales>
struct PackedTable {
  static constexpr int64_t kGroupBytes = kPackedGroup / 2;
  static constexpr bool kHasMinimum = false;
  static constexpr int kScales = Scales;
  explicit PackedTable(const PackedWeights& weights) : table(t_load(weights.table)) {}
  [[gnu::always_inline]] inline C load(const uint8_t* p) const { return c_look_up(table, c_load_nibbles(p)); }
  [[gnu::always_inline]] static inline I dot(const C& w, const int8_t* x) { return i_dot_bytes(w, x); }
  static int number(const PackedWeights& weights, const uint8_t* codes, int64_t i) {
    return weights.table[nibble(codes, i)];
  }
  const T table;
};

// N halves as float32, zero beyond the n that there are.
template <int64_t N>
[[gnu::always_inline]] static inline void load_scales(const Half* from, int64_t n, F* to) {
  Half padded[N];
  if (n < N) {
    for (int64_t i = 0; i < N; ++i) padded[i] = i < n ? from[i] : Half{0};
    from = padded;
  }
  for (int v = 0; v < N / W; ++v) to[v] = f_load_as(from + v * W);
}

// Zeros, then ones: from kFrom + kPackedScales - n on, the first n of kPackedScales are zero.
alignas(64) inline constexpr float kFrom[2 * kPackedScales] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
                                                               1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

// The factors of kPackedScales groups, and zeros for those that a load has beyond them.
template <class P>
inline constexpr int64_t kFactors = kPackedScales * P::kScales + (kDotGroups > 1 ? W : 0);

// part[g] += the products of kDotGroups groups of one row of weights with those of input row g
template <class P, int G>
[[gnu::always_inline]] static inline void add_groups(const P& format, const uint8_t* codes, const int8_t* x_codes,
                                                     int64_t x_stride, const float* factors, F* part) {
  const C w = format.load(codes);
#pragma GCC unroll 4
  for (int g = 0; g < G; ++g) {
    if constexpr (P::kScales == 2) {
      part[g] = f_add_halves(w, x_codes + g * x_stride, factors + g * kFactors<P>, part[g]);
    } else {
      const I dot = P::dot(w, x_codes + g * x_stride);
      part[g] = f_fma(f_from_ints(dot), f_spread(factors + g * kFactors<P>), part[g]);
    }
  }
}

// sums[g * S + r]: W lanes whose sum is the product of input row g with row o + r of weights. The R rows are summed
// side by side: each sum waits for its last addition, and inputs are loaded once for all of them.
template <class P, int G, int R, int S>
[[gnu::always_inline]] static inline void project_packed(const PackedInput& x, int64_t first_row,
                                                         const PackedWeights& weights, int64_t o, F* sums) {
  const int64_t num_groups = weights.num_groups;
  constexpr int64_t kBlockScales = kPackedScales * P::kScales;
  constexpr int kVectors = static_cast<int>(kBlockScales) / W;
  const P format(weights);
  F part[R][G];
  alignas(64) float factors[R][G][kFactors<P>];
  for (int r = 0; r < R; ++r) {
    for (int g = 0; g < G; ++g) {
      part[r][g] = f_zero();
      if (kDotGroups > 1) f_store(factors[r][g] + kBlockScales, f_zero());  // of no group
    }
  }
  for (int64_t done = 0; done < num_groups; done += kPackedScales) {
    // The last scales of a row are loaded together with those before them, which were used already, if it has so many.
    const int64_t begin =
        num_groups < kPackedScales || done + kPackedScales <= num_groups ? done : num_groups - kPackedScales;
    const int64_t used = done - begin;
    const int64_t n = num_groups - begin < kPackedScales ? num_groups - begin : kPackedScales;
    alignas(64) float twice[G][kBlockScales];  // where a group has two scales, that of x for each
    if constexpr (P::kScales == 2) {
      for (int g = 0; g < G; ++g) {
        const float* scales = x.scales + (first_row + g) * x.padded_groups + begin;
        for (int64_t i = 0; i < kPackedScales; ++i) twice[g][2 * i] = twice[g][2 * i + 1] = scales[i];
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      F of_weights[kVectors];
      load_scales<kBlockScales>(weights.scales + ((o + r) * num_groups + begin) * P::kScales, n * P::kScales,
                                of_weights);
      for (int g = 0; g < G; ++g) {
        const float* scales = P::kScales == 2 ? twice[g] : x.scales + (first_row + g) * x.padded_groups + begin;
        for (int v = 0; v < kVectors; ++v) {
          f_store(factors[r][g] + v * W, f_mul(of_weights[v], f_load(scales + v * W)));
        }
      }
      if constexpr (P::kHasMinimum) {
        static_assert(P::kScales == 1);
        load_scales<kBlockScales>(weights.minimums + (o + r) * num_groups + begin, n, of_weights);
        for (int g = 0; g < G; ++g) {
          const float* of_x = x.sums + (first_row + g) * x.padded_groups + begin;
          for (int v = 0; v < kVectors; ++v) {
            F sum = f_load(of_x + v * W);
            if (used > 0) sum = f_mul(sum, f_load(kFrom + kPackedScales - used + v * W));
            part[r][g] = f_fma(of_weights[v], sum, part[r][g]);
          }
        }
      }
    }
    const int8_t* x_codes = x.codes + first_row * x.codes_stride() + begin * kPackedGroup;
    const uint8_t* codes = weights.codes + (o * num_groups + begin) * P::kGroupBytes;
    // The R rows lie one after the other: while they are read side by side, the next are fetched in order.
    const int64_t bytes = R * num_groups * P::kGroupBytes;
    const uint8_t* ahead =
        weights.codes + (o * num_groups + R * begin) * P::kGroupBytes + (bytes > kProjectAhead ? bytes : kProjectAhead);
    constexpr int64_t kBytes = kDotGroups * P::kGroupBytes;
    const int64_t whole = n - (n - used) % kDotGroups;
    for (int64_t i = used; i < whole; i += kDotGroups) {
      const int64_t at = i * R * P::kGroupBytes;
      for (int64_t p = 0; p < R * kBytes; p += 64) {
        if (R * kBytes >= 64 || at % 64 == 0) prefetch_l2(ahead + at + p);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        add_groups<P, G>(format, codes + (r * num_groups + i) * P::kGroupBytes, x_codes + i * kPackedGroup,
                         x.codes_stride(), factors[r][0] + i * P::kScales, part[r]);
      }
    }
    if (kDotGroups > 1 && whole < n) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        alignas(64) uint8_t padded[kBytes] = {};
        std::memcpy(padded, codes + (r * num_groups + whole) * P::kGroupBytes,
                    static_cast<size_t>((n - whole) * P::kGroupBytes));
        add_groups<P, G>(format, padded, x_codes + whole * kPackedGroup, x.codes_stride(),
                         factors[r][0] + whole * P::kScales, part[r]);
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int g = 0; g < G; ++g) sums[g * S + r] = part[r][g];
  }
}

template <class P, int G>
static void project_packed_rows(const PackedInput& x, int64_t first_row, const PackedWeights& weights, int64_t first,
                                int64_t last, float* out, int64_t out_stride) {
  constexpr int kTogether = G == 1 ? kRowTile : G == 2 ? kRowTile / 2 : 1;  // or registers do not hold the sums
  F sums[G * kRowTile];
  int64_t o = first;
  for (; o + kRowTile <= last; o += kRowTile) {
    for (int r = 0; r < kRowTile; r += kTogether) {
      project_packed<P, G, kTogether, kRowTile>(x, first_row, weights, o + r, sums + r);
    }
    f_store_sums<G, kRowTile>(sums, 1.0f, out + o - first, out_stride);
  }
  for (; o < last; ++o) {
    project_packed<P, G, 1, 1>(x, first_row, weights, o, sums);
    f_store_sums<G, 1>(sums, 1.0f, out + o - first, out_stride);
  }
}

template <class P>
static void packed_linear(const PackedInput& x, int num_rows, const PackedWeights& weights, int64_t first, int64_t last,
                          float* out, int64_t out_stride) {
  for (int row = 0; row < num_rows; row += kHeadBlock, out += kHeadBlock * out_stride) {
    switch (num_rows - row) {
      case 1:
        project_packed_rows<P, 1>(x, row, weights, first, last, out, out_stride);
        break;
      case 2:
        project_packed_rows<P, 2>(x, row, weights, first, last, out, out_stride);
        break;
      case 3:
        project_packed_rows<P, 3>(x, row, weights, first, last, out, out_stride);
        break;
      default:
        project_packed_rows<P, 4>(x, row, weights, first, last, out, out_stride);
    }
  }
}

// out[i] = scale * code (+ minimum) of the first n elements of row o
template <class P>
static void unpack_row(const PackedWeights& weights, int64_t o, int64_t n, float* out) {
  const int64_t begin = o * weights.num_groups;
  alignas(64) float values[kPackedGroup];
  for (int64_t g = 0; g * kPackedGroup < n; ++g) {
    const uint8_t* codes = weights.codes + (begin + g) * P::kGroupBytes;
    const float minimum = P::kHasMinimum ? to_float(weights.minimums[begin + g]) : 0.0f;
    constexpr int64_t kSame = kPackedGroup / P::kScales;
    for (int64_t s = 0; s < P::kScales; ++s) {
      const float scale = to_float(weights.scales[(begin + g) * P::kScales + s]);
      for (int64_t i = s * kSame; i < (s + 1) * kSame; ++i) {
        values[i] = scale * static_cast<float>(P::number(weights, codes, i)) + minimum;
      }
    }
    const int64_t count = n - g * kPackedGroup < kPackedGroup ? n - g * kPackedGroup : kPackedGroup;
    std::memcpy(out + g * kPackedGroup, values, static_cast<size_t>(count) * sizeof(float));
  }
}

template <class P>
static void add_format(KernelTable* table, WeightFormat format) {
  table->packed_linear[static_cast<int>(format)] = packed_linear<P>;
  table->unpack_row[static_cast<int>(format)] = unpack_row<P>;
}

static inline void add_packed(KernelTable* table) {
  table->quantise_row = quantise_row;
  add_format<PackedBytes<false, 1>>(table, WeightFormat::q8);
  add_format<PackedBytes<false, 2>>(table, WeightFormat::q8_of_16);
  add_format<PackedBytes<true, 1>>(table, WeightFormat::q8_min);
  add_format<PackedQ4>(table, WeightFormat::q4);
  add_format<PackedTable<1>>(table, WeightFormat::table4);
  add_format<PackedTable<2>>(table, WeightFormat::table4_of_16);
}
