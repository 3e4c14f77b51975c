// A call of several requests, each in a slot. Every pass has a row of each: its next token, and as many of a prompt as
// there are rows left. Each CTA keeps the same state and chooses the same rows, from the same packets.
//
// The slots of a call stay. It ends for all of them once one has drawn its last token or was cancelled, or when the
// host asks it to yield, because a request waits. The others have yielded then: the host lets them go on in another
// call.
#pragma once

#include "rows.h"

namespace laneformer {
namespace gpu {

// In shared memory.
struct RequestState {
  int prompt, start, limit;  // as in `Control`; prompt: 0 for a slot that takes no part
  int passed, drawn;         // tokens of the prompt that were in passes, and those drawn
  int token, end;            // the last one drawn; a value of Ends, kYielded while the slot runs
};
struct RequestsState {
  RequestState of[kRequests];
  Row row[kPassRows];
  int token[kPassRows], draws[kPassRows], drawn[kPassRows];  // drawn: by the row, -1 for none
  int rows, passes, over;
};

// What ends a call, in a packet: a value of Ends; of a call of several slots what the host has asked, or kFailure.
constexpr int kFailure = kRequests == 1 ? (int)kFailed : 2 * kYield;

static_assert(kRequests == 1 || sizeof(RequestsState) <= 4 * kDraftInts, "custom_calls/gpu/layout.py counts otherwise");
static_assert(kRequests <= kPassRows || kRequests == 1, "each slot has a row");

class Requests {
 public:
  LF_DEVICE Requests(const Params& p, int* shared) : p_(p), s_(*(RequestsState*)shared) {}

  LF_DEVICE void begin() {
    if (thread() == 0) {
      for (int slot = 0; slot < kRequests; slot++) {
        const int* control = p_.control + slot * kControls;
        s_.of[slot] = {control[0], control[1], control[2], 0, 0, 0, kYielded};
      }
      s_.passes = 0;
    }
  }

  // The rows of the next pass.
  LF_DEVICE void choose() {
    sync_cta();
    if (thread() == 0) {
      int spare = kPassRows, rows = 0;
      for (int slot = 0; slot < kRequests; slot++) spare -= s_.of[slot].prompt > 0;
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
  LF_DEVICE int drawn(int slot) const { return s_.of[slot].drawn; }  // before this pass
  LF_DEVICE void draw(int m, int token) const {
    if (thread() == 0) s_.drawn[m] = token;
  }

  // After a pass; asked: by the host, or kFailure. Whether the call is over.
  LF_DEVICE bool end_pass(int asked) {
    sync_cta();
    if (thread() == 0) {
      s_.passes++;
      s_.over = asked >= kYield || s_.passes == p_.passes;
      for (int m = 0; m < s_.rows; m++) {
        RequestState& own = s_.of[s_.row[m].slot];
        if (own.passed < own.prompt) own.passed++;
        if (s_.drawn[m] < 0) continue;
        own.token = s_.drawn[m];
        own.drawn++;
        if (own.drawn == own.limit) own.end = kLength;
        const int* stops = p_.stops + s_.row[m].slot * p_.num_stops;
        for (int i = 0; i < p_.num_stops; i++)
          if (stops[i] == own.token) own.end = kStop;
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

 private:
  const Params& p_;
  RequestsState& s_;
};

}  // namespace gpu
}  // namespace laneformer
