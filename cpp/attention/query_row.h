// What decode attention is asked: query tokens over pages of the host KV store.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels/kernels.h"

namespace offload {

struct AttentionShape {
  int num_qo_heads;
  int num_kv_heads;
  int head_dim;
  int page_shift;      // log2 of the tokens of a page
  DType dtype;         // of queries and outputs
  float sm_scale;      // of a layer
  DType format;        // of keys and values in pages
  float cap = 0.0f;    // of its scores, as of ScoreArgs
  int64_t window = 0;  // how many tokens a row sees where it attends to all, the last; 0: all
  // [num_qo_heads] logits that take their share of each softmax and have no value, or null. Outputs are what is left;
  // an lse is of tokens alone. For who attends to all tokens here.
  const float* sinks = nullptr;
  bool keys_only = false;  // values are the first elements of keys, and pages have keys alone

  int group_size() const { return num_qo_heads / num_kv_heads; }
  bool has_heads_of(const AttentionShape& other) const {
    return num_qo_heads == other.num_qo_heads && num_kv_heads == other.num_kv_heads && head_dim == other.head_dim;
  }
  int64_t head_bytes() const { return head_dim * dtype_bytes(dtype); }
  int64_t row_bytes() const { return offload::row_bytes(head_dim, format); }
  RowSource keys(const int64_t* pages, int kv_head) const {
    return {pages, (row_bytes() << page_shift) * kv_head, row_bytes(), page_shift, format};
  }
  RowSource values(const int64_t* pages, int kv_head) const {
    if (keys_only) return keys(pages, kv_head);
    return {pages, (row_bytes() << page_shift) * (num_kv_heads + kv_head), row_bytes(), page_shift, format};
  }
  // x, [head_dim] of `dtype`, becomes a token's key or value.
  void write(const KernelTable& kernels, const RowSource& to, int64_t token, const void* x) const {
    void* row = const_cast<void*>(to.row(token));
    if (format == dtype) {
      std::memcpy(row, x, static_cast<size_t>(head_bytes()));
      return;
    }
    alignas(64) float values[kMaxHeadDim];
    kernels.to_float[static_cast<int>(dtype)](x, head_dim, values);
    kernels.from_float[static_cast<int>(format)](values, head_dim, row);
  }
};

inline constexpr int64_t kAttendsToAll = -1;  // in place of a budget

// One query token. Several rows may belong to one sequence, each with a kv_len of its own.
struct QueryRow {
  const int64_t* pages;   // page addresses of (sequence, layer)
  int64_t kv_len;         // attends to tokens [0, kv_len)
  const int64_t* starts;  // [num_kv_heads] where KV heads have pages of their own, and lack the first tokens; or null
  int64_t head_stride;    // then: pages from one KV head's to the next
  const void* query;      // [num_qo_heads, head_dim], dtype of the shape
  void* output;           // the same, or float32 (AttendOptions)
  float* lse;             // optional [num_qo_heads]
  void* const* arrays;    // of the policy: [num_layers, PolicyFunctions::num_arrays]; may be null
  const uint8_t* text_marks;  // [kv_len] or null
  int64_t budget_tokens;      // in place of the policy's, and no more than it; 0: the policy's; or kAttendsToAll
  // An explicit selection instead of a policy's: CSR over units, sorted unique tokens. Null where a policy selects.
  const int64_t* indptr;
  const int32_t* indices;
  float* weights;  // optional with an explicit selection: normalised weights [group_size, n] per unit, units in order
  // What a GPU listed in place of the policy's propose(), of each KV head that AttendOptions::listed names: sinks,
  // candidates and recent tokens, sorted and unique, [num_kv_heads, max_listed]; and how many, -1 where its numbers
  // were not finite.
  const int32_t* listed;
  const int32_t* num_listed;
  int64_t max_listed;

  // What a KV head has: tokens are numbered from 0 on in each head by itself.
  int64_t num_tokens(int kv_head) const { return starts == nullptr ? kv_len : kv_len - starts[kv_head]; }
  RowSource keys(const AttentionShape& shape, int kv_head) const {
    if (starts == nullptr) return shape.keys(pages, kv_head);
    return {pages_of(shape, kv_head), 0, shape.row_bytes(), shape.page_shift, shape.format};
  }
  RowSource values(const AttentionShape& shape, int kv_head) const {
    if (starts == nullptr) return shape.values(pages, kv_head);
    if (shape.keys_only) return keys(shape, kv_head);
    return {pages_of(shape, kv_head), shape.row_bytes() << shape.page_shift, shape.row_bytes(), shape.page_shift,
            shape.format};
  }

 private:
  const int64_t* pages_of(const AttentionShape& shape, int kv_head) const {
    return pages + kv_head * head_stride + (starts[kv_head] >> shape.page_shift);
  }
};

// For callers that hold a part of the cache elsewhere, and have something to do between the answer and the policy's
// learning from it.
struct AttendOptions {
  // Sinks and recent tokens are somebody else's (a GPU's): what is attended here is the rest of each unit's tokens, for
  // an exact merge; that of no tokens has an lse of -inf. What the policy is shown does not change by it. A unit that
  // the policy answered has an lse of +inf: its output is the whole answer.
  bool window_on_device = false;
  int64_t sink_tokens = 0;  // of that window; where a policy selects, as many as its own
  int64_t recent_tokens = 0;
  const uint8_t* elsewhere = nullptr;  // [num_kv_heads] of this layer, or null: 1 where somebody else attends to all
  const uint8_t* listed = nullptr;     // likewise: 1 where the rows have lists of candidates
  bool float_output = false;           // output is float32 instead of the shape's dtype
  bool defers_updates = false;         // the policy's observe() and append() wait for update()
  // Tokens are chosen, and nothing is attended: output is written, but says nothing. The policy learns as if.
  bool chooses_only = false;
  int64_t max_chosen = 0;  // of a unit, by a policy that does not observe each step; or the budget, if that is more
  bool is_decoded = true;  // false: a row again, for the policy only, which is not probed
};

}  // namespace offload
