// One layer's attention as data: its rows, and of each unit what the jobs (Selector, KeyScan, LanePlan, Attender) find
// out about it and hand on to each other.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention/attention_setup.h"
#include "attention/scratch.h"

namespace offload {

// What propose() has named for a unit, and the scores of it; Selector's.
struct Candidates {
  Deferred deferred;                // what propose() leaves to the workers
  int64_t num_scans = 0;            // that their scoring is cut into
  Scratch<float> code_scores;       // [codes]
  std::vector<int32_t> considered;  // sinks, candidates, recent tokens
  int64_t num_ranges = 0;           // that scoring is cut into; 0: nothing is considered
  Scratch<float> scores;            // [group, considered]; once scored exp(score - maximum of its range)
  Scratch<float> range_max;         // [group, ranges]
  Scratch<float> range_factors;     // [group, ranges]: sums, then what makes them weights
  Scratch<float> importance;        // [considered]
  Scratch<int32_t> positions;       // where each attended token is among the considered ones
};

struct Unit {
  bool sparse = false;  // the policy has a say in it
  Role role = Role::dense;
  bool scanned = false;   // all keys are scored before the policy selects
  bool asks = false;      // the policy's callbacks are to be asked, in the unit's lane
  bool answered = false;  // by propose: there is nothing to attend
  Candidates candidates;
  Scratch<float> importance;  // of all tokens, where units that retrieve share a selection
  // Attention weights of what is attended [group, n], where they are known before: relative to all keys that were
  // scored, whose log-sum-exp is lse_all.
  Scratch<float> weights;
  float lse_all[kMaxGroupSize];
  Scratch<float> scores;             // raw scores of the selection [group, n], where somebody wants its weights
  const int32_t* indices = nullptr;  // null: tokens 0 … n - 1
  int64_t n = 0;
  int64_t begin = 0;  // of those n, [begin, end) are attended here; the others are in the window on the device
  int64_t end = 0;
  float lse[kMaxGroupSize];  // of what was attended here
  int64_t first_part = 0;    // of its partial results in the Attender's
  int num_parts = 0;
  std::atomic<int> scores_left{0};  // of unit 0: units of its row that retrieve and are not scanned
  std::atomic<int> parts_left{0};   // to be attended, where lists are known before

  bool asks_policy() const { return offload::asks_policy(role); }
  bool is_whole() const { return end - begin == n; }
};

// What a unit last published: its own list, or one that lies elsewhere.
struct Published {
  std::vector<int32_t> own;
  const int32_t* tokens = nullptr;
  int64_t n = 0;

  void set(const std::vector<int32_t>& list) {
    own = list;
    set_own();
  }
  void set_own() {
    tokens = own.data();
    n = static_cast<int64_t>(own.size());
  }
};

struct LayerPass {
  explicit LayerPass(AttentionSetup& setup) : setup(setup) {}

  AttentionSetup& setup;
  int64_t layer_idx = 0;
  int first_row = 0;  // rows[0] in its step
  std::vector<QueryRow> rows;
  size_t num_units = 0;  // of all rows
  AttendOptions options;
  std::vector<int> sparse_rows;                 // those that the policy has a say in
  std::vector<std::vector<int32_t>> selection;  // of each unit of each row
  std::vector<Published> published;             // of each row of the step and unit; kept from layer to layer

  // Decides each unit's role, and what it attends where that is known.
  void begin(int64_t layer, const std::vector<QueryRow>& query_rows, bool sparse, int first_row_of_step,
             const AttendOptions& attend_options);
  // The first row whose newest key or value is not finite, in words; or an empty string.
  std::string find_non_finite() const;
  std::vector<std::vector<int32_t>> last_selection() const;
  void forget_published();

  size_t index_of(int r, int u) const { return static_cast<size_t>(r * setup.units() + u); }
  const QueryRow& row(int r) const { return rows[static_cast<size_t>(r)]; }
  Unit& unit(int r, int u) { return units_[index_of(r, u)]; }
  const Unit& unit(int r, int u) const { return units_[index_of(r, u)]; }
  int64_t tokens_of(int r, int u) const { return setup.tokens_of(row(r), u); }
  const PolicyMember& member_of(int u) const { return setup.member_of(layer_idx, u); }
  // Whether its member sees the weights of this step; where layers are asked ahead they take turns.
  bool observes(int r, int u) const {
    const PolicyMember& member = member_of(u);
    const bool is_scored = !options.chooses_only || setup.policy.top_p < 1.0;  // in any case
    const bool in_turn = is_scored || (row(r).kv_len + layer_idx) % member.observes_every == 0;
    return member.observe != nullptr && in_turn;
  }
  std::vector<int32_t>& selection_of(int r, int u) { return selection[index_of(r, u)]; }
  Published& published_of(int r, int u) { return published[index_of(first_row + r, u)]; }
  template <class Predicate>
  bool any_unit(Predicate&& holds) const {
    return std::any_of(units_.get(), units_.get() + num_units, holds);
  }

  void load_queries();  // once
  // Null where there are no queries yet.
  const float* queries_of(int r, int qo_head) const;
  void score(int r, int first_qo_head, int num_heads, const TokenSpan& tokens, float* scores, int64_t stride) const {
    setup.score(layer_idx, queries_of(r, first_qo_head), num_heads,
                row(r).keys(setup.shape, first_qo_head / setup.shape.group_size()), tokens, scores, stride);
  }
  void write_output(int r, int first_head, int num_heads, const float* x) const;

  TraceSpan task_span(TraceKind kind, int r, int u, int worker) const {
    return setup.task_span(kind, layer_idx, r, u, worker);
  }
  void report_non_finite(int r, int u) const { setup.report_non_finite(layer_idx, r, u); }

 private:
  void begin_unit(int r, int u, bool row_is_sparse);

  std::vector<float> queries_;  // [rows, num_qo_heads, head_dim]
  bool queries_loaded_ = false;
  std::unique_ptr<Unit[]> units_;
  size_t units_capacity_ = 0;
};

}  // namespace offload
