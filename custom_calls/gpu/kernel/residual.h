// The residual stream of a lane: each CTA owns some rows of it, in float32, for the whole generation. The schedule
// (laneformer/layout.py) says when a module's output is added and when the other lanes' outputs land; a thread does all
// of it for its rows.
#pragma once

#include "exchange.h"
#include "product.h"

namespace laneformer {
namespace gpu {

constexpr bool kExchanged = kLanes > 1 || kAnyMean;  // otherwise a sum is the lane's own part

using LaneExchange = Exchange<kLanes, kMailSlots, kHidden>;

struct Residual {
  const Params& p;
  float* x;        // shared memory, [rows]
  float* history;  // [kHistory][rows]: outputs of the last modules
  Watch& watch;
  int lane, first, count;  // rows that the CTA has

  // Threads' own rows.
  template <class Body>
  LF_DEVICE void each(Body body) const {
    if constexpr (kStreamRows <= kThreads) {
      const int r = opaque(thread());
      if (r < count) body(r);
    } else {
      for (int r = opaque(thread()); r < count; r += kThreads) body(r);
    }
  }

  LF_DEVICE void begin(int token) {
    each([&](int r) { x[r] = element<kEmbedding>(p.embedding, (i64)token * kHidden + first + r); });
  }

  // Module `time` has ended; value(r): a row of its output.
  template <class Rows>
  LF_DEVICE void set_output(int time, Rows value) {
    each([&](int r) { history[time % kHistory * kStreamRows + r] = value(r); });
  }

  // What the schedule does with it, and with what arrives at that time.
  LF_DEVICE void add_output(int time, u32 sequence) {
    if (kExchanged && !kNormedSums) send(time, sequence);
    apply(time, sequence);
  }

  // Its sum over the lanes in place of the lane's own rows. The schedule adds nothing else of it (kNormedSums).
  LF_DEVICE void sum_output(int time, u32 sequence) {
    if (!kExchanged) return;
    send(time, sequence);
    for (int s = 0; s < kNumSums; s++) {
      if (kSums[s].complete_at != time) continue;
      watch.delay();
      each([&](int r) { history[time % kHistory * kStreamRows + r] = arrived_sum(s, sequence, r); });
    }
  }

  LF_DEVICE float output(int module, int r) const { return history[module % kHistory * kStreamRows + r]; }

  LF_DEVICE void apply(int time, u32 sequence) {
    for (int e = kEventsAt[time]; e < kEventsAt[time + 1]; e++) {
      const Event& event = kEvents[e];
      if (event.landing < 0) {
        each([&](int r) { x[r] += event.weight * output(event.module, r); });
        continue;
      }
      const Sum& sum = kSums[event.landing];
      watch.delay();
      each([&](int r) {
        if (first + r >= sum.width) return;
        float total = kExchanged && !kNormedSums ? arrived_sum(event.landing, sequence, r) : share(sum, r);
        if (sum.stream_mean) {
          x[r] = total;
          return;
        }
        for (int i = event.parts; i < event.parts + event.num_parts; i++)
          total -= kParts[i].weight * output(kParts[i].module, r);
        x[r] += total;
      });
    }
  }

  // For all CTAs of the lane: two boards take turns.
  LF_DEVICE void publish(u64* board, u32 tag) const {
    watch.delay();
    each([&](int r) { store_word(board + first + r, word_of(x[r], tag)); });
  }

 private:
  // A row of a sum over the lanes.
  LF_DEVICE float arrived_sum(int sum, u32 sequence, int r) const {
    float shares[kLanes];
    LaneExchange::pull(p.shared[p.device] + kMailAt, sequence + sum, first + r, shares, watch, kAtLanding);
    float total = shares[0];
    LF_UNROLL for (int l = 1; l < kLanes; l++) total += shares[l];
    return total;
  }

  LF_DEVICE float share(const Sum& sum, int r) const {
    float total = 0;
    for (int i = sum.parts; i < sum.parts + sum.num_parts; i++) total += kParts[i].weight * output(kParts[i].module, r);
    return sum.stream_mean ? total + x[r] / (float)kLanes : total;
  }

  LF_DEVICE void send(int time, u32 sequence) {
    for (int s = 0; s < kNumSums; s++) {
      const Sum& sum = kSums[s];
      if (sum.complete_at != time) continue;
      watch.delay();
      each([&](int r) {
        if (first + r < sum.width) LaneExchange::push(p, kMailAt, sequence + s, lane, first + r, share(sum, r));
      });
    }
  }
};

}  // namespace gpu
}  // namespace laneformer
