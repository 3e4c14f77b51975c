// A worker's part of the head and of the draw: logits of a pass's rows, and the next tokens.
#pragma once

#include <cstdint>
#include <vector>

#include "schedule.h"

namespace laneformer {

class Worker;

// Each worker takes the part of the vocabulary whose logits it computes. Workers put what they find into
// DecodeState::packets, and worker 0 accepts the tokens.
class Sampler {
 public:
  explicit Sampler(Worker&);

  void compute_logits();  // head.cc; after the last module, if the pass has rows
  void sample();          // sample.cc

 private:
  void await_masks();
  void apply_mask(const std::vector<uint32_t>& mask, float* z) const;
  void scale_logits();
  void adjust(const Adjustment& by, const SamplingOptions& s, float* z) const;
  float threshold(const SamplingOptions& s, int row, float best);
  void accept(const Run& run, const float* largest, float cost);
  static void count(Slot& slot, int rows, int drawn);
  void emit(Slot& slot, int row, int32_t token, float largest);
  void best_tokens(Slot& slot, const float* logits, float lse) const;

  Worker& w_;
  int64_t vocab_first_ = 0, vocab_last_ = 0;  // its part of the vocabulary: first <= token < last
  std::vector<float> finals_;                 // exchange by message: [rows][lanes][hidden_size]
  std::vector<float> exponentials_;           // [vocab_size], for the filters
};

// Calls f(run, i) for each row i of each run.
template <class F>
void each_row(const Pass& pass, const F& f) {
  for (int r = 0; r < pass.runs; r++)
    for (int i = 0; i < pass.run[r].rows; i++) f(pass.run[r], i);
}

}  // namespace laneformer
