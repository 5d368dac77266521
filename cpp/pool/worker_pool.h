// A pool of threads that runs numbered tasks; the caller is one of the workers.
//
// Between jobs workers spin for a bounded time and then sleep in the kernel. A job never waits for a worker that has
// not joined it: a sleeping or descheduled worker costs nothing but its help. No thread is pinned, no global setting
// of OpenMP, torch or numba is touched.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace offload {

class WorkerPool {
 public:
  // num_threads counts the caller: 1 starts no thread. Throws, with no thread left, if one cannot be started.
  explicit WorkerPool(int num_threads, int64_t spin_us = 500);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int num_threads() const { return num_threads_; }

  // Runs tasks 0 … num_tasks - 1, in that order of start, and returns when all are done. `worker` is below
  // num_threads(). Calls from several threads take turns. In a forked child the caller runs every task itself.
  template <class Body>  // Body: void(int64_t task, int worker) const
  void parallel_for(int64_t num_tasks, const Body& body) {
    run({num_tasks, call<Body>, const_cast<Body*>(&body), false});
  }

  // The same without an order, where task i prefers one worker: i * num_threads() / num_tasks. Called again with as
  // many tasks, it meets the same data in the same core's cache. Each worker drains its own block of tasks and then
  // helps the others; a block that nobody has begun is left alone for a moment, because its worker is about to join.
  template <class Body>
  void parallel_for_near(int64_t num_tasks, const Body& body) {
    run({num_tasks, call<Body>, const_cast<Body*>(&body), true});
  }

  // The first of the tasks that prefer `worker`; they end with the next worker's first.
  int64_t block_begin(int worker, int64_t num_tasks) const {
    return (worker * num_tasks + num_threads_ - 1) / num_threads_;
  }

  // While this is on (calls with true less calls with false), workers do not sleep: for callers who know that jobs come
  // in short order. Wakes them.
  void keep_awake(bool on);

  // Ends the threads; jobs then works on the caller alone. Called by the destructor.
  void close();

 private:
  struct Job {
    int64_t num_tasks = 0;
    void (*task)(void* context, int64_t task, int worker) = nullptr;  // must not throw
    void* context = nullptr;
    bool near = false;
  };
  // The next task of a worker's block.
  struct alignas(64) Block {
    std::atomic<int64_t> next{0};
  };

  template <class Body>
  static void call(void* context, int64_t task, int worker) {
    (*static_cast<const Body*>(context))(task, worker);
  }
  void run(const Job& job);
  void worker_loop(int worker);
  void announce(uint64_t state);
  // Returns when it has changed, and at times before.
  void sleep_through(uint64_t state);
  void work(int worker);
  void work_near(const Job& job, int worker);

  const int num_threads_;
  const int64_t spin_ns_;
  const pid_t owner_;
  std::vector<std::thread> threads_;
  std::mutex run_mutex_;

  std::unique_ptr<Block[]> blocks_;  // of each worker

  Job job_;  // written only while closed and with no worker joined
  // 2 * epoch + 1 while a job is open, 2 * epoch between jobs; kStop ends the workers.
  static constexpr uint64_t kStop = ~uint64_t{0};
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int> joined_{0};
  alignas(64) std::atomic<int64_t> next_task_{0};
  alignas(64) std::atomic<int> kept_awake_{0};
  // Workers sleep on 32 bits, which the kernel can watch by themselves. For what is wider libstdc++ has few words that
  // all waiters of the process share: each job would wake the sleeping workers of every other pool.
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<int32_t> bell_{0};
};

}  // namespace offload
