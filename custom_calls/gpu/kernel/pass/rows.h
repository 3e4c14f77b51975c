// The rows of a pass: tokens of one sequence, at positions that follow each other. All of them use each line of the
// weights while it is in registers, and a row has the bits that it has alone: its sums are of their own, in the same
// order. Whatever a lane keeps for a pass, it keeps once for each row: boards kLaneWords apart, and arrays in shared
// memory.
//
// Code is compiled for one row and, in a kernel for several, also for kPassRows of them; a pass that has fewer reads
// the last one again in place of the others, and leaves their results.
#pragma once

#include "edges.h"

namespace laneformer {
namespace gpu {

constexpr int kThreads = kWarps * kWarpSize;

template <int most>
struct Run {
  int position;  // of the first row
  int rows;      // at most `most`

  LF_DEVICE int count() const { return rows; }
};
template <>
struct Run<1> {
  int position;

  LF_DEVICE constexpr int count() const { return 1; }
};

// A board of each row. first: the first row's.
template <int most>
LF_DEVICE Boards<most> boards_of(const u64* first, const Run<most>& run) {
  if constexpr (most == 1) {
    return first;
  } else {
    return {first, kLaneWords, run.count() - 1};
  }
}

// Calls body(m, r) for r < count of each row m of the pass, divided among the threads. each: count, or more.
template <int each, int most, class Body>
LF_DEVICE void each_of_rows(const Run<most>& run, int count, Body body) {
  if constexpr (most == 1) {
    for (int r = opaque(thread()); r < count; r += kThreads) body(0, r);
  } else {
    for (int at = opaque(thread()); at < run.count() * each; at += kThreads)
      if (at % each < count) body(at / each, at % each);
  }
}

}  // namespace gpu
}  // namespace laneformer
