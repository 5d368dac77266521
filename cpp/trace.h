// A timeline of what serves the requests of a GPU: one thread records, another drains.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "spin.h"

namespace offload {

enum class TraceKind : int64_t { wait, store, attend, update, prepare, warm };
inline constexpr const char* kTraceKindNames[] = {"wait", "store", "attend", "update", "prepare", "warm"};

struct TraceEvent {
  TraceKind kind;
  int64_t layer_idx;  // -1: none
  int64_t request;    // -1: none
  int64_t start_ns;
  int64_t end_ns;
};

class Trace {
 public:
  // Starts or stops recording; events recorded before stay until they are drained. Of the draining thread.
  void record(bool on) {
    if (on && ring_.empty()) ring_.resize(kCapacity);
    on_.store(on, std::memory_order_release);
  }
  bool on() const { return on_.load(std::memory_order_acquire); }

  // Where nobody drains, the newest events are lost.
  void add(const TraceEvent& event) {
    const uint64_t head = head_.load(std::memory_order_relaxed);
    if (head - tail_.load(std::memory_order_acquire) == kCapacity) {
      num_lost_.fetch_add(1, std::memory_order_relaxed);
      return;
    }
    ring_[head % kCapacity] = event;
    head_.store(head + 1, std::memory_order_release);
  }

  std::vector<TraceEvent> drain() {
    std::vector<TraceEvent> events;
    uint64_t tail = tail_.load(std::memory_order_relaxed);
    for (const uint64_t head = head_.load(std::memory_order_acquire); tail != head; ++tail) {
      events.push_back(ring_[tail % kCapacity]);
    }
    tail_.store(tail, std::memory_order_release);
    return events;
  }
  // Since the last call.
  int64_t take_num_lost() { return num_lost_.exchange(0, std::memory_order_relaxed); }

 private:
  static constexpr uint64_t kCapacity = uint64_t{1} << 16;
  std::vector<TraceEvent> ring_;  // never shrinks: the recording thread may still be in it
  std::atomic<bool> on_{false};
  alignas(64) std::atomic<uint64_t> head_{0};
  alignas(64) std::atomic<uint64_t> tail_{0};
  std::atomic<int64_t> num_lost_{0};
};

// Records the time until it goes.
class TraceSpan {
 public:
  TraceSpan(Trace& trace, TraceKind kind, int64_t layer_idx, int64_t request)
      : trace_(trace.on() ? &trace : nullptr), event_{kind, layer_idx, request, 0, 0} {
    if (trace_ != nullptr) event_.start_ns = now_ns();
  }
  ~TraceSpan() {
    if (trace_ == nullptr) return;
    event_.end_ns = now_ns();
    trace_->add(event_);
  }
  TraceSpan(const TraceSpan&) = delete;
  TraceSpan& operator=(const TraceSpan&) = delete;

 private:
  Trace* trace_;
  TraceEvent event_;
};

}  // namespace offload
