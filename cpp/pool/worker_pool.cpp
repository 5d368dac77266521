#include "pool/worker_pool.h"

#include <unistd.h>

#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

#include "pool/spin.h"

namespace offload {

WorkerPool::WorkerPool(int num_threads, int64_t spin_us)
    : num_threads_(num_threads),
      spin_ns_(spin_us * 1000),
      owner_(getpid()),
      blocks_(std::make_unique<Block[]>(static_cast<size_t>(num_threads))) {
  threads_.reserve(static_cast<size_t>(num_threads - 1));
  try {
    for (int worker = 1; worker < num_threads; ++worker) threads_.emplace_back([this, worker] { worker_loop(worker); });
  } catch (const std::system_error& error) {
    const size_t started = threads_.size() + 1;
    close();
    throw std::runtime_error("num_threads is " + std::to_string(num_threads) + ", but only " + std::to_string(started) +
                             " threads could be started (" + error.code().message() +
                             "); give fewer, or raise the limit of threads or of memory");
  }
}

WorkerPool::~WorkerPool() { close(); }

void WorkerPool::close() {
  if (getpid() != owner_) {
    // The threads stayed in the parent: nothing here may be joined or detached, and a handle must not go either.
    static_cast<void>(new std::vector<std::thread>(std::move(threads_)));
    threads_.clear();
    return;
  }
  const std::lock_guard<std::mutex> lock(run_mutex_);
  announce(kStop);
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void WorkerPool::run(const Job& job) {
  const auto run_alone = [&] {
    for (int64_t i = 0; i < job.num_tasks; ++i) job.task(job.context, i, 0);
  };
  if (num_threads_ == 1 || job.num_tasks <= 1 || getpid() != owner_) return run_alone();
  const std::lock_guard<std::mutex> lock(run_mutex_);
  const uint64_t closed = state_.load(std::memory_order_relaxed);
  if (closed == kStop) return run_alone();
  job_ = job;
  next_task_.store(0, std::memory_order_relaxed);
  for (int w = 0; w < num_threads_ && job.near; ++w) {
    blocks_[static_cast<size_t>(w)].next.store(block_begin(w, job.num_tasks), std::memory_order_relaxed);
  }
  announce(closed + 1);
  work(0);
  // Closing and then reading joined_ pairs with a worker's joining and then reading state_ (all sequentially
  // consistent): either the worker sees the job closed, or we see the worker and wait for it.
  state_.store(closed + 2);
  for (int spins = 1; joined_.load() != 0; ++spins) {
    cpu_relax();
    if (spins % kYieldSpins == 0) std::this_thread::yield();  // it may have been put aside for us
  }
}

void WorkerPool::announce(uint64_t state) {
  state_.store(state);
  if (sleepers_.load() == 0) return;
  bell_.fetch_add(1);
  bell_.notify_all();
}

// Counting itself and then reading state_ pairs with announcing a state and then reading sleepers_ (all sequentially
// consistent): either the worker sees the new state, or the bell rings for it.
void WorkerPool::sleep_through(uint64_t state) {
  sleepers_.fetch_add(1);
  const int32_t heard = bell_.load();
  if (state_.load() == state) bell_.wait(heard);
  sleepers_.fetch_sub(1);
}

void WorkerPool::keep_awake(bool on) {
  kept_awake_.fetch_add(on ? 1 : -1, std::memory_order_relaxed);
  if (on) parallel_for(num_threads_, [](int64_t, int) {});
}

void WorkerPool::work(int worker) {
  const Job job = job_;
  if (job.near) return work_near(job, worker);
  for (;;) {
    const int64_t task = next_task_.fetch_add(1, std::memory_order_relaxed);
    if (task >= job.num_tasks) return;
    job.task(job.context, task, worker);
  }
}

// Returns when every task has been taken by somebody.
void WorkerPool::work_near(const Job& job, int worker) {
  int patience = kPatience;
  for (bool left_alone = true; left_alone; --patience) {
    left_alone = false;
    for (int i = 0; i < num_threads_; ++i) {
      const int of = (worker + i) % num_threads_;
      std::atomic<int64_t>& next = blocks_[static_cast<size_t>(of)].next;
      const int64_t begin = block_begin(of, job.num_tasks);
      const int64_t end = block_begin(of + 1, job.num_tasks);
      // Looking first keeps the counters of drained blocks in everybody's cache.
      for (int64_t task = next.load(std::memory_order_relaxed); task < end;
           task = next.load(std::memory_order_relaxed)) {
        if (i > 0 && task == begin && patience > 0) {
          left_alone = true;
          break;
        }
        task = next.fetch_add(1, std::memory_order_relaxed);
        if (task < end) job.task(job.context, task, worker);
      }
    }
    if (left_alone) cpu_relax();
  }
}

void WorkerPool::worker_loop(int worker) {
  uint64_t seen = 0;  // the state of the last job this worker has worked on
  for (;;) {
    uint64_t state = state_.load(std::memory_order_acquire);
    int64_t deadline = 0;
    for (int spins = 1; state % 2 == 0 || state == seen; ++spins) {
      cpu_relax();
      if (spins % kYieldSpins == 0) {
        const int64_t now = now_ns();
        if (deadline == 0) deadline = now + spin_ns_;
        if (now > deadline && kept_awake_.load(std::memory_order_relaxed) == 0) {
          sleep_through(state);
        } else {
          // Whoever shares this CPU may have work that all wait for: it would have to sit out our spinning.
          std::this_thread::yield();
        }
      }
      state = state_.load(std::memory_order_acquire);
    }
    if (state == kStop) return;
    joined_.fetch_add(1);
    state = state_.load();
    if (state % 2 == 1 && state != kStop) {
      work(worker);
      seen = state;
    }
    joined_.fetch_sub(1);
  }
}

}  // namespace offload
