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
constexpr AttentionShape kShape{4, 2, 16, 4, DType::bf16, 0.25f, DType::bf16};
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
  DecodeAttention serial({kShape}, *scalar_table(), one), parallel({kShape}, *scalar_table(), pool);
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
  DecodeAttention serial({kShape}, *scalar_table(), one), parallel({kShape}, *scalar_table(), pool);
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
  DecodeAttention attention({kShape}, *scalar_table(), pool);
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

// Rows that a GPU keeps of layers with hot heads, in memory that ends with them, and what passes between the two.
struct AheadSide : Side {
  static constexpr int64_t kBudget = 40;  // the policy's
  static constexpr int64_t kHotTokens = 2 * kBudget;
  static constexpr int64_t kSets = kMaxRows * kShape.num_kv_heads;
  static constexpr int64_t kRowElements = 2 * int64_t{kShape.head_dim};  // a key, then a value
  HotRows map{kMaxRows, kNumLayers, kShape.num_kv_heads, kHotTokens};
  Exact<uint16_t> predicted = Exact<uint16_t>(2 * kMaxRows * kRow);
  Exact<int32_t> fetches = Exact<int32_t>(2 * kSets * kBudget * 2);
  Exact<int32_t> hot_counts = Exact<int32_t>(2 * kSets * 2);
  Exact<uint16_t> hot = Exact<uint16_t>(kNumLayers * kSets * kHotTokens * kRowElements);
  std::vector<int64_t> counts_of[kMaxRows][kNumLayers];  // one layer learns while the next prepares
  std::vector<float> attended_of[kMaxRows][kNumLayers];

  AheadSide() {
    hot_counts.fill([] { return 0; });
    hot.fill([] { return 0; });
    for (int64_t row = 0; row < kMaxRows; ++row) {
      for (int64_t layer_idx = 0; layer_idx < kNumLayers; ++layer_idx) {
        counts_of[row][layer_idx] = counts[row];
        attended_of[row][layer_idx] = attended[row];
        arrays[row][static_cast<size_t>(2 * layer_idx)] = counts_of[row][layer_idx].data();
        arrays[row][static_cast<size_t>(2 * layer_idx + 1)] = attended_of[row][layer_idx].data();
      }
    }
  }
  Mailbox mailbox() {
    Mailbox mailbox = Side::mailbox();
    mailbox.predicted = reinterpret_cast<const char*>(predicted.data());
    mailbox.fetches = fetches.data();
    mailbox.hot_counts = hot_counts.data();
    mailbox.fetch_tokens = kBudget;
    return mailbox;
  }
  const uint16_t* row_of(int64_t slot, int64_t layer_idx, int64_t side, int64_t kv_head, int64_t token) const {
    const int64_t page_tokens = int64_t{1} << kShape.page_shift, per_layer = kMaxTokens / page_tokens;
    const auto page = static_cast<size_t>(layer_idx * per_layer + token / page_tokens);
    const auto* rows = reinterpret_cast<const uint16_t*>(tables[slot][page]);
    return rows + ((side * kShape.num_kv_heads + kv_head) * page_tokens + token % page_tokens) * kShape.head_dim;
  }
  uint16_t* hot_row(int64_t slot, int64_t layer_idx, int64_t kv_head, int64_t place) {
    const int64_t set = (layer_idx * kMaxRows + slot) * kShape.num_kv_heads + kv_head;
    return hot.data() + (set * kHotTokens + place) * kRowElements;
  }
  // As fetch_rows of gpu_ops; appends what the reply said.
  void fetch(int64_t slot, int64_t layer_idx, std::vector<int32_t>& replied) {
    for (int64_t h = 0; h < kShape.num_kv_heads; ++h) {
      const int64_t at = (layer_idx % 2 * kMaxRows + slot) * kShape.num_kv_heads + h;
      const int32_t n = hot_counts[2 * at];
      replied.insert(replied.end(), {n, hot_counts[2 * at + 1]});
      CHECK(n >= 0 && n <= kBudget, "%d rows to fetch", n);
      for (int64_t i = 0; i < n; ++i) {
        const int32_t token = fetches[(at * kBudget + i) * 2], place = fetches[(at * kBudget + i) * 2 + 1];
        replied.insert(replied.end(), {token, place});
        CHECK(token >= 0 && token < kMaxTokens && place >= 0 && place < kHotTokens, "%d at %d", token, place);
        for (int64_t side = 0; side < 2; ++side) {
          std::memcpy(hot_row(slot, layer_idx, h, place) + side * kShape.head_dim,
                      row_of(slot, layer_idx, side, h, token), kShape.head_dim * sizeof(uint16_t));
        }
      }
    }
  }
  // The GPU's rows are those of the map.
  int64_t check_rows(int64_t layer_idx) {
    int64_t num_hot = 0;
    for (int64_t slot = 0; slot < kMaxRows; ++slot) {
      for (int h = 0; h < kShape.num_kv_heads; ++h) {
        for (const Fetch& fetch : map.hot(slot, layer_idx, h)) {
          for (int64_t side = 0; side < 2; ++side) {
            CHECK(std::memcmp(hot_row(slot, layer_idx, h, fetch.place) + side * kShape.head_dim,
                              row_of(slot, layer_idx, side, h, fetch.token), kShape.head_dim * sizeof(uint16_t)) == 0,
                  "layer %d, slot %d, head %d: token %d at %d", static_cast<int>(layer_idx), static_cast<int>(slot), h,
                  fetch.token, fetch.place);
          }
          ++num_hot;
        }
      }
    }
    return num_hot;
  }
};

// A GPU whose layers attend to rows that are chosen a layer ahead, beside others that the CPU attends to, or does not.
struct AheadStep {
  std::vector<uint8_t> host, hot;                  // of each layer: the CPU attends; its rows are hot
  std::vector<std::pair<int64_t, int64_t>> parts;  // first row, rows of each micro-batch

  DeviceHeads heads() const {
    DeviceHeads heads;
    for (int64_t i = 0; i < kNumLayers * kShape.num_kv_heads; ++i) {
      const auto layer_idx = static_cast<size_t>(i / kShape.num_kv_heads);
      heads.attended.push_back(host[layer_idx] == 0 && hot[layer_idx] == 0);
      heads.hot.push_back(hot[layer_idx]);
    }
    return heads;
  }
  bool is_ahead(int64_t layer_idx) const { return layer_idx < kNumLayers && hot[static_cast<size_t>(layer_idx)] != 0; }
  // In their order, as requests_of in offload/decode/gpu/layer_heads.py.
  std::vector<Request> requests() const {
    std::vector<Request> requests;
    for (int64_t layer_idx = 0; layer_idx < kNumLayers; ++layer_idx) {
      for (const auto& [first, n] : parts) {
        if (host[static_cast<size_t>(layer_idx)] != 0) requests.push_back({layer_idx, first, n});
        if (is_ahead(layer_idx + 1)) requests.push_back({layer_idx + 1, first, n});
      }
    }
    return requests;
  }
  // As DeviceStep: micro-batches take turns in finishing a layer and projecting the next.
  template <class Raise, class Await>
  void play(AheadSide& side, const Numbers& numbers, const ServedStep& step, Raise&& raise, Await&& await,
            std::vector<float>& answers, std::vector<int32_t>& replied) const {
    const std::vector<Request> all = requests();
    const auto number_of = [&](int64_t layer_idx, int64_t first) {
      const auto found = std::find_if(
          all.begin(), all.end(), [&](const Request& r) { return r.layer_idx == layer_idx && r.first_row == first; });
      return static_cast<int>(found - all.begin());
    };
    const auto finish = [&](int64_t layer_idx, int64_t first, int64_t n) {
      if (host[static_cast<size_t>(layer_idx)] != 0) {
        await(number_of(layer_idx, first));
        for (int64_t j = first * kRow; j < (first + n) * kRow; ++j) {
          answers.push_back(side.output[static_cast<size_t>(j)]);
          side.output[static_cast<size_t>(j)] = 0.0f;
        }
      }
      if (!is_ahead(layer_idx + 1)) return;
      await(number_of(layer_idx + 1, first));
      for (const StepRow& row : step.rows) {
        if (row.slot >= first && row.slot < first + n) side.fetch(row.slot, layer_idx + 1, replied);
      }
    };
    const auto project = [&](int64_t layer_idx, int64_t first, int64_t n) {
      for (int64_t row = first; row < first + n; ++row) {
        const int64_t at = layer_idx * kMaxRows + row;
        std::memcpy(side.kv.data() + at * kKv, numbers.kv.data() + at * kKv, kKv * sizeof(uint16_t));
        if (host[static_cast<size_t>(layer_idx)] == 0) continue;
        std::memcpy(side.query.data() + row * kRow, numbers.query.data() + at * kRow, kRow * sizeof(uint16_t));
      }
      if (host[static_cast<size_t>(layer_idx)] != 0) raise(number_of(layer_idx, first));
      if (!is_ahead(layer_idx + 1)) return;
      for (int64_t row = first; row < first + n; ++row) {
        std::memcpy(side.predicted.data() + ((layer_idx + 1) % 2 * kMaxRows + row) * kRow,
                    numbers.query.data() + ((layer_idx + 1) * kMaxRows + row) * kRow, kRow * sizeof(uint16_t));
      }
      raise(number_of(layer_idx + 1, first));
    };
    for (int64_t layer_idx = 0; layer_idx <= kNumLayers; ++layer_idx) {
      for (const auto& [first, n] : parts) {
        if (layer_idx > 0) finish(layer_idx - 1, first, n);
        if (layer_idx < kNumLayers) project(layer_idx, first, n);
      }
    }
  }
  // By a thread's flags.
  void play_driven(AheadSide& side, const Numbers& numbers, const ServedStep& step, std::vector<float>& answers,
                   std::vector<int32_t>& replied) const {
    const std::atomic<bool> never{false};
    play(
        side, numbers, step,
        [&](int request) {
          std::atomic_ref<int32_t>(side.requests[static_cast<size_t>(request * kFlagStride)]).store(1);
        },
        [&](int request) {
          int32_t* reply = side.replies.data() + request * kFlagStride;
          wait_while(never, reply, 0);
          std::atomic_ref<int32_t>(*reply).store(0);
        },
        answers, replied);
    std::atomic_ref<int32_t>(side.requests[requests().size() * kFlagStride]).store(1);
  }
};

// Steps from within the budget to beyond it, in which sequences come and go; the same fetches as on one thread.
void rows_are_fetched_ahead(const AheadStep& plan, int num_threads, int num_steps, bool proposes) {
  WorkerPool one(1), pool(num_threads, 30);
  DecodeAttention serial({kShape}, *scalar_table(), one), parallel({kShape}, *scalar_table(), pool);
  serial.set_policy(make_policy(proposes));
  parallel.set_policy(make_policy(proposes));
  serial.probe().start(0.3, 7);
  parallel.probe().start(0.3, 7);
  AheadSide alone, driven;
  const auto plan_of = [&](AheadSide& side) {
    return StepPlan{plan.requests(), {0, 1, 1}, 2, 6, plan.heads(), &side.map};
  };
  Coprocessor called(serial, alone.mailbox(), plan_of(alone)), threaded(parallel, driven.mailbox(), plan_of(driven));
  threaded.set_deadline(60'000'000'000);
  threaded.start();
  std::vector<float> expected, answers;
  std::vector<int32_t> expected_replies, replied;
  int64_t num_hot = 0;
  for (int i = 0; i < num_steps; ++i) {
    const Numbers numbers;
    const ServedStep step = alone.step(20 + i), same = driven.step(20 + i);
    if (i % 10 == 9) {  // the slot tells of another sequence
      alone.map.forget(i / 10 % kMaxRows);
      driven.map.forget(i / 10 % kMaxRows);
    }
    called.begin(step);
    plan.play(
        alone, numbers, step, [](int) {},
        [&](int request) {
          const std::string failure = called.serve(request);
          CHECK(failure.empty(), "%s", failure.c_str());
        },
        expected, expected_replies);
    CHECK(called.end().empty(), "end");
    const int64_t number = threaded.queue(driven.step(20 + i));
    std::thread gpu([&] { plan.play_driven(driven, numbers, same, answers, replied); });
    std::string message;
    CHECK(threaded.wait(number, 60'000'000'000, &message) == Coprocessor::Outcome::done, "%s", message.c_str());
    gpu.join();
    for (int64_t layer_idx = 1; layer_idx < kNumLayers; ++layer_idx) num_hot += driven.check_rows(layer_idx);
  }
  CHECK(threaded.close(10'000'000'000) == Coprocessor::Retirement::gone, "close");
  CHECK(num_hot > 0 && replied == expected_replies, "what was to be fetched");
  CHECK(answers.size() == expected.size() && relative_error(answers, expected) < 1e-5, "answers");
  CHECK(parallel.probe().num_found() == serial.probe().num_found(), "probes");
  CHECK(alone.pages == driven.pages, "pages");
  for (int64_t row = 0; row < kMaxRows; ++row) {
    for (int64_t layer_idx = 0; layer_idx < kNumLayers; ++layer_idx) {
      CHECK(alone.counts_of[row][layer_idx] == driven.counts_of[row][layer_idx], "prepared and appended");
      CHECK(relative_error(driven.attended_of[row][layer_idx], alone.attended_of[row][layer_idx]) < 1e-4, "observed");
    }
  }
  const auto [hits, misses] = driven.map.take_counts();
  CHECK(alone.map.take_counts() == std::make_pair(hits, misses) && hits > misses, "hits");
}

// Aborted anywhere, also between a request that comes ahead and its reply: what the GPU fetches then is a row of some
// token, in some place; and the next steps are served, of slots that hold nothing.
void aborts_ahead(const AheadStep& plan, int rounds) {
  AheadSide side;
  const Numbers numbers;
  WorkerPool pool(3, 30);
  DecodeAttention attention({kShape}, *scalar_table(), pool);
  attention.set_policy(make_policy(true));
  Coprocessor coprocessor(attention, side.mailbox(), {plan.requests(), {0, 1, 1}, 2, 6, plan.heads(), &side.map});
  std::vector<float> answers;
  std::vector<int32_t> replied;
  for (int round = 0; round < rounds; ++round) {
    coprocessor.start();
    const int fault = round % 5;
    if (fault == 1) coprocessor.inject_stall(1, 100'000'000);
    if (fault == 2) coprocessor.inject_death(1);
    const ServedStep step = side.step(50 + round);
    for (int i = 0; i < 3; ++i) coprocessor.queue(side.step(50 + round));
    std::thread gpu([&] {
      for (int i = 0; i < 3; ++i) plan.play_driven(side, numbers, step, answers, replied);
    });
    std::this_thread::sleep_for(std::chrono::microseconds(uniform(0, 4000)));
    const auto result = coprocessor.abort(fault == 1 ? 20'000'000 : 10'000'000'000);
    CHECK(result != Coprocessor::Retirement::stuck || fault == 1, "stuck");
    gpu.join();
    if (result == Coprocessor::Retirement::stuck) return;  // as above
    for (int64_t slot = 0; slot < kMaxRows; ++slot) side.map.forget(slot);
    coprocessor.reset();
    coprocessor.inject_stall(-1, 0);  // a fault that has not come by now
    coprocessor.inject_death(-1);
    coprocessor.start();
    const int64_t number = coprocessor.queue(side.step(50 + round));
    std::thread again([&] { plan.play_driven(side, numbers, step, answers, replied); });
    std::string message;
    CHECK(coprocessor.wait(number, 60'000'000'000, &message) == Coprocessor::Outcome::done, "%s", message.c_str());
    again.join();
    for (int64_t layer_idx = 1; layer_idx < kNumLayers; ++layer_idx) side.check_rows(layer_idx);
    coprocessor.abort(10'000'000'000);
    coprocessor.reset();
  }
}

}  // namespace
}  // namespace offload::test

int main() {
  using namespace offload::test;
  for (const int threads : {1, 2, 4}) {
    for (const bool proposes : {false, true}) steps_are_the_same(threads, 40, threads == 2, proposes);
  }
  for (const int threads : {1, 3}) heads_of_the_gpu(threads, 4, 12);
  const AheadStep between{{1, 0, 1}, {0, 1, 0}, {{0, 1}, {1, 2}}}, below{{1, 0, 0}, {0, 1, 1}, {{0, 3}}},
      alone{{0, 0, 0}, {0, 1, 1}, {{0, 1}, {1, 2}}};
  for (const AheadStep& plan : {between, below, alone}) {
    for (const int threads : {1, 3}) {
      for (const bool proposes : {false, true}) rows_are_fetched_ahead(plan, threads, 60, proposes);
    }
  }
  rings_count_what_they_lose();
  aborts(60);
  aborts_ahead(between, 20);
  aborts_ahead(alone, 20);
  std::puts("ok");
}
