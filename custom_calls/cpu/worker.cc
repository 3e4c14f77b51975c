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
    : d_(state),
      m_(state.plan),
      k_(*state.kernels),
      progress_(state.progress[index]),
      index_(index),
      count_(state.threads),
      first_lane_(m_.lanes * index / count_),
      last_lane_((m_.lanes * (index + 1) + count_ - 1) / count_),
      random_(0x9E3779B97F4A7C15u * (index + 1)) {
  int64_t bytes = 0, widest = std::max(1, m_.streams()) * (int64_t)m_.hidden_size, rows_of_y = 0, heads = 0,
          kv_heads = 0, summed = 0;
  for (const Product* product : d_.products) {
    const int64_t units = product->units(), all = units * product->matrices;
    Packed& packed = packed_.emplace_back();
    packed.first_unit = all * index / count_;
    packed.offset = bytes;  // `place` changes it if the form is chosen later
    for (int64_t first = all * index / count_, last = all * (index + 1) / count_; first < last;) {
      const int64_t matrix = first / units, end = std::min(last, (matrix + 1) * units);
      packed.shares.push_back({(int)matrix, first - matrix * units, end - matrix * units});
      first = end;
    }
    for (const Share& share : packed.shares) {
      packed.bytes += (share.last - share.first) * product->unit_bytes();
      const int64_t rows = kTile * (share.last - share.first);
      if (product->gated) rows_of_y = std::max(rows_of_y, 2 * rows * kBlock);
      if (product->added || product->blocks) rows_of_y = std::max(rows_of_y, rows * kBlock);
      if (product == &d_.head) rows_of_y = std::max(rows_of_y, rows * kMostRows);
    }
    widest = std::max(widest, product->columns);
    if (product->experts) {
      rows_of_y = std::max(rows_of_y, product->unit_tiles() * units * kTile * kBlock);
      for (int lane = first_lane_; lane < last_lane_ && product->summed; lane++) {
        const Part part = part_of(lane, units);
        summed = std::max(summed, kBlock * product->used * kTile * (part.last - part.first));
      }
    } else if (product->apart) {
      packed.apart = Region(packed.bytes);
    } else {
      bytes += packed.bytes;
    }
  }
  if ((int)d_.products.size() > d_.head.number + 1) {  // there are routers or mixers
    routes_.resize(last_lane_ - first_lane_);
    for (const Product* product : d_.products)
      if (product->apart) choice_.resize(std::max((int64_t)choice_.size(), 2 * product->rows));
    groups_.resize(std::max<size_t>(choice_.size(), 2));
    own_.resize(kBlock * widest);
    each_ = Region(summed * sizeof(float));
  }
  stream_ = Region(bytes);
  used_ = d_.options.bf12 ? 0 : bytes;
  const std::vector<Share>& vocab = shares(d_.head);
  if (!vocab.empty()) {
    const Share &front = vocab.front(), &back = vocab.back();
    vocab_first_ = front.matrix * d_.head.rows + front.first * kTile;
    vocab_last_ = back.matrix * d_.head.rows + std::min(d_.head.rows, back.last * kTile);
  }
  name_head_tiles();

  const int64_t d = m_.hidden_size;
  int64_t queries = 0, space = 0;
  for (int m = 0; m < m_.num_modules(); m++)
    for (const plan::Op& op : m_.module(m).ops) {
      if (const auto* attend = std::get_if<plan::Attend>(&op)) {
        heads = std::max(heads, (int64_t)attend->heads * attend->head_dim);
        kv_heads = std::max(kv_heads, (int64_t)attend->kv_heads * attend->head_dim);
      }
      if (const auto* attend = std::get_if<plan::LatentAttend>(&op)) {
        const int64_t entry = attend->rank + attend->rotating();
        queries = std::max(queries, attend->heads * entry);
        heads = std::max(heads, (int64_t)attend->rank);
        kv_heads = std::max(kv_heads, entry);
        space = std::max(space, latent_floats(entry, attend->rank));
      }
      if (const auto* keep = std::get_if<plan::CompressedKeep>(&op)) {
        kv_heads = std::max(kv_heads, (int64_t)keep->channels);
        for (const auto* compressor : {&keep->entries, &keep->keys}) {
          if (!*compressor) continue;
          kv_heads = std::max(kv_heads, (int64_t)(*compressor)->channels);
          parts_of_entry_.resize(std::max((int64_t)parts_of_entry_.size(), 3 * ((*compressor)->earlier() + 1)));
        }
      }
      if (const auto* attend = std::get_if<plan::CompressedAttend>(&op)) {
        heads = std::max(heads, attend->width());
        space = std::max(space, latent_floats(attend->head_dim, attend->head_dim));
        if (!attend->index) continue;
        queries = std::max<int64_t>(queries, attend->index->heads * attend->index->channels);
        space = std::max(space, index_floats(attend->index->heads, attend->index->channels));
        order_.resize(d_.index_entries);
      }
      if (const auto* delta = std::get_if<plan::DeltaNet>(&op); delta && !recurrence_) {
        recurrence_ = std::make_unique<Recurrence>(*delta);
        widest = std::max<int64_t>(widest, delta->key_dim);
      }
    }
  x_.resize((last_lane_ - first_lane_) * kBlock * d);
  if (m_.streams()) {
    streams_.resize((last_lane_ - first_lane_) * kBlock * m_.streams() * d);
    joins_.resize((last_lane_ - first_lane_) * kBlock * m_.streams() * (m_.streams() + 1));
    joined_.resize(m_.streams() * d);
    rows_.resize(m_.streams() * (m_.streams() + 2));
  }
  size_t apart = 0;
  for (const auto& events : m_.events)
    for (const plan::Event& event : events) apart = std::max(apart, event.apart.size());
  h_.resize(kBlock * widest);
  a_.resize(kBlock * heads);
  prepared_.resize(std::max(prepared_floats(widest, kBlock), queries));
  y_.resize(rows_of_y);
  q_.resize(kBlock * std::max(heads, queries));
  space_.resize(space);
  key_.resize(kv_heads);
  turns_.resize(m_.rotaries.size());
  for (size_t i = 0; i < turns_.size(); i++) {
    turns_[i].cos.resize(kBlock * m_.rotaries[i].frequencies.size());
    turns_[i].sin.resize(turns_[i].cos.size());
  }
  total_.resize(kBlock * d);
  share_.resize(m_.lanes * d);
  added_.resize(std::max<size_t>(apart + 1, m_.lanes));
  factors_.resize(added_.size());
  module_points_.resize(m_.num_modules());
  if (d_.options.one_thread_per_lane) {
    received_.resize(m_.sums.size() * kBlock * d);
    has_.resize(m_.sums.size());
  }
}

// ---------------------------------------------------------------------------------------------------- synchronisation

void Worker::reset() {
  progress_.raise(0);
  progress_.core = -1;  // unknown: the caller's thread, not the worker's, has raised it
  point_ = 0;
}

void Worker::delay() {
  if (d_.options.chaos_us == 0) return;
  random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
  const int64_t until = now_ns() + (int64_t)(random_ % (1000ull * d_.options.chaos_us));
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
    return std::any_of(&d_.progress[0], &d_.progress[count_],
                       [&](const Counter& progress) { return progress.needs(here, point); });
  };
  const int64_t timeout_ns = d_.options.timeout_ms * 1'000'000LL;
  for (int w = 0; w < count_; w++)
    if (w != index_ && !d_.progress[w].wait(point, d_.stopped, timeout_ns, d_.spin_ns, crowded)) {
      d_.fail("worker " + std::to_string(w) + " of " + std::to_string(count_) + " timed out at the barrier after " +
              std::to_string(d_.options.timeout_ms) + " ms");
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
    for (int turn = 0; !d_.passes[turn].over; turn ^= 1) {
      pass_ = &d_.passes[turn];
      if (pass_->positions) step();
      if (pass_->rows) sample();
      if (index_ == 0) d_.schedule.plan(*d_.leader, *pass_, d_.passes[turn ^ 1]);
      meet();
      if (index_ == 0) d_.schedule.publish();
    }
  } catch (const Stopped&) {
  }
}

void Worker::step() {
  positions_ = pass_->positions;
  const int64_t began = clock();
  for (int p = 0; p < positions_; p++) {
    d_.embed(pass_->tokens[p], stream(first_lane_, p));
    for (int lane = first_lane_ + 1; lane < last_lane_; lane++)
      std::memcpy(stream(lane, p), stream(first_lane_, p), m_.hidden_size * sizeof(float));
    for (int lane = first_lane_; lane < last_lane_; lane++)
      for (int s = 0; s < m_.streams(); s++)
        std::memcpy(streams(lane, p) + s * (int64_t)m_.hidden_size, stream(lane, p), m_.hidden_size * sizeof(float));
  }
  for (const Run* run = pass_->run; run < pass_->run + pass_->runs; run++)
    for (int i = 0; i < run->count; i++) turn(run->first + i, run->start + i);
  mark(kEmbed, 0, began);
  std::fill(has_.begin(), has_.end(), 0);
  token_tags_ = tags_;
  tags_ += (uint32_t)m_.sums.size() + 1;
  const int modules = m_.num_modules();
  for (int t = 0; t < modules; t++) {
    for (size_t i = 0; i < m_.sums.size(); i++)
      if (m_.sums[i].stream_mean && m_.sums[i].complete_at == t) keep_streams((int)i);
    module(t);
    module_points_[t] = arrive();
    if (d_.mail) send(t);
    apply(t);
  }
  apply(modules);
  if (pass_->rows) head();
}

// Computes cos and sin of all angles at block position p, which is position `position` of its text.
void Worker::turn(int p, int64_t position) {
  for (size_t r = 0; r < turns_.size(); r++) {
    const plan::Rotary& rotary = m_.rotaries[r];
    const size_t pairs = rotary.frequencies.size();
    for (size_t i = 0; i < pairs; i++) {
      const float angle = (float)position * rotary.frequencies[i];
      turns_[r].cos[p * pairs + i] = std::cos(angle) * rotary.factor;
      turns_[r].sin[p * pairs + i] = std::sin(angle) * rotary.factor;
    }
  }
}

// Runs the ops of a module. Workers that share lanes meet between two ops, as an op reads what all have written.
void Worker::module(int number) {
  bool first = true;
  for (const Op& op : d_.modules[number]) {
    if (!first) meet_if_shared();
    first = false;
    const int64_t began = clock();
    std::visit([&](const auto& one) { run(one, number); }, op);
    const auto* product = std::get_if<Product>(&op);
    const int kind = count_of(plan::ProductName{}) + (int)op.index() - 1;
    mark(kOps + (product ? (int)product->name : kind), number / 2, began);
  }
}

// The vectors that a product reads in a lane, or one block of it; normed if the product has a norm.
Worker::Vectors Worker::vectors_of(const Product& product, int lane, int block) {
  Vectors found{a_.data(), product.columns, positions_};
  if (product.reads == plan::Value::stream) {
    found = {stream(lane, 0), m_.hidden_size, positions_};
  } else if (product.reads == plan::Value::streams) {
    found = {streams(lane, 0), (int64_t)m_.streams() * m_.hidden_size, positions_};
  } else if (product.reads == plan::Value::attended && attended_.index()) {
    const auto merge_of = [&](const auto& op) {
      if constexpr (!std::is_same_v<decltype(op), const std::monostate&>) merge(*op, {lane, block, product.columns});
    };
    std::visit(merge_of, attended_);
  } else {
    found.x = target(product.reads, 0, lane, &found.stride) + block * product.block_step;
  }
  if (!product.normed) return found;
  const bool of_streams = product.reads == plan::Value::streams;  // a block reads one stream; the norm is over all
  const float* gain = of_streams ? d_.ones.data() : d_.small(product.norm.gain, lane);
  const int64_t n = of_streams ? found.stride : product.columns;
  for (int p = 0; p < positions_; p++)
    k_.rms_norm(found.x + p * found.stride, gain, product.norm.eps, n, h_.data() + p * n);
  return {h_.data() + (of_streams ? block * product.block_step : 0), n, positions_};
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
    d_.instructions.quantized->prepare(piece.format, product.activations, from.x, from.stride, n, x.positions,
                                       prepared_.data());
  } else {
    k_.prepare(product.dtype, product.activations, from.x, from.stride, n, x.positions, prepared_.data());
  }
}

// Address of a lane's value at block position 0. stride: floats from one position to the next.
float* Worker::target(plan::Value value, int module, int lane, int64_t* stride) const {
  const auto& held = d_.of(value);
  *stride = held.padded;
  return value == plan::Value::output ? output(module, lane, 0) : held.floats() + lane * kBlock * *stride;
}

// A tile in the session's dtype by its number: among the tiles that this worker packs, or, if the product has experts,
// among the tiles of all experts.
const char* Worker::tiles(const Product& product, int64_t tile) const {
  const char* first = product.experts ? d_.forms[product.number].experts.data : weights(product);
  return first + tile * tile_bytes(product.dtype, product.columns);
}

// Multiplies one share of a product, whose first tile is number `tile`, by the vectors x. Writes row r of the share's
// tile t at position p to y[p * ldy + kTile * t + r]. Returns the number of the next share's first tile.
int64_t Worker::times(const Product& product, const Share& share, int64_t tile, const Vectors& x, float* y,
                      int64_t ldy) {
  const int64_t of = product.unit_tiles(), first = share.first * of, count_here = share.last * of - first;
  const int64_t columns = product.columns;
  const float* const prepared = prepared_.data();
  const Form& form = d_.forms[product.number];
  const auto plain = [&](int64_t at, int64_t count) {
    k_.product(product.dtype, product.activations, tiles(product, tile + at), prepared, columns, count, x.positions,
               y + at * kTile, ldy);
  };
  for (const Piece& piece : form.pieces) {
    const int64_t begin = piece.before(first), end = piece.before(first + count_here);
    const int64_t together = piece.step == 1 ? end - begin : 1;
    if (begin < end) prepare(product, piece, x);
    for (int64_t j = begin; j < end; j += together) {
      const int64_t at = piece.first + j * piece.step - first;
      if (piece.tiles) {
        d_.instructions.quantized->product(piece.format, product.activations, piece.of_matrix(share.matrix),
                                           piece.count, j, together, prepared, piece.columns, x.positions,
                                           y + at * kTile, ldy);
      } else {
        plain(at, together);
      }
    }
  }
  if (!form.pieces.empty()) return tile + count_here;
  k_.prepare(product.dtype, product.activations, x.x, x.stride, columns, x.positions, prepared_.data());
  if (form.bf12) {
    k_.product_bf12(product.activations, bf12(product, tile), prepared, columns, count_here, x.positions, y, ldy);
  } else {
    plain(0, count_here);
  }
  return tile + count_here;
}

// Adds the biases to a share's results in y, where `times` has written them.
void Worker::add_biases(const Product& product, int lane, const Share& share, int positions, float* y,
                        int64_t ldy) const {
  const int64_t first = share.first * kTile, last = std::min(product.rows, share.last * kTile);
  for (const Product::Bias& bias : product.biases) {
    const float* values = d_.small(bias.vector, lane) + share.matrix % std::max(product.experts, 1) * bias.vector.size;
    if (product.gated) {  // tiles of gate and up rows alternate
      float* const own = y + (bias.first > 0 ? kTile : 0);
      for (int p = 0; p < positions; p++)
        for (int64_t row = first; row < last; row += kTile)
          k_.add_scaled(own + p * ldy + 2 * (row - first), values + row, 1.0f, std::min<int64_t>(kTile, last - row));
      continue;
    }
    const int64_t begin = std::max(first, bias.first), end = std::min(last, bias.first + bias.vector.size);
    for (int p = 0; p < positions && begin < end; p++)
      k_.add_scaled(y + p * ldy + begin - first, values + begin - bias.first, 1.0f, end - begin);
  }
}

// Applies the product's limits and activation to the units of one position. out: [units][kTile]; it may be `tiles`
// unless the product is gated.
void Worker::activate(const Product& product, int64_t units, float* tiles, float* out) const {
  if (product.limit || product.up_offset != 0)
    k_.limit_gated(product.limit.value_or(INFINITY), product.up_offset, units, tiles);
  k_.activate(product.activation, product.gated, tiles, units, out);
}

// Computes this worker's shares of a product and writes them to its value.
void Worker::run(const Product& product, int module) {
  if (product.experts) return run_experts(product, module);
  if (product.blocks) return run_blocks(product, module);
  int64_t tile = 0;
  for (const Share& share : shares(product)) {
    const int64_t units = share.last - share.first, first = share.first * kTile;
    int64_t stride;
    const int lane = share.matrix;
    const Vectors x = vectors_of(product, lane);
    float* const y = target(product.writes, module, lane, &stride) + first;
    if (product.gated) {
      const int64_t ldy = 2 * kTile * units;
      tile = times(product, share, tile, x, y_.data(), ldy);
      add_biases(product, lane, share, positions_, y_.data(), ldy);
      for (int p = 0; p < positions_; p++) activate(product, units, y_.data() + p * ldy, y + p * stride);
      continue;
    }
    tile = times(product, share, tile, x, y, stride);
    add_biases(product, lane, share, positions_, y, stride);
    for (int p = 0; p < positions_ && product.activation != Activation::kNone; p++)
      activate(product, units, y + p * stride, y + p * stride);
  }
}

// The same for a block-diagonal product. A block's rows may end within a tile, and the next block's rows follow them in
// the result, so padding rows are not copied.
void Worker::run_blocks(const Product& product, int module) {
  int64_t tile = 0, stride;
  for (const Share& share : shares(product)) {
    const int64_t first = share.first * kTile, last = std::min(product.rows, share.last * kTile);
    const int64_t ldy = (share.last - share.first) * kTile;
    const int lane = share.matrix / product.blocks, block = share.matrix % product.blocks;
    tile = times(product, share, tile, vectors_of(product, lane, block), y_.data(), ldy);
    float* const to = target(product.writes, module, lane, &stride) + block * product.rows + first;
    for (int p = 0; p < positions_; p++)
      std::memcpy(to + p * stride, y_.data() + p * ldy, (last - first) * sizeof(float));
  }
}

}  // namespace laneformer
