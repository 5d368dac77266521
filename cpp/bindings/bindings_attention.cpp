// The Python face of decode attention.
#include <chrono>
#include <cstddef>
#include <memory>
#include <tuple>
#include <utility>

#include "bindings/bindings.h"
#include "attention/decode_attention.h"
#include "kernels/dispatch.h"
#include "operators/decoder_layers.h"

namespace offload {
namespace {

constexpr const char* kPhaseNames[kNumPhases] = {"predict", "score", "select", "attend", "update"};

// Empty arrays are null.
KeptRows kept_rows(const Int64s& page_tables, const Int64s& table_strides, const Int64s& kv_lens, const Int64s& arrays,
                   const Int64s& text_marks, const Int64s& starts, const Int64s& budgets) {
  const auto data = [](const Int64s& array) { return array.size() == 0 ? nullptr : array.data(); };
  return {{kv_lens.size(), data(page_tables), data(table_strides), data(kv_lens), data(arrays), data(text_marks),
           data(starts), data(budgets)},
          {page_tables, table_strides, kv_lens, arrays, text_marks, starts, budgets}};
}

// (num_qo_heads, num_kv_heads, head_dim, sm_scale, softcap, window, address of sinks or 0) of a layer.
using Heads = std::tuple<int, int, int, float, float, int64_t, int64_t>;

std::unique_ptr<DecodeAttention> make_attention(WorkerPool& pool, const std::string& isa,
                                                const std::vector<Heads>& layers, int page_shift, int dtype, int format,
                                                bool keys_only) {
  std::vector<AttentionShape> shapes;
  for (const auto& [num_qo_heads, num_kv_heads, head_dim, sm_scale, cap, window, sinks] : layers) {
    shapes.push_back({num_qo_heads, num_kv_heads, head_dim, page_shift, static_cast<DType>(dtype), sm_scale,
                      static_cast<DType>(format), cap, window, pointer<const float>(sinks), keys_only});
  }
  return std::make_unique<DecodeAttention>(std::move(shapes), kernels_for(isa), pool);
}

// Of a member: whether it scans keys, the addresses of prepare, propose, select, observe, append, or 0, its numbers,
// how many arrays it has, and of how many steps ahead it observes one.
using Member = std::tuple<bool, std::vector<int64_t>, std::vector<double>, int64_t, int64_t>;

PolicyMember member_from(const Member& member, int64_t first_array) {
  const auto& [scans_keys, functions, parameters, num_arrays, observes_every] = member;
  return {.scans_keys = scans_keys,
          .parameters = parameters,
          .first_array = first_array,
          .prepare = pointer<void(PolicyContext*)>(functions.at(0)),
          .propose = pointer<int64_t(PolicyContext*)>(functions.at(1)),
          .select = pointer<int64_t(PolicyContext*)>(functions.at(2)),
          .observe = pointer<void(PolicyContext*)>(functions.at(3)),
          .observes_every = observes_every,
          .append = pointer<void(PolicyContext*)>(functions.at(4))};
}

// `roles`, `member_of`, `number_of`: of each [layer, unit], or empty.
void set_policy(DecodeAttention& attention, int64_t budget_tokens, int64_t dense_tokens, int64_t sink_tokens,
                int64_t recent_tokens, double top_p, bool per_query_head, const std::vector<Member>& members,
                const std::vector<uint8_t>& roles, bool shares_selection, const std::vector<uint8_t>& member_of,
                const std::vector<int32_t>& number_of, int64_t estimate_clusters) {
  PolicyFunctions policy;
  static_cast<PolicyMember&>(policy) = member_from(members.at(0), 0);
  for (const Member& member : members) {
    if (&member != &members[0]) policy.others.push_back(member_from(member, policy.num_arrays));
    policy.num_arrays += std::get<3>(member);
  }
  policy.budget_tokens = budget_tokens;
  policy.dense_tokens = dense_tokens;
  policy.sink_tokens = sink_tokens;
  policy.recent_tokens = recent_tokens;
  policy.top_p = top_p;
  policy.per_query_head = per_query_head;
  policy.shares_selection = shares_selection;
  policy.roles = roles;
  policy.member_of = member_of;
  policy.number_of = number_of;
  policy.estimate_clusters = estimate_clusters;
  if (estimate_clusters > 0) policy.num_arrays += kNumEstimateArrays;
  attention.set_policy(policy);
}

// `num_rows` rows of a step from `first_row` on; query, output and lse are those of row 0.
void attend_with(DecodeAttention& attention, int64_t layer_idx, int64_t query, int64_t query_stride_bytes,
                 int64_t output, int64_t output_stride_bytes, int64_t lse, const KeptRows& step, int first_row,
                 int num_rows, bool sparse, bool prepares, const AttendOptions& options) {
  std::vector<QueryRow> rows;
  const AttentionShape& shape = attention.shape(layer_idx);
  step.rows.of_layer(layer_idx, shape.num_kv_heads, rows, first_row, num_rows);
  for (int64_t i = 0; i < num_rows; ++i) {
    QueryRow& row = rows[static_cast<size_t>(i)];
    row.query = pointer<const char>(query) + (first_row + i) * query_stride_bytes;
    row.output = pointer<char>(output) + (first_row + i) * output_stride_bytes;
    if (lse != 0) row.lse = pointer<float>(lse) + (first_row + i) * shape.num_qo_heads;
  }
  check_numbers(attention.attend(layer_idx, rows, sparse, first_row, prepares, options));
}

void attend(DecodeAttention& attention, int64_t layer_idx, int64_t query, int64_t query_stride_bytes, int64_t output,
            int64_t output_stride_bytes, int64_t lse, const KeptRows& step, int first_row, int num_rows, bool sparse,
            bool prepares) {
  attend_with(attention, layer_idx, query, query_stride_bytes, output, output_stride_bytes, lse, step, first_row,
              num_rows, sparse, prepares, {});
}

// One row, for what the policy learns from it; what is attended is dropped. With `window_on_device` as of a step whose
// sinks and recent tokens a GPU attends to; `chooses_only`: and to what was chosen, too; `elsewhere`: 1 for KV heads
// that are not attended here, or empty.
void learn(DecodeAttention& attention, int64_t layer_idx, int64_t query, const KeptRows& step, bool window_on_device,
           int64_t sink_tokens, int64_t recent_tokens, bool chooses_only, const std::vector<uint8_t>& elsewhere) {
  const AttentionShape& shape = attention.shape(layer_idx);
  std::vector<float> output(static_cast<size_t>(shape.num_qo_heads) * static_cast<size_t>(shape.head_dim));
  std::vector<QueryRow> rows;
  step.rows.of_layer(layer_idx, shape.num_kv_heads, rows);
  rows[0].query = pointer<const void>(query);
  rows[0].output = output.data();
  const AttendOptions options{.window_on_device = window_on_device,
                              .sink_tokens = sink_tokens,
                              .recent_tokens = recent_tokens,
                              .elsewhere = elsewhere.empty() ? nullptr : elsewhere.data(),
                              .float_output = true,
                              .chooses_only = chooses_only,
                              .is_decoded = false};
  check_numbers(attention.attend(layer_idx, rows, true, 0, true, options));
}

// (count, sum) of each compared [layer, KV head]; those after the last are missing.
std::vector<std::pair<int64_t, double>> probed(DecodeAttention& attention) {
  std::vector<std::pair<int64_t, double>> result;
  for (const MassKept& found : attention.probe().found()) result.emplace_back(found.count, found.sum);
  return result;
}

void prepare(DecodeAttention& attention, int64_t layer_idx, const KeptRows& step) {
  std::vector<QueryRow> rows;
  step.rows.of_layer(layer_idx, attention.shape(layer_idx).num_kv_heads, rows);
  attention.prepare(layer_idx, rows);
  check_numbers(attention.take_failure());
}

// One row, an explicit CSR selection. `weights`: address of f32 [nnz * group] or 0. Returns the seconds it took.
double attend_csr(DecodeAttention& attention, int64_t query, int64_t output, int64_t lse, int64_t pages, int64_t kv_len,
                  const Int64s& indptr, const Int32s& indices, int64_t weights) {
  const AttentionShape& shape = attention.shape();
  QueryRow row{};
  row.pages = pointer<const int64_t>(pages);
  row.kv_len = kv_len;
  row.query = pointer<const void>(query);
  row.output = pointer<void>(output);
  row.lse = pointer<float>(lse);
  row.indptr = indptr.data();
  row.indices = indices.data();
  row.weights = pointer<float>(weights);
  attention.set_units_per_row(indptr.size() - 1 == shape.num_qo_heads && shape.group_size() > 1);
  using Clock = std::chrono::steady_clock;
  const Clock::time_point start = Clock::now();
  const std::string failure = attention.attend(0, {row}, true);
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  attention.set_units_per_row(attention.policy().per_query_head);
  check_numbers(failure);
  return seconds;
}

// (kind, layer, request, start_ns, end_ns, worker, row, unit) of each event, and how many were lost.
py::tuple drain(DecodeAttention& attention) {
  py::list events;
  for (const TraceEvent& e : attention.trace().drain()) {
    const char* kind = kTraceKindNames[static_cast<int>(e.kind)];
    events.append(py::make_tuple(kind, e.layer_idx, e.request, e.start_ns, e.end_ns, e.worker, e.row, e.unit));
  }
  return py::make_tuple(events, attention.trace().take_num_lost());
}

void append(const DecodeAttention& attention, int64_t layer_idx, const KeptRows& step, int64_t qkv, int64_t cos,
            int64_t sin, int64_t rotary_dim, int64_t q_norm, int64_t k_norm, float norm_eps) {
  rope_append(attention, layer_idx, step.rows, pointer<char>(qkv),
              {pointer<const char>(cos), pointer<const char>(sin), rotary_dim},
              {pointer<const void>(q_norm), pointer<const void>(k_norm), norm_eps});
}

py::dict as_dict(const WorkerProfile& sum) {
  py::dict seconds;
  for (int i = 0; i < kNumPhases; ++i) seconds[kPhaseNames[i]] = sum.seconds[i];
  py::dict result;
  result["seconds"] = seconds;
  result["bytes"] = sum.bytes;
  result["scored_tokens"] = sum.scored_tokens;
  result["attended_tokens"] = sum.attended_tokens;
  return result;
}

// Attends layers one after the other as DecoderLayers::run does, without its linear layers: for benches. `queries`:
// address of each layer's, contiguous. With `prepares` what comes before the query counts, too; with `chooses_only`
// nothing is attended, as a layer ahead. Returns (seconds, profile) of each layer.
py::list time_layers(DecodeAttention& attention, const std::vector<int64_t>& queries, int64_t output,
                     const KeptRows& step, const std::vector<bool>& sparse_layers, bool prepares, bool chooses_only) {
  using Clock = std::chrono::steady_clock;
  const int64_t row_bytes = attention.shape().num_qo_heads * attention.shape().head_bytes();
  std::vector<std::pair<double, WorkerProfile>> measured;
  {
    const py::gil_scoped_release release;
    for (size_t layer_idx = 0; layer_idx < queries.size(); ++layer_idx) {
      if (!prepares && sparse_layers[layer_idx]) prepare(attention, static_cast<int64_t>(layer_idx), step);
      attention.start_profile();
      const Clock::time_point start = Clock::now();
      attend_with(attention, static_cast<int64_t>(layer_idx), queries[layer_idx], row_bytes, output, row_bytes, 0, step,
                  0, static_cast<int>(step.rows.num_rows), sparse_layers[layer_idx], prepares,
                  {.chooses_only = chooses_only, .max_chosen = step.rows.kv_lens[0]});
      const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
      measured.emplace_back(seconds, attention.profile());
    }
  }
  py::list result;
  for (const auto& [seconds, profile] : measured) result.append(py::make_tuple(seconds, as_dict(profile)));
  return result;
}

py::dict policy_context_offsets() {
#define FIELD(name)                      \
  {                                      \
    #name, offsetof(PolicyContext, name) \
  }
  const std::pair<const char*, size_t> offsets[] = {
      FIELD(layer_idx),       FIELD(unit),         FIELD(kv_head),
      FIELD(group_size),      FIELD(head_dim),     FIELD(kv_len),
      FIELD(first),           FIELD(last),         FIELD(budget_tokens),
      FIELD(num_candidates),  FIELD(sm_scale),     FIELD(parameters),
      FIELD(query),           FIELD(importance),   FIELD(indices),
      FIELD(num_indices),     FIELD(weights),      FIELD(candidates),
      FIELD(output),          FIELD(lse),          FIELD(text_marks),
      FIELD(bytes_touched),   FIELD(may_defer),    FIELD(ahead),
      FIELD(resumes),         FIELD(arrays),       FIELD(score_tokens),
      FIELD(top_k),           FIELD(score_rows),   FIELD(rank_rows),
      FIELD(top_codes),       FIELD(load_keys),    FIELD(store_rows),
      FIELD(filter_at_least), FIELD(block_scores), FIELD(block_starts),
      FIELD(num_blocks),      FIELD(error),        FIELD(prepared_together)};
#undef FIELD
  py::dict result;
  for (const auto& [name, offset] : offsets) result[name] = offset;
  return result;
}

}  // namespace

void bind_attention(py::module_& m) {
  m.def("policy_context_offsets", &policy_context_offsets);
  m.attr("ERROR_BYTES") = kErrorBytes;
  py::class_<KeptRows>(m, "StepRows").def(py::init(&kept_rows));
  py::class_<DecodeAttention>(m, "DecodeAttention")
      .def(py::init(&make_attention), py::keep_alive<1, 2>())
      .def("set_policy", &set_policy)
      .def("attend", &attend, WithoutGil())
      .def("rope_append", &append)
      .def("learn", &learn, WithoutGil())
      .def("prepare", &prepare, WithoutGil())
      .def("time_layers", &time_layers)
      .def("hold_top_p", &DecodeAttention::hold_top_p)
      .def("take_chosen", &DecodeAttention::take_chosen)
      .def("attend_csr", &attend_csr, WithoutGil())
      .def("start_probe",
           [](DecodeAttention& attention, double share, uint64_t seed) { attention.probe().start(share, seed); })
      .def("probed", &probed)
      .def("num_probed", [](DecodeAttention& attention) { return attention.probe().num_found(); })
      .def("start_profile", &DecodeAttention::start_profile)
      .def("profile", [](const DecodeAttention& attention) { return as_dict(attention.profile()); })
      .def("record", [](DecodeAttention& attention, bool on) { attention.trace().record(on); })
      .def("drain", &drain)
      .def("last_selection", &DecodeAttention::last_selection);
}

}  // namespace offload
