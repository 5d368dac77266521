// The coprocessor's thread under load, for ThreadSanitizer: a thread that plays the GPU by flags, a host that queues
// steps ahead, aborts, stalls and restarts. Mailbox, pages and policy arrays are plain memory, so every hand-over that
// lacks a happens-before is a race that it reports. Results are compared with steps served on one thread.
#include "coprocessor/coprocessor.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "kernels/number_formats.h"

namespace offload::test {
namespace {

constexpr int64_t kNumLayers = 3;
constexpr int64_t kMaxRows = 3;
constexpr int64_t kMaxTokens = 512;
constexpr AttentionShape kShape{4, 2, 16, 4, DType::bf16, 0.25f};
constexpr int64_t kRow = int64_t{kShape.num_qo_heads} * kShape.head_dim;
constexpr int64_t kKv = 2 * int64_t{kShape.num_kv_heads} * kShape.head_dim;  // K and V of a token of a layer

int64_t select_first(PolicyContext* context) {
  const int64_t n = std::min(context->budget_tokens, context->last - context->first);
  for (int64_t i = 0; i < n; ++i) context->indices[i] = static_cast<int32_t>(context->first + i);
  return n;
}
void prepare(PolicyContext* context) { static_cast<int64_t*>(context->arrays[0])[context->unit] += 1; }
void observe(PolicyContext* context) {
  auto* attended = static_cast<float*>(context->arrays[1]) + context->unit * kMaxTokens;
  for (int64_t i = 0; i < context->num_indices; ++i) attended[context->indices[i]] += context->weights[i];
}
void append(PolicyContext* context) { static_cast<int64_t*>(context->arrays[0])[context->unit] += context->kv_len; }

// Every third token.
int64_t propose(PolicyContext* context) {
  static const std::vector<int32_t> tokens = [] {
    std::vector<int32_t> all;
    for (int32_t t = 0; t < kMaxTokens; t += 3) all.push_back(t);
    return all;
  }();
  const auto first = std::lower_bound(tokens.begin(), tokens.end(), static_cast<int32_t>(context->first));
  context->candidates = &*first;
  return std::lower_bound(first, tokens.end(), static_cast<int32_t>(context->last)) - first;
}

PolicyFunctions make_policy(bool proposes) {
  PolicyFunctions policy;
  policy.budget_tokens = policy.dense_tokens = 40;
  policy.sink_tokens = 2;
  policy.recent_tokens = 6;
  policy.num_arrays = 2;
  policy.select = proposes ? nullptr : select_first;
  policy.propose = proposes ? propose : nullptr;
  policy.prepare = prepare;
  policy.observe = observe;
  policy.append = append;
  return policy;
}

// Everything that one side of a comparison owns: pages and policy arrays of kMaxRows sequences, and the mailbox.
struct Side {
  std::vector<uint16_t> pages;
  std::vector<int64_t> tables[kMaxRows];
  std::vector<int64_t> counts[kMaxRows];
  std::vector<float> attended[kMaxRows];
  std::vector<void*> arrays[kMaxRows];
  std::vector<uint16_t> query = std::vector<uint16_t>(kMaxRows * kRow);
  std::vector<uint16_t> kv = std::vector<uint16_t>(kNumLayers * kMaxRows * kKv);
  std::vector<float> output = std::vector<float>(kMaxRows * kRow);
  std::vector<float> lse = std::vector<float>(kMaxRows * kShape.num_qo_heads);
  std::vector<int32_t> requests = std::vector<int32_t>(16 * kFlagStride);
  std::vector<int32_t> replies = std::vector<int32_t>(16 * kFlagStride);

  Side() {
    const int64_t page_tokens = int64_t{1} << kShape.page_shift;
    const int64_t per_layer = kMaxTokens / page_tokens;
    pages.assign(static_cast<size_t>(kMaxRows * kNumLayers * kMaxTokens * kKv), 0x3c00);
    for (int64_t row = 0; row < kMaxRows; ++row) {
      for (int64_t i = 0; i < kNumLayers * per_layer; ++i) {
        const int64_t page = row * kNumLayers * per_layer + i;
        tables[row].push_back(reinterpret_cast<int64_t>(pages.data() + page * page_tokens * kKv));
      }
      counts[row].assign(static_cast<size_t>(kShape.num_kv_heads), 0);
      attended[row].assign(static_cast<size_t>(kShape.num_kv_heads * kMaxTokens), 0.0f);
      for (int64_t layer_idx = 0; layer_idx < kNumLayers; ++layer_idx) {  // shared: layers come one after the other
        arrays[row].insert(arrays[row].end(), {counts[row].data(), attended[row].data()});
      }
    }
  }
  Mailbox mailbox() {
    return {reinterpret_cast<const char*>(query.data()),
            reinterpret_cast<const char*>(kv.data()),
            output.data(),
            lse.data(),
            requests.data(),
            replies.data(),
            kMaxRows};
  }
  ServedStep step(int64_t kv_len) {
    ServedStep result;
    for (int64_t row = 0; row < kMaxRows; ++row) {
      if ((kv_len + row) % 4 == 0) continue;  // not every sequence is in every step
      result.rows.push_back(
          {row, tables[row].data(), kMaxTokens >> kShape.page_shift, kv_len + 30 * row, arrays[row].data(), nullptr});
    }
    return result;
  }
};

// What the GPU computes; the same for both sides.
struct Numbers {
  std::vector<uint16_t> query;
  std::vector<uint16_t> kv;
  Numbers() : query(kNumLayers * kMaxRows * kRow), kv(kNumLayers * kMaxRows * kKv) {
    for (uint16_t& x : query) x = from_float<Bf16>(normal()).bits;
    for (uint16_t& x : kv) x = from_float<Bf16>(normal()).bits;
  }
};

std::vector<Request> make_requests() { return {{0, 0, 1}, {0, 1, 2}, {2, 0, 1}, {2, 1, 2}}; }

void wait_while(const std::atomic<bool>& stop, int32_t* flag, int32_t value) {
  const std::atomic_ref<int32_t> ref(*flag);
  while (ref.load(std::memory_order_acquire) == value && !stop.load()) std::this_thread::yield();
}

// The GPU's step: `ask(i)` returns when the answer is there. Appends what the CPU answered to `answers`.
template <class Ask>
void play(Side& side, const Numbers& numbers, const Ask& ask, std::vector<float>& answers) {
  const std::vector<Request> requests = make_requests();
  for (size_t i = 0; i < requests.size(); ++i) {
    const Request& r = requests[i];
    for (int64_t row = r.first_row; row < r.first_row + r.num_rows; ++row) {
      std::memcpy(side.query.data() + row * kRow, numbers.query.data() + (r.layer_idx * kMaxRows + row) * kRow,
                  kRow * sizeof(uint16_t));
      for (int64_t layer_idx = r.layer_idx == 0 ? 0 : 1; layer_idx <= r.layer_idx; ++layer_idx) {
        const int64_t at = (layer_idx * kMaxRows + row) * kKv;
        std::memcpy(side.kv.data() + at, numbers.kv.data() + at, kKv * sizeof(uint16_t));
      }
    }
    ask(static_cast<int>(i));
    for (int64_t j = r.first_row * kRow; j < (r.first_row + r.num_rows) * kRow; ++j) {
      answers.push_back(side.output[static_cast<size_t>(j)]);
      side.output[static_cast<size_t>(j)] = 0.0f;
    }
  }
}

// The host runs up to `ahead` steps before the GPU.
void steps_are_the_same(int num_threads, int num_steps, bool traced, bool proposes) {
  std::vector<Numbers> numbers(static_cast<size_t>(num_steps));
  std::vector<float> expected, answers;
  Side alone, driven;
  WorkerPool one(1), pool(num_threads, 30);
  DecodeAttention serial(kShape, *scalar_table(), one), parallel(kShape, *scalar_table(), pool);
  serial.set_policy(make_policy(proposes));
  parallel.set_policy(make_policy(proposes));
  serial.probe().start(0.3, 7);
  parallel.probe().start(0.3, 7);
  Coprocessor called(serial, alone.mailbox(), {make_requests(), {0, 1, 1}, 2, 6});
  Coprocessor threaded(parallel, driven.mailbox(), {make_requests(), {0, 1, 1}, 2, 6});
  threaded.set_deadline(60'000'000'000);
  for (int i = 0; i < num_steps; ++i) {
    called.begin(alone.step(20 + i));
    play(
        alone, numbers[static_cast<size_t>(i)],
        [&](int request) {
          const std::string failure = called.serve(request);
          CHECK(failure.empty(), "%s", failure.c_str());
        },
        expected);
    called.end();
  }
  threaded.start();
  std::atomic<int> launched{0};
  const std::atomic<bool> never{false};
  std::thread gpu([&] {
    for (int i = 0; i < num_steps; ++i) {
      while (launched.load() <= i) std::this_thread::yield();
      play(
          driven, numbers[static_cast<size_t>(i)],
          [&](int request) {
            int32_t* reply = driven.replies.data() + request * kFlagStride;
            std::atomic_ref<int32_t>(driven.requests[static_cast<size_t>(request * kFlagStride)]).store(1);
            wait_while(never, reply, 0);
            std::atomic_ref<int32_t>(*reply).store(0);
          },
          answers);
      std::atomic_ref<int32_t>(driven.requests[static_cast<size_t>(4 * kFlagStride)]).store(1);
    }
  });
  for (int i = 0; i < num_steps; ++i) {
    const int64_t number = threaded.queue(driven.step(20 + i));
    launched.fetch_add(1);
    if (traced) threaded.trace().record(i % 3 != 0);
    if (traced) threaded.trace().drain();
    CHECK(parallel.probe().num_found() >= 0, "asked while it serves");
    std::string message;
    while (i % 4 == 3 && threaded.wait(number, 1'000'000, &message) == Coprocessor::Outcome::waiting) {
      CHECK(!threaded.position().empty() && !threaded.is_silent(), "position");
    }
    CHECK(message.empty(), "%s", message.c_str());
  }
  gpu.join();
  std::string message;
  CHECK(threaded.wait(num_steps, 60'000'000'000, &message) == Coprocessor::Outcome::done, "%s", message.c_str());
  CHECK(threaded.close(10'000'000'000) == Coprocessor::Retirement::gone, "close");
  CHECK(relative_error(answers, expected) < 1e-5, "answers");
  const std::vector<MassKept> kept = parallel.probe().found(), wanted = serial.probe().found();
  CHECK(!wanted.empty() && kept.size() == wanted.size(), "probed heads");
  for (size_t i = 0; i < kept.size(); ++i) {
    CHECK(kept[i].count == wanted[i].count, "probes of head %zu", i);
    CHECK(std::abs(kept[i].sum - wanted[i].sum) < 1e-4 * static_cast<double>(1 + kept[i].count), "head %zu", i);
  }
  CHECK(alone.pages == driven.pages, "pages");
  for (int64_t row = 0; row < kMaxRows; ++row) {
    CHECK(alone.counts[row] == driven.counts[row], "prepared and appended");
    CHECK(relative_error(driven.attended[row], alone.attended[row]) < 1e-4, "observed weights");
  }
}

// Lists of each row and KV head that a GPU publishes, in memory that ends with them.
struct Lists {
  static constexpr int64_t kTokens = 40;  // the policy's budget
  static constexpr int64_t kLists = kMaxRows * kShape.num_kv_heads;
  Exact<int32_t> tokens = Exact<int32_t>(kLists * kTokens);
  Exact<int32_t> counts = Exact<int32_t>(kLists);

  Lists() {
    tokens.fill([] { return -1; });
    counts.fill([] { return 0; });
  }
  Mailbox in(Mailbox mailbox) const {
    mailbox.selection = tokens.data();
    mailbox.counts = counts.data();
    mailbox.selection_units = kShape.num_kv_heads;
    mailbox.selection_tokens = kTokens;
    return mailbox;
  }
  // Sinks, some tokens in between, recent ones; others for each layer. Of a row within the budget nobody reads them.
  void publish(const ServedStep& step, const Request& rows, int64_t layer_idx, int kv_head) {
    for (const StepRow& row : step.rows) {
      if (row.slot < rows.first_row || row.slot >= rows.first_row + rows.num_rows || row.kv_len <= kTokens) continue;
      const int64_t list = row.slot * kShape.num_kv_heads + kv_head;
      int32_t n = 0;
      const auto add = [&](int64_t token) {
        std::atomic_ref<int32_t>(tokens[list * kTokens + n++]).store(static_cast<int32_t>(token));
      };
      for (int64_t t = 0; t < 2; ++t) add(t);
      for (int64_t t = 2 + (row.kv_len + layer_idx + kv_head) % 3; t < row.kv_len - 6 && n < kTokens - 6; t += 3)
        add(t);
      for (int64_t t = row.kv_len - 6; t < row.kv_len; ++t) add(t);
      std::atomic_ref<int32_t>(counts[list]).store(n);
    }
  }
};

// A GPU that attends to the heads that retrieve: all of layer 0, and head 0 in layer 1, whose list it replaces while
// the CPU attends to the other head. One attention serves mailboxes that come and go.
void heads_of_the_gpu(int num_threads, int num_rounds, int num_steps) {
  const std::vector<Request> whole{{1, 0, 3}, {2, 0, 3}}, parts{{1, 0, 1}, {1, 1, 2}, {2, 0, 1}, {2, 1, 2}};
  const DeviceHeads heads{{1, 1, 1, 0, 0, 0}, {1, 1, 1, 0, 0, 0}};
  PolicyFunctions policy = make_policy(false);
  for (const Role role : {Role::retrieve, Role::retrieve, Role::retrieve, Role::reuse, Role::reuse, Role::reuse}) {
    policy.roles.push_back(static_cast<uint8_t>(role));
  }
  WorkerPool one(1), pool(num_threads, 30);
  DecodeAttention serial(kShape, *scalar_table(), one), parallel(kShape, *scalar_table(), pool);
  serial.set_policy(policy);
  parallel.set_policy(policy);
  // Appends what the CPU answered; `raise` and `await` are of a request.
  const auto play_heads = [&](const std::vector<Request>& requests, Side& side, Lists& lists, const Numbers& numbers,
                              const ServedStep& step, auto&& raise, auto&& await, std::vector<float>& answers) {
    for (size_t i = 0; i < requests.size(); ++i) {
      const Request& r = requests[i];
      for (int64_t row = r.first_row; row < r.first_row + r.num_rows; ++row) {
        std::memcpy(side.query.data() + row * kRow, numbers.query.data() + (r.layer_idx * kMaxRows + row) * kRow,
                    kRow * sizeof(uint16_t));
        for (int64_t layer_idx = r.layer_idx == 1 ? 0 : 2; layer_idx <= r.layer_idx; ++layer_idx) {
          const int64_t at = (layer_idx * kMaxRows + row) * kKv;
          std::memcpy(side.kv.data() + at, numbers.kv.data() + at, kKv * sizeof(uint16_t));
        }
      }
      if (r.layer_idx == 1) lists.publish(step, r, 0, 0);
      if (r.layer_idx == 1) lists.publish(step, r, 0, 1);
      raise(static_cast<int>(i));
      const bool later = step.rows[0].kv_len % 2 == 1;  // beside the CPU's attending, or its reading ahead
      if (r.layer_idx == 1 && !later) lists.publish(step, r, 1, 0);
      await(static_cast<int>(i));
      if (r.layer_idx == 1 && later) lists.publish(step, r, 1, 0);
      for (int64_t j = r.first_row * kRow; j < (r.first_row + r.num_rows) * kRow; ++j) {
        answers.push_back(side.output[static_cast<size_t>(j)]);
        side.output[static_cast<size_t>(j)] = 0.0f;
      }
    }
  };
  for (int round = 0; round < num_rounds; ++round) {
    const std::vector<Request>& requests = round % 4 < 2 ? whole : parts;
    Side alone, driven;
    Lists of_alone, of_driven;
    std::vector<float> expected, answers;
    Coprocessor called(serial, of_alone.in(alone.mailbox()), {requests, {0, 1, 1}, 2, 6, heads});
    Coprocessor threaded(parallel, of_driven.in(driven.mailbox()), {requests, {0, 1, 1}, 2, 6, heads});
    threaded.start();
    for (int i = 0; i < num_steps; ++i) {
      const Numbers numbers;
      const ServedStep step = alone.step(30 + i);
      called.begin(alone.step(30 + i));
      play_heads(
          requests, alone, of_alone, numbers, step, [](int) {},
          [&](int request) {
            const std::string failure = called.serve(request);
            CHECK(failure.empty(), "%s", failure.c_str());
          },
          expected);
      CHECK(called.end().empty(), "end");
      const int64_t number = threaded.queue(driven.step(30 + i));
      std::thread gpu([&] {
        const std::atomic<bool> never{false};
        play_heads(
            requests, driven, of_driven, numbers, step,
            [&](int request) {
              std::atomic_ref<int32_t>(driven.requests[static_cast<size_t>(request * kFlagStride)]).store(1);
            },
            [&](int request) {
              int32_t* reply = driven.replies.data() + request * kFlagStride;
              wait_while(never, reply, 0);
              std::atomic_ref<int32_t>(*reply).store(0);
            },
            answers);
        std::atomic_ref<int32_t>(driven.requests[requests.size() * kFlagStride]).store(1);
      });
      std::string message;
      CHECK(threaded.wait(number, 60'000'000'000, &message) == Coprocessor::Outcome::done, "%s", message.c_str());
      gpu.join();
    }
    CHECK(threaded.close(10'000'000'000) == Coprocessor::Retirement::gone, "close");
    if (round % 2 == 1) threaded.let_go();
    if (round % 2 == 1) CHECK(parallel.last_selection()[1].empty(), "lists that are gone");
    CHECK(relative_error(answers, expected) < 1e-5, "answers");
    CHECK(alone.pages == driven.pages, "pages");
  }
}

// A ring that nobody drains keeps what came first, and counts the rest; the others have room.
void rings_count_what_they_lose() {
  Trace trace(2);
  CHECK(trace.leader() == nullptr && trace.workers() == nullptr, "off");
  trace.record(true);
  for (uint64_t i = 0; i < Trace::kCapacity + 3; ++i) {
    const TraceSpan span(trace.workers() + 1, {TraceKind::ask, static_cast<int64_t>(i), -1, 0, 0, 1, 0, 2});
  }
  {
    const TraceSpan span(trace, TraceKind::attend, 7, 0);
  }
  trace.record(false);
  {
    const TraceSpan span(trace, TraceKind::attend, 8, 0);
  }
  CHECK(trace.take_num_lost() == 3 && trace.take_num_lost() == 0, "lost");
  const std::vector<TraceEvent> events = trace.drain();
  CHECK(events.size() == Trace::kCapacity + 1 && trace.drain().empty(), "%zu events", events.size());
  CHECK(events[0].worker == -1 && events[0].layer_idx == 7, "the leading thread's come first");
  CHECK(events[1].layer_idx == 0 && events[1].worker == 1 && events[1].unit == 2, "the oldest stay");
  CHECK(events[1].start_ns > 0 && events[1].start_ns <= events[1].end_ns, "times");
}

// Aborted anywhere, also while the thread is stalled or dead: the GPU ends, and the next steps are served.
void aborts(int rounds) {
  Side side;
  const Numbers numbers;
  WorkerPool pool(3, 30);
  DecodeAttention attention(kShape, *scalar_table(), pool);
  attention.set_policy(make_policy(false));
  Coprocessor coprocessor(attention, side.mailbox(), {make_requests(), {0, 1, 1}, 2, 6});
  for (int round = 0; round < rounds; ++round) {
    coprocessor.start();
    if (round % 5 == 1) coprocessor.inject_stall(2, 100'000'000);
    if (round % 5 == 2) coprocessor.inject_death(0);
    std::atomic<bool> never{false};
    for (int i = 0; i < 3; ++i) coprocessor.queue(side.step(50 + i));
    std::thread gpu([&] {
      for (int step = 0; step < 3; ++step) {
        for (int i = 0; i < 4; ++i) {
          int32_t* reply = side.replies.data() + i * kFlagStride;
          std::atomic_ref<int32_t>(side.requests[static_cast<size_t>(i * kFlagStride)]).store(1);
          wait_while(never, reply, 0);
          std::atomic_ref<int32_t>(*reply).store(0);
        }
        std::atomic_ref<int32_t>(side.requests[static_cast<size_t>(4 * kFlagStride)]).store(1);
      }
    });
    std::this_thread::sleep_for(std::chrono::microseconds(uniform(0, 4000)));
    const auto result = coprocessor.abort(round % 5 == 1 ? 20'000'000 : 10'000'000'000);
    CHECK(result != Coprocessor::Retirement::stuck || round % 5 == 1, "stuck");
    gpu.join();
    if (result == Coprocessor::Retirement::stuck) return;  // on a machine that is too busy: this object has had it
    coprocessor.reset();
  }
  coprocessor.start();
}

}  // namespace
}  // namespace offload::test

int main() {
  using namespace offload::test;
  for (const int threads : {1, 2, 4}) {
    for (const bool proposes : {false, true}) steps_are_the_same(threads, 40, threads == 2, proposes);
  }
  for (const int threads : {1, 3}) heads_of_the_gpu(threads, 4, 12);
  rings_count_what_they_lose();
  aborts(60);
  std::puts("ok");
}
