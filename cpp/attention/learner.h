// Tells the policy what units attended to, and that their newest tokens are there.
#pragma once

#include <cstdint>

#include "attention/attender.h"
#include "attention/layer_pass.h"

namespace offload {

class Learner {
 public:
  Learner(LayerPass& pass, Attender& attender) : pass_(pass), setup_(pass.setup), attender_(attender) {}

  // One unit's observe() and append().
  void update(int r, int u, int worker);
  // Or all that the pass deferred, as tasks.
  int64_t num_tasks() const;
  void run_task(int64_t task, int worker);

 private:
  LayerPass& pass_;
  AttentionSetup& setup_;
  Attender& attender_;
};

}  // namespace offload
