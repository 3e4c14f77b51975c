// The end of a module: the norm of its output, then the schedule, which adds each lane's own outputs and sums over the
// lanes to the streams. Worker::step calls `keep_streams`, `send` and `apply` around each module. Lanes share memory,
// or send each other messages as GPUs do (exchange.h).
//
// Invariant: a sum adds the lanes' shares in the order of the lanes, whichever worker computes it and however the
// shares arrive. So the bits are the same with shared memory and with messages.
#include <algorithm>
#include <cstring>

#include "worker.h"

namespace laneformer {

float* Worker::kept_stream(int payload, int lane, int position) const {
  return d_.streams.floats() + (((int64_t)payload * m_.lanes + lane) * kBlock + position) * m_.hidden_size;
}

// Copies the streams, before this module's events change them, for a sum that includes their mean.
void Worker::keep_streams(int payload) {
  for (int lane = first_lane_; lane < last_lane_; lane++)
    if (owns(lane))
      for (int p = 0; p < positions_; p++)
        std::memcpy(kept_stream(payload, lane, p), stream(lane, p), m_.hidden_size * sizeof(float));
}

// Norms each lane's output in place; the lane's first worker does it.
void Worker::run(const plan::OutputNorm& op, int module) {
  for (int lane = first_lane_; lane < last_lane_; lane++)
    for (int p = 0; p < positions_ && owns(lane); p++) {
      float* o = output(module, lane, p);
      k_.rms_norm(o, d_.small(op.norm.gain, lane), op.norm.eps, m_.hidden_size, o);
    }
}

// A lane's share of a sum: its weighted outputs and, if the sum includes the mean of the streams, its part of that.
// Written to `space`, unless the share is one output, which is returned itself.
const float* Worker::share_of(int payload, int lane, int position, float* space) {
  const plan::Sum& sum = m_.sums[payload];
  if (sum.parts.size() == 1 && sum.parts[0].weight == 1.0f && !sum.stream_mean)
    return output(sum.parts[0].module, lane, position);
  std::fill_n(space, sum.width, 0.0f);
  for (const plan::Part& part : sum.parts)
    k_.add_scaled(space, output(part.module, lane, position), part.weight, sum.width);
  if (sum.stream_mean) {
    const float* kept = kept_stream(payload, lane, position);
    for (int i = 0; i < sum.width; i++) space[i] += kept[i] / (float)m_.lanes;
  }
  return space;
}

// Exchange by message: sends this lane's shares of the sums that the module's output completes.
void Worker::send(int module) {
  for (size_t i = 0; i < m_.sums.size(); i++) {
    if (m_.sums[i].complete_at != module) continue;
    for (int p = 0; p < positions_; p++)
      std::memcpy(message(p), share_of((int)i, index_, p, share_.data()), m_.sums[i].width * sizeof(float));
    post(token_tags_ + (uint32_t)i, positions_ * (int64_t)m_.hidden_size);
  }
}

// The sum over all lanes of a payload, after its norm if it has one: [B][hidden_size].
const float* Worker::total(int payload) {
  const int width = m_.sums[payload].width;
  const std::optional<plan::Norm>& norm = m_.module(m_.sums[payload].complete_at).sum_norm;
  const auto finish = [&](float* sum) {
    if (norm) k_.rms_norm(sum, d_.small(norm->gain, 0), norm->eps, width, sum);
  };
  if (!d_.mail) {
    wait_for(module_points_[m_.sums[payload].complete_at]);
    std::fill_n(factors_.begin(), m_.lanes, 1.0f);
    for (int p = 0; p < positions_; p++) {
      float* sum = total_.data() + p * m_.hidden_size;
      for (int lane = 0; lane < m_.lanes; lane++)
        added_[lane] = share_of(payload, lane, p, share_.data() + lane * m_.hidden_size);
      k_.add_parts(added_.data(), factors_.data(), m_.lanes, false, width, sum);
      finish(sum);
    }
    return total_.data();
  }
  float* sum = received_.data() + (int64_t)payload * kBlock * m_.hidden_size;
  if (has_[payload]) return sum;  // an earlier event has received it
  has_[payload] = 1;
  for (int lane = 0; lane < m_.lanes; lane++) {
    if (lane != index_) fetch(lane, token_tags_ + (uint32_t)payload, positions_ * (int64_t)m_.hidden_size);
    for (int p = 0; p < positions_; p++) {
      const float* share = lane == index_ ? share_of(payload, lane, p, share_.data()) : message(p);
      if (lane == 0) {
        std::memcpy(sum + p * m_.hidden_size, share, width * sizeof(float));
      } else {
        k_.add_scaled(sum + p * m_.hidden_size, share, 1.0f, width);
      }
    }
  }
  for (int p = 0; p < positions_; p++) finish(sum + p * m_.hidden_size);
  return sum;
}

// Sends this many floats of total_ to all other lanes.
void Worker::post(uint32_t tag, int64_t floats) {
  delay();
  d_.mail->push(index_, tag, total_.data(), floats);
}

// Receives this many floats from a lane into total_. Throws Stopped after the session's timeout or another failure.
void Worker::fetch(int from, uint32_t tag, int64_t floats) {
  const int64_t began = now_ns(), limit = d_.options.timeout_ms * 1'000'000LL;
  const bool came = d_.mail->pull(index_, from, tag, total_.data(), floats, [&](int64_t spins) {
    if (spins < 64) {
      pause();
      return true;
    }
    std::this_thread::yield();
    return !d_.stopped.load(std::memory_order_relaxed) && now_ns() - began < limit;
  });
  if (!came) {
    d_.fail("lane " + std::to_string(from) + " sent nothing to lane " + std::to_string(index_) + " within " +
            std::to_string(d_.options.timeout_ms) + " ms");
    throw Stopped();
  }
  delay();
}

// Applies the events that the schedule has at this time to the streams.
void Worker::apply(int time) {
  const int64_t began = clock(), d = m_.hidden_size;
  for (const plan::Event& event : m_.events[time]) {
    if (event.payload < 0) {
      if (d_.lanes_shared) wait_for(module_points_[event.module]);
      for (int lane = first_lane_; lane < last_lane_; lane++)
        for (int p = 0; p < positions_; p++)
          k_.add_scaled(stream(lane, p), output(event.module, lane, p), event.weight, d);
      continue;
    }
    const plan::Sum& payload = m_.sums[event.payload];
    const float* sums = total(event.payload);
    for (int lane = first_lane_; lane < last_lane_; lane++)
      for (int p = 0; p < positions_; p++) {
        const float* sum = sums + p * d;
        if (m_.streams()) {
          join(lane, p, sum);
        } else if (payload.stream_mean) {
          std::memcpy(stream(lane, p), sum, d * sizeof(float));
        } else if (event.apart.empty()) {
          k_.add_scaled(stream(lane, p), sum, 1.0f, payload.width);
        } else {
          added_[0] = sum;
          for (size_t i = 0; i < event.apart.size(); i++) {
            added_[i + 1] = output(event.apart[i].module, lane, p);
            factors_[i + 1] = -event.apart[i].weight;
          }
          k_.add_parts(added_.data(), factors_.data(), (int)event.apart.size() + 1, true, payload.width,
                       stream(lane, p));
        }
      }
  }
  mark(kExchange, time / 2, began);
}

}  // namespace laneformer
