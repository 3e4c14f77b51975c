// The residual stream of a lane. Each CTA owns some channels of it, in float32 in shared memory, for the whole
// generation. The ops call it where a module ends (DenseOps::end_module) and at the start of a pass.
//
// The schedule (laneformer/layout.py; kEvents and kSums in model.h) says when a module's output is added to the stream
// and when sums over the lanes land in it. A thread does all of that for its own channels, so these steps need no
// barrier. Norms and `publish` are edges between the CTAs of the lane, sums over lanes between lanes (exchange.h).
#pragma once

#include "exchange.h"
#include "product.h"

namespace laneformer {
namespace gpu {

constexpr int kJoinFloats = kStreams * (1 + kStreams);
constexpr bool kExchanged = kLanes > 1 || kAnyMean;  // otherwise a sum over lanes is the lane's own part

using LaneExchange = Exchange<kLanes, kMailSlots, kPassRows * kHidden>;

struct Residual {
  const Params& p;
  float* x;        // [rows of a pass][channels], the stream; all five arrays are in shared memory
  float* history;  // [rows][kHistory][channels], outputs of the last modules
  float* streams;  // [rows][kStreams][channels], where there are several; x is then what a module reads of them
  float* joins;    // [rows][kJoinFloats], how the module's output joins the streams
  float* scratch;  // [2 * kWarps], then [rows][channels]
  Watch& watch;
  int lane, first, count;  // the lane; the CTA's first channel and number of channels

  // Calls body(m, r) for the thread's own channels r of each row m of the pass.
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

  // Sets the stream to the embeddings of the pass's tokens; token(m) is the token of row m.
  template <int most, class Token>
  LF_DEVICE void begin(const Run<most>& run, Token token) {
    each(run, [&](int m, int r) {
      const float value = element<kEmbedding>(p.embedding, (i64)token(m) * kHidden + first + r) * kEmbeddingMultiplier;
      if constexpr (kStreams == 0) {
        stream(m, r) = value;
      } else {
        LF_UNROLL for (int s = 0; s < kStreams; s++) one_stream(m, s, r) = value;
      }
    });
    clear_padding(run);
  }

  // Zeros the padding after the CTA's channels of the streams, because the mixture's product reads them too.
  template <int most>
  LF_DEVICE void clear_padding(const Run<most>& run) const {
    if constexpr (kStreams > 0) {
      for (int i = opaque(thread()); i < run.count() * kStreams * kStreamRows; i += kThreads)
        if (i % kStreamRows >= count) streams[i] = 0;
    }
  }

  // Keeps the output of module `time`; value(m, r): channel r of row m.
  template <int most, class Channels>
  LF_DEVICE void set_output(const Run<most>& run, int time, Channels value) {
    each(run, [&](int m, int r) { output(time, m, r) = value(m, r); });
  }

  // Runs an op on the module's output alone: its norm.
  template <class Op, int most>
  LF_DEVICE void run(const Run<most>& run, int layer, u32 tag) {
    static_assert(Op::kIsOutputNorm, "only OutputNorm is computed here");
    const int time = 2 * layer + Op::kModule;
    float* own = history + time % kHistory * kStreamRows;
    const float* gains = p.small + Op::norm(layer) + (i64)lane * Op::kNormStride;
    norm(
        run, own, kHistory * kStreamRows, [&](int m, int r) { return output(time, m, r); }, kHidden, gains,
        Op::kNormEps, 0, tag + time);
  }

  // Sends the sums over lanes that are complete at this time, and applies the schedule's events.
  template <int most>
  LF_DEVICE void add_output(const Run<most>& run, int time, u32 tag, u32 sequence) {
    if (kExchanged) send(run, time, sequence);
    apply(run, time, tag, sequence);
  }

  // Applies the schedule's events of a time: adds outputs of the lane, and sums over lanes that land, to the stream.
  template <int most>
  LF_DEVICE void apply(const Run<most>& run, int time, u32 tag, u32 sequence) {
    for (int e = kEventsAt[time]; e < kEventsAt[time + 1]; e++) {
      const Event& event = kEvents[e];
      if (event.landing < 0) {
        each(run, [&](int m, int r) { stream(m, r) = fma(event.weight, output(event.module, m, r), stream(m, r)); });
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
          total = fma(-kParts[i].weight, output(kParts[i].module, m, r), total);
        stream(m, r) += total;
      });
    }
  }

  // Publishes the stream to all CTAs of the lane. Two boards take turns (edges.h).
  template <int most>
  LF_DEVICE void publish(const Run<most>& run, u64* board, u32 tag) const {
    watch.delay();
    if constexpr (kStreamTriples > 0) {
      if constexpr (most == 1 && kStreamTriples <= kWarpSize * 3 / 4) {
        sync_warp();  // the first warp has written the channels and reads them
      } else {
        sync_cta();
      }
      for (int m = 0; m < run.count(); m++) {
        Threes<kStreamTriples>::publish(board + (i64)m * kLaneWords, first, count, tag,
                                        [&](int r) { return stream(m, r); });
      }
      return;
    }
    each(run, [&](int m, int r) { store_word(board + (i64)m * kLaneWords + first + r, word_of(stream(m, r), tag)); });
  }

 private:
  // Replaces each stream by its share of the output and a mixture of all streams.
  LF_DEVICE void join(int m, int r, float output) const {
    const float *post = joins + m * kJoinFloats, *between = post + kStreams;
    float own[kStreams == 0 ? 1 : kStreams];
    LF_UNROLL for (int s = 0; s < kStreams; s++) own[s] = one_stream(m, s, r);
    LF_UNROLL for (int to = 0; to < kStreams; to++) {
      float sum = 0;
      LF_UNROLL for (int from = 0; from < kStreams; from++) sum = fma(own[from], between[from * kStreams + to], sum);
      one_stream(m, to, r) = fma(output, post[to], sum);
    }
  }

  // RMSNorm of a vector [width] of the lane. value(m, r): the CTA's channels; out: their normed values, rows `stride`
  // apart. Each CTA publishes its sum of squares and reads those of all CTAs of the lane. place: where the board has
  // these sums; no other norm may use that place between the same two edges of the stream.
  template <int most, class Channels>
  LF_DEVICE void norm(const Run<most>& run, float* out, int stride, Channels value, int width, const float* gains,
                      float eps, int place, u32 tag) {
    u64* board = p.boards + (i64)(lane - p.first_lane) * kPassRows * kLaneWords + kRowSumsBoard + place * kCtas;
    if constexpr (most == 1) {
      float sum = 0;
      each(run, [&](int, int r) {
        out[r] = first + r < width ? value(0, r) : 0.0f;
        sum = fma(out[r], out[r], sum);
      });
      publish_squares(sum, board, tag);
      const float factor = norm_factor(board, width, eps, tag);
      each(run, [&](int, int r) { out[r] = out[r] * factor * gains[first + r]; });
    } else {
      each(run, [&](int m, int r) { out[m * stride + r] = first + r < width ? value(m, r) : 0.0f; });
      sync_cta();
      // The same threads add a row's squares as in a pass of one row, so the bits are the same.
      const Run<1> one = {0};
      for (int m = 0; m < run.count(); m++) {
        float sum = 0;
        each(one, [&](int, int r) { sum = fma(out[m * stride + r], out[m * stride + r], sum); });
        publish_squares(sum, board + (i64)m * kLaneWords, tag);
        sync_cta();  // before the scratch is used again
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

  // The sum over the CTA, in the order of the warps. shared: [kWarps], which no thread still reads.
  LF_DEVICE static float sum_over_cta(float v, float* shared) {
    v = sum_over_warp(v);
    if (warp_lane() == 0) shared[warp()] = v;
    sync_cta();
    v = 0;
    LF_UNROLL for (int w = 0; w < kWarps; w++) v += shared[w];
    return v;
  }

  // Waits for a channel of a sum over the lanes.
  LF_DEVICE float arrived_sum(int sum, u32 sequence, int m, int r) const {
    float shares[kLanes];
    LaneExchange::pull(p.shared[p.device] + kMailAt, sequence + sum, m * kHidden + first + r, shares, watch,
                       kAtLanding);
    float total = shares[0];
    LF_UNROLL for (int l = 1; l < kLanes; l++) total += shares[l];
    return total;
  }

  // The lane's part of a channel of a sum over the lanes.
  LF_DEVICE float share(const Sum& sum, int m, int r) const {
    float total = 0;
    for (int i = sum.parts; i < sum.parts + sum.num_parts; i++)
      total = fma(kParts[i].weight, output(kParts[i].module, m, r), total);
    return sum.stream_mean ? total + stream(m, r) / (float)kLanes : total;
  }

  // Pushes the lane's part of the sums that are complete at a time to all lanes.
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
