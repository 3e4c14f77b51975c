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
  return state.streams.floats() + (((int64_t)payload * plan.lanes + lane) * kBlock + position) * plan.hidden_size;
}

// Copies the streams, before this module's events change them, for a sum that includes their mean.
void Worker::keep_streams(int payload) {
  for (int lane = first_lane; lane < last_lane; lane++)
    if (owns(lane))
      for (int p = 0; p < positions; p++)
        std::memcpy(kept_stream(payload, lane, p), stream(lane, p), plan.hidden_size * sizeof(float));
}

// A lane's share of a sum: its weighted outputs and, if the sum includes the mean of the streams, its part of that.
// Written to `space`, unless the share is one output, which is returned itself.
const float* Worker::share_of(int payload, int lane, int position, float* space) {
  const plan::Sum& sum = plan.sums[payload];
  if (sum.parts.size() == 1 && sum.parts[0].weight == 1.0f && !sum.stream_mean)
    return output(sum.parts[0].module, lane, position);
  std::fill_n(space, sum.width, 0.0f);
  for (const plan::Part& part : sum.parts)
    kernels.add_scaled(space, output(part.module, lane, position), part.weight, sum.width);
  if (sum.stream_mean) {
    const float* kept = kept_stream(payload, lane, position);
    for (int i = 0; i < sum.width; i++) space[i] += kept[i] / (float)plan.lanes;
  }
  return space;
}

// Exchange by message: sends this lane's shares of the sums that the module's output completes.
void Worker::send(int module) {
  for (size_t i = 0; i < plan.sums.size(); i++) {
    if (plan.sums[i].complete_at != module) continue;
    for (int p = 0; p < positions; p++)
      std::memcpy(message(p), share_of((int)i, index, p, share_.data()), plan.sums[i].width * sizeof(float));
    post(token_tags_ + (uint32_t)i, positions * (int64_t)plan.hidden_size);
  }
}

// The sum over all lanes of a payload, after its norm if it has one: [B][hidden_size].
const float* Worker::total(int payload) {
  const int width = plan.sums[payload].width;
  const std::optional<plan::Norm>& norm = plan.module(plan.sums[payload].complete_at).sum_norm;
  const auto finish = [&](float* sum) {
    if (norm) kernels.rms_norm(sum, state.small(norm->gain, 0), norm->eps, width, sum);
  };
  if (!state.mail) {
    wait_for(module_points_[plan.sums[payload].complete_at]);
    std::fill_n(factors_.begin(), plan.lanes, 1.0f);
    for (int p = 0; p < positions; p++) {
      float* sum = total_.data() + p * plan.hidden_size;
      for (int lane = 0; lane < plan.lanes; lane++)
        added_[lane] = share_of(payload, lane, p, share_.data() + lane * plan.hidden_size);
      kernels.add_parts(added_.data(), factors_.data(), plan.lanes, false, width, sum);
      finish(sum);
    }
    return total_.data();
  }
  float* sum = received_.data() + (int64_t)payload * kBlock * plan.hidden_size;
  if (has_[payload]) return sum;  // an earlier event has received it
  has_[payload] = 1;
  for (int lane = 0; lane < plan.lanes; lane++) {
    if (lane != index) fetch(lane, token_tags_ + (uint32_t)payload, positions * (int64_t)plan.hidden_size);
    for (int p = 0; p < positions; p++) {
      const float* share = lane == index ? share_of(payload, lane, p, share_.data()) : message(p);
      if (lane == 0) {
        std::memcpy(sum + p * plan.hidden_size, share, width * sizeof(float));
      } else {
        kernels.add_scaled(sum + p * plan.hidden_size, share, 1.0f, width);
      }
    }
  }
  for (int p = 0; p < positions; p++) finish(sum + p * plan.hidden_size);
  return sum;
}

// Sends this many floats of total_ to all other lanes.
void Worker::post(uint32_t tag, int64_t floats) {
  delay();
  state.mail->push(index, tag, total_.data(), floats);
}

// Receives this many floats from a lane into total_. Throws Stopped after the session's timeout or another failure.
void Worker::fetch(int from, uint32_t tag, int64_t floats) {
  const int64_t began = now_ns(), limit = state.options.timeout_ms * 1'000'000LL;
  const bool came = state.mail->pull(index, from, tag, total_.data(), floats, [&](int64_t spins) {
    if (spins < 64) {
      pause();
      return true;
    }
    std::this_thread::yield();
    return !state.stopped.load(std::memory_order_relaxed) && now_ns() - began < limit;
  });
  if (!came) {
    state.fail("lane " + std::to_string(from) + " sent nothing to lane " + std::to_string(index) + " within " +
               std::to_string(state.options.timeout_ms) + " ms");
    throw Stopped();
  }
  delay();
}

// Applies the events that the schedule has at this time to the streams.
void Worker::apply(int time) {
  const int64_t began = clock(), d = plan.hidden_size;
  for (const plan::Event& event : plan.events[time]) {
    if (event.payload < 0) {
      if (state.lanes_shared) wait_for(module_points_[event.module]);
      for (int lane = first_lane; lane < last_lane; lane++)
        for (int p = 0; p < positions; p++)
          kernels.add_scaled(stream(lane, p), output(event.module, lane, p), event.weight, d);
      continue;
    }
    const plan::Sum& payload = plan.sums[event.payload];
    const float* sums = total(event.payload);
    for (int lane = first_lane; lane < last_lane; lane++)
      for (int p = 0; p < positions; p++) {
        const float* sum = sums + p * d;
        if (streams.count()) {
          streams.join(kernels, lane, p, sum);
        } else if (payload.stream_mean) {
          std::memcpy(stream(lane, p), sum, d * sizeof(float));
        } else if (event.apart.empty()) {
          kernels.add_scaled(stream(lane, p), sum, 1.0f, payload.width);
        } else {
          added_[0] = sum;
          for (size_t i = 0; i < event.apart.size(); i++) {
            added_[i + 1] = output(event.apart[i].module, lane, p);
            factors_[i + 1] = -event.apart[i].weight;
          }
          kernels.add_parts(added_.data(), factors_.data(), (int)event.apart.size() + 1, true, payload.width,
                            stream(lane, p));
        }
      }
  }
  mark(kExchange, time / 2, began);
}

}  // namespace laneformer
