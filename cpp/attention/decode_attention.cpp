// One layer: choose (scan all keys, or ask the policy and score its candidates), attend piece by piece, merge. A scan
// is a job of the pool of its own, decode_attention_scan.cpp; the rest is one job, decode_attention_lanes.cpp. Choosing
// is in decode_attention_select.cpp.
#include "attention/decode_attention.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "kernels/number_formats.h"

namespace offload {

DecodeAttention::DecodeAttention(const AttentionShape& shape, const KernelTable& kernels, WorkerPool& pool)
    : shape_(shape),
      kernels_(kernels),
      pool_(pool),
      trace_(pool.num_threads()),
      dense_scores_(static_cast<size_t>(pool.num_threads())) {}

void DecodeAttention::report_non_finite(int64_t layer_idx, int row_idx, int unit) {
  if (!failed_.exchange(true)) failure_ = non_finite(layer_idx, row_idx, unit);
}

void DecodeAttention::report_policy(int64_t layer_idx, int row_idx, int unit, const char* callback,
                                    const std::string& what) {
  if (failed_.exchange(true)) return;
  failure_ = std::string("the policy's ") + callback + " failed in layer " + std::to_string(layer_idx) +
             ", query row " + std::to_string(row_idx) + ", KV head " + std::to_string(kv_head_of(unit)) + ": " + what;
}

std::string DecodeAttention::non_finite(int64_t layer_idx, int row_idx, int unit) const {
  char text[160];
  std::snprintf(text, sizeof text,
                "non-finite attention in layer %lld, query row %d, KV head %d: NaN or inf in q or the KV cache",
                static_cast<long long>(layer_idx), row_idx, kv_head_of(unit));
  return text;
}

void DecodeAttention::make_room_for_published(size_t num_rows) {
  grow(published_, num_rows * static_cast<size_t>(units()));
}

void DecodeAttention::publish(int row_of_step, int unit, const int32_t* tokens, int64_t n) {
  make_room_for_published(static_cast<size_t>(row_of_step) + 1);
  Published& published = published_[static_cast<size_t>(row_of_step * units() + unit)];
  published.tokens = tokens;
  published.n = n;
}

void DecodeAttention::forget_published() {
  const size_t first = static_cast<size_t>(first_row_) * static_cast<size_t>(units());
  for (size_t i = 0; i < published_.size(); ++i) {
    Published& published = published_[i];
    if (published.tokens == published.own.data()) continue;
    // A unit of the last attend() that reuses it: what last_selection() would tell.
    if (i >= first && i - first < num_selections_ && units_[i - first].role == Role::reuse) units_[i - first].n = 0;
    published.own.clear();
    published.set_own();
  }
}

std::vector<std::vector<int32_t>> DecodeAttention::last_selection() const {
  std::vector<std::vector<int32_t>> lists(num_selections_);
  for (size_t i = 0; i < num_selections_; ++i) {
    const Unit& unit = units_[i];
    if (unit.role == Role::reuse) {
      lists[i].assign(unit.indices, unit.indices + unit.n);
    } else {
      lists[i] = selection_[i];
    }
  }
  return lists;
}

void DecodeAttention::load_queries(const std::vector<QueryRow>& rows) {
  if (queries_loaded_) return;
  queries_loaded_ = true;
  const int64_t n = int64_t{shape_.num_qo_heads} * shape_.head_dim;
  grow(queries_, rows.size() * static_cast<size_t>(n));
  for (size_t r = 0; r < rows.size(); ++r) {
    kernels_.to_float[static_cast<int>(shape_.dtype)](rows[r].query, n, queries_.data() + r * static_cast<size_t>(n));
  }
}

AttendArgs DecodeAttention::unit_args(const QueryRow& row, int row_idx, int unit_idx, int split) {
  Unit& unit = unit_of(row_idx, unit_idx);
  const int group = unit_group();
  const int kv_head = kv_head_of(unit_idx);
  AttendArgs args{};
  args.query = queries_of(row_idx, unit_idx * group);
  args.group_size = group;
  args.head_dim = shape_.head_dim;
  args.keys = row.keys(shape_, kv_head);
  args.values = row.values(shape_, kv_head);
  args.scale = shape_.sm_scale;
  args.acc = parts_.data() + (unit.first_part + split) * group * (shape_.head_dim + 2);
  args.row_max = args.acc + group * shape_.head_dim;
  args.row_sum = args.row_max + group;
  return args;
}

// A page at a time: scores of all the piece's heads, then their values.
void DecodeAttention::attend_dense(const QueryRow& row, const Piece& piece, int worker) {
  const int type = static_cast<int>(shape_.dtype);
  const int group = unit_group();
  std::vector<float>& scores = dense_scores_[static_cast<size_t>(worker)];
  scores.resize(static_cast<size_t>(units() * group * kScoreTile));
  const int64_t tile = std::min<int64_t>(kScoreTile, int64_t{1} << shape_.page_shift);
  for (int64_t done = 0; done < piece.n;) {
    const int64_t first = piece.begin + done;
    const int64_t n = std::min(tile - first % tile, piece.n - done);
    for (int u = piece.first_unit; u < piece.first_unit + piece.num_units; ++u) {
      score(row, piece.row, u * group, group, {nullptr, first, n}, scores.data() + u * group * kScoreTile, kScoreTile);
    }
    for (int u = piece.first_unit; u < piece.first_unit + piece.num_units; ++u) {
      AttendArgs args = unit_args(row, piece.row, u, piece.split);
      args.tokens = {nullptr, first, n};
      args.scored = scores.data() + u * group * kScoreTile;
      args.continues = done > 0;
      args.ends = done + n == piece.n;
      kernels_.attend[type](args);
    }
    done += n;
  }
}

void DecodeAttention::attend_piece(const QueryRow& row, const Piece& piece, int worker) {
  Unit& unit = unit_of(piece.row, piece.first_unit);
  WorkerProfile* profile = profile_of(worker);
  const PhaseTimer timer(profile, Phase::attend);
  if (profile != nullptr) {
    const int64_t rows_per_token = unit.weights.empty() ? 2 : 1;
    profile->bytes += piece.num_units * piece.n * rows_per_token * shape_.row_bytes();
    profile->attended_tokens += piece.num_units * piece.n;
  }
  if (unit.role == Role::dense) {
    attend_dense(row, piece, worker);
  } else if (piece.n > 0) {
    AttendArgs args = unit_args(row, piece.row, piece.first_unit, piece.split);
    args.tokens = unit.indices == nullptr ? TokenSpan{nullptr, piece.begin, piece.n}
                                          : TokenSpan{unit.indices + piece.begin, 0, piece.n};
    args.ends = true;
    if (!unit.weights.empty()) {
      if (unit.num_ranges > 0) gather_weights(unit, piece.begin, piece.begin + piece.n);
      args.weights = unit.weights.data() + piece.begin;
      args.weight_stride = unit.n;
    }
    if (!unit.scores.empty()) {
      args.scores = unit.scores.data() + piece.begin;
      args.score_stride = unit.n;
    }
    kernels_.attend[static_cast<int>(shape_.dtype)](args);
  }
}

void DecodeAttention::write_output(const QueryRow& row, int first_head, int64_t num_heads, const float* x) const {
  const int64_t n = num_heads * shape_.head_dim;
  const int64_t item = options_.float_output ? int64_t{sizeof(float)} : dtype_bytes(shape_.dtype);
  char* out = static_cast<char*>(row.output) + int64_t{first_head} * shape_.head_dim * item;
  if (options_.float_output) {
    std::memcpy(out, x, static_cast<size_t>(n * item));
  } else {
    kernels_.from_float[static_cast<int>(shape_.dtype)](x, n, out);
  }
}

// Exact merge of partial softmaxes: o = Σ exp(max_i - max) acc_i / Σ exp(max_i - max) sum_i.
void DecodeAttention::merge_unit(int64_t layer_idx, const QueryRow& row, int row_idx, int unit_idx, int worker) {
  Unit& unit = unit_of(row_idx, unit_idx);
  const int group = unit_group();
  const int64_t head_dim = shape_.head_dim;
  const int64_t part_size = group * (head_dim + 2);
  const float* parts = parts_.data() + unit.first_part * part_size;
  float* lse = unit.lse;
  float out[kMaxHeadDim];
  const bool empty = unit.begin == unit.end;  // the neutral element of the merge: zero output, lse of -inf
  if (empty) {
    const int64_t item = options_.float_output ? int64_t{sizeof(float)} : dtype_bytes(shape_.dtype);
    const int64_t bytes = group * head_dim * item;
    if (unit.role != Role::elsewhere) {  // else nobody reads it
      std::memset(static_cast<char*>(row.output) + unit_idx * bytes, 0, static_cast<size_t>(bytes));
    }
    std::fill_n(lse, group, -INFINITY);
    if (row.lse != nullptr) std::fill_n(row.lse + unit_idx * group, group, -INFINITY);
  }
  for (int g = 0; g < group && !empty; ++g) {
    float maximum = -3.0e38f;
    for (int i = 0; i < unit.num_parts; ++i) maximum = std::max(maximum, parts[i * part_size + group * head_dim + g]);
    float sum = 0.0f;
    for (int64_t d = 0; d < head_dim; ++d) out[d] = 0.0f;
    for (int i = 0; i < unit.num_parts; ++i) {
      const float* part = parts + i * part_size;
      const float weight = std::exp(part[group * head_dim + g] - maximum);
      sum += weight * part[group * head_dim + group + g];
      for (int64_t d = 0; d < head_dim; ++d) out[d] += weight * part[g * head_dim + d];
    }
    // Known weights are relative to all that was scored. Beside a window on the device that holds all of the mass,
    // those left here may all be too small for a float: that is attending to nothing.
    const bool vanishes = sum == 0.0f && !unit.weights.empty();
    float check = 0.0f;  // stays 0 unless some output is NaN or inf
    for (int64_t d = 0; d < head_dim; ++d) {
      out[d] = vanishes ? out[d] : out[d] / sum;
      check += out[d] * 0.0f;
    }
    lse[g] = vanishes ? -INFINITY : maximum + std::log(sum) + (unit.weights.empty() ? 0.0f : unit.lse_all[g]);
    if (check != 0.0f || !(vanishes || std::isfinite(lse[g]))) return report_non_finite(layer_idx, row_idx, unit_idx);
    const int head = unit_idx * group + g;
    write_output(row, head, 1, out);
    if (row.lse != nullptr) row.lse[head] = lse[g];
  }
  if (row.weights != nullptr && unit.n > 0) {
    std::memcpy(row.weights + row.indptr[unit_idx] * group, attended_weights(row, row_idx, unit_idx),
                static_cast<size_t>(group * unit.n) * sizeof(float));
  }
  if (unit.sparse && !options_.defers_updates) update_unit(layer_idx, row, row_idx, unit_idx, worker);
}

// Scores the tokens of a unit's list that are in the window on the device, for the policy's eyes. Raises lse, of what
// was attended here, to that of the whole list.
void DecodeAttention::score_window(const QueryRow& row, int row_idx, int unit_idx, float* lse) {
  Unit& unit = unit_of(row_idx, unit_idx);
  const int group = unit_group();
  const int64_t ends[2][2] = {{0, unit.begin}, {unit.end, unit.n}};
  for (const auto& [first, last] : ends) {
    if (first == last) continue;
    score(row, row_idx, unit_idx * group, group, {unit.indices + first, 0, last - first}, unit.scores.data() + first,
          unit.n);
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

// The normalised weights [group, n] of a unit's tokens, whether attended here or on the device, in place of its scores.
// Null where they are not known.
float* DecodeAttention::attended_weights(const QueryRow& row, int row_idx, int unit_idx) {
  Unit& unit = unit_of(row_idx, unit_idx);
  const int group = unit_group();
  const bool whole = unit.end - unit.begin == unit.n;
  if (!unit.scores.empty()) {
    float lse[kMaxGroupSize];
    std::copy_n(unit.lse, group, lse);
    if (!whole) score_window(row, row_idx, unit_idx, lse);
    float* weights = unit.scores.data();
    for (int g = 0; g < group; ++g) {
      for (int64_t i = 0; i < unit.n; ++i) weights[g * unit.n + i] = std::exp(weights[g * unit.n + i] - lse[g]);
    }
    return weights;
  }
  if (unit.weights.empty()) return nullptr;
  float* weights = unit.weights.data();
  if (unit.num_ranges > 0 && !whole) {  // those of the window
    gather_weights(unit, 0, unit.begin);
    gather_weights(unit, unit.end, unit.n);
  }
  for (int g = 0; g < group; ++g) {
    float factor = std::exp(unit.lse_all[g] - unit.lse[g]);
    if (!whole) {
      float sum = 0.0f;
      for (int64_t i = 0; i < unit.n; ++i) sum += weights[g * unit.n + i];
      factor = 1.0f / sum;
    }
    for (int64_t i = 0; i < unit.n; ++i) weights[g * unit.n + i] *= factor;
  }
  return weights;
}

// Tells the policy what a unit attended to, and that its newest token is there.
void DecodeAttention::update_unit(int64_t layer_idx, const QueryRow& row, int row_idx, int unit_idx, int worker) {
  const Unit& unit = unit_of(row_idx, unit_idx);
  const PolicyMember& member = member_of(layer_idx, unit_idx);
  if (!asks_policy(unit.role) || !member.learns()) return;
  const PhaseTimer timer(profile_of(worker), Phase::update);
  const char* callback = "observe";
  PolicyContext ctx = context(layer_idx, row, row_idx, unit_idx, worker);
  if (member.observe != nullptr && unit.indices != nullptr && !unit.answered) {
    ctx.indices = const_cast<int32_t*>(unit.indices);
    ctx.num_indices = unit.n;
    ctx.weights = attended_weights(row, row_idx, unit_idx);
    member.observe(&ctx);
  }
  if (member.append != nullptr && ctx.error[0] == '\0') {
    callback = "append";
    member.append(&ctx);
  }
  finish_context(ctx, row_idx, unit_idx, callback);
}

void DecodeAttention::update(int64_t layer_idx, const std::vector<QueryRow>& rows) {
  if (num_updates() == 0) return;
  task_rings_ = trace_.workers();
  pool_.parallel_for_near(num_updates(), [&](int64_t task, int worker) { update_task(layer_idx, rows, task, worker); });
}

void DecodeAttention::update_task(int64_t layer_idx, const std::vector<QueryRow>& rows, int64_t task, int worker) {
  const int r = sparse_rows_[static_cast<size_t>(task / units())];
  const int unit = static_cast<int>(task % units());
  if (!unit_of(r, unit).sparse) return;
  const TraceSpan span = task_span(TraceKind::update, layer_idx, r, unit, worker);
  update_unit(layer_idx, rows[static_cast<size_t>(r)], r, unit, worker);
}

int64_t DecodeAttention::num_updates() const {
  return policy_.any_learns() ? static_cast<int64_t>(sparse_rows_.size()) * units() : 0;
}

// Where workers share a unit, one of them prepares it, which is the one that will ask for it, and the other updates.
void DecodeAttention::update_and_prepare(int64_t layer_idx, const std::vector<QueryRow>& rows, int64_t next_layer_idx,
                                         const std::vector<QueryRow>& next_rows) {
  const int64_t updates = num_updates();
  const int64_t prepares = policy_.any_prepares() ? static_cast<int64_t>(next_rows.size()) * units() : 0;
  if (updates == 0 && prepares == 0) return;
  task_rings_ = trace_.workers();
  pool_.parallel_for_near(2 * std::max(updates, prepares), [&](int64_t task, int worker) {
    if (task % 2 == 0 && task / 2 < prepares) prepare_task(next_layer_idx, next_rows, task / 2, worker);
    if (task % 2 == 1 && task / 2 < updates) update_task(layer_idx, rows, task / 2, worker);
  });
}

WorkerProfile DecodeAttention::profile() const {
  WorkerProfile sum;
  for (const WorkerProfile& of_worker : profiles_) {
    for (int i = 0; i < kNumPhases; ++i) sum.seconds[i] += of_worker.seconds[i];
    sum.bytes += of_worker.bytes;
    sum.scored_tokens += of_worker.scored_tokens;
    sum.attended_tokens += of_worker.attended_tokens;
  }
  return sum;
}

std::string DecodeAttention::attend(int64_t layer_idx, const std::vector<QueryRow>& rows, bool sparse, int first_row,
                                    bool prepares, const AttendOptions& options) {
  if (failed_.load()) return take_failure();
  task_rings_ = trace_.workers();
  options_ = options;
  queries_loaded_ = false;
  const size_t count = rows.size() * static_cast<size_t>(units());
  if (count > units_capacity_) {
    units_ = std::make_unique<Unit[]>(count);
    units_capacity_ = count;
  }
  grow(selection_, count);
  num_selections_ = count;
  first_row_ = first_row;
  make_room_for_published(static_cast<size_t>(first_row) + rows.size());
  sparse_rows_.clear();
  bool scans = false;
  for (int r = 0; r < static_cast<int>(rows.size()); ++r) {
    const QueryRow& row = rows[static_cast<size_t>(r)];
    const bool chosen = sparse && row.indptr == nullptr && row.kv_len > policy_.dense_tokens;
    if (chosen) sparse_rows_.push_back(r);
    for (int u = 0; u < units(); ++u) {
      Unit& unit = unit_of(r, u);
      const bool elsewhere = options.elsewhere != nullptr && options.elsewhere[kv_head_of(u)] != 0;
      const int64_t num_tokens = tokens_of(row, u);
      const bool by_role = chosen && num_tokens > policy_.dense_tokens;  // heads of a row may have fewer than it
      unit.role = elsewhere               ? Role::elsewhere
                  : by_role               ? role_of(layer_idx, u)
                  : row.indptr != nullptr ? Role::select
                                          : Role::dense;
      unit.sparse = by_role && unit.role != Role::dense && !elsewhere;
      scans = scans || (unit.sparse && asks_policy(unit.role) && member_of(layer_idx, u).scans_keys);
      // What select_unit() or finish_proposal() overwrites keeps its size, so that nothing is zeroed.
      if (!unit.sparse || unit.role != Role::select) selection_[static_cast<size_t>(r * units() + u)].clear();
      unit.asks = false;
      unit.num_ranges = 0;
      unit.answered = false;
      unit.weights.clear();
      unit.scores.clear();
      unit.indices = row.indptr != nullptr ? row.indices + row.indptr[u] : nullptr;
      unit.n = row.indptr != nullptr ? row.indptr[u + 1] - row.indptr[u] : num_tokens;
      if (row.indptr != nullptr && row.weights != nullptr)
        unit.scores.resize(static_cast<size_t>(unit_group() * unit.n));
      if (unit.role == Role::reuse) {
        unit.indices = published_of(r, u).tokens;
        unit.n = published_of(r, u).n;
      }
      if (elsewhere) unit.n = 0;
    }
    if (options.window_on_device || row.indptr != nullptr) continue;
    // A cache must not keep what is not finite, and not all shows in the output: a key of -inf may have no weight.
    for (int h = 0; h < shape_.num_kv_heads; ++h) {
      const int64_t newest = row.num_tokens(h) - 1;
      const void* key = row.keys(shape_, h).row(newest);
      const void* value = row.values(shape_, h).row(newest);
      const int64_t bytes = shape_.row_bytes();
      if (!all_finite(key, bytes, shape_.dtype) || !all_finite(value, bytes, shape_.dtype))
        return non_finite(layer_idx, r, h * (units() / shape_.num_kv_heads));
    }
  }
  if (!sparse_rows_.empty() && policy_.any_asks_queries()) load_queries(rows);
  if (scans) {
    if (prepares) prepare(layer_idx, rows);
    prepares = false;
    scan_and_select(layer_idx, rows);
    if (failed_.load()) return take_failure();
  }
  for (const int r : sparse_rows_) {
    for (int u = 0; u < units(); ++u) {
      Unit& unit = unit_of(r, u);
      const PolicyMember& member = member_of(layer_idx, u);
      if (member.scans_keys || !asks_policy(unit.role)) continue;
      unit.asks = member.has_lane();
      if (unit.asks) continue;
      // A list of sinks and recent tokens is written sooner than the pool starts.
      const TraceSpan span = task_span(TraceKind::ask, layer_idx, r, u, 0);
      ask_unit(layer_idx, rows[static_cast<size_t>(r)], r, u, 0);
    }
  }
  run_lanes(layer_idx, rows, prepares);
  if (failed_.load()) return take_failure();
  if (probe_.is_on() && options.is_decoded) {
    draw_probes(layer_idx, rows);
    if (!options.defers_updates) run_probes();
  }
  return {};
}

}  // namespace offload
