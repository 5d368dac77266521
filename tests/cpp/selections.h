// Selections for stress tests of decode attention: the most important tokens, by a scan or by scores of their own.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/policy.h"

namespace offload::test {

inline int64_t offset_by_first(PolicyContext* context, int64_t count) {
  for (int64_t i = 0; i < count; ++i) context->indices[i] += static_cast<int32_t>(context->first);
  return count;
}

inline int64_t select_scanned(PolicyContext* context) {
  return offset_by_first(context,
                         context->top_k(context, context->importance + context->first, context->last - context->first,
                                        context->budget_tokens, context->indices));
}

inline int64_t select_scored(PolicyContext* context) {
  const int64_t n = context->last - context->first;
  std::vector<int32_t> tokens(static_cast<size_t>(n));
  std::vector<float> scores(static_cast<size_t>(n * context->group_size));
  for (int64_t i = 0; i < n; ++i) tokens[static_cast<size_t>(i)] = static_cast<int32_t>(context->first + i);
  context->score_tokens(context, tokens.data(), n, scores.data());
  return offset_by_first(context, context->top_k(context, scores.data(), n, context->budget_tokens, context->indices));
}

}  // namespace offload::test
