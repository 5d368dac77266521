#include "attention/lane_job.h"

#include <algorithm>

#include "attention/policy_context.h"

namespace offload {
namespace {

// Of one task; shorter ones cost more to start than to run. 8 units of 1,024 tokens make 64 pieces for 15 threads.
constexpr int64_t kMinScoreTokens = 128;

enum LaneStage : int { kAsk, kScan, kScore, kAttend, kMerge };
constexpr TraceKind kStageKinds[] = {TraceKind::ask, TraceKind::ask, TraceKind::score, TraceKind::attend};

}  // namespace

void LaneJob::run(bool prepares) {
  prepares_ = prepares;
  plan_.make();
  for (const auto& [r, u] : plan_.null_units()) merge(r, u, 0);
  if (plan_.lanes().empty()) return;
  attender_.make_room(plan_.num_parts());
  pass_.load_queries();
  if (plan_.is_known()) return run_known();
  staged_.reset(static_cast<int64_t>(plan_.lanes().size()));
  int64_t num_tasks = 0;
  bool asks = false;
  for (size_t i = 0; i < plan_.lanes().size(); ++i) {
    const Lane& lane = plan_.lanes()[i];
    const bool of_lane = pass_.unit(lane.row, lane.first_unit).asks;
    const StagedLanes::Stage first = of_lane ? StagedLanes::Stage{kAsk, 1} : begin_attending(lane);
    staged_.start(static_cast<int64_t>(i), first);
    num_tasks += first.num_tasks;
    asks = asks || of_lane;
  }
  if (!asks && (num_tasks == 1 || plan_.num_tokens() <= kMinPieceTokens)) {
    staged_.run_alone(*this);  // sooner done than the pool begins
  } else {
    staged_.run(setup_.pool, *this);
  }
}

// Pieces in the order of lists, of which every worker has a block of its own: the one that it has read ahead.
void LaneJob::run_known() {
  const auto num_lanes = static_cast<int64_t>(plan_.lanes().size());
  setup_.pool.parallel_for_near(num_lanes * plan_.known_splits(), [&](int64_t task, int worker) {
    const Lane& lane = plan_.lanes()[static_cast<size_t>(task / plan_.known_splits())];
    const int64_t split = task % plan_.known_splits();
    Unit& unit = pass_.unit(lane.row, lane.first_unit);
    if (split >= unit.num_parts) return;
    {
      const TraceSpan span = pass_.task_span(TraceKind::attend, lane.row, lane.first_unit, worker);
      attender_.attend(plan_.piece_of(lane, split), worker);
    }
    if (unit.parts_left.fetch_sub(1, std::memory_order_acq_rel) == 1) merge(lane.row, lane.first_unit, worker);
  });
}

// A lane's units know their tokens.
StagedLanes::Stage LaneJob::begin_attending(const Lane& lane) { return {kAttend, plan_.split(lane)}; }

void LaneJob::task(int64_t index, int stage, int64_t i, int worker) {
  const Lane& lane = plan_.lanes()[static_cast<size_t>(index)];
  const int r = lane.row;
  const int u = lane.first_unit + (stage == kMerge ? static_cast<int>(i) : 0);
  if (stage == kMerge) return merge(r, u, worker);
  const TraceSpan span = pass_.task_span(kStageKinds[stage], r, u, worker);
  if (stage == kAsk) {
    if (prepares_) selector_.prepare(pass_.layer_idx, pass_.rows, r, u, 1, worker);
    selector_.ask(r, u, worker);
    const bool learns = pass_.unit(r, u).answered && !pass_.options.defers_updates;
    if (learns && !setup_.failure.is_set()) learner_.update(r, u, worker);
  } else if (stage == kScan) {
    selector_.scan(r, u, i, worker);
  } else if (stage == kScore) {
    selector_.score_range(r, u, i, worker);
  } else {
    attender_.attend(plan_.piece_of(lane, i), worker);
  }
}

StagedLanes::Stage LaneJob::advance(int64_t index, int stage, int worker) {
  const Lane& lane = plan_.lanes()[static_cast<size_t>(index)];
  const int r = lane.row;
  const int first = lane.first_unit;
  Unit& unit = pass_.unit(r, first);
  if (stage == kScan) {
    const TraceSpan span = pass_.task_span(TraceKind::ask, r, first, worker);
    selector_.finish_scan(r, first, worker);
  }
  if (stage == kScore) {
    const TraceSpan span = pass_.task_span(TraceKind::choose, r, first, worker);
    selector_.finish_proposal(r, first, worker);
  }
  if (setup_.failure.is_set()) {
    staged_.cancel();
    return {};
  }
  if (stage == kMerge || unit.answered) return {};
  if (stage <= kScan && pass_.member_of(first).propose != nullptr) {
    const StagedLanes::Stage next = stage_of_candidates(r, first, stage);
    if (next.num_tasks > 0) return next;
    if (setup_.failure.is_set()) {  // of take_all(): nothing is to be learnt
      staged_.cancel();
      return {};
    }
    if (unit.candidates.num_ranges > 0) unit.n = pass_.tokens_of(r, first);  // none is considered: all are attended
  }
  if (stage <= kScore) {
    const StagedLanes::Stage next = begin_attending(lane);
    if (unit.begin < unit.end) return next;
  } else if (lane.num_units > 1 && setup_.pool.num_threads() > 1) {
    return {kMerge, lane.num_units};
  }
  for (int u = first; u < first + lane.num_units; ++u) merge(r, u, worker);
  return {};
}

// What follows propose(), or what it left to the workers.
StagedLanes::Stage LaneJob::stage_of_candidates(int r, int u, int stage) {
  Candidates& candidates = pass_.unit(r, u).candidates;
  const Deferred& deferred = candidates.deferred;
  if (stage == kAsk && (deferred.codes.k > 0 || deferred.num_ranked > 0)) {
    const bool of_codes = deferred.codes.k > 0;
    const int64_t most = of_codes ? deferred.codes.args.n / kMinScanCodes : deferred.num_ranked / kMinRankRows;
    candidates.num_scans = std::clamp<int64_t>(plan_.max_ranges(), 1, most);
    return {kScan, candidates.num_scans};
  }
  if (selector_.takes_all(r, u)) {
    selector_.take_all(r, u);
    return {};
  }
  const auto n = static_cast<int64_t>(candidates.considered.size());
  candidates.num_ranges = std::clamp<int64_t>(divide_rounded(n, kMinScoreTokens), 1, plan_.max_ranges());
  const auto maxima = static_cast<size_t>(setup_.unit_group() * candidates.num_ranges);
  candidates.range_max.resize(maxima);
  candidates.range_factors.resize(maxima);
  return {kScore, n > 0 ? candidates.num_ranges : 0};
}

void LaneJob::merge(int r, int u, int worker) {
  const TraceSpan span = pass_.task_span(TraceKind::merge, r, u, worker);
  if (!attender_.merge(r, u)) return;
  if (pass_.unit(r, u).sparse && !pass_.options.defers_updates) learner_.update(r, u, worker);
}

}  // namespace offload
