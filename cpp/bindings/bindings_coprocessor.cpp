// The Python face of the coprocessor.
#include <algorithm>
#include <deque>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "bindings/bindings.h"
#include "coprocessor/coprocessor.h"

namespace offload {
namespace {

constexpr int64_t kWaitSliceNs = 20'000'000;  // between looks at signals
constexpr int64_t kLastGraceNs = 1'000'000'000;

std::vector<Request> requests_of(const std::vector<std::vector<int64_t>>& requests) {
  std::vector<Request> result;
  for (const auto& r : requests) result.push_back({r.at(0), r.at(1), r.at(2)});
  return result;
}

// Addresses in the order of cpu_ops/mailbox.py's tensors.
Mailbox mailbox_of(const std::vector<int64_t>& addresses, int64_t max_rows, int64_t selection_units,
                   int64_t selection_tokens) {
  return {pointer<const char>(addresses.at(0)),
          pointer<const char>(addresses.at(1)),
          pointer<float>(addresses.at(2)),
          pointer<float>(addresses.at(3)),
          pointer<int32_t>(addresses.at(4)),
          pointer<int32_t>(addresses.at(5)),
          max_rows,
          pointer<const int32_t>(addresses.at(6)),
          pointer<const int32_t>(addresses.at(7)),
          selection_units,
          selection_tokens};
}

// Rows in the order of their slots.
ServedStep step_of(const Int64s& slots, const Int64s& page_tables, const Int64s& table_strides, const Int64s& kv_lens,
                   const Int64s& arrays, const Int64s& text_marks, int64_t queries) {
  ServedStep step;
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
    step.rows.push_back(row);
  }
  step.queries = pointer<char>(queries);
  step.query_rows = std::move(order);
  return step;
}

// Keeps alive what the thread may touch: the attention, `keep` of the mailbox, and `keep` of each step that is not
// done. Where the thread is stuck they are never released.
class PyCoprocessor {
 public:
  PyCoprocessor(py::object attention, const std::vector<int64_t>& mailbox, int64_t max_rows, int64_t selection_units,
                int64_t selection_tokens, const std::vector<std::vector<int64_t>>& requests,
                const std::vector<uint8_t>& sparse_layers, int64_t sink_tokens, int64_t recent_tokens,
                const std::vector<uint8_t>& device_heads, const std::vector<uint8_t>& publishing_heads, py::object keep)
      : core_(attention_of(attention), mailbox_of(mailbox, max_rows, selection_units, selection_tokens),
              requests_of(requests), sparse_layers, sink_tokens, recent_tokens, {device_heads, publishing_heads}),
        kept_{std::move(attention), std::move(keep)} {}

  ~PyCoprocessor() {
    if (close(kLastGraceNs) != Coprocessor::Retirement::stuck) return;
    for (py::object& object : kept_) object.release();
    for (auto& [number, object] : kept_steps_) object.release();
  }

  void set_deadline(int64_t ns) {
    deadline_ns_ = ns;
    core_.set_deadline(ns);
  }
  void set_idle(bool idle) { core_.set_idle(idle); }
  void set_warm_up(bool on) { core_.set_warm_up(on); }

  void begin(const Int64s& slots, const Int64s& page_tables, const Int64s& table_strides, const Int64s& kv_lens,
             const Int64s& arrays, const Int64s& text_marks, int64_t queries, py::object keep) {
    core_.begin(step_of(slots, page_tables, table_strides, kv_lens, arrays, text_marks, queries));
    kept_steps_.clear();
    kept_steps_.emplace_back(0, std::move(keep));
  }

  void serve(int request) {
    std::string failure;
    {
      const py::gil_scoped_release release;
      failure = core_.serve(request);
    }
    if (!failure.empty()) throw std::runtime_error(failure);
  }

  void end() {
    std::string failure;
    {
      const py::gil_scoped_release release;
      failure = core_.end();
    }
    kept_steps_.clear();
    if (!failure.empty()) throw std::runtime_error(failure);
  }

  void start() { core_.start(); }

  int64_t queue(const Int64s& slots, const Int64s& page_tables, const Int64s& table_strides, const Int64s& kv_lens,
                const Int64s& arrays, const Int64s& text_marks, int64_t queries, py::object keep) {
    const int64_t number =
        core_.queue(step_of(slots, page_tables, table_strides, kv_lens, arrays, text_marks, queries));
    kept_steps_.emplace_back(number, std::move(keep));
    return number;
  }

  // How many steps are done; releases what they kept.
  int64_t release_done() {
    const int64_t num_done = core_.num_done();
    while (!kept_steps_.empty() && kept_steps_.front().first <= num_done) kept_steps_.pop_front();
    return num_done;
  }

  // ("done" | "failed" | "silent" | "late", what the thread said or is at). Silent: no progress within the deadline.
  // Late: `timeout_ns`, where it is not negative, has passed.
  py::tuple wait(int64_t number, int64_t timeout_ns) {
    const int64_t start = now_ns();
    for (;;) {
      const int64_t left = timeout_ns < 0 ? kWaitSliceNs : std::max<int64_t>(0, start + timeout_ns - now_ns());
      std::string message;
      Coprocessor::Outcome outcome;
      {
        const py::gil_scoped_release release;
        outcome = core_.wait(number, std::min(kWaitSliceNs, left), &message);
      }
      if (outcome == Coprocessor::Outcome::done) return py::make_tuple("done", "");
      if (outcome == Coprocessor::Outcome::failed) return py::make_tuple("failed", message);
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      if (core_.silent_ns() > deadline_ns_) return py::make_tuple("silent", core_.position());
      if (timeout_ns >= 0 && now_ns() - start >= timeout_ns) return py::make_tuple("late", core_.position());
    }
  }

  // False: the thread is stuck, this object is of no more use.
  bool abort(int64_t grace_ns) {
    Coprocessor::Retirement result;
    {
      const py::gil_scoped_release release;
      result = core_.abort(grace_ns);
    }
    if (result == Coprocessor::Retirement::stuck) return false;
    kept_steps_.clear();
    return true;
  }

  void reset() {
    const py::gil_scoped_release release;
    core_.reset();
  }

  Coprocessor::Retirement close(int64_t grace_ns) {
    const py::gil_scoped_release release;
    return core_.close(grace_ns);
  }
  void close_for_good() {
    // Not in the destructor: others may be in a step of the same attention when this is collected.
    if (close(kLastGraceNs) != Coprocessor::Retirement::stuck && !core_.forked()) core_.let_go();
  }
  bool forked() const { return core_.forked(); }

  void inject_stall(int64_t layer_idx, int64_t ns) { core_.inject_stall(layer_idx, ns); }
  void inject_death(int64_t layer_idx) { core_.inject_death(layer_idx); }

 private:
  Coprocessor core_;
  int64_t deadline_ns_ = 5'000'000'000;
  py::object kept_[2];
  std::deque<std::pair<int64_t, py::object>> kept_steps_;
};

}  // namespace

void bind_coprocessor(py::module_& m) {
  m.attr("FLAG_STRIDE") = kFlagStride;
  py::class_<PyCoprocessor>(m, "Coprocessor")
      .def(py::init<py::object, const std::vector<int64_t>&, int64_t, int64_t, int64_t,
                    const std::vector<std::vector<int64_t>>&, const std::vector<uint8_t>&, int64_t, int64_t,
                    const std::vector<uint8_t>&, const std::vector<uint8_t>&, py::object>())
      .def("set_deadline", &PyCoprocessor::set_deadline)
      .def("set_idle", &PyCoprocessor::set_idle)
      .def("set_warm_up", &PyCoprocessor::set_warm_up)
      .def("begin", &PyCoprocessor::begin)
      .def("serve", &PyCoprocessor::serve)
      .def("end", &PyCoprocessor::end)
      .def("start", &PyCoprocessor::start)
      .def("queue", &PyCoprocessor::queue)
      .def("release_done", &PyCoprocessor::release_done)
      .def("wait", &PyCoprocessor::wait)
      .def("abort", &PyCoprocessor::abort)
      .def("reset", &PyCoprocessor::reset)
      .def("close", &PyCoprocessor::close_for_good)
      .def("forked", &PyCoprocessor::forked)
      .def("inject_stall", &PyCoprocessor::inject_stall)
      .def("inject_death", &PyCoprocessor::inject_death);
}

}  // namespace offload
