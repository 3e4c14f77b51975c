// Encoding and reading of tiles in 12 bits; bf12.h says what for. Bytes of a line are in the order that makes decoding
// two interleaving instructions (kernels/bf12_decode.h).
#include "bf12.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>

namespace laneformer {

namespace {

// The place of row r and column c < 4 in a line of bytes.
inline int slot(int r, int c) { return 16 * (r / 4) + 8 * (c / 2) + 2 * (r % 4) + c % 2; }

// The column and the row of an exception in its tile.
inline int64_t column_of(uint32_t exception) {
  const int at = (int)(exception >> 8 & 127);
  return (exception >> 15) * (int64_t)kUnitColumns + at / 64 * 4 + at / 8 % 2 * 2 + at % 2;
}
inline int row_of(uint32_t exception) {
  const int line = (int)(exception >> 8 & 63);
  return line / 16 * 4 + line % 8 / 2;
}

// The index of row r and column k in a tile of bf16 lines.
inline int64_t place(int r, int64_t k) { return k / 2 * 2 * kTile + 2 * r + k % 2; }

}  // namespace

Bf12Codes::Bf12Codes(const Bf12Counts& counts) {
  std::array<int, 128> order;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return counts[a] > counts[b]; });
  std::fill(std::begin(code), std::end(code), kNone);
  for (int i = 0; i < 16; i++) {
    high[i] = (uint8_t)(order[i % 8] | i / 8 << 7);
    code[high[i]] = (uint8_t)i;
  }
  weights = exceptions = std::accumulate(counts.begin(), counts.end(), (int64_t)0);
  for (int i = 0; i < 8; i++) exceptions -= counts[order[i]];
}

void count(const uint16_t* tile, int rows, int64_t columns, Bf12Counts& counts) {
  for (int64_t k = 0; k < columns; k++)
    for (int r = 0; r < rows; r++) counts[tile[place(r, k)] >> 8 & 127]++;
}

void encode(const uint16_t* tile, int rows, int64_t columns, const Bf12Codes& codes, char* units,
            std::vector<uint32_t>& exceptions) {
  for (int64_t first = 0, number = 0; first < columns; first += kUnitColumns, units += kUnitBytes, number++) {
    uint8_t unit[kUnitBytes] = {};
    const size_t before = exceptions.size();
    const int here = (int)std::min<int64_t>(kUnitColumns, columns - first);
    for (int c = 0; c < here; c++)
      for (int r = 0; r < rows; r++) {
        const uint16_t bits = tile[place(r, first + c)];
        const int at = slot(r, c % 4), half = c / 4;
        uint8_t code = codes.code[bits >> 8];
        if (code == Bf12Codes::kNone) {
          exceptions.push_back((uint32_t)number << 15 | (uint32_t)(at + 64 * half) << 8 | bits >> 8);
          code = 0;
        }
        unit[at] |= (uint8_t)(code << 4 * half);
        unit[64 * (1 + half) + at] = (uint8_t)bits;
      }
    std::sort(exceptions.begin() + (int64_t)before, exceptions.end());
    std::memcpy(units, unit, sizeof unit);
  }
  exceptions.push_back(~0u);
}

std::vector<uint32_t> starts_of(const uint32_t* exceptions, int64_t count, int64_t tiles, int64_t columns) {
  std::vector<uint32_t> starts;
  bool ended = true;
  for (int64_t i = 0; i < count; i++) {
    if (ended) starts.push_back((uint32_t)i);
    ended = exceptions[i] == ~0u;
    if (!ended && column_of(exceptions[i]) >= columns)
      throw std::runtime_error("an exception of weights in 12 bits is outside their columns");
  }
  if (!ended || (int64_t)starts.size() != tiles)
    throw std::runtime_error("the exceptions of weights in 12 bits must have one end for each of their tiles");
  return starts;
}

void read_row(const Bf12& weights, int64_t t, int r, int64_t columns, uint16_t* row) {
  const auto* unit = (const uint8_t*)weights.data + t * bf12_tile_bytes(columns);
  const uint32_t* exception = weights.exceptions + weights.starts[t];
  for (int64_t k = 0; k < columns; k++) {
    const int c = (int)(k % kUnitColumns), at = slot(r, c % 4), half = c / 4;
    const uint8_t high = weights.table[unit[at] >> 4 * half & 15];
    row[k] = (uint16_t)(high << 8 | unit[64 * (1 + half) + at]);
    if (c == kUnitColumns - 1) unit += kUnitBytes;
  }
  for (; *exception != ~0u; exception++) {
    uint16_t& bits = row[column_of(*exception)];
    if (row_of(*exception) == r) bits = (uint16_t)((*exception & 0xff) << 8 | (bits & 0xff));
  }
}

}  // namespace laneformer
