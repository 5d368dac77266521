// Scores of keys that are codes of 1 or 2 bits a dimension (offload/policies/sketch): a nibble of a code has 16 values,
// so what it adds to a score is looked up, a register of tokens at a time, as product quantisation's fast scan does
// (Andre et al., VLDB 2015). Included inside a per-ISA namespace after attention-inl.h.

inline constexpr int kNibbleValues = 16;
inline constexpr int kMaxCodeBytes = kMaxHeadDim / 4;
inline constexpr int kCodeHeads = 4;  // query heads that share the loads of a block

// What query . level of a nibble adds, in whole steps above the least: entries of 7 bits, so that two of them add up in
// a byte. A head's score of a token is scale * (step * sum of entries + least) + offset.
struct CodeTables {
  alignas(64) uint8_t entries[kMaxGroupSize][2 * kMaxCodeBytes][kNibbleValues];
  float step[kMaxGroupSize];
  float least[kMaxGroupSize];
};

static void make_code_tables(const CodeArgs& args, CodeTables* tables) {
  const int dims = 4 / args.bits, num_nibbles = args.head_dim / dims;
  for (int g = 0; g < args.group_size; ++g) {
    float sums[2 * kMaxCodeBytes][kNibbleValues], lowest[2 * kMaxCodeBytes];
    float range = 0.0f, least = 0.0f, check = 0.0f;
    for (int j = 0; j < num_nibbles; ++j) {
      const float* query = args.query + g * args.head_dim + j * dims;
      float low = INFINITY, high = -INFINITY;
      for (int value = 0; value < kNibbleValues; ++value) {
        float sum = 0.0f;
        for (int d = 0; d < dims; ++d) sum += query[d] * args.levels[value >> d * args.bits & ((1 << args.bits) - 1)];
        sums[j][value] = sum;
        low = sum < low ? sum : low;
        high = sum > high ? sum : high;
        check += sum * 0.0f;
      }
      lowest[j] = low;
      least += low;
      range = high - low > range ? high - low : range;
    }
    if (check != 0.0f) range = least = NAN;
    tables->step[g] = range / 127.0f;
    tables->least[g] = least;
    const float steps = range > 1e-30f ? 127.0f / range : 0.0f;  // a NaN range has no steps either
    for (int j = 0; j < num_nibbles; ++j) {
      for (int value = 0; value < kNibbleValues; ++value) {
        const float entry = steps > 0.0f ? (sums[j][value] - lowest[j]) * steps : 0.0f;
        tables->entries[g][j][value] = static_cast<uint8_t>(std::nearbyint(entry));
      }
    }
  }
}

// sums[g][i]: the entries of G heads, from `first` on, for the nibbles of token i of a block.
template <int G>
static inline void sum_entries(const uint8_t* block, int num_bytes, const CodeTables& tables, int first,
                               uint16_t (*sums)[kCodeBlock]) {
  for (int v = 0; v < kCodeBlock; v += kByteLanes) {
    ByteSums total[G];
    for (int g = 0; g < G; ++g) total[g] = b_no_sums();
    for (int j = 0; j < num_bytes; ++j) {
      const B code = b_load(block + j * kCodeBlock + v);
      const B low = b_low_nibbles(code), high = b_high_nibbles(code);
      for (int g = 0; g < G; ++g) {
        const auto& entries = tables.entries[first + g];
        b_add_to(&total[g], b_add(b_look_up(entries[2 * j], low), b_look_up(entries[2 * j + 1], high)));
      }
    }
    for (int g = 0; g < G; ++g) b_store_sums(total[g], sums[g] + v);
  }
}

static void score_codes(const CodeArgs& args) {
  const int num_bytes = args.head_dim * args.bits / 8;
  CodeTables tables;
  make_code_tables(args, &tables);
  for (int64_t first = 0; first < args.n; first += kCodeBlock) {
    const uint8_t* block = args.codes + first * num_bytes;
    const float* scales = args.scales + first;
    alignas(64) float best[kCodeBlock];
    for (int i = 0; i < kCodeBlock; ++i) best[i] = -INFINITY;
    for (int g = 0; g < args.group_size; g += kCodeHeads) {
      alignas(64) uint16_t sums[kCodeHeads][kCodeBlock];
      const int heads = args.group_size - g < kCodeHeads ? args.group_size - g : kCodeHeads;
      if (heads == 4) sum_entries<4>(block, num_bytes, tables, g, sums);
      if (heads == 3) sum_entries<3>(block, num_bytes, tables, g, sums);
      if (heads == 2) sum_entries<2>(block, num_bytes, tables, g, sums);
      if (heads == 1) sum_entries<1>(block, num_bytes, tables, g, sums);
      for (int h = 0; h < heads; ++h) {
        const float step = tables.step[g + h], least = tables.least[g + h], offset = args.offsets[g + h];
        for (int i = 0; i < kCodeBlock; ++i) {
          const float score = scales[i] * (step * static_cast<float>(sums[h][i]) + least) + offset;
          // What is no number counts as infinite: the token is attended to, and attention reports it.
          const float known = score == score ? score : INFINITY;
          best[i] = known > best[i] ? known : best[i];
        }
      }
    }
    const int64_t n = args.n - first < kCodeBlock ? args.n - first : kCodeBlock;
    std::memcpy(args.scores + first, best, static_cast<size_t>(n) * sizeof(float));
  }
}
