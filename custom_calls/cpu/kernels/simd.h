// Vectors of float32 for every instruction set (AVX-512, AVX2, NEON, SSE), written once with the vector types of GCC
// and Clang. All files of the kernels use them; kernels.cc, quantized.cc and amx.cc are compiled per instruction set.
//
// Invariant: LF_ISA is the name of the instruction set and of the namespace, so the linker never mixes inline functions
// that were compiled for different machines.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace LF_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float vf __attribute__((vector_size(4 * kWidth)));
typedef int32_t vi __attribute__((vector_size(4 * kWidth)));
typedef uint32_t vu __attribute__((vector_size(4 * kWidth)));
typedef uint16_t vh __attribute__((vector_size(2 * kWidth)));

#define LF_INLINE static inline __attribute__((always_inline))

// CountUp<N> is Numbers<0, ..., N - 1>.
template <int... I>
struct Numbers {};
template <int N, int... I>
struct CountUp : CountUp<N - 1, N - 1, I...> {};
template <int... I>
struct CountUp<0, I...> : Numbers<I...> {};

template <int N>
struct Count {
  constexpr int operator()() const { return N; }
};

// Calls f(i) for i = 0 .. N - 1, where i() is a constant. An array that only such numbers index stays in registers,
// which GCC 12 does not achieve with loops, unrolled or not. Write f as [&](auto i) LF_INLINED { ... i() ... }.
#define LF_INLINED __attribute__((always_inline))
template <class F, int... I>
LF_INLINE void each_of(F f, Numbers<I...>) {
  (f(Count<I>{}), ...);
}
template <int N, class F>
LF_INLINE void each(F f) {
  each_of(f, CountUp<N>{});
}

template <class V, class T>
LF_INLINE V load(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
LF_INLINE vf loadf(const float* p) { return load<vf>(p); }
LF_INLINE void storef(float* p, vf v) { std::memcpy(p, &v, sizeof v); }
LF_INLINE vf splat(float x) { return x - vf{}; }
LF_INLINE vu splat_u(uint32_t x) { return x + vu{}; }
LF_INLINE vf as_float(vu v) { return (vf)v; }
LF_INLINE vu as_bits(vf v) { return (vu)v; }
LF_INLINE vf select(vi mask, vf yes, vf no) { return (vf)(((vi)yes & mask) | ((vi)no & ~mask)); }
LF_INLINE vf max(vf a, vf b) { return select(a > b, a, b); }

// Loads the first n < kWidth elements, with zeros after them. Reads nothing beyond p[n - 1].
template <class V, class T>
LF_INLINE V load_first(const T* p, int n) {
  V v = {};
  std::memcpy(&v, p, n * sizeof(T));
  return v;
}

LF_INLINE float sum(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float total = 0;
  for (int i = 0; i < kWidth; i++) total += v[i];
  return total;
#endif
}

// Adds the two halves of each block of S partial sums: first the blocks of u, then those of v.
template <int S, int... I>
LF_INLINE vf halve(vf u, vf v, Numbers<I...>) {
  return __builtin_shufflevector(u, v, (I / (S / 2) * S + I % (S / 2))...) +
         __builtin_shufflevector(u, v, (I / (S / 2) * S + S / 2 + I % (S / 2))...);
}

// With S = kWidth, element i of the result is the sum of the elements of v[i].
template <int S>
LF_INLINE vf sums(vf (&v)[S]) {
  if constexpr (S == 1) {
    return v[0];
  } else {
    vf half[S / 2];
    for (int i = 0; i < S / 2; i++) half[i] = halve<S>(v[2 * i], v[2 * i + 1], CountUp<kWidth>{});
    return sums(half);
  }
}

LF_INLINE float largest(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#endif
  float m = v[0];
  for (int i = 1; i < kWidth; i++) m = v[i] > m ? v[i] : m;
  return m;
}

LF_INLINE bool any(vi mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
  for (int i = 0; i < kWidth; i++)
    if (mask[i]) return true;
  return false;
#endif
}

// 16-bit floats. bf16 is the upper half of a float32.
LF_INLINE vf widen_bf16(vh h) {
#if defined(__AVX512F__)
  return as_float((vu)_mm512_cvtepu16_epi32((__m256i)h) << 16);  // GCC 12 converts two halves and joins them
#else
  return as_float(__builtin_convertvector(h, vu) << 16);
#endif
}

LF_INLINE vf widen_f16(vh h) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps((__m256i)h);
#elif defined(__F16C__)
  return (vf)_mm256_cvtph_ps((__m128i)h);
#else
  const vu bits = __builtin_convertvector(h, vu), magnitude = (bits & 0x7fff) << 13, exponent = magnitude & 0x0f800000;
  const vu normal = magnitude + (112u << 23), infinite = normal + (112u << 23);  // rebias 15 -> 127; 31 -> 255
  const vu small =
      as_bits(as_float(magnitude + (113u << 23)) - splat(6.103515625e-05f));  // subnormal: (1 + f) 2^-14 - 2^-14
  vu value = (vu)select((vi)(exponent == 0), as_float(small), as_float(normal));
  value = (vu)select((vi)(exponent == 0x0f800000), as_float(infinite), as_float(value));
  return as_float(value | (bits & 0x8000) << 16);
#endif
}

LF_INLINE uint16_t narrow_bf16(float x) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// Rounds to bf16, as `narrow_bf16` does; the bits are in the lower halves.
LF_INLINE vu narrowed_bf16(vf x) {
  const vu bits = as_bits(x), nearest = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (vu)select((vi)((bits & 0x7fffffff) > 0x7f800000), as_float(bits >> 16 | 0x40), as_float(nearest));
}

// Joins the lower halves of 2 kWidth consecutive columns, low then high, into words of two columns each, the even
// column in the lower half.
template <int... I>
LF_INLINE vf pairs(vu low, vu high, Numbers<I...>) {
  return as_float(__builtin_shufflevector(low, high, (2 * I)...) | __builtin_shufflevector(low, high, (2 * I + 1)...)
                                                                       << 16);
}

// Columns `first` to first + kWidth - 1 of x [columns], with zeros beyond its end.
LF_INLINE vf columns_of(const float* x, int64_t first, int64_t columns) {
  if (first + kWidth <= columns) return loadf(x + first);
  return first < columns ? load_first<vf>(x + first, (int)(columns - first)) : vf{};
}

LF_INLINE uint16_t narrow_f16(float x) {
#if defined(__F16C__)
  return (uint16_t)_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(x), 0));
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (magnitude < 0x38800000) {  // subnormal: let the float adder round at 2^-24
    float f;
    std::memcpy(&f, &magnitude, 4);
    f += 0.5f;
    uint32_t rounded;
    std::memcpy(&rounded, &f, 4);
    return (uint16_t)(sign | (rounded - 0x3f000000));
  }
  return (uint16_t)(sign | ((magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13));
#endif
}

// acc[i] + w[2i] x[2i] + w[2i + 1] x[2i + 1], for words of two bf16 numbers; products and sums in float32.
LF_INLINE vf dot_bf16(vf acc, vu w, vu x) {
#if defined(__AVX512BF16__)
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512i)w, (__m512bh)(__m512i)x);
#else
  acc += as_float(w & 0xffff0000) * as_float(x & 0xffff0000);
  return acc + as_float(w << 16) * as_float(x << 16);
#endif
}

// exp(x) within 2 units in the last place for -87.3 <= x <= 88; 0 below.
LF_INLINE vf exp(vf x) {
  const vi lost = x < splat(-87.3f);
  x = max(x, splat(-87.3f));
  const vf shifted =
      x * splat(1.44269504088896341f) + splat(12582912.0f);  // 1.5 2^23: the sum's low bits are round(x / ln 2)
  const vf n = shifted - splat(12582912.0f);
  vf r = x - n * splat(0.693359375f);
  r = r + n * splat(2.12194440e-4f);
  vf p = splat(1.9875691500e-4f);
  p = p * r + splat(1.3981999507e-3f);
  p = p * r + splat(8.3334519073e-3f);
  p = p * r + splat(4.1665795894e-2f);
  p = p * r + splat(1.6666665459e-1f);
  p = p * r + splat(5.0000001201e-1f);
  p = p * (r * r) + r + splat(1.0f);
  const vf power = as_float((as_bits(shifted) + 127u) << 23);
  return select(lost, vf{}, p * power);
}

// log(x) within 2 units in the last place for normal x > 0 (coefficients as in Cephes, S. Moshier).
LF_INLINE vf log(vf x) {
  const vu bits = as_bits(x) - as_bits(splat(0.707106781186547524f));
  const vf e = __builtin_convertvector((vi)bits >> 23, vf);
  const vf m = as_float((bits & 0x007fffff) + as_bits(splat(0.707106781186547524f))) - splat(1.0f);
  const vf z = m * m;
  vf p = splat(7.0376836292e-2f);
  p = p * m + splat(-1.1514610310e-1f);
  p = p * m + splat(1.1676998740e-1f);
  p = p * m + splat(-1.2420140846e-1f);
  p = p * m + splat(1.4249322787e-1f);
  p = p * m + splat(-1.6668057665e-1f);
  p = p * m + splat(2.0000714765e-1f);
  p = p * m + splat(-2.4999993993e-1f);
  p = p * m + splat(3.3333331174e-1f);
  p = p * m * z + e * splat(-2.12194440e-4f) - splat(0.5f) * z;
  return m + p + e * splat(0.693359375f);
}

struct Vectors {  // the functions that activation.h needs
  LF_INLINE vf exp(vf x) { return LF_ISA::exp(x); }
  LF_INLINE vf at_least(vf x, float low) { return select(x < splat(low), splat(low), x); }
};

}  // namespace LF_ISA
