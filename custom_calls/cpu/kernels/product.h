// Products of packed weight tiles with the vectors of one position or of several. Included by kernels.cc alone, as
// simd.h is.
//
// The bits of a result depend on its weights, its vector and whether that is alone: not on the number of other
// positions, on the tiles computed beside it, or on the threads. With several positions a sum is one chain over the
// columns.
#pragma once

#include "formats.h"
#include "kernels.h"
#include "simd.h"

namespace LF_ISA {
namespace {

using laneformer::Activations;
using laneformer::Dtype;

// Positions whose sums fit the registers, beside a column's weights and one value of a vector.
constexpr int kMostPositions = kWidth == 16 ? 24 : kWidth == 8 ? 6 : kRegisters == 32 ? 4 : 2;
constexpr int64_t kChunkBytes = kWidth == 16 ? 32768 : 16384;  // of a tile, which all positions use before the next
// How far ahead weights are fetched, in bytes: 0.98 of a pure read of them with it, 0.91 without (Xeon, 2 threads).
constexpr int kAhead = 1024;

bool uses_dot(Dtype dtype, Activations activations) {
  return kHasDot && dtype == Dtype::bf16 && activations == Activations::rounded;
}

// Positions are multiplied in parts of equal size, one of the sizes for which there is code; the last may be padded.
int part_of(int positions) {
  const int parts = (positions + kMostPositions - 1) / kMostPositions;
  const int size = (positions + parts - 1) / parts;
  return kMostPositions < 8 || size < 3 ? size : (size + 3) / 4 * 4;
}

// One position: T tiles side by side, in two chains of sums each where one would wait for its own multiply-adds.
// Several tiles are as many streams from memory, for prefetchers that stop at the end of a page. Sums are the same for
// every T.
template <class Line, int T>
__attribute__((noinline)) void multiply_one(const char* w, const float* x, int64_t lines, float* y) {
  constexpr int kChains = kVectors < 4 ? 2 : 1;
  vf sums[kChains * T][kVectors][1] = {};
  const int64_t tile = lines * Line::bytes;
  const char* const end = w + tile;
  int64_t ahead = kAhead;
  for (; end - w >= kChains * Line::bytes; w += kChains * Line::bytes, x += kChains * Line::step) {
    if (end - w <= kAhead) ahead = kAhead + (T - 1) * tile;  // behind the tiles the next T begin
    each<kChains>([&](auto c) LF_INLINED {
      each<T>([&](auto t) LF_INLINED {
        const char* line = w + t() * tile + c() * Line::bytes;
        __builtin_prefetch(line + ahead);
        Line::add(line, x + c() * Line::step, sums[c() * T + t()]);
      });
    });
  }
  if (w < end) each<T>([&](auto t) LF_INLINED { Line::add(w + t() * tile, x, sums[t()]); });
  each<T>([&](auto t) LF_INLINED {
    each<kVectors>([&](auto v) LF_INLINED {
      vf total = sums[t()][v()][0];
      if constexpr (kChains > 1) total += sums[T + t()][v()][0];
      storef(y + t() * kTile + v() * kWidth, total);
    });
  });
}

// As many tiles as fit, T at a time; then half as many at a time.
template <class Line, int T>
void tiles_of_one(const char* w, const float* x, int64_t lines, int64_t tiles, float* y) {
  for (; tiles >= T; tiles -= T, w += T * lines * Line::bytes, y += T * kTile) multiply_one<Line, T>(w, x, lines, y);
  if constexpr (T > 1) {
    if (tiles) tiles_of_one<Line, T / 2>(w, x, lines, tiles, y);
  }
}

// Some lines of a tile and the vectors of N positions, of which the first `positions` count. The sums continue those in
// y, where there are `earlier` columns.
struct Block {
  const char* w;
  int64_t lines;
  const float* x;
  float* y;
  int64_t ldy;
  int positions;
  bool earlier;
  const char* ahead;   // what to fetch while line 0 is used
  int64_t ahead_step;  // from line to line
};

// A function by itself: inlined, it would share the general registers with its callers' loops.
template <class Line, int N>
__attribute__((noinline)) void multiply(const Block& block) {
  vf sums[kVectors][N] = {};
  float* const y = block.y;
  const int64_t ldy = block.ldy, ahead_step = block.ahead_step;
  const int positions = block.positions;
  if (block.earlier)
    each<kVectors>([&](auto v) LF_INLINED {
      each<N>([&](auto p) LF_INLINED {
        if (p() < positions) sums[v()][p()] = loadf(y + p() * ldy + v() * kWidth);
      });
    });
  const char *w = block.w, *ahead = block.ahead, *const end = w + block.lines * Line::bytes;
  for (const float* x = block.x; w < end; w += Line::bytes, x += Line::step * N, ahead += ahead_step) {
    __builtin_prefetch(ahead);
    Line::add(w, x, sums);
  }
  each<kVectors>([&](auto v) LF_INLINED {
    each<N>([&](auto p) LF_INLINED {
      if (p() < positions) storef(y + p() * ldy + v() * kWidth, sums[v()][p()]);
    });
  });
}

// All parts of the positions use a chunk of a tile before the next chunk, which is fetched meanwhile.
template <class Line, int N>
void tiles_of_several(const char* w, const float* x, int64_t lines, int64_t tiles, int positions, float* y,
                      int64_t ldy) {
  constexpr int64_t kChunk = kChunkBytes / Line::bytes;
  const int parts = (positions + N - 1) / N;
  for (; tiles > 0; tiles--, y += kTile)
    for (int64_t first = 0; first < lines; first += kChunk) {
      const int64_t chunk = lines - first < kChunk ? lines - first : kChunk, size = chunk * Line::bytes;
      for (int part = 0; part < parts; part++) {
        const float* values = x + (part * lines + first) * Line::step * N;
        const char* ahead = parts == 1 ? w + kAhead : w + size + part * size / parts;
        multiply<Line, N>(
            {w, chunk, values, y + part * N * ldy, ldy, positions - part * N, first > 0, ahead, Line::bytes / parts});
      }
      w += size;
    }
}

template <class Line, int N>
void product_of(const char* w, const float* x, int64_t columns, int64_t tiles, int positions, float* y, int64_t ldy) {
  if constexpr (N > kMostPositions) {
    return;
  } else {
    constexpr int next = kMostPositions < 8 || N < 2 ? N + 1 : N < 4 ? 4 : N + 4;
    if (part_of(positions) != N) return product_of<Line, next>(w, x, columns, tiles, positions, y, ldy);
    const int64_t lines = (columns + Line::columns - 1) / Line::columns;
    if constexpr (N == 1) {
      tiles_of_one<Line, kVectors == 1 ? 8 : 1>(w, x, lines, tiles, y);
    } else {
      tiles_of_several<Line, N>(w, x, lines, tiles, positions, y, ldy);
    }
  }
}

void product(Dtype dtype, Activations activations, const void* w, const void* x, int64_t columns, int64_t tiles,
             int positions, float* y, int64_t ldy) {
  const auto with = [&](auto line) {
    product_of<decltype(line), 1>((const char*)w, (const float*)x, columns, tiles, positions, y, ldy);
  };
  if (uses_dot(dtype, activations)) return with(Bf16DotLine{});
  switch (dtype) {
    case Dtype::bf16: return with(Bf16Line{});
    case Dtype::f16: return with(F16Line{});
    case Dtype::f32: return with(F32Line{});
  }
}

}  // namespace
}  // namespace LF_ISA
