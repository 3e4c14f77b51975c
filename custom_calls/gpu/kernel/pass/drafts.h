// Drafts of the next tokens, copied from the text: common/drafts.h on a GPU, for each slot of a call. decode.cu uses
// them for one request, requests.h for several. Drafts decide which rows a pass has, and so its speed, but never the
// tokens: a row of a wrong draft draws nothing.
//
// Each CTA keeps the same state and makes the same drafts from the same tokens, so it needs neither the host nor other
// CTAs. No clock decides, because clocks differ between CTAs: prices stay those that the call provides.
//
// The text of a slot is in the memory of each device: another text and the text before the prompt, which the host
// provides, then the prompt and the answer. Every CTA writes every token of the answer, the same tokens to the same
// places, and so reads only what it has written itself.
#pragma once

#include "rows.h"

namespace laneformer {
namespace gpu {

constexpr int kClasses = 4;  // of drafts, by the length of their match: below 3, 6 and 16 tokens, and longer

// In shared memory.
struct DraftState {
  int tokens[kPassRows];     // of the pass's rows: the newest token, then drafts
  int drafts[kPassRows];     // all that were found, also those that are too dear to check
  int drawn[kPassRows];      // tokens that the pass's rows drew
  int rows, made;            // rows of the pass; drafts that were found
  int size;                  // tokens of the text
  int of_class, from_other;  // class of the drafts; whether they are from another text
  float rates[kClasses];     // share of right drafts, by class
  DraftCounts counts;
  u32 found[kWarps];  // of each warp, for largest_in_cta
};

static_assert(!kDrafting || kRequests > 1 || sizeof(DraftState) <= 4 * kDraftInts,
              "kDraftInts is too small: see draft_ints in custom_calls/gpu/layout.py");

class Drafts {
 public:
  // shared: the DraftStates of all slots, in shared memory.
  LF_DEVICE Drafts(const Params& p, int* shared, int slot = 0)
      : p_(p), t_(p.texts[slot]), s_(((DraftState*)shared)[slot]), slot_(slot) {}

  LF_DEVICE int token(int m) const { return s_.tokens[m]; }
  LF_DEVICE const int* tokens() const { return s_.tokens; }
  LF_DEVICE int rows() const { return s_.rows; }

  // Copies the texts to device memory, each CTA a part of them. A barrier of all CTAs must follow.
  LF_DEVICE void bring_texts(int prompt) const {
    const int first = cta() * kThreads + thread(), step = kLanesHere * kCtas * kThreads;
    for (int i = first; i < t_.before; i += step) t_.text[i] = t_.given[i];
    for (int i = first; i < prompt; i += step) t_.text[t_.before + i] = prompt_of(p_, slot_)[i];
    for (int i = first; i < t_.forced + t_.drafts; i += step) t_.text[t_.room + i] = t_.given[t_.before + i];
    fence_device();
    sync_cta();
  }

  // Starts a call. prompt: its number of tokens.
  LF_DEVICE void begin(int prompt) {
    fence_device();
    if (thread() == 0) {
      s_.size = t_.before + prompt;
      s_.made = s_.from_other = s_.of_class = 0;
      constexpr float rates[kClasses] = {0.1f, 0.3f, 0.6f, 0.9f};  // low, because unchecked drafts raise them too
      LF_UNROLL for (int i = 0; i < kClasses; i++) s_.rates[i] = rates[i];
      s_.counts = {};
    }
    sync_cta();
  }

  // Gives the next pass `count` tokens of the prompt, from number `first` on.
  LF_DEVICE void take_prompt(int first, int count) {
    sync_cta();
    if (thread() < count) s_.tokens[thread()] = p_.prompt[first + thread()];
    if (thread() == 0) s_.rows = count;
    sync_cta();
  }

  // The token that the answer must have at a place, whatever is drawn, or -1.
  LF_DEVICE int forced(int place) const { return place < t_.forced ? text(t_.room + place) : -1; }

  LF_DEVICE void draw(int m, int token) const {
    if (thread() == 0) s_.drawn[m] = token;
  }

  // Called after a pass that drew `count` tokens, when `before` had been drawn. Adds them to the text and chooses the
  // rows of the next pass: the newest token and up to `most` drafts.
  LF_DEVICE void next(int before, int count, int most) {
    sync_cta();
    if (thread() == 0) {
      take(before, count);
      s_.tokens[0] = s_.drawn[count - 1];
    }
    sync_cta();
    propose(before + count, smaller(most, smaller(t_.most, kPassRows - 1)));
  }

  // Adds the tokens of a pass to the text and learns from them; called by one thread.
  LF_DEVICE void take(int before, int count) const {
    if (before > 0) this->count(count);
    learn(count);
    for (int i = 0; i < count && t_.most > 0; i++) t_.text[s_.size + i] = s_.drawn[i];
    s_.size += count;
  }

  // Chooses the rows of the first pass that draws. last: the prompt's last token, of its first row.
  LF_DEVICE void first(int last, int most) {
    sync_cta();
    if (thread() == 0) s_.tokens[0] = last;
    sync_cta();
    propose(0, smaller(most, smaller(t_.most, kPassRows - 1)));
  }

  // For several slots, which share the rows of a pass (requests.h): finds drafts of the answer's tokens from number
  // `next` on, at most `most`. Thread 0 writes them to the state.
  LF_DEVICE void find(int next, int most) const {
    find(next, most, [] {});
  }
  // Leaves the slot without drafts.
  LF_DEVICE void find_none() const { s_.made = s_.from_other = s_.of_class = 0; }

  LF_DEVICE int most() const { return t_.most; }
  LF_DEVICE int made() const { return s_.made; }
  LF_DEVICE bool given() const { return t_.drafts > 0; }  // drafts to check at any price
  LF_DEVICE float rate() const { return s_.rates[s_.of_class]; }
  LF_DEVICE int draft(int i) const { return s_.drafts[i]; }
  LF_DEVICE void set_rows(int rows) const { s_.rows = rows; }
  LF_DEVICE void keep(int place, int token) const { s_.drawn[place] = token; }  // a token that the pass drew

  // Writes the counts to host memory; called by one thread. count: tokens of the last pass, which `next` has not
  // counted; before: tokens drawn before it.
  LF_DEVICE void report(int before, int count) const {
    if (before > 0 && count > 0) this->count(count);
    p_.host->drafts[slot_] = s_.counts;
  }

 private:
  static constexpr int kEndOfText = -1, kLongest = 64, kPlaceBits = 28;

  LF_DEVICE int text(int at) const { return load_between_ctas(t_.text + at); }

  LF_DEVICE void count(int drawn) const {
    const int checked = s_.rows - 1;
    s_.counts.passes[checked]++;
    for (int i = 0; i < drawn - 1; i++) s_.counts.accepted[i]++;
    if (s_.from_other) s_.counts.other += checked, s_.counts.other_accepted += drawn - 1;
  }

  // Adjusts the rate of the drafts' class by those that the drawn tokens confirm or refute.
  LF_DEVICE void learn(int count) const {
    float& rate = s_.rates[s_.of_class];
    for (int i = 0; i < smaller(count, s_.made); i++) {
      const bool right = s_.drawn[i] == s_.drafts[i];
      rate += (1.0f / 16) * ((right ? 1.0f : 0.0f) - rate);
      if (!right) break;
    }
  }

  // The largest v of the CTA's threads.
  LF_DEVICE u32 largest_in_cta(u32 v) const {
    v = largest_in_warp(v);
    if (warp_lane() == 0) s_.found[warp()] = v;
    sync_cta();
    v = 0;
    for (int w = 0; w < kWarps; w++) v = v > s_.found[w] ? v : s_.found[w];
    sync_cta();
    return v;
  }

  // Finds drafts and chooses how many of them the next pass checks.
  LF_DEVICE void propose(int next, int most) {
    find(next, most, [&] {
      s_.rows = 1 + (t_.drafts > 0 ? s_.made : worth(smaller(most, s_.made)));
      for (int i = 1; i < s_.rows; i++) s_.tokens[i] = s_.drafts[i - 1];
    });
    sync_cta();
  }

  // Finds drafts; thread 0 writes them to the state and then calls `then`.
  template <class Then>
  LF_DEVICE void find(int next, int most, Then then) const {
    int place = 0, length = 0;
    if (most > 0 && t_.drafts == 0) {
      place = newest_match();
      if (place > 0) length = follow(place);
    }
    if (thread() == 0) {
      if (t_.drafts > 0) {
        copy_given(next, most);
      } else {
        copy_from(place, length);
      }
      then();
    }
  }

  // The place that follows the same 8, 6, 4, 3 or 2 tokens as the end of the text: the longest match, then the newest.
  // 0: none.
  LF_DEVICE int newest_match() const {
    constexpr int longest = 8;
    const int end = s_.size;
    int last[longest];
    LF_UNROLL for (int i = 0; i < longest; i++) last[i] = end > i ? text(end - 1 - i) : kEndOfText;
    u32 best = 0;
    for (int place = opaque(thread()) + 2; place < end; place += kThreads) {
      if (text(place - 1) != last[0] || text(place - 2) != last[1]) continue;
      int length = 2;
      while (length < longest && length < place && text(place - 1 - length) == last[length]) length++;
      const u32 rank = length >= 8 ? 5 : length >= 6 ? 4 : length >= 4 ? 3 : length >= 3 ? 2 : 1;
      const u32 found = rank << kPlaceBits | (u32)place;
      best = best > found ? best : found;
    }
    return (int)(largest_in_cta(best) & ((1u << kPlaceBits) - 1));
  }

  // How many tokens before a place equal those before the end of the text, at most kLongest.
  LF_DEVICE int follow(int place) const {
    u32 different = 0;  // kLongest less the distance of the nearest difference
    for (int i = warp_lane(); i < kLongest; i += kWarpSize)
      if (i >= place || text(place - 1 - i) != text(s_.size - 1 - i))
        different = different > (u32)(kLongest - i) ? different : (u32)(kLongest - i);
    return kLongest - (int)largest_in_warp(different);
  }

  // Copies drafts that the call provides.
  LF_DEVICE void copy_given(int next, int most) const {
    s_.made = 0;
    for (; s_.made < most && next + s_.made < t_.drafts; s_.made++) {
      const int token = text(t_.room + t_.forced + next + s_.made);
      if (token < 0) break;
      s_.drafts[s_.made] = token;
    }
  }

  // Copies drafts from a place of the text; length: of its match.
  LF_DEVICE void copy_from(int place, int length) const {
    s_.of_class = length < 3 ? 0 : length < 6 ? 1 : length < 16 ? 2 : 3;
    const int longest = length < 3 ? 2 : length < 6 ? 4 : length < 16 ? 7 : 15;
    s_.from_other = place > 0 && place < t_.other;
    s_.made = 0;
    for (int i = 0; place > 0 && i < smaller(longest, kPassRows - 1); i++) {  // beyond the end the drafts repeat
      const int token = place + i < s_.size ? text(place + i) : s_.drafts[place + i - s_.size];
      if (token == kEndOfText) break;
      s_.drafts[s_.made++] = token;
    }
  }

  // How many drafts give the most expected tokens per time; 0 unless that gains 3 %.
  LF_DEVICE int worth(int most) const {
    const float rate = s_.rates[s_.of_class];
    float right = 1, tokens = 1, best = 1.03f;
    int count = 0;
    for (int n = 1; n <= most; n++) {
      tokens += right *= rate;
      const float gain = tokens / t_.prices[n];
      if (gain > best) best = gain, count = n;
    }
    return count;
  }

  const Params& p_;
  const Texts& t_;
  DraftState& s_;
  const int slot_;
};

}  // namespace gpu
}  // namespace laneformer
