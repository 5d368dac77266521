// A layer as lanes of one job: a unit is asked about, its candidates are scored, its tokens attended piece by piece and
// its pieces merged, each as soon as what comes before is done for that unit. Workers that have nothing to do for one
// unit help another.
#pragma once

#include <cstdint>

#include "attention/attender.h"
#include "attention/lane_plan.h"
#include "attention/layer_pass.h"
#include "attention/learner.h"
#include "attention/selector.h"
#include "pool/staged_lanes.h"

namespace offload {

class LaneJob {
 public:
  LaneJob(LayerPass& pass, Selector& selector, Attender& attender, Learner& learner)
      : pass_(pass), setup_(pass.setup), selector_(selector), attender_(attender), learner_(learner), plan_(pass) {}

  // Attends all units of the pass, and with `prepares` calls the policy's prepare() of those that are asked about.
  void run(bool prepares);

  // For StagedLanes.
  void task(int64_t lane, int stage, int64_t i, int worker);
  StagedLanes::Stage advance(int64_t lane, int stage, int worker);

 private:
  void run_known();
  StagedLanes::Stage begin_attending(const Lane& lane);
  StagedLanes::Stage stage_of_candidates(int r, int u, int stage);
  void merge(int r, int u, int worker);

  LayerPass& pass_;
  AttentionSetup& setup_;
  Selector& selector_;
  Attender& attender_;
  Learner& learner_;
  LanePlan plan_;
  StagedLanes staged_;
  bool prepares_ = false;
};

}  // namespace offload
