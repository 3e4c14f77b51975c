// A worker's passes from token to token, and its products. Decoder::lead runs `generate` on all workers; `step` takes
// the positions of one pass through all modules, and `module` runs a module's ops one after the other. worker.h has the
// invariant.
#include "worker.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace laneformer {

namespace {

// Sets this thread to flush subnormals to zero, as XLA does in the threads that it starts.
class FlushToZero {
#if defined(__x86_64__)
 public:
  FlushToZero() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushToZero() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
 public:
  FlushToZero() {}
#endif
};

}  // namespace

Worker::Worker(DecodeState& state, int index)
    : state(state),
      plan(state.plan),
      kernels(*state.kernels),
      index(index),
      workers(state.threads),
      first_lane(plan.lanes * index / workers),
      last_lane((plan.lanes * (index + 1) + workers - 1) / workers),
      rotations(plan),
      streams(plan.streams(), plan.hidden_size, first_lane, last_lane - first_lane),
      progress_(state.progress[index]),
      random_(0x9E3779B97F4A7C15u * (index + 1)) {
  int64_t bytes = 0, widest = std::max(1, plan.streams()) * (int64_t)plan.hidden_size, attended = 0, rows_of_y = 0;
  for (const Product* product : state.products) {
    const int64_t units = product->units(), all = units * product->matrices;
    Packed& packed = packed_.emplace_back();
    packed.first_unit = all * index / workers;
    packed.offset = bytes;  // `place` changes it if the form is chosen later
    for (int64_t first = all * index / workers, last = all * (index + 1) / workers; first < last;) {
      const int64_t matrix = first / units, end = std::min(last, (matrix + 1) * units);
      packed.shares.push_back({(int)matrix, first - matrix * units, end - matrix * units});
      first = end;
    }
    for (const Share& share : packed.shares) {
      packed.bytes += (share.last - share.first) * product->unit_bytes();
      const int64_t rows = kTile * (share.last - share.first);
      if (product->gated) rows_of_y = std::max(rows_of_y, 2 * rows * kBlock);
      if (product->added || product->blocks) rows_of_y = std::max(rows_of_y, rows * kBlock);
      if (product == &state.head) rows_of_y = std::max(rows_of_y, rows * kMostRows);
    }
    widest = std::max(widest, product->columns);
    if (product->attention) attended = std::max(attended, product->columns);
    if (product->experts) {
      rows_of_y = std::max(rows_of_y, product->unit_tiles() * units * kTile * kBlock);
    } else if (product->unstreamed) {
      packed.apart = Region(packed.bytes);
    } else {
      bytes += packed.bytes;
    }
  }
  stream_ = Region(bytes);
  used_ = state.options.bf12 ? 0 : bytes;
  const std::vector<Share>& vocab = shares(state.head);
  if (!vocab.empty()) {
    const Share &front = vocab.front(), &back = vocab.back();
    vocab_first_ = front.matrix * state.head.rows + front.first * kTile;
    vocab_last_ = back.matrix * state.head.rows + std::min(state.head.rows, back.last * kTile);
  }
  name_head_tiles();

  const int64_t d = plan.hidden_size;
  int64_t scratch = 0;
  const auto measure = [&](const Op& op) {
    Arena own, shared;
    op.scratch(own, shared);
    scratch = std::max(scratch, own.bytes());
  };
  for (const auto& module : state.modules)
    for (const auto& op : module) measure(*op);
  if (state.head_gather) measure(*state.head_gather);
  arena_ = Region(scratch);
  x_.resize((last_lane - first_lane) * kBlock * d);
  size_t apart = 0;
  for (const auto& events : plan.events)
    for (const plan::Event& event : events) apart = std::max(apart, event.apart.size());
  h_.resize(kBlock * widest);
  a_.resize(kBlock * attended);
  prepared_.resize(prepared_floats(widest, kBlock));
  y_.resize(rows_of_y);
  total_.resize(kBlock * d);
  share_.resize(plan.lanes * d);
  added_.resize(std::max<size_t>(apart + 1, plan.lanes));
  factors_.resize(added_.size());
  module_points_.resize(plan.num_modules());
  if (state.options.one_thread_per_lane) {
    received_.resize(plan.sums.size() * kBlock * d);
    has_.resize(plan.sums.size());
  }
}

// ---------------------------------------------------------------------------------------------------- synchronisation

void Worker::reset() {
  progress_.raise(0);
  progress_.core = -1;  // unknown: the caller's thread, not the worker's, has raised it
  point_ = 0;
}

void Worker::delay() {
  if (state.options.chaos_us == 0) return;
  random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
  const int64_t until = now_ns() + (int64_t)(random_ % (1000ull * state.options.chaos_us));
  while (now_ns() < until) std::this_thread::yield();
}

uint32_t Worker::arrive() {
  delay();
  progress_.raise(++point_);
  return point_;
}

void Worker::wait_for(uint32_t point) {
  const auto crowded = [&] {  // whether any worker that is behind needs this core
    const int here = this_core();
    return std::any_of(&state.progress[0], &state.progress[workers],
                       [&](const Counter& progress) { return progress.needs(here, point); });
  };
  const int64_t timeout_ns = state.options.timeout_ms * 1'000'000LL;
  for (int w = 0; w < workers; w++)
    if (w != index && !state.progress[w].wait(point, state.stopped, timeout_ns, state.spin_ns, crowded)) {
      state.fail("worker " + std::to_string(w) + " of " + std::to_string(workers) + " timed out at the barrier after " +
                 std::to_string(state.options.timeout_ms) + " ms");
      throw Stopped();
    }
  delay();
}

void Worker::trace(int64_t spans) {
  tracing_ = spans > 0;
  max_spans_ = spans;
  spans_.clear();
  spans_.reserve(spans);
}

void Worker::mark(int op, int layer, int64_t began) {
  if (tracing_ && spans_.size() < max_spans_) spans_.push_back({op, layer, began, now_ns()});
}

// ------------------------------------------------------------------------------------------------------------- modules

void Worker::generate() {
  const FlushToZero flush;
  try {
    for (int turn = 0; !state.passes[turn].over; turn ^= 1) {
      pass = &state.passes[turn];
      if (pass->positions) step();
      if (pass->rows) sample();
      if (index == 0) state.schedule.plan(*state.leader, *pass, state.passes[turn ^ 1]);
      barrier();
      if (index == 0) state.schedule.publish();
    }
  } catch (const Stopped&) {
  }
}

void Worker::step() {
  positions = pass->positions;
  const int64_t began = clock();
  for (int p = 0; p < positions; p++) {
    state.embed(pass->tokens[p], stream(first_lane, p));
    for (int lane = first_lane + 1; lane < last_lane; lane++)
      std::memcpy(stream(lane, p), stream(first_lane, p), plan.hidden_size * sizeof(float));
    for (int lane = first_lane; lane < last_lane; lane++) streams.embed(lane, p, stream(lane, p));
  }
  for (const Run* run = pass->run; run < pass->run + pass->runs; run++)
    for (int i = 0; i < run->count; i++) rotations.set_position(run->first + i, run->start + i);
  mark(kEmbed, 0, began);
  std::fill(has_.begin(), has_.end(), 0);
  token_tags_ = tags_;
  tags_ += (uint32_t)plan.sums.size() + 1;
  const int modules = plan.num_modules();
  for (int t = 0; t < modules; t++) {
    for (size_t i = 0; i < plan.sums.size(); i++)
      if (plan.sums[i].stream_mean && plan.sums[i].complete_at == t) keep_streams((int)i);
    module(t);
    module_points_[t] = arrive();
    if (state.mail) send(t);
    apply(t);
  }
  apply(modules);
  if (pass->rows) head();
}

// Runs the ops of a module. Workers that share lanes meet between two ops, as an op reads what all have written.
void Worker::module(int number) {
  bool first = true;
  for (const auto& op : state.modules[number]) {
    if (!first) barrier_if_shared();
    first = false;
    const int64_t began = clock();
    op->run(*this, number);
    mark(op->trace, number / 2, began);
  }
}

// This worker's part of `count` things in a lane. A lane is divided into `workers` shares; counted through all lanes,
// worker w has plan.lanes shares from number plan.lanes * w on. The things are divided in proportion.
Interval Worker::part_of(int lane, int64_t count) const {
  const auto before = [&](int worker) {  // things that belong to workers before this one
    const int64_t share = std::clamp<int64_t>((int64_t)plan.lanes * worker - (int64_t)lane * workers, 0, workers);
    return count * share / workers;
  };
  return {before(index), before(index + 1)};
}

// The vectors that a product reads in a lane, or one block of it; normed if the product has a norm.
Vectors Worker::vectors_of(const Product& product, int lane, int block) {
  Vectors found{a_.data(), product.columns, positions};
  if (product.reads == plan::Value::stream) {
    found = {stream(lane, 0), plan.hidden_size, positions};
  } else if (product.reads == plan::Value::streams) {
    found = {streams.of(lane, 0), (int64_t)plan.streams() * plan.hidden_size, positions};
  } else if (product.attention) {
    product.attention->merge(*this, {lane, block, product.columns}, a_.data());
  } else {
    found.x = target(product.reads, 0, lane, &found.stride) + block * product.block_step;
  }
  if (!product.normed) return found;
  const bool of_streams = product.reads == plan::Value::streams;  // a block reads one stream; the norm is over all
  const float* gain = of_streams ? state.ones.data() : state.small(product.norm.gain, lane);
  const int64_t n = of_streams ? found.stride : product.columns;
  for (int p = 0; p < positions; p++)
    kernels.rms_norm(found.x + p * found.stride, gain, product.norm.eps, n, h_.data() + p * n);
  return {h_.data() + (of_streams ? block * product.block_step : 0), n, positions};
}

// Writes the vectors to prepared_ in the form that the tiles of a piece read.
void Worker::prepare(const Product& product, const Piece& piece, const Vectors& x) {
  const int64_t n = piece.columns;
  Vectors from = x;
  if (!piece.order.empty()) {
    for (int p = 0; p < x.positions; p++)
      for (int64_t k = 0; k < n; k++) {
        const int32_t entry = piece.order[k];
        gathered_[p * n + k] = entry < 0 ? 0 : x.x[p * x.stride + entry];
      }
    from = {gathered_.data(), n, x.positions};
  }
  if (piece.tiles) {
    state.instructions.quantized->prepare(piece.format, product.activations, from.x, from.stride, n, x.positions,
                                          prepared_.data());
  } else {
    kernels.prepare(product.dtype, product.activations, from.x, from.stride, n, x.positions, prepared_.data());
  }
}

// Address of a lane's value at block position 0. stride: floats from one position to the next.
float* Worker::target(plan::Value value, int module, int lane, int64_t* stride) const {
  const auto& held = state.of(value);
  *stride = held.padded;
  return value == plan::Value::output ? output(module, lane, 0) : held.floats() + lane * kBlock * *stride;
}

// A tile in the session's dtype by its number: among the tiles that this worker packs, or, if the product has experts,
// among the tiles of all experts.
const char* Worker::tiles(const Product& product, int64_t tile) const {
  const char* first = product.experts ? state.forms[product.number].experts.data : weights(product);
  return first + tile * tile_bytes(product.dtype, product.columns);
}

// Multiplies one share of a product, whose first tile is number `tile`, by the vectors x. Writes row r of the share's
// tile t at position p to y[p * ldy + kTile * t + r]. Returns the number of the next share's first tile.
int64_t Worker::multiply(const Product& product, const Share& share, int64_t tile, const Vectors& x, float* y,
                         int64_t ldy) {
  const int64_t of = product.unit_tiles(), first = share.first * of, count_here = share.last * of - first;
  const int64_t columns = product.columns;
  const float* const prepared = prepared_.data();
  const Form& form = state.forms[product.number];
  const auto plain = [&](int64_t at, int64_t count) {
    kernels.product(product.dtype, product.activations, tiles(product, tile + at), prepared, columns, count,
                    x.positions, y + at * kTile, ldy);
  };
  for (const Piece& piece : form.pieces) {
    const int64_t begin = piece.before(first), end = piece.before(first + count_here);
    const int64_t together = piece.step == 1 ? end - begin : 1;
    if (begin < end) prepare(product, piece, x);
    for (int64_t j = begin; j < end; j += together) {
      const int64_t at = piece.first + j * piece.step - first;
      if (piece.tiles) {
        state.instructions.quantized->product(piece.format, product.activations, piece.of_matrix(share.matrix),
                                              piece.count, j, together, prepared, piece.columns, x.positions,
                                              y + at * kTile, ldy);
      } else {
        plain(at, together);
      }
    }
  }
  if (!form.pieces.empty()) return tile + count_here;
  kernels.prepare(product.dtype, product.activations, x.x, x.stride, columns, x.positions, prepared_.data());
  if (form.bf12) {
    kernels.product_bf12(product.activations, bf12(product, tile), prepared, columns, count_here, x.positions, y, ldy);
  } else {
    plain(0, count_here);
  }
  return tile + count_here;
}

// Adds the biases to a share's results in y, where `multiply` has written them.
void Worker::add_biases(const Product& product, int lane, const Share& share, int positions, float* y,
                        int64_t ldy) const {
  const int64_t first = share.first * kTile, last = std::min(product.rows, share.last * kTile);
  for (const Product::Bias& bias : product.biases) {
    const float* values =
        state.small(bias.vector, lane) + share.matrix % std::max(product.experts, 1) * bias.vector.size;
    if (product.gated) {  // tiles of gate and up rows alternate
      float* const own = y + (bias.first > 0 ? kTile : 0);
      for (int p = 0; p < positions; p++)
        for (int64_t row = first; row < last; row += kTile)
          kernels.add_scaled(own + p * ldy + 2 * (row - first), values + row, 1.0f,
                             std::min<int64_t>(kTile, last - row));
      continue;
    }
    const int64_t begin = std::max(first, bias.first), end = std::min(last, bias.first + bias.vector.size);
    for (int p = 0; p < positions && begin < end; p++)
      kernels.add_scaled(y + p * ldy + begin - first, values + begin - bias.first, 1.0f, end - begin);
  }
}

// Applies the product's limits and activation to the units of one position. out: [units][kTile]; it may be `tiles`
// unless the product is gated.
void Worker::activate(const Product& product, int64_t units, float* tiles, float* out) const {
  if (product.limit || product.up_offset != 0)
    kernels.limit_gated(product.limit.value_or(INFINITY), product.up_offset, units, tiles);
  kernels.activate(product.activation, product.gated, tiles, units, out);
}

}  // namespace laneformer
