// How worker threads wait for each other: a Counter per worker, on its own cache lines (worker.cc). Sessions and slots
// have further counters for jobs, tokens and masks (decoder.cc, schedule.cc).
//
// A waiting thread spins first, because that notices a change fastest, and sleeps on a futex after kSpinNs. It sleeps
// at once if the thread that it waits for last ran on the same core: when other processes compete for the cores, the
// system may put two workers on one core, and a worker that spins there keeps the other from running until its time
// slice ends.
//
// Invariant: no wake-up is lost. `raise` writes the value before it reads the number of sleepers; a sleeper adds itself
// before it reads the value. These accesses have one order, so one of the two reads what the other has written.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
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

// Sleeps while the word is `seen`, for `ns` nanoseconds or 0.1 s at most.
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

// The core that runs the calling thread; -1 if the system does not report it.
inline int this_core() {
#if defined(__linux__)
  return sched_getcpu();  // a few nanoseconds
#else
  return -1;
#endif
}

constexpr int64_t kSpinNs = 100'000;  // several times the 15 to 25 us that waking a sleeper takes on a virtual machine

// A counter that one thread raises and others wait for. It wraps around, so a value and a target that are compared must
// be less than 2^31 apart.
struct alignas(128) Counter {
  std::atomic<uint32_t> value{0};
  std::atomic<uint32_t> sleepers{0};
  std::atomic<int> core{-1};  // core on which it was last raised; -1: unknown

  void raise(uint32_t to) {
    core.store(this_core(), std::memory_order_relaxed);
    value.store(to, std::memory_order_seq_cst);  // before `sleepers` is read: see the top
    if (sleepers.load(std::memory_order_seq_cst)) wake_all(value);
  }

  bool reached(uint32_t target) const { return (int32_t)(value.load(std::memory_order_acquire) - target) >= 0; }

  // Whether the thread that raises this counter is behind and probably needs the core `here`, where it last ran.
  bool needs(int here, uint32_t target) const {
    return here >= 0 && core.load(std::memory_order_relaxed) == here && !reached(target);
  }

  // Waits until the counter has reached `target`. Returns false if `stopped` is set first, or after `timeout_ns`. Spins
  // for at most `spin_ns`, and only while `crowded()` is false, that is, no other thread needs this core; then sleeps.
  template <class Crowded>
  bool wait(uint32_t target, const std::atomic<int>& stopped, int64_t timeout_ns, int64_t spin_ns, Crowded crowded) {
    if (reached(target)) return true;
    const int64_t began = now_ns();
    for (int64_t spun = 0; spun < spin_ns && !crowded(); spun = now_ns() - began)
      for (int i = 0; i < 16; i++) {
        if (reached(target)) return true;
        pause();
      }
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

  bool wait(uint32_t target, const std::atomic<int>& stopped, int64_t timeout_ns, int64_t spin_ns = kSpinNs) {
    return wait(target, stopped, timeout_ns, spin_ns, [&] { return needs(this_core(), target); });
  }
};

}  // namespace laneformer
