// Exact causal attention of many queries, as a prefill has them: FlashAttention's loop over blocks of keys with a
// running maximum. Both products are P's, of P::kRows rows at once: by AMX's tiles (causal_attention_amx-inl.h), of
// pairs of bf16 where the CPU has dot products of them (causal_attention_bf16-inl.h), else of float32
// (products-inl.h). Scores, sums and outputs are float32; softmax weights are P's. Included inside a per-ISA namespace
// after register_tile-inl.h.

inline constexpr int kPanel = 64;           // keys scored at once
inline constexpr float kHidden = -1.0e30f;  // the score of a key that a query does not see; its exp is 0

// weights <- exp(scores - the new maximum) of one row; returns what the sums so far are multiplied with.
template <class P>
[[gnu::always_inline]] static inline float weigh(const float* scores, int64_t n, float* maximum, float* sum,
                                                 typename P::Weight* weights) {
  using T = typename P::Item;
  F highest = f_set1(*maximum);
  for (int64_t i = 0; i < n; i += W) highest = f_max(f_load(scores + i), highest);
  const float before = *maximum;
  *maximum = f_max_lane(highest);
  const F shift = f_set1(*maximum);
  F low_total = f_zero(), high_total = f_zero();
  for (int64_t i = 0; i < n; i += 2 * W) {
    const F low = f_exp_fast<T>(f_sub(f_load(scores + i), shift));
    const F high = f_exp_fast<T>(f_sub(f_load(scores + i + W), shift));
    low_total = f_add(low_total, low);
    high_total = f_add(high_total, high);
    P::store_weights(weights + i, low, high);
  }
  const float factor = f_max_lane(f_exp_fast<T>(f_set1(before - *maximum)));
  *sum = *sum * factor + f_sum(f_add(low_total, high_total));
  return factor;
}

// P whose sums stay in registers: P::add is the inner loop of both products.
template <class P, class Weight, class Packed>
struct RegisterProducts {
  using Session = NoSession;
  static constexpr int kRows = kProductRows;

  // scores[r] <- scale * queries[r] · keys, of `width` packed keys
  static void score(const Weight* const* queries, const Packed* keys, int64_t width, int64_t head_dim, float scale,
                    float (*scores)[kCausalKeys]) {
    constexpr int kScored = kPanel / W < P::kVectors ? kPanel / W : P::kVectors;  // vectors of keys
    for (int64_t panel = 0; panel < width; panel += kPanel) {
      const Packed* columns = keys + P::packed_items(panel, head_dim);
      for (int at_key = 0; at_key < kPanel; at_key += kScored * W) {
        F products[kProductRows][kScored] = {};
        P::template add<kScored>(queries, columns + at_key, kPanel, head_dim, products);
        for (int r = 0; r < kProductRows; ++r) {
          float* to = scores[r] + panel + at_key;
          for (int v = 0; v < kScored; ++v) f_store(to + v * W, f_mul(products[r][v], f_set1(scale)));
        }
      }
    }
  }

  // acc[r] <- acc[r] * factors[r] + weights[r] · values, of `width` packed values
  static void accumulate(const Weight* const* weights, const float* factors, int num_rows, const Packed* values,
                         int64_t width, int64_t head_dim, float* acc) {
    int64_t d = 0;
    for (; d + P::kVectors * W <= head_dim; d += P::kVectors * W) {
      add_values<P::kVectors>(weights, factors, num_rows, values + d, width, head_dim, acc + d);
    }
    for (; d < head_dim; d += W) add_values<1>(weights, factors, num_rows, values + d, width, head_dim, acc + d);
  }

 private:
  template <int V>
  [[gnu::always_inline]] static inline void add_values(const Weight* const* weights, const float* factors, int num_rows,
                                                       const Packed* values, int64_t width, int64_t head_dim,
                                                       float* acc) {
    F sums[kProductRows][V] = {};
    P::template add<V>(weights, values, head_dim, width, sums);
    for (int r = 0; r < num_rows; ++r) {
      for (int v = 0; v < V; ++v) {
        float* to = acc + r * head_dim + v * W;
        f_store(to, f_fma(f_load(to), f_set1(factors[r]), sums[r][v]));
      }
    }
  }
};

// The queries first .. last of one KV head's group. A row is one query head of one token; rows of a token are adjacent.
template <class P>
static void attend_causal(const CausalArgs& args, int64_t kv_head, int64_t first, int64_t last, float* scratch) {
  using T = typename P::Item;
  using Weight = typename P::Weight;
  constexpr int kRows = P::kRows;
  const typename P::Session session;
  const int64_t head_dim = args.head_dim, group_size = args.group_size;
  const int64_t num_rows = (last - first) * group_size;
  const auto* queries = static_cast<const T*>(args.queries) + kv_head * group_size * args.query_head;
  const auto* keys = static_cast<const T*>(args.keys) + kv_head * args.kv_head;
  const auto* values = static_cast<const T*>(args.values) + kv_head * args.kv_head;
  float* acc = scratch;
  float* maxima = acc + num_rows * head_dim;
  float* sums = maxima + num_rows;
  const uintptr_t packed = reinterpret_cast<uintptr_t>(sums + num_rows);
  auto* packed_keys = reinterpret_cast<typename P::Packed*>((packed + kLineBytes - 1) / kLineBytes * kLineBytes);
  auto* packed_values = packed_keys + P::packed_items(kCausalKeys, head_dim);
  for (int64_t i = 0; i < num_rows * head_dim; ++i) acc[i] = 0.0f;
  for (int64_t i = 0; i < num_rows; ++i) {
    const float sink = args.sinks != nullptr ? args.sinks[kv_head * group_size + i % group_size] : kHidden;
    maxima[i] = sink < kHidden ? kHidden : sink;  // NaN stays
    sums[i] = args.sinks != nullptr ? 1.0f : 0.0f;
  }

  const auto seen_by = [&](int64_t row) { return args.kv_len - args.num_queries + first + row / group_size + 1; };
  const int64_t window = args.window > 0 ? args.window : args.kv_len;
  const auto past_by = [&](int64_t row) { return seen_by(row) > window ? seen_by(row) - window : 0; };
  const int64_t seen_by_all = seen_by(num_rows - 1);
  for (int64_t base = past_by(0) / kCausalKeys * kCausalKeys; base < seen_by_all; base += kCausalKeys) {
    const int64_t num_keys = seen_by_all - base < kCausalKeys ? seen_by_all - base : kCausalKeys;
    P::pack_keys(keys + base * args.kv_row, args.kv_row, num_keys, head_dim, packed_keys);
    P::pack_values(values + base * args.kv_row, args.kv_row, num_keys, head_dim, packed_values);
    for (int64_t at = 0; at < num_rows; at += kRows) {
      const int live = static_cast<int>(num_rows - at < kRows ? num_rows - at : kRows);
      const int64_t most = seen_by(at + live - 1) - base;
      if (most <= 0 || past_by(at) >= base + num_keys) continue;
      const int64_t width = ((most < num_keys ? most : num_keys) + kPanel - 1) / kPanel * kPanel;
      alignas(64) float scores[kRows][kCausalKeys];
      alignas(64) Weight weights[kRows][kCausalKeys];
      alignas(64) Weight converted[kRows][P::kConverts ? kMaxHeadDim : 1];
      const Weight* query_rows[kRows];
      const Weight* weight_rows[kRows];
      float factors[kRows];
      for (int r = 0; r < kRows; ++r) {  // a short last group repeats its first row
        const int64_t row = at + (r < live ? r : 0);
        const T* query = queries + row % group_size * args.query_head + (first + row / group_size) * args.query_row;
        query_rows[r] = P::query_row(query, head_dim, converted[r]);
        weight_rows[r] = weights[r < live ? r : 0];
      }
      P::score(query_rows, packed_keys, width, head_dim, args.scale, scores);
      for (int r = 0; r < live; ++r) {
        const int64_t seen = seen_by(at + r) - base;
        for (int64_t i = seen > 0 ? seen : 0; i < width; ++i) scores[r][i] = kHidden;
        const int64_t past = past_by(at + r) - base < width ? past_by(at + r) - base : width;
        for (int64_t i = 0; i < past; ++i) scores[r][i] = kHidden;
        factors[r] = weigh<P>(scores[r], width, maxima + at + r, sums + at + r, weights[r]);
      }
      P::accumulate(weight_rows, factors, live, packed_values, width, head_dim, acc + at * head_dim);
    }
  }
  for (int64_t row = 0; row < num_rows; ++row) {
    const int64_t query_head = kv_head * group_size + row % group_size;
    T* out = static_cast<T*>(args.out) + (first + row / group_size) * args.out_row + query_head * head_dim;
    // Where nothing is above what hides a key, what is hidden counted, too.
    const F inverse = f_set1(maxima[row] > kHidden ? 1.0f / sums[row] : NAN);
    for (int64_t d = 0; d < head_dim; d += W) f_store_as(out + d, f_mul(f_load(acc + row * head_dim + d), inverse));
  }
}
