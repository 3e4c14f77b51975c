// The draw of the next token, as infer/sampling.py defines it. Decoder calls it at the end of every pass.
//
// Each CTA has the logits of its rows of the head. It finds the best token among them, with Gumbel noise if the
// temperature is above 0, and publishes it in a packet. Every CTA of every device reads all packets, so all of them
// compute the same token, and no CTA has to announce it. Packets also carry how the call ends. All CTAs take the
// maximum of that, so all end with the same pass.
//
// Filters, most likely tokens and returned logits need all logits. These are published only by calls that use them. In
// a pass with several rows each row is drawn in this way, with the noise of its position.
#pragma once

#include "product.h"
#include "requests.h"

namespace laneformer {
namespace gpu {

struct Best {
  float value;
  int token;  // -1: none
};

// The larger value; of equal ones the lower token.
LF_DEVICE Best better(Best a, Best b) {
  const bool first = b.token < 0 || (a.token >= 0 && (a.value > b.value || (a.value == b.value && a.token < b.token)));
  return {first ? a.value : b.value, first ? a.token : b.token};
}

// Threefry-2x32 and Gumbel noise, as infer/noise.py defines them.
LF_DEVICE float gumbel(const u32 key[2], u32 position, u32 token) {
  const u32 keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDAu};
  constexpr int rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  u32 x0 = position + keys[0], x1 = token + keys[1];
  LF_UNROLL for (int group = 0; group < 5; group++) {
    LF_UNROLL for (int i = 0; i < 4; i++) {
      const int r = rotations[group % 2][i];
      x0 += x1;
      x1 = (x1 << r | x1 >> (32 - r)) ^ x0;
    }
    x0 += keys[(group + 1) % 3];
    x1 += keys[(group + 2) % 3] + (u32)group + 1;
  }
  const float uniform = ((float)(x0 >> 9) + 0.5f) * 0x1p-23f;
  return -log_of(-log_of(uniform));
}

// A packet: the largest logit, the sum of exp(logit - largest), the best value, its token and that token's logit, and
// how the call ends (kEndWord). Each CTA of all lanes publishes one.
constexpr int kEndWord = kPacketWords - 1, kPackets = kLanes * kCtas;
constexpr int kBuckets = 1 << 11, kBucketGroups = 64;  // of a histogram; three of them resolve 32 bits
constexpr float kLowest = -3.4e38f;                    // no logit yet; just above -FLT_MAX

static_assert(kZAt >= kPacketsAt + 2 * kPassRows * kPackets * kPacketWords, "gpu/edges.py reserves fewer words");

// Shared memory of the sampler, in floats: histogram, sums of its groups, values of the warps.
constexpr int kSampleFloats = 2 * kBuckets + 2 * kBucketGroups + 4 * kWarps + 16;

struct Sampled {
  int token;
  int end;  // kCancelled, kFailed, or 0 to continue
};

struct Sampler {
  const Params& p;
  float* logits;  // shared memory, [rows of a pass][kHeadRows]
  float* z;       // the same after penalty and temperature
  float* scratch;
  int* end;  // shared memory, kept between passes: how the next packet ends the call, or 0
  Watch& watch;
  int place, first, count;  // number of the CTA among all; its range of tokens
  bool leader;              // whether this CTA writes the results of its device, to the host too
  float temperature = 0, top_p = 1, min_p = 0, penalty = 1;
  int top_k = 0;
  u32 key[2] = {};
  int slot = 0;  // the slot that the settings belong to

  LF_DEVICE void configure() {
    use(0);
    if (thread() == 0) *end = 0;
  }

  // Takes a slot's settings for the rows that follow.
  LF_DEVICE void use(int slot) {
    const float* settings = p.settings + slot * 4;
    temperature = settings[0], top_p = settings[1], min_p = settings[2], penalty = settings[3];
    top_k = p.control[slot * kControls + 3];
    key[0] = p.key[2 * slot], key[1] = p.key[2 * slot + 1];
    this->slot = slot;
  }

  // Whether this thread reads Host::asked. Reading host memory takes long, and a read whose value is needed soon stalls
  // the thread.
  LF_DEVICE bool polls_host() const { return leader && p.reports && thread() == kThreads - kWarpSize; }
  LF_DEVICE int asked_by_host() const { return polls_host() ? *(volatile const int*)&p.host->asked : 0; }
  // Host::asked as the end word of a packet.
  LF_DEVICE static int ending(int asked) { return kRequests > 1 ? asked : asked ? kCancelled : 0; }

  // Ends a pass in which no row draws. Returns how the call ends, or 0.
  LF_DEVICE int end_of_pass(u32 tag, int parity) {
    record_timeout();
    sync_cta();  // the scratch is free
    const Edge edge = {tag, parity * kPassRows};
    publish(edge, 0, 0, {0, -1}, 0);
    Best best;
    float largest, sum, logit;
    return collect<true>(edge, largest, sum, best, logit);
  }

  // Draws the token at `position` from the logits in shared memory. drawn: tokens drawn before it.
  LF_DEVICE Sampled sample(u32 tag, int parity, int position, int drawn) {
    const Edge edge = {tag, parity * kPassRows};
    offer(edge, 0, position, 0, nullptr, -1);
    return settle<true>(edge, drawn);
  }

  // For several rows: publishes this CTA's packet of row m. position: of the token to draw; tokens: of the pass's rows,
  // the first of which is part of the text already; forced: the token to draw whatever the logits are, or -1.
  LF_DEVICE void offer_row(u32 tag, int parity, int m, int position, const int* tokens, int forced) {
    if (m > 0) sync_cta();  // the scratch is free
    offer({tag, parity * kPassRows + m}, m, position, m, tokens, forced);
  }
  // The same for rows of several slots; `use` precedes it. first: whether the row is the pass's first one that draws;
  // place: the row's number among the slot's rows that draw; tokens: of these rows.
  LF_DEVICE void offer_row(u32 tag, int parity, int m, int position, bool first, int place, const int* tokens,
                           int forced) {
    if (!first) sync_cta();  // the scratch is free
    offer({tag, parity * kPassRows + m}, m, position, place, tokens, forced);
  }
  // Returns a row's token. asked: receives Host::asked, or kFailure, with the first row that draws.
  LF_DEVICE Sampled settle_row(u32 tag, int parity, int m, bool first, int drawn, int& asked) {
    const Edge edge = {tag, parity * kPassRows + m};
    return first ? settle<true>(edge, drawn, &asked) : settle<false>(edge, drawn, &asked);
  }

  // Returns a row's token. This CTA must have offered all rows before.
  LF_DEVICE Sampled settle_row(u32 tag, int parity, int m, int drawn) {
    const Edge edge = {tag, parity * kPassRows + m};
    return m == 0 ? settle<true>(edge, drawn) : settle<false>(edge, drawn);
  }

 private:
  // The words of a row: their tag, and the number of their boards.
  struct Edge {
    u32 tag;
    int number;
  };

  // Whether a token is among the first `drafts` drafts of a row's slot, which are part of the row's text.
  LF_DEVICE static bool is_draft(int token, int drafts, const int* tokens) {
    bool found = false;
    if constexpr (kDrafting) {
      for (int i = 1; i <= drafts; i++) found = found || tokens[i] == token;
    }
    return found;
  }

  // Applies penalty, temperature and filters to the logits of row m, and publishes the CTA's packet. A spare CTA only
  // publishes its word: that it has read what the pass before has left, and how the call ends.
  LF_DEVICE void offer(const Edge& edge, int m, int position, int drafts, const int* tokens, int forced) {
    if (is_spare()) {
      record_timeout();
      sync_cta();
      return publish(edge, 0, 0, {0, -1}, 0);
    }
    const u32 tag = edge.tag;
    float *logits = this->logits + m * kHeadRows, *z = this->z + m * kHeadRows;
    const bool ranked = temperature > 0 && (top_k > 0 || top_p < 1),
               filtered = ranked || (temperature > 0 && min_p > 0);
    const bool published = p.top > 0 || p.logits != nullptr;
    float largest = kLowest, largest_z = kLowest;
    bool broken = false;
    for (int r = opaque(thread()); r < count; r += kThreads) {
      const float raw = logits[r];
      float value = raw;
      if (seen(first + r) || is_draft(first + r, drafts, tokens)) value = value > 0 ? value / penalty : value * penalty;
      if (temperature > 0) value /= temperature;
      z[r] = value;
      largest = larger(largest, raw), largest_z = larger(largest_z, value);
      broken = broken || raw != raw;
      for (int d = 0; d < p.devices; d++) {
        if (ranked) store_word(p.shared[d] + kZAt + (i64)edge.number * kVocab + first + r, word_of(value, tag));
        if (published) store_word(p.shared[d] + kLogitsAt + (i64)edge.number * kVocab + first + r, word_of(raw, tag));
      }
    }
    sync_cta();
    largest = max_over_cta(largest, warps());
    const float least = filtered ? threshold(edge, max_over_cta(largest_z, warps())) : kLowest;
    float sum = 0;
    Best best = {kLowest, -1};
    for (int r = opaque(thread()); r < count; r += kThreads) {
      sum += exp_of(logits[r] - largest);
      if (!(z[r] >= least)) continue;
      const float value = temperature > 0 ? z[r] + gumbel(key, (u32)position, (u32)(first + r)) : z[r];
      best = better(best, {value, first + r});
    }
    record_timeout();
    sync_cta();
    sum = sum_over_cta(broken ? bits_to_float(0x7fc00000u) : sum, warps());
    best = best_over_cta(best);
    if (kPassRows > 1 && forced >= 0) best = {0, forced >= first && forced < first + count ? forced : -1};
    publish(edge, largest, sum, best, best.token < 0 ? 0.0f : logits[best.token - first]);
  }

  // Reads the packets of a row, records its token and returns it. ends_pass: whether this is the pass's first row that
  // draws, with which Host::asked is read. asked: receives that for a call of several slots.
  template <bool ends_pass>
  LF_DEVICE Sampled settle(const Edge& edge, int drawn, [[maybe_unused]] int* asked = nullptr) {
    float largest, sum, logit;
    Best best;
    int end = collect<ends_pass>(edge, largest, sum, best, logit);
    if constexpr (kRequests > 1) {
      if (asked) *asked = end;
      end = end >= kFailure ? kFailed : end >> slot & 1 ? kCancelled : 0;
    }
    int token = best.token;
    if (token < 0 || token >= kVocab) token = 0;  // no logit was a number: the log-probability is NaN
    if (end) return {token, end};
    const float lse = largest + log_of(sum);
    const int row = kRequests == 1 ? drawn : slot * p.room + drawn;  // row of the results
    if (thread() == 0 && (leader || (token >= first && token < first + count))) seen(token) = 1;
    if (leader && p.logits != nullptr) copy_logits(edge, p.logits + (i64)row * kVocab);
    if (leader && p.top > 0) rank(edge, lse, row);
    if (leader && host_writer()) emit(token, logit - lse, row);
    return {token, 0};
  }

  // A thread that has timed out has computed from stale words, so this CTA's packet ends the call without a token.
  LF_DEVICE void record_timeout() const {
    if (watch.ended()) *end = kFailure;
  }

  // Whether a token is in the slot's text.
  LF_DEVICE unsigned char& seen(int token) const { return p.seen[kRequests == 1 ? token : slot * (i64)kVocab + token]; }

  // Whether this thread writes to host memory and waits for that: a thread with little else to do.
  LF_DEVICE static bool host_writer() { return thread() == kThreads - 1; }

  LF_DEVICE float* warps() const { return scratch + 2 * kBuckets + 2 * kBucketGroups; }

  LF_DEVICE float max_over_cta(float v, float* shared) const {
    v = max_over_warp(v);
    if (warp_lane() == 0) shared[warp()] = v;
    sync_cta();
    v = shared[0];
    LF_UNROLL for (int w = 1; w < kWarps; w++) v = larger(v, shared[w]);
    sync_cta();
    return v;
  }

  LF_DEVICE float sum_over_cta(float v, float* shared) const {
    v = sum_over_warp(v);
    if (warp_lane() == 0) shared[warp()] = v;
    sync_cta();
    v = 0;
    LF_UNROLL for (int w = 0; w < kWarps; w++) v += shared[w];
    sync_cta();
    return v;
  }

  LF_DEVICE Best best_over_cta(Best best) const {
    float* shared = warps();
    LF_UNROLL for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
      const Best other = {shuffle(best.value, mask), (int)shuffle_bits((u32)best.token, mask)};
      best = better(best, other);
    }
    if (warp_lane() == 0) shared[2 * warp()] = best.value, shared[2 * warp() + 1] = bits_to_float((u32)best.token);
    sync_cta();
    best = {shared[0], (int)float_to_bits(shared[1])};
    LF_UNROLL for (int w = 1; w < kWarps; w++) best =
        better(best, {shared[2 * w], (int)float_to_bits(shared[2 * w + 1])});
    sync_cta();
    return best;
  }

  LF_DEVICE i64 spare_word(const Edge& edge, int device) const { return kSpareAt + edge.number * kSpares + device; }
  LF_DEVICE i64 packet(const Edge& edge, int from) const {
    return kPacketsAt + ((i64)edge.number * kPackets + from) * kPacketWords;
  }

  // Publishes this CTA's packet on all devices.
  LF_DEVICE void publish(const Edge& edge, float largest, float sum, const Best& best, float logit) const {
    watch.delay();
    if (is_spare()) {
      if (thread() < kSpares)
        store_word(p.shared[thread()] + spare_word(edge, p.device), word_of((float)*end, edge.tag));
      return;
    }
    if (thread() >= kPacketWords) return;
    fence_device();  // what this CTA wrote to the caches is visible to readers of the packet (sync_cta ordered it)
    const float values[kPacketWords] = {largest, sum, best.value, bits_to_float((u32)best.token), logit, (float)*end};
    float value = values[0];
    LF_UNROLL for (int i = 1; i < kPacketWords; i++) if (thread() == i) value = values[i];
    for (int d = 0; d < p.devices; d++)
      store_word(p.shared[d] + packet(edge, place) + thread(), word_of(value, edge.tag));
  }

  // Reads all packets of a row. Returns how they end the call, or 0. polls: also reads Host::asked, for the next
  // packets.
  template <bool polls>
  LF_DEVICE int collect(const Edge& edge, float& largest, float& sum, Best& best, float& logit) const {
    constexpr int each = (kPackets + kThreads - 1) / kThreads;
    const int asked = kSteps || !polls ? 0 : asked_by_host();  // arrives while the packets are awaited
    float packets[each][kPacketWords];
    const u64* memory = p.shared[p.device] + packet(edge, 0);
    LF_UNROLL for (int i = 0; i < each; i++) {
      const int from = i * kThreads + opaque(thread());
      float one[1][kPacketWords];
      read_words<kPackets % kThreads == 0>(
          memory, smaller(from, kPackets) * kPacketWords, kPackets * kPacketWords, edge.tag,
          [](int, int i) { return i; }, one, watch, kAtPacket);
      LF_UNROLL for (int k = 0; k < kPacketWords; k++) packets[i][k] = one[0][k];
      if (from >= kPackets) packets[i][0] = kLowest, packets[i][3] = bits_to_float(~0u);
    }
    float top = kLowest, ending = 0;
    LF_UNROLL for (int i = 0; i < each; i++) top = larger(top, packets[i][0]),
                                             ending = larger(ending, packets[i][kEndWord]);
    if (kSpares > 0 && thread() < kSpares) {
      const u64* word = p.shared[p.device] + spare_word(edge, thread());
      ending = larger(ending, wait_for(word, edge.tag, watch, kAtSpare, thread()));
    }
    if (watch.ended()) ending = kFailure;
    fence_device();
    sync_cta();
    if (!kSteps && polls && polls_host()) *end = this->ending(asked);
    largest = max_over_cta(top, warps());
    ending = max_over_cta(ending, warps());
    float total = 0;
    Best found = {kLowest, -1};
    LF_UNROLL for (int i = 0; i < each; i++) {
      if (packets[i][1] != 0) total = fma(packets[i][1], exp_of(packets[i][0] - largest), total);
      found = better(found, {packets[i][2], (int)float_to_bits(packets[i][3])});
    }
    sum = sum_over_cta(total, warps());
    best = best_over_cta(found);
    float* shared = warps();
    LF_UNROLL for (int i = 0; i < each; i++) if (best.token >= 0 && (int)float_to_bits(packets[i][3]) == best.token)
        shared[0] = packets[i][4];
    sync_cta();
    logit = shared[0];
    sync_cta();
    return (int)ending;
  }

  // Writes a token to the results and to host memory. row: of the results.
  LF_DEVICE void emit(int token, float logprob, int row) const {
    p.tokens[row] = token;
    p.logprobs[row] = logprob;
    if (!p.reports) return;
    if constexpr (kRequests > 1) return emit_of_slot(token, logprob, row);
    p.emitted[row] = {token, logprob, clock_ns()};
    for (int i = 0; i < p.top; i++) {
      p.emitted_tokens[(i64)row * p.top + i] = p.top_tokens[(i64)row * p.top + i];
      p.emitted_logprobs[(i64)row * p.top + i] = p.top_logprobs[(i64)row * p.top + i];
    }
    fence_system();
    *(volatile int*)&p.host->count[0] = row + 1;
  }

  // Writes a token to host memory after those of the request's earlier calls. Most likely tokens are kMaxTop apart,
  // because these calls may have reported another number of them.
  LF_DEVICE void emit_of_slot(int token, float logprob, int row) const {
    const int number = p.control[slot * kControls + 4] + row - slot * p.room;
    const i64 at = (i64)slot * p.emitted_room + number, from = (i64)row * p.top;
    p.emitted[at] = {token, logprob, clock_ns()};
    for (int i = 0; i < p.top; i++) {
      p.emitted_tokens[at * kMaxTop + i] = p.top_tokens[from + i];
      p.emitted_logprobs[at * kMaxTop + i] = p.top_logprobs[from + i];
    }
    fence_system();
    *(volatile int*)&p.host->count[slot] = number + 1;
  }

  // Calls body(token, value) for all published words as they arrive, divided among the threads. Loads take long, so
  // several are issued together where the weights leave registers for them.
  template <class Body>
  LF_DEVICE void each_published(i64 base, u32 tag, Body body) const {
    constexpr int each = LF_BULK ? 4 : 1;
    const u64* board = p.shared[p.device] + base;
    for (int first = opaque(thread()); first < kVocab; first += each * kThreads) {
      u64 words[each];
      LF_UNROLL for (int i = 0; i < each; i++) if (first + i * kThreads < kVocab) words[i] =
          load_word(board + first + i * kThreads);
      LF_UNROLL for (int i = 0; i < each; i++) {
        const int token = first + i * kThreads;
        if (token >= kVocab) continue;
        for (u32 spins = 0; !arrived(words[i], tag); words[i] = load_word(board + token))
          if (!watch.keep_waiting(spins, kAtLogits, token, board + token, tag)) break;
        body(token, value_of(words[i]));
      }
    }
  }

  LF_DEVICE void copy_logits(const Edge& edge, float* out) const {
    each_published(kLogitsAt + (i64)edge.number * kVocab, edge.tag,
                   [&](int token, float value) { out[token] = value; });
  }

  // Writes the p.top most likely tokens to the results; of equal ones the lowest comes first.
  LF_DEVICE void rank(const Edge& edge, float lse, int row) const {
    Best last = {0, -1};
    for (int i = 0; i < p.top; i++) {
      Best best = {kLowest, -1};
      each_published(kLogitsAt + (i64)edge.number * kVocab, edge.tag, [&](int token, float logit) {
        const float value = logit + 0.0f;  // -0 and 0 are equal
        const bool behind = i == 0 || value < last.value || (value == last.value && token > last.token);
        if (behind) best = better(best, {value, token});
      });
      last = best_over_cta(best);
      if (host_writer()) {
        p.top_tokens[(i64)row * p.top + i] = last.token < 0 ? i : last.token;
        p.top_logprobs[(i64)row * p.top + i] = last.value - lse;
      }
    }
  }

  // The least z that the filters keep. Every CTA computes it from the same words. own_best: the largest z of this CTA.
  LF_DEVICE float threshold(const Edge& edge, float own_best) const {
    const u32 tag = edge.tag;
    const i64 base = kZAt + (i64)edge.number * kVocab, of_ctas = kLargestZAt + (i64)edge.number * kPackets;
    if (thread() < p.devices) store_word(p.shared[thread()] + of_ctas + place, word_of(own_best, tag));
    float best = kLowest;
    for (int from = opaque(thread()); from < kPackets; from += kThreads) {
      const u64* word = p.shared[p.device] + of_ctas + from;
      best = larger(best, wait_for(word, tag, watch, kAtPacket, from * kPacketWords));
    }
    best = max_over_cta(best, warps());
    float least = kLowest;
    if (top_k > 0) least = largest_reaching(base, tag, (double)top_k, [](float) { return (u64)1; });
    if (top_p < 1) {
      const float kth = least;
      const auto amount = [=](float z) { return z >= kth ? (u64)(exp_of(z - best) * 0x1p40f) : (u64)0; };
      least = larger(least, largest_reaching(base, tag, -(double)top_p, amount));
    }
    if (min_p > 0) least = larger(least, best + log_of(min_p));
    return least < best ? least : best;
  }

  // The largest z for which the amounts of all values >= z sum to at least `wanted`; if that is negative, to -wanted
  // times the total. Three histograms resolve the upper, middle and lower bits of z. Amounts are integers, so their
  // sums do not depend on the order.
  template <class Amount>
  LF_DEVICE float largest_reaching(i64 base, u32 tag, double wanted, Amount amount) const {
    u64* sums = (u64*)scratch;
    u64* groups = sums + kBuckets;
    int* found = (int*)(warps() + 2 * kWarps);
    u64* above_shared = (u64*)(warps() + 2 * kWarps + 2);
    u32 prefix = 0;
    int shift = 32;
    u64 above = 0;
    for (int pass = 0; pass < 3; pass++) {
      const int upper = shift, bits = pass < 2 ? 11 : 10;
      shift -= bits;
      sync_cta();
      for (int i = opaque(thread()); i < kBuckets; i += kThreads) sums[i] = 0;
      sync_cta();
      each_published(base, tag, [&](int, float value) {
        const u32 order = order_of(value);
        if (upper < 32 && order >> upper != prefix) return;
        const u64 own = amount(value);
        if (own) add_shared(sums + (order >> shift & ((1u << bits) - 1)), own);
      });
      sync_cta();
      for (int g = opaque(thread()); g < kBucketGroups; g += kThreads) {
        u64 sum = 0;
        for (int i = 0; i < kBuckets / kBucketGroups; i++) sum += sums[g * (kBuckets / kBucketGroups) + i];
        groups[g] = sum;
      }
      sync_cta();
      if (thread() == 0) {
        if (pass == 0 && wanted < 0) {
          u64 total = 0;
          for (int g = 0; g < kBucketGroups; g++) total += groups[g];
          *(double*)(above_shared + 1) = -wanted * (double)total;
        } else if (pass == 0) {
          *(double*)(above_shared + 1) = wanted;
        }
        const double goal = *(double*)(above_shared + 1);
        constexpr int each = kBuckets / kBucketGroups;
        int g = kBucketGroups - 1;
        while (g >= 0 && !(groups[g] > 0 && (double)(above + groups[g]) >= goal)) above += groups[g--];
        int bucket = -1;
        if (g >= 0)
          for (bucket = g * each + each - 1; !(sums[bucket] > 0 && (double)(above + sums[bucket]) >= goal); bucket--)
            above += sums[bucket];
        *found = bucket;
        *above_shared = above;
      }
      sync_cta();
      above = *above_shared;
      if (*found < 0) return kLowest;
      prefix = prefix << bits | (u32)*found;
    }
    return float_of_order(prefix);
  }
};

}  // namespace gpu
}  // namespace laneformer
