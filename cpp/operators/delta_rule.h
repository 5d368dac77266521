// The mixer of a layer with the gated delta rule (Gated DeltaNet, arXiv 2412.06464, equation 10) in a decode step, from
// its projections to what its output projection reads: a short convolution, the step, and a gated RMSNorm.
#pragma once

#include <cstdint>

#include "kernels/kernels.h"
#include "pool/worker_pool.h"

namespace offload {

struct DeltaShape {
  DType dtype;
  int64_t num_k_heads;
  int64_t num_v_heads;  // a multiple of num_k_heads
  int64_t k_dim;
  int64_t v_dim;
  int64_t conv_width;  // tokens that the convolution sees, the newest included

  int64_t heads_per_key() const { return num_v_heads / num_k_heads; }
  int64_t channels() const { return 2 * num_k_heads * k_dim + num_v_heads * v_dim; }
};

// Where the part of a key head is in a row of projections, in elements: first + head * stride.
struct HeadPlace {
  int64_t first;
  int64_t stride;
};

struct DeltaPlaces {
  HeadPlace query, key, value, gate, beta, alpha;
};

struct DeltaWeights {
  const void* conv;      // [channels, conv_width], of queries, keys, values
  const void* norm;      // [v_dim]
  const float* rate;     // [num_v_heads], exp(A_log)
  const float* dt_bias;  // [num_v_heads]
  float eps;
};

struct DeltaRule {
  DeltaShape shape;
  DeltaPlaces places;
  DeltaWeights weights;

  // A token of each row. projected: [num_rows, row_size]; conv_state: [num_rows, channels, conv_width], the last
  // tokens' inputs; state: [num_rows, num_v_heads, k_dim, v_dim]; both are then those of the token. out: [num_rows,
  // num_v_heads * v_dim].
  void run(const KernelTable& kernels, WorkerPool& pool, const void* projected, int64_t num_rows, int64_t row_size,
           void* conv_state, float* state, void* out) const;
};

}  // namespace offload
