// Products of the plan as workers run them; prepare.h says what for.
#include "prepare.h"

#include <stdexcept>

#include "../state.h"

namespace laneformer {

namespace {

Product prepare(const plan::Product& op, const Setup& setup, Dtype dtype, Activations activations) {
  Product product{};
  product.name = op.name;
  product.matrices = (int)setup.state.plan.lanes;
  product.gated = op.gated;
  product.activation = op.activation;
  product.limit = op.limit;
  product.up_offset = op.up_offset;
  product.rows = plan::channels(op);
  product.columns = plan::columns(op);
  product.reads = op.reads;
  product.writes = op.writes;
  if (op.reads == plan::Value::attended) product.attention = setup.attention;
  product.normed = op.norm.has_value();
  if (product.normed) product.norm = *op.norm;
  product.dtype = dtype;
  product.activations = activations;
  if (op.chosen) {
    product.experts = (int)op.matrices[0].weight.experts;
    product.used = op.chosen->used;
    product.summed = op.chosen->summed;
    product.matrices *= product.experts;
  }
  if (op.blocks) {
    product.blocks = op.blocks->count;
    product.block_step = op.blocks->step;
    product.matrices *= product.blocks;
  }
  int64_t first = 0;
  for (const plan::Matrix& matrix : op.matrices) {
    product.parts.push_back({matrix.weight.number, first});
    if (matrix.bias) product.biases.push_back({*matrix.bias, first});
    first += matrix.weight.size;
  }
  const auto beside = product.summed ? op.reads : op.writes;
  if (product.experts && (beside != plan::Value::hidden || (product.summed && product.activation != Activation::kNone)))
    throw std::runtime_error("the CPU kernel supports experts only as two products through HIDDEN: use backend xla");
  if (product.normed && product.summed)
    throw std::runtime_error("the CPU kernel supports no norm between the two products of experts: use backend xla");
  setup.state.hold(product.writes, product.experts && !product.summed ? product.used * product.written_step()
                                   : product.blocks                   ? product.blocks * product.rows
                                                                      : product.rows);
  return product;
}

}  // namespace

Product prepare_product(const plan::Product& op, const Setup& setup) {
  return prepare(op, setup, setup.state.weights, setup.state.activations);
}

Product prepare_unstreamed(const plan::Matrix& matrix, plan::Value reads, plan::Value writes,
                           const std::optional<plan::Norm>& norm, const Setup& setup) {
  plan::Product op{};
  op.matrices = {matrix};
  op.reads = reads;
  op.writes = writes;
  op.norm = norm;
  Product product = prepare(op, setup, Dtype::f32, Activations::exact);
  product.unstreamed = true;
  return product;
}

Product prepare_logits(const plan::Matrix& matrix, const std::optional<plan::Norm>& norm, const Setup& setup) {
  return prepare_unstreamed(matrix, plan::Value::stream, plan::Value::routes, norm, setup);
}

}  // namespace laneformer
