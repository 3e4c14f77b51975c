// Packs tiles of bf16 lines into the units of kernels/bf12_decode.h, and reads single rows of them.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "../kernels/kernels.h"

namespace laneformer {

constexpr double kMostExceptions = 1e-3;  // share above which a matrix stays bf16: laneformer/formats.py

using Bf12Counts = std::array<int64_t, 128>;  // weights by e >> 1

// The codes of a matrix, by its counts.
struct Bf12Codes {
  explicit Bf12Codes(const Bf12Counts& counts);
  uint8_t high[16];   // high byte of each code
  uint8_t code[256];  // of each high byte; kNone for exceptions
  int64_t weights = 0, exceptions = 0;
  static constexpr uint8_t kNone = 0xff;
};

// Adds the weights of a tile of bf16 lines, of which the first `rows` rows count.
void count(const uint16_t* tile, int rows, int64_t columns, Bf12Counts& counts);
// Writes bf12_tile_bytes(columns), and the tile's exceptions with their end.
void encode(const uint16_t* tile, int rows, int64_t columns, const Bf12Codes& codes, char* units,
            std::vector<uint32_t>& exceptions);
// Where the exceptions of each tile begin in a list that has those of `tiles` tiles, each with its end. Throws
// std::runtime_error for another number of tiles, and for exceptions that are in none of the columns.
std::vector<uint32_t> starts_of(const uint32_t* exceptions, int64_t count, int64_t tiles, int64_t columns);
// Row r of tile t as bf16.
void read_row(const Bf12& weights, int64_t t, int r, int64_t columns, uint16_t* row);

}  // namespace laneformer
