// Checks the products of a table of kernels against sums in double, each position alone against all positions together,
// and weights in 12 bits against bf16.
#pragma once

#include <limits>
#include <vector>

#include "check.h"
#include "kernels/kernels.h"
#include "packing/bf12.h"

using namespace laneformer;

namespace {

constexpr Dtype kDtypes[] = {Dtype::f32, Dtype::bf16, Dtype::f16};
constexpr float kInfinity = std::numeric_limits<float>::infinity();

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

// The value of a 16-bit pattern by the definition of the format; NaN for every NaN.
double value_of(Dtype dtype, uint16_t h) {
  const int mantissa_bits = dtype == Dtype::bf16 ? 7 : 10, exponent_bits = 15 - mantissa_bits,
            bias = (1 << (exponent_bits - 1)) - 1;
  const int mantissa = h & ((1 << mantissa_bits) - 1), exponent = h >> mantissa_bits & ((1 << exponent_bits) - 1);
  const double sign = h >> 15 ? -1 : 1;
  if (exponent == (1 << exponent_bits) - 1) return mantissa ? NAN : sign * kInfinity;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

// Numbers as the kernels store them in a dtype, and the values of the stored numbers.
struct Stored {
  std::vector<char> data;
  std::vector<double> values;

  Stored(const Kernels& k, Dtype dtype, const std::vector<float>& from)
      : data(from.size() * bytes_of(dtype)), values(from.size()) {
    k.narrow(dtype, from.data(), (int64_t)from.size(), data.data());
    for (size_t i = 0; i < from.size(); i++) {
      uint16_t half;
      if (dtype == Dtype::f32) {
        values[i] = from[i];
      } else {
        std::memcpy(&half, data.data() + 2 * i, 2);
        values[i] = value_of(dtype, half);
      }
    }
  }
};

// Tiles of bf16 bits. random: any bits, including NaN, infinities and subnormals. few: exponents with eight values of
// e >> 1, and `exceptions` others in the last unit.
enum class Bits { random, few };

std::vector<uint16_t> bf16_tiles(Bits kind, int64_t columns, int tiles, int exceptions) {
  Random random(columns + 1000 * tiles + exceptions);
  const int64_t stored = stored_columns(Dtype::bf16, columns);
  std::vector<uint16_t> all(tiles * stored * kTile);
  const auto any = [&] { return (uint16_t)(random.bits() >> 16); };
  for (int64_t i = 0; i < (int64_t)all.size(); i++) {
    const bool padding = i % (stored * kTile) / (2 * kTile) * 2 + i % 2 >= columns;
    all[i] = padding ? 0 : kind == Bits::random ? any() : (uint16_t)((any() & 0x87ff) | 0x3800);
  }
  const int64_t in_tile = columns * kTile, last = (columns - 1) / kUnitColumns * kUnitColumns;
  for (int e = 0; e < exceptions && e < in_tile; e++) {  // from the last column on, in the last tile
    const int64_t k = columns - 1 - e / kTile, r = e % kTile;
    if (k >= last) all[((tiles - 1) * stored + k / 2 * 2) * kTile + 2 * r + k % 2] = (uint16_t)(0x0100 * e + 0x7f81);
  }
  return all;
}

bool same(float a, float b) { return bits_of(a) == bits_of(b) || (std::isnan(a) && std::isnan(b)); }

// The product of weights in 12 bits has the bits of the product in bf16, and read_row returns each row.
void bf12(const Kernels& k, Activations activations, Bits kind, int64_t columns, int tiles, int positions,
          int exceptions) {
  const std::vector<uint16_t> bits = bf16_tiles(kind, columns, tiles, exceptions);
  const int64_t stored = stored_columns(Dtype::bf16, columns), rows = tiles * kTile, ldy = rows + 5;
  Bf12Counts counts{};
  for (int t = 0; t < tiles; t++) count(bits.data() + t * stored * kTile, kTile, columns, counts);
  const Bf12Codes codes(counts);
  std::vector<char> units(tiles * bf12_tile_bytes(columns));
  std::vector<uint32_t> list, starts;
  for (int t = 0; t < tiles; t++) {
    starts.push_back((uint32_t)list.size());
    encode(bits.data() + t * stored * kTile, kTile, columns, codes, units.data() + t * bf12_tile_bytes(columns), list);
  }
  CHECK((int64_t)list.size() == codes.exceptions + tiles && codes.weights == rows * columns,
        "%zu words of exceptions, not %ld", list.size(), (long)codes.exceptions + tiles);
  const Bf12 weights{units.data(), codes.high, list.data(), starts.data()};
  std::vector<uint16_t> row(columns);
  for (int64_t r = 0; r < rows; r++) {
    read_row(weights, r / kTile, (int)(r % kTile), columns, row.data());
    for (int64_t c = 0; c < columns; c++)
      CHECK(row[c] == bits[(r / kTile * stored + c / 2 * 2) * kTile + 2 * (r % kTile) + c % 2],
            "row %ld, column %ld of %ld became %04x", (long)r, (long)c, (long)columns, row[c]);
  }
  const std::vector<float> x = Random(columns).floats(columns * positions);
  std::vector<float> prepared(prepared_floats(columns, positions), NAN), expected(ldy * positions, 7), y = expected;
  k.prepare(Dtype::bf16, activations, x.data(), columns, columns, positions, prepared.data());
  k.product(Dtype::bf16, activations, bits.data(), prepared.data(), columns, tiles, positions, expected.data(), ldy);
  k.product_bf12(activations, weights, prepared.data(), columns, tiles, positions, y.data(), ldy);
  for (size_t i = 0; i < y.size(); i++)
    CHECK(same(y[i], expected[i]), "%s bf12: %ld columns, %d tiles, %d positions, row %zu of position %zu: %a, not %a",
          k.name, (long)columns, tiles, positions, i % ldy, i / ldy, y[i], expected[i]);
}

// Checks y = W x for every position, with the weights in tiles.
void product(const Kernels& k, Dtype dtype, Activations activations, int64_t columns, int tiles, int positions) {
  Random random(1000 * columns + 50 * tiles + positions);
  const int64_t rows = tiles * kTile, stored = stored_columns(dtype, columns), ldx = columns + 3, ldy = rows + 5;
  const int width = bytes_of(dtype);
  const std::vector<float> x = random.floats(ldx * positions);
  const Stored w(k, dtype, random.floats(rows * columns));
  std::vector<char> packed(tiles * tile_bytes(dtype, columns));
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) {
      const int64_t row = r % kTile,
                    place = dtype == Dtype::bf16 ? c / 2 * 2 * kTile + 2 * row + c % 2 : c * kTile + row;
      std::memcpy(packed.data() + (r / kTile * stored * kTile + place) * width,
                  w.data.data() + (r * columns + c) * width, width);
    }
  const Dtype read_as = activations == Activations::rounded ? dtype : Dtype::f32;
  const Stored seen(k, read_as, x);
  std::vector<float> prepared(prepared_floats(columns, positions), NAN), y(ldy * positions, 7);
  k.prepare(dtype, activations, x.data(), ldx, columns, positions, prepared.data());
  k.product(dtype, activations, packed.data(), prepared.data(), columns, tiles, positions, y.data(), ldy);
  for (int p = 0; p < positions; p++)
    for (int64_t r = 0; r < ldy; r++) {
      const float got = y[p * ldy + r];
      if (r >= rows) {
        CHECK(got == 7, "%s: product wrote beyond the last row", k.name);
        continue;
      }
      double exact = 0, size = 0;
      for (int64_t c = 0; c < columns; c++) {
        const double term = w.values[r * columns + c] * seen.values[p * ldx + c];
        exact += term;
        size += std::fabs(term);
      }
      CHECK(std::fabs(got - exact) <= (double)(columns + 1) * 0x1p-24 * size,  // numbers in parts are rounded once more
            "%s dtype %d %s: %ld columns, row %ld, position %d of %d: %g, not %g", k.name, (int)dtype,
            read_as == Dtype::f32 ? "exact" : "rounded", (long)columns, (long)r, p, positions, got, exact);
    }
  for (int p = 0; p < positions; p++) {  // each position and each tile alone must have the same bits
    k.prepare(dtype, activations, x.data() + p * ldx, ldx, columns, 1, prepared.data());
    for (int t = 0; t < tiles; t++) {
      float alone[kTile];
      k.product(dtype, activations, packed.data() + t * tile_bytes(dtype, columns), prepared.data(), columns, 1, 1,
                alone, kTile);
      CHECK(std::memcmp(alone, &y[p * ldy + t * kTile], sizeof alone) == 0,
            "%s dtype %d: %ld columns, tile %d of %d, position %d of %d depends on the others", k.name, (int)dtype,
            (long)columns, t, tiles, p, positions);
    }
  }
}

void products(const Kernels& k) {
  for (const Dtype dtype : kDtypes)
    for (const Activations activations : {Activations::exact, Activations::rounded})
      for (const int64_t columns : {1, 2, 3, 7, 16, 31, 64, 97, 130})
        for (int positions = 1; positions <= 16; positions++)
          product(k, dtype, activations, columns, 1 + positions % 3, positions);
  for (const Dtype dtype : kDtypes) {
    for (const int positions : {17, 24, 25, 33, 49, 97})  // several parts, some of them padded
      product(k, dtype, Activations::rounded, 30, 2, positions);
    for (const int tiles : {7, 8, 15, 25})  // tiles side by side, and left-over tiles
      for (const int positions : {1, 2}) product(k, dtype, Activations::rounded, 40, tiles, positions);
    for (const int positions : {1, 3, 26}) product(k, dtype, Activations::rounded, 1100, 3, positions);  // in chunks
  }
}

void packed(const Kernels& k) {
  for (const int64_t columns : {1, 8, 9, 37, 299})
    for (const int tiles : {1, 7})
      for (const int positions : {1, 7, 25})
        for (const Bits kind : {Bits::few, Bits::random})
          bf12(k, Activations::exact, kind, columns, tiles, positions, 0);
  for (const int exceptions : {1, 2, 33, 128})  // in the last unit, beside padding
    for (const int64_t columns : {64, 67}) {
      bf12(k, Activations::exact, Bits::few, columns, 5, 1, exceptions);
      bf12(k, Activations::rounded, Bits::few, columns, 5, 1, exceptions);
      bf12(k, Activations::rounded, Bits::few, columns, 5, 9, exceptions);
    }
  bf12(k, Activations::exact, Bits::random, 3070, 1, 3, 0);
}

}  // namespace
