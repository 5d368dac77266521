// The rest: what a unit has not chosen, estimated instead of dropped. Its tokens are in clusters by their keys; each
// cluster is one more row of attention, with the means of its keys and values, and log(tokens left) added to its score.
// The arrays are those of offload/selection/estimate.py, behind the policy's own.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/layer_pass.h"

namespace offload {

// Of a KV head; mirrored field for field by offload/selection/estimate.py.
struct EstimateHeader {
  int64_t end;       // tokens below are in clusters, but for sinks
  int64_t capacity;  // of cluster_of, in tokens
  int64_t taken;     // tokens that the last step took in
  int64_t cluster;   // that of the last one
};

inline constexpr int kNumEstimateArrays = 7;
inline constexpr uint8_t kNoCluster = 255;

// The arrays of a layer, at one KV head.
struct EstimateArrays {
  EstimateHeader* header;
  float* keys;          // [clusters, head_dim]: means
  float* values;        // the same
  float* inverse_norm;  // [clusters]: of the keys
  int32_t* counts;      // [clusters]: tokens
  float* undo;          // the last cluster that grew as it was: key, value, inverse norm, count
  uint8_t* cluster_of;  // [capacity]: of each token
};

class Estimate {
 public:
  explicit Estimate(LayerPass& pass) : pass_(pass), setup_(pass.setup) {}

  bool is_on() const { return setup_.policy.estimate_clusters > 0; }
  // Tokens that have left the recent window of the pass's rows join the clusters of their keys.
  void take_in();
  // The same of one head, of a row that has `kv_len` tokens by now, for those who attend elsewhere. False: it has none.
  bool take_in(int r, int kv_head, int64_t kv_len, EstimateArrays* arrays);
  // The partial softmax of a unit's rest: acc [group, head_dim], then maxima, then sums. False: there is none.
  bool attend(int r, int u, float* part) const;

 private:
  bool arrays_of(int r, int kv_head, EstimateArrays* arrays) const;
  void add(const EstimateArrays& arrays, const QueryRow& row, int kv_head, int64_t token);
  int nearest(const EstimateArrays& arrays, const float* key) const;

  LayerPass& pass_;
  AttentionSetup& setup_;
};

}  // namespace offload
