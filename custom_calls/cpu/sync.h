// How worker threads wait for each other: one counter per worker on its own cache lines, spinning first and sleeping
// after a while.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#endif

namespace laneformer {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Sleeps while the word is `seen`, for a tenth of a second at most.
inline void sleep_while(std::atomic<uint32_t>& word, uint32_t seen, int64_t ns) {
#if defined(__linux__)
  const timespec limit = {0, ns < 100'000'000 ? ns : 100'000'000};
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, seen, &limit, nullptr, 0);
#else
  (void)ns;
  if (word.load() == seen) std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

inline void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

// A counter that one thread raises and others wait for. It wraps around: only distances below 2^31 are compared.
struct alignas(128) Counter {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};

  void raise(uint32_t to) {
    value.store(to, std::memory_order_seq_cst);  // before looking for sleepers, who look the other way round
    if (sleepers.load(std::memory_order_seq_cst)) wake_all(value);
  }

  bool reached(uint32_t target) const { return (int32_t)(value.load(std::memory_order_acquire) - target) >= 0; }

  // Waits until the counter has reached `target`; false if `stopped` was set, or after `timeout_ns`.
  bool wait(uint32_t target, const std::atomic<int>& stopped, int64_t timeout_ns, int spins = 4000) {
    for (int i = 0; i < spins; i++) {
      if (reached(target)) return true;
      pause();
    }
    const int64_t began = now_ns();
    while (!reached(target)) {
      const int64_t left = timeout_ns - (now_ns() - began);
      if (stopped.load(std::memory_order_relaxed) || left <= 0) return false;
      sleepers.fetch_add(1, std::memory_order_seq_cst);
      const uint32_t seen = value.load(std::memory_order_seq_cst);
      if ((int32_t)(seen - target) < 0) sleep_while(value, seen, left);
      sleepers.fetch_sub(1, std::memory_order_relaxed);
    }
    return true;
  }
};

}  // namespace laneformer
