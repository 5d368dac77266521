#include "attention/lane_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>

namespace offload {
namespace {

constexpr int64_t kMinEvenPieceTokens = 48;  // of lists that are known before, and read ahead

}  // namespace

int64_t even_splits(int64_t num_threads, int64_t num_lists, int64_t num_tokens) {
  if (num_threads == 1) return 1;
  const int64_t of_list = num_tokens / num_lists;
  const int64_t even = num_threads / std::gcd(num_threads, num_lists);
  if (even * kMinEvenPieceTokens <= of_list) return even;
  return std::clamp<int64_t>(divide_rounded(num_threads * kPiecesPerThread, num_lists), 1,
                             std::max<int64_t>(1, of_list / kMinPieceTokens));
}

// Which of a unit's tokens are attended here. Lists hold the sinks first and the recent tokens last, as rows do.
void LanePlan::set_range(Unit& unit) const {
  unit.begin = 0;
  unit.end = pass_.options.chooses_only ? 0 : unit.n;
  if (pass_.options.chooses_only) return;
  const int64_t window = setup_.window(pass_.layer_idx);
  if (window > 0 && unit.role == Role::dense) unit.begin = std::max<int64_t>(0, unit.n - window);
  if (!pass_.options.window_on_device) return;
  unit.begin = std::min(pass_.options.sink_tokens, unit.n);
  unit.end = std::max(unit.begin, unit.n - pass_.options.recent_tokens);
}

bool LanePlan::is_null(int r, const Unit& unit) const {
  const bool learns = unit.sparse && !pass_.options.defers_updates && setup_.policy.any_learns();
  return !unit.asks && unit.begin == unit.end && !learns && (pass_.row(r).weights == nullptr || unit.n == 0);
}

// Pieces begin at multiples of this, where a unit's tokens are contiguous and not few.
int64_t LanePlan::alignment_of(const Unit& unit) const {
  const int64_t page_tokens = int64_t{1} << setup_.shape.page_shift;
  return unit.role == Role::dense || (unit.indices == nullptr && unit.end - unit.begin > page_tokens) ? page_tokens : 1;
}

// How many blocks of that alignment hold a unit's tokens: so many pieces can be made of which none is empty.
int64_t LanePlan::blocks_of(const Unit& unit) const {
  const int64_t align = alignment_of(unit);
  return std::max<int64_t>(1, ceil_div(unit.end, align) - unit.begin / align);
}

void LanePlan::add(int r, int first_unit, int num_units, int64_t splits) {
  lanes_.push_back({r, first_unit, num_units, splits});
  for (int u = first_unit; u < first_unit + num_units; ++u, num_parts_ += splits) {
    pass_.unit(r, u).first_part = num_parts_;
  }
}

void LanePlan::make() {
  lanes_.clear();
  null_units_.clear();
  num_tokens_ = num_parts_ = 0;
  is_known_ = !pass_.any_unit([](const Unit& u) { return u.role != Role::reuse && u.role != Role::elsewhere; });
  int64_t num_asking = 0;
  for (int r = 0; r < static_cast<int>(pass_.rows.size()); ++r) {
    for (int u = 0; u < setup_.units(); ++u) {
      Unit& unit = pass_.unit(r, u);
      if (unit.asks && unit.role == Role::select) {
        unit.n = std::min(setup_.budget_of(pass_.row(r)), pass_.tokens_of(r, u));
      }
      set_range(unit);
      num_tokens_ += unit.end - unit.begin;
      num_asking += unit.asks;
      if (is_null(r, unit)) null_units_.emplace_back(r, u);
    }
  }
  if (is_known_) return make_known();
  const int64_t threads = setup_.pool.num_threads();
  const int64_t pieces = threads * kPiecesPerThread;
  piece_tokens_ =
      threads == 1 ? std::numeric_limits<int64_t>::max() / 4 : std::max(kMinPieceTokens, num_tokens_ / pieces);
  max_ranges_ = threads == 1 ? 1 : ceil_div(pieces, std::max<int64_t>(1, num_asking));
  for (int r = 0; r < static_cast<int>(pass_.rows.size()); ++r) {
    add_dense(r);
    for (int u = 0; u < setup_.units(); ++u) {
      const Unit& unit = pass_.unit(r, u);
      if (unit.role == Role::dense || is_null(r, unit)) continue;
      const int64_t most = unit.asks ? std::max<int64_t>(1, unit.n) : blocks_of(unit);
      add(r, u, 1, std::clamp<int64_t>(divide_rounded(unit.end - unit.begin, piece_tokens_), 1, most));
    }
  }
}

// Lanes of a row's runs of dense units.
void LanePlan::add_dense(int r) {
  const int units = setup_.units();
  const bool heads_apart = pass_.row(r).starts != nullptr;
  const auto is_dense = [&](int u) { return pass_.unit(r, u).role == Role::dense && !is_null(r, pass_.unit(r, u)); };
  int num_dense = 0;
  for (int u = 0; u < units; ++u) num_dense += is_dense(u);
  for (int first = 0; num_dense > 0 && first < units;) {
    int last = first;
    while (last < units && is_dense(last) && !(heads_apart && setup_.kv_head_of(last) != setup_.kv_head_of(first))) {
      ++last;
    }
    if (last == first) {
      ++first;
      continue;
    }
    const Unit& unit = pass_.unit(r, first);
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
}

void LanePlan::make_known() {
  const auto num_lanes = static_cast<int64_t>(pass_.num_units - null_units_.size());
  if (num_lanes == 0) return;
  known_splits_ = even_splits(setup_.pool.num_threads(), num_lanes, num_tokens_);
  for (int r = 0; r < static_cast<int>(pass_.rows.size()); ++r) {
    for (int u = 0; u < setup_.units(); ++u) {
      Unit& unit = pass_.unit(r, u);
      if (is_null(r, unit)) continue;
      unit.num_parts = static_cast<int>(std::clamp<int64_t>(unit.end - unit.begin, 1, known_splits_));
      unit.parts_left.store(unit.num_parts, std::memory_order_relaxed);
      add(r, u, 1, unit.num_parts);
    }
  }
}

int64_t LanePlan::split(const Lane& lane) {
  int64_t splits = lane.max_splits;
  for (int u = lane.first_unit; u < lane.first_unit + lane.num_units; ++u) {
    Unit& unit = pass_.unit(lane.row, u);
    set_range(unit);
    if (unit.role != Role::dense) {
      const int64_t wanted = divide_rounded(unit.end - unit.begin, piece_tokens_);
      splits = std::clamp<int64_t>(wanted, 1, std::min(lane.max_splits, blocks_of(unit)));
    }
    unit.num_parts = static_cast<int>(splits);
  }
  return splits;
}

Piece LanePlan::piece_of(const Lane& lane, int64_t split) const {
  const Unit& unit = pass_.unit(lane.row, lane.first_unit);  // the others have its range
  const int64_t align = alignment_of(unit);
  const int64_t blocks = blocks_of(unit);
  const auto bound = [&](int64_t i) {
    if (i == 0) return unit.begin;
    return i == unit.num_parts ? unit.end : (unit.begin / align + blocks * i / unit.num_parts) * align;
  };
  const int64_t begin = bound(split);
  return {lane.row, lane.first_unit, lane.num_units, begin, bound(split + 1) - begin, static_cast<int>(split)};
}

}  // namespace offload
