// `product` of the table of kernels: packed weight tiles times the vectors of one position or several, as prepare.h
// writes them. Included by kernels.cc alone.
//
// Invariant: the bits of a result depend on its weights and its vector alone, not on other positions, on the tiles that
// are computed beside it, or on the threads. A sum consists of kChains chains of multiply-adds, one over the lines of a
// tile with even numbers and one over the others, which are added at the end (with one chain, over all lines). All
// functions here keep that order.
//
// For few positions memory is the limit: `multiply_few` takes whole tiles side by side and prefetches them. Several
// positions share a chunk of a tile while it is in the cache: `tiles_of_several` cuts the positions into parts whose
// sums fit in registers, and `multiply` takes one chain of a chunk for one part.
#pragma once

#include "formats.h"
#include "kernels.h"
#include "simd.h"

namespace LF_ISA {
namespace {

using laneformer::Activations;
using laneformer::Dtype;

// Positions of a part at most: their sums fit in registers, beside a column's weights and one value of a vector.
constexpr int kPartPositions = kWidth == 16 ? 24 : kWidth == 8 ? 6 : kRegisters == 32 ? 4 : 2;
// Bytes of a tile that all positions use before the next ones: if the positions are one part, or several.
constexpr int64_t kPartChunk = 8192, kChunk = kWidth == 16 ? 32768 : 16384;
constexpr int kChains = kVectors < 4 ? 2 : 1;  // with one chain, each multiply-add of one position waits for the last

// How few positions read weights from memory: kStreams tiles side by side, each a stream, prefetched near_of() bytes
// ahead into the first-level cache and kFar bytes ahead into the second. With AVX-512, AMD's prefetchers follow a
// single stream best, and lose it when code prefetches lines that they would have fetched. With AVX2 (Zen 3), three
// streams are faster than one or two.
#if defined(__clang__)
constexpr int kStreams = kVectors == 1 ? 4 : kVectors == 2 ? 3 : 1;  // with eight, Clang keeps sums in memory
#else
constexpr int kStreams = kVectors == 1 ? 8 : kVectors == 2 ? 3 : 1;
#endif
enum class Reader { amd, other };
constexpr int streams_of(Reader reader, int wanted) { return reader == Reader::amd && kVectors == 1 ? 1 : wanted; }
constexpr int64_t kFar = 4096;  // not used on AMD's processors
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

// Size of the parts into which positions are cut. All parts of a product have the same size, one for which there is
// code, so the last part may be padded.
int part_of(int positions) {
  const int parts = (positions + kPartPositions - 1) / kPartPositions;
  const int size = (positions + parts - 1) / parts;
  return kPartPositions < 8 || size < 3 ? size : (size + 3) / 4 * 4;
}

// How many tiles n positions read side by side.
constexpr int side_of(int n) {
  if (kVectors == 2) return n == 1 ? kStreams : n == 2 ? 2 : 1;
  if (kStreams / n > 1) return kStreams / n;
  return kVectors == 1 && n <= 12 ? 2 : 1;  // with two, each value of a vector is loaded once for both tiles
}

// Whether N positions are few: the sums of both chains of T tiles fit in registers at once, and N positions are never
// one part of several.
template <int N, int T>
constexpr bool kFew =
    N < kPartPositions && kChains * T * kVectors * N <= (N == 1 ? kRegisters * 3 / 4 : kRegisters / 2);

// Prefetching for T tiles side by side. After the end of these tiles, the next T tiles begin.
template <int T, Reader reader>
struct Fetching {
  const char *near, *far, *end;
  int64_t tile;
  Fetching(const char* w, int64_t bytes) : near(w + near_of(reader)), far(w + kFar), end(w + bytes), tile(bytes) {}

  // Prefetches the next `bytes` bytes of all tiles.
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
  // At the end of the first tile, jumps over the other tiles to the next T tiles.
  template <int bytes>
  LF_INLINED void skip(const char*& at) const {
    if (T > 1 && (uint64_t)(at - end) < bytes) at += (T - 1) * tile;
  }
};

// Few positions: multiplies T whole tiles side by side, both chains at once. positions: how many of the N are written.
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

// Few positions: multiplies all tiles, T at a time while there are as many, then about half as many at a time.
template <class Line, int N, int T, Reader reader>
void tiles_of_few(const char* w, const float* x, int64_t lines, int64_t tiles, int positions, float* y, int64_t ldy) {
  for (; tiles >= T; tiles -= T, w += T * lines * Line::bytes, y += T * kTile)
    multiply_few<Line, N, T, reader>(w, x, lines, positions, y, ldy);
  if constexpr (T > 1) {
    if (tiles) tiles_of_few<Line, N, (T + 1) / 2, reader>(w, x, lines, tiles, positions, y, ldy);
  }
}

// A chunk of T tiles and the vectors of N positions.
struct Block {
  const char* w;
  int64_t bytes, tile;  // bytes of the chunk in one tile, and from one tile to the next
  const float* x;
  float* y;
  int64_t ldy;
  float* odd;           // [T][N][kTile]: sums of the second chain, until the last chunk
  int positions;        // only the first of the N are written
  bool earlier, ended;  // y and `odd` have the sums of earlier chunks; this chunk is the last
  const char* ahead;    // what to prefetch with line 0
  int64_t ahead_step;   // bytes further for each line
};

// Multiplies the lines of one chain of a chunk. It is not inlined, because it would then share registers with its
// callers' loops. The loops over sums are written out, because Clang keeps sums in memory that a lambda refers to.
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
  if (kChain) ahead += (block.bytes / Line::bytes + 1) / 2 * ahead_step;  // after what the first chain prefetched
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

// Multiplies a chunk, one chain after the other.
template <class Line, int N, int T>
LF_INLINE void multiply_chains(const Block& block) {
  each<kChains>([&](auto chain) LF_INLINED { multiply<Line, N, T, chain()>(block); });
}

// Several positions: multiplies T tiles at a time. All parts of the positions use a chunk of the tiles, while the next
// chunk is prefetched.
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

// Calls f(Count<N>{}) with the size N of the parts into which this many positions are cut.
template <int N = 1, class F>
void with_part(int positions, F f) {
  if constexpr (N <= kPartPositions) {
    constexpr int next = kPartPositions < 8 || N < 2 ? N + 1 : N < 4 ? 4 : N + 4;
    part_of(positions) == N ? f(Count<N>{}) : with_part<next>(positions, f);
  }
}

// Calls f(Count<T>{}, Count<reader>{}) for this processor. T: how many tiles it reads side by side, `side` or 1.
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
