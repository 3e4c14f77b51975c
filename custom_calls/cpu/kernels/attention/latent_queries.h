// A group of queries of attention to latents: where they are, which entries they attend to, their softmax so far. Used
// by latents.h, which computes on vectors, and by tile_latents.h, which computes on tile registers.
//
// Invariant: a query is one element of each vector and nothing is added across a vector, so its softmax does not depend
// on the queries beside it.
#pragma once

#include <cmath>

#include "cached.h"

namespace LF_ISA {
namespace {

using laneformer::AttendLatents;

// V vectors of queries.
template <int V>
struct LatentQueries {
  static constexpr int kAcross = V * kWidth;

  vf largest[V], total[V];    // largest score and sum of exponentials so far
  int64_t row[kAcross];       // rows of q and out; unused queries repeat the last one
  int64_t position[kAcross];  // newest entry that each query attends to; ascending
  int used;

  // Starts with queries from number `first` on, of `queries` in all, counted by position and head.
  LF_INLINED void begin(const AttendLatents& a, int64_t first, int64_t queries) {
    used = queries - first < kAcross ? (int)(queries - first) : kAcross;
    for (int c = 0; c < kAcross; c++) {
      const int64_t query = first + (c < used ? c : used - 1);
      row[c] = query / a.heads * a.of + query % a.heads;
      position[c] = (a.start + query / a.heads + 1) / a.every - 1;
    }
    for (int v = 0; v < V; v++) largest[v] = splat(-INFINITY), total[v] = vf{};
  }

  // How many of the entries low <= t < end the last query attends to, without regard to the window; <= 0: none.
  int count(int64_t low, int64_t end) const {
    const int64_t newest = position[kAcross - 1];
    return (int)((end < newest + 1 ? end : newest + 1) - low);
  }
  // Whether all queries attend to all of the `count` entries from `low` on.
  bool see_all(int64_t low, int count, int64_t window) const {
    return low + count <= position[0] + 1 && low >= position[kAcross - 1] - window + 1;
  }

  // Writes masks[j]: which queries attend to entry low + j, for j < count.
  LF_INLINED void seen(int64_t low, int count, int64_t window, vi (*masks)[V]) const {
    for (int v = 0; v < V; v++) {
      vi first, last;
      for (int c = 0; c < kWidth; c++) {
        const int64_t own = position[v * kWidth + c] - low, least = own - window + 1;
        first[c] = least < 0 ? 0 : least > count ? count : (int)least;
        last[c] = own < 0 ? -1 : own > count ? count : (int)own;
      }
      for (int j = 0; j < count; j++) masks[j][v] = (last >= j) & (first <= j);
    }
  }

  // Turns scores [entry][query] into exponentials and adds them to `total`. Entries to which a query does not attend
  // get 0; masks: null if all queries attend to all entries. shrink: receives the factors on what was summed before.
  LF_INLINED void weigh(float (*scores)[kAcross], const vi (*masks)[V], int count, vf (&shrink)[V]) {
    for (int v = 0; v < V; v++) {
      vf most = largest[v], sum = {};
      for (int j = 0; j < count; j++) {
        float* const at = scores[j] + v * kWidth;
        if (masks) storef(at, select(masks[j][v], loadf(at), splat(-INFINITY)));
        most = max(most, loadf(at));
      }
      const vf from = max(most, splat(-3e38f));  // finite even before the first entry that a query attends to
      shrink[v] = exp(largest[v] - from);
      for (int j = 0; j < count; j++) {
        float* const at = scores[j] + v * kWidth;
        const vf weight = exp(loadf(at) - from);
        storef(at, weight);
        sum += weight;
      }
      total[v] = total[v] * shrink[v] + sum;
      largest[v] = most;
    }
  }

  // Writes what follows the values of query c in the result: its largest score and its sum of exponentials.
  void end(int c, float* out) const {
    out[0] = largest[c / kWidth][c % kWidth], out[1] = total[c / kWidth][c % kWidth];
  }
};

// Prefetches the entries that are read next into the second-level cache, in even steps.
struct LatentAhead {
  const char* data;
  int64_t lines, due = 0;

  // What follows the entries before `end`: at most `most` entries of `bytes` bytes, of this chunk or of the next one. A
  // list is not followed.
  static LatentAhead behind(const AttendLatents& a, int64_t end, int64_t bytes, int64_t most) {
    const int64_t left = a.list ? 0 : end < a.last ? (a.last - end) * bytes : a.next_bytes;
    return {end < a.last ? (const char*)a.entries + end * bytes : a.next,
            ((left < most * bytes ? left : most * bytes) + 63) / 64};
  }

  LF_INLINED void step(int steps) {
    for (due += lines; due >= steps; due -= steps, data += 64) __builtin_prefetch(data, 0, 2);
  }
};

// The entries low <= t < end as float32 rows: the cache itself, or a copy in `space`. stride: floats from row to row.
template <Dtype dtype>
const float* latent_rows(const AttendLatents& a, int64_t low, int64_t end, float* space, int64_t* stride) {
  if (!a.list) return widened<dtype>({a.entries, low * a.e, a.e}, (int)(end - low), a.e, space, stride);
  int64_t own;
  for (int64_t t = low; t < end; t++) {
    float* const to = space + (t - low) * a.e;
    const float* const row = widened<dtype>({a.entries, (int64_t)a.list[t] * a.e, a.e}, 1, a.e, to, &own);
    if (row != to) std::memcpy(to, row, a.e * sizeof(float));
  }
  *stride = a.e;
  return space;
}

}  // namespace
}  // namespace LF_ISA
