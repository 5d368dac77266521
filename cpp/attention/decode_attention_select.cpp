// Choosing what a unit attends to: the policy's context and primitives, its proposal, and the scores of that.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "attention/decode_attention.h"

namespace offload {
namespace {

constexpr int64_t kMinDeferredCodes = 2 * kMinScanCodes;  // fewer are scored where they are asked for

const KernelTable& kernels_of(const PolicyContext* context) {
  return *static_cast<const KernelTable*>(context->kernels);
}

void score_tokens(const PolicyContext* context, const int32_t* indices, int64_t n, float* scores) {
  const PhaseTimer timer(context->profile, Phase::score);
  if (context->profile != nullptr) {
    context->profile->bytes += n * context->keys.row_bytes;
    context->profile->scored_tokens += n;
  }
  kernels_of(context).score[context->dtype]({context->query,
                                             static_cast<int>(context->group_size),
                                             static_cast<int>(context->head_dim),
                                             context->keys,
                                             {indices, 0, n},
                                             static_cast<float>(context->sm_scale),
                                             scores,
                                             n});
}

int64_t top_k_for_policy(const PolicyContext* context, const float* x, int64_t n, int64_t k, int32_t* positions) {
  return top_k(kernels_of(context), x, n, k, positions);
}

void score_rows(const PolicyContext* context, const float* query, const void* rows, int64_t n, int64_t width,
                float* scores) {
  constexpr int32_t kOnePage = 62;
  const int64_t row_bytes = width * dtype_bytes(static_cast<DType>(context->dtype));
  const PhaseTimer timer(context->profile, Phase::score);
  if (context->profile != nullptr) context->profile->bytes += n * row_bytes;
  const int64_t page = reinterpret_cast<int64_t>(rows);
  kernels_of(context).score[context->dtype]({query,
                                             static_cast<int>(context->group_size),
                                             static_cast<int>(width),
                                             {&page, 0, row_bytes, kOnePage},
                                             {nullptr, 0, n},
                                             static_cast<float>(context->sm_scale),
                                             scores,
                                             n});
}

void rank_rows(const PolicyContext* context, const float* query, int64_t num_queries, const int8_t* rows,
               const Bf16* scales, const Bf16* spreads, float spread_weight, int64_t boxes, const int32_t* ranges,
               int64_t num_ranges, float* ranks) {
  const int64_t of_scales = spreads != nullptr ? 2 * sizeof(Bf16) : sizeof(Bf16);
  const int64_t row_bytes = context->head_dim + of_scales;
  for (int64_t i = 0; i < num_ranges && context->profile != nullptr; ++i) {
    context->profile->bytes += (ranges[2 * i + 1] - ranges[2 * i]) * row_bytes;
  }
  kernels_of(context).rank_rows({query, static_cast<int>(num_queries), static_cast<int>(context->head_dim), rows,
                                 scales, spreads, spread_weight, boxes != 0, ranges, static_cast<int>(num_ranges),
                                 ranks});
}

// The k tokens of [first, args.n) that score most; how many.
int64_t list_tokens(const KernelTable& kernels, const CodeArgs& args, int64_t first, int64_t k, int32_t* tokens) {
  const int64_t count = top_k(kernels, args.scores + first, args.n - first, k, tokens);
  for (int64_t i = 0; i < count; ++i) tokens[i] += static_cast<int32_t>(first);
  return count;
}

int64_t top_codes(const PolicyContext* context, const float* query, const float* offsets, const uint8_t* codes,
                  const float* scales, const float* levels, int64_t bits, int64_t k, int32_t* tokens) {
  const int64_t n = context->last;
  if (context->profile != nullptr) context->profile->bytes += n * (context->head_dim * bits / 8 + 4);
  CodeArgs args{query,
                static_cast<int>(context->group_size),
                static_cast<int>(context->head_dim),
                static_cast<int>(bits),
                levels,
                offsets,
                codes,
                scales,
                n,
                nullptr};
  if (context->may_defer != 0 && k > 0 && n >= kMinDeferredCodes) {
    *context->deferred = {args, k, tokens};
    return kDeferred;
  }
  static thread_local std::vector<float> scores;
  scores.resize(std::max(scores.size(), static_cast<size_t>(n)));
  args.scores = scores.data();
  kernels_of(context).score_codes(args);
  return list_tokens(kernels_of(context), args, context->first, k, tokens);
}

void load_keys(const PolicyContext* context, int64_t first, int64_t n, float* out) {
  for (int64_t t = first; t < first + n; ++t, out += context->head_dim) {
    kernels_of(context).to_float[context->dtype](context->keys.row(t), context->head_dim, out);
  }
}

void store_rows(const PolicyContext* context, const float* x, int64_t n, void* out) {
  kernels_of(context).from_float[context->dtype](x, n, out);
}

int64_t filter_at_least(const PolicyContext* context, const float* x, int64_t n, float threshold, int32_t* positions) {
  return kernels_of(context).filter_at_least(x, n, threshold, positions, n);
}

}  // namespace

PolicyContext DecodeAttention::context(int64_t layer_idx, const QueryRow& row, int row_idx, int unit, int worker) {
  PolicyContext context{};
  const PolicyMember& member = member_of(layer_idx, unit);
  context.layer_idx = layer_idx;
  context.unit = unit;
  if (!policy_.number_of.empty()) context.unit = policy_.number_of[static_cast<size_t>(layer_idx * units() + unit)];
  context.kv_head = context.unit * unit_group() / shape_.group_size();
  context.group_size = unit_group();
  context.head_dim = shape_.head_dim;
  context.kv_len = tokens_of(row, unit);
  context.first = policy_.sink_tokens;
  context.last = context.kv_len - policy_.recent_tokens;
  context.budget_tokens = policy_.budget_tokens - policy_.sink_tokens - policy_.recent_tokens;
  context.sm_scale = shape_.sm_scale;
  context.parameters = member.parameters.data();
  if (static_cast<size_t>(row_idx) < queries_.size() / (static_cast<size_t>(shape_.num_qo_heads) * shape_.head_dim)) {
    context.query = queries_of(row_idx, unit * unit_group());
  }
  context.text_marks = row.text_marks;
  if (row.arrays != nullptr) context.arrays = row.arrays + layer_idx * policy_.num_arrays + member.first_array;
  context.score_tokens = score_tokens;
  context.top_k = top_k_for_policy;
  context.score_rows = score_rows;
  context.rank_rows = rank_rows;
  context.top_codes = top_codes;
  context.load_keys = load_keys;
  context.store_rows = store_rows;
  context.filter_at_least = filter_at_least;
  context.kernels = &kernels_;
  context.dtype = static_cast<int64_t>(shape_.dtype);
  context.keys = row.keys(shape_, kv_head_of(unit));
  context.profile = profile_of(worker);
  static thread_local char error[kErrorBytes];
  error[0] = '\0';
  context.error = error;
  return context;
}

// After `callback`; false if it raised something, which is reported.
bool DecodeAttention::finish_context(const PolicyContext& context, int row_idx, int unit, const char* callback) {
  if (context.profile != nullptr) context.profile->bytes += context.bytes_touched;
  if (context.error[0] == '\0') return true;
  report_policy(context.layer_idx, row_idx, unit, callback, context.error);
  return false;
}

// Whether `count` chosen tokens, or positions, are at most `most` and ascend in [first, last); else it is reported.
bool DecodeAttention::accepts(const PolicyContext& context, int row_idx, int unit, const char* callback,
                              const int32_t* chosen, int64_t count, int64_t first, int64_t last, int64_t most) {
  if (count < 0) {
    report_non_finite(context.layer_idx, row_idx, unit);
    return false;
  }
  const auto refuse = [&](const std::string& what) {
    report_policy(context.layer_idx, row_idx, unit, callback, what);
    return false;
  };
  if (count > most)
    return refuse("it returned " + std::to_string(count) + " tokens, of at most " + std::to_string(most));
  if (count == 0) return true;
  if (chosen == nullptr)
    return refuse("it returned " + std::to_string(count) + " candidates, but set no address of them");
  bool ascends = chosen[0] >= first && chosen[count - 1] < last;
  for (int64_t i = 1; i < count; ++i) ascends &= chosen[i - 1] < chosen[i];
  if (ascends) return true;
  int64_t wrong = 0;
  while (wrong + 1 < count && chosen[wrong] >= first && chosen[wrong] < last &&
         (wrong == 0 || chosen[wrong - 1] < chosen[wrong])) {
    ++wrong;
  }
  return refuse("index " + std::to_string(wrong) + " of its choice is " + std::to_string(chosen[wrong]) +
                ", but they must ascend, without repeats, in [" + std::to_string(first) + ", " + std::to_string(last) +
                ")");
}

void DecodeAttention::prepare(int64_t layer_idx, const std::vector<QueryRow>& rows) {
  if (!policy_.any_prepares()) return;
  task_rings_ = trace_.workers();
  pool_.parallel_for_near(static_cast<int64_t>(rows.size()) * units(),
                          [&](int64_t task, int worker) { prepare_task(layer_idx, rows, task, worker); });
}

void DecodeAttention::prepare_task(int64_t layer_idx, const std::vector<QueryRow>& rows, int64_t task, int worker) {
  const int r = static_cast<int>(task / units());
  const int unit = static_cast<int>(task % units());
  const QueryRow& row = rows[static_cast<size_t>(r)];
  if (tokens_of(row, unit) <= policy_.dense_tokens || !asks_policy(role_of(layer_idx, unit))) return;
  const TraceSpan span = task_span(TraceKind::prepare, layer_idx, r, unit, worker);
  prepare_unit(layer_idx, row, r, unit, worker);
}

void DecodeAttention::prepare_unit(int64_t layer_idx, const QueryRow& row, int row_idx, int unit, int worker) {
  const PolicyMember& member = member_of(layer_idx, unit);
  if (member.prepare == nullptr) return;
  const PhaseTimer timer(profile_of(worker), Phase::predict);
  PolicyContext ctx = context(layer_idx, row, row_idx, unit, worker);
  ctx.query = nullptr;  // whether it is known or not: predictions come before the query
  member.prepare(&ctx);
  finish_context(ctx, row_idx, unit, "prepare");
}

// For policies that do not scan all keys: select() alone, or propose(), after which the candidates are scored.
void DecodeAttention::ask_unit(int64_t layer_idx, const QueryRow& row, int row_idx, int unit_idx, int worker) {
  const PolicyMember& member = member_of(layer_idx, unit_idx);
  if (member.propose != nullptr) return propose_unit(layer_idx, row, row_idx, unit_idx, worker);
  select_unit(layer_idx, row, row_idx, unit_idx, nullptr, worker);
  Unit& unit = unit_of(row_idx, unit_idx);
  if (member.observe != nullptr) unit.scores.resize(static_cast<size_t>(unit_group() * unit.n));
}

void DecodeAttention::score_range(const QueryRow& row, int row_idx, int unit_idx, int64_t range, int worker) {
  Unit& unit = unit_of(row_idx, unit_idx);
  const auto all = static_cast<int64_t>(unit.considered.size());
  const int64_t begin = all * range / unit.num_ranges;
  const int64_t n = all * (range + 1) / unit.num_ranges - begin;
  WorkerProfile* profile = profile_of(worker);
  const PhaseTimer timer(profile, Phase::score);
  if (profile != nullptr) {
    profile->bytes += n * shape_.row_bytes();
    profile->scored_tokens += n;
  }
  float* scores = unit.candidate_scores.data() + begin;
  score(row, row_idx, unit_idx * unit_group(), unit_group(), {unit.considered.data() + begin, 0, n}, scores, all);
  for (int g = 0; g < unit_group(); ++g) {
    const int64_t at = g * unit.num_ranges + range;
    unit.range_max.data()[at] = kernels_.exp_shifted(scores + g * all, n, unit.range_factors.data() + at);
  }
}

// Whether a unit's candidates are those that a GPU has listed. A list that cannot be one leaves nothing to consider.
bool DecodeAttention::takes_list(const QueryRow& row, int row_idx, int unit_idx) {
  const int kv_head = kv_head_of(unit_idx);
  if (options_.listed == nullptr || options_.listed[kv_head] == 0) return false;
  const int64_t n = row.num_listed[kv_head];
  const int64_t most = std::min(row.max_listed, row.num_tokens(kv_head));
  const bool is_list = n >= policy_.sink_tokens + policy_.recent_tokens && n <= most;
  const int32_t* tokens = row.listed + kv_head * row.max_listed;
  unit_of(row_idx, unit_idx).considered.assign(tokens, tokens + (is_list ? n : 0));
  return true;
}

void DecodeAttention::propose_unit(int64_t layer_idx, const QueryRow& row, int row_idx, int unit_idx, int worker) {
  const PhaseTimer timer(profile_of(worker), Phase::predict);
  Unit& unit = unit_of(row_idx, unit_idx);
  unit.codes = {};
  if (takes_list(row, row_idx, unit_idx)) {
    if (unit.considered.empty()) return report_non_finite(layer_idx, row_idx, unit_idx);
    unit.candidate_scores.resize(static_cast<size_t>(unit_group()) * unit.considered.size());
    unit.importance.resize(unit.considered.size());
    return;
  }
  const int group = unit_group();
  float output[kMaxGroupSize * kMaxHeadDim];
  float lse[kMaxGroupSize];
  PolicyContext ctx = context(layer_idx, row, row_idx, unit_idx, worker);
  ctx.output = output;
  ctx.lse = lse;
  ctx.may_defer = pool_.num_threads() > 1;
  ctx.deferred = &unit.codes;
  const int64_t count = member_of(layer_idx, unit_idx).propose(&ctx);
  if (!finish_context(ctx, row_idx, unit_idx, "propose")) return;
  if (count == kDeferred && unit.codes.k > 0) {
    return unit.code_scores.resize(static_cast<size_t>(unit.codes.args.n));
  }
  unit.codes = {};  // what was deferred, and then not asked for
  if (count == kAnswered) {
    unit.answered = true;
    unit.n = 0;
    selection_[static_cast<size_t>(row_idx * units() + unit_idx)].clear();
    // Nothing was chosen: that is what the layers below inherit.
    if (!policy_.roles.empty()) {
      list_considered(ctx.kv_len, nullptr, 0, &published_of(row_idx, unit_idx).own);
      published_of(row_idx, unit_idx).set_own();
    }
    float check = 0.0f;  // stays 0 unless some output is NaN or inf
    for (int i = 0; i < group * shape_.head_dim; ++i) check += output[i] * 0.0f;
    for (int g = 0; g < group; ++g) check += lse[g] * 0.0f;
    if (check != 0.0f) return report_non_finite(layer_idx, row_idx, unit_idx);
    write_output(row, unit_idx * group, group, output);
    for (int g = 0; g < group && row.lse != nullptr; ++g) {
      row.lse[unit_idx * group + g] = options_.window_on_device ? INFINITY : lse[g];
    }
    if (!options_.defers_updates) update_unit(layer_idx, row, row_idx, unit_idx, worker);
    return;
  }
  if (!accepts(ctx, row_idx, unit_idx, "propose", ctx.candidates, count, ctx.first, ctx.last, ctx.last - ctx.first))
    return;
  consider(ctx.kv_len, unit, ctx.candidates, count);
}

// Codes that propose left to the workers: those of a range of tokens, whole blocks.
void DecodeAttention::scan_codes(int row_idx, int unit_idx, int64_t range, int worker) {
  const PhaseTimer timer(profile_of(worker), Phase::predict);
  Unit& unit = unit_of(row_idx, unit_idx);
  CodeArgs args = unit.codes.args;
  const int64_t blocks = ceil_div(args.n, kCodeBlock);
  const int64_t begin = blocks * range / unit.num_scans * kCodeBlock;
  args.n = std::min(args.n, blocks * (range + 1) / unit.num_scans * kCodeBlock) - begin;
  args.codes += begin * args.head_dim * args.bits / 8;
  args.scales += begin;
  args.scores = unit.code_scores.data() + begin;
  kernels_.score_codes(args);
}

// All of them are scored.
void DecodeAttention::finish_codes(int64_t layer_idx, const QueryRow& row, int row_idx, int unit_idx, int worker) {
  const PhaseTimer timer(profile_of(worker), Phase::predict);
  Unit& unit = unit_of(row_idx, unit_idx);
  CodesRequest& codes = unit.codes;
  codes.args.scores = unit.code_scores.data();
  const int64_t count = list_tokens(kernels_, codes.args, policy_.sink_tokens, codes.k, codes.tokens);
  if (count < 0) return report_non_finite(layer_idx, row_idx, unit_idx);
  consider(tokens_of(row, unit_idx), unit, codes.tokens, count);
}

// Sinks, the policy's tokens, recent ones.
void DecodeAttention::list_considered(int64_t kv_len, const int32_t* chosen, int64_t n,
                                      std::vector<int32_t>* tokens) const {
  tokens->clear();
  for (int64_t t = 0; t < policy_.sink_tokens; ++t) tokens->push_back(static_cast<int32_t>(t));
  tokens->insert(tokens->end(), chosen, chosen + n);
  for (int64_t t = kv_len - policy_.recent_tokens; t < kv_len; ++t) tokens->push_back(static_cast<int32_t>(t));
}

void DecodeAttention::consider(int64_t kv_len, Unit& unit, const int32_t* candidates, int64_t n) const {
  list_considered(kv_len, candidates, n, &unit.considered);
  unit.candidate_scores.resize(static_cast<size_t>(unit_group()) * unit.considered.size());
  unit.importance.resize(unit.considered.size());
}

// Of chosen positions into `importance` those that have top_p of all its weight, with the sinks' and the recent tokens'
// before and after [0, last); sinks are inside where `sinks_before` is 0. The weights are sums over the query heads: no
// head keeps less than half of its own, however small top_p.
int64_t DecodeAttention::cut_to_mass(int32_t* chosen, int64_t count, const float* importance, int64_t sinks_before,
                                     int64_t last, int64_t recent) const {
  if (policy_.top_p >= 1.0) return count;
  const float* sinks = importance - sinks_before;
  double mass = std::max(policy_.top_p * unit_group(), unit_group() - 1.0 + policy_.least_of_head);
  mass -= std::accumulate(sinks, sinks + policy_.sink_tokens, 0.0);
  mass -= std::accumulate(importance + last, importance + last + recent, 0.0);
  return top_mass(importance, chosen, count, mass);
}

// All that a unit considers is scored: attention weights over it, and the policy's choice among its candidates.
void DecodeAttention::finish_proposal(int64_t layer_idx, const QueryRow& row, int row_idx, int unit_idx, int worker) {
  const PhaseTimer timer(profile_of(worker), Phase::select);
  Unit& unit = unit_of(row_idx, unit_idx);
  const int group = unit_group();
  const auto n = static_cast<int64_t>(unit.considered.size());
  const int64_t ranges = unit.num_ranges;
  for (int g = 0; g < group; ++g) {
    const float* maxima = unit.range_max.data() + g * ranges;
    float* factors = unit.range_factors.data() + g * ranges;
    const float maximum = *std::max_element(maxima, maxima + ranges);
    float sum = 0.0f;
    for (int64_t r = 0; r < ranges; ++r) sum += factors[r] * std::exp(maxima[r] - maximum);
    unit.lse_all[g] = maximum + std::log(sum);
    if (!std::isfinite(unit.lse_all[g])) return report_non_finite(layer_idx, row_idx, unit_idx);
    for (int64_t r = 0; r < ranges; ++r) {
      factors[r] = std::exp(maxima[r] - maximum) * (1.0f / sum);
      const int64_t begin = n * r / ranges;
      kernels_.scale_add(unit.candidate_scores.data() + g * n + begin, factors[r], n * (r + 1) / ranges - begin, g > 0,
                         unit.importance.data() + begin);
    }
  }
  PolicyContext ctx = context(layer_idx, row, row_idx, unit_idx, worker);
  const int64_t recent = ctx.kv_len - ctx.last;
  const int64_t num_candidates = n - ctx.first - recent;
  const float* importance = unit.importance.data() + ctx.first;
  ctx.num_candidates = num_candidates;
  ctx.importance = importance;
  unit.positions.resize(static_cast<size_t>(ctx.first + ctx.budget_tokens + recent));
  int32_t* positions = unit.positions.data();
  ctx.indices = positions + ctx.first;
  const PolicyMember& member = member_of(layer_idx, unit_idx);
  int64_t count = member.select != nullptr
                      ? member.select(&ctx)
                      : top_k(kernels_, ctx.importance, ctx.num_candidates, ctx.budget_tokens, ctx.indices);
  if (!finish_context(ctx, row_idx, unit_idx, "select")) return;
  if (!accepts(ctx, row_idx, unit_idx, "select", ctx.indices, count, 0, num_candidates, ctx.budget_tokens)) return;
  count = cut_to_mass(ctx.indices, count, importance, ctx.first, num_candidates, recent);
  // Where each attended token is among the considered ones: sinks, the choice, recent tokens.
  std::iota(positions, positions + ctx.first, 0);
  for (int64_t i = 0; i < count; ++i) ctx.indices[i] += static_cast<int32_t>(ctx.first);
  std::iota(ctx.indices + count, ctx.indices + count + recent, static_cast<int32_t>(n - recent));
  unit.n = ctx.first + count + recent;
  count_chosen(unit);
  std::vector<int32_t>& chosen = selection_[static_cast<size_t>(row_idx * units() + unit_idx)];
  chosen.resize(static_cast<size_t>(unit.n));
  for (int64_t i = 0; i < unit.n; ++i) {
    chosen[static_cast<size_t>(i)] = unit.considered[static_cast<size_t>(positions[i])];
  }
  unit.indices = chosen.data();
  unit.weights.resize(static_cast<size_t>(group * unit.n));  // filled where they are needed
  if (!policy_.roles.empty()) published_of(row_idx, unit_idx).set(chosen);
}

// The weights of attended tokens [first, last) of a unit whose candidates were scored.
void DecodeAttention::gather_weights(Unit& unit, int64_t first, int64_t last) const {
  const auto all = static_cast<int64_t>(unit.considered.size());
  const int32_t* positions = unit.positions.data();
  for (int64_t i = first, r = 0; i < last; ++r) {  // positions ascend, and so do ranges
    const int64_t end_of_range = all * (r + 1) / unit.num_ranges;
    const int64_t end = std::lower_bound(positions + i, positions + last, end_of_range) - positions;
    for (int g = 0; g < unit_group(); ++g) {
      const float factor = unit.range_factors.data()[g * unit.num_ranges + r];
      const float* weights = unit.candidate_scores.data() + g * all;
      float* kept = unit.weights.data() + g * unit.n;
      for (int64_t j = i; j < end; ++j) kept[j] = weights[positions[j]] * factor;
    }
    i = end;
  }
}

// Sinks, the policy's choice, recent tokens: sorted and unique by construction.
void DecodeAttention::select_unit(int64_t layer_idx, const QueryRow& row, int row_idx, int unit_idx,
                                  const float* importance, int worker) {
  const PhaseTimer timer(profile_of(worker), Phase::select);
  Unit& unit = unit_of(row_idx, unit_idx);
  const bool attends_to_all = unit.role == Role::retrieve;
  std::vector<int32_t>& chosen = attends_to_all ? published_of(row_idx, unit_idx).own
                                                : selection_[static_cast<size_t>(row_idx * units() + unit_idx)];
  PolicyContext ctx = context(layer_idx, row, row_idx, unit_idx, worker);
  chosen.resize(static_cast<size_t>(policy_.budget_tokens));
  for (int64_t i = 0; i < policy_.sink_tokens; ++i) chosen[static_cast<size_t>(i)] = static_cast<int32_t>(i);
  ctx.importance = importance;
  ctx.indices = chosen.data() + policy_.sink_tokens;
  const PolicyMember& member = member_of(layer_idx, unit_idx);
  int64_t count = member.select != nullptr ? member.select(&ctx) : 0;
  if (!finish_context(ctx, row_idx, unit_idx, "select") ||
      !accepts(ctx, row_idx, unit_idx, "select", ctx.indices, count, ctx.first, ctx.last, ctx.budget_tokens)) {
    chosen.clear();
    if (attends_to_all) published_of(row_idx, unit_idx).set_own();
    return;
  }
  const int64_t recent = ctx.kv_len - ctx.last;
  if (importance != nullptr) count = cut_to_mass(ctx.indices, count, importance, 0, ctx.last, recent);
  int64_t end = policy_.sink_tokens + count;
  std::iota(chosen.begin() + end, chosen.begin() + end + recent, static_cast<int32_t>(ctx.last));
  end += recent;
  chosen.resize(static_cast<size_t>(end));
  if (attends_to_all) return published_of(row_idx, unit_idx).set_own();
  unit.indices = chosen.data();
  unit.n = end;
  if (importance != nullptr) count_chosen(unit);
  if (!policy_.roles.empty()) published_of(row_idx, unit_idx).set(chosen);
}

}  // namespace offload
