// Weights of 8 and 4 bits: how their tiles are packed, and the products with them as a table of functions, one table
// per instruction set; see quantized.cc. All tables give the same bits.
#pragma once

#include "kernels.h"

namespace laneformer {

enum class Code : int32_t { int4 = 0, e2m1 = 1, int8 = 2, e4m3 = 3 };
enum class ScaleType : int32_t { none = 0, e8m0 = 1, e4m3 = 2, bf16 = 3, f16 = 4, f32 = 5 };

// A weight is code * scale of its group * factor of its row. A tile of 16 rows is
//   [16 factors, float32, if `rows`] [chunk of up to kChunkColumns columns: [scales] [codes]] ...
// Scales: of each group 16 (one per row), or 1 if `shared`; then of each group 16 zero points, a byte each as codes
// are, if `zeros`; padded to 64 bytes. Codes: lines of 64 bytes, a dword for each of 16 rows. 4 bits: 8 columns, low
// halves of bytes 0-3 columns 0-3, high halves columns 4-7. int8: 4 columns, each + 128. e4m3: two halves of a line
// with 16 words each, of two columns. Columns are padded to 32 with weights of value 0.
//
// Tiles 2 i and 2 i + 1 of a lane are one stream, so that one position multiplies both at once: factors of both, then
// in each chunk the scales of both, and codes whose lines alternate. A last tile without a partner is by itself, and so
// are all of e4m3, which share no loads of digits.
struct Quantized {
  Code code = Code::int4;
  ScaleType scale = ScaleType::none;
  int group = 0;        // columns of a scale, a multiple of 32 (e2m1: or 16) that divides kChunkColumns; 0: no scales
  bool shared = false;  // one scale for all rows of a tile
  bool zeros = false;   // of integers: code - zero point; else int4 is code - 8, int8 code - 128
  bool rows = false;

  bool operator==(const Quantized& b) const {
    return code == b.code && scale == b.scale && group == b.group && shared == b.shared && zeros == b.zeros &&
           rows == b.rows;
  }
};

constexpr int kBlockColumns = 32;  // columns are padded to these
constexpr int64_t kChunkColumns = 512;

constexpr bool in_pairs(Code code) { return code != Code::e4m3; }
inline int bits_of(Code code) { return code == Code::int4 || code == Code::e2m1 ? 4 : 8; }
inline int bytes_of(ScaleType scale) {
  return scale == ScaleType::none ? 0 : scale == ScaleType::f32 ? 4 : scale >= ScaleType::bf16 ? 2 : 1;
}
inline int64_t padded_columns(int64_t columns) { return (columns + kBlockColumns - 1) / kBlockColumns * kBlockColumns; }
inline int64_t groups_of(const Quantized& format, int64_t columns) {
  return format.group ? (columns + format.group - 1) / format.group : 0;
}
// Of a chunk with that many columns.
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
  // The vectors x[p ldx + k] as `product` reads them: integers of 23 bits and a power of two per 32 columns (rounded:
  // of 16 bits), or float32 for e4m3.
  void (*prepare)(const Quantized&, Activations, const float* x, int64_t ldx, int64_t columns, int positions,
                  void* out);
  // `count` tiles of a lane's `all`, from tile `first` on, times each position's vector: row r of tile first + t is
  // y[p ldy + 16 t + r]. Its bits depend on its weights and its vector alone: not on instruction set, positions or
  // tiles. tiles: the lane's first.
  void (*product)(const Quantized&, Activations, const char* tiles, int64_t all, int64_t first, int64_t count,
                  const void* x, int64_t columns, int positions, float* y, int64_t ldy);
};

extern "C" {
extern const QuantizedKernels laneformer_quantized_portable;
#if defined(__x86_64__)  // null where a set was not compiled
extern const QuantizedKernels laneformer_quantized_avx2 __attribute__((weak));
extern const QuantizedKernels laneformer_quantized_avx512 __attribute__((weak));
extern const QuantizedKernels laneformer_quantized_avx512_vnni __attribute__((weak));
#endif
}

}  // namespace laneformer
