// Mixtures of experts: the choice of the router, and the pieces of the chosen experts' matrices.
//
// A matrix of an expert is cut into kParts parts: one that writes hidden channels by its rows, one that is summed by
// its columns. The parts of the used experts follow each other in the order of their shares; each CTA (or each warp,
// where they are summed) has kPieces of them. In memory the parts of all experts follow each other, part f in the row
// of CTA (or warp) f % n at depth f / n, so that every row has as many.
//
// The rows of a pass take turns, each with its own experts in its own order, so that a row has the sums that it has
// alone. Weights that two rows need are read for both, the second time from the second-level cache at best.
#pragma once

#include "product.h"

namespace laneformer {
namespace gpu {

// Of the thread's rank: which expert has that share in the sum.
struct Routes {
  int expert;
  float share;
};

// A number's place in an order: a NaN has the first one, no number the last, 0.
LF_DEVICE u32 place_of(float v) { return v != v ? ~0u : order_of(v); }

struct Leader {
  u32 place;
  int number;
};

// The best of what the warp's threads have, of equal ones the one with the lowest number.
LF_DEVICE Leader leader_of_warp(Leader own) {
  const u32 place = largest_in_warp(own.place);
  return {place, (int)~largest_in_warp(own.place == place ? ~(u32)own.number : 0u)};
}

// The experts of a router from which a warp chooses. A thread has some pairs of neighbours.
template <class Router>
class Candidates {
 public:
  static constexpr int kAll = Router::kExperts, kPairs = (kAll + 2 * kWarpSize - 1) / (2 * kWarpSize);

  // board: logits, or scores, which are corrected for the choice.
  LF_DEVICE Candidates(const u64* board, u32 tag, Watch& watch, const float* correction) {
    [[maybe_unused]] float more[kPairs][2] = {};  // arrives while the words are awaited
    if constexpr (kCorrected) each([&](int v, int i) { more[v][i] = correction[number(v, i)]; });
    read_words<kAll % (2 * kWarpSize) == 0>(
        board, 2 * warp_lane(), kAll, tag, [](int v, int) { return 2 * v * kWarpSize; }, values_, watch, kAtVector);
    LF_UNROLL for (int v = 0; v < kPairs; v++) places_[v][0] = places_[v][1] = 0;
    each([&](int v, int i) { places_[v][i] = place_of(kCorrected ? values_[v][i] + more[v][i] : values_[v][i]); });
  }

  // The best one, which is not one any more. value: its logit or score.
  LF_DEVICE int take(float& value) {
    const Leader best = leader();
    value = float_of_order(best.place);
    if constexpr (kCorrected) {
      each([&](int v, int i) {
        if (number(v, i) == best.number) value = values_[v][i];
      });
      value = bits_to_float(shuffle_from(float_to_bits(value), best.number / 2 % kWarpSize));
    }
    leave_out(best.number);
    return best.number;
  }

  // Leaves those groups whose two best have the largest sums.
  LF_DEVICE void choose_groups() {
    Leader own = {0, warp_lane()};  // the group of the thread's number
    LF_UNROLL for (int g = 0; g < Router::kGroups; g++) {
      const Leader first = leader(g), second = leader(g, first.number);
      if (warp_lane() == g) own.place = place_of(float_of_order(first.place) + float_of_order(second.place));
    }
    u32 chosen = 0;
    for (int i = 0; i < Router::kGroupsUsed; i++) {
      const int group = leader_of_warp(own).number;
      chosen |= 1u << group;
      if (warp_lane() == group) own.place = 0;
    }
    each([&](int v, int i) {
      if (!(chosen >> group_of(v, i) & 1)) places_[v][i] = 0;
    });
  }

  // The sum of the thread's odds to the one with that logit.
  LF_DEVICE float odds_to(float logit) const {
    float sum = 0;
    each([&](int v, int i) { sum += exp_of(values_[v][i] - logit); });
    return sum;
  }

 private:
  static constexpr bool kCorrected = Router::kCorrectionGiven;

  LF_DEVICE static int number(int v, int i) { return 2 * (v * kWarpSize + warp_lane()) + i; }
  LF_DEVICE static int group_of(int v, int i) { return number(v, i) / (kAll / Router::kGroups); }

  // Calls body(v, i) for each expert of the thread.
  template <class Body>
  LF_DEVICE static void each(Body body) {
    LF_UNROLL for (int v = 0; v < kPairs; v++) {
      LF_UNROLL for (int i = 0; i < 2; i++) {
        if (number(v, i) < kAll) body(v, i);
      }
    }
  }

  LF_DEVICE void leave_out(int expert) {
    each([&](int v, int i) {
      if (number(v, i) == expert) places_[v][i] = 0;
    });
  }

  // Of a group, or of all; but for one.
  LF_DEVICE Leader leader(int group = -1, int but = -1) const {
    Leader own = {0, 0};
    each([&](int v, int i) {
      if (group >= 0 && (group_of(v, i) != group || number(v, i) == but)) return;
      if (places_[v][i] > own.place) own = {places_[v][i], number(v, i)};
    });
    return leader_of_warp(own);
  }

  float values_[kPairs][2];
  u32 places_[kPairs][2];  // of what is chosen by; 0: not to be chosen
};

// A RootRoute's score.
LF_DEVICE float root_of_softplus(float logit) {
  const float softplus = softplus_of(logit);
  return softplus > 0 ? softplus * rsqrt_of(softplus) : softplus;
}

// Shares by the scores of the used experts, of which each of the warp's first threads has one.
template <class Router>
LF_DEVICE float share_by_score(float own) {
  const float score = warp_lane() < Router::kUsed ? own : 0.0f;
  return score * (Router::kNormalized ? Router::kFactor / (sum_over_warp(score) + 1e-20f) : Router::kFactor);
}

// The experts that a table has of the row's token, in its order; listed: [used], their numbers.
template <class Router>
LF_DEVICE Routes look_up(const u64* board, u32 tag, Watch& watch, const float* listed) {
  Routes found = {0, 0};
  if (warp_lane() < Router::kUsed) {
    found.expert = (int)listed[warp_lane()];
    found.share = wait_for(board + found.expert, tag, watch, kAtVector, found.expert);
  }
  found.share = share_by_score<Router>(found.share);
  return found;
}

// The experts that the router's words choose, and their shares, by each warp by itself.
template <class Router>
LF_DEVICE Routes choose(const u64* board, u32 tag, Watch& watch, const float* correction) {
  Candidates<Router> candidates(board, tag, watch, correction);
  if constexpr (Router::kGroups > 1) candidates.choose_groups();
  Routes found = {0, 0};
  float largest = 0, own = 0;
  for (int rank = 0; rank < Router::kUsed; rank++) {
    float value;
    const int expert = candidates.take(value);
    if (rank == 0) largest = value;
    if (warp_lane() == rank) found.expert = expert, own = value;
  }
  if constexpr (Router::kIsRoute) {
    const float odds = warp_lane() < Router::kUsed ? exp_of(own - largest) : 0.0f;
    found.share = odds / sum_over_warp(Router::kNormalized ? odds : candidates.odds_to(largest));
  } else {
    found.share = share_by_score<Router>(own);
  }
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

  // The line among the lane's weights at which the one of the thread's number, less `before`, begins. Those of a pass's
  // rows follow each other. routes: of each row.
  template <int most>
  LF_DEVICE u32 line(int layer, const Routes* routes, int before) const {
    int i = warp_lane() - before, m = 0;
    if constexpr (most == 1) {
      i = larger(0, smaller(i, Op::kPieces - 1));
    } else {
      const int each = larger(1, count());
      i = larger(0, i), m = i / each, i %= each;
    }
    const int at = smaller(rank(i), Op::kUsed - 1);
    u32 expert = shuffle_from((u32)routes[0].expert, at);
    LF_UNROLL for (int row = 1; row < most; row++) {
      const u32 other = shuffle_from((u32)routes[row].expert, at);
      if (row == m) expert = other;
    }
    const int f = (int)expert * Op::kParts + part(i);
    const u32 row = Op::kSummed ? c * kWarps + f % rows : f % rows * kWarps + warp();
    return row * kRowLines + Op::stored(layer) + f / rows * Op::kLines;
  }
};

// Orders the pieces of a product and, in a persistent kernel, those of the one that follows it, of all of a pass's
// rows.
template <class Op, int most, class AnyStream>
LF_DEVICE void order(AnyStream& stream, int layer, int c, const Routes* routes, const Run<most>& run) {
  const Pieces<Op> own = {c};
  const u32 line = own.template line<most>(layer, routes, 0);
  const int count = run.count() * own.count();
  if constexpr (kSteps || Op::kSummed) {
    stream.open(line, Op::kLines, count);
  } else {
    using Then = typename Op::Then;
    const Pieces<Then> then = {c};
    const bool is_own = warp_lane() < count;
    const u32 then_line = then.template line<most>(layer, routes, count);
    stream.open(is_own ? line : then_line, is_own ? Op::kLines : Then::kLines, count + run.count() * then.count());
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
