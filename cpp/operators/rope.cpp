#include "operators/rope.h"

#include <algorithm>
#include <cstring>

namespace offload {

void rotate_heads(const KernelTable& kernels, WorkerPool& pool, DType dtype, const RopeArgs& args) {
  constexpr int64_t kTokens = 64;
  const auto rope_head = kernels.rope_head[static_cast<int>(dtype)];
  const int64_t item = dtype_bytes(dtype), row_bytes = args.head_dim * item, rope_bytes = args.rotary_dim * item;
  pool.parallel_for((args.num_tokens + kTokens - 1) / kTokens, [&](int64_t task, int) {
    const int64_t last = std::min((task + 1) * kTokens, args.num_tokens);
    for (int64_t head = 0; head < args.num_heads; ++head) {
      for (int64_t t = task * kTokens; t < last; ++t) {
        char* out = static_cast<char*>(args.out) + (head * args.num_tokens + t) * row_bytes;
        std::memcpy(out, static_cast<const char*>(args.x) + t * args.token * item + head * row_bytes,
                    static_cast<size_t>(row_bytes));
        rope_head(out, static_cast<const char*>(args.cos) + t * rope_bytes,
                  static_cast<const char*>(args.sin) + t * rope_bytes, nullptr, 0.0f, args.rotary_dim);
      }
    }
  });
}

}  // namespace offload
