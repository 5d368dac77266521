// What an index of clustered keys is made of: the nearest centroids of many points. Included
// inside a per-ISA namespace after register_tile-inl.h.

inline constexpr int kCentroidBlock = kPanelColumns;

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
    for (int64_t begin = 0; begin < num_points; begin += kProductRows) {
      const float* point[kProductRows];
      for (int p = 0; p < kProductRows; ++p) {
        point[p] = points + (begin + p < num_points ? begin + p : num_points - 1) * width;
      }
      F sums[kProductRows][kProductVectors] = {};
      add_products(point, packed, kCentroidBlock, width, sums);
      for (int p = 0; p < kProductRows && begin + p < num_points; ++p) {
        F best = sums[p][0];
        for (int v = 1; v < kProductVectors; ++v) best = f_max(best, sums[p][v]);
        const float product = f_max_lane(best);
        if (!(product > products[begin + p])) continue;
        alignas(64) float all[kCentroidBlock];
        for (int v = 0; v < kProductVectors; ++v) f_store(all + v * W, sums[p][v]);
        int at = 0;
        while (at < kCentroidBlock - 1 && all[at] != product) ++at;
        labels[begin + p] = static_cast<int32_t>(first + at);
        products[begin + p] = product;
      }
    }
  }
}
