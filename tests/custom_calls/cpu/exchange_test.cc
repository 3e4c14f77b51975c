// The lane exchange: its ring of slots explored over all interleavings of two and three lanes, its tags, and the
// counters of sync.h.
#include "exchange.h"

#include <algorithm>
#include <set>
#include <string>
#include <thread>

#include "check.h"
#include "sync.h"

#if defined(__linux__)
#include <sched.h>
#include <sys/resource.h>
#endif

using namespace laneformer;

namespace {

// One lane's part in a pass, in the order of its steps: an exchange is pushed to one other lane, or pulled from one.
struct Step {
  bool push;
  int exchange, lane;
};

// As a lane runs a schedule: after each module the sums that it completes are sent, then those that land are read.
std::vector<Step> steps_of(int lane, int lanes, const std::vector<Exchange>& exchanges) {
  std::vector<Step> steps;
  const int end = exchanges.back().issued;
  const auto all = [&](bool push, int exchange) {
    for (int other = 0; other < lanes; other++)
      if (other != lane) steps.push_back({push, exchange, other});
  };
  const int count = (int)exchanges.size(), head = count - 1;  // the head's comes when everything has landed
  for (int time = 0; time <= end; time++) {
    for (int i = 0; i < head; i++)
      if (exchanges[i].issued == time) all(true, i);
    for (int i = 0; i < head; i++)
      if (exchanges[i].last_read == time) all(false, i);
  }
  all(true, head);
  all(false, head);
  return steps;
}

// All states that the lanes can come to, one step at a time, with a ring of that many slots. Whether no slot is ever
// written before it was read; that they always come to the end is checked.
bool safe(int lanes, const std::vector<Exchange>& exchanges, int slots) {
  std::vector<std::vector<Step>> steps;
  std::vector<std::vector<size_t>> pushed, pulled;  // [lane][exchange lanes + other]: the step after which it is done
  for (int lane = 0; lane < lanes; lane++) {
    steps.push_back(steps_of(lane, lanes, exchanges));
    pushed.emplace_back(exchanges.size() * lanes);
    pulled.emplace_back(exchanges.size() * lanes);
    for (size_t i = 0; i < steps[lane].size(); i++) {
      const Step& step = steps[lane][i];
      (step.push ? pushed : pulled)[lane][step.exchange * lanes + step.lane] = i + 1;
    }
  }
  const auto code = [&](const std::vector<size_t>& at) {
    uint64_t word = 0;
    for (const size_t step : at) word = word << 16 | step;
    return word;
  };
  std::set<uint64_t> known;
  std::vector<std::vector<size_t>> open{std::vector<size_t>(lanes, 0)};
  while (!open.empty()) {
    const std::vector<size_t> at = open.back();
    open.pop_back();
    bool moved = false, ended = true;
    for (int lane = 0; lane < lanes; lane++) {
      if (at[lane] == steps[lane].size()) continue;
      ended = false;
      const Step& step = steps[lane][at[lane]];
      if (step.push) {
        const int before = step.exchange - slots;  // what stands in the slot
        if (before >= 0 && at[step.lane] < pulled[step.lane][before * lanes + lane]) return false;
      } else if (at[step.lane] < pushed[step.lane][step.exchange * lanes + lane]) {
        continue;  // it has not come yet
      }
      moved = true;
      std::vector<size_t> next = at;
      next[lane]++;
      if (known.insert(code(next)).second) open.push_back(next);
    }
    CHECK(moved || ended, "%d lanes wait for each other", lanes);
  }
  return true;
}

// What the layouts of laneformer/layout.py send: tp, dtp and laneformer send after every module, kraken after every
// layer.
std::vector<Exchange> delayed(int modules, int every, int delay) {
  std::vector<Exchange> exchanges;
  for (int m = every - 1; m < modules; m += every)
    if (m + delay <= modules) exchanges.push_back({m, m + delay});
  exchanges.push_back({modules, modules});
  return exchanges;
}

// The corrected start and the published one: early sums land at once, in the latter again with the delay.
std::vector<Exchange> laneformer_exchanges(int modules, int delta, bool twice) {
  std::vector<Exchange> exchanges;
  for (int m = 0; m < modules; m++) {
    if (m < delta)
      exchanges.push_back({m, twice && m + delta < modules ? m + delta : m});
    else if (m + delta < modules)
      exchanges.push_back({m, m + delta});
  }
  exchanges.push_back({modules, modules});
  return exchanges;
}

void rings() {
  std::vector<std::vector<Exchange>> schedules = {delayed(8, 1, 0), delayed(8, 2, 1), delayed(6, 1, 1), {{8, 8}}};
  for (int delta = 1; delta <= 5; delta++) schedules.push_back(delayed(8, 1, delta));
  for (const int delta : {2, 4})
    for (const bool twice : {false, true}) schedules.push_back(laneformer_exchanges(8, delta, twice));
  schedules.push_back({{1, 5}, {1, 1}, {3, 3}, {3, 7}, {8, 8}});  // two sums after one module, landing apart
  int tight = 0;
  for (const std::vector<Exchange>& exchanges : schedules) {
    const int slots = ring_slots(exchanges);
    for (const int lanes : {2, 3}) {
      for (int larger = slots; larger <= slots + 2; larger++)
        CHECK(safe(lanes, exchanges, larger), "%d lanes overwrite one of %d slots", lanes, larger);
      if (slots > 1 && !safe(lanes, exchanges, slots - 1)) tight++;
    }
  }
  CHECK(tight >= 2 * (int)schedules.size() - 4, "one slot fewer is too small for %d rings only",
        tight);  // all but kraken's and that of one sum
  CHECK(ring_slots(delayed(8, 1, 0)) == 2 && !safe(2, delayed(8, 1, 0), 1), "tp needs two slots");
}

void tags() {
  constexpr int slots = 4, floats = 5;
  Mailboxes mail(3, slots, floats);
  const auto never = [](int64_t) { return false; };
  float data[floats], got[floats];
  CHECK(!mail.pull(1, 0, 7, got, floats, never), "an empty slot has tag 7");
  uint32_t tag = UINT32_MAX - 9;  // through the largest tag and on from 0
  for (int i = 0; i < 20; i++, tag++) {
    for (int c = 0; c < floats; c++) data[c] = (float)(100 * i + c);
    CHECK(!mail.pull(1, 0, tag, got, floats, never), "tag %u came before it was sent", tag);
    mail.push(0, tag, data, floats);
    for (const int to : {1, 2}) {
      CHECK(mail.pull(to, 0, tag, got, floats, never) && std::memcmp(got, data, sizeof data) == 0, "tag %u is lost",
            tag);
      CHECK(!mail.pull(to, 0, tag - slots, got, floats, never), "tag %u still stands in the slot of %u", tag - slots,
            tag);
    }
    CHECK(tag == 0 || !mail.pull(0, 1, tag, got, floats, never), "tag %u came from a lane that sent nothing", tag);
  }
  mail.push(0, 100, data, 2);  // the first words alone
  int64_t asked = 0;
  CHECK(!mail.pull(1, 0, 100, got, floats, [&](int64_t spins) { return asked = spins, spins < 50; }) && asked == 50,
        "gave up after %ld", (long)asked);
}

void meetings() {
  constexpr int threads = 4, rounds = 1500;
  std::vector<Counter> counters(threads);
  std::vector<int64_t> written(threads);
  std::atomic<int> stopped{0}, wrong{0};
  const uint32_t first = UINT32_MAX - rounds / 2;  // it wraps around on the way
  for (Counter& counter : counters) counter.raise(first);
  const auto run = [&](int self) {
    for (int round = 1; round <= rounds; round++) {
      written[self] = round;
      for (int half = 0; half < 2; half++) {
        counters[self].raise(first + 2 * round + half);
        for (Counter& counter : counters)
          if (!counter.wait(first + 2 * round + half, stopped, 60'000'000'000, round % 3 ? 0 : 5'000)) wrong++;
        if (half == 0)
          for (const int64_t value : written) wrong += value != round;
      }
    }
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; i++) others.emplace_back(run, i);
  run(0);
  for (std::thread& thread : others) thread.join();
  CHECK(wrong == 0, "%d meetings went wrong", wrong.load());
}

void giving_up() {
  Counter counter;
  std::atomic<int> stopped{0};
  const int64_t began = now_ns();
  CHECK(!counter.wait(1, stopped, 30'000'000, 500), "a counter that no thread raises was reached");
  CHECK(now_ns() - began >= 30'000'000, "it gave up too early");
  counter.raise(5);
  CHECK(counter.wait(5, stopped, 0, 0) && counter.wait(1, stopped, 0, 0) && !counter.reached(6), "5 is not 5");
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    stopped.store(1);
  });
  CHECK(!counter.wait(6, stopped, 60'000'000'000), "it did not stop");
  other.join();
  stopped = 0;
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    counter.raise(6);
  });
  CHECK(counter.wait(6, stopped, 60'000'000'000, 0) && now_ns() - began < 30'000'000'000, "it was not woken");
  late.join();
}

// Sleepers wake when they are called, not when their tenth of a second is over.
void waking() {
  constexpr int rounds = 100;
  std::atomic<int> stopped{0};
  Counter asked, answered;
  std::thread other([&] {
    for (int round = 1; round <= rounds; round++) {
      asked.wait(round, stopped, 60'000'000'000, 0);
      answered.raise(round);
    }
  });
  const int64_t began = now_ns();
  for (int round = 1; round <= rounds; round++) {
    asked.raise(round);
    answered.wait(round, stopped, 60'000'000'000, 0);
  }
  const int64_t took = now_ns() - began;
  other.join();
  CHECK(took < rounds * 50'000'000LL, "%d calls took %ld ms", rounds, (long)(took / 1'000'000));
}

// A thread that waits beside another one on a core sleeps, however long it may spin: counted, not timed.
void giving_the_core_away() {
  std::atomic<int> stopped{0};
  Counter counter;
  CHECK(!counter.wait(1, stopped, 1'000'000, INT64_MAX, [] { return true; }),
        "a counter that no thread raises was reached");
  CHECK(!counter.needs(0, 1) && !counter.needs(-1, 1), "a thread that was never seen needs a core");
#if defined(__linux__)
  constexpr int rounds = 1000;
  cpu_set_t before, one;
  if (sched_getaffinity(0, sizeof before, &before) != 0) return;
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  if (sched_setaffinity(0, sizeof one, &one) != 0) return;  // threads inherit it
  counter.raise(1);
  CHECK(counter.needs(sched_getcpu(), 2) && !counter.needs(sched_getcpu(), 1), "it does not know its core");
  Counter ping, pong;
  std::atomic<int64_t> slept{0};
  const auto run = [&](Counter& mine, Counter& other) {
    for (int round = 1; round <= rounds; round++) {
      mine.raise(round);
      if (!other.wait(round, stopped, 60'000'000'000, 10'000'000'000)) stopped = 1;
    }
    rusage used{};
    getrusage(RUSAGE_THREAD, &used);
    slept += used.ru_nvcsw;
  };
  rusage used{};
  getrusage(RUSAGE_THREAD, &used);
  slept -= used.ru_nvcsw;
  std::thread second(run, std::ref(pong), std::ref(ping));
  run(ping, pong);
  second.join();
  sched_setaffinity(0, sizeof before, &before);
  CHECK(stopped == 0, "one of them was not woken");
  CHECK(slept >= rounds / 4, "%d rounds on one core, and the two threads slept %ld times", rounds, (long)slept);
#endif
}

}  // namespace

int main() {
  rings();
  tags();
  waking();
  meetings();
  giving_up();
  giving_the_core_away();
  return 0;
}
