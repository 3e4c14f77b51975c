// The schedule of calls that run together, with passes that only take time: which calls share passes, which rows
// prompts get, and which calls copy from others.
#include "schedule.h"

#include <chrono>
#include <functional>
#include <thread>

#include "check.h"

using namespace laneformer;

namespace {

constexpr int kAlone = 300, kShort = 20;  // tokens of an answer

// The clock of the schedules. Each pass advances it, so the load of the machine does not change measured times.
std::atomic<int64_t> simulated_ns{0};
int64_t simulated_clock() { return simulated_ns; }

// A worker without a model: the key of a position is its token, and every pass draws token 0 for each of its calls.
// seconds: the time that a pass takes on the simulated clock.
void lead(Schedule& schedule, const Slot& leader, const std::function<double(const Pass&)>& seconds) {
  Pass pass, next;
  schedule.plan(leader, {}, pass);
  while (!pass.over) {
    simulated_ns += (int64_t)(1e9 * seconds(pass));
    std::this_thread::sleep_for(std::chrono::milliseconds(1));  // other threads can join meanwhile
    if (pass.rows) schedule.cost_of(pass);
    for (int r = 0; r < pass.runs; r++) {
      Slot& slot = *pass.run[r].slot;
      for (int i = 0; i < pass.run[r].count && !slot.call->caches.empty(); i++)
        static_cast<int32_t*>(slot.call->caches[0])[pass.run[r].start + i] = pass.tokens[pass.run[r].first + i];
      if (pass.run[r].rows == 0) continue;
      slot.answer.tokens[slot.drawn++] = 0;
      slot.count.raise((uint32_t)slot.drawn);
      if (slot.drawn == slot.call->limit) slot.stopped = true;
    }
    schedule.plan(leader, pass, next);
    schedule.publish();
    pass = next;
  }
}

// Runs a call with a prompt of equal tokens to its end.
void run(Schedule& schedule, int number, int prompt, int limit, const std::function<double(const Pass&)>& seconds) {
  Call call;
  call.prompt.assign(prompt, 1);
  call.limit = limit;
  call.speculation = schedule.speculation_of(call);
  CHECK(schedule.run(number, call, [&](const Slot& slot) { lead(schedule, slot, seconds); }) == End::length, "call %d",
        number);
}

void a_price_that_was_too_high_is_not_kept() {
  Schedule schedule(2, 1.5, simulated_clock);
  float prices[kMostRows];
  for (int rows = 0; rows < kMostRows; rows++) prices[rows] = 1 + 0.2f * (float)rows;
  schedule.speculate(0, prices, true);
  std::atomic<bool> disturbed{true};
  const auto seconds = [&](const Pass& pass) { return pass.runs > 1 && disturbed ? 4e-3 : 1e-3; };
  const auto answer = [&](int number, int limit) { run(schedule, number, 1, limit, seconds); };
  std::thread longer(answer, 0, kAlone);
  while (schedule.slot(0).drawn_tokens() < 10) std::this_thread::yield();
  answer(1, kShort);  // shares passes, which take four times as long as single passes
  CHECK(schedule.slot(1).shared > kShort / 2, "shared %d passes", (int)schedule.slot(1).shared);
  disturbed = false;
  const int before = schedule.slot(0).drawn_tokens();
  answer(1, kShort);
  const int after = schedule.slot(0).drawn_tokens();
  CHECK(schedule.slot(1).shared > kShort / 2, "shared %d passes", (int)schedule.slot(1).shared);
  CHECK(after - before >= kConfirmed, "joined after %d tokens of the other call", after - before - kShort);
  longer.join();
}

// A call has the same prompt as a running call. later: 0 to copy from that call, otherwise from a call number that does
// not exist. cancelled: whether the running call is cancelled after its first pass. expected: positions copied.
void a_prompt_is_copied_from_a_call_that_runs(int later, bool cancelled, int expected) {
  constexpr int kPrompt = 2 * kBlock + 10, kDrawn = 3;
  Schedule schedule(2, 1.5, simulated_clock);
  std::vector<int32_t> keys[2] = {std::vector<int32_t>(kPrompt + kDrawn), std::vector<int32_t>(kPrompt + kDrawn)};
  std::atomic<int> passes{0}, computed{0};
  const auto seconds = [&](const Pass& pass) {
    for (int ms = 0; passes == 0 && !schedule.waits() && pass.runs == 1 && ms < 200; ms++)  // await the second call
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (passes++ == 0 && cancelled) schedule.slot(0).cancel.store(1);
    for (int r = 0; r < pass.runs; r++)
      if (pass.run[r].slot == &schedule.slot(1) && schedule.slot(1).drawn == 0) computed += pass.run[r].count;
    return 1e-3;
  };
  const int64_t first = schedule.begin(0);
  schedule.begin(1);
  const auto answer = [&](int number, End end) {
    Call call;
    for (int i = 0; i < kPrompt; i++) call.prompt.push_back(100 + i);
    call.limit = kDrawn;
    if (number == 1) call.source = Source{0, first + later, kPrompt};
    call.caches = {keys[number].data()};
    call.widths = {sizeof(int32_t)};
    CHECK(schedule.run(number, call, [&](const Slot& slot) { lead(schedule, slot, seconds); }) == end, "call %d",
          number);
  };
  std::thread one(answer, 0, cancelled ? End::cancelled : End::length);
  answer(1, End::length);
  one.join();
  CHECK(schedule.slot(1).copied == expected && computed == kPrompt - expected, "%d copied, %d computed, not %d",
        (int)schedule.slot(1).copied, (int)computed, expected);
  for (int i = 0; i < kPrompt; i++) CHECK(keys[1][i] == 100 + i, "key %d is %d", i, keys[1][i]);
}

// A prompt is beside a call that draws. A pass of six rows is the most efficient but takes too long. Passes of two rows
// save time for passes of six, so that passes take as long as allowed on average.
void a_prompt_takes_its_share_of_time_in_the_best_passes() {
  constexpr int kPrompt = 400;
  Schedule schedule(2, 1.5, simulated_clock);
  float prices[kMostRows];
  for (int rows = 1; rows <= kMostRows; rows++)
    prices[rows - 1] = rows <= 3 ? 1.0f : rows <= 5 ? 1.49f : rows == 6 ? 1.6f : 0.4f * (float)rows;
  schedule.speculate(0, prices, false);
  int passes = 0, largest = 0, before = 0;
  double time = 0;
  const auto seconds = [&](const Pass& pass) {
    const bool waits = pass.run[0].slot->drawn == 5 && before++ == 0;  // to await the second call
    for (int ms = 0; waits && !schedule.waits() && ms < 2000; ms++)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (pass.runs == 2 && schedule.slot(1).drawn == 0) {
      passes++, time += prices[pass.positions - 1];
      largest = std::max(largest, pass.positions);
    }
    return 0.0;
  };
  const auto answer = [&](int number, int prompt, int limit) { run(schedule, number, prompt, limit, seconds); };
  std::thread one(answer, 0, 1, 1000);
  while (schedule.slot(0).drawn_tokens() == 0) std::this_thread::yield();
  answer(1, kPrompt, 2);
  one.join();
  CHECK(largest == 6, "%d positions at most", largest);
  CHECK(time / passes < 1.52, "passes take %.3f on average", time / passes);
  CHECK(passes < kPrompt / 4.1, "%d passes, as many as with four positions each", passes);
}

// Passes of two calls are disturbed until a third call joins. By these prices, each pass has room for one position of
// its prompt. The third call's own passes show that there is more room.
void a_prompt_finds_out_that_prices_were_too_high() {
  constexpr int kPrompt = 400;
  Schedule schedule(3, 1.5, simulated_clock);
  float prices[kMostRows];
  for (int rows = 0; rows < kMostRows; rows++) prices[rows] = 1 + 0.05f * (float)rows;
  schedule.speculate(0, prices, true);
  std::atomic<int> passes{0};
  std::atomic<bool> came{false};
  const auto seconds = [&](const Pass& pass) {
    if (pass.run[0].slot->drawn == 0) return 0.0;
    if (pass.runs == 3) came = true, passes += pass.run[2].slot->drawn == 0;
    return pass.runs == 2 && !came ? 1.4e-3 : 1e-3;
  };
  const auto answer = [&](int number, int prompt, int limit) { run(schedule, number, prompt, limit, seconds); };
  std::thread one(answer, 0, 1, 600);
  while (schedule.slot(0).drawn_tokens() < 20) std::this_thread::yield();
  std::thread two(answer, 1, 1, 550);
  while (schedule.slot(1).drawn_tokens() < 20) std::this_thread::yield();
  answer(2, kPrompt, 2);
  one.join(), two.join();
  CHECK(passes < kPrompt / 4, "%d passes", (int)passes);
}

// In a list that is flat at its end, passes of a whole block look cheap but are not. Calls that draw keep their share
// of the time nevertheless.
void a_prompt_learns_what_long_passes_take() {
  constexpr int kPrompt = 400;
  Schedule schedule(2, 1.5, simulated_clock);
  float prices[kMostRows];
  const auto price = [](int rows) { return 1 + 0.1 * (rows - 1); };
  for (int rows = 1; rows <= kMostRows; rows++) prices[rows - 1] = (float)price(std::min(rows, 12));
  schedule.speculate(0, prices, true);
  int passes = 0;
  double time = 0;
  const auto seconds = [&](const Pass& pass) {
    const double found = price(pass.positions);
    if (pass.runs == 2 && pass.run[1].slot->drawn == 0) passes++, time += found;
    return found * 1e-3;
  };
  const auto answer = [&](int number, int prompt, int limit) { run(schedule, number, prompt, limit, seconds); };
  std::thread one(answer, 0, 1, 500);
  while (schedule.slot(0).drawn_tokens() < 20) std::this_thread::yield();
  answer(1, kPrompt, 2);
  one.join();
  CHECK(passes < kPrompt / 3, "%d passes", passes);
  CHECK(time / passes < 1.7, "passes take %.3f on average", time / passes);
}

// One prompt has many blocks. Beside it, other calls begin and end.
void a_short_prompt_does_not_wait_for_a_long_one(int prompt, int most) {
  constexpr int kBlocks = 60;
  Schedule schedule(2, 1.5, simulated_clock);
  float prices[kMostRows];
  for (int rows = 0; rows < kMostRows; rows++) prices[rows] = 1 + (float)rows;  // calls that draw share no passes
  schedule.speculate(0, prices, false);
  std::atomic<int> passes{0}, of_long{0};
  std::atomic<bool> more{true};
  const auto seconds = [&](const Pass& pass) {
    for (int ms = 0; passes > 0 && more && !schedule.waits() && schedule.slot(1).finished() && ms < 2000; ms++)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    for (int r = 0; r < pass.runs; r++)
      if (pass.run[r].slot == &schedule.slot(0)) of_long += pass.run[r].count;
    passes++;
    return 1e-3;
  };
  std::thread one([&] { run(schedule, 0, kBlocks * kBlock, 1, seconds); });
  while (passes == 0) std::this_thread::yield();
  for (int i = 0; i < 8; i++) {
    const int before = passes;
    run(schedule, 1, prompt, 1, seconds);
    CHECK(passes - before <= most, "%d passes for %d positions", passes - before, prompt);
  }
  more = false;
  CHECK(of_long < kBlocks * kBlock, "the long prompt was read after %d passes", (int)passes);
  one.join();
  CHECK(passes <= kBlocks + 16 + 8 * prompt / kBlock, "%d passes", (int)passes);
}

// Two long prompts are read together. One call does not draw beside the other, because a pass with two
// rows costs too much.
void calls_with_long_prompts_keep_the_limit() {
  Schedule schedule(2, 1.5, simulated_clock);
  float prices[kMostRows];
  for (int rows = 0; rows < kMostRows; rows++) prices[rows] = 1 + (float)rows;
  schedule.speculate(0, prices, false);
  std::atomic<int> passes{0}, most{0}, together{0}, of_first{0};
  std::atomic<bool> began{false};
  const auto seconds = [&](const Pass& pass) {
    began = true;
    for (int ms = 0; passes == 0 && !schedule.waits() && ms < 2000; ms++)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    passes++;
    for (int r = 0; r < pass.runs; r++)
      if (pass.run[r].slot == &schedule.slot(0)) of_first += pass.run[r].count;
    together += pass.run[0].slot == &schedule.slot(1) && of_first < 8 * kBlock;
    most = std::max(most.load(), pass.rows);
    return 1e-3;
  };
  std::thread one([&] { run(schedule, 0, 8 * kBlock, 20, seconds); });
  while (!began) std::this_thread::yield();
  run(schedule, 1, 4 * kBlock, 200, seconds);
  one.join();
  CHECK(most == 1, "%d rows in a pass", (int)most);
  CHECK(together > 0, "no pass of %d read the second prompt before the first one", (int)passes);
}

// Several calls with short prompts run beside a long one all the time. It gets its share of the passes.
void a_long_prompt_does_not_wait_for_many() {
  constexpr int kBlocks = 40;
  Schedule schedule(3, 1.5, simulated_clock);
  std::atomic<int> passes{0};
  std::atomic<bool> over{false};
  const auto seconds = [&](const Pass&) {
    for (int ms = 0; passes > 0 && !over && schedule.slot(1).finished() && schedule.slot(2).finished() && ms < 2000;
         ms++)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    passes++;
    return 1e-3;
  };
  const auto again = [&](int number) {
    for (int i = 0; i < 2 * kBlocks && !over; i++) run(schedule, number, 2 * kBlock, 1, seconds);
    over = true;
  };
  std::thread two(again, 1), three(again, 2);
  while (passes == 0) std::this_thread::yield();
  const int before = passes;
  run(schedule, 0, kBlocks * kBlock, 1, seconds);
  const int took = passes - before;
  over = true;
  two.join(), three.join();
  CHECK(took <= 3 * kBlocks, "%d passes for %d blocks", took, kBlocks);
}

}  // namespace

int main() {
  a_short_prompt_does_not_wait_for_a_long_one(1, 4);
  a_short_prompt_does_not_wait_for_a_long_one(kBlock, 4);
  a_long_prompt_does_not_wait_for_many();
  calls_with_long_prompts_keep_the_limit();
  a_prompt_learns_what_long_passes_take();
  a_prompt_finds_out_that_prices_were_too_high();
  a_prompt_takes_its_share_of_time_in_the_best_passes();
  a_price_that_was_too_high_is_not_kept();
  a_prompt_is_copied_from_a_call_that_runs(0, false, 2 * kBlock + 9);
  a_prompt_is_copied_from_a_call_that_runs(0, true, kBlock);
  a_prompt_is_copied_from_a_call_that_runs(7, false, 0);  // a call that does not exist
  return 0;
}
