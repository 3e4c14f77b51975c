// Matrix times vector: a CTA has some rows of the matrix, its warps share the columns, and so do the threads of a warp
// in groups, one row for each group. Every thread keeps its columns of the vector in registers, for all rows.
//
// A shape (custom_calls/gpu/tiling.py makes them, and packs the weights to match):
//   kRows      of a CTA                    kColumns   of the matrix
//   kGroup     threads for a row           kVectors   of 16 bytes that a thread has of a row, in each of kSegments
//   stretches of columns.
//              A vector's columns are dealt in pairs, those of kCluster of the group's threads side by side: what they
//              read of a board together is contiguous, 64 bytes or more, and a cluster's columns may share a scale
//   kColumnParts  parts of the columns: usually one for each warp
//   kSteps     in which a warp takes all rows, warp size / kGroup of them at a time
//   kTogether  steps whose lines are in registers at the same time
//   Weights    the format of the lines (formats.h, tensor.h)
#pragma once

#include "edges.h"
#include "formats.h"
#include "stream.h"
#include "tensor.h"

namespace laneformer {
namespace gpu {

constexpr int kThreads = kWarps * kWarpSize;

template <class Shape>
constexpr int kPer = Shape::Weights::kPer;

// Threads of a group among which its sums end.
template <class Shape>
constexpr int kOwners = smaller_of(Shape::kGroup, Shape::kTogether % 4 == 0   ? 4
                                                  : Shape::kTogether % 2 == 0 ? 2
                                                                              : 1);

template <class Shape>
constexpr int kRowsAtOnce = kWarpSize / Shape::kGroup;

template <class Shape>
constexpr int kPaddedRows = Shape::kSteps * kRowsAtOnce<Shape>;

// Floats of a CTA in shared memory: its warps' sums, and the factors of its rows.
template <class Shape>
constexpr int kPartials = kWarps * kPaddedRows<Shape> + (kHasFactors<typename Shape::Weights> ? Shape::kRows : 0);

// Rows whose factors a thread brings, at least 1.
template <class Shape>
constexpr int kFactors = kHasFactors<typename Shape::Weights> ? (Shape::kRows + kThreads - 1) / kThreads : 1;

// Whether no thread's part of the vector is beyond its end.
template <class Shape>
constexpr bool kWhole =
    Shape::kColumnParts * Shape::kSegments * Shape::kVectors * Shape::kGroup * kPer<Shape> == Shape::kColumns;

// The thread's first column of a segment, and how far from it the pair is that begins at element i of vector v.
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

// What a thread has of a vector: float32.
template <class Shape>
struct Floats {
  static constexpr int kFloats = 0, per = kPer<Shape>, vectors = Shape::kVectors;
  using Part = float[vectors][per];

  template <class Load>
  LF_DEVICE static void bring(int segment, float*, Load load, Part& x) {
    load(segment, x);
  }

  // The products with row `at` of a step's lines.
  template <int n, class Held>
  LF_DEVICE static float sum(typename Shape::Weights::Reader& weights,
                             const Vec (&lines)[Shape::Weights::template kLines<n>], const Held& scales, int at,
                             const Part& x) {
    float sum = 0;
    LF_UNROLL for (int v = 0; v < vectors; v++) {
      if constexpr (kQuantized<typename Shape::Weights>) {
        sum = Shape::Weights::template add<n>(sum, lines, scales, at * vectors + v, x[v]);
      } else {
        float w[per];
        weights.template read<n>(lines, at * vectors + v, w);
        LF_UNROLL for (int i = 0; i < per; i++) sum += w[i] * x[v][i];
      }
    }
    return sum;
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

// Floats of a CTA in shared memory by way of which its warps bring a vector.
template <class Shape>
constexpr int kBrought = kWarps * Operand<Shape>::kFloats;

// Each warp's sums of its columns into partial[warp][padded rows]. load(segment, x) brings the thread's part of the
// vector, while the first weights are on their way; brought: kBrought floats; adds: to sums that are there.
template <class Shape, class Load>
LF_DEVICE void product(Stream& stream, typename Shape::Weights::Reader weights, float* partial, float* brought,
                       Load load, bool adds = false) {
  constexpr int together = Shape::kTogether, vectors = Shape::kVectors, rows = kRowsAtOnce<Shape>,
                owners = kOwners<Shape>, taken = Shape::Weights::template kLines<together * vectors>;
  float* out = partial + opaque(warp() * kPaddedRows<Shape>);
  [[maybe_unused]] float factors[kFactors<Shape>];  // read while the vector is awaited
  if constexpr (kHasFactors<typename Shape::Weights>) weights.template load_factors<Shape::kRows>(factors);
  Beside<typename Shape::Weights, together * vectors, Shape::kCluster> beside;
  for (int segment = 0; segment < Shape::kSegments; segment++) {
    Vec lines[taken];
#if !LF_BULK
    beside.take(stream);
    stream.take(lines);
#endif
    typename Operand<Shape>::Part x;
    Operand<Shape>::bring(segment, brought + warp() * (kBrought<Shape> / kWarps), load, x);
    if (segment == 0) {
      weights.begin();
      if constexpr (kHasFactors<typename Shape::Weights>) {
        LF_UNROLL for (int i = 0; i < kFactors<Shape>; i++) {
          const int row = opaque(thread()) + i * kThreads;
          if (row < Shape::kRows) partial[kWarps * kPaddedRows<Shape> + row] = factors[i];
        }
      }
    }
    const auto multiply = [&](int step) {
      float sums[together];
      [[maybe_unused]] const auto scales = beside.scales(lines);
      LF_UNROLL for (int t = 0; t < together; t++) sums[t] =
          Operand<Shape>::template sum<together * vectors>(weights, lines, scales, t, x);
      // Over the group's threads, in pairs that keep half of the sums each as long as there are several: thread i ends
      // with sum i % owners.
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
      const int own = warp_lane() % Shape::kGroup;
      if (own < owners) {
        LF_UNROLL for (int t = 0; t < together / owners; t++) {
          float& sum = out[(step + t * owners + own) * rows + warp_lane() / Shape::kGroup];
          sum = segment == 0 && !adds ? sums[t] : sum + sums[t];
        }
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

template <class Shape>
LF_DEVICE float row_sum(const float* partial, int row) {
  float sum = 0;
  LF_UNROLL for (int w = 0; w < kWarps; w++) sum += partial[w * kPaddedRows<Shape> + row];
  if constexpr (kHasFactors<typename Shape::Weights>) sum *= partial[kWarps * kPaddedRows<Shape> + row];
  return sum;
}

// A vector from a board, as the threads of a product need it.
template <class Shape>
struct FromBoard {
  const u64* board;
  u32 tag;
  Watch& watch;

  LF_DEVICE void operator()(int segment, float (&x)[Shape::kVectors][kPer<Shape>]) const {
    read_words<kWhole<Shape>>(board, column<Shape>(segment), Shape::kColumns, tag, distance<Shape>, x, watch,
                              kAtVector);
  }
};

// The same under an RMS norm (Zhang & Sennrich, arXiv 1910.07467): the gains are applied here, the factor of the whole
// vector to the results, so that no thread waits for it before multiplying. squares: [kWarps], of each warp's columns.
template <class Shape>
struct NormedFromBoard {
  FromBoard<Shape> board;
  const float* gains;
  float* squares;

  LF_DEVICE void operator()(int segment, float (&x)[Shape::kVectors][kPer<Shape>]) const {
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
    float sum = 0;
    LF_UNROLL for (int v = 0; v < Shape::kVectors; v++) {
      LF_UNROLL for (int i = 0; i < kPer<Shape>; i++) {
        sum += x[v][i] * x[v][i];
        x[v][i] *= gain[v][i];
      }
    }
    LF_UNROLL for (int mask = 1; mask < Shape::kGroup; mask *= 2) sum += shuffle(sum, mask);
    if (warp_lane() == 0) squares[warp()] = segment == 0 ? sum : squares[warp()] + sum;
  }
};

// A vector in shared memory.
template <class Shape>
struct FromShared {
  const float* data;

  LF_DEVICE void operator()(int segment, float (&x)[Shape::kVectors][kPer<Shape>]) const {
    const int first = column<Shape>(segment);
    const float* own = data + first;
    LF_UNROLL for (int v = 0; v < Shape::kVectors; v++) {
      LF_UNROLL for (int i = 0; i < kPer<Shape>; i++) {
        const int at = distance<Shape>(v, i / 2 * 2) + i % 2;
        x[v][i] = kWhole<Shape> || first + at < Shape::kColumns ? own[at] : 0.0f;
      }
    }
  }
};

}  // namespace gpu
}  // namespace laneformer
