// A worker's passes from token to token. Decoder::lead runs `generate` on all workers; `step` takes the positions of
// one pass through all modules, and `run_module` runs a module's ops one after the other. worker.h has the invariant.
#include "worker.h"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace laneformer {

namespace {

// Sets this thread to flush subnormals to zero, as XLA does in the threads that it starts.
class FlushToZero {
#if defined(__x86_64__)
 public:
  FlushToZero() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushToZero() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#else
 public:
  FlushToZero() {}
#endif
};

}  // namespace

Worker::Worker(DecodeState& state, int index)
    : Lanes(state.plan.lanes, index, state.threads),
      state(state),
      plan(state.plan),
      kernels(*state.kernels),
      points(state.waiting, index),
      rotations(plan),
      streams(plan.streams(), plan.hidden_size, first_lane, last_lane - first_lane),
      weights(state, *this),
      products(*this),
      exchange(*this),
      sampler(*this),
      stream_((last_lane - first_lane) * kBlock * plan.hidden_size) {
  int64_t scratch = 0;
  const auto measure = [&](const Op& op) {
    Arena own, shared;
    op.scratch(own, shared);
    scratch = std::max(scratch, own.bytes());
  };
  for (const auto& module : state.modules)
    for (const auto& op : module) measure(*op);
  if (state.head_gather) measure(*state.head_gather);
  arena_ = Region(scratch);
}

void Worker::generate() {
  const FlushToZero flush;
  try {
    for (int turn = 0; !state.passes[turn].over; turn ^= 1) {
      pass = &state.passes[turn];
      if (pass->positions) step();
      if (pass->rows) sampler.sample();
      if (index == 0) state.schedule.plan(*state.leader, *pass, state.passes[turn ^ 1]);
      barrier();
      if (index == 0) state.schedule.publish();
    }
  } catch (const Stopped&) {
  }
}

void Worker::step() {
  positions = pass->positions;
  const int64_t began = trace.clock();
  for (int p = 0; p < positions; p++) {
    float* const embedded = stream(first_lane, p);
    state.embed(pass->tokens[p], embedded);
    for (int64_t i = 0; i < plan.hidden_size; i++) embedded[i] *= plan.embedding_multiplier;
    for (int lane = first_lane + 1; lane < last_lane; lane++)
      std::memcpy(stream(lane, p), stream(first_lane, p), plan.hidden_size * sizeof(float));
    for (int lane = first_lane; lane < last_lane; lane++) streams.embed(lane, p, stream(lane, p));
  }
  for (const Run* run = pass->run; run < pass->run + pass->runs; run++)
    for (int i = 0; i < run->count; i++) rotations.set_position(run->first + i, run->start + i);
  trace.mark(kEmbed, 0, began);
  exchange.begin_pass();
  const int modules = plan.num_modules();
  for (int t = 0; t < modules; t++) {
    exchange.begin_module(t);
    run_module(t);
    exchange.end_module(t);
    exchange.apply(t);
  }
  exchange.apply(modules);
  if (pass->rows) sampler.compute_logits();
}

// Workers that share lanes meet between two ops, as an op reads what all have written.
void Worker::run_module(int number) {
  bool first = true;
  for (const auto& op : state.modules[number]) {
    if (!first) barrier_if_shared();
    first = false;
    const int64_t began = trace.clock();
    op->run(*this, number);
    trace.mark(op->trace, number / 2, began);
  }
}

float* Worker::target(plan::Value value, int module, int lane, int64_t* stride) const {
  const auto& held = state.of(value);
  *stride = held.padded;
  return value == plan::Value::output ? output(module, lane, 0) : held.floats() + lane * kBlock * *stride;
}

}  // namespace laneformer
