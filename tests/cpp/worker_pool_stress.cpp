// The worker pool under load, for ThreadSanitizer: plain (not atomic) results are written by tasks and read by callers,
// so every hand-over that lacks a happens-before is a race that it reports.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "check.h"
#include "pool/worker_pool.h"

namespace offload::test {
namespace {

void pause_us(int64_t us) { std::this_thread::sleep_for(std::chrono::microseconds(us)); }

// One job: every task runs once, on a worker with a number of its own.
void run_job(WorkerPool& pool, int64_t num_tasks, bool near = false) {
  std::vector<int> runs(static_cast<size_t>(num_tasks), 0);
  std::vector<int> on_worker(static_cast<size_t>(pool.num_threads()), 0);
  const int64_t input = uniform(1, 1000);
  std::vector<int64_t> output(runs.size(), 0);
  const auto body = [&](int64_t task, int worker) {
    ++runs[static_cast<size_t>(task)];
    ++on_worker[static_cast<size_t>(worker)];  // two tasks at once on one worker would race
    output[static_cast<size_t>(task)] = input + task;
  };
  if (near) {
    pool.parallel_for_near(num_tasks, body);
  } else {
    pool.parallel_for(num_tasks, body);
  }
  int64_t total = 0;
  for (const int n : on_worker) total += n;
  CHECK(total == num_tasks, "%lld tasks ran instead of %lld", static_cast<long long>(total),
        static_cast<long long>(num_tasks));
  for (int64_t task = 0; task < num_tasks; ++task) {
    CHECK(runs[static_cast<size_t>(task)] == 1, "task %lld", static_cast<long long>(task));
    CHECK(output[static_cast<size_t>(task)] == input + task, "task %lld", static_cast<long long>(task));
  }
}

void many_small_jobs(int num_threads, int64_t spin_us) {
  WorkerPool pool(num_threads, spin_us);
  for (int job = 0; job < 3000; ++job) run_job(pool, job % 23, job % 2 == 0);
}

// All workers take part when each waits for the others; then each has the tasks that prefer it.
void tasks_go_to_their_workers() {
  for (const int num_threads : {2, 4}) {
    for (const int64_t num_tasks : {num_threads, 3 * num_threads + 1}) {
      WorkerPool pool(num_threads, 500);
      pool.keep_awake(true);
      int64_t at_home = 0;
      constexpr int kJobs = 40;
      for (int job = 0; job < kJobs; ++job) {
        std::vector<int> ran_on(static_cast<size_t>(num_tasks), -1);
        pool.parallel_for_near(num_tasks, [&](int64_t task, int worker) {
          ran_on[static_cast<size_t>(task)] = worker;
          pause_us(200);
        });
        for (int64_t task = 0; task < num_tasks; ++task) {
          at_home += ran_on[static_cast<size_t>(task)] == task * num_threads / num_tasks;
        }
      }
      // All, on an idle machine; half of two workers' if one of them gets no CPU.
      CHECK(at_home * 2 >= kJobs * num_tasks, "%lld of %lld", static_cast<long long>(at_home),
            static_cast<long long>(kJobs * num_tasks));
      pool.keep_awake(false);
    }
  }
}

// Pauses on both sides of the spinning time: workers are met spinning, about to sleep and asleep.
void jobs_between_sleeps(int num_threads) {
  WorkerPool pool(num_threads, 50);
  for (int job = 0; job < 300; ++job) {
    pause_us(uniform(0, 1) != 0 ? uniform(30, 80) : 1000);
    run_job(pool, uniform(0, 12), uniform(0, 1) != 0);
  }
}

void several_callers() {
  WorkerPool pool(3, 20);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller) {
    callers.emplace_back([&pool, caller] {
      std::minstd_rand random(static_cast<unsigned>(test::seed()) * 3 + static_cast<unsigned>(caller) + 1);
      for (int job = 0; job < 400; ++job) {
        std::vector<int64_t> seen(random() % 9, -1);
        pool.parallel_for(static_cast<int64_t>(seen.size()),
                          [&](int64_t task, int) { seen[static_cast<size_t>(task)] = task; });
        for (size_t i = 0; i < seen.size(); ++i) CHECK(seen[i] == static_cast<int64_t>(i), "task %zu", i);
        if (job % 40 == 0) pause_us(200);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

// Tasks are started in order, so a task may wait for one of a lower number (key_scan.cpp does).
void tasks_wait_for_earlier_ones() {
  WorkerPool pool(4, 20);
  for (int job = 0; job < 300; ++job) {
    std::vector<std::atomic<bool>> done(20);
    pool.parallel_for(20, [&](int64_t task, int) {
      while (task >= 2 && !done[static_cast<size_t>(task - 2)].load(std::memory_order_acquire))
        std::this_thread::yield();
      done[static_cast<size_t>(task)].store(true, std::memory_order_release);
    });
  }
}

void pools_come_and_go() {
  for (int i = 0; i < 60; ++i) {
    WorkerPool pool(static_cast<int>(uniform(1, 4)), uniform(0, 1) * 500);
    if (i % 3 != 0) run_job(pool, 5);
    if (i % 4 == 0) pause_us(600);  // workers sleep when the pool closes
    if (i % 2 == 0) {
      pool.close();
      run_job(pool, 7, i % 3 == 0);
      pool.close();
    }
  }
}

void closing_beside_a_caller() {
  for (int i = 0; i < 30; ++i) {
    WorkerPool pool(3, 20);
    std::thread caller([&pool] {
      for (int job = 0; job < 20; ++job) {
        int64_t sums[6] = {};
        pool.parallel_for(6, [&](int64_t task, int) { sums[task] = task; });
        CHECK(sums[5] == 5, "job %d", job);
      }
    });
    pool.close();
    caller.join();
  }
}

}  // namespace
}  // namespace offload::test

int main() {
  using namespace offload::test;
  for (const int threads : {1, 2, 4}) many_small_jobs(threads, threads == 2 ? 0 : 500);
  jobs_between_sleeps(2);
  jobs_between_sleeps(4);
  several_callers();
  tasks_wait_for_earlier_ones();
  tasks_go_to_their_workers();
  pools_come_and_go();
  closing_beside_a_caller();
  std::puts("ok");
}
