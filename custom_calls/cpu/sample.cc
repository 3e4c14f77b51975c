// Draws the next tokens from the logits of a pass's rows, as infer/sampling.py defines a draw. Worker::generate calls
// `sample` on all workers after `step`; each takes the part of the vocabulary whose logits it computed (head.cc).
// Workers put what they find into DecodeState::packets, and worker 0 accepts the tokens.
//
// Invariant: a token is a function of its row's logits, the call's settings, the text before it and its position, which
// decides the noise. What workers combine does not depend on how the vocabulary is divided: maxima, sums of integers,
// and the best token, with the lowest id among equals. A draft is accepted if it equals the token that the row before
// it has drawn, so drafts never change an answer.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "worker.h"

namespace laneformer {

namespace {

// How long a pass waits for a mask: a pass with rows of other calls, a pass of one call.
constexpr int64_t kBesideNs = 1'000'000, kAloneNs = 5'000'000'000;

// Maps a float to a uint32 so that larger floats give larger numbers.
uint32_t order_of(float z) {
  uint32_t bits;
  z += 0.0f;  // -0 and 0 are equal
  std::memcpy(&bits, &z, 4);
  return bits >> 31 ? ~bits : bits | 1u << 31;
}

// The inverse of `order_of`.
float float_of(uint32_t order) {
  const uint32_t bits = order >> 31 ? order & ~(1u << 31) : ~order;
  float z;
  std::memcpy(&z, &bits, 4);
  return z;
}

// The largest z among `values` [n] for which the sum of amount(i) over all values[i] >= z is at least `wanted`; -inf if
// the sum of all is less. Needs no sorting: three histograms, of the upper, middle and lower bits, find z. Amounts are
// integers, so that their sum is the same in any order.
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

// Whether a draw needs a threshold.
bool filtered(const SamplingOptions& s) {
  return s.temperature > 0 && (s.top_k > 0 || s.top_p < 1 || s.min_p > 0 || s.top_n_sigma > 0);
}

// The standard deviation of the finite z [n].
double deviation(const float* z, int64_t n) {
  double count = 0, sum = 0, squares = 0;
  for (int64_t i = 0; i < n; i++)
    if (std::isfinite(z[i])) count++, sum += z[i];
  for (int64_t i = 0; i < n; i++)
    if (std::isfinite(z[i])) squares += (z[i] - sum / count) * (z[i] - sum / count);
  return std::sqrt(squares / count);
}

}  // namespace

Adjustment adjustment_of(const SamplingOptions& sampling, int64_t vocab_size) {
  Adjustment adjustment;
  if (sampling.presence_penalty == 0 && sampling.frequency_penalty == 0 && sampling.logit_bias.empty())
    return adjustment;
  adjustment.bias.resize(vocab_size);
  adjustment.drawn.resize(vocab_size);
  for (const auto& [token, bias] : sampling.logit_bias) adjustment.bias[token] = bias;
  return adjustment;
}

Sampler::Sampler(Worker& worker) : w_(worker) {
  const Product& head = w_.state.head;
  const std::vector<Share>& shares = w_.weights.shares(head);
  if (shares.empty()) return;
  const Share &front = shares.front(), &back = shares.back();
  vocab_first_ = front.matrix * head.rows + front.first * kTile;
  vocab_last_ = back.matrix * head.rows + std::min(head.rows, back.last * kTile);
}

void Sampler::sample() {
  const int64_t began = w_.trace.clock();
  const int64_t vocab = w_.plan.vocab_size, first = vocab_first_, count = vocab_last_ - first;
  const int rows = w_.pass->rows;
  DecodeState::Packet& own = w_.state.packets[w_.index];
  bool any_filtered = false, any_masked = false;
  for (int r = 0; r < w_.pass->runs; r++) any_masked |= w_.pass->run[r].rows > 0 && w_.pass->run[r].slot->call->masked;
  if (any_masked) {
    if (w_.index == 0) await_masks();
    w_.barrier();  // then all workers know which calls are deferred
  }
  for (int r = 0; r < w_.pass->runs; r++) {
    Slot& slot = *w_.pass->run[r].slot;
    if (w_.index == 0) slot.cancelled = slot.cancel.load(std::memory_order_relaxed);
    any_filtered |= w_.pass->run[r].rows > 0 && filtered(slot.call->sampling);
  }
  scale_logits();
  w_.barrier();

  float largest[kMostRows], largest_z[kMostRows];
  for (int row = 0; row < rows; row++) {
    largest[row] = w_.state.packets[0].rows[row].largest, largest_z[row] = w_.state.packets[0].rows[row].largest_z;
    for (const DecodeState::Packet& packet : w_.state.packets) {
      const DecodeState::Drawn& part = packet.rows[row];
      if (part.largest > largest[row] || std::isnan(part.largest)) largest[row] = part.largest;
      largest_z[row] = std::max(largest_z[row], part.largest_z);
    }
  }
  if (any_filtered) {
    each_row(*w_.pass, [&](const Run& run, int i) {
      const int row = run.row + i;
      if (row % w_.workers == w_.index && filtered(run.slot->call->sampling))
        w_.state.least[row] = threshold(run.slot->call->sampling, row, largest_z[row]);
    });
    w_.barrier();
  }
  each_row(*w_.pass, [&](const Run& run, int i) {
    const int row = run.row + i;
    const Call& call = *run.slot->call;
    const int64_t position = run.start + run.count - run.rows + i + 1;  // of the token to draw
    const uint64_t seed = (uint64_t)call.sampling.seed;
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    own.rows[row].sum = w_.kernels.sum_exp(w_.state.logits.floats() + row * vocab + first, largest[row], count);
    own.rows[row].best =
        w_.kernels.draw(w_.state.z.floats() + row * vocab, filtered(call.sampling) ? w_.state.least[row] : -INFINITY,
                        call.sampling.temperature > 0, key, (uint32_t)position, first, vocab_last_);
  });
  w_.barrier();
  if (w_.index == 0) {
    const float cost = w_.state.schedule.cost_of(*w_.pass);
    for (int r = 0; r < w_.pass->runs; r++)
      if (w_.pass->run[r].rows > 0) accept(w_.pass->run[r], largest + w_.pass->run[r].row, cost);
  }
  w_.trace.mark(kSample, w_.plan.num_layers(), began);
}

// Worker 0 waits for the masks of the pass's rows. A call whose mask is late draws nothing in this pass and has no rows
// until its mask is given: computing its position again costs less than delaying the other calls.
void Sampler::await_masks() {
  const bool alone = w_.pass->runs == 1;
  const int64_t until =
      now_ns() + (alone ? std::min<int64_t>(kAloneNs, w_.state.options.timeout_ms * 250'000LL) : kBesideNs);
  for (int r = 0; r < w_.pass->runs; r++) {
    Slot& slot = *w_.pass->run[r].slot;
    if (w_.pass->run[r].rows == 0 || !slot.call->masked) continue;
    const uint32_t target = (uint32_t)slot.drawn + 1;
    const auto given = [&] {
      const int64_t left = until - now_ns();
      // Does not spin, as the host needs a core to compute the mask.
      return slot.masks.wait(target, slot.cancel, std::clamp<int64_t>(left, 0, kBesideNs), 0);
    };
    do slot.deferred = !given();
    while (slot.deferred && alone && !slot.cancel.load() && !w_.state.schedule.waits() && now_ns() < until);
  }
}

// Sets z to -inf for the tokens of this worker's part that the mask does not allow. z: of the part's first token.
void Sampler::apply_mask(const std::vector<uint32_t>& mask, float* z) const {
  for (int64_t token = vocab_first_; token < vocab_last_;) {
    const uint32_t word = mask[token / 32];
    const int64_t end = std::min(vocab_last_, (token / 32 + 1) * 32);
    if (word == 0) {
      std::fill(z + token - vocab_first_, z + end - vocab_first_, -INFINITY);
    } else if (word != ~0u) {
      for (int64_t t = token; t < end; t++)
        if (!(word >> (t % 32) & 1)) z[t - vocab_first_] = -INFINITY;
    }
    token = end;
  }
}

// Computes z from the logits of this worker's part: penalties, biases, temperature and mask. For a row, the drafts
// before it count as seen and drawn. So each worker counts the drafts of its part while it goes through a run's rows,
// and then restores the counts.
void Sampler::scale_logits() {
  const int64_t vocab = w_.plan.vocab_size, first = vocab_first_, count = vocab_last_ - first;
  for (int r = 0; r < w_.pass->runs; r++) {
    const Run& run = w_.pass->run[r];
    const Call& call = *run.slot->call;
    const SamplingOptions& s = call.sampling;
    int32_t marked[kMostRows];
    int marks = 0;
    for (int i = 0; i < run.rows; i++) {
      const int32_t draft = w_.pass->tokens[run.place_of(i)];
      if (i > 0 && draft >= first && draft < vocab_last_) {
        if (!call.seen[draft]) call.seen[marked[marks++] = draft] = 1;
        if (call.adjustment) call.adjustment->drawn[draft]++;
      }
      const float* logits = w_.state.logits.floats() + (run.row + i) * vocab + first;
      float* z = w_.state.z.floats() + (run.row + i) * vocab + first;
      w_.kernels.temper(logits, call.seen + first, s.repetition_penalty, call.adjustment ? 0 : s.temperature, count, z);
      if (call.adjustment) adjust(*call.adjustment, s, z);
      if (call.masked && !run.slot->deferred) apply_mask(run.slot->mask, z);
      DecodeState::Drawn& own = w_.state.packets[w_.index].rows[run.row + i];
      own.largest = w_.kernels.largest(logits, count);
      own.largest_z = w_.kernels.largest(z, count);
      if (call.logits) std::memcpy(call.logits + (run.slot->drawn + i) * vocab + first, logits, count * sizeof(float));
    }
    while (marks > 0) call.seen[marked[--marks]] = 0;
    for (int i = 1; i < run.rows && call.adjustment; i++) {
      const int32_t draft = w_.pass->tokens[run.place_of(i)];
      if (draft >= first && draft < vocab_last_) call.adjustment->drawn[draft]--;
    }
  }
}

// Applies presence and frequency penalty, biases and temperature to this worker's part of a row.
void Sampler::adjust(const Adjustment& by, const SamplingOptions& s, float* z) const {
  const int64_t count = vocab_last_ - vocab_first_;
  const float* const bias = by.bias.data() + vocab_first_;
  const int32_t* const drawn = by.drawn.data() + vocab_first_;
  const float presence = s.presence_penalty, frequency = s.frequency_penalty, temperature = s.temperature;
  for (int64_t i = 0; i < count; i++) z[i] += bias[i] - (drawn[i] > 0 ? (float)drawn[i] * frequency + presence : 0.0f);
  for (int64_t i = 0; i < count && temperature > 0; i++) z[i] /= temperature;
}

// Worker 0 records the tokens that the rows of a run have drawn, up to the first one that differs from the next row's
// draft, or a stop token. largest: [rows], each row's largest logit. cost: of the pass, in passes without drafts.
void Sampler::accept(const Run& run, const float* largest, float cost) {
  Slot& slot = *run.slot;
  const Call& call = *slot.call;
  if (slot.cancelled) {
    slot.stopped = true, slot.end = End::cancelled;
    return;
  }
  if (slot.deferred) return;
  const int32_t before = slot.drawn;
  bool stop = false;
  for (int i = 0; i < run.rows; i++) {
    const int row = run.row + i;
    Best best = {-INFINITY, -1};
    for (const DecodeState::Packet& packet : w_.state.packets) {
      const Best& part = packet.rows[row].best;
      if (part.token >= 0 && (best.token < 0 || part.value > best.value)) best = part;  // workers are in order of ids
    }
    int32_t token = std::max(best.token, 0);  // token 0 if all logits are NaN; its log-probability is NaN then
    if (slot.drawn < (int64_t)call.speculation.forced.size()) token = call.speculation.forced[slot.drawn];
    stop = std::find(call.stops.begin(), call.stops.end(), token) != call.stops.end();
    emit(slot, row, token, largest[i]);
    if (stop || (i + 1 < run.rows && token != w_.pass->tokens[run.place_of(i + 1)])) break;
  }
  const int drawn = slot.drawn - before;
  for (int i = 0; i < drawn; i++) {  // all but the last token were drafts
    slot.answer.drafted[before + i] = i < drawn - 1;
    slot.answer.others[before + i] = (uint8_t)(w_.pass->runs - 1);
  }
  if (before > 0) count(slot, run.rows, drawn);
  slot.stopped = stop || slot.drawn == call.limit;
  slot.end = stop ? End::stop : End::length;
  if (!slot.stopped && call.speculation.most > 0) {
    const int32_t* const tokens = slot.answer.tokens.data() + before;
    slot.drafts.learn(tokens, drawn, before > 0 ? cost : 1);
    for (int i = 0; i < drawn; i++) slot.drafts.add(tokens[i]);
  }
  slot.count.raise((uint32_t)slot.drawn);
}

// Adds to the counts of a call a run after the prompt's, of `rows` rows, in which `drawn` tokens were drawn.
void Sampler::count(Slot& slot, int rows, int drawn) {
  Drafting& counts = slot.drafting;
  counts.passes[rows - 1]++;
  for (int place = 0; place < drawn - 1; place++) counts.accepted[place]++;
  if (slot.drafts.from_other()) counts.other += rows - 1, counts.other_accepted += drawn - 1;
}

// Records a drawn token, its log-probability, its time and the most likely tokens.
void Sampler::emit(Slot& slot, int row, int32_t token, float largest) {
  uint64_t sum = 0;
  for (const DecodeState::Packet& packet : w_.state.packets) sum += packet.rows[row].sum;
  const float lse = std::isnan(largest) ? largest : (float)((double)largest + std::log((double)sum * 0x1p-40));
  const float* logits = w_.state.logits.floats() + (int64_t)row * w_.plan.vocab_size;
  slot.call->seen[token] = 1;
  if (slot.call->adjustment) slot.call->adjustment->drawn[token]++;
  slot.answer.logprobs[slot.drawn] = logits[token] - lse;
  if (slot.call->top) best_tokens(slot, logits, lse);
  slot.answer.times_ns[slot.drawn] = now_ns();
  slot.answer.tokens[slot.drawn++] = token;
}

// The least z of a row that the filters keep; -inf keeps every token. best: the row's largest z.
float Sampler::threshold(const SamplingOptions& s, int row, float best) {
  const float* z = w_.state.z.floats() + (int64_t)row * w_.plan.vocab_size;
  float least = -INFINITY;
  if (s.top_k > 0)
    least = largest_reaching(z, w_.plan.vocab_size, (double)s.top_k, [](int64_t) { return uint64_t{1}; });
  if (s.top_p < 1) {
    exponentials_.resize(w_.plan.vocab_size);
    w_.kernels.exp_from(z, best, w_.plan.vocab_size, exponentials_.data());
    uint64_t total = 0;
    for (int64_t i = 0; i < w_.plan.vocab_size; i++) total += z[i] >= least ? (uint64_t)(exponentials_[i] * 0x1p40) : 0;
    const auto amount = [&](int64_t i) { return z[i] >= least ? (uint64_t)(exponentials_[i] * 0x1p40) : 0; };
    least = std::max(least, largest_reaching(z, w_.plan.vocab_size, (double)s.top_p * (double)total, amount));
  }
  if (s.min_p > 0) least = std::max(least, best + std::log(s.min_p));
  if (s.top_n_sigma > 0) least = std::max(least, (float)(best - s.top_n_sigma * deviation(z, w_.plan.vocab_size)));
  return std::min(least, best);
}

// Writes the call's `top` most likely tokens and their log-probabilities, the lowest id first among equals. lse:
// logarithm of the sum of the logits' exponentials.
void Sampler::best_tokens(Slot& slot, const float* logits, float lse) const {
  const int n = slot.call->top;
  int32_t* tokens = slot.answer.top_tokens.data() + (int64_t)slot.drawn * n;
  float* logprobs = slot.answer.top_logprobs.data() + (int64_t)slot.drawn * n;
  int found = 0;
  for (int32_t token = 0; token < w_.plan.vocab_size; token++) {
    if (found == n && !(logits[token] > logits[tokens[n - 1]])) continue;
    int at = found < n ? found++ : n - 1;
    for (; at > 0 && logits[token] > logits[tokens[at - 1]]; at--) tokens[at] = tokens[at - 1];
    tokens[at] = token;
  }
  for (int i = 0; i < n; i++) logprobs[i] = logits[tokens[i]] - lse;
}

}  // namespace laneformer
