#include "attention/decode_attention.h"

#include <algorithm>

namespace offload {

std::string DecodeAttention::attend(int64_t layer_idx, const std::vector<QueryRow>& rows, bool sparse, int first_row,
                                    bool prepares, const AttendOptions& options) {
  if (setup_.failure.is_set()) return take_failure();
  setup_.begin_layer(layer_idx);
  setup_.begin_job();
  pass_.begin(layer_idx, rows, sparse, first_row, options);
  if (std::string failure = pass_.find_non_finite(); !failure.empty()) return failure;
  const bool asks_queries = setup_.policy.any_asks_queries() || estimate_.is_on();
  if (!pass_.sparse_rows.empty() && asks_queries) pass_.load_queries();
  estimate_.take_in();
  if (pass_.any_unit([](const Unit& unit) { return unit.scanned; })) {
    if (prepares) prepare(layer_idx, rows);
    prepares = false;
    scan_.run();
    if (setup_.failure.is_set()) return take_failure();
  }
  for (const int r : pass_.sparse_rows) {
    for (int u = 0; u < setup_.units(); ++u) {
      Unit& unit = pass_.unit(r, u);
      if (!unit.asks_policy() || unit.scanned) continue;
      unit.asks = pass_.member_of(u).has_lane();
      if (unit.asks) continue;
      // A list of sinks and recent tokens is written sooner than the pool starts.
      const TraceSpan span = pass_.task_span(TraceKind::ask, r, u, 0);
      selector_.ask(r, u, 0);
    }
  }
  lanes_.run(prepares);
  if (setup_.failure.is_set()) return take_failure();
  if (probe().is_on() && options.is_decoded) {
    probes_.draw();
    if (!options.defers_updates) probes_.run();
  }
  return {};
}

void DecodeAttention::update() {
  if (learner_.num_tasks() == 0) return;
  setup_.begin_job();
  setup_.pool.parallel_for_near(learner_.num_tasks(),
                                [&](int64_t task, int worker) { learner_.run_task(task, worker); });
}

void DecodeAttention::prepare(int64_t layer_idx, const std::vector<QueryRow>& rows) {
  if (!setup_.policy.any_prepares()) return;
  setup_.begin_layer(layer_idx);
  setup_.for_each_unit(rows.size(), [&](int r, int u, int worker) { prepare_unit(layer_idx, rows, r, u, worker); });
}

void DecodeAttention::prepare_unit(int64_t layer_idx, const std::vector<QueryRow>& rows, int r, int u, int worker) {
  const QueryRow& row = rows[static_cast<size_t>(r)];
  if (setup_.is_dense(row, setup_.tokens_of(row, u)) || !asks_policy(setup_.role_of(layer_idx, u))) return;
  const TraceSpan span = setup_.task_span(TraceKind::prepare, layer_idx, r, u, worker);
  const auto num_units = static_cast<int64_t>(rows.size()) * setup_.units();
  selector_.prepare(layer_idx, rows, r, u, ceil_div(num_units, setup_.pool.num_threads()), worker);
}

// Where workers share a unit, one of them prepares it, which is the one that will ask for it, and the other updates.
void DecodeAttention::update_and_prepare(int64_t next_layer_idx, const std::vector<QueryRow>& next_rows) {
  const int64_t updates = learner_.num_tasks();
  const int64_t units = setup_.units();
  const int64_t prepares = setup_.policy.any_prepares() ? static_cast<int64_t>(next_rows.size()) * units : 0;
  if (updates == 0 && prepares == 0) return;
  setup_.begin_job();
  setup_.pool.parallel_for_near(2 * std::max(updates, prepares), [&](int64_t task, int worker) {
    const int64_t i = task / 2;
    if (task % 2 == 1 && i < updates) learner_.run_task(i, worker);
    if (task % 2 == 0 && i < prepares) {
      prepare_unit(next_layer_idx, next_rows, static_cast<int>(i / units), static_cast<int>(i % units), worker);
    }
  });
}

void DecodeAttention::publish(int row_of_step, int unit, const int32_t* tokens, int64_t n) {
  grow(pass_.published, pass_.index_of(row_of_step + 1, 0));
  Published& published = pass_.published[pass_.index_of(row_of_step, unit)];
  published.tokens = tokens;
  published.n = n;
}

WorkerProfile DecodeAttention::profile() const {
  WorkerProfile sum;
  for (const WorkerProfile& of_worker : setup_.profiles) {
    for (int i = 0; i < kNumPhases; ++i) sum.seconds[i] += of_worker.seconds[i];
    sum.bytes += of_worker.bytes;
    sum.scored_tokens += of_worker.scored_tokens;
    sum.attended_tokens += of_worker.attended_tokens;
  }
  return sum;
}

}  // namespace offload
