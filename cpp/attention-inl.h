// Scoring and attention over any tokens of one KV head: one body for dense and sparse, for every dtype.
// Tiles of rows are named by pointers, so pages and gathers cost the inner loops nothing. While a tile of keys is
// scored its values are prefetched, and while those are accumulated the next tile of keys is.
// Included inside a per-ISA namespace after tile_ops-inl.h.

// A tile is about 8 KiB: far enough ahead to hide DRAM latency, near enough that two tiles stay in L1.
static inline int tile_rows(int64_t row_bytes) {
  const int64_t rows = 8192 / row_bytes;
  return static_cast<int>(rows < 16 ? 16 : rows > kMaxTile ? kMaxTile : rows);
}

template <class T>
static inline void tile_pointers(const RowSource& source, const TokenSpan& tokens, int64_t begin, int count,
                                 const T** rows) {
  if (tokens.indices != nullptr) {
    for (int r = 0; r < count; ++r) rows[r] = static_cast<const T*>(source.row(tokens.indices[begin + r]));
    return;
  }
  const int64_t page_tokens = int64_t{1} << source.page_shift;
  int64_t t = tokens.first + begin;
  for (int r = 0; r < count;) {
    const char* row = static_cast<const char*>(source.row(t));
    const int64_t left_in_page = page_tokens - (t & (page_tokens - 1));
    const int run = static_cast<int>(left_in_page < count - r ? left_in_page : count - r);
    for (int j = 0; j < run; ++j) rows[r + j] = reinterpret_cast<const T*>(row + j * source.row_bytes);
    r += run;
    t += run;
  }
}

template <class T>
struct QueryBlock {
  alignas(64) typename TileOps<T>::Query packed[kMaxGroupSize * kMaxHeadDim];
  explicit QueryBlock(const float* query, int64_t n) { TileOps<T>::pack_query(query, n, packed); }
};

template <class T>
static inline void score_tile(const typename TileOps<T>::Query* query, int group_size, int64_t head_dim,
                              const T* const* rows, int count, const T* const* next, float scale, float* out,
                              int64_t stride) {
  for (int g = 0; g < group_size; g += kHeadBlock) {
    const T* const* ahead = g == 0 ? next : nullptr;
    const auto* q = query + g * head_dim;
    float* o = out + g * stride;
    switch (group_size - g) {
      case 1: TileOps<T>::template score<1>(q, head_dim, rows, count, ahead, scale, o, stride); break;
      case 2: TileOps<T>::template score<2>(q, head_dim, rows, count, ahead, scale, o, stride); break;
      case 3: TileOps<T>::template score<3>(q, head_dim, rows, count, ahead, scale, o, stride); break;
      default: TileOps<T>::template score<4>(q, head_dim, rows, count, ahead, scale, o, stride);
    }
  }
}

template <class T>
static inline void accumulate_tile(float* weights, int64_t weight_stride, int group_size, const T* const* rows,
                                   int count, const T* const* next, int64_t head_dim, float* acc) {
  for (int g = 0; g < group_size; g += kHeadBlock) {
    const T* const* ahead = g == 0 ? next : nullptr;
    float* w = weights + g * weight_stride;
    float* a = acc + g * head_dim;
    switch (group_size - g) {
      case 1: TileOps<T>::template accumulate<1>(w, weight_stride, rows, count, ahead, head_dim, a, head_dim); break;
      case 2: TileOps<T>::template accumulate<2>(w, weight_stride, rows, count, ahead, head_dim, a, head_dim); break;
      case 3: TileOps<T>::template accumulate<3>(w, weight_stride, rows, count, ahead, head_dim, a, head_dim); break;
      default: TileOps<T>::template accumulate<4>(w, weight_stride, rows, count, ahead, head_dim, a, head_dim);
    }
  }
}

template <class T>
static void score(const ScoreArgs& args) {
  const QueryBlock<T> query(args.query, int64_t{args.group_size} * args.head_dim);
  const int tile = tile_rows(args.keys.row_bytes);
  const T* buffers[2][kMaxTile];
  const T** rows = buffers[0];
  const T** next = buffers[1];
  const int64_t n = args.tokens.n;
  tile_pointers(args.keys, args.tokens, 0, static_cast<int>(n < tile ? n : tile), rows);
  for (int64_t begin = 0; begin < n; begin += tile) {
    const int count = static_cast<int>(n - begin < tile ? n - begin : tile);
    const int64_t left = args.prefetch_n - begin - count;
    const int ahead = static_cast<int>(left < tile ? left : tile);
    tile_pointers(args.keys, args.tokens, begin + count, ahead, next);
    score_tile<T>(query.packed, args.group_size, args.head_dim, rows, count, ahead >= count ? next : nullptr,
                  args.scale, args.scores + begin, args.score_stride);
    const T** swap = rows;
    rows = next;
    next = swap;
  }
}

template <class T>
static void attend(const AttendArgs& args) {
  const QueryBlock<T> query(args.query, args.weights == nullptr ? int64_t{args.group_size} * args.head_dim : 0);
  const int tile = tile_rows(args.values.row_bytes);
  const int group_size = args.group_size;
  const int64_t head_dim = args.head_dim;
  const int64_t n = args.tokens.n;
  const bool given = args.weights != nullptr;
  alignas(64) float p[kMaxGroupSize * kMaxTile];
  const T* key_rows[2][kMaxTile];
  const T* value_rows[2][kMaxTile];
  const T* const* no_rows = nullptr;

  for (int64_t i = 0; i < group_size * head_dim; ++i) args.acc[i] = 0.0f;
  for (int g = 0; g < group_size; ++g) {
    args.row_max[g] = given ? 0.0f : -3.0e38f;
    args.row_sum[g] = 0.0f;
  }
  int side = 0;
  const int first_count = static_cast<int>(n < tile ? n : tile);
  if (!given) tile_pointers(args.keys, args.tokens, 0, first_count, key_rows[0]);
  tile_pointers(args.values, args.tokens, 0, first_count, value_rows[0]);

  for (int64_t begin = 0; begin < n; begin += tile, side ^= 1) {
    const int count = static_cast<int>(n - begin < tile ? n - begin : tile);
    const int64_t left = n - begin - count;
    const int ahead = static_cast<int>(left < tile ? left : tile);
    const T* const* values = value_rows[side];
    tile_pointers(args.values, args.tokens, begin + count, ahead, value_rows[side ^ 1]);
    const T* const* next = value_rows[side ^ 1];
    const int padded = (count + 31) & ~31;

    if (given) {
      for (int g = 0; g < group_size; ++g) {
        for (int i = 0; i < count; ++i) p[g * kMaxTile + i] = args.weights[g * args.weight_stride + begin + i];
        for (int i = count; i < padded; ++i) p[g * kMaxTile + i] = 0.0f;
        F sum = f_zero();
        for (int i = 0; i < padded; i += W) sum = f_add(sum, TileOps<T>::weight_as_used(f_load(p + g * kMaxTile + i)));
        args.row_sum[g] += f_sum(sum);
      }
    } else {
      tile_pointers(args.keys, args.tokens, begin + count, ahead, key_rows[side ^ 1]);
      next = key_rows[side ^ 1];
      score_tile<T>(query.packed, group_size, head_dim, key_rows[side], count, values, args.scale, p, kMaxTile);
      for (int g = 0; g < group_size; ++g) {
        float* row = p + g * kMaxTile;
        if (args.scores != nullptr) {
          for (int i = 0; i < count; ++i) args.scores[g * args.score_stride + begin + i] = row[i];
        }
        for (int i = count; i < padded; ++i) row[i] = -3.0e38f;
        F highest = f_load(row);
        for (int i = W; i < padded; i += W) highest = f_max(highest, f_load(row + i));
        const float tile_max = f_max_lane(highest);
        if (tile_max > args.row_max[g]) {
          alignas(64) float factor[W];
          f_store(factor, f_exp(f_set1(args.row_max[g] - tile_max)));
          args.row_max[g] = tile_max;
          args.row_sum[g] *= factor[0];
          const F scale = f_set1(factor[0]);
          float* acc = args.acc + g * head_dim;
          for (int64_t d = 0; d < head_dim; d += W) f_store(acc + d, f_mul(f_load(acc + d), scale));
        }
        const F maximum = f_set1(args.row_max[g]);
        F sum = f_zero();
        for (int i = 0; i < padded; i += W) {
          const F weight = f_exp(f_sub(f_load(row + i), maximum));
          f_store(row + i, weight);
        }
        for (int i = count; i < padded; ++i) row[i] = 0.0f;
        for (int i = 0; i < padded; i += W) sum = f_add(sum, TileOps<T>::weight_as_used(f_load(row + i)));
        args.row_sum[g] += f_sum(sum);
      }
    }
    accumulate_tile<T>(p, kMaxTile, group_size, values, count, ahead >= count ? next : no_rows, head_dim, args.acc);
  }
  TileOps<T>::finish(args.acc, group_size, head_dim);
}

static float exp_shifted(float* x, int64_t n, float* sum) {
  const int64_t whole = n / W * W;
  F highest = f_set1(-3.0e38f);
  for (int64_t i = 0; i < whole; i += W) highest = f_max(highest, f_load(x + i));
  float maximum = f_max_lane(highest);
  for (int64_t i = whole; i < n; ++i) maximum = x[i] > maximum ? x[i] : maximum;
  F total = f_zero();
  for (int64_t i = 0; i < whole; i += W) {
    const F e = f_exp(f_sub(f_load(x + i), f_set1(maximum)));
    f_store(x + i, e);
    total = f_add(total, e);
  }
  float rest = 0.0f;
  if (whole < n) {
    alignas(64) float tail[W];
    for (int i = 0; i < W; ++i) tail[i] = whole + i < n ? x[whole + i] : maximum;
    f_store(tail, f_exp(f_sub(f_load(tail), f_set1(maximum))));
    for (int64_t i = whole; i < n; ++i) rest += x[i] = tail[i - whole];
  }
  *sum = f_sum(total) + rest;
  return maximum;
}

static void scale_add(const float* x, float factor, int64_t n, bool accumulate, float* importance) {
  const int64_t whole = n / W * W;
  const F f = f_set1(factor);
  for (int64_t i = 0; i < whole; i += W) {
    const F base = accumulate ? f_load(importance + i) : f_zero();
    f_store(importance + i, f_fma(f_load(x + i), f, base));
  }
  for (int64_t i = whole; i < n; ++i) importance[i] = x[i] * factor + (accumulate ? importance[i] : 0.0f);
}

// Four rows of weights at a time, like key rows; the rows after them are prefetched.
template <class T>
static void linear(const float* x, int num_rows, int64_t in_features, const void* weight, int64_t first, int64_t last,
                   float* out, int64_t out_stride) {
  using Query = typename TileOps<T>::Query;
  const T* w = static_cast<const T*>(weight);
  for (int row = 0; row < num_rows; row += kHeadBlock) {
    const int group = num_rows - row < kHeadBlock ? num_rows - row : kHeadBlock;
    // The input block is packed once a call; 4 rows of a 28,672-wide MLP are 224 KiB of bf16.
    Query* packed = static_cast<Query*>(
        ::operator new(sizeof(Query) * static_cast<size_t>(group * in_features), std::align_val_t{64}));
    for (int g = 0; g < group; ++g) {
      TileOps<T>::pack_query(x + (row + g) * in_features, in_features, packed + g * in_features);
    }
    const T* rows[kMaxTile];
    for (int64_t o = first; o < last; o += kMaxTile) {
      const int count = static_cast<int>(last - o < kMaxTile ? last - o : kMaxTile);
      for (int r = 0; r < count; ++r) rows[r] = w + (o + r) * in_features;
      score_tile<T>(packed, group, in_features, rows, count, nullptr, 1.0f, out + row * out_stride + (o - first),
                    out_stride);
    }
    ::operator delete(packed, std::align_val_t{64});
  }
}

static uint64_t read_bytes(const void* data, int64_t num_bytes) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < num_bytes; i += 4096) {
    sum += read_chunk(static_cast<const char*>(data) + i, num_bytes - i < 4096 ? num_bytes - i : 4096);
  }
  return sum;
}

static uint64_t read_rows(const void* data, const int32_t* rows, int64_t num_rows, int64_t row_bytes) {
  constexpr int64_t kAhead = 32;
  const char* base = static_cast<const char*>(data);
  uint64_t sum = 0;
  for (int64_t i = 0; i < num_rows; ++i) {
    if (i + kAhead < num_rows) prefetch_row(base + rows[i + kAhead] * row_bytes, row_bytes);
    sum += read_chunk(base + rows[i] * row_bytes, row_bytes);
  }
  return sum;
}
