// The lane exchange: all interleavings of two and three lanes with its ring of slots, its tags, and the counters of
// sync.h.
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

// A step of one lane in a pass: an exchange is pushed to another lane, or pulled from it.
struct Step {
  bool push;
  int exchange, lane;
};

// The steps of a lane that runs a schedule: after each module it sends the sums that the module completes, then reads
// the sums that land.
std::vector<Step> steps_of(int lane, int lanes, const std::vector<Exchange>& exchanges) {
  std::vector<Step> steps;
  const int end = exchanges.back().issued;
  const auto all = [&](bool push, int exchange) {
    for (int other = 0; other < lanes; other++)
      if (other != lane) steps.push_back({push, exchange, other});
  };
  const int count = (int)exchanges.size(), head = count - 1;  // the head's exchange is last
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

// Explores all states that the lanes can reach, one step at a time, with a ring of `slots` slots. Returns whether every
// slot is read before it is overwritten. Also checks that all lanes always reach the end.
bool safe(int lanes, const std::vector<Exchange>& exchanges, int slots) {
  std::vector<std::vector<Step>> steps;
  std::vector<std::vector<size_t>> pushed, pulled;  // [lane][exchange * lanes + other]: number of steps when it is done
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
        const int before = step.exchange - slots;  // the exchange whose data is in the slot
        if (before >= 0 && at[step.lane] < pulled[step.lane][before * lanes + lane]) return false;
      } else if (at[step.lane] < pushed[step.lane][step.exchange * lanes + lane]) {
        continue;  // the data has not arrived yet
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

// Exchanges of layouts of laneformer/layout.py: tp, dtp and laneformer send after every module, kraken after every
// layer.
std::vector<Exchange> delayed(int modules, int every, int delay) {
  std::vector<Exchange> exchanges;
  for (int m = every - 1; m < modules; m += every)
    if (m + delay <= modules) exchanges.push_back({m, m + delay});
  exchanges.push_back({modules, modules});
  return exchanges;
}

// Exchanges of laneformer: early sums land at once, and with `twice`, as published, again after the delay.
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
  schedules.push_back({{1, 5}, {1, 1}, {3, 3}, {3, 7}, {8, 8}});  // two sums of one module land at different times
  int tight = 0;
  for (const std::vector<Exchange>& exchanges : schedules) {
    const int slots = ring_slots(exchanges);
    for (const int lanes : {2, 3}) {
      for (int larger = slots; larger <= slots + 2; larger++)
        CHECK(safe(lanes, exchanges, larger), "%d lanes overwrite one of %d slots", lanes, larger);
      if (slots > 1 && !safe(lanes, exchanges, slots - 1)) tight++;
    }
  }
  CHECK(tight >= 2 * (int)schedules.size() - 4, "only %d rings need all their slots",
        tight);  // all rings except kraken's and that of one sum
  CHECK(ring_slots(delayed(8, 1, 0)) == 2 && !safe(2, delayed(8, 1, 0), 1), "tp needs two slots");
}

void tags() {
  constexpr int slots = 4, floats = 5;
  Mailboxes mail(3, slots, floats);
  const auto never = [](int64_t) { return false; };
  float data[floats], got[floats];
  CHECK(!mail.pull(1, 0, 7, got, floats, never), "an empty slot has tag 7");
  uint32_t tag = UINT32_MAX - 9;  // tags wrap around to 0
  for (int i = 0; i < 20; i++, tag++) {
    for (int c = 0; c < floats; c++) data[c] = (float)(100 * i + c);
    CHECK(!mail.pull(1, 0, tag, got, floats, never), "tag %u arrived before it was sent", tag);
    mail.push(0, tag, data, floats);
    for (const int to : {1, 2}) {
      CHECK(mail.pull(to, 0, tag, got, floats, never) && std::memcmp(got, data, sizeof data) == 0, "tag %u is lost",
            tag);
      CHECK(!mail.pull(to, 0, tag - slots, got, floats, never), "tag %u is still in the slot of %u", tag - slots, tag);
    }
    CHECK(tag == 0 || !mail.pull(0, 1, tag, got, floats, never), "tag %u arrived from a lane that sent nothing", tag);
  }
  mail.push(0, 100, data, 2);  // only the first words
  int64_t asked = 0;
  CHECK(!mail.pull(1, 0, 100, got, floats, [&](int64_t spins) { return asked = spins, spins < 50; }) && asked == 50,
        "gave up after %ld", (long)asked);
}

void meetings() {
  constexpr int threads = 4, rounds = 1500;
  std::vector<Counter> counters(threads);
  std::vector<int64_t> written(threads);
  std::atomic<int> stopped{0}, wrong{0};
  const uint32_t first = UINT32_MAX - rounds / 2;  // the counters wrap around halfway
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
  CHECK(wrong == 0, "%d barriers failed", wrong.load());
}

void giving_up() {
  Counter counter;
  std::atomic<int> stopped{0};
  const int64_t began = now_ns();
  CHECK(!counter.wait(1, stopped, 30'000'000, 500), "a counter that no thread raises was reached");
  CHECK(now_ns() - began >= 30'000'000, "timed out too early");
  counter.raise(5);
  CHECK(counter.wait(5, stopped, 0, 0) && counter.wait(1, stopped, 0, 0) && !counter.reached(6),
        "a counter at 5 compares wrongly");
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    stopped.store(1);
  });
  CHECK(!counter.wait(6, stopped, 60'000'000'000), "a stopped wait succeeded");
  other.join();
  stopped = 0;
  std::thread late([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    counter.raise(6);
  });
  CHECK(counter.wait(6, stopped, 60'000'000'000, 0) && now_ns() - began < 30'000'000'000,
        "a sleeping thread was not woken");
  late.join();
}

// A sleeping thread wakes when its counter is raised, before its sleep of a tenth of a second is over.
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
  CHECK(took < rounds * 50'000'000LL, "%d rounds took %ld ms", rounds, (long)(took / 1'000'000));
}

// A thread that waits for another thread on the same core sleeps at once, even if it may spin for long. The test counts
// sleeps instead of measuring times.
void giving_the_core_away() {
  std::atomic<int> stopped{0};
  Counter counter;
  CHECK(!counter.wait(1, stopped, 1'000'000, INT64_MAX, [] { return true; }),
        "a counter that no thread raises was reached");
  CHECK(!counter.needs(0, 1) && !counter.needs(-1, 1), "a counter that was never raised needs a core");
#if defined(__linux__)
  constexpr int rounds = 1000;
  cpu_set_t before, one;
  if (sched_getaffinity(0, sizeof before, &before) != 0) return;
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  if (sched_setaffinity(0, sizeof one, &one) != 0) return;  // threads inherit it
  counter.raise(1);
  CHECK(counter.needs(sched_getcpu(), 2) && !counter.needs(sched_getcpu(), 1),
        "the counter does not know its thread's core");
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
  CHECK(stopped == 0, "a thread was not woken");
  CHECK(slept >= rounds / 4, "in %d rounds on one core, the two threads slept %ld times", rounds, (long)slept);
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
