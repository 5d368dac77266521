// A timeline of what serves the requests of a GPU: the thread that leads and each worker of the pool record into rings
// of their own, one other thread drains them.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "pool/spin.h"

namespace offload {

// From `ask` on, only workers do it; of the others a worker does a share.
enum class TraceKind : int64_t {
  wait,
  store,
  attend,
  update,
  prepare,
  warm,
  experts,
  ask,
  score,
  choose,
  merge,
  remember
};
inline constexpr const char* kTraceKindNames[] = {"wait",    "store", "attend", "update", "prepare", "warm",
                                                  "experts", "ask",   "score",  "choose", "merge",   "remember"};

struct TraceEvent {
  TraceKind kind;
  int64_t layer_idx;  // -1: none
  int64_t request;    // -1: none
  int64_t start_ns;
  int64_t end_ns;
  // Of a worker's task; -1: the leading thread's.
  int32_t worker = -1;
  int32_t row = -1;   // of those attended together; -1: several
  int32_t unit = -1;  // of the row, the first where there are several; -1: all
};

// One thread records, another drains.
class TraceRing {
 public:
  // Before the first event.
  void allocate(uint64_t capacity) {
    if (ring_.empty()) ring_.resize(capacity);
  }

  // Where nobody drains, the newest events are lost.
  void add(const TraceEvent& event) {
    const uint64_t head = head_.load(std::memory_order_relaxed);
    if (head - tail_.load(std::memory_order_acquire) == ring_.size()) {
      num_lost_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    ring_[head % ring_.size()] = event;
    head_.store(head + 1, std::memory_order_release);
  }

  void drain(std::vector<TraceEvent>& events) {
    uint64_t tail = tail_.load(std::memory_order_relaxed);
    for (const uint64_t head = head_.load(std::memory_order_acquire); tail != head; ++tail) {
      events.push_back(ring_[tail % ring_.size()]);
    }
    tail_.store(tail, std::memory_order_release);
  }
  // Since the last call.
  int64_t take_num_lost() { return num_lost_.exchange(0, std::memory_order_relaxed); }

 private:
  std::vector<TraceEvent> ring_;  // never shrinks: the recording thread may still be in it
  alignas(64) std::atomic<uint64_t> head_{0};
  alignas(64) std::atomic<uint64_t> tail_{0};
  std::atomic<int64_t> num_lost_{0};
};

class Trace {
 public:
  static constexpr uint64_t kCapacity = uint64_t{1} << 15;  // of each ring, 2 MiB

  explicit Trace(int num_workers)
      : num_workers_(num_workers), workers_(std::make_unique<TraceRing[]>(static_cast<size_t>(num_workers))) {}

  // Starts or stops recording; events recorded before stay until they are drained. Of the draining thread.
  void record(bool on) {
    for (int w = 0; w < num_workers_ && on; ++w) workers_[static_cast<size_t>(w)].allocate(kCapacity);
    if (on) leader_.allocate(kCapacity);
    on_.store(on, std::memory_order_release);
  }

  // Null while nothing is recorded. The workers' are for the tasks of one job: who leads it asks once.
  TraceRing* leader() { return on_.load(std::memory_order_acquire) ? &leader_ : nullptr; }
  TraceRing* workers() { return on_.load(std::memory_order_acquire) ? workers_.get() : nullptr; }

  // The leading thread's, then each worker's, by their time within each.
  std::vector<TraceEvent> drain() {
    std::vector<TraceEvent> events;
    leader_.drain(events);
    for (int w = 0; w < num_workers_; ++w) workers_[static_cast<size_t>(w)].drain(events);
    return events;
  }
  // Since the last call.
  int64_t take_num_lost() {
    int64_t num_lost = leader_.take_num_lost();
    for (int w = 0; w < num_workers_; ++w) num_lost += workers_[static_cast<size_t>(w)].take_num_lost();
    return num_lost;
  }

 private:
  const int num_workers_;
  TraceRing leader_;
  std::unique_ptr<TraceRing[]> workers_;
  std::atomic<bool> on_{false};
};

// Records the time until it goes. A null ring costs nothing.
class TraceSpan {
 public:
  TraceSpan(TraceRing* ring, const TraceEvent& event) : ring_(ring) {
    if (ring_ == nullptr) return;
    event_ = event;
    event_.start_ns = now_ns();
  }
  // Of the leading thread.
  TraceSpan(Trace& trace, TraceKind kind, int64_t layer_idx, int64_t request)
      : TraceSpan(trace.leader(), {kind, layer_idx, request, 0, 0}) {}
  ~TraceSpan() {
    if (ring_ == nullptr) return;
    event_.end_ns = now_ns();
    ring_->add(event_);
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  TraceRing* ring_;
  TraceEvent event_;
};

}  // namespace offload
