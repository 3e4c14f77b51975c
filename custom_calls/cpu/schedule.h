// Which rows each pass carries: those of the calls that run together. A row is one position of one call. Passes never
// change an answer (docs/decode_kernel.md), so the schedule decides the speed of each call alone.
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
#include "sync.h"

namespace laneformer {

struct Sampling {
  float temperature, top_p, min_p, repetition_penalty;
  int32_t top_k;
  uint32_t key[2];
};

struct Adjustment {            // of a call's logits: the second step of infer/sampling.py
  std::vector<float> bias;     // [vocab]; empty: no adjustment
  std::vector<int32_t> drawn;  // [vocab]: how often the answer has each token so far
  float presence = 0, frequency = 0;
  bool masked = false;  // whether the host names the tokens that each draw may choose
};

struct Call {
  std::vector<int32_t> prompt;
  int64_t start = 0;  // position of prompt[0]; earlier ones are in the cache
  int32_t limit = 0, top = 0;
  Sampling sampling{};
  std::vector<int32_t> stops;
  std::vector<void*> caches;         // [kept arrays][lanes] -> [t][entry], in the order of plan::kept_arrays
  std::vector<int64_t> widths;       // of each: bytes of an entry, where calls copy from others; else empty
  uint8_t* seen = nullptr;           // [vocab], updated
  float* logits = nullptr;           // [limit][vocab] or null: for tests
  Adjustment* adjustment = nullptr;  // updated; null: none
  bool masked = false;               // it draws a token once the host has given its mask
  Speculation speculation;

  bool filtered() const {
    return sampling.temperature > 0 && (sampling.top_k > 0 || sampling.top_p < 1 || sampling.min_p > 0);
  }
};

// The beginning of a call's text that another call, which runs, has as well: its keys and values are copied.
struct Source {
  int slot = -1;          // of the other call; -1: none
  int64_t call = 0;       // its number, which `begin` gave
  int64_t positions = 0;  // that both have
};

enum class End : int32_t { length = 0, stop = 1, cancelled = 2, failed = 3 };

constexpr int kConfirmed = 64;  // passes of one call, after which no price of a shared one is sure any longer

constexpr int kBlock = 48;  // positions that go through the model together: 6 and 24 divide it

struct Drafting {                         // what drafts were worth in a call
  int64_t passes[kMostRows] = {};         // after the prompt's, by their rows
  int64_t accepted[kMostRows - 1] = {};   // drafts by their place in a pass
  int64_t other = 0, other_accepted = 0;  // drafts from another text
};

struct Answer {  // a place for each token of a call
  std::vector<int32_t> tokens, top_tokens;
  std::vector<float> logprobs, top_logprobs;
  std::vector<int64_t> times_ns;
  std::vector<uint8_t> drafted, others;  // whether it was a right draft; other calls with rows in its pass
};

// A slot runs one call after the other. Its tokens are read while the call runs.
struct Slot {
  // Of the host.
  std::atomic<int> cancel{0}, done{1};
  Counter count;               // tokens drawn
  Counter masks;               // masks given: the last one is of the token to draw
  std::vector<uint32_t> mask;  // a bit for each token of the vocabulary; written while no draw reads it
  bool armed = false;          // for a call that is announced
  Speculation texts;           // of the next call, and the most drafts of its passes
  Adjustment adjustment;       // of the next call
  Source source;               // of the next call
  // Of the running call, written by worker 0 alone. The schedule's lock guards the next three.
  int64_t number = 0;  // of the call, and of its announcement
  bool running = false, ended = true;
  Slot* from = nullptr;  // the call whose keys and values it waits for
  int64_t common = 0;    // positions that it has in common with that
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
  bool deferred = false;   // it has drawn nothing in its last pass, as the mask was missing
  bool stopped = false;    // its last token is drawn; `end` says why
  End end = End::length;
  std::string reason;  // of End::failed

  bool finished() const { return done.load(std::memory_order_acquire); }
  int32_t drawn_tokens() const { return (int32_t)count.value.load(std::memory_order_acquire); }
  bool mask_given() const { return masks.reached((uint32_t)drawn + 1); }
  bool draws() const { return absorbed == (int64_t)call->prompt.size(); }
  int64_t filled() const { return call->start + absorbed + (drawn > 0 ? drawn - 1 : 0); }  // positions in its caches
};

// Consecutive positions of one call in a pass.
struct Run {
  Slot* slot;
  int first, count;  // block positions
  int64_t start;     // position of the first in the text
  int row, rows;     // rows of the pass that draw: its last positions, none inside a prompt

  int place_of(int i) const { return first + count - rows + i; }  // block position of row `row + i`
};

struct Pass {
  int runs = 0, positions = 0, rows = 0;
  Run run[kMostRows];
  int32_t tokens[kBlock];
  bool over = true;  // the leader's call has ended

  void add(Slot& slot, const int32_t* of, int count, int64_t start, int drawing);
};

// The calls of a session. One of their threads leads: it is worker 0, and plans the passes. When its own call has ended
// another one leads.
class Schedule {
 public:
  // slots: calls that may run together; most_slowdown: of a pass, over a pass of one row, through other calls.
  // clock: the time in ns, which tests simulate.
  Schedule(int slots, double most_slowdown, int64_t (*clock)() = now_ns);

  Slot& slot(int number);  // throws std::runtime_error for one that there is not
  int slots() const { return (int)slots_.size(); }

  int64_t begin(int slot);  // announces a call; returns its number
  void settle(int slot);    // after a call that was refused
  // What calls may draft, and the prices of passes.
  void speculate(int most, const float* prices, bool corrected);
  void give_texts(int slot, Speculation texts);
  Speculation take_speculation(int slot);
  void give_adjustment(int slot, Adjustment adjustment);
  Adjustment take_adjustment(int slot);
  // What the next call of a slot may copy, unless that call has ended by then.
  void give_source(int slot, const Source& source);

  // Runs a call to its end. lead: runs passes until the slot that it is given has stopped, or throws.
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
  // Runs something that needs all workers while no call does.
  template <class F>
  void alone(const F& f) {
    wait_for_lead();
    f();
    leave_lead("");
  }

  // Of the leader, between two passes.
  void plan(const Slot& leader, const Pass& last, Pass& next);
  // When no worker uses the last pass any longer: copies what calls have in common, and publishes those that have
  // stopped.
  void publish();
  bool waits() const { return arrived_.load(std::memory_order_relaxed) > 0; }  // whether a call has not been let in
  float cost_of(const Pass& pass);  // that has ended now, of each of its calls, in passes without drafts
  const Prices& prices() const { return prices_; }  // as the last call left them

 private:
  Slot& enter(int number, const Call& call);
  void follow(std::unique_lock<std::mutex>& lock, Slot& slot);
  void copy(Slot& slot);
  bool become_leader(const Slot& slot);  // false: its call has ended
  void leave_lead(const std::string& reason);
  End leave(Slot& slot);
  void wait_for_lead();
  void admit();
  double price(int rows) const;
  double spent(const Pass& pass, double time);
  int prompt_rows(int beside);

  std::vector<std::unique_ptr<Slot>> slots_;
  const double most_slowdown_;
  int64_t (*const clock_)();
  std::mutex lock_;
  std::condition_variable changed_;
  bool led_ = false;
  std::deque<Slot*> waiting_;      // in the order in which they came
  std::atomic<int> arrived_{0};    // calls in waiting_
  std::vector<Slot*> following_;   // those that wait for the keys and values of others; guarded by lock_
  std::atomic<int> followers_{0};  // calls in following_
  int64_t calls_ = 0;              // that were announced; guarded by lock_
  std::vector<Slot*> running_;     // of the leader, in the order in which they came
  std::vector<Slot*> stopped_;     // of the leader, not yet published
  Speculation usual_;              // guarded by lock_
  Prices prices_;                  // of the leader
  double long_ = 1;                // of the leader: what passes of more than kMostRows take, over what the list says
  double credit_ = 0;              // of the leader: by how much passes with prompts stayed below the most slowdown
  double most_credit_ = 0;         // of the leader: what the best pass with positions of a prompt needs
  int64_t ended_ns_ = 0;  // of the leader: when the last pass ended
  int64_t unshared_ = 0;  // of the leader: passes since one that calls shared
};

}  // namespace laneformer
