#include "decoder.h"

#include <algorithm>
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

void Decoder::begin() {
  armed_ = true;
  state_.cancel.store(0);
  state_.count.raise(0);
  done_.store(0);
}

void Decoder::settle() {
  const std::unique_lock<std::mutex> alone(running_, std::try_to_lock);
  if (!alone.owns_lock()) return;  // another call runs
  armed_ = false;
  done_.store(1, std::memory_order_release);
}

int32_t Decoder::wait(int32_t have, int timeout_ms) {
  const int64_t until = now_ns() + timeout_ms * 1'000'000LL;
  while (drawn() <= have && !finished() && now_ns() < until) {
    state_.count.wait((uint32_t)have + 1, done_, std::max<int64_t>(0, until - now_ns()), 0);
  }
  return drawn();
}

End Decoder::run(const Call& call) {
  const std::unique_lock<std::mutex> alone(running_, std::try_to_lock);
  if (!alone.owns_lock()) throw std::runtime_error("this model is already generating: wait for that call to end");
  if (!armed_) begin();
  armed_ = false;
  state_.answer.tokens.resize(call.limit);
  state_.answer.logprobs.resize(call.limit);
  state_.answer.times_ns.resize(call.limit);
  state_.answer.top_tokens.resize((int64_t)call.limit * call.top);
  state_.answer.top_logprobs.resize(state_.answer.top_tokens.size());
  state_.stopped.store(0);
  state_.reason.clear();
  for (auto& worker : workers_) worker->reset();
  state_.call = &call;
  on_all([&](int w) { workers_[w]->generate(); });
  state_.call = nullptr;
  done_.store(1, std::memory_order_release);
  wake_all(state_.count.value);
  if (state_.stopped.load()) throw std::runtime_error(state_.reason);
  return state_.end;
}

double Decoder::read_pass() {
  const std::lock_guard<std::mutex> alone(running_);
  const int64_t began = now_ns();
  on_all([&](int w) { state_.packets[w].sum = workers_[w]->read(); });
  return 1e-9 * (double)(now_ns() - began);
}

void Decoder::trace(int64_t spans) {
  for (auto& worker : workers_) worker->trace(spans);
}

const std::vector<Span>& Decoder::spans(int worker) const { return workers_.at(worker)->spans(); }

}  // namespace laneformer
