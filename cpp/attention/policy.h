// What a selection policy is to the worker pool: a few C functions, usually compiled by Numba from one Python file
// (offload/policies/), called without the GIL, one call per query row and selection unit. A unit is a KV head with its
// group of query heads, or one query head where the policy selects per query head.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "kernels/kernels.h"

namespace offload {

inline constexpr int64_t kErrorBytes = 240;
inline constexpr int64_t kAnswered = -2;  // of propose: the unit's output is written, nothing is attended
// Of top_codes or rank_rows, then of propose: the workers score the codes, or rank the rows, together.
inline constexpr int64_t kDeferred = -3;

// What top_codes was asked, where it left the answer to the runtime.
struct CodesRequest {
  CodeArgs args{};  // but for the scores
  int64_t k = 0;
  int32_t* tokens = nullptr;
};

// What propose has left to the workers: codes if k is not 0, rows to rank if there are any.
struct Deferred {
  CodesRequest codes;
  RankArgs ranks{};
  int64_t num_ranked = 0;  // rows in all of its ranges
};

struct WorkerProfile;

// Mirrored field for field by offload/selection/callback.py; all fields are 8 bytes wide.
struct PolicyContext {
  int64_t layer_idx;
  int64_t unit;        // KV head, or query head, as the policy's arrays count them: those of the member that is asked
  int64_t kv_head;     // of them
  int64_t group_size;  // query heads of this unit
  int64_t head_dim;
  int64_t kv_len;  // tokens in the cache, the newest included
  int64_t first;   // the policy chooses tokens in [first, last): sinks and recent tokens are the runtime's
  int64_t last;
  int64_t budget_tokens;   // how many it may choose
  int64_t num_candidates;  // select: what propose returned
  double sm_scale;
  const double* parameters;  // the policy's numbers, in the order that it declares
  const float* query;        // [group_size, head_dim]; null in prepare
  const float* importance;  // exact attention weights summed over the group: of the candidates, or of all kv_len tokens
  int32_t* indices;         // select writes budget_tokens of them; observe reads num_indices
  int64_t num_indices;
  const float* weights;       // observe: [group_size, num_indices] normalised attention weights
  const int32_t* candidates;  // propose: sorted unique tokens in [first, last), in memory of the policy's own
  float* output;              // propose: [group_size, head_dim] and
  float* lse;                 // [group_size], where it answers
  const uint8_t* text_marks;  // [kv_len] what the text of each token ends with; null where it is not known
  int64_t bytes_touched;      // callbacks add what they read and write of their own arrays
  // 1: propose may leave codes to the workers; 2: rows to rank, too, for there are more workers than units to ask.
  int64_t may_defer;
  int64_t prepared_together;  // prepare: units that one worker prepares before it asks about the first of them
  // A choice a layer ahead, which others will attend to beside what they hold, and no weight is asked for: where
  // propose names no more than budget_tokens (or AttendOptions::max_chosen, where the policy observes some steps), that
  // is the choice, and nothing is scored.
  int64_t ahead;
  int64_t resumes;      // propose: called again, after the workers have ranked
  void* const* arrays;  // the policy's own arrays of this (sequence, layer), in the order that it declares
  // SIMD primitives, as function pointers so that Numba code can call them.
  void (*score_tokens)(const PolicyContext*, const int32_t* indices, int64_t n, float* scores);
  int64_t (*top_k)(const PolicyContext*, const float* x, int64_t n, int64_t k, int32_t* positions);
  void (*score_rows)(const PolicyContext*, const float* query, const void* rows, int64_t n, int64_t width,
                     float* scores);
  int64_t (*rank_rows)(const PolicyContext*, const float* query, int64_t num_queries, const int8_t* rows,
                       const Bf16* scales, const Bf16* spreads, float spread_weight, const int32_t* ranges,
                       int64_t num_ranges, float* ranks);
  int64_t (*top_codes)(const PolicyContext*, const float* query, const float* offsets, const uint8_t* codes,
                       const float* scales, const float* levels, int64_t bits, int64_t k, int32_t* tokens);
  void (*load_keys)(const PolicyContext*, int64_t first, int64_t n, float* out);
  void (*store_rows)(const PolicyContext*, const float* x, int64_t n, void* out);
  int64_t (*filter_at_least)(const PolicyContext*, const float* x, int64_t n, float threshold, int32_t* positions);
  // What select ranked, for a policy that is asked through another one: where it ranks blocks of tokens, a score of
  // each and where they begin, and behind the last one where that ends. Later tokens were chosen whatever they are.
  const float* block_scores;    // [num_blocks]
  const int32_t* block_starts;  // [num_blocks + 1]
  int64_t num_blocks;
  char* error;  // [kErrorBytes] what a callback raised, in words; empty if nothing
  // For the primitives only.
  const void* kernels;
  int64_t dtype;
  RowSource keys;
  WorkerProfile* profile;
  Deferred* deferred;
};

// What a unit does in a layer where its row has more than dense_tokens.
enum class Role : uint8_t {
  dense = 0,      // full attention
  retrieve = 1,   // full attention, and publishes the policy's selection
  select = 2,     // attends to the policy's selection and publishes it
  reuse = 3,      // attends to what the same unit last published in this step
  elsewhere = 4,  // somebody else attends to all of it (a GPU): nothing is done here
};

inline bool asks_policy(Role role) { return role == Role::retrieve || role == Role::select; }

// What selects for some units: callbacks, numbers, and arrays of its own.
struct PolicyMember {
  bool scans_keys = false;  // the runtime scores every key first and hands over `importance`
  std::vector<double> parameters;
  int64_t first_array = 0;                       // of PolicyFunctions::num_arrays
  void (*prepare)(PolicyContext*) = nullptr;     // before the query is known
  int64_t (*propose)(PolicyContext*) = nullptr;  // sets candidates, returns how many; or answers
  // Writes sorted unique tokens in [first, last), or where there are candidates ascending positions among them; returns
  // how many. With candidates it may be missing: the most important ones are kept.
  int64_t (*select)(PolicyContext*) = nullptr;
  void (*observe)(PolicyContext*) = nullptr;  // sees the attention weights of what was attended
  // Where a layer is asked ahead: in one step of so many. In the others the choice is all that propose named, unscored,
  // if there is room for it.
  int64_t observes_every = 1;
  // The newest token is in the cache. Where a layer is asked ahead, the first such token was there when arrays were
  // built; where it then no longer is, one token goes unsaid: what is new is told by kv_len.
  void (*append)(PolicyContext*) = nullptr;

  bool learns() const { return observe != nullptr || append != nullptr; }
  bool asks_queries() const { return scans_keys || propose != nullptr || select != nullptr || observe != nullptr; }
  bool has_lane() const { return propose != nullptr || select != nullptr || prepare != nullptr; }
};

// A policy is its first member, and may have others for some units.
struct PolicyFunctions : PolicyMember {
  int64_t budget_tokens = 0;  // tokens attended, sinks and recent ones included
  int64_t dense_tokens = 0;   // rows of at most so many attend to all of them; no less than sinks and recent ones
  int64_t sink_tokens = 0;
  int64_t recent_tokens = 0;
  double top_p = 1.0;          // a selection ends where it has this share of the attention weight
  double least_of_head = 0.5;  // and each query head has this one of its own, below the budget
  bool per_query_head = false;
  bool shares_selection = false;  // units of a row that retrieve publish one selection, by their summed importance
  std::vector<uint8_t> roles;     // Role of each [layer, unit]
  int64_t num_arrays = 0;         // of all members, and of Estimate if it is on, of each (sequence, layer)
  int64_t estimate_clusters = 0;  // of each KV head, which stand for what is not chosen; 0: that is dropped
  std::vector<PolicyMember> others;
  std::vector<uint8_t> member_of;  // of each [layer, unit]: 0 is the policy itself, i others[i - 1]; empty: all 0
  std::vector<int32_t> number_of;  // of each [layer, unit] among its member's of the layer; empty: all in order

  const PolicyMember& member(size_t unit_of_all) const {
    if (member_of.empty() || member_of[unit_of_all] == 0) return *this;
    return others[member_of[unit_of_all] - size_t{1}];
  }
  template <class Predicate>
  bool any_member(Predicate&& holds) const {
    return holds(*this) || std::any_of(others.begin(), others.end(), holds);
  }
  bool any_learns() const {
    return any_member([](const PolicyMember& m) { return m.learns(); });
  }
  bool any_asks_queries() const {
    return any_member([](const PolicyMember& m) { return m.asks_queries(); });
  }
  bool any_prepares() const {
    return any_member([](const PolicyMember& m) { return m.prepare != nullptr; });
  }
};

// Where the time of decode attention goes.
enum class Phase { predict, score, select, attend, update };
inline constexpr int kNumPhases = 5;

class PhaseTimer;

// One worker's share; times are of its own clock.
struct alignas(64) WorkerProfile {
  PhaseTimer* running = nullptr;
  double seconds[kNumPhases] = {};
  int64_t bytes = 0;
  int64_t scored_tokens = 0;    // keys scored exactly, tokens x units
  int64_t attended_tokens = 0;  // tokens x units
};

// Gives the time until it goes to one phase of a worker's profile, less what timers started meanwhile take. A null
// profile costs nothing.
class PhaseTimer {
 public:
  PhaseTimer(WorkerProfile* profile, Phase phase) : profile_(profile), phase_(phase) {
    if (profile_ == nullptr) return;
    outer_ = profile_->running;
    profile_->running = this;
    start_ = Clock::now();
  }
  ~PhaseTimer() {
    if (profile_ == nullptr) return;
    const double seconds = std::chrono::duration<double>(Clock::now() - start_).count();
    profile_->seconds[static_cast<int>(phase_)] += seconds - inner_seconds_;
    if (outer_ != nullptr) outer_->inner_seconds_ += seconds;
    profile_->running = outer_;
  }
  PhaseTimer(const PhaseTimer&) = delete;
  PhaseTimer& operator=(const PhaseTimer&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  WorkerProfile* profile_;
  Phase phase_;
  PhaseTimer* outer_ = nullptr;
  double inner_seconds_ = 0.0;
  Clock::time_point start_;
};

// The k largest of x[0..n), as ascending positions; equal values prefer lower positions. Returns min(k, n), or -1 if
// NaN leaves fewer than k values.
int64_t top_k(const KernelTable& kernels, const float* x, int64_t n, int64_t k, int32_t* positions);

// Of ascending positions into x the fewest whose values sum to `mass`: the largest, equal ones by lower positions.
// They come first, ascending, and it is returned how many; all where they do not sum to it.
int64_t top_mass(const float* x, int32_t* positions, int64_t n, double mass);

}  // namespace offload
