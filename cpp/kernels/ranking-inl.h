// Ranks of boxes around the keys of a chunk, in rows of bytes, for the best of several queries, as an index of chunks
// asks for them (offload/policies/lychee_cluster). Included inside a per-ISA namespace after vector_math-inl.h.

// What of a row is multiplied at once: pairs of neighbouring products go to one lane.
inline constexpr int kDotWidth = W == 1 ? 1 : 2 * W;
inline constexpr int kRankTile = 64;  // rows whose sums stay in the first-level cache
inline constexpr int kRankHeads = 4;  // queries that share the loads of a row
inline constexpr int kScalesOfLine = 32;

// So many steps have the largest number of a query, and its square.
inline constexpr float kSteps = 127.0f, kSquareSteps = 16383.0f;
static_assert(int64_t{225} * 16383 * kMaxHeadDim <= INT32_MAX);  // a scalar lane has the products of a whole row

// A query in whole steps, filled up with zeros; returns the step. 0 if the query is too small to have steps, NaN if one
// of its numbers is not finite.
static float round_query(const float* query, int head_dim, int16_t* rounded) {
  F largest = f_zero(), check = f_zero();
  for (int d = 0; d < head_dim; d += W) {
    const F x = f_load(query + d);
    largest = f_max(f_max(x, f_sub(f_zero(), x)), largest);
    check = f_fma(x, f_zero(), check);
  }
  const float limit = f_max_lane(largest);
  if (f_sum(check) != 0.0f) return NAN;
  std::memset(rounded, 0, kMaxHeadDim * sizeof(int16_t));
  if (limit < 1e-30f) return 0.0f;
  alignas(64) float whole[kMaxHeadDim];
  for (int d = 0; d < head_dim; d += W) {
    f_store(whole + d, f_round(f_mul(f_load(query + d), f_set1(kSteps / limit))));
  }
  for (int d = 0; d < head_dim; ++d) rounded[d] = static_cast<int16_t>(whole[d]);
  return limit / kSteps;
}

// The squares of a query's numbers in whole steps; the root of the step.
static float round_squares(const float* query, int head_dim, int16_t* rounded) {
  float limit = 0.0f;
  for (int d = 0; d < head_dim; ++d) {
    const float x = std::fabs(query[d]);
    limit = limit < x ? x : limit;
  }
  std::memset(rounded, 0, kMaxHeadDim * sizeof(int16_t));
  if (!(limit >= 1e-30f)) return 0.0f;
  for (int d = 0; d < head_dim; ++d) {
    const float x = query[d] / limit;
    rounded[d] = static_cast<int16_t>(x * x * kSquareSteps + 0.5f);
  }
  return limit / std::sqrt(kSquareSteps);
}

// What of a row's bytes is multiplied: numbers of the low half, -8 to 7; the squares of the high half's, 0 to 225, of
// which 256 times 16383 fit an int32.
enum class Part { low, high_squared };

template <Part P>
static inline auto load_part(const int8_t* bytes) {
  const auto row = i_load_pairs(bytes);
  if constexpr (P == Part::low) return i_low_nibbles(row);
  if constexpr (P == Part::high_squared) return i_high_squares(row);
}

// sums[g * kRankTile + r] = <query[g], row r>: sums of whole numbers. The rows are rounded already, and the query's 16
// bits take a quarter of the time that floats do. Up to kDotWidth - 1 numbers beyond the last row are read.
// D: head_dim, where the loop over it is to be unrolled, or 0.
template <Part P, int G, int R, int D>
static inline void dot_bytes(const int16_t (*query)[kMaxHeadDim], int head_dim, const int8_t* rows, float* sums) {
  if (D > 0) head_dim = D;
  I products[G * R];
  for (int i = 0; i < G * R; ++i) products[i] = i_zero();
#pragma GCC unroll 8
  for (int d = 0; d < head_dim; d += kDotWidth) {
    for (int r = 0; r < R; ++r) {
      const auto row = load_part<P>(rows + r * head_dim + d);
      for (int g = 0; g < G; ++g) products[g * R + r] = i_add_products(products[g * R + r], row, query[g] + d);
    }
  }
  F floats[G * R];
  for (int i = 0; i < G * R; ++i) floats[i] = f_from_ints(products[i]);
  f_store_sums<G, R>(floats, 1.0f, sums, kRankTile);
}

// `ahead`: rows that will be asked for next, which these may not be followed by in memory.
template <Part P, int G, int D>
static void dot_rows_of(const int16_t (*query)[kMaxHeadDim], int head_dim, const int8_t* rows, int n,
                        const int8_t* ahead, float* sums) {
  const int whole = head_dim % kDotWidth == 0 ? n : n - 1;
  int r = 0;
  for (; r + kRowTile <= whole; r += kRowTile) {
    for (int i = 0; i < kRowTile * head_dim; i += 64) prefetch_l1(ahead + r * head_dim + i);
    dot_bytes<P, G, kRowTile, D>(query, head_dim, rows + r * head_dim, sums + r);
  }
  for (; r < whole; ++r) dot_bytes<P, G, 1, 0>(query, head_dim, rows + r * head_dim, sums + r);
  if (r < n) {
    int8_t last[kMaxHeadDim + kDotWidth] = {};
    std::memcpy(last, rows + r * head_dim, static_cast<size_t>(head_dim));
    dot_bytes<P, G, 1, 0>(query, head_dim, last, sums + r);
  }
}

template <Part P, int G>
static void dot_rows(const int16_t (*query)[kMaxHeadDim], int head_dim, const int8_t* rows, int n, const int8_t* ahead,
                     float* sums) {
  if (head_dim == 128) return dot_rows_of<P, G, 128>(query, head_dim, rows, n, ahead, sums);
  if (head_dim == 64) return dot_rows_of<P, G, 64>(query, head_dim, rows, n, ahead, sums);
  dot_rows_of<P, G, 0>(query, head_dim, rows, n, ahead, sums);
}

template <Part P>
static void dot_rows(const int16_t (*query)[kMaxHeadDim], int num_queries, int head_dim, const int8_t* rows, int n,
                     const int8_t* ahead, float* sums) {
  if (num_queries == 4) dot_rows<P, 4>(query, head_dim, rows, n, ahead, sums);
  if (num_queries == 3) dot_rows<P, 3>(query, head_dim, rows, n, ahead, sums);
  if (num_queries == 2) dot_rows<P, 2>(query, head_dim, rows, n, ahead, sums);
  if (num_queries == 1) dot_rows<P, 1>(query, head_dim, rows, n, ahead, sums);
}

// What ranks boxes by rounded queries and their squares: sums of products with their centres, and of squares of both.
struct WordBoxes {
  alignas(64) int16_t numbers[kMaxGroupSize][kMaxHeadDim];
  alignas(64) int16_t squares[kMaxGroupSize][kMaxHeadDim];

  void set(int g, const int16_t* of_query, const int16_t* of_squares) {
    std::memcpy(numbers[g], of_query, sizeof(numbers[g]));
    std::memcpy(squares[g], of_squares, sizeof(squares[g]));
  }

  // Of queries from g on; sums[h * kRankTile + r] of row r.
  void dot(int g, int num_queries, int head_dim, const int8_t* rows, int n, const int8_t* ahead, float* sums,
           float* widths) const {
    dot_rows<Part::low>(numbers + g, num_queries, head_dim, rows, n, ahead, sums);
    dot_rows<Part::high_squared>(squares + g, num_queries, head_dim, rows, n, rows, widths);
  }
};

template <typename Boxes>
static void rank_rows(const RankArgs& args) {
  alignas(64) int16_t rounded[kMaxHeadDim] = {}, squares[kMaxHeadDim];
  Boxes boxes;
  float steps[kMaxGroupSize], reaches[kMaxGroupSize], check = 0.0f;
  for (int g = 0; g < args.num_queries; ++g) {
    const float* query = args.query + g * args.head_dim;
    steps[g] = round_query(query, args.head_dim, rounded);
    reaches[g] = args.spread_weight * round_squares(query, args.head_dim, squares);
    boxes.set(g, rounded, squares);
    check += steps[g];
  }
  float* ranks = args.ranks;
  alignas(64) float sums[kRankHeads * kRankTile] = {}, widths[kRankHeads * kRankTile] = {};
  alignas(64) float scales[kRankTile] = {}, spreads[kRankTile] = {};
  for (int range = 0; range < args.num_ranges; ++range) {
    const int64_t end = args.ranges[2 * range + 1];
    for (int64_t first = args.ranges[2 * range]; first < end; first += kRankTile) {
      const int n = static_cast<int>(end - first < kRankTile ? end - first : kRankTile);
      const bool goes_on = first + n < end;
      const int64_t next = goes_on || range + 1 == args.num_ranges ? first + n : args.ranges[2 * range + 2];
      const int8_t* rows = args.rows + first * args.head_dim;
      const int8_t* ahead = args.rows + next * args.head_dim;
      for (int i = 0; i <= kRankTile; i += kScalesOfLine) {
        prefetch_l1(args.scales + next + i);
        prefetch_l1(args.spreads + next + i);
      }
      for (int i = 0; i < n; ++i) scales[i] = to_float(args.scales[first + i]);
      for (int i = 0; i < n; ++i) spreads[i] = to_float(args.spreads[first + i]);
      alignas(64) float best[kRankTile];
      for (int i = 0; i < kRankTile; ++i) best[i] = check == check ? -INFINITY : NAN;
      for (int g = 0; g < args.num_queries && check == check; g += kRankHeads) {
        const int heads = args.num_queries - g < kRankHeads ? args.num_queries - g : kRankHeads;
        boxes.dot(g, heads, args.head_dim, rows, n, ahead, sums, widths);
        for (int h = 0; h < heads; ++h) {
          float* of_head = widths + h * kRankTile;
          for (int i = 0; i < n; i += W) f_store(of_head + i, f_sqrt(f_load(of_head + i)));
        }
        for (int h = 0; h < heads; ++h) {
          const float step = steps[g + h], reach = reaches[g + h];
          for (int i = 0; i < n; ++i) {
            const int at = h * kRankTile + i;
            const float rank = step * scales[i] * sums[at] + reach * spreads[i] * widths[at];
            best[i] = rank > best[i] ? rank : best[i];  // what is no number ranks last
          }
        }
      }
      std::memcpy(ranks, best, static_cast<size_t>(n) * sizeof(float));
      ranks += n;
    }
  }
}
