// The shape contract of every CPU kernel: raw pointers, no torch, no Python.
//
// The layout of the host KV store is stated in offload/kv/store.py; RowSource is what a kernel needs of it:
// where row t (one token of one KV head, keys or values) lies. All offsets are 64-bit.
#pragma once

#include <cstdint>

namespace offload {

// The dtypes of a model; i8 is a format of cached rows alone (see Int8).
enum class DType : int32_t { f32 = 0, f16 = 1, bf16 = 2, i8 = 3 };
inline constexpr int kNumDTypes = 3;
inline constexpr int kNumRowFormats = 4;   // of keys and values in pages
inline constexpr int kMaxGroupSize = 128;  // query heads that share one KV head
inline constexpr int kMaxHeadDim = 576;    // latents of 512 beside a rotated part of 64
inline constexpr int kHeadDimMultiple = 16;
inline constexpr int kScoreTile = 256;     // tokens whose scores are held at once
inline constexpr int64_t kLineBytes = 64;  // of a cache

// How a weight matrix lies in memory: as numbers of the model's dtype, or as packed groups (see PackedWeights).
enum class WeightFormat : int32_t { dense = 0, q8 = 1, q4 = 2, q8_of_16 = 3, q8_min = 4, table4 = 5, table4_of_16 = 6 };
inline constexpr int kNumWeightFormats = 7;
inline constexpr int64_t kPackedGroup = 32;      // elements of a row that share a scale, but where 16 do (.._of_16)
inline constexpr int64_t kPackedScales = 16;     // groups whose scales are converted at once
inline constexpr float kSmallestInput = 1e-30f;  // a group of nothing larger counts as zero: 127 / x is finite

struct Half {
  uint16_t bits;
};
struct Bf16 {
  uint16_t bits;
};

inline constexpr int64_t kRowGroup = 64;  // dimensions of an int8 row that share a scale; the last group may have fewer
// A row is its codes, [head_dim] and zeros up to a multiple of kCodeMultiple, then the scales of their groups, float16:
// element d is scale[d / kRowGroup] * code[d].
inline constexpr int64_t kCodeMultiple = 32;
inline constexpr int64_t num_codes(int64_t head_dim) { return (head_dim + kCodeMultiple - 1) & -kCodeMultiple; }
struct Int8 {
  int8_t code;
};

// How far ahead of a contiguous stream kernels prefetch into L2; 0 leaves it to the hardware. Intel's (Sapphire
// Rapids) does not keep up: dense attention reaches 50 % of a sequential read on one core and 57 % on fifteen; with
// this 74 and 79 %. On Zen 4, whose prefetchers do, every software prefetch of a stream costs bandwidth.
#if defined(__x86_64__)
inline const bool is_intel = (__builtin_cpu_init(), __builtin_cpu_is("intel"));
inline const int64_t stream_ahead_bytes = is_intel ? 4096 : 0;
#else
inline constexpr bool is_intel = false;
inline constexpr int64_t stream_ahead_bytes = 0;
#endif

// Where gathered rows are prefetched into: L2, but L1 on a Zen 5 (an AMD with VP2INTERSECT). That drops many of the
// prefetches into L2 while others use the memory, and the loads wait: a gather of keys then falls from 16 to 10 GB/s.
// On a Zen 4 those into L1 share its few miss buffers: 6 GB/s, where L2 has 9.6.
#if defined(__x86_64__)
inline const bool gathers_into_l1 =
    (__builtin_cpu_init(), __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512vp2intersect"));
#else
inline constexpr bool gathers_into_l1 = false;
#endif

// Into L2. Inlined by force: GCC takes a function that only prefetches for one without effects, and drops calls to it.
[[gnu::always_inline]] inline void prefetch_l2(const void* p) { __builtin_prefetch(p, 0, 2); }

// Into L1, for what is read at once: of so many that come so fast, those into L2 are dropped.
[[gnu::always_inline]] inline void prefetch_l1(const void* p) { __builtin_prefetch(p, 0, 3); }

// A gathered row, to be read soon.
[[gnu::always_inline]] inline void prefetch_gathered(const void* row, int64_t row_bytes) {
  const char* bytes = static_cast<const char*>(row);
  if (gathers_into_l1) {
    for (int64_t i = 0; i < row_bytes; i += 64) prefetch_l1(bytes + i);
  } else {
    for (int64_t i = 0; i < row_bytes; i += 64) prefetch_l2(bytes + i);
  }
}

inline int64_t dtype_bytes(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// Of one key or value in a page.
inline int64_t row_bytes(int64_t head_dim, DType format) {
  if (format == DType::i8) {
    return num_codes(head_dim) + (head_dim + kRowGroup - 1) / kRowGroup * static_cast<int64_t>(sizeof(Half));
  }
  return head_dim * dtype_bytes(format);
}

// Row t lies at pages[t >> page_shift] + offset + (t & page_mask) * row_bytes.
struct RowSource {
  const int64_t* pages;  // page addresses of one (sequence, layer)
  int64_t offset;        // of this KV head's keys or values inside a page
  int64_t row_bytes;
  int32_t page_shift;
  DType format = DType::f32;

  const void* row(int64_t t) const {
    const int64_t in_page = t & ((int64_t{1} << page_shift) - 1);
    return reinterpret_cast<const void*>(pages[t >> page_shift] + offset + in_page * row_bytes);
  }
};

// The tokens a kernel visits: indices[0..n) when given, else first, first + 1, … first + n - 1.
struct TokenSpan {
  const int32_t* indices;
  int64_t first;
  int64_t n;
};

// scores[g * score_stride + i] = scale * <query[g], key(token i)>
struct ScoreArgs {
  const float* query;  // [group_size, head_dim], already rounded to the cache's dtype
  int group_size;
  int head_dim;
  RowSource keys;
  TokenSpan tokens;
  float scale;
  float* scores;
  int64_t score_stride;
  float cap = 0.0f;  // scores are cap * tanh(score / cap); 0: as they are
};

// A partial softmax over the tokens: acc = Σ exp(s - max) v, row_sum = Σ exp(s - max).
// With `weights` given (f32 [group_size, weight_stride]) they stand in for exp(s - max): keys are not read and max is
// 0.
struct AttendArgs {
  const float* query;
  int group_size;
  int head_dim;
  RowSource keys;
  RowSource values;
  TokenSpan tokens;
  float scale;
  const float* weights;
  int64_t weight_stride;
  // Or the scores themselves, [group_size, kScoreTile], of at most kScoreTile contiguous tokens of one page; destroyed.
  float* scored;
  float* scores;  // optional out: raw scaled scores [group_size, score_stride]
  int64_t score_stride;
  float* acc;      // out [group_size, head_dim]
  float* row_max;  // out [group_size]
  float* row_sum;  // out [group_size]
  // Tokens may come in several calls: all but the first continue, and acc is in order only after the last.
  bool continues;
  bool ends;
  float cap = 0.0f;  // as of ScoreArgs
};

inline constexpr int64_t kCausalKeys = 256;  // keys that attend_causal() works on at once
inline constexpr int64_t kCausalRows = 384;  // (query head, token) of a KV head that share the work of packing keys

// Exact attention of queries, the last of which sees all keys: query i sees kv_len - num_queries + i + 1 of them.
// Strides are in elements; a row has head_dim of them.
struct CausalArgs {
  const void* queries;  // [num_kv_heads * group_size, num_queries, head_dim]
  int64_t query_head;   // from one head to the next
  int64_t query_row;
  int64_t num_queries;
  int64_t group_size;
  const void* keys;  // [num_kv_heads, kv_len, head_dim]; values have the same strides
  const void* values;
  int64_t kv_head;
  int64_t kv_row;
  int64_t kv_len;
  int64_t head_dim;
  float scale;
  void* out;  // [num_queries, num_kv_heads * group_size, head_dim]
  int64_t out_row;
  int64_t window = 0;            // how many tokens a query sees, its own the last of them; 0: all
  const float* sinks = nullptr;  // [num_kv_heads * group_size], logits that join each softmax without a value; or null

  // float32 of scratch for that many rows: sums, and the keys and values of a block, which begin a cache line
  int64_t scratch_items(int64_t num_rows) const {
    return num_rows * (head_dim + 2) + 2 * kCausalKeys * head_dim + kLineBytes / 4;
  }
};

// multiply() holds so many outputs and input features of a weight matrix as float32: half of a small second-level
// cache.
inline constexpr int64_t kMultiplyColumns = 192;
inline constexpr int64_t kMultiplyDepth = 192;
// Rows of x that are converted at one time: with a panel of weights they fit the first-level cache.
inline constexpr int64_t kConvertedRows = 12;
inline constexpr int64_t kMultiplyRows = 384;  // of x that share the work of converting them

// out[r][o] = round(<x[r], weight[o]> + bias[o]) (+ residual[r][o]) for o in [first, last), at most kMultiplyColumns.
struct ProductArgs {
  const void* x;  // [num_rows, in_features]
  int64_t num_rows;
  int64_t in_features;
  const void* weight;    // [.., in_features]
  const void* bias;      // or null
  const void* residual;  // or null: as out
  void* out;             // [num_rows, out_row]
  int64_t out_row;
  int64_t first;
  int64_t last;

  // float32 of scratch: a block of weights, sums, and a few rows of x
  int64_t scratch_items() const {
    return kMultiplyDepth * (kMultiplyColumns + kConvertedRows) + num_rows * kMultiplyColumns;
  }
};

// Rows of weights in groups of kPackedGroup, the last one of a row padded. Element i of q8 is scale * code, an int8; of
// q4 scale * code + minimum, with a code of 0 to 15: the first half of a group in the low halves of its 16 bytes.
// q8_min is q8 with minimums; table4 has scale * table[code], its codes as those of q4. Each half of a group has a
// scale of its own in q8_of_16 and table4_of_16.
struct PackedWeights {
  const uint8_t* codes;  // [out_features, num_groups, 32 or 16]
  const Half* scales;    // [out_features, num_groups], or [out_features, num_groups, 2]
  const Half* minimums;  // [out_features, num_groups] of q4 and q8_min, else null
  int64_t num_groups;    // of a row
  const int8_t* table;   // [16] of table4 and table4_of_16, else null
};

// Rows of inputs in the same groups, as scale * code; padded with groups of zeros to whole kPackedScales.
struct PackedInput {
  int8_t* codes;  // [num_rows, padded_groups, kPackedGroup]
  float* scales;  // [num_rows, padded_groups]
  float* sums;    // [num_rows, padded_groups] scale * the sum of a group's codes
  int64_t padded_groups;

  int64_t codes_stride() const { return padded_groups * kPackedGroup; }
};

inline constexpr int64_t kCodeBlock = 64;  // tokens whose codes lie together

// scores[i] = max over g of scales[i] * <query[g], levels[code i]> + offsets[g]; infinite where that is no number. What
// a few dimensions add is rounded to 1/127 of the widest range that any of them has.
struct CodeArgs {
  const float* query;  // [group_size, head_dim]
  int group_size;
  int head_dim;
  int bits;              // of a dimension: 1 or 2
  const float* levels;   // [1 << bits] what a dimension's code stands for
  const float* offsets;  // [group_size]
  // [blocks of kCodeBlock tokens, head_dim * bits / 8, kCodeBlock]: a byte has neighbouring dimensions, the first one
  // in its lowest bits. The last block is whole, and so are its scales.
  const uint8_t* codes;
  const float* scales;  // [n]
  int64_t n;
  float* scores;
};

// The rank of row i, a box, is the largest scales[i] * <query[g], c> + spread_weight * spreads[i] *
// sqrt(sum_d (query[g][d] w[d])^2) of all g, where c are the low halves of a row's bytes, -8 to 7, and w the high ones,
// 0 to 15: <query, x> of the x farthest along in an ellipsoid around c whose half-axes are spread_weight w. -inf where
// none is a number. Queries are rounded to 1/127 of their largest value, and their squares to 1/16383 of the largest;
// where one is not finite all ranks are NaN.
struct RankArgs {
  const float* query;  // [num_queries, head_dim]
  int num_queries;     // at most kMaxGroupSize
  int head_dim;
  const int8_t* rows;   // [num_rows, head_dim]
  const Bf16* scales;   // [num_rows]
  const Bf16* spreads;  // [num_rows]
  float spread_weight;
  const int32_t* ranges;  // [num_ranges, 2]: first row and end of those to rank
  int num_ranges;
  float* ranks;  // of the rows of all ranges, one after the other
};

// One instruction set's kernels. Arrays are indexed by DType; those of row formats by RowSource::format.
struct KernelTable {
  const char* name;
  void (*score[kNumRowFormats])(const ScoreArgs&);
  void (*attend[kNumRowFormats])(const AttendArgs&);

  // The queries [first, last) of one KV head's group; null where an ISA has no kernel.
  void (*attend_causal[kNumDTypes])(const CausalArgs&, int64_t kv_head, int64_t first, int64_t last, float* scratch);
  int64_t causal_multiple[kNumDTypes];  // of which head_dim must be a multiple for it

  // x[i] <- exp(x[i] - max(x)) over n scores; returns the maximum, adds the sum to *sum.
  float (*exp_shifted)(float* x, int64_t n, float* sum);
  // importance[i] (+)= factor * x[i]
  void (*scale_add)(const float* x, float factor, int64_t n, bool accumulate, float* importance);
  // Positions i with x[i] >= threshold, ascending; at most `capacity` are written, the full count is returned.
  int64_t (*filter_at_least)(const float* x, int64_t n, float threshold, int32_t* positions, int64_t capacity);

  int64_t (*count_at_least)(const float* x, int64_t n, float threshold);
  // The least and the largest of x[0..n) that are no NaN; inf and -inf where all are.
  void (*extremes)(const float* x, int64_t n, float* lowest, float* highest);

  // Elementwise, float32 in and out with the value rounded to the dtype at the points where transformers rounds.
  // Of i8: a whole row, n = head_dim.
  void (*to_float[kNumRowFormats])(const void* x, int64_t n, float* out);
  void (*from_float[kNumRowFormats])(const float* x, int64_t n, void* out);
  void (*rms_norm[kNumDTypes])(const void* x, const void* weight, float eps, int64_t n, float* out);
  void (*silu_mul[kNumDTypes])(const void* gate, const void* up, int64_t n, float* out);
  // The same of GELU, as by tanh.
  void (*gelu_mul[kNumDTypes])(const void* gate, const void* up, int64_t n, float* out);
  // (up + 1) * gate * sigmoid(alpha * gate), the gate at most `limit` and up within it (gpt-oss)
  void (*clamped_glu[kNumDTypes])(const void* gate, const void* up, float alpha, float limit, int64_t n, float* out);
  // out = round(round(x) + residual): the sum of a rounded projection and the residual stream
  void (*add_residual[kNumDTypes])(const float* x, const void* residual, int64_t n, void* out);
  // Rotates one head in place: x*cos + rotate_half(x)*sin, rounded after each product and the sum; norm_weight
  // optional.
  void (*rope_head[kNumDTypes])(void* x, const void* cos, const void* sin, const void* norm_weight, float eps,
                                int64_t head_dim);

  // Converts n inputs to what linear() multiplies with; at most 4 bytes each.
  void (*pack_input[kNumDTypes])(const float* x, int64_t n, void* packed);
  // y[r * out_stride + o - first] = <x[r], weight[o]> for o in [first, last); x packed, [num_rows, in_features]
  void (*linear[kNumDTypes])(const void* packed, int num_rows, int64_t in_features, const void* weight, int64_t first,
                             int64_t last, float* out, int64_t out_stride);
  // Of packed weights, indexed by WeightFormat; null for dense. Row `row` of `to` <- n inputs.
  void (*quantise_row)(const float* x, int64_t n, const PackedInput& to, int64_t row);
  // As linear(), x quantised.
  void (*packed_linear[kNumWeightFormats])(const PackedInput& x, int num_rows, const PackedWeights& weights,
                                           int64_t first, int64_t last, float* out, int64_t out_stride);
  // out[i] <- element i of row o, for i < n
  void (*unpack_row[kNumWeightFormats])(const PackedWeights& weights, int64_t o, int64_t n, float* out);
  // linear() for many rows; null where torch's way is as fast.
  void (*multiply[kNumDTypes])(const ProductArgs&, float* scratch);

  // For indexes of clustered keys (ranking-inl.h, clustering-inl.h).
  void (*rank_rows)(const RankArgs&);
  void (*score_codes)(const CodeArgs&);
  // The centroid of largest dot product of each point, the first of equals; centroids packed by pack_centroids into
  // whole blocks of `centroid_block`.
  int64_t centroid_block;
  void (*pack_centroids)(const float* centroids, int64_t num_centroids, int64_t width, float* packed);
  void (*nearest_centroids)(const float* points, int64_t num_points, int64_t width, const float* packed,
                            int64_t num_centroids, int32_t* labels, float* products);

  // What bandwidth measurements read with; they return a checksum so that nothing is optimised away.
  uint64_t (*read_bytes)(const void* data, int64_t num_bytes);
  uint64_t (*read_rows)(const void* data, const int32_t* rows, int64_t num_rows, int64_t row_bytes);
};

// Each where the architecture has the ISA.
const KernelTable* scalar_table();
const KernelTable* avx2_table();
const KernelTable* avx512_table();
const KernelTable* avx512_vnni_table();
const KernelTable* avx512_bf16_table();
const KernelTable* amx_table();
const KernelTable* neon_table();

}  // namespace offload
