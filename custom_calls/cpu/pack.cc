// Packs the weights: matrices as tiles in the order in which their worker reads them, vectors widened to float32, the
// embedding table as it is stored.
#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "worker.h"

namespace laneformer {

namespace {

// The index of element k of row r in a tile.
inline int64_t place(Dtype dtype, int64_t r, int64_t k) {
  return dtype == Dtype::bf16 ? k / 2 * 2 * kTile + 2 * r + k % 2 : k * kTile + r;
}

template <class T>
void place_row(Dtype dtype, int64_t r, int64_t first, const T* row, int64_t n, T* tile) {
  int64_t k = 0;
  if (sizeof(T) == 2 && dtype == Dtype::bf16 && first % 2 == 0)
    for (; k + 2 <= n; k += 2) std::memcpy(tile + place(dtype, r, first + k), row + k, 4);
  for (; k < n; k++) tile[place(dtype, r, first + k)] = row[k];
}

}  // namespace

// Packs all rows of a weight, for each lane.
void Decoder::pack_rows(const Rows& rows, const plan::Weight& weight, const void* data, Dtype dtype) {
  const Product& product = *rows.product;
  const int64_t count = weight.shape[0], stretch = weight.shape[1];
  const int64_t stretches = product.columns / stretch;  // a head over all lanes: their columns one after the other
  on_all([&](int w) {
    std::vector<float> wide(stretch);
    std::vector<char> row(stretch * 4);
    char* unit = workers_[w]->weights(product);
    for (const Share& share : workers_[w]->shares(product))
      for (int64_t u = share.first; u < share.last; u++, unit += product.unit_bytes(weights_)) {
        char* tile = unit + (rows.second ? tile_bytes(weights_, product.columns) : 0);
        for (int64_t r = 0; r < kTile; r++) {
          const int64_t source = u * kTile + r - rows.first;
          if (source < 0 || source >= count) continue;
          for (int64_t s = 0; s < stretches; s++) {
            const int64_t lane = stretches > 1 ? s : weight.lane_sharded ? share.lane : 0;
            const char* from = (const char*)data + (lane * count + source) * stretch * bytes_of(dtype);
            if (dtype != weights_) {
              kernels_->widen(dtype, from, stretch, wide.data());
              kernels_->narrow(weights_, wide.data(), stretch, row.data());
              from = row.data();
            }
            if (weights_ == Dtype::f32) {
              place_row(weights_, r, s * stretch, (const float*)from, stretch, (float*)tile);
            } else {
              place_row(weights_, r, s * stretch, (const uint16_t*)from, stretch, (uint16_t*)tile);
            }
          }
        }
      }
  });
}

void Decoder::pack(int number, const void* data, int64_t count, Dtype dtype) {
  if (number < 0 || number >= (int)plan_.weights.size())
    throw std::runtime_error("the model has no weight " + std::to_string(number));
  const plan::Weight& weight = plan_.weights[number];
  const int64_t lanes = weight.lane_sharded ? plan_.lanes : 1, each = weight.elements();
  if (count != lanes * each)
    throw std::runtime_error("weight " + std::to_string(number) + " has " + std::to_string(count) +
                             " elements, the model's has " + std::to_string(lanes * each));
  if (!weight.is_matrix())
    for (int64_t lane = 0; lane < lanes; lane++)
      kernels_->widen(dtype, (const char*)data + lane * each * bytes_of(dtype), each,
                      small_.data() + weight.offset + lane * weight.stride);
  for (const Rows& rows : places_[number]) pack_rows(rows, weight, data, dtype);
  if (number == plan_.embedding) {
    embedding_dtype_ = dtype;
    if (number != plan_.head.weight || dtype != weights_) {
      const int64_t bytes = each * bytes_of(dtype);
      embedding_ = Region(bytes);
      on_all([&](int w) {
        const int64_t n = threads(), first = bytes * w / n, last = bytes * (w + 1) / n;
        std::memcpy(embedding_.data + first, (const char*)data + first, last - first);
      });
    }
  }
}

int64_t Decoder::packed_bytes() const {
  int64_t bytes = embedding_.bytes;
  for (const auto& worker : workers_) bytes += worker->packed_bytes();
  return bytes;
}

// Widens a row of the embedding table to float32.
void Decoder::embed(int32_t token, float* row) const {
  const int64_t d = plan_.hidden_size;
  if (embedding_.data) {
    kernels_->widen(embedding_dtype_, embedding_.data + token * d * bytes_of(embedding_dtype_), d, row);
    return;
  }
  const int64_t tile = token / kTile, r = token % kTile;  // the head's rows are the table
  const char* data = nullptr;
  for (const auto& worker : workers_)
    for (const Share& share : worker->shares(head_))
      if (share.first <= tile && tile < share.last)
        data = worker->weights(head_) + (tile - share.first) * head_.unit_bytes(weights_);
  for (int64_t k = 0; k < d; k++)
    kernels_->widen(weights_, data + place(weights_, r, k) * bytes_of(weights_), 1, row + k);
}

}  // namespace laneformer
