// The Python face of a decoder's layers on the CPU, together and one by one.
#include <memory>

#include "bindings/bindings.h"
#include "operators/decoder_layers.h"
#include "operators/routed_linear.h"
#include "kernels/dispatch.h"

namespace offload {
namespace {

std::unique_ptr<Linear> make_linear(int dtype, int64_t in_features, const std::vector<int64_t>& weights,
                                    const std::vector<int64_t>& biases, const std::vector<int64_t>& out_features) {
  std::vector<WeightBlock> blocks;
  for (size_t i = 0; i < weights.size(); ++i) {
    blocks.push_back({pointer<const void>(weights[i]), pointer<const void>(biases[i]), out_features[i]});
  }
  return std::make_unique<Linear>(static_cast<DType>(dtype), in_features, std::move(blocks));
}

std::unique_ptr<Linear> make_packed_linear(int dtype, int64_t in_features, const std::vector<int>& formats,
                                           const std::vector<int64_t>& codes, const std::vector<int64_t>& scales,
                                           const std::vector<int64_t>& minimums, const std::vector<int64_t>& tables,
                                           const std::vector<int64_t>& biases,
                                           const std::vector<int64_t>& out_features) {
  std::vector<WeightBlock> blocks;
  for (size_t i = 0; i < codes.size(); ++i) {
    blocks.push_back({pointer<const void>(codes[i]), pointer<const void>(biases[i]), out_features[i],
                      pointer<const Half>(scales[i]), pointer<const Half>(minimums[i]),
                      static_cast<WeightFormat>(formats[i]), pointer<const int8_t>(tables[i])});
  }
  return std::make_unique<Linear>(static_cast<DType>(dtype), in_features, std::move(blocks));
}

void unpack_linear(const Linear& linear, WorkerPool& pool, const std::string& isa, int64_t first, int64_t last,
                   int64_t out) {
  linear.unpack(kernels_for(isa), pool, first, last, pointer<void>(out));
}

void run_linear(const Linear& linear, WorkerPool& pool, const std::string& isa, int64_t x, int num_rows,
                int64_t norm_weight, float norm_eps, int gate, int64_t residual, int64_t out) {
  linear.run(kernels_for(isa), pool,
             {pointer<const void>(x), num_rows, pointer<const void>(norm_weight), norm_eps, static_cast<Gate>(gate)},
             pointer<const void>(residual), pointer<void>(out));
}

std::unique_ptr<RoutedLinear> make_routed_linear(int dtype, int64_t in_features, int64_t num_experts,
                                                 int64_t out_features, int format, int64_t codes, int64_t scales,
                                                 int64_t minimums, int64_t table, int64_t bias, int gate, float alpha,
                                                 float limit) {
  const WeightBlock block{pointer<const void>(codes),  pointer<const void>(bias),     out_features,
                          pointer<const Half>(scales), pointer<const Half>(minimums), static_cast<WeightFormat>(format),
                          pointer<const int8_t>(table)};
  const ExpertActivation activation{static_cast<ExpertGate>(gate), alpha, limit};
  return std::make_unique<RoutedLinear>(static_cast<DType>(dtype), in_features, block, num_experts, activation);
}

void run_routed(const RoutedLinear& linear, WorkerPool& pool, const std::string& isa, int64_t x, int64_t num_rows,
                int64_t pairs_per_row, int64_t experts, int64_t out) {
  Routing routing;
  routing.set(pointer<const int64_t>(experts), num_rows * pairs_per_row, linear.num_experts());
  linear.run(kernels_for(isa), pool, pointer<const void>(x), num_rows, pairs_per_row, routing, pointer<void>(out));
}

void run_all_experts(const RoutedLinear& up, const RoutedLinear& down, WorkerPool& pool, const std::string& isa,
                     int64_t x, int64_t num_tokens, int64_t experts, int64_t weights, int64_t per_token, int64_t out) {
  run_experts(
      kernels_for(isa), pool, up, down,
      {pointer<const void>(x), num_tokens, pointer<const int64_t>(experts), pointer<const float>(weights), per_token},
      pointer<void>(out));
}

std::unique_ptr<RoutedMlp> make_routed_mlp(const Linear& router, const RoutedLinear& up, const RoutedLinear& down,
                                           int64_t per_token, bool normalises, bool rounds) {
  return std::make_unique<RoutedMlp>(RoutedMlp{&router, &up, &down, {per_token, normalises, rounds}});
}

void choose(const std::string& isa, int dtype, int64_t logits, int64_t num_rows, int64_t num_experts, int64_t per_token,
            bool normalises, bool rounds, int64_t experts, int64_t weights) {
  choose_experts(kernels_for(isa), static_cast<DType>(dtype), pointer<const void>(logits), num_rows, num_experts,
                 {per_token, normalises, rounds}, pointer<int64_t>(experts), pointer<float>(weights));
}

// Its owner keeps alive what the addresses point into. `ropes`: cos, sin, dim, cos, sin, dim, …
DecoderStep decoder_step(int64_t hidden, const std::vector<int64_t>& ropes, int64_t qkv, int64_t attended,
                         int64_t gate_up, int64_t added, int64_t kept_queries, int64_t query_scale,
                         const KeptRows& step) {
  std::vector<Rope> tables;
  for (size_t i = 0; i + 2 < ropes.size(); i += 3) {
    tables.push_back({pointer<const char>(ropes[i]), pointer<const char>(ropes[i + 1]), ropes[i + 2]});
  }
  return {pointer<char>(hidden),
          std::move(tables),
          pointer<char>(qkv),
          pointer<char>(attended),
          pointer<char>(gate_up),
          pointer<char>(added),
          pointer<char>(kept_queries),
          pointer<const char>(query_scale),
          step.rows};
}

using NormAddress = std::pair<int64_t, float>;

NormWeight norm_weight(const NormAddress& norm) { return {pointer<const void>(norm.first), norm.second}; }

void add_layer(DecoderLayers& layers, const NormAddress& input_norm, const Linear& qkv, int64_t q_norm, int64_t k_norm,
               int64_t v_norm, float head_norms_eps, bool whole, const Linear& o_proj, const NormAddress& mlp_norm,
               const Linear* gate_up, const Linear* down, const RoutedMlp* routed,
               const NormAddress& attention_out_norm, const NormAddress& mlp_out_norm, size_t rope_idx, bool sparse,
               int gate, float out_scale) {
  layers.add(
      {norm_weight(input_norm),
       &qkv,
       {pointer<const void>(q_norm), pointer<const void>(k_norm), head_norms_eps, whole, pointer<const void>(v_norm)},
       &o_proj,
       norm_weight(mlp_norm),
       gate_up,
       down,
       routed,
       norm_weight(attention_out_norm),
       norm_weight(mlp_out_norm),
       rope_idx,
       sparse,
       static_cast<Gate>(gate),
       out_scale});
}

}  // namespace

void bind_layers(py::module_& m) {
  m.attr("MAX_LINEAR_ROWS") = kMaxLinearRows;
  m.attr("IS_INTEL") = is_intel;
  m.def("has_products", [](const std::string& isa, int dtype) { return kernels_for(isa).multiply[dtype] != nullptr; });
  m.attr("PACKED_GROUP") = kPackedGroup;
  py::class_<Linear>(m, "Linear")
      .def(py::init(&make_linear))
      .def(py::init(&make_packed_linear))
      .def("run", &run_linear, WithoutGil())
      .def("unpack", &unpack_linear, WithoutGil());
  py::class_<RoutedLinear>(m, "RoutedLinear").def(py::init(&make_routed_linear)).def("run", &run_routed, WithoutGil());
  m.def("run_experts", &run_all_experts, WithoutGil());
  m.def("choose_experts", &choose);
  py::class_<RoutedMlp>(m, "RoutedMlp").def(py::init(&make_routed_mlp));
  py::class_<DecoderStep>(m, "DecoderStep").def(py::init(&decoder_step));
  // Its attention and its layers' linears are kept alive by the Python wrapper.
  py::class_<DecoderLayers>(m, "DecoderLayers")
      .def(py::init<DecodeAttention&>())
      .def("add", &add_layer)
      .def(
          "run", [](DecoderLayers& layers, const DecoderStep& step) { check_numbers(layers.run(step)); }, WithoutGil())
      .def("project", &DecoderLayers::project, WithoutGil())
      .def("finish", &DecoderLayers::finish, WithoutGil());
}

}  // namespace offload
