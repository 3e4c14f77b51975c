// `attend_latents` of the table of kernels: attention over one chunk of cached vectors that are keys and values of all
// heads of a lane. ops/attend.cc calls it with latents, ops/compressed.cc with positions and entries. Included by
// kernels.cc alone; tile_latents.h has the same for AMX.
//
// The heads of all positions are queries alike, so an entry is read once for many queries. Vectors run over queries.
//
// Invariant: nothing is added across a vector, so a query's result has the same bits whichever queries are beside it. A
// score is one chain of multiply-adds over the channels. A value is one over the entries, in blocks of kEntries that
// begin at multiples of kEntries, with the softmax so far as in attention.h.
#pragma once

#include "latent_queries.h"

namespace LF_ISA {
namespace {

using laneformer::kLatentEntries;
using laneformer::kLatentQueries;

constexpr int kEntries = 48;                                   // entries of a block
constexpr int kAcross = LatentQueries<2>::kAcross;             // queries of a panel
constexpr int kPanels = kLatentQueries / kAcross;              // panels that use a block before the next is read
constexpr int kSums = kWidth == 16 ? 8 : kWidth == 8 ? 6 : 4;  // entries, or channels, with sums in registers together
constexpr int kStretch = 96;  // channels of the queries that all entries of a block use before the next ones
static_assert(kLatentQueries % kAcross == 0 && kEntries % kSums == 0, "whole panels and tiles");
static_assert(kLatentEntries % kEntries == 0, "blocks begin at multiples of their size");

struct LatentPanel : LatentQueries<2> {
  float *q, *mixed;  // [e][kAcross], [values][kAcross]
};

// Computes scores[j][query] of `count` entries.
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

// mixed = mixed * shrink + sum over j of scores[j] * entry[j]. An entry to which a query does not attend does not
// change its sum, even if it is NaN.
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

// Starts a panel with queries from number `begin` on: transposes them and clears their results, both in `space`.
LF_INLINE void begin_panel(const AttendLatents& a, int64_t begin, int64_t queries, float* space, LatentPanel& panel) {
  panel.q = space, panel.mixed = space + (int64_t)a.e * kAcross;
  panel.begin(a, begin, queries);
  for (int c = 0; c < kAcross; c++) {
    const float* const q = a.q + panel.row[c] * a.e;
    for (int i = 0; i < a.e; i++) panel.q[i * kAcross + c] = q[i];
  }
  std::memset(panel.mixed, 0, (int64_t)a.values * kAcross * sizeof(float));
}

// Writes the panel's results to `out`.
LF_INLINE void end_panel(const AttendLatents& a, const LatentPanel& panel) {
  for (int c = 0; c < panel.used; c++) {
    float* const out = a.out + panel.row[c] * (a.values + 2);
    for (int i = 0; i < a.values; i++) out[i] = panel.mixed[i * kAcross + c];
    panel.end(c, out + a.values);
  }
}

// Attends with a panel to the entries low <= t < end of a block.
void attend_panel(const AttendLatents& a, LatentPanel& panel, const float* rows, int64_t stride, int64_t low,
                  int64_t end, LatentAhead& ahead, int steps) {
  const int count = panel.count(low, end);
  if (count <= 0) return;
  alignas(64) float scores[kEntries][kAcross];
  vi masks[kEntries][2];
  const bool all = panel.see_all(low, count, a.window);
  if (!all) panel.seen(low, count, a.window, masks);
  const auto* const seen = all ? nullptr : masks;
  score_latents(panel, rows, stride, count, a.e, scores, ahead, steps);
  vf shrink[2];
  panel.weigh(scores, seen, count, shrink);
  if (all) {
    mix_latents<true>(panel, rows, stride, count, a.values, scores, seen, shrink);
  } else {
    mix_latents<false>(panel, rows, stride, count, a.values, scores, seen, shrink);
  }
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
      LatentAhead ahead = LatentAhead::behind(a, end, bytes, kEntries);
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
