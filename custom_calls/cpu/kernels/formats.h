// The formats of weights: how a line of a tile, 16 rows of one column or of two, enters the sums of a product. Included
// as simd.h is.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace LF_ISA {
namespace {

using laneformer::kTile;

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kRegisters = 32;
#else
constexpr int kRegisters = 16;
#endif
constexpr int kVectors = kTile / kWidth;  // of one column of a tile

#if defined(__AVX512BF16__) || \
    defined(LF_DOT)  // LF_DOT: with plain arithmetic, to test its order of operands on any machine
constexpr bool kHasDot = true;
#else
constexpr bool kHasDot = false;
#endif

// x & 0xffff0000; the mask is read from memory where no register is left for it.
#if defined(__x86_64__) && !defined(__AVX512F__)
alignas(sizeof(vu)) constexpr uint32_t kUpperHalf[] = {~0xffffu, ~0xffffu, ~0xffffu, ~0xffffu,
                                                       ~0xffffu, ~0xffffu, ~0xffffu, ~0xffffu};
#endif
template <bool kTight>
LF_INLINE vu upper_half(vu x) {
#if defined(__x86_64__) && !defined(__AVX512F__)
  if (kTight) {
#if defined(__AVX2__)
    __asm__("vpand %1, %0, %0" : "+x"(x) : "m"(kUpperHalf));
#else
    __asm__("pand %1, %0" : "+x"(x) : "m"(kUpperHalf));
#endif
    return x;
  }
#endif
  return x & 0xffff0000;
}

// sum += weights * x. Where registers are few, the compilers would choose forms that overwrite a factor or the product,
// move the sums about, and so need more of them than there are.
template <bool kTight>
LF_INLINE void multiply_add(vf& sum, vf weights, vf x) {
#if defined(__x86_64__) && !defined(__AVX512F__)
  if (kTight) {
#if defined(__FMA__)
    __asm__("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(weights), "x"(x));
#else
    const vf product = weights * x;
    __asm__("addps %1, %0" : "+x"(sum) : "x"(product));
#endif
    return;
  }
#if defined(__FMA__)
  sum = (vf)_mm256_fmadd_ps((__m256)weights, (__m256)x, (__m256)sum);  // rounds as above at every level of optimisation
  return;
#endif
#endif
  sum += weights * x;
}

// add(): one line of each of T tiles, which are `tile` bytes apart, times its value of each position, to the sums. The
// values of all positions are beside each other: x[column][position].
template <class Format>
struct Line {
  template <int T, int N>
  LF_INLINE void add(const char* w, int64_t tile, const float* x, vf (&sums)[T][kVectors][N]) {
    constexpr bool kTight = T * kVectors * N >= (N == 1 ? 4 : 8);
    each<Format::columns>([&](auto c) LF_INLINED {
      if constexpr (N <= T && T > 1 &&
                    kRegisters < 32) {  // the values of a column fit the registers, not those of the tiles
        vf values[N];
        each<N>([&](auto p) LF_INLINED { values[p()] = splat(x[c() * N + p()]); });
        each<T>([&](auto t) LF_INLINED {
          each<kVectors>([&](auto v) LF_INLINED {
            const vf column = Format::template column<kTight>(w + t() * tile, v(), c());
            each<N>([&](auto p) LF_INLINED { multiply_add<kTight>(sums[t()][v()][p()], column, values[p()]); });
          });
        });
      } else if constexpr (kWidth > 4 || kRegisters == 32) {
        vf column[T][kVectors];
        each<T>([&](auto t) LF_INLINED {
          each<kVectors>(
              [&](auto v) LF_INLINED { column[t()][v()] = Format::template column<kTight>(w + t() * tile, v(), c()); });
        });
        each<N>([&](auto p) LF_INLINED {
          const vf value = splat(x[c() * N + p()]);
          each<T>([&](auto t) LF_INLINED {
            each<kVectors>([&](auto v)
                               LF_INLINED { multiply_add<kTight>(sums[t()][v()][p()], column[t()][v()], value); });
          });
        });
      } else {
        each<kVectors>([&](auto v) LF_INLINED {
          const vf column = Format::template column<kTight>(w, v(), c());
          each<N>([&](auto p) LF_INLINED { multiply_add<kTight>(sums[0][v()][p()], column, splat(x[c() * N + p()])); });
          __asm__ volatile(
              ""
              : "+r"(w), "+r"(x)::"memory");  // one after the other: columns loaded ahead would not fit the registers
        });
      }
      // The next column loads the line again: there is no register to keep it in.
      if (kRegisters < 32 && T * kVectors * N > 8) __asm__("" : "+r"(w));
    });
  }
};

struct Bf16Line : Line<Bf16Line> {
  static constexpr int columns = 2, bytes = 4 * kTile, step = 2;  // step: floats of x per position
  template <bool kTight>
  LF_INLINE vf column(const char* w, int v, int c) {
    const vu pair = load<vu>(w + v * sizeof(vu));
    return as_float(c == 0 ? pair << 16 : upper_half<kTight>(pair));
  }
#if defined(__AVX2__) && !defined(__AVX512F__)
  // Eight rows of a line.
  LF_INLINE void add_vector(const char* w, vf even, vf odd, vf& sum) {
    vu first, second;
    __asm__(
        "vmovdqu %[line], %[first]\n\t"
        "vpand %[mask], %[first], %[second]\n\t"
        "vpslld $16, %[first], %[first]\n\t"
        "vfmadd231ps %[even], %[first], %[sum]\n\t"
        "vfmadd231ps %[odd], %[second], %[sum]"
        : [sum] "+x"(sum), [first] "=&x"(first), [second] "=&x"(second)
        : [line] "m"(*(const char (*)[sizeof(vu)])w), [mask] "m"(kUpperHalf), [even] "x"(even), [odd] "x"(odd));
  }
  template <int T, int N>
  LF_INLINE void add(const char* w, int64_t tile, const float* x, vf (&sums)[T][kVectors][N]) {
    if constexpr (N > 1 || T == 1) {
      Line<Bf16Line>::add(w, tile, x, sums);
    } else {  // three tiles leave four registers, for both columns and their values
      const vf even = splat(x[0]), odd = splat(x[1]);
      each<T>([&](auto t) LF_INLINED {
        each<kVectors>([&](auto v)
                           LF_INLINED { add_vector(w + t() * tile + v() * sizeof(vu), even, odd, sums[t()][v()][0]); });
      });
    }
  }
#endif
};

struct F16Line : Line<F16Line> {
  static constexpr int columns = 1, bytes = 2 * kTile, step = 1;
  template <bool kTight>
  LF_INLINE vf column(const char* w, int v, int) {
    return widen_f16(load<vh>(w + v * sizeof(vh)));
  }
};

struct F32Line : Line<F32Line> {
  static constexpr int columns = 1, bytes = 4 * kTile, step = 1;
  template <bool kTight>
  LF_INLINE vf column(const char* w, int v, int) {
    return load<vf>(w + v * sizeof(vf));
  }
};

struct Bf16DotLine {  // both columns at once
  static constexpr int columns = 2, bytes = 4 * kTile, step = 1;
  template <int T, int N>
  LF_INLINE void add(const char* w, int64_t tile, const float* x, vf (&sums)[T][kVectors][N]) {
    vu pairs[T][kVectors];
    each<T>([&](auto t) LF_INLINED {
      each<kVectors>([&](auto v) LF_INLINED { pairs[t()][v()] = load<vu>(w + t() * tile + v() * sizeof(vu)); });
    });
    each<N>([&](auto p) LF_INLINED {
      uint32_t both;
      std::memcpy(&both, x + p(), 4);
      each<T>([&](auto t) LF_INLINED {
        each<kVectors>([&](auto v) LF_INLINED {
          sums[t()][v()][p()] = dot_bf16(sums[t()][v()][p()], pairs[t()][v()], splat_u(both));
        });
      });
    });
  }
};

}  // namespace
}  // namespace LF_ISA
