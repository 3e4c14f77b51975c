// Attention over cached latents, which are the keys and values of all heads of a lane: one position's heads are a
// matrix of queries, so that an entry is read once for all of them. Included by kernels.cc alone, as simd.h is.
//
// Vectors run over queries, and nothing is added across a vector: a query's result has the same bits in any company.
// Its scores are a chain of multiply-adds over the channels, its values over the entries, in blocks of kEntries that
// begin at multiples of that.
#pragma once

#include "attention.h"

namespace LF_ISA {
namespace {

using laneformer::AttendLatents;
using laneformer::kLatentQueries;

constexpr int kEntries = laneformer::kLatentEntries;
constexpr int kAcross = 2 * kWidth;                            // queries of a panel
constexpr int kPanels = kLatentQueries / kAcross;              // that use a block before the next is read
constexpr int kSums = kWidth == 16 ? 8 : kWidth == 8 ? 6 : 4;  // entries, or channels, whose sums stay in registers
constexpr int kStretch = 96;                                   // channels that all entries of a block multiply in turn
static_assert(kLatentQueries % kAcross == 0 && kEntries % kSums == 0, "whole panels and tiles");

// Some queries and their results so far. A query's position is that of the newest entry that it sees.
struct LatentPanel {
  float *q, *mixed;  // [e][kAcross], [values][kAcross]
  vf largest[2], total[2];
  int64_t row[kAcross];  // of q and out; unused columns repeat the last one
  int64_t position[kAcross];
  int used;
};

// Lines that are needed next, fetched in even steps into the second-level cache.
struct LatentAhead {
  const char* data;
  int64_t lines, due = 0;
  LF_INLINED void step(int steps) {
    for (due += lines; due >= steps; due -= steps, data += 64) __builtin_prefetch(data, 0, 2);
  }
};

// scores[j][query] of `count` entries.
LF_INLINE void score_latents(const LatentPanel& panel, const float* rows, int64_t stride, int count, int e,
                             float (*scores)[kAcross], LatentAhead& ahead, int steps) {
  for (int first = 0; first < e; first += kStretch) {
    const int last = first + kStretch < e ? first + kStretch : e;
    for (int j = 0; j < count; j += kSums) {
      const float* row[kSums];
      each<kSums>([&](auto c) LF_INLINED { row[c()] = rows + (j + c() < count ? j + c() : count - 1) * stride; });
      vf acc[kSums][2];
      each<kSums>([&](auto c) LF_INLINED {
        each<2>([&](auto v) LF_INLINED { acc[c()][v()] = first ? loadf(scores[j + c()] + v() * kWidth) : vf{}; });
      });
      for (int i = first; i < last; i++) {
        const vf low = loadf(panel.q + i * kAcross), high = loadf(panel.q + i * kAcross + kWidth);
        each<kSums>([&](auto c) LF_INLINED {
          const vf x = splat(row[c()][i]);
          acc[c()][0] += x * low;
          acc[c()][1] += x * high;
        });
      }
      each<kSums>([&](auto c) LF_INLINED {
        each<2>([&](auto v) LF_INLINED { storef(scores[j + c()] + v() * kWidth, acc[c()][v()]); });
      });
      ahead.step(steps);
    }
  }
}

// Exponentials of the scores of entries that a query attends to, zeros for others; adds their sum.
LF_INLINE void weigh_latents(LatentPanel& panel, float (*scores)[kAcross], const vi (*seen)[2], int count,
                             vf (&shrink)[2]) {
  for (int v = 0; v < 2; v++) {
    vf most = panel.largest[v], total = {};
    for (int j = 0; j < count; j++) {
      float* const at = scores[j] + v * kWidth;
      if (seen) storef(at, select(seen[j][v], loadf(at), splat(-INFINITY)));
      most = max(most, loadf(at));
    }
    const vf from = max(most, splat(-3e38f));  // finite even before the first entry that is seen
    shrink[v] = exp(panel.largest[v] - from);
    for (int j = 0; j < count; j++) {
      float* const at = scores[j] + v * kWidth;
      const vf weight = exp(loadf(at) - from);
      storef(at, weight);
      total += weight;
    }
    panel.total[v] = panel.total[v] * shrink[v] + total;
    panel.largest[v] = most;
  }
}

// mixed = mixed * shrink + sum_j scores[j] entry[j]. An entry that a query does not attend to cannot change its sum,
// not even as NaN.
template <bool all>
LF_INLINE void mix_latents(const LatentPanel& panel, const float* rows, int64_t stride, int count, int values,
                           const float (*scores)[kAcross], const vi (*seen)[2], const vf (&shrink)[2]) {
  for (int i = 0; i < values; i += kSums) {
    int channel[kSums];
    vf acc[kSums][2];
    each<kSums>([&](auto c) LF_INLINED {
      channel[c()] = i + c() < values ? i + c() : values - 1;
      each<2>([&](auto v) LF_INLINED {
        acc[c()][v()] = loadf(panel.mixed + channel[c()] * kAcross + v() * kWidth) * shrink[v()];
      });
    });
    for (int j = 0; j < count; j++) {
      const vf low = loadf(scores[j]), high = loadf(scores[j] + kWidth);
      const float* const row = rows + j * stride;
      each<kSums>([&](auto c) LF_INLINED {
        const vf x = splat(row[channel[c()]]);
        if constexpr (all) {
          acc[c()][0] += x * low;
          acc[c()][1] += x * high;
        } else {
          acc[c()][0] = select(seen[j][0], acc[c()][0] + x * low, acc[c()][0]);
          acc[c()][1] = select(seen[j][1], acc[c()][1] + x * high, acc[c()][1]);
        }
      });
    }
    each<kSums>([&](auto c) LF_INLINED {
      each<2>([&](auto v) LF_INLINED { storef(panel.mixed + channel[c()] * kAcross + v() * kWidth, acc[c()][v()]); });
    });
  }
}

LF_INLINE void begin_panel(const AttendLatents& a, int64_t begin, int64_t queries, float* space, LatentPanel& panel) {
  panel.q = space, panel.mixed = space + (int64_t)a.e * kAcross;
  panel.used = queries - begin < kAcross ? (int)(queries - begin) : kAcross;
  for (int c = 0; c < kAcross; c++) {
    const int64_t query = begin + (c < panel.used ? c : panel.used - 1);
    panel.row[c] = query / a.heads * a.of + query % a.heads;
    panel.position[c] = (a.start + query / a.heads + 1) / a.every - 1;
    const float* const q = a.q + panel.row[c] * a.e;
    for (int i = 0; i < a.e; i++) panel.q[i * kAcross + c] = q[i];
  }
  std::memset(panel.mixed, 0, (int64_t)a.values * kAcross * sizeof(float));
  for (int v = 0; v < 2; v++) panel.largest[v] = splat(-INFINITY), panel.total[v] = vf{};
}

LF_INLINE void end_panel(const AttendLatents& a, const LatentPanel& panel) {
  for (int c = 0; c < panel.used; c++) {
    float* const out = a.out + panel.row[c] * (a.values + 2);
    for (int i = 0; i < a.values; i++) out[i] = panel.mixed[i * kAcross + c];
    out[a.values] = panel.largest[c / kWidth][c % kWidth];
    out[a.values + 1] = panel.total[c / kWidth][c % kWidth];
  }
}

// A panel and the entries from `low` to `end` of a block.
void attend_panel(const AttendLatents& a, LatentPanel& panel, const float* rows, int64_t stride, int64_t low,
                  int64_t end, LatentAhead& ahead, int steps) {
  const int64_t oldest = panel.position[0], newest = panel.position[kAcross - 1];
  const int count = (int)((end < newest + 1 ? end : newest + 1) - low);
  if (count <= 0) return;
  alignas(64) float scores[kEntries][kAcross];
  vi masks[kEntries][2];
  const bool all = low + count <= oldest + 1 && low >= newest - a.window + 1;
  for (int v = 0; v < 2 && !all; v++) {
    vi first, last;  // entries of this block that each query attends to
    for (int c = 0; c < kWidth; c++) {
      const int64_t own = panel.position[v * kWidth + c] - low, least = own - a.window + 1;
      first[c] = least < 0 ? 0 : least > kEntries ? kEntries : (int)least;
      last[c] = own < 0 ? -1 : own > kEntries ? kEntries : (int)own;
    }
    for (int j = 0; j < count; j++) masks[j][v] = (last >= j) & (first <= j);
  }
  const auto* const seen = all ? nullptr : masks;
  score_latents(panel, rows, stride, count, a.e, scores, ahead, steps);
  vf shrink[2];
  weigh_latents(panel, scores, seen, count, shrink);
  if (all) {
    mix_latents<true>(panel, rows, stride, count, a.values, scores, seen, shrink);
  } else {
    mix_latents<false>(panel, rows, stride, count, a.values, scores, seen, shrink);
  }
}

// The entries of a block as float32 rows: in place, or in `space`.
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

template <Dtype dtype>
void attend_latents_as(const AttendLatents& a) {
  const int64_t queries = (int64_t)a.positions * a.heads, each_panel = (int64_t)(a.e + a.values) * kAcross;
  const int64_t bytes = (int64_t)a.e * (dtype == Dtype::f32 ? 4 : 2);
  float* const space = (float*)(((uintptr_t)a.space + 63) / 64 * 64);  // no vector crosses a line
  float* const widened_rows = space + kPanels * each_panel;
  LatentPanel panels[kPanels];
  for (int64_t group = 0; group < queries; group += kLatentQueries) {
    int count = 0;
    for (int64_t begin = group; begin < queries && count < kPanels; begin += kAcross, count++)
      begin_panel(a, begin, queries, space + count * each_panel, panels[count]);
    const int64_t newest = panels[count - 1].position[kAcross - 1];
    for (int64_t low = a.first; low < a.last && low <= newest; low += kEntries) {
      const int64_t end = low + kEntries < a.last ? low + kEntries : a.last;
      int64_t stride;
      const float* const rows = latent_rows<dtype>(a, low, end, widened_rows, &stride);
      const int64_t left = a.list ? 0 : end < a.last ? (a.last - end) * bytes : a.next_bytes;
      LatentAhead ahead{end < a.last ? (const char*)a.entries + end * bytes : a.next,
                        ((left < kEntries * bytes ? left : kEntries * bytes) + 63) / 64};
      const int steps = count * ((kEntries + kSums - 1) / kSums) * ((a.e + kStretch - 1) / kStretch);
      for (int n = 0; n < count; n++) attend_panel(a, panels[n], rows, stride, low, end, ahead, steps);
    }
    for (int n = 0; n < count; n++) end_panel(a, panels[n]);
  }
}

void attend_latents(const AttendLatents& a) {
  switch (a.dtype) {
    case Dtype::bf16: return attend_latents_as<Dtype::bf16>(a);
    case Dtype::f16: return attend_latents_as<Dtype::f16>(a);
    case Dtype::f32: return attend_latents_as<Dtype::f32>(a);
  }
}

}  // namespace
}  // namespace LF_ISA
