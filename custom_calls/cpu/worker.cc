#include "worker.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace laneformer {

namespace {

// XLA computes with subnormals flushed to zero; threads that it did not start must say so themselves.
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

Worker::Worker(Decoder& decoder, int index, int count)
    : d_(decoder),
      m_(decoder.plan_),
      k_(*decoder.kernels_),
      index_(index),
      count_(count),
      first_lane_(m_.lanes * index / count),
      last_lane_((m_.lanes * (index + 1) + count - 1) / count),
      random_(0x9E3779B97F4A7C15u * (index + 1)) {
  int64_t bytes = 0, widest = m_.hidden_size, rows_of_y = 0, heads = 0, head_dim = 0;
  for (const Product* product : d_.products_) {
    const int64_t per_lane = product->units(), all = per_lane * product->lanes;
    Packed& packed = packed_.emplace_back();
    packed.offset = bytes;
    for (int64_t first = all * index / count, last = all * (index + 1) / count; first < last;) {
      const int64_t lane = first / per_lane, end = std::min(last, (lane + 1) * per_lane);
      packed.shares.push_back({(int)lane, first - lane * per_lane, end - lane * per_lane});
      first = end;
    }
    for (const Share& share : packed.shares) {
      bytes += (share.last - share.first) * product->unit_bytes(d_.weights_);
      const int64_t rows = kTile * (share.last - share.first);
      if (product->gated) rows_of_y = std::max(rows_of_y, 2 * rows * kBlock);
      if (product == &d_.head_) rows_of_y = std::max(rows_of_y, rows);
    }
    widest = std::max(widest, product->columns);
  }
  stream_ = Region(bytes);
  const std::vector<Share>& vocab = shares(d_.head_);
  if (!vocab.empty()) {
    const Share &front = vocab.front(), &back = vocab.back();
    vocab_first_ = front.lane * d_.head_.rows + front.first * kTile;
    vocab_last_ = back.lane * d_.head_.rows + std::min(d_.head_.rows, back.last * kTile);
  }

  const int64_t d = m_.hidden_size;
  for (int layer = 0; layer < m_.layers(); layer++) {
    const plan::Attend& attend = d_.attend_of(layer);
    heads = std::max(heads, (int64_t)attend.heads * attend.head_dim);
    head_dim = std::max(head_dim, (int64_t)attend.head_dim);
  }
  x_.resize((last_lane_ - first_lane_) * kBlock * d);
  h_.resize(kBlock * d);
  a_.resize(kBlock * heads);
  prepared_.resize(prepared_floats(widest, kBlock));
  y_.resize(rows_of_y);
  q_.resize(kBlock * heads);
  key_.resize(head_dim);
  turns_.resize(m_.rotaries.size());
  for (size_t i = 0; i < turns_.size(); i++) {
    turns_[i].cos.resize(kBlock * m_.rotaries[i].frequencies.size());
    turns_[i].sin.resize(turns_[i].cos.size());
  }
  total_.resize(kBlock * d);
  share_.resize(d);
  module_points_.resize(m_.modules.size());
  if (index == 0) weights_of_.resize(m_.vocab_size);
  if (d_.options_.one_thread_per_lane) {
    received_.resize(m_.sums.size() * kBlock * d);
    has_.resize(m_.sums.size());
  }
}

// ------------------------------------------------------------------------------------------------------------ meeting

void Worker::reset() {
  progress_.raise(0);
  point_ = 0;
  drawn_ = 0;
  blocks_ = 0;
}

void Worker::delay() {
  if (d_.options_.chaos_us == 0) return;
  random_ ^= random_ << 13, random_ ^= random_ >> 7, random_ ^= random_ << 17;
  const int64_t until = now_ns() + (int64_t)(random_ % (1000ull * d_.options_.chaos_us));
  while (now_ns() < until) std::this_thread::yield();
}

uint32_t Worker::arrive() {
  delay();
  progress_.raise(++point_);
  return point_;
}

void Worker::wait_for(uint32_t point) {
  for (int w = 0; w < count_; w++)
    if (w != index_ &&
        !d_.workers_[w]->progress_.wait(point, d_.stopped_, d_.options_.timeout_ms * 1'000'000LL, d_.spins_)) {
      d_.fail("worker " + std::to_string(w) + " of " + std::to_string(count_) + " did not come within " +
              std::to_string(d_.options_.timeout_ms) + " ms");
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
  const Call& call = *d_.call_;
  try {
    const int64_t n = (int64_t)call.prompt.size();
    for (int64_t i = 0; i < n; i += kBlock) {
      const int positions = (int)std::min<int64_t>(kBlock, n - i);
      step(call.prompt.data() + i, call.start + i, positions, i + positions == n);
      if (i + positions == n) break;
      const int turn = blocks_++ % 2;
      if (index_ == 0) d_.cancelled_[turn] = d_.cancel_.load(std::memory_order_relaxed);
      meet();
      if (index_ == 0) d_.absorbed_ = i + positions;
      if (d_.cancelled_[turn]) {
        if (index_ == 0) d_.end_ = End::cancelled;
        return;
      }
    }
    if (index_ == 0) d_.absorbed_ = n;
    for (int64_t position = call.start + n; sample(position); position++) {
      const int32_t token = d_.tokens[drawn_ - 1];
      step(&token, position, 1, true);
    }
  } catch (const Stopped&) {
    if (index_ == 0) d_.end_ = End::failed;
  }
}

void Worker::step(const int32_t* tokens, int64_t start, int positions, bool last) {
  start_ = start;
  positions_ = positions;
  const int64_t began = clock();
  for (int p = 0; p < positions; p++) {
    d_.embed(tokens[p], stream(first_lane_, p));
    for (int lane = first_lane_ + 1; lane < last_lane_; lane++)
      std::memcpy(stream(lane, p), stream(first_lane_, p), m_.hidden_size * sizeof(float));
    for (size_t r = 0; r < turns_.size(); r++) {
      const plan::Rotary& rotary = m_.rotaries[r];
      const size_t pairs = rotary.frequencies.size();
      for (size_t i = 0; i < pairs; i++) {
        const float angle = (float)(start + p) * rotary.frequencies[i];
        turns_[r].cos[p * pairs + i] = std::cos(angle) * rotary.factor;
        turns_[r].sin[p * pairs + i] = std::sin(angle) * rotary.factor;
      }
    }
  }
  mark(Decoder::kEmbed, 0, began);
  std::fill(has_.begin(), has_.end(), 0);
  token_tags_ = tags_;
  tags_ += (uint32_t)m_.sums.size() + 1;
  const int modules = (int)m_.modules.size();
  for (int t = 0; t < modules; t++) {
    for (size_t i = 0; i < m_.sums.size(); i++)
      if (m_.sums[i].stream_mean && m_.sums[i].complete_at == t) keep_streams((int)i);
    module(t);
    module_points_[t] = arrive();
    if (d_.mail_) send(t);
    apply(t);
  }
  apply(modules);
  if (last) head();
}

// Between two ops of a module, workers that share lanes meet: one reads what the others have written.
void Worker::module(int number) {
  bool first = true;
  for (const Op& op : d_.modules_[number]) {
    if (!first) meet_if_shared();
    first = false;
    if (const auto* product = std::get_if<Product>(&op)) {
      multiply(*product, number);
    } else {
      attention(std::get<Attention>(op));
    }
  }
}

// The vectors of all positions that a lane's product reads, as it reads them.
const float* Worker::vector_of(const Product& product, int lane) {
  const int64_t d = m_.hidden_size;
  const float* x = h_.data();
  int64_t stride = product.columns;
  if (product.reads == plan::Value::stream) {
    const float* gain = d_.small(product.norm.gain, lane);
    for (int p = 0; p < positions_; p++) k_.rms_norm(stream(lane, p), gain, product.norm.eps, d, h_.data() + p * d);
  } else if (product.reads == plan::Value::attended) {
    merge(lane);
    x = a_.data();
  } else {
    x = target(product.reads, 0, lane, &stride);
  }
  k_.prepare(d_.weights_, d_.activations_, x, stride, product.columns, positions_, prepared_.data());
  return prepared_.data();
}

// Where a lane's rows of a value are for position 0; stride: from one position to the next.
float* Worker::target(plan::Value value, int module, int lane, int64_t* stride) const {
  if (value == plan::Value::output) {
    *stride = d_.output_padded_;
    return output(module, lane, 0);
  }
  const bool hidden = value == plan::Value::hidden;
  *stride = hidden ? d_.hidden_padded_ : d_.projected_padded_;
  return (hidden ? d_.hiddens_ : d_.projected_).floats() + lane * kBlock * *stride;
}

// One share of a product, from its packed weights on; returns those of the next share.
const char* Worker::times(const Product& product, const Share& share, const char* weights, const float* prepared,
                          float* y, int64_t ldy) {
  const int64_t units = share.last - share.first;
  k_.product(d_.weights_, d_.activations_, weights, prepared, product.columns, product.gated ? 2 * units : units,
             positions_, y, ldy);
  return weights + units * product.unit_bytes(d_.weights_);
}

void Worker::multiply(const Product& product, int module) {
  const int64_t began = clock();
  const char* weights = this->weights(product);
  for (const Share& share : shares(product)) {
    const int64_t units = share.last - share.first, first = share.first * kTile;
    const int64_t last = std::min(product.rows, share.last * kTile);
    int64_t stride;
    const float* x = vector_of(product, share.lane);
    float* y = target(product.writes, module, share.lane, &stride);
    if (product.gated) {
      weights = times(product, share, weights, x, y_.data(), 2 * kTile * units);
      for (int p = 0; p < positions_; p++) k_.swiglu(y_.data() + p * 2 * kTile * units, units, y + p * stride + first);
      continue;
    }
    weights = times(product, share, weights, x, y + first, stride);
    for (const Product::Bias& bias : product.biases) {
      const int64_t begin = std::max(first, bias.first), end = std::min(last, bias.first + bias.vector.size);
      const float* values = d_.small(bias.vector, share.lane) - bias.first;
      for (int p = 0; p < positions_ && begin < end; p++)
        k_.add_scaled(y + p * stride + begin, values + begin, 1.0f, end - begin);
    }
  }
  mark(Decoder::kProducts + product.name, module / 2, began);
}

void Worker::attention(const Attention& attention) {
  const int64_t began = clock();
  const plan::Attend& op = attention.op;
  const int64_t window = op.window.value_or(INT64_MAX / 2);
  const int64_t low = std::max<int64_t>(0, start_ - window + 1), high = start_ + positions_;
  const int64_t size = 256 * ((high - low + 256 * 16 - 1) / (256 * 16)), first_chunk = low / size;
  const int chunks = (int)((high - 1) / size + 1 - first_chunk);
  int64_t first = (int64_t)first_lane_ * chunks, last = (int64_t)last_lane_ * chunks;
  if (d_.lanes_shared_) {
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
    attend(attention, keys, unit + 1 < last ? keys_of(unit + 1) : Keys{keys.lane, 0, 0}, (int)(unit % chunks), window);
  }
  attend_ = &op;
  chunks_ = chunks;
  mark(Decoder::kAttend, attention.layer, began);
}

// Norm and rotation of one head at block position p, in place.
void Worker::rotate(float* head, const plan::Attend& op, const std::optional<plan::Norm>& norm, int lane, int p) {
  const int e = op.head_dim;
  if (norm) k_.rms_norm(head, d_.small(norm->gain, lane), norm->eps, e, head);
  if (op.rotary < 0) return;
  const Turns& turns = turns_[op.rotary];
  const float *cos = turns.cos.data() + p * e / 2, *sin = turns.sin.data() + p * e / 2;
  for (int i = 0; i < e / 2; i++) {
    const float even = head[2 * i], odd = head[2 * i + 1];
    head[2 * i] = even * cos[i] - odd * sin[i];
    head[2 * i + 1] = even * sin[i] + odd * cos[i];
  }
}

void Worker::queries(const plan::Attend& op, int lane) {
  const int64_t e = op.head_dim, heads = op.heads, stride = d_.projected_padded_;
  const float scale = op.scale;  // a copy, which no write to q can change
  for (int p = 0; p < positions_; p++)
    for (int64_t h = 0; h < heads; h++) {
      float* q = q_.data() + (p * heads + h) * e;
      std::memcpy(q, d_.projected_.floats() + (lane * kBlock + p) * stride + h * e, e * sizeof(float));
      rotate(q, op, op.q_norm, lane, p);
      if (d_.activations_ == Activations::rounded) round_trip(q, e);
      for (int64_t i = 0; i < e; i++) q[i] *= scale;
    }
}

void Worker::round_trip(float* x, int64_t n) {
  k_.narrow(d_.weights_, x, n, prepared_.data());
  k_.widen(d_.weights_, prepared_.data(), n, x);
}

// The new keys and values among first..last - 1 into the cache, then all queries over these keys.
void Worker::attend(const Attention& attention, Keys part, Keys next, int chunk, int64_t window) {
  const plan::Attend& op = attention.op;
  const int64_t e = op.head_dim, n = op.kv_heads, width = bytes_of(d_.cache_);
  const auto cache = [&](const std::vector<void*>& caches, int lane) {
    return (char*)caches[attention.layer * m_.lanes + lane];
  };
  char *keys = cache(d_.call_->keys, part.lane), *values = cache(d_.call_->values, part.lane);
  for (int64_t t = std::max(part.first, start_); t < part.last; t++) {
    const int p = (int)(t - start_);
    const float* k = d_.projected_.floats() + (part.lane * kBlock + p) * d_.projected_padded_ + op.heads * e;
    for (int64_t head = 0; head < n; head++) {
      std::memcpy(key_.data(), k + head * e, e * sizeof(float));
      rotate(key_.data(), op, op.k_norm, part.lane, p);
      k_.narrow(d_.cache_, key_.data(), e, keys + (t * n + head) * e * width);
    }
    k_.narrow(d_.cache_, k + n * e, n * e, values + t * n * e * width);
  }
  float* out = d_.parts_.floats() + (int64_t)(part.lane * kChunks + chunk) * kBlock * op.heads * (e + 2);
  const int64_t ahead = next.first * n * e * width;
  k_.attend({q_.data(), keys, values, out, d_.cache_, op.kv_heads, op.heads / op.kv_heads, (int)e, part.first,
             part.last, start_, window, positions_, cache(d_.call_->keys, next.lane) + ahead,
             cache(d_.call_->values, next.lane) + ahead, next.last - next.first});
}

// a[p][heads][head_dim] from the chunks' parts, in their order.
void Worker::merge(int lane) {
  const int64_t e = attend_->head_dim, heads = attend_->heads, stride = (int64_t)kBlock * heads * (e + 2);
  const float* parts = d_.parts_.floats() + (int64_t)lane * kChunks * stride;
  for (int64_t row = 0; row < positions_ * heads; row++) {
    const float* part = parts + row * (e + 2);
    float* a = a_.data() + row * e;
    float largest = -INFINITY, sum = 0;
    for (int c = 0; c < chunks_; c++) largest = std::max(largest, part[c * stride + e]);
    std::memset(a, 0, e * sizeof(float));
    for (int c = 0; c < chunks_; c++) {
      const float weight = part[c * stride + e] == -INFINITY ? 0.0f : std::exp(part[c * stride + e] - largest);
      k_.add_scaled(a, part + c * stride, weight, e);
      sum += weight * part[c * stride + e + 1];
    }
    for (int64_t i = 0; i < e; i++) a[i] /= sum;
  }
}

// ----------------------------------------------------------------------------------------------------------- exchange

float* Worker::kept_stream(int payload, int lane, int position) const {
  return d_.streams_.floats() + (((int64_t)payload * m_.lanes + lane) * kBlock + position) * m_.hidden_size;
}

void Worker::keep_streams(int payload) {
  for (int lane = first_lane_; lane < last_lane_; lane++)
    if (owns(lane))
      for (int p = 0; p < positions_; p++)
        std::memcpy(kept_stream(payload, lane, p), stream(lane, p), m_.hidden_size * sizeof(float));
}

// What a lane gives to a sum: its outputs, weighted, and perhaps its share of the streams' mean.
const float* Worker::share_of(int payload, int lane, int position) {
  const plan::Sum& sum = m_.sums[payload];
  if (sum.parts.size() == 1 && sum.parts[0].weight == 1.0f && !sum.stream_mean)
    return output(sum.parts[0].module, lane, position);
  std::fill_n(share_.begin(), sum.width, 0.0f);
  for (const plan::Part& part : sum.parts)
    k_.add_scaled(share_.data(), output(part.module, lane, position), part.weight, sum.width);
  if (sum.stream_mean) {
    const float* kept = kept_stream(payload, lane, position);
    for (int i = 0; i < sum.width; i++) share_[i] += kept[i] / (float)m_.lanes;
  }
  return share_.data();
}

// Exchange by message: the sums that the output of this module completes.
void Worker::send(int module) {
  for (size_t i = 0; i < m_.sums.size(); i++) {
    if (m_.sums[i].complete_at != module) continue;
    for (int p = 0; p < positions_; p++)
      std::memcpy(message(p), share_of((int)i, index_, p), m_.sums[i].width * sizeof(float));
    post(token_tags_ + (uint32_t)i, positions_ * (int64_t)m_.hidden_size);
  }
}

// The sum over all lanes of a payload, [B][hidden].
const float* Worker::total(int payload) {
  const int width = m_.sums[payload].width;
  if (!d_.mail_) {
    wait_for(module_points_[m_.sums[payload].complete_at]);
    for (int p = 0; p < positions_; p++) {
      float* sum = total_.data() + p * m_.hidden_size;
      std::memcpy(sum, share_of(payload, 0, p), width * sizeof(float));
      for (int lane = 1; lane < m_.lanes; lane++) k_.add_scaled(sum, share_of(payload, lane, p), 1.0f, width);
    }
    return total_.data();
  }
  float* sum = received_.data() + (int64_t)payload * kBlock * m_.hidden_size;
  if (has_[payload]) return sum;  // it lands a second time
  has_[payload] = 1;
  for (int lane = 0; lane < m_.lanes; lane++) {
    if (lane != index_) fetch(lane, token_tags_ + (uint32_t)payload, positions_ * (int64_t)m_.hidden_size);
    for (int p = 0; p < positions_; p++) {
      const float* share = lane == index_ ? share_of(payload, lane, p) : message(p);
      if (lane == 0) {
        std::memcpy(sum + p * m_.hidden_size, share, width * sizeof(float));
      } else {
        k_.add_scaled(sum + p * m_.hidden_size, share, 1.0f, width);
      }
    }
  }
  return sum;
}

void Worker::post(uint32_t tag, int64_t floats) {
  delay();
  d_.mail_->push(index_, tag, total_.data(), floats);
}

void Worker::fetch(int from, uint32_t tag, int64_t floats) {
  const int64_t began = now_ns(), limit = d_.options_.timeout_ms * 1'000'000LL;
  const bool came = d_.mail_->pull(index_, from, tag, total_.data(), floats, [&](int64_t spins) {
    if (spins < 64) {
      pause();
      return true;
    }
    std::this_thread::yield();
    return !d_.stopped_.load(std::memory_order_relaxed) && now_ns() - began < limit;
  });
  if (!came) {
    d_.fail("lane " + std::to_string(from) + " sent nothing to lane " + std::to_string(index_) + " within " +
            std::to_string(d_.options_.timeout_ms) + " ms");
    throw Stopped();
  }
  delay();
}

// What the schedule says of this time.
void Worker::apply(int time) {
  const int64_t began = clock(), d = m_.hidden_size;
  for (const plan::Event& event : m_.events[time]) {
    if (event.payload < 0) {
      if (d_.lanes_shared_) wait_for(module_points_[event.module]);
      for (int lane = first_lane_; lane < last_lane_; lane++)
        for (int p = 0; p < positions_; p++)
          k_.add_scaled(stream(lane, p), output(event.module, lane, p), event.weight, d);
      continue;
    }
    const plan::Sum& payload = m_.sums[event.payload];
    const float* sums = total(event.payload);
    for (int lane = first_lane_; lane < last_lane_; lane++)
      for (int p = 0; p < positions_; p++) {
        const float* sum = sums + p * d;
        if (payload.stream_mean) {
          std::memcpy(stream(lane, p), sum, d * sizeof(float));
        } else if (event.apart.empty()) {
          k_.add_scaled(stream(lane, p), sum, 1.0f, payload.width);
        } else {
          std::memcpy(share_.data(), sum, payload.width * sizeof(float));
          for (const plan::Part& part : event.apart)
            k_.add_scaled(share_.data(), output(part.module, lane, p), -part.weight, payload.width);
          k_.add_scaled(stream(lane, p), share_.data(), 1.0f, payload.width);
        }
      }
  }
  mark(Decoder::kExchange, time / 2, began);
}

// ---------------------------------------------------------------------------------------------------------------- head

void Worker::head() {
  int64_t began = clock();
  const int64_t d = m_.hidden_size;
  float* finals = d_.finals_.floats();
  for (int lane = first_lane_; lane < last_lane_; lane++) {
    if (!owns(lane)) continue;
    const float* x = stream(lane, positions_ - 1);
    if (m_.head.norm_of_sum) {
      std::memcpy(finals + lane * d, x, d * sizeof(float));
    } else {
      k_.rms_norm(x, d_.small(m_.head.norm.gain, lane), m_.head.norm.eps, d, finals + lane * d);
    }
  }
  if (d_.mail_ && m_.head.kind != plan::HeadKind::vocab_parallel) {
    const uint32_t tag = token_tags_ + (uint32_t)m_.sums.size();
    std::memcpy(message(0), finals + index_ * d, d * sizeof(float));
    post(tag, d);
    finals_.resize(m_.lanes * d);
    for (int lane = 0; lane < m_.lanes; lane++) {
      if (lane != index_) fetch(lane, tag, d);
      std::memcpy(finals_.data() + lane * d, lane == index_ ? finals + lane * d : message(0), d * sizeof(float));
    }
    finals = finals_.data();
  } else {
    meet();
  }
  mark(Decoder::kExchange, m_.layers(), began);

  began = clock();
  const char* weights = this->weights(d_.head_);
  const int64_t rows = d_.head_.rows, columns = d_.head_.columns;
  positions_ = 1;
  if (m_.head.kind == plan::HeadKind::replicate) {
    std::fill_n(total_.begin(), d, 0.0f);
    for (int lane = 0; lane < m_.lanes; lane++) k_.add_scaled(total_.data(), finals + lane * d, 1.0f, d);
    if (m_.head.norm_of_sum) {
      k_.rms_norm(total_.data(), d_.small(m_.head.norm.gain, 0), m_.head.norm.eps, d, total_.data());
    } else {
      for (int64_t i = 0; i < d; i++) total_[i] /= (float)m_.lanes;
    }
    finals = total_.data();
  }
  for (const Share& share : shares(d_.head_)) {
    k_.prepare(d_.weights_, d_.activations_, finals + share.lane * d, columns, columns, 1, prepared_.data());
    weights = times(d_.head_, share, weights, prepared_.data(), y_.data(), 0);
    const int64_t first = share.first * kTile, count = std::min(rows, share.last * kTile) - first;
    std::memcpy(d_.logits_.floats() + share.lane * rows + first, y_.data(), count * sizeof(float));
  }
  mark(Decoder::kHead, m_.layers(), began);
}

}  // namespace laneformer
