// Logits of a pass's rows from the streams after the last module. Worker::step calls `compute_logits` if the pass has
// rows. The lanes' normed streams are collected in DecodeState::finals, or from messages. Then each worker computes its
// share of the vocabulary, which is also its part in sample.cc.
//
// Invariant: the head is a product like any other, so a row's logits do not depend on other rows. Where lanes are
// added, they are added in their order.
#include <algorithm>
#include <cstring>

#include "worker.h"

namespace laneformer {

void Sampler::compute_logits() {
  int64_t began = w_.trace.clock();
  if (w_.state.head_gather) w_.state.head_gather->run(w_, w_.plan.num_modules() - 1);
  const int64_t d = w_.plan.hidden_size, all = w_.plan.lanes * d;
  const int rows = w_.pass->rows;
  float* finals = w_.state.finals.floats();  // [rows][lanes][hidden_size]
  for (int lane = w_.first_lane; lane < w_.last_lane; lane++) {
    if (!w_.owns(lane)) continue;
    each_row(*w_.pass, [&](const Run& run, int i) {
      const float* x = w_.stream(lane, run.place_of(i));
      float* final = finals + (run.row + i) * all + lane * d;
      if (w_.plan.head.norm_of_sum) {
        std::memcpy(final, x, d * sizeof(float));
      } else {
        w_.kernels.rms_norm(x, w_.state.small(w_.plan.head.norm.gain, lane), w_.plan.head.norm.eps, d, final);
      }
    });
  }
  if (w_.state.mail && w_.plan.head.kind != plan::HeadKind::vocab_parallel) {
    const uint32_t tag = w_.exchange.head_tag();
    for (int row = 0; row < rows; row++)
      std::memcpy(w_.exchange.message(row), finals + row * all + w_.index * d, d * sizeof(float));
    w_.exchange.post(tag, rows * d);
    finals_.resize(rows * all);
    for (int lane = 0; lane < w_.plan.lanes; lane++) {
      if (lane != w_.index) w_.exchange.fetch(lane, tag, rows * d);
      for (int row = 0; row < rows; row++)
        std::memcpy(finals_.data() + row * all + lane * d,
                    lane == w_.index ? finals + row * all + lane * d : w_.exchange.message(row), d * sizeof(float));
    }
    finals = finals_.data();
  } else {
    w_.barrier();
  }
  w_.trace.mark(kExchange, w_.plan.num_layers(), began);

  began = w_.trace.clock();
  Vectors x{finals, all, rows};
  if (w_.plan.head.kind == plan::HeadKind::replicate) {
    x = {w_.exchange.message(0), d, rows};
    for (int row = 0; row < rows; row++) {
      float* total = w_.exchange.message(row);
      std::fill_n(total, d, 0.0f);
      for (int lane = 0; lane < w_.plan.lanes; lane++)
        w_.kernels.add_scaled(total, finals + row * all + lane * d, 1.0f, d);
      if (w_.plan.head.norm_of_sum) {
        w_.kernels.rms_norm(total, w_.state.small(w_.plan.head.norm.gain, 0), w_.plan.head.norm.eps, d, total);
      } else {
        for (int64_t i = 0; i < d; i++) total[i] /= (float)w_.plan.lanes;
      }
    }
  }
  int64_t tile = 0;
  for (const Share& share : w_.weights.shares(w_.state.head)) {
    const int64_t units = share.last - share.first, ldy = units * kTile, begin = share.first * kTile;
    const int64_t count = std::min(w_.state.head.rows, share.last * kTile) - begin;
    tile = w_.products.multiply(w_.state.head, share, tile, {x.x + share.matrix * d, x.stride, rows},
                                w_.products.results(), ldy);
    for (int row = 0; row < rows; row++) {
      float* const logits =
          w_.state.logits.floats() + row * w_.plan.vocab_size + share.matrix * w_.state.head.rows + begin;
      std::memcpy(logits, w_.products.results() + row * ldy, count * sizeof(float));
      if (const auto& cap = w_.plan.head.softcap) w_.kernels.softcap(*cap, count, logits);
    }
  }
  w_.trace.mark(kHead, w_.plan.num_layers(), began);
}

}  // namespace laneformer
