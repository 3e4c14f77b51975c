// The choice of experts from a router's logits, and the pieces of the chosen experts' matrices that a warp reads.
// chosen.h uses both.
//
// A matrix of an expert is cut into kParts parts: by rows if it writes hidden channels, by columns if its products are
// summed over the experts. The parts of the chosen experts are lined up in the order of their shares, and each CTA (or
// warp, if cut by columns) has kPieces of them. The parts of all experts are stored in the same way: part f belongs to
// CTA (or warp) f % n, at depth f / n of its memory. So each has equally many, and a part's address follows from its
// expert.
//
// The rows of a pass are computed one after the other, each with its experts in its own order, so that a row has the
// bits that it has alone. Weights that two rows need are read for both, the second time from the second-level cache at
// best.
#pragma once

#include "product.h"

namespace laneformer {
namespace gpu {

// The chosen experts: thread i has the number of the expert of rank i, and its share in the sum.
struct Routes {
  int expert;
  float share;
};

// The place of a number in an order: larger for larger numbers, the largest for NaN. No number has place 0.
LF_DEVICE u32 place_of(float v) { return v != v ? ~0u : order_of(v); }

// A place, and the number of the expert (or group of experts) that has it.
struct Leader {
  u32 place;
  int number;
};

// The best of the threads' leaders; of equal ones the one with the lowest number.
LF_DEVICE Leader leader_of_warp(Leader own) {
  const u32 place = largest_in_warp(own.place);
  return {place, (int)~largest_in_warp(own.place == place ? ~(u32)own.number : 0u)};
}

// The experts from which a warp chooses. Each thread has pairs of neighbouring experts.
template <class Router>
class Candidates {
 public:
  static constexpr int kAll = Router::kExperts, kPairs = (kAll + 2 * kWarpSize - 1) / (2 * kWarpSize);

  // board: the router's logits or scores. correction: is added to scores for the choice alone.
  LF_DEVICE Candidates(const u64* board, u32 tag, Watch& watch, const float* correction) {
    [[maybe_unused]] float more[kPairs][2] = {};  // arrives while the words are awaited
    if constexpr (kCorrected) each([&](int v, int i) { more[v][i] = correction[number(v, i)]; });
    read_words<kAll % (2 * kWarpSize) == 0>(
        board, 2 * warp_lane(), kAll, tag, [](int v, int) { return 2 * v * kWarpSize; }, values_, watch, kAtVector);
    LF_UNROLL for (int v = 0; v < kPairs; v++) places_[v][0] = places_[v][1] = 0;
    each([&](int v, int i) { places_[v][i] = place_of(kCorrected ? values_[v][i] + more[v][i] : values_[v][i]); });
  }

  // Removes the best expert and returns its number. value: its logit or score, not corrected.
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

  // Removes all groups except those with the largest sums of their two best experts.
  LF_DEVICE void choose_groups() {
    Leader own = {0, warp_lane()};  // thread i has group i
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

  // The sum of exp(own logit - logit) over the thread's experts.
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

  // The best expert of all, or of a group without expert `but`.
  LF_DEVICE Leader leader(int group = -1, int but = -1) const {
    Leader own = {0, 0};
    each([&](int v, int i) {
      if (group >= 0 && (group_of(v, i) != group || number(v, i) == but)) return;
      if (places_[v][i] > own.place) own = {places_[v][i], number(v, i)};
    });
    return leader_of_warp(own);
  }

  float values_[kPairs][2];
  u32 places_[kPairs][2];  // of the values to choose by; 0: not to be chosen
};

// The score of a RootRoute: the root of the softplus of the logit.
LF_DEVICE float root_of_softplus(float logit) {
  const float softplus = softplus_of(logit);
  return softplus > 0 ? softplus * rsqrt_of(softplus) : softplus;
}

// The share of the thread's expert. own: its score, in the first kUsed threads.
template <class Router>
LF_DEVICE float share_by_score(float own) {
  const float score = warp_lane() < Router::kUsed ? own : 0.0f;
  return score * (Router::kNormalized ? Router::kFactor / (sum_over_warp(score) + 1e-20f) : Router::kFactor);
}

// The experts that a table lists for a row's token, in its order, and their shares. listed: [used], their numbers.
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

// The experts that the router's words choose, and their shares. Each warp computes them by itself.
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

// Words of an expert's hidden channels on their board, an even number.
template <int channels>
constexpr int kEven = channels + channels % 2;

// The pieces of a product that a warp reads: count() of them, piece i being part part(i) of the expert of rank rank(i).
template <class Op>
struct Pieces {
  static constexpr int all = Op::kUsed * Op::kParts, rows = Op::kSummed ? kWarps : kCtas;
  int c;

  LF_DEVICE int place() const { return Op::kSummed ? warp() : c; }
  LF_DEVICE int first() const { return place() * Op::kPieces; }
  LF_DEVICE int count() const { return smaller(Op::kPieces, larger(0, all - first())); }
  LF_DEVICE int rank(int i) const { return (first() + i) / Op::kParts; }
  LF_DEVICE int part(int i) const { return (first() + i) % Op::kParts; }

  // The first line of a piece among the lane's weights. Its number is the thread's less `before`; pieces of a pass's
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

// Orders a product's pieces for all rows of a pass; in a persistent kernel also those of the product that follows it.
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

// Templates, because the streams of models without experts have no such functions; these are not called then.
template <class AnyStream>
LF_DEVICE void end_part(AnyStream& stream) {
  stream.end_part();
}
template <class AnyStream>
LF_DEVICE void close(AnyStream& stream) {
  stream.close();
}

// Loads the thread's part of an expert's hidden channels, times the expert's share.
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
