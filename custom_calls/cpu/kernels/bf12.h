// Weights of bf16 in 12 bits each (laneformer/formats.py has the format), in units of 16 rows and 8 columns: a line of
// codes, those of columns 0-3 in the low nibbles and of 4-7 in the high ones, then two lines of low bytes. Byte
// 16 (r / 4) + 8 (c / 2) + 2 (r % 4) + c % 2 of a line is row r, column c of four: interleaving high and low bytes
// gives the lines of bf16 tiles. A product adds them in the order of the bf16 product, and so has its bits.
//
// Exceptions are words unit << 15 | slot << 8 | high byte, ascending in each tile and ended by ~0; slot: the place of a
// weight's byte in the two lines of low bytes. Included by kernels.cc alone, as simd.h is.
#pragma once

#include "product.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace LF_ISA {
namespace {

using laneformer::Bf12;
using laneformer::kUnitBytes;

typedef uint8_t vb __attribute__((vector_size(4 * kWidth)));

constexpr int kUnitLines = laneformer::kUnitColumns / Bf16Line::columns;
constexpr int64_t kPiece = 8192;  // bytes of bf16 lines that are decoded at once: they stay in the first-level cache

// table[index]; the table is repeated in each 16 bytes of its vector.
LF_INLINE vb lookup(vb table, vb index) {
#if defined(__AVX512BW__)
  return (vb)_mm512_shuffle_epi8((__m512i)table, (__m512i)index);
#elif defined(__AVX2__)
  return (vb)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);
#elif defined(__aarch64__)
  return (vb)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)index);
#else  // a comparison for each entry, and the sign
  vb found = (vb)(((vu)index & 0x08080808) << 4);
  for (int i = 0; i < 8; i++) found |= (vb)((index & 7) == (uint8_t)i) & table[i];
  return found;
#endif
}

// Pairs of bytes, (low, high) each, of the first (half 0) or second eight bytes of each 16.
template <int half, int... I>
LF_INLINE vb interleave(vb low, vb high, Numbers<I...>) {
  constexpr int n = sizeof(vb);
  return __builtin_shufflevector(low, high, (I / 16 * 16 + 8 * half + I % 16 / 2 + I % 2 * n)...);
}
template <int half>
LF_INLINE vu pairs_of(vb low, vb high) {
#if defined(__AVX512BW__)
  return (vu)(half ? _mm512_unpackhi_epi8((__m512i)low, (__m512i)high)
                   : _mm512_unpacklo_epi8((__m512i)low, (__m512i)high));
#elif defined(__AVX2__)
  return (vu)(half ? _mm256_unpackhi_epi8((__m256i)low, (__m256i)high)
                   : _mm256_unpacklo_epi8((__m256i)low, (__m256i)high));
#else
  return (vu)interleave<half>(low, high, CountUp<sizeof(vb)>{});
#endif
}

LF_INLINE vb table_of(const Bf12& weights) {
  vb table;
  for (int i = 0; i < (int)sizeof table; i += 16) std::memcpy((char*)&table + i, weights.table, 16);
  return table;
}

alignas(64) constexpr uint8_t kSlots[128] = {
#define LF_EIGHT(n) n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6, n + 7
    LF_EIGHT(0),  LF_EIGHT(8),  LF_EIGHT(16), LF_EIGHT(24), LF_EIGHT(32), LF_EIGHT(40),  LF_EIGHT(48),  LF_EIGHT(56),
    LF_EIGHT(64), LF_EIGHT(72), LF_EIGHT(80), LF_EIGHT(88), LF_EIGHT(96), LF_EIGHT(104), LF_EIGHT(112), LF_EIGHT(120),
#undef LF_EIGHT
};

// Puts the high byte of an exception into vector v of the high bytes of columns 0-3 (half 0) or 4-7, if it is there.
template <int half>
LF_INLINE void put(uint32_t exception, [[maybe_unused]] int v, vb& high) {
  const uint32_t slot = exception >> 8 & 127;
#if defined(__AVX512BW__)
  high = (vb)_mm512_mask_set1_epi8((__m512i)high, slot >> 6 == half ? 1ull << (slot & 63) : 0, (char)exception);
#else
  const vb slots = load<vb>(kSlots + 64 * half + v * sizeof(vb));
#if defined(__AVX2__)
  const __m256i here = _mm256_cmpeq_epi8((__m256i)slots, _mm256_set1_epi8((char)slot));
  high = (vb)_mm256_blendv_epi8((__m256i)high, _mm256_set1_epi8((char)exception), here);
#else
  const vb here = (vb)(slots == vb{} + (uint8_t)slot);
  high = (high & ~here) | ((vb{} + (uint8_t)exception) & here);
#endif
#endif
}

// f(line, pairs): vector v of each of a unit's lines of bf16. exceptions: the first one of this unit or of a later one.
template <class F>
LF_INLINE void unit_lines(const char* unit, vb table, int v, const uint32_t* exceptions, uint32_t number, F f) {
  const vb codes = load<vb>(unit + v * sizeof(vb));
  vb high[2] = {lookup(table, codes & 15), lookup(table, (vb)((vu)codes >> 4) & 15)};
  for (; __builtin_expect(*exceptions >> 15 == number, 0); exceptions++)
    each<2>([&](auto half) LF_INLINED { put<half()>(*exceptions, v, high[half()]); });
  each<2>([&](auto half) LF_INLINED {
    const vb low = load<vb>(unit + 64 * (1 + half()) + v * sizeof(vb));
    f(Count<2 * half()>{}, pairs_of<0>(low, high[half()]));
    f(Count<2 * half() + 1>{}, pairs_of<1>(low, high[half()]));
  });
}

LF_INLINE const uint32_t* after(const uint32_t* exceptions, uint32_t unit) {
  while (__builtin_expect(*exceptions >> 15 == unit, 0)) exceptions++;
  return exceptions;
}

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

// Decodes `count` units of a tile into lines of bf16. exceptions: the first one of these units or of later ones;
// returns the first one of later units.
const uint32_t* decode(const char* units, vb table, const uint32_t* exceptions, int64_t first, int64_t count,
                       int64_t by, char* lines) {
  for (int64_t u = 0; u < count; u++, units += kUnitBytes, lines += kUnitLines * Bf16Line::bytes) {
    each<kUnitBytes / 64>([&](auto line) LF_INLINED { __builtin_prefetch(units + by + 64 * line()); });
    each<kVectors>([&](auto v) LF_INLINED {
      unit_lines(units, table, v(), exceptions, (uint32_t)(first + u), [&](auto line, vu pairs) LF_INLINED {
        std::memcpy(lines + line() * Bf16Line::bytes + v() * sizeof(vu), &pairs, sizeof(vu));
      });
    });
    exceptions = after(exceptions, (uint32_t)(first + u));
  }
  return exceptions;
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
