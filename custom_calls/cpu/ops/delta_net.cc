// Gated DeltaNet: op DeltaNet, which Worker::module runs. A value head keeps its matrix S as it was at its base, a
// position that is a multiple of kTile, and an entry for each position since: the key, the delta (what the position
// added to S along its key) and the decay. So a position reads S once, and kTile positions write it once.
//
// Let A_i be the product of the decays from the base b up to position i, and w_ij that of the decays after j up to i:
//   delta_i = beta_i (v_i - A_i S_b^T k_i - sum over j < i of w_ij (k_j . k_i) delta_j)
//   result_i = A_i S_b^T q_i + sum over j <= i of w_ij (k_j . q_i) delta_j
// and, where i is the last of kTile positions:
//   S_(b + kTile) = A_i S_b + sum over j of w_ij k_j (x) delta_j
//
// Invariant 1: the order of a position's sums depends only on its place in the text, so its results have the same bits
// in every pass. Invariant 2: wrong drafts change nothing. Only positions that are certain move the base, and a later
// pass overwrites the entries of the others.
//
// S^T is stored in tiles like a product's float32 weights, and the keys of kTile positions (a stretch) are one tile, so
// both are multiplied by the kernel's `product`.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../worker.h"

namespace laneformer {

static_assert(plan::kEntries == kTile, "the keys of as many positions are a tile");

Worker::Recurrence::Recurrence(const plan::DeltaNet& op)
    : inputs((op.taps() - 1 + kBlock) * op.head_channels()),
      mixed(kBlock * (op.head_channels() + kTile)),
      rows(2 * kTile * op.key_dim),
      products(2 * kTile * op.delta_width()),
      likeness(2 * kTile * kTile),
      scaled(kTile * op.delta_width()),
      scratch(op.key_dim * op.delta_width()),
      unit(op.key_dim, 1 / std::sqrt((float)op.key_dim)),
      unit_query(op.key_dim, 1 / (float)op.key_dim) {}

// Runs this worker's units: a unit is a key head of a lane with its value heads, and always has the same worker.
void Worker::run(const plan::DeltaNet& op, int module) {
  attended_ = {};
  const int64_t first_lane = d_.lanes_shared ? 0 : first_lane_;
  const int64_t units = ((d_.lanes_shared ? m_.lanes : last_lane_) - first_lane) * op.key_heads;
  const int64_t first = d_.lanes_shared ? units * index_ / count_ : 0;
  const int64_t last = d_.lanes_shared ? units * (index_ + 1) / count_ : units;
  for (int64_t unit = first; unit < last; unit++)
    for (int r = 0; r < pass_->runs; r++)
      recur(op, module / 2, pass_->run[r], (int)(first_lane + unit / op.key_heads), (int)(unit % op.key_heads));
}

// The stretch that begins at position `from`, a multiple of kTile, in the entries of a key head. Two stretches are
// kept: the one from the base on, and the next one, which rows of a pass may begin.
Worker::Stretch Worker::stretch_of(const plan::DeltaNet& op, float* entries, int64_t from) const {
  float* const keys = entries + from / kTile % 2 * op.stretch_floats();
  float* const deltas = keys + kTile * op.key_dim;
  return {keys, deltas, deltas + kTile * op.delta_width()};
}

// Writes to `to` the matrices of a key head's value heads after a whole stretch. from: the matrices before it, null for
// zero; it may be `to`.
void Worker::advance(const plan::DeltaNet& op, const float* from, const Stretch& by, float* to) {
  const int64_t ratio = op.ratio(), width = op.delta_width(), own = width / ratio;
  for (int64_t head = 0; head < ratio; head++) {
    float decay = 1;
    for (int j = kTile - 1; j >= 0; j--) {
      for (int64_t i = 0; i < own; i++)
        recurrence_->scaled[j * own + i] = decay * by.deltas[j * width + head * own + i];
      decay *= by.decays[j * ratio + head];
    }
    const int64_t at = head * own * op.key_dim;
    k_.advance(from ? from + at : nullptr, decay, by.keys, recurrence_->scaled.data(), op.key_dim, own / kTile,
               to + at);
  }
}

// Writes what the convolution reads of a key head's channels to recurrence_->inputs: the last positions before the run,
// from the ring `kept`, then the run's. Adds the run's positions to the ring, rounded to the cache's dtype as they are
// read later.
void Worker::read_inputs(const plan::DeltaNet& op, const Run& run, int lane, int head, char* kept) {
  const int64_t channels = op.head_channels(), width = bytes_of(d_.cache), ring = op.ring();
  const int64_t before = op.taps() - 1, values = channels - 2 * op.key_dim;
  const auto& projected = d_.of(plan::Value::projected);
  float* to = recurrence_->inputs.data();
  for (int64_t t = run.start - before; t < run.start; t++, to += channels) {
    if (t < 0) {
      std::fill_n(to, channels, 0.0f);
    } else {
      k_.widen(d_.cache, kept + t % ring * channels * width, channels, to);
    }
  }
  for (int i = 0; i < run.count; i++, to += channels) {
    const float* const from =
        projected.floats() + (lane * kBlock + run.first + i) * projected.padded + head * (channels + values);
    std::memcpy(to, from, channels * sizeof(float));
    if (d_.cache == Dtype::f32 && i < run.count - ring) continue;
    char* const place = kept + (run.start + i) % ring * channels * width;
    k_.narrow(d_.cache, to, channels, place);
    k_.widen(d_.cache, place, channels, to);
  }
}

// Convolves the run's positions into recurrence_->mixed and makes unit vectors of queries and keys. Returns the floats
// from one position to the next there.
int64_t Worker::convolve(const plan::DeltaNet& op, const Run& run, int lane, int head) {
  const int64_t key_dim = op.key_dim, channels = op.head_channels(), values = channels - 2 * key_dim;
  const int64_t stride = (channels + kTile - 1) / kTile * kTile, all = op.channels(), taps = op.taps();
  const float* const weights = d_.small(op.convolution, lane);  // [taps][all]
  const struct {
    int64_t at, weight, count;
  } parts[] = {{0, head * key_dim, key_dim},
               {key_dim, (op.key_heads + head) * key_dim, key_dim},
               {2 * key_dim, 2 * op.key_heads * key_dim + head * values, values}};
  for (int i = 0; i < run.count; i++) {
    float* const y = recurrence_->mixed.data() + i * stride;
    std::fill_n(y, stride, 0.0f);
    for (const auto& part : parts)
      for (int64_t tap = 0; tap < taps; tap++) {
        const float* const x = recurrence_->inputs.data() + (i + tap) * channels + part.at;
        const float* const w = weights + tap * all + part.weight;
        for (int64_t c = 0; c < part.count; c++) y[part.at + c] += w[c] * x[c];
      }
    k_.activate(Activation::kSilu, false, y, stride / kTile, y);
    const float eps = op.unit_eps / (float)key_dim;
    k_.rms_norm(y, recurrence_->unit_query.data(), eps, key_dim, y);
    k_.rms_norm(y + key_dim, recurrence_->unit.data(), eps, key_dim, y + key_dim);
  }
  return stride;
}

// Takes a run's positions through a key head and its value heads.
void Worker::recur(const plan::DeltaNet& op, int layer, const Run& run, int lane, int head) {
  const int64_t key_dim = op.key_dim, width = op.delta_width(), state = key_dim * width;
  const auto kept = [&](plan::Kept kind) { return d_.kept_of(*run.slot->call, kind, layer, lane); };
  int32_t& base = ((int32_t*)kept(plan::Kept::base))[head];
  float* const entries = (float*)kept(plan::Kept::entries) + head * 2 * op.stretch_floats();
  float* const matrices = (float*)kept(plan::Kept::state) + head * state;
  const float* now = matrices;
  if (run.start == 0) base = 0;
  const auto current = [&] { return base == 0 && now == matrices ? nullptr : now; };  // null: zero
  read_inputs(op, run, lane, head,
              (char*)kept(plan::Kept::inputs) + head * op.ring() * op.head_channels() * bytes_of(d_.cache));
  const int64_t stride = convolve(op, run, lane, head);
  const int64_t sure = run.start + run.count - run.rows;  // positions before it are certain
  int64_t from = base;                                    // first position of the stretch
  for (int64_t t = run.start; t < run.start + run.count;) {
    for (; t >= from + kTile; from += kTile) {
      const bool commit = from + kTile <= sure;
      float* const to = commit ? matrices : recurrence_->scratch.data();
      advance(op, current(), stretch_of(op, entries, from), to);
      now = to;
      if (commit) base = (int32_t)from + kTile;
    }
    const int count = (int)std::min<int64_t>(from + kTile, run.start + run.count) - (int)t;
    const int place = (int)(t - run.start);
    respond(op, {lane, head, run.first + place, count, (int)(t - from)}, current(),
            recurrence_->mixed.data() + place * stride, stride, stretch_of(op, entries, from));
    t += count;
  }
}

// Takes positions of one stretch, from place rows.at on. x: their q, k and v, `stride` floats from one position to the
// next. matrices: S at the beginning of the stretch, null for zero.
void Worker::respond(const plan::DeltaNet& op, const Rows& rows, const float* matrices, float* x, int64_t stride,
                     const Stretch& stretch) {
  const int64_t key_dim = op.key_dim, width = op.delta_width();
  const int n = rows.count;
  float* const vectors = recurrence_->rows.data();  // keys, then queries
  for (int i = 0; i < n; i++) {
    const float *const q = x + i * stride, *const k = q + key_dim;
    std::memcpy(vectors + i * key_dim, k, key_dim * sizeof(float));
    std::memcpy(vectors + (n + i) * key_dim, q, key_dim * sizeof(float));
    for (int64_t c = 0; c < key_dim; c++) stretch.keys[c * kTile + rows.at + i] = k[c];
  }
  const auto times = [&](const float* tiles, int64_t count, float* y) {
    k_.product(Dtype::f32, Activations::exact, tiles, prepared_.data(), key_dim, count, 2 * n, y, count * kTile);
  };
  k_.prepare(Dtype::f32, Activations::exact, vectors, key_dim, key_dim, 2 * n, prepared_.data());
  times(stretch.keys, 1, recurrence_->likeness.data());
  if (matrices) {
    times(matrices, width / kTile, recurrence_->products.data());
  } else {
    std::fill_n(recurrence_->products.begin(), 2 * n * width, 0.0f);
  }
  const int ratio = (int)op.ratio();
  for (int i = 0; i < n; i++)
    for (int head = 0; head < ratio; head++) write_row(op, rows, i, head, x + i * stride + 2 * key_dim, stretch);
}

// Computes the delta and the result of position number i of the rows for one value head. values: v of the position's
// value heads, overwritten.
void Worker::write_row(const plan::DeltaNet& op, const Rows& rows, int i, int head, float* values,
                       const Stretch& stretch) {
  const int64_t size = op.value_dim, ratio = op.ratio(), width = op.delta_width();
  const int64_t own = width / ratio, number = rows.head * ratio + head;
  const int at = rows.at + i;
  const auto &of_projected = d_.of(plan::Value::projected), &attended = d_.of(plan::Value::attended);
  const int64_t row = rows.lane * kBlock + rows.first + i;
  const float* const projected = of_projected.floats() + row * of_projected.padded;
  // Points to the head's b; its a is `ratio` floats further on.
  const float* const steps = projected + op.steps_begin() + rows.head * 2 * ratio + head;
  const float beta = 1 / (1 + std::exp(-steps[0]));
  const float step = steps[ratio] + d_.small(op.step, rows.lane)[number];
  const float softplus = std::max(step, 0.0f) + std::log1p(std::exp(-std::fabs(step)));
  stretch.decays[at * ratio + head] = std::exp(-std::exp(d_.small(op.decay, rows.lane)[number]) * softplus);

  const float *parts[kTile + 1], *const alike = recurrence_->likeness.data() + i * kTile,
                                        *const alike_query = alike + rows.count * kTile;
  float weights[kTile + 1], query_weights[kTile + 1], left = 1;
  for (int j = at; j >= 0; j--) {
    parts[j + 1] = stretch.deltas + j * width + head * own;
    weights[j + 1] = -beta * left * alike[j];
    query_weights[j + 1] = left * alike_query[j];
    left *= stretch.decays[j * ratio + head];
  }
  float* const value = values + head * size;
  const float* const seen = recurrence_->products.data() + i * width + head * own;
  for (int64_t c = 0; c < size; c++) value[c] = beta * (value[c] - left * seen[c]);
  parts[0] = value;
  k_.add_parts(parts, weights, at + 1, false, size, stretch.deltas + at * width + head * own);

  const float* const found = seen + rows.count * width;
  for (int64_t c = 0; c < size; c++) value[c] = left * found[c];
  float* const out = attended.floats() + row * attended.padded + number * size;
  k_.add_parts(parts, query_weights, at + 2, false, size, out);
  k_.rms_norm(out, d_.small(op.norm.gain, rows.lane), op.norm.eps, size, out);
  const float* const z = projected + rows.head * op.head_rows() + op.head_channels() + head * size;
  k_.gate(z, size, out);
  for (int64_t c = 0; c < size; c++) out[c] *= z[c];
}

}  // namespace laneformer
