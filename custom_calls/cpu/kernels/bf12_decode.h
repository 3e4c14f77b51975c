// Decodes bf16 weights in 12 bits each (laneformer/formats.py defines the format) to lines of bf16. bf12.h and amx.cc
// use it; packing/bf12.cc encodes.
//
// A unit has 16 rows and 8 columns in three lines of 64 bytes: codes, those of columns 0-3 in the low nibbles and those
// of columns 4-7 in the high ones, then the low bytes of columns 0-3 and of 4-7. Row r and column c < 4 are byte
//   16 (r / 4) + 8 (c / 2) + 2 (r % 4) + c % 2
// of a line. So interleaving high and low bytes makes the lines of bf16 tiles.
//
// Exceptions are words unit << 15 | slot << 8 | high byte, in ascending order within a tile and ended by ~0. A slot is
// the place of a weight's byte in the two lines of low bytes.
//
// Invariant: a high byte is table[code] unless an exception names its slot. So decoding restores all encoded bits.
#pragma once

#include "formats.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace LF_ISA {
namespace {

using laneformer::Bf12;
using laneformer::kUnitBytes;

typedef uint8_t vb __attribute__((vector_size(4 * kWidth)));

constexpr int kUnitLines = laneformer::kUnitColumns / Bf16Line::columns;
constexpr int64_t kPiece = 8192;  // bytes of bf16 lines that are decoded together; they fit in the first-level cache

// table[index] for each byte; the vector `table` repeats the table in each 16 bytes.
LF_INLINE vb lookup(vb table, vb index) {
#if defined(__AVX512BW__)
  return (vb)_mm512_shuffle_epi8((__m512i)table, (__m512i)index);
#elif defined(__AVX2__)
  return (vb)_mm256_shuffle_epi8((__m256i)table, (__m256i)index);
#elif defined(__aarch64__)
  return (vb)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)index);
#else  // the sign is bit 3 of the index; one comparison for each of the eight values
  vb found = (vb)(((vu)index & 0x08080808) << 4);
  for (int i = 0; i < 8; i++) found |= (vb)((index & 7) == (uint8_t)i) & table[i];
  return found;
#endif
}

// Joins low and high bytes to pairs (low, high): the first eight bytes of each 16 (half 0), or the second eight.
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

// The table of the weights, repeated in each 16 bytes.
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

// Puts the high byte of an exception into `high` if its slot is there: in vector v of columns 0-3 (half 0) or 4-7.
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

// Calls f(line, pairs) with vector v of each of the unit's bf16 lines. exceptions: the first one of this unit or of a
// later unit. number: of the unit.
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

// The first exception after those of this unit.
LF_INLINE const uint32_t* after(const uint32_t* exceptions, uint32_t unit) {
  while (__builtin_expect(*exceptions >> 15 == unit, 0)) exceptions++;
  return exceptions;
}

// Decodes `count` units of a tile, from number `first` on, into lines of bf16, and prefetches `by` bytes ahead.
// exceptions: the first one of these units or of later ones. Returns the first exception of later units.
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

}  // namespace
}  // namespace LF_ISA
