#include "attention/policy_context.h"

#include <algorithm>
#include <vector>

namespace offload {
namespace {

// Fewer are scored where they are asked for.
constexpr int64_t kMinDeferredCodes = 2 * kMinScanCodes;
constexpr int64_t kMinDeferredRows = 2 * kMinRankRows;

const KernelTable& kernels_of(const PolicyContext* context) {
  return *static_cast<const KernelTable*>(context->kernels);
}

void score_tokens(const PolicyContext* context, const int32_t* indices, int64_t n, float* scores) {
  const PhaseTimer timer(context->profile, Phase::score);
  if (context->profile != nullptr) {
    context->profile->bytes += n * context->keys.row_bytes;
    context->profile->scored_tokens += n;
  }
  kernels_of(context).score[static_cast<int>(context->keys.format)]({context->query,
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

int64_t rank_rows(const PolicyContext* context, const float* query, int64_t num_queries, const int8_t* rows,
                  const Bf16* scales, const Bf16* spreads, float spread_weight, const int32_t* ranges,
                  int64_t num_ranges, float* ranks) {
  int64_t num_rows = 0;
  for (int64_t i = 0; i < num_ranges; ++i) num_rows += ranges[2 * i + 1] - ranges[2 * i];
  if (context->profile != nullptr) context->profile->bytes += num_rows * (context->head_dim + 2 * sizeof(Bf16));
  const RankArgs args{query,
                      static_cast<int>(num_queries),
                      static_cast<int>(context->head_dim),
                      rows,
                      scales,
                      spreads,
                      spread_weight,
                      ranges,
                      static_cast<int>(num_ranges),
                      ranks};
  if (context->deferred != nullptr && context->may_defer > 1 && num_rows >= kMinDeferredRows) {
    context->deferred->ranks = args;
    context->deferred->num_ranked = num_rows;
    return kDeferred;
  }
  kernels_of(context).rank_rows(args);
  return 0;
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
  if (context->deferred != nullptr && context->may_defer != 0 && k > 0 && n >= kMinDeferredCodes) {
    context->deferred->codes = {args, k, tokens};
    return kDeferred;
  }
  static thread_local std::vector<float> scores;
  scores.resize(std::max(scores.size(), static_cast<size_t>(n)));
  args.scores = scores.data();
  kernels_of(context).score_codes(args);
  return list_codes(kernels_of(context), args, context->first, k, tokens);
}

void load_keys(const PolicyContext* context, int64_t first, int64_t n, float* out) {
  const KernelTable& kernels = kernels_of(context);
  const auto format = static_cast<int>(context->keys.format);
  alignas(64) char rounded[kMaxHeadDim * sizeof(float)];
  for (int64_t t = first; t < first + n; ++t, out += context->head_dim) {
    kernels.to_float[format](context->keys.row(t), context->head_dim, out);
    if (format == context->dtype) continue;  // else as KVStore.gather has them: a policy's build sees the same
    kernels.from_float[context->dtype](out, context->head_dim, rounded);
    kernels.to_float[context->dtype](rounded, context->head_dim, out);
  }
}

void store_rows(const PolicyContext* context, const float* x, int64_t n, void* out) {
  kernels_of(context).from_float[context->dtype](x, n, out);
}

int64_t filter_at_least(const PolicyContext* context, const float* x, int64_t n, float threshold, int32_t* positions) {
  return kernels_of(context).filter_at_least(x, n, threshold, positions, n);
}

}  // namespace

int64_t list_codes(const KernelTable& kernels, const CodeArgs& args, int64_t first, int64_t k, int32_t* tokens) {
  const int64_t count = top_k(kernels, args.scores + first, args.n - first, k, tokens);
  for (int64_t i = 0; i < count; ++i) tokens[i] += static_cast<int32_t>(first);
  return count;
}

PolicyContext policy_context(AttentionSetup& setup, int64_t layer_idx, const QueryRow& row, int unit,
                             const float* query, int worker) {
  const PolicyFunctions& policy = setup.policy;
  const PolicyMember& member = setup.member_of(layer_idx, unit);
  PolicyContext context{};
  context.layer_idx = layer_idx;
  context.unit = unit;
  if (!policy.number_of.empty()) {
    context.unit = policy.number_of[static_cast<size_t>(layer_idx * setup.units() + unit)];
  }
  context.group_size = setup.unit_group();
  context.kv_head = context.unit * context.group_size / setup.shape.group_size();
  context.head_dim = setup.shape.head_dim;
  context.kv_len = setup.tokens_of(row, unit);
  context.first = policy.sink_tokens;
  context.last = context.kv_len - policy.recent_tokens;
  context.budget_tokens = setup.budget_of(row) - policy.sink_tokens - policy.recent_tokens;
  context.sm_scale = setup.sm_scale(layer_idx);
  context.parameters = member.parameters.data();
  context.query = query;
  context.text_marks = row.text_marks;
  if (row.arrays != nullptr) context.arrays = row.arrays + layer_idx * policy.num_arrays + member.first_array;
  context.score_tokens = score_tokens;
  context.top_k = top_k_for_policy;
  context.score_rows = score_rows;
  context.rank_rows = rank_rows;
  context.top_codes = top_codes;
  context.load_keys = load_keys;
  context.store_rows = store_rows;
  context.filter_at_least = filter_at_least;
  context.kernels = &setup.kernels;
  context.dtype = setup.dtype();
  context.keys = row.keys(setup.shape, setup.kv_head_of(unit));
  context.profile = setup.profile_of(worker);
  static thread_local char error[kErrorBytes];
  error[0] = '\0';
  context.error = error;
  return context;
}

bool returned_well(AttentionSetup& setup, const PolicyContext& context, int row_idx, int unit, const char* callback) {
  if (context.profile != nullptr) context.profile->bytes += context.bytes_touched;
  if (context.error[0] == '\0') return true;
  setup.report_policy(context.layer_idx, row_idx, unit, callback, context.error);
  return false;
}

bool ascends_within(AttentionSetup& setup, const PolicyContext& context, int row_idx, int unit, const char* callback,
                    const int32_t* chosen, int64_t count, int64_t first, int64_t last, int64_t most) {
  if (count < 0) {
    setup.report_non_finite(context.layer_idx, row_idx, unit);
    return false;
  }
  const auto refuse = [&](const std::string& what) {
    setup.report_policy(context.layer_idx, row_idx, unit, callback, what);
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

}  // namespace offload
