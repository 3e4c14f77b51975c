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
  float* scratch;  // [2 * kWarps + rows]
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

  // An op on the output alone, which is its norm.
  template <class Op>
  LF_DEVICE void run(int layer, u32 tag) {
    static_assert(Op::kIsOutputNorm, "an op that is computed here");
    const int time = 2 * layer + Op::kModule;
    float* own = history + time % kHistory * kStreamRows;
    const float* gains = p.small + Op::norm(layer) + (i64)lane * Op::kNormStride;
    norm(own, [&](int r) { return own[r]; }, kHidden, gains, Op::kNormEps, 0, tag + time);
  }

  // What the schedule does with it, and with what arrives at that time.
  LF_DEVICE void add_output(int time, u32 tag, u32 sequence) {
    if (kExchanged) send(time, sequence);
    apply(time, tag, sequence);
  }

  LF_DEVICE float output(int module, int r) const { return history[module % kHistory * kStreamRows + r]; }

  LF_DEVICE void apply(int time, u32 tag, u32 sequence) {
    for (int e = kEventsAt[time]; e < kEventsAt[time + 1]; e++) {
      const Event& event = kEvents[e];
      if (event.landing < 0) {
        each([&](int r) { x[r] += event.weight * output(event.module, r); });
        continue;
      }
      const Sum& sum = kSums[event.landing];
      watch.delay();
      const auto sum_of_lanes = [&](int r) {
        return kExchanged ? arrived_sum(event.landing, sequence, r) : share(sum, r);
      };
      float* normed = scratch + 2 * kWarps;
      if (Modules::kSumNormed)
        norm(normed, sum_of_lanes, sum.width, p.small + Modules::sum_norm(sum.complete_at), Modules::kSumNormEps, 1 + e,
             tag + time);
      each([&](int r) {
        if (first + r >= sum.width) return;
        float total = Modules::kSumNormed ? normed[r] : sum_of_lanes(r);
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
  // RMSNorm of a vector of the lane [width]: of the CTA's rows value(r), into out. All CTAs of the lane read the sums
  // of squares, in a place of the board that no other norm has between two edges of the stream.
  template <class Rows>
  LF_DEVICE void norm(float* out, Rows value, int width, const float* gains, float eps, int place, u32 tag) {
    u64* board = p.boards + (i64)(lane - p.first_lane) * kLaneWords + kRowSumsBoard + place * kCtas;
    float sum = 0;
    each([&](int r) {
      out[r] = first + r < width ? value(r) : 0.0f;
      sum += out[r] * out[r];
    });
    sum = sum_over_cta(sum, scratch);
    watch.delay();
    if (thread() == 0) store_word(board + first / kStreamRows, word_of(sum, tag));
    sum = 0;
    for (int from = opaque(thread()); from < kCtas; from += kThreads) {
      u64 word;
      for (u32 spins = 0; !arrived(word = load_word(board + from), tag);)
        if (!watch.keep_waiting(spins, kAtVector, from * kStreamRows)) break;
      sum += value_of(word);
    }
    const float factor = rsqrt_of(sum_over_cta(sum, scratch + kWarps) / (float)width + eps);
    each([&](int r) { out[r] = out[r] * factor * gains[first + r]; });
  }

  // In the order of the warps; shared: [kWarps], which no thread reads any more.
  LF_DEVICE static float sum_over_cta(float v, float* shared) {
    v = sum_over_warp(v);
    if (warp_lane() == 0) shared[warp()] = v;
    sync_cta();
    v = 0;
    LF_UNROLL for (int w = 0; w < kWarps; w++) v += shared[w];
    return v;
  }

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
