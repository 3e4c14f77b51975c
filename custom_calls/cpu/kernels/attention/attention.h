// `attend` of the table of kernels: attention over one chunk of a lane's keys and values, for one position or several.
// ops/attend.cc calls it, and merges chunks. Included by kernels.cc alone.
//
// The softmax is computed block by block: `largest` is the largest score so far, and what was summed before a larger
// one is found is multiplied by a factor `shrink`. Two codes share this order. `attend_in` is for one position or few:
// vectors run over the channels of keys and values, and query heads with the same key share its loads. `attend_panels`
// is for prompts: vectors run over queries.
//
// Invariant: the bits of a query's result do not depend on the queries beside it, nor on which code computes it. Keys
// are taken in blocks of kKeys that begin at multiples of kKeys. A score is kWidth chains of multiply-adds, over the
// channels i with the same i modulo kWidth. A sum of exponentials is kWidth such chains over the keys. Chains are added
// in pairs, those farthest apart first.
#pragma once

#include <cmath>

#include "cached.h"

namespace LF_ISA {
namespace {

using laneformer::Attend;
using laneformer::softcapped;

constexpr int kKeys = 32;  // positions of a block, whose keys and values stay in the first-level cache
constexpr int kQueries = kWidth < 8 ? kWidth : 8;  // queries of one key/value head that share its loads, at most
constexpr int kMixed = kWidth == 16 ? 16 : 8;      // vectors of results that stay in registers

// Prefetches the keys and values that are read next, in even steps while others are in use, so that memory is neither
// idle nor flooded by a burst.
struct Ahead {
  const char *keys, *values;
  int64_t lines;  // of keys, and as many of values
  int64_t due = 0;

  // One of `steps` steps that share the lines.
  __attribute__((always_inline)) void step(int steps) {
    for (due += lines; due >= steps; due -= steps, keys += 64, values += 64) {
      __builtin_prefetch(keys);
      __builtin_prefetch(values);
    }
  }
};

// Exchanges elements whose indices differ by S, a power of two.
template <int S, int... I>
LF_INLINE vf exchange(vf v, Numbers<I...>) {
  return __builtin_shufflevector(v, v, (I ^ S)...);
}

// Element i of the result is the largest, or the sum, of all elements whose index is i modulo G.
template <int G, int S = kWidth / 2>
LF_INLINE vf largest_by_rest(vf v) {
  if constexpr (S < G) {
    return v;
  } else {
    return largest_by_rest<G, S / 2>(max(v, exchange<S>(v, CountUp<kWidth>{})));
  }
}
template <int G, int S = kWidth / 2>
LF_INLINE vf sum_by_rest(vf v) {
  if constexpr (S < G) {
    return v;
  } else {
    return sum_by_rest<G, S / 2>(v + exchange<S>(v, CountUp<kWidth>{}));
  }
}

// scores[j * G + g] = q[g] . key[j], with their softcap, for G queries of e channels and `count` keys; then -inf up to
// the end of a vector.
template <Dtype dtype, int G>
void score(const float* q, Rows keys, int count, int e, float softcap, float* scores, Ahead ahead) {
  constexpr int kAtOnce = kWidth / G;  // keys whose scores fill a vector
  const int whole = e / kWidth * kWidth, rest = e - whole,
            steps = (count + kAtOnce - 1) / kAtOnce * ((e + kWidth - 1) / kWidth);
  for (int j = 0; j < count; j += kAtOnce) {
    int64_t row[kAtOnce];
    for (int c = 0; c < kAtOnce; c++) row[c] = keys.offset + (j + c < count ? j + c : count - 1) * keys.stride;
    vf acc[kWidth];
    for (int c = 0; c < kWidth; c++) acc[c] = vf{};
    for (int i = 0; i < whole; i += kWidth) {
      ahead.step(steps);
      for (int c = 0; c < kAtOnce; c++) {
        const vf key = element(dtype, keys.data, row[c] + i);
        for (int g = 0; g < G; g++) acc[c * G + g] += loadf(q + g * e + i) * key;
      }
    }
    if (rest) {
      ahead.step(steps);
      for (int c = 0; c < kAtOnce; c++) {
        const vf key = first_elements(dtype, keys.data, row[c] + whole, rest);
        for (int g = 0; g < G; g++) acc[c * G + g] += load_first<vf>(q + g * e + whole, rest) * key;
      }
    }
    const vf found = sums(acc);
    storef(scores + j * G, softcap > 0 ? softcapped<Vectors>(found, softcap) : found);
  }
  for (int i = count * G; i % kWidth; i++) scores[i] = -INFINITY;
}

// out[g][i] = out[g][i] * shrink[g] + sum over j of weights[j * G + g] * value[j][i], for N vectors of channels i. The
// last vector has only `rest` channels unless rest is 0.
template <Dtype dtype, int G, int N>
void mix_channels(const float* weights, Rows values, int count, int rest, const float* shrink, float* out, int64_t ldo,
                  Ahead& ahead, int steps) {
  constexpr int last = (N - 1) * kWidth;
  vf acc[G][N];
  for (int g = 0; g < G; g++)
    for (int n = 0; n < N; n++) {
      const float* from = out + g * ldo + n * kWidth;
      acc[g][n] = (n == N - 1 && rest ? load_first<vf>(from, rest) : loadf(from)) * splat(shrink[g]);
    }
  const auto add = [&](int j, auto ragged) {
    for (int n = 0; n < N; n++) {
      const int64_t at = values.offset + j * values.stride + n * kWidth;
      const vf value =
          n == N - 1 && ragged() ? first_elements(dtype, values.data, at, rest) : element(dtype, values.data, at);
      for (int g = 0; g < G; g++) acc[g][n] += splat(weights[j * G + g]) * value;
    }
  };
  for (int j = 0; j < count; j++) {
    ahead.step(steps);
    if (rest) {
      add(j, Count<1>{});
    } else {
      add(j, Count<0>{});
    }
  }
  for (int g = 0; g < G; g++) {
    for (int n = 0; n < N - 1; n++) storef(out + g * ldo + n * kWidth, acc[g][n]);
    std::memcpy(out + g * ldo + last, &acc[g][N - 1], rest ? rest * sizeof(float) : sizeof(vf));
  }
}

// The same for all e channels: as many at a time as have sums in registers, then the rest.
template <Dtype dtype, int G, int N = kMixed / G>
void mix(const float* weights, Rows values, int count, int e, const float* shrink, float* out, int64_t ldo,
         Ahead& ahead, int steps) {
  for (; e >= N * kWidth; e -= N * kWidth, values.offset += N * kWidth, out += N * kWidth)
    mix_channels<dtype, G, N>(weights, values, count, 0, shrink, out, ldo, ahead, steps);
  if (e > (N - 1) * kWidth)
    return mix_channels<dtype, G, N>(weights, values, count, e % kWidth, shrink, out, ldo, ahead, steps);
  if constexpr (N > 1) {
    if (e > 0) mix<dtype, G, N - 1>(weights, values, count, e, shrink, out, ldo, ahead, steps);
  }
}

// The sums of each query's chains. A vector has kWidth / G chains of each of G queries; a query's chains are G elements
// apart. Adds pairs, those farthest apart first.
template <int G>
LF_INLINE vf sum_of_chains(vf (&chains)[G]) {
  for (int half = G / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) chains[i] += chains[i + half];
  return sum_by_rest<G>(chains[0]);
}

// Attends with G queries of one key/value head and position to `count` keys of a block, from key number `slot` on.
template <Dtype dtype, int G>
void attend_block(const float* q, Rows keys, Rows values, int slot, int count, int e, float softcap, float* out,
                  Ahead first_half, Ahead second_half) {
  const int64_t ldo = e + 2;
  constexpr int kScores = kKeys * G;
  float scores[kScores + kWidth], shrink[kWidth], before[kWidth], most[kWidth];
  for (int i = 0; i < kScores; i += kWidth) storef(scores + i, splat(-INFINITY));
  score<dtype, G>(q, keys, count, e, softcap, scores + slot * G, first_half);
  for (int i = 0; i < kWidth; i++) before[i] = out[i % G * ldo + e];
  vf largest = loadf(before);
  for (int i = 0; i < kScores; i += kWidth) largest = max(largest, loadf(scores + i));
  largest = largest_by_rest<G>(largest);
  storef(most, largest);
  storef(shrink, exp(loadf(before) - largest));
  vf totals[G] = {};
  for (int i = 0; i < kScores; i += G * kWidth)
    for (int g = 0; g < G; g++) {
      const vf weight = exp(loadf(scores + i + g * kWidth) - largest);
      storef(scores + i + g * kWidth, weight);
      totals[g] += weight;
    }
  for (int g = 0; g < G; g++) out[g * ldo + e] = most[g];
  storef(most, sum_of_chains<G>(totals));
  constexpr int channels = kMixed / G * kWidth;
  mix<dtype, G>(scores + slot * G, values, count, e, shrink, out, ldo, second_half,
                count * ((e + channels - 1) / channels));
  for (int g = 0; g < G; g++) out[g * ldo + e + 1] = out[g * ldo + e + 1] * shrink[g] + most[g];
}

// Attends with vectors over channels.
template <Dtype dtype>
void attend_in(const Attend& a) {
  const int heads = a.kv_heads * a.group;
  const int64_t stride = (int64_t)a.kv_heads * a.e;
  const int64_t row = stride * (dtype == Dtype::f32 ? 4 : 2);
  for (int p = 0; p < a.positions; p++)
    for (int h = 0; h < heads; h++) {
      float* out = a.out + ((int64_t)p * heads + h) * (a.e + 2);
      std::memset(out, 0, a.e * sizeof(float));
      out[a.e] = -INFINITY;
      out[a.e + 1] = 0;
    }
  // Blocks of keys are outermost, then heads and queries, so that keys and values are read from memory once.
  for (int64_t t0 = a.first / kKeys * kKeys; t0 < a.last; t0 += kKeys) {
    const bool more = a.last - t0 > kKeys;
    const int64_t end = more ? t0 + kKeys : a.last;
    // The next rows to prefetch: an equal share with each head's scores and with each head's mixing.
    const int64_t rows = more ? a.last - end : a.next;
    const Ahead next = {(const char*)(more ? a.keys : a.next_keys) + (more ? end * row : 0),
                        (const char*)(more ? a.values : a.next_values) + (more ? end * row : 0),
                        ((rows < kKeys ? rows : kKeys) * row + 63) / 64};
    for (int n = 0; n < a.kv_heads; n++)
      for (int p = 0; p < a.positions; p++) {
        const int64_t position = a.start + p, oldest = position - a.window + 1, begin = t0 > a.first ? t0 : a.first;
        const int64_t low = begin > oldest ? begin : oldest;
        const int64_t high = end < position + 1 ? end : position + 1;
        const int count = (int)(high - low);
        if (count <= 0) continue;
        const int64_t offset = low * stride + (int64_t)n * a.e;
        for (int g = 0; g < a.group;) {
          const auto share = [&](int part) {  // only the first queries that read this block prefetch
            const int64_t begin = next.lines * part / (2 * a.kv_heads),
                          stop = next.lines * (part + 1) / (2 * a.kv_heads);
            return Ahead{next.keys + 64 * begin, next.values + 64 * begin, p == 0 && g == 0 ? stop - begin : 0};
          };
          const int64_t head = (int64_t)p * heads + n * a.group + g;
          const auto some = [&](auto queries) {
            attend_block<dtype, queries()>(a.q + head * a.e, {a.keys, offset, stride}, {a.values, offset, stride},
                                           (int)(low - t0), count, a.e, a.softcap, a.out + head * (a.e + 2),
                                           share(2 * n), share(2 * n + 1));
            g += queries();
          };
          const int left = a.group - g;
          if (left >= 8 && kQueries >= 8) {
            some(Count<kQueries>{});
          } else if (left >= 4) {
            some(Count<4>{});
          } else if (left >= 2) {
            some(Count<2>{});
          } else {
            some(Count<1>{});
          }
        }
      }
  }
}

// A panel is two vectors of queries that share the loads of each key and value. Nothing is added across a vector.
constexpr int kPanel = 2 * kWidth;
constexpr int kTogether = kWidth == 16 ? 8 : 4;  // keys, or channels, whose sums are in registers together
constexpr int kLongestHead = 256;                // channels at most

struct Panel {
  float q[kLongestHead][kPanel], mixed[kLongestHead][kPanel], scores[kKeys][kPanel], rows[kKeys * kLongestHead];
  vf largest[2], total[2];
  vi seen[kKeys][2];  // whether a query attends to a key of the block
};

// Reverses the bits of the number of an element in a vector.
constexpr int reversed_bits(int number) {
  int reversed = 0;
  for (int bit = 1; bit < kWidth; bit *= 2) reversed = 2 * reversed + (number & bit ? 1 : 0);
  return reversed;
}

// Computes the scores of `count` keys of a block, from key number `slot` on, with their softcap; -inf if a query does
// not attend to a key. all: every query attends to every key.
template <Dtype dtype>
void score_panel(Panel& panel, Rows keys, int slot, int count, int e, float softcap, bool all) {
  int64_t stride;
  const float* rows = widened<dtype>(keys, count, e, panel.rows, &stride);
  for (int j = 0; j < count; j += kTogether) {
    const float* key[kTogether];
    for (int c = 0; c < kTogether; c++) key[c] = rows + (j + c < count ? j + c : count - 1) * stride;
    // Computes chains in the order in which they are added: pending[n] has the sum of 2^n chains.
    vf pending[5][kTogether][2], acc[kTogether][2];
    for (int chain = 0; chain < kWidth; chain++) {
      each<kTogether>([&](auto c) LF_INLINED { acc[c()][0] = acc[c()][1] = vf{}; });
      for (int i = reversed_bits(chain); i < e; i += kWidth) {
        const vf low = loadf(panel.q[i]), high = loadf(panel.q[i] + kWidth);
        each<kTogether>([&](auto c) LF_INLINED {
          const vf x = splat(key[c()][i]);
          acc[c()][0] += x * low;
          acc[c()][1] += x * high;
        });
      }
      int level = 0;
      for (; chain >> level & 1; level++)
        each<kTogether>([&](auto c) LF_INLINED {
          acc[c()][0] += pending[level][c()][0];
          acc[c()][1] += pending[level][c()][1];
        });
      if (chain < kWidth - 1)
        each<kTogether>([&](auto c) LF_INLINED {
          pending[level][c()][0] = acc[c()][0];
          pending[level][c()][1] = acc[c()][1];
        });
    }
    each<kTogether>([&](auto c) LF_INLINED {
      if (j + c() < count)
        each<2>([&](auto v) LF_INLINED {
          const int at = slot + j + c();
          const vf found = softcap > 0 ? softcapped<Vectors>(acc[c()][v()], softcap) : acc[c()][v()];
          const vf seen = all ? found : select(panel.seen[at][v()], found, splat(-INFINITY));
          storef(panel.scores[at] + v() * kWidth, seen);
        });
    });
  }
}

// Turns the scores into exponentials and updates their sum. shrink: the factor on what was summed before.
LF_INLINE void weigh_panel(Panel& panel, int slot, int count, vf (&shrink)[2]) {
  for (int v = 0; v < 2; v++) {
    vf most = panel.largest[v], totals[kWidth] = {};
    for (int j = slot; j < slot + count; j++) most = max(most, loadf(panel.scores[j] + v * kWidth));
    const vf from = max(most, splat(-3e38f));  // finite even before the first key that a query attends to
    shrink[v] = exp(panel.largest[v] - from);
    for (int j = slot; j < slot + count; j++) {
      const vf weight = exp(loadf(panel.scores[j] + v * kWidth) - from);
      storef(panel.scores[j] + v * kWidth, weight);
      totals[j % kWidth] += weight;
    }
    for (int half = kWidth / 2; half > 0; half /= 2)
      for (int i = 0; i < half; i++) totals[i] += totals[i + half];
    panel.total[v] = panel.total[v] * shrink[v] + totals[0];
    panel.largest[v] = most;
  }
}

// mixed = mixed * shrink + sum over j of scores[j] * value[j]. A value that a query does not attend to does not change
// its sum, even if it is NaN.
template <Dtype dtype, bool all>
void mix_panel(Panel& panel, Rows values, int slot, int count, int e, const vf (&shrink)[2]) {
  int64_t stride;
  const float* rows = widened<dtype>(values, count, e, panel.rows, &stride);
  for (int i = 0; i < e; i += kTogether) {
    int channel[kTogether];
    vf acc[kTogether][2];
    for (int c = 0; c < kTogether; c++) {
      channel[c] = i + c < e ? i + c : e - 1;
      for (int v = 0; v < 2; v++) acc[c][v] = loadf(panel.mixed[channel[c]] + v * kWidth) * shrink[v];
    }
    for (int j = 0; j < count; j++) {
      const float* const weights = panel.scores[slot + j];
      const vf weight[2] = {loadf(weights), loadf(weights + kWidth)};
      for (int c = 0; c < kTogether; c++) {
        const vf x = splat(rows[j * stride + channel[c]]);
        for (int v = 0; v < 2; v++) {
          const vf sum = acc[c][v] + x * weight[v];
          acc[c][v] = all ? sum : select(panel.seen[slot + j][v], sum, acc[c][v]);
        }
      }
    }
    for (int c = 0; c < kTogether; c++)
      for (int v = 0; v < 2; v++) storef(panel.mixed[channel[c]] + v * kWidth, acc[c][v]);
  }
}

// Attends with vectors over queries.
template <Dtype dtype>
void attend_panels(const Attend& a) {
  const int heads = a.kv_heads * a.group, queries = a.positions * a.group;
  const int64_t stride = (int64_t)a.kv_heads * a.e;
  Panel panel;
  for (int n = 0; n < a.kv_heads; n++)
    for (int begin = 0; begin < queries; begin += kPanel) {
      const int used = queries - begin < kPanel ? queries - begin : kPanel;
      int position[kPanel];
      int64_t row[kPanel];  // of q and out; unused columns repeat the last one
      for (int c = 0; c < kPanel; c++) {
        const int query = begin + (c < used ? c : used - 1);
        position[c] = query / a.group;
        row[c] = (int64_t)position[c] * heads + n * a.group + query % a.group;
        for (int i = 0; i < a.e; i++) panel.q[i][c] = a.q[row[c] * a.e + i];
      }
      std::memset(panel.mixed, 0, a.e * sizeof panel.mixed[0]);
      for (int v = 0; v < 2; v++) panel.largest[v] = splat(-INFINITY), panel.total[v] = vf{};
      const int64_t oldest = a.start + position[0],
                    newest = a.start + position[kPanel - 1];  // the panel's first and last position
      for (int64_t t0 = a.first / kKeys * kKeys; t0 < a.last; t0 += kKeys) {
        int64_t low = t0 > a.first ? t0 : a.first, high = t0 + kKeys < a.last ? t0 + kKeys : a.last;
        if (low < oldest - a.window + 1) low = oldest - a.window + 1;
        if (high > newest + 1) high = newest + 1;
        if (high <= low) continue;
        const int slot = (int)(low - t0), count = (int)(high - low);
        const bool all = high <= oldest + 1 && low >= newest - a.window + 1;
        for (int v = 0; v < 2 && !all; v++) {
          vi first, last;  // the keys of this block that each query attends to
          for (int c = 0; c < kWidth; c++) {
            const int64_t own = a.start + position[v * kWidth + c] - t0, least = own - a.window + 1;
            first[c] = least < 0 ? 0 : least > kKeys ? kKeys : (int)least;
            last[c] = own < 0 ? -1 : own > kKeys ? kKeys : (int)own;
          }
          for (int j = slot; j < slot + count; j++) panel.seen[j][v] = (j >= first) & (j <= last);
        }
        const int64_t offset = low * stride + (int64_t)n * a.e;
        score_panel<dtype>(panel, {a.keys, offset, stride}, slot, count, a.e, a.softcap, all);
        vf shrink[2];
        weigh_panel(panel, slot, count, shrink);
        if (all) {
          mix_panel<dtype, true>(panel, {a.values, offset, stride}, slot, count, a.e, shrink);
        } else {
          mix_panel<dtype, false>(panel, {a.values, offset, stride}, slot, count, a.e, shrink);
        }
      }
      for (int c = 0; c < used; c++) {
        float* out = a.out + row[c] * (a.e + 2);
        for (int i = 0; i < a.e; i++) out[i] = panel.mixed[i][c];
        out[a.e] = panel.largest[c / kWidth][c % kWidth];
        out[a.e + 1] = panel.total[c / kWidth][c % kWidth];
      }
    }
}

template <Dtype dtype>
void attend_as(const Attend& a) {
  const bool panels = a.positions > 1 && a.positions * a.group >= kWidth && a.e <= kLongestHead;
  return panels ? attend_panels<dtype>(a) : attend_in<dtype>(a);
}

void attend(const Attend& a) {
  switch (a.dtype) {
    case Dtype::bf16: return attend_as<Dtype::bf16>(a);
    case Dtype::f16: return attend_as<Dtype::f16>(a);
    case Dtype::f32: return attend_as<Dtype::f32>(a);
  }
}

}  // namespace
}  // namespace LF_ISA
