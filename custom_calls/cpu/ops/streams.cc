// Several residual streams: op GatherStreams, which computes what a module reads of them, and the streams of a worker
// (streams.h).
#include "streams.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../../common/checks.h"
#include "../products/prepare.h"
#include "../worker.h"
#include "product.h"

namespace laneformer {

namespace {

float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }

// Turns a matrix [m][m] of logits into one whose rows and columns sum to about 1 (Sinkhorn), in the steps of the
// published model.
void balance(float* x, int m, int iterations, float eps) {
  const auto divide = [&](float* first, int step, float more) {  // a row, or a column, by its sum and `more`
    float sum = more;
    for (int i = 0; i < m; i++) sum += first[i * step];
    for (int i = 0; i < m; i++) first[i * step] /= sum;
  };
  for (float* row = x; row < x + m * m; row += m) {
    const float largest = *std::max_element(row, row + m);
    for (int i = 0; i < m; i++) row[i] = std::exp(row[i] - largest);
    divide(row, 1, 0);
    for (int i = 0; i < m; i++) row[i] += eps;
  }
  for (int n = 0; n < iterations; n++) {
    for (int i = 0; i < m && n > 0; i++) divide(x + i * m, 1, eps);
    for (int i = 0; i < m; i++) divide(x + i, m, eps);
  }
}

class GatherStreamsOp final : public Op {
 public:
  GatherStreamsOp(const plan::GatherStreams& op, const Setup& setup);

  std::vector<Product*> products() override { return {&rows_}; }
  void scratch(Arena& own, Arena&) const override { own.floats(op_.mix.weight.size); }
  void run(Worker& w, int module) const override;

 private:
  void gather(Worker& w, int lane, int p, const float* parts, float* rows) const;

  const plan::GatherStreams op_;
  Product rows_;  // makes the rows of MIXTURE
};

// The product reads the streams over their root mean square, which is a norm without a gain. Its columns are split into
// a block for each stream, so that more workers share its few rows; `gather` adds the blocks.
GatherStreamsOp::GatherStreamsOp(const plan::GatherStreams& op, const Setup& setup)
    : op_(op), rows_(prepare_unstreamed(op.mix, plan::Value::streams, plan::Value::mixture, {}, setup)) {
  const int count = (int)op.count;
  rows_.blocks = count;
  rows_.matrices *= count;
  rows_.columns /= count;
  rows_.block_step = rows_.columns;
  rows_.normed = true;
  rows_.norm.eps = op.norm_eps;
  setup.state.hold(plan::Value::mixture, count * rows_.rows);
}

// Computes MIXTURE, then each lane's stream from it.
void GatherStreamsOp::run(Worker& w, int module) const {
  float* const rows = w.arena().floats(op_.mix.weight.size);
  run_product(w, rows_, module);
  w.barrier_if_shared();
  for (int lane = w.first_lane; lane < w.last_lane; lane++)
    for (int p = 0; p < w.positions; p++) gather(w, lane, p, w.state.of(plan::Value::mixture).row(lane, p), rows);
}

// Writes the stream that the module reads at block position p, and the factors with which the output joins the streams,
// if MIXTURE has rows for them (it has none in the head). parts: [streams][rows], added up to `rows`.
void GatherStreamsOp::gather(Worker& w, int lane, int p, const float* parts, float* rows) const {
  const int64_t d = w.plan.hidden_size, count = op_.mix.weight.size;
  const int m = (int)op_.count;
  std::copy_n(parts, count, rows);
  for (int s = 1; s < m; s++)
    for (int64_t i = 0; i < count; i++) rows[i] += parts[s * count + i];
  const float *factors = w.state.small(op_.factors, lane), *offsets = w.state.small(op_.offsets, lane);
  float* const to = w.stream(lane, p);
  std::fill_n(to, d, 0.0f);
  for (int s = 0; s < m; s++)
    w.kernels.add_scaled(to, w.streams.of(lane, p) + s * d, sigmoid(rows[s] * factors[0] + offsets[s]) + op_.eps, d);
  if (count == m) return;
  float *const post = w.streams.joins(lane, p), *const between = post + m;
  for (int s = 0; s < m; s++) post[s] = 2 * sigmoid(rows[m + s] * factors[1] + offsets[m + s]);
  for (int i = 0; i < m * m; i++) between[i] = rows[2 * m + i] * factors[2] + offsets[2 * m + i];
  balance(between, m, op_.iterations, op_.eps);
}

}  // namespace

ResidualStreams::ResidualStreams(int count, int64_t hidden_size, int first_lane, int lanes)
    : count_(count),
      hidden_size_(hidden_size),
      first_lane_(first_lane),
      streams_((int64_t)lanes * kBlock * count * hidden_size),
      joins_((int64_t)lanes * kBlock * count * (count + 1)),
      joined_(count * hidden_size) {}

int64_t ResidualStreams::place(int lane, int p) const { return (int64_t)(lane - first_lane_) * kBlock + p; }

void ResidualStreams::embed(int lane, int p, const float* row) {
  for (int s = 0; s < count_; s++) std::memcpy(of(lane, p) + s * hidden_size_, row, hidden_size_ * sizeof(float));
}

void ResidualStreams::join(const Kernels& kernels, int lane, int p, const float* output) {
  const int64_t d = hidden_size_;
  const float *const post = joins(lane, p), *const between = post + count_;
  float* const x = of(lane, p);
  for (int to = 0; to < count_; to++) {
    float* const sum = joined_.data() + to * d;
    std::fill_n(sum, d, 0.0f);
    for (int from = 0; from < count_; from++) kernels.add_scaled(sum, x + from * d, between[from * count_ + to], d);
    kernels.add_scaled(sum, output, post[to], d);
  }
  std::memcpy(x, joined_.data(), count_ * d * sizeof(float));
}

std::unique_ptr<Op> make_op(const plan::GatherStreams& op, Setup& setup) {
  return std::make_unique<GatherStreamsOp>(op, setup);
}

namespace plan {

void check(const GatherStreams& op, Checks& checks) {
  const bool of_head = checks.of_head();
  const int64_t count = op.count, rows = of_head ? count : 2 * count + count * count, d = checks.plan.hidden_size;
  require(count == checks.plan.streams(), "a mixture is of another number of streams");
  checks.matrix(op.mix.weight, "a mixture");
  require(op.mix.weight.size == rows && op.mix.weight.columns == count * d && !op.mix.bias,
          "a mixture has another shape than its streams");
  checks.vector(op.factors, of_head ? 1 : 3, "factors");
  checks.vector(op.offsets, rows, "offsets");
  require(checks.channels_of(Value::stream) == 0,
          "modules begin with a mixture of streams if the head does, and have no other");
  checks.channels_of(Value::stream) = d;
}

}  // namespace plan

}  // namespace laneformer
