// The rows of a pass: tokens of one sequence at consecutive positions. All rows use each line of the weights while it
// is in registers. A row has the bits that it has alone, because it has its own sums, added in the same order. What a
// lane keeps for a pass it keeps once for each row: boards, kLaneWords apart, and arrays in shared memory.
//
// Code is compiled for one row and, in a kernel for several, also for kPassRows rows. A pass with fewer rows reads the
// last row again in place of the missing ones, and drops their results.
//
// In a kernel for several requests (kRequests), each in a slot, a pass has rows of several sequences. Rows of a slot
// are neighbours at consecutive positions, and use nothing of other slots.
#pragma once

#include "edges.h"

namespace laneformer {
namespace gpu {

constexpr int kThreads = kWarps * kWarpSize;

// A row of a pass with several sequences.
struct Row {
  int slot;
  int first, start;  // the slot's first row in the pass, and its position
};

// The rows of a pass, at most `most`. position_of, slot_of: of row m. first_of: the first row of m's slot; start_of:
// that row's position; place_of: the number of m among the rows of its slot.
template <int most, bool of_slots = (kRequests > 1)>
struct Run {
  int position;  // of the first row
  int rows;      // at most `most`

  LF_DEVICE int count() const { return rows; }
  LF_DEVICE int position_of(int m) const { return position + m; }
  LF_DEVICE int slot_of(int) const { return 0; }
  LF_DEVICE int first_of(int) const { return 0; }
  LF_DEVICE int start_of(int) const { return position; }
  LF_DEVICE int place_of(int m) const { return m; }
};
template <>
struct Run<1, false> {
  int position;

  LF_DEVICE static Run of(int position, int) { return {position}; }
  LF_DEVICE constexpr int count() const { return 1; }
  LF_DEVICE int position_of(int) const { return position; }
  LF_DEVICE int slot_of(int) const { return 0; }
  LF_DEVICE int first_of(int) const { return 0; }
  LF_DEVICE int start_of(int) const { return position; }
  LF_DEVICE int place_of(int) const { return 0; }
};
template <int most>
struct Run<most, true> {
  const Row* row;  // in shared memory
  int rows;

  LF_DEVICE int count() const { return rows; }
  LF_DEVICE int position_of(int m) const { return row[m].start + place_of(m); }
  LF_DEVICE int slot_of(int m) const { return row[m].slot; }
  LF_DEVICE int first_of(int m) const { return row[m].first; }
  LF_DEVICE int start_of(int m) const { return row[m].start; }
  LF_DEVICE int place_of(int m) const { return m - row[m].first; }
};
template <>
struct Run<1, true> {
  int position, slot;

  LF_DEVICE static Run of(int position, int slot) { return {position, slot}; }
  LF_DEVICE constexpr int count() const { return 1; }
  LF_DEVICE int position_of(int) const { return position; }
  LF_DEVICE int slot_of(int) const { return slot; }
  LF_DEVICE int first_of(int) const { return 0; }
  LF_DEVICE int start_of(int) const { return position; }
  LF_DEVICE int place_of(int) const { return 0; }
};

LF_DEVICE const int* prompt_of(const Params& p, int slot) { return p.prompt + slot * p.room_of_prompt; }

// The number of a slot's part of an array that lanes keep, [lanes here][slots][...].
LF_DEVICE int kept_part(int lane_here, int slot) { return kRequests == 1 ? lane_here : lane_here * kRequests + slot; }

// The boards of all rows of a pass. first: the first row's.
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
