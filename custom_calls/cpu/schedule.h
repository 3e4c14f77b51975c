// The calls of a session that run together, and which positions of each go into a pass. Decoder::run makes a call
// through Schedule::run; worker 0 calls `plan` and `publish` between two passes. A row is a position of a pass that
// draws a token from its logits.
//
// Invariant: a position's results do not depend on the pass that it is in (worker.h). So the schedule decides how fast
// each call is, and never changes an answer. docs/decode_kernel.md describes the rules.
//
// Several threads use a slot: the host's threads announce calls and read tokens while a call runs, and the leader plans
// and draws. Comments at the fields say which of them writes.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../common/drafts.h"
#include "../common/request.h"
#include "sync.h"

namespace laneformer {

// Arrays of the second step of infer/sampling.py; empty if the request adjusts no logits.
struct Adjustment {
  std::vector<float> bias;     // [vocab_size]
  std::vector<int32_t> drawn;  // [vocab_size]: how often the answer has each token so far
};
Adjustment adjustment_of(const SamplingOptions& sampling, int64_t vocab_size);

// A request, and where its call reads and writes.
struct Call : Request {
  int32_t top = 0;                   // most likely tokens to record with each token
  std::vector<void*> caches;         // [kept arrays][lanes], each [t][entry], in the order of plan::kept_arrays
  std::vector<int64_t> widths;       // by cache: bytes of an entry; empty if calls cannot copy from each other
  uint8_t* seen = nullptr;           // [vocab_size], updated
  float* logits = nullptr;           // [limit][vocab_size], for tests; may be null
  Adjustment* adjustment = nullptr;  // updated; may be null
  Speculation speculation;
};

enum class End : int32_t { length = 0, stop = 1, cancelled = 2, failed = 3 };

constexpr int kConfirmed = 64;  // passes of single calls after which a measured price of a shared one is outdated

constexpr int kBlock = 48;  // positions that go through the model together at most; 6 and 24 divide it

struct Drafting {                         // counts of a call, for measurements
  int64_t passes[kMostRows] = {};         // passes after the prompt's, by number of rows
  int64_t accepted[kMostRows - 1] = {};   // accepted drafts, by place in their pass
  int64_t other = 0, other_accepted = 0;  // drafts from another text, and accepted ones
};

struct Answer {  // entries for each token that a call may draw
  std::vector<int32_t> tokens, top_tokens;
  std::vector<float> logprobs, top_logprobs;
  std::vector<int64_t> times_ns;
  std::vector<uint8_t> drafted, others;  // whether it was an accepted draft; other calls with rows in its pass
};

// Runs one call after the other. Its tokens are read while the call runs.
struct Slot {
  // Written by the host's threads; `done` and `count` also by worker 0.
  std::atomic<int> cancel{0}, done{1};
  Counter count;               // tokens drawn
  Counter masks;               // masks given; the last one is for the token to draw
  std::vector<uint32_t> mask;  // a bit for each token of the vocabulary; written while no draw reads it
  bool armed = false;          // `begin` has announced a call that does not run yet
  // State of the running call. The schedule's lock guards `number`, `running` and `ended`; worker 0 alone writes the
  // others.
  int64_t number = 0;  // number of the call, from its announcement on
  bool running = false, ended = true;
  Slot* from = nullptr;  // the slot whose keys and values the call waits for
  int64_t common = 0;    // positions that both calls have in common
  int64_t copied = 0;    // positions that were copied
  const Call* call = nullptr;
  Answer answer;
  Drafts drafts;
  Drafting drafting;
  int64_t shared = 0;  // passes with rows of other calls
  int32_t drawn = 0;
  int64_t absorbed = 0;    // tokens of the prompt that are in the cache
  int64_t known = 0;       // tokens of the prompt that drafts may be copied from
  bool cancelled = false;  // `cancel` as it was before the tokens of a pass were drawn
  bool joined = false;     // whether passes may have a row of it
  bool deferred = false;   // the call drew nothing in its last pass, because its mask was missing
  bool stopped = false;    // the last token is drawn; `end` has the reason
  End end = End::length;
  std::string reason;  // message of End::failed

  bool finished() const { return done.load(std::memory_order_acquire); }
  int32_t drawn_tokens() const { return (int32_t)count.value.load(std::memory_order_acquire); }
  bool mask_given() const { return masks.reached((uint32_t)drawn + 1); }
  int64_t unread() const { return (int64_t)call->prompt.size() - absorbed; }
  bool draws() const { return unread() == 0; }  // the whole prompt is in the cache
  bool draws_soon() const { return unread() <= kBlock; }
  int64_t filled() const { return call->start + absorbed + (drawn > 0 ? drawn - 1 : 0); }  // positions in its caches
};

// Consecutive positions of one call in a pass.
struct Run {
  Slot* slot;
  int first, count;  // its block positions: first <= p < first + count
  int64_t start;     // position of the first one in the text
  int row, rows;     // its rows of the pass: its last positions, which draw; none inside a prompt

  int place_of(int i) const { return first + count - rows + i; }  // block position of row `row + i`
};

struct Pass {
  int runs = 0, positions = 0, rows = 0;
  Run run[kMostRows];
  int32_t tokens[kBlock];
  bool over = true;  // the leader's call has ended: workers stop

  // Adds a run: `count` tokens from position `start` on, of which the last `drawing` positions draw.
  void add(Slot& slot, const int32_t* of, int count, int64_t start, int drawing);
};

// The calls of a session. The thread of one of them leads: it is worker 0 and plans the passes. When its own call has
// ended, the thread of another call leads.
class Schedule {
 public:
  // slots: calls that may run together. most_slowdown: Options::most_slowdown. clock: returns the time in ns; tests
  // simulate it. Throws std::runtime_error for a number of slots that a pass has no rows for.
  Schedule(int slots, double most_slowdown, int64_t (*clock)() = now_ns);

  Slot& slot(int number);  // throws std::runtime_error for a number that is not below slots()
  int slots() const { return (int)slots_.size(); }

  int64_t begin(int slot);  // announces a call; returns its number
  void settle(int slot);    // ends an announced call that does not run, because it was refused
  // Sets drafts of a pass at most, the prices [kMostRows] of passes, and whether passes correct them.
  void speculate(int most, const float* prices, bool corrected);
  Speculation speculation_of(const Request& request);  // its texts, with the drafts and prices of `speculate`

  // Runs a call to its end. lead(slot) runs passes until this slot has stopped, or throws. Throws std::runtime_error if
  // the call fails, or if the slot already runs another one.
  template <class Lead>
  End run(int number, const Call& call, const Lead& lead) {
    Slot& slot = enter(number, call);
    while (become_leader(slot)) {
      std::string reason;
      try {
        lead(slot);
      } catch (const std::exception& error) {
        reason = error.what();
      }
      leave_lead(reason);
    }
    return leave(slot);
  }
  // Runs f, which needs all workers, while no call runs passes.
  template <class F>
  void alone(const F& f) {
    wait_for_lead();
    f();
    leave_lead("");
  }

  // Called by the leader when the rows of the last pass are drawn: writes the next pass.
  void plan(const Slot& leader, const Pass& last, Pass& next);
  // Called by the leader when no worker uses the last pass any longer: copies common positions from call to call, and
  // ends the calls that have stopped.
  void publish();
  bool waits() const { return arrived_.load(std::memory_order_relaxed) > 0; }  // whether a call waits to be admitted
  // The cost of a pass that has just ended to each of its calls, in passes without drafts.
  float cost_of(const Pass& pass);
  const Prices& prices() const { return prices_; }  // as the last call left them

 private:
  Slot& enter(int number, const Call& call);
  void follow(std::unique_lock<std::mutex>& lock, Slot& slot);
  void copy(Slot& slot);
  bool become_leader(const Slot& slot);  // waits for the lead; false if the slot's call has ended instead
  void leave_lead(const std::string& reason);
  End leave(Slot& slot);
  void wait_for_lead();
  void admit();
  double price(int rows) const;
  double spent(const Pass& pass, double time);
  int prompt_rows(int beside);
  bool allowed(int rows) const;
  std::vector<Slot*> prompts_in_order(int drawing);

  std::vector<std::unique_ptr<Slot>> slots_;
  const double most_slowdown_;
  int64_t (*const clock_)();
  std::mutex lock_;
  std::condition_variable changed_;
  // Guarded by lock_; the atomics mirror sizes for the leader.
  bool led_ = false;               // some thread leads
  std::deque<Slot*> waiting_;      // calls to be admitted, in the order of their arrival
  std::atomic<int> arrived_{0};    // calls in waiting_
  std::vector<Slot*> following_;   // calls that wait for the keys and values of other calls
  std::atomic<int> followers_{0};  // calls in following_
  int64_t calls_ = 0;              // calls announced so far
  // Used by the leader alone, except usual_, which lock_ guards.
  std::vector<Slot*> running_;  // admitted calls, in the order of their arrival
  std::vector<Slot*> stopped_;  // calls that have stopped but are not published yet
  Speculation usual_;           // drafts and prices of `speculate`
  Prices prices_;
  double long_ = 1;              // time of passes of more than kMostRows rows over what their list extrapolates to
  double credit_ = 0;            // by how much passes with prompts have stayed below most_slowdown_
  double most_credit_ = 0;       // limit of credit_: what the best pass with positions of a prompt needs
  int64_t ended_ns_ = 0;         // when the last pass ended
  bool shortest_first_ = false;  // whether the last pass with several prompts began with the shortest rest
  int64_t unshared_ = 0;         // passes since the last one that calls shared
};

}  // namespace laneformer
