#include "operators/rope_append.h"

#include <cstring>

namespace offload {

void rope_append(const KernelTable& kernels, const AttentionShape& shape, void* qkv, const void* cos, const void* sin,
                 const HeadNorms& norms, const int64_t* pages, int64_t position) {
  const auto rope_head = kernels.rope_head[static_cast<int>(shape.dtype)];
  const int64_t head_bytes = shape.row_bytes();
  char* head = static_cast<char*>(qkv);
  for (int h = 0; h < shape.num_qo_heads; ++h, head += head_bytes) {
    rope_head(head, cos, sin, norms.query, norms.eps, shape.head_dim);
  }
  const char* value = head + shape.num_kv_heads * head_bytes;
  for (int h = 0; h < shape.num_kv_heads; ++h, head += head_bytes, value += head_bytes) {
    rope_head(head, cos, sin, norms.key, norms.eps, shape.head_dim);
    std::memcpy(const_cast<void*>(shape.keys(pages, h).row(position)), head, static_cast<size_t>(head_bytes));
    std::memcpy(const_cast<void*>(shape.values(pages, h).row(position)), value, static_cast<size_t>(head_bytes));
  }
}

}  // namespace offload
