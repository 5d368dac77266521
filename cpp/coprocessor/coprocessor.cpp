#include "coprocessor/coprocessor.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>

namespace offload {
namespace {

constexpr int64_t kNever = -1;  // of a layer
constexpr int64_t kSpinNs = 2'000'000;
constexpr auto kDrainPause = std::chrono::microseconds(20);

// Flags lie in memory that a GPU reads and writes.
bool is_up(int32_t* flag) { return std::atomic_ref<int32_t>(*flag).load(std::memory_order_acquire) != 0; }
void set(int32_t* flag, int32_t value) { std::atomic_ref<int32_t>(*flag).store(value, std::memory_order_release); }

enum class At : int { idle, preparing, waiting, storing, attending, updating, stalled, probing, experts };
constexpr const char* kAtNames[] = {"between steps",       "preparing",
                                    "waiting for the GPU", "storing keys and values",
                                    "attending",           "updating policy, or preparing the next layer",
                                    "stalled on purpose",  "comparing with exact attention",
                                    "running experts"};

}  // namespace

// Whether a thread may be inside memory that is not its own. It enters and leaves by itself; retire() bars one that is
// outside from entering again.
struct Coprocessor::Thread {
  enum Place : int { outside, inside, barred };
  std::thread thread;
  std::atomic<int> place{outside};
  std::atomic<bool> retired{false};
  std::atomic<bool> exited{false};
  std::atomic<bool> keeps_pool_awake{false};

  bool enter() {
    int expected = outside;
    return place.compare_exchange_strong(expected, inside);
  }
  void leave() { place.store(outside); }
};

struct Coprocessor::State {
  State(DecodeAttention& a, const Mailbox& m, StepPlan plan)
      : attention(a), mailbox(m), server(a, m, std::move(plan)) {}

  int32_t* request_flag(size_t i) const { return mailbox.requests + static_cast<int64_t>(i) * kFlagStride; }
  int32_t* reply_flag(size_t i) const { return mailbox.replies + static_cast<int64_t>(i) * kFlagStride; }
  size_t num_requests() const { return server.requests().size(); }
  size_t has_taken() const { return num_requests(); }
  size_t has_begun() const { return num_requests() + 1; }

  void progress(At where, int request) {
    at.store(static_cast<int>(where), std::memory_order_relaxed);
    at_request.store(request, std::memory_order_relaxed);
    progress_ns.store(now_ns(), std::memory_order_relaxed);
  }
  void fail(const std::string& message) {
    const std::lock_guard<std::mutex> lock(mutex);
    failure = message;
    done.notify_all();
  }
  std::string describe(int request) const {
    char text[96];
    if (request >= static_cast<int>(num_requests())) return "the end of the step";
    std::snprintf(text, sizeof text, "layer %lld (request %d of %zu)",
                  static_cast<long long>(server.requests()[static_cast<size_t>(request)].layer_idx), request + 1,
                  num_requests());
    return text;
  }
  // Answers, without serving, whatever the GPU waits for or asks for until `stop`.
  void drain(const std::atomic<bool>& stop) const {
    for (size_t i = 0; i <= has_begun(); ++i) set(reply_flag(i), 1);
    while (!stop.load()) {
      for (size_t i = 0; i <= num_requests(); ++i) {
        if (!is_up(request_flag(i))) continue;
        set(request_flag(i), 0);
        set(reply_flag(i), 1);
      }
      set(reply_flag(has_begun()), 1);
      std::this_thread::sleep_for(kDrainPause);
    }
  }

  bool wait_for(int request, const Thread& self);
  bool pass_faults(int request, Thread& self);
  bool serve_step(const ServedStep& step, Thread& self);
  void warm_up(int next);
  void run(Thread& self);
  // Also for a thread that cannot do it any more.
  void let_pool_sleep(Thread& of) {
    if (of.keeps_pool_awake.exchange(false)) attention.pool().keep_awake(false);
  }

  DecodeAttention& attention;
  const Mailbox mailbox;
  StepServer server;
  ServedStep open;  // on the calling thread
  const pid_t owner = getpid();
  std::atomic<int64_t> deadline_ns{5'000'000'000};

  std::mutex mutex;
  std::condition_variable queued_or_retired;
  std::condition_variable done;
  std::deque<ServedStep> steps;  // not yet begun
  int64_t num_queued = 0;
  std::atomic<int64_t> num_done{0};
  std::string failure;

  std::atomic<int64_t> progress_ns{0};
  std::atomic<int> at{0};
  std::atomic<int> at_request{0};

  std::atomic<bool> drain_ends{false};
  std::atomic<int64_t> stall_layer{kNever};
  std::atomic<int64_t> stall_ns{0};
  std::atomic<int64_t> death_layer{kNever};
};

// False: the thread is to end, or the GPU did not come in time.
bool Coprocessor::State::wait_for(int request, const Thread& self) {
  progress(At::waiting, request);
  const bool ends = request == static_cast<int>(num_requests());
  const TraceSpan span(server.trace(), TraceKind::wait,
                       ends ? -1 : server.requests()[static_cast<size_t>(request)].layer_idx, ends ? -1 : request);
  int32_t* flag = request_flag(static_cast<size_t>(request));
  const int64_t start = progress_ns.load(std::memory_order_relaxed);
  // Sooner than the host, which may be waiting for us: our message says more.
  const int64_t patience = deadline_ns.load(std::memory_order_relaxed) / 10 * 9;
  bool yields = false;
  for (int spins = 1; !is_up(flag); ++spins) {
    cpu_relax();
    if (spins % 64 != 0) continue;
    if (self.retired.load(std::memory_order_relaxed)) return false;
    if (yields)
      std::this_thread::yield();  // on a machine with fewer CPUs than threads, the one who raises it needs one
    const int64_t waited = now_ns() - start;
    yields = waited > kSpinNs;
    if (waited > patience) {
      char text[160];
      std::snprintf(text, sizeof text, "the GPU did not come to %s within %.1f s", describe(request).c_str(),
                    static_cast<double>(patience) * 1e-9);
      fail(text);
      return false;
    }
  }
  set(flag, 0);
  return true;
}

// False: the thread is to end at once.
bool Coprocessor::State::pass_faults(int request, Thread& self) {
  const int64_t layer_idx = server.requests()[static_cast<size_t>(request)].layer_idx;
  int64_t expected = layer_idx;
  if (death_layer.compare_exchange_strong(expected, kNever)) {
    self.leave();
    return false;
  }
  expected = layer_idx;
  if (!stall_layer.compare_exchange_strong(expected, kNever)) return true;
  progress(At::stalled, request);
  self.leave();
  std::this_thread::sleep_for(std::chrono::nanoseconds(stall_ns.load()));
  return self.enter();
}

// For the attention that comes first from request `next` on, while the GPU does not ask for that yet.
void Coprocessor::State::warm_up(int next) {
  const int request = server.attention_from(next);
  if (request == static_cast<int>(num_requests())) return;
  progress(At::preparing, request);
  int32_t* flag = request_flag(static_cast<size_t>(next));
  if (!is_up(flag)) server.warm_up(request, flag);
}

// False: the thread is to end.
bool Coprocessor::State::serve_step(const ServedStep& step, Thread& self) {
  const int num = static_cast<int>(num_requests());
  set(reply_flag(has_begun()), 1);
  server.begin(step);
  if (const int first = server.attention_from(0); first < num) {
    progress(At::preparing, first);
    server.prepare(first);
    warm_up(0);
  }
  for (int i = 0; i < num; ++i) {
    if (!wait_for(i, self)) return false;
    progress(At::storing, i);
    if (death_layer.load(std::memory_order_relaxed) != kNever ||
        stall_layer.load(std::memory_order_relaxed) != kNever) {
      if (!pass_faults(i, self)) return false;
    }
    if (server.is_of_experts(i)) {
      progress(At::experts, i);
      server.run_experts(i);
      set(reply_flag(static_cast<size_t>(i)), 1);
      if (i + 1 < num) warm_up(i + 1);
      continue;
    }
    server.store(i);
    progress(At::attending, i);
    if (const std::string message = server.attend(i); !message.empty()) {
      fail(message);
      return false;
    }
    set(reply_flag(static_cast<size_t>(i)), 1);
    progress(At::updating, i);
    server.update_and_prepare_next(i);
    if (!is_up(request_flag(static_cast<size_t>(i) + 1))) server.remember(i);
    if (i + 1 < num) warm_up(i + 1);
  }
  // While the GPU computes what follows the last layer.
  if (const std::string message = server.check_asked(); !message.empty()) {
    fail(message);
    return false;
  }
  progress(At::probing, num);
  server.run_probes();
  if (!wait_for(num, self)) return false;
  progress(At::storing, num);
  if (const std::string message = server.end(); !message.empty()) {
    fail(message);
    return false;
  }
  set(reply_flag(has_taken()), 1);
  return true;
}

void Coprocessor::State::run(Thread& self) {
  for (;;) {
    ServedStep step;
    {
      std::unique_lock<std::mutex> lock(mutex);
      queued_or_retired.wait(lock, [&] { return self.retired.load() || !steps.empty(); });
      if (self.retired.load()) return;
      step = std::move(steps.front());
      steps.pop_front();
    }
    if (!self.enter()) return;
    self.keeps_pool_awake.store(true);
    attention.pool().keep_awake(true);
    const bool served = serve_step(step, self);
    if (self.place.load() != Thread::inside) return;  // died, or was left behind
    let_pool_sleep(self);
    if (!served) {
      if (!self.retired.load()) drain(self.retired);
      self.leave();
      return;
    }
    progress(At::idle, 0);
    self.leave();
    const std::lock_guard<std::mutex> lock(mutex);
    num_done.fetch_add(1);
    done.notify_all();
  }
}

Coprocessor::Coprocessor(DecodeAttention& attention, const Mailbox& mailbox, StepPlan plan)
    : state_(std::make_shared<State>(attention, mailbox, std::move(plan))) {}

Coprocessor::~Coprocessor() {
  if (close(0) != Retirement::stuck && !forked()) return;
  // In a child the mutex may be locked and the condition waited for by a thread that only the parent has.
  static_cast<void>(new std::shared_ptr<State>(std::move(state_)));
  static_cast<void>(new std::shared_ptr<Thread>(std::move(thread_)));
}

void Coprocessor::set_deadline(int64_t ns) { state_->deadline_ns.store(ns); }
Trace& Coprocessor::trace() { return state_->server.trace(); }
bool Coprocessor::forked() const { return state_->owner != getpid(); }
int64_t Coprocessor::num_done() const { return state_->num_done.load(); }

void Coprocessor::begin(ServedStep step) {
  state_->open = std::move(step);
  state_->server.begin(state_->open);
}

std::string Coprocessor::serve(int request) {
  StepServer& server = state_->server;
  if (server.is_of_experts(request)) {
    server.run_experts(request);
    return {};
  }
  server.prepare(request);
  server.store(request);
  std::string failure = server.attend(request);
  if (failure.empty()) server.update(request);
  return failure;
}

std::string Coprocessor::end() {
  state_->server.run_probes();
  return state_->server.end();
}

void Coprocessor::let_go() { state_->attention.forget_published(); }

void Coprocessor::start() {
  auto thread = std::make_shared<Thread>();
  thread->thread = std::thread([state = state_, self = thread] {
    state->run(*self);
    self->exited.store(true);
  });
  thread_ = std::move(thread);  // not before it runs: starting it may throw
}

int64_t Coprocessor::queue(ServedStep step) {
  const std::lock_guard<std::mutex> lock(state_->mutex);
  if (state_->num_queued == state_->num_done.load()) state_->progress(At::idle, 0);  // it had nothing to do until now
  state_->steps.push_back(std::move(step));
  state_->queued_or_retired.notify_all();
  return ++state_->num_queued;
}

Coprocessor::Outcome Coprocessor::wait(int64_t number, int64_t ns, std::string* message) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  const auto is_over = [&] { return state_->num_done.load() >= number || !state_->failure.empty(); };
  if (!state_->done.wait_for(lock, std::chrono::nanoseconds(ns), is_over)) return Outcome::waiting;
  if (state_->num_done.load() >= number) return Outcome::done;
  *message = state_->failure;
  return Outcome::failed;
}

bool Coprocessor::is_silent() const { return now_ns() - state_->progress_ns.load() > state_->deadline_ns.load(); }

std::string Coprocessor::position() const {
  const int at = state_->at.load();
  std::string text = kAtNames[at];
  if (at != static_cast<int>(At::idle)) text = state_->describe(state_->at_request.load()) + ", " + text;
  return text;
}

Coprocessor::Retirement Coprocessor::retire(int64_t grace_ns) {
  if (thread_ == nullptr || forked()) return Retirement::gone;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    thread_->retired.store(true);
    state_->steps.clear();
    state_->queued_or_retired.notify_all();
  }
  const int64_t end = now_ns() + grace_ns;
  while (!thread_->exited.load() && now_ns() < end) std::this_thread::sleep_for(kDrainPause);
  Retirement result = Retirement::gone;
  if (thread_->exited.load()) {
    if (thread_->thread.joinable()) thread_->thread.join();
  } else {
    int expected = Thread::outside;
    const bool barred = thread_->place.compare_exchange_strong(expected, Thread::barred);
    result = barred || expected == Thread::barred ? Retirement::left_behind : Retirement::stuck;
    if (thread_->thread.joinable()) thread_->thread.detach();
  }
  if (result == Retirement::stuck) return result;  // thread_ stays: there cannot be another
  state_->let_pool_sleep(*thread_);
  thread_.reset();
  return result;
}

void Coprocessor::end_drain() {
  if (!drain_.joinable()) return;
  if (forked()) {  // as WorkerPool::close()
    static_cast<void>(new std::thread(std::move(drain_)));
    return;
  }
  state_->drain_ends.store(true);
  drain_.join();
}

Coprocessor::Retirement Coprocessor::abort(int64_t grace_ns) {
  const bool serves_flags = thread_ != nullptr;
  const Retirement result = retire(grace_ns);
  if (serves_flags && !drain_.joinable()) {
    state_->drain_ends.store(false);
    drain_ = std::thread([state = state_] { state->drain(state->drain_ends); });
  }
  return result;
}

void Coprocessor::reset() {
  end_drain();
  State& state = *state_;
  for (size_t i = 0; i <= state.num_requests(); ++i) set(state.request_flag(i), 0);
  for (size_t i = 0; i <= state.has_begun(); ++i) set(state.reply_flag(i), 0);
  const std::lock_guard<std::mutex> lock(state.mutex);
  state.failure.clear();
  state.num_done.store(state.num_queued);
}

Coprocessor::Retirement Coprocessor::close(int64_t grace_ns) {
  end_drain();
  return retire(grace_ns);
}

void Coprocessor::inject_stall(int64_t layer_idx, int64_t ns) {
  state_->stall_ns.store(ns);
  state_->stall_layer.store(layer_idx);
}

void Coprocessor::inject_death(int64_t layer_idx) { state_->death_layer.store(layer_idx); }

}  // namespace offload
