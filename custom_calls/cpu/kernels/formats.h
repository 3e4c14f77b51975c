// The formats of weights that are multiplied as they are: how a line of a tile, 16 rows of one column or of two, is
// added to the sums of a product. product.h, bf12.h and amx.cc use the formats.
//
// Invariant: `add` adds a line's columns to each sum in their order, whatever T and N are. T is the number of tiles
// side by side, N the number of positions. Only the order in which different sums are computed depends on them.
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
constexpr int kVectors = kTile / kWidth;  // vectors of one column of a tile

#if defined(__AVX512BF16__) || \
    defined(LF_DOT)  // LF_DOT: the dot instruction as plain arithmetic, to test its order of operands on any machine
constexpr bool kHasDot = true;
#else
constexpr bool kHasDot = false;
#endif

// x & 0xffff0000. kTight: no register is left for the mask, so it is read from memory.
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

// sum += weights * x. kTight: registers are few. Compilers would then choose instructions that overwrite a factor or
// the product, copy sums between registers and run out of them, so this names the instruction.
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
  // Rounds once, as above, at every level of optimisation.
  sum = (vf)_mm256_fmadd_ps((__m256)weights, (__m256)x, (__m256)sum);
  return;
#endif
#endif
  sum += weights * x;
}

// add() multiplies one line of each of T tiles, which are `tile` bytes apart, by its columns' values x[column][N] for N
// positions, and adds the products to the sums. A Format has the number of columns and bytes of a line, and `column`,
// which loads vector v of column c as float32.
template <class Format>
struct Line {
  template <int T, int N>
  LF_INLINE void add(const char* w, int64_t tile, const float* x, vf (&sums)[T][kVectors][N]) {
    constexpr bool kTight = T * kVectors * N >= (N == 1 ? 4 : 8);
    each<Format::columns>([&](auto c) LF_INLINED {
      if constexpr (N <= T && T > 1 &&
                    kRegisters < 32) {  // registers hold a column's values of all positions, but not all tiles' weights
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
              : "+r"(w), "+r"(x)::"memory");  // one by one: columns that are loaded ahead would not fit in registers
        });
      }
      // Makes the next column load the line again: no register is left to keep it in.
      if (kRegisters < 32 && T * kVectors * N > 8) __asm__("" : "+r"(w));
    });
  }
};

struct Bf16Line : Line<Bf16Line> {
  static constexpr int columns = 2, bytes = 4 * kTile, step = 2;  // step: floats of x per position for a line
  template <bool kTight>
  LF_INLINE vf column(const char* w, int v, int c) {
    const vu pair = load<vu>(w + v * sizeof(vu));
    return as_float(c == 0 ? pair << 16 : upper_half<kTight>(pair));
  }
#if defined(__AVX2__) && !defined(__AVX512F__)
  // Adds both columns of eight rows of a line. even, odd: the values of the columns.
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
    } else {  // the sums of three tiles leave four registers: for both columns and their values
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

struct Bf16DotLine {  // the dot instruction multiplies both columns; x has pairs of bf16 numbers
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
