// Exact attention mass of a random share of what a policy selects for: all keys of a KV head are scored, and what the
// selected ones among them weigh is what the policy kept. Values are not read, outputs do not change.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/layer_pass.h"
#include "attention/quality_probe.h"

namespace offload {

class ProbeScan {
 public:
  explicit ProbeScan(LayerPass& pass) : pass_(pass), setup_(pass.setup) {}

  QualityProbe& quality() { return quality_; }
  const QualityProbe& quality() const { return quality_; }
  // Draws among the KV heads of the pass for which the policy selected here; those that attend to all are exact.
  void draw();
  // Compares what was drawn, or forgets it.
  void run();
  void drop() { probes_.clear(); }

 private:
  void scan(const Probe& probe, int64_t first, int64_t last, PartialMass* masses) const;

  LayerPass& pass_;
  AttentionSetup& setup_;
  QualityProbe quality_;
  std::vector<Probe> probes_;  // drawn, and not yet compared
};

}  // namespace offload
