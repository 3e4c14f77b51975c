// Units of attention and the merging of their results; attention.h says what for.
#include "attention.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "../worker.h"

namespace laneformer {

namespace {

// Positions of a chunk of keys: a function of the session alone.
int64_t keys_of_chunk(const Worker& w) { return 256 * ((w.plan.context + 256 * 16 - 1) / (256 * 16)); }

// The first key that a run attends to.
int64_t first_key(const Run& run, int64_t window) { return std::max<int64_t>(0, run.start - window + 1); }

}  // namespace

std::vector<Unit> share_units(const Worker& w, const Chunks& chunks_of, int heads, int least) {
  constexpr int64_t kEnough = 6;  // chunks per worker
  const Pass& pass = *w.pass;
  const bool shared = w.state.lanes_shared;
  const int64_t chunks = std::accumulate(chunks_of.begin(), chunks_of.begin() + pass.runs, int64_t{0});
  // Units are in the order of runs, then lanes, then groups of heads, then chunks.
  const bool cut = shared && w.plan.lanes * chunks < kEnough * w.workers;
  const int groups = cut ? std::max(1, std::min(w.workers, heads / least)) : 1;
  const int64_t first_lane = shared ? 0 : w.first_lane,
                of_chunk = ((shared ? w.plan.lanes : w.last_lane) - first_lane) * groups;
  int64_t first = 0, last = of_chunk * chunks;
  if (shared) {
    first = of_chunk * chunks * w.index / w.workers;
    last = of_chunk * chunks * (w.index + 1) / w.workers;
  }
  std::vector<Unit> units;
  units.reserve(last - first);
  for (int64_t unit = first; unit < last; unit++) {
    int64_t number = unit;
    int r = 0;
    for (; number >= of_chunk * chunks_of[r]; r++) number -= of_chunk * chunks_of[r];
    const int chunk = (int)(number % chunks_of[r]), group = (int)(number / chunks_of[r] % groups);
    const int lane = (int)(first_lane + number / chunks_of[r] / groups);
    units.push_back({&pass.run[r], chunk, {lane, 0, 0}, heads * group / groups, heads * (group + 1) / groups});
  }
  return units;
}

Chunks chunks_of_keys(const Worker& w, int64_t window) {
  const int64_t size = keys_of_chunk(w);
  Chunks chunks{};
  for (int r = 0; r < w.pass->runs; r++) {
    const Run& run = w.pass->run[r];
    chunks[r] = (int)((run.start + run.count - 1) / size + 1 - first_key(run, window) / size);
  }
  return chunks;
}

std::vector<Unit> cut_keys(const Worker& w, const Chunks& chunks, int64_t window, int heads, int least) {
  const int64_t size = keys_of_chunk(w);
  std::vector<Unit> units = share_units(w, chunks, heads, least);
  for (Unit& unit : units) {
    const Run& run = *unit.run;
    const int64_t low = first_key(run, window), begin = (low / size + unit.chunk) * size;
    unit.keys.first = std::max(begin, low);
    unit.keys.last = std::min(begin + size, run.start + run.count);
  }
  return units;
}

void Parts::merge(const Worker& w, const Chunks& chunks, const Heads& wanted, const float* sinks, float* to) const {
  const int64_t count = wanted.columns / channels, first = wanted.block * count;
  const int64_t stride = (int64_t)kBlock * heads * (channels + 2);  // of a chunk
  const auto merge_head = [&](int r, int p, int64_t head, float sink, float* a) {
    const float* const part = of(wanted.lane, 0, p, head);
    float largest = sink, sum = 0;
    for (int c = 0; c < chunks[r]; c++) largest = std::max(largest, part[c * stride + channels]);
    std::memset(a, 0, channels * sizeof(float));
    if (sink > -INFINITY) sum = std::exp(sink - largest);
    for (int c = 0; c < chunks[r]; c++) {
      if (part[c * stride + channels] == -INFINITY) continue;  // this position attends to no key of the chunk
      const float weight = std::exp(part[c * stride + channels] - largest);
      w.kernels.add_scaled(a, part + c * stride, weight, channels);
      sum += weight * part[c * stride + channels + 1];
    }
    for (int64_t i = 0; i < channels; i++) a[i] /= sum;
  };
  for (int r = 0; r < w.pass->runs; r++)
    for (int p = w.pass->run[r].first; p < w.pass->run[r].first + w.pass->run[r].count; p++)
      for (int64_t i = 0; i < count; i++)
        merge_head(r, p, first + i, sinks ? sinks[first + i] : -INFINITY, to + p * wanted.columns + i * channels);
}

void round_as_read(const Worker& w, int64_t n, float* x, float* space) {
  if (w.state.activations != Activations::rounded) return;
  w.kernels.narrow(w.state.weights, x, n, space);
  w.kernels.widen(w.state.weights, space, n, x);
}

void scale_queries(const Worker& w, float scale, int64_t n, float* x, float* space) {
  round_as_read(w, n, x, space);
  for (int64_t i = 0; i < n; i++) x[i] *= scale;
}

}  // namespace laneformer
