// The weight stream of a model with experts; it replaces Ring of stream.h. Which experts' weights are needed is known
// only after the router has run. So a warp has two courses: the fixed course of all other weights, and the pieces of
// the chosen experts (experts.h), which it reads between `open`, after the router, and `close`.
//
// With bulk copies both courses share one ring. A free slot takes the next lines of the chosen experts if any are left,
// otherwise fixed lines. These may follow a router whose experts are unknown: they are in flight while the CTA waits
// for the router, and stay in the ring until the experts have been read. They are ordered only while fixed lines fill
// fewer than kAheadSlots slots, so slots are always left for the experts, and the warp cannot block itself. Slots are
// not read in the order of their places; a queue for each course has the order. Pieces begin at the start of
// a slot, and so do the parts of the fixed course between them; the copies of their last lines are short.
//
// One thread of the warp orders copies and keeps the queues in shared memory; in registers they would take the place of
// weights.
#pragma once

#include "model.h"
#include "numbers.h"

namespace laneformer {
namespace gpu {

#if LF_BULK

// The fixed course: the lines of a pass in parts, the head's last. The first `without_head` passes leave out the head.
struct PartCourse {
  int without_head, pass = 0, part = 0;
  u32 at = 0, routers = 0;  // the line in the part; routers that the course has passed

  LF_DEVICE u32 line() const { return part_line(part) + at; }
  LF_DEVICE u32 passed() const { return routers; }
  LF_DEVICE int most(int n) const { return smaller(n, part_lines(part) - (int)at); }
  LF_DEVICE void advance(int n) {
    at += n;
    if ((int)at != part_lines(part)) return;
    at = 0;
    routers += experts_follow(part);
    if (++part == (pass < without_head ? kCourseParts : kCourseParts + 1)) part = 0, pass++;
  }
};
using PassCourse = PartCourse;

// A queue of slot numbers, four bits each, the first in the lowest bits.
struct Slots {
  u64 numbers = 0;
  int count = 0;

  LF_DEVICE static int number(u64 numbers, int i) { return (int)(numbers >> 4 * i) & 15; }
  LF_DEVICE void push(int slot) { numbers |= (u64)slot << 4 * count++; }
  LF_DEVICE int pop() {
    const int first = number(numbers, 0);
    numbers >>= 4;
    count--;
    return first;
  }
};

// What a warp has ordered and will order, in shared memory.
template <class Course>
struct Orders {
  Course course;
  Slots read[2], free;      // slots to read of the fixed course and of pieces; slots without a copy
  u64 pieces[kMostPieces];  // of each the first line and the number of lines, in 32 bits each
  int count, next, at;      // number of pieces; the piece to order next, and the line in it
  u32 routers;              // routers whose experts were all ordered
  u64 policy;
};

template <class Course>
class RoutedRing {
 public:
  LF_DEVICE RoutedRing(const char* weights, char* shared, u64* barriers, Course course, const Watch& watch)
      : ring_(shared + warp() * kRingLines * kLineBytes),
        barriers_(barriers + warp() * kSlots),
        orders_((Orders<Course>*)((char*)barriers + kBarrierBytes) - (kWarps - warp())),
        watch_(watch),
        weights_(weights) {
    static_assert(kSlots <= 16, "the number of a slot must fit four bits");
    static_assert((int)sizeof(Orders<Course>) * kWarps + 8 * kWarps * kSlots <= kBarrierBytes,
                  "kBarrierBytes is too small for the orders: see custom_calls/gpu/layout.py");
    if (warp_lane() == 0) {
      for (int s = 0; s < kSlots; s++) barrier_init(barriers_ + s);
      barrier_init_done();
      *orders_ = {course, {}, {}, {}, 0, 0, 0, 0, stream_policy()};
      for (int s = 0; s < kSlots; s++) reuse(s);
    }
    look();
  }

  // Until `close` the warp reads `count` pieces of the chosen experts. Thread i passes piece i: its first line among
  // the lane's weights, and its number of lines.
  LF_DEVICE void open(u32 line, int lines, int count) {
    if (warp_lane() < count) orders_->pieces[warp_lane()] = (u64)line << 32 | (u32)lines;
    reading_pieces_ = true;
    sync_warp();
    if (warp_lane() == 0) {
      orders_->count = count;
      orders_->next = orders_->at = 0;
      orders_->routers += count == 0;
      for (int left = orders_->free.count; left > 0; left--) reuse(orders_->free.pop());
    }
    look();
  }

  LF_DEVICE void close() {
    reading_pieces_ = false;
    look();
  }

  // Reads this thread's part of the next n lines.
  template <int n>
  LF_DEVICE void take(Vec (&out)[n]) {
    static_assert(n + kSlotLines - 1 <= kRingLines, "the ring is smaller than what a step takes");
    constexpr int most = (n + 2 * kSlotLines - 2) / kSlotLines;  // slots that n lines may be in
    for (; awaited_ * kSlotLines < at_ + n; awaited_++) await(Slots::number(read_, awaited_));
    const char* from[most + 1];
    LF_UNROLL for (int i = 0; i < most; i++) from[i] =
        ring_ + Slots::number(read_, i) * kSlotBytes + at_ * kLineBytes + warp_lane() * 16;
    from[most] = from[0];
    LF_UNROLL for (int i = 0; i < n; i++) {
      const int in_slot = i % kSlotLines, slot = i / kSlotLines;
      const bool behind = at_ + in_slot >= kSlotLines;
      out[i] = load_vec((behind ? from[slot + 1] - kSlotBytes : from[slot]) + in_slot * kLineBytes);
    }
    at_ += n;
    if (at_ >= kSlotLines) pass_by();
  }

  // Skips the rest of a slot, where a part or a piece ends.
  LF_DEVICE void end_part() {
    if (at_ == 0) return;
    at_ = kSlotLines;
    pass_by();
  }

  LF_DEVICE void skip_padding(int) { end_part(); }

  // Waits for all copies: none may be in flight when the kernel ends.
  LF_DEVICE void drain() {
    for (int of = 0; of < 2; of++) {
      const Slots slots = orders_->read[of];
      for (int i = of == reading_pieces_ ? awaited_ : 0; i < slots.count; i++) await(Slots::number(slots.numbers, i));
    }
  }

 private:
  // Reads the queue after the warp's first thread has changed it.
  LF_DEVICE void look() {
    sync_warp();
    read_ = orders_->read[reading_pieces_].numbers;
  }

  LF_DEVICE void await(int slot) {
    await_copy(barriers_ + slot, parities_ >> slot & 1, slot, watch_);
    parities_ ^= 1u << slot;
  }

  LF_DEVICE void pass_by() {
    const int slots = at_ / kSlotLines;
    at_ %= kSlotLines;
    awaited_ -= slots;
    reads_done();
    sync_warp();  // all threads have read the slots
    if (warp_lane() == 0)
      for (int i = 0; i < slots; i++) reuse(orders_->read[reading_pieces_].pop());
    look();
  }

  // Orders the next lines into a slot, or keeps the slot for later.
  LF_DEVICE void reuse(int slot) {
    Orders<Course>& o = *orders_;
    if (o.next < o.count) {
      const u32 line = (u32)(o.pieces[o.next] >> 32) + o.at;
      const int all = (int)(u32)o.pieces[o.next], lines = smaller(kSlotLines, all - o.at);
      copy(slot, weights_ + ((i64)line - (i64)(cta() % kCtas) * kWarps * kRowLines) * kLineBytes, lines);
      o.read[1].push(slot);
      o.at += lines;
      if (o.at < all) return;
      o.at = 0;
      o.routers += ++o.next == o.count;
      return;
    }
    const int lines = o.course.passed() == o.routers || o.read[0].count < kAheadSlots ? o.course.most(kSlotLines) : 0;
    if (lines == 0) return o.free.push(slot);
    copy(slot, weights_ + ((i64)warp() * kRowLines + o.course.line()) * kLineBytes, lines);
    o.read[0].push(slot);
    o.course.advance(lines);
  }

  LF_DEVICE void copy(int slot, const char* from, int lines) {
    bulk_copy(ring_ + slot * kSlotBytes, from, lines * kLineBytes, barriers_ + slot, orders_->policy);
  }

  char* ring_;
  u64* barriers_;
  Orders<Course>* orders_;
  const Watch& watch_;
  const char* weights_;       // the CTA's weights
  u64 read_;                  // the queue of the course that is read
  int at_ = 0, awaited_ = 0;  // the line in the first slot, and slots whose copies have arrived
  u32 parities_ = 0;          // a bit for each slot
  bool reading_pieces_ = false;
};

#else

using PassCourse = Passes;

template <class Course>
class RoutedRing {
 public:
  LF_DEVICE RoutedRing(const char* weights, char*, u64*, Course course, const Watch&)
      : weights_(weights + warp_lane() * 16), course_(course) {}

  LF_DEVICE void open(u32 line, int lines, int count) {
    line_ = line, piece_ = at_ = 0;
    reading_pieces_ = true;
  }

  LF_DEVICE void close() { reading_pieces_ = false; }

  template <int n>
  LF_DEVICE void take(Vec (&out)[n]) {
    i64 line = (i64)warp() * kRowLines + course_.next;
    if (reading_pieces_) {
      line = (i64)(broadcast(line_, piece_) + at_) - (i64)(cta() % kCtas) * kWarps * kRowLines;
      at_ += n;
    } else {
      course_.advance(n);
    }
    LF_UNROLL for (int i = 0; i < n; i++) out[i] = load_stream(weights_ + (line + i) * kLineBytes);
  }

  LF_DEVICE void end_part() {
    if (reading_pieces_) piece_++, at_ = 0;
  }

  LF_DEVICE void skip_padding(int lines) { course_.advance(lines); }

  LF_DEVICE void drain() {}

 private:
  const char* weights_;  // the CTA's weights
  Course course_;
  u32 line_ = 0;            // first line of piece i, in thread i
  int piece_ = 0, at_ = 0;  // the next piece, and the line in it
  bool reading_pieces_ = false;
};

#endif

template <class Course>
using StreamOf = RoutedRing<Course>;

}  // namespace gpu
}  // namespace laneformer
