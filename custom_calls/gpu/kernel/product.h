// Matrix times vector. An op calls `product`, then sync_cta, then `row_sum` for each of its rows.
//
// A CTA has some rows of the matrix. Its warps divide the columns, and the threads of a warp divide them further, in
// groups of threads that compute a row together. Every thread keeps its columns of the vector in registers for all
// rows. The order of the sums is fixed: a thread's columns, the threads of a group, the segments, the warps.
//
// A pass of several rows (rows.h) has as many vectors. Each line of weights is read once for all of them, and each sum
// has the same multiply-adds in the same order as for one vector, so its bits are the same.
//
// A shape says how a matrix is divided; custom_calls/gpu/tiling.py chooses it and packs the weights to match:
//   kRows, kColumns  rows of a CTA, columns of the matrix
//   kColumnParts     parts of the columns, usually one for each warp
//   kSegments        stretches of a part's columns that are computed one after the other
//   kGroup           threads that share a row
//   kVectors         vectors of kPer weights that a thread has of a row in a segment
//   kCluster         neighbouring threads whose columns of a vector are interleaved in pairs: what they read of a board
//                    together is contiguous, 64 bytes or more, and their columns may share a scale
//   kSteps           steps in which a warp takes all rows, warp size / kGroup of them at a time
//   kTogether        steps whose lines are in registers at the same time
//   Weights          the format of the lines (formats.h, codes.h, tensor.h)
#pragma once

#include "edges.h"
#include "formats.h"
#include "rows.h"
#include "stream.h"
#include "tensor.h"

namespace laneformer {
namespace gpu {

// Weights of a vector.
template <class Shape>
constexpr int kPer = Shape::Weights::kPer;

// Threads of a group that have its sums after the reduction over the group.
template <class Shape>
constexpr int kOwners = smaller_of(Shape::kGroup, Shape::kTogether % 4 == 0   ? 4
                                                  : Shape::kTogether % 2 == 0 ? 2
                                                                              : 1);

template <class Shape>
constexpr int kRowsAtOnce = kWarpSize / Shape::kGroup;

// Rows of a CTA, padded to whole steps.
template <class Shape>
constexpr int kPaddedRows = Shape::kSteps * kRowsAtOnce<Shape>;

// Floats of the warps' sums with one vector, in all steps or in one of `parts` parts of them.
template <class Shape, int parts = 1>
constexpr int kSumFloats = kWarps * kPaddedRows<Shape> / parts;

// Floats of a product in shared memory: the warps' sums with each vector, then the factors of the matrix's rows.
template <class Shape, int rows = 1, int parts = 1>
constexpr int kPartials = rows * kSumFloats<Shape, parts> + (kHasFactors<typename Shape::Weights> ? Shape::kRows : 0);

// Factors of rows that a thread loads, at least 1.
template <class Shape>
constexpr int kFactors = kHasFactors<typename Shape::Weights> ? (Shape::kRows + kThreads - 1) / kThreads : 1;

// Whether no thread's part of the vector extends beyond its end.
template <class Shape>
constexpr bool kWhole =
    Shape::kColumnParts * Shape::kSegments * Shape::kVectors * Shape::kGroup * kPer<Shape> == Shape::kColumns;

// column: the thread's first column of a segment. distance: columns from there to the pair of elements i and i + 1 of
// the thread's vector v.
template <class Shape>
LF_DEVICE int column(int segment, int part = warp()) {
  const int own = warp_lane() % Shape::kGroup;
  return opaque((part * Shape::kSegments + segment) * Shape::kVectors * Shape::kGroup * kPer<Shape> +
                (own / Shape::kCluster * Shape::kCluster * kPer<Shape> + own % Shape::kCluster * 2));
}
template <class Shape>
LF_DEVICE int distance(int v, int i) {
  return v * kPer<Shape> * Shape::kGroup + i * Shape::kCluster;
}

// The thread's part of a vector as float32. Digits (tensor.h) has the same functions for tensor cores.
template <class Shape>
struct Floats {
  static constexpr int kFloats = 0, per = kPer<Shape>, vectors = Shape::kVectors;
  using Part = float[vectors][per];

  template <int rows, class Load>
  LF_DEVICE static void bring(int segment, float*, Load load, Part (&x)[rows]) {
    load(segment, x);
  }

  // The products of each vector with row `at` of the lines, over the thread's columns.
  template <int n, int rows, class Held>
  LF_DEVICE static void sum(typename Shape::Weights::Reader& weights,
                            const Vec (&lines)[Shape::Weights::template kLines<n>], const Held& scales, int at,
                            const Part (&x)[rows], float (&sums)[rows]) {
    LF_UNROLL for (int m = 0; m < rows; m++) sums[m] = 0;
    LF_UNROLL for (int v = 0; v < vectors; v++) {
      if constexpr (kQuantized<typename Shape::Weights>) {
        LF_UNROLL for (int m = 0; m < rows; m++) sums[m] =
            Shape::Weights::template add<n>(sums[m], lines, scales, at * vectors + v, x[m][v]);
      } else {
        float w[per];
        weights.template read<n>(lines, at * vectors + v, w);
        LF_UNROLL for (int m = 0; m < rows; m++) {
          LF_UNROLL for (int i = 0; i < per; i++) sums[m] = fma(w[i], x[m][v][i], sums[m]);
        }
      }
    }
  }
};

template <class Shape, bool by_tensor>
struct OperandOf {
  using Type = Floats<Shape>;
};
#if LF_TENSOR
template <class Shape>
struct OperandOf<Shape, true> {
  using Type = Digits<Shape>;
};
#endif
template <class Shape>
using Operand = typename OperandOf<Shape, kByTensor<typename Shape::Weights>>::Type;

// Floats of shared memory that the CTA's warps need to prepare a vector for tensor cores; otherwise 0.
template <class Shape>
constexpr int kBrought = kWarps * Operand<Shape>::kFloats;

struct Whole {  // the sums are read when the product has ended
  LF_DEVICE void operator()(int) const {}
};

// Writes each warp's sums over its columns to partial[vector][warp][padded rows]. load(segment, x) loads the thread's
// part of the vectors, while the first weights are in flight. brought: kBrought floats of shared memory. adds: adds to
// the sums that `partial` has. parts: divides the steps, with one segment only; each_part(number) is called after each
// part, whose sums the next part overwrites.
template <class Shape, int vectors_of_pass = 1, int parts = 1, class Load, class EachPart = Whole>
LF_DEVICE void product(Stream& stream, typename Shape::Weights::Reader weights, float* partial, float* brought,
                       Load load, bool adds = false, EachPart each_part = {}) {
  constexpr int together = Shape::kTogether, vectors = Shape::kVectors, rows = kRowsAtOnce<Shape>,
                owners = kOwners<Shape>, taken = Shape::Weights::template kLines<together * vectors>,
                part_steps = Shape::kSteps / parts;
  static_assert(parts == 1 || (Shape::kSegments == 1 && Shape::kSteps % (parts * together) == 0),
                "parts need one segment and must divide the steps: see custom_calls/gpu/layout.py");
  float* out = partial + opaque(warp() * (kPaddedRows<Shape> / parts));
  [[maybe_unused]] float factors[kFactors<Shape>];  // loaded while the vector is awaited
  if constexpr (kHasFactors<typename Shape::Weights>) weights.template load_factors<Shape::kRows>(factors);
  Beside<typename Shape::Weights, together * vectors, Shape::kCluster> beside;
  for (int segment = 0; segment < Shape::kSegments; segment++) {
    Vec lines[taken];
#if !LF_BULK
    beside.take(stream);
    stream.take(lines);
#endif
    typename Operand<Shape>::Part x[vectors_of_pass];
    Operand<Shape>::bring(segment, brought + warp() * (kBrought<Shape> / kWarps), load, x);
    if (segment == 0) {
      weights.begin();
      if constexpr (kHasFactors<typename Shape::Weights>) {
        LF_UNROLL for (int i = 0; i < kFactors<Shape>; i++) {
          const int row = opaque(thread()) + i * kThreads;
          if (row < Shape::kRows) partial[vectors_of_pass * kSumFloats<Shape, parts> + row] = factors[i];
        }
      }
    }
    const auto multiply = [&](int step) {
      float all[vectors_of_pass][together];
      [[maybe_unused]] const auto scales = beside.scales(lines);
      LF_UNROLL for (int t = 0; t < together; t++) {
        float own[vectors_of_pass];
        Operand<Shape>::template sum<together * vectors>(weights, lines, scales, t, x, own);
        LF_UNROLL for (int m = 0; m < vectors_of_pass; m++) all[m][t] = own[m];
      }
      // Adds over the group in pairs of threads. While they have several sums, each keeps half of them: thread i ends
      // with the sums whose numbers are i modulo owners.
      LF_UNROLL for (int m = 0; m < vectors_of_pass; m++) {
        float (&sums)[together] = all[m];
        LF_UNROLL for (int mask = 1; mask < Shape::kGroup; mask *= 2) {
          if (mask < owners) {
            const bool upper = warp_lane() & mask;
            LF_UNROLL for (int t = 0; t < together / mask; t += 2) {
              const float kept = upper ? sums[t + 1] : sums[t], given = upper ? sums[t] : sums[t + 1];
              sums[t / 2] = kept + shuffle(given, mask);
            }
          } else {
            LF_UNROLL for (int t = 0; t < together / owners; t++) sums[t] += shuffle(sums[t], mask);
          }
        }
        const int own = warp_lane() % Shape::kGroup, first = parts == 1 ? step : step % part_steps;
        if (own < owners) {
          LF_UNROLL for (int t = 0; t < together / owners; t++) {
            float& sum =
                out[m * kSumFloats<Shape, parts> + (first + t * owners + own) * rows + warp_lane() / Shape::kGroup];
            sum = segment == 0 && !adds ? sums[t] : sum + sums[t];
          }
        }
      }
      if constexpr (parts > 1) {
        if ((step + together) % part_steps == 0) each_part(step / part_steps);
      }
    };
#if LF_BULK
    for (int step = 0; step < Shape::kSteps; step += together) {
      beside.take(stream);
      stream.take(lines);
      multiply(step);
    }
#else
    for (int step = together; step < Shape::kSteps; step += together) {
      Vec next[taken];
      auto next_beside = beside;
      next_beside.take(stream);
      stream.take(next);
      multiply(step - together);
      LF_UNROLL for (int i = 0; i < taken; i++) lines[i] = next[i];
      beside = next_beside;
    }
    multiply(Shape::kSteps - together);
#endif
  }
  weights.end();
}

// The product of a row with vector m: the warps' sums in their order. With parts, `row` counts from the part's first
// row, which is row `first` of the CTA.
template <class Shape, int vectors_of_pass = 1, int parts = 1>
LF_DEVICE float row_sum(const float* partial, int row, int m = 0, int first = 0) {
  const float* own = partial + m * kSumFloats<Shape, parts>;
  float sum = 0;
  LF_UNROLL for (int w = 0; w < kWarps; w++) sum += own[w * (kPaddedRows<Shape> / parts) + row];
  if constexpr (kHasFactors<typename Shape::Weights>)
    sum *= partial[vectors_of_pass * kSumFloats<Shape, parts> + first + row];
  return sum;
}

// Channels of a warp's part of a vector in a segment.
template <class Shape>
constexpr int kSegmentColumns = Shape::kVectors * Shape::kGroup * kPer<Shape>;

// Loads the thread's part of a vector from a board, or of the vectors of several rows. threes: if positive, the board
// is Threes<threes>; stages: then shared memory, kStagedFloats for each warp.
template <class Shape, int rows = 1, int threes = 0>
struct FromBoard {
  Boards<rows> board;
  u32 tag;
  Watch& watch;
  float* stages = nullptr;

  LF_DEVICE void operator()(int segment, float (&x)[rows][Shape::kVectors][kPer<Shape>]) const {
    if constexpr (threes == 0) {
      read_words<kWhole<Shape>>(board, column<Shape>(segment), Shape::kColumns, tag, distance<Shape>, x, watch,
                                kAtVector);
    } else {
      constexpr int n = kSegmentColumns<Shape>;
      static_assert(n <= kStagedFloats, "custom_calls/gpu/layout.py computes fewer columns of a segment");
      const int part = opaque(warp()), first = (part * Shape::kSegments + segment) * n,
                own = column<Shape>(segment, part);
      float* staged = stages + part * kStagedFloats;
      LF_UNROLL for (int m = 0; m < rows; m++) {
        Threes<threes>::template bring<n, kWhole<Shape>>(board.of(m), first, Shape::kColumns, tag, staged, watch,
                                                         kAtVector);
        LF_UNROLL for (int v = 0; v < Shape::kVectors; v++) {
          LF_UNROLL for (int i = 0; i < kPer<Shape>; i++) {
            const int at = distance<Shape>(v, i / 2 * 2) + i % 2;
            x[m][v][i] = kWhole<Shape> || own + at < Shape::kColumns ? staged[own - first + at] : 0.0f;
          }
        }
      }
    }
  }
};

// FromBoard under an RMS norm (Zhang & Sennrich, arXiv 1910.07467). The gains are applied here. The factor of the whole
// vector is applied to the results, so that no thread waits for it before it multiplies. squares: [rows][kWarps],
// receives the sum of squares over each warp's columns.
template <class Shape, int rows = 1, int threes = 0>
struct NormedFromBoard {
  FromBoard<Shape, rows, threes> board;
  const float* gains;
  float* squares;

  LF_DEVICE void operator()(int segment, float (&x)[rows][Shape::kVectors][kPer<Shape>]) const {
    float gain[Shape::kVectors][kPer<Shape>];
    const int first = column<Shape>(segment);
    const float* own = gains + first;
    LF_UNROLL for (int v = 0; v < Shape::kVectors; v++) {
      LF_UNROLL for (int i = 0; i < kPer<Shape>; i += 2) {
        const int at = distance<Shape>(v, i);
        Pair pair = {0, 0};
        if constexpr (Shape::kColumns % 2 == 0) {
          if (kWhole<Shape> || first + at < Shape::kColumns) pair = load_pair(own + at);
        } else {
          if (first + at < Shape::kColumns) pair.a = own[at];
          if (first + at + 1 < Shape::kColumns) pair.b = own[at + 1];
        }
        gain[v][i] = pair.a, gain[v][i + 1] = pair.b;
      }
    }
    board(segment, x);
    LF_UNROLL for (int m = 0; m < rows; m++) {
      float sum = 0;
      LF_UNROLL for (int v = 0; v < Shape::kVectors; v++) {
        LF_UNROLL for (int i = 0; i < kPer<Shape>; i++) {
          sum = fma(x[m][v][i], x[m][v][i], sum);
          x[m][v][i] *= gain[v][i];
        }
      }
      LF_UNROLL for (int mask = 1; mask < Shape::kGroup; mask *= 2) sum += shuffle(sum, mask);
      float& own = squares[m * kWarps + warp()];
      if (warp_lane() == 0) own = segment == 0 ? sum : own + sum;
    }
  }
};

// Loads the thread's part of a vector from shared memory, or of the vectors of several rows, `stride` floats apart.
template <class Shape, int rows = 1>
struct FromShared {
  const float* data;
  int stride = 0;

  LF_DEVICE void operator()(int segment, float (&x)[rows][Shape::kVectors][kPer<Shape>]) const {
    const int first = column<Shape>(segment);
    LF_UNROLL for (int m = 0; m < rows; m++) {
      const float* own = data + m * stride + first;
      LF_UNROLL for (int v = 0; v < Shape::kVectors; v++) {
        LF_UNROLL for (int i = 0; i < kPer<Shape>; i++) {
          const int at = distance<Shape>(v, i / 2 * 2) + i % 2;
          x[m][v][i] = kWhole<Shape> || first + at < Shape::kColumns ? own[at] : 0.0f;
        }
      }
    }
  }
};

}  // namespace gpu
}  // namespace laneformer
