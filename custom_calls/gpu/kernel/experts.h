// Mixtures of experts: the choice of the router, and the pieces of the chosen experts' matrices.
//
// A matrix of an expert is cut into kParts parts: one that writes hidden channels by its rows, one that is summed by
// its columns. The parts of the used experts follow each other in the order of their shares; each CTA (or each warp,
// where they are summed) has kPieces of them. In memory the parts of all experts follow each other, part f in the row
// of CTA (or warp) f % n at depth f / n, so that every row has as many.
#pragma once

#include "product.h"

namespace laneformer {
namespace gpu {

// Of the thread's rank: which expert has that share in the sum.
struct Routes {
  int expert;
  float share;
};

// The experts with the largest logits, of equal ones the lowest number first, by each warp from the words of all.
template <class Router>
LF_DEVICE Routes choose(const u64* board, u32 tag, Watch& watch) {
  constexpr int experts = Router::kAllRows, each = (experts + 2 * kWarpSize - 1) / (2 * kWarpSize);
  float logits[each][2];
  read_words<experts % (2 * kWarpSize) == 0>(
      board, 2 * warp_lane(), experts, tag, [](int v, int) { return 2 * v * kWarpSize; }, logits, watch, kAtVector);
  const auto number = [](int v, int i) { return 2 * (v * kWarpSize + warp_lane()) + i; };
  u32 keys[each][2];
  LF_UNROLL for (int v = 0; v < each; v++) {
    LF_UNROLL for (int i = 0; i < 2; i++) {
      const float logit = logits[v][i];  // a NaN is the largest; no number has the order 0
      keys[v][i] = number(v, i) >= experts ? 0 : logit != logit ? ~0u : order_of(logit);
    }
  }
  Routes found = {0, 0};
  float largest = 0, own = 0;
  for (int rank = 0; rank < Router::kUsed; rank++) {
    u32 best = 0;
    int at = 0;
    LF_UNROLL for (int v = 0; v < each; v++) {
      LF_UNROLL for (int i = 0; i < 2; i++) {
        if (keys[v][i] > best) best = keys[v][i], at = number(v, i);
      }
    }
    const u32 key = largest_in_warp(best);
    const int expert = (int)~largest_in_warp(best == key ? ~(u32)at : 0u);
    LF_UNROLL for (int v = 0; v < each; v++) {
      LF_UNROLL for (int i = 0; i < 2; i++) {
        if (number(v, i) == expert) keys[v][i] = 0;
      }
    }
    if (rank == 0) largest = float_of_order(key);
    if (warp_lane() == rank) found.expert = expert, own = float_of_order(key);
  }
  const float odds = warp_lane() < Router::kUsed ? exp_of(own - largest) : 0.0f;
  float sum = odds;
  if constexpr (!Router::kNormalized) {
    sum = 0;
    LF_UNROLL for (int v = 0; v < each; v++) {
      LF_UNROLL for (int i = 0; i < 2; i++) {
        if (number(v, i) < experts) sum += exp_of(logits[v][i] - largest);
      }
    }
  }
  found.share = odds / sum_over_warp(sum);
  return found;
}

// Words between those of two experts' hidden channels.
template <int channels>
constexpr int kEven = channels + channels % 2;

// The pieces of a warp.
template <class Op>
struct Pieces {
  static constexpr int all = Op::kUsed * Op::kParts, rows = Op::kSummed ? kWarps : kCtas;
  int c;

  LF_DEVICE int place() const { return Op::kSummed ? warp() : c; }
  LF_DEVICE int first() const { return place() * Op::kPieces; }
  LF_DEVICE int count() const { return smaller(Op::kPieces, larger(0, all - first())); }
  LF_DEVICE int rank(int i) const { return (first() + i) / Op::kParts; }
  LF_DEVICE int part(int i) const { return (first() + i) % Op::kParts; }

  // The line among the lane's weights at which the one of the thread's number, less `before`, begins.
  LF_DEVICE u32 line(int layer, const Routes& routes, int before) const {
    const int i = larger(0, smaller(warp_lane() - before, Op::kPieces - 1)), at = smaller(rank(i), Op::kUsed - 1);
    const int f = (int)shuffle_from((u32)routes.expert, at) * Op::kParts + part(i);
    const u32 row = Op::kSummed ? c * kWarps + f % rows : f % rows * kWarps + warp();
    return row * kRowLines + Op::stored(layer) + f / rows * Op::kLines;
  }
};

// Orders the pieces of a product and, in a persistent kernel, those of the one that follows it.
template <class Op, class AnyStream>
LF_DEVICE void order(AnyStream& stream, int layer, int c, const Routes& routes) {
  const Pieces<Op> own = {c};
  const u32 line = own.line(layer, routes, 0);
  if constexpr (kSteps || Op::kSummed) {
    stream.open(line, Op::kLines, own.count());
  } else {
    using Then = typename Op::Then;
    const Pieces<Then> then = {c};
    const bool is_own = warp_lane() < own.count();
    const u32 then_line = then.line(layer, routes, own.count());
    stream.open(is_own ? line : then_line, is_own ? Op::kLines : Then::kLines, own.count() + then.count());
  }
}

// The streams of models without experts have neither; these are not called then.
template <class AnyStream>
LF_DEVICE void end_part(AnyStream& stream) {
  stream.end_part();
}
template <class AnyStream>
LF_DEVICE void close(AnyStream& stream) {
  stream.close();
}

// Hidden channels of an expert, times its share.
template <class Shape>
struct FromExpert {
  const u64* board;
  u32 tag;
  Watch& watch;
  int part;
  float share;

  LF_DEVICE void operator()(int segment, float (&x)[1][Shape::kVectors][kPer<Shape>]) const {
    read_words<kWhole<Shape>>(Boards<1>(board), column<Shape>(segment, part), Shape::kColumns, tag, distance<Shape>, x,
                              watch, kAtVector);
    LF_UNROLL for (int v = 0; v < Shape::kVectors; v++) {
      LF_UNROLL for (int i = 0; i < kPer<Shape>; i++) x[0][v][i] *= share;
    }
  }
};

}  // namespace gpu
}  // namespace laneformer
