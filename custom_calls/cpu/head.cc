// Logits from the streams after the last module: each worker computes its share of the vocabulary.
#include <algorithm>
#include <cstring>

#include "worker.h"

namespace laneformer {

void Worker::head() {
  int64_t began = clock();
  const int64_t d = m_.hidden_size;
  float* finals = d_.finals.floats();
  for (int lane = first_lane_; lane < last_lane_; lane++) {
    if (!owns(lane)) continue;
    const float* x = stream(lane, positions_ - 1);
    if (m_.head.norm_of_sum) {
      std::memcpy(finals + lane * d, x, d * sizeof(float));
    } else {
      k_.rms_norm(x, d_.small(m_.head.norm.gain, lane), m_.head.norm.eps, d, finals + lane * d);
    }
  }
  if (d_.mail && m_.head.kind != plan::HeadKind::vocab_parallel) {
    const uint32_t tag = token_tags_ + (uint32_t)m_.sums.size();
    std::memcpy(message(0), finals + index_ * d, d * sizeof(float));
    post(tag, d);
    finals_.resize(m_.lanes * d);
    for (int lane = 0; lane < m_.lanes; lane++) {
      if (lane != index_) fetch(lane, tag, d);
      std::memcpy(finals_.data() + lane * d, lane == index_ ? finals + lane * d : message(0), d * sizeof(float));
    }
    finals = finals_.data();
  } else {
    meet();
  }
  mark(kExchange, m_.num_layers(), began);

  began = clock();
  int64_t tile = 0;
  const int64_t rows = d_.head.rows, columns = d_.head.columns;
  positions_ = 1;
  if (m_.head.kind == plan::HeadKind::replicate) {
    std::fill_n(total_.begin(), d, 0.0f);
    for (int lane = 0; lane < m_.lanes; lane++) k_.add_scaled(total_.data(), finals + lane * d, 1.0f, d);
    if (m_.head.norm_of_sum) {
      k_.rms_norm(total_.data(), d_.small(m_.head.norm.gain, 0), m_.head.norm.eps, d, total_.data());
    } else {
      for (int64_t i = 0; i < d; i++) total_[i] /= (float)m_.lanes;
    }
    finals = total_.data();
  }
  for (const Share& share : shares(d_.head)) {
    tile = times(d_.head, share, tile, {finals + share.matrix * d, columns, 1}, y_.data(), 0);
    const int64_t first = share.first * kTile, count = std::min(rows, share.last * kTile) - first;
    std::memcpy(d_.logits.floats() + share.matrix * rows + first, y_.data(), count * sizeof(float));
  }
  mark(kHead, m_.num_layers(), began);
}

}  // namespace laneformer
