// The multiplication of vectors by a worker's shares; multiplier.h says what for.
#include "multiplier.h"

#include <algorithm>
#include <cmath>

#include "../worker.h"

namespace laneformer {

Multiplier::Multiplier(Worker& worker) : w_(worker) {
  int64_t widest = std::max(1, w_.plan.streams()) * (int64_t)w_.plan.hidden_size, merged = 0, results = 0;
  for (const Product* product : w_.state.products) {
    for (const Share& share : w_.weights.shares(*product)) {
      const int64_t rows = kTile * (share.last - share.first);
      if (product->gated) results = std::max(results, 2 * rows * kBlock);
      if (product->added || product->blocks) results = std::max(results, rows * kBlock);
      if (product == &w_.state.head) results = std::max(results, rows * kMostRows);
    }
    if (product->experts) results = std::max(results, product->unit_tiles() * product->units() * kTile * kBlock);
    if (product->attention) merged = std::max(merged, product->columns);
    widest = std::max(widest, product->columns);
  }
  normed_.resize(kBlock * widest);
  merged_.resize(kBlock * merged);
  prepared_.resize(prepared_floats(widest, kBlock));
  results_.resize(results);
}

void Multiplier::use_pieces(const Product& product) {
  for (const Piece& piece : w_.state.forms[product.number].pieces) {
    const int64_t bytes =
        w_.state.instructions.quantized->prepared_bytes(piece.format, product.activations, piece.columns, kBlock);
    if ((int64_t)(prepared_.size() * sizeof(float)) < bytes) prepared_.resize((bytes + 3) / 4);
    if (!piece.order.empty()) gathered_.resize(std::max<size_t>(gathered_.size(), kBlock * piece.columns));
  }
}

Vectors Multiplier::vectors_of(const Product& product, int lane, int block) {
  Vectors found{merged_.data(), product.columns, w_.positions};
  if (product.reads == plan::Value::stream) {
    found = {w_.stream(lane, 0), w_.plan.hidden_size, w_.positions};
  } else if (product.reads == plan::Value::streams) {
    found = {w_.streams.of(lane, 0), (int64_t)w_.plan.streams() * w_.plan.hidden_size, w_.positions};
  } else if (product.attention) {
    product.attention->merge(w_, {lane, block, product.columns}, merged_.data());
  } else {
    found.x = w_.target(product.reads, 0, lane, &found.stride) + block * product.block_step;
  }
  if (!product.normed) return found;
  const bool of_streams = product.reads == plan::Value::streams;  // a block reads one stream; the norm is over all
  const float* gain = of_streams ? w_.state.ones.data() : w_.state.small(product.norm.gain, lane);
  const int64_t n = of_streams ? found.stride : product.columns;
  for (int p = 0; p < w_.positions; p++)
    w_.kernels.rms_norm(found.x + p * found.stride, gain, product.norm.eps, n, normed_.data() + p * n);
  return {normed_.data() + (of_streams ? block * product.block_step : 0), n, w_.positions};
}

// Writes the vectors to prepared_ in the form that the tiles of a piece read.
void Multiplier::prepare(const Product& product, const Piece& piece, const Vectors& x) {
  const int64_t n = piece.columns;
  Vectors from = x;
  if (!piece.order.empty()) {
    for (int p = 0; p < x.positions; p++)
      for (int64_t k = 0; k < n; k++) {
        const int32_t entry = piece.order[k];
        gathered_[p * n + k] = entry < 0 ? 0 : x.x[p * x.stride + entry];
      }
    from = {gathered_.data(), n, x.positions};
  }
  if (piece.tiles) {
    w_.state.instructions.quantized->prepare(piece.format, product.activations, from.x, from.stride, n, x.positions,
                                             prepared_.data());
  } else {
    w_.kernels.prepare(product.dtype, product.activations, from.x, from.stride, n, x.positions, prepared_.data());
  }
}

int64_t Multiplier::multiply(const Product& product, const Share& share, int64_t tile, const Vectors& x, float* y,
                             int64_t ldy) {
  const int64_t of = product.unit_tiles(), first = share.first * of, count_here = share.last * of - first;
  const int64_t columns = product.columns;
  const float* const prepared = prepared_.data();
  const Form& form = w_.state.forms[product.number];
  const auto plain = [&](int64_t at, int64_t count) {
    w_.kernels.product(product.dtype, product.activations, w_.weights.tile(product, tile + at), prepared, columns,
                       count, x.positions, y + at * kTile, ldy);
  };
  for (const Piece& piece : form.pieces) {
    const int64_t begin = piece.before(first), end = piece.before(first + count_here);
    const int64_t together = piece.step == 1 ? end - begin : 1;
    if (begin < end) prepare(product, piece, x);
    for (int64_t j = begin; j < end; j += together) {
      const int64_t at = piece.first + j * piece.step - first;
      if (piece.tiles) {
        w_.state.instructions.quantized->product(piece.format, product.activations, piece.of_matrix(share.matrix),
                                                 piece.count, j, together, prepared, piece.columns, x.positions,
                                                 y + at * kTile, ldy);
      } else {
        plain(at, together);
      }
    }
  }
  if (!form.pieces.empty()) return tile + count_here;
  w_.kernels.prepare(product.dtype, product.activations, x.x, x.stride, columns, x.positions, prepared_.data());
  if (form.bf12) {
    w_.kernels.product_bf12(product.activations, w_.weights.bf12(product, tile), prepared, columns, count_here,
                            x.positions, y, ldy);
  } else {
    plain(0, count_here);
  }
  return tile + count_here;
}

void Multiplier::add_biases(const Product& product, int lane, const Share& share, int positions, float* y,
                            int64_t ldy) const {
  const int64_t first = share.first * kTile, last = std::min(product.rows, share.last * kTile);
  for (const Product::Bias& bias : product.biases) {
    const float* values =
        w_.state.small(bias.vector, lane) + share.matrix % std::max(product.experts, 1) * bias.vector.size;
    if (product.gated) {  // tiles of gate and up rows alternate
      float* const own = y + (bias.first > 0 ? kTile : 0);
      for (int p = 0; p < positions; p++)
        for (int64_t row = first; row < last; row += kTile)
          w_.kernels.add_scaled(own + p * ldy + 2 * (row - first), values + row, 1.0f,
                                std::min<int64_t>(kTile, last - row));
      continue;
    }
    const int64_t begin = std::max(first, bias.first), end = std::min(last, bias.first + bias.vector.size);
    for (int p = 0; p < positions && begin < end; p++)
      w_.kernels.add_scaled(y + p * ldy + begin - first, values + begin - bias.first, 1.0f, end - begin);
  }
}

void Multiplier::activate(const Product& product, int64_t units, float* tiles, float* out) const {
  if (product.limit || product.up_offset != 0)
    w_.kernels.limit_gated(product.limit.value_or(INFINITY), product.up_offset, units, tiles);
  w_.kernels.activate(product.activation, product.gated, tiles, units, out);
}

}  // namespace laneformer
