#include "attention/attention_setup.h"

namespace offload {

std::string AttentionSetup::non_finite(int64_t layer_idx, int row_idx, int unit) const {
  return "non-finite attention in layer " + std::to_string(layer_idx) + ", query row " + std::to_string(row_idx) +
         ", KV head " + std::to_string(kv_head_of(unit)) + ": NaN or inf in q or the KV cache";
}

void AttentionSetup::report_policy(int64_t layer_idx, int row_idx, int unit, const char* callback,
                                   const std::string& what) {
  failure.report(std::string("the policy's ") + callback + " failed in layer " + std::to_string(layer_idx) +
                 ", query row " + std::to_string(row_idx) + ", KV head " + std::to_string(kv_head_of(unit)) + ": " +
                 what);
}

}  // namespace offload
