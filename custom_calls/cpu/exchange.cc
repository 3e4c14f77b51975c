// The schedule's sums and events; exchange.h says what for.
#include "exchange.h"

#include <algorithm>
#include <cstring>

#include "worker.h"

namespace laneformer {

LaneExchange::LaneExchange(Worker& worker) : w_(worker) {
  const int64_t d = w_.plan.hidden_size;
  size_t apart = 0;
  for (const auto& events : w_.plan.events)
    for (const plan::Event& event : events) apart = std::max(apart, event.apart.size());
  total_.resize(kBlock * d);
  share_.resize(w_.plan.lanes * d);
  added_.resize(std::max<size_t>(apart + 1, w_.plan.lanes));
  factors_.resize(added_.size());
  module_points_.resize(w_.plan.num_modules());
  if (!w_.state.mail) return;
  received_.resize(w_.plan.sums.size() * kBlock * d);
  has_.resize(w_.plan.sums.size());
}

void LaneExchange::begin_pass() {
  std::fill(has_.begin(), has_.end(), 0);
  pass_tags_ = tags_;
  tags_ += (uint32_t)w_.plan.sums.size() + 1;
}

void LaneExchange::begin_module(int module) {
  for (size_t i = 0; i < w_.plan.sums.size(); i++)
    if (w_.plan.sums[i].stream_mean && w_.plan.sums[i].complete_at == module) keep_streams((int)i);
}

void LaneExchange::end_module(int module) {
  module_points_[module] = w_.points.arrive();
  if (w_.state.mail) send(module);
}

float* LaneExchange::message(int position) { return total_.data() + position * w_.plan.hidden_size; }

uint32_t LaneExchange::head_tag() const { return pass_tags_ + (uint32_t)w_.plan.sums.size(); }

float* LaneExchange::kept_stream(int payload, int lane, int position) const {
  return w_.state.streams.floats() +
         (((int64_t)payload * w_.plan.lanes + lane) * kBlock + position) * w_.plan.hidden_size;
}

// Copies the streams, before this module's events change them, for a sum that includes their mean.
void LaneExchange::keep_streams(int payload) {
  for (int lane = w_.first_lane; lane < w_.last_lane; lane++)
    if (w_.owns(lane))
      for (int p = 0; p < w_.positions; p++)
        std::memcpy(kept_stream(payload, lane, p), w_.stream(lane, p), w_.plan.hidden_size * sizeof(float));
}

// A lane's share of a sum: its weighted outputs and, if the sum includes the mean of the streams, its part of that.
// Written to `space`, unless the share is one output, which is returned itself.
const float* LaneExchange::share_of(int payload, int lane, int position, float* space) {
  const plan::Sum& sum = w_.plan.sums[payload];
  if (sum.parts.size() == 1 && sum.parts[0].weight == 1.0f && !sum.stream_mean)
    return w_.output(sum.parts[0].module, lane, position);
  std::fill_n(space, sum.width, 0.0f);
  for (const plan::Part& part : sum.parts)
    w_.kernels.add_scaled(space, w_.output(part.module, lane, position), part.weight, sum.width);
  if (sum.stream_mean) {
    const float* kept = kept_stream(payload, lane, position);
    for (int i = 0; i < sum.width; i++) space[i] += kept[i] / (float)w_.plan.lanes;
  }
  return space;
}

// Exchange by message: sends this lane's shares of the sums that the module's output completes.
void LaneExchange::send(int module) {
  for (size_t i = 0; i < w_.plan.sums.size(); i++) {
    if (w_.plan.sums[i].complete_at != module) continue;
    for (int p = 0; p < w_.positions; p++)
      std::memcpy(message(p), share_of((int)i, w_.index, p, share_.data()), w_.plan.sums[i].width * sizeof(float));
    post(pass_tags_ + (uint32_t)i, w_.positions * (int64_t)w_.plan.hidden_size);
  }
}

// The sum over all lanes of a payload, after its norm if it has one: [B][hidden_size].
const float* LaneExchange::total(int payload) {
  const int width = w_.plan.sums[payload].width;
  const std::optional<plan::Norm>& norm = w_.plan.module(w_.plan.sums[payload].complete_at).sum_norm;
  const auto finish = [&](float* sum) {
    if (norm) w_.kernels.rms_norm(sum, w_.state.small(norm->gain, 0), norm->eps, width, sum);
  };
  if (!w_.state.mail) {
    w_.points.wait_for(module_points_[w_.plan.sums[payload].complete_at]);
    std::fill_n(factors_.begin(), w_.plan.lanes, 1.0f);
    for (int p = 0; p < w_.positions; p++) {
      float* sum = total_.data() + p * w_.plan.hidden_size;
      for (int lane = 0; lane < w_.plan.lanes; lane++)
        added_[lane] = share_of(payload, lane, p, share_.data() + lane * w_.plan.hidden_size);
      w_.kernels.add_parts(added_.data(), factors_.data(), w_.plan.lanes, false, width, sum);
      finish(sum);
    }
    return total_.data();
  }
  float* sum = received_.data() + (int64_t)payload * kBlock * w_.plan.hidden_size;
  if (has_[payload]) return sum;  // an earlier event has received it
  has_[payload] = 1;
  for (int lane = 0; lane < w_.plan.lanes; lane++) {
    if (lane != w_.index) fetch(lane, pass_tags_ + (uint32_t)payload, w_.positions * (int64_t)w_.plan.hidden_size);
    for (int p = 0; p < w_.positions; p++) {
      const float* share = lane == w_.index ? share_of(payload, lane, p, share_.data()) : message(p);
      if (lane == 0) {
        std::memcpy(sum + p * w_.plan.hidden_size, share, width * sizeof(float));
      } else {
        w_.kernels.add_scaled(sum + p * w_.plan.hidden_size, share, 1.0f, width);
      }
    }
  }
  for (int p = 0; p < w_.positions; p++) finish(sum + p * w_.plan.hidden_size);
  return sum;
}

void LaneExchange::post(uint32_t tag, int64_t floats) {
  w_.points.delay();
  w_.state.mail->push(w_.index, tag, total_.data(), floats);
}

void LaneExchange::fetch(int from, uint32_t tag, int64_t floats) {
  const int64_t began = now_ns(), limit = w_.state.options.timeout_ms * 1'000'000LL;
  const bool came = w_.state.mail->pull(w_.index, from, tag, total_.data(), floats, [&](int64_t spins) {
    if (spins < 64) {
      pause();
      return true;
    }
    std::this_thread::yield();
    return !w_.state.stopped.load(std::memory_order_relaxed) && now_ns() - began < limit;
  });
  if (!came) {
    w_.state.fail("lane " + std::to_string(from) + " sent nothing to lane " + std::to_string(w_.index) + " within " +
                  std::to_string(w_.state.options.timeout_ms) + " ms");
    throw Stopped();
  }
  w_.points.delay();
}

void LaneExchange::apply(int time) {
  const int64_t began = w_.trace.clock(), d = w_.plan.hidden_size;
  for (const plan::Event& event : w_.plan.events[time]) {
    if (event.payload < 0) {
      if (w_.state.lanes_shared) w_.points.wait_for(module_points_[event.module]);
      for (int lane = w_.first_lane; lane < w_.last_lane; lane++)
        for (int p = 0; p < w_.positions; p++)
          w_.kernels.add_scaled(w_.stream(lane, p), w_.output(event.module, lane, p), event.weight, d);
      continue;
    }
    const plan::Sum& payload = w_.plan.sums[event.payload];
    const float* sums = total(event.payload);
    for (int lane = w_.first_lane; lane < w_.last_lane; lane++)
      for (int p = 0; p < w_.positions; p++) {
        const float* sum = sums + p * d;
        if (w_.streams.count()) {
          w_.streams.join(w_.kernels, lane, p, sum);
        } else if (payload.stream_mean) {
          std::memcpy(w_.stream(lane, p), sum, d * sizeof(float));
        } else if (event.apart.empty()) {
          w_.kernels.add_scaled(w_.stream(lane, p), sum, 1.0f, payload.width);
        } else {
          added_[0] = sum;
          for (size_t i = 0; i < event.apart.size(); i++) {
            added_[i + 1] = w_.output(event.apart[i].module, lane, p);
            factors_[i + 1] = -event.apart[i].weight;
          }
          w_.kernels.add_parts(added_.data(), factors_.data(), (int)event.apart.size() + 1, true, payload.width,
                               w_.stream(lane, p));
        }
      }
  }
  w_.trace.mark(kExchange, time / 2, began);
}

}  // namespace laneformer
