// Announcing, admitting and ending calls, and planning passes; schedule.h says who calls what. A call enters, waits for
// the lead or for its end, and leaves. The leader admits calls and plans between two passes, so no pass changes while
// workers run it.
#include "schedule.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace laneformer {

constexpr int64_t kIdleNs = 2'000'000;                // wait for a mask before the next look for new calls
constexpr double kMostWrong = 4;                      // long_ is at most this and at least its inverse
constexpr std::chrono::milliseconds kAnnounced{100};  // longest wait for an announced call to begin

void Pass::add(Slot& slot, const int32_t* of, int count, int64_t start, int drawing) {
  run[runs++] = {&slot, positions, count, start, rows, drawing};
  std::copy_n(of, count, tokens + positions);
  positions += count;
  rows += drawing;
}

Schedule::Schedule(int slots, double most_slowdown, int64_t (*clock)()) : most_slowdown_(most_slowdown), clock_(clock) {
  if (slots < 1 || slots > kMostRows)
    throw std::runtime_error("slots must be 1 to " + std::to_string(kMostRows) + ", got " + std::to_string(slots));
  for (int i = 0; i < slots; i++) {
    slots_.push_back(std::make_unique<Slot>());
  }
}

Slot& Schedule::slot(int number) {
  if (number < 0 || number >= slots())
    throw std::runtime_error("slot " + std::to_string(number) + " is not among the " + std::to_string(slots()) +
                             " of this session");
  return *slots_[number];
}

int64_t Schedule::begin(int number) {
  Slot& of = slot(number);
  const std::lock_guard<std::mutex> lock(lock_);
  of.armed = true;
  of.number = ++calls_;
  of.cancel.store(0);
  of.count.raise(0);
  of.masks.raise(0);
  of.done.store(0);
  return of.number;
}

void Schedule::settle(int number) {
  if (number < 0 || number >= slots()) return;
  Slot& of = *slots_[number];
  const std::lock_guard<std::mutex> lock(lock_);
  if (of.running) return;  // another call of this slot runs
  of.armed = false;
  of.done.store(1, std::memory_order_release);
  changed_.notify_all();
}

void Schedule::speculate(int most, const float* prices, bool corrected) {
  if (most < 0 || most >= kMostRows)
    throw std::runtime_error("drafts of a pass must be 0 to " + std::to_string(kMostRows - 1) + ", got " +
                             std::to_string(most));
  const std::lock_guard<std::mutex> lock(lock_);
  usual_.most = most;
  usual_.corrected = corrected;
  std::copy_n(prices, kMostRows, usual_.prices.begin());
}

Speculation Schedule::speculation_of(const Request& request) {
  Speculation found;
  found.before = request.before;
  found.forced = request.forced;
  found.given = request.given;
  const std::lock_guard<std::mutex> lock(lock_);
  found.most = request.masked ? 0 : (int)std::clamp<int64_t>(request.most_drafts.value_or(kMostRows), 0, usual_.most);
  found.prices = usual_.prices;
  found.corrected = usual_.corrected;
  return found;
}

// ------------------------------------------------------------------------------------------------------------ leading

Slot& Schedule::enter(int number, const Call& call) {
  Slot& of = slot(number);
  {
    const std::lock_guard<std::mutex> lock(lock_);
    if (of.running) throw std::runtime_error("this model is already generating: wait for that call to end");
    of.running = true;
  }
  if (!of.armed) begin(number);
  of.call = &call;
  of.answer.tokens.resize(call.limit);
  of.answer.logprobs.resize(call.limit);
  of.answer.times_ns.resize(call.limit);
  of.answer.drafted.resize(call.limit);
  of.answer.others.resize(call.limit);
  of.answer.top_tokens.resize((int64_t)call.limit * call.top);
  of.answer.top_logprobs.resize(of.answer.top_tokens.size());
  of.drafting = {};
  of.shared = 0;
  of.drawn = 0;
  of.absorbed = of.known = of.copied = 0;
  of.stopped = of.deferred = false;
  of.end = End::length;
  std::unique_lock<std::mutex> lock(lock_);
  follow(lock, of);
  of.ended = false;
  of.armed = false;
  waiting_.push_back(&of);
  arrived_.store((int)waiting_.size());
  changed_.notify_all();
  return of;
}

// Makes a call wait for the positions that it has in common with a call that arrived before it. If that call is only
// announced, waits up to kAnnounced for it to begin.
void Schedule::follow(std::unique_lock<std::mutex>& lock, Slot& slot) {
  if (!slot.call->source || slot.call->widths.empty()) return;
  const Source& source = *slot.call->source;
  Slot& other = this->slot((int)source.slot);
  if (&other == &slot) return;
  const auto of_call = [&] { return other.number == source.call; };
  const auto runs = [&] { return of_call() && other.running && !other.ended; };
  changed_.wait_for(lock, kAnnounced, [&] { return !of_call() || !other.armed || runs(); });
  const int64_t last = slot.call->start + (int64_t)slot.call->prompt.size() - 1;  // not copied: its logits are needed
  slot.common = std::min(source.positions, last);
  if (!runs() || slot.common <= slot.call->start) return;
  slot.from = &other;
  following_.push_back(&slot);
  followers_.store((int)following_.size());
}

bool Schedule::become_leader(const Slot& slot) {
  std::unique_lock<std::mutex> lock(lock_);
  changed_.wait(lock, [&] { return slot.ended || !led_; });
  if (slot.ended) return false;
  return led_ = true;
}

void Schedule::wait_for_lead() {
  std::unique_lock<std::mutex> lock(lock_);
  changed_.wait(lock, [&] { return !led_; });
  led_ = true;
}

void Schedule::leave_lead(const std::string& reason) {
  if (!reason.empty()) {
    for (Slot* slot : running_) {
      if (!slot->stopped) slot->stopped = true, slot->end = End::failed, slot->reason = reason;
      stopped_.push_back(slot);
    }
    running_.clear();
  }
  publish();
  const std::lock_guard<std::mutex> lock(lock_);
  led_ = false;
  changed_.notify_all();
}

// Copies to a slot's call the common positions that the other call has filled. Filled positions are final: passes of
// the other call only read them.
void Schedule::copy(Slot& slot) {
  Slot& other = *slot.from;
  const Call &to = *slot.call, &of = *other.call;
  const int64_t first = to.start + slot.absorbed, last = std::min(slot.common, other.filled());
  if (first < last && other.end != End::failed) {
    for (size_t i = 0; i < to.widths.size(); i++) {
      const int64_t begin = first * to.widths[i], bytes = (last - first) * to.widths[i];
      std::memcpy((char*)to.caches[i] + begin, (const char*)of.caches[i] + begin, bytes);
    }
    slot.absorbed += last - first;
    slot.copied += last - first;
  }
  if (last == slot.common || other.draws() || other.deferred || other.stopped) slot.from = nullptr;
}

void Schedule::publish() {
  if (stopped_.empty() && followers_.load(std::memory_order_relaxed) == 0) return;
  const std::lock_guard<std::mutex> lock(lock_);
  for (Slot* slot : following_)
    if (slot->stopped || slot->end == End::failed) {
      slot->from = nullptr;
    } else {
      copy(*slot);
    }
  following_.erase(std::remove_if(following_.begin(), following_.end(), [](Slot* slot) { return !slot->from; }),
                   following_.end());
  followers_.store((int)following_.size());
  for (Slot* slot : stopped_) {
    slot->ended = true;
    slot->done.store(1, std::memory_order_release);
    wake_all(slot->count.value);
  }
  stopped_.clear();
  changed_.notify_all();
}

End Schedule::leave(Slot& slot) {
  const std::lock_guard<std::mutex> lock(lock_);
  slot.running = false;
  slot.call = nullptr;
  if (slot.end == End::failed) throw std::runtime_error(slot.reason);
  return slot.end;
}

// ----------------------------------------------------------------------------------------------------------- planning

// The time of a pass of this many rows over that of a pass of one row. Beyond kMostRows rows it grows linearly, as the
// list of prices does at its end, times a factor from the times of such passes.
double Schedule::price(int rows) const {
  if (rows <= kMostRows) return prices_.of(rows);
  const double end = prices_.listed(kMostRows), of_row = std::max(0.0, (end - prices_.listed(kMostRows - 4)) / 4);
  return std::max((double)prices_.of(kMostRows), long_ * (end + (rows - kMostRows) * of_row));
}

float Schedule::cost_of(const Pass& pass) {
  const int64_t before = ended_ns_;
  ended_ns_ = clock_();
  unshared_ = pass.runs > 1 ? 0 : unshared_ + 1;
  const double time = (double)(ended_ns_ - before);
  bool given = false;  // drafts were given or masks awaited, so the time says nothing about usual passes
  int prompts = 0;
  for (int i = 0; i < pass.runs; i++) {
    prompts += pass.run[i].slot->drawn == 0;
    given |= !pass.run[i].slot->call->speculation.given.empty() || pass.run[i].slot->call->masked;
  }
  if (prompts > 0) {
    if (prompts < pass.runs) credit_ = std::min(most_credit_, credit_ + most_slowdown_ - spent(pass, given ? 0 : time));
    return 1;
  }
  return (given ? prices_.of(pass.rows) : prices_.took(pass.rows, time)) / prices_.of(pass.runs);
}

// The cost of a pass that had positions of a prompt beside calls that draw: from its time if `time` is set and prices
// are known, else as expected. The time also corrects the price of this many positions. The cost is at least half and
// at most twice what was expected, so that a process that delayed this pass does not hold up the prompt for long.
double Schedule::spent(const Pass& pass, double time) {
  const double expected = price(pass.positions), cost = time > 0 ? prices_.cost(time) : 0;
  if (cost <= 0) return expected;
  const double found = std::clamp(cost, expected / 2, expected * 2);
  if (pass.positions <= kMostRows) {
    prices_.took(pass.positions, time);
  } else {
    long_ = std::clamp(long_ * std::sqrt(found / expected), 1 / kMostWrong, kMostWrong);
  }
  return found;
}

// The cost of a pass of this many rows, to decide whether a call joins. Other processes may have raised a measured
// price, and only shared passes can correct it. So after kConfirmed passes without sharing, the list's price is enough.
bool Schedule::allowed(int rows) const {
  const double found = price(rows);
  return (unshared_ < kConfirmed ? found : std::min(found, (double)prices_.listed(rows))) <= most_slowdown_;
}

// Admits waiting calls in the order of their arrival while a pass with a row of each call costs at most most_slowdown_.
// Calls that still have to read more than a block do not count, so that a short call does not wait for a long prompt;
// `prompts_in_order` holds them up before they draw. Also ends waiting calls that are cancelled.
void Schedule::admit() {
  const std::lock_guard<std::mutex> lock(lock_);
  int rows = (int)std::count_if(running_.begin(), running_.end(), [](Slot* slot) { return slot->draws_soon(); });
  for (auto at = waiting_.begin(); at != waiting_.end();) {
    Slot* const slot = *at;
    if (running_.empty()) prices_.begin(slot->call->speculation);
    if (rows == 0 || allowed(rows + 1)) {
      running_.push_back(slot);
      slot->joined = slot->draws_soon();
      rows += slot->joined;
      if (slot->call->speculation.most > 0) slot->drafts.begin(slot->call->speculation, prices_);
    } else if (slot->cancel.load(std::memory_order_relaxed)) {
      slot->stopped = true, slot->end = End::cancelled;
      stopped_.push_back(slot);
    } else {
      at++;
      continue;
    }
    at = waiting_.erase(at);
  }
  arrived_.store((int)waiting_.size());
}

// How many positions of a prompt join a pass with `beside` rows of other calls; at least one. Passes may cost
// most_slowdown_ on average. If a larger pass gets more positions done per time, passes with one position save credit
// for it (`cost_of` adds what they leave).
int Schedule::prompt_rows(int beside) {
  if (beside == 0) return kBlock;
  const double least = price(beside + 1), room = most_slowdown_ - least;
  int best = 1;
  double most = 1;  // positions per pass, on average, with the best number
  for (int count = 2; count <= kBlock - beside && room > 0; count++) {
    const double more = price(beside + count) - least;
    const double found = 1 + (count - 1) * (more > room ? room / more : 1);
    if (found > most) best = count, most = found;
  }
  const double over = price(beside + best) - most_slowdown_;
  most_credit_ = std::max(room, over);
  return over <= credit_ ? best : 1;
}

// Calls whose prompt is read, in the order in which their positions join the next pass. The prompt that arrived first
// and the one with the shortest rest take turns: a short prompt does not wait for a long one, nor a long one for many.
// A call that was admitted with a long prompt reads its last block when a pass with its row costs at most
// most_slowdown_. drawing: number of calls that draw in the pass.
std::vector<Slot*> Schedule::prompts_in_order(int drawing) {
  std::vector<Slot*> found;
  for (Slot* slot : running_) {
    if (slot->deferred || slot->draws() || slot->from) continue;
    if (!slot->joined && slot->draws_soon()) slot->joined = drawing == 0 || allowed(drawing + 1);
    drawing += slot->joined;
    if (slot->joined || !slot->draws_soon()) found.push_back(slot);
  }
  if (found.size() < 2) return found;
  shortest_first_ = !shortest_first_;
  if (shortest_first_)
    std::stable_sort(found.begin(), found.end(), [](Slot* a, Slot* b) { return a->unread() < b->unread(); });
  return found;
}

// Plans the next pass. A call whose mask is missing gets no positions, and neither does one that waits for the keys and
// values of another call. Priority: the next token of each call, positions of prompts, drafts.
void Schedule::plan(const Slot& leader, const Pass& last, Pass& next) {
  for (int i = 0; i < last.runs; i++) {
    Slot& slot = *last.run[i].slot;
    const int64_t filled = last.run[i].start + last.run[i].count - slot.call->start;
    slot.absorbed = std::min(filled, (int64_t)slot.call->prompt.size());
    slot.shared += last.runs > 1;
    if (slot.deferred && slot.drawn == 0) slot.absorbed--;  // its last position goes through the model again
  }
  for (Slot* slot : running_) {
    if ((slot->drawn == 0 || slot->deferred) && !slot->stopped && slot->cancel.load(std::memory_order_relaxed))
      slot->stopped = true, slot->end = End::cancelled;
    slot->deferred = slot->deferred && !slot->mask_given();
  }
  const auto first = std::stable_partition(running_.begin(), running_.end(), [](Slot* slot) { return !slot->stopped; });
  stopped_.insert(stopped_.end(), first, running_.end());
  running_.erase(first, running_.end());
  if (arrived_.load(std::memory_order_relaxed)) admit();

  next.runs = next.positions = next.rows = 0;
  next.over = leader.stopped;
  if (next.over) return;
  if (std::all_of(running_.begin(), running_.end(), [](Slot* slot) { return slot->deferred; })) {
    Slot& slot = *running_.front();
    slot.masks.wait((uint32_t)slot.drawn + 1, slot.cancel, kIdleNs, 0);
    return;  // an empty pass
  }
  const bool prompts =
      std::any_of(running_.begin(), running_.end(), [](Slot* slot) { return !slot->deferred && !slot->draws(); });
  const int together = (int)running_.size();
  int drawing = 0, rows = 0;  // calls that draw; their rows so far
  for (Slot* slot : running_) drawing += !slot->deferred && slot->draws();
  rows = drawing;
  for (Slot* slot : running_) {
    if (slot->deferred || !slot->draws()) continue;
    const Call& call = *slot->call;
    int32_t tokens[kMostRows] = {slot->answer.tokens[slot->drawn - 1]};
    int drafts = 0;
    if (call.speculation.most > 0 && !prompts) {
      int most = (int)std::min<int64_t>(call.limit - slot->drawn - 1, (kMostRows - together) / together);
      while (together > 1 && most > 0 && price(rows + most) > most_slowdown_) most--;
      drafts = slot->drafts.propose(slot->drawn, most, tokens + 1, rows - 1);
    }
    rows += drafts;
    next.add(*slot, tokens, 1 + drafts, call.start + (int64_t)call.prompt.size() + slot->drawn - 1, 1 + drafts);
  }
  for (Slot* slot : prompts_in_order(drawing)) {
    const Call& call = *slot->call;
    const int64_t rest = slot->unread();
    const int count = (int)std::min<int64_t>(rest, drawing ? prompt_rows(drawing) : kBlock - next.positions);
    if (count == 0) break;
    const int32_t* const tokens = call.prompt.data() + slot->absorbed;
    for (; slot->known < slot->absorbed + count && call.speculation.most > 0; slot->known++)
      slot->drafts.add(call.prompt[slot->known]);
    next.add(*slot, tokens, count, call.start + slot->absorbed, count == rest);
    if (drawing) break;
  }
}

}  // namespace laneformer
