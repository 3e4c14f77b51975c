// `product_bf12` of the table of kernels: products with weights in 12 bits (bf12_decode.h). Used by kernels.cc alone.
//
// Invariant: weights are decoded to their bf16 bits and added in the order of product.h, line by line in the same two
// chains. So a product has the same bits in 12 and in 16 bits.
//
// Few positions decode in registers. Several positions decode a piece of a tile to memory, and all parts of the
// positions use it before the next piece.
#pragma once

#include "bf12_decode.h"
#include "product.h"

namespace LF_ISA {
namespace {

// Adds to `sums` pairs of weights times the values of their two columns, as the bf16 formats of formats.h do.
template <int N>
LF_INLINE void add_pairs(Bf16Line, vu pairs, const float* x, vf (&sums)[N]) {
  const vf columns[2] = {as_float(pairs << 16), as_float(upper_half<false>(pairs))};
  each<2>([&](auto c) LF_INLINED {
    each<N>([&](auto p) LF_INLINED { multiply_add<false>(sums[p()], columns[c()], splat(x[c() * N + p()])); });
  });
}
template <int N>
LF_INLINE void add_pairs(Bf16DotLine, vu pairs, const float* x, vf (&sums)[N]) {
  each<N>([&](auto p) LF_INLINED {
    uint32_t both;
    std::memcpy(&both, x + p(), 4);
    sums[p()] = dot_bf16(sums[p()], pairs, splat_u(both));
  });
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// One position and eight rows of half a unit without exceptions: columns 0-3 (half 0) or 4-7. Adds the first of the
// half's two lines to `first`, the other to `second`. Assembly, as the sums of three tiles leave only four registers.
template <int half>
LF_INLINE void add_half(const char* unit, const vb& table, const float* x, vf& first, vf& second) {
  typedef const char Vector[sizeof(vb)];
  alignas(sizeof(vb)) static constexpr uint32_t kNibbles[] = {0x0f0f0f0f, 0x0f0f0f0f, 0x0f0f0f0f, 0x0f0f0f0f,
                                                              0x0f0f0f0f, 0x0f0f0f0f, 0x0f0f0f0f, 0x0f0f0f0f};
  vu a, b, c, high;
#define LF_LINE(pairs, sum, even, odd)                   \
  "vbroadcastss " even ", %[a]\n\tvpslld $16, " pairs    \
  ", %[c]\n\t"                                           \
  "vfmadd231ps %[a], %[c], " sum "\n\tvbroadcastss " odd \
  ", %[a]\n\t"                                           \
  "vpand %[mask], " pairs ", " pairs "\n\tvfmadd231ps %[a], " pairs ", " sum "\n\t"
  __asm__(
      "vmovdqu %[codes], %[a]\n\tvpsrld %[shift], %[a], %[a]\n\tvpand %[nibbles], %[a], %[a]\n\t"
      "vmovdqa %[table], %[high]\n\tvpshufb %[a], %[high], %[high]\n\tvmovdqu %[low], %[a]\n\t"
      "vpunpcklbw %[high], %[a], %[b]\n\tvpunpckhbw %[high], %[a], %[high]\n\t"  //
      LF_LINE("%[b]", "%[first]", "%[x0]", "%[x1]") LF_LINE("%[high]", "%[second]", "%[x2]", "%[x3]")
      : [first] "+x"(first), [second] "+x"(second), [a] "=&x"(a), [b] "=&x"(b), [c] "=&x"(c), [high] "=&x"(high)
      : [codes] "m"(*(Vector*)unit), [low] "m"(*(Vector*)(unit + 64 * (1 + half))), [table] "m"(table),
        [nibbles] "m"(kNibbles), [mask] "m"(kUpperHalf), [shift] "i"(4 * half), [x0] "m"(x[0]), [x1] "m"(x[1]),
        [x2] "m"(x[2]), [x3] "m"(x[3]));
#undef LF_LINE
}

template <int T>
using OneSums = vf[kChains][T][kVectors];

// One position: multiplies units without exceptions, `bytes` bytes of each of T tiles. The table is read from memory.
template <int T, Reader reader>
__attribute__((noinline)) void multiply_units(const char* w, int64_t bytes, int64_t tile, const vb* table,
                                              const float* x, Fetching<T, reader>& fetching, OneSums<T>& all) {
  vf sums[kChains][T][kVectors];
  each<kChains * T * kVectors>([&](auto i) LF_INLINED { (&sums[0][0][0])[i()] = (&all[0][0][0])[i()]; });
  Fetching<T, reader> ahead = fetching;
  for (const char* const end = w + bytes; w < end; w += kUnitBytes, x += laneformer::kUnitColumns) {
    ahead.template fetch<kUnitBytes>();
    each<T>([&](auto t) LF_INLINED {
      each<kVectors>([&](auto v) LF_INLINED {
        each<2>([&](auto half) LF_INLINED {
          add_half<half()>(w + t() * tile + v() * sizeof(vb), *table, x + 4 * half(), sums[0][t()][v()],
                           sums[1][t()][v()]);
        });
      });
    });
  }
  each<kChains * T * kVectors>([&](auto i) LF_INLINED { (&all[0][0][0])[i()] = (&sums[0][0][0])[i()]; });
  fetching = ahead;
}

// One position: multiplies the first `lines` lines of one unit of T tiles, with its exceptions.
template <int T>
__attribute__((noinline)) void multiply_unit(const char* w, int64_t tile, vb table, const uint32_t* (&exceptions)[T],
                                             uint32_t unit, int lines, const float* x, OneSums<T>& sums) {
  for (int t = 0; t < T; t++) {
    each<kVectors>([&](auto v) LF_INLINED {
      unit_lines(w + t * tile, table, v(), exceptions[t], unit, [&](auto line, vu pairs) LF_INLINED {
        vf(&sum)[1] = (vf(&)[1])sums[line() % kChains][t][v()];
        if (line() < lines) add_pairs(Bf16Line{}, pairs, x + line() * Bf16Line::step, sum);
      });
    });
    exceptions[t] = after(exceptions[t], unit);
  }
}

// One position: multiplies T whole tiles side by side, in the order of multiply_few. Between units with exceptions it
// uses the faster multiply_units.
template <int T, Reader reader>
void multiply_one_bf12(const Bf12& weights, int64_t first, const float* x, int64_t lines, float* y) {
  const uint32_t units = (uint32_t)(lines / kUnitLines), rest = (uint32_t)(lines % kUnitLines);
  const int64_t tile = (lines + kUnitLines - 1) / kUnitLines * kUnitBytes;
  const vb table = table_of(weights);
  const char* const w = weights.data + first * tile;
  const uint32_t* exceptions[T];
  for (int t = 0; t < T; t++) exceptions[t] = weights.exceptions + weights.starts[first + t];
  OneSums<T> sums = {};
  Fetching<T, reader> ahead(w, tile);
  for (uint32_t unit = 0;; unit++) {
    uint32_t next = units;  // the next unit with an exception in any tile
    for (int t = 0; t < T; t++) next = exceptions[t][0] >> 15 < next ? exceptions[t][0] >> 15 : next;
    multiply_units(w + unit * kUnitBytes, (next - unit) * kUnitBytes, tile, &table, x + unit * laneformer::kUnitColumns,
                   ahead, sums);
    unit = next;
    const int here = unit < units ? kUnitLines : (int)rest;
    if (here)
      multiply_unit(w + unit * kUnitBytes, tile, table, exceptions, unit, here, x + unit * laneformer::kUnitColumns,
                    sums);
    if (unit == units) break;
    ahead.template fetch<kUnitBytes>();
  }
  for (int t = 0; t < T; t++)
    for (int v = 0; v < kVectors; v++) storef(y + t * kTile + v * kWidth, sums[0][t][v] + sums[kChains - 1][t][v]);
}
#endif

// Few positions: multiplies T whole tiles side by side, as multiply_few does with their bf16 lines.
template <class Line, int N, int T, Reader reader>
__attribute__((noinline)) void multiply_few_bf12(const Bf12& weights, int64_t first, const float* x, int64_t lines,
                                                 int positions, float* y, int64_t ldy) {
  constexpr int kStep = Line::step * N;
  const int64_t units = lines / kUnitLines, tile = (lines + kUnitLines - 1) / kUnitLines * kUnitBytes;
  const vb table = table_of(weights);
  const char* w = weights.data + first * tile;
  const uint32_t* exceptions[T];
  each<T>([&](auto t) LF_INLINED { exceptions[t()] = weights.exceptions + weights.starts[first + t()]; });
  vf sums[kChains][T][kVectors][N] = {};
  const char* const end = w + units * kUnitBytes;
  Fetching<T, reader> ahead(w, tile);
  uint32_t unit = 0;
  for (; w < end; w += kUnitBytes, x += kUnitLines * kStep, unit++) {
    ahead.template fetch<kUnitBytes>();
    each<T>([&](auto t) LF_INLINED {
      const char* from = w + t() * tile;
      each<kVectors>([&](auto v) LF_INLINED {
        unit_lines(from, table, v(), exceptions[t()], unit, [&](auto line, vu pairs) LF_INLINED {
          add_pairs(Line{}, pairs, x + line() * kStep, sums[line() % kChains][t()][v()]);
        });
        // Makes the next vector or tile load the values again: there are no registers to keep all of them in.
        if (N > 1 || (kVectors > 1 && kRegisters < 32)) __asm__("" : "+r"(x));
      });
      exceptions[t()] = after(exceptions[t()], unit);
    });
  }
  const int rest = (int)(lines % kUnitLines);
  each<T>([&](auto t) LF_INLINED {
    each<kVectors>([&](auto v) LF_INLINED {
      if (rest)
        unit_lines(w + t() * tile, table, v(), exceptions[t()], unit, [&](auto line, vu pairs) LF_INLINED {
          if (line() < rest) add_pairs(Line{}, pairs, x + line() * kStep, sums[line() % kChains][t()][v()]);
        });
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
void tiles_of_few_bf12(const Bf12& weights, int64_t first, const float* x, int64_t lines, int64_t tiles, int positions,
                       float* y, int64_t ldy) {
  for (; tiles >= T; tiles -= T, first += T, y += T * kTile) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (N == 1 && std::is_same_v<Line, Bf16Line>) {
      multiply_one_bf12<T, reader>(weights, first, x, lines, y);
      continue;
    }
#endif
    multiply_few_bf12<Line, N, T, reader>(weights, first, x, lines, positions, y, ldy);
  }
  if constexpr (T > 1) {
    if (tiles) tiles_of_few_bf12<Line, N, (T + 1) / 2, reader>(weights, first, x, lines, tiles, positions, y, ldy);
  }
}

// Several positions: all parts of the positions use a decoded piece of a tile before the next piece is decoded.
template <class Line, int N>
void tiles_of_several_bf12(const Bf12& weights, const float* x, int64_t lines, int64_t tiles, int positions, float* y,
                           int64_t ldy) {
  constexpr int64_t kLines = kPiece / Line::bytes;
  alignas(64) char piece[kPiece];
  float odd[kChains > 1 ? laneformer::kMostPositions * kTile : 1];
  const bool fetches = reader() == Reader::other;
  const vb table = table_of(weights);
  const int parts = (positions + N - 1) / N;
  const int64_t tile = (lines + kUnitLines - 1) / kUnitLines * kUnitBytes;
  for (int64_t t = 0; t < tiles; t++, y += kTile) {
    const uint32_t* exceptions = weights.exceptions + weights.starts[t];
    const char* w = weights.data + t * tile;
    for (int64_t first = 0; first < lines; first += kLines) {
      const int64_t count = lines - first < kLines ? lines - first : kLines;
      const int64_t unit = first / kUnitLines, units = (count + kUnitLines - 1) / kUnitLines;
      exceptions = decode(w + unit * kUnitBytes, table, exceptions, unit, units, near_of(reader()), piece);
      // While this piece is used, the units of the next one are prefetched.
      const char* const ahead = fetches ? w + (unit + units) * kUnitBytes : piece;
      const int64_t rest = fetches ? units * kUnitBytes : 0, step = fetches ? kUnitBytes / kUnitLines / parts : 0;
      for (int part = 0; part < parts; part++) {
        const int begin = part * N;
        multiply_chains<Line, N, 1>({piece, count * Line::bytes, 0, x + (part * lines + first) * Line::step * N,
                                     y + begin * ldy, ldy, odd + (kChains > 1 ? begin * kTile : 0), positions - begin,
                                     first > 0, first + count == lines, ahead + part * rest / parts, step});
      }
    }
  }
}

template <class Line>
void product_of_bf12(const Bf12& weights, const float* x, int64_t columns, int64_t tiles, int positions, float* y,
                     int64_t ldy) {
  const int64_t lines = (columns + Line::columns - 1) / Line::columns;
  with_part(positions, [&](auto n) {
    constexpr int kSide = n() == 1 && kVectors == 1 ? (kStreams + 1) / 2 : kStreams / n() > 1 ? kStreams / n() : 1;
    if constexpr (kFew<n(), kSide>) {
      with_reader<kSide>([&](auto t, auto by) {
        tiles_of_few_bf12<Line, n(), t(), (Reader)by()>(weights, 0, x, lines, tiles, positions, y, ldy);
      });
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
