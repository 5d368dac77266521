#include "attention/selector.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention/policy_context.h"

namespace offload {

namespace {

// As a context has it.
int64_t may_defer(const AttentionSetup& setup, size_t num_rows) {
  const int threads = setup.pool.num_threads();
  if (threads == 1) return 0;
  return static_cast<int64_t>(num_rows) * setup.units() < threads ? 2 : 1;
}

}  // namespace

PolicyContext Selector::context(int r, int u, int worker) const {
  const float* query = pass_.queries_of(r, u * setup_.unit_group());
  PolicyContext ctx = policy_context(setup_, pass_.layer_idx, pass_.row(r), u, query, worker);
  ctx.ahead = is_unscored(r, u);
  return ctx;
}

void Selector::prepare(int64_t layer_idx, const std::vector<QueryRow>& rows, int r, int u, int64_t together,
                       int worker) {
  const PolicyMember& member = setup_.member_of(layer_idx, u);
  if (member.prepare == nullptr) return;
  const PhaseTimer timer(setup_.profile_of(worker), Phase::predict);
  // Without the query, whether it is known or not: predictions come before it.
  PolicyContext ctx = policy_context(setup_, layer_idx, rows[static_cast<size_t>(r)], u, nullptr, worker);
  ctx.may_defer = may_defer(setup_, rows.size());
  ctx.prepared_together = together;
  member.prepare(&ctx);
  returned_well(setup_, ctx, r, u, "prepare");
}

void Selector::ask(int r, int u, int worker) {
  const PolicyMember& member = pass_.member_of(u);
  if (member.propose != nullptr) return propose(r, u, worker);
  select(r, u, nullptr, worker);
  Unit& unit = pass_.unit(r, u);
  if (member.observe != nullptr) unit.scores.resize(static_cast<size_t>(setup_.unit_group() * unit.n));
}

// Whether a unit's candidates are those that a GPU has listed. A list that cannot be one leaves nothing to consider.
bool Selector::takes_list(int r, int u) {
  const int kv_head = setup_.kv_head_of(u);
  if (pass_.options.listed == nullptr || pass_.options.listed[kv_head] == 0) return false;
  const QueryRow& row = pass_.row(r);
  const int64_t n = row.num_listed[kv_head];
  const int64_t most = std::min(row.max_listed, row.num_tokens(kv_head));
  const bool is_list = n >= setup_.policy.sink_tokens + setup_.policy.recent_tokens && n <= most;
  const int32_t* tokens = row.listed + kv_head * row.max_listed;
  pass_.unit(r, u).candidates.considered.assign(tokens, tokens + (is_list ? n : 0));
  return true;
}

void Selector::propose(int r, int u, int worker) {
  const PhaseTimer timer(setup_.profile_of(worker), Phase::predict);
  Candidates& candidates = pass_.unit(r, u).candidates;
  candidates.deferred = {};
  if (takes_list(r, u)) {
    if (candidates.considered.empty()) return pass_.report_non_finite(r, u);
    return make_room(candidates);
  }
  call_propose(r, u, may_defer(setup_, pass_.rows.size()), worker);
}

void Selector::call_propose(int r, int u, int64_t may_defer, int worker) {
  Candidates& candidates = pass_.unit(r, u).candidates;
  float output[kMaxGroupSize * kMaxHeadDim];
  float lse[kMaxGroupSize];
  PolicyContext ctx = context(r, u, worker);
  ctx.output = output;
  ctx.lse = lse;
  ctx.may_defer = may_defer;
  ctx.resumes = candidates.deferred.num_ranked > 0;
  ctx.deferred = &candidates.deferred;
  const int64_t count = pass_.member_of(u).propose(&ctx);
  if (!returned_well(setup_, ctx, r, u, "propose")) return;
  if (count == kDeferred && candidates.deferred.codes.k > 0) {
    return candidates.code_scores.resize(static_cast<size_t>(candidates.deferred.codes.args.n));
  }
  if (count == kDeferred && candidates.deferred.num_ranked > 0 && ctx.resumes == 0) return;
  candidates.deferred = {};  // what was deferred, and then not asked for
  if (count == kAnswered) return write_answer(r, u, output, lse);
  const int64_t most = ctx.last - ctx.first;
  if (!ascends_within(setup_, ctx, r, u, "propose", ctx.candidates, count, ctx.first, ctx.last, most)) return;
  list_considered(ctx.kv_len, ctx.candidates, count, &candidates.considered);
  make_room(candidates);
}

void Selector::write_answer(int r, int u, float* output, const float* lse) {
  const int group = setup_.unit_group(), head_dim = setup_.shape.head_dim;
  Unit& unit = pass_.unit(r, u);
  unit.answered = true;
  unit.n = 0;
  pass_.selection_of(r, u).clear();
  // Nothing was chosen: that is what the layers below inherit.
  if (!setup_.policy.roles.empty()) {
    list_considered(pass_.tokens_of(r, u), nullptr, 0, &pass_.published_of(r, u).own);
    pass_.published_of(r, u).set_own();
  }
  float check = 0.0f;  // stays 0 unless some output is NaN or inf
  for (int g = 0; g < group; ++g) {
    const float share = setup_.share_beside_sink(pass_.layer_idx, u * group + g, lse[g]);
    for (int i = g * head_dim; i < (g + 1) * head_dim; ++i) check += (output[i] *= share) * 0.0f;
    check += lse[g] * 0.0f;
  }
  if (check != 0.0f) return pass_.report_non_finite(r, u);
  pass_.write_output(r, u * group, group, output);
  float* lse_out = pass_.row(r).lse;
  for (int g = 0; g < group && lse_out != nullptr; ++g) {
    lse_out[u * group + g] = pass_.options.window_on_device ? INFINITY : lse[g];
  }
}

void Selector::scan(int r, int u, int64_t range, int worker) {
  const PhaseTimer timer(setup_.profile_of(worker), Phase::predict);
  if (pass_.unit(r, u).candidates.deferred.codes.k > 0) {
    scan_codes(r, u, range);
  } else {
    rank_range(r, u, range);
  }
}

void Selector::scan_codes(int r, int u, int64_t range) {
  Candidates& candidates = pass_.unit(r, u).candidates;
  CodeArgs args = candidates.deferred.codes.args;
  const int64_t blocks = ceil_div(args.n, kCodeBlock);  // whole ones
  const int64_t begin = blocks * range / candidates.num_scans * kCodeBlock;
  args.n = std::min(args.n, blocks * (range + 1) / candidates.num_scans * kCodeBlock) - begin;
  args.codes += begin * args.head_dim * args.bits / 8;
  args.scales += begin;
  args.scores = candidates.code_scores.data() + begin;
  setup_.kernels.score_codes(args);
}

// Of the rows of all ranges, one after the other, a share.
void Selector::rank_range(int r, int u, int64_t range) {
  static thread_local std::vector<int32_t> ranges;
  const Candidates& candidates = pass_.unit(r, u).candidates;
  RankArgs args = candidates.deferred.ranks;
  const int64_t rows = candidates.deferred.num_ranked;
  const int64_t begin = rows * range / candidates.num_scans;
  const int64_t end = rows * (range + 1) / candidates.num_scans;
  ranges.clear();
  int64_t at = 0;  // rows before those of the range
  for (int i = 0; i < args.num_ranges && at < end; ++i) {
    const int64_t first = args.ranges[2 * i];
    const int64_t n = args.ranges[2 * i + 1] - first;
    const int64_t from = std::max(begin - at, int64_t{0});
    const int64_t to = std::min(end - at, n);
    if (from < to) {
      ranges.push_back(static_cast<int32_t>(first + from));
      ranges.push_back(static_cast<int32_t>(first + to));
    }
    at += n;
  }
  args.ranges = ranges.data();
  args.num_ranges = static_cast<int>(ranges.size() / 2);
  args.ranks += begin;
  setup_.kernels.rank_rows(args);
}

void Selector::finish_scan(int r, int u, int worker) {
  const PhaseTimer timer(setup_.profile_of(worker), Phase::predict);
  Candidates& candidates = pass_.unit(r, u).candidates;
  if (candidates.deferred.codes.k == 0) return call_propose(r, u, 0, worker);
  CodesRequest& codes = candidates.deferred.codes;
  codes.args.scores = candidates.code_scores.data();
  const int64_t count = list_codes(setup_.kernels, codes.args, setup_.policy.sink_tokens, codes.k, codes.tokens);
  if (count < 0) return pass_.report_non_finite(r, u);
  list_considered(pass_.tokens_of(r, u), codes.tokens, count, &candidates.considered);
  make_room(candidates);
}

bool Selector::is_unscored(int r, int u) const {
  return pass_.options.chooses_only && setup_.policy.top_p >= 1.0 && !pass_.observes(r, u);
}

bool Selector::takes_all(int r, int u) const {
  if (!is_unscored(r, u)) return false;
  int64_t most = setup_.budget_of(pass_.row(r));
  if (pass_.member_of(u).observe != nullptr) most = std::max(most, pass_.options.max_chosen);
  return static_cast<int64_t>(pass_.unit(r, u).candidates.considered.size()) <= most;
}

void Selector::take_all(int r, int u) {
  Unit& unit = pass_.unit(r, u);
  const int group = setup_.unit_group();
  const float* query = pass_.queries_of(r, u * group);
  float check = 0.0f;  // stays 0 unless some number is NaN or inf: no score would tell
  for (int i = 0; i < group * setup_.shape.head_dim; ++i) check += query[i] * 0.0f;
  if (check != 0.0f) return pass_.report_non_finite(r, u);
  std::vector<int32_t>& chosen = pass_.selection_of(r, u);
  chosen.swap(unit.candidates.considered);
  unit.candidates.num_ranges = 0;
  unit.weights.clear();
  unit.indices = chosen.data();
  unit.n = static_cast<int64_t>(chosen.size());
  if (!setup_.policy.roles.empty()) pass_.published_of(r, u).set(chosen);
}

// Sinks, the policy's tokens, recent ones.
void Selector::list_considered(int64_t kv_len, const int32_t* chosen, int64_t n, std::vector<int32_t>* tokens) const {
  tokens->clear();
  for (int64_t t = 0; t < setup_.policy.sink_tokens; ++t) tokens->push_back(static_cast<int32_t>(t));
  tokens->insert(tokens->end(), chosen, chosen + n);
  for (int64_t t = kv_len - setup_.policy.recent_tokens; t < kv_len; ++t) tokens->push_back(static_cast<int32_t>(t));
}

void Selector::make_room(Candidates& candidates) const {
  candidates.scores.resize(static_cast<size_t>(setup_.unit_group()) * candidates.considered.size());
  candidates.importance.resize(candidates.considered.size());
}

void Selector::score_range(int r, int u, int64_t range, int worker) {
  Candidates& candidates = pass_.unit(r, u).candidates;
  const int group = setup_.unit_group();
  const auto all = static_cast<int64_t>(candidates.considered.size());
  const int64_t begin = all * range / candidates.num_ranges;
  const int64_t n = all * (range + 1) / candidates.num_ranges - begin;
  WorkerProfile* profile = setup_.profile_of(worker);
  const PhaseTimer timer(profile, Phase::score);
  if (profile != nullptr) {
    profile->bytes += n * setup_.shape.row_bytes();
    profile->scored_tokens += n;
  }
  float* scores = candidates.scores.data() + begin;
  pass_.score(r, u * group, group, {candidates.considered.data() + begin, 0, n}, scores, all);
  for (int g = 0; g < group; ++g) {
    const int64_t at = g * candidates.num_ranges + range;
    candidates.range_max.data()[at] =
        setup_.kernels.exp_shifted(scores + g * all, n, candidates.range_factors.data() + at);
  }
}

// Of chosen positions into `importance` those that have top_p of all its weight, with the sinks' and the recent tokens'
// before and after [0, last); sinks are inside where `sinks_before` is 0. The weights are sums over the query heads: no
// head keeps less than half of its own, however small top_p.
int64_t Selector::cut_to_mass(int32_t* chosen, int64_t count, const float* importance, int64_t sinks_before,
                              int64_t last, int64_t recent) const {
  const PolicyFunctions& policy = setup_.policy;
  if (policy.top_p >= 1.0) return count;
  const int group = setup_.unit_group();
  const float* sinks = importance - sinks_before;
  double mass = std::max(policy.top_p * group, group - 1.0 + policy.least_of_head);
  mass -= std::accumulate(sinks, sinks + policy.sink_tokens, 0.0);
  mass -= std::accumulate(importance + last, importance + last + recent, 0.0);
  return top_mass(importance, chosen, count, mass);
}

void Selector::count_chosen(const Unit& unit) {
  if (setup_.policy.top_p >= 1.0) return;
  chosen_units_.fetch_add(1, std::memory_order_relaxed);
  chosen_tokens_.fetch_add(unit.n, std::memory_order_relaxed);
}

void Selector::finish_proposal(int r, int u, int worker) {
  const PhaseTimer timer(setup_.profile_of(worker), Phase::select);
  Unit& unit = pass_.unit(r, u);
  Candidates& candidates = unit.candidates;
  const int group = setup_.unit_group();
  const auto n = static_cast<int64_t>(candidates.considered.size());
  const int64_t ranges = candidates.num_ranges;
  for (int g = 0; g < group; ++g) {
    const float* maxima = candidates.range_max.data() + g * ranges;
    float* factors = candidates.range_factors.data() + g * ranges;
    const float maximum = *std::max_element(maxima, maxima + ranges);
    float sum = 0.0f;
    for (int64_t i = 0; i < ranges; ++i) sum += factors[i] * std::exp(maxima[i] - maximum);
    unit.lse_all[g] = maximum + std::log(sum);
    if (!std::isfinite(unit.lse_all[g])) return pass_.report_non_finite(r, u);
    for (int64_t i = 0; i < ranges; ++i) {
      factors[i] = std::exp(maxima[i] - maximum) * (1.0f / sum);
      const int64_t begin = n * i / ranges;
      setup_.kernels.scale_add(candidates.scores.data() + g * n + begin, factors[i], n * (i + 1) / ranges - begin,
                               g > 0, candidates.importance.data() + begin);
    }
  }
  PolicyContext ctx = context(r, u, worker);
  const int64_t recent = ctx.kv_len - ctx.last;
  ctx.num_candidates = n - ctx.first - recent;
  ctx.importance = candidates.importance.data() + ctx.first;
  candidates.positions.resize(static_cast<size_t>(ctx.first + ctx.budget_tokens + recent));
  int32_t* positions = candidates.positions.data();
  ctx.indices = positions + ctx.first;
  const int64_t last = ctx.num_candidates;
  const float* importance = ctx.importance;
  const PolicyMember& member = pass_.member_of(u);
  int64_t count = member.select != nullptr
                      ? member.select(&ctx)
                      : top_k(setup_.kernels, ctx.importance, ctx.num_candidates, ctx.budget_tokens, ctx.indices);
  if (!returned_well(setup_, ctx, r, u, "select")) return;
  if (!ascends_within(setup_, ctx, r, u, "select", ctx.indices, count, 0, last, ctx.budget_tokens)) return;
  count = cut_to_mass(ctx.indices, count, importance, ctx.first, last, recent);
  // Where each attended token is among the considered ones: sinks, the choice, recent tokens.
  std::iota(positions, positions + ctx.first, 0);
  for (int64_t i = 0; i < count; ++i) ctx.indices[i] += static_cast<int32_t>(ctx.first);
  std::iota(ctx.indices + count, ctx.indices + count + recent, static_cast<int32_t>(n - recent));
  unit.n = ctx.first + count + recent;
  count_chosen(unit);
  std::vector<int32_t>& chosen = pass_.selection_of(r, u);
  chosen.resize(static_cast<size_t>(unit.n));
  for (int64_t i = 0; i < unit.n; ++i) {
    chosen[static_cast<size_t>(i)] = candidates.considered[static_cast<size_t>(positions[i])];
  }
  unit.indices = chosen.data();
  unit.weights.resize(static_cast<size_t>(group * unit.n));  // filled where they are needed
  if (!setup_.policy.roles.empty()) pass_.published_of(r, u).set(chosen);
}

void Selector::gather_weights(Unit& unit, int64_t first, int64_t last) const {
  const Candidates& candidates = unit.candidates;
  const auto all = static_cast<int64_t>(candidates.considered.size());
  const int32_t* positions = candidates.positions.data();
  for (int64_t i = first, range = 0; i < last; ++range) {  // positions ascend, and so do ranges
    const int64_t end_of_range = all * (range + 1) / candidates.num_ranges;
    const int64_t end = std::lower_bound(positions + i, positions + last, end_of_range) - positions;
    for (int g = 0; g < setup_.unit_group(); ++g) {
      const float factor = candidates.range_factors.data()[g * candidates.num_ranges + range];
      const float* weights = candidates.scores.data() + g * all;
      float* kept = unit.weights.data() + g * unit.n;
      for (int64_t j = i; j < end; ++j) kept[j] = weights[positions[j]] * factor;
    }
    i = end;
  }
}

void Selector::select(int r, int u, const float* importance, int worker) {
  const PhaseTimer timer(setup_.profile_of(worker), Phase::select);
  const PolicyFunctions& policy = setup_.policy;
  Unit& unit = pass_.unit(r, u);
  const bool attends_to_all = unit.role == Role::retrieve;
  std::vector<int32_t>& chosen = attends_to_all ? pass_.published_of(r, u).own : pass_.selection_of(r, u);
  PolicyContext ctx = context(r, u, worker);
  chosen.resize(static_cast<size_t>(setup_.budget_of(pass_.row(r))));
  std::iota(chosen.begin(), chosen.begin() + policy.sink_tokens, 0);
  ctx.importance = importance;
  ctx.indices = chosen.data() + policy.sink_tokens;
  const PolicyMember& member = pass_.member_of(u);
  int64_t count = member.select != nullptr ? member.select(&ctx) : 0;
  if (!returned_well(setup_, ctx, r, u, "select") ||
      !ascends_within(setup_, ctx, r, u, "select", ctx.indices, count, ctx.first, ctx.last, ctx.budget_tokens)) {
    chosen.clear();
    if (attends_to_all) pass_.published_of(r, u).set_own();
    return;
  }
  const int64_t recent = ctx.kv_len - ctx.last;
  if (importance != nullptr) count = cut_to_mass(ctx.indices, count, importance, 0, ctx.last, recent);
  int64_t end = policy.sink_tokens + count;
  std::iota(chosen.begin() + end, chosen.begin() + end + recent, static_cast<int32_t>(ctx.last));
  end += recent;
  chosen.resize(static_cast<size_t>(end));
  if (attends_to_all) return pass_.published_of(r, u).set_own();
  unit.indices = chosen.data();
  unit.n = end;
  if (importance != nullptr) count_chosen(unit);
  if (!policy.roles.empty()) pass_.published_of(r, u).set(chosen);
}

}  // namespace offload
