// The residual stream of a lane: each CTA owns some rows of it, in float32, for the whole generation. The schedule
// (laneformer/layout.py) says when a module's output is added and when the other lanes' outputs land; a thread does all
// of it for its rows.
#pragma once

#include "exchange.h"
#include "product.h"

namespace laneformer {
namespace gpu {

constexpr int kJoinFloats = kStreams * (1 + kStreams);
constexpr bool kExchanged = kLanes > 1 || kAnyMean;  // otherwise a sum is the lane's own part

using LaneExchange = Exchange<kLanes, kMailSlots, kPassRows * kHidden>;

struct Residual {
  const Params& p;
  float* x;        // shared memory, for each of a pass's rows m: [m][channels]
  float* history;  // [m][kHistory][channels]: outputs of the last modules
  float* streams;  // [m][kStreams][channels], where there are several; x is then what a module reads of them
  float* joins;    // [m][kJoinFloats]: how the module's output joins them
  float* scratch;  // [2 * kWarps], [m][channels]
  Watch& watch;
  int lane, first, count;  // channels that the CTA has

  // Threads' own channels r of each of the pass's rows m.
  template <int most, class Body>
  LF_DEVICE void each(const Run<most>& run, Body body) const {
    if constexpr (most == 1 && kStreamRows <= kThreads) {
      const int r = opaque(thread());
      if (r < count) body(0, r);
    } else {
      each_of_rows<kStreamRows>(run, count, body);
    }
  }

  LF_DEVICE float& stream(int m, int r) const { return x[m * kStreamRows + r]; }
  LF_DEVICE float& one_stream(int m, int s, int r) const { return streams[(m * kStreams + s) * kStreamRows + r]; }
  LF_DEVICE float& output(int module, int m, int r) const {
    return history[(m * kHistory + module % kHistory) * kStreamRows + r];
  }

  // token(m): of row m.
  template <int most, class Token>
  LF_DEVICE void begin(const Run<most>& run, Token token) {
    each(run, [&](int m, int r) {
      const float value = element<kEmbedding>(p.embedding, (i64)token(m) * kHidden + first + r);
      if constexpr (kStreams == 0) {
        stream(m, r) = value;
      } else {
        LF_UNROLL for (int s = 0; s < kStreams; s++) one_stream(m, s, r) = value;
      }
    });
    clear_padding(run);
  }

  // A product reads the streams' channels beyond those of the CTA, too.
  template <int most>
  LF_DEVICE void clear_padding(const Run<most>& run) const {
    if constexpr (kStreams > 0) {
      for (int i = opaque(thread()); i < run.count() * kStreams * kStreamRows; i += kThreads)
        if (i % kStreamRows >= count) streams[i] = 0;
    }
  }

  // Module `time` has ended; value(m, r): a channel of its output.
  template <int most, class Channels>
  LF_DEVICE void set_output(const Run<most>& run, int time, Channels value) {
    each(run, [&](int m, int r) { output(time, m, r) = value(m, r); });
  }

  // An op on the output alone, which is its norm.
  template <class Op, int most>
  LF_DEVICE void run(const Run<most>& run, int layer, u32 tag) {
    static_assert(Op::kIsOutputNorm, "an op that is computed here");
    const int time = 2 * layer + Op::kModule;
    float* own = history + time % kHistory * kStreamRows;
    const float* gains = p.small + Op::norm(layer) + (i64)lane * Op::kNormStride;
    norm(
        run, own, kHistory * kStreamRows, [&](int m, int r) { return output(time, m, r); }, kHidden, gains,
        Op::kNormEps, 0, tag + time);
  }

  // What the schedule does with it, and with what arrives at that time.
  template <int most>
  LF_DEVICE void add_output(const Run<most>& run, int time, u32 tag, u32 sequence) {
    if (kExchanged) send(run, time, sequence);
    apply(run, time, tag, sequence);
  }

  template <int most>
  LF_DEVICE void apply(const Run<most>& run, int time, u32 tag, u32 sequence) {
    for (int e = kEventsAt[time]; e < kEventsAt[time + 1]; e++) {
      const Event& event = kEvents[e];
      if (event.landing < 0) {
        each(run, [&](int m, int r) { stream(m, r) += event.weight * output(event.module, m, r); });
        continue;
      }
      const Sum& sum = kSums[event.landing];
      watch.delay();
      const auto sum_of_lanes = [&](int m, int r) {
        return kExchanged ? arrived_sum(event.landing, sequence, m, r) : share(sum, m, r);
      };
      float* normed = scratch + 2 * kWarps;
      if (Modules::kSumNormed)
        norm(run, normed, kStreamRows, sum_of_lanes, sum.width, p.small + Modules::sum_norm(sum.complete_at),
             Modules::kSumNormEps, 1 + e, tag + time);
      each(run, [&](int m, int r) {
        if (first + r >= sum.width) return;
        float total = Modules::kSumNormed ? normed[m * kStreamRows + r] : sum_of_lanes(m, r);
        if constexpr (kStreams > 0) {
          join(m, r, total);
          return;
        }
        if (sum.stream_mean) {
          stream(m, r) = total;
          return;
        }
        for (int i = event.parts; i < event.parts + event.num_parts; i++)
          total -= kParts[i].weight * output(kParts[i].module, m, r);
        stream(m, r) += total;
      });
    }
  }

  // For all CTAs of the lane: two boards take turns.
  template <int most>
  LF_DEVICE void publish(const Run<most>& run, u64* board, u32 tag) const {
    watch.delay();
    each(run, [&](int m, int r) { store_word(board + (i64)m * kLaneWords + first + r, word_of(stream(m, r), tag)); });
  }

 private:
  // Each stream becomes its share of the output, and of all streams.
  LF_DEVICE void join(int m, int r, float output) const {
    const float *post = joins + m * kJoinFloats, *between = post + kStreams;
    float own[kStreams == 0 ? 1 : kStreams];
    LF_UNROLL for (int s = 0; s < kStreams; s++) own[s] = one_stream(m, s, r);
    LF_UNROLL for (int to = 0; to < kStreams; to++) {
      float sum = 0;
      LF_UNROLL for (int from = 0; from < kStreams; from++) sum += own[from] * between[from * kStreams + to];
      one_stream(m, to, r) = sum + output * post[to];
    }
  }

  // RMSNorm of a vector of the lane [width]: of the CTA's channels value(m, r), into out, whose rows are `stride`
  // apart. All CTAs of the lane read the sums of squares, in a place of the board that no other norm has between two
  // edges of the stream.
  template <int most, class Channels>
  LF_DEVICE void norm(const Run<most>& run, float* out, int stride, Channels value, int width, const float* gains,
                      float eps, int place, u32 tag) {
    u64* board = p.boards + (i64)(lane - p.first_lane) * kPassRows * kLaneWords + kRowSumsBoard + place * kCtas;
    if constexpr (most == 1) {
      float sum = 0;
      each(run, [&](int, int r) {
        out[r] = first + r < width ? value(0, r) : 0.0f;
        sum += out[r] * out[r];
      });
      publish_squares(sum, board, tag);
      const float factor = norm_factor(board, width, eps, tag);
      each(run, [&](int, int r) { out[r] = out[r] * factor * gains[first + r]; });
    } else {
      each(run, [&](int m, int r) { out[m * stride + r] = first + r < width ? value(m, r) : 0.0f; });
      sync_cta();
      // The sums of a row are those that it has alone, by the same threads.
      const Run<1> one = {0};
      for (int m = 0; m < run.count(); m++) {
        float sum = 0;
        each(one, [&](int, int r) { sum += out[m * stride + r] * out[m * stride + r]; });
        publish_squares(sum, board + (i64)m * kLaneWords, tag);
        sync_cta();  // the scratch is used again
      }
      for (int m = 0; m < run.count(); m++) {
        const float factor = norm_factor(board + (i64)m * kLaneWords, width, eps, tag);
        each(one, [&](int, int r) { out[m * stride + r] = out[m * stride + r] * factor * gains[first + r]; });
        sync_cta();
      }
    }
  }

  LF_DEVICE void publish_squares(float sum, u64* board, u32 tag) {
    sum = sum_over_cta(sum, scratch);
    watch.delay();
    if (thread() == 0) store_word(board + first / kStreamRows, word_of(sum, tag));
  }

  LF_DEVICE float norm_factor(const u64* board, int width, float eps, u32 tag) {
    float sum = 0;
    for (int from = opaque(thread()); from < kCtas; from += kThreads) {
      sum += wait_for(board + from, tag, watch, kAtVector, from * kStreamRows);
    }
    return rsqrt_of(sum_over_cta(sum, scratch + kWarps) / (float)width + eps);
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

  // A channel of a sum over the lanes.
  LF_DEVICE float arrived_sum(int sum, u32 sequence, int m, int r) const {
    float shares[kLanes];
    LaneExchange::pull(p.shared[p.device] + kMailAt, sequence + sum, m * kHidden + first + r, shares, watch,
                       kAtLanding);
    float total = shares[0];
    LF_UNROLL for (int l = 1; l < kLanes; l++) total += shares[l];
    return total;
  }

  LF_DEVICE float share(const Sum& sum, int m, int r) const {
    float total = 0;
    for (int i = sum.parts; i < sum.parts + sum.num_parts; i++)
      total += kParts[i].weight * output(kParts[i].module, m, r);
    return sum.stream_mean ? total + stream(m, r) / (float)kLanes : total;
  }

  template <int most>
  LF_DEVICE void send(const Run<most>& run, int time, u32 sequence) {
    for (int s = 0; s < kNumSums; s++) {
      const Sum& sum = kSums[s];
      if (sum.complete_at != time) continue;
      watch.delay();
      each(run, [&](int m, int r) {
        if (first + r < sum.width)
          LaneExchange::push(p, kMailAt, sequence + s, lane, m * kHidden + first + r, share(sum, m, r));
      });
    }
  }
};

}  // namespace gpu
}  // namespace laneformer
