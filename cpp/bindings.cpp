// The Python face of the kernels. cpu_ops/native.py checks shapes and dtypes and passes addresses; nothing here
// touches torch. The GIL is released for as long as the pool works.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstring>
#include <stdexcept>

#include "bandwidth.h"
#include "clustering.h"
#include "decode_attention.h"
#include "dispatch.h"
#include "linear.h"

namespace py = pybind11;

namespace offload {
namespace {

template <class T>
T* pointer(int64_t address) {
  return reinterpret_cast<T*>(address);
}

constexpr const char* kPhaseNames[kNumPhases] = {"predict", "score", "select", "attend", "update"};

using Int64s = py::array_t<int64_t, py::array::c_style>;
using Int32s = py::array_t<int32_t, py::array::c_style>;

std::vector<QueryRow> query_rows(const AttentionShape& shape, int64_t layer_idx, int64_t query,
                                 int64_t query_stride_bytes, int64_t output, int64_t output_stride_bytes, int64_t lse,
                                 const Int64s& page_tables, const Int64s& table_strides, const Int64s& kv_lens,
                                 const Int64s& arrays, const Int64s& text_marks) {
  const auto n = static_cast<size_t>(kv_lens.size());
  std::vector<QueryRow> rows(n);
  for (size_t r = 0; r < n; ++r) {
    const auto i = static_cast<py::ssize_t>(r);
    rows[r].pages = pointer<const int64_t>(page_tables.at(i)) + layer_idx * table_strides.at(i);
    rows[r].kv_len = kv_lens.at(i);
    rows[r].query = pointer<const char>(query) + i * query_stride_bytes;
    rows[r].output = pointer<char>(output) + i * output_stride_bytes;
    rows[r].lse = lse != 0 ? pointer<float>(lse) + i * shape.num_qo_heads : nullptr;
    if (arrays.size() != 0 && arrays.at(i) != 0) {
      rows[r].arrays = pointer<void* const>(arrays.at(i)) + layer_idx * kMaxPolicyArrays;
    }
    if (text_marks.size() != 0) rows[r].text_marks = pointer<const uint8_t>(text_marks.at(i));
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
                  const std::vector<uint8_t>& roles, bool shares_selection) {
    PolicyFunctions policy;
    policy.budget_tokens = budget_tokens;
    policy.sink_tokens = sink_tokens;
    policy.recent_tokens = recent_tokens;
    policy.per_query_head = per_query_head;
    policy.scans_keys = scans_keys;
    policy.roles = roles;
    policy.shares_selection = shares_selection;
    for (size_t i = 0; i < parameters.size() && i < kMaxPolicyParameters; ++i) policy.parameters[i] = parameters[i];
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
                                 page_tables, table_strides, kv_lens, arrays, text_marks);
    std::string failure;
    {
      const py::gil_scoped_release release;
      failure = attention_.attend(layer_idx, rows, sparse, first_row, prepares);
    }
    if (!failure.empty()) throw std::runtime_error(failure);
  }

  void prepare(int64_t layer_idx, const Int64s& page_tables, const Int64s& table_strides, const Int64s& kv_lens,
               const Int64s& arrays, const Int64s& text_marks) {
    const auto rows =
        query_rows(shape_, layer_idx, 0, 0, 0, 0, 0, page_tables, table_strides, kv_lens, arrays, text_marks);
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

  void start_profile() { attention_.start_profile(); }

  py::dict profile() const {
    const WorkerProfile sum = attention_.profile();
    py::dict seconds;
    for (int i = 0; i < kNumPhases; ++i) seconds[kPhaseNames[i]] = sum.seconds[i];
    py::dict result;
    result["seconds"] = seconds;
    result["bytes"] = sum.bytes;
    result["scored_tokens"] = sum.scored_tokens;
    result["attended_tokens"] = sum.attended_tokens;
    return result;
  }

  std::vector<std::vector<int32_t>> last_selection() const { return attention_.last_selection(); }

 private:
  AttentionShape shape_;
  DecodeAttention attention_;
  bool per_query_head_ = false;
};

class PyLinear {
 public:
  PyLinear(int dtype, int64_t in_features, const std::vector<int64_t>& weights, const std::vector<int64_t>& biases,
           const std::vector<int64_t>& out_features)
      : linear_(static_cast<DType>(dtype), in_features, blocks(weights, biases, out_features)) {}

  void run(WorkerPool& pool, const std::string& isa, int64_t x, int num_rows, int64_t norm_weight, float norm_eps,
           bool silu_mul, int64_t residual, int64_t out) const {
    const KernelTable& kernels = kernels_for(isa);
    const py::gil_scoped_release release;
    linear_.run(kernels, pool, {pointer<const void>(x), num_rows, pointer<const void>(norm_weight), norm_eps, silu_mul},
                pointer<const void>(residual), pointer<void>(out));
  }

 private:
  static std::vector<WeightBlock> blocks(const std::vector<int64_t>& weights, const std::vector<int64_t>& biases,
                                         const std::vector<int64_t>& out_features) {
    std::vector<WeightBlock> result;
    for (size_t i = 0; i < weights.size(); ++i) {
      result.push_back({pointer<const void>(weights[i]), pointer<const void>(biases[i]), out_features[i]});
    }
    return result;
  }

  Linear linear_;
};

// Rotates the query heads of qkv in place and writes the rotated keys and the values of each row into its page.
void rope_append(const std::string& isa, int dtype, int64_t qkv, int64_t cos, int64_t sin, int num_qo_heads,
                 int num_kv_heads, int64_t head_dim, int page_shift, const Int64s& page_tables,
                 const Int64s& table_strides, int64_t layer_idx, const Int64s& positions, int64_t q_norm,
                 int64_t k_norm, float norm_eps) {
  const KernelTable& kernels = kernels_for(isa);
  const int64_t item = dtype_bytes(static_cast<DType>(dtype));
  const int64_t head_bytes = head_dim * item;
  for (py::ssize_t r = 0; r < positions.size(); ++r) {
    char* head = pointer<char>(qkv) + r * (num_qo_heads + 2 * num_kv_heads) * head_bytes;
    const char* c = pointer<const char>(cos) + r * head_bytes;
    const char* s = pointer<const char>(sin) + r * head_bytes;
    const int64_t position = positions.at(r);
    const int64_t* pages = pointer<const int64_t>(page_tables.at(r)) + layer_idx * table_strides.at(r);
    const AttentionShape shape{
        num_qo_heads, num_kv_heads, static_cast<int>(head_dim), page_shift, static_cast<DType>(dtype), 0.0f};
    for (int h = 0; h < num_qo_heads; ++h, head += head_bytes) {
      kernels.rope_head[dtype](head, c, s, pointer<const void>(q_norm), norm_eps, head_dim);
    }
    const char* value = head + num_kv_heads * head_bytes;
    for (int h = 0; h < num_kv_heads; ++h, head += head_bytes, value += head_bytes) {
      kernels.rope_head[dtype](head, c, s, pointer<const void>(k_norm), norm_eps, head_dim);
      std::memcpy(const_cast<void*>(shape.keys(pages, h).row(position)), head, static_cast<size_t>(head_bytes));
      std::memcpy(const_cast<void*>(shape.values(pages, h).row(position)), value, static_cast<size_t>(head_bytes));
    }
  }
}

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
#undef FIELD
  return offsets;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "CPU kernels of offload; use them through cpu_ops.native, which checks its arguments.";
  m.attr("MAX_GROUP_SIZE") = kMaxGroupSize;
  m.attr("MAX_HEAD_DIM") = kMaxHeadDim;
  m.attr("HEAD_DIM_MULTIPLE") = kHeadDimMultiple;
  m.attr("MAX_LINEAR_ROWS") = kMaxLinearRows;
  m.attr("MAX_POLICY_ARRAYS") = kMaxPolicyArrays;
  m.def("available_isas", &available_isas);
  m.def("known_isas", &known_isas);
  m.def("default_isa", [] { return std::string(default_kernels().name); });
  m.def("policy_context_offsets", &policy_context_offsets);
  m.def("rope_append", &rope_append);
  m.def("top_k", [](const std::string& isa, int64_t x, int64_t n, int64_t k) {
    Int32s positions(static_cast<py::ssize_t>(std::max<int64_t>(0, std::min(n, k))));
    const int64_t count = top_k(kernels_for(isa), pointer<const float>(x), n, k, positions.mutable_data());
    if (count < 0) throw std::runtime_error("top_k: NaN among the values");
    return positions;
  });
  m.def("score_int8", [](const std::string& isa, int64_t query, int group_size, int head_dim, int64_t rows, int64_t n,
                         int64_t scores) {
    kernels_for(isa).score_int8(pointer<const float>(query), group_size, head_dim, pointer<const int8_t>(rows), n,
                                pointer<float>(scores));
  });
  m.def("chunk_means",
        [](WorkerPool& pool, const std::string& isa, int dtype, int64_t keys, int64_t num_heads, int64_t head_bytes,
           int64_t row_bytes, int64_t width, const Int64s& starts, int64_t means, int64_t norms, int64_t spreads) {
          ChunkMeanArgs args{};
          args.keys = pointer<const void>(keys);
          args.dtype = static_cast<DType>(dtype);
          args.num_heads = num_heads;
          args.head_bytes = head_bytes;
          args.row_bytes = row_bytes;
          args.width = width;
          args.starts = starts.data();
          args.num_chunks = starts.size() - 1;
          args.means = pointer<float>(means);
          args.norms = pointer<float>(norms);
          args.spreads = pointer<float>(spreads);
          const KernelTable& kernels = kernels_for(isa);
          const py::gil_scoped_release release;
          chunk_means(kernels, pool, args);
        });
  m.def("spherical_kmeans", [](WorkerPool& pool, const std::string& isa, int64_t points, int64_t num_heads,
                               int64_t num_points, int64_t width, int64_t num_clusters, int64_t iterations,
                               int64_t labels, int64_t centroids) {
    const KMeansArgs args{
        pointer<const float>(points), num_heads, num_points, width, num_clusters, iterations, pointer<int32_t>(labels),
        pointer<float>(centroids)};
    const KernelTable& kernels = kernels_for(isa);
    const py::gil_scoped_release release;
    spherical_kmeans(kernels, pool, args);
  });
  m.def("time_sequential_read", [](WorkerPool& pool, const std::string& isa, int64_t data, int64_t num_bytes) {
    const py::gil_scoped_release release;
    return time_sequential_read(kernels_for(isa), pool, pointer<const void>(data), num_bytes);
  });
  m.def("time_row_gather",
        [](WorkerPool& pool, const std::string& isa, int64_t data, const Int32s& rows, int64_t row_bytes) {
          const int32_t* first = rows.data();
          const int64_t n = rows.size();
          const py::gil_scoped_release release;
          return time_row_gather(kernels_for(isa), pool, pointer<const void>(data), first, n, row_bytes);
        });

  py::class_<WorkerPool>(m, "WorkerPool")
      .def(py::init<int, int64_t>(), py::arg("num_threads"), py::arg("spin_us"))
      .def_property_readonly("num_threads", &WorkerPool::num_threads)
      .def("close", &WorkerPool::close, py::call_guard<py::gil_scoped_release>());

  py::class_<PyDecodeAttention>(m, "DecodeAttention")
      .def(py::init<WorkerPool&, const std::string&, int, int, int, int, int, float>(), py::keep_alive<1, 2>())
      .def("set_policy", &PyDecodeAttention::set_policy)
      .def("attend", &PyDecodeAttention::attend)
      .def("prepare", &PyDecodeAttention::prepare)
      .def("attend_csr", &PyDecodeAttention::attend_csr)
      .def("start_profile", &PyDecodeAttention::start_profile)
      .def("profile", &PyDecodeAttention::profile)
      .def("last_selection", &PyDecodeAttention::last_selection);

  py::class_<PyLinear>(m, "Linear")
      .def(py::init<int, int64_t, const std::vector<int64_t>&, const std::vector<int64_t>&,
                    const std::vector<int64_t>&>())
      .def("run", &PyLinear::run);
}

}  // namespace offload
