// Compressed attention (DeepSeek-V4): ops CompressedKeep and CompressedAttend, which Worker::module runs. A position
// has one vector, which is key and value of all heads. An entry is a vector made from several positions. An index may
// choose the entries that a position attends to. laneformer/blocks/compressed_attention.py has the equations.
//
// Invariant 1: wrong drafts change nothing. Positions of an unfinished window are kept in a ring that also has room for
// the rows of a pass. The next pass overwrites the places of wrong rows, and an entry that they completed, before
// anything reads them.
// Invariant 2: a position's sums depend only on its place in the text. Blocks of vectors and of entries begin at
// multiples of their size, or at such places in the list of the chosen entries, and what a position does not attend to
// adds nothing.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "../worker.h"

namespace laneformer {

// Rotates the last pairs of x [channels] by the angles of block position p; back: by the negative angles.
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

// Writes the vectors of the pass's positions and the completed entries to the caches. Workers that share a lane share
// out its positions and entries. The ring is written last, because entries read what it had before.
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
    if (op.keys) compress(*op.keys, run, lane, layer, plan::Kept::index_keys, plan::Kept::index_keys_tail);
  });
  if (!op.entries) return;
  meet_if_shared();
  each([&](const Run& run, int lane) {
    keep_tail(*op.entries, run, lane, layer, plan::Kept::compressed_tail);
    if (op.keys) keep_tail(*op.keys, run, lane, layer, plan::Kept::index_keys_tail);
    if (owns(lane))
      *(int32_t*)d_.kept_of(*run.slot->call, plan::Kept::base, layer, lane) =
          (int32_t)(run.start + run.count - run.rows);
  });
}

// Writes this worker's part of the entries whose last positions are in the run.
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

// Writes this worker's part of the run's vectors and gates to the ring.
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

// How many entries are complete at a position.
int64_t closed(const plan::CompressedAttend& op, int64_t position) { return op.ratio ? (position + 1) / *op.ratio : 0; }

}  // namespace

// How many of a run's first positions attend to all complete entries, as these are not more than the index chooses.
int Worker::plain_positions(const plan::CompressedAttend& op, const Run& run) {
  int count = run.count;
  while (op.index && count > 0 && closed(op, run.start + count - 1) > op.index->most) count--;
  return count;
}

// Scores the complete entries for each position whose index chooses. Workers share out each position's entries.
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
                     (int)index.heads, (int)index.channels, part.first, part.last, scores_of_entries(lane, p),
                     space_.data()});
  }
}

// Chooses the entries with the largest scores for these positions, which workers share out; of equal scores the lowest
// number first. Writes their numbers in ascending order.
void Worker::choose_entries(const plan::CompressedAttend& op, const Run& run, int lane) {
  const int first = plain_positions(op, run), most = op.index->most;
  const Part part = part_of(lane, run.count - first);
  for (int64_t i = first + part.first; i < first + part.last; i++) {
    const int p = run.first + (int)i;
    const float* const scores = scores_of_entries(lane, p);
    // NaN counts as the largest score, so that it is noticed.
    const auto score = [&](int32_t n) { return scores[n] != scores[n] ? INFINITY : scores[n]; };
    const auto begin = order_.begin(), end = begin + closed(op, run.start + i);
    std::iota(begin, end, 0);
    std::nth_element(begin, begin + most, end,
                     [&](int32_t a, int32_t b) { return score(a) > score(b) || (score(a) == score(b) && a < b); });
    std::sort(begin, begin + most);
    std::copy_n(begin, most, chosen_entries(lane, p));
  }
}

// -------------------------------------------------------------------------------------------------------- attention

// Attends with this worker's units. Chunk 0 of a run is the newest positions; the other chunks are entries.
void Worker::run(const plan::CompressedAttend& op, int module) {
  constexpr int kLeast = 16;  // heads, which fill one vector (AVX-512) or two (AVX2)
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

// Writes the queries of a unit's heads and positions to q_[p][heads][head_dim]: normed, rotated and scaled.
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

// Attends to a unit's chunk of positions or entries. Positions whose index chooses are attended one by one, since each
// has its own list.
void Worker::attend(const plan::CompressedAttend& op, int layer, const Unit& unit) {
  const Run& run = *unit.run;
  const int64_t n = op.head_dim, lane = unit.keys.lane;
  // The kernel's arguments for the run's positions i to i + count - 1, and vectors or entries first <= t < last. start:
  // position of the first query, which decides what it attends to.
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

// Writes the wanted heads' results to a_. They are rotated back, because the values were rotated as keys.
void Worker::merge(const plan::CompressedAttend& op, const Heads& wanted) {
  merge_heads(wanted, op.heads, op.head_dim, d_.small(op.sinks, wanted.lane));
  for (int p = 0; p < positions_; p++)
    for (int64_t i = 0; i < wanted.columns; i += op.head_dim)
      turn_last(a_.data() + p * wanted.columns + i, op.head_dim, op.rotary, p, true);
}

}  // namespace laneformer
