// Packs the weights: matrices as tiles in the order in which their worker reads them, vectors widened to float32, the
// embedding table as it is stored. custom_calls/cpu/session.py packs each weight once, through Decoder::pack; workers
// read a row of the table with DecodeState::embed.
//
// Invariant: a row's place in a product's tiles depends only on the weight, the lane and the row, and one worker writes
// each tile. So weights may come in any order, and workers pack in parallel without locks.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "../decoder.h"
#include "../worker.h"

namespace laneformer {

namespace {

constexpr int64_t kPiece = 4096;  // values of the embedding table that are copied at a time

// The index of row r and column k in a tile.
inline int64_t place(Dtype dtype, int64_t r, int64_t k) {
  return dtype == Dtype::bf16 ? k / 2 * 2 * kTile + 2 * r + k % 2 : k * kTile + r;
}

// Tests numbers for infinity and NaN, whose exponents are all ones: adding `one`, the exponent's lowest bit, to the
// bits of such an exponent gives the sign bit.
template <class T>
struct Exponent {
  explicit Exponent(Dtype dtype) : one((T)(dtype == Dtype::f32 ? 1 << 23 : dtype == Dtype::bf16 ? 1 << 7 : 1 << 10)) {}
  static constexpr T kSign = (T)((T)1 << (8 * sizeof(T) - 1));
  T mask() const { return (T)(kSign - one); }
  bool finite(T value) const { return (T)((value & mask()) + one) != kSign; }
  const T one;
};

// Copies a row [n] into columns `first` to first + n - 1 of row r of its tile. Returns whether all values are finite.
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

// Index of the first value that is not finite; n if all are.
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

// Turns [rows][columns] into [columns][rows], so that vectors run over the channels of a convolution.
void transpose(float* values, int64_t rows, int64_t columns) {
  const std::vector<float> old(values, values + rows * columns);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) values[c * rows + r] = old[r * columns + c];
}

// The least of the indices that several threads find.
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

// Sets places_ and missing_.
void Decoder::find_places() {
  places_.resize(plan().weights.size());
  for (const Product* product : state_.products)
    for (const Product::Part& part : product->parts)
      places_[part.weight].push_back({product, product->gated ? 0 : part.first, product->gated && part.first > 0});
  missing_.resize(state_.products.size());
  for (size_t weight = 0; weight < places_.size() && options().bf12; weight++)
    for (const Rows& rows : places_[weight])
      if (rows.product->dtype == Dtype::bf16) missing_[rows.product->number].push_back((int)weight);
}

// Packs all rows of a matrix into one of its products, for each lane and expert. Returns the index of the first value
// that is not finite as packed; if all are, a number beyond the last.
int64_t Decoder::pack_rows(const Rows& rows, const plan::Weight& weight, const void* data, Dtype dtype) {
  const Product& product = *rows.product;
  const Dtype packed = product.dtype;
  const int64_t count = weight.shape[0], columns = weight.shape[1], stretch = std::min(columns, product.columns);
  const int64_t stretches = product.columns / stretch;  // more than one: a head reads all lanes' columns end to end
  First first;
  on_all([&](int w) {
    std::vector<float> wide(stretch);
    std::vector<char> row(stretch * 4);
    char* unit = workers_[w]->weights.first_tile(product);
    for (const Share& share : workers_[w]->weights.shares(product))
      for (int64_t u = share.first; u < share.last; u++, unit += product.unit_bytes()) {
        char* tile = unit + (rows.second ? tile_bytes(packed, product.columns) : 0);
        for (int64_t r = 0; r < kTile; r++) {
          const int64_t source = u * kTile + r - rows.first;
          if (source < 0 || source >= count) continue;
          for (int64_t s = 0; s < stretches; s++) {
            const int64_t matrix = stretches > 1         ? s
                                   : weight.lane_sharded ? share.matrix
                                                         : share.matrix % weight.copies();
            const int64_t first_column = columns > stretch ? share.matrix % product.blocks * stretch : 0;
            const int64_t begin = (matrix * count + source) * columns + first_column;
            const char* from = (const char*)data + begin * bytes_of(dtype);
            if (dtype != packed) {
              state_.kernels->widen(dtype, from, stretch, wide.data());
              state_.kernels->narrow(packed, wide.data(), stretch, row.data());
              from = row.data();
            }
            const bool finite =
                packed == Dtype::f32
                    ? place_row(packed, r, s * stretch, (const uint32_t*)from, stretch, (uint32_t*)tile)
                    : place_row(packed, r, s * stretch, (const uint16_t*)from, stretch, (uint16_t*)tile);
            if (!finite) first.found(begin + not_finite(packed, from, stretch));
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
      if (state_.transposed[number]) transpose(to, weight.shape[0], each / weight.shape[0]);
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
        for (int64_t k = each * w / threads(); k < last; k += kPiece) {  // in pieces: tested while in the cache
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

// Writes row `token` of the embedding table to row [hidden_size], as float32.
void DecodeState::embed(int32_t token, float* row) const {
  const int64_t d = plan.hidden_size;
  if (embedding.data) {
    kernels->widen(embedding_dtype, embedding.data + token * d * bytes_of(embedding_dtype), d, row);
    return;
  }
  const bool mapped = mapped_embedding.mapped != nullptr;  // else the head's matrix is the table
  const Bf12 tile = mapped ? mapped_embedding.tiles(token / kTile, d) : head_tiles[token / kTile];
  if (mapped || forms[head.number].bf12) {
    std::vector<uint16_t> bits(d);
    read_row(tile, 0, token % kTile, d, bits.data());
    return kernels->widen(Dtype::bf16, bits.data(), d, row);
  }
  for (int64_t k = 0; k < d; k++)
    kernels->widen(weights, tile.data + place(weights, token % kTile, k) * bytes_of(weights), 1, row + k);
}

}  // namespace laneformer
