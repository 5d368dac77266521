// The thread that serves a GPU's requests: it sees a flag rise in shared memory, attends on the pool, raises the reply.
// No Python, no GIL and no system call between the two.
//
// The host queues steps ahead of the GPU; the thread serves them one after the other. Both sides give up after a
// deadline: the thread when the GPU raises no flag, the host when the thread makes no progress. After that, or after
// abort(), every request is answered at once and unserved, so that whatever the GPU still has to run comes to its end.
// A thread that does not come back in time is left behind, with all memory that it may touch.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "coprocessor/step_server.h"

namespace offload {

class Coprocessor {
 public:
  enum class Outcome { done, failed, waiting };
  enum class Retirement { gone, left_behind, stuck };

  Coprocessor(DecodeAttention& attention, const Mailbox& mailbox, StepPlan plan);
  // Where the thread did not end: leaks what it may touch.
  ~Coprocessor();
  Coprocessor(const Coprocessor&) = delete;
  Coprocessor& operator=(const Coprocessor&) = delete;

  void set_deadline(int64_t ns);

  // On the calling thread.
  void begin(ServedStep step);
  std::string serve(int request);
  std::string end();
  // Between steps: the attention keeps no addresses of the mailbox.
  void let_go();

  // By the thread; start() may be called again after reset().
  void start();
  // The number of the step, from 1.
  int64_t queue(ServedStep step);
  int64_t num_done() const;
  // Waits for at most `ns` until step `number` is done. `message` is set where it failed.
  Outcome wait(int64_t number, int64_t ns, std::string* message);
  // Whether the thread has not got on for longer than the deadline, and what it is at.
  bool is_silent() const;
  std::string position() const;

  // Ends serving: drops queued steps, ends the thread within `grace_ns` or leaves it behind, and answers all requests
  // from now on. `stuck`: the thread is inside a step, perhaps for ever, and this object is of no more use.
  Retirement abort(int64_t grace_ns);
  // After abort(), when the GPU is idle: as new, flags down.
  void reset();
  // abort() without answering. In a forked child it does nothing: the thread stayed in the parent.
  Retirement close(int64_t grace_ns);
  bool forked() const;

  Trace& trace();

  // Faults for tests, of the next request of that layer: the thread sleeps before it attends, or ends without a word.
  void inject_stall(int64_t layer_idx, int64_t ns);
  void inject_death(int64_t layer_idx);

 private:
  struct State;
  struct Thread;
  Retirement retire(int64_t grace_ns);
  void end_drain();

  std::shared_ptr<State> state_;  // shared with threads left behind
  std::shared_ptr<Thread> thread_;
  std::thread drain_;
};

}  // namespace offload
