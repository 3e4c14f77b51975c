// Who joins whom, with passes that only take time: a call that waits is let in again after prices were too high.
#include "schedule.h"

#include <chrono>
#include <functional>
#include <thread>

#include "check.h"

using namespace laneformer;

namespace {

constexpr int kAlone = 300, kShort = 20;  // tokens

// A worker without a model: every pass draws token 0 for each of its calls. seconds: what it takes.
void lead(Schedule& schedule, const Slot& leader, const std::function<double(const Pass&)>& seconds) {
  Pass pass, next;
  schedule.plan(leader, {}, pass);
  while (!pass.over) {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds(pass)));
    if (pass.rows) schedule.cost_of(pass);
    for (int r = 0; r < pass.runs; r++) {
      Slot& slot = *pass.run[r].slot;
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

void a_price_that_was_too_high_is_not_kept() {
  Schedule schedule(2, 1.5);
  float prices[kMostRows];
  for (int rows = 0; rows < kMostRows; rows++) prices[rows] = 1 + 0.2f * (float)rows;
  schedule.speculate(0, prices, true);
  std::atomic<bool> disturbed{true};
  const auto seconds = [&](const Pass& pass) { return pass.runs > 1 && disturbed ? 4e-3 : 1e-3; };
  const auto answer = [&](int number, int limit) {
    Call call;
    call.prompt = {1};
    call.limit = limit;
    call.speculation = schedule.take_speculation(number);
    CHECK(schedule.run(number, call, [&](const Slot& slot) { lead(schedule, slot, seconds); }) == End::length,
          "call %d", number);
  };
  std::thread longer(answer, 0, kAlone);
  while (schedule.slot(0).drawn_tokens() < 10) std::this_thread::yield();
  answer(1, kShort);  // shares passes, which take four times as long as others
  CHECK(schedule.slot(1).shared > kShort / 2, "shared %d passes", (int)schedule.slot(1).shared);
  disturbed = false;
  const int before = schedule.slot(0).drawn_tokens();
  answer(1, kShort);
  const int after = schedule.slot(0).drawn_tokens();
  CHECK(schedule.slot(1).shared > kShort / 2, "shared %d passes", (int)schedule.slot(1).shared);
  CHECK(after - before >= kConfirmed, "let in after %d tokens of the other call", after - before - kShort);
  longer.join();
}

}  // namespace

int main() {
  a_price_that_was_too_high_is_not_kept();
  return 0;
}
