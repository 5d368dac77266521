#include "attention/attender.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace offload {

void Attender::make_room(int64_t num_parts) {
  grow(parts_, static_cast<size_t>(num_parts * setup_.unit_group() * (setup_.shape.head_dim + 2)));
}

AttendArgs Attender::args_of(int r, int u, int split) {
  const int group = setup_.unit_group();
  const int head_dim = setup_.shape.head_dim;
  const int kv_head = setup_.kv_head_of(u);
  AttendArgs args{};
  args.query = pass_.queries_of(r, u * group);
  args.group_size = group;
  args.head_dim = head_dim;
  args.keys = pass_.row(r).keys(setup_.shape, kv_head);
  args.values = pass_.row(r).values(setup_.shape, kv_head);
  args.scale = setup_.sm_scale(pass_.layer_idx);
  args.cap = setup_.cap(pass_.layer_idx);
  args.acc = parts_.data() + (pass_.unit(r, u).first_part + split) * group * (head_dim + 2);
  args.row_max = args.acc + group * head_dim;
  args.row_sum = args.row_max + group;
  return args;
}

// A page at a time: scores of all the piece's heads, then their values.
void Attender::attend_dense(const Piece& piece, int worker) {
  const int group = setup_.unit_group();
  std::vector<float>& scores = dense_scores_[static_cast<size_t>(worker)];
  scores.resize(static_cast<size_t>(setup_.units() * group * kScoreTile));
  const int64_t tile = std::min<int64_t>(kScoreTile, int64_t{1} << setup_.shape.page_shift);
  for (int64_t done = 0; done < piece.n;) {
    const int64_t first = piece.begin + done;
    const int64_t n = std::min(tile - first % tile, piece.n - done);
    for (int u = piece.first_unit; u < piece.first_unit + piece.num_units; ++u) {
      pass_.score(piece.row, u * group, group, {nullptr, first, n}, scores.data() + u * group * kScoreTile, kScoreTile);
    }
    for (int u = piece.first_unit; u < piece.first_unit + piece.num_units; ++u) {
      AttendArgs args = args_of(piece.row, u, piece.split);
      args.tokens = {nullptr, first, n};
      args.scored = scores.data() + u * group * kScoreTile;
      args.continues = done > 0;
      args.ends = done + n == piece.n;
      setup_.kernels.attend[static_cast<int>(args.values.format)](args);
    }
    done += n;
  }
}

void Attender::attend(const Piece& piece, int worker) {
  Unit& unit = pass_.unit(piece.row, piece.first_unit);
  WorkerProfile* profile = setup_.profile_of(worker);
  const PhaseTimer timer(profile, Phase::attend);
  if (profile != nullptr) {
    const int64_t rows_per_token = unit.weights.empty() ? 2 : 1;
    profile->bytes += piece.num_units * piece.n * rows_per_token * setup_.shape.row_bytes();
    profile->attended_tokens += piece.num_units * piece.n;
  }
  if (unit.role == Role::dense) return attend_dense(piece, worker);
  if (piece.n == 0) return;
  AttendArgs args = args_of(piece.row, piece.first_unit, piece.split);
  args.tokens = unit.indices == nullptr ? TokenSpan{nullptr, piece.begin, piece.n}
                                        : TokenSpan{unit.indices + piece.begin, 0, piece.n};
  args.ends = true;
  if (!unit.weights.empty()) {
    if (unit.candidates.num_ranges > 0) selector_.gather_weights(unit, piece.begin, piece.begin + piece.n);
    args.weights = unit.weights.data() + piece.begin;
    args.weight_stride = unit.n;
  }
  if (!unit.scores.empty()) {
    args.scores = unit.scores.data() + piece.begin;
    args.score_stride = unit.n;
  }
  setup_.kernels.attend[static_cast<int>(args.values.format)](args);
}

// The neutral element of the merge: zero output, lse of -inf.
void Attender::write_nothing(int r, int u) {
  const int group = setup_.unit_group();
  const QueryRow& row = pass_.row(r);
  Unit& unit = pass_.unit(r, u);
  if (unit.role != Role::elsewhere) {  // else nobody reads it
    const int64_t item = pass_.options.float_output ? int64_t{sizeof(float)} : dtype_bytes(setup_.shape.dtype);
    const int64_t bytes = group * setup_.shape.head_dim * item;
    std::memset(static_cast<char*>(row.output) + u * bytes, 0, static_cast<size_t>(bytes));
  }
  std::fill_n(unit.lse, group, -INFINITY);
  if (row.lse != nullptr) std::fill_n(row.lse + u * group, group, -INFINITY);
}

// o = Σ exp(max_i - max) acc_i / Σ exp(max_i - max) sum_i
bool Attender::merge(int r, int u) {
  Unit& unit = pass_.unit(r, u);
  const QueryRow& row = pass_.row(r);
  const int group = setup_.unit_group();
  const int64_t head_dim = setup_.shape.head_dim;
  const int64_t part_size = group * (head_dim + 2);
  const float* parts = parts_.data() + unit.first_part * part_size;
  float* lse = unit.lse;
  float out[kMaxHeadDim];
  float estimate[kMaxGroupSize * (kMaxHeadDim + 2)];
  const bool has_estimate = estimate_.attend(r, u, estimate);
  const bool empty = unit.begin == unit.end;
  const int num_parts = empty ? 0 : unit.num_parts;
  if (empty) write_nothing(r, u);
  for (int g = 0; g < group && (!empty || has_estimate); ++g) {
    float maximum = -3.0e38f;
    for (int i = 0; i < num_parts; ++i) maximum = std::max(maximum, parts[i * part_size + group * head_dim + g]);
    float sum = 0.0f;
    for (int64_t d = 0; d < head_dim; ++d) out[d] = 0.0f;
    for (int i = 0; i < num_parts; ++i) {
      const float* part = parts + i * part_size;
      const float weight = std::exp(part[group * head_dim + g] - maximum);
      sum += weight * part[group * head_dim + group + g];
      for (int64_t d = 0; d < head_dim; ++d) out[d] += weight * part[g * head_dim + d];
    }
    // Known weights are relative to all that was scored. Beside a window on the device that holds all of the mass,
    // those left here may all be too small for a float: that is attending to nothing.
    const bool vanishes = sum == 0.0f && !unit.weights.empty() && !has_estimate;
    const float of_scored = unit.weights.empty() ? 0.0f : unit.lse_all[g];
    lse[g] = sum == 0.0f && (vanishes || has_estimate) ? -INFINITY : maximum + std::log(sum) + of_scored;
    float row_lse = lse[g];
    if (has_estimate) {
      const float* means = estimate + g * head_dim;
      const float estimate_max = estimate[group * head_dim + g] - of_scored;
      const float highest = std::max(maximum, estimate_max);
      const float of_tokens = std::exp(maximum - highest);
      const float of_estimate = std::exp(estimate_max - highest);
      sum = sum * of_tokens + estimate[group * head_dim + group + g] * of_estimate;
      for (int64_t d = 0; d < head_dim; ++d) out[d] = out[d] * of_tokens + means[d] * of_estimate;
      row_lse = highest + std::log(sum) + of_scored;
    }
    const int head = u * group + g;
    const bool is_part = pass_.options.window_on_device;  // whoever has the whole takes sinks into account
    const float share = is_part ? 1.0f : setup_.share_beside_sink(pass_.layer_idx, head, row_lse);
    float check = 0.0f;  // stays 0 unless some output is NaN or inf
    for (int64_t d = 0; d < head_dim; ++d) {
      out[d] = vanishes ? out[d] : out[d] / sum * share;
      check += out[d] * 0.0f;
    }
    if (check != 0.0f || !(vanishes || std::isfinite(row_lse))) {
      pass_.report_non_finite(r, u);
      return false;
    }
    pass_.write_output(r, head, 1, out);
    if (row.lse != nullptr) row.lse[head] = row_lse;
  }
  if (row.weights != nullptr && unit.n > 0) {
    std::memcpy(row.weights + row.indptr[u] * group, weights_of(r, u),
                static_cast<size_t>(group * unit.n) * sizeof(float));
  }
  return true;
}

// Scores the tokens of a unit's list that are in the window on the device, for the policy's eyes. Raises lse, of what
// was attended here, to that of the whole list.
void Attender::score_window(int r, int u, float* lse) {
  Unit& unit = pass_.unit(r, u);
  const int group = setup_.unit_group();
  const int64_t ends[2][2] = {{0, unit.begin}, {unit.end, unit.n}};
  for (const auto& [first, last] : ends) {
    if (first == last) continue;
    pass_.score(r, u * group, group, {unit.indices + first, 0, last - first}, unit.scores.data() + first, unit.n);
  }
  for (int g = 0; g < group; ++g) {
    const float* scores = unit.scores.data() + g * unit.n;
    float maximum = lse[g];
    for (const auto& [first, last] : ends) {
      for (int64_t i = first; i < last; ++i) maximum = std::max(maximum, scores[i]);
    }
    float sum = std::exp(lse[g] - maximum);
    for (const auto& [first, last] : ends) {
      for (int64_t i = first; i < last; ++i) sum += std::exp(scores[i] - maximum);
    }
    lse[g] = maximum + std::log(sum);
  }
}

float* Attender::weights_of(int r, int u) {
  Unit& unit = pass_.unit(r, u);
  const int group = setup_.unit_group();
  if (!unit.scores.empty()) {
    float lse[kMaxGroupSize];
    std::copy_n(unit.lse, group, lse);
    if (!unit.is_whole()) score_window(r, u, lse);
    float* weights = unit.scores.data();
    for (int g = 0; g < group; ++g) {
      for (int64_t i = 0; i < unit.n; ++i) weights[g * unit.n + i] = std::exp(weights[g * unit.n + i] - lse[g]);
    }
    return weights;
  }
  if (unit.weights.empty()) return nullptr;
  float* weights = unit.weights.data();
  if (unit.candidates.num_ranges > 0 && !unit.is_whole()) {  // those of the window
    selector_.gather_weights(unit, 0, unit.begin);
    selector_.gather_weights(unit, unit.end, unit.n);
  }
  for (int g = 0; g < group; ++g) {
    float factor = std::exp(unit.lse_all[g] - unit.lse[g]);
    if (!unit.is_whole()) {
      float sum = 0.0f;
      for (int64_t i = 0; i < unit.n; ++i) sum += weights[g * unit.n + i];
      factor = 1.0f / sum;
    }
    for (int64_t i = 0; i < unit.n; ++i) weights[g * unit.n + i] *= factor;
  }
  return weights;
}

}  // namespace offload
