#include "attention/learner.h"

#include "attention/policy_context.h"

namespace offload {

void Learner::update(int r, int u, int worker) {
  const Unit& unit = pass_.unit(r, u);
  const PolicyMember& member = pass_.member_of(u);
  if (!unit.asks_policy() || !member.learns()) return;
  const PhaseTimer timer(setup_.profile_of(worker), Phase::update);
  const char* callback = "observe";
  const float* query = pass_.queries_of(r, u * setup_.unit_group());
  PolicyContext ctx = policy_context(setup_, pass_.layer_idx, pass_.row(r), u, query, worker);
  if (pass_.observes(r, u) && unit.indices != nullptr && !unit.answered) {
    ctx.indices = const_cast<int32_t*>(unit.indices);
    ctx.num_indices = unit.n;
    ctx.weights = attender_.weights_of(r, u);
    member.observe(&ctx);
  }
  if (member.append != nullptr && ctx.error[0] == '\0') {
    callback = "append";
    member.append(&ctx);
  }
  returned_well(setup_, ctx, r, u, callback);
}

int64_t Learner::num_tasks() const {
  return setup_.policy.any_learns() ? static_cast<int64_t>(pass_.sparse_rows.size()) * setup_.units() : 0;
}

void Learner::run_task(int64_t task, int worker) {
  const int r = pass_.sparse_rows[static_cast<size_t>(task / setup_.units())];
  const int u = static_cast<int>(task % setup_.units());
  if (!pass_.unit(r, u).sparse) return;
  const TraceSpan span = pass_.task_span(TraceKind::update, r, u, worker);
  update(r, u, worker);
}

}  // namespace offload
