// The CPU's share of a GPU's decode step, request by request: K/V out of the mailbox into the pages, attention to what
// the GPU does not hold, the policy's learning from it. On the calling thread and the pool; coprocessor.h has the
// thread that is driven by flags.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "attention/decode_attention.h"
#include "coprocessor/hot_rows.h"
#include "operators/routed_linear.h"
#include "pool/trace.h"

namespace offload {

inline constexpr int64_t kFlagStride = 16;  // int32 per flag: one cache line

// Memory that the GPU and the CPU share. The layout is stated in cpu_ops/mailbox.py.
struct Mailbox {
  const char* query;
  const char* kv;
  float* output;
  float* lse;
  int32_t* requests;
  int32_t* replies;
  int64_t max_rows;
  // What a GPU's heads published, or candidates that it lists: lists of `selection_tokens` int32 and their lengths, of
  // each row and of each KV head, or one for all of them. Null where no GPU does.
  const int32_t* selection = nullptr;
  const int32_t* counts = nullptr;
  int64_t selection_units = 0;
  int64_t selection_tokens = 0;
  // Of heads with hot rows, for even and odd layers by themselves: queries that were predicted; rows to fetch, at most
  // `fetch_tokens` of each row and KV head; and how many these are and how many are hot, two int32. Null where there
  // are no such heads.
  const char* predicted = nullptr;
  int32_t* fetches = nullptr;
  int32_t* hot_counts = nullptr;
  int64_t fetch_tokens = 0;
  // Beside these, of each row and KV head: how many tokens of each cluster are neither hot nor in the window, and which
  // cluster has grown, or -1: int32 [clusters + 1]; and that one's means, [2, head_dim]. Null: nothing is estimated.
  int32_t* rest_counts = nullptr;
  float* rest_means = nullptr;
  // Of layers whose experts are on the CPU: what they read, and their sum, [max_rows, hidden_size]; which the GPU's
  // router chose, and their weights, [max_rows, per_token]. An expert that is none is not run. Null: there are none.
  const char* normed = nullptr;
  char* summed = nullptr;
  const int64_t* experts = nullptr;
  const float* weights = nullptr;
};

// What the GPU does of each [layer, KV head], in whole layers that are asked for or not.
struct DeviceHeads {
  std::vector<uint8_t> attended;     // 1: the GPU attends to all of it
  std::vector<uint8_t> published;    // 1: and publishes a selection, which is in the mailbox before the next request
  std::vector<uint8_t> listed = {};  // 1: lists candidates for it, which are in the mailbox before the layer's request
  // 1: attends to rows that the CPU chooses a layer ahead, by a predicted query: the request comes before the layer's
  // keys and values, and the reply is what to fetch. The CPU attends to no head of such a layer.
  std::vector<uint8_t> hot = {};
};

// Rows [first_row, first_row + num_rows) of the mailbox in one layer.
struct Request {
  int64_t layer_idx;  // of experts, where they are in StepPlan::experts: there may be layers that do not attend
  int64_t first_row;
  int64_t num_rows;
  bool of_experts = false;  // else of attention
};

// One sequence in one step.
struct StepRow {
  int64_t slot;  // its row of the mailbox
  const int64_t* page_table;
  int64_t table_stride;
  int64_t kv_len;             // the step's own token included
  void* const* arrays;        // as QueryRow's
  const uint8_t* text_marks;  // or null
};

struct ServedStep {
  std::vector<StepRow> rows;  // by ascending slot
  // Where queries are kept for the policy to build from: [num_layers, rows, num_qo_heads * head_dim], or null. The row
  // of rows[i] is query_rows[i].
  char* queries = nullptr;
  std::vector<int64_t> query_rows;
};

// What every step of a mailbox has in common.
struct StepPlan {
  std::vector<Request> requests;
  std::vector<uint8_t> sparse_layers;  // of each layer: the policy has a say in it
  int64_t sink_tokens;                 // of the window on the device
  int64_t recent_tokens;
  DeviceHeads device_heads = {};
  HotRows* hot_rows = nullptr;
  std::vector<const RoutedMlp*> experts = {};  // at the layer_idx of their requests
};

class StepServer {
 public:
  StepServer(DecodeAttention& attention, const Mailbox& mailbox, StepPlan plan);

  const std::vector<Request>& requests() const { return plan_.requests; }
  Trace& trace() { return trace_; }  // the attention's

  // A step's requests are served in their order, each as: prepare, warm_up, store, attend, update, remember. update and
  // the next request's prepare may be done at a time. Those of experts: run_experts alone, between remember of the
  // request before and warm_up of the next.
  void begin(const ServedStep& step);
  bool is_of_experts(int request) const { return plan_.requests[static_cast<size_t>(request)].of_experts; }
  // The first request of attention that is not before `request`; the number of requests if there is none.
  int attention_from(int request) const;
  // Writes the experts' sum of the request's rows.
  void run_experts(int request);
  void prepare(int request);
  // K/V of the request's rows, of all layers up to its own.
  void store(int request);
  // Writes output and lse; returns what was wrong, or an empty string.
  std::string attend(int request);
  void update(int request);
  void update_and_prepare_next(int request);
  // Reads ahead for the request, until *stop is not 0; remember() notes what for. Optional.
  void remember(int request);
  void warm_up(int request, int32_t* stop);
  // What is wrong with the K/V of the layers up to the last request's, or an empty string. A cache must not keep
  // numbers that are not finite, and not all show in what is attended: a key of -inf may have no weight. Optional, for
  // a time in which nobody waits: end() makes up for it.
  std::string check_asked();
  // Compares what was drawn of the step's selections with exact attention; also for a time in which nobody waits.
  void run_probes() { attention_.run_probes(); }
  // Stores the K/V of the layers that are left; returns what was wrong with any of them or with what the GPU published,
  // or an empty string.
  std::string end();

 private:
  int64_t layer_of(int request) const { return plan_.requests[static_cast<size_t>(request)].layer_idx; }
  // Whether it comes a layer ahead.
  bool is_ahead(int request) const { return is_ahead_[static_cast<size_t>(request)] != 0; }
  void send_hot_rows(int64_t layer_idx);
  void send_rest(const StepRow& of_step, int64_t at, const int32_t* hot, const EstimateArrays& rest) const;
  bool is_sparse(int request) const { return plan_.sparse_layers[static_cast<size_t>(layer_of(request))] != 0; }
  // Fills `rows` and returns which row of the step is the first.
  size_t rows_of(int request, std::vector<QueryRow>& rows) const;
  void store_rows(size_t first, size_t last, int64_t end_layer);
  void store_row(size_t row, int64_t end_layer);
  void keep_queries(int request);
  std::string take_over(size_t first, size_t last, int64_t end_layer);
  // The first K/V of layers [first_layer, end_layer) that is not finite, in words; or an empty string.
  std::string find_non_finite(size_t first, size_t last, int64_t first_layer, int64_t end_layer) const;
  // Those of a layer: [num_kv_heads], or null.
  const uint8_t* of_layer(const std::vector<uint8_t>& heads, int64_t layer_idx) const;

  DecodeAttention& attention_;
  Trace& trace_;
  const Mailbox mailbox_;
  const StepPlan plan_;
  AttendOptions options_;

  const ServedStep* step_ = nullptr;
  std::vector<int64_t> num_stored_;      // layers, of each row
  std::vector<int64_t> num_taken_over_;  // likewise, of what the GPU published
  int64_t num_checked_ = 0;              // layers, of all rows
  std::vector<QueryRow> rows_;           // of the request that is attended
  std::vector<QueryRow> prepared_rows_;
  size_t first_ = 0;                      // rows_[0] is step_->rows[first_]
  std::vector<uint8_t> is_ahead_;         // of each request
  mutable std::vector<float> no_output_;  // of what only chooses
  std::vector<char> normed_;              // rows that are in use, their experts, and the sums of these
  std::vector<int64_t> experts_;
  std::vector<float> weights_;
  std::vector<char> summed_;
};

}  // namespace offload
