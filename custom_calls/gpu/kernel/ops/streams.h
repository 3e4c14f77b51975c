// Several residual streams, as a base of Decoder: what a module, or the head, reads of them. Residual::join joins the
// module's output to them. laneformer/blocks/streams.py has the equations.
//
// A CTA owns its channels of all streams. It multiplies them by its columns of the mixing matrix, which are in the
// weight stream, and publishes these parts of the mixture's sums with the sum of its channels' squares. All CTAs of the
// lane add all parts in the same order, so they have the same mixture. That is one more edge for each module. How the
// output joins the streams is needed only when the module ends, so one warp computes that after the CTA has published
// what the module reads, while those words are in flight.
#pragma once

#include "dense.h"

namespace laneformer {
namespace gpu {

// Loads the thread's part of the CTA's channels of all streams. squares: [rows][kWarps], receives the sum of squares
// over each warp's columns.
template <class Shape, int rows>
struct SquaredFromShared {
  FromShared<Shape, rows> channels;
  float* squares;

  LF_DEVICE void operator()(int segment, float (&x)[rows][Shape::kVectors][kPer<Shape>]) const {
    channels(segment, x);
    LF_UNROLL for (int m = 0; m < rows; m++) {
      float sum = 0;
      LF_UNROLL for (int v = 0; v < Shape::kVectors; v++) {
        LF_UNROLL for (int i = 0; i < kPer<Shape>; i++) sum = fma(x[m][v][i], x[m][v][i], sum);
      }
      LF_UNROLL for (int mask = 1; mask < Shape::kGroup; mask *= 2) sum += shuffle(sum, mask);
      float& own = squares[m * kWarps + warp()];
      if (warp_lane() == 0) own = segment == 0 ? sum : own + sum;
    }
  }
};

// Turns a matrix of logits into one whose rows and columns sum to about 1 (Sinkhorn).
template <int n>
LF_DEVICE void balance(float (&x)[n][n], int iterations, float eps) {
  const auto inverse = [](float sum) {  // sums are above 0; each division would be a branch
    const float root = rsqrt_of(sum);
    return root * root;
  };
  LF_UNROLL for (int i = 0; i < n; i++) {
    float largest = x[i][0], sum = 0;
    LF_UNROLL for (int j = 1; j < n; j++) largest = larger(largest, x[i][j]);
    LF_UNROLL for (int j = 0; j < n; j++) sum += x[i][j] = exp_of(x[i][j] - largest);
    const float factor = inverse(sum);
    LF_UNROLL for (int j = 0; j < n; j++) x[i][j] = fma(x[i][j], factor, eps);
  }
  for (int iteration = 0; iteration < iterations; iteration++) {
    LF_UNROLL for (int i = 0; i < n && iteration > 0; i++) {  // the softmax has divided the rows already
      float sum = eps;
      LF_UNROLL for (int j = 0; j < n; j++) sum += x[i][j];
      const float factor = inverse(sum);
      LF_UNROLL for (int j = 0; j < n; j++) x[i][j] *= factor;
    }
    LF_UNROLL for (int j = 0; j < n; j++) {
      float sum = eps;
      LF_UNROLL for (int i = 0; i < n; i++) sum += x[i][j];
      const float factor = inverse(sum);
      LF_UNROLL for (int i = 0; i < n; i++) x[i][j] *= factor;
    }
  }
}

class StreamOps : public DenseOps {
 public:
  using DenseOps::DenseOps;

 protected:
  // Publishes STREAM, what the module at a time (or the head) reads, to all CTAs of the lane.
  template <class Op, int most>
  LF_DEVICE void gather_streams(const Run<most>& run, int layer, int time, u32 tag) {
    constexpr int rows = Op::kRows, words = rows + 1 + (rows + 1) % 2, pairs = words / 2, groups = kThreads / pairs,
                  each = (kCtas + groups - 1) / groups, own_rows = (rows + kThreads - 1) / kThreads;
    static_assert(groups > 0 && (kPassRows * (groups + 1) + 2) * words <= kScratchFloats,
                  "the scratch memory is too small for the sums");
    float *sums = shared_.scratch, *mixture = sums + kPassRows * groups * words, *factors = mixture + kPassRows * words,
          *offsets = factors + words;
    float factor[own_rows], offset[own_rows];  // loaded while the parts are computed
    LF_UNROLL for (int i = 0; i < own_rows; i++) {
      const int row = smaller(opaque(thread()) + i * kThreads, rows - 1);
      factor[i] = small(Op::factors(layer), Op::kFactorsStride)[part_of(row)];
      offset[i] = small(Op::offsets(layer), Op::kOffsetsStride)[row];
    }
    float *partial = next_partial(), *squares = this->squares(turn_);
    sync_cta();  // the product reads other threads' channels
    const FromShared<Op, most> channels = {residual.streams, kStreams * kStreamRows};
    product<Op, most>(stream_, weights<Op>(layer), partial, shared_.brought,
                      SquaredFromShared<Op, most>{channels, squares});
    sync_cta();
    watch_.delay();
    u64* board = boards_ + kMixtureBoard;
    each_of_rows<words>(run, words, [&](int m, int w) {
      float value = 0;
      if (w < rows) {
        value = row_sum<Op, most>(partial, w, m);
      } else if (w == rows) {
        LF_UNROLL for (int i = 0; i < kWarps; i++) value += squares[m * kWarps + i];
      }
      store_word(board + (i64)m * kLaneWords + c_ * words + w, word_of(value, tag + time));
    });
    LF_UNROLL for (int i = 0; i < own_rows; i++) {
      const int row = opaque(thread()) + i * kThreads;
      if (row < rows) factors[row] = factor[i], offsets[row] = offset[i];
    }
    // A thread adds two words of every `groups`-th CTA. Then one thread for each row of the mixture adds these sums.
    float values[most][each][2];
    const int number = opaque(thread()), group = number / pairs, pair = number % pairs;
    const bool reads = group < groups;
    read_words<false>(
        boards_of(board, run), reads ? group * words + 2 * pair : kCtas * words, kCtas * words, tag + time,
        [](int v, int) { return v * groups * words; }, values, watch_, kAtVector);
    LF_UNROLL for (int m = 0; m < most; m++) {
      float a = 0, b = 0;
      LF_UNROLL for (int v = 0; v < each; v++) a += values[m][v][0], b += values[m][v][1];
      float* own = sums + (m * groups + group) * words + 2 * pair;
      if (reads) own[0] = a, own[1] = b;
    }
    sync_cta();
    each_of_rows<rows>(run, rows, [&](int m, int w) {
      const float* own = sums + m * groups * words;
      float total = 0, square = 0;
      LF_UNROLL for (int g = 0; g < groups; g++) total += own[g * words + w], square += own[g * words + rows];
      const float norm = rsqrt_of(square / (float)(kStreams * kHidden) + Op::kNormEps),
                  value = fma(total * norm, factors[w], offsets[w]), share = sigmoid<Numbers>(value);
      mixture[m * words + w] = part_of(w) == 0 ? share + Op::kEps : part_of(w) == 1 ? 2 * share : value;
    });
    sync_cta();
    residual.each(run, [&](int m, int r) {
      float sum = 0;
      LF_UNROLL for (int s = 0; s < kStreams; s++) sum = fma(residual.one_stream(m, s, r), mixture[m * words + s], sum);
      residual.stream(m, r) = sum;
    });
    residual.publish(run, stream_board(time), tag + time);
    if constexpr (rows > kStreams) {  // for a module, not for the head
      static_assert(rows == kStreams + kJoinFloats,
                    "a mixture has rows for reading, for writing, and between the streams");
      static_assert(kPassRows <= kWarpSize, "a warp needs a thread for each row of the pass");
      const int m = warp_lane();
      if (warp() == kWarps - 1 && m < run.count())
        keep_join<Op>(mixture + m * words + kStreams, residual.joins + m * kJoinFloats);
    }
  }

 private:
  // The part of a mixture that a row belongs to: 0 for reading, 1 for writing, 2 between the streams.
  LF_DEVICE static int part_of(int row) { return row < kStreams ? 0 : row < 2 * kStreams ? 1 : 2; }

  // Computes how a row's output joins the streams; called by one thread.
  template <class Op>
  LF_DEVICE static void keep_join(const float* mixture, float* join) {
    constexpr int n = kStreams;
    float between[n][n];
    LF_UNROLL for (int i = 0; i < n * n; i++) between[i / n][i % n] = mixture[n + i];
    LF_UNROLL for (int s = 0; s < n; s++) join[s] = mixture[s];
    balance(between, Op::kIterations, Op::kEps);
    LF_UNROLL for (int i = 0; i < n * n; i++) join[n + i] = between[i / n][i % n];
  }
};

}  // namespace gpu
}  // namespace laneformer
