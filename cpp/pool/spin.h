// What threads that wait for each other without a system call need.
#pragma once

#include <chrono>
#include <cstdint>

namespace offload {

inline constexpr int kPatience = 32;    // pauses, 1.5 us: how long a worker that joins is behind another
inline constexpr int kYieldSpins = 64;  // pauses, 3 us, between two yields of one who waits

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Of the clock that Python's time.monotonic_ns() reads.
inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace offload
