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
  if (d_.head_mixer) run(*d_.head_mixer, m_.num_modules() - 1);
  const int64_t d = m_.hidden_size, all = m_.lanes * d;
  const int rows = pass_->rows;
  float* finals = d_.finals.floats();  // [rows][lanes][hidden_size]
  for (int lane = first_lane_; lane < last_lane_; lane++) {
    if (!owns(lane)) continue;
    each_row([&](const Run& run, int i) {
      const float* x = stream(lane, run.place_of(i));
      float* final = finals + (run.row + i) * all + lane * d;
      if (m_.head.norm_of_sum) {
        std::memcpy(final, x, d * sizeof(float));
      } else {
        k_.rms_norm(x, d_.small(m_.head.norm.gain, lane), m_.head.norm.eps, d, final);
      }
    });
  }
  if (d_.mail && m_.head.kind != plan::HeadKind::vocab_parallel) {
    const uint32_t tag = token_tags_ + (uint32_t)m_.sums.size();
    for (int row = 0; row < rows; row++) std::memcpy(message(row), finals + row * all + index_ * d, d * sizeof(float));
    post(tag, rows * d);
    finals_.resize(rows * all);
    for (int lane = 0; lane < m_.lanes; lane++) {
      if (lane != index_) fetch(lane, tag, rows * d);
      for (int row = 0; row < rows; row++)
        std::memcpy(finals_.data() + row * all + lane * d,
                    lane == index_ ? finals + row * all + lane * d : message(row), d * sizeof(float));
    }
    finals = finals_.data();
  } else {
    meet();
  }
  mark(kExchange, m_.num_layers(), began);

  began = clock();
  Vectors x{finals, all, rows};
  if (m_.head.kind == plan::HeadKind::replicate) {
    x = {total_.data(), d, rows};
    for (int row = 0; row < rows; row++) {
      float* total = message(row);
      std::fill_n(total, d, 0.0f);
      for (int lane = 0; lane < m_.lanes; lane++) k_.add_scaled(total, finals + row * all + lane * d, 1.0f, d);
      if (m_.head.norm_of_sum) {
        k_.rms_norm(total, d_.small(m_.head.norm.gain, 0), m_.head.norm.eps, d, total);
      } else {
        for (int64_t i = 0; i < d; i++) total[i] /= (float)m_.lanes;
      }
    }
  }
  int64_t tile = 0;
  for (const Share& share : shares(d_.head)) {
    const int64_t units = share.last - share.first, ldy = units * kTile, begin = share.first * kTile;
    const int64_t count = std::min(d_.head.rows, share.last * kTile) - begin;
    tile = times(d_.head, share, tile, {x.x + share.matrix * d, x.stride, rows}, y_.data(), ldy);
    for (int row = 0; row < rows; row++)
      std::memcpy(d_.logits.floats() + row * m_.vocab_size + share.matrix * d_.head.rows + begin, y_.data() + row * ldy,
                  count * sizeof(float));
  }
  mark(kHead, m_.num_layers(), began);
}

}  // namespace laneformer
