#include "operators/causal_attention.h"

#include <algorithm>
#include <vector>

namespace offload {
namespace {

constexpr int64_t kTasksPerThread = 8;
constexpr int64_t kFewestRows = 24;  // packing its keys is then a quarter of a task

}  // namespace

bool has_causal_attention(const KernelTable& kernels, DType dtype, int64_t head_dim) {
  const int type = static_cast<int>(dtype);
  return kernels.attend_causal[type] != nullptr && head_dim % kernels.causal_multiple[type] == 0 &&
         head_dim <= kMaxHeadDim;
}

void causal_attention(const KernelTable& kernels, WorkerPool& pool, DType dtype, int64_t num_kv_heads,
                      const CausalArgs& args) {
  const auto attend = kernels.attend_causal[static_cast<int>(dtype)];
  const int64_t share = args.num_queries * num_kv_heads / (pool.num_threads() * kTasksPerThread);
  const int64_t rows = std::clamp(share * args.group_size, kFewestRows, kCausalRows);
  const int64_t tokens = std::max<int64_t>(1, rows / args.group_size);
  const int64_t num_blocks = (args.num_queries + tokens - 1) / tokens;
  // The last queries see most keys: they go first, so that the threads end together.
  pool.parallel_for(num_blocks * num_kv_heads, [&](int64_t task, int) {
    static thread_local std::vector<float> scratch;
    const int64_t first = (num_blocks - 1 - task / num_kv_heads) * tokens;
    const int64_t last = std::min(first + tokens, args.num_queries);
    scratch.resize(static_cast<size_t>(args.scratch_items((last - first) * args.group_size)));
    attend(args, task % num_kv_heads, first, last, scratch.data());
  });
}

}  // namespace offload
