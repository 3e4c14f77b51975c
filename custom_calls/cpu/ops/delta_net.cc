// Gated DeltaNet: op DeltaNet. A value head keeps its matrix S as it was at its base, a
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
#include <vector>

#include "../../common/checks.h"
#include "../worker.h"
#include "op.h"

namespace laneformer {

static_assert(plan::kEntries == kTile, "the keys of as many positions are a tile");

namespace {

class DeltaNetOp final : public Op {
 public:
  explicit DeltaNetOp(const plan::DeltaNet& op)
      : op_(op), unit_(op.key_dim, 1 / std::sqrt((float)op.key_dim)), unit_query_(op.key_dim, 1 / (float)op.key_dim) {}

  void scratch(Arena& own, Arena&) const override { Buffers(op_, own); }
  void run(Worker& w, int module) const override;

 private:
  struct Buffers {  // for one key head
    Buffers(const plan::DeltaNet& op, Arena& own)
        : inputs(own.floats((op.taps() - 1 + kBlock) * op.head_channels())),
          mixed(own.floats(kBlock * (op.head_channels() + kTile))),
          rows(own.floats(2 * kTile * op.key_dim)),
          prepared(own.floats(prepared_floats(op.key_dim, 2 * kTile))),
          products(own.floats(2 * kTile * op.delta_width())),
          similarity(own.floats(2 * kTile * kTile)),
          scaled(own.floats(kTile * op.delta_width())),
          scratch(own.floats(op.key_dim * op.delta_width())) {}
    float* inputs;      // [taps - 1 + kBlock][channels]: what the convolution reads
    float* mixed;       // [kBlock][channels, padded]: its results, q, k and v
    float* rows;        // [2 kTile][key_dim]: keys, then queries
    float* prepared;    // these rows as a product reads them
    float* products;    // [2 kTile][delta_width]: these rows times the matrices
    float* similarity;  // [2 kTile][kTile]: these rows times the keys of a stretch
    float* scaled;      // [kTile][value_dim, padded]: deltas times later decays
    float* scratch;     // the matrices after positions that are not certain yet
  };
  struct Stretch {                  // the entries of kTile positions
    float *keys, *deltas, *decays;  // [key_dim][kTile], [kTile][delta_width], [kTile][value heads of the key head]
  };
  struct Rows {                        // `count` block positions from `first` on, of a lane and key head
    int lane, head, first, count, at;  // at: place of the first one in its stretch
  };
  void recur(Worker& w, const Buffers& buffers, int layer, const Run& run, int lane, int head) const;
  void read_inputs(Worker& w, const Buffers& buffers, const Run& run, int lane, int head, char* kept) const;
  int64_t convolve(Worker& w, const Buffers& buffers, const Run& run, int lane, int head) const;
  Stretch stretch_of(float* entries, int64_t from) const;
  void advance(Worker& w, const Buffers& buffers, const float* from, const Stretch& by, float* to) const;
  void read_out(Worker& w, const Buffers& buffers, const Rows& rows, const float* matrices, float* x, int64_t stride,
                const Stretch& stretch) const;
  void write_row(Worker& w, const Buffers& buffers, const Rows& rows, int i, int head, float* values,
                 const Stretch& stretch) const;

  const plan::DeltaNet op_;
  const std::vector<float> unit_, unit_query_;  // [key_dim]: gains that make unit vectors of keys and queries
};

// Runs this worker's units: a unit is a key head of a lane with its value heads, and always has the same worker.
void DeltaNetOp::run(Worker& w, int module) const {
  Arena own = w.arena();
  const Buffers buffers(op_, own);
  const bool shared = w.state.lanes_shared;
  const int64_t first_lane = shared ? 0 : w.first_lane;
  const int64_t units = ((shared ? w.plan.lanes : w.last_lane) - first_lane) * op_.key_heads;
  const int64_t first = shared ? units * w.index / w.workers : 0;
  const int64_t last = shared ? units * (w.index + 1) / w.workers : units;
  for (int64_t unit = first; unit < last; unit++)
    for (int r = 0; r < w.pass->runs; r++)
      recur(w, buffers, module / 2, w.pass->run[r], (int)(first_lane + unit / op_.key_heads),
            (int)(unit % op_.key_heads));
}

// The stretch that begins at position `from`, a multiple of kTile, in the entries of a key head. Two stretches are
// kept: the one from the base on, and the next one, which rows of a pass may begin.
DeltaNetOp::Stretch DeltaNetOp::stretch_of(float* entries, int64_t from) const {
  float* const keys = entries + from / kTile % 2 * op_.stretch_floats();
  float* const deltas = keys + kTile * op_.key_dim;
  return {keys, deltas, deltas + kTile * op_.delta_width()};
}

// Writes to `to` the matrices of a key head's value heads after a whole stretch. from: the matrices before it, null for
// zero; it may be `to`.
void DeltaNetOp::advance(Worker& w, const Buffers& buffers, const float* from, const Stretch& by, float* to) const {
  const int64_t ratio = op_.ratio(), width = op_.delta_width(), own = width / ratio;
  for (int64_t head = 0; head < ratio; head++) {
    float decay = 1;
    for (int j = kTile - 1; j >= 0; j--) {
      for (int64_t i = 0; i < own; i++) buffers.scaled[j * own + i] = decay * by.deltas[j * width + head * own + i];
      decay *= by.decays[j * ratio + head];
    }
    const int64_t at = head * own * op_.key_dim;
    w.kernels.advance(from ? from + at : nullptr, decay, by.keys, buffers.scaled, op_.key_dim, own / kTile, to + at);
  }
}

// Writes what the convolution reads of a key head's channels to buffers.inputs: the last positions before the run,
// from the ring `kept`, then the run's. Adds the run's positions to the ring, rounded to the cache's dtype as they are
// read later.
void DeltaNetOp::read_inputs(Worker& w, const Buffers& buffers, const Run& run, int lane, int head, char* kept) const {
  const int64_t channels = op_.head_channels(), width = bytes_of(w.state.cache), ring = op_.ring();
  const int64_t before = op_.taps() - 1, values = channels - 2 * op_.key_dim;
  const auto& projected = w.state.of(plan::Value::projected);
  float* to = buffers.inputs;
  for (int64_t t = run.start - before; t < run.start; t++, to += channels) {
    if (t < 0) {
      std::fill_n(to, channels, 0.0f);
    } else {
      w.kernels.widen(w.state.cache, kept + t % ring * channels * width, channels, to);
    }
  }
  for (int i = 0; i < run.count; i++, to += channels) {
    const float* const from =
        projected.floats() + (lane * kBlock + run.first + i) * projected.padded + head * (channels + values);
    std::memcpy(to, from, channels * sizeof(float));
    if (w.state.cache == Dtype::f32 && i < run.count - ring) continue;
    char* const place = kept + (run.start + i) % ring * channels * width;
    w.kernels.narrow(w.state.cache, to, channels, place);
    w.kernels.widen(w.state.cache, place, channels, to);
  }
}

// Convolves the run's positions into buffers.mixed and makes unit vectors of queries and keys. Returns the floats
// from one position to the next there.
int64_t DeltaNetOp::convolve(Worker& w, const Buffers& buffers, const Run& run, int lane, int head) const {
  const int64_t key_dim = op_.key_dim, channels = op_.head_channels(), values = channels - 2 * key_dim;
  const int64_t stride = (channels + kTile - 1) / kTile * kTile, all = op_.channels(), taps = op_.taps();
  const float* const weights = w.state.small(op_.convolution, lane);  // [taps][all]
  const struct {
    int64_t at, weight, count;
  } parts[] = {{0, head * key_dim, key_dim},
               {key_dim, (op_.key_heads + head) * key_dim, key_dim},
               {2 * key_dim, 2 * op_.key_heads * key_dim + head * values, values}};
  for (int i = 0; i < run.count; i++) {
    float* const y = buffers.mixed + i * stride;
    std::fill_n(y, stride, 0.0f);
    for (const auto& part : parts)
      for (int64_t tap = 0; tap < taps; tap++) {
        const float* const x = buffers.inputs + (i + tap) * channels + part.at;
        const float* const w = weights + tap * all + part.weight;
        for (int64_t c = 0; c < part.count; c++) y[part.at + c] += w[c] * x[c];
      }
    w.kernels.activate(Activation::kSilu, false, y, stride / kTile, y);
    const float eps = op_.unit_eps / (float)key_dim;
    w.kernels.rms_norm(y, unit_query_.data(), eps, key_dim, y);
    w.kernels.rms_norm(y + key_dim, unit_.data(), eps, key_dim, y + key_dim);
  }
  return stride;
}

// Takes a run's positions through a key head and its value heads.
void DeltaNetOp::recur(Worker& w, const Buffers& buffers, int layer, const Run& run, int lane, int head) const {
  const int64_t key_dim = op_.key_dim, width = op_.delta_width(), state = key_dim * width;
  const auto kept = [&](plan::Kept kind) { return w.state.kept_of(*run.slot->call, kind, layer, lane); };
  int32_t& base = ((int32_t*)kept(plan::Kept::base))[head];
  float* const entries = (float*)kept(plan::Kept::entries) + head * 2 * op_.stretch_floats();
  float* const matrices = (float*)kept(plan::Kept::state) + head * state;
  const float* now = matrices;
  if (run.start == 0) base = 0;
  const auto current = [&] { return base == 0 && now == matrices ? nullptr : now; };  // null: zero
  read_inputs(w, buffers, run, lane, head,
              (char*)kept(plan::Kept::inputs) + head * op_.ring() * op_.head_channels() * bytes_of(w.state.cache));
  const int64_t stride = convolve(w, buffers, run, lane, head);
  const int64_t sure = run.start + run.count - run.rows;  // positions before it are certain
  int64_t from = base;                                    // first position of the stretch
  for (int64_t t = run.start; t < run.start + run.count;) {
    for (; t >= from + kTile; from += kTile) {
      const bool commit = from + kTile <= sure;
      float* const to = commit ? matrices : buffers.scratch;
      advance(w, buffers, current(), stretch_of(entries, from), to);
      now = to;
      if (commit) base = (int32_t)from + kTile;
    }
    const int count = (int)std::min<int64_t>(from + kTile, run.start + run.count) - (int)t;
    const int place = (int)(t - run.start);
    read_out(w, buffers, {lane, head, run.first + place, count, (int)(t - from)}, current(),
             buffers.mixed + place * stride, stride, stretch_of(entries, from));
    t += count;
  }
}

// Takes positions of one stretch, from place rows.at on. x: their q, k and v, `stride` floats from one position to the
// next. matrices: S at the beginning of the stretch, null for zero.
void DeltaNetOp::read_out(Worker& w, const Buffers& buffers, const Rows& rows, const float* matrices, float* x,
                          int64_t stride, const Stretch& stretch) const {
  const int64_t key_dim = op_.key_dim, width = op_.delta_width();
  const int n = rows.count;
  float* const vectors = buffers.rows;  // keys, then queries
  for (int i = 0; i < n; i++) {
    const float *const q = x + i * stride, *const k = q + key_dim;
    std::memcpy(vectors + i * key_dim, k, key_dim * sizeof(float));
    std::memcpy(vectors + (n + i) * key_dim, q, key_dim * sizeof(float));
    for (int64_t c = 0; c < key_dim; c++) stretch.keys[c * kTile + rows.at + i] = k[c];
  }
  const auto multiply = [&](const float* tiles, int64_t count, float* y) {
    w.kernels.product(Dtype::f32, Activations::exact, tiles, buffers.prepared, key_dim, count, 2 * n, y, count * kTile);
  };
  w.kernels.prepare(Dtype::f32, Activations::exact, vectors, key_dim, key_dim, 2 * n, buffers.prepared);
  multiply(stretch.keys, 1, buffers.similarity);
  if (matrices) {
    multiply(matrices, width / kTile, buffers.products);
  } else {
    std::fill_n(buffers.products, 2 * n * width, 0.0f);
  }
  const int ratio = (int)op_.ratio();
  for (int i = 0; i < n; i++)
    for (int head = 0; head < ratio; head++)
      write_row(w, buffers, rows, i, head, x + i * stride + 2 * key_dim, stretch);
}

// Computes the delta and the result of position number i of the rows for one value head. values: v of the position's
// value heads, overwritten.
void DeltaNetOp::write_row(Worker& w, const Buffers& buffers, const Rows& rows, int i, int head, float* values,
                           const Stretch& stretch) const {
  const int64_t size = op_.value_dim, ratio = op_.ratio(), width = op_.delta_width();
  const int64_t own = width / ratio, number = rows.head * ratio + head;
  const int at = rows.at + i;
  const auto &of_projected = w.state.of(plan::Value::projected), &attended = w.state.of(plan::Value::attended);
  const int64_t row = rows.lane * kBlock + rows.first + i;
  const float* const projected = of_projected.floats() + row * of_projected.padded;
  // Points to the head's b; its a is `ratio` floats further on.
  const float* const steps = projected + op_.steps_begin() + rows.head * 2 * ratio + head;
  const float beta = 1 / (1 + std::exp(-steps[0]));
  const float step = steps[ratio] + w.state.small(op_.step, rows.lane)[number];
  const float softplus = std::max(step, 0.0f) + std::log1p(std::exp(-std::fabs(step)));
  stretch.decays[at * ratio + head] = std::exp(-std::exp(w.state.small(op_.decay, rows.lane)[number]) * softplus);

  const float *parts[kTile + 1], *const key_similarity = buffers.similarity + i * kTile,
                                        *const query_similarity = key_similarity + rows.count * kTile;
  float weights[kTile + 1], query_weights[kTile + 1], left = 1;
  for (int j = at; j >= 0; j--) {
    parts[j + 1] = stretch.deltas + j * width + head * own;
    weights[j + 1] = -beta * left * key_similarity[j];
    query_weights[j + 1] = left * query_similarity[j];
    left *= stretch.decays[j * ratio + head];
  }
  float* const value = values + head * size;
  const float* const seen = buffers.products + i * width + head * own;
  for (int64_t c = 0; c < size; c++) value[c] = beta * (value[c] - left * seen[c]);
  parts[0] = value;
  w.kernels.add_parts(parts, weights, at + 1, false, size, stretch.deltas + at * width + head * own);

  const float* const found = seen + rows.count * width;
  for (int64_t c = 0; c < size; c++) value[c] = left * found[c];
  float* const out = attended.floats() + row * attended.padded + number * size;
  w.kernels.add_parts(parts, query_weights, at + 2, false, size, out);
  w.kernels.rms_norm(out, w.state.small(op_.norm.gain, rows.lane), op_.norm.eps, size, out);
  const float* const z = projected + rows.head * op_.head_rows() + op_.head_channels() + head * size;
  w.kernels.gate(z, size, out);
  for (int64_t c = 0; c < size; c++) out[c] *= z[c];
}

}  // namespace

std::unique_ptr<Op> make_op(const plan::DeltaNet& op, Setup& setup) {
  setup.attention = nullptr;
  setup.state.hold(plan::Value::attended, op.width());
  setup.state.transposed[op.convolution.number] = true;
  return std::make_unique<DeltaNetOp>(op);
}

namespace plan {

void check(const DeltaNet& op, Checks& checks) {
  require(op.key_heads <= kMostHeads && op.value_heads <= kMostHeads && op.key_dim <= kMostHeads &&
              op.value_dim <= kMostHeads,
          "too many heads");
  require(op.value_heads % op.key_heads == 0, "value heads are not a multiple of key heads");
  require(op.convolution.columns == 0 && op.convolution.size % op.channels() == 0,
          "a convolution has other channels than its heads");
  checks.norm(op.norm, op.value_dim);
  require(checks.channels_of(Value::projected) == op.projected(),
          "DeltaNet reads another number of channels than are projected");
  checks.channels_of(Value::attended) = op.width();
}

}  // namespace plan

}  // namespace laneformer
