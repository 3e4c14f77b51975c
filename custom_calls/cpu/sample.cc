// The next tokens from the logits of a run's rows, as infer/sampling.py defines them: each with the noise of its own
// position. Each worker takes the part of the vocabulary whose logits it computed.
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

bool Worker::sample() {
  const int64_t began = clock();
  const Call& call = *d_.call;
  const Sampling& s = call.sampling;
  const int64_t vocab = m_.vocab_size, first = vocab_first_, count = vocab_last_ - first;
  const int64_t position = call.start + (int64_t)call.prompt.size() + drawn_;  // of the first token
  const int rows = run_.rows;
  DecodeState::Packet& own = d_.packets[index_];
  if (index_ == 0) d_.cancelled[2] = d_.cancel.load(std::memory_order_relaxed);
  temper();
  meet();

  float largest[kMostRows], largest_z[kMostRows];
  for (int row = 0; row < rows; row++) {
    largest[row] = d_.packets[0].rows[row].largest, largest_z[row] = d_.packets[0].rows[row].largest_z;
    for (const DecodeState::Packet& packet : d_.packets) {
      const DecodeState::Drawn& part = packet.rows[row];
      if (part.largest > largest[row] || std::isnan(part.largest)) largest[row] = part.largest;
      largest_z[row] = std::max(largest_z[row], part.largest_z);
    }
  }
  const bool filtered = s.temperature > 0 && (s.top_k > 0 || s.top_p < 1 || s.min_p > 0);
  if (filtered) {
    for (int row = index_; row < rows; row += count_) d_.least[row] = threshold(row, largest_z[row]);
    meet();
  }
  for (int row = 0; row < rows; row++) {
    own.rows[row].sum = k_.sum_exp(d_.logits.floats() + row * vocab + first, largest[row], count);
    own.rows[row].best = k_.draw(d_.z.floats() + row * vocab, filtered ? d_.least[row] : -INFINITY, s.temperature > 0,
                                 s.key, (uint32_t)(position + row), first, vocab_last_);
  }
  meet();

  if (d_.cancelled[2]) {
    if (index_ == 0) d_.end = End::cancelled;
    return false;
  }
  // A draft is right if it is what the row before it has drawn; the first row whose token is another ends the run.
  bool stop = false;
  const int32_t before = drawn_;
  for (int row = 0; row < rows; row++) {
    Best best = {-INFINITY, -1};
    for (const DecodeState::Packet& packet : d_.packets) {
      const Best& part = packet.rows[row].best;
      if (part.token >= 0 && (best.token < 0 || part.value > best.value)) best = part;  // workers are in order of ids
    }
    int32_t token = std::max(best.token, 0);  // no token where no logit is a number; the log-probability is NaN
    if (drawn_ < (int64_t)call.speculation.forced.size()) token = call.speculation.forced[drawn_];
    stop = std::find(call.stops.begin(), call.stops.end(), token) != call.stops.end();
    if (index_ == 0) emit(row, token, largest[row]);
    drawn_++;
    if (stop || (row + 1 < rows && token != run_.tokens[row + 1])) break;
  }
  const bool more = !stop && drawn_ < call.limit;
  if (index_ == 0) {
    const float cost = before > 0 ? count_run(drawn_ - before) : 1;
    d_.end = stop ? End::stop : End::length;
    if (more) plan_run(drawn_ - before, cost);
    d_.count.raise((uint32_t)drawn_);
  }
  meet();  // the others may now read the tokens
  run_ = d_.next;
  mark(kSample, m_.num_layers(), began);
  return more;
}

// The logits with penalty and temperature. In a row a draft before it has been seen: each worker marks those of its
// part, and takes the marks away again.
void Worker::temper() {
  const Call& call = *d_.call;
  const Sampling& s = call.sampling;
  const int64_t vocab = m_.vocab_size, first = vocab_first_, count = vocab_last_ - first;
  int32_t marked[kMostRows];
  int marks = 0;
  for (int row = 0; row < run_.rows; row++) {
    const int32_t draft = run_.tokens[row];
    if (row > 0 && draft >= first && draft < vocab_last_ && !call.seen[draft]) call.seen[marked[marks++] = draft] = 1;
    const float* logits = d_.logits.floats() + row * vocab + first;
    float* z = d_.z.floats() + row * vocab + first;
    k_.temper(logits, call.seen + first, s.repetition_penalty, s.temperature, count, z);
    DecodeState::Drawn& own = d_.packets[index_].rows[row];
    own.largest = k_.largest(logits, count);
    own.largest_z = k_.largest(z, count);
    if (call.logits) std::memcpy(call.logits + (drawn_ + row) * vocab + first, logits, count * sizeof(float));
  }
  while (marks > 0) call.seen[marked[--marks]] = 0;
}

// Records a token that is drawn.
void Worker::emit(int row, int32_t token, float largest) {
  uint64_t sum = 0;
  for (const DecodeState::Packet& packet : d_.packets) sum += packet.rows[row].sum;
  const float lse = std::isnan(largest) ? largest : (float)((double)largest + std::log((double)sum * 0x1p-40));
  const float* logits = d_.logits.floats() + (int64_t)row * m_.vocab_size;
  d_.call->seen[token] = 1;
  d_.answer.logprobs[drawn_] = logits[token] - lse;
  if (d_.call->top) best_tokens(logits, lse);
  d_.answer.times_ns[drawn_] = now_ns();
  d_.answer.tokens[drawn_] = token;
}

// Worker 0: counts a run of which some tokens were drawn; returns what it has cost, in passes of one row.
float Worker::count_run(int drawn) {
  Drafting& counts = d_.drafting;
  counts.passes[run_.rows - 1]++;
  for (int place = 0; place < drawn - 1; place++) counts.accepted[place]++;
  if (d_.drafts.from_other()) counts.other += run_.rows - 1, counts.other_accepted += drawn - 1;
  const Speculation& speculation = d_.call->speculation;
  const int64_t* last = d_.answer.times_ns.data() + drawn_ - 1;
  if (speculation.most == 0 || !speculation.given.empty()) return 1;
  return d_.prices.took(run_.rows, (double)(last[0] - last[-drawn]));
}

// Worker 0: the last of some tokens that were drawn now, and drafts of those after it.
void Worker::plan_run(int drawn, float cost) {
  const Speculation& speculation = d_.call->speculation;
  const int32_t* tokens = d_.answer.tokens.data() + drawn_ - drawn;
  d_.next.rows = 1;
  d_.next.tokens[0] = tokens[drawn - 1];
  if (speculation.most == 0) return;
  d_.drafts.learn(tokens, drawn, cost);
  for (int i = 0; i < drawn; i++) d_.drafts.add(tokens[i]);
  d_.next.rows += d_.drafts.propose(drawn_, d_.call->limit - drawn_ - 1, d_.next.tokens + 1);
}

// The filters' threshold on z of a row; -inf keeps every token.
float Worker::threshold(int row, float best) {
  const Sampling& s = d_.call->sampling;
  const float* z = d_.z.floats() + (int64_t)row * m_.vocab_size;
  float least = -INFINITY;
  if (s.top_k > 0) least = largest_reaching(z, m_.vocab_size, s.top_k, [](int64_t) { return uint64_t{1}; });
  if (s.top_p < 1) {
    weights_of_.resize(m_.vocab_size);
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
void Worker::best_tokens(const float* logits, float lse) {
  const int n = d_.call->top;
  int32_t* tokens = d_.answer.top_tokens.data() + (int64_t)drawn_ * n;
  float* logprobs = d_.answer.top_logprobs.data() + (int64_t)drawn_ * n;
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
