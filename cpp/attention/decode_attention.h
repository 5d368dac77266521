// One layer's decode attention over the host KV store: dense or under a policy, on the worker pool, without the GIL.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "attention/policy.h"
#include "attention/quality_probe.h"
#include "pool/staged_lanes.h"
#include "pool/trace.h"
#include "pool/worker_pool.h"

namespace offload {

inline constexpr int kMaxWaveHeads = 32;
inline constexpr int64_t kPiecesPerThread = 4;  // finer pieces balance better, coarser ones merge faster
inline constexpr int64_t kMinScanCodes = 4096;  // of one task: each makes tables of its queries first

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <class T>
void grow(std::vector<T>& x, size_t n) {
  if (x.size() < n) x.resize(n);
}

// Memory that only grows and is not cleared: what a call writes anyway.
template <class T>
class Scratch {
 public:
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  void clear() { size_ = 0; }
  void resize(size_t n) {  // what was there is lost
    if (n > capacity_) {
      data_ = std::make_unique_for_overwrite<T[]>(n);
      capacity_ = n;
    }
    size_ = n;
  }

 private:
  std::unique_ptr<T[]> data_;
  size_t size_ = 0;
  size_t capacity_ = 0;
};

struct AttentionShape {
  int num_qo_heads;
  int num_kv_heads;
  int head_dim;
  int page_shift;  // log2 of the tokens of a page
  DType dtype;
  float sm_scale;

  int group_size() const { return num_qo_heads / num_kv_heads; }
  int64_t row_bytes() const { return head_dim * dtype_bytes(dtype); }
  RowSource keys(const int64_t* pages, int kv_head) const {
    return {pages, (row_bytes() << page_shift) * kv_head, row_bytes(), page_shift};
  }
  RowSource values(const int64_t* pages, int kv_head) const {
    return {pages, (row_bytes() << page_shift) * (num_kv_heads + kv_head), row_bytes(), page_shift};
  }
};

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
    return {pages_of(shape, kv_head), 0, shape.row_bytes(), shape.page_shift};
  }
  RowSource values(const AttentionShape& shape, int kv_head) const {
    if (starts == nullptr) return shape.values(pages, kv_head);
    return {pages_of(shape, kv_head), shape.row_bytes() << shape.page_shift, shape.row_bytes(), shape.page_shift};
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
  bool is_decoded = true;              // false: a row again, for the policy only, which is not probed
};

class DecodeAttention {
 public:
  DecodeAttention(const AttentionShape& shape, const KernelTable& kernels, WorkerPool& pool);

  const AttentionShape& shape() const { return shape_; }
  const KernelTable& kernels() const { return kernels_; }
  WorkerPool& pool() { return pool_; }
  Trace& trace() { return trace_; }  // of each worker's tasks, and of who leads them

  const PolicyFunctions& policy() const { return policy_; }
  // Between steps: the share of the attention weight at which selections end from now on, whatever a head keeps of its
  // own.
  void hold_top_p(double top_p) {
    policy_.top_p = top_p;
    policy_.least_of_head = 0.0;
  }
  // Units whose selections ended at a share of the weight, and the tokens of these, since the last call.
  std::pair<int64_t, int64_t> take_chosen() { return {chosen_units_.exchange(0), chosen_tokens_.exchange(0)}; }
  void set_policy(const PolicyFunctions& policy) {
    policy_ = policy;
    per_query_head_ = policy.per_query_head;
  }
  // For explicit selections, which may be for other units than the policy's.
  void set_units_per_row(bool per_query_head) { per_query_head_ = per_query_head; }

  // Attends all rows: units that have at most dense_tokens, or all where `sparse` is false, to all of them, others by
  // their roles.
  // Returns an empty string, or what was wrong with the numbers ("non-finite …") or with the policy, in a prepare() or
  // update() before as well; outputs are then unusable.
  // `first_row` numbers rows[0] in its step: where rows are attended in several calls, each finds what it published.
  // With `prepares`, the policy's prepare() runs first, for callers that have nothing to overlap it with.
  std::string attend(int64_t layer_idx, const std::vector<QueryRow>& rows, bool sparse, int first_row = 0,
                     bool prepares = false, const AttendOptions& options = {});
  // What was wrong since the last attend(), which would return it; or an empty string.
  std::string take_failure() { return failed_.exchange(false) ? failure_ : std::string(); }
  // What the last attend() deferred; rows are those of that call.
  void update(int64_t layer_idx, const std::vector<QueryRow>& rows);
  // The policy's prepare() for rows that will be attended sparsely.
  void prepare(int64_t layer_idx, const std::vector<QueryRow>& rows);
  // Both at a time, of what comes one after the other: neither has a task for every worker.
  void update_and_prepare(int64_t layer_idx, const std::vector<QueryRow>& rows, int64_t next_layer_idx,
                          const std::vector<QueryRow>& next_rows);
  // For callers with time to spare. remember() notes what the last attend(), of these rows, read under the policy;
  // warm_up() brings what was noted of a layer's rows into the workers' caches until *stop is not 0.
  void remember(int64_t layer_idx, const std::vector<QueryRow>& rows);
  // `elsewhere` as in AttendOptions.
  void warm_up(int64_t layer_idx, const std::vector<QueryRow>& rows, int first_row, int32_t* stop,
               const uint8_t* elsewhere = nullptr);

  // What a unit of a row of the step would have published, had it been attended here: sinks, chosen, recent tokens.
  // They are read where they are until something else is published, or all such lists are forgotten: between steps,
  // and before their memory goes away.
  void publish(int row_of_step, int unit, const int32_t* tokens, int64_t n);
  void forget_published();
  // Names who found numbers that are not finite; as attend() returns it.
  std::string non_finite(int64_t layer_idx, int row_idx, int unit) const;
  int num_units() const { return units(); }

  // Which tokens each unit of each row of the last attend() attended; empty where it was all of them, or none because
  // the policy answered.
  std::vector<std::vector<int32_t>> last_selection() const;

  // Which selections are compared with exact attention, and what was found. They are drawn in attend(), which compares
  // them before it returns; where updates are deferred, run_probes() does so later in the step, or drop_probes() not.
  QualityProbe& probe() { return probe_; }
  const QualityProbe& probe() const { return probe_; }
  void run_probes();
  void drop_probes() { probes_.clear(); }

  // Counts from now on; off until the first call.
  void start_profile() { profiles_.assign(static_cast<size_t>(pool_.num_threads()), WorkerProfile{}); }
  // The sum over workers since start_profile().
  WorkerProfile profile() const;

 private:
  // What goes through the stages of a layer by itself: a unit, or some units of a row that is dense.
  struct Lane {
    int row;
    int first_unit;
    int num_units;
    int64_t max_splits;  // pieces that there is room for
  };
  // One task of attending: some tokens of some units of a row. A dense piece walks page by page, all heads' keys
  // and then all heads' values, which is the order of memory: one long sequential stream.
  struct Piece {
    int row;
    int first_unit;
    int num_units;
    int64_t begin;  // into the units' tokens
    int64_t n;
    int split;  // its partial results are number `split` of each unit
  };
  struct Unit {
    bool sparse = false;  // the policy has a say in it
    Role role = Role::dense;
    bool asks = false;      // the policy's callbacks are to be asked, in the unit's lane
    bool answered = false;  // by propose: there is nothing to attend
    int64_t first_part = 0;
    int num_parts = 0;
    int64_t num_ranges = 0;  // that scoring is cut into
    // Attention weights of what is attended [group, n], where they are known before: relative to all keys that were
    // scored, whose log-sum-exp is lse_all.
    Scratch<float> weights;
    float lse_all[kMaxGroupSize];
    Scratch<float> scores;             // raw scores of the selection [group, n], where somebody wants its weights
    const int32_t* indices = nullptr;  // null: tokens 0 … n - 1
    int64_t n = 0;
    int64_t begin = 0;  // of those n, [begin, end) are attended here; the others are in the window on the device
    int64_t end = 0;
    float lse[kMaxGroupSize];         // of what was attended here
    CodesRequest codes;               // with propose, where it leaves them to the workers
    int64_t num_scans = 0;            // that their scoring is cut into
    Scratch<float> code_scores;       // [codes]
    std::vector<int32_t> considered;  // with propose: sinks, candidates, recent tokens
    Scratch<float> candidate_scores;  // [group, considered]; once scored exp(score - maximum of its range)
    Scratch<float> range_max;         // [group, ranges]
    Scratch<float> range_factors;     // [group, ranges]: sums, then what makes them weights
    Scratch<float> importance;        // [considered]
    Scratch<int32_t> positions;       // with propose: where each attended token is among the considered ones
    std::atomic<int> scores_left{0};  // of unit 0: units of its row that retrieve and are not scanned
    std::atomic<int> parts_left{0};   // in run_known(): to be attended
  };
  // What a unit read in the last step.
  struct Remembered {
    std::vector<int32_t> scored;
    std::vector<int32_t> attended;
    bool reads_keys = false;  // of what was attended, and not only its values
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
  // What a unit will probably read, in one of the lists above or a GPU's.
  struct Forecast {
    int row = 0;
    int kv_head = 0;
    std::span<const int32_t> scored;
    std::span<const int32_t> attended;
    bool reads_keys = false;
    bool is_certain = false;  // and it is in lists that were published
  };
  // Scratch of a wave: some KV heads of a row whose keys are scanned together.
  struct ScanSlot {
    std::vector<float> weights;     // [heads, group_size, tokens of the wave], relative to each chunk's maximum
    std::vector<float> importance;  // [heads, tokens]
    std::vector<float> chunk_max;   // [heads, group_size, chunks of those tokens]
    std::vector<float> chunk_sum;
  };
  struct Wave {
    int row;
    int heads[kMaxWaveHeads];
    int num_heads = 0;
    int64_t tokens = 0;  // of the head that has most
    std::atomic<int> ranges_left{0};
    std::atomic<int> heads_left{0};  // to be finished
  };

  const float* queries_of(int row_idx, int qo_head) const {
    return queries_.data() + (int64_t{row_idx} * shape_.num_qo_heads + qo_head) * shape_.head_dim;
  }
  int units() const { return per_query_head_ ? shape_.num_qo_heads : shape_.num_kv_heads; }
  int unit_group() const { return shape_.num_qo_heads / units(); }
  int kv_head_of(int unit) const { return unit * unit_group() / shape_.group_size(); }
  int64_t tokens_of(const QueryRow& row, int unit) const { return row.num_tokens(kv_head_of(unit)); }

  // Scaled scores [num_heads, stride] of tokens, for neighbouring query heads of one KV head.
  void score(const QueryRow& row, int row_idx, int first_qo_head, int num_heads, const TokenSpan& tokens, float* scores,
             int64_t stride) const {
    kernels_.score[static_cast<int>(shape_.dtype)]({queries_of(row_idx, first_qo_head), num_heads, shape_.head_dim,
                                                    row.keys(shape_, first_qo_head / shape_.group_size()), tokens,
                                                    shape_.sm_scale, scores, stride});
  }

  Unit& unit_of(int row_idx, int unit) { return units_[static_cast<size_t>(row_idx * units() + unit)]; }
  Role role_of(int64_t layer_idx, int unit) const {
    if (policy_.roles.empty()) return Role::select;
    return static_cast<Role>(policy_.roles[static_cast<size_t>(layer_idx * units() + unit)]);
  }
  const PolicyMember& member_of(int64_t layer_idx, int unit) const {
    return policy_.member(static_cast<size_t>(layer_idx * units() + unit));
  }
  bool asks_policy(Role role) const { return role == Role::retrieve || role == Role::select; }
  void write_output(const QueryRow& row, int first_head, int64_t num_heads, const float* x) const;
  WorkerProfile* profile_of(int worker) {
    return profiles_.empty() ? nullptr : &profiles_[static_cast<size_t>(worker)];
  }

  // Of a task in a job whose leader has set task_rings_.
  TraceSpan task_span(TraceKind kind, int64_t layer_idx, int row_idx, int unit, int worker) {
    return {task_rings_ == nullptr ? nullptr : task_rings_ + worker,
            {kind, layer_idx, -1, 0, 0, worker, row_idx, unit}};
  }

  // decode_attention_select.cpp: what to attend to
  PolicyContext context(int64_t layer_idx, const QueryRow& row, int row_idx, int unit, int worker);
  bool finish_context(const PolicyContext& context, int row_idx, int unit, const char* callback);
  bool accepts(const PolicyContext& context, int row_idx, int unit, const char* callback, const int32_t* chosen,
               int64_t count, int64_t first, int64_t last, int64_t most);
  void prepare_task(int64_t layer_idx, const std::vector<QueryRow>& rows, int64_t task, int worker);
  void prepare_unit(int64_t layer_idx, const QueryRow& row, int row_idx, int unit, int worker);
  void ask_unit(int64_t layer_idx, const QueryRow& row, int row_idx, int unit, int worker);
  void score_range(const QueryRow& row, int row_idx, int unit, int64_t range, int worker);
  void propose_unit(int64_t layer_idx, const QueryRow& row, int row_idx, int unit, int worker);
  void scan_codes(int row_idx, int unit, int64_t range, int worker);
  void finish_codes(int64_t layer_idx, const QueryRow& row, int row_idx, int unit, int worker);
  void list_considered(int64_t kv_len, const int32_t* chosen, int64_t n, std::vector<int32_t>* tokens) const;
  void consider(int64_t kv_len, Unit& unit, const int32_t* candidates, int64_t n) const;
  bool takes_list(const QueryRow& row, int row_idx, int unit);
  void finish_proposal(int64_t layer_idx, const QueryRow& row, int row_idx, int unit, int worker);
  void count_chosen(const Unit& unit) {
    if (policy_.top_p >= 1.0) return;
    chosen_units_.fetch_add(1, std::memory_order_relaxed);
    chosen_tokens_.fetch_add(unit.n, std::memory_order_relaxed);
  }
  int64_t cut_to_mass(int32_t* chosen, int64_t count, const float* importance, int64_t sinks_before, int64_t last,
                      int64_t recent) const;
  void gather_weights(Unit& unit, int64_t first, int64_t last) const;
  void select_unit(int64_t layer_idx, const QueryRow& row, int row_idx, int unit, const float* importance, int worker);
  Published& published_of(int row_idx, int unit) {
    return published_[static_cast<size_t>((first_row_ + row_idx) * units() + unit)];
  }
  void make_room_for_published(size_t num_rows);

  // decode_attention_scan.cpp: exact weights of all keys
  void scan_and_select(int64_t layer_idx, const std::vector<QueryRow>& rows);
  void select_for_all(int64_t layer_idx, const QueryRow& row, int row_idx, int worker);
  void scan_chunks(const QueryRow& row, const Wave& wave, int64_t first_chunk, int64_t num_chunks, ScanSlot& slot,
                   int worker);
  void finish_scan(int64_t layer_idx, const QueryRow& row, const Wave& wave, int head_of_wave, ScanSlot& slot,
                   int worker);

  // decode_attention.cpp: attending to it
  void load_queries(const std::vector<QueryRow>& rows);
  void attend_piece(const QueryRow& row, const Piece& piece, int worker);
  void attend_dense(const QueryRow& row, const Piece& piece, int worker);
  AttendArgs unit_args(const QueryRow& row, int row_idx, int unit, int split);
  void merge_unit(int64_t layer_idx, const QueryRow& row, int row_idx, int unit, int worker);
  float* attended_weights(const QueryRow& row, int row_idx, int unit);
  void score_window(const QueryRow& row, int row_idx, int unit, float* lse);
  int64_t num_updates() const;
  void update_task(int64_t layer_idx, const std::vector<QueryRow>& rows, int64_t task, int worker);
  void update_unit(int64_t layer_idx, const QueryRow& row, int row_idx, int unit, int worker);
  void report_non_finite(int64_t layer_idx, int row_idx, int unit);
  void report_policy(int64_t layer_idx, int row_idx, int unit, const char* callback, const std::string& what);

  // decode_attention_lanes.cpp: what comes when
  void set_range(Unit& unit) const;
  bool is_null(const QueryRow& row, const Unit& unit) const;
  int64_t alignment_of(const Unit& unit) const;
  int64_t blocks_of(const Unit& unit) const;
  int64_t plan_lanes(int64_t layer_idx, const std::vector<QueryRow>& rows);
  StagedLanes::Stage begin_attending(const Lane& lane);
  Piece piece_of(const Lane& lane, int64_t split);
  void run_lanes(int64_t layer_idx, const std::vector<QueryRow>& rows, bool prepares);
  int64_t even_splits(int64_t num_lists, int64_t num_tokens) const;
  bool plan_known(int64_t layer_idx, const std::vector<QueryRow>& rows);
  void run_known(int64_t layer_idx, const std::vector<QueryRow>& rows);

  // decode_attention_probe.cpp
  void draw_probes(int64_t layer_idx, const std::vector<QueryRow>& rows);
  void scan_probe(const Probe& probe, int64_t first, int64_t last, int worker, PartialMass* masses);

  // decode_attention_warm.cpp
  Remembered& remembered_of(int64_t layer_idx, int row, int unit);
  Forecast forecast(int64_t layer_idx, const QueryRow& row, int row_of_step, int unit);

  const AttentionShape shape_;
  const KernelTable& kernels_;
  WorkerPool& pool_;
  PolicyFunctions policy_;
  bool per_query_head_ = false;
  Trace trace_;
  TraceRing* task_rings_ = nullptr;  // of each worker, in this call; null while nothing is recorded

  // Scratch only grows: a step in steady state allocates nothing.
  AttendOptions options_;
  std::vector<float> queries_;    // [rows, num_qo_heads, head_dim]
  bool queries_loaded_ = false;   // those of this call
  std::vector<int> sparse_rows_;  // those of the last attend() that the policy had a say in
  size_t num_selections_ = 0;
  std::vector<std::vector<int32_t>> selection_;
  std::vector<Published> published_;  // of each row of the step and unit; kept from layer to layer
  int first_row_ = 0;
  std::unique_ptr<Unit[]> units_;
  size_t units_capacity_ = 0;
  std::vector<Lane> lanes_;
  StagedLanes staged_;
  int64_t piece_tokens_ = 0;  // of a lane, about
  int64_t max_ranges_ = 0;    // of a unit
  int64_t known_splits_ = 0;  // in run_known(), of each lane
  std::vector<float> parts_;  // [parts, unit_group, head_dim + 2]: acc, then max, then sum
  ScanSlot slots_[3];
  std::vector<std::vector<float>> dense_scores_;  // of each worker: [units, group, kScoreTile]
  QualityProbe probe_;
  std::vector<Probe> probes_;                        // drawn, and not yet compared
  std::vector<std::vector<Remembered>> remembered_;  // [layer][row of the step, unit]
  std::vector<Forecast> forecasts_;
  std::vector<WorkerProfile> profiles_;  // of each worker; empty while nobody asks
  std::atomic<bool> failed_{false};
  std::atomic<int64_t> chosen_units_{0}, chosen_tokens_{0};  // since take_chosen()
  std::string failure_;
};

}  // namespace offload
