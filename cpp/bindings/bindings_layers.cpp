// The Python face of a decoder's layers on the CPU, together and one by one. The GIL is released for as long as the
// pool works.
#include <memory>
#include <stdexcept>

#include "bindings/bindings.h"
#include "operators/decoder_layers.h"
#include "kernels/dispatch.h"

namespace offload {
namespace {

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

  const Linear& linear() const { return linear_; }

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

void rope_append_rows(const std::string& isa, int dtype, int64_t qkv, int64_t cos, int64_t sin, int num_qo_heads,
                      int num_kv_heads, int64_t head_dim, int page_shift, const Int64s& page_tables,
                      const Int64s& table_strides, int64_t layer_idx, const Int64s& positions, int64_t q_norm,
                      int64_t k_norm, float norm_eps) {
  const KernelTable& kernels = kernels_for(isa);
  const AttentionShape shape{
      num_qo_heads, num_kv_heads, static_cast<int>(head_dim), page_shift, static_cast<DType>(dtype), 0.0f};
  const HeadNorms norms{pointer<const void>(q_norm), pointer<const void>(k_norm), norm_eps};
  const int64_t qkv_bytes = (num_qo_heads + 2 * num_kv_heads) * shape.row_bytes();
  for (py::ssize_t r = 0; r < positions.size(); ++r) {
    const int64_t rope = r * shape.row_bytes();
    const int64_t* pages = pointer<const int64_t>(page_tables.at(r)) + layer_idx * table_strides.at(r);
    rope_append(kernels, shape, pointer<char>(qkv) + r * qkv_bytes, pointer<const char>(cos) + rope,
                pointer<const char>(sin) + rope, norms, pages, positions.at(r));
  }
}

// A step with what its addresses point into.
struct KeptStep {
  std::vector<Int64s> arrays;  // of rows
  DecoderStep step;
};

KeptStep decoder_step(int64_t hidden, int64_t cos, int64_t sin, int64_t qkv, int64_t attended, int64_t gate_up,
                      int64_t kept_queries, const Int64s& page_tables, const Int64s& table_strides,
                      const Int64s& kv_lens, const Int64s& policy_arrays, const Int64s& text_marks) {
  const StepRows rows = step_rows(page_tables, table_strides, kv_lens, policy_arrays, text_marks);
  return {{page_tables, table_strides, kv_lens, policy_arrays, text_marks},
          {pointer<char>(hidden), pointer<const char>(cos), pointer<const char>(sin), pointer<char>(qkv),
           pointer<char>(attended), pointer<char>(gate_up), pointer<char>(kept_queries), rows}};
}

void add_layer(DecoderLayers& layers, int64_t input_norm, float input_eps, const PyLinear& qkv, int64_t q_norm,
               int64_t k_norm, float qk_norm_eps, const PyLinear& o_proj, int64_t mlp_norm, float mlp_eps,
               const PyLinear& gate_up, const PyLinear& down, bool sparse) {
  layers.add({{pointer<const void>(input_norm), input_eps},
              &qkv.linear(),
              {pointer<const void>(q_norm), pointer<const void>(k_norm), qk_norm_eps},
              &o_proj.linear(),
              {pointer<const void>(mlp_norm), mlp_eps},
              &gate_up.linear(),
              &down.linear(),
              sparse});
}

}  // namespace

void bind_layers(py::module_& m) {
  m.attr("MAX_LINEAR_ROWS") = kMaxLinearRows;
  m.def("rope_append", &rope_append_rows);
  py::class_<PyLinear>(m, "Linear")
      .def(py::init<int, int64_t, const std::vector<int64_t>&, const std::vector<int64_t>&,
                    const std::vector<int64_t>&>())
      .def("run", &PyLinear::run);
  py::class_<KeptStep>(m, "DecoderStep").def(py::init(&decoder_step));
  // Its attention and its layers' linears are kept alive by the Python wrapper.
  py::class_<DecoderLayers>(m, "DecoderLayers")
      .def(py::init([](const py::object& attention, const std::string& isa) {
        return std::make_unique<DecoderLayers>(attention_of(attention), kernels_for(isa));
      }))
      .def("add", &add_layer)
      .def("run",
           [](DecoderLayers& layers, const KeptStep& kept) {
             std::string failure;
             {
               const py::gil_scoped_release release;
               failure = layers.run(kept.step);
             }
             if (!failure.empty()) throw std::runtime_error(failure);
           })
      .def("project",
           [](DecoderLayers& layers, int64_t layer_idx, const KeptStep& kept) {
             const py::gil_scoped_release release;
             layers.project(layer_idx, kept.step);
           })
      .def("finish", [](DecoderLayers& layers, int64_t layer_idx, const KeptStep& kept) {
        const py::gil_scoped_release release;
        layers.finish(layer_idx, kept.step);
      });
}

}  // namespace offload
