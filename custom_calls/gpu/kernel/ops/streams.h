// Several residual streams: what a module reads of them. Residual joins its output to them;
// laneformer/blocks/streams.py has the equations.
//
// A CTA owns its channels of all streams. It multiplies them by its columns of the mixing matrix, which are in the
// weight stream, and publishes these parts of the sums with the sum of the channels' squares. All CTAs of the lane add
// all parts in the same order: an edge more for each module. How the output joins the streams is not needed before the
// module ends, so one warp computes that once the stream is published, while its words are on their way.
#pragma once

#include "dense.h"

namespace laneformer {
namespace gpu {

// A CTA's channels of all streams, and the sum of their squares: squares [rows][kWarps], of each warp's columns.
template <class Shape, int rows>
struct SquaredFromShared {
  FromShared<Shape, rows> channels;
  float* squares;

  LF_DEVICE void operator()(int segment, float (&x)[rows][Shape::kVectors][kPer<Shape>]) const {
    channels(segment, x);
    LF_UNROLL for (int m = 0; m < rows; m++) {
      float sum = 0;
      LF_UNROLL for (int v = 0; v < Shape::kVectors; v++) {
        LF_UNROLL for (int i = 0; i < kPer<Shape>; i++) sum += x[m][v][i] * x[m][v][i];
      }
      LF_UNROLL for (int mask = 1; mask < Shape::kGroup; mask *= 2) sum += shuffle(sum, mask);
      float& own = squares[m * kWarps + warp()];
      if (warp_lane() == 0) own = segment == 0 ? sum : own + sum;
    }
  }
};

// Makes the rows and the columns of a matrix of logits sum to about 1 (Sinkhorn).
template <int n>
LF_DEVICE void balance(float (&x)[n][n], int iterations, float eps) {
  LF_UNROLL for (int i = 0; i < n; i++) {
    float largest = x[i][0], sum = 0;
    LF_UNROLL for (int j = 1; j < n; j++) largest = larger(largest, x[i][j]);
    LF_UNROLL for (int j = 0; j < n; j++) sum += x[i][j] = exp_of(x[i][j] - largest);
    LF_UNROLL for (int j = 0; j < n; j++) x[i][j] = x[i][j] / sum + eps;
  }
  for (int iteration = 0; iteration < iterations; iteration++) {
    LF_UNROLL for (int i = 0; i < n; i++) {
      float sum = eps;
      LF_UNROLL for (int j = 0; j < n; j++) sum += x[i][j];
      const float factor = iteration == 0 ? 1.0f : 1.0f / sum;  // the softmax has divided the rows
      LF_UNROLL for (int j = 0; j < n; j++) x[i][j] *= factor;
    }
    LF_UNROLL for (int j = 0; j < n; j++) {
      float sum = eps;
      LF_UNROLL for (int i = 0; i < n; i++) sum += x[i][j];
      const float factor = 1.0f / sum;
      LF_UNROLL for (int i = 0; i < n; i++) x[i][j] *= factor;
    }
  }
}

class StreamOps : public DenseOps {
 public:
  using DenseOps::DenseOps;

 protected:
  // STREAM of the module at a time, or of the head, for all CTAs of the lane.
  template <class Op, int most>
  LF_DEVICE void gather_streams(const Run<most>& run, int layer, int time, u32 tag) {
    constexpr int words = Op::kRows + 1 + (Op::kRows + 1) % 2, pairs = words / 2, groups = kThreads / pairs,
                  each = (kCtas + groups - 1) / groups;
    static_assert(groups > 0 && kPassRows * (groups + 1) * words <= kScratchFloats, "the sums have room");
    const float *factors = small(Op::factors(layer), Op::kFactorsStride),
                *offsets = small(Op::offsets(layer), Op::kOffsetsStride);
    float offset[kStreams];  // on their way while parts are awaited
    LF_UNROLL for (int s = 0; s < kStreams; s++) offset[s] = offsets[s];
    const float factor = factors[0];
    float *partial = next_partial(), *squares = this->squares(turn_);
    sync_cta();  // other threads' channels
    const FromShared<Op, most> channels = {residual.streams, kStreams * kStreamRows};
    product<Op, most>(stream_, weights<Op>(layer), partial, shared_.brought,
                      SquaredFromShared<Op, most>{channels, squares});
    sync_cta();
    watch_.delay();
    u64* board = boards_ + kMixtureBoard;
    each_of_rows<words>(run, words, [&](int m, int w) {
      float value = 0;
      if (w < Op::kRows) {
        value = row_sum<Op, most>(partial, w, m);
      } else if (w == Op::kRows) {
        LF_UNROLL for (int i = 0; i < kWarps; i++) value += squares[m * kWarps + i];
      }
      store_word(board + (i64)m * kLaneWords + c_ * words + w, word_of(value, tag + time));
    });
    // A thread adds two words of every `groups`-th CTA; then one thread the groups' sums of a word.
    float values[most][each][2];
    const int group = opaque(thread()) / pairs, pair = thread() % pairs;
    const bool reads = group < groups;
    read_words<false>(
        boards_of(board, run), reads ? group * words + 2 * pair : kCtas * words, kCtas * words, tag + time,
        [](int v, int) { return v * groups * words; }, values, watch_, kAtVector);
    float *sums = shared_.scratch, *totals = sums + kPassRows * groups * words;
    LF_UNROLL for (int m = 0; m < most; m++) {
      float a = 0, b = 0;
      LF_UNROLL for (int v = 0; v < each; v++) a += values[m][v][0], b += values[m][v][1];
      float* own = sums + (m * groups + group) * words + 2 * pair;
      if (reads) own[0] = a, own[1] = b;
    }
    sync_cta();
    each_of_rows<words>(run, words, [&](int m, int w) {
      float total = 0;
      LF_UNROLL for (int g = 0; g < groups; g++) total += sums[(m * groups + g) * words + w];
      totals[m * words + w] = total;
    });
    sync_cta();
    const auto norm_of = [&](int m) {
      return rsqrt_of(totals[m * words + Op::kRows] / (float)(kStreams * kHidden) + Op::kNormEps);
    };
    residual.each(run, [&](int m, int r) {
      const float norm = norm_of(m);
      float sum = 0;
      LF_UNROLL for (int s = 0; s < kStreams; s++) {
        const float read = sigmoid<Numbers>(totals[m * words + s] * norm * factor + offset[s]) + Op::kEps;
        sum += residual.one_stream(m, s, r) * read;
      }
      residual.stream(m, r) = sum;
    });
    residual.publish(run, stream_board(time), tag + time);
    if constexpr (Op::kRows > kStreams) {  // a module's
      static_assert(kPassRows <= kWarpSize, "a thread for each row of the pass");
      const int m = warp_lane();
      if (warp() == kWarps - 1 && m < run.count()) mix<Op>(m, totals + m * words, norm_of(m), factors, offsets);
    }
  }

 private:
  // How the output of row m joins the streams, by one thread.
  template <class Op>
  LF_DEVICE void mix(int m, const float* totals, float norm, const float* factors, const float* offsets) {
    constexpr int n = kStreams;
    static_assert(Op::kRows == 2 * n + n * n, "what is read, what is written, what is between the streams");
    float *post = residual.joins + m * kJoinFloats, between[n][n];
    LF_UNROLL for (int s = 0; s < n; s++) post[s] =
        2 * sigmoid<Numbers>(totals[n + s] * norm * factors[1] + offsets[n + s]);
    LF_UNROLL for (int i = 0; i < n * n; i++) between[i / n][i % n] =
        totals[2 * n + i] * norm * factors[2] + offsets[2 * n + i];
    balance(between, Op::kIterations, Op::kEps);
    LF_UNROLL for (int i = 0; i < n * n; i++) post[n + i] = between[i / n][i % n];
  }
};

}  // namespace gpu
}  // namespace laneformer
