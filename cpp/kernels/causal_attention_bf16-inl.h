// Exact causal attention of many queries, as a prefill has them: FlashAttention's loop over blocks of keys with a
// running maximum. Both products are one inner loop of dot-product instructions (AVX512-BF16) whose sums stay in
// registers. Scores, sums and outputs are float32; softmax weights are rounded to bf16, as FlashAttention does.
// Included inside a per-ISA namespace after vector_math-inl.h. head_dim must be a multiple of 32.

inline constexpr int kQueryRows = 6;        // with four vectors of columns 24 registers hold their sums
inline constexpr int kPanel = 64;           // keys scored at once
inline constexpr float kHidden = -1.0e30f;  // the score of a key that a query does not see; its exp is 0

// sums[r] += Σ_p a[r][2p .. 2p + 1] · b[p * stride + column], b having pairs of bf16
template <int V>
[[gnu::always_inline]] static inline void multiply_rows(const Bf16* const* a, const uint32_t* b, int64_t stride,
                                                        int64_t num_pairs, F (&sums)[kQueryRows][V]) {
  for (int64_t p = 0; p < num_pairs; ++p) {
    __m512bh columns[V];
    for (int v = 0; v < V; ++v) {
      columns[v] = reinterpret_cast<__m512bh>(_mm512_loadu_si512(b + p * stride + v * 16));
    }
    for (int r = 0; r < kQueryRows; ++r) {
      int pair;
      __builtin_memcpy(&pair, a[r] + 2 * p, sizeof pair);
      const auto factor = reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair));
      for (int v = 0; v < V; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], factor, columns[v]);
    }
  }
}

// Words [n / kPanel][head_dim / 2][kPanel keys], each two neighbouring columns of a key; n rounded up, with zeros.
static void pack_key_pairs(const Bf16* keys, int64_t row, int64_t n, int64_t head_dim, uint32_t* packed) {
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
static void pack_value_pairs(const Bf16* values, int64_t row, int64_t n, int64_t head_dim, uint32_t* packed) {
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

// weights <- exp(scores - the new maximum) of one row; returns what the sums so far are multiplied with.
[[gnu::always_inline]] static inline float weigh(const float* scores, int64_t n, float* maximum, float* sum,
                                                 Bf16* weights) {
  F highest = f_set1(*maximum);
  for (int64_t i = 0; i < n; i += W) highest = f_max(f_load(scores + i), highest);
  const float before = *maximum;
  *maximum = f_max_lane(highest);
  const F shift = f_set1(*maximum);
  F low_total = f_zero(), high_total = f_zero();
  for (int64_t i = 0; i < n; i += 2 * W) {
    const F low = f_exp_fast<Bf16>(f_sub(f_load(scores + i), shift));
    const F high = f_exp_fast<Bf16>(f_sub(f_load(scores + i + W), shift));
    low_total = f_add(low_total, low);
    high_total = f_add(high_total, high);
    _mm512_storeu_si512(weights + i, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low)));
  }
  const float factor = _mm512_cvtss_f32(f_exp_fast<Bf16>(f_set1(before - *maximum)));
  *sum = *sum * factor + f_sum(f_add(low_total, high_total));
  return factor;
}

// acc[r] <- acc[r] * factor[r] + weights[r] · values, for V vectors of columns
template <int V>
[[gnu::always_inline]] static inline void add_values(const Bf16* const* weights, const float* factors, int num_rows,
                                                     const uint32_t* values, int64_t head_dim, int64_t num_pairs,
                                                     float* acc) {
  F sums[kQueryRows][V];
  for (int r = 0; r < kQueryRows; ++r) {
    for (int v = 0; v < V; ++v) {
      sums[r][v] = r < num_rows ? f_mul(f_load(acc + r * head_dim + v * W), f_set1(factors[r])) : f_zero();
    }
  }
  multiply_rows<V>(weights, values, head_dim, num_pairs, sums);
  for (int r = 0; r < num_rows; ++r) {
    for (int v = 0; v < V; ++v) f_store(acc + r * head_dim + v * W, sums[r][v]);
  }
}

// The queries first .. last of one KV head's group. A row is one query head of one token; rows of a token are adjacent.
static void attend_causal(const CausalArgs& args, int64_t kv_head, int64_t first, int64_t last, float* scratch) {
  const int64_t head_dim = args.head_dim, group_size = args.group_size;
  const int64_t num_rows = (last - first) * group_size;
  const auto* queries = static_cast<const Bf16*>(args.queries) + kv_head * group_size * args.query_head;
  const auto* keys = static_cast<const Bf16*>(args.keys) + kv_head * args.kv_head;
  const auto* values = static_cast<const Bf16*>(args.values) + kv_head * args.kv_head;
  float* acc = scratch;
  float* maxima = acc + num_rows * head_dim;
  float* sums = maxima + num_rows;
  auto* packed_keys = reinterpret_cast<uint32_t*>(sums + num_rows);
  uint32_t* packed_values = packed_keys + kCausalKeys * head_dim / 2;
  for (int64_t i = 0; i < num_rows * head_dim; ++i) acc[i] = 0.0f;
  for (int64_t i = 0; i < num_rows; ++i) maxima[i] = kHidden, sums[i] = 0.0f;

  const auto seen_by = [&](int64_t row) { return args.kv_len - args.num_queries + first + row / group_size + 1; };
  const int64_t seen_by_all = seen_by(num_rows - 1);
  for (int64_t base = 0; base < seen_by_all; base += kCausalKeys) {
    const int64_t num_keys = seen_by_all - base < kCausalKeys ? seen_by_all - base : kCausalKeys;
    pack_key_pairs(keys + base * args.kv_row, args.kv_row, num_keys, head_dim, packed_keys);
    pack_value_pairs(values + base * args.kv_row, args.kv_row, num_keys, head_dim, packed_values);
    for (int64_t at = 0; at < num_rows; at += kQueryRows) {
      const int live = static_cast<int>(num_rows - at < kQueryRows ? num_rows - at : kQueryRows);
      const int64_t most = seen_by(at + live - 1) - base;
      if (most <= 0) continue;
      const int64_t width = ((most < num_keys ? most : num_keys) + kPanel - 1) / kPanel * kPanel;
      alignas(64) float scores[kQueryRows][kCausalKeys];
      alignas(64) Bf16 weights[kQueryRows][kCausalKeys];
      const Bf16* query_rows[kQueryRows];
      const Bf16* weight_rows[kQueryRows];
      float factors[kQueryRows];
      for (int r = 0; r < kQueryRows; ++r) {  // a short last group repeats its first row
        const int64_t row = at + (r < live ? r : 0);
        query_rows[r] = queries + row % group_size * args.query_head + (first + row / group_size) * args.query_row;
        weight_rows[r] = weights[r < live ? r : 0];
      }
      for (int64_t panel = 0; panel < width; panel += kPanel) {
        F products[kQueryRows][4] = {};
        multiply_rows<4>(query_rows, packed_keys + panel * (head_dim / 2), kPanel, head_dim / 2, products);
        for (int r = 0; r < kQueryRows; ++r) {
          for (int v = 0; v < 4; ++v) f_store(scores[r] + panel + v * W, f_mul(products[r][v], f_set1(args.scale)));
        }
      }
      for (int r = 0; r < live; ++r) {
        const int64_t seen = seen_by(at + r) - base;
        for (int64_t i = seen > 0 ? seen : 0; i < width; ++i) scores[r][i] = kHidden;
        factors[r] = weigh(scores[r], width, maxima + at + r, sums + at + r, weights[r]);
      }
      int64_t d = 0;
      for (; d + 4 * W <= head_dim; d += 4 * W) {
        add_values<4>(weight_rows, factors, live, packed_values + d, head_dim, width / 2, acc + at * head_dim + d);
      }
      if (d < head_dim) {
        add_values<2>(weight_rows, factors, live, packed_values + d, head_dim, width / 2, acc + at * head_dim + d);
      }
    }
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t query_head = kv_head * group_size + row % group_size;
    Bf16* out = static_cast<Bf16*>(args.out) + (first + row / group_size) * args.out_row + query_head * head_dim;
    // Where nothing is above what hides a key, what is hidden counted, too.
    const F inverse = f_set1(maxima[row] > kHidden ? 1.0f / sums[row] : NAN);
    for (int64_t d = 0; d < head_dim; d += W) f_store_as(out + d, f_mul(f_load(acc + row * head_dim + d), inverse));
  }
}
