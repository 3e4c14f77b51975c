// Float32 numbers as operands of tile registers, which multiply bf16 numbers: splitting into parts, aligned memory and
// the registers' shapes. Used by amx.cc and attention/tile_latents.h.
//
// Invariant: three parts of 8 bits each have all 24 bits of a float32, so the sum of the parts is the number, except
// that a subnormal part counts as zero.
#pragma once

#include "simd.h"
#include "tile_registers.h"

namespace LF_ISA {
namespace {

constexpr int kColumns = 2 * kTileRows;  // columns of 16 bits in a register
constexpr int kAtOnce = 2;               // registers of each factor that are multiplied together

// Splits numbers into P parts, the largest first; P = 1: rounds them to bf16.
template <int P>
LF_INLINE void split(vf x, vf (&parts)[P]) {
  if constexpr (P == 1) {
    parts[0] = as_float(narrowed_bf16(x) << 16);
  } else {
    each<P>([&](auto p) LF_INLINED {  // the upper 8 bits of what is left
      parts[p()] = as_float(as_bits(x) & 0xffff0000);
      x -= parts[p()];
    });
  }
}

// The first address from p on where rows of registers do not cross cache lines.
template <class T>
T* aligned(T* p) {
  return (T*)(((uintptr_t)p + kTileBytes - 1) / kTileBytes * kTileBytes);
}

// Sets the shapes of the registers: 0 to 3 are sums, 4 and 5 the first factor (positions), 6 and 7 the second
// (weights). Releases the registers at its end.
class Configured {
 public:
  ~Configured() {
    if (first_) tile_release();
  }
  void use(int first, int second) {  // rows of the two registers of positions; 0: no second register
    if (first == first_ && second == second_) return;
    first_ = first, second_ = second;
    TileShapes shapes;
    const auto shape = [&](int tile, int rows) {
      shapes.rows[tile] = (uint8_t)rows;
      shapes.bytes[tile] = rows ? kTileBytes : 0;
    };
    for (int a = 0; a < kAtOnce; a++) {
      const int rows = a ? second : first;
      for (int t = 0; t < kAtOnce; t++) shape(a * kAtOnce + t, rows);
      shape(4 + a, rows);
      shape(6 + a, kTileRows);
    }
    tile_configure(shapes);
  }

 private:
  int first_ = 0, second_ = 0;
};

}  // namespace
}  // namespace LF_ISA
