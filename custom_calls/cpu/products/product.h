// Matrix products as workers run them: what a product is, a worker's share of it, and how its weights are packed.
//
// A product's rows are packed in tiles of kTile rows. A unit is what workers share out: a tile, or the tile of a gate
// and that of its up rows. Sizes are those of one lane unless they say otherwise.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "../../common/plan.h"
#include "../kernels/kernels.h"
#include "../kernels/quantized.h"
#include "../memory.h"

namespace laneformer {

class Attention;

// A worker's share of one matrix: its units first <= unit < last.
struct Share {
  int matrix;
  int64_t first, last;
};

// A matrix product as it is packed. The tiles of gate and up rows alternate.
struct Product {
  int number;  // in the model: first the layers' products in their order, then the head, then those that are
               // `unstreamed`
  plan::ProductName name;
  int matrices;           // in all lanes; expert or block e of lane l is number l * experts + e, or l * blocks + e
  int64_t rows, columns;  // of one matrix; a gate row and its up row count once
  bool gated;
  Activation activation;
  std::optional<float> limit;
  float up_offset;
  plan::Value reads, writes;
  const Attention* attention = nullptr;  // makes ATTENDED where the product reads it; null: it is written already
  plan::Norm norm;
  bool normed;
  Dtype dtype;  // of the packed weights, unless the product has another Form
  Activations activations;
  int experts = 0, used = 0;  // experts of a lane, and how many of them a position uses; 0: no experts
  bool summed = false;        // the results of a position's experts are summed, as in plan::Chosen
  int blocks = 0;             // blocks of a lane, each with its own matrix; 0: not block-diagonal
  int64_t block_step = 0;     // channels from one block's first to the next one's in the vector read
  bool unstreamed = false;    // packed apart from what workers stream: router, gate of a shared expert, mixture
  bool added = false;         // the result is added to the value written
  struct Part {               // one weight
    int weight;               // its number in the plan
    int64_t first;            // its first row in the product
  };
  std::vector<Part> parts;
  struct Bias {
    plan::Array vector;
    int64_t first;  // its first row in the product
  };
  std::vector<Bias> biases;

  int64_t units() const { return (rows + kTile - 1) / kTile; }  // of one matrix
  int unit_tiles() const { return gated ? 2 : 1; }
  int64_t tiles() const { return matrices * units() * unit_tiles(); }
  int64_t unit_bytes() const { return tile_bytes(dtype, columns) * unit_tiles(); }
  int64_t bytes() const { return tile_bytes(dtype, columns) * tiles(); }
  // Channels from one expert's first to the next one's, in the value read and in the value written: whole tiles.
  int64_t read_step() const { return (columns + kTile - 1) / kTile * kTile; }
  int64_t written_step() const { return units() * kTile; }
};

// The tiles of a product that have one format and one order of columns. A product with a quantized matrix consists of
// such pieces.
struct Piece {
  int64_t first, step;  // tile j of the piece is tile first + j * step of a matrix
  int64_t count;        // tiles of the piece in one matrix
  const char* tiles;    // in the caller's memory, matrix by matrix; null: not quantized, in the worker's memory
  int64_t bytes;        // of `tiles`
  Quantized format;
  int64_t columns;             // of a tile
  std::vector<int32_t> order;  // by column: the entry of the vector that it multiplies, -1 for 0; empty: in order

  // How many of the piece's tiles are before this tile of a matrix.
  int64_t before(int64_t tile) const {
    const int64_t found = (tile - first + step - 1) / step;
    return found < 0 ? 0 : found < count ? found : count;
  }
  const char* of_matrix(int matrix) const { return tiles + matrix * count * tile_bytes(format, columns); }
};

// How a product's weights are packed: in 12 bits, in pieces, or else in the session's dtype.
struct Form {
  bool bf12 = false;
  std::vector<Piece> pieces;
  uint8_t table[16] = {};               // bf12: high byte of each code
  int64_t weights = 0, exceptions = 0;  // bf12: how many; counted also for a product that stays in 16 bits
  Region experts;                       // all tiles of a product with experts, unless the caller has them
  // bf12: all tiles in one place, the caller's memory or `experts`, their exceptions, and where those of each tile
  // begin. Null: each worker has its own tiles and exceptions.
  const char* mapped = nullptr;
  std::vector<uint32_t> list, starts;
  int64_t bytes = 0;  // of these tiles, list and starts, or of the pieces
  Bf12 tiles(int64_t first, int64_t columns) const {
    return {mapped + first * bf12_tile_bytes(columns), table, list.data(), starts.data() + first};
  }
};

}  // namespace laneformer
