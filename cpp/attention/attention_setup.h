// What stays from layer to layer: the model's shape, kernels and workers, the policy, and what the workers report.
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "attention/policy.h"
#include "attention/query_row.h"
#include "kernels/kernels.h"
#include "pool/trace.h"
#include "pool/worker_pool.h"

namespace offload {

inline constexpr int64_t kPiecesPerThread = 4;  // finer pieces balance better, coarser ones merge faster

// What went wrong first, told once.
class Failure {
 public:
  bool is_set() const { return failed_.load(); }
  void report(std::string what) {
    if (!failed_.exchange(true)) what_ = std::move(what);
  }
  std::string take() { return failed_.exchange(false) ? what_ : std::string(); }

 private:
  std::atomic<bool> failed_{false};
  std::string what_;
};

struct AttentionSetup {
  AttentionSetup(std::vector<AttentionShape> of_layers, const KernelTable& kernels, WorkerPool& pool)
      : shapes(std::move(of_layers)), shape(shapes.at(0)), kernels(kernels), pool(pool), trace(pool.num_threads()) {}

  const std::vector<AttentionShape> shapes;  // of each layer, or one of all
  AttentionShape shape;                      // has the heads of the layer at hand
  const KernelTable& kernels;
  WorkerPool& pool;
  PolicyFunctions policy;
  bool per_query_head = false;  // a unit is a query head; else a KV head with its group
  Trace trace;
  TraceRing* task_rings = nullptr;      // of each worker, in this job; null while nothing is recorded
  std::vector<WorkerProfile> profiles;  // of each worker; empty while nobody asks
  Failure failure;

  // Before anything of a layer. Who works for two layers at a time needs heads that are alike.
  void begin_layer(int64_t layer_idx) {
    if (!shape.has_heads_of(shape_of(layer_idx))) shape = shape_of(layer_idx);
  }
  const AttentionShape& shape_of(int64_t layer_idx) const {
    return shapes[shapes.size() == 1 ? 0 : static_cast<size_t>(layer_idx)];
  }

  int dtype() const { return static_cast<int>(shape.dtype); }
  int units() const { return per_query_head ? shape.num_qo_heads : shape.num_kv_heads; }
  int unit_group() const { return shape.num_qo_heads / units(); }
  int units_per_head() const { return units() / shape.num_kv_heads; }
  int kv_head_of(int unit) const { return unit * unit_group() / shape.group_size(); }
  int64_t tokens_of(const QueryRow& row, int unit) const { return row.num_tokens(kv_head_of(unit)); }
  // Whether a row that has so many tokens attends to all of them, and no policy is asked.
  bool is_dense(const QueryRow& row, int64_t num_tokens) const {
    return num_tokens <= policy.dense_tokens || row.budget_tokens == kAttendsToAll;
  }
  int64_t budget_of(const QueryRow& row) const {
    return row.budget_tokens > 0 ? row.budget_tokens : policy.budget_tokens;
  }

  Role role_of(int64_t layer_idx, int unit) const {
    if (policy.roles.empty()) return Role::select;
    return static_cast<Role>(policy.roles[static_cast<size_t>(layer_idx * units() + unit)]);
  }
  const PolicyMember& member_of(int64_t layer_idx, int unit) const {
    return policy.member(static_cast<size_t>(layer_idx * units() + unit));
  }

  int64_t window(int64_t layer_idx) const { return shape_of(layer_idx).window; }
  float cap(int64_t layer_idx) const { return shape_of(layer_idx).cap; }
  float sm_scale(int64_t layer_idx) const { return shape_of(layer_idx).sm_scale; }
  // What a head's sink leaves of its whole output; `lse` is of the tokens.
  float share_beside_sink(int64_t layer_idx, int head, float lse) const {
    const float* sinks = shape_of(layer_idx).sinks;
    return sinks == nullptr ? 1.0f : 1.0f / (1.0f + std::exp(sinks[head] - lse));
  }
  // Scaled scores [num_heads, stride] of tokens, for neighbouring query heads of one KV head.
  void score(int64_t layer_idx, const float* query, int num_heads, const RowSource& keys, const TokenSpan& tokens,
             float* scores, int64_t stride) const {
    kernels.score[static_cast<int>(keys.format)](
        {query, num_heads, shape.head_dim, keys, tokens, sm_scale(layer_idx), scores, stride, cap(layer_idx)});
  }

  WorkerProfile* profile_of(int worker) { return profiles.empty() ? nullptr : &profiles[static_cast<size_t>(worker)]; }
  // Of a task in a job whose leader has called begin_job().
  TraceSpan task_span(TraceKind kind, int64_t layer_idx, int row_idx, int unit, int worker) {
    return {task_rings == nullptr ? nullptr : task_rings + worker, {kind, layer_idx, -1, 0, 0, worker, row_idx, unit}};
  }
  void begin_job() { task_rings = trace.workers(); }
  // task(row, unit, worker) for each unit of `num_rows` rows.
  template <class Task>
  void for_each_unit(size_t num_rows, Task&& task) {
    begin_job();
    pool.parallel_for_near(static_cast<int64_t>(num_rows) * units(), [&](int64_t i, int worker) {
      task(static_cast<int>(i / units()), static_cast<int>(i % units()), worker);
    });
  }

  std::string place(int64_t layer_idx, int row_idx, int unit) const {
    return "layer " + std::to_string(layer_idx) + ", query row " + std::to_string(row_idx) + ", KV head " +
           std::to_string(kv_head_of(unit)) + ": ";
  }
  std::string non_finite(int64_t layer_idx, int row_idx, int unit) const {
    return "non-finite attention in " + place(layer_idx, row_idx, unit) + "NaN or inf in q or the KV cache";
  }
  void report_non_finite(int64_t layer_idx, int row_idx, int unit) {
    failure.report(non_finite(layer_idx, row_idx, unit));
  }
  void report_policy(int64_t layer_idx, int row_idx, int unit, const char* callback, const std::string& what) {
    failure.report(std::string("the policy's ") + callback + " failed in " + place(layer_idx, row_idx, unit) + what);
  }
};

}  // namespace offload
