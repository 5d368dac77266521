// The Python face of decode attention. The GIL is released for as long as the pool works.
#include <chrono>
#include <cstddef>
#include <stdexcept>

#include "bindings/bindings.h"
#include "attention/decode_attention.h"
#include "kernels/dispatch.h"
#include "attention/step_rows.h"

namespace offload {
namespace {

constexpr const char* kPhaseNames[kNumPhases] = {"predict", "score", "select", "attend", "update"};

std::vector<QueryRow> query_rows(const AttentionShape& shape, int64_t layer_idx, int64_t query,
                                 int64_t query_stride_bytes, int64_t output, int64_t output_stride_bytes, int64_t lse,
                                 const StepRows& step) {
  std::vector<QueryRow> rows;
  step.of_layer(layer_idx, rows);
  for (int64_t r = 0; r < step.num_rows; ++r) {
    QueryRow& row = rows[static_cast<size_t>(r)];
    row.query = pointer<const char>(query) + r * query_stride_bytes;
    row.output = pointer<char>(output) + r * output_stride_bytes;
    row.lse = lse != 0 ? pointer<float>(lse) + r * shape.num_qo_heads : nullptr;
  }
  return rows;
}

// Owns the attention of one model; keeps the pool alive through Python (py::keep_alive).
class PyDecodeAttention {
 public:
  PyDecodeAttention(WorkerPool& pool, const std::string& isa, int num_qo_heads, int num_kv_heads, int head_dim,
                    int page_shift, int dtype, float sm_scale)
      : shape_{num_qo_heads, num_kv_heads, head_dim, page_shift, static_cast<DType>(dtype), sm_scale},
        attention_(shape_, kernels_for(isa), pool) {}

  // `functions`: addresses of prepare, propose, select, observe, append, or 0. `roles`: Role of each [layer, unit], or
  // empty.
  void set_policy(int64_t budget_tokens, int64_t sink_tokens, int64_t recent_tokens, bool per_query_head,
                  bool scans_keys, const std::vector<int64_t>& functions, const std::vector<double>& parameters,
                  int64_t num_arrays, const std::vector<uint8_t>& roles, bool shares_selection) {
    PolicyFunctions policy;
    policy.budget_tokens = budget_tokens;
    policy.sink_tokens = sink_tokens;
    policy.recent_tokens = recent_tokens;
    policy.per_query_head = per_query_head;
    policy.scans_keys = scans_keys;
    policy.roles = roles;
    policy.shares_selection = shares_selection;
    policy.parameters = parameters;
    policy.num_arrays = num_arrays;
    policy.prepare = pointer<void(PolicyContext*)>(functions.at(0));
    policy.propose = pointer<int64_t(PolicyContext*)>(functions.at(1));
    policy.select = pointer<int64_t(PolicyContext*)>(functions.at(2));
    policy.observe = pointer<void(PolicyContext*)>(functions.at(3));
    policy.append = pointer<void(PolicyContext*)>(functions.at(4));
    attention_.set_policy(policy);
    per_query_head_ = per_query_head;
    attention_.set_units_per_row(per_query_head);
  }

  void attend(int64_t layer_idx, int64_t query, int64_t query_stride_bytes, int64_t output, int64_t output_stride_bytes,
              int64_t lse, const Int64s& page_tables, const Int64s& table_strides, const Int64s& kv_lens,
              const Int64s& arrays, const Int64s& text_marks, bool sparse, int first_row, bool prepares) {
    const auto rows = query_rows(shape_, layer_idx, query, query_stride_bytes, output, output_stride_bytes, lse,
                                 step_rows(page_tables, table_strides, kv_lens, arrays, text_marks));
    std::string failure;
    {
      const py::gil_scoped_release release;
      failure = attention_.attend(layer_idx, rows, sparse, first_row, prepares);
    }
    if (!failure.empty()) throw std::runtime_error(failure);
  }

  // One row, for what the policy learns from it; what is attended is dropped. With `window_on_device` as of a step
  // whose sinks and recent tokens a GPU attends to; `elsewhere`: 1 for KV heads that are not attended here, or empty.
  void learn(int64_t layer_idx, int64_t query, const Int64s& page_tables, const Int64s& table_strides,
             const Int64s& kv_lens, const Int64s& arrays, const Int64s& text_marks, bool window_on_device,
             int64_t sink_tokens, int64_t recent_tokens, const std::vector<uint8_t>& elsewhere) {
    std::vector<float> output(static_cast<size_t>(shape_.num_qo_heads) * static_cast<size_t>(shape_.head_dim));
    auto rows = query_rows(shape_, layer_idx, query, 0, 0, 0, 0,
                           step_rows(page_tables, table_strides, kv_lens, arrays, text_marks));
    rows[0].output = output.data();
    AttendOptions options;
    options.window_on_device = window_on_device;
    options.sink_tokens = sink_tokens;
    options.recent_tokens = recent_tokens;
    options.elsewhere = elsewhere.empty() ? nullptr : elsewhere.data();
    options.float_output = true;
    std::string failure;
    {
      const py::gil_scoped_release release;
      failure = attention_.attend(layer_idx, rows, true, 0, true, options);
    }
    if (!failure.empty()) throw std::runtime_error(failure);
  }

  void prepare(int64_t layer_idx, const Int64s& page_tables, const Int64s& table_strides, const Int64s& kv_lens,
               const Int64s& arrays, const Int64s& text_marks) {
    const auto rows = query_rows(shape_, layer_idx, 0, 0, 0, 0, 0,
                                 step_rows(page_tables, table_strides, kv_lens, arrays, text_marks));
    const py::gil_scoped_release release;
    attention_.prepare(layer_idx, rows);
  }

  // One row, an explicit CSR selection. `weights`: address of f32 [nnz * group] or 0.
  void attend_csr(int64_t query, int64_t output, int64_t lse, int64_t pages, int64_t kv_len, const Int64s& indptr,
                  const Int32s& indices, int64_t weights) {
    std::vector<QueryRow> rows(1);
    rows[0].pages = pointer<const int64_t>(pages);
    rows[0].kv_len = kv_len;
    rows[0].query = pointer<const void>(query);
    rows[0].output = pointer<void>(output);
    rows[0].lse = pointer<float>(lse);
    rows[0].indptr = indptr.data();
    rows[0].indices = indices.data();
    rows[0].weights = pointer<float>(weights);
    std::string failure;
    {
      const py::gil_scoped_release release;
      attention_.set_units_per_row(indptr.size() - 1 == shape_.num_qo_heads && shape_.group_size() > 1);
      failure = attention_.attend(0, rows, true);
      attention_.set_units_per_row(per_query_head_);
    }
    if (!failure.empty()) throw std::runtime_error(failure);
  }

  void record(bool on) { attention_.trace().record(on); }

  // (kind, layer, request, start_ns, end_ns, worker, row, unit) of each event, and how many were lost.
  py::tuple drain() {
    py::list events;
    for (const TraceEvent& e : attention_.trace().drain()) {
      const char* kind = kTraceKindNames[static_cast<int>(e.kind)];
      events.append(py::make_tuple(kind, e.layer_idx, e.request, e.start_ns, e.end_ns, e.worker, e.row, e.unit));
    }
    return py::make_tuple(events, attention_.trace().take_num_lost());
  }

  DecodeAttention& attention() { return attention_; }

  // Attends layers one after the other as DecoderLayers::run does, without its linear layers: for benches. `queries`:
  // address of each layer's, contiguous. Returns (seconds, profile) of each layer.
  py::list time_layers(const Int64s& queries, int64_t output, const Int64s& page_tables, const Int64s& table_strides,
                       const Int64s& kv_lens, const Int64s& arrays, const Int64s& text_marks,
                       const std::vector<bool>& sparse_layers) {
    using Clock = std::chrono::steady_clock;
    const StepRows step = step_rows(page_tables, table_strides, kv_lens, arrays, text_marks);
    const int64_t row_bytes = shape_.num_qo_heads * shape_.row_bytes();
    const int64_t* queries_of = queries.data();
    const int64_t num_layers = queries.size();
    std::vector<double> seconds(static_cast<size_t>(num_layers));
    std::vector<WorkerProfile> profiles(seconds.size());
    std::string failure;
    {
      const py::gil_scoped_release release;
      std::vector<QueryRow> rows;
      for (int64_t layer_idx = 0; layer_idx < num_layers && failure.empty(); ++layer_idx) {
        const auto i = static_cast<size_t>(layer_idx);
        attention_.start_profile();
        const Clock::time_point start = Clock::now();
        step.of_layer(layer_idx, rows);
        for (int64_t r = 0; r < step.num_rows; ++r) {
          rows[static_cast<size_t>(r)].query = pointer<const char>(queries_of[layer_idx]) + r * row_bytes;
          rows[static_cast<size_t>(r)].output = pointer<char>(output) + r * row_bytes;
        }
        failure = attention_.attend(layer_idx, rows, sparse_layers[i], 0, true);
        seconds[i] = std::chrono::duration<double>(Clock::now() - start).count();
        profiles[i] = attention_.profile();
      }
    }
    if (!failure.empty()) throw std::runtime_error(failure);
    py::list result;
    for (size_t i = 0; i < seconds.size(); ++i) result.append(py::make_tuple(seconds[i], as_dict(profiles[i])));
    return result;
  }

  void start_profile() { attention_.start_profile(); }

  py::dict profile() const { return as_dict(attention_.profile()); }

  std::vector<std::vector<int32_t>> last_selection() const { return attention_.last_selection(); }

 private:
  static py::dict as_dict(const WorkerProfile& sum) {
    py::dict seconds;
    for (int i = 0; i < kNumPhases; ++i) seconds[kPhaseNames[i]] = sum.seconds[i];
    py::dict result;
    result["seconds"] = seconds;
    result["bytes"] = sum.bytes;
    result["scored_tokens"] = sum.scored_tokens;
    result["attended_tokens"] = sum.attended_tokens;
    return result;
  }

  AttentionShape shape_;
  DecodeAttention attention_;
  bool per_query_head_ = false;
};

py::dict policy_context_offsets() {
  py::dict offsets;
#define FIELD(name) offsets[#name] = offsetof(PolicyContext, name)
  FIELD(layer_idx);
  FIELD(unit);
  FIELD(kv_head);
  FIELD(group_size);
  FIELD(head_dim);
  FIELD(kv_len);
  FIELD(first);
  FIELD(last);
  FIELD(budget_tokens);
  FIELD(num_candidates);
  FIELD(sm_scale);
  FIELD(parameters);
  FIELD(query);
  FIELD(importance);
  FIELD(indices);
  FIELD(num_indices);
  FIELD(weights);
  FIELD(candidates);
  FIELD(output);
  FIELD(lse);
  FIELD(text_marks);
  FIELD(bytes_touched);
  FIELD(arrays);
  FIELD(score_tokens);
  FIELD(top_k);
  FIELD(score_rows);
  FIELD(score_int8);
  FIELD(load_keys);
  FIELD(store_rows);
  FIELD(filter_at_least);
#undef FIELD
  return offsets;
}

}  // namespace

DecodeAttention& attention_of(const py::object& attention) { return attention.cast<PyDecodeAttention&>().attention(); }

void bind_attention(py::module_& m) {
  m.def("policy_context_offsets", &policy_context_offsets);
  py::class_<PyDecodeAttention>(m, "DecodeAttention")
      .def(py::init<WorkerPool&, const std::string&, int, int, int, int, int, float>(), py::keep_alive<1, 2>())
      .def("set_policy", &PyDecodeAttention::set_policy)
      .def("attend", &PyDecodeAttention::attend)
      .def("learn", &PyDecodeAttention::learn)
      .def("prepare", &PyDecodeAttention::prepare)
      .def("time_layers", &PyDecodeAttention::time_layers)
      .def("attend_csr", &PyDecodeAttention::attend_csr)
      .def("start_profile", &PyDecodeAttention::start_profile)
      .def("profile", &PyDecodeAttention::profile)
      .def("record", &PyDecodeAttention::record)
      .def("drain", &PyDecodeAttention::drain)
      .def("last_selection", &PyDecodeAttention::last_selection);
}

}  // namespace offload
