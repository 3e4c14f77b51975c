// bf16 weights in 12 bits: packs tiles of bf16 lines into the units of kernels/bf12_decode.h, and reads single rows of
// such tiles. Used by forms.cc and pack.cc; laneformer/formats.py has the same format in NumPy.
//
// Invariant: decoding gives the bits of the bf16 weights. A weight whose high byte has no code is in the list of
// exceptions, which overwrites the byte.
//
// In e >> 1, e is the 8 bits of the exponent: a high byte is the sign and e >> 1. Eight values of e >> 1 have codes;
// bit 3 of a code is the sign.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "../kernels/kernels.h"

namespace laneformer {

constexpr double kMostExceptions = 1e-3;  // a matrix with a larger share stays bf16, as laneformer/formats.py says

using Bf12Counts = std::array<int64_t, 128>;  // how many weights have each value of e >> 1

// The codes of a matrix: those of its eight most frequent values of e >> 1.
struct Bf12Codes {
  explicit Bf12Codes(const Bf12Counts& counts);
  uint8_t high[16];   // by code: its high byte
  uint8_t code[256];  // by high byte: its code, or kNone for exceptions
  int64_t weights = 0, exceptions = 0;
  static constexpr uint8_t kNone = 0xff;
};

// Adds the weights of a tile of bf16 lines to the counts. rows: rows of the tile that are not padding.
void count(const uint16_t* tile, int rows, int64_t columns, Bf12Counts& counts);
// Writes the tile's units, bf12_tile_bytes(columns) bytes, and appends its exceptions and their end to the list.
void encode(const uint16_t* tile, int rows, int64_t columns, const Bf12Codes& codes, char* units,
            std::vector<uint32_t>& exceptions);
// For a list [count] with the exceptions of `tiles` tiles, an end after each: where the exceptions of each tile begin.
// Throws std::runtime_error for another number of tiles, or for an exception outside the columns.
std::vector<uint32_t> starts_of(const uint32_t* exceptions, int64_t count, int64_t tiles, int64_t columns);
// Writes row r of tile t to row [columns] as bf16.
void read_row(const Bf12& weights, int64_t t, int r, int64_t columns, uint16_t* row);

}  // namespace laneformer
