// Emulated peers, to measure one lane of several alone on a GPU (scripts/gpu_rank.py): kPeerCtas spare CTAs play the
// other lanes. decode.cu runs them. They write what lane 0 sends to the places of the other lanes, after a delay, so
// that lane 0 waits as in a real exchange. The results are meaningless. What can be measured is the time of a pass, and
// the delay from which on it grows. Always call such figures emulated.
#pragma once

#include "residual.h"
#include "sampling.h"

namespace laneformer {
namespace gpu {

constexpr int kTurns = larger_of(1, kPeerCtas);  // kPeerCtas is usually 0

// CTA i handles the exchanges whose turn is i modulo kTurns, so that others handle the next ones while it waits for its
// delay.
struct Peers {
  const Params& p;
  int index;  // number of this CTA among the emulating ones

  LF_DEVICE void run(int passes) {
    copy(kCheckInAt, 1, kCtas, p.pass_tag, index == 0);
    u32 tag = p.pass_tag + 1, sequence = p.exchange_tag;
    int turn = 0;
    for (int pass = 0; pass < passes && !over(); pass++, tag += kPassTags, sequence += kNumSums + 1) {
      for (int time = 0; time < 2 * kLayers; time++)
        for (int s = 0; s < kNumSums; s++)
          if (kSums[s].complete_at == time) exchange(sequence + s, kSums[s].width, turn++);
      if (Head::kKind != HeadKind::kVocabParallel && pass + 1 >= p.control[0])
        exchange(sequence + kNumSums, kHidden, turn++);
      copy(kPacketsAt + (i64)(tag / kPassTags & 1) * kPackets * kPacketWords, kPacketWords, kCtas, tag,
           index == turn++ % kTurns);
    }
  }

 private:
  static constexpr int kMostWords = (larger_of(kHidden, kCtas* kPacketWords) + kThreads - 1) / kThreads;

  LF_DEVICE bool over() const {
    return load_word(p.shared[0] + 1) == p.pass_tag;
  }  // write_results sets it, also after a failure

  LF_DEVICE void exchange(u32 sequence, int width, int turn) {
    if (turn % kTurns != index) return;
    const i64 from = kMailAt + LaneExchange::at(sequence, 0, 0);
    copy(from, 1, width, sequence, true, kHidden);
  }

  // Waits for each * count words of lane 0 with this tag, and copies them to the other lanes' places, `stride` words
  // apart (0: one directly after the other).
  LF_DEVICE void copy(i64 at, int each, int count, u32 tag, bool mine, int stride = 0) {
    if (!mine) return;
    const int words = each * count;
    if (stride == 0) stride = words;
    u64* board = p.shared[0] + at;
    u64 own[kMostWords];
    LF_UNROLL for (int n = 0; n < kMostWords; n++) {
      const int i = n * kThreads + thread();
      while (i < words && !arrived(own[n] = load_word(board + i), tag)) {
        if (over()) return;
        pause();
      }
    }
    const u64 due = clock_ns() + p.peer_delay_ns;
    while (clock_ns() < due) pause();
    LF_UNROLL for (int n = 0; n < kMostWords; n++) {
      const int i = n * kThreads + thread();
      if (i >= words) continue;
      LF_UNROLL for (int lane = 1; lane < kLanes; lane++) store_word(board + (i64)lane * stride + i, own[n]);
    }
  }
};

}  // namespace gpu
}  // namespace laneformer
