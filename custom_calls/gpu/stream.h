// The weight stream: each warp reads its weights of a pass in one fixed order, without end. What it will need next is on its way while it
// waits for other CTAs, over the borders of ops, layers and tokens.
//
// The unit is a line: 16 bytes for each thread of the warp. With bulk copies a warp has a ring of slots in shared memory, which it refills
// itself as soon as it has read them; without, a product keeps its first lines in registers (see product.h).
#pragma once

#include "model.h"
#include "numbers.h"

namespace laneformer {
namespace gpu {

constexpr int kLineBytes = kWarpSize * 16;

#if LF_BULK

constexpr int kRingLines = kSlots * kSlotLines, kSlotBytes = kSlotLines * kLineBytes;
constexpr int kRingBytes = kWarps * kRingLines * kLineBytes;

class Stream {
 public:
  // shared: kRingBytes and 8 kWarps kSlots bytes. without_head: passes that end before the head.
  LF_DEVICE Stream(const char* weights, char* shared, u64* barriers, int without_head)
      : weights_(weights + (i64)warp() * (kLayerLines + kHeadLines) * kLineBytes),
        ring_(shared + warp() * kRingLines * kLineBytes),
        barriers_(barriers + warp() * kSlots),
        without_head_(without_head) {
    if (warp_lane() == 0) {
      policy_ = stream_policy();
      for (int s = 0; s < kSlots; s++) barrier_init(barriers_ + s);
      barrier_init_done();
    }
    sync_warp();
    for (int s = 0; s < kSlots; s++) issue(s);
  }

  // This thread's part of the next n lines.
  template <int n>
  LF_DEVICE void take(Vec (&out)[n]) {
    static_assert(n + kSlotLines - 1 <= kRingLines, "the ring is smaller than what a step takes");
    await(line_ + n);
    LF_UNROLL for (int i = 0; i < n; i++) {
      out[i] = load_vec(ring_ + place_ * kLineBytes + warp_lane() * 16);
      if (++place_ == kRingLines) place_ = 0;
    }
    line_ += n;
    release();
  }

  // To the next border of a slot, where layers and head begin.
  LF_DEVICE void skip_padding(int lines) {
    await(line_ + lines);
    line_ += lines;
    place_ = (place_ + lines) % kRingLines;
    release();
  }

  // Nothing may be on its way when the kernel ends.
  LF_DEVICE void drain() { await(freed_ + kRingLines); }

 private:
  LF_DEVICE void await(u32 line) {
    while ((int)(line - ready_) > 0) {
      const u32 slot = ready_ / kSlotLines % kSlots, parity = ready_ / kRingLines & 1;
      while (!barrier_passed(barriers_ + slot, parity)) pause();
      ready_ += kSlotLines;
    }
  }

  LF_DEVICE void release() {
    while (line_ - freed_ >= kSlotLines) {
      sync_warp();  // all have read it
      issue(freed_ / kSlotLines % kSlots);
      freed_ += kSlotLines;
    }
  }

  LF_DEVICE void issue(int slot) {
    if (warp_lane() == 0)
      bulk_copy(ring_ + slot * kSlotBytes, weights_ + (i64)next_ * kLineBytes, kSlotBytes, barriers_ + slot, policy_);
    next_ += kSlotLines;
    const bool without_head = pass_ < without_head_;
    if (next_ == (without_head ? kLayerLines : kLayerLines + kHeadLines)) {
      next_ = 0;
      pass_++;
    }
  }

  const char* weights_;
  char* ring_;
  u64* barriers_;
  int without_head_, pass_ = 0;
  u64 policy_ = 0;
  u32 next_ = 0;              // line of the pass that is issued next
  u32 line_ = 0, place_ = 0;  // read next: counted from the start, and in the ring
  u32 ready_ = 0, freed_ = 0;
};

#else

constexpr int kRingBytes = 0;

class Stream {
 public:
  LF_DEVICE Stream(const char* weights, char*, u64*, int without_head)
      : weights_(weights + (i64)warp() * (kLayerLines + kHeadLines) * kLineBytes + warp_lane() * 16), without_head_(without_head) {}

  template <int n>
  LF_DEVICE void take(Vec (&out)[n]) {
    LF_UNROLL for (int i = 0; i < n; i++) out[i] = load_stream(weights_ + (i64)(next_ + i) * kLineBytes);
    next_ += n;
    turn();
  }

  LF_DEVICE void skip_padding(int lines) {
    next_ += lines;
    turn();
  }

  LF_DEVICE void drain() {}

 private:
  LF_DEVICE void turn() {
    if (next_ != (pass_ < without_head_ ? kLayerLines : kLayerLines + kHeadLines)) return;
    next_ = 0;
    pass_++;
  }

  const char* weights_;
  int without_head_, pass_ = 0;
  u32 next_ = 0;
};

#endif

}  // namespace gpu
}  // namespace laneformer
