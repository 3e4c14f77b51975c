// Several residual streams: what a module reads of them (op GatherStreams, which Worker::module runs), and how its
// output joins them (`join`, which Worker::apply calls). laneformer/blocks/streams.py has the equations.
//
// Invariant: all lanes have the same streams, and each worker keeps those of its lanes and computes the same numbers
// for them. So workers share out only the product that makes MIXTURE, and meet only after it.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../worker.h"

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

}  // namespace

// Computes MIXTURE, then each lane's stream from it.
void Worker::run(const Mixer& op, int module) {
  run(op.rows, module);
  meet_if_shared();
  for (int lane = first_lane_; lane < last_lane_; lane++) {
    int64_t stride;
    const float* rows = target(plan::Value::mixture, module, lane, &stride);
    for (int p = 0; p < positions_; p++) gather(op.op, lane, p, rows + p * stride);
  }
}

// Writes the stream that the module reads at block position p, and the factors with which the output joins the streams,
// if MIXTURE has rows for them (it has none in the head). parts: [streams][rows], added up to MIXTURE.
void Worker::gather(const plan::GatherStreams& op, int lane, int p, const float* parts) {
  const int64_t d = m_.hidden_size, count = op.mix.weight.size;
  const int m = op.count;
  std::copy_n(parts, count, rows_.begin());
  for (int s = 1; s < m; s++)
    for (int64_t i = 0; i < count; i++) rows_[i] += parts[s * count + i];
  const float* const rows = rows_.data();
  const float *factors = d_.small(op.factors, lane), *offsets = d_.small(op.offsets, lane);
  float* const to = stream(lane, p);
  std::fill_n(to, d, 0.0f);
  for (int s = 0; s < m; s++)
    k_.add_scaled(to, streams(lane, p) + s * d, sigmoid(rows[s] * factors[0] + offsets[s]) + op.eps, d);
  if (count == m) return;
  float *const post = joins(lane, p), *const between = post + m;
  for (int s = 0; s < m; s++) post[s] = 2 * sigmoid(rows[m + s] * factors[1] + offsets[m + s]);
  for (int i = 0; i < m * m; i++) between[i] = rows[2 * m + i] * factors[2] + offsets[2 * m + i];
  balance(between, m, op.iterations, op.eps);
}

// Replaces each stream by its share of the output plus its shares of all streams.
void Worker::join(int lane, int p, const float* output) {
  const int64_t d = m_.hidden_size;
  const int m = m_.streams();
  const float *const post = joins(lane, p), *const between = post + m;
  float* const x = streams(lane, p);
  for (int to = 0; to < m; to++) {
    float* const sum = joined_.data() + to * d;
    std::fill_n(sum, d, 0.0f);
    for (int from = 0; from < m; from++) k_.add_scaled(sum, x + from * d, between[from * m + to], d);
    k_.add_scaled(sum, output, post[to], d);
  }
  std::memcpy(x, joined_.data(), m * d * sizeof(float));
}

}  // namespace laneformer
