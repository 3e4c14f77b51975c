// The weight stream: each warp reads its weights in one fixed order, pass after pass. Products take lines from it. The
// next lines are in flight while the warp waits for other CTAs, across ops, layers and tokens. The unit is a line: 16
// bytes for each thread of the warp.
//
// With bulk copies a warp has a ring of slots in shared memory, and refills a slot as soon as it has read it. A copy
// never overtakes a read: each thread orders its reads of a slot (reads_done), the warp synchronizes, and then one
// thread issues the copy into the slot. A read never precedes its copy: `take` waits for the barrier of each slot.
// Without bulk copies a product loads its first lines into registers before it waits for its vector (product.h).
//
// A course is the order of a warp's lines: `next` is the line to copy next, most(n) the number of lines, n at most,
// that may be copied from there at once, and `all` their number. Models with experts have another course and another
// ring (routed.h).
#pragma once

#include "edges.h"

namespace laneformer {
namespace gpu {

constexpr int kLineBytes = kWarpSize * 16, kPassLines = kLayerLines + kHeadLines;
#if !LF_EXPERTS
constexpr int kRowLines = kPassLines;  // of a warp in memory; with experts, these follow the lines of a pass
#endif

// The course of an answer: the lines of a pass, repeated. The first `without_head` passes leave out the head.
struct Passes {
  static constexpr u32 all = ~0u;
  int without_head, pass = 0;
  u32 next = 0;

  LF_DEVICE static constexpr int most(int n) { return n; }
  LF_DEVICE void advance(int n) {
    next += n;
    if (next != (u32)(pass < without_head ? kLayerLines : kPassLines)) return;
    next = 0;
    pass++;
  }
};

// The course of a launch of steps.cu: one range of the lines of a pass.
struct Stretch {
  u32 next, all;
  u32 left = all;

  LF_DEVICE u32 line() const { return next; }
  LF_DEVICE u32 passed() const { return 0; }
  LF_DEVICE int most(int n) const { return smaller(n, (int)left); }
  LF_DEVICE void advance(int n) { next += n, left -= n; }
};

#if LF_BULK

// Ends a call in which a copy of weights does not complete. The launch ends too, with a driver's error, because no copy
// may be in flight when a kernel ends. slot: of this warp's ring.
[[noreturn]] LF_COLD void lose_copy(const Params& p, Whereabouts at, int slot) {
  if (p.stuck) {
    const int own = warp() * kSlots + slot;
    fail(p, at, kAtWeights, own, nullptr, 0);
    const u64 until = clock_ns() + p.timeouts_ns[2] - p.timeouts_ns[1];  // by then other CTAs have made their records
    while (clock_ns() < until) pause();
  }
  trap();
}

// Waits for a copy that has not completed yet.
LF_OUTLINED void await_late(const Params& p, Whereabouts at, u64* barrier, u32 parity, int slot) {
  const u64 began = clock_ns();
  for (; !barrier_passed(barrier, parity); pause())
    if (clock_ns() - began > p.timeouts_ns[1]) lose_copy(p, at, slot);
}

// Waits for the copy into a slot of this warp's ring, whose barrier is given.
LF_DEVICE void await_copy(u64* barrier, u32 parity, int slot, const Watch& watch) {
  if (!barrier_passed(barrier, parity)) await_late(watch.params(), watch.whereabouts(), barrier, parity, slot);
}

constexpr int kRingLines = kSlots * kSlotLines, kSlotBytes = kSlotLines * kLineBytes;
constexpr int kRingBytes = kWarps * kRingLines * kLineBytes;

template <class Course>
class Ring {
 public:
  // shared: kRingBytes of shared memory; barriers: 8 kWarps kSlots bytes of it.
  LF_DEVICE Ring(const char* weights, char* shared, u64* barriers, Course course, const Watch& watch)
      : weights_(weights + (i64)warp() * kRowLines * kLineBytes),
        ring_(shared + warp() * kRingLines * kLineBytes),
        barriers_(barriers + warp() * kSlots),
        watch_(watch),
        course_(course) {
    if (warp_lane() == 0) {
      policy_ = stream_policy();
      for (int s = 0; s < kSlots; s++) barrier_init(barriers_ + s);
      barrier_init_done();
    }
    sync_warp();
    for (int s = 0; s < kSlots; s++) issue(s);
  }

  // Reads this thread's part of the next n lines.
  template <int n>
  LF_DEVICE void take(Vec (&out)[n]) {
    static_assert(n + kSlotLines - 1 <= kRingLines, "the ring is smaller than what a step takes");
    await(line_ + n);
    const char* own = ring_ + warp_lane() * 16;
    if (place_ + n <= kRingLines) {  // constant offsets: a load needs no other instruction
      own += place_ * kLineBytes;
      LF_UNROLL for (int i = 0; i < n; i++) out[i] = load_vec(own + i * kLineBytes);
    } else {
      LF_UNROLL for (int i = 0; i < n; i++) out[i] = load_vec(own + (place_ + i) % kRingLines * kLineBytes);
    }
    pass_by(n);
  }

  // Skips the padding up to the next slot, where the layers or the head begin.
  LF_DEVICE void skip_padding(int lines) {
    await(line_ + lines);
    pass_by(lines);
  }

  // Waits for all copies: none may be in flight when the kernel ends.
  LF_DEVICE void drain() {
    const u32 issued = freed_ + kRingLines;
    await(issued < course_.all ? issued : course_.all);
  }

 private:
  LF_DEVICE void await(u32 line) {
    while ((int)(line - ready_) > 0) {
      await_copy(barriers_ + ready_slot_, parity_, ready_slot_, watch_);
      ready_ += kSlotLines;
      if (++ready_slot_ == kSlots) ready_slot_ = 0, parity_ ^= 1;
    }
  }

  LF_DEVICE void pass_by(int lines) {
    line_ += lines;
    place_ += lines;
    if (place_ >= kRingLines) place_ -= kRingLines;
    if (line_ - freed_ < kSlotLines) return;
    reads_done();
    sync_warp();  // all threads have read it
    while (line_ - freed_ >= kSlotLines) {
      issue(free_slot_);
      freed_ += kSlotLines;
      if (++free_slot_ == kSlots) free_slot_ = 0;
    }
  }

  LF_DEVICE void issue(int slot) {
    course_ = issued(course_, weights_, ring_ + slot * kSlotBytes, barriers_ + slot, policy_);
  }

  // Issues the course's next lines into a slot, and returns the rest of the course.
  LF_OUTLINED Course issued(Course course, const char* weights, char* to, u64* barrier, u64 policy) {
    const int lines = course.most(kSlotLines);
    if (lines == 0) return course;
    if (warp_lane() == 0) bulk_copy(to, weights + (i64)course.next * kLineBytes, lines * kLineBytes, barrier, policy);
    course.advance(lines);
    return course;
  }

  const char* weights_;
  char* ring_;
  u64* barriers_;
  const Watch& watch_;
  Course course_;  // of the lines to issue next
  u64 policy_ = 0;
  u32 line_ = 0;               // the line to read next, counted from the start
  int place_ = 0;              // its place in the ring
  u32 ready_ = 0, freed_ = 0;  // lines that have arrived; lines whose slots were refilled
  int ready_slot_ = 0, free_slot_ = 0;
  u32 parity_ = 0;
};

#else

constexpr int kRingBytes = 0;

template <class Course>
class Ring {
 public:
  LF_DEVICE Ring(const char* weights, char*, u64*, Course course, const Watch&)
      : weights_(weights + (i64)warp() * kRowLines * kLineBytes + warp_lane() * 16), course_(course) {}

  template <int n>
  LF_DEVICE void take(Vec (&out)[n]) {
    LF_UNROLL for (int i = 0; i < n; i++) out[i] = load_stream(weights_ + (i64)(course_.next + i) * kLineBytes);
    course_.advance(n);
  }

  LF_DEVICE void skip_padding(int lines) { course_.advance(lines); }

  LF_DEVICE void drain() {}

 private:
  const char* weights_;
  Course course_;
};

#endif

}  // namespace gpu
}  // namespace laneformer

#if LF_EXPERTS
#include "routed.h"
#endif

namespace laneformer {
namespace gpu {

#if !LF_EXPERTS
using PassCourse = Passes;
template <class Course>
using StreamOf = Ring<Course>;
#endif

#if LF_STEPS
using Course = Stretch;
#else
using Course = PassCourse;
#endif
using Stream = StreamOf<Course>;

}  // namespace gpu
}  // namespace laneformer
