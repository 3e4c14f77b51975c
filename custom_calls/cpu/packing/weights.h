// A worker's packed weights: its shares of all products, in the order in which it reads them.
//
// Invariant: a worker's tiles of a product follow each other in the order in which it multiplies them.
#pragma once

#include <vector>

#include "../state.h"
#include "bf12.h"

namespace laneformer {

class PackedWeights {
 public:
  PackedWeights(DecodeState& state, const Lanes& lanes);

  // The worker's shares of a product. It packs them, and multiplies them too unless the product has experts.
  const std::vector<Share>& shares(const Product& product) const { return packed_[product.number].shares; }
  char* first_tile(const Product& product) const;  // of its shares
  // A tile in the session's dtype by its number: among the tiles that this worker packs, or, if the product has
  // experts, among the tiles of all experts.
  const char* tile(const Product& product, int64_t number) const;
  // The same in 12 bits: that tile and those after it.
  Bf12 bf12(const Product& product, int64_t number) const;

  uint64_t read() const;  // reads the weights that it multiplies for one token, without computing; returns a sum
  int64_t bytes() const;

  // Packing in 12 bits. A product's form is chosen once all its weights are packed; until then its tiles are apart
  // from the stream.
  void stage(const Product& product);                            // reserves that memory
  void count(const Product& product, Bf12Counts& counts) const;  // adds the weights of its shares
  void place(const Product& product, const Bf12Codes* codes);    // moves the tiles into the stream; null: as bf16
  struct Exceptions {
    std::vector<uint32_t> list, starts;  // by tile: where its exceptions begin in the list
  };
  // Writes its share of all experts' tiles to its place in `all`.
  Exceptions encode_experts(const Product& product, const Bf12Codes& codes, char* all) const;
  void name_head_tiles();  // stores the places of the head's tiles, whenever they have moved

 private:
  int64_t mapped_tiles(const Product& product) const;
  uint64_t read_tiles(const Product& product, const Share& share, int64_t tile) const;
  uint64_t read_experts(const Product& product) const;
  // f(tile, rows that are not padding) for each bf16 tile of its shares.
  template <class F>
  void each_tile(const Product& product, const F& f) const;

  DecodeState& state_;
  const Lanes& lanes_;
  struct Packed {  // the worker's shares of a product
    std::vector<Share> shares;
    int64_t first_unit = 0;         // its first unit, counted through all matrices
    int64_t offset = 0, bytes = 0;  // place in stream_; size as bf16 or in the session's dtype
    Region apart;                   // tiles outside of stream_: of a router, or until the form is chosen
    Exceptions bf12;
  };
  std::vector<Packed> packed_;  // by product
  Region stream_;               // its tiles of all products, in the order of the ops
  int64_t used_ = 0;            // bytes of stream_ in use
};

}  // namespace laneformer
