// float32 numbers as the operands of tile registers, which multiply bf16 numbers: their parts, their places and the
// registers' shapes. Included by amx.cc and tile_latents.h.
#pragma once

#include "simd.h"
#include "tile_registers.h"

namespace LF_ISA {
namespace {

constexpr int kColumns = 2 * kTileRows;  // of 16 bits, in a register
constexpr int kAtOnce = 2;               // registers of each factor

// The P parts of a vector's numbers.
template <int P>
LF_INLINE void split(vf x, vf (&parts)[P]) {
  if constexpr (P == 1) {
    parts[0] = as_float(narrowed_bf16(x) << 16);
  } else {
    each<P>([&](auto p) LF_INLINED {  // the upper 8 bits of what is left, so that 24 are three parts
      parts[p()] = as_float(as_bits(x) & 0xffff0000);
      x -= parts[p()];
    });
  }
}

// Where `prepare` puts vectors for tile registers: rows are not to cross lines of the cache.
template <class T>
T* aligned(T* p) {
  return (T*)(((uintptr_t)p + kTileBytes - 1) / kTileBytes * kTileBytes);
}

// The shapes of registers: 0 to 3 sums, 4 and 5 one factor (positions), 6 and 7 the other (weights).
class Configured {
 public:
  ~Configured() {
    if (first_) tile_release();
  }
  void use(int first, int second) {  // rows of two registers of positions; 0: no second one
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
