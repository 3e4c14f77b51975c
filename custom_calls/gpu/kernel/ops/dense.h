// The base of Decoder: what all ops of a CTA share, and products whose weights are the same for every token.
//
// A product reads its vector from a board or from shared memory, leaves sums in shared memory, and publishes its rows
// on another board or stores them as the module's output. Two sets of sums take turns: an op writes the second set
// while slower threads still read the first, and the sync_cta between them keeps threads from being further apart.
#pragma once

#include "shared.h"

namespace laneformer {
namespace gpu {

// Tags of a pass, counted from its first one: the residual stream's edges by time, then the edge of the head.
constexpr u32 kStreamEdges = 2 * kLayers + 1, kHeadEdge = kStreamEdges;

// The ops of a trace, as in custom_calls/gpu/session.py. kNameOp + n is op n of laneformer.ops.TRACE_NAMES.
enum Names { kNameEmbed, kNameMerge, kNameFinal, kNameHead, kNameSample, kNameOp };

// The factor of an RMS norm over n channels. squares: of each warp's channels.
template <int n = kHidden>
LF_DEVICE float norm_factor(const float* squares, float eps) {
  float sum = 0;
  LF_UNROLL for (int w = 0; w < kWarps; w++) sum += squares[w];
  return rsqrt_of(sum / (float)n + eps);
}

class DenseOps {
 public:
  LF_DEVICE DenseOps(const Params& p, Shared& shared, Stream& stream, Watch& watch, int lane_here, int c)
      : residual{p,
                 shared.x,
                 shared.history,
                 shared.streams,
                 shared.joins,
                 shared.scratch,
                 watch,
                 p.first_lane + lane_here,
                 c * kStreamRows,
                 rows_of(c * kStreamRows, kStreamRows, kHidden)},
        p_(p),
        shared_(shared),
        stream_(stream),
        watch_(watch),
        lane_here_(lane_here),
        lane_(p.first_lane + lane_here),
        c_(c),
        lists_(p),
        boards_(p.boards + (i64)lane_here * kPassRows * kLaneWords) {}

  Residual residual;

  LF_DEVICE static int rows_of(int first, int rows, int all) { return larger(0, smaller(rows, all - first)); }

 protected:
  // Times an op for the trace, and names it in reports of failures.
  struct Clock {
    DenseOps& d;
    int op, layer;
    u64 began;
    LF_DEVICE Clock(DenseOps& d, int op, int layer) : d(d), op(op), layer(layer), began(d.p_.spans ? clock_ns() : 0) {
      d.watch_.op = op;
    }
    LF_DEVICE void end() const {
      if (!d.p_.spans || thread() != 0) return;
      int& n = d.p_.num_spans[cta()];
      if (n < d.p_.max_spans) d.p_.spans[(i64)cta() * d.p_.max_spans + n++] = {op, layer, began, clock_ns()};
    }
  };

  LF_DEVICE u64* stream_board(int time) const { return boards_ + (time % 2 == 0 ? kStreamBoard : kOtherStreamBoard); }

  // The other set of partial sums: one op's may be read while the next op's are written.
  LF_DEVICE float* next_partial() {
    turn_ ^= 1;
    return shared_.partial[0] +
           turn_ * (shared_.partial[1] - shared_.partial[0]);  // an array of pointers would be kept in memory
  }
  LF_DEVICE float* squares(int turn) const {
    return shared_.squares[0] + turn * (shared_.squares[1] - shared_.squares[0]);
  }

  template <class Shape>
  LF_DEVICE typename Shape::Weights::Reader weights(int layer) {
    return {p_, lists_, Shape::product(layer)};
  }

  // A small weight of this lane.
  LF_DEVICE const float* small(int offset, int stride) const { return p_.small + offset + (i64)lane_ * stride; }

  // A row's sum times a factor, plus its bias.
  template <class Op>
  LF_DEVICE float biased(float sum, float factor, int layer, int row) const {
    if constexpr (Op::kBiased) return fma(sum, factor, small(Op::bias(layer), Op::kBiasStride)[row]);
    return sum * factor;
  }

  // The object that computes ATTENDED for an op (Attending in shared.h).
  template <class Op, int most>
  LF_DEVICE Attending<Op, most> attending(const Run<most>& run, int layer, u32 tag) const {
    if constexpr (Op::kIsCompressedKeep || Op::kIsCompressedAttend) {
      // All layers have the same boards and positions, and values derived from them would be kept over the layers
      const int none = same_in_warp(opaque(0));
      Run<most> own = run;
      if constexpr (most == 1 || kRequests == 1) own.position += none;
      return {p_, boards_ + none, shared_.scratch, watch_, lane_here_ + none, layer, own, tag + layer};
    }
    return {p_, boards_, shared_.scratch, watch_, lane_here_, layer, run, tag + layer};
  }

  // A product that is neither of experts nor block-diagonal.
  template <class Op, int most>
  LF_DEVICE void multiply(const Run<most>& run, int layer, u32 tag, u32 sequence) {
    if constexpr (Op::kReads == Value::kAttended) {
      using Attended = typename Op::Attended;
      const Clock clock(*this, kNameMerge, layer);
      const auto attended = attending<Attended>(run, layer, tag);
      for (int m = 0; m < run.count(); m++) {
        attended.merge(m, shared_.merged + m * kMergedFloats);
        sync_cta();
      }
      clock.end();
    }
    const Clock clock(*this, kNameOp + Op::kTraced, layer);
    const int time = 2 * layer + Op::kModule;
    float* partial = next_partial();
    if constexpr (Op::kReads == Value::kAttended) {
      const auto attended = attending<typename Op::Attended>(run, layer, tag);
      product<Op, most>(stream_, weights<Op>(layer), partial, shared_.brought,
                        attended.template reader<Reading<Op>>(shared_.merged, kMergedFloats));
    } else {
      multiply_board<Op>(run, layer, tag, partial);
    }
    sync_cta();
    if constexpr (Op::kWrites == Value::kOutput) {
      float scale = 1;
      if constexpr (most == 1) scale = scale_of<Op>(0, layer, tag);
      residual.set_output(run, time, [&](int m, int r) {
        if constexpr (most > 1) scale = scale_of<Op>(m, layer, tag);
        const float value = biased<Op>(row_sum<Op, most>(partial, r, m), 1, layer, residual.first + r);
        return Op::kAdds ? fma(scale, value, residual.output(time, m, r)) : value;
      });
      if constexpr (Op::kEndsModule) end_module<Op>(run, layer, tag, sequence);
    } else {
      constexpr int own = Op::kGated ? Op::kRows / 2 : Op::kRows;
      watch_.delay();
      write<Op>(run, partial, layer, tag + layer, c_ * own, rows_of(c_ * own, own, Op::kChannels));
    }
    clock.end();
  }

  // The factor on a product of row m: the gate of a shared expert, otherwise 1.
  template <class Op>
  LF_DEVICE float scale_of(int m, int layer, u32 tag) {
    if constexpr (Op::kScaled) {
      const u64* gate = boards_ + (i64)m * kLaneWords + kRoutesBoard + Op::Router::kExperts;
      return wait_for(gate, tag + layer, watch_, kAtVector, Op::Router::kExperts);
    }
    return 1;
  }

  // A block-diagonal product. In each of kTurns turns the CTA has rows of one block, and reads the channels of that
  // block.
  template <class Op, int most>
  LF_DEVICE void multiply_blocks(const Run<most>& run, int layer, u32 tag) {
    const Clock clock(*this, kNameOp + Op::kTraced, layer);
    for (int turn = 0; turn < Op::kTurns; turn++) {
      const int part = c_ * Op::kTurns + turn, block = smaller(part / Op::kBlockParts, Op::kBlocks - 1),
                first = part % Op::kBlockParts * Op::kRows;
      float* partial = next_partial();
      if constexpr (Op::kReads == Value::kAttended && Op::kFrom < 0) {  // the results are on no board
        const auto attended = attending<typename Op::Attended>(run, layer, tag);
        for (int m = 0; m < run.count(); m++) {
          attended.merge(m, shared_.merged + m * kMergedFloats, block);
          sync_cta();
        }
        product<Op, most>(stream_, weights<Op>(layer), partial, shared_.brought,
                          FromShared<Reading<Op>, most>{shared_.merged, kMergedFloats});
      } else {
        const u64* board = boards_ + Op::kFrom + block * Op::kBlockStep;
        product<Op, most>(stream_, weights<Op>(layer), partial, shared_.brought,
                          FromBoard<Reading<Op>, most>{boards_of(board, run), tag + layer, watch_});
      }
      sync_cta();
      watch_.delay();
      const int count = part / Op::kBlockParts > block ? 0 : rows_of(first, Op::kRows, Op::kBlockRows);
      write<Op>(run, partial, layer, tag + layer, block * Op::kBlockRows + first, count);
    }
    clock.end();
  }

  // Sums of a product with the residual stream, or with a vector on another board. row: the pass's row that is the
  // run's first.
  template <class Op, int most>
  LF_DEVICE void multiply_board(const Run<most>& run, int layer, u32 tag, float* partial, int row = 0) {
    constexpr bool of_stream = Op::kReads == Value::kStream;
    const int time = of_stream ? 2 * layer + Op::kModule : layer;
    const u64* vector = (of_stream ? stream_board(time) : boards_ + Op::kFrom) + (i64)row * kLaneWords;
    constexpr int threes = Op::kFromTriples;
    const FromBoard<Reading<Op>, most, threes> board = {boards_of(vector, run), tag + time, watch_, shared_.stages};
    if constexpr (Op::kNormed) {
      const float* gains = small(Op::norm(layer), Op::kNormStride);
      product<Op, most>(stream_, weights<Op>(layer), partial, shared_.brought,
                        NormedFromBoard<Reading<Op>, most, threes>{board, gains, squares(turn_)});
    } else {
      product<Op, most>(stream_, weights<Op>(layer), partial, shared_.brought, board);
    }
  }

  // Ends a module: handles its output as the schedule says, and publishes the stream if there is only one.
  template <class Op, int most>
  LF_DEVICE void end_module(const Run<most>& run, int layer, u32 tag, u32 sequence) {
    const int time = 2 * layer + Op::kModule;
    residual.add_output(run, time, tag, sequence);
    if (Op::kModule == 1 && layer == kLayers - 1) residual.apply(run, 2 * kLayers, tag, sequence);
    if (kStreams == 0) residual.publish(run, stream_board(time + 1), tag + time + 1);
  }

  // Publishes the CTA's rows of a product to all CTAs of the lane. first: the channel of its first row.
  template <class Op, int most>
  LF_DEVICE void write(const Run<most>& run, const float* partial, int layer, u32 tag, int first, int count) {
    constexpr int own = Op::kGated ? Op::kRows / 2 : Op::kRows, columns = Op::kColumns;
    u64* board = boards_ + Op::kTo;
    float factor = 1;
    if constexpr (Op::kNormed && most == 1) factor = norm_factor<columns>(squares(turn_), Op::kNormEps);
    if constexpr (Op::kToTriples > 0) {
      static_assert(Op::kToTriples == own, "custom_calls/gpu/layout.py counts other rows of a CTA");
      for (int m = 0; m < run.count(); m++) {
        if constexpr (Op::kNormed && most > 1) factor = norm_factor<columns>(squares(turn_) + m * kWarps, Op::kNormEps);
        Threes<own>::publish(board + (i64)m * kLaneWords, first, count, tag, [&](int r) {
          return finished<Op, most>(partial, r, factor, layer, first + r, Op::kChannels, m);
        });
      }
      return;
    }
    each_of_rows<own>(run, count, [&](int m, int r) {
      if constexpr (Op::kNormed && most > 1) factor = norm_factor<columns>(squares(turn_) + m * kWarps, Op::kNormEps);
      const float value = finished<Op, most>(partial, r, factor, layer, first + r, Op::kChannels, m);
      u64* to = board + (i64)m * kLaneWords + first + r;
      if constexpr (Op::kOddHead > 0) to += (first + r) / Op::kOddHead;  // each head begins at an even word
      store_word(to, word_of(value, tag));
    });
  }

  // The value of row r, or of pair r of rows where the product is gated. row: its place among the biases; up_row: how
  // far after the gate's bias the up row's bias is.
  template <class Op, int most = 1>
  LF_DEVICE float finished(const float* partial, int r, float factor, int layer, int row, int up_row, int m = 0) const {
    if constexpr (Op::kGated) {  // rows of gate and up alternate
      float gate = biased<Op>(row_sum<Op, most>(partial, 2 * r, m), factor, layer, row),
            up = biased<Op>(row_sum<Op, most>(partial, 2 * r + 1, m), factor, layer, up_row + row);
      if constexpr (Op::kLimited) {  // NaN stays NaN
        gate = gate > Op::kLimit ? Op::kLimit : gate;
        up = up > Op::kLimit ? Op::kLimit : up < -Op::kLimit ? -Op::kLimit : up;
      }
      if constexpr (Op::kUpOffset != 0) up += Op::kUpOffset;
      return activated<Op::kActivation, Numbers>(gate) * up;
    } else {
      return activated<Op::kActivation, Numbers>(biased<Op>(row_sum<Op, most>(partial, r, m), factor, layer, row));
    }
  }

  const Params& p_;
  Shared& shared_;
  Stream& stream_;
  Watch& watch_;
  const int lane_here_, lane_, c_;
  Lists lists_;
  u64* boards_;
  int turn_ = 0;
};

}  // namespace gpu
}  // namespace laneformer
