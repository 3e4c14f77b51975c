// How worker threads wait for each other: a Barrier, which has a Counter per worker. Sessions and slots
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

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
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

struct Stopped {};  // thrown to leave a pass after a failure

// How the workers of a session wait.
struct Waiting {
  int workers;
  Counter* progress;            // by worker: the point that it has reached
  std::atomic<int>& stopped;    // set after a failure
  int64_t timeout_ms, spin_ns;  // how long to wait, and how long of it without sleeping
  int chaos_us;                 // longest random delay at each point, for tests
  std::function<void(const std::string&)> fail;
};

// A worker's place among the points that all workers reach in the same order; a point's number is a count of them.
class Barrier {
 public:
  Barrier(const Waiting& waiting, int index)
      : waiting_(waiting), index_(index), random_(0x9E3779B97F4A7C15u * (index + 1)) {}

  void reset() {  // while all workers are idle
    own().raise(0);
    own().core = -1;  // unknown: the caller's thread, not the worker's, has raised it
    point_ = 0;
  }
  uint32_t arrive() {  // reaches the next point and returns its number
    delay();
    own().raise(++point_);
    return point_;
  }
  // Waits until all workers have reached a point. Throws Stopped after the session's timeout or another failure.
  void wait_for(uint32_t point) {
    Counter *const begin = waiting_.progress, *const end = begin + waiting_.workers;
    const auto crowded = [&] {  // whether any worker that is behind needs this core
      const int here = this_core();
      return std::any_of(begin, end, [&](const Counter& progress) { return progress.needs(here, point); });
    };
    for (int w = 0; w < waiting_.workers; w++)
      if (w != index_ &&
          !begin[w].wait(point, waiting_.stopped, waiting_.timeout_ms * 1'000'000, waiting_.spin_ns, crowded)) {
        waiting_.fail("worker " + std::to_string(w) + " of " + std::to_string(waiting_.workers) +
                      " timed out at the barrier after " + std::to_string(waiting_.timeout_ms) + " ms");
        throw Stopped();
      }
    delay();
  }
  void delay() {  // for a random time, if the session was opened so
    if (waiting_.chaos_us == 0) return;
    random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
    const int64_t until = now_ns() + (int64_t)(random_ % (1000ull * waiting_.chaos_us));
    while (now_ns() < until) std::this_thread::yield();
  }

 private:
  Counter& own() const { return waiting_.progress[index_]; }

  const Waiting& waiting_;
  const int index_;
  uint32_t point_ = 0;  // the last point that it has reached
  uint64_t random_;     // state of the generator of delays
};

}  // namespace laneformer
