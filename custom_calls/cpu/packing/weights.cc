// A worker's packed weights: where its tiles are, packing them in 12 bits, and the reading of all weights without
// computing, for Decoder::read_pass.
#include "weights.h"

#include <algorithm>
#include <cstring>

namespace laneformer {

PackedWeights::PackedWeights(DecodeState& state, const Lanes& lanes) : state_(state), lanes_(lanes) {
  int64_t bytes = 0;
  for (const Product* product : state_.products) {
    const int64_t units = product->units(), all = units * product->matrices;
    Packed& packed = packed_.emplace_back();
    packed.first_unit = all * lanes.index / lanes.workers;
    packed.offset = bytes;  // `place` changes it if the form is chosen later
    for (int64_t first = all * lanes.index / lanes.workers, last = all * (lanes.index + 1) / lanes.workers;
         first < last;) {
      const int64_t matrix = first / units, end = std::min(last, (matrix + 1) * units);
      packed.shares.push_back({(int)matrix, first - matrix * units, end - matrix * units});
      first = end;
    }
    for (const Share& share : packed.shares) packed.bytes += (share.last - share.first) * product->unit_bytes();
    if (product->experts) continue;
    if (product->unstreamed) {
      packed.apart = Region(packed.bytes);
    } else {
      bytes += packed.bytes;
    }
  }
  stream_ = Region(bytes);
  used_ = state_.options.bf12 ? 0 : bytes;
  name_head_tiles();
}

char* PackedWeights::first_tile(const Product& product) const {
  const Packed& packed = packed_[product.number];
  if (product.experts) return state_.forms[product.number].experts.data + packed.first_unit * product.unit_bytes();
  return packed.apart.data ? packed.apart.data : stream_.data + packed.offset;
}

const char* PackedWeights::tile(const Product& product, int64_t number) const {
  const char* first = product.experts ? state_.forms[product.number].experts.data : first_tile(product);
  return first + number * tile_bytes(product.dtype, product.columns);
}

void PackedWeights::stage(const Product& product) {
  Packed& packed = packed_[product.number];
  if (!packed.apart.data && !product.experts) packed.apart = Region(packed.bytes);
}

template <class F>
void PackedWeights::each_tile(const Product& product, const F& f) const {
  const char* tile = first_tile(product);
  for (const Share& share : shares(product))
    for (int64_t u = share.first; u < share.last; u++)
      for (int of = 0; of < product.unit_tiles(); of++, tile += tile_bytes(Dtype::bf16, product.columns))
        f((const uint16_t*)tile, (int)std::min<int64_t>(kTile, product.rows - u * kTile));
}

void PackedWeights::count(const Product& product, Bf12Counts& counts) const {
  each_tile(product, [&](const uint16_t* tile, int rows) { laneformer::count(tile, rows, product.columns, counts); });
}

void PackedWeights::place(const Product& product, const Bf12Codes* codes) {
  Packed& packed = packed_[product.number];
  packed.offset = used_;
  if (codes) {
    each_tile(product, [&](const uint16_t* tile, int rows) {
      packed.bf12.starts.push_back((uint32_t)packed.bf12.list.size());
      encode(tile, rows, product.columns, *codes, stream_.data + used_, packed.bf12.list);
      used_ += bf12_tile_bytes(product.columns);
    });
    packed.bf12.list.shrink_to_fit();
  } else {
    std::memcpy(stream_.data + used_, packed.apart.data, packed.bytes);
    used_ += packed.bytes;
  }
  packed.apart = Region();
  if (&product == &state_.head) name_head_tiles();
}

// Encodes this worker's share of all experts' tiles into its place in `all`.
PackedWeights::Exceptions PackedWeights::encode_experts(const Product& product, const Bf12Codes& codes,
                                                        char* all) const {
  Exceptions found;
  const int64_t bytes = bf12_tile_bytes(product.columns);
  char* units = all + packed_[product.number].first_unit * product.unit_tiles() * bytes;
  each_tile(product, [&](const uint16_t* tile, int rows) {
    found.starts.push_back((uint32_t)found.list.size());
    encode(tile, rows, product.columns, codes, units, found.list);
    units += bytes;
  });
  return found;
}

// How many tiles of the worker's shares the caller has, in quantized pieces.
int64_t PackedWeights::mapped_tiles(const Product& product) const {
  const int64_t of = product.unit_tiles();
  int64_t tiles = 0;
  for (const Share& share : shares(product)) {
    tiles += (share.last - share.first) * of;
    for (const Piece& piece : state_.forms[product.number].pieces)
      if (!piece.tiles) tiles -= piece.before(share.last * of) - piece.before(share.first * of);
  }
  return tiles;
}

// Reads the weights of a share, whose first tile is number `tile`, as `multiply` reads them. Returns a sum.
uint64_t PackedWeights::read_tiles(const Product& product, const Share& share, int64_t tile) const {
  const Form& form = state_.forms[product.number];
  const int64_t of = product.unit_tiles(), first = share.first * of, last = share.last * of;
  const int64_t plain = tile_bytes(product.dtype, product.columns);
  if (form.bf12)
    return state_.kernels->read(this->bf12(product, tile).data, (last - first) * bf12_tile_bytes(product.columns));
  if (form.pieces.empty()) return state_.kernels->read(this->tile(product, tile), (last - first) * plain);
  uint64_t sum = 0;
  for (const Piece& piece : form.pieces) {
    const int64_t begin = piece.before(first), end = piece.before(last),
                  bytes = tile_bytes(piece.format, piece.columns);
    if (piece.tiles) sum += state_.kernels->read(piece.of_matrix(share.matrix) + begin * bytes, (end - begin) * bytes);
    for (int64_t j = begin; j < end && !piece.tiles; j++)
      sum += state_.kernels->read(this->tile(product, tile + piece.first + j * piece.step - first), plain);
  }
  return sum;
}

void PackedWeights::name_head_tiles() {
  const Packed& packed = packed_[state_.head.number];
  const bool bf12 = state_.forms[state_.head.number].bf12;
  int64_t tile = 0;
  for (const Share& share : packed.shares)
    for (int64_t unit = share.first; unit < share.last; unit++, tile++)
      if (share.matrix == 0)
        state_.head_tiles[unit] =
            bf12 ? this->bf12(state_.head, tile) : Bf12{this->tile(state_.head, tile), {}, {}, {}};
}

// The tiles of a product in 12 bits from number `tile` on: of this worker's tiles, or of those of all experts.
Bf12 PackedWeights::bf12(const Product& product, int64_t number) const {
  const Packed& packed = packed_[product.number];
  const Form& form = state_.forms[product.number];
  if (product.experts) return form.tiles(number, product.columns);
  if (form.mapped) return form.tiles(packed.first_unit * product.unit_tiles() + number, product.columns);
  return {stream_.data + packed.offset + number * bf12_tile_bytes(product.columns), form.table, packed.bf12.list.data(),
          packed.bf12.starts.data() + number};
}

// Reads what this worker would read for one position, for `PackedWeights::read`. It uses experts that are far from each
// other.
uint64_t PackedWeights::read_experts(const Product& product) const {
  const int64_t units = product.units();
  uint64_t sum = 0;
  for (int lane = lanes_.first_lane; lane < lanes_.last_lane; lane++) {
    const Interval rows = lanes_.part_of(lane, units), all = lanes_.part_of(lane, product.used * units);
    for (int64_t j = 0; j < product.used; j++) {
      const int64_t first = product.summed ? rows.first : std::clamp<int64_t>(all.first - j * units, 0, units);
      const int64_t last = product.summed ? rows.last : std::clamp<int64_t>(all.last - j * units, 0, units);
      const int matrix = lane * product.experts + (int)(j * product.experts / product.used);
      if (first < last)
        sum += read_tiles(product, {matrix, first, last}, (matrix * units + first) * product.unit_tiles());
    }
  }
  return sum;
}

uint64_t PackedWeights::read() const {
  uint64_t sum = state_.options.bf12 ? state_.kernels->read(stream_.data, used_) : 0;
  for (const Product* product : state_.products) {
    const Form& form = state_.forms[product->number];
    const bool streamed = state_.options.bf12 && form.pieces.empty() && !form.mapped && !product->unstreamed;
    int64_t tile = 0;
    if (product->experts) sum += read_experts(*product);
    for (const Share& share : shares(*product)) {
      if (product->experts || streamed) break;
      sum += read_tiles(*product, share, tile);
      tile += (share.last - share.first) * product->unit_tiles();
    }
  }
  return sum;
}

int64_t PackedWeights::bytes() const {
  int64_t bytes = used_;
  for (const Product* product : state_.products) {
    const Packed& packed = packed_[product->number];
    const Form& form = state_.forms[product->number];
    bytes += (int64_t)((packed.bf12.list.size() + packed.bf12.starts.size()) * sizeof(uint32_t));
    if (packed.apart.data || (product->experts && !form.mapped)) bytes += packed.bytes;
    const bool counted = product->experts || !state_.options.bf12;
    if (counted && !form.pieces.empty()) bytes -= mapped_tiles(*product) * tile_bytes(product->dtype, product->columns);
  }
  return bytes;
}

}  // namespace laneformer
