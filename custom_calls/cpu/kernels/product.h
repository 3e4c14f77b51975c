// Products of packed weight tiles with the vectors of one position or of several. Included by kernels.cc alone, as
// simd.h is.
//
// The bits of a result depend on its weights and its vector alone: not on other positions, on the tiles computed beside
// it, or on the threads. A sum is kChains chains of multiply-adds, one for the lines of a tile whose number is even and
// one for the others, which are added at the end.
#pragma once

#include "formats.h"
#include "kernels.h"
#include "simd.h"

namespace LF_ISA {
namespace {

using laneformer::Activations;
using laneformer::Dtype;

// Positions whose sums fit the registers, beside a column's weights and one value of a vector.
constexpr int kPartPositions = kWidth == 16 ? 24 : kWidth == 8 ? 6 : kRegisters == 32 ? 4 : 2;
// Of a tile, which all positions use before the next: those of one part and of several.
constexpr int64_t kPartChunk = 8192, kChunk = kWidth == 16 ? 32768 : 16384;
constexpr int kChains = kVectors < 4 ? 2 : 1;  // one would have each multiply-add of one position wait for the last

// How one position reads weights from memory: tiles at a time, which are as many streams, and how many bytes ahead they
// are fetched. AMD's prefetchers follow one stream best, and lose it where lines that they would bring are asked for.
#if defined(__clang__)
constexpr int kStreams = kVectors == 1 ? 4 : 1;  // with eight it keeps sums in memory
#else
constexpr int kStreams = kVectors == 1 ? 8 : 1;
#endif
struct Reading {
  int streams;
  int64_t ahead;
};
LF_INLINE Reading reading() {
#if defined(__x86_64__)
  if (__builtin_cpu_is("amd")) return {1, 384};
#endif
  return {kStreams, 1024};
}

bool uses_dot(Dtype dtype, Activations activations) {
  return kHasDot && dtype == Dtype::bf16 && activations == Activations::rounded;
}

// Positions are multiplied in parts of equal size, one of the sizes for which there is code; the last may be padded.
int part_of(int positions) {
  const int parts = (positions + kPartPositions - 1) / kPartPositions;
  const int size = (positions + parts - 1) / parts;
  return kPartPositions < 8 || size < 3 ? size : (size + 3) / 4 * 4;
}

// One position: T tiles side by side.
template <class Line, int T>
__attribute__((noinline)) void multiply_one(const char* w, const float* x, int64_t lines, int64_t by, float* y) {
  vf sums[kChains * T][kVectors][1] = {};
  const int64_t tile = lines * Line::bytes;
  const char* const end = w + tile;
  int64_t ahead = by;
  for (; end - w >= kChains * Line::bytes; w += kChains * Line::bytes, x += kChains * Line::step) {
    if (end - w <= by) ahead = by + (T - 1) * tile;  // behind the tiles the next T begin
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
void tiles_of_one(const char* w, const float* x, int64_t lines, int64_t tiles, int64_t by, float* y) {
  for (; tiles >= T; tiles -= T, w += T * lines * Line::bytes, y += T * kTile)
    multiply_one<Line, T>(w, x, lines, by, y);
  if constexpr (T > 1) {
    if (tiles) tiles_of_one<Line, T / 2>(w, x, lines, tiles, by, y);
  }
}

// Some lines of a tile and the vectors of N positions, of which the first `positions` count.
struct Block {
  const char* w;
  int64_t bytes;
  const float* x;
  float* y;
  int64_t ldy;
  float* odd;  // [N][kTile]: the second chain, while there are lines left
  int positions;
  bool earlier, ended;  // whether y and `odd` have the sums of earlier lines, and whether these are the last
  const char* ahead;    // what to fetch while line 0 is used
  int64_t ahead_step;   // from line to line
};

// The lines of one chain. A function by itself: inlined, it would share the registers with its callers' loops.
// The loops over sums are written out: Clang keeps sums in memory that a function object refers to.
template <class Line, int N, int kChain>
__attribute__((noinline)) void multiply(const Block& block) {
  vf sums[kVectors][N] = {};
  float* const carried = kChain ? block.odd : block.y;
  const int64_t ld = kChain ? kTile : block.ldy, ahead_step = block.ahead_step;
  const int positions = block.positions;
  if (block.earlier)
    each<kVectors>([&](auto v) LF_INLINED {
      each<N>([&](auto p) LF_INLINED {
        if (p() < positions) sums[v()][p()] = loadf(carried + p() * ld + v() * kWidth);
      });
    });
  const char *w = block.w + kChain * Line::bytes, *const end = block.w + block.bytes, *ahead = block.ahead;
  if (kChain) ahead += (block.bytes / Line::bytes + 1) / 2 * ahead_step;  // behind what the other chain fetched
  const float* x = block.x + kChain * Line::step * N;
  for (; w < end; w += kChains * Line::bytes, x += kChains * Line::step * N, ahead += ahead_step) {
    __builtin_prefetch(ahead);
    Line::add(w, x, sums);
  }
  const bool added = kChain && block.ended;
  float* const to = added ? block.y : carried;
  const int64_t ldt = added ? block.ldy : ld;
  each<kVectors>([&](auto v) LF_INLINED {
    each<N>([&](auto p) LF_INLINED {
      float* const at = to + p() * ldt + v() * kWidth;
      if (p() < positions) storef(at, added ? loadf(at) + sums[v()][p()] : sums[v()][p()]);
    });
  });
}

template <class Line, int N>
LF_INLINE void multiply_chains(const Block& block) {  // one after the other
  each<kChains>([&](auto chain) LF_INLINED { multiply<Line, N, chain()>(block); });
}

// A whole tile, both chains at once: for few positions.
template <class Line, int N>
__attribute__((noinline)) void multiply_few(const char* w, const float* x, int64_t lines, int64_t by, int positions,
                                            float* y, int64_t ldy) {
  vf sums[kChains][kVectors][N] = {};
  const char* const end = w + lines * Line::bytes;
  for (; end - w >= kChains * Line::bytes; w += kChains * Line::bytes, x += kChains * Line::step * N)
    each<kChains>([&](auto c) LF_INLINED {
      __builtin_prefetch(w + c() * Line::bytes + by);
      Line::add(w + c() * Line::bytes, x + c() * Line::step * N, sums[c()]);
    });
  if (w < end) Line::add(w, x, sums[0]);
  each<kVectors>([&](auto v) LF_INLINED {
    each<N>([&](auto p) LF_INLINED {
      vf total = sums[0][v()][p()];
      if constexpr (kChains > 1) total += sums[kChains - 1][v()][p()];
      if (p() < positions) storef(y + p() * ldy + v() * kWidth, total);
    });
  });
}

// All parts of the positions use a chunk of a tile before the next chunk, which is fetched meanwhile.
template <class Line, int N>
void tiles_of_several(const char* w, const float* x, int64_t lines, int64_t tiles, int positions, float* y,
                      int64_t ldy) {
  if constexpr (kChains > 1 && kChains * kVectors * N <= kRegisters / 2) {  // never several parts
    for (; tiles > 0; tiles--, y += kTile, w += lines * Line::bytes)
      multiply_few<Line, N>(w, x, lines, reading().ahead, positions, y, ldy);
  } else {
    float odd[kChains > 1 ? laneformer::kMostPositions * kTile : 1];
    const int parts = (positions + N - 1) / N;
    const int64_t most = (parts == 1 ? kPartChunk : kChunk) / Line::bytes;
    for (; tiles > 0; tiles--, y += kTile)
      for (int64_t first = 0; first < lines; first += most) {
        const int64_t chunk = lines - first < most ? lines - first : most, size = chunk * Line::bytes;
        for (int part = 0; part < parts; part++) {
          const int begin = part * N;
          multiply_chains<Line, N>({w, size, x + (part * lines + first) * Line::step * N, y + begin * ldy, ldy,
                                    odd + (kChains > 1 ? begin * kTile : 0), positions - begin, first > 0,
                                    first + chunk == lines, w + size + part * size / parts, Line::bytes / parts});
        }
        w += size;
      }
  }
}

// f(Count<N>{}): N is the size of the parts in which so many positions are multiplied.
template <int N = 1, class F>
void with_part(int positions, F f) {
  if constexpr (N <= kPartPositions) {
    constexpr int next = kPartPositions < 8 || N < 2 ? N + 1 : N < 4 ? 4 : N + 4;
    part_of(positions) == N ? f(Count<N>{}) : with_part<next>(positions, f);
  }
}

// f(Count<T>{}, bytes ahead): how one position reads here, T being 1 or `streams`.
template <int streams, class F>
void with_reading(F f) {
  const Reading way = reading();
  way.streams > 1 ? f(Count<streams>{}, way.ahead) : f(Count<1>{}, way.ahead);
}

template <class Line>
void product_of(const char* w, const float* x, int64_t columns, int64_t tiles, int positions, float* y, int64_t ldy) {
  const int64_t lines = (columns + Line::columns - 1) / Line::columns;
  with_part(positions, [&](auto n) {
    if constexpr (n() == 1) {
      with_reading<kStreams>([&](auto t, int64_t by) { tiles_of_one<Line, t()>(w, x, lines, tiles, by, y); });
    } else {
      tiles_of_several<Line, n()>(w, x, lines, tiles, positions, y, ldy);
    }
  });
}

void product(Dtype dtype, Activations activations, const void* w, const void* x, int64_t columns, int64_t tiles,
             int positions, float* y, int64_t ldy) {
  const auto with = [&](auto line) {
    product_of<decltype(line)>((const char*)w, (const float*)x, columns, tiles, positions, y, ldy);
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
