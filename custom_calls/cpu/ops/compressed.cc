// Compressed attention (DeepSeek-V4): one vector per position, which all heads have as key and value, entries that are
// made of several positions each, and an index that chooses among these. laneformer/blocks/compressed_attention.py has
// the equations.
//
// What waits for the rest of its window is kept by position, in a ring that has room for the rows of a pass: rows that
// were wrong, and an entry that they have completed, are overwritten before anything reads them. A position's sums
// depend on its place alone: blocks of vectors begin at multiples of their size, blocks of entries likewise, or at
// places in the list of those that its index has chosen, and what it does not see adds nothing.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "../worker.h"

namespace laneformer {

// Rotates the last channels of x by the angles of block position p, or by their negatives.
void Worker::turn_last(float* x, int64_t channels, const plan::RotaryIndex& rotary, int p, bool back) const {
  const int64_t pairs = (int64_t)m_.rotaries[rotary.index].frequencies.size();
  const float *cos = turns_[rotary.index].cos.data() + p * pairs, *sin = turns_[rotary.index].sin.data() + p * pairs;
  x += channels - 2 * pairs;
  for (int64_t i = 0; i < pairs; i++) {
    const float even = x[2 * i], odd = x[2 * i + 1], s = back ? -sin[i] : sin[i];
    x[2 * i] = even * cos[i] - odd * s;
    x[2 * i + 1] = even * s + odd * cos[i];
  }
}

// ---------------------------------------------------------------------------------------------------- what is kept

// Positions and entries are shared out where workers share lanes. The ring is written when all entries are made.
void Worker::run(const plan::CompressedKeep& op, int module) {
  const auto& projected = d_.of(plan::Value::projected);
  const int64_t n = op.channels, width = bytes_of(d_.cache);
  const int layer = module / 2;
  const auto each = [&](const auto& f) {
    for (int r = 0; r < pass_->runs; r++)
      for (int lane = first_lane_; lane < last_lane_; lane++) f(pass_->run[r], lane);
  };
  each([&](const Run& run, int lane) {
    char* const kept = (char*)d_.kept_of(*run.slot->call, plan::Kept::positions, layer, lane);
    const Part part = part_of(lane, run.count);
    for (int64_t i = part.first; i < part.last; i++) {
      const int p = run.first + (int)i;
      const float* const x = projected.floats() + (lane * kBlock + p) * projected.padded;
      k_.rms_norm(x, d_.small(op.norm.gain, lane), op.norm.eps, n, key_.data());
      turn_last(key_.data(), n, op.rotary, p);
      k_.narrow(d_.cache, key_.data(), n, kept + (run.start + i) * n * width);
    }
    if (op.entries) compress(*op.entries, run, lane, layer, plan::Kept::compressed, plan::Kept::compressed_tail);
    if (op.index_keys) compress(*op.index_keys, run, lane, layer, plan::Kept::index_keys, plan::Kept::index_keys_tail);
  });
  if (!op.entries) return;
  meet_if_shared();
  each([&](const Run& run, int lane) {
    keep_tail(*op.entries, run, lane, layer, plan::Kept::compressed_tail);
    if (op.index_keys) keep_tail(*op.index_keys, run, lane, layer, plan::Kept::index_keys_tail);
    if (owns(lane))
      *(int32_t*)d_.kept_of(*run.slot->call, plan::Kept::base, layer, lane) =
          (int32_t)(run.start + run.count - run.rows);
  });
}

// The entries whose last positions are in the run.
void Worker::compress(const plan::Compressor& op, const Run& run, int lane, int layer, plan::Kept kind,
                      plan::Kept tail) {
  const int64_t n = op.channels, width = op.width(), ring = op.tail(), ratio = op.ratio;
  const auto& projected = d_.of(plan::Value::projected);
  const Call& call = *run.slot->call;
  char* const kept = (char*)d_.kept_of(call, kind, layer, lane);
  const float* const old = (const float*)d_.kept_of(call, tail, layer, lane);
  const float* const biases = d_.small(op.biases, lane);
  const std::vector<float>& frequencies = m_.rotaries[op.rotary.index].frequencies;
  const float factor = m_.rotaries[op.rotary.index].factor;
  const int64_t first = run.start / ratio;
  const Part part = part_of(lane, (run.start + run.count) / ratio - first);
  const int64_t most = op.earlier() + 1;
  const float **vectors = parts_of_entry_.data(), **gates = vectors + most, **own = gates + most;
  for (int64_t w = first + part.first; w < first + part.last; w++) {
    int count = 0;
    for (int64_t t = std::max<int64_t>(0, ratio * (w + 1) - most); t < ratio * (w + 1); t++, count++) {
      const float* const row =
          t < run.start
              ? old + t % ring * 2 * width
              : projected.floats() + (lane * kBlock + run.first + t - run.start) * projected.padded + op.first;
      const int64_t half = op.overlaps && t >= ratio * w ? n : 0;
      vectors[count] = row + half;
      gates[count] = row + width + half;
      own[count] = biases + t % ratio * width + half;
    }
    float* const entry = key_.data();
    k_.compress(vectors, gates, own, count, n, entry);
    k_.rms_norm(entry, d_.small(op.norm.gain, lane), op.norm.eps, n, entry);
    float* const last = entry + n - 2 * frequencies.size();
    for (size_t i = 0; i < frequencies.size(); i++) {
      const float angle = (float)(ratio * w) * frequencies[i], even = last[2 * i], odd = last[2 * i + 1];
      const float cos = std::cos(angle) * factor, sin = std::sin(angle) * factor;
      last[2 * i] = even * cos - odd * sin;
      last[2 * i + 1] = even * sin + odd * cos;
    }
    k_.narrow(d_.cache, entry, n, kept + w * n * bytes_of(d_.cache));
  }
}

void Worker::keep_tail(const plan::Compressor& op, const Run& run, int lane, int layer, plan::Kept tail) {
  const auto& projected = d_.of(plan::Value::projected);
  const int64_t each = 2 * op.width(), ring = op.tail();
  float* const kept = (float*)d_.kept_of(*run.slot->call, tail, layer, lane);
  const Part part = part_of(lane, run.count);
  for (int64_t i = std::max<int64_t>(part.first, run.count - ring); i < part.last; i++)
    std::memcpy(kept + (run.start + i) % ring * each,
                projected.floats() + (lane * kBlock + run.first + i) * projected.padded + op.first,
                each * sizeof(float));
}

// ------------------------------------------------------------------------------------------------------- the index

namespace {

// Entries that are complete at a position.
int64_t closed(const plan::CompressedAttend& op, int64_t position) { return op.ratio ? (position + 1) / *op.ratio : 0; }

}  // namespace

// How many of a run's positions, the first ones, see all entries that are complete.
int Worker::plain_positions(const plan::CompressedAttend& op, const Run& run) {
  int count = run.count;
  while (op.index && count > 0 && closed(op, run.start + count - 1) > op.index->most) count--;
  return count;
}

// Entries are shared out, of each position.
void Worker::score_entries(const plan::CompressedAttend& op, int layer, const Run& run, int lane) {
  const plan::Index& index = *op.index;
  const int64_t n = (int64_t)index.heads * index.channels;
  const auto &queries = d_.of(plan::Value::index), &projected = d_.of(plan::Value::projected);
  const void* const keys = d_.kept_of(*run.slot->call, plan::Kept::index_keys, layer, lane);
  for (int i = plain_positions(op, run); i < run.count; i++) {
    const int p = run.first + i;
    const Part part = part_of(lane, closed(op, run.start + i));
    if (part.first == part.last) continue;
    float* const q = q_.data();
    std::memcpy(q, queries.floats() + (lane * kBlock + p) * queries.padded, n * sizeof(float));
    for (int head = 0; head < index.heads; head++) turn_last(q + head * index.channels, index.channels, op.rotary, p);
    if (d_.activations == Activations::rounded) round_trip(q, n);
    k_.index_scores({q, projected.floats() + (lane * kBlock + p) * projected.padded + index.first, keys, d_.cache,
                     index.heads, index.channels, part.first, part.last, scores_of_entries(lane, p), space_.data()});
  }
}

// Positions are shared out. Numbers are in order.
void Worker::choose_entries(const plan::CompressedAttend& op, const Run& run, int lane) {
  const int first = plain_positions(op, run), most = op.index->most;
  const Part part = part_of(lane, run.count - first);
  for (int64_t i = first + part.first; i < first + part.last; i++) {
    const int p = run.first + (int)i;
    const float* const scores = scores_of_entries(lane, p);
    const auto score = [&](int32_t n) { return scores[n] != scores[n] ? INFINITY : scores[n]; };  // NaN is noticed
    const auto begin = order_.begin(), end = begin + closed(op, run.start + i);
    std::iota(begin, end, 0);
    std::nth_element(begin, begin + most, end,
                     [&](int32_t a, int32_t b) { return score(a) > score(b) || (score(a) == score(b) && a < b); });
    std::sort(begin, begin + most);
    std::copy_n(begin, most, chosen_entries(lane, p));
  }
}

// -------------------------------------------------------------------------------------------------------- attention

// A run's first chunk are the newest positions, the others entries.
void Worker::run(const plan::CompressedAttend& op, int module) {
  constexpr int kLeast = 16;  // heads: those of a vector, or of two
  const int layer = module / 2;
  const auto each = [&](const auto& f) {
    for (int r = 0; r < pass_->runs; r++)
      for (int lane = first_lane_; lane < last_lane_; lane++) f(pass_->run[r], lane);
  };
  if (op.index) {
    each([&](const Run& run, int lane) { score_entries(op, layer, run, lane); });
    meet_if_shared();
    each([&](const Run& run, int lane) { choose_entries(op, run, lane); });
    meet_if_shared();
  }
  const int64_t size = entries_of_chunk(op, m_.context);
  for (int r = 0; r < pass_->runs; r++) {
    int64_t seen = closed(op, pass_->run[r].start + pass_->run[r].count - 1);
    if (op.index) seen = std::min<int64_t>(seen, op.index->most);
    chunks_[r] = 1 + (int)((seen + size - 1) / size);
  }
  const std::vector<Unit>& units = share_units(op.heads, kLeast);
  for (size_t i = 0; i < units.size(); i++) {
    if (i == 0 || units[i].chunk == 0) queries(op, units[i]);
    attend(op, layer, units[i]);
  }
  attended_ = &op;
}

// Those of a unit's heads and positions, into q[p][heads][head_dim].
void Worker::queries(const plan::CompressedAttend& op, const Unit& unit) {
  const int64_t n = op.head_dim, lane = unit.keys.lane;
  const auto& from = d_.of(plan::Value::queries);
  const float scale = op.scale;  // a copy: a write to q cannot change it
  for (int p = unit.run->first; p < unit.run->first + unit.run->count; p++)
    for (int64_t head = unit.first_head; head < unit.last_head; head++) {
      float* const q = q_.data() + (p * op.heads + head) * n;
      k_.rms_norm(from.floats() + (lane * kBlock + p) * from.padded + head * n, d_.ones.data(), op.norm_eps, n, q);
      turn_last(q, n, op.rotary, p);
      if (d_.activations == Activations::rounded) round_trip(q, n);
      for (int64_t i = 0; i < n; i++) q[i] *= scale;
    }
}

void Worker::attend(const plan::CompressedAttend& op, int layer, const Unit& unit) {
  const Run& run = *unit.run;
  const int64_t n = op.head_dim, lane = unit.keys.lane;
  // A run's positions from i on and the entries, or vectors, from `first` to `last`.
  const auto attend = [&](plan::Kept kind, int i, int count, int64_t start, int64_t first, int64_t last) {
    const int64_t row = (int64_t)(run.first + i) * op.heads + unit.first_head;
    AttendLatents found{};
    found.q = q_.data() + row * n;
    found.entries = d_.kept_of(*run.slot->call, kind, layer, (int)lane);
    found.out = d_.parts.floats() + ((lane * kChunks + unit.chunk) * kBlock * op.heads + row) * (n + 2);
    found.dtype = d_.cache;
    found.heads = unit.last_head - unit.first_head;
    found.of = op.heads;
    found.e = found.values = (int)n;
    found.first = first, found.last = last, found.start = start;
    found.positions = count;
    found.space = space_.data();
    return found;
  };
  if (unit.chunk == 0) {
    const int64_t oldest = std::max<int64_t>(0, run.start - op.window + 1);
    AttendLatents newest = attend(plan::Kept::positions, 0, run.count, run.start,
                                  oldest / kLatentEntries * kLatentEntries, run.start + run.count);
    newest.window = op.window;
    return k_.attend_latents(newest);
  }
  const int64_t size = entries_of_chunk(op, m_.context), first = (unit.chunk - 1) * size;
  const int plain = plain_positions(op, run);
  if (plain > 0) {
    const int64_t last = std::min(first + size, closed(op, run.start + plain - 1));
    AttendLatents all = attend(plan::Kept::compressed, 0, plain, run.start, first, last);
    all.every = *op.ratio;
    k_.attend_latents(all);
  }
  for (int i = plain; i < run.count; i++) {
    const int64_t last = std::min<int64_t>(first + size, op.index->most);
    AttendLatents chosen = attend(plan::Kept::compressed, i, 1, last - 1, first, last);
    chosen.list = chosen_entries((int)lane, run.first + i);
    k_.attend_latents(chosen);
  }
}

// Turned back, as they hold values that were turned as keys.
void Worker::merge(const plan::CompressedAttend& op, const Heads& wanted) {
  merge_heads(wanted, op.heads, op.head_dim, d_.small(op.sinks, wanted.lane));
  for (int p = 0; p < positions_; p++)
    for (int64_t i = 0; i < wanted.columns; i += op.head_dim)
      turn_last(a_.data() + p * wanted.columns + i, op.head_dim, op.rotary, p, true);
}

}  // namespace laneformer
