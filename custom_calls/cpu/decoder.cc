// The threads of a session and the start of a call: `run` waits until the call leads or has ended, and the leading
// thread runs passes on all workers until its own call has stopped. Called by api.cc; decoder.h has the invariant.
#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "worker.h"

namespace laneformer {

Decoder::Decoder(plan::Plan plan, const Options& options) : state_(std::move(plan), options) {
  find_places();
  const int threads = state_.threads;
  idle_ = std::make_unique<Counter[]>(threads);
  for (int w = 0; w < threads; w++) workers_.push_back(std::make_unique<Worker>(state_, w));
  for (int w = 1; w < threads; w++)
    threads_.emplace_back([this, w] {
      for (uint32_t job = 1;; job++) {
        std::atomic<int> never{0};
        while (!work_.wait(job, never, INT64_MAX)) {
        }
        if (closing_) return;
        job_(w);
        idle_[w].raise(job);
      }
    });
}

Decoder::~Decoder() {
  closing_ = true;
  work_.raise(++jobs_);
  for (std::thread& thread : threads_) thread.join();
}

// ------------------------------------------------------------------------------------------------------------ running

void Decoder::on_all(const std::function<void(int)>& job) {
  job_ = job;
  const uint32_t number = ++jobs_;
  work_.raise(number);
  job(0);
  std::atomic<int> never{0};
  for (int w = 1; w < threads(); w++)
    while (!idle_[w].wait(number, never, INT64_MAX)) {
    }
}

int32_t Decoder::wait(int32_t have, int timeout_ms, int number) {
  Slot& of = slot(number);
  const int64_t until = now_ns() + timeout_ms * 1'000'000LL;
  while (of.drawn_tokens() <= have && !of.finished() && now_ns() < until)
    of.count.wait((uint32_t)have + 1, of.done, std::max<int64_t>(0, until - now_ns()), 0);
  return of.drawn_tokens();
}

// Runs passes until the slot's call has stopped. Throws std::runtime_error if a worker has failed.
void Decoder::lead(const Slot& slot) {
  state_.stopped.store(0);
  state_.reason.clear();
  state_.leader = &slot;
  for (auto& worker : workers_) worker->points.reset();
  state_.schedule.plan(slot, {}, state_.passes[0]);
  on_all([&](int w) { workers_[w]->generate(); });
  if (state_.stopped.load()) throw std::runtime_error(state_.reason);
}

End Decoder::run(const Call& call, int number) {
  check_states(call);
  return state_.schedule.run(number, call, [&](const Slot& slot) { lead(slot); });
}

// Every base of a recurrent state must be less than two stretches of kEntries positions before the call's first
// position. At position 0 the state starts empty, whatever its base is.
void Decoder::check_states(const Call& call) const {
  if (call.start == 0) return;
  const auto is_before = [&](int32_t base) { return base <= call.start && call.start < base + 2 * plan::kEntries; };
  for (size_t i = 0; i < kept().size(); i++) {
    const plan::KeptArray& array = kept()[i];
    if (array.kind != plan::Kept::base) continue;
    for (int lane = 0; lane < state_.plan.lanes; lane++) {
      const auto* bases = (const int32_t*)call.caches[i * state_.plan.lanes + lane];
      if (!std::all_of(bases, bases + array.elements(), is_before))
        throw std::invalid_argument("the recurrent state of layer " + std::to_string(array.layer) +
                                    " is not the state before position " + std::to_string(call.start) +
                                    ": start where its text ends, or at position 0");
    }
  }
}

// Generates answers in separate caches. Their tokens are forced, so all drafts are accepted and each pass has the
// wanted number of rows. They start inside a text, so that the times include attention to earlier positions.
std::vector<double> Decoder::time_passes(const std::vector<int>& rows, int passes) {
  constexpr int kRounds = 2;  // each over all numbers of rows, as other processes may delay one
  constexpr int64_t kUsual = 1024;
  const plan::Plan& model = state_.plan;
  const int most = rows.empty() ? 0 : *std::max_element(rows.begin(), rows.end()), longest = 1 + passes * most;
  if (most > kMostRows || passes < 1 ||
      std::any_of(rows.begin(), rows.end(), [](int n) { return n < 1; }) || longest > model.context)
    throw std::runtime_error(std::to_string(passes) + " passes of up to " + std::to_string(most) +
                             " rows do not fit the context of " + std::to_string(model.context));
  Call call;
  call.prompt = {0};
  call.start = std::min<int64_t>(kUsual, (model.context - longest) / 2) / plan::kEntries * plan::kEntries;
  std::vector<uint8_t> seen(model.vocab_size);
  call.seen = seen.data();
  std::vector<Region> caches;
  for (const plan::KeptArray& array : kept())
    for (int lane = 0; lane < model.lanes; lane++) {
      caches.emplace_back(array.entries(call.start + longest) * array.bytes(bytes_of(state_.cache)));
      std::memset(caches.back().data, 0, caches.back().bytes);  // pages never written would all map one page of zeros
      call.caches.push_back(caches.back().data);
    }
  const auto begin_states = [&] {
    for (size_t i = 0; i < caches.size(); i++) {
      const plan::KeptArray& array = kept()[i / model.lanes];
      if (array.kind == plan::Kept::base) std::fill_n((int32_t*)caches[i].data, array.elements(), (int32_t)call.start);
    }
  };
  Speculation& speculation = call.speculation;
  for (int64_t i = 0; i < longest; i++)  // tokens far apart, which use different experts and embedding rows
    speculation.forced.push_back((int32_t)(i * 7919 % model.vocab_size));
  speculation.given = speculation.forced;
  std::vector<double> fastest(rows.size(), INFINITY);
  for (int round = 0; round < kRounds; round++)
    for (size_t i = 0; i < rows.size(); i++) {
      call.limit = 1 + passes * rows[i];
      speculation.most = rows[i] - 1;
      begin_states();
      run(call);
      const auto time = [&](int pass) { return slot().answer.times_ns[pass * rows[i]]; };
      for (int pass = 0; pass < passes; pass++)
        fastest[i] = std::min(fastest[i], 1e-9 * (double)(time(pass + 1) - time(pass)));
    }
  return fastest;
}

void Decoder::check_token(int64_t token, int32_t least) const {
  if (token < least || token >= state_.plan.vocab_size)
    throw std::invalid_argument("token " + std::to_string(token) + " is outside the vocabulary of " +
                                std::to_string(state_.plan.vocab_size));
}

void Decoder::check(const Request& request) const {
  for (const int32_t token : request.prompt) check_token(token, 0);
  for (const int32_t token : request.before) check_token(token, kEndOfText);
  for (const int32_t token : request.forced) check_token(token, 0);
  for (const int32_t token : request.given) check_token(token, -1);
  for (const auto& [token, bias] : request.sampling.logit_bias) check_token(token, 0);
  if (!request.source) return;
  if (recurrent())
    throw std::invalid_argument(
        "a call cannot copy a recurrent state from a running call: reuse the whole text of a call that has ended");
  if (request.source->slot < 0 || request.source->slot >= state_.schedule.slots())
    throw std::invalid_argument("the source's slot " + std::to_string(request.source->slot) + " is not among the " +
                                std::to_string(state_.schedule.slots()) + " of this session");
}

void Decoder::give_mask(int32_t number, const uint32_t* words, int64_t count, int slot) {
  Slot& of = this->slot(slot);
  if (count != (state_.plan.vocab_size + 31) / 32)
    throw std::runtime_error("the mask has " + std::to_string(count) + " words: give one bit for each of " +
                             std::to_string(state_.plan.vocab_size) + " tokens");
  if (number != of.drawn_tokens() || (uint32_t)number != of.masks.value.load())
    throw std::runtime_error("got the mask of token " + std::to_string(number) + " after " +
                             std::to_string(of.drawn_tokens()) + " tokens and " +
                             std::to_string(of.masks.value.load()) + " masks: give the next token's mask, once");
  of.mask.assign(words, words + count);
  of.masks.raise((uint32_t)number + 1);
}

double Decoder::read_pass() {
  double seconds;
  state_.schedule.alone([&] {
    const int64_t began = now_ns();
    on_all([&](int w) { state_.packets[w].rows[0].sum = workers_[w]->weights.read(); });
    seconds = 1e-9 * (double)(now_ns() - began);
  });
  return seconds;
}

void Decoder::trace(int64_t spans) {
  for (auto& worker : workers_) worker->trace.start(spans);
}

bool Decoder::recurrent() const {
  return std::any_of(kept().begin(), kept().end(), [](const plan::KeptArray& array) { return array.fixed; });
}

const std::vector<Span>& Decoder::spans(int worker) const { return workers_.at(worker)->trace.spans(); }

}  // namespace laneformer
