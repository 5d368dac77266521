// Spherical k-means over the keys of a layer, all KV heads at once, on the worker pool.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"
#include "pool/worker_pool.h"

namespace offload {

// Of each chunk's rows the normalised mean, the middle between their mean and the centre of the box that they fill, and
// half of that box's widths. Chunk i holds rows [starts[i], starts[i + 1]) of a head; a mean of zero stays zero.
struct ChunkBoxArgs {
  const void* keys;
  DType dtype;
  int64_t num_heads;
  int64_t head_bytes;  // from one head to the next
  int64_t row_bytes;   // from one row to the next
  int64_t width;
  const int64_t* starts;  // [num_chunks + 1]
  int64_t num_chunks;
  float* points;   // out [num_heads, num_chunks, width]: normalised means
  float* centres;  // out, as points
  float* widths;   // out, as points: halves
};
void chunk_boxes(const KernelTable& kernels, WorkerPool& pool, const ChunkBoxArgs& args);

// Deterministic: starts from points at equal distances, and does not depend on the number of threads. A cluster that
// loses all its points gets the point that fits its own cluster worst, so that none is empty.
struct KMeansArgs {
  const float* points;  // [num_heads, num_points, width]
  int64_t num_heads;
  int64_t num_points;
  int64_t width;
  int64_t num_clusters;  // at most num_points
  int64_t iterations;    // at least 1; fewer are made where labels stop changing
  int32_t* labels;       // out [num_heads, num_points]
  float* centroids;      // out [num_heads, num_clusters, width]: normalised means of the labelled points
};
void spherical_kmeans(const KernelTable& kernels, WorkerPool& pool, const KMeansArgs& args);

}  // namespace offload
