// What an index of clustered keys needs: sums of key rows, the nearest centroids of many points, and dot products with
// int8 rows. Included inside a per-ISA namespace after attention-inl.h.

// What of a row is multiplied at once: pairs of neighbouring products go to one lane.
inline constexpr int kDotWidth = W == 1 ? 1 : 2 * W;

// A query in whole steps of 1/32767 of its largest value, filled up with zeros; returns the step. 0 if the query is
// too small to have steps, NaN if one of its numbers is not finite.
static float round_query(const float* query, int head_dim, int16_t* rounded) {
  F largest = f_zero(), check = f_zero();
  for (int d = 0; d < head_dim; d += W) {
    const F x = f_load(query + d);
    largest = f_max(f_max(x, f_sub(f_zero(), x)), largest);
    check = f_fma(x, f_zero(), check);
  }
  const float limit = f_max_lane(largest);
  if (f_sum(check) != 0.0f) return NAN;
  if (limit < 1e-30f) return 0.0f;
  alignas(64) float whole[kMaxHeadDim];
  for (int d = 0; d < head_dim; d += W) f_store(whole + d, f_round(f_mul(f_load(query + d), f_set1(32767.0f / limit))));
  for (int d = 0; d < head_dim; ++d) rounded[d] = static_cast<int16_t>(whole[d]);
  for (int d = head_dim; d % kDotWidth != 0; ++d) rounded[d] = 0;
  return limit / 32767.0f;
}

template <int R>
static inline void score_int8_rows(const int16_t* query, int head_dim, const int8_t* rows, float scale, float* scores) {
  const int whole = head_dim / kDotWidth * kDotWidth;
  I sums[R];
  for (int r = 0; r < R; ++r) sums[r] = i_zero();
  for (int d = 0; d < whole; d += kDotWidth) {
    for (int r = 0; r < R; ++r) sums[r] = i_add_products(sums[r], i_load_pairs(rows + r * head_dim + d), query + d);
  }
  if (whole < head_dim) {
    for (int r = 0; r < R; ++r) {
      sums[r] = i_add_products(sums[r], i_load_half(rows + r * head_dim + whole), query + whole);
    }
  }
  F floats[R];
  for (int r = 0; r < R; ++r) floats[r] = f_from_ints(sums[r]);
  f_store_sums<1, R>(floats, scale, scores, R);
}

// scores[g * n + i] = <query[g], rows[i]>: raw sums, the caller knows the rows' scales. Sums of whole numbers: the rows
// are rounded to 8 bits already, and the query's 16 take a quarter of the time that floats do.
static void score_int8(const float* query, int group_size, int head_dim, const int8_t* rows, int64_t n, float* scores) {
  alignas(64) int16_t rounded[kMaxHeadDim];
  for (int g = 0; g < group_size; ++g, query += head_dim, scores += n) {
    const float step = round_query(query, head_dim, rounded);
    if (!(step > 0.0f)) {
      for (int64_t i = 0; i < n; ++i) scores[i] = step;
      continue;
    }
    int64_t i = 0;
    for (; i + 4 <= n; i += 4) score_int8_rows<4>(rounded, head_dim, rows + i * head_dim, step, scores + i);
    for (; i < n; ++i) score_int8_rows<1>(rounded, head_dim, rows + i * head_dim, step, scores + i);
  }
}

// out[d] = Σ_i row i [d], rows row_bytes apart
template <class T>
static void sum_rows(const void* rows, int64_t num_rows, int64_t row_bytes, int64_t width, float* out) {
  for (int64_t d = 0; d < width; d += W) {
    F sum = f_zero();
    for (int64_t i = 0; i < num_rows; ++i) {
      sum = f_add(sum, f_load_as(reinterpret_cast<const T*>(static_cast<const char*>(rows) + i * row_bytes) + d));
    }
    f_store(out + d, sum);
  }
}

// The register tile: kTilePoints points times kTileVectors vectors of centroids, one float of each point at a time.
inline constexpr int kTilePoints = 6;
inline constexpr int kTileVectors = W == 8 ? 2 : 4;  // 12 of AVX2's 16 registers, 24 of 32
inline constexpr int kCentroidBlock = kTileVectors * W;

// Blocks of kCentroidBlock centroids, each [width, kCentroidBlock]. The last block is filled up with copies of the last
// centroid, which never win: the first of equal centroids does.
static void pack_centroids(const float* centroids, int64_t num_centroids, int64_t width, float* packed) {
  for (int64_t first = 0; first < num_centroids; first += kCentroidBlock) {
    for (int64_t i = 0; i < kCentroidBlock; ++i) {
      const int64_t from = first + i < num_centroids ? first + i : num_centroids - 1;
      for (int64_t d = 0; d < width; ++d) packed[d * kCentroidBlock + i] = centroids[from * width + d];
    }
    packed += width * kCentroidBlock;
  }
}

// Of each point the centroid of largest dot product, the first of equals, and that product. A block of centroids stays
// in the first-level cache while all points pass.
static void nearest_centroids(const float* points, int64_t num_points, int64_t width, const float* packed,
                              int64_t num_centroids, int32_t* labels, float* products) {
  for (int64_t i = 0; i < num_points; ++i) {
    labels[i] = 0;
    products[i] = -INFINITY;
  }
  for (int64_t first = 0; first < num_centroids; first += kCentroidBlock, packed += width * kCentroidBlock) {
    for (int64_t begin = 0; begin < num_points; begin += kTilePoints) {
      const float* point[kTilePoints];
      for (int p = 0; p < kTilePoints; ++p) {
        point[p] = points + (begin + p < num_points ? begin + p : num_points - 1) * width;
      }
      F sums[kTilePoints][kTileVectors];
      for (int p = 0; p < kTilePoints; ++p) {
        for (int v = 0; v < kTileVectors; ++v) sums[p][v] = f_zero();
      }
      for (int64_t d = 0; d < width; ++d) {
        F centroid[kTileVectors];
        for (int v = 0; v < kTileVectors; ++v) centroid[v] = f_load(packed + d * kCentroidBlock + v * W);
        for (int p = 0; p < kTilePoints; ++p) {
          const F x = f_set1(point[p][d]);
          for (int v = 0; v < kTileVectors; ++v) sums[p][v] = f_fma(x, centroid[v], sums[p][v]);
        }
      }
      for (int p = 0; p < kTilePoints && begin + p < num_points; ++p) {
        F best = sums[p][0];
        for (int v = 1; v < kTileVectors; ++v) best = f_max(best, sums[p][v]);
        const float product = f_max_lane(best);
        if (!(product > products[begin + p])) continue;
        alignas(64) float all[kCentroidBlock];
        for (int v = 0; v < kTileVectors; ++v) f_store(all + v * W, sums[p][v]);
        int at = 0;
        while (at < kCentroidBlock - 1 && all[at] != product) ++at;
        labels[begin + p] = static_cast<int32_t>(first + at);
        products[begin + p] = product;
      }
    }
  }
}
