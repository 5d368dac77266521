// The Python face of the kernels. cpu_ops/native.py checks shapes and dtypes and passes addresses; nothing here
// touches torch.
#include "bindings/bindings.h"

#include <algorithm>

#include "operators/bandwidth.h"
#include "operators/causal_attention.h"
#include "operators/clustering.h"
#include "operators/delta_rule.h"
#include "operators/rms_norm.h"
#include "operators/rope.h"
#include "attention/decode_attention.h"
#include "kernels/dispatch.h"

// One file to the compiler: for each, pybind11's headers would take it longer than what is in it.
#include "bindings/bindings_attention.cpp"
#include "bindings/bindings_coprocessor.cpp"
#include "bindings/bindings_layers.cpp"

namespace offload {
PYBIND11_MODULE(_native, m) {
  m.doc() = "CPU kernels of offload; use them through cpu_ops.native, which checks its arguments.";
  m.attr("BINDINGS_DIGEST") = BINDINGS_DIGEST;  // by setup.py; cpu_ops/__init__.py compares it
  m.attr("MAX_GROUP_SIZE") = kMaxGroupSize;
  m.attr("MAX_HEAD_DIM") = kMaxHeadDim;
  m.attr("HEAD_DIM_MULTIPLE") = kHeadDimMultiple;
  m.def("available_isas", &available_isas);
  m.def("known_isas", &known_isas);
  m.def("default_isa", [] { return std::string(default_kernels().name); });
  m.def("top_k", [](const std::string& isa, int64_t x, int64_t n, int64_t k) {
    Int32s positions(static_cast<py::ssize_t>(std::max<int64_t>(0, std::min(n, k))));
    const int64_t count = top_k(kernels_for(isa), pointer<const float>(x), n, k, positions.mutable_data());
    if (count < 0) throw std::runtime_error("top_k: NaN among the values");
    return positions;
  });
  m.def("top_mass", [](int64_t x, Int32s positions, double mass) {
    return top_mass(pointer<const float>(x), positions.mutable_data(), positions.size(), mass);
  });
  m.def("rank_rows",
        [](const std::string& isa, int64_t query, int num_queries, int head_dim, int64_t rows, int64_t scales,
           int64_t spreads, float spread_weight, int64_t ranges, int num_ranges, int64_t ranks) {
          kernels_for(isa).rank_rows({pointer<const float>(query), num_queries, head_dim, pointer<const int8_t>(rows),
                                      pointer<const Bf16>(scales), pointer<const Bf16>(spreads), spread_weight,
                                      pointer<const int32_t>(ranges), num_ranges, pointer<float>(ranks)});
        });
  m.attr("CODE_BLOCK") = kCodeBlock;
  m.def("score_codes", [](const std::string& isa, int64_t query, int group_size, int head_dim, int bits, int64_t levels,
                          int64_t offsets, int64_t codes, int64_t scales, int64_t n, int64_t scores) {
    kernels_for(isa).score_codes({pointer<const float>(query), group_size, head_dim, bits, pointer<const float>(levels),
                                  pointer<const float>(offsets), pointer<const uint8_t>(codes),
                                  pointer<const float>(scales), n, pointer<float>(scores)});
  });
  m.def(
      "chunk_boxes",
      [](WorkerPool& pool, const std::string& isa, int dtype, int64_t keys, int64_t num_heads, int64_t head_bytes,
         int64_t row_bytes, int64_t width, const Int64s& starts, int64_t points, int64_t centres, int64_t widths) {
        chunk_boxes(kernels_for(isa), pool,
                    {pointer<const void>(keys), static_cast<DType>(dtype), num_heads, head_bytes, row_bytes, width,
                     starts.data(), starts.size() - 1, pointer<float>(points), pointer<float>(centres),
                     pointer<float>(widths)});
      },
      WithoutGil());
  m.def(
      "spherical_kmeans",
      [](WorkerPool& pool, const std::string& isa, int64_t points, int64_t num_heads, int64_t num_points, int64_t width,
         int64_t num_clusters, int64_t iterations, int64_t labels, int64_t centroids) {
        spherical_kmeans(kernels_for(isa), pool,
                         {pointer<const float>(points), num_heads, num_points, width, num_clusters, iterations,
                          pointer<int32_t>(labels), pointer<float>(centroids)});
      },
      WithoutGil());
  m.def("has_causal_attention", [](const std::string& isa, int dtype, int64_t head_dim) {
    return has_causal_attention(kernels_for(isa), static_cast<DType>(dtype), head_dim);
  });
  m.def(
      "causal_attention",
      [](WorkerPool& pool, const std::string& isa, int dtype, int64_t queries, int64_t query_head, int64_t query_row,
         int64_t num_queries, int64_t group_size, int64_t keys, int64_t values, int64_t kv_head, int64_t kv_row,
         int64_t kv_len, int64_t num_kv_heads, int64_t head_dim, float scale, int64_t window, int64_t sinks,
         int64_t out) {
        causal_attention(
            kernels_for(isa), pool, static_cast<DType>(dtype), num_kv_heads,
            {pointer<const void>(queries), query_head, query_row, num_queries, group_size, pointer<const void>(keys),
             pointer<const void>(values), kv_head, kv_row, kv_len, head_dim, scale, pointer<void>(out),
             num_kv_heads * group_size * head_dim, window, pointer<const float>(sinks)});
      },
      WithoutGil());
  m.def(
      "rms_norm",
      [](WorkerPool& pool, const std::string& isa, int dtype, int64_t x, int64_t weight, float eps, int64_t num_rows,
         int64_t width, int64_t out) {
        rms_norm(kernels_for(isa), pool, static_cast<DType>(dtype), pointer<const void>(x), pointer<const void>(weight),
                 eps, num_rows, width, pointer<void>(out));
      },
      WithoutGil());
  py::class_<DeltaRule>(m, "DeltaRule")
      .def(py::init([](int dtype, const std::vector<int64_t>& sizes, const std::vector<int64_t>& places, int64_t conv,
                       int64_t norm, int64_t rate, int64_t dt_bias, float eps) {
        const auto place = [&](size_t i) { return HeadPlace{places[2 * i], places[2 * i + 1]}; };
        return DeltaRule{{static_cast<DType>(dtype), sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]},
                         {place(0), place(1), place(2), place(3), place(4), place(5)},
                         {pointer<const void>(conv), pointer<const void>(norm), pointer<const float>(rate),
                          pointer<const float>(dt_bias), eps}};
      }))
      .def(
          "run",
          [](const DeltaRule& rule, WorkerPool& pool, const std::string& isa, int64_t projected, int64_t num_rows,
             int64_t row_size, int64_t conv_state, int64_t state, int64_t out) {
            rule.run(kernels_for(isa), pool, pointer<const void>(projected), num_rows, row_size,
                     pointer<void>(conv_state), pointer<float>(state), pointer<void>(out));
          },
          WithoutGil());
  m.def(
      "rotate_heads",
      [](WorkerPool& pool, const std::string& isa, int dtype, int64_t x, int64_t token, int64_t num_tokens,
         int64_t num_heads, int64_t head_dim, int64_t rotary_dim, int64_t cos, int64_t sin, int64_t out) {
        rotate_heads(kernels_for(isa), pool, static_cast<DType>(dtype),
                     {pointer<const void>(x), token, num_tokens, num_heads, head_dim, rotary_dim,
                      pointer<const void>(cos), pointer<const void>(sin), pointer<void>(out)});
      },
      WithoutGil());
  m.def(
      "time_sequential_read",
      [](WorkerPool& pool, const std::string& isa, int64_t data, int64_t num_bytes) {
        return time_sequential_read(kernels_for(isa), pool, pointer<const void>(data), num_bytes);
      },
      WithoutGil());
  m.def(
      "time_row_gather",
      [](WorkerPool& pool, const std::string& isa, int64_t data, const Int32s& rows, int64_t row_bytes) {
        return time_row_gather(kernels_for(isa), pool, pointer<const void>(data), rows.data(), rows.size(), row_bytes);
      },
      WithoutGil());

  py::class_<WorkerPool>(m, "WorkerPool")
      .def(py::init<int, int64_t>(), py::arg("num_threads"), py::arg("spin_us"))
      .def_property_readonly("num_threads", &WorkerPool::num_threads)
      .def("close", &WorkerPool::close, WithoutGil());

  bind_attention(m);
  bind_coprocessor(m);
  bind_layers(m);
}

}  // namespace offload
