// Work that becomes ready bit by bit, inside one job of a pool: each lane goes through stages of its own, each stage
// has numbered tasks, and whoever finishes the last task of a stage says what comes next. Nobody waits for another
// lane.
//
// Workers have lanes of their own, as WorkerPool::parallel_for_near() deals tasks out, and take what is ready there
// first. Where there are more workers than lanes, those that share a lane start from its two ends: each meets the same
// tasks again when the same lanes run another time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "pool/spin.h"
#include "pool/worker_pool.h"

namespace offload {

class StagedLanes {
 public:
  struct Stage {
    int number = 0;
    int64_t num_tasks = 0;  // 0: the lane is finished
  };

  // Before run(). Allocates only where there are more lanes than ever before.
  void reset(int64_t num_lanes) {
    if (num_lanes > capacity_) {
      lanes_ = std::make_unique<Lane[]>(static_cast<size_t>(num_lanes));
      capacity_ = num_lanes;
    }
    num_lanes_ = num_lanes;
    lanes_left_.store(num_lanes, std::memory_order_relaxed);
  }
  // The lane's first stage; each lane needs one of at least one task, before run().
  void start(int64_t lane, Stage stage) {
    lanes_[lane].begun.store(false, std::memory_order_relaxed);
    open(lanes_[lane], stage);
  }

  // Body has void task(lane, stage number, task, worker) and Stage advance(lane, stage number, worker), which follows
  // the stage's last task.
  template <class Body>
  void run(WorkerPool& pool, Body&& body) {
    pool.parallel_for(pool.num_threads(), [&](int64_t, int worker) { work(pool, body, worker); });
  }
  // On the calling thread.
  template <class Body>
  void run_alone(Body&& body) {
    for (int64_t i = 0; i < num_lanes_; ++i) {
      for (Claim claim; take(lanes_[i], false, &claim);) finish(lanes_[i], i, claim, body, 0);
    }
  }
  // Ends run() without what has not begun.
  void cancel() { lanes_left_.store(0, std::memory_order_relaxed); }

 private:
  struct alignas(64) Lane {
    std::atomic<uint64_t> ready{0};  // stage, first and end of the tasks that nobody has taken
    std::atomic<int64_t> left{0};    // of the stage's tasks, to be finished
    std::atomic<bool> begun{false};
  };
  struct Claim {
    int stage;
    int64_t task;
  };
  static constexpr int kBits = 28;
  static constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;
  static constexpr uint64_t kFinished = ~uint64_t{0};
  static constexpr int kSpins = 256;  // from then on it yields: there may be fewer CPUs than threads

  static void open(Lane& lane, Stage stage) {
    lane.left.store(stage.num_tasks, std::memory_order_relaxed);
    const uint64_t word = static_cast<uint64_t>(stage.number) << (2 * kBits) | static_cast<uint64_t>(stage.num_tasks);
    lane.ready.store(word, std::memory_order_release);
  }

  static bool take(Lane& lane, bool from_end, Claim* claim) {
    uint64_t word = lane.ready.load(std::memory_order_acquire);
    for (;;) {
      const uint64_t first = word >> kBits & kMask;
      const uint64_t end = word & kMask;
      if (word == kFinished || first >= end) return false;
      const uint64_t rest = from_end ? word - 1 : word + (uint64_t{1} << kBits);
      if (!lane.ready.compare_exchange_weak(word, rest, std::memory_order_acquire)) continue;
      *claim = {static_cast<int>(word >> (2 * kBits)), static_cast<int64_t>(from_end ? end - 1 : first)};
      return true;
    }
  }

  template <class Body>
  void finish(Lane& lane, int64_t index, const Claim& claim, Body& body, int worker) {
    body.task(index, claim.stage, claim.task, worker);
    if (lane.left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    const Stage next = body.advance(index, claim.stage, worker);
    if (next.num_tasks > 0) return open(lane, next);
    lane.ready.store(kFinished, std::memory_order_relaxed);
    lanes_left_.fetch_sub(1, std::memory_order_acq_rel);
  }

  template <class Body>
  void work(const WorkerPool& pool, Body& body, int worker) {
    const int64_t begin = pool.block_begin(worker, num_lanes_);
    const int64_t end = pool.block_begin(worker + 1, num_lanes_);
    const bool shares = begin == end;  // the lane before
    const int64_t home = shares ? begin - 1 : begin;
    int64_t finished = 0;  // lanes from home on
    int idle = 0;          // rounds
    while (lanes_left_.load(std::memory_order_acquire) > 0) {
      bool found = false;
      for (int64_t i = finished; i < num_lanes_ && !found; ++i) {
        const int64_t index = (home + i) % num_lanes_;
        Lane& lane = lanes_[index];
        if (i == finished && lane.ready.load(std::memory_order_relaxed) == kFinished) {
          ++finished;
          continue;
        }
        const bool own = !shares && i < end - begin;
        if (!own && idle < kPatience && !lane.begun.load(std::memory_order_relaxed)) continue;  // its worker is coming
        Claim claim;
        if (!take(lane, !own, &claim)) continue;
        if (!lane.begun.load(std::memory_order_relaxed)) lane.begun.store(true, std::memory_order_relaxed);
        finish(lane, index, claim, body, worker);
        found = true;
      }
      if (found) continue;
      cpu_relax();
      if (++idle > kSpins && idle % 64 == 0) std::this_thread::yield();
    }
  }

  std::unique_ptr<Lane[]> lanes_;
  int64_t capacity_ = 0;
  int64_t num_lanes_ = 0;
  alignas(64) std::atomic<int64_t> lanes_left_{0};
};

}  // namespace offload
