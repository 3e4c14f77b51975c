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

// How few positions read weights from memory: tiles side by side, which are as many streams, and how many bytes ahead
// they are fetched into the first level and into the second. With AVX-512, AMD's prefetchers follow one stream best,
// and lose it where lines that they would bring are asked for; with AVX2 (Zen 3) three streams are faster than one or
// two.
#if defined(__clang__)
constexpr int kStreams = kVectors == 1 ? 4 : kVectors == 2 ? 3 : 1;  // with eight it keeps sums in memory
#else
constexpr int kStreams = kVectors == 1 ? 8 : kVectors == 2 ? 3 : 1;
#endif
enum class Reader { amd, other };
constexpr int streams_of(Reader reader, int wanted) { return reader == Reader::amd && kVectors == 1 ? 1 : wanted; }
constexpr int64_t kFar = 4096;  // not for AMD's
constexpr int64_t near_of(Reader reader) { return reader == Reader::other ? 1024 : kVectors == 2 ? 768 : 384; }
LF_INLINE Reader reader() {
#if defined(__x86_64__)
  if (__builtin_cpu_is("amd")) return Reader::amd;
#endif
  return Reader::other;
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

// Tiles that N positions read side by side.
constexpr int side_of(int n) {
  if (kVectors == 2) return n == 1 ? kStreams : n == 2 ? 2 : 1;
  if (kStreams / n > 1) return kStreams / n;
  return kVectors == 1 && n <= 12 ? 2 : 1;  // each value of a vector is then loaded once for both
}

// Whether the sums of both chains fit the registers at once, and N positions are never one part of several.
template <int N, int T>
constexpr bool kFew =
    N < kPartPositions && kChains * T * kVectors * N <= (N == 1 ? kRegisters * 3 / 4 : kRegisters / 2);

// What is fetched ahead of T tiles side by side, behind whose end the next T tiles begin.
template <int T, Reader reader>
struct Fetching {
  const char *near, *far, *end;
  int64_t tile;
  Fetching(const char* w, int64_t bytes) : near(w + near_of(reader)), far(w + kFar), end(w + bytes), tile(bytes) {}

  // The next `bytes` of all tiles.
  template <int bytes>
  LF_INLINED void fetch() {
    skip<bytes>(near);
    if constexpr (reader == Reader::other) skip<bytes>(far);
    each<bytes / 64>([&](auto line) LF_INLINED {
      each<T>([&](auto t) LF_INLINED {
        __builtin_prefetch(near + 64 * line() + t() * tile);
        if constexpr (reader == Reader::other) __builtin_prefetch(far + 64 * line() + t() * tile, 0, 2);
      });
    });
    near += bytes, far += bytes;
  }
  template <int bytes>
  LF_INLINED void skip(const char*& at) const {
    if (T > 1 && (uint64_t)(at - end) < bytes) at += (T - 1) * tile;  // once
  }
};

// Few positions: T whole tiles side by side, both chains at once.
template <class Line, int N, int T, Reader reader>
__attribute__((noinline)) void multiply_few(const char* w, const float* x, int64_t lines, int positions, float* y,
                                            int64_t ldy) {
  vf sums[kChains][T][kVectors][N] = {};
  const int64_t tile = lines * Line::bytes;
  const char* const end = w + tile;
  Fetching<T, reader> ahead(w, tile);
  for (; end - w >= kChains * Line::bytes; w += kChains * Line::bytes, x += kChains * Line::step * N) {
    ahead.template fetch<kChains * Line::bytes>();
    each<kChains>([&](auto c)
                      LF_INLINED { Line::add(w + c() * Line::bytes, tile, x + c() * Line::step * N, sums[c()]); });
  }
  if (w < end) Line::add(w, tile, x, sums[0]);
  each<T>([&](auto t) LF_INLINED {
    each<kVectors>([&](auto v) LF_INLINED {
      each<N>([&](auto p) LF_INLINED {
        vf total = sums[0][t()][v()][p()];
        if constexpr (kChains > 1) total += sums[kChains - 1][t()][v()][p()];
        if (p() < positions) storef(y + p() * ldy + t() * kTile + v() * kWidth, total);
      });
    });
  });
}

// As many tiles as fit, T at a time; then about half as many at a time.
template <class Line, int N, int T, Reader reader>
void tiles_of_few(const char* w, const float* x, int64_t lines, int64_t tiles, int positions, float* y, int64_t ldy) {
  for (; tiles >= T; tiles -= T, w += T * lines * Line::bytes, y += T * kTile)
    multiply_few<Line, N, T, reader>(w, x, lines, positions, y, ldy);
  if constexpr (T > 1) {
    if (tiles) tiles_of_few<Line, N, (T + 1) / 2, reader>(w, x, lines, tiles, positions, y, ldy);
  }
}

// Some lines of T tiles and the vectors of N positions, of which the first `positions` count.
struct Block {
  const char* w;
  int64_t bytes, tile;  // of the lines, and from tile to tile
  const float* x;
  float* y;
  int64_t ldy;
  float* odd;  // [T][N][kTile]: the second chain, while there are lines left
  int positions;
  bool earlier, ended;  // whether y and `odd` have the sums of earlier lines, and whether these are the last
  const char* ahead;    // what to fetch while line 0 is used
  int64_t ahead_step;   // from line to line
};

// The lines of one chain. A function by itself: inlined, it would share the registers with its callers' loops.
// The loops over sums are written out: Clang keeps sums in memory that a function object refers to.
template <class Line, int N, int T, int kChain>
__attribute__((noinline)) void multiply(const Block& block) {
  vf sums[T][kVectors][N] = {};
  float* const carried = kChain ? block.odd : block.y;
  const int64_t ld = kChain ? kTile : block.ldy, ahead_step = block.ahead_step, tile = block.tile;
  const int64_t of_tile = kChain ? N * kTile : kTile;
  const int positions = block.positions;
  if (block.earlier)
    each<T>([&](auto t) LF_INLINED {
      each<kVectors>([&](auto v) LF_INLINED {
        each<N>([&](auto p) LF_INLINED {
          if (p() < positions) sums[t()][v()][p()] = loadf(carried + t() * of_tile + p() * ld + v() * kWidth);
        });
      });
    });
  const char *w = block.w + kChain * Line::bytes, *const end = block.w + block.bytes, *ahead = block.ahead;
  if (kChain) ahead += (block.bytes / Line::bytes + 1) / 2 * ahead_step;  // behind what the other chain fetched
  const float* x = block.x + kChain * Line::step * N;
  for (; w < end; w += kChains * Line::bytes, x += kChains * Line::step * N, ahead += ahead_step) {
    each<T>([&](auto t) LF_INLINED { __builtin_prefetch(ahead + t() * tile); });
    Line::add(w, tile, x, sums);
  }
  const bool added = kChain && block.ended;
  float* const to = added ? block.y : carried;
  const int64_t ldt = added ? block.ldy : ld, to_tile = added ? kTile : of_tile;
  each<T>([&](auto t) LF_INLINED {
    each<kVectors>([&](auto v) LF_INLINED {
      each<N>([&](auto p) LF_INLINED {
        float* const at = to + t() * to_tile + p() * ldt + v() * kWidth;
        if (p() < positions) storef(at, added ? loadf(at) + sums[t()][v()][p()] : sums[t()][v()][p()]);
      });
    });
  });
}

template <class Line, int N, int T>
LF_INLINE void multiply_chains(const Block& block) {  // one after the other
  each<kChains>([&](auto chain) LF_INLINED { multiply<Line, N, T, chain()>(block); });
}

// T tiles at a time; all parts of the positions use a chunk of them before the next chunk, which is fetched meanwhile.
template <class Line, int N, int T>
void tiles_of_several(const char* w, const float* x, int64_t lines, int64_t tiles, int positions, float* y,
                      int64_t ldy) {
  float odd[kChains > 1 ? T * laneformer::kMostPositions * kTile : 1];
  const int parts = (positions + N - 1) / N;
  const int64_t most = (parts == 1 ? kPartChunk : kChunk) / Line::bytes / T, tile = lines * Line::bytes;
  for (; tiles >= T; tiles -= T, y += T * kTile, w += (T - 1) * tile)
    for (int64_t first = 0; first < lines; first += most) {
      const int64_t chunk = lines - first < most ? lines - first : most, size = chunk * Line::bytes;
      const bool last = first + chunk == lines;
      for (int part = 0; part < parts; part++) {
        const int begin = part * N;
        multiply_chains<Line, N, T>({w, size, tile, x + (part * lines + first) * Line::step * N, y + begin * ldy, ldy,
                                     odd + (kChains > 1 ? T * begin * kTile : 0), positions - begin, first > 0, last,
                                     w + size + part * size / parts + (last ? (T - 1) * tile : 0),
                                     Line::bytes / parts});
      }
      w += size;
    }
  if constexpr (T > 1) {
    if (tiles) tiles_of_several<Line, N, 1>(w, x, lines, tiles, positions, y, ldy);
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

// f(Count<T>{}, Count<reader>{}): the tiles that are read side by side here, `side` or 1.
template <int side, class F>
void with_reader(F f) {
  const auto with = [&](auto by) { f(Count<streams_of((Reader)by(), side)>{}, by); };
  reader() == Reader::amd ? with(Count<(int)Reader::amd>{}) : with(Count<(int)Reader::other>{});
}

template <class Line>
void product_of(const char* w, const float* x, int64_t columns, int64_t tiles, int positions, float* y, int64_t ldy) {
  const int64_t lines = (columns + Line::columns - 1) / Line::columns;
  with_part(positions, [&](auto n) {
    with_reader<side_of(n())>([&](auto t, auto by) {
      if constexpr (kFew<n(), t()>) {
        tiles_of_few<Line, n(), t(), (Reader)by()>(w, x, lines, tiles, positions, y, ldy);
      } else {
        tiles_of_several<Line, n(), t()>(w, x, lines, tiles, positions, y, ldy);
      }
    });
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
