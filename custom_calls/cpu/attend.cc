// A worker's share of attention. The unit of work is a lane and a chunk of its keys, for all queries of a run; the
// chunks' parts are merged where the next product reads them.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "worker.h"

namespace laneformer {

void Worker::run(const plan::Attend& op, int module) {
  const int64_t window = op.window ? *op.window : INT64_MAX / 2;
  // Chunks depend on the session alone, so a position's sums do not depend on those that are computed with it.
  const int64_t size = 256 * ((m_.context + 256 * 16 - 1) / (256 * 16));
  const auto low = [&](const Run& run) { return std::max<int64_t>(0, run.start - window + 1); };
  int64_t chunks = 0;  // of all runs
  for (int r = 0; r < pass_->runs; r++) {
    const Run& run = pass_->run[r];
    chunks_[r] = (int)((run.start + run.count - 1) / size + 1 - low(run) / size);
    chunks += chunks_[r];
  }
  // Units are in the order of runs, then lanes, then chunks.
  const int64_t first_lane = d_.lanes_shared ? 0 : first_lane_,
                lanes = (d_.lanes_shared ? m_.lanes : last_lane_) - first_lane;
  int64_t first = 0, last = lanes * chunks;
  if (d_.lanes_shared) {
    first = lanes * chunks * index_ / count_;
    last = lanes * chunks * (index_ + 1) / count_;
  }
  const auto unit_of = [&](int64_t number) {
    int r = 0;
    for (; number >= lanes * chunks_[r]; r++) number -= lanes * chunks_[r];
    const Run& run = pass_->run[r];
    const int chunk = (int)(number % chunks_[r]);
    const int64_t begin = (low(run) / size + chunk) * size;
    return Unit{&run,
                chunk,
                {(int)(first_lane + number / chunks_[r]), std::max(begin, low(run)),
                 std::min(begin + size, run.start + run.count)}};
  };
  Unit unit{}, next{};
  for (int64_t number = first; number < last; number++) {
    unit = number == first ? unit_of(number) : next;
    const bool more = number + 1 < last;
    if (more) next = unit_of(number + 1);
    if (number == first || unit.chunk == 0) queries(op, *unit.run, unit.keys.lane);
    attend(op, module / 2, unit, more ? &next : nullptr, window);
  }
  attend_ = &op;
}

// Applies the norm, of each head or of all, and the rotation to the heads at block position p, in place.
void Worker::rotate(float* heads, int count, const plan::Attend& op, const std::optional<plan::Norm>& norm, int lane,
                    int p) {
  const int e = op.head_dim;
  if (norm)
    for (int64_t first = 0; first < (int64_t)count * e; first += norm->gain.size)
      k_.rms_norm(heads + first, d_.small(norm->gain, lane), norm->eps, norm->gain.size, heads + first);
  if (!op.rotary) return;
  const Turns& turns = turns_[op.rotary->index];
  const float *cos = turns.cos.data() + p * e / 2, *sin = turns.sin.data() + p * e / 2;
  for (float* head = heads; head < heads + (int64_t)count * e; head += e)
    for (int i = 0; i < e / 2; i++) {
      const float even = head[2 * i], odd = head[2 * i + 1];
      head[2 * i] = even * cos[i] - odd * sin[i];
      head[2 * i + 1] = even * sin[i] + odd * cos[i];
    }
}

void Worker::queries(const plan::Attend& op, const Run& run, int lane) {
  const int64_t n = (int64_t)op.heads * op.head_dim, stride = d_.projected_padded;
  const float scale = op.scale;  // a copy: a write to q cannot change it
  for (int p = run.first; p < run.first + run.count; p++) {
    float* q = q_.data() + p * n;
    std::memcpy(q, d_.projected.floats() + (lane * kBlock + p) * stride, n * sizeof(float));
    rotate(q, op.heads, op, op.q_norm, lane, p);
    if (d_.activations == Activations::rounded) round_trip(q, n);
    for (int64_t i = 0; i < n; i++) q[i] *= scale;
  }
}

void Worker::round_trip(float* x, int64_t n) {
  k_.narrow(d_.weights, x, n, prepared_.data());
  k_.widen(d_.weights, prepared_.data(), n, x);
}

// Writes the new keys and values of a unit to the cache, then attends to all its keys with the queries of its run.
void Worker::attend(const plan::Attend& op, int layer, const Unit& unit, const Unit* next, int64_t window) {
  const Run& run = *unit.run;
  const Keys& part = unit.keys;
  const int64_t e = op.head_dim, n = op.kv_heads, width = bytes_of(d_.cache);
  const auto cache = [&](const std::vector<void*>& caches, int lane) { return (char*)caches[layer * m_.lanes + lane]; };
  const Call& call = *run.slot->call;
  char *keys = cache(call.keys, part.lane), *values = cache(call.values, part.lane);
  for (int64_t t = std::max(part.first, run.start); t < part.last; t++) {
    const int p = run.first + (int)(t - run.start);
    const float* k = d_.projected.floats() + (part.lane * kBlock + p) * d_.projected_padded + op.heads * e;
    std::memcpy(key_.data(), k, n * e * sizeof(float));
    rotate(key_.data(), op.kv_heads, op, op.k_norm, part.lane, p);
    k_.narrow(d_.cache, key_.data(), n * e, keys + t * n * e * width);
    k_.narrow(d_.cache, k + n * e, n * e, values + t * n * e * width);
  }
  float* const out =
      d_.parts.floats() + ((int64_t)(part.lane * kChunks + unit.chunk) * kBlock + run.first) * op.heads * (e + 2);
  const Call& after = next ? *next->run->slot->call : call;
  const Keys ahead = next ? next->keys : Keys{part.lane, 0, 0};
  k_.attend({q_.data() + run.first * op.heads * e, keys, values, out, d_.cache, op.kv_heads, op.heads / op.kv_heads,
             (int)e, part.first, part.last, run.start, window, run.count,
             cache(after.keys, ahead.lane) + ahead.first * n * e * width,
             cache(after.values, ahead.lane) + ahead.first * n * e * width, ahead.last - ahead.first});
}

// Merges the chunks' parts, in their order, into a[p][heads][head_dim], and applies the gates. A sink is a first part
// without a value.
void Worker::merge(int lane) {
  const int64_t e = attend_->head_dim, heads = attend_->heads, stride = (int64_t)kBlock * heads * (e + 2);
  const float* parts = d_.parts.floats() + (int64_t)lane * kChunks * stride;
  const float* sinks = attend_->sinks ? d_.small(*attend_->sinks, lane) : nullptr;
  for (int r = 0; r < pass_->runs; r++) {
    const Run& run = pass_->run[r];
    for (int64_t row = run.first * heads; row < (run.first + run.count) * heads; row++) {
      const float* part = parts + row * (e + 2);
      float* a = a_.data() + row * e;
      const float sink = sinks ? sinks[row % heads] : -INFINITY;
      float largest = sink, sum = 0;
      for (int c = 0; c < chunks_[r]; c++) largest = std::max(largest, part[c * stride + e]);
      std::memset(a, 0, e * sizeof(float));
      if (sinks) sum = std::exp(sink - largest);
      for (int c = 0; c < chunks_[r]; c++) {
        if (part[c * stride + e] == -INFINITY) continue;  // other positions see its keys
        const float weight = std::exp(part[c * stride + e] - largest);
        k_.add_scaled(a, part + c * stride, weight, e);
        sum += weight * part[c * stride + e + 1];
      }
      for (int64_t i = 0; i < e; i++) a[i] /= sum;
    }
  }
  for (int p = 0; p < positions_ && attend_->attention_gate; p++)
    k_.gate(d_.projected.floats() + (lane * kBlock + p) * d_.projected_padded + plan::values_end(*attend_), heads * e,
            a_.data() + p * heads * e);
}

}  // namespace laneformer
