// The next token from the logits, as infer/sampling.py defines it. Each worker takes the part of the vocabulary whose
// logits it computed.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "worker.h"

namespace laneformer {

namespace {

// Maps a float to a uint32 of the same order.
uint32_t order_of(float z) {
  uint32_t bits;
  z += 0.0f;  // -0 and 0 are equal
  std::memcpy(&bits, &z, 4);
  return bits >> 31 ? ~bits : bits | 1u << 31;
}

float float_of(uint32_t order) {
  const uint32_t bits = order >> 31 ? order & ~(1u << 31) : ~order;
  float z;
  std::memcpy(&z, &bits, 4);
  return z;
}

// The largest z among `values` for which the amounts of all values >= z sum to at least `wanted`; -inf if there is
// none. Three histograms, of the upper, middle and lower bits, need no sorting, and integer amounts have the same sum
// in any order.
template <class Amount>
float largest_reaching(const float* values, int64_t n, double wanted, Amount amount) {
  constexpr int bits[3] = {11, 11, 10};
  uint32_t prefix = 0;
  int shift = 32;
  double above = 0;
  std::vector<uint64_t> sums(1 << 11);
  for (const int width : bits) {
    const int upper = shift;
    shift -= width;
    std::fill(sums.begin(), sums.end(), 0);
    for (int64_t i = 0; i < n; i++) {
      const uint32_t order = order_of(values[i]);
      if (upper < 32 && order >> upper != prefix) continue;
      sums[order >> shift & ((1u << width) - 1)] += amount(i);
    }
    int bucket = (1 << width) - 1;
    for (; bucket >= 0; bucket--) {
      if (above + (double)sums[bucket] >= wanted && sums[bucket] > 0) break;
      above += (double)sums[bucket];
    }
    if (bucket < 0) return -INFINITY;
    prefix = prefix << width | (uint32_t)bucket;
  }
  return float_of(prefix);
}

}  // namespace

bool Worker::sample(int64_t position) {
  const int64_t began = clock();
  const Call& call = *d_.call;
  const Sampling& s = call.sampling;
  const int64_t first = vocab_first_, count = vocab_last_ - first;
  float *logits = d_.logits.floats(), *z = d_.z.floats();
  DecodeState::Packet& own = d_.packets[index_];
  if (index_ == 0) d_.cancelled[2] = d_.cancel.load(std::memory_order_relaxed);
  k_.temper(logits + first, call.seen + first, s.repetition_penalty, s.temperature, count, z + first);
  own.largest = k_.largest(logits + first, count);
  own.largest_z = k_.largest(z + first, count);
  if (call.logits)
    std::memcpy(call.logits + (int64_t)drawn_ * m_.vocab_size + first, logits + first, count * sizeof(float));
  meet();

  float largest = d_.packets[0].largest, largest_z = d_.packets[0].largest_z;
  for (const DecodeState::Packet& packet : d_.packets) {
    if (packet.largest > largest || std::isnan(packet.largest)) largest = packet.largest;
    largest_z = std::max(largest_z, packet.largest_z);
  }
  const bool filtered = s.temperature > 0 && (s.top_k > 0 || s.top_p < 1 || s.min_p > 0);
  if (filtered) {
    if (index_ == 0) d_.least = threshold(largest_z);
    meet();
  }
  own.sum = k_.sum_exp(logits + first, largest, count);
  own.best =
      k_.draw(z, filtered ? d_.least : -INFINITY, s.temperature > 0, s.key, (uint32_t)position, first, vocab_last_);
  meet();

  uint64_t sum = 0;
  Best best = {-INFINITY, -1};
  for (const DecodeState::Packet& packet : d_.packets) {
    sum += packet.sum;
    if (packet.best.token >= 0 && (best.token < 0 || packet.best.value > best.value))
      best = packet.best;  // workers are in order of ids
  }
  const int32_t token = std::max(best.token, 0);  // no token where no logit is a number; the log-probability is NaN
  if (d_.cancelled[2]) {
    if (index_ == 0) d_.end = End::cancelled;
    return false;
  }
  const bool stop = std::find(call.stops.begin(), call.stops.end(), token) != call.stops.end();
  drawn_++;
  if (index_ == 0) {
    const float lse = std::isnan(largest) ? largest : (float)((double)largest + std::log((double)sum * 0x1p-40));
    call.seen[token] = 1;
    d_.answer.logprobs[drawn_ - 1] = logits[token] - lse;
    if (call.top) best_tokens(lse);
    d_.answer.times_ns[drawn_ - 1] = now_ns();
    d_.end = stop ? End::stop : End::length;
    d_.answer.tokens[drawn_ - 1] = token;
    d_.count.raise((uint32_t)drawn_);
  }
  meet();  // the others may now read the token
  mark(kSample, m_.num_layers(), began);
  return !stop && drawn_ < call.limit;
}

// The filters' threshold on z; -inf keeps every token.
float Worker::threshold(float best) {
  const Sampling& s = d_.call->sampling;
  const float* z = d_.z.floats();
  float least = -INFINITY;
  if (s.top_k > 0) least = largest_reaching(z, m_.vocab_size, s.top_k, [](int64_t) { return uint64_t{1}; });
  if (s.top_p < 1) {
    k_.exp_from(z, best, m_.vocab_size, weights_of_.data());
    uint64_t total = 0;
    for (int64_t i = 0; i < m_.vocab_size; i++) total += z[i] >= least ? (uint64_t)(weights_of_[i] * 0x1p40) : 0;
    const auto amount = [&](int64_t i) { return z[i] >= least ? (uint64_t)(weights_of_[i] * 0x1p40) : 0; };
    least = std::max(least, largest_reaching(z, m_.vocab_size, (double)s.top_p * (double)total, amount));
  }
  if (s.min_p > 0) least = std::max(least, best + std::log(s.min_p));
  return std::min(least, best);
}

// Writes the most likely tokens, lowest id first among equals.
void Worker::best_tokens(float lse) {
  const int n = d_.call->top;
  const float* logits = d_.logits.floats();
  int32_t* tokens = d_.answer.top_tokens.data() + (int64_t)(drawn_ - 1) * n;
  float* logprobs = d_.answer.top_logprobs.data() + (int64_t)(drawn_ - 1) * n;
  int found = 0;
  for (int32_t token = 0; token < m_.vocab_size; token++) {
    if (found == n && !(logits[token] > logits[tokens[n - 1]])) continue;
    int at = found < n ? found++ : n - 1;
    for (; at > 0 && logits[token] > logits[tokens[at - 1]]; at--) tokens[at] = tokens[at - 1];
    tokens[at] = token;
  }
  for (int i = 0; i < n; i++) logprobs[i] = logits[tokens[i]] - lse;
}

}  // namespace laneformer
