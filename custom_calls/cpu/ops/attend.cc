// A worker's part of attention: ops Attend, LatentKeep and LatentAttend, which Worker::module runs. A unit of work is a
// chunk of a lane's keys with a run's queries for some heads. The kernels (kernels/attention/) write each unit's result
// to DecodeState::parts, and `merge` joins the chunks' parts where the next product reads them.
//
// Invariant: the size of a chunk depends on the session alone, and parts are merged in the order of the chunks. So a
// position's result does not depend on the pass or on the number of workers. A unit of Attend writes the new keys and
// values of its chunk before it reads them; no other unit reads these.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "../worker.h"

namespace laneformer {

// Sets units_ to this worker's units, without their keys; run r has chunks_[r] chunks. If workers share lanes and
// chunks are too few to share out, the heads are split as well, into at most as many groups as there are workers, of at
// least `least` heads. Otherwise they are not, since each group reads all keys.
std::vector<Worker::Unit>& Worker::share_units(int heads, int least) {
  constexpr int64_t kEnough = 6;  // chunks per worker
  const int64_t chunks = std::accumulate(chunks_, chunks_ + pass_->runs, int64_t{0});
  // Units are in the order of runs, then lanes, then groups of heads, then chunks.
  const bool cut = d_.lanes_shared && m_.lanes * chunks < kEnough * count_;
  const int groups = cut ? std::max(1, std::min(count_, heads / least)) : 1;
  const int64_t first_lane = d_.lanes_shared ? 0 : first_lane_,
                of_chunk = ((d_.lanes_shared ? m_.lanes : last_lane_) - first_lane) * groups;
  int64_t first = 0, last = of_chunk * chunks;
  if (d_.lanes_shared) {
    first = of_chunk * chunks * index_ / count_;
    last = of_chunk * chunks * (index_ + 1) / count_;
  }
  units_.clear();
  for (int64_t unit = first; unit < last; unit++) {
    int64_t number = unit;
    int r = 0;
    for (; number >= of_chunk * chunks_[r]; r++) number -= of_chunk * chunks_[r];
    const int chunk = (int)(number % chunks_[r]), group = (int)(number / chunks_[r] % groups);
    const int lane = (int)(first_lane + number / chunks_[r] / groups);
    units_.push_back({&pass_->run[r], chunk, {lane, 0, 0}, heads * group / groups, heads * (group + 1) / groups});
  }
  return units_;
}

// Sets units_ to this worker's units with their keys. window: how many of the newest keys a position attends to.
const std::vector<Worker::Unit>& Worker::cut_keys(int64_t window, int heads, int least) {
  // Positions of a chunk: a function of the session alone.
  const int64_t size = 256 * ((m_.context + 256 * 16 - 1) / (256 * 16));
  const auto low = [&](const Run& run) { return std::max<int64_t>(0, run.start - window + 1); };
  for (int r = 0; r < pass_->runs; r++) {
    const Run& run = pass_->run[r];
    chunks_[r] = (int)((run.start + run.count - 1) / size + 1 - low(run) / size);
  }
  for (Unit& unit : share_units(heads, least)) {
    const Run& run = *unit.run;
    const int64_t begin = (low(run) / size + unit.chunk) * size;
    unit.keys.first = std::max(begin, low(run));
    unit.keys.last = std::min(begin + size, run.start + run.count);
  }
  return units_;
}

void Worker::run(const plan::Attend& op, int module) {
  const int64_t window = op.window ? *op.window : kNoWindow;
  const std::vector<Unit>& units = cut_keys(window, op.heads, op.heads);
  for (size_t i = 0; i < units.size(); i++) {
    if (i == 0 || units[i].chunk == 0) queries(op, *units[i].run, units[i].keys.lane);
    attend(op, module / 2, units[i], i + 1 < units.size() ? &units[i + 1] : nullptr, window);
  }
  attended_ = &op;
}

// Rotates the pairs of x by the angles of block position p.
void Worker::turn_pairs(float* x, const plan::RotaryIndex& rotary, int p) const {
  const int64_t pairs = (int64_t)m_.rotaries[rotary.index].frequencies.size();
  const Turns& turns = turns_[rotary.index];
  const float *cos = turns.cos.data() + p * pairs, *sin = turns.sin.data() + p * pairs;
  for (int64_t i = 0; i < pairs; i++) {
    const float even = x[2 * i], odd = x[2 * i + 1];
    x[2 * i] = even * cos[i] - odd * sin[i];
    x[2 * i + 1] = even * sin[i] + odd * cos[i];
  }
}

// Norms `count` heads at block position p, each or all together, and rotates them, in place.
void Worker::rotate(float* heads, int count, const plan::Attend& op, const std::optional<plan::Norm>& norm, int lane,
                    int p) {
  const int e = op.head_dim;
  if (norm)
    for (int64_t first = 0; first < (int64_t)count * e; first += norm->gain.size)
      k_.rms_norm(heads + first, d_.small(norm->gain, lane), norm->eps, norm->gain.size, heads + first);
  for (float* head = heads; op.rotary && head < heads + (int64_t)count * e; head += e) turn_pairs(head, *op.rotary, p);
}

// Writes a run's queries to q_[p][heads][head_dim]: normed, rotated and scaled.
void Worker::queries(const plan::Attend& op, const Run& run, int lane) {
  const int64_t n = (int64_t)op.heads * op.head_dim, stride = d_.of(plan::Value::projected).padded;
  const float scale = op.scale;  // a copy: a write to q cannot change it
  for (int p = run.first; p < run.first + run.count; p++) {
    float* q = q_.data() + p * n;
    std::memcpy(q, d_.of(plan::Value::projected).floats() + (lane * kBlock + p) * stride, n * sizeof(float));
    rotate(q, op.heads, op, op.q_norm, lane, p);
    if (d_.activations == Activations::rounded) round_trip(q, n);
    for (int64_t i = 0; i < n; i++) q[i] *= scale;
  }
}

// Rounds x [n] to the weights' dtype.
void Worker::round_trip(float* x, int64_t n) {
  k_.narrow(d_.weights, x, n, prepared_.data());
  k_.widen(d_.weights, prepared_.data(), n, x);
}

// Writes the new keys and values of a unit's chunk to the cache, then attends to all its keys with the run's queries.
// next: the worker's next unit, whose keys and values are prefetched; may be null.
void Worker::attend(const plan::Attend& op, int layer, const Unit& unit, const Unit* next, int64_t window) {
  const Run& run = *unit.run;
  const Keys& part = unit.keys;
  const auto& projected = d_.of(plan::Value::projected);
  const int64_t e = op.head_dim, n = op.kv_heads, width = bytes_of(d_.cache);
  const auto cache = [&](const Call& call, plan::Kept kind, int lane) {
    return (char*)d_.kept_of(call, kind, layer, lane);
  };
  const Call& call = *run.slot->call;
  char *keys = cache(call, plan::Kept::keys, part.lane), *values = cache(call, plan::Kept::values, part.lane);
  for (int64_t t = std::max(part.first, run.start); t < part.last; t++) {
    const int p = run.first + (int)(t - run.start);
    const float* k = projected.floats() + (part.lane * kBlock + p) * projected.padded + op.heads * e;
    std::memcpy(key_.data(), k, n * e * sizeof(float));
    rotate(key_.data(), op.kv_heads, op, op.k_norm, part.lane, p);
    k_.narrow(d_.cache, key_.data(), n * e, keys + t * n * e * width);
    k_.narrow(d_.cache, k + n * e, n * e, values + t * n * e * width);
  }
  float* const out =
      d_.parts.floats() + ((int64_t)(part.lane * kChunks + unit.chunk) * kBlock + run.first) * op.heads * (e + 2);
  const Call& after = next ? *next->run->slot->call : call;
  const Keys ahead = next ? next->keys : Keys{part.lane, 0, 0};
  k_.attend({q_.data() + run.first * op.heads * e, keys, values, out, d_.cache, (int)op.kv_heads,
             (int)(op.heads / op.kv_heads), (int)e, part.first, part.last, run.start, window, run.count,
             cache(after, plan::Kept::keys, ahead.lane) + ahead.first * n * e * width,
             cache(after, plan::Kept::values, ahead.lane) + ahead.first * n * e * width, ahead.last - ahead.first});
}

// Merges the chunks' parts of a head at position p of run r, in their order, into a[channels]. A sink counts as a first
// part with a score and no value; -inf: no sink.
void Worker::merge_chunks(int r, int lane, int p, int64_t head, int64_t heads, int64_t channels, float sink, float* a) {
  const int64_t row = channels + 2, stride = (int64_t)kBlock * heads * row;
  const float* part = d_.parts.floats() + lane * kChunks * stride + (p * heads + head) * row;
  float largest = sink, sum = 0;
  for (int c = 0; c < chunks_[r]; c++) largest = std::max(largest, part[c * stride + channels]);
  std::memset(a, 0, channels * sizeof(float));
  if (sink > -INFINITY) sum = std::exp(sink - largest);
  for (int c = 0; c < chunks_[r]; c++) {
    if (part[c * stride + channels] == -INFINITY) continue;  // this position attends to no key of the chunk
    const float weight = std::exp(part[c * stride + channels] - largest);
    k_.add_scaled(a, part + c * stride, weight, channels);
    sum += weight * part[c * stride + channels + 1];
  }
  for (int64_t i = 0; i < channels; i++) a[i] /= sum;
}

// Writes the wanted heads' results at all positions to a_[p][columns]. heads: of the lane; channels: of a head. sinks:
// [heads], or null.
void Worker::merge_heads(const Heads& wanted, int64_t heads, int64_t channels, const float* sinks) {
  const int64_t count = wanted.columns / channels, first = wanted.block * count;
  for (int r = 0; r < pass_->runs; r++)
    for (int p = pass_->run[r].first; p < pass_->run[r].first + pass_->run[r].count; p++)
      for (int64_t i = 0; i < count; i++)
        merge_chunks(r, wanted.lane, p, first + i, heads, channels, sinks ? sinks[first + i] : -INFINITY,
                     a_.data() + p * wanted.columns + i * channels);
}

// Writes the wanted heads' results to a_, each channel times the sigmoid of its gate if the op has gates.
void Worker::merge(const plan::Attend& op, const Heads& wanted) {
  merge_heads(wanted, op.heads, op.head_dim, op.sinks ? d_.small(*op.sinks, wanted.lane) : nullptr);
  const auto& projected = d_.of(plan::Value::projected);
  for (int p = 0; p < positions_ && op.attention_gate; p++)
    k_.gate(projected.floats() + (wanted.lane * kBlock + p) * projected.padded + op.values_end(), wanted.columns,
            a_.data() + p * wanted.columns);
}

// ------------------------------------------------------------------------------------------------------------- latents
//
// The cache keeps one vector per position, the latent, from which all heads' keys and values could be made. Queries are
// transformed instead, so that attention reads the latents themselves.

// Writes the latents of the pass's positions to the cache. Workers that share a lane share out its positions.
void Worker::run(const plan::LatentKeep& op, int module) {
  const auto& projected = d_.of(plan::Value::projected);
  const int64_t n = op.channels(), width = bytes_of(d_.cache);
  for (int r = 0; r < pass_->runs; r++) {
    const Run& run = pass_->run[r];
    for (int lane = first_lane_; lane < last_lane_; lane++) {
      char* const latents = (char*)d_.kept_of(*run.slot->call, plan::Kept::latents, module / 2, lane);
      const Part part = part_of(lane, run.count);
      for (int64_t i = part.first; i < part.last; i++) {
        const int p = run.first + (int)i;
        const float* x = projected.floats() + (lane * kBlock + p) * projected.padded;
        k_.rms_norm(x, d_.small(op.norm.gain, lane), op.norm.eps, op.rank, key_.data());
        std::memcpy(key_.data() + op.rank, x + op.rank, (n - op.rank) * sizeof(float));
        turn_pairs(key_.data() + op.rank, op.rotary, p);
        k_.narrow(d_.cache, key_.data(), n, latents + (run.start + i) * n * width);
      }
    }
  }
}

void Worker::run(const plan::LatentAttend& op, int module) {
  constexpr int kLeast = 16;  // heads, which fill one vector (AVX-512) or two (AVX2)
  const std::vector<Unit>& units = cut_keys(kNoWindow, op.heads, kLeast);
  for (size_t i = 0; i < units.size(); i++) {
    if (i == 0 || units[i].chunk == 0) queries(op, units[i]);
    attend(op, module / 2, units[i], i + 1 < units.size() ? &units[i + 1] : nullptr);
  }
  attended_ = &op;
}

// Writes the queries of a unit's heads and positions to q_[p][heads][rank + rotating]: from ABSORBED, then from
// QUERIES, rotated; both scaled.
void Worker::queries(const plan::LatentAttend& op, const Unit& unit) {
  const int64_t rotating = op.rotating(), n = op.rank + rotating, of_head = op.still + rotating;
  const auto &absorbed = d_.of(plan::Value::absorbed), &queries = d_.of(plan::Value::queries);
  const int64_t lane = unit.keys.lane;
  const float scale = op.scale;  // a copy: a write to q cannot change it
  for (int p = unit.run->first; p < unit.run->first + unit.run->count; p++)
    for (int64_t head = unit.first_head; head < unit.last_head; head++) {
      float* const q = q_.data() + (p * op.heads + head) * n;
      std::memcpy(q, absorbed.floats() + (lane * kBlock + p) * absorbed.padded + head * op.rank,
                  op.rank * sizeof(float));
      std::memcpy(q + op.rank, queries.floats() + (lane * kBlock + p) * queries.padded + head * of_head + op.still,
                  rotating * sizeof(float));
      turn_pairs(q + op.rank, op.rotary, p);
      if (d_.activations == Activations::rounded) round_trip(q, n);
      for (int64_t i = 0; i < n; i++) q[i] *= scale;
    }
}

// Attends to the latents of a unit's chunk. next: the worker's next unit, whose latents are prefetched; may be null.
void Worker::attend(const plan::LatentAttend& op, int layer, const Unit& unit, const Unit* next) {
  const Run& run = *unit.run;
  const Keys& part = unit.keys;
  const int64_t n = op.rank + op.rotating(), bytes = n * bytes_of(d_.cache);
  const auto latents = [&](const Unit& of) {
    return (const char*)d_.kept_of(*of.run->slot->call, plan::Kept::latents, layer, of.keys.lane);
  };
  const int64_t row = (int64_t)run.first * op.heads + unit.first_head;
  float* const out =
      d_.parts.floats() + ((int64_t)(part.lane * kChunks + unit.chunk) * kBlock * op.heads + row) * (op.rank + 2);
  k_.attend_latents({q_.data() + row * n, latents(unit), out, d_.cache, unit.last_head - unit.first_head, (int)op.heads,
                     (int)n, (int)op.rank, part.first, part.last, run.start, run.count,
                     next ? latents(*next) + next->keys.first * bytes : nullptr,
                     next ? (next->keys.last - next->keys.first) * bytes : 0, space_.data()});
}

void Worker::merge(const plan::LatentAttend& op, const Heads& wanted) {
  merge_heads(wanted, op.heads, op.rank, nullptr);
}

}  // namespace laneformer
