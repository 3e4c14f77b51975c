// Compressed attention (DeepSeek-V4): ops CompressedKeep and CompressedAttend. A position has one vector, which is key
// and value of all heads. An entry is a vector made from several positions. An index may choose the entries that a
// position attends to. laneformer/blocks/compressed_attention.py has the equations.
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

#include "../../common/checks.h"
#include "../worker.h"
#include "attention.h"

namespace laneformer {

namespace {

// Calls f(run, lane) for each run of the pass and each of the worker's lanes.
template <class F>
void each_run(const Worker& w, const F& f) {
  for (int r = 0; r < w.pass->runs; r++)
    for (int lane = w.first_lane; lane < w.last_lane; lane++) f(w.pass->run[r], lane);
}

// ---------------------------------------------------------------------------------------------------- what is kept

class CompressedKeepOp final : public Op {
 public:
  explicit CompressedKeepOp(const plan::CompressedKeep& op) : op_(op) {}

  void scratch(Arena& own, Arena&) const override { Buffers(op_, own); }
  void run(Worker& w, int module) const override;

 private:
  struct Buffers {
    Buffers(const plan::CompressedKeep& op, Arena& own) {
      int64_t channels = op.channels, positions = 0;
      for (const auto* compressor : {&op.entries, &op.keys}) {
        if (!*compressor) continue;
        channels = std::max<int64_t>(channels, (*compressor)->channels);
        positions = std::max<int64_t>(positions, (*compressor)->earlier() + 1);
      }
      entry = own.floats(channels);
      parts = own.take<const float*>(3 * positions);
    }
    float* entry;
    const float** parts;  // [3][positions]: vectors, gates and biases of an entry's positions
  };
  struct Kinds {  // where a compressor's entries, and its newest vectors and gates, are kept
    plan::Kept entries, tail;
  };
  static constexpr Kinds kEntries = {plan::Kept::compressed, plan::Kept::compressed_tail};
  static constexpr Kinds kKeys = {plan::Kept::index_keys, plan::Kept::index_keys_tail};
  void compress(Worker& w, const Buffers& buffers, const plan::Compressor& op, const Run& run, int lane, int layer,
                const Kinds& kinds) const;
  void keep_tail(Worker& w, const plan::Compressor& op, const Run& run, int lane, int layer, const Kinds& kinds) const;

  const plan::CompressedKeep op_;
};

// Writes the vectors of the pass's positions and the completed entries to the caches. Workers that share a lane share
// out its positions and entries. The ring is written last, because entries read what it had before.
void CompressedKeepOp::run(Worker& w, int module) const {
  Arena own = w.arena();
  const Buffers buffers(op_, own);
  const int64_t n = op_.channels, width = bytes_of(w.state.cache);
  const int layer = module / 2;
  each_run(w, [&](const Run& run, int lane) {
    char* const kept = (char*)w.state.kept_of(*run.slot->call, plan::Kept::positions, layer, lane);
    const Interval part = w.part_of(lane, run.count);
    for (int64_t i = part.first; i < part.last; i++) {
      const int p = run.first + (int)i;
      const float* const x = w.state.of(plan::Value::projected).row(lane, p);
      w.kernels.rms_norm(x, w.state.small(op_.norm.gain, lane), op_.norm.eps, n, buffers.entry);
      w.rotations.rotate_last(buffers.entry, n, op_.rotary, p);
      w.kernels.narrow(w.state.cache, buffers.entry, n, kept + (run.start + i) * n * width);
    }
    if (op_.entries) compress(w, buffers, *op_.entries, run, lane, layer, kEntries);
    if (op_.keys) compress(w, buffers, *op_.keys, run, lane, layer, kKeys);
  });
  if (!op_.entries) return;
  w.barrier_if_shared();
  each_run(w, [&](const Run& run, int lane) {
    keep_tail(w, *op_.entries, run, lane, layer, kEntries);
    if (op_.keys) keep_tail(w, *op_.keys, run, lane, layer, kKeys);
    if (w.owns(lane))
      *(int32_t*)w.state.kept_of(*run.slot->call, plan::Kept::base, layer, lane) =
          (int32_t)(run.start + run.count - run.rows);
  });
}

// Writes this worker's part of the entries whose last positions are in the run.
void CompressedKeepOp::compress(Worker& w, const Buffers& buffers, const plan::Compressor& op, const Run& run, int lane,
                                int layer, const Kinds& kinds) const {
  const int64_t n = op.channels, width = op.width(), ring = op.tail(), ratio = op.ratio;
  const auto& projected = w.state.of(plan::Value::projected);
  const Call& call = *run.slot->call;
  char* const kept = (char*)w.state.kept_of(call, kinds.entries, layer, lane);
  const float* const old = (const float*)w.state.kept_of(call, kinds.tail, layer, lane);
  const float* const biases = w.state.small(op.biases, lane);
  const plan::Rotary& rotary = w.plan.rotaries[op.rotary.index];
  const int64_t first = run.start / ratio;
  const Interval part = w.part_of(lane, (run.start + run.count) / ratio - first);
  const int64_t most = op.earlier() + 1;
  const float **vectors = buffers.parts, **gates = vectors + most, **own = gates + most;
  for (int64_t e = first + part.first; e < first + part.last; e++) {
    int count = 0;
    for (int64_t t = std::max<int64_t>(0, ratio * (e + 1) - most); t < ratio * (e + 1); t++, count++) {
      const float* const row =
          t < run.start ? old + t % ring * 2 * width : projected.row(lane, run.first + (int)(t - run.start)) + op.first;
      const int64_t half = op.overlaps && t >= ratio * e ? n : 0;
      vectors[count] = row + half;
      gates[count] = row + width + half;
      own[count] = biases + t % ratio * width + half;
    }
    w.kernels.compress(vectors, gates, own, count, n, buffers.entry);
    w.kernels.rms_norm(buffers.entry, w.state.small(op.norm.gain, lane), op.norm.eps, n, buffers.entry);
    rotate_to(buffers.entry + n - 2 * rotary.frequencies.size(), rotary, ratio * e);
    w.kernels.narrow(w.state.cache, buffers.entry, n, kept + e * n * bytes_of(w.state.cache));
  }
}

// Writes this worker's part of the run's vectors and gates to the ring.
void CompressedKeepOp::keep_tail(Worker& w, const plan::Compressor& op, const Run& run, int lane, int layer,
                                 const Kinds& kinds) const {
  const int64_t each = 2 * op.width(), ring = op.tail();
  float* const kept = (float*)w.state.kept_of(*run.slot->call, kinds.tail, layer, lane);
  const Interval part = w.part_of(lane, run.count);
  for (int64_t i = std::max<int64_t>(part.first, run.count - ring); i < part.last; i++)
    std::memcpy(kept + (run.start + i) % ring * each,
                w.state.of(plan::Value::projected).row(lane, run.first + (int)i) + op.first, each * sizeof(float));
}

// -------------------------------------------------------------------------------------------------------- attention

class CompressedAttendOp final : public Attention {
 public:
  CompressedAttendOp(const plan::CompressedAttend& op, const Setup& setup)
      : op_(op),
        lanes_((int)setup.state.plan.lanes),
        entries_(op.index ? setup.state.plan.context / *op.ratio : 0),
        most_(op.index ? op.index->most : 0),
        size_(entries_of_chunk(setup.state.plan.context)),
        ones_(op.head_dim, 1.0f) {}

  void scratch(Arena& own, Arena& shared) const override { Buffers(*this, own, shared); }
  void run(Worker& w, int module) const override;
  void merge(Worker& w, const Heads& wanted, float* to) const override;

 private:
  struct Buffers {
    Buffers(const CompressedAttendOp& of, Arena& own, Arena& shared)
        : queries(own.floats(kBlock * of.op_.width())),
          parts(shared, of.lanes_, of.op_.heads, of.op_.head_dim),
          entries(of.entries_),
          most(of.most_),
          scores(shared.floats((int64_t)of.lanes_ * kBlock * entries)),
          numbers(shared.take<int32_t>((int64_t)of.lanes_ * kBlock * most)) {
      int64_t floats = latent_floats(of.op_.head_dim, of.op_.head_dim), of_index = 0;
      if (of.op_.index) {
        floats = std::max(floats, index_floats(of.op_.index->heads, of.op_.index->channels));
        of_index = of.op_.index->heads * of.op_.index->channels;
      }
      space = own.floats(floats);
      index = own.floats(of_index);
      rounded = own.floats(of_index);
      order = own.take<int32_t>(entries);
    }
    float *queries, *space;  // [kBlock][heads][head_dim]; of the kernels
    float *index, *rounded;  // [index heads][channels]: queries of the index; space to round them
    int32_t* order;          // [entries]: their numbers, in the order in which the index sorts them
    Parts parts;             // of all workers, as are the next ones
    int64_t entries, most;   // numbers of all entries and of chosen ones
    float* scores;           // [lanes][kBlock][entries]
    int32_t* numbers;        // [lanes][kBlock][most]: the chosen entries
    float* scores_of(int lane, int p) const { return scores + ((int64_t)lane * kBlock + p) * entries; }
    int32_t* chosen(int lane, int p) const { return numbers + ((int64_t)lane * kBlock + p) * most; }
  };

  // How many entries are complete at a position.
  int64_t closed(int64_t position) const { return op_.ratio ? (position + 1) / *op_.ratio : 0; }
  int64_t entries_of_chunk(int64_t context) const;
  Chunks chunks(const Pass& pass) const;
  int plain_positions(const Run& run) const;
  void score_entries(Worker& w, const Buffers& buffers, int layer, const Run& run, int lane) const;
  void choose_entries(Worker& w, const Buffers& buffers, const Run& run, int lane) const;
  void write_queries(Worker& w, const Buffers& buffers, const Unit& unit) const;
  void attend(Worker& w, const Buffers& buffers, int layer, const Unit& unit) const;

  const plan::CompressedAttend op_;
  const int lanes_;
  const int64_t entries_, most_;  // most entries of a text, and that an index chooses; 0 without an index
  const int64_t size_;            // entries in a chunk
  const std::vector<float> ones_;
};

// Entries in a chunk. It depends on the session alone, so a position's sums do not depend on the pass. The newest
// positions are a chunk by themselves.
int64_t CompressedAttendOp::entries_of_chunk(int64_t context) const {
  constexpr int64_t kLeast = 2;  // blocks
  const int64_t all = op_.ratio ? (context + *op_.ratio - 1) / *op_.ratio : 0;
  const int64_t most = op_.index ? std::min<int64_t>(all, op_.index->most) : all;
  return kLatentEntries * std::max(kLeast, (most + kLatentEntries * 16 - 1) / (kLatentEntries * 16));
}

// Chunk 0 of a run is the newest positions; the other chunks are entries.
Chunks CompressedAttendOp::chunks(const Pass& pass) const {
  Chunks found{};
  for (int r = 0; r < pass.runs; r++) {
    int64_t seen = closed(pass.run[r].start + pass.run[r].count - 1);
    if (op_.index) seen = std::min<int64_t>(seen, op_.index->most);
    found[r] = 1 + (int)((seen + size_ - 1) / size_);
  }
  return found;
}

// How many of a run's first positions attend to all complete entries, as these are not more than the index chooses.
int CompressedAttendOp::plain_positions(const Run& run) const {
  int count = run.count;
  while (op_.index && count > 0 && closed(run.start + count - 1) > op_.index->most) count--;
  return count;
}

// Scores the complete entries for each position whose index chooses. Workers share out each position's entries.
void CompressedAttendOp::score_entries(Worker& w, const Buffers& buffers, int layer, const Run& run, int lane) const {
  const plan::Index& index = *op_.index;
  const int64_t n = index.heads * index.channels;
  const void* const keys = w.state.kept_of(*run.slot->call, plan::Kept::index_keys, layer, lane);
  for (int i = plain_positions(run); i < run.count; i++) {
    const int p = run.first + i;
    const Interval part = w.part_of(lane, closed(run.start + i));
    if (part.first == part.last) continue;
    float* const q = buffers.index;
    std::memcpy(q, w.state.of(plan::Value::index).row(lane, p), n * sizeof(float));
    for (int64_t head = 0; head < index.heads; head++)
      w.rotations.rotate_last(q + head * index.channels, index.channels, op_.rotary, p);
    round_as_read(w, n, q, buffers.rounded);
    w.kernels.index_scores({q, w.state.of(plan::Value::projected).row(lane, p) + index.first, keys, w.state.cache,
                            (int)index.heads, (int)index.channels, part.first, part.last, buffers.scores_of(lane, p),
                            buffers.space});
  }
}

// Chooses the entries with the largest scores for these positions, which workers share out; of equal scores the lowest
// number first. Writes their numbers in ascending order.
void CompressedAttendOp::choose_entries(Worker& w, const Buffers& buffers, const Run& run, int lane) const {
  const int first = plain_positions(run);
  const Interval part = w.part_of(lane, run.count - first);
  for (int64_t i = first + part.first; i < first + part.last; i++) {
    const int p = run.first + (int)i;
    const float* const scores = buffers.scores_of(lane, p);
    // NaN counts as the largest score, so that it is noticed.
    const auto score = [&](int32_t n) { return scores[n] != scores[n] ? INFINITY : scores[n]; };
    int32_t *const begin = buffers.order, *const end = begin + closed(run.start + i);
    std::iota(begin, end, 0);
    std::nth_element(begin, begin + most_, end,
                     [&](int32_t a, int32_t b) { return score(a) > score(b) || (score(a) == score(b) && a < b); });
    std::sort(begin, begin + most_);
    std::copy_n(begin, most_, buffers.chosen(lane, p));
  }
}

// Attends with this worker's units.
void CompressedAttendOp::run(Worker& w, int module) const {
  constexpr int kLeast = 16;  // heads, which fill one vector (AVX-512) or two (AVX2)
  Arena own = w.arena(), shared = w.shared_arena();
  const Buffers buffers(*this, own, shared);
  const int layer = module / 2;
  if (op_.index) {
    each_run(w, [&](const Run& run, int lane) { score_entries(w, buffers, layer, run, lane); });
    w.barrier_if_shared();
    each_run(w, [&](const Run& run, int lane) { choose_entries(w, buffers, run, lane); });
    w.barrier_if_shared();
  }
  const std::vector<Unit> units = share_units(w, chunks(*w.pass), (int)op_.heads, kLeast);
  for (size_t i = 0; i < units.size(); i++) {
    if (i == 0 || units[i].chunk == 0) write_queries(w, buffers, units[i]);
    attend(w, buffers, layer, units[i]);
  }
}

// Writes the queries of a unit's heads and positions: normed, rotated and scaled.
void CompressedAttendOp::write_queries(Worker& w, const Buffers& buffers, const Unit& unit) const {
  const int64_t n = op_.head_dim;
  for (int p = unit.run->first; p < unit.run->first + unit.run->count; p++)
    for (int64_t head = unit.first_head; head < unit.last_head; head++) {
      float* const q = buffers.queries + (p * op_.heads + head) * n;
      const float* const from = w.state.of(plan::Value::queries).row(unit.keys.lane, p) + head * n;
      w.kernels.rms_norm(from, ones_.data(), op_.norm_eps, n, q);
      w.rotations.rotate_last(q, n, op_.rotary, p);
      scale_queries(w, op_.scale, n, q, buffers.space);
    }
}

// Attends to a unit's chunk of positions or entries. Positions whose index chooses are attended one by one, since each
// has its own list.
void CompressedAttendOp::attend(Worker& w, const Buffers& buffers, int layer, const Unit& unit) const {
  const Run& run = *unit.run;
  const int64_t n = op_.head_dim;
  const int lane = unit.keys.lane;
  // The kernel's arguments for the run's positions i to i + count - 1, and vectors or entries first <= t < last. start:
  // position of the first query, which decides what it attends to.
  const auto attend = [&](plan::Kept kind, int i, int count, int64_t start, int64_t first, int64_t last) {
    AttendLatents found{};
    found.q = buffers.queries + ((int64_t)(run.first + i) * op_.heads + unit.first_head) * n;
    found.entries = w.state.kept_of(*run.slot->call, kind, layer, lane);
    found.out = buffers.parts.of(lane, unit.chunk, run.first + i, unit.first_head);
    found.dtype = w.state.cache;
    found.heads = unit.last_head - unit.first_head;
    found.of = (int)op_.heads;
    found.e = found.values = (int)n;
    found.first = first, found.last = last, found.start = start;
    found.positions = count;
    found.space = buffers.space;
    return found;
  };
  if (unit.chunk == 0) {
    const int64_t oldest = std::max<int64_t>(0, run.start - op_.window + 1);
    AttendLatents newest = attend(plan::Kept::positions, 0, run.count, run.start,
                                  oldest / kLatentEntries * kLatentEntries, run.start + run.count);
    newest.window = op_.window;
    return w.kernels.attend_latents(newest);
  }
  const int64_t first = (unit.chunk - 1) * size_;
  const int plain = plain_positions(run);
  if (plain > 0) {
    const int64_t last = std::min(first + size_, closed(run.start + plain - 1));
    AttendLatents all = attend(plan::Kept::compressed, 0, plain, run.start, first, last);
    all.every = *op_.ratio;
    w.kernels.attend_latents(all);
  }
  for (int i = plain; i < run.count; i++) {
    const int64_t last = std::min<int64_t>(first + size_, most_);
    AttendLatents chosen = attend(plan::Kept::compressed, i, 1, last - 1, first, last);
    chosen.list = buffers.chosen(lane, run.first + i);
    w.kernels.attend_latents(chosen);
  }
}

// Results are rotated back, because the values were rotated as keys.
void CompressedAttendOp::merge(Worker& w, const Heads& wanted, float* to) const {
  Arena shared = w.shared_arena();
  const Parts parts(shared, lanes_, op_.heads, op_.head_dim);
  parts.merge(w, chunks(*w.pass), wanted, w.state.small(op_.sinks, wanted.lane), to);
  for (int p = 0; p < w.positions; p++)
    for (int64_t i = 0; i < wanted.columns; i += op_.head_dim)
      w.rotations.rotate_last(to + p * wanted.columns + i, op_.head_dim, op_.rotary, p, true);
}

}  // namespace

std::unique_ptr<Op> make_op(const plan::CompressedKeep& op, Setup&) { return std::make_unique<CompressedKeepOp>(op); }

std::unique_ptr<Op> make_op(const plan::CompressedAttend& op, Setup& setup) {
  return make_attention<CompressedAttendOp>(op, setup);
}

namespace plan {

namespace {

// The rotated channels are the last ones of a head with this many.
void check_rotary(const RotaryIndex& rotary, int64_t channels) {
  require(rotary.channels() <= channels, "a rotation has more channels than a head");
}

void check_compressor(const std::optional<Compressor>& op, Checks& checks, const char* what) {
  if (!op) return;
  require(op->channels <= kMostHeads && op->ratio <= kMostHeads, what);
  require(op->first + 2 * op->width() <= checks.channels_of(Value::projected), what);
  checks.vector(op->biases, op->ratio * op->width(), "a compressor's biases");
  checks.norm(op->norm, op->channels);
  check_rotary(op->rotary, op->channels);
}

}  // namespace

void check(const CompressedKeep& op, Checks& checks) {
  checks.norm(op.norm, op.channels);
  check_rotary(op.rotary, op.channels);
  require(op.channels <= checks.channels_of(Value::projected), "a position has more channels than are projected");
  check_compressor(op.entries, checks, "entries have another size than what is projected");
  check_compressor(op.keys, checks, "keys of an index have another size than what is projected");
  require(!op.keys || (op.entries && op.entries->ratio == op.keys->ratio),
          "an index has keys for other entries than there are");
  require(!op.entries || op.entries->channels == op.channels, "entries have other channels than positions");
}

void check(const CompressedAttend& op, Checks& checks) {
  const auto* keep = checks.earlier<CompressedKeep>();
  require(op.heads <= kMostHeads && op.head_dim <= kMostHeads, "too many heads");
  require(keep && keep->channels == op.head_dim, "heads have other channels than what is kept");
  require(op.ratio ? keep->entries && keep->entries->ratio == *op.ratio : !keep->entries,
          "compressed attention has other entries than are kept");
  require(checks.channels_of(Value::queries) == op.width(), "compressed attention reads another number of queries");
  check_rotary(op.rotary, op.head_dim);
  if (op.index) {
    require(keep->keys && keep->keys->channels == op.index->channels, "an index has no keys");
    check_rotary(op.rotary, op.index->channels);
    require(op.index->heads <= kMostHeads && checks.channels_of(Value::index) == op.index->heads * op.index->channels &&
                op.index->first + op.index->heads <= checks.channels_of(Value::projected),
            "an index reads another number of channels than are projected");
  }
  checks.attended_heads = op.head_dim;
  checks.channels_of(Value::attended) = op.width();
}

}  // namespace plan

}  // namespace laneformer
