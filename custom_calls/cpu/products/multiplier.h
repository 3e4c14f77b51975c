// A worker's products: the vectors that a product reads, their multiplication by the worker's shares, biases and
// activations. Ops and the head use it.
#pragma once

#include <cstdint>
#include <vector>

#include "product.h"

namespace laneformer {

class Worker;

// The vectors that a product reads, one per position.
struct Vectors {
  const float* x;
  int64_t stride;  // floats
  int positions;
};

class Multiplier {
 public:
  explicit Multiplier(Worker&);

  // The vectors that a product reads in a lane, or one block of it; normed if the product has a norm. They are valid
  // until the next call.
  Vectors vectors_of(const Product& product, int lane, int block = 0);
  // Multiplies one share of a product, whose first tile is number `tile`, by the vectors x. Writes row r of the share's
  // tile t at position p to y[p * ldy + kTile * t + r]. Returns the number of the next share's first tile.
  int64_t multiply(const Product& product, const Share& share, int64_t tile, const Vectors& x, float* y, int64_t ldy);
  // Adds the biases to a share's results in y, where `multiply` has written them.
  void add_biases(const Product& product, int lane, const Share& share, int positions, float* y, int64_t ldy) const;
  // Applies the product's limits and activation to the units of one position. out: [units][kTile]; it may be `tiles`
  // unless the product is gated.
  void activate(const Product& product, int64_t units, float* tiles, float* out) const;
  float* results() { return results_.data(); }  // [kBlock][own rows of a product, gate and up], for `multiply`
  void use_pieces(const Product& product);      // makes room for the vectors that the product's pieces read

 private:
  void prepare(const Product& product, const Piece& piece, const Vectors& x);

  Worker& w_;
  std::vector<float> normed_, merged_;  // [kBlock][widest]: vectors after the norm; heads' results
  std::vector<float> gathered_;         // [kBlock][columns] in a piece's order of columns
  std::vector<float> prepared_;         // vectors as the kernels' products read them
  std::vector<float> results_;
};

}  // namespace laneformer
