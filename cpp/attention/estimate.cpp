#include "attention/estimate.h"

#include <algorithm>
#include <cmath>

namespace offload {
namespace {

constexpr int kFloat = static_cast<int>(DType::f32);
constexpr int kOnePage = 30;  // rows of an array that is one page
constexpr float kNoScore = -3.0e38f;

// Pages of one, in the memory of `address`.
RowSource rows_at(const int64_t* address, int head_dim) {
  return {address, 0, head_dim * static_cast<int64_t>(sizeof(float)), kOnePage};
}

}  // namespace

bool Estimate::arrays_of(int r, int kv_head, EstimateArrays* arrays) const {
  const QueryRow& row = pass_.row(r);
  if (row.arrays == nullptr || row.starts != nullptr) return false;
  const PolicyFunctions& policy = setup_.policy;
  void* const* at = row.arrays + (pass_.layer_idx + 1) * policy.num_arrays - kNumEstimateArrays;
  if (at[0] == nullptr) return false;
  const int64_t clusters = policy.estimate_clusters, dim = setup_.shape.head_dim;
  arrays->header = static_cast<EstimateHeader*>(at[0]) + kv_head;
  arrays->keys = static_cast<float*>(at[1]) + kv_head * clusters * dim;
  arrays->values = static_cast<float*>(at[2]) + kv_head * clusters * dim;
  arrays->inverse_norm = static_cast<float*>(at[3]) + kv_head * clusters;
  arrays->counts = static_cast<int32_t*>(at[4]) + kv_head * clusters;
  arrays->undo = static_cast<float*>(at[5]) + kv_head * (2 * dim + 2);
  arrays->cluster_of = static_cast<uint8_t*>(at[6]) + kv_head * arrays->header->capacity;
  return true;
}

// By the cosine.
int Estimate::nearest(const EstimateArrays& arrays, const float* key) const {
  const auto address = reinterpret_cast<int64_t>(arrays.keys);
  const int64_t clusters = setup_.policy.estimate_clusters;
  float scores[kScoreTile];
  setup_.kernels.score[kFloat]({key,
                                1,
                                setup_.shape.head_dim,
                                rows_at(&address, setup_.shape.head_dim),
                                {nullptr, 0, clusters},
                                1.0f,
                                scores,
                                kScoreTile});
  int best = 0;
  float highest = kNoScore;
  for (int c = 0; c < clusters; ++c) {
    const float cosine = scores[c] * arrays.inverse_norm[c];
    if (arrays.counts[c] == 0 || !(cosine > highest)) continue;
    highest = cosine;
    best = c;
  }
  return best;
}

void Estimate::add(const EstimateArrays& arrays, const QueryRow& row, int kv_head, int64_t token) {
  const int64_t dim = setup_.shape.head_dim;
  const auto to_float = setup_.kernels.to_float[static_cast<int>(setup_.shape.format)];
  float key[kMaxHeadDim], value[kMaxHeadDim];
  to_float(row.keys(setup_.shape, kv_head).row(token), dim, key);
  to_float(row.values(setup_.shape, kv_head).row(token), dim, value);
  const int c = nearest(arrays, key);
  float* mean_key = arrays.keys + c * dim;
  float* mean_value = arrays.values + c * dim;
  std::copy_n(mean_key, dim, arrays.undo);
  std::copy_n(mean_value, dim, arrays.undo + dim);
  arrays.undo[2 * dim] = arrays.inverse_norm[c];
  arrays.undo[2 * dim + 1] = static_cast<float>(arrays.counts[c]);
  const float share = 1.0f / static_cast<float>(++arrays.counts[c]);
  float squares = 0.0f;
  for (int64_t d = 0; d < dim; ++d) {
    mean_key[d] += share * (key[d] - mean_key[d]);
    mean_value[d] += share * (value[d] - mean_value[d]);
    squares += mean_key[d] * mean_key[d];
  }
  arrays.inverse_norm[c] = squares > 0.0f ? 1.0f / std::sqrt(squares) : 0.0f;
  arrays.cluster_of[token] = static_cast<uint8_t>(c);
  arrays.header->end = token + 1;
  arrays.header->cluster = c;
  ++arrays.header->taken;
}

void Estimate::take_in() {
  if (!is_on() || pass_.options.chooses_only) return;
  const uint8_t* elsewhere = pass_.options.elsewhere;
  for (const int r : pass_.sparse_rows) {
    for (int h = 0; h < setup_.shape.num_kv_heads; ++h) {
      EstimateArrays arrays;
      if (elsewhere == nullptr || elsewhere[h] == 0) take_in(r, h, pass_.row(r).kv_len, &arrays);
    }
  }
}

bool Estimate::take_in(int r, int kv_head, int64_t kv_len, EstimateArrays* arrays) {
  if (!is_on() || !arrays_of(r, kv_head, arrays)) return false;
  const QueryRow& row = pass_.row(r);
  EstimateHeader& header = *arrays->header;
  const int64_t last = std::min({kv_len - setup_.policy.recent_tokens, row.kv_len, header.capacity});
  if (header.end < last) header.taken = 0;
  for (int64_t token = header.end; token < last; ++token) add(*arrays, row, kv_head, token);
  return true;
}

bool Estimate::attend(int r, int u, float* part) const {
  const Unit& unit = pass_.unit(r, u);
  EstimateArrays arrays;
  const bool selects = unit.sparse && (unit.role == Role::select || unit.role == Role::reuse);
  if (!is_on() || !selects || pass_.options.chooses_only || unit.indices == nullptr) return false;
  const int kv_head = setup_.kv_head_of(u);
  if (!arrays_of(r, kv_head, &arrays)) return false;
  const int64_t end = arrays.header->end;
  if (end > pass_.row(r).kv_len) return false;  // clusters have tokens that are to come
  const auto clusters = static_cast<int>(setup_.policy.estimate_clusters);
  int32_t left[kScoreTile];  // recent tokens may be in clusters after others were cropped: they are in the list, too
  std::copy_n(arrays.counts, clusters, left);
  for (int64_t i = 0; i < unit.n && unit.indices[i] < end; ++i) {
    const uint8_t c = arrays.cluster_of[unit.indices[i]];
    if (c != kNoCluster) --left[c];
  }
  float log_left[kScoreTile];
  bool any = false;
  for (int c = 0; c < clusters; ++c) {
    any = any || left[c] > 0;
    log_left[c] = left[c] > 0 ? std::log(static_cast<float>(left[c])) : kNoScore;
  }
  if (!any) return false;
  const int group = setup_.unit_group();
  const int dim = setup_.shape.head_dim;
  const auto keys = reinterpret_cast<int64_t>(arrays.keys);
  const auto values = reinterpret_cast<int64_t>(arrays.values);
  float scores[kMaxGroupSize * kScoreTile];
  AttendArgs args{};
  args.query = pass_.queries_of(r, u * group);
  args.group_size = group;
  args.head_dim = dim;
  args.keys = rows_at(&keys, dim);
  args.values = rows_at(&values, dim);
  args.tokens = {nullptr, 0, clusters};
  args.scale = setup_.sm_scale(pass_.layer_idx);
  args.cap = setup_.cap(pass_.layer_idx);
  args.scored = scores;
  args.acc = part;
  args.row_max = part + group * dim;
  args.row_sum = args.row_max + group;
  args.ends = true;
  setup_.kernels.score[kFloat](
      {args.query, group, dim, args.keys, args.tokens, args.scale, scores, kScoreTile, args.cap});
  for (int g = 0; g < group; ++g) {
    for (int c = 0; c < clusters; ++c) {
      float& score = scores[g * kScoreTile + c];
      score = left[c] > 0 ? score + log_left[c] : kNoScore;
    }
  }
  setup_.kernels.attend[kFloat](args);
  return true;
}

}  // namespace offload
