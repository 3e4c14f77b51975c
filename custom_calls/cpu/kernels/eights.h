// fp8 weights (E4M3): widened through float16, whose exponent field has the same form with another bias, and multiplied
// in float32. Included by quantized.cc alone.
//
// Invariant: `fused` rounds once on every instruction set, and the sum of a block is a fixed tree. So all sets find the
// same bits.
#pragma once

#include "digits.h"

namespace LF_ISA {
namespace {

// sum + a b, rounded once.
LF_INLINE vf fused(vf a, vf b, vf sum) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum);
#elif defined(__FMA__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sum);
#elif defined(__aarch64__)
  return (vf)vfmaq_f32((float32x4_t)sum, (float32x4_t)a, (float32x4_t)b);
#else
  // In float64 the product is exact. The sum is rounded to odd, so that rounding it again to float32 gives the same
  // result as rounding once.
  typedef double vd __attribute__((vector_size(8 * kWidth)));
  typedef int64_t vl __attribute__((vector_size(8 * kWidth)));
  const vd product = __builtin_convertvector(a, vd) * __builtin_convertvector(b, vd);
  const vd other = __builtin_convertvector(sum, vd), total = product + other, back = total - product;
  const vd lost = (product - (total - back)) + (other - back);
  const vl even = ((vl)total & 1) == 0, inexact = (lost > 0) | (lost < 0);
  const vl outward = ((vl)total ^ (vl)lost) >= 0;  // total and lost have the same sign
  const vl step = (outward & 1) | (~outward & -1);
  return __builtin_convertvector((vd)((vl)total + (step & even & inexact)), vf);
#endif
}

// The values of E4M3 numbers, a byte in each dword, times 2^-8.
LF_INLINE vf widen_e4m3(vu byte) {
  const vu bits = (byte & 0x80) << 8 | (byte & 0x7f) << 7;
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)bits));
#elif defined(__F16C__)
  return widen_f16(__builtin_convertvector(bits, vh));
#else
  return widen_f16(__builtin_convertvector(bits, vh));
#endif
}

// The format of e4m3 for quantized.cc, with the same members as Digits. The sum of a block is four chains, each over
// every fourth column, added as (0 + 1) + (2 + 3).
struct Eights {
  static constexpr Code code = Code::e4m3;
  static constexpr int columns = 32;
  static constexpr bool zeros = false;
  static constexpr int bytes = columns * kTile, step = columns * 4;
  static constexpr float factor = 256;
  static constexpr int together = 1;
  struct Weights {
    vf of[columns];
  };

  LF_INLINE void prepare(const float* x, int64_t count, char* to) {
    const int here = count < columns ? (int)count : columns;
    std::memcpy(to, x, here * sizeof(float));
    std::memset(to + here * sizeof(float), 0, (columns - here) * sizeof(float));
  }

  // Vector v of each of a line's four columns.
  LF_INLINE void columns_of(const char* line, int v, vf (&to)[4]) {
#if defined(__AVX512F__)
    const __m512i words = _mm512_loadu_si512(line), sign = _mm512_set1_epi16((short)0xbf80);
    const __m512i even = _mm512_and_si512(_mm512_srai_epi16(_mm512_slli_epi16(words, 8), 1), sign);
    const __m512i odd = _mm512_and_si512(_mm512_srai_epi16(words, 1), sign);
    to[0] = (vf)_mm512_cvtph_ps(_mm512_castsi512_si256(even));
    to[1] = (vf)_mm512_cvtph_ps(_mm512_castsi512_si256(odd));
    to[2] = (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(even, 1));
    to[3] = (vf)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(odd, 1));
    (void)v;
#else
    for (int half = 0; half < 2; half++) {
      const vh words = load<vh>(line + 32 * half + v * sizeof(vh));
      const vh even = (words << 8 & 0x8000) | (words << 7 & 0x3f80), odd = (words & 0x8000) | (words >> 1 & 0x3f80);
      to[2 * half] = widen_f16(even);
      to[2 * half + 1] = widen_f16(odd);
    }
#endif
  }

  template <int T, class Block, class V>
  LF_INLINE void add(const Block& block, int t0, V v, const char* x, float* y) {
    vf chains[T][4] = {};
    each<columns / 4>([&](auto line) LF_INLINED {
      each<T>([&](auto t) LF_INLINED {
        vf w[4];
        columns_of(block.line(line(), t0 + t(), v), v(), w);
        each<4>([&](auto c) LF_INLINED {
          chains[t()][c()] = fused(w[c()], splat(((const float*)x)[4 * line() + c()]), chains[t()][c()]);
        });
      });
    });
    each<T>([&](auto t) LF_INLINED {
      const vf total = (chains[t()][0] + chains[t()][1]) + (chains[t()][2] + chains[t()][3]);
      float* const to = y + t() * kTile + v() * kWidth;
      storef(to, loadf(to) + total * block.scale(t0 + t(), v()));
    });
  }

  template <class Block, class V>
  LF_INLINE void decode(const Block& block, int t, V v, Weights& to) {
    each<columns / 4>([&](auto line) LF_INLINED {
      vf w[4];
      columns_of(block.line(line(), t, v), v(), w);
      each<4>([&](auto c) LF_INLINED { to.of[4 * line() + c()] = w[c()]; });
    });
  }
  template <int T, class F>
  LF_INLINE void times(const Weights (&weights)[T], const char* x, const vf (&)[T], const F& f) {
    static_assert(T == 1, "a block fills the registers");
    vf chains[4] = {};
    each<columns>([&](auto c) LF_INLINED {
      chains[c() % 4] = fused(weights[0].of[c()], splat(((const float*)x)[c()]), chains[c() % 4]);
    });
    f(Count<0>{}, (chains[0] + chains[1]) + (chains[2] + chains[3]));
  }
};

}  // namespace
}  // namespace LF_ISA
