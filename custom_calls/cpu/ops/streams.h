// Several residual streams of a worker: what op GatherStreams reads, and how a module's output joins them where the
// schedule adds it. laneformer/blocks/streams.py has the equations.
//
// Invariant: all lanes have the same streams, and each worker keeps those of its lanes and computes the same numbers
// for them. So workers share out only the product that makes MIXTURE, and meet only after it.
#pragma once

#include <cstdint>
#include <vector>

#include "../kernels/kernels.h"

namespace laneformer {

class ResidualStreams {
 public:
  // count: of a lane; 0 if the model has one stream, which is Worker::stream. lanes: the worker's, from first_lane on.
  ResidualStreams(int count, int64_t hidden_size, int first_lane, int lanes);

  int count() const { return count_; }
  void embed(int lane, int p, const float* row);  // each stream begins as the token's row of the embedding table
  float* of(int lane, int p) { return streams_.data() + place(lane, p) * count_ * hidden_size_; }  // [count][hidden]
  // Factors with which the output joins the streams: on the output [count], between the streams [count][count].
  float* joins(int lane, int p) { return joins_.data() + place(lane, p) * count_ * (count_ + 1); }
  // Replaces each stream by its share of the output plus its shares of all streams.
  void join(const Kernels&, int lane, int p, const float* output);

 private:
  int64_t place(int lane, int p) const;

  const int count_;
  const int64_t hidden_size_;
  const int first_lane_;
  std::vector<float> streams_, joins_;  // [lanes][kBlock] of these
  std::vector<float> joined_;           // [count][hidden_size]
};

}  // namespace laneformer
