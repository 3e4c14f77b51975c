// Logits of a pass's rows from the streams after the last module. Worker::step calls `head` if the pass has rows. The
// lanes' normed streams are collected in DecodeState::finals, or from messages. Then each worker computes its share of
// the vocabulary, which is also its part in sample.cc.
//
// Invariant: the head is a product like any other, so a row's logits do not depend on other rows. Where lanes are
// added, they are added in their order.
#include <algorithm>
#include <cstring>

#include "worker.h"

namespace laneformer {

void Worker::head() {
  int64_t began = clock();
  if (state.head_gather) state.head_gather->run(*this, plan.num_modules() - 1);
  const int64_t d = plan.hidden_size, all = plan.lanes * d;
  const int rows = pass->rows;
  float* finals = state.finals.floats();  // [rows][lanes][hidden_size]
  for (int lane = first_lane; lane < last_lane; lane++) {
    if (!owns(lane)) continue;
    each_row([&](const Run& run, int i) {
      const float* x = stream(lane, run.place_of(i));
      float* final = finals + (run.row + i) * all + lane * d;
      if (plan.head.norm_of_sum) {
        std::memcpy(final, x, d * sizeof(float));
      } else {
        kernels.rms_norm(x, state.small(plan.head.norm.gain, lane), plan.head.norm.eps, d, final);
      }
    });
  }
  if (state.mail && plan.head.kind != plan::HeadKind::vocab_parallel) {
    const uint32_t tag = token_tags_ + (uint32_t)plan.sums.size();
    for (int row = 0; row < rows; row++) std::memcpy(message(row), finals + row * all + index * d, d * sizeof(float));
    post(tag, rows * d);
    finals_.resize(rows * all);
    for (int lane = 0; lane < plan.lanes; lane++) {
      if (lane != index) fetch(lane, tag, rows * d);
      for (int row = 0; row < rows; row++)
        std::memcpy(finals_.data() + row * all + lane * d, lane == index ? finals + row * all + lane * d : message(row),
                    d * sizeof(float));
    }
    finals = finals_.data();
  } else {
    barrier();
  }
  mark(kExchange, plan.num_layers(), began);

  began = clock();
  Vectors x{finals, all, rows};
  if (plan.head.kind == plan::HeadKind::replicate) {
    x = {total_.data(), d, rows};
    for (int row = 0; row < rows; row++) {
      float* total = message(row);
      std::fill_n(total, d, 0.0f);
      for (int lane = 0; lane < plan.lanes; lane++) kernels.add_scaled(total, finals + row * all + lane * d, 1.0f, d);
      if (plan.head.norm_of_sum) {
        kernels.rms_norm(total, state.small(plan.head.norm.gain, 0), plan.head.norm.eps, d, total);
      } else {
        for (int64_t i = 0; i < d; i++) total[i] /= (float)plan.lanes;
      }
    }
  }
  int64_t tile = 0;
  for (const Share& share : shares(state.head)) {
    const int64_t units = share.last - share.first, ldy = units * kTile, begin = share.first * kTile;
    const int64_t count = std::min(state.head.rows, share.last * kTile) - begin;
    tile = multiply(state.head, share, tile, {x.x + share.matrix * d, x.stride, rows}, y_.data(), ldy);
    for (int row = 0; row < rows; row++)
      std::memcpy(state.logits.floats() + row * plan.vocab_size + share.matrix * state.head.rows + begin,
                  y_.data() + row * ldy, count * sizeof(float));
  }
  mark(kHead, plan.num_layers(), began);
}

}  // namespace laneformer
