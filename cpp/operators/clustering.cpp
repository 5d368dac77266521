#include "operators/clustering.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace offload {
namespace {

constexpr int64_t kPointTile = 96;  // points of one task: they stay in the second-level cache
constexpr int64_t kChunkTile = 64;

// Scales x to unit length; leaves it where it has none.
void normalize(float* x, int64_t width) {
  double squares = 0.0;
  for (int64_t d = 0; d < width; ++d) squares += double{x[d]} * x[d];
  if (!(squares > 0.0)) return;
  const auto inverse = static_cast<float>(1.0 / std::sqrt(squares));
  for (int64_t d = 0; d < width; ++d) x[d] *= inverse;
}

// One head's part of the problem.
struct Head {
  const float* points;
  int32_t* labels;
  float* centroids;
  std::vector<float> packed;
  std::vector<float> products;  // of each point with its centroid
  std::vector<int32_t> old_labels;
  std::vector<int64_t> counts;
  std::vector<int32_t> worst;  // points, the worst-fitting first
  bool converged = false;
};

// Moves a point of a cluster that has others into each empty one.
void fill_empty(const KMeansArgs& args, Head& head) {
  if (std::find(head.counts.begin(), head.counts.end(), 0) == head.counts.end()) return;
  head.worst.resize(static_cast<size_t>(args.num_points));
  for (size_t i = 0; i < head.worst.size(); ++i) head.worst[i] = static_cast<int32_t>(i);
  std::stable_sort(head.worst.begin(), head.worst.end(), [&](int32_t a, int32_t b) {
    return head.products[static_cast<size_t>(a)] < head.products[static_cast<size_t>(b)];
  });
  auto next = head.worst.begin();
  for (int64_t c = 0; c < args.num_clusters; ++c) {
    if (head.counts[static_cast<size_t>(c)] != 0) continue;
    // There are at least as many points as clusters, so some cluster has two.
    while (head.counts[static_cast<size_t>(head.labels[*next])] < 2) ++next;
    --head.counts[static_cast<size_t>(head.labels[*next])];
    head.labels[*next] = static_cast<int32_t>(c);
    head.counts[static_cast<size_t>(c)] = 1;
    ++next;
  }
}

void update(const KMeansArgs& args, Head& head) {
  head.converged = std::equal(head.old_labels.begin(), head.old_labels.end(), head.labels);
  if (head.converged) return;
  std::fill(head.counts.begin(), head.counts.end(), 0);
  for (int64_t i = 0; i < args.num_points; ++i) ++head.counts[static_cast<size_t>(head.labels[i])];
  fill_empty(args, head);
  std::copy(head.labels, head.labels + args.num_points, head.old_labels.begin());
  std::fill(head.centroids, head.centroids + args.num_clusters * args.width, 0.0f);
  for (int64_t i = 0; i < args.num_points; ++i) {
    float* sum = head.centroids + head.labels[i] * args.width;
    const float* point = head.points + i * args.width;
    for (int64_t d = 0; d < args.width; ++d) sum[d] += point[d];
  }
  for (int64_t c = 0; c < args.num_clusters; ++c) normalize(head.centroids + c * args.width, args.width);
}

}  // namespace

void chunk_boxes(const KernelTable& kernels, WorkerPool& pool, const ChunkBoxArgs& args) {
  const int64_t tiles = (args.num_chunks + kChunkTile - 1) / kChunkTile;
  const auto to_float = kernels.to_float[static_cast<int>(args.dtype)];
  pool.parallel_for(args.num_heads * tiles, [&](int64_t task, int) {
    const int64_t head = task / tiles;
    const int64_t first = task % tiles * kChunkTile;
    const char* keys = static_cast<const char*>(args.keys) + head * args.head_bytes;
    for (int64_t i = first; i < std::min(first + kChunkTile, args.num_chunks); ++i) {
      const int64_t at = (head * args.num_chunks + i) * args.width;
      const int64_t n = args.starts[i + 1] - args.starts[i];
      const char* rows = keys + args.starts[i] * args.row_bytes;
      float row[kMaxHeadDim], low[kMaxHeadDim], high[kMaxHeadDim];
      float* mean = args.points + at;
      to_float(rows, args.width, mean);
      std::copy(mean, mean + args.width, low);
      std::copy(mean, mean + args.width, high);
      for (int64_t r = 1; r < n; ++r) {
        to_float(rows + r * args.row_bytes, args.width, row);
        for (int64_t d = 0; d < args.width; ++d) {
          mean[d] += row[d];
          low[d] = std::min(low[d], row[d]);
          high[d] = std::max(high[d], row[d]);
        }
      }
      for (int64_t d = 0; d < args.width; ++d) {
        mean[d] /= static_cast<float>(n);
        args.centres[at + d] = 0.5f * mean[d] + 0.25f * (low[d] + high[d]);
        args.widths[at + d] = 0.5f * (high[d] - low[d]);
      }
      normalize(mean, args.width);
    }
  });
}

void spherical_kmeans(const KernelTable& kernels, WorkerPool& pool, const KMeansArgs& args) {
  const int64_t n = args.num_points;
  const int64_t k = args.num_clusters;
  const int64_t width = args.width;
  const int64_t blocks = (k + kernels.centroid_block - 1) / kernels.centroid_block;
  const int64_t block_floats = kernels.centroid_block * width;
  std::vector<Head> heads(static_cast<size_t>(args.num_heads));
  for (int64_t h = 0; h < args.num_heads; ++h) {
    Head& head = heads[static_cast<size_t>(h)];
    head.points = args.points + h * n * width;
    head.labels = args.labels + h * n;
    head.centroids = args.centroids + h * k * width;
    head.packed.resize(static_cast<size_t>(blocks * block_floats));
    head.products.resize(static_cast<size_t>(n));
    head.old_labels.assign(static_cast<size_t>(n), -1);
    head.counts.resize(static_cast<size_t>(k));
    for (int64_t c = 0; c < k; ++c) {
      std::memcpy(head.centroids + c * width, head.points + c * n / k * width,
                  static_cast<size_t>(width) * sizeof(float));
    }
  }
  const int64_t tiles = (n + kPointTile - 1) / kPointTile;
  for (int64_t iteration = 0; iteration < args.iterations; ++iteration) {
    pool.parallel_for(args.num_heads * blocks, [&](int64_t task, int) {
      Head& head = heads[static_cast<size_t>(task / blocks)];
      if (head.converged) return;
      const int64_t block = task % blocks;
      const int64_t first = block * kernels.centroid_block;
      kernels.pack_centroids(head.centroids + first * width, std::min(kernels.centroid_block, k - first), width,
                             head.packed.data() + block * block_floats);
    });
    pool.parallel_for(args.num_heads * tiles, [&](int64_t task, int) {
      Head& head = heads[static_cast<size_t>(task / tiles)];
      if (head.converged) return;
      const int64_t first = task % tiles * kPointTile;
      kernels.nearest_centroids(head.points + first * width, std::min(kPointTile, n - first), width, head.packed.data(),
                                k, head.labels + first, head.products.data() + first);
    });
    pool.parallel_for(args.num_heads, [&](int64_t h, int) {
      Head& head = heads[static_cast<size_t>(h)];
      if (!head.converged) update(args, head);
    });
  }
}

}  // namespace offload
