// Attends to what units have chosen, piece by piece, and merges the pieces. Called from several workers at a time, each
// for other pieces.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/estimate.h"
#include "attention/lane_plan.h"
#include "attention/layer_pass.h"
#include "attention/selector.h"

namespace offload {

class Attender {
 public:
  Attender(LayerPass& pass, const Selector& selector, const Estimate& estimate)
      : pass_(pass),
        setup_(pass.setup),
        selector_(selector),
        estimate_(estimate),
        dense_scores_(static_cast<size_t>(setup_.pool.num_threads())) {}

  // For so many partial results of units, before the first piece.
  void make_room(int64_t num_parts);
  void attend(const Piece& piece, int worker);
  // Exact merge of a unit's pieces, and of its rest, into its row's output, lse and weights. False where they are not
  // finite, which is reported. The unit's lse is that of its tokens.
  bool merge(int r, int u);
  // The normalised weights [group, n] of a unit's tokens, whether attended here or on the device, in place of its
  // scores. Null where they are not known.
  float* weights_of(int r, int u);

 private:
  AttendArgs args_of(int r, int u, int split);
  void attend_dense(const Piece& piece, int worker);
  void write_nothing(int r, int u);
  void score_window(int r, int u, float* lse);

  LayerPass& pass_;
  AttentionSetup& setup_;
  const Selector& selector_;
  const Estimate& estimate_;
  std::vector<float> parts_;                      // [parts, unit_group, head_dim + 2]: acc, then max, then sum
  std::vector<std::vector<float>> dense_scores_;  // of each worker: [units, group, kScoreTile]
};

}  // namespace offload
