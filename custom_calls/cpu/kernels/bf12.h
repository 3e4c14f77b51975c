// Products of weights in 12 bits (bf12_decode.h), in the order of the bf16 product, whose bits they have. Included by
// kernels.cc alone, as simd.h is.
#pragma once

#include "bf12_decode.h"
#include "product.h"

namespace LF_ISA {
namespace {

// sum += pairs of weights times the values of their two columns, as the bf16 lines add them.
LF_INLINE void add_pairs(Bf16Line, vu pairs, const float* x, vf& sum) {
  multiply_add<false>(sum, as_float(pairs << 16), splat(x[0]));
  multiply_add<false>(sum, as_float(upper_half<false>(pairs)), splat(x[1]));
}
LF_INLINE void add_pairs(Bf16DotLine, vu pairs, const float* x, vf& sum) {
  uint32_t both;
  std::memcpy(&both, x, 4);
  sum = dot_bf16(sum, pairs, splat_u(both));
}

// One position, T tiles side by side: multiply_one of the lines that the units hold.
template <class Line, int T>
__attribute__((noinline)) void multiply_one_bf12(const Bf12& weights, int64_t first, const float* x, int64_t lines,
                                                 int64_t by, float* y) {
  const int64_t units = lines / kUnitLines, tile = (lines + kUnitLines - 1) / kUnitLines * kUnitBytes;
  const vb table = table_of(weights);
  const char* w = weights.data + first * tile;
  const uint32_t* exceptions[T];
  each<T>([&](auto t) LF_INLINED { exceptions[t()] = weights.exceptions + weights.starts[first + t()]; });
  vf sums[kChains * T][kVectors] = {};
  const char* const end = w + units * kUnitBytes;
  int64_t ahead = by;
  uint32_t unit = 0;
  for (; w < end; w += kUnitBytes, x += kUnitLines * Line::step, unit++) {
    if (end - w <= by) ahead = by + (T - 1) * tile;  // behind the tiles the next T begin
    each<T>([&](auto t) LF_INLINED {
      const char* from = w + t() * tile;
      each<kUnitBytes / 64>([&](auto line) LF_INLINED { __builtin_prefetch(from + ahead + 64 * line()); });
      each<kVectors>([&](auto v) LF_INLINED {
        unit_lines(from, table, v(), exceptions[t()], unit, [&](auto line, vu pairs) LF_INLINED {
          add_pairs(Line{}, pairs, x + line() * Line::step, sums[line() % kChains * T + t()][v()]);
        });
        // The next vector loads the values again: there are no registers to keep eight of them in.
        if (kVectors > 1 && kRegisters < 32) __asm__("" : "+r"(x));
      });
      exceptions[t()] = after(exceptions[t()], unit);
    });
  }
  const int rest = (int)(lines % kUnitLines);
  each<T>([&](auto t) LF_INLINED {
    each<kVectors>([&](auto v) LF_INLINED {
      if (rest)
        unit_lines(w + t() * tile, table, v(), exceptions[t()], unit, [&](auto line, vu pairs) LF_INLINED {
          if (line() < rest) add_pairs(Line{}, pairs, x + line() * Line::step, sums[line() % kChains * T + t()][v()]);
        });
      vf total = sums[t()][v()];
      if constexpr (kChains > 1) total += sums[T + t()][v()];
      storef(y + t() * kTile + v() * kWidth, total);
    });
  });
}

template <class Line, int T>
void tiles_of_one_bf12(const Bf12& weights, int64_t first, const float* x, int64_t lines, int64_t tiles, int64_t by,
                       float* y) {
  for (; tiles >= T; tiles -= T, first += T, y += T * kTile)
    multiply_one_bf12<Line, T>(weights, first, x, lines, by, y);
  if constexpr (T > 1) {
    if (tiles) tiles_of_one_bf12<Line, T / 2>(weights, first, x, lines, tiles, by, y);
  }
}

// Several positions: all parts of them use a piece of a tile before the next is decoded.
template <class Line, int N>
void tiles_of_several_bf12(const Bf12& weights, const float* x, int64_t lines, int64_t tiles, int positions, float* y,
                           int64_t ldy) {
  constexpr int64_t kLines = kPiece / Line::bytes;
  alignas(64) char piece[kPiece];
  float odd[kChains > 1 ? laneformer::kMostPositions * kTile : 1];
  const int64_t by = reading().ahead;
  const vb table = table_of(weights);
  const int parts = (positions + N - 1) / N;
  const int64_t tile = (lines + kUnitLines - 1) / kUnitLines * kUnitBytes;
  for (int64_t t = 0; t < tiles; t++, y += kTile) {
    const uint32_t* exceptions = weights.exceptions + weights.starts[t];
    const char* w = weights.data + t * tile;
    for (int64_t first = 0; first < lines; first += kLines) {
      const int64_t count = lines - first < kLines ? lines - first : kLines;
      const int64_t unit = first / kUnitLines, units = (count + kUnitLines - 1) / kUnitLines;
      exceptions = decode(w + unit * kUnitBytes, table, exceptions, unit, units, by, piece);
      for (int part = 0; part < parts; part++) {
        const int begin = part * N;
        multiply_chains<Line, N>({piece, count * Line::bytes, x + (part * lines + first) * Line::step * N,
                                  y + begin * ldy, ldy, odd + (kChains > 1 ? begin * kTile : 0), positions - begin,
                                  first > 0, first + count == lines, piece, 0});
      }
    }
  }
}

template <class Line>
void product_of_bf12(const Bf12& weights, const float* x, int64_t columns, int64_t tiles, int positions, float* y,
                     int64_t ldy) {
  const int64_t lines = (columns + Line::columns - 1) / Line::columns;
  with_part(positions, [&](auto n) {
    if constexpr (n() == 1) {
      with_reading<(kStreams + 1) / 2>(
          [&](auto t, int64_t by) { tiles_of_one_bf12<Line, t()>(weights, 0, x, lines, tiles, by, y); });
    } else {
      tiles_of_several_bf12<Line, n()>(weights, x, lines, tiles, positions, y, ldy);
    }
  });
}

void product_bf12(Activations activations, const Bf12& weights, const void* x, int64_t columns, int64_t tiles,
                  int positions, float* y, int64_t ldy) {
  const auto with = [&](auto line) {
    product_of_bf12<decltype(line)>(weights, (const float*)x, columns, tiles, positions, y, ldy);
  };
  uses_dot(Dtype::bf16, activations) ? with(Bf16DotLine{}) : with(Bf16Line{});
}

}  // namespace
}  // namespace LF_ISA
