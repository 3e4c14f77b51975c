// Weights of 8 and 4 bits: how their tiles are packed, and products with them as tables of functions, one table per
// instruction set. custom_calls/cpu/tiles.py packs the tiles; class Multiplier calls the functions.
// quantized.cc defines the tables, digits.h and eights.h have the arithmetic.
//
// Invariant: the bits of a result depend on its weights, its vector and the Activations alone: all tables give the same
// bits, for one position and for several. Sums within a block of columns are exact integers, or a fixed tree for fp8.
#pragma once

#include "kernels.h"

namespace laneformer {

enum class Code : int32_t { int4 = 0, e2m1 = 1, int8 = 2, e4m3 = 3 };
enum class ScaleType : int32_t { none = 0, e8m0 = 1, e4m3 = 2, bf16 = 3, f16 = 4, f32 = 5 };

// A weight is value * scale of its group * factor of its row. The value is what an e2m1 or e4m3 code stands for, or an
// int4 or int8 code, stored as an unsigned integer, less its zero point. A tile of 16 rows is
//   [16 factors, float32, if `rows`] [chunk of up to kChunkColumns columns: [scales] [codes]] ...
// The scales of a chunk are 16 for each group, one per row, or 1 if `shared`. If `zeros`, 16 zero points of a byte
// follow for each group. Together they are padded to 64 bytes. The codes of a chunk are lines of 64 bytes.
//   4 bits: a line has 8 columns, 4 bytes per row. Low halves of bytes 0-3 are columns 0-3, high halves columns 4-7.
//   int8: a line has 4 columns, 4 bytes per row.
//   e4m3: a line has 4 columns in two halves; a half has the 2 bytes of its columns for each of 16 rows.
// Columns are padded to kBlockColumns with weights of value 0.
//
// Tiles 2 i and 2 i + 1 of a matrix are one stream, so that one position multiplies both at once: the factors of both,
// then in each chunk the scales of both, and codes whose lines alternate. A last tile without a partner is by itself.
// So are all tiles of e4m3, which have no digits whose loads they could share.
struct Quantized {
  Code code = Code::int4;
  ScaleType scale = ScaleType::none;
  int group = 0;        // columns of a scale, a multiple of 32 (e2m1: or 16) that divides kChunkColumns; 0: no scales
  bool shared = false;  // one scale for all rows of a tile
  bool zeros = false;   // int4, int8: each group has zero points; otherwise they are 8 (int4) or 128 (int8)
  bool rows = false;    // each row has a factor

  bool operator==(const Quantized& b) const {
    return code == b.code && scale == b.scale && group == b.group && shared == b.shared && zeros == b.zeros &&
           rows == b.rows;
  }
};

constexpr int kBlockColumns = 32;  // columns are padded to a multiple of this
constexpr int64_t kChunkColumns = 512;

constexpr bool in_pairs(Code code) { return code != Code::e4m3; }  // whether two tiles are one stream
inline int bits_of(Code code) { return code == Code::int4 || code == Code::e2m1 ? 4 : 8; }
inline int bytes_of(ScaleType scale) {
  return scale == ScaleType::none ? 0 : scale == ScaleType::f32 ? 4 : scale >= ScaleType::bf16 ? 2 : 1;
}
inline int64_t padded_columns(int64_t columns) { return (columns + kBlockColumns - 1) / kBlockColumns * kBlockColumns; }
inline int64_t groups_of(const Quantized& format, int64_t columns) {
  return format.group ? (columns + format.group - 1) / format.group : 0;
}
// Bytes of the scales and zero points of a tile's chunk with this many columns.
inline int64_t scale_bytes(const Quantized& format, int64_t columns) {
  const int64_t each = bytes_of(format.scale) * (format.shared ? 1 : kTile) + (format.zeros ? kTile : 0);
  return (groups_of(format, columns) * each + 63) / 64 * 64;
}
inline int64_t code_bytes(const Quantized& format, int64_t columns) {
  return padded_columns(columns) * kTile * bits_of(format.code) / 8;
}
inline int64_t tile_bytes(const Quantized& format, int64_t columns) {
  const int64_t whole = columns / kChunkColumns, rest = columns % kChunkColumns;
  return (format.rows ? kTile * 4 : 0) + whole * scale_bytes(format, kChunkColumns) + scale_bytes(format, rest) +
         code_bytes(format, columns);
}
struct QuantizedKernels {
  const char* name;
  // Bytes that `prepare` writes.
  int64_t (*prepared_bytes)(const Quantized&, Activations, int64_t columns, int positions);
  // Writes the vectors x[p * ldx + k] in the form that `product` reads: integers of 23 bits (rounded activations: of 16
  // bits) and a power of two for each block of columns, or float32 for e4m3.
  void (*prepare)(const Quantized&, Activations, const float* x, int64_t ldx, int64_t columns, int positions,
                  void* out);
  // Multiplies `count` tiles of a matrix, from tile `first` on, by each position's vector. tiles: the matrix's first
  // tile; all: how many it has. Row r of tile first + t at position p goes to y[p * ldy + 16 * t + r].
  void (*product)(const Quantized&, Activations, const char* tiles, int64_t all, int64_t first, int64_t count,
                  const void* x, int64_t columns, int positions, float* y, int64_t ldy);
};

extern "C" {
extern const QuantizedKernels laneformer_quantized_portable;
#if defined(__x86_64__)  // weak: the address is null if the set was not compiled
extern const QuantizedKernels laneformer_quantized_avx2 __attribute__((weak));
extern const QuantizedKernels laneformer_quantized_avx512 __attribute__((weak));
extern const QuantizedKernels laneformer_quantized_avx512_vnni __attribute__((weak));
#endif
}

}  // namespace laneformer
