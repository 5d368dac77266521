// Scoring and attention over any tokens of one KV head: one body for dense and sparse, for every dtype.
// Tiles of rows are named by pointers, so pages and gathers cost the inner loops nothing. In a gather of both, a tile's
// values are prefetched while its keys are scored, and the next keys while those values are accumulated; in a gather of
// one, rows are prefetched some tiles ahead. Contiguous tiles are whole pages: all keys, then all values, one
// sequential run. Included inside a per-ISA namespace after tile_ops-inl.h.

inline constexpr int kGatherTile = 32;   // rows: enough for DRAM's latency, where most come from there
inline constexpr int kTilesAhead = 3;    // where keys or values are read alone, and most may be in the cache
inline constexpr int kL1TilesAhead = 1;  // the same where they go into L1 (gathers_into_l1): it must hold them

// A contiguous tile stays inside one page.
static inline int tile_size(const RowSource& source, const TokenSpan& tokens, int64_t begin) {
  const int64_t left = tokens.n - begin;
  if (tokens.indices != nullptr) return static_cast<int>(left < kGatherTile ? left : kGatherTile);
  const int64_t page_tokens = int64_t{1} << source.page_shift;
  int64_t whole = page_tokens - ((tokens.first + begin) & (page_tokens - 1));
  whole = whole < kScoreTile ? whole : kScoreTile;
  return static_cast<int>(left < whole ? left : whole);
}

template <class T>
static inline void gather_pointers(const RowSource& source, const TokenSpan& tokens, int64_t begin, int count,
                                   const T** rows) {
  for (int r = 0; r < count; ++r) rows[r] = static_cast<const T*>(source.row(tokens.indices[begin + r]));
}

template <class T>
static inline ContiguousRows<T> rows_from(const RowSource& source, int64_t token) {
  return {static_cast<const T*>(source.row(token)), source.row_bytes / static_cast<int64_t>(sizeof(T))};
}

template <class T>
struct QueryBlock {
  alignas(64)
      typename TileOps<T>::Query packed[(kMaxGroupSize / kHeadBlock + 1) * TileOps<T>::block_stride(kMaxHeadDim)];
  QueryBlock(const float* query, int group_size, int64_t head_dim) {
    TileOps<T>::pack_heads(query, group_size, head_dim, packed);
  }
};

// cap * tanh(x / cap), by 1 - 2 / (exp(2 |x / cap|) + 1) with the sign of x.
static void cap_scores(float* scores, int count, float cap) {
  const F one = f_set1(1.0f), two = f_set1(2.0f);
  for (int i = 0; i < count; i += W) {
    alignas(64) float last[W] = {};
    const int n = count - i < W ? count - i : W;
    float* row = n == W ? scores + i : last;
    for (int j = 0; n < W && j < n; ++j) last[j] = scores[i + j];
    const F x = f_mul(f_load(row), f_set1(2.0f / cap));
    const F small = f_exp(f_sub(f_zero(), f_max(x, f_sub(f_zero(), x))));  // exp(-2 |x|) <= 1
    const F magnitude = f_mul(f_sub(f_div(two, f_add(one, small)), one), f_set1(cap));
    f_store(last, magnitude);
    for (int j = 0; j < n; ++j) scores[i + j] = std::copysign(last[j], scores[i + j]);
  }
}

template <class T, class Rows>
static inline void score_tile(const typename TileOps<T>::Query* query, int group_size, int64_t head_dim,
                              const Rows& rows, int count, const Prefetch<T>& ahead, float scale, float cap, float* out,
                              int64_t stride) {
  for (int g = 0; g < group_size; g += kHeadBlock) {
    const Prefetch<T> once = g == 0 ? ahead : Prefetch<T>();
    const auto* q = query + g / kHeadBlock * TileOps<T>::block_stride(head_dim);
    float* o = out + g * stride;
    switch (group_size - g) {
      case 1:
        TileOps<T>::template score<1>(q, head_dim, rows, count, once, scale, o, stride);
        break;
      case 2:
        TileOps<T>::template score<2>(q, head_dim, rows, count, once, scale, o, stride);
        break;
      case 3:
        TileOps<T>::template score<3>(q, head_dim, rows, count, once, scale, o, stride);
        break;
      default:
        TileOps<T>::template score<4>(q, head_dim, rows, count, once, scale, o, stride);
    }
  }
  for (int g = 0; cap > 0.0f && g < group_size; ++g) cap_scores(out + g * stride, count, cap);
}

template <class T, class Rows>
static inline void accumulate_tile(const float* weights, int64_t weight_stride, int group_size, const Rows& rows,
                                   int count, const Prefetch<T>& ahead, int64_t head_dim, float* acc) {
  for (int g = 0; g < group_size; g += kHeadBlock) {
    const Prefetch<T> once = g == 0 ? ahead : Prefetch<T>();
    const float* w = weights + g * weight_stride;
    float* a = acc + g * head_dim;
    switch (group_size - g) {
      case 1:
        TileOps<T>::template accumulate<1>(w, weight_stride, rows, count, once, head_dim, a, head_dim);
        break;
      case 2:
        TileOps<T>::template accumulate<2>(w, weight_stride, rows, count, once, head_dim, a, head_dim);
        break;
      case 3:
        TileOps<T>::template accumulate<3>(w, weight_stride, rows, count, once, head_dim, a, head_dim);
        break;
      default:
        TileOps<T>::template accumulate<4>(w, weight_stride, rows, count, once, head_dim, a, head_dim);
    }
  }
}

// The gathered rows of a tile and of the one after it.
template <class T>
struct GatherWindow {
  const T* pointers[2][kGatherTile];
  int side = 0;
  GatheredRows<T> now() const { return {pointers[side]}; }
  const T* const* next() const { return pointers[side ^ 1]; }
};

// Gathered rows tile by tile, prefetched some tiles ahead: where most are in the cache already, one tile is done sooner
// than a row of the next comes from memory.
template <class T>
class GatherStream {
 public:
  GatherStream(const RowSource& source, const TokenSpan& tokens) : source_(source), tokens_(tokens) {
    for (int i = 0; i <= ahead_; ++i) look_up(i);
    for (int i = 1; i < ahead_; ++i) {
      const Prefetch<T> early{pointers_[i]};
      for (int r = 0; r < counts_[i]; ++r) early.row(r, source.row_bytes);
    }
  }
  int64_t begin() const { return begin_; }
  int count() const { return counts_[at_ % kTiles]; }  // 0 after the last
  GatheredRows<T> now() const { return {pointers_[at_ % kTiles]}; }
  // The rows to prefetch beside the current ones, as many as these are.
  Prefetch<T> ahead() const {
    const int i = (at_ + ahead_) % kTiles;
    return {counts_[i] > 0 ? pointers_[i] : nullptr};
  }
  void advance() {
    begin_ += count();
    ++at_;
    look_up(at_ + ahead_);
  }

 private:
  static constexpr int kTiles = kTilesAhead + 1;
  const int ahead_ = gathers_into_l1 ? kL1TilesAhead : kTilesAhead;

  void look_up(int tile) {
    const int i = tile % kTiles;
    counts_[i] = tile_size(source_, tokens_, looked_up_);
    if (counts_[i] <= 0) return;
    gather_pointers(source_, tokens_, looked_up_, counts_[i], pointers_[i]);
    for (int r = counts_[i]; r < kGatherTile; ++r) pointers_[i][r] = pointers_[i][counts_[i] - 1];
    looked_up_ += counts_[i];
  }

  const RowSource& source_;
  const TokenSpan& tokens_;
  const T* pointers_[kTiles][kGatherTile];
  int counts_[kTiles];
  int at_ = 0;
  int64_t begin_ = 0;
  int64_t looked_up_ = 0;
};

template <class T>
static void score(const ScoreArgs& args) {
  const typename TileOps<T>::Session session;
  const QueryBlock<T> query(args.query, args.group_size, args.head_dim);
  if (args.tokens.indices == nullptr) {
    const int64_t n = args.tokens.n;
    int count = tile_size(args.keys, args.tokens, 0);
    for (int64_t begin = 0; begin < n; begin += count, count = tile_size(args.keys, args.tokens, begin)) {
      score_tile<T>(query.packed, args.group_size, args.head_dim, rows_from<T>(args.keys, args.tokens.first + begin),
                    count, Prefetch<T>::stream(), args.scale, args.cap, args.scores + begin, args.score_stride);
    }
    return;
  }
  for (GatherStream<T> keys(args.keys, args.tokens); keys.count() > 0; keys.advance()) {
    score_tile<T>(query.packed, args.group_size, args.head_dim, keys.now(), keys.count(), keys.ahead(), args.scale,
                  args.cap, args.scores + keys.begin(), args.score_stride);
  }
}

// Turns a tile's scores into weights relative to the running maximum, rescaling what was accumulated before.
static inline void raise_maximum(const float* scores, int count, float* row_max, float* row_sum, float* acc,
                                 int64_t head_dim) {
  const int whole = count / W * W;
  F highest = f_set1(-3.0e38f);
  for (int i = 0; i < whole; i += W) highest = f_max(highest, f_load(scores + i));
  float maximum = f_max_lane(highest);
  for (int i = whole; i < count; ++i) maximum = scores[i] > maximum ? scores[i] : maximum;
  if (!(maximum > *row_max)) return;
  const float factor = std::exp(*row_max - maximum);
  *row_max = maximum;
  *row_sum *= factor;
  for (int64_t d = 0; d < head_dim; d += W) f_store(acc + d, f_mul(f_load(acc + d), f_set1(factor)));
}

// Scores of one tile, then weights, then values: everything between two tiles' memory accesses stays short, because
// the hardware prefetchers idle through it.
template <class T, class Rows>
static inline void attend_tile(const AttendArgs& args, const typename TileOps<T>::Query* query, int64_t begin,
                               int count, const Rows& keys, const Prefetch<T>& after_keys, const Rows& values,
                               const Prefetch<T>& after_values, float* p) {
  const int64_t head_dim = args.head_dim;
  const bool given = args.weights != nullptr;
  if (args.scored != nullptr) {
    for (int g = 0; g < args.group_size; ++g) {
      raise_maximum(p + g * kScoreTile, count, args.row_max + g, args.row_sum + g, args.acc + g * head_dim, head_dim);
    }
  } else if (given) {
    for (int g = 0; g < args.group_size; ++g) {
      const float* weights = args.weights + g * args.weight_stride + begin;
      for (int i = 0; i < count; ++i) p[g * kScoreTile + i] = weights[i];
    }
  } else {
    score_tile<T>(query, args.group_size, head_dim, keys, count, after_keys, args.scale, args.cap, p, kScoreTile);
    for (int g = 0; g < args.group_size; ++g) {
      const float* row = p + g * kScoreTile;
      if (args.scores != nullptr) {
        for (int i = 0; i < count; ++i) args.scores[g * args.score_stride + begin + i] = row[i];
      }
      raise_maximum(row, count, args.row_max + g, args.row_sum + g, args.acc + g * head_dim, head_dim);
    }
  }
  alignas(64) float sums[kMaxGroupSize * W];  // lane by lane until the tile ends
  for (int i = 0; i < args.group_size * W; i += W) f_store(sums + i, f_zero());
  for (int sub = 0; sub < count; sub += kSubTile) {
    const int rows = count - sub < kSubTile ? count - sub : kSubTile;
    for (int g = 0; g < args.group_size; ++g) {
      float* row = p + g * kScoreTile + sub;
      if (!given) {
        const F maximum = f_set1(args.row_max[g]);
        for (int i = 0; i < rows; i += W) f_store(row + i, f_exp_fast<T>(f_sub(f_load(row + i), maximum)));
      }
      for (int i = rows; i < kSubTile; ++i) row[i] = 0.0f;
      F sum = f_load(sums + g * W);
      for (int i = 0; i < kSubTile; i += W) sum = f_add(sum, f_load(row + i));
      f_store(sums + g * W, sum);
    }
    accumulate_tile<T>(p + sub, kScoreTile, args.group_size, values.from(sub), rows, after_values.from(sub), head_dim,
                       args.acc);
  }
  for (int g = 0; g < args.group_size; ++g) args.row_sum[g] += f_sum(f_load(sums + g * W));
}

template <class T>
static void attend(const AttendArgs& args) {
  const typename TileOps<T>::Session session;
  const bool given = args.weights != nullptr;  // weights instead of scores: keys are not read
  const int64_t head_dim = args.head_dim;
  const int64_t n = args.tokens.n;
  const QueryBlock<T> query(args.query, given || args.scored != nullptr ? 0 : args.group_size, head_dim);
  alignas(64) float own_scores[kMaxGroupSize * kScoreTile];
  float* p = args.scored != nullptr ? args.scored : own_scores;
  for (int64_t i = 0; !args.continues && i < args.group_size * head_dim; ++i) args.acc[i] = 0.0f;
  for (int g = 0; !args.continues && g < args.group_size; ++g) {
    args.row_max[g] = given ? 0.0f : -3.0e38f;
    args.row_sum[g] = 0.0f;
  }
  int count = tile_size(args.values, args.tokens, 0);
  if (args.tokens.indices == nullptr) {
    for (int64_t begin = 0; begin < n; begin += count, count = tile_size(args.values, args.tokens, begin)) {
      const int64_t token = args.tokens.first + begin;
      attend_tile<T>(args, query.packed, begin, count, rows_from<T>(args.keys, token), Prefetch<T>::stream(),
                     rows_from<T>(args.values, token), Prefetch<T>::stream(), p);
    }
  } else if (given) {
    for (GatherStream<T> values(args.values, args.tokens); values.count() > 0; values.advance()) {
      attend_tile<T>(args, query.packed, values.begin(), values.count(), values.now(), Prefetch<T>(), values.now(),
                     values.ahead(), p);
    }
  } else {
    GatherWindow<T> keys, values;
    gather_pointers(args.keys, args.tokens, 0, count, keys.pointers[0]);
    gather_pointers(args.values, args.tokens, 0, count, values.pointers[0]);
    for (int64_t begin = 0; begin < n; keys.side ^= 1, values.side ^= 1) {
      const int next_count = tile_size(args.values, args.tokens, begin + count);
      gather_pointers(args.keys, args.tokens, begin + count, next_count, keys.pointers[keys.side ^ 1]);
      gather_pointers(args.values, args.tokens, begin + count, next_count, values.pointers[values.side ^ 1]);
      const Prefetch<T> after_keys{values.now().pointers};
      const Prefetch<T> after_values{next_count < count ? nullptr : keys.next()};
      attend_tile<T>(args, query.packed, begin, count, keys.now(), after_keys, values.now(), after_values, p);
      begin += count;
      count = next_count;
    }
  }
  if (args.ends) TileOps<T>::finish(args.acc, args.group_size, head_dim);
}

template <class T>
static void pack_input(const float* x, int64_t n, void* packed) {
  TileOps<T>::pack_input(x, n, static_cast<typename TileOps<T>::Query*>(packed));
}

template <class T, int G>
static inline void project_rows(const typename TileOps<T>::Query* x, int64_t width, const T* weight, int64_t count,
                                float* out, int64_t out_stride) {
  int64_t o = 0;
  for (; o + kRowTile <= count; o += kRowTile) {
    TileOps<T>::template project<G, kRowTile>(x, width, weight + o * width, out + o, out_stride);
  }
  for (; o < count; ++o) TileOps<T>::template project<G, 1>(x, width, weight + o * width, out + o, out_stride);
}

template <class T>
static void linear(const void* packed, int num_rows, int64_t in_features, const void* weight, int64_t first,
                   int64_t last, float* out, int64_t out_stride) {
  const auto* x = static_cast<const typename TileOps<T>::Query*>(packed);
  const T* w = static_cast<const T*>(weight) + first * in_features;
  const int64_t count = last - first;
  for (int row = 0; row < num_rows; row += kHeadBlock, x += kHeadBlock * in_features, out += kHeadBlock * out_stride) {
    switch (num_rows - row) {
      case 1:
        project_rows<T, 1>(x, in_features, w, count, out, out_stride);
        break;
      case 2:
        project_rows<T, 2>(x, in_features, w, count, out, out_stride);
        break;
      case 3:
        project_rows<T, 3>(x, in_features, w, count, out, out_stride);
        break;
      default:
        project_rows<T, 4>(x, in_features, w, count, out, out_stride);
    }
  }
}
