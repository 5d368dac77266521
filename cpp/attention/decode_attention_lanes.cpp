// A layer as lanes of one job: a unit is asked about, its candidates are scored, its tokens attended piece by piece and
// its pieces merged, each as soon as what comes before is done for that unit. Workers that have nothing to do for one
// unit help another.
#include <algorithm>
#include <limits>
#include <numeric>

#include "attention/decode_attention.h"

namespace offload {
namespace {

// Of one task; shorter ones cost more to start than to run. 8 units of 1,024 tokens make 64 pieces for 15 threads.
constexpr int64_t kMinScoreTokens = 128;
constexpr int64_t kMinPieceTokens = 128;
constexpr int64_t kMinEvenPieceTokens = 48;  // of lists that are known before, and read ahead

enum LaneStage : int { kAsk, kScan, kScore, kAttend, kMerge };
constexpr TraceKind kStageKinds[] = {TraceKind::ask, TraceKind::ask, TraceKind::score, TraceKind::attend,
                                     TraceKind::merge};

int64_t divide_rounded(int64_t a, int64_t b) { return (a + b / 2) / b; }

}  // namespace

// Which of a unit's tokens are attended here. Lists hold the sinks first and the recent tokens last, as rows do.
void DecodeAttention::set_range(Unit& unit) const {
  unit.begin = 0;
  unit.end = unit.n;
  if (!options_.window_on_device) return;
  unit.begin = std::min(options_.sink_tokens, unit.n);
  unit.end = std::max(unit.begin, unit.n - options_.recent_tokens);
}

// Answered at once: there is nothing to attend, to report or to learn from it.
bool DecodeAttention::is_null(const QueryRow& row, const Unit& unit) const {
  const bool learns = unit.sparse && !options_.defers_updates && policy_.any_learns();
  return !unit.asks && unit.begin == unit.end && !learns && (row.weights == nullptr || unit.n == 0);
}

// Pieces begin at multiples of this, where a unit's tokens are contiguous and not few.
int64_t DecodeAttention::alignment_of(const Unit& unit) const {
  const int64_t page_tokens = int64_t{1} << shape_.page_shift;
  return unit.role == Role::dense || (unit.indices == nullptr && unit.end - unit.begin > page_tokens) ? page_tokens : 1;
}

// How many blocks of that alignment hold a unit's tokens: so many pieces can be made of which none is empty.
int64_t DecodeAttention::blocks_of(const Unit& unit) const {
  const int64_t align = alignment_of(unit);
  return std::max<int64_t>(1, ceil_div(unit.end, align) - unit.begin / align);
}

// Decides on lanes, and on the size of pieces so that all threads are busy, whether there is one long sequence or many
// short ones. Dense rows are cut at pages, and by heads only when there are too few pages, or heads have pages of their
// own. What a policy will choose is taken to be its budget. Returns how many tokens that makes in all.
int64_t DecodeAttention::plan_lanes(int64_t layer_idx, const std::vector<QueryRow>& rows) {
  const int64_t threads = pool_.num_threads();
  int64_t all_tokens = 0;
  int64_t num_asking = 0;
  for (size_t i = 0; i < rows.size() * static_cast<size_t>(units()); ++i) {
    Unit& unit = units_[i];
    const QueryRow& row = rows[i / static_cast<size_t>(units())];
    const int u = static_cast<int>(i % static_cast<size_t>(units()));
    if (unit.asks && unit.role == Role::select) unit.n = std::min(policy_.budget_tokens, tokens_of(row, u));
    set_range(unit);
    all_tokens += unit.end - unit.begin;
    num_asking += unit.asks;
  }
  const int64_t pieces = threads * kPiecesPerThread;
  piece_tokens_ =
      threads == 1 ? std::numeric_limits<int64_t>::max() / 4 : std::max(kMinPieceTokens, all_tokens / pieces);
  max_ranges_ = threads == 1 ? 1 : ceil_div(pieces, std::max<int64_t>(1, num_asking));
  lanes_.clear();
  int64_t part = 0;
  const auto add = [&](int r, int first_unit, int num_units, int64_t splits) {
    lanes_.push_back({r, first_unit, num_units, splits});
    for (int u = first_unit; u < first_unit + num_units; ++u, part += splits) unit_of(r, u).first_part = part;
  };
  for (int r = 0; r < static_cast<int>(rows.size()); ++r) {
    const QueryRow& row = rows[static_cast<size_t>(r)];
    const bool heads_apart = row.starts != nullptr;
    const auto is_dense = [&](int u) { return unit_of(r, u).role == Role::dense && !is_null(row, unit_of(r, u)); };
    int num_dense = 0;
    for (int u = 0; u < units(); ++u) num_dense += is_dense(u);
    for (int first = 0; num_dense > 0 && first < units();) {  // runs of units that are attended here
      int last = first;
      while (last < units() && is_dense(last) && !(heads_apart && kv_head_of(last) != kv_head_of(first))) ++last;
      if (last == first) {
        ++first;
        continue;
      }
      const Unit& unit = unit_of(r, first);
      const int64_t alike = heads_apart ? last - first : num_dense;  // that have its tokens
      const int64_t wanted = std::max<int64_t>(1, (unit.end - unit.begin) * alike / piece_tokens_);
      const int64_t splits = std::min(wanted, blocks_of(unit));
      const int64_t groups = std::min<int64_t>(alike, ceil_div(wanted, splits));
      const int64_t of_run = ceil_div((last - first) * groups, alike);
      for (int64_t g = 0; g < of_run; ++g) {
        const int64_t begin = first + (last - first) * g / of_run;
        const int64_t end = first + (last - first) * (g + 1) / of_run;
        add(r, static_cast<int>(begin), static_cast<int>(end - begin), splits);
      }
      first = last;
    }
    for (int u = 0; u < units(); ++u) {
      const Unit& unit = unit_of(r, u);
      if (is_dense(u)) continue;
      if (is_null(row, unit)) {
        const TraceSpan span = task_span(TraceKind::merge, layer_idx, r, u, 0);
        merge_unit(layer_idx, row, r, u, 0);
      } else {
        const int64_t most = unit.asks ? std::max<int64_t>(1, unit.n) : blocks_of(unit);
        add(r, u, 1, std::clamp<int64_t>(divide_rounded(unit.end - unit.begin, piece_tokens_), 1, most));
      }
    }
  }
  grow(parts_, static_cast<size_t>(part * unit_group() * (shape_.head_dim + 2)));
  return all_tokens;
}

// A lane's units know their tokens.
StagedLanes::Stage DecodeAttention::begin_attending(const Lane& lane) {
  int64_t splits = lane.max_splits;
  for (int u = lane.first_unit; u < lane.first_unit + lane.num_units; ++u) {
    Unit& unit = unit_of(lane.row, u);
    set_range(unit);
    if (unit.role != Role::dense) {
      const int64_t wanted = divide_rounded(unit.end - unit.begin, piece_tokens_);
      splits = std::clamp<int64_t>(wanted, 1, std::min(lane.max_splits, blocks_of(unit)));
    }
    unit.num_parts = static_cast<int>(splits);
  }
  return {kAttend, splits};
}

DecodeAttention::Piece DecodeAttention::piece_of(const Lane& lane, int64_t split) {
  const Unit& unit = unit_of(lane.row, lane.first_unit);  // the others have its range
  const int64_t align = alignment_of(unit);
  const int64_t blocks = blocks_of(unit);
  const auto bound = [&](int64_t i) {
    if (i == 0) return unit.begin;
    return i == unit.num_parts ? unit.end : (unit.begin / align + blocks * i / unit.num_parts) * align;
  };
  const int64_t begin = bound(split);
  return {lane.row, lane.first_unit, lane.num_units, begin, bound(split + 1) - begin, static_cast<int>(split)};
}

// Into how many pieces each list is cut where all are known beforehand: so that every thread has as many, all of one
// size. Where they would be too small, as many as there are otherwise.
int64_t DecodeAttention::even_splits(int64_t num_lists, int64_t num_tokens) const {
  const int64_t threads = pool_.num_threads();
  if (threads == 1) return 1;
  const int64_t of_list = num_tokens / num_lists;
  const int64_t even = threads / std::gcd(threads, num_lists);
  if (even * kMinEvenPieceTokens <= of_list) return even;
  return std::clamp<int64_t>(divide_rounded(threads * kPiecesPerThread, num_lists), 1,
                             std::max<int64_t>(1, of_list / kMinPieceTokens));
}

// False unless every unit that is attended here reuses a selection.
bool DecodeAttention::plan_known(int64_t layer_idx, const std::vector<QueryRow>& rows) {
  const size_t count = rows.size() * static_cast<size_t>(units());
  int64_t num_tokens = 0;
  for (size_t i = 0; i < count; ++i) {
    Unit& unit = units_[i];
    if (unit.role != Role::reuse && unit.role != Role::elsewhere) return false;
    set_range(unit);
    num_tokens += unit.end - unit.begin;
  }
  lanes_.clear();
  for (int r = 0; r < static_cast<int>(rows.size()); ++r) {
    for (int u = 0; u < units(); ++u) {
      if (!is_null(rows[static_cast<size_t>(r)], unit_of(r, u))) {
        lanes_.push_back({r, u, 1, 0});
      } else {
        const TraceSpan span = task_span(TraceKind::merge, layer_idx, r, u, 0);
        merge_unit(layer_idx, rows[static_cast<size_t>(r)], r, u, 0);
      }
    }
  }
  if (lanes_.empty()) return true;
  known_splits_ = even_splits(static_cast<int64_t>(lanes_.size()), num_tokens);
  int64_t part = 0;
  for (const Lane& lane : lanes_) {
    Unit& unit = unit_of(lane.row, lane.first_unit);
    unit.first_part = part;
    unit.num_parts = static_cast<int>(std::clamp<int64_t>(unit.end - unit.begin, 1, known_splits_));
    unit.parts_left.store(unit.num_parts, std::memory_order_relaxed);
    part += unit.num_parts;
  }
  grow(parts_, static_cast<size_t>(part * unit_group() * (shape_.head_dim + 2)));
  return true;
}

// Pieces in the order of lists, of which every worker has a block of its own: the one that it has read ahead.
void DecodeAttention::run_known(int64_t layer_idx, const std::vector<QueryRow>& rows) {
  if (lanes_.empty()) return;
  load_queries(rows);
  const auto num_lanes = static_cast<int64_t>(lanes_.size());
  pool_.parallel_for_near(num_lanes * known_splits_, [&](int64_t task, int worker) {
    const Lane& lane = lanes_[static_cast<size_t>(task / known_splits_)];
    const int64_t split = task % known_splits_;
    Unit& unit = unit_of(lane.row, lane.first_unit);
    if (split >= unit.num_parts) return;
    const QueryRow& row = rows[static_cast<size_t>(lane.row)];
    {
      const TraceSpan span = task_span(TraceKind::attend, layer_idx, lane.row, lane.first_unit, worker);
      attend_piece(row, piece_of(lane, split), worker);
    }
    if (unit.parts_left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    const TraceSpan span = task_span(TraceKind::merge, layer_idx, lane.row, lane.first_unit, worker);
    merge_unit(layer_idx, row, lane.row, lane.first_unit, worker);
  });
}

void DecodeAttention::run_lanes(int64_t layer_idx, const std::vector<QueryRow>& rows, bool prepares) {
  struct Body {
    DecodeAttention& self;
    int64_t layer_idx;
    const std::vector<QueryRow>& rows;
    bool prepares;

    void task(int64_t index, int stage, int64_t i, int worker) {
      const Lane& lane = self.lanes_[static_cast<size_t>(index)];
      const QueryRow& row = rows[static_cast<size_t>(lane.row)];
      const int u = lane.first_unit + (stage == kMerge ? static_cast<int>(i) : 0);
      const TraceSpan span = self.task_span(kStageKinds[stage], layer_idx, lane.row, u, worker);
      if (stage == kAsk) {
        if (prepares) self.prepare_unit(layer_idx, row, lane.row, u, worker);
        self.ask_unit(layer_idx, row, lane.row, u, worker);
      } else if (stage == kScan) {
        self.scan_codes(lane.row, u, i, worker);
      } else if (stage == kScore) {
        self.score_range(row, lane.row, u, i, worker);
      } else if (stage == kAttend) {
        self.attend_piece(row, self.piece_of(lane, i), worker);
      } else {
        self.merge_unit(layer_idx, row, lane.row, u, worker);
      }
    }

    StagedLanes::Stage advance(int64_t index, int stage, int worker) {
      const Lane& lane = self.lanes_[static_cast<size_t>(index)];
      const QueryRow& row = rows[static_cast<size_t>(lane.row)];
      Unit& unit = self.unit_of(lane.row, lane.first_unit);
      if (stage == kScan) {
        const TraceSpan span = self.task_span(TraceKind::ask, layer_idx, lane.row, lane.first_unit, worker);
        self.finish_codes(layer_idx, row, lane.row, lane.first_unit, worker);
      }
      if (stage == kScore) {
        const TraceSpan span = self.task_span(TraceKind::choose, layer_idx, lane.row, lane.first_unit, worker);
        self.finish_proposal(layer_idx, row, lane.row, lane.first_unit, worker);
      }
      if (self.failed_.load(std::memory_order_relaxed)) {
        self.staged_.cancel();
        return {};
      }
      if (stage == kMerge || unit.answered) return {};
      const bool proposes = self.member_of(layer_idx, lane.first_unit).propose != nullptr;
      if (stage == kAsk && proposes && unit.codes.k > 0) {
        const int64_t most = unit.codes.args.n / kMinScanCodes;
        unit.num_scans = std::clamp<int64_t>(self.max_ranges_, 1, most);
        return {kScan, unit.num_scans};
      }
      if (stage <= kScan && proposes) {
        const auto n = static_cast<int64_t>(unit.considered.size());
        unit.num_ranges = std::clamp<int64_t>(divide_rounded(n, kMinScoreTokens), 1, self.max_ranges_);
        const auto maxima = static_cast<size_t>(self.unit_group() * unit.num_ranges);
        unit.range_max.resize(maxima);
        unit.range_factors.resize(maxima);
        if (n > 0) return {kScore, unit.num_ranges};
        unit.n = self.tokens_of(row, lane.first_unit);  // nothing is considered: everything is attended
      }
      if (stage <= kScore) {
        const StagedLanes::Stage next = self.begin_attending(lane);
        if (unit.begin < unit.end) return next;
      } else if (lane.num_units > 1 && self.pool_.num_threads() > 1) {
        return {kMerge, lane.num_units};
      }
      for (int u = lane.first_unit; u < lane.first_unit + lane.num_units; ++u) {
        const TraceSpan span = self.task_span(TraceKind::merge, layer_idx, lane.row, u, worker);
        self.merge_unit(layer_idx, row, lane.row, u, worker);
      }
      return {};
    }
  };

  if (plan_known(layer_idx, rows)) return run_known(layer_idx, rows);
  const int64_t all_tokens = plan_lanes(layer_idx, rows);
  if (lanes_.empty()) return;
  load_queries(rows);
  staged_.reset(static_cast<int64_t>(lanes_.size()));
  int64_t num_tasks = 0;
  bool asks = false;
  for (size_t i = 0; i < lanes_.size(); ++i) {
    const bool of_lane = unit_of(lanes_[i].row, lanes_[i].first_unit).asks;
    const StagedLanes::Stage first = of_lane ? StagedLanes::Stage{kAsk, 1} : begin_attending(lanes_[i]);
    staged_.start(static_cast<int64_t>(i), first);
    num_tasks += first.num_tasks;
    asks = asks || of_lane;
  }
  Body body{*this, layer_idx, rows, prepares};
  if (!asks && (num_tasks == 1 || all_tokens <= kMinPieceTokens)) {
    staged_.run_alone(body);  // sooner done than the pool begins
  } else {
    staged_.run(pool_, body);
  }
}

}  // namespace offload
