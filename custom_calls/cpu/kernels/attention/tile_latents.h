// `attend_latents` of AMX's table of kernels: attention over one chunk of cached vectors on tile registers; latents.h
// has the same on vectors. Included by amx.cc alone.
//
// Both products of attention multiply tiles of bf16 numbers. A float32 is the sum of three of them, its parts, and a
// bf16 latent is one. Products of parts i and j are added if i + j <= 2; the others are below a float32's last digit.
//
// Invariant: a query's scores are a column of a register and its values a row, so it has the same bits whichever
// queries are beside it. Blocks begin at multiples of kLatentEntries. The result of a query with an infinity is NaN. So
// are those of the queries that attend to an entry with a number that is not finite, and no others: the entry is packed
// as zeros, and the weights of these queries become NaN.
//
// The entries of a block are split and packed once for kLatentTileQueries queries: by rows as keys, and by pairs of
// entries as values.
#pragma once

#include "../tile_operands.h"
#include "latent_queries.h"

namespace LF_ISA {
namespace {

constexpr int kTileWords = kTileRows * kTileBytes / 4;  // words of 4 bytes in a register
constexpr int kParts = 3;                               // parts of a float32
constexpr int kPanelVectors = 2 * kTileRows / kWidth;   // a panel is two registers of queries
using TilePanel = LatentQueries<kPanelVectors>;
constexpr int kBlockEntries = laneformer::kLatentEntries;
constexpr int kBlockTiles = kBlockEntries / kTileRows, kBlockSteps = kBlockEntries / (2 * kTileRows);
constexpr int kTilePanels = laneformer::kLatentTileQueries / TilePanel::kAcross;
static_assert(kBlockEntries % (2 * kTileRows) == 0 && TilePanel::kAcross == 2 * kTileRows, "whole pairs of registers");

// Transposes the words of a register: to[r][c] = words[c][r].
#if defined(__AVX512F__)
template <int S, int... I>
LF_INLINE void exchange_halves(vu (&rows)[kTileRows], Numbers<I...>) {
  if constexpr (S > 0) {
    for (int r = 0; r < kTileRows; r++) {
      if (r & S) continue;
      const vu a = rows[r], b = rows[r + S];
      rows[r] = __builtin_shufflevector(a, b, (I & S ? kTileRows + I - S : I)...);
      rows[r + S] = __builtin_shufflevector(a, b, (I & S ? kTileRows + I : I + S)...);
    }
    exchange_halves<S / 2>(rows, Numbers<I...>{});
  }
}
LF_INLINE void transpose(const uint32_t* words, uint32_t* to) {
  vu rows[kTileRows];
  each<kTileRows>([&](auto r) LF_INLINED { rows[r()] = load<vu>(words + r() * kTileRows); });
  exchange_halves<kTileRows / 2>(rows, CountUp<kTileRows>{});
  each<kTileRows>([&](auto r) LF_INLINED { std::memcpy(to + r() * kTileRows, &rows[r()], sizeof(vu)); });
}
#else
LF_INLINE void transpose(const uint32_t* words, uint32_t* to) {
  for (int r = 0; r < kTileRows; r++)
    for (int c = 0; c < kTileRows; c++) to[r * kTileRows + c] = words[c * kTileRows + r];
}
#endif

// Writes pairs of bf16 numbers as words, the first number in the lower half.
LF_INLINE void store_pairs(vf first, vf second, uint32_t* to) {
  const vu words = as_bits(first) >> 16 | (as_bits(second) & 0xffff0000);
  std::memcpy(to, &words, sizeof words);
}
// Splits pairs of float32 numbers and writes part p of them as words to to + p * stride.
template <int P>
LF_INLINE void pack_pairs(vf first, vf second, uint32_t* to, int64_t stride) {
  vf low[P], high[P];
  split<P>(first, low);
  split<P>(second, high);
  each<P>([&](auto p) LF_INLINED { store_pairs(low[p()], high[p()], to + p() * stride); });
}

// The buffers in AttendLatents::space, whose size latent_floats() in kernels.h has.
struct TileSpace {
  int64_t steps, channels;  // steps of 32 channels of a query or an entry, and of its values
  uint32_t *queries, *keys, *values;
  float *mixed, *zeros, *rows;  // results by query; an entry of zeros; entries widened to float32

  TileSpace(const AttendLatents& a, float* space)
      : steps((a.e + kColumns - 1) / kColumns), channels((a.values + kColumns - 1) / kColumns) {
    uint32_t* at = aligned((uint32_t*)space);
    const auto take = [&](int64_t words) {
      uint32_t* const taken = at;
      at += words;
      return taken;
    };
    queries = take(2 * kTilePanels * steps * kParts * kTileWords);
    keys = take(kBlockTiles * steps * kParts * kTileWords);
    values = take(kBlockSteps * 2 * channels * kParts * kTileWords);
    mixed = (float*)take(kTilePanels * TilePanel::kAcross * ldm());
    zeros = (float*)take(a.e);
    for (int i = 0; i < a.e; i++) zeros[i] = 0;
    rows = (float*)at;
  }
  // Floats from one row of `mixed` to the next: not a power of two, so that rows are in different sets of the cache.
  int64_t ldm() const { return kColumns * channels + kTileRows; }
};

// Packs 32 channels of a query or an entry, from channel `first` on, as 16 pairs: channels c and c + 16.
template <int P>
LF_INLINE void pack_channels(const float* x, int64_t first, int64_t channels, uint32_t* to, int64_t stride) {
  for (int c = 0; c < kTileRows; c += kWidth)
    pack_pairs<P>(columns_of(x, first + c, channels), columns_of(x, first + kTileRows + c, channels), to + c, stride);
}

// Packs a panel's queries as the second factor of scores: [register of queries][step][part][pair of channels][query].
void pack_queries(const AttendLatents& a, const TilePanel& panel, const TileSpace& space, uint32_t* to) {
  alignas(64) uint32_t part[kParts][kTileWords];
  for (int first = 0; first < TilePanel::kAcross; first += kTileRows)
    for (int64_t step = 0; step < space.steps; step++, to += kParts * kTileWords) {
      for (int r = 0; r < kTileRows; r++)
        pack_channels<kParts>(a.q + panel.row[first + r] * a.e, step * kColumns, a.e, part[0] + r * kTileRows,
                              kTileWords);
      for (int p = 0; p < kParts; p++) transpose(part[p], to + p * kTileWords);
    }
}

// Packs two entries, from number j of a block on, as the first factor of scores, [register of entries][step][part]
// [entry][pair of channels], and as the second factor of values, [32 entries][register of channels][part]
// [pair of entries][channel]. Returns whether one of them has a number that is not finite.
template <int P>
LF_INLINE bool pack_two(const float* const (&rows)[2], int64_t channels, int j, const TileSpace& space) {
  uint32_t* key = space.keys + j / kTileRows * space.steps * P * kTileWords + j % kTileRows * kTileRows;
  uint32_t* value = space.values + j / kColumns * 2 * space.channels * P * kTileWords + j % kColumns / 2 * kTileRows;
  vi broken = {};
  for (int64_t step = 0; step < space.steps; step++, key += P * kTileWords, value += 2 * P * kTileWords)
    for (int c = 0; c < kTileRows; c += kWidth) {
      vf parts[2][2][P];  // by entry and half of these channels
      each<2>([&](auto n) LF_INLINED {
        each<2>([&](auto half) LF_INLINED {
          const vf x = columns_of(rows[n()], step * kColumns + half() * kTileRows + c, channels);
          broken |= (vi)((as_bits(x) & 0x7f800000) == 0x7f800000);
          split<P>(x, parts[n()][half()]);
        });
      });
      each<2>([&](auto n) LF_INLINED {
        each<P>([&](auto p) LF_INLINED {
          store_pairs(parts[n()][0][p()], parts[n()][1][p()], key + n() * kTileRows + p() * kTileWords + c);
          if (step < space.channels)
            store_pairs(parts[0][n()][p()], parts[1][n()][p()], value + (n() * P + p()) * kTileWords + c);
        });
      });
    }
  return any(broken);
}

// Packs the entries of a block, and zeros after them up to whole steps of 32. broken[j]: receives whether entry j has a
// number that is not finite; it is packed as zeros then. Returns whether any entry has one.
template <int P>
bool pack_entries(const AttendLatents& a, const float* rows, int64_t stride, int count, const TileSpace& space,
                  bool* broken) {
  bool any_broken = false;
  const int padded = (count + kColumns - 1) / kColumns * kColumns;
  for (int j = 0; j < padded; j += 2) {
    const float* two[2];
    for (int n = 0; n < 2; n++) two[n] = j + n < count ? rows + (j + n) * stride : space.zeros, broken[j + n] = false;
    if (!pack_two<P>(two, a.e, j, space)) continue;
    any_broken = true;
    for (int n = 0; n < 2; n++) {
      for (int i = 0; i < a.e; i++) broken[j + n] = broken[j + n] || two[n][i] - two[n][i] != 0;
      if (broken[j + n]) two[n] = space.zeros;
    }
    pack_two<P>(two, a.e, j, space);
  }
  return any_broken;
}

// Computes scores [entry][query] of whole steps of entries. Takes kStretch steps of channels of all entries at a time,
// so that the queries' channels stay in the first-level cache.
template <int P>
void score_tiles(const TileSpace& space, const uint32_t* queries, int entries, float (*scores)[TilePanel::kAcross],
                 LatentAhead& ahead, int steps) {
  constexpr int64_t kStretch = 3, ld = TilePanel::kAcross * sizeof(float);
  const int64_t next_query = space.steps * kParts * kTileWords, next_entry = space.steps * P * kTileWords;
  for (int64_t first = 0; first < space.steps; first += kStretch) {
    const int64_t last = first + kStretch < space.steps ? first + kStretch : space.steps;
    for (int j = 0; j < entries; j += kColumns) {
      float *const upper = scores[j], *const lower = scores[j + kTileRows];
      if (first) {
        tile_load<0>(upper, ld), tile_load<1>(upper + kTileRows, ld);
        tile_load<2>(lower, ld), tile_load<3>(lower + kTileRows, ld);
      } else {
        each<4>([&](auto sum) LF_INLINED { tile_zero<sum()>(); });
      }
      for (int64_t step = first; step < last; step++) {
        const uint32_t* const key = space.keys + j / kTileRows * next_entry + step * P * kTileWords;
        const uint32_t* const query = queries + step * kParts * kTileWords;
        ahead.step(steps);
        each<P>([&](auto i) LF_INLINED {
          tile_load<4>(key + i() * kTileWords, kTileBytes);
          tile_load<5>(key + next_entry + i() * kTileWords, kTileBytes);
          each<kParts - i()>([&](auto j) LF_INLINED {
            tile_load<6>(query + j() * kTileWords, kTileBytes);
            tile_load<7>(query + next_query + j() * kTileWords, kTileBytes);
            tile_multiply<0, 4, 6>(), tile_multiply<1, 4, 7>(), tile_multiply<2, 5, 6>(), tile_multiply<3, 5, 7>();
          });
        });
      }
      tile_store<0>(upper, ld), tile_store<1>(upper + kTileRows, ld);
      tile_store<2>(lower, ld), tile_store<3>(lower + kTileRows, ld);
    }
  }
}

// Packs weights as the first factor of values: [32 entries][register of queries][part][query][pair of entries].
LF_INLINE void pack_weights(const float (*weights)[TilePanel::kAcross], int entries, uint32_t* to) {
  alignas(64) uint32_t part[kParts][kTileWords];
  for (int j = 0; j < entries; j += kColumns)
    for (int first = 0; first < TilePanel::kAcross; first += kTileRows, to += kParts * kTileWords) {
      for (int pair = 0; pair < kTileRows; pair++)
        for (int c = 0; c < kTileRows; c += kWidth)
          pack_pairs<kParts>(loadf(weights[j + 2 * pair] + first + c), loadf(weights[j + 2 * pair + 1] + first + c),
                             part[0] + pair * kTileRows + c, kTileWords);
      for (int p = 0; p < kParts; p++) transpose(part[p], to + p * kTileWords);
    }
}

// mixed[query] += the sum of weight * value over whole steps of entries.
template <int P>
void mix_tiles(const TileSpace& space, const uint32_t* weights, int entries, float* mixed, LatentAhead& ahead,
               int steps) {
  constexpr int64_t next_query = kParts * kTileWords;
  const int64_t ld = space.ldm() * (int64_t)sizeof(float), next_channels = P * kTileWords;
  for (int64_t c = 0; c < space.channels; c++, mixed += kColumns) {
    float* const below = mixed + kTileRows * space.ldm();
    tile_load<0>(mixed, ld), tile_load<1>(mixed + kTileRows, ld);
    tile_load<2>(below, ld), tile_load<3>(below + kTileRows, ld);
    const uint32_t *weight = weights, *value = space.values + 2 * c * next_channels;
    for (int j = 0; j < entries; j += kColumns) {
      ahead.step(steps);
      each<P>([&](auto j) LF_INLINED {
        tile_load<6>(value + j() * kTileWords, kTileBytes);
        tile_load<7>(value + next_channels + j() * kTileWords, kTileBytes);
        each<kParts - j()>([&](auto i) LF_INLINED {
          tile_load<4>(weight + i() * kTileWords, kTileBytes);
          tile_load<5>(weight + next_query + i() * kTileWords, kTileBytes);
          tile_multiply<0, 4, 6>(), tile_multiply<1, 4, 7>(), tile_multiply<2, 5, 6>(), tile_multiply<3, 5, 7>();
        });
      });
      weight += 2 * next_query, value += 2 * space.channels * next_channels;
    }
    tile_store<0>(mixed, ld), tile_store<1>(mixed + kTileRows, ld);
    tile_store<2>(below, ld), tile_store<3>(below + kTileRows, ld);
  }
}

// Multiplies the results of each query by its `shrink`. Turns -0 into 0, as adding the zero weights of entries that
// only other queries attend to would do.
LF_INLINE void shrink_mixed(const TileSpace& space, const vf (&shrink)[kPanelVectors], float* mixed) {
  for (int c = 0; c < TilePanel::kAcross; c++, mixed += space.ldm()) {
    const vf factor = splat(shrink[c / kWidth][c % kWidth]);
    for (int64_t i = 0; i < kColumns * space.channels; i += kWidth) storef(mixed + i, loadf(mixed + i) * factor + vf{});
  }
}

// Attends with panel `number` to the entries low <= t < end of a block. broken: null if all entries are finite.
template <int P>
void attend_tiles_panel(const AttendLatents& a, const TileSpace& space, TilePanel& panel, int number, int64_t low,
                        int64_t end, const bool* broken, LatentAhead& ahead, int steps) {
  const int count = panel.count(low, end), entries = (count + kColumns - 1) / kColumns * kColumns;
  if (count <= 0) return;
  alignas(64) float scores[kBlockEntries][TilePanel::kAcross];
  alignas(64) uint32_t weights[2 * kBlockSteps * kParts * kTileWords];
  vi masks[kBlockEntries][kPanelVectors];
  float* const mixed = space.mixed + number * TilePanel::kAcross * space.ldm();
  const bool all = panel.see_all(low, count, a.window);
  if (!all) panel.seen(low, count, a.window, masks);
  score_tiles<P>(space, space.queries + number * 2 * space.steps * kParts * kTileWords, entries, scores, ahead, steps);
  vf shrink[kPanelVectors];
  panel.weigh(scores, all ? nullptr : masks, count, shrink);
  for (int j = 0; j < count && broken; j++)
    for (int v = 0; v < kPanelVectors && broken[j]; v++)
      storef(scores[j] + v * kWidth, all ? splat(NAN) : select(masks[j][v], splat(NAN), vf{}));
  std::memset(scores[count], 0, (entries - count) * sizeof scores[0]);
  pack_weights(scores, entries, weights);
  shrink_mixed(space, shrink, mixed);
  mix_tiles<P>(space, weights, entries, mixed, ahead, steps);
}

template <Dtype dtype>
void attend_tiles_as(const AttendLatents& a) {
  constexpr int P = dtype == Dtype::bf16 ? 1 : kParts;
  const int64_t queries = (int64_t)a.positions * a.heads;
  const int64_t bytes = (int64_t)a.e * (dtype == Dtype::f32 ? 4 : 2);
  const TileSpace space(a, a.space);
  Configured configured;
  configured.use(kTileRows, kTileRows);
  TilePanel panels[kTilePanels];
  bool broken[kBlockEntries];
  for (int64_t group = 0; group < queries; group += laneformer::kLatentTileQueries) {
    int count = 0;
    for (int64_t first = group; first < queries && count < kTilePanels; first += TilePanel::kAcross, count++) {
      panels[count].begin(a, first, queries);
      pack_queries(a, panels[count], space, space.queries + count * 2 * space.steps * kParts * kTileWords);
    }
    std::memset(space.mixed, 0, count * TilePanel::kAcross * space.ldm() * sizeof(float));
    const int64_t newest = panels[count - 1].position[TilePanel::kAcross - 1];
    for (int64_t low = a.first; low < a.last && low <= newest; low += kBlockEntries) {
      const int64_t end = low + kBlockEntries < a.last ? low + kBlockEntries : a.last;
      int64_t stride;
      const float* const rows = latent_rows<dtype>(a, low, end, space.rows, &stride);
      const bool any_broken = pack_entries<P>(a, rows, stride, (int)(end - low), space, broken);
      LatentAhead ahead = LatentAhead::behind(a, end, bytes, kBlockEntries);
      const int steps = count * kBlockSteps * (int)(space.steps + space.channels);
      for (int n = 0; n < count; n++)
        attend_tiles_panel<P>(a, space, panels[n], n, low, end, any_broken ? broken : nullptr, ahead, steps);
    }
    for (int n = 0; n < count; n++)
      for (int c = 0; c < panels[n].used; c++) {
        const float* const mixed = space.mixed + (n * TilePanel::kAcross + c) * space.ldm();
        float* const out = a.out + panels[n].row[c] * (a.values + 2);
        for (int i = 0; i < a.values; i++) out[i] = mixed[i] + 0.0f;
        panels[n].end(c, out + a.values);
      }
  }
}

void attend_latents(const AttendLatents& a) {
  switch (a.dtype) {
    case Dtype::bf16: return attend_tiles_as<Dtype::bf16>(a);
    case Dtype::f16: return attend_tiles_as<Dtype::f16>(a);
    case Dtype::f32: return attend_tiles_as<Dtype::f32>(a);
  }
}

}  // namespace
}  // namespace LF_ISA
