// One worker thread of a session: its lanes, its weights in the order in which it reads them, and the steps from token
// to token. A Decoder owns the workers. Start reading at `step` in worker.cc.
//
// All workers run the same ops in the same order. Each computes its share: units of a product, chunks of attention, a
// part of the vocabulary. A worker that reads what others have written first waits until they have reached the same
// point (`barrier`). Invariant: one worker computes each sum, in an order that depends neither on the number of workers
// nor on the other positions of the pass. So a position's results have the same bits for any number of threads, and
// whether it is computed alone or with others.
#pragma once

#include <vector>

#include "exchange.h"
#include "ops/rotation.h"
#include "ops/streams.h"
#include "packing/weights.h"
#include "products/multiplier.h"
#include "sample.h"
#include "state.h"

namespace laneformer {

class Worker : public Lanes {
 public:
  Worker(DecodeState& state, int index);

  void generate();  // runs the planned passes until the leading call has ended; before that, reset `points`

  // Waits for all workers; `barrier_if_shared` only if some of them share a lane.
  void barrier() { points.wait_for(points.arrive()); }
  void barrier_if_shared() {
    if (state.lanes_shared) barrier();
  }

  // The memory of Op::scratch, from its front.
  Arena arena() const { return Arena(arena_); }
  Arena shared_arena() const { return Arena(state.scratch); }

  // What an own lane's module reads at a block position: [hidden_size].
  float* stream(int lane, int position) {
    return stream_.data() + ((int64_t)(lane - first_lane) * kBlock + position) * plan.hidden_size;
  }
  float* output(int module, int lane, int position) const {
    const auto& outputs = state.of(plan::Value::output);
    return outputs.floats() + (((int64_t)module * plan.lanes + lane) * kBlock + position) * outputs.padded;
  }
  // Address of a lane's value at block position 0. stride: floats from one position to the next.
  float* target(plan::Value value, int module, int lane, int64_t* stride) const;

  DecodeState& state;
  const plan::Plan& plan;
  const Kernels& kernels;
  Barrier points;
  Trace trace;
  Rotations rotations;
  ResidualStreams streams;  // empty unless there are several
  PackedWeights weights;
  Multiplier products;
  LaneExchange exchange;
  Sampler sampler;
  const Pass* pass = nullptr;
  int positions = 0;  // of the pass

 private:
  void step();
  void run_module(int number);

  std::vector<float> stream_;  // [own lanes][kBlock][hidden_size]
  Region arena_;               // what ops take from `own` in Op::scratch
};

}  // namespace laneformer
