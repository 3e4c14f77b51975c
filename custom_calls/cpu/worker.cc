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
      m_(decoder.model_),
      k_(*decoder.kernels_),
      index_(index),
      count_(count),
      first_lane_(m_.lanes * index / count),
      last_lane_((m_.lanes * (index + 1) + count - 1) / count),
      random_(0x9E3779B97F4A7C15u * (index + 1)) {
  int64_t bytes = 0;
  for (int o = 0; o < Decoder::kOps; o++) {
    const Op op = (Op)o;
    const int64_t per_lane = d_.units(op), all = per_lane * d_.lanes(op);
    for (int64_t first = all * index / count, last = all * (index + 1) / count; first < last;) {
      const int64_t lane = first / per_lane, end = std::min(last, (lane + 1) * per_lane);
      shares_[op].push_back({(int)lane, first - lane * per_lane, end - lane * per_lane});
      first = end;
    }
    if (op == Decoder::kHead) {
      layer_bytes_ = bytes;
      bytes *= m_.layers;
      head_ = bytes;
    }
    offsets_[op] = op == Decoder::kHead ? 0 : bytes;
    for (const Share& share : shares_[op]) bytes += (share.last - share.first) * d_.unit_bytes(op);
  }
  stream_ = Region(bytes);
  const int64_t rows = d_.rows(Decoder::kHead);
  if (!shares_[Decoder::kHead].empty()) {
    const Share &front = shares_[Decoder::kHead].front(), &back = shares_[Decoder::kHead].back();
    vocab_first_ = front.lane * rows + front.first * kTile;
    vocab_last_ = back.lane * rows + std::min(rows, back.last * kTile);
  }

  const int64_t d = m_.hidden, heads = (int64_t)m_.heads * m_.head_dim;
  const int64_t widest = std::max({d_.columns(Decoder::kHead), heads, d, (int64_t)m_.ff});
  int64_t rows_of_y = 0;
  for (const Share& share : shares_[Decoder::kGateUp])
    rows_of_y = std::max(rows_of_y, 2 * kTile * (share.last - share.first) * kBlock);
  for (const Share& share : shares_[Decoder::kHead])
    rows_of_y = std::max(rows_of_y, kTile * (share.last - share.first));
  x_.resize((last_lane_ - first_lane_) * kBlock * d);
  h_.resize(kBlock * d);
  a_.resize(kBlock * heads);
  prepared_.resize(prepared_floats(widest, kBlock));
  y_.resize(rows_of_y);
  q_.resize(kBlock * heads);
  key_.resize(m_.head_dim);
  cos_.resize(kBlock * m_.head_dim / 2);
  sin_.resize(cos_.size());
  total_.resize(kBlock * d);
  share_.resize(d);
  module_points_.resize(2 * m_.layers);
  if (index == 0) weights_of_.resize(m_.vocab);
  if (d_.options_.one_thread_per_lane) {
    received_.resize(d_.payloads_.size() * kBlock * d);
    has_.resize(d_.payloads_.size());
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
  const int half = m_.head_dim / 2;
  for (int p = 0; p < positions; p++) {
    d_.embed(tokens[p], stream(first_lane_, p));
    for (int lane = first_lane_ + 1; lane < last_lane_; lane++)
      std::memcpy(stream(lane, p), stream(first_lane_, p), m_.hidden * sizeof(float));
    for (int i = 0; i < half; i++) {
      const float angle = (float)(start + p) * d_.frequencies_[i];
      cos_[p * half + i] = std::cos(angle) * m_.rope_factor;
      sin_[p * half + i] = std::sin(angle) * m_.rope_factor;
    }
  }
  mark(kEmbed, 0, began);
  std::fill(has_.begin(), has_.end(), 0);
  token_tags_ = tags_;
  tags_ += (uint32_t)d_.payloads_.size() + 1;
  for (int t = 0; t < 2 * m_.layers; t++) {
    for (size_t i = 0; i < d_.payloads_.size(); i++)
      if (d_.payloads_[i].stream_mean && d_.payloads_[i].complete_at == t) keep_streams((int)i);
    if (t % 2 == 0) {
      attention(t / 2);
    } else {
      feed_forward(t / 2);
    }
    module_points_[t] = arrive();
    if (d_.mail_) send(t);
    apply(t);
  }
  apply(2 * m_.layers);
  if (last) head();
}

// The norm of a lane's streams, as a product reads it.
const float* Worker::normed(int lane, const std::vector<float>& scales, int layer) {
  const int64_t d = m_.hidden;
  const float* scale = scales.data() + (m_.lane_norms ? layer * m_.lanes + lane : layer) * d;
  for (int p = 0; p < positions_; p++) k_.rms_norm(stream(lane, p), scale, m_.norm_eps, d, h_.data() + p * d);
  k_.prepare(d_.weights_, d_.activations_, h_.data(), d, d, positions_, prepared_.data());
  return prepared_.data();
}

void Worker::times(Op op, const Share& share, const char*& weights, const float* prepared, float* y, int64_t ldy) {
  const int64_t count = share.last - share.first;
  k_.product(d_.weights_, d_.activations_, weights, prepared, d_.columns(op),
             op == Decoder::kGateUp ? 2 * count : count, positions_, y, ldy);
  weights += count * d_.unit_bytes(op);
}

void Worker::attention(int layer) {
  int64_t began = clock();
  const char* weights = this->weights(Decoder::kQkv, layer);
  for (const Share& share : shares_[Decoder::kQkv]) {
    float* y = d_.qkv_.floats() + share.lane * kBlock * d_.qkv_padded_;
    times(Decoder::kQkv, share, weights, normed(share.lane, d_.attention_norms_, layer), y + share.first * kTile,
          d_.qkv_padded_);
    if (!m_.qkv_bias) continue;
    const int64_t rows = d_.rows(Decoder::kQkv), first = share.first * kTile, last = std::min(rows, share.last * kTile);
    const float* bias = d_.biases_.data() + (layer * m_.lanes + share.lane) * rows;
    for (int p = 0; p < positions_; p++)
      k_.add_scaled(y + p * d_.qkv_padded_ + first, bias + first, 1.0f, last - first);
  }
  mark(Decoder::kQkv, layer, began);
  meet_if_shared();

  began = clock();
  const int64_t window = d_.windows_[layer] ? d_.windows_[layer] : INT64_MAX / 2;
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
    if (unit == first || unit % chunks == 0) queries(layer, keys.lane);
    attend(layer, keys, unit + 1 < last ? keys_of(unit + 1) : Keys{keys.lane, 0, 0}, (int)(unit % chunks), window);
  }
  mark(kAttend, layer, began);
  meet_if_shared();

  began = clock();
  weights = this->weights(Decoder::kOut, layer);
  const int64_t heads = (int64_t)m_.heads * m_.head_dim;
  for (const Share& share : shares_[Decoder::kOut]) {
    merge(share.lane, chunks);
    k_.prepare(d_.weights_, d_.activations_, a_.data(), heads, heads, positions_, prepared_.data());
    times(Decoder::kOut, share, weights, prepared_.data(), output(2 * layer, share.lane, 0) + share.first * kTile,
          d_.hidden_padded_);
  }
  mark(Decoder::kOut, layer, began);
}

// Norm and rotation of one head at block position p, in place.
void Worker::turn(float* head, const std::vector<float>& norms, int layer, int p) {
  const int e = m_.head_dim;
  if (m_.qk_norm) k_.rms_norm(head, norms.data() + layer * e, m_.norm_eps, e, head);
  const float *cos = cos_.data() + p * e / 2, *sin = sin_.data() + p * e / 2;
  for (int i = 0; i < e / 2; i++) {
    const float even = head[2 * i], odd = head[2 * i + 1];
    head[2 * i] = even * cos[i] - odd * sin[i];
    head[2 * i + 1] = even * sin[i] + odd * cos[i];
  }
}

void Worker::queries(int layer, int lane) {
  const int64_t e = m_.head_dim;
  const float scale = 1.0f / std::sqrt((float)e);
  for (int p = 0; p < positions_; p++)
    for (int h = 0; h < m_.heads; h++) {
      float* q = q_.data() + (p * m_.heads + h) * e;
      std::memcpy(q, d_.qkv_.floats() + (lane * kBlock + p) * d_.qkv_padded_ + h * e, e * sizeof(float));
      turn(q, d_.q_norms_, layer, p);
      if (d_.activations_ == Activations::rounded) round_trip(q, e);
      for (int64_t i = 0; i < e; i++) q[i] *= scale;
    }
}

void Worker::round_trip(float* x, int64_t n) {
  k_.narrow(d_.weights_, x, n, prepared_.data());
  k_.widen(d_.weights_, prepared_.data(), n, x);
}

// The new keys and values among first..last - 1 into the cache, then all queries over these keys.
void Worker::attend(int layer, Keys part, Keys next, int chunk, int64_t window) {
  const int64_t e = m_.head_dim, n = m_.kv_heads, width = bytes_of(d_.cache_);
  const auto cache = [&](const std::vector<void*>& caches, int lane) { return (char*)caches[layer * m_.lanes + lane]; };
  char *keys = cache(d_.call_->keys, part.lane), *values = cache(d_.call_->values, part.lane);
  for (int64_t t = std::max(part.first, start_); t < part.last; t++) {
    const int p = (int)(t - start_);
    const float* k = d_.qkv_.floats() + (part.lane * kBlock + p) * d_.qkv_padded_ + m_.heads * e;
    for (int64_t head = 0; head < n; head++) {
      std::memcpy(key_.data(), k + head * e, e * sizeof(float));
      turn(key_.data(), d_.k_norms_, layer, p);
      k_.narrow(d_.cache_, key_.data(), e, keys + (t * n + head) * e * width);
    }
    k_.narrow(d_.cache_, k + n * e, n * e, values + t * n * e * width);
  }
  float* out = d_.parts_.floats() + (int64_t)(part.lane * kChunks + chunk) * kBlock * m_.heads * (e + 2);
  const int64_t ahead = next.first * n * e * width;
  k_.attend({q_.data(), keys, values, out, d_.cache_, m_.kv_heads, m_.heads / m_.kv_heads, (int)e, part.first,
             part.last, start_, window, positions_, cache(d_.call_->keys, next.lane) + ahead,
             cache(d_.call_->values, next.lane) + ahead, next.last - next.first});
}

// a[p][heads][head_dim] from the chunks' parts, in their order.
void Worker::merge(int lane, int chunks) {
  const int64_t e = m_.head_dim, stride = (int64_t)kBlock * m_.heads * (e + 2);
  const float* parts = d_.parts_.floats() + (int64_t)lane * kChunks * stride;
  for (int64_t row = 0; row < (int64_t)positions_ * m_.heads; row++) {
    const float* part = parts + row * (e + 2);
    float* a = a_.data() + row * e;
    float largest = -INFINITY, sum = 0;
    for (int c = 0; c < chunks; c++) largest = std::max(largest, part[c * stride + e]);
    std::memset(a, 0, e * sizeof(float));
    for (int c = 0; c < chunks; c++) {
      const float weight = part[c * stride + e] == -INFINITY ? 0.0f : std::exp(part[c * stride + e] - largest);
      k_.add_scaled(a, part + c * stride, weight, e);
      sum += weight * part[c * stride + e + 1];
    }
    for (int64_t i = 0; i < e; i++) a[i] /= sum;
  }
}

void Worker::feed_forward(int layer) {
  int64_t began = clock();
  const char* weights = this->weights(Decoder::kGateUp, layer);
  for (const Share& share : shares_[Decoder::kGateUp]) {
    const int64_t units = share.last - share.first;
    times(Decoder::kGateUp, share, weights, normed(share.lane, d_.ffn_norms_, layer), y_.data(), 2 * kTile * units);
    for (int p = 0; p < positions_; p++)
      k_.swiglu(y_.data() + p * 2 * kTile * units, units,
                d_.hiddens_.floats() + (share.lane * kBlock + p) * d_.ff_padded_ + share.first * kTile);
  }
  mark(Decoder::kGateUp, layer, began);
  meet_if_shared();

  began = clock();
  weights = this->weights(Decoder::kDown, layer);
  for (const Share& share : shares_[Decoder::kDown]) {
    const float* hidden = d_.hiddens_.floats() + share.lane * kBlock * d_.ff_padded_;
    k_.prepare(d_.weights_, d_.activations_, hidden, d_.ff_padded_, m_.ff, positions_, prepared_.data());
    times(Decoder::kDown, share, weights, prepared_.data(), output(2 * layer + 1, share.lane, 0) + share.first * kTile,
          d_.hidden_padded_);
  }
  mark(Decoder::kDown, layer, began);
}

// ----------------------------------------------------------------------------------------------------------- exchange

float* Worker::kept_stream(int payload, int lane, int position) const {
  return d_.streams_.floats() + (((int64_t)payload * m_.lanes + lane) * kBlock + position) * m_.hidden;
}

void Worker::keep_streams(int payload) {
  for (int lane = first_lane_; lane < last_lane_; lane++)
    if (owns(lane))
      for (int p = 0; p < positions_; p++)
        std::memcpy(kept_stream(payload, lane, p), stream(lane, p), m_.hidden * sizeof(float));
}

// What a lane gives to a sum: its outputs, weighted, and perhaps its share of the streams' mean.
const float* Worker::share_of(int payload, int lane, int position) {
  const Payload& sum = d_.payloads_[payload];
  if (sum.parts.size() == 1 && sum.parts[0].weight == 1.0f && !sum.stream_mean)
    return output(sum.parts[0].module, lane, position);
  std::fill_n(share_.begin(), sum.width, 0.0f);
  for (const Part& part : sum.parts)
    k_.add_scaled(share_.data(), output(part.module, lane, position), part.weight, sum.width);
  if (sum.stream_mean) {
    const float* kept = kept_stream(payload, lane, position);
    for (int i = 0; i < sum.width; i++) share_[i] += kept[i] / (float)m_.lanes;
  }
  return share_.data();
}

// Exchange by message: the sums that the output of this module completes.
void Worker::send(int module) {
  for (size_t i = 0; i < d_.payloads_.size(); i++) {
    if (d_.payloads_[i].complete_at != module) continue;
    for (int p = 0; p < positions_; p++)
      std::memcpy(message(p), share_of((int)i, index_, p), d_.payloads_[i].width * sizeof(float));
    post(token_tags_ + (uint32_t)i, positions_ * (int64_t)m_.hidden);
  }
}

// The sum over all lanes of a payload, [B][hidden].
const float* Worker::total(int payload) {
  const int width = d_.payloads_[payload].width;
  if (!d_.mail_) {
    wait_for(module_points_[d_.payloads_[payload].complete_at]);
    for (int p = 0; p < positions_; p++) {
      float* sum = total_.data() + p * m_.hidden;
      std::memcpy(sum, share_of(payload, 0, p), width * sizeof(float));
      for (int lane = 1; lane < m_.lanes; lane++) k_.add_scaled(sum, share_of(payload, lane, p), 1.0f, width);
    }
    return total_.data();
  }
  float* sum = received_.data() + (int64_t)payload * kBlock * m_.hidden;
  if (has_[payload]) return sum;  // it lands a second time
  has_[payload] = 1;
  for (int lane = 0; lane < m_.lanes; lane++) {
    if (lane != index_) fetch(lane, token_tags_ + (uint32_t)payload, positions_ * (int64_t)m_.hidden);
    for (int p = 0; p < positions_; p++) {
      const float* share = lane == index_ ? share_of(payload, lane, p) : message(p);
      if (lane == 0) {
        std::memcpy(sum + p * m_.hidden, share, width * sizeof(float));
      } else {
        k_.add_scaled(sum + p * m_.hidden, share, 1.0f, width);
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
  const int64_t began = clock(), d = m_.hidden;
  for (const Event& event : d_.events_[time]) {
    if (event.kind == Event::own) {
      if (d_.lanes_shared_) wait_for(module_points_[event.module]);
      for (int lane = first_lane_; lane < last_lane_; lane++)
        for (int p = 0; p < positions_; p++)
          k_.add_scaled(stream(lane, p), output(event.module, lane, p), event.weight, d);
      continue;
    }
    const Payload& payload = d_.payloads_[event.payload];
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
          for (const Part& part : event.apart)
            k_.add_scaled(share_.data(), output(part.module, lane, p), -part.weight, payload.width);
          k_.add_scaled(stream(lane, p), share_.data(), 1.0f, payload.width);
        }
      }
  }
  mark(kExchange, time / 2, began);
}

// ---------------------------------------------------------------------------------------------------------------- head

void Worker::head() {
  int64_t began = clock();
  const int64_t d = m_.hidden;
  float* finals = d_.finals_.floats();
  for (int lane = first_lane_; lane < last_lane_; lane++) {
    if (!owns(lane)) continue;
    const float* x = stream(lane, positions_ - 1);
    if (m_.norm_of_sum) {
      std::memcpy(finals + lane * d, x, d * sizeof(float));
    } else {
      k_.rms_norm(x, d_.final_norm_.data() + (m_.lane_final_norm ? lane * d : 0), m_.norm_eps, d, finals + lane * d);
    }
  }
  if (d_.mail_ && m_.head_type != 2) {
    const uint32_t tag = token_tags_ + (uint32_t)d_.payloads_.size();
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
  mark(kExchange, m_.layers, began);

  began = clock();
  const char* weights = this->weights(Decoder::kHead, 0);
  const int64_t rows = d_.rows(Decoder::kHead), columns = d_.columns(Decoder::kHead);
  positions_ = 1;
  if (m_.head_type == 0) {
    std::fill_n(total_.begin(), d, 0.0f);
    for (int lane = 0; lane < m_.lanes; lane++) k_.add_scaled(total_.data(), finals + lane * d, 1.0f, d);
    if (m_.norm_of_sum) {
      k_.rms_norm(total_.data(), d_.final_norm_.data(), m_.norm_eps, d, total_.data());
    } else {
      for (int64_t i = 0; i < d; i++) total_[i] /= (float)m_.lanes;
    }
    finals = total_.data();
  }
  for (const Share& share : shares_[Decoder::kHead]) {
    k_.prepare(d_.weights_, d_.activations_, finals + share.lane * d, columns, columns, 1, prepared_.data());
    times(Decoder::kHead, share, weights, prepared_.data(), y_.data(), 0);
    const int64_t first = share.first * kTile, count = std::min(rows, share.last * kTile) - first;
    std::memcpy(d_.logits_.floats() + share.lane * rows + first, y_.data(), count * sizeof(float));
  }
  mark(Decoder::kHead, m_.layers, began);
}

}  // namespace laneformer
