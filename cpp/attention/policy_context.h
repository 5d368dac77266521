// A call of a policy's function: what it is told, the primitives it may use, and what it may return.
#pragma once

#include <cstdint>

#include "attention/attention_setup.h"
#include "attention/policy.h"

namespace offload {

// Of one task: each makes tables of its queries first, or rounds them.
inline constexpr int64_t kMinScanCodes = 4096;
inline constexpr int64_t kMinRankRows = 512;

// `query` may be null. The text of an error lies in the calling thread's memory until its next call.
PolicyContext policy_context(AttentionSetup& setup, int64_t layer_idx, const QueryRow& row, int unit,
                             const float* query, int worker);
// After `callback`; false if it raised something, which is reported.
bool returned_well(AttentionSetup& setup, const PolicyContext& context, int row_idx, int unit, const char* callback);
// Whether `count` chosen tokens, or positions, are at most `most` and ascend in [first, last); else it is reported.
bool ascends_within(AttentionSetup& setup, const PolicyContext& context, int row_idx, int unit, const char* callback,
                    const int32_t* chosen, int64_t count, int64_t first, int64_t last, int64_t most);

// The k tokens of [first, args.n) that score most; how many.
int64_t list_codes(const KernelTable& kernels, const CodeArgs& args, int64_t first, int64_t k, int32_t* tokens);

}  // namespace offload
