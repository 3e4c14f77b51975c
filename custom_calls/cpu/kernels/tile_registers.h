// The eight tile registers of AMX, each of up to 16 rows of 64 bytes, and the instructions on them. amx.cc and
// attention/tile_latents.h use them.
//
// With LF_EMULATE_TILES the instructions are plain code, for tests on machines without them. Invariant: the emulation
// has the documented results, bit for bit (Intel's Software Developer's Manual, volume 1, chapter 18; volume 2,
// TDPBF16PS), and traps where the processor would refuse.
//
// The instructions are assembly, because the compilers' intrinsics take register numbers only as literals.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(LF_EMULATE_TILES) && defined(__FMA__)
#include <immintrin.h>
#endif

namespace LF_ISA {
namespace {

constexpr int kTileRows = 16, kTileBytes = 64;  // rows of a register, bytes of a row

struct alignas(64) TileShapes {  // the registers' shapes as LDTILECFG reads them
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // by register: bytes of a row
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileShapes) == 64, "a line");

#if defined(LF_EMULATE_TILES)

// x with a subnormal number replaced by zero.
inline float flushed(float x) { return x > -0x1p-126f && x < 0x1p-126f ? __builtin_copysignf(0.0f, x) : x; }
inline float number(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return flushed(x);
}

constexpr int kNumbers = kTileBytes / 4;  // of float32 in a row

// sums[n] += x w[n], rounded once, for kNumbers numbers.
inline void add_products(float x, const float* w, float* sums) {
#if defined(__FMA__)
  for (int n = 0; n < kNumbers; n += 8) {
    typedef int32_t Bits __attribute__((vector_size(32)));
    const Bits sum = (Bits)_mm256_fmadd_ps(_mm256_set1_ps(x), _mm256_loadu_ps(w + n), _mm256_loadu_ps(sums + n));
    const Bits normal = (sum & 0x7f800000) != 0;
    _mm256_storeu_ps(sums + n, (__m256)(sum & (normal | INT32_MIN)));  // a subnormal number keeps its sign alone
  }
#else
  for (int n = 0; n < kNumbers; n++) sums[n] = flushed(__builtin_fmaf(x, w[n], sums[n]));
#endif
}

// The registers of a thread.
class TileFile {
 public:
  void configure(const TileShapes& shapes) {
    shapes_ = shapes;
    require(shapes.palette == 1 && shapes.start_row == 0);
    for (int tile = 0; tile < 8; tile++) {
      require(shapes.rows[tile] <= kTileRows && shapes.bytes[tile] <= kTileBytes && shapes.bytes[tile] % 4 == 0);
      require((shapes.rows[tile] > 0) == (shapes.bytes[tile] > 0));
      clear(tile);
    }
  }
  void release() { shapes_ = {}, shapes_.palette = 0; }

  void zero(int tile) {
    require(shapes_.rows[tile] > 0);
    clear(tile);
  }
  void load(int tile, const void* from, int64_t stride) {
    zero(tile);
    for (int row = 0; row < shapes_.rows[tile]; row++)
      std::memcpy(words_[tile][row], (const char*)from + row * stride, shapes_.bytes[tile]);
  }
  void store(int tile, void* to, int64_t stride) const {
    require(shapes_.rows[tile] > 0);
    for (int row = 0; row < shapes_.rows[tile]; row++)
      std::memcpy((char*)to + row * stride, words_[tile][row], shapes_.bytes[tile]);
  }

  // sums[m][n] += the sum over k of a[m][k] b[k][n], for pairs of bf16. The products of even columns and those of odd
  // columns are a chain of multiply-adds each, from zero; then the sum of both chains is added to sums[m][n].
  void multiply(int sums, int a, int b) {
    require(sums != a && sums != b && a != b && shapes_.rows[sums] > 0 && shapes_.rows[sums] == shapes_.rows[a] &&
            shapes_.bytes[sums] == shapes_.bytes[b] && shapes_.bytes[a] / 4 == shapes_.rows[b]);
    float even_columns[kTileRows][kNumbers], odd_columns[kTileRows][kNumbers];  // of b
    for (int k = 0; k < shapes_.rows[b]; k++)
      for (int n = 0; n < kNumbers; n++) {
        even_columns[k][n] = number(words_[b][k][n] << 16);
        odd_columns[k][n] = number(words_[b][k][n] & 0xffff0000);
      }
    for (int m = 0; m < shapes_.rows[sums]; m++) {
      float even[kNumbers] = {}, odd[kNumbers] = {};
      for (int k = 0; k < shapes_.rows[b]; k++) {
        const uint32_t x = words_[a][m][k];
        add_products(number(x << 16), even_columns[k], even);
        add_products(number(x & 0xffff0000), odd_columns[k], odd);
      }
      for (int n = 0; n < shapes_.bytes[sums] / 4; n++) {
        const float sum = flushed(number(words_[sums][m][n]) + flushed(even[n] + odd[n]));
        std::memcpy(&words_[sums][m][n], &sum, 4);
      }
    }
  }

 private:
  void require(bool holds) const {  // traps unless the processor would accept the instruction
    if (shapes_.palette != 1 || !holds) __builtin_trap();
  }
  void clear(int tile) { std::memset(words_[tile], 0, sizeof words_[tile]); }

  TileShapes shapes_;
  uint32_t words_[8][kTileRows][kNumbers];
};
thread_local TileFile tile_file;

inline void tile_configure(const TileShapes& shapes) { tile_file.configure(shapes); }
inline void tile_release() { tile_file.release(); }
template <int tile>
inline void tile_zero() {
  tile_file.zero(tile);
}
template <int tile>
inline void tile_load(const void* from, int64_t stride) {
  tile_file.load(tile, from, stride);
}
template <int tile>
inline void tile_store(void* to, int64_t stride) {
  tile_file.store(tile, to, stride);
}
template <int sums, int a, int b>
inline void tile_multiply() {
  tile_file.multiply(sums, a, b);
}

#else

inline void tile_configure(const TileShapes& shapes) { __asm__ volatile("ldtilecfg %0" : : "m"(shapes) : "memory"); }
inline void tile_release() { __asm__ volatile("tilerelease" : : : "memory"); }

template <int tile>
inline void tile_zero() {
  __asm__ volatile("tilezero %%tmm%c0" : : "i"(tile));
}

template <int tile>
inline void tile_load(const void* from, int64_t stride) {
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(tile) : "memory");
}

template <int tile>
inline void tile_store(void* to, int64_t stride) {
  __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(tile) : "memory");
}

template <int sums, int a, int b>
inline void tile_multiply() {
  __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(sums), "i"(a), "i"(b));
}

#endif

}  // namespace
}  // namespace LF_ISA
