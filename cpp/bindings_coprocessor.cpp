// The Python face of the coprocessor.
#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "bindings.h"
#include "step_server.h"

namespace offload {
namespace {

// `keep` lives as long as somebody may use the memory: mailbox, attention, and the arrays of a step.
class PyCoprocessor {
 public:
  PyCoprocessor(const py::object& attention, const std::vector<int64_t>& mailbox, int64_t max_rows,
                const std::vector<std::vector<int64_t>>& requests, const std::vector<uint8_t>& sparse_layers,
                int64_t sink_tokens, int64_t recent_tokens, py::object keep)
      : kept_attention_(attention),
        keep_(std::move(keep)),
        server_(
            attention_of(attention),
            {pointer<const char>(mailbox.at(0)), pointer<const char>(mailbox.at(1)), pointer<float>(mailbox.at(2)),
             pointer<float>(mailbox.at(3)), pointer<int32_t>(mailbox.at(4)), pointer<int32_t>(mailbox.at(5)), max_rows},
            requests_of(requests), sparse_layers, sink_tokens, recent_tokens) {}

  void begin_step(const Int64s& slots, const Int64s& page_tables, const Int64s& table_strides, const Int64s& kv_lens,
                  const Int64s& arrays, const Int64s& text_marks, int64_t queries, py::object keep) {
    step_ = ServedStep();
    std::vector<int64_t> order(static_cast<size_t>(slots.size()));
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return slots.at(a) < slots.at(b); });
    for (const int64_t i : order) {
      StepRow row{};
      row.slot = slots.at(i);
      row.page_table = pointer<const int64_t>(page_tables.at(i));
      row.table_stride = table_strides.at(i);
      row.kv_len = kv_lens.at(i);
      if (arrays.size() != 0) row.arrays = pointer<void* const>(arrays.at(i));
      if (text_marks.size() != 0) row.text_marks = pointer<const uint8_t>(text_marks.at(i));
      step_.rows.push_back(row);
    }
    step_.queries = pointer<char>(queries);
    step_.query_rows = std::move(order);
    step_keep_ = std::move(keep);
    server_.begin(step_);
  }

  void serve(int request) {
    std::string failure;
    {
      const py::gil_scoped_release release;
      server_.prepare(request);
      server_.store(request);
      failure = server_.attend(request);
      if (failure.empty()) server_.update(request);
    }
    if (!failure.empty()) throw std::runtime_error(failure);
  }

  void end_step() {
    {
      const py::gil_scoped_release release;
      server_.end();
    }
    step_keep_ = py::none();
  }

  void record(bool on) { server_.trace().record(on); }

  // (kind, layer, request, start_ns, end_ns) of each event, and how many were lost.
  py::tuple drain() {
    py::list events;
    for (const TraceEvent& e : server_.trace().drain()) {
      events.append(
          py::make_tuple(kTraceKindNames[static_cast<int>(e.kind)], e.layer_idx, e.request, e.start_ns, e.end_ns));
    }
    return py::make_tuple(events, server_.trace().take_num_lost());
  }

 private:
  static std::vector<Request> requests_of(const std::vector<std::vector<int64_t>>& requests) {
    std::vector<Request> result;
    for (const auto& r : requests) result.push_back({r.at(0), r.at(1), r.at(2)});
    return result;
  }

  py::object kept_attention_;
  py::object keep_;
  py::object step_keep_;
  ServedStep step_;
  StepServer server_;
};

}  // namespace

void bind_coprocessor(py::module_& m) {
  m.attr("FLAG_STRIDE") = kFlagStride;
  py::class_<PyCoprocessor>(m, "Coprocessor")
      .def(py::init<const py::object&, const std::vector<int64_t>&, int64_t, const std::vector<std::vector<int64_t>>&,
                    const std::vector<uint8_t>&, int64_t, int64_t, py::object>())
      .def("begin_step", &PyCoprocessor::begin_step)
      .def("serve", &PyCoprocessor::serve)
      .def("end_step", &PyCoprocessor::end_step)
      .def("record", &PyCoprocessor::record)
      .def("drain", &PyCoprocessor::drain);
}

}  // namespace offload
