// Op Product: dense and block-diagonal ones here, those with experts in experts.cc.
#include "product.h"

#include <cstring>

#include "../../common/checks.h"
#include "../products/prepare.h"
#include "../worker.h"

namespace laneformer {

namespace {

void run_dense(Worker& w, const Product& product, int module) {
  int64_t tile = 0;
  for (const Share& share : w.weights.shares(product)) {
    const int64_t units = share.last - share.first, first = share.first * kTile;
    int64_t stride;
    const int lane = share.matrix;
    const Vectors x = w.products.vectors_of(product, lane);
    float* const y = w.target(product.writes, module, lane, &stride) + first;
    if (product.gated) {
      float* const tiles = w.products.results();
      const int64_t ldy = 2 * kTile * units;
      tile = w.products.multiply(product, share, tile, x, tiles, ldy);
      w.products.add_biases(product, lane, share, w.positions, tiles, ldy);
      for (int p = 0; p < w.positions; p++) w.products.activate(product, units, tiles + p * ldy, y + p * stride);
      continue;
    }
    tile = w.products.multiply(product, share, tile, x, y, stride);
    w.products.add_biases(product, lane, share, w.positions, y, stride);
    for (int p = 0; p < w.positions && product.activation != Activation::kNone; p++)
      w.products.activate(product, units, y + p * stride, y + p * stride);
  }
}

// A block's rows may end within a tile, and the next block's rows follow them in the result, so padding rows are not
// copied.
void run_blocks(Worker& w, const Product& product, int module) {
  int64_t tile = 0, stride;
  for (const Share& share : w.weights.shares(product)) {
    const int64_t first = share.first * kTile, last = std::min(product.rows, share.last * kTile);
    const int64_t ldy = (share.last - share.first) * kTile;
    const int lane = share.matrix / product.blocks, block = share.matrix % product.blocks;
    tile = w.products.multiply(product, share, tile, w.products.vectors_of(product, lane, block), w.products.results(),
                               ldy);
    float* const to = w.target(product.writes, module, lane, &stride) + block * product.rows + first;
    for (int p = 0; p < w.positions; p++)
      std::memcpy(to + p * stride, w.products.results() + p * ldy, (last - first) * sizeof(float));
  }
}

class ProductOp final : public Op {
 public:
  explicit ProductOp(Product product) : product_(std::move(product)) {}
  std::vector<Product*> products() override { return {&product_}; }
  void run(Worker& w, int module) const override { run_product(w, product_, module); }

 private:
  Product product_;
};

}  // namespace

void run_product(Worker& w, const Product& product, int module) {
  product.blocks ? run_blocks(w, product, module) : run_dense(w, product, module);
}

std::unique_ptr<Op> make_op(const plan::Product& op, Setup& setup) {
  return op.chosen ? make_experts(op, setup) : std::make_unique<ProductOp>(prepare_product(op, setup));
}

namespace plan {

void check(const Product& product, Checks& checks) {
  const std::vector<Matrix>& matrices = product.matrices;
  require(!matrices.empty(), "a product without matrices");
  if (product.reads == Value::stream) checks.reads_stream();
  const int64_t experts = product.chosen ? matrices[0].weight.experts : product.blocks ? product.blocks->count : 0;
  if (product.blocks) {
    require(product.blocks->count <= kMostExperts, "too many blocks");
    require(columns(product) <= product.blocks->step, "the blocks of a product overlap in what they read");
    require(!product.chosen && !product.gated && !product.norm && product.activation == Activation::kNone,
            "a product of blocks is gated, normed or of experts");
    for (const Matrix& matrix : matrices) require(!matrix.bias, "a product of blocks has a bias");
  }
  if (product.chosen) {
    require(checks.channels_of(Value::routes) == product.chosen->used, "a product uses another number of experts");
    require(experts == checks.experts, "a product has other experts than its router");
  }
  for (const Matrix& matrix : matrices) {
    checks.matrix(matrix.weight, "a product's weight", experts);
    require(matrix.weight.columns == columns(product), "matrices of one product differ in columns");
    if (matrix.bias) checks.vector(*matrix.bias, matrix.weight.size, "a bias", experts);
  }
  checks.norm(product.norm, columns(product));
  require(!product.gated || (matrices.size() == 2 && matrices[0].weight.size == matrices[1].weight.size),
          "a gated product needs two equal matrices");
  require(product.gated || (!product.limit && product.up_offset == 0), "only a gated product has limits");
  const int64_t read =
      product.blocks ? product.blocks->count * product.blocks->step : columns(product) * read_experts(product);
  require(product.reads != Value::routes && checks.channels_of(product.reads) == read,
          "a product has other columns than the value that it reads");
  require(product.reads != Value::attended || columns(product) % checks.attended_heads == 0,
          "a product reads a part of a head's result");
  for (const Value value : {Value::stream, Value::attended, Value::routes, Value::streams, Value::mixture})
    require(product.writes != value, "a product writes what it must not");
  const int64_t written = channels(product) * written_experts(product) * blocks(product);
  require(product.writes != Value::output || written == checks.plan.hidden_size,
          "a module's output has another size than the stream");
  checks.channels_of(product.writes) = written;
}

}  // namespace plan

}  // namespace laneformer
