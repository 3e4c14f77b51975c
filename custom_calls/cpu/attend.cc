// A worker's share of attention. The unit of work is a lane and a chunk of its keys, for all queries of the block; the
// chunks' parts are merged where the next product reads them.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "worker.h"

namespace laneformer {

void Worker::run(const plan::Attend& op, int module) {
  const int64_t window = op.window ? *op.window : INT64_MAX / 2;
  const int64_t low = std::max<int64_t>(0, start_ - window + 1), high = start_ + positions_;
  // Chunks depend on the session alone, so a position's sums do not depend on those that are computed with it.
  const int64_t size = 256 * ((m_.context + 256 * 16 - 1) / (256 * 16)), first_chunk = low / size;
  const int chunks = (int)((high - 1) / size + 1 - first_chunk);
  int64_t first = (int64_t)first_lane_ * chunks, last = (int64_t)last_lane_ * chunks;
  if (d_.lanes_shared) {
    first = (int64_t)m_.lanes * chunks * index_ / count_;
    last = (int64_t)m_.lanes * chunks * (index_ + 1) / count_;
  }
  const auto keys_of = [&](int64_t unit) {
    const int64_t begin = (first_chunk + unit % chunks) * size;
    return Keys{(int)(unit / chunks), std::max(begin, low), std::min(begin + size, high)};
  };
  for (int64_t unit = first; unit < last; unit++) {
    const Keys keys = keys_of(unit);
    if (unit == first || unit % chunks == 0) queries(op, keys.lane);
    attend(op, module / 2, keys, unit + 1 < last ? keys_of(unit + 1) : Keys{keys.lane, 0, 0}, (int)(unit % chunks),
           window);
  }
  attend_ = &op;
  chunks_ = chunks;
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

void Worker::queries(const plan::Attend& op, int lane) {
  const int64_t n = (int64_t)op.heads * op.head_dim, stride = d_.projected_padded;
  const float scale = op.scale;  // a copy: a write to q cannot change it
  for (int p = 0; p < positions_; p++) {
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

// Writes the new keys and values among first..last - 1 to the cache, then attends to these keys with all queries.
void Worker::attend(const plan::Attend& op, int layer, Keys part, Keys next, int chunk, int64_t window) {
  const int64_t e = op.head_dim, n = op.kv_heads, width = bytes_of(d_.cache);
  const auto cache = [&](const std::vector<void*>& caches, int lane) { return (char*)caches[layer * m_.lanes + lane]; };
  char *keys = cache(d_.call->keys, part.lane), *values = cache(d_.call->values, part.lane);
  for (int64_t t = std::max(part.first, start_); t < part.last; t++) {
    const int p = (int)(t - start_);
    const float* k = d_.projected.floats() + (part.lane * kBlock + p) * d_.projected_padded + op.heads * e;
    std::memcpy(key_.data(), k, n * e * sizeof(float));
    rotate(key_.data(), op.kv_heads, op, op.k_norm, part.lane, p);
    k_.narrow(d_.cache, key_.data(), n * e, keys + t * n * e * width);
    k_.narrow(d_.cache, k + n * e, n * e, values + t * n * e * width);
  }
  float* out = d_.parts.floats() + (int64_t)(part.lane * kChunks + chunk) * kBlock * op.heads * (e + 2);
  const int64_t ahead = next.first * n * e * width;
  k_.attend({q_.data(), keys, values, out, d_.cache, op.kv_heads, op.heads / op.kv_heads, (int)e, part.first, part.last,
             start_, window, positions_, cache(d_.call->keys, next.lane) + ahead,
             cache(d_.call->values, next.lane) + ahead, next.last - next.first});
}

// Merges the chunks' parts, in their order, into a[p][heads][head_dim], and applies the gates. A sink is a first part
// without a value.
void Worker::merge(int lane) {
  const int64_t e = attend_->head_dim, heads = attend_->heads, stride = (int64_t)kBlock * heads * (e + 2);
  const float* parts = d_.parts.floats() + (int64_t)lane * kChunks * stride;
  const float* sinks = attend_->sinks ? d_.small(*attend_->sinks, lane) : nullptr;
  for (int64_t row = 0; row < positions_ * heads; row++) {
    const float* part = parts + row * (e + 2);
    float* a = a_.data() + row * e;
    const float sink = sinks ? sinks[row % heads] : -INFINITY;
    float largest = sink, sum = 0;
    for (int c = 0; c < chunks_; c++) largest = std::max(largest, part[c * stride + e]);
    std::memset(a, 0, e * sizeof(float));
    if (sinks) sum = std::exp(sink - largest);
    for (int c = 0; c < chunks_; c++) {
      if (part[c * stride + e] == -INFINITY) continue;  // other positions see its keys
      const float weight = std::exp(part[c * stride + e] - largest);
      k_.add_scaled(a, part + c * stride, weight, e);
      sum += weight * part[c * stride + e + 1];
    }
    for (int64_t i = 0; i < e; i++) a[i] /= sum;
  }
  for (int p = 0; p < positions_ && attend_->attention_gate; p++)
    k_.gate(d_.projected.floats() + (lane * kBlock + p) * d_.projected_padded + plan::values_end(*attend_), heads * e,
            a_.data() + p * heads * e);
}

}  // namespace laneformer
