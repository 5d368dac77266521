// The Python face of the coprocessor.
#include <algorithm>
#include <deque>
#include <numeric>
#include <utility>

#include "bindings/bindings.h"
#include "coprocessor/coprocessor.h"

namespace offload {
namespace {

constexpr int64_t kWaitSliceNs = 20'000'000;  // between looks at signals
constexpr int64_t kLastGraceNs = 1'000'000'000;

std::vector<Request> requests_of(const std::vector<std::vector<int64_t>>& requests) {
  std::vector<Request> result;
  for (const auto& r : requests) result.push_back({r.at(0), r.at(1), r.at(2), r.at(3) != 0});
  return result;
}

Int32s pairs_of(const Fetch* fetches, int64_t n) {
  Int32s pairs({static_cast<py::ssize_t>(n), py::ssize_t{2}});
  std::copy_n(reinterpret_cast<const int32_t*>(fetches), 2 * n, pairs.mutable_data());
  return pairs;
}

// Addresses in the order of cpu_ops/mailbox.py's tensors.
Mailbox mailbox_of(const std::vector<int64_t>& addresses, int64_t max_rows, int64_t selection_units,
                   int64_t selection_tokens, int64_t fetch_tokens) {
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
          selection_tokens,
          pointer<const char>(addresses.at(8)),
          pointer<int32_t>(addresses.at(9)),
          pointer<int32_t>(addresses.at(10)),
          fetch_tokens,
          pointer<int32_t>(addresses.at(11)),
          pointer<float>(addresses.at(12)),
          pointer<const char>(addresses.at(13)),
          pointer<char>(addresses.at(14)),
          pointer<const int64_t>(addresses.at(15)),
          pointer<const float>(addresses.at(16))};
}

// Rows in the order of their slots.
ServedStep step_of(const Int64s& slots, const StepRows& rows, int64_t queries) {
  if (rows.starts != nullptr)
    throw py::value_error("a coprocessor takes no rows whose KV heads have pages of their own");
  ServedStep step;
  std::vector<int64_t> order(static_cast<size_t>(slots.size()));
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return slots.at(a) < slots.at(b); });
  for (const int64_t i : order) {
    const QueryRow row = rows.row(i, 0, 1);
    step.rows.push_back({slots.at(i), row.pages, rows.table_strides[i], row.kv_len, row.arrays, row.text_marks});
  }
  step.queries = pointer<char>(queries);
  step.query_rows = std::move(order);
  return step;
}

// Keeps alive what the thread may touch: the attention, `keep` of the mailbox, and `keep` of each step that is not
// done. Where the thread is stuck they are never released.
class PyCoprocessor : public Coprocessor {
 public:
  PyCoprocessor(py::object attention, const std::vector<int64_t>& mailbox, int64_t max_rows, int64_t selection_units,
                int64_t selection_tokens, int64_t fetch_tokens, const std::vector<std::vector<int64_t>>& requests,
                const std::vector<uint8_t>& sparse_layers, int64_t sink_tokens, int64_t recent_tokens,
                const std::vector<uint8_t>& device_heads, const std::vector<uint8_t>& publishing_heads,
                const std::vector<uint8_t>& listed_heads, const std::vector<uint8_t>& hot_heads, py::object hot_rows,
                const std::vector<const RoutedMlp*>& experts, py::object keep)
      : Coprocessor(attention.cast<DecodeAttention&>(),
                    mailbox_of(mailbox, max_rows, selection_units, selection_tokens, fetch_tokens),
                    {requests_of(requests),
                     sparse_layers,
                     sink_tokens,
                     recent_tokens,
                     {device_heads, publishing_heads, listed_heads, hot_heads},
                     hot_rows.is_none() ? nullptr : hot_rows.cast<HotRows*>(),
                     experts}),
        kept_{std::move(attention), std::move(keep), std::move(hot_rows)} {}

  ~PyCoprocessor() {
    if (close_quietly() != Retirement::stuck) return;
    for (py::object& object : kept_) object.release();
    for (auto& [number, object] : kept_steps_) object.release();
  }

  void begin_step(const Int64s& slots, const KeptRows& step, int64_t queries, py::object keep) {
    begin(step_of(slots, step.rows, queries));
    kept_steps_.clear();
    kept_steps_.emplace_back(0, std::move(keep));
  }

  void end_step() {
    std::string failure;
    {
      const py::gil_scoped_release release;
      failure = end();
    }
    kept_steps_.clear();
    check_numbers(failure);
  }

  void queue_step(const Int64s& slots, const KeptRows& step, int64_t queries, py::object keep) {
    kept_steps_.emplace_back(queue(step_of(slots, step.rows, queries)), std::move(keep));
  }

  // What those steps kept that are done since the last call.
  py::list release_done() {
    py::list released;
    const int64_t done = num_done();
    for (; !kept_steps_.empty() && kept_steps_.front().first <= done; kept_steps_.pop_front()) {
      released.append(kept_steps_.front().second);
    }
    return released;
  }

  // ("done" | "failed" | "silent" | "late", what the thread said or is at). Silent: no progress within the deadline.
  // Late: `timeout_ns`, where it is not negative, has passed.
  py::tuple wait_for_steps(int64_t timeout_ns) {
    const int64_t number = kept_steps_.empty() ? 0 : kept_steps_.back().first;
    const int64_t start = now_ns();
    for (;;) {
      const int64_t left = timeout_ns < 0 ? kWaitSliceNs : std::max<int64_t>(0, start + timeout_ns - now_ns());
      std::string message;
      Outcome outcome;
      {
        const py::gil_scoped_release release;
        outcome = wait(number, std::min(kWaitSliceNs, left), &message);
      }
      if (outcome == Outcome::done) return py::make_tuple("done", "");
      if (outcome == Outcome::failed) return py::make_tuple("failed", message);
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
      if (is_silent()) return py::make_tuple("silent", position());
      if (timeout_ns >= 0 && now_ns() - start >= timeout_ns) return py::make_tuple("late", position());
    }
  }

  // False: the thread is stuck, this object is of no more use.
  bool abort_steps(int64_t grace_ns) {
    Retirement result;
    {
      const py::gil_scoped_release release;
      result = abort(grace_ns);
    }
    if (result == Retirement::stuck) return false;
    kept_steps_.clear();
    return true;
  }

  void close_for_good() {
    // Not in the destructor: others may be in a step of the same attention when this is collected.
    if (close_quietly() != Retirement::stuck && !forked()) let_go();
  }

 private:
  Retirement close_quietly() {
    const py::gil_scoped_release release;
    return close(kLastGraceNs);
  }

  py::object kept_[3];
  std::deque<std::pair<int64_t, py::object>> kept_steps_;
};

}  // namespace

void bind_coprocessor(py::module_& m) {
  m.attr("FLAG_STRIDE") = kFlagStride;
  py::class_<HotRows>(m, "HotRows")
      .def(py::init<int64_t, int64_t, int, int64_t>())
      .def("forget", &HotRows::forget)
      .def("estimate", &HotRows::estimate)
      .def("estimates", &HotRows::estimates)
      // (token, place) of each hot row, [n, 2].
      .def("hot",
           [](const HotRows& rows, int64_t slot, int64_t layer_idx, int kv_head) {
             const std::vector<Fetch> hot = rows.hot(slot, layer_idx, kv_head);
             return pairs_of(hot.data(), static_cast<int64_t>(hot.size()));
           })
      .def("take_counts", &HotRows::take_counts)
      // For tests: (token, place) of what has to be fetched, [n, 2].
      .def("choose", [](HotRows& rows, int64_t slot, int64_t layer_idx, int kv_head, const Int32s& tokens) {
        std::vector<Fetch> fetches(static_cast<size_t>(tokens.size()));
        const int64_t n = rows.choose(slot, layer_idx, kv_head, tokens.data(), tokens.size(), fetches.data());
        return pairs_of(fetches.data(), n);
      });
  py::class_<PyCoprocessor>(m, "Coprocessor")
      .def(py::init<py::object, const std::vector<int64_t>&, int64_t, int64_t, int64_t, int64_t,
                    const std::vector<std::vector<int64_t>>&, const std::vector<uint8_t>&, int64_t, int64_t,
                    const std::vector<uint8_t>&, const std::vector<uint8_t>&, const std::vector<uint8_t>&,
                    const std::vector<uint8_t>&, py::object, const std::vector<const RoutedMlp*>&, py::object>())
      .def("set_deadline", &PyCoprocessor::set_deadline)
      .def("begin", &PyCoprocessor::begin_step)
      .def(
          "serve", [](PyCoprocessor& core, int request) { check_numbers(core.serve(request)); }, WithoutGil())
      .def("end", &PyCoprocessor::end_step)
      .def("start", &PyCoprocessor::start)
      .def("queue", &PyCoprocessor::queue_step)
      .def("release_done", &PyCoprocessor::release_done)
      .def("wait", &PyCoprocessor::wait_for_steps)
      .def("abort", &PyCoprocessor::abort_steps)
      .def("reset", &PyCoprocessor::reset, WithoutGil())
      .def("close", &PyCoprocessor::close_for_good)
      .def("forked", &PyCoprocessor::forked)
      .def("inject_stall", &PyCoprocessor::inject_stall)
      .def("inject_death", &PyCoprocessor::inject_death);
}

}  // namespace offload
