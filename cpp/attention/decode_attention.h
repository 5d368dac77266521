// One layer's decode attention over the host KV store: dense or under a policy, on the worker pool, without the GIL.
//
// LayerPass is the layer as data. KeyScan scores all keys, Selector asks the policy and chooses, LanePlan cuts what is
// attended into pieces, Attender attends and merges them, Estimate stands for what is not chosen, Learner tells the
// policy; LaneJob does all but the scan as one job of the pool. ProbeScan and CacheWarmer are for times in which nobody
// waits.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "attention/attender.h"
#include "attention/attention_setup.h"
#include "attention/cache_warmer.h"
#include "attention/estimate.h"
#include "attention/key_scan.h"
#include "attention/lane_job.h"
#include "attention/layer_pass.h"
#include "attention/learner.h"
#include "attention/probe_scan.h"
#include "attention/selector.h"

namespace offload {

class DecodeAttention {
 public:
  // `shapes`: of each layer, or one of all.
  DecodeAttention(std::vector<AttentionShape> shapes, const KernelTable& kernels, WorkerPool& pool)
      : setup_(std::move(shapes), kernels, pool) {}

  // Without a layer for who needs layers whose heads are alike.
  const AttentionShape& shape(int64_t layer_idx = 0) const { return setup_.shape_of(layer_idx); }
  const KernelTable& kernels() const { return setup_.kernels; }
  WorkerPool& pool() { return setup_.pool; }
  Trace& trace() { return setup_.trace; }  // of each worker's tasks, and of who leads them

  const PolicyFunctions& policy() const { return setup_.policy; }
  void set_policy(const PolicyFunctions& policy) {
    setup_.policy = policy;
    setup_.per_query_head = policy.per_query_head;
  }
  // Between steps: the share of the attention weight at which selections end from now on, whatever a head keeps of its
  // own.
  void hold_top_p(double top_p) {
    setup_.policy.top_p = top_p;
    setup_.policy.least_of_head = 0.0;
  }
  std::pair<int64_t, int64_t> take_chosen() { return selector_.take_chosen(); }
  // For explicit selections, which may be for other units than the policy's.
  void set_units_per_row(bool per_query_head) { setup_.per_query_head = per_query_head; }
  int num_units() const { return setup_.units(); }

  // Attends all rows: units that have at most dense_tokens, or all where `sparse` is false, to all of them, others by
  // their roles.
  // Returns an empty string, or what was wrong with the numbers ("non-finite …") or with the policy, in a prepare() or
  // update() before as well; outputs are then unusable.
  // `first_row` numbers rows[0] in its step: where rows are attended in several calls, each finds what it published.
  // With `prepares`, the policy's prepare() runs first, for callers that have nothing to overlap it with.
  std::string attend(int64_t layer_idx, const std::vector<QueryRow>& rows, bool sparse, int first_row = 0,
                     bool prepares = false, const AttendOptions& options = {});
  // What was wrong since the last attend(), which would return it; or an empty string.
  std::string take_failure() { return setup_.failure.take(); }
  // What the last attend() deferred.
  void update();
  // The policy's prepare() for rows that will be attended sparsely.
  void prepare(int64_t layer_idx, const std::vector<QueryRow>& rows);
  // Both at a time, of what comes one after the other: neither has a task for every worker.
  void update_and_prepare(int64_t next_layer_idx, const std::vector<QueryRow>& next_rows);
  // For callers with time to spare. remember() notes what the last attend() read under the policy; warm_up() brings
  // what was noted of a layer's rows into the workers' caches until *stop is not 0.
  void remember() { warmer_.remember(); }
  void warm_up(int64_t layer_idx, const std::vector<QueryRow>& rows, int first_row, int32_t* stop,
               const uint8_t* elsewhere = nullptr) {
    warmer_.warm_up(layer_idx, rows, first_row, stop, elsewhere);
  }

  // What a unit of a row of the step would have published, had it been attended here: sinks, chosen, recent tokens.
  // They are read where they are until something else is published, or all such lists are forgotten: between steps,
  // and before their memory goes away.
  void publish(int row_of_step, int unit, const int32_t* tokens, int64_t n);
  void forget_published() { pass_.forget_published(); }
  // Names who found numbers that are not finite; as attend() returns it.
  std::string non_finite(int64_t layer_idx, int row_idx, int unit) const {
    return setup_.non_finite(layer_idx, row_idx, unit);
  }
  // What a unit of the last attend() has chosen: `n` tokens, ascending, sinks and recent ones among them. Null: all of
  // its tokens, or where n is 0 none.
  std::pair<const int32_t*, int64_t> chosen(int row_idx, int unit) const {
    const Unit& x = pass_.unit(row_idx, unit);
    return {x.indices, x.n};
  }
  // The clusters of what a head of a row of the last attend() does not choose, where its row has `kv_len` tokens by
  // now. False: it has none. Of several heads at a time.
  bool take_in(int row_idx, int kv_head, int64_t kv_len, EstimateArrays* arrays) {
    return estimate_.take_in(row_idx, kv_head, kv_len, arrays);
  }
  int64_t estimate_clusters() const { return setup_.policy.estimate_clusters; }
  // Which tokens each unit of each row of the last attend() attended; empty where it was all of them, or none because
  // the policy answered.
  std::vector<std::vector<int32_t>> last_selection() const { return pass_.last_selection(); }

  // Which selections are compared with exact attention, and what was found. They are drawn in attend(), which compares
  // them before it returns; where updates are deferred, run_probes() does so later in the step, or drop_probes() not.
  QualityProbe& probe() { return probes_.quality(); }
  const QualityProbe& probe() const { return probes_.quality(); }
  void run_probes() { probes_.run(); }
  void drop_probes() { probes_.drop(); }

  // Counts from now on; off until the first call.
  void start_profile() { setup_.profiles.assign(static_cast<size_t>(setup_.pool.num_threads()), WorkerProfile{}); }
  // The sum over workers since start_profile().
  WorkerProfile profile() const;

 private:
  void prepare_unit(int64_t layer_idx, const std::vector<QueryRow>& rows, int r, int u, int worker);

  AttentionSetup setup_;
  LayerPass pass_{setup_};
  Selector selector_{pass_};
  KeyScan scan_{pass_, selector_};
  Estimate estimate_{pass_};
  Attender attender_{pass_, selector_, estimate_};
  Learner learner_{pass_, attender_};
  LaneJob lanes_{pass_, selector_, attender_, learner_};
  ProbeScan probes_{pass_};
  CacheWarmer warmer_{pass_};
};

}  // namespace offload
