// Packs the weights: matrices as tiles in the order in which their worker reads them, vectors widened to float32, the
// embedding table as it is stored.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "decoder.h"
#include "worker.h"

namespace laneformer {

namespace {

constexpr int64_t kPiece = 4096;  // values of the embedding table

// The index of element k of row r in a tile.
inline int64_t place(Dtype dtype, int64_t r, int64_t k) {
  return dtype == Dtype::bf16 ? k / 2 * 2 * kTile + 2 * r + k % 2 : k * kTile + r;
}

// An infinity or NaN has an exponent of ones: adding `one`, its lowest bit, to the exponent alone gives the sign bit.
template <class T>
struct Exponent {
  explicit Exponent(Dtype dtype) : one((T)(dtype == Dtype::f32 ? 1 << 23 : dtype == Dtype::bf16 ? 1 << 7 : 1 << 10)) {}
  static constexpr T kSign = (T)((T)1 << (8 * sizeof(T) - 1));
  T mask() const { return (T)(kSign - one); }
  bool finite(T value) const { return (T)((value & mask()) + one) != kSign; }
  const T one;
};

// Copies a row into its tile. Returns whether all values are finite, which is tested on the way.
template <class T>
bool place_row(Dtype dtype, int64_t r, int64_t first, const T* row, int64_t n, T* tile) {
  const Exponent<T> exponent(dtype);
  int64_t k = 0;
  uint32_t pairs = 0;
  T found = 0;
  if (sizeof(T) == 2 && dtype == Dtype::bf16 && first % 2 == 0) {
    const uint32_t one = exponent.one * 0x10001u, mask = exponent.mask() * 0x10001u;
    for (; k + 2 <= n; k += 2) {
      uint32_t pair;
      std::memcpy(&pair, row + k, 4);
      pairs |= (pair & mask) + one;
      std::memcpy(tile + place(dtype, r, first + k), &pair, 4);
    }
  }
  for (; k < n; k++) {
    found |= (T)((row[k] & exponent.mask()) + exponent.one);
    tile[place(dtype, r, first + k)] = row[k];
  }
  return !(pairs & 0x80008000u) && !(found & exponent.kSign);
}

// Place of the first value that is not finite; n if there is none.
template <class T>
int64_t first_not_finite(Dtype dtype, const T* values, int64_t n) {
  const Exponent<T> exponent(dtype);
  T found = 0;
  for (int64_t k = 0; k < n; k++) found |= (T)((values[k] & exponent.mask()) + exponent.one);
  if (!(found & exponent.kSign)) return n;
  return std::find_if(values, values + n, [&](T value) { return !exponent.finite(value); }) - values;
}

int64_t not_finite(Dtype dtype, const void* values, int64_t n) {
  return dtype == Dtype::f32 ? first_not_finite(dtype, (const uint32_t*)values, n)
                             : first_not_finite(dtype, (const uint16_t*)values, n);
}

// The least of the places that several threads find.
class First {
 public:
  void found(int64_t place) {
    int64_t before = place_.load();
    while (place < before && !place_.compare_exchange_weak(before, place)) {
    }
  }
  int64_t place() const { return place_.load(); }

 private:
  std::atomic<int64_t> place_{std::numeric_limits<int64_t>::max()};
};

}  // namespace

// Where each matrix lies.
void Decoder::find_places() {
  places_.resize(plan().weights.size());
  for (const Product* product : state_.products)
    for (const Product::Part& part : product->parts)
      places_[part.weight].push_back({product, product->gated ? 0 : part.first, product->gated && part.first > 0});
  missing_.resize(state_.products.size());
  for (size_t weight = 0; weight < places_.size() && options().bf12; weight++)
    for (const Rows& rows : places_[weight]) missing_[rows.product->number].push_back((int)weight);
}

// Packs all rows of a weight, for each lane. Returns the place of the first value that is not finite, or a larger
// number.
int64_t Decoder::pack_rows(const Rows& rows, const plan::Weight& weight, const void* data, Dtype dtype) {
  const Product& product = *rows.product;
  const int64_t count = weight.shape[0], stretch = weight.shape[1];
  const int64_t stretches = product.columns / stretch;  // a head over all lanes: their columns one after the other
  First first;
  on_all([&](int w) {
    std::vector<float> wide(stretch);
    std::vector<char> row(stretch * 4);
    char* unit = workers_[w]->weights(product);
    for (const Share& share : workers_[w]->shares(product))
      for (int64_t u = share.first; u < share.last; u++, unit += product.unit_bytes(state_.weights)) {
        char* tile = unit + (rows.second ? tile_bytes(state_.weights, product.columns) : 0);
        for (int64_t r = 0; r < kTile; r++) {
          const int64_t source = u * kTile + r - rows.first;
          if (source < 0 || source >= count) continue;
          for (int64_t s = 0; s < stretches; s++) {
            const int64_t lane = stretches > 1 ? s : weight.lane_sharded ? share.lane : 0;
            const int64_t begin = (lane * count + source) * stretch;
            const char* from = (const char*)data + begin * bytes_of(dtype);
            if (dtype != state_.weights) {
              state_.kernels->widen(dtype, from, stretch, wide.data());
              state_.kernels->narrow(state_.weights, wide.data(), stretch, row.data());
              from = row.data();
            }
            const bool finite =
                state_.weights == Dtype::f32
                    ? place_row(state_.weights, r, s * stretch, (const uint32_t*)from, stretch, (uint32_t*)tile)
                    : place_row(state_.weights, r, s * stretch, (const uint16_t*)from, stretch, (uint16_t*)tile);
            if (!finite) first.found(begin + not_finite(state_.weights, from, stretch));
          }
        }
      }
  });
  return first.place();
}

int64_t Decoder::pack(int number, const void* data, int64_t count, Dtype dtype) {
  if (number < 0 || number >= (int)plan().weights.size())
    throw std::runtime_error("the model has no weight " + std::to_string(number));
  const plan::Weight& weight = plan().weights[number];
  const int64_t lanes = weight.lane_sharded ? plan().lanes : 1, each = weight.elements();
  if (count != lanes * each)
    throw std::runtime_error("weight " + std::to_string(number) + " has " + std::to_string(count) +
                             " elements, the model's has " + std::to_string(lanes * each));
  First first;
  if (!weight.is_matrix())
    for (int64_t lane = 0; lane < lanes; lane++) {
      float* to = state_.small_weights.data() + weight.offset + lane * weight.stride;
      state_.kernels->widen(dtype, (const char*)data + lane * each * bytes_of(dtype), each, to);
      const int64_t finite = not_finite(Dtype::f32, to, each);
      if (finite < each) first.found(lane * each + finite);
    }
  if (options().bf12) stage(number);
  for (const Rows& rows : places_[number]) first.found(pack_rows(rows, weight, data, dtype));
  if (options().bf12) settle_form(number);
  if (number == plan().embedding.number) {
    state_.embedding_dtype = dtype;
    if (number != plan().head.weight.number || dtype != state_.weights) {
      const int64_t bytes = each * bytes_of(dtype);
      state_.embedding = Region(bytes);
      on_all([&](int w) {
        const int64_t size = bytes_of(dtype), last = each * (w + 1) / threads();
        for (int64_t k = each * w / threads(); k < last; k += kPiece) {  // tested while it is in the cache
          const int64_t n = std::min(kPiece, last - k);
          std::memcpy(state_.embedding.data + k * size, (const char*)data + k * size, n * size);
          const int64_t finite = not_finite(dtype, (const char*)data + k * size, n);
          if (finite < n) first.found(k + finite);
        }
      });
    }
  }
  return first.place() < count ? first.place() : -1;
}

int64_t Decoder::packed_bytes() const {
  int64_t bytes = state_.embedding.bytes + state_.mapped_embedding.bytes;
  for (const Form& form : state_.forms) bytes += form.bytes;
  for (const auto& worker : workers_) bytes += worker->packed_bytes();
  return bytes;
}

// Widens a row of the embedding table to float32.
void DecodeState::embed(int32_t token, float* row) const {
  const int64_t d = plan.hidden_size;
  if (embedding.data) {
    kernels->widen(embedding_dtype, embedding.data + token * d * bytes_of(embedding_dtype), d, row);
    return;
  }
  const bool mapped = mapped_embedding.mapped != nullptr;  // otherwise the head's rows are the table
  const Bf12 tile = mapped ? mapped_embedding.tiles(token / kTile, d) : head_tiles[token / kTile];
  if (mapped || forms[head.number].bf12) {
    std::vector<uint16_t> bits(d);
    read_row(tile, 0, token % kTile, d, bits.data());
    return kernels->widen(Dtype::bf16, bits.data(), d, row);
  }
  for (int64_t k = 0; k < d; k++)
    kernels->widen(weights, tile.data + place(weights, token % kTile, k) * bytes_of(weights), 1, row + k);
}

// ---------------------------------------------------------------------------------------------------------------- bf12

void Decoder::stage(int weight) {
  for (const Rows& rows : places_[weight]) {
    const std::vector<int>& missing = missing_[rows.product->number];
    if (std::count(missing.begin(), missing.end(), weight) == 0)
      throw std::runtime_error("weight " + std::to_string(weight) + " is packed already, and in 12 bits only once");
    for (auto& worker : workers_) worker->stage(*rows.product);
  }
}

void Decoder::settle_form(int weight) {
  for (const Rows& rows : places_[weight]) {
    std::vector<int>& missing = missing_[rows.product->number];
    missing.erase(std::find(missing.begin(), missing.end(), weight));
    if (missing.empty()) choose_form(*rows.product);
  }
}

// One table for all rows of a product, of whatever weights: by the counts of all workers.
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
  on_all([&](int w) { workers_[w]->place(product, form.bf12 ? &codes : nullptr); });
}

void Decoder::map(int number, const char* tiles, int64_t bytes, const uint8_t* table, const uint32_t* exceptions,
                  int64_t count) {
  if (!options().bf12) throw std::runtime_error("this session was not opened for weights in 12 bits");
  if (number < kEmbedding || number >= (int)state_.products.size())
    throw std::runtime_error("the model has no product " + std::to_string(number));
  Product table_of_rows{};  // as a product packs it
  table_of_rows.lanes = 1, table_of_rows.rows = plan().vocab_size, table_of_rows.columns = plan().hidden_size;
  const Product& product = number == kEmbedding ? table_of_rows : *state_.products[number];
  const int64_t of = product.gated ? 2 : 1, all = product.lanes * product.units() * of;
  const int64_t wanted = all * bf12_tile_bytes(product.columns);
  if (bytes != wanted)
    throw std::runtime_error("product " + std::to_string(number) + " has " + std::to_string(wanted) +
                             " bytes of tiles in 12 bits, not " + std::to_string(bytes));
  if (number != kEmbedding && missing_[number].size() != product.parts.size())
    throw std::runtime_error("product " + std::to_string(number) + " is packed already");
  Form form;
  form.starts = starts_of(exceptions, count, all, product.columns);
  form.list.assign(exceptions, exceptions + count);
  form.bf12 = true;
  form.mapped = tiles;
  form.bytes = bytes + (int64_t)((form.list.size() + form.starts.size()) * sizeof(uint32_t));
  for (int i = 0; i < 16; i++) form.table[i] = (uint8_t)(table[i % 8] | i / 8 << 7);
  form.weights = product.lanes * product.rows * of * product.columns;
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
  if (number < 0 || number >= (int)state_.products.size())
    throw std::runtime_error("the model has no product " + std::to_string(number));
  const Product& product = *state_.products[number];
  const std::string name = "product " + std::to_string(number);
  if (&product == &state_.head && plan().embedding.number == plan().head.weight.number)
    throw std::runtime_error("the head is the embedding's table, which is not quantized");
  int64_t bytes = 0, count = 0;
  for (const Piece& piece : pieces) {
    const int64_t wanted = piece.tiles ? product.lanes * piece.count * tile_bytes(piece.format, piece.columns) : 0;
    if (piece.bytes != wanted)
      throw std::runtime_error(name + " has " + std::to_string(wanted) + " bytes of tiles in this format, not " +
                               std::to_string(piece.bytes));
    if (!piece.tiles && options().bf12)
      throw std::runtime_error(name + " has quantized and other matrices: these cannot be in 12 bits");
    for (const int32_t entry : piece.order)
      if (entry >= product.columns) throw std::runtime_error(name + " has no column " + std::to_string(entry));
    bytes += wanted, count += piece.count;
  }
  const int64_t all = product.units() * (product.gated ? 2 : 1);
  if (count != all)
    throw std::runtime_error(name + " has " + std::to_string(all) + " tiles in a lane, not " + std::to_string(count));
  Form& form = state_.forms[number];
  form = Form();
  form.pieces = std::move(pieces);
  form.bytes = bytes;
  missing_[number].clear();
  for (auto& worker : workers_) worker->use_pieces(product);
}

Decoder::Bf12Weights Decoder::bf12_weights() const {
  Bf12Weights all;
  for (const Form& form : state_.forms)
    if (form.bf12) {
      all.weights += form.weights;
      all.exceptions += form.exceptions;
      all.matrices++;
    } else {
      all.left += form.weights > 0;
    }
  return all;
}

void Worker::stage(const Product& product) {
  Packed& packed = packed_[product.number];
  if (!packed.staged.data) packed.staged = Region(packed.bytes);
}

template <class F>
void Worker::each_tile(const Product& product, const F& f) const {
  const char* tile = weights(product);
  for (const Share& share : shares(product))
    for (int64_t u = share.first; u < share.last; u++)
      for (int of = 0; of < (product.gated ? 2 : 1); of++, tile += tile_bytes(Dtype::bf16, product.columns))
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
      packed.starts.push_back((uint32_t)packed.exceptions.size());
      encode(tile, rows, product.columns, *codes, stream_.data + used_, packed.exceptions);
      used_ += bf12_tile_bytes(product.columns);
    });
    packed.exceptions.shrink_to_fit();
  } else {
    std::memcpy(stream_.data + used_, packed.staged.data, packed.bytes);
    used_ += packed.bytes;
  }
  packed.staged = Region();
  if (&product == &d_.head) name_head_tiles();
}

int64_t Worker::mapped_tiles(const Product& product) const {
  const int64_t of = product.gated ? 2 : 1;
  int64_t tiles = 0;
  for (const Share& share : shares(product)) {
    tiles += (share.last - share.first) * of;
    for (const Piece& piece : d_.forms[product.number].pieces)
      if (!piece.tiles) tiles -= piece.before(share.last * of) - piece.before(share.first * of);
  }
  return tiles;
}

void Worker::use_pieces(const Product& product) {
  for (const Piece& piece : d_.forms[product.number].pieces) {
    const int64_t bytes =
        d_.instructions.quantized->prepared_bytes(piece.format, d_.activations, piece.columns, kBlock);
    if ((int64_t)(prepared_.size() * sizeof(float)) < bytes) prepared_.resize((bytes + 3) / 4);
    if (!piece.order.empty()) gathered_.resize(std::max<size_t>(gathered_.size(), kBlock * piece.columns));
  }
}

uint64_t Worker::read_pieces(const Product& product) const {
  const int64_t of = product.gated ? 2 : 1, plain = tile_bytes(d_.weights, product.columns);
  const char* own = weights(product);
  uint64_t sum = 0;
  for (const Share& share : shares(product)) {
    const int64_t first = share.first * of, last = share.last * of;
    for (const Piece& piece : d_.forms[product.number].pieces) {
      const int64_t begin = piece.before(first), end = piece.before(last),
                    bytes = tile_bytes(piece.format, piece.columns);
      if (piece.tiles) sum += k_.read(piece.of_lane(share.lane) + begin * bytes, (end - begin) * bytes);
      for (int64_t j = begin; j < end && !piece.tiles; j++)
        sum += k_.read(own + (piece.first + j * piece.step - first) * plain, plain);
    }
    own += (last - first) * plain;
  }
  return sum;
}

void Worker::name_head_tiles() {
  const Packed& packed = packed_[d_.head.number];
  const bool bf12 = d_.forms[d_.head.number].bf12;
  int64_t tile = 0;
  for (const Share& share : packed.shares)
    for (int64_t unit = share.first; unit < share.last; unit++, tile++)
      if (share.lane == 0)
        d_.head_tiles[unit] = bf12 ? this->bf12(d_.head, tile)
                                   : Bf12{weights(d_.head) + tile * d_.head.unit_bytes(d_.weights), {}, {}, {}};
}

Bf12 Worker::bf12(const Product& product, int64_t tile) const {
  const Packed& packed = packed_[product.number];
  const Form& form = d_.forms[product.number];
  if (form.mapped) return form.tiles(packed.first_unit * (product.gated ? 2 : 1) + tile, product.columns);
  return {stream_.data + packed.offset + tile * bf12_tile_bytes(product.columns), form.table, packed.exceptions.data(),
          packed.starts.data() + tile};
}

uint64_t Worker::read() const {
  uint64_t sum = d_.options.bf12 ? k_.read(stream_.data, used_) : 0;
  for (const Product* product : d_.products) {
    const Form& form = d_.forms[product->number];
    const Packed& packed = packed_[product->number];
    if (!form.pieces.empty()) {
      sum += read_pieces(*product);
    } else if (form.mapped) {
      sum += k_.read(bf12(*product, 0).data, mapped_tiles(*product) * bf12_tile_bytes(product->columns));
    } else if (!d_.options.bf12) {
      sum += k_.read(stream_.data + packed.offset, packed.bytes);
    }
  }
  return sum;
}

int64_t Worker::packed_bytes() const {
  int64_t bytes = used_;
  for (const Product* product : d_.products) {
    const Packed& packed = packed_[product->number];
    bytes += (int64_t)((packed.exceptions.size() + packed.starts.size()) * sizeof(uint32_t));
    if (packed.staged.data) bytes += packed.bytes;
    if (!d_.options.bf12 && !d_.forms[product->number].pieces.empty())
      bytes -= mapped_tiles(*product) * tile_bytes(d_.weights, product->columns);
  }
  return bytes;
}

}  // namespace laneformer
