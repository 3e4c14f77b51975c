// The state of a call of several requests, each in a slot. decode.cu calls it around every pass. A pass has a row of
// each request, for its next token; further rows go to prompts, and the rest to drafts. Each CTA keeps the same state
// and chooses the same rows, because all CTAs read the same packets.
//
// The requests of a call do not change. The call ends for all of them once one has drawn its last token or was
// cancelled, when the host asks it to yield because another request waits, or after Params::passes passes. Requests
// that have not ended have then yielded: the host continues them in another call.
#pragma once

#include "drafts.h"

namespace laneformer {
namespace gpu {

// In shared memory.
struct RequestState {
  int prompt, start, limit;  // as in Control; prompt is 0 for a slot that takes no part
  int passed, drawn;         // tokens of the prompt that were in passes; tokens drawn
  int token, end;            // the last token drawn; a value of Ends, kYielded while the request runs
};
struct RequestsState {
  RequestState of[kRequests];
  Row row[kPassRows];
  // draws: 0, or 1 + the row's number among the slot's rows that draw; drawn: the token that the row drew, or -1
  int token[kPassRows], draws[kPassRows], drawn[kPassRows];
  int rows, passes, over;
};
struct SharedRows {         // after the DraftStates of all slots
  float chance[kRequests];  // by slot, that its next draft is right
  int got[kRequests];       // by slot, tokens drawn in the pass
  int order[kPassRows];     // the slots of the pass's drafts, in the order of choice
};

// The end word of a packet is a value of Ends; with several slots it is Host::asked, or kFailure after a failure.
constexpr int kFailure = kRequests == 1 ? (int)kFailed : 2 * kYield;

static_assert(kRequests == 1 ||
                  sizeof(RequestsState) + kDrafting * (kRequests * sizeof(DraftState) + sizeof(SharedRows)) <=
                      4 * kDraftInts,
              "kDraftInts is too small: see draft_ints in custom_calls/gpu/layout.py");
static_assert(kRequests <= kPassRows || kRequests == 1, "a pass needs a row for each slot");

class Requests {
 public:
  LF_DEVICE Requests(const Params& p, int* shared) : p_(p), s_(*(RequestsState*)shared) {}

  // Starts a call.
  LF_DEVICE void begin() {
    if constexpr (kDrafting) {
      for (int slot = 0; slot < kRequests; slot++) drafts(slot).begin(p_.control[slot * kControls]);
    }
    if (thread() == 0) {
      for (int slot = 0; slot < kRequests; slot++) {
        const int* control = p_.control + slot * kControls;
        s_.of[slot] = {control[0], control[1], control[2], 0, 0, 0, kYielded};
      }
      s_.passes = 0;
    }
  }

  // Chooses the rows of the next pass.
  LF_DEVICE void choose() {
    sync_cta();
    if constexpr (kDrafting) {
      for (int slot = 0; slot < kRequests; slot++)
        if (drafts_now(slot)) drafts(slot).find(s_.of[slot].drawn, most_drafts(slot));
    }
    if (thread() == 0) {
      int spare = kPassRows, rows = 0;
      for (int slot = 0; slot < kRequests; slot++) spare -= s_.of[slot].prompt > 0;
      if constexpr (kDrafting) share_rows();
      for (int slot = 0; slot < kRequests; slot++) {
        const RequestState& own = s_.of[slot];
        if (own.prompt == 0) continue;
        const int left = own.prompt - own.passed, count = left > 0 ? smaller(left, 1 + spare) : 1, first = rows;
        spare -= count - 1;
        for (; rows < first + count; rows++) {
          const int place = rows - first;
          s_.row[rows] = {slot, first, own.start + own.passed + larger(own.drawn - 1, 0)};
          s_.token[rows] = left > 0 ? p_.prompt[slot * p_.room_of_prompt + own.passed + place] : own.token;
          s_.draws[rows] = place + 1 == count && count >= left;
          s_.drawn[rows] = -1;
        }
        if constexpr (kDrafting) {
          const int drafted = drafts(slot).rows() - 1;
          for (int i = 0; i < drafted; i++, rows++) {
            s_.row[rows] = s_.row[first];
            s_.token[rows] = drafts(slot).draft(i);
            s_.draws[rows] = 2 + i;
            s_.drawn[rows] = -1;
          }
        }
      }
      s_.rows = rows;
    }
    sync_cta();
  }

  LF_DEVICE int rows() const { return s_.rows; }
  template <int most>
  LF_DEVICE Run<most, true> run() const {
    return {s_.row, s_.rows};
  }
  LF_DEVICE const Row& row(int m) const { return s_.row[m]; }
  LF_DEVICE int position(int m) const { return s_.row[m].start + m - s_.row[m].first; }
  LF_DEVICE int token(int m) const { return s_.token[m]; }
  LF_DEVICE bool draws(int m) const { return s_.draws[m]; }
  // Of a row that draws: its number among the slot's rows that draw, the tokens of these, and what it must draw, or -1.
  LF_DEVICE int place(int m) const { return kDrafting ? s_.draws[m] - 1 : 0; }
  LF_DEVICE const int* text(int m) const { return kDrafting ? s_.token + m - place(m) : nullptr; }
  LF_DEVICE int forced(int m) const {
    return kDrafting ? drafts(s_.row[m].slot).forced(s_.of[s_.row[m].slot].drawn + place(m)) : -1;
  }
  // Whether the row after row m is a draft of the token that row m drew, and that token does not end the answer.
  LF_DEVICE bool goes_on(int m, int token) const {
    if (m + 1 >= s_.rows || s_.draws[m + 1] < 2 || s_.token[m + 1] != token) return false;
    return !stops(s_.row[m].slot, token);
  }
  LF_DEVICE int drawn(int slot) const { return s_.of[slot].drawn; }  // tokens drawn before this pass
  LF_DEVICE void draw(int m, int token) const {
    if (thread() == 0) s_.drawn[m] = token;
  }

  // Ends a pass. asked: Host::asked as the packets report it, or kFailure. Returns whether the call is over.
  LF_DEVICE bool end_pass(int asked) {
    sync_cta();
    if (thread() == 0) {
      s_.passes++;
      s_.over = asked >= kYield || s_.passes == p_.passes;
      if constexpr (kDrafting) {
        for (int slot = 0; slot < kRequests; slot++) of_rows().got[slot] = 0;
      }
      for (int m = 0; m < s_.rows; m++) {
        RequestState& own = s_.of[s_.row[m].slot];
        if (own.passed < own.prompt) own.passed++;
        if (s_.drawn[m] < 0) continue;
        own.token = s_.drawn[m];
        own.drawn++;
        if (own.drawn == own.limit) own.end = kLength;
        if (stops(s_.row[m].slot, own.token)) own.end = kStop;
        if constexpr (kDrafting) drafts(s_.row[m].slot).keep(of_rows().got[s_.row[m].slot]++, own.token);
      }
      if constexpr (kDrafting) {
        for (int slot = 0; slot < kRequests; slot++)
          if (const int got = of_rows().got[slot])
            drafts(slot).take(p_.control[slot * kControls + 4] + s_.of[slot].drawn - got, got);
      }
      for (int slot = 0; slot < kRequests; slot++) {
        RequestState& own = s_.of[slot];
        if (own.prompt == 0) continue;
        if (asked >= kFailure) {
          own.end = kFailed;
        } else if (own.end == kYielded && (asked >> slot & 1)) {
          own.end = kCancelled;
        }
        s_.over = s_.over || own.end != kYielded;
      }
    }
    sync_cta();
    return s_.over;
  }

  LF_DEVICE int passes() const { return s_.passes; }
  LF_DEVICE const RequestState& of(int slot) const { return s_.of[slot]; }

  // Writes the counts of drafts to host memory; called by one thread.
  LF_DEVICE void report_drafts() const {
    if constexpr (kDrafting) {
      for (int slot = 0; slot < kRequests; slot++) drafts(slot).report(0, 0);
    }
  }

 private:
  LF_DEVICE int* behind() const { return (int*)(&s_ + 1); }
  LF_DEVICE Drafts drafts(int slot) const { return {p_, behind(), slot}; }
  LF_DEVICE SharedRows& of_rows() const { return *(SharedRows*)((DraftState*)behind() + kRequests); }

  LF_DEVICE bool stops(int slot, int token) const {
    const int* stops = p_.stops + slot * p_.num_stops;
    bool found = false;
    for (int i = 0; i < p_.num_stops; i++) found = found || stops[i] == token;
    return found;
  }

  // Whether drafts may follow a slot's row: all tokens of its prompt except the last must have been in passes.
  LF_DEVICE bool drafts_now(int slot) const {
    return s_.of[slot].prompt > 0 && s_.of[slot].prompt - s_.of[slot].passed <= 1;
  }
  LF_DEVICE int most_drafts(int slot) const {
    return smaller(smaller(drafts(slot).most(), kPassRows - 1), s_.of[slot].limit - s_.of[slot].drawn - 1);
  }

  // Gives the rows that prompts leave to drafts of the slots, the likeliest first: as many as give the most expected
  // tokens per time.
  LF_DEVICE void share_rows() const {
    SharedRows& shared = of_rows();
    int rows = 0, draws = 0;
    for (int slot = 0; slot < kRequests; slot++) {
      const Drafts own = drafts(slot);
      const bool now = drafts_now(slot);
      if (!now) own.find_none();
      own.set_rows(1);
      rows += s_.of[slot].prompt > 0, draws += now;
      const bool any = now && smaller(most_drafts(slot), own.made()) > 0;
      shared.chance[slot] = !any ? 0.0f : own.given() ? kSure : own.rate();
    }
    for (int slot = 0; slot < kRequests; slot++) {
      const int left = s_.of[slot].prompt - s_.of[slot].passed;
      if (left > 1) rows += smaller(left - 1, kPassRows - rows);
    }
    const float* prices = p_.texts[0].prices;
    float tokens = (float)draws, best = draws > 0 ? 1.03f * tokens / prices[rows - 1] : 0;
    int made = 0, kept = 0;
    for (; rows + made < kPassRows; made++) {
      int slot = -1;
      for (int i = 0; i < kRequests; i++)
        if (shared.chance[i] > 0 && (slot < 0 || shared.chance[i] > shared.chance[slot])) slot = i;
      if (slot < 0) break;
      const Drafts own = drafts(slot);
      shared.order[made] = slot;
      tokens += own.given() ? 1.0f : shared.chance[slot];
      const float gain = tokens / prices[rows + made];
      if (own.given() || gain > best) best = gain, kept = made + 1;
      own.set_rows(own.rows() + 1);
      shared.chance[slot] *= own.given() ? kLessSure : own.rate();
      if (own.rows() > smaller(most_drafts(slot), own.made())) shared.chance[slot] = 0;
    }
    for (; made > kept; made--) {
      const Drafts own = drafts(shared.order[made - 1]);
      own.set_rows(own.rows() - 1);
    }
  }

  // Chances of given drafts: above 1 for all rows of a pass, and falling, so that slots share the rows evenly.
  static constexpr float kSure = 8, kLessSure = 0.8f;

  const Params& p_;
  RequestsState& s_;
};

}  // namespace gpu
}  // namespace laneformer
