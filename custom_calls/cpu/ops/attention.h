// Attention to cached vectors in units, for all ops that attend: how workers share out the chunks of a lane's keys, and
// how the results of the chunks are merged where the next product reads them.
//
// Invariant: the size of a chunk depends on the session alone, and parts are merged in the order of the chunks. So a
// position's result does not depend on the pass or on the number of workers.
#pragma once

#include <array>
#include <cmath>
#include <memory>
#include <vector>

#include "../state.h"
#include "op.h"

namespace laneformer {

constexpr int kChunks = 18;  // chunks of a lane's keys at most; each is attended to by itself, then they are merged
constexpr int64_t kNoWindow = INT64_MAX / 2;

using Chunks = std::array<int, kMostRows>;  // by run of a pass: chunks of a lane's keys

struct Keys {  // positions first <= t < last of a lane's cache
  int lane;
  int64_t first, last;
};

struct Unit {  // a run's queries for some heads of a lane, over one chunk of keys
  const Run* run;
  int chunk;
  Keys keys;
  int first_head, last_head;
};

// This worker's units, without their keys. If workers share lanes and chunks are too few to share out, the heads are
// split as well, into at most as many groups as there are workers, of at least `least` heads. Otherwise they are not,
// since each group reads all keys.
std::vector<Unit> share_units(const Worker&, const Chunks&, int heads, int least);

// The chunks of the keys that a pass attends to. window: how many of the newest keys a position attends to.
Chunks chunks_of_keys(const Worker&, int64_t window);
// This worker's units of these chunks, with their keys.
std::vector<Unit> cut_keys(const Worker&, const Chunks&, int64_t window, int heads, int least);

// Where the kernels write the result of each chunk: for each head the sum of exponentials times values [channels], the
// largest score and the sum of exponentials.
struct Parts {
  Parts(Arena& shared, int lanes, int64_t heads_of, int64_t channels_of)
      : heads(heads_of),
        channels(channels_of),
        data(shared.floats((int64_t)lanes * kChunks * kBlock * heads * (channels + 2))) {}

  float* of(int lane, int chunk, int p, int64_t head) const {
    return data + ((((int64_t)lane * kChunks + chunk) * kBlock + p) * heads + head) * (channels + 2);
  }
  // Merges the chunks and writes the wanted heads' results to `to` [positions][columns]. sinks: [heads], or null; a
  // sink counts as a first part with a score and no value.
  void merge(const Worker&, const Chunks&, const Heads& wanted, const float* sinks, float* to) const;

  int64_t heads, channels;  // of a lane, of a head
  float* data;              // [lanes][kChunks][kBlock][heads][channels + 2]
};

// Makes an op of this class, whose results the module's later products read.
template <class Kind, class Fields>
std::unique_ptr<Op> make_attention(const Fields& op, Setup& setup) {
  auto made = std::make_unique<Kind>(op, setup);
  setup.attention = made.get();
  return made;
}

// Rounds x [n] to the weights' dtype if the session rounds what products read. space: [n].
void round_as_read(const Worker&, int64_t n, float* x, float* space);
// The same, then x times `scale`.
void scale_queries(const Worker&, float scale, int64_t n, float* x, float* space);

}  // namespace laneformer
