// The forms that packed weights may have beside the session's dtype: 12 bits, quantized pieces, tiles in the caller's
// memory. Decoder::pack calls `stage` and `settle_form` before and after it copies a weight; api.cc calls `map`. Here
// are also the reading of all weights without computing, for Decoder::read_pass, and the packed sizes.
//
// Invariant: a product has one Form, chosen once all its weights are known. Its results have the same bits in 12 and in
// 16 bits. A worker's tiles of a product follow each other in the order in which it multiplies them.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "../decoder.h"
#include "../worker.h"

namespace laneformer {

// Reserves memory, apart from the streams, for the bf16 products of a weight whose form is not chosen yet. Throws
// std::runtime_error for a weight that is packed already.
void Decoder::stage(int weight) {
  for (const Rows& rows : places_[weight]) {
    if (rows.product->dtype != Dtype::bf16) continue;
    const std::vector<int>& missing = missing_[rows.product->number];
    if (std::count(missing.begin(), missing.end(), weight) == 0)
      throw std::runtime_error("weight " + std::to_string(weight) + " is packed already: in 12 bits pack it only once");
    for (auto& worker : workers_) worker->stage(*rows.product);
  }
}

// Chooses the forms of the products whose last weight this is.
void Decoder::settle_form(int weight) {
  for (const Rows& rows : places_[weight]) {
    if (rows.product->dtype != Dtype::bf16) continue;
    std::vector<int>& missing = missing_[rows.product->number];
    missing.erase(std::find(missing.begin(), missing.end(), weight));
    if (missing.empty()) choose_form(*rows.product);
  }
}

// Chooses a product's form by the counts of all workers, and packs its tiles in this form. All its weights share one
// table of codes.
void Decoder::choose_form(const Product& product) {
  std::vector<Bf12Counts> counts(workers_.size(), Bf12Counts{});
  on_all([&](int w) { workers_[w]->count(product, counts[w]); });
  for (size_t w = 1; w < counts.size(); w++)
    for (size_t i = 0; i < counts[0].size(); i++) counts[0][i] += counts[w][i];
  const Bf12Codes codes(counts[0]);
  Form& form = state_.forms[product.number];
  form.weights = codes.weights;
  form.exceptions = codes.exceptions;
  form.bf12 = (double)codes.exceptions <= kMostExceptions * (double)codes.weights;
  std::copy(std::begin(codes.high), std::end(codes.high), form.table);
  if (!product.experts) {
    on_all([&](int w) { workers_[w]->place(product, form.bf12 ? &codes : nullptr); });
  } else if (form.bf12) {
    encode_experts(product, codes, form);
  }
}

// Encodes the tiles of all experts in one place, with one list of exceptions, since any worker may multiply any expert.
void Decoder::encode_experts(const Product& product, const Bf12Codes& codes, Form& form) {
  Region encoded(product.tiles() * bf12_tile_bytes(product.columns));
  std::vector<Worker::Exceptions> found(workers_.size());
  on_all([&](int w) { found[w] = workers_[w]->encode_experts(product, codes, encoded.data); });
  for (const Worker::Exceptions& part : found) {
    for (const uint32_t start : part.starts) form.starts.push_back((uint32_t)form.list.size() + start);
    form.list.insert(form.list.end(), part.list.begin(), part.list.end());
  }
  form.bytes = encoded.bytes + (int64_t)((form.list.size() + form.starts.size()) * sizeof(uint32_t));
  form.experts = std::move(encoded);
  form.mapped = form.experts.data;
}

void Decoder::map(int number, const char* tiles, int64_t bytes, const uint8_t* table, const uint32_t* exceptions,
                  int64_t count) {
  if (!options().bf12)
    throw std::runtime_error("this session was not opened for weights in 12 bits: open it with bf12");
  if (number < kEmbedding || number > state_.head.number)
    throw std::runtime_error("the model has no product " + std::to_string(number));
  Product table_of_rows{};  // the embedding table as if it were a product's matrix
  table_of_rows.matrices = 1, table_of_rows.rows = plan().vocab_size, table_of_rows.columns = plan().hidden_size;
  const Product& product = number == kEmbedding ? table_of_rows : *state_.products[number];
  const int64_t all = product.tiles();
  const int64_t wanted = all * bf12_tile_bytes(product.columns);
  if (bytes != wanted)
    throw std::runtime_error("product " + std::to_string(number) + " needs " + std::to_string(wanted) +
                             " bytes of tiles in 12 bits, got " + std::to_string(bytes));
  if (number != kEmbedding && missing_[number].size() != product.parts.size())
    throw std::runtime_error("product " + std::to_string(number) + " is packed already");
  Form form;
  form.starts = starts_of(exceptions, count, all, product.columns);
  form.list.assign(exceptions, exceptions + count);
  form.bf12 = true;
  form.mapped = tiles;
  form.bytes = bytes + (int64_t)((form.list.size() + form.starts.size()) * sizeof(uint32_t));
  for (int i = 0; i < 16; i++) form.table[i] = (uint8_t)(table[i % 8] | i / 8 << 7);
  form.weights = product.matrices * product.rows * product.unit_tiles() * product.columns;
  form.exceptions = count - all;
  if (number == kEmbedding) {
    state_.mapped_embedding = std::move(form);
    return;
  }
  state_.forms[number] = std::move(form);
  missing_[number].clear();
  if (&product == &state_.head)
    for (auto& worker : workers_) worker->name_head_tiles();
}

void Decoder::map(int number, std::vector<Piece> pieces) {
  if (number < 0 || number > state_.head.number)
    throw std::runtime_error("the model has no product " + std::to_string(number));
  const Product& product = *state_.products[number];
  const std::string name = "product " + std::to_string(number);
  if (&product == &state_.head && plan().embedding.number == plan().head.weight.number)
    throw std::runtime_error("the head is the embedding table, which cannot be quantized");
  int64_t bytes = 0, count = 0;
  for (const Piece& piece : pieces) {
    const int64_t wanted = piece.tiles ? product.matrices * piece.count * tile_bytes(piece.format, piece.columns) : 0;
    if (piece.bytes != wanted)
      throw std::runtime_error(name + " needs " + std::to_string(wanted) + " bytes of tiles in this format, got " +
                               std::to_string(piece.bytes));
    if (!piece.tiles && options().bf12)
      throw std::runtime_error(name + " has quantized and other matrices: open the session without bf12");
    for (const int32_t entry : piece.order)
      if (entry >= product.columns) throw std::runtime_error(name + " has no column " + std::to_string(entry));
    bytes += wanted, count += piece.count;
  }
  const int64_t all = product.units() * product.unit_tiles();
  if (count != all)
    throw std::runtime_error(name + " needs " + std::to_string(all) + " tiles per matrix, got " +
                             std::to_string(count));
  Form& form = state_.forms[number];
  Region experts = std::move(form.experts);  // still used by pieces that are not quantized
  form = Form();
  form.experts = std::move(experts);
  form.pieces = std::move(pieces);
  form.bytes = bytes;
  missing_[number].clear();
  for (auto& worker : workers_) worker->use_pieces(product);
}

Decoder::Bf12Weights Decoder::bf12_weights() const {
  Bf12Weights all;
  for (const Product* product : state_.products) {
    const Form& form = state_.forms[product->number];
    if (form.bf12) {
      const int64_t used = std::max(product->used, 1), of = std::max(product->experts, 1);
      all.weights += form.weights / of * used;
      all.exceptions += form.exceptions * used / of;
      all.matrices++;
    } else {
      all.left += form.weights > 0;
    }
  }
  return all;
}

void Worker::stage(const Product& product) {
  Packed& packed = packed_[product.number];
  if (!packed.apart.data && !product.experts) packed.apart = Region(packed.bytes);
}

template <class F>
void Worker::each_tile(const Product& product, const F& f) const {
  const char* tile = weights(product);
  for (const Share& share : shares(product))
    for (int64_t u = share.first; u < share.last; u++)
      for (int of = 0; of < product.unit_tiles(); of++, tile += tile_bytes(Dtype::bf16, product.columns))
        f((const uint16_t*)tile, (int)std::min<int64_t>(kTile, product.rows - u * kTile));
}

void Worker::count(const Product& product, Bf12Counts& counts) const {
  each_tile(product, [&](const uint16_t* tile, int rows) { laneformer::count(tile, rows, product.columns, counts); });
}

void Worker::place(const Product& product, const Bf12Codes* codes) {
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
  if (&product == &state.head) name_head_tiles();
}

// Encodes this worker's share of all experts' tiles into its place in `all`.
Worker::Exceptions Worker::encode_experts(const Product& product, const Bf12Codes& codes, char* all) const {
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
int64_t Worker::mapped_tiles(const Product& product) const {
  const int64_t of = product.unit_tiles();
  int64_t tiles = 0;
  for (const Share& share : shares(product)) {
    tiles += (share.last - share.first) * of;
    for (const Piece& piece : state.forms[product.number].pieces)
      if (!piece.tiles) tiles -= piece.before(share.last * of) - piece.before(share.first * of);
  }
  return tiles;
}

void Worker::use_pieces(const Product& product) {
  for (const Piece& piece : state.forms[product.number].pieces) {
    const int64_t bytes =
        state.instructions.quantized->prepared_bytes(piece.format, product.activations, piece.columns, kBlock);
    if ((int64_t)(prepared_.size() * sizeof(float)) < bytes) prepared_.resize((bytes + 3) / 4);
    if (!piece.order.empty()) gathered_.resize(std::max<size_t>(gathered_.size(), kBlock * piece.columns));
  }
}

// Reads the weights of a share, whose first tile is number `tile`, as `multiply` reads them. Returns a sum.
uint64_t Worker::read_tiles(const Product& product, const Share& share, int64_t tile) const {
  const Form& form = state.forms[product.number];
  const int64_t of = product.unit_tiles(), first = share.first * of, last = share.last * of;
  const int64_t plain = tile_bytes(product.dtype, product.columns);
  if (form.bf12) return kernels.read(bf12(product, tile).data, (last - first) * bf12_tile_bytes(product.columns));
  if (form.pieces.empty()) return kernels.read(tiles(product, tile), (last - first) * plain);
  uint64_t sum = 0;
  for (const Piece& piece : form.pieces) {
    const int64_t begin = piece.before(first), end = piece.before(last),
                  bytes = tile_bytes(piece.format, piece.columns);
    if (piece.tiles) sum += kernels.read(piece.of_matrix(share.matrix) + begin * bytes, (end - begin) * bytes);
    for (int64_t j = begin; j < end && !piece.tiles; j++)
      sum += kernels.read(tiles(product, tile + piece.first + j * piece.step - first), plain);
  }
  return sum;
}

void Worker::name_head_tiles() {
  const Packed& packed = packed_[state.head.number];
  const bool bf12 = state.forms[state.head.number].bf12;
  int64_t tile = 0;
  for (const Share& share : packed.shares)
    for (int64_t unit = share.first; unit < share.last; unit++, tile++)
      if (share.matrix == 0)
        state.head_tiles[unit] = bf12 ? this->bf12(state.head, tile) : Bf12{tiles(state.head, tile), {}, {}, {}};
}

// The tiles of a product in 12 bits from number `tile` on: of this worker's tiles, or of those of all experts.
Bf12 Worker::bf12(const Product& product, int64_t tile) const {
  const Packed& packed = packed_[product.number];
  const Form& form = state.forms[product.number];
  if (product.experts) return form.tiles(tile, product.columns);
  if (form.mapped) return form.tiles(packed.first_unit * product.unit_tiles() + tile, product.columns);
  return {stream_.data + packed.offset + tile * bf12_tile_bytes(product.columns), form.table, packed.bf12.list.data(),
          packed.bf12.starts.data() + tile};
}

// Reads what this worker would read for one position, for `Worker::read`. It uses experts that are far from each other.
uint64_t Worker::read_experts(const Product& product) const {
  const int64_t units = product.units();
  uint64_t sum = 0;
  for (int lane = first_lane; lane < last_lane; lane++) {
    const Interval rows = part_of(lane, units), all = part_of(lane, product.used * units);
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

uint64_t Worker::read() const {
  uint64_t sum = state.options.bf12 ? kernels.read(stream_.data, used_) : 0;
  for (const Product* product : state.products) {
    const Form& form = state.forms[product->number];
    const bool streamed = state.options.bf12 && form.pieces.empty() && !form.mapped && !product->unstreamed;
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

int64_t Decoder::packed_bytes() const {
  int64_t bytes = state_.embedding.bytes + state_.mapped_embedding.bytes;
  for (const Form& form : state_.forms) bytes += form.bytes;
  for (const auto& worker : workers_) bytes += worker->packed_bytes();
  return bytes;
}

int64_t Worker::packed_bytes() const {
  int64_t bytes = used_;
  for (const Product* product : state.products) {
    const Packed& packed = packed_[product->number];
    const Form& form = state.forms[product->number];
    bytes += (int64_t)((packed.bf12.list.size() + packed.bf12.starts.size()) * sizeof(uint32_t));
    if (packed.apart.data || (product->experts && !form.mapped)) bytes += packed.bytes;
    const bool counted = product->experts || !state.options.bf12;
    if (counted && !form.pieces.empty()) bytes -= mapped_tiles(*product) * tile_bytes(product->dtype, product->columns);
  }
  return bytes;
}

}  // namespace laneformer
