// What compressed attention (DeepSeek-V4) keeps between tokens. laneformer/blocks/compressed_attention.py has the
// equations; custom_calls/cpu/ops/compressed.cc keeps the same arrays.
//
// Compressing is a separate op, which makes entries; Decoder runs it between the two products of the queries. A task
// has some channels of all rows' entries, and of the ring of vectors and gates that wait for the rest of their entry.
// It publishes sums before their norm, which needs all channels, so every reader applies the norm. Only the task's CTA
// reads its part of the ring, and the ring has room for the rows of a pass, so no row overwrites what another reads.
//
// CompressedRows is the base of the classes that attend. Vectors and entries that a pass adds are on boards, from which
// the pass's tasks take them; `keep` writes them to the caches at the end of the op.
#pragma once

#include "attention.h"

namespace laneformer {
namespace gpu {

// Rotates the last `rotating` of x's n channels, by one warp.
template <int n, int rotating>
LF_DEVICE void rotate_last(float* x, const float* rotation) {
  constexpr int half = rotating / 2;
  for (int i = opaque(warp_lane()); i < half; i += kWarpSize) {
    float* pair = x + n - rotating + 2 * i;
    const float even = pair[0], odd = pair[1], cosine = rotation[i], sine = rotation[half + i];
    pair[0] = fma(even, cosine, -(odd * sine));
    pair[1] = fma(even, sine, odd * cosine);
  }
}

// The op that makes a pass's entries and keeps what waits for the rest of an entry.
template <class Op, int most = 1>
struct Compressing {
  using Entries = typename Op::Entries;
  using Keys = typename Op::Keys;

  template <class Own>
  static constexpr int kTiles = (Own::kChannels + kWarpSize - 1) / kWarpSize;
  static constexpr int kFloats = Entries::kGiven ? 3 * kThreads : 0, kMerged = 0;

  const Params& p;
  u64* boards_of_first;  // the boards of the pass's first row
  float* scratch;
  Watch& watch;
  int lane_here, layer;
  Run<most> pass;
  u32 tag;

  LF_DEVICE void run(int cta) const {
    constexpr int tasks = kTiles<Entries> + kTiles<Keys>;
    if constexpr (Entries::kGiven) {
      for (int task = cta; task < tasks; task += kCtas) {
        if (task < kTiles<Entries>) {
          compress<Entries>(task);
        } else if constexpr (Keys::kGiven) {
          compress<Keys>(task - kTiles<Entries>);
        }
      }
      if (cta == tasks % kCtas && thread() == 0) {
        int* const base = (int*)p.caches[Op::cache(layer)];
        for (int m = 0; m < pass.count(); m++)
          if (m == pass.first_of(m)) base[kept_part(lane_here, pass.slot_of(m))] = pass.start_of(m);
      }
    }
  }

 private:
  static constexpr float kMinusInfinity = -1e30f;

  // Makes a tile of the channels of all rows' entries. Thread i of every warp has channel i of the tile; the warps
  // divide the positions of an entry.
  template <class Own>
  LF_DEVICE void compress(int tile) const {
    constexpr int n = Own::kChannels, width = Own::kWidth, parts = 2 * width / n, window = Own::kEarlier + 1;
    const int own = tile * kWarpSize + opaque(warp_lane()), c = smaller(own, n - 1);
    const auto ring = [&](int m, int position) {
      return (float*)p.caches[Op::cache(layer) + Own::kArray + 1] +
             ((i64)kept_part(lane_here, pass.slot_of(m)) * Own::kTail + position % Own::kTail) * (2 * width) + c;
    };
    for (int i = same_in_warp(opaque(warp())); i < pass.count() * parts; i += kWarps) {
      const int m = i / parts, at = i % parts * n;
      const u64* word = boards_of_first + Op::kFrom + (i64)m * kLaneWords + Own::kFirst + at + c;
      const float value = wait_for(word, tag, watch, kAtVector, Own::kFirst + at + c);
      if (own < n) ring(m, pass.position_of(m))[at] = value;
    }
    sync_cta();
    const float* biases = p.small + Own::biases(layer) + (i64)(p.first_lane + lane_here) * Own::kBiasesStride + c;
    for (int m = 0; m < pass.count(); m++) {
      const int end = pass.position_of(m) + 1;
      if (end % Own::kRatio != 0) continue;
      const int first = larger(0, end - window), count = end - first;
      float top = kMinusInfinity, total = 0, sum = 0;
      constexpr int each = 4;
      for (int i0 = same_in_warp(opaque(warp())); i0 < count; i0 += kWarps * each) {
        float value[each], gate[each], now = top;
        LF_UNROLL for (int j = 0; j < each; j++) {
          const int i = i0 + j * kWarps, t = first + smaller(i, count - 1);
          const int half = width > n && t >= end - Own::kRatio ? n : 0;
          const float* row = ring(m, t) + half;
          value[j] = load_between_ctas(row);
          gate[j] = load_between_ctas(row + width) + biases[t % Own::kRatio * width + half];
          if (i < count) now = larger(now, gate[j]);
        }
        const float keep = exp_of(top - now);
        total *= keep, sum *= keep, top = now;
        LF_UNROLL for (int j = 0; j < each; j++) {
          if (i0 + j * kWarps >= count) continue;
          const float weight = exp_of(gate[j] - now);
          total += weight, sum = fma(weight, value[j], sum);
        }
      }
      float* sums = scratch + opaque(thread());
      sums[0] = top, sums[kThreads] = total, sums[2 * kThreads] = sum;
      sync_cta();
      if (warp() == 0) publish<Own>(m, own);
      sync_cta();
    }
  }

  // Merges the sums of the warps, in their order, and publishes the tile's channels of an entry.
  template <class Own>
  LF_DEVICE void publish(int m, int own) const {
    const float* first = scratch + opaque(warp_lane());
    float top = kMinusInfinity, total = 0, sum = 0;
    LF_UNROLL for (int w = 0; w < kWarps; w++) top = larger(top, first[w * kWarpSize]);
    LF_UNROLL for (int w = 0; w < kWarps; w++) {
      const float *sums = first + w * kWarpSize, keep = exp_of(sums[0] - top);
      total = fma(keep, sums[kThreads], total), sum = fma(keep, sums[2 * kThreads], sum);
    }
    watch.delay();
    u64* board = boards_of_first + Op::kTo + (i64)m * kLaneWords + Own::kPlace;
    if (own < Own::kChannels) store_word(board + own, word_of(sum / total, tag));
  }
};

// What the rows of a pass attend to and keep, and the shared memory of attention and index.
template <class Op, int most>
struct CompressedRows {
  using Keep = typename Op::Keep;
  using Entries = typename Keep::Entries;
  using Keys = typename Keep::Keys;
  using Splitting = Attention<Op, most>;

  static constexpr bool kIndexed = Keys::kGiven;
  static constexpr int kHeads = Op::kHeads, kHeadDim = Op::kKeyDim, kGroupHeads = kHeads / Op::kGroups,
                       kRotating = Op::kRotating;
  static constexpr int kRatio = Entries::kRatio;
  static constexpr int kNewEntries = Entries::kGiven ? (most - 1) / kRatio + 1 : 0;  // of a pass in a slot, at most
  static constexpr int kOwn = Splitting::kOwn, kHeadsAtOnce = Splitting::kHeadsAtOnce,
                       kKeyThreads = Splitting::kKeyThreads, kKeysAtOnce = Splitting::kKeysAtOnce;

  // Shared memory of a task, in floats: queries, new positions and entries, sums of the warps.
  static constexpr int kNewAt = kGroupHeads * kHeadDim, kSumsAt = kNewAt + (most + kNewEntries) * kHeadDim;
  static constexpr int kTaskFloats = kSumsAt + kWarps * kHeadsAtOnce * (kHeadDim + 2);
  // Of scores: queries, whose heads begin in different banks, weights, new keys, and the keys of each warp.
  static constexpr int kIndexHeads = Op::kIndexHeads, kIndexChannels = Op::kIndexChannels,
                       kIndexStride = kIndexChannels + 1 - kIndexChannels % 2, kWarpKeys = 4;
  static constexpr int kWeightsAt = kIndexHeads * kIndexStride, kFreshAt = kWeightsAt + kIndexHeads,
                       kWarpsAt = kFreshAt + kNewEntries * kIndexChannels,
                       kScoreFloats = kWarpsAt + kWarps * kWarpKeys * kIndexChannels;
  // Of the choice: a histogram, sums of the warps, the result of a digit, and the scores' places if they are few.
  static constexpr int kDigit = 11, kBuckets = 1 << kDigit;
  static constexpr int kCountsAt = 2 * kBuckets, kFoundAt = kCountsAt + 2 * kWarps, kPlacesAt = kFoundAt + 2,
                       kLeastPlaces = 32;
  static constexpr int kLargest = larger_of(kTaskFloats, larger_of(kScoreFloats, kPlacesAt + kLeastPlaces));
  static constexpr int kListAt = kIndexed ? kLargest : kTaskFloats, kPlaces = kListAt - kPlacesAt;
  static constexpr int kFloats = kListAt + (kIndexed ? Op::kMostListed : 0);

  const Params& p;
  u64* boards_of_first;  // the boards of the pass's first row
  float* scratch;
  Watch& watch;
  int lane_here, layer;
  Run<most> pass;
  u32 tag;

  // The keys of row m, `keys` in all: `positions` positions from `oldest` on, then entries. `closed` entries are
  // complete; chosen: the index has chosen among them.
  struct Seen {
    int oldest, positions, closed, keys;
    bool chosen;
  };
  LF_DEVICE Seen seen(int m) const {
    const int end = pass.position_of(m) + 1, oldest = larger(0, end - Op::kWindow);
    const int closed = Entries::kGiven ? end / kRatio : 0;
    const bool chosen = kIndexed && closed > Op::kIndexMost;
    return {oldest, end - oldest, closed, end - oldest + (chosen ? Op::kIndexMost : closed), chosen};
  }

  LF_DEVICE const u64* board(int m, int at) const { return boards_of_first + at + (i64)m * kLaneWords; }
  LF_DEVICE const float* small(int offset, int stride) const {
    return p.small + offset + (i64)(p.first_lane + lane_here) * stride;
  }
  // The slot's part of the layer's kept array of that number: a vector of `channels` for each `every` positions.
  LF_DEVICE char* kept(int array, int m, int channels, int every) const {
    const i64 each = (p.capacity + every - 1) / every * channels * Splitting::kKvBytes;
    return (char*)p.caches[Op::cache(layer) + array] + kept_part(lane_here, pass.slot_of(m)) * each;
  }
  LF_DEVICE char* positions(int m) const { return kept(Keep::kArray, m, kHeadDim, 1); }
  template <class Own>
  LF_DEVICE char* entries(int m) const {
    return kept(Own::kArray, m, Own::kChannels, Own::kRatio);
  }
  // first_new_entry: the first entry that rows of the pass may complete. row_of_entry: the row that completes an entry.
  LF_DEVICE int first_new_entry(int m) const { return pass.start_of(m) / kRatio; }
  LF_DEVICE int row_of_entry(int m, int entry) const {
    return pass.first_of(m) + (entry + 1) * kRatio - 1 - pass.start_of(m);
  }

  // Norms and rotates a vector in shared memory and rounds it to the cache's dtype, by one warp.
  template <class Own>
  LF_DEVICE void finish(float* x, int position) const {
    constexpr int n = Own::kChannels;
    const float* gains = small(Own::norm(layer), Own::kNormStride);
    float sum = 0;
    for (int i = opaque(warp_lane()); i < n; i += kWarpSize) sum = fma(x[i], x[i], sum);
    const float factor = rsqrt_of(sum_over_warp(sum) / (float)n + Own::kNormEps);
    for (int i = opaque(warp_lane()); i < n; i += kWarpSize) x[i] *= factor * gains[i];
    sync_warp();
    rotate_last<n, Own::kRotating>(x, p.rotations + Own::kRotations + (i64)position * Own::kRotating);
    sync_warp();
    for (int i = opaque(warp_lane()); i < n; i += kWarpSize) x[i] = rounded_to<kCache>(x[i]);
  }

  // Writes the vectors that the rows add to the caches; one CTA writes each.
  LF_DEVICE void keep(int cta) const {
    const auto is_own = [&](int m, int kind) { return cta == (3 * m + kind) % kCtas; };
    for (int m = 0; m < pass.count(); m++) {
      const int position = pass.position_of(m), entry = position / kRatio;
      if (is_own(m, 0)) keep_one<Keep>(board(m, Keep::kFrom), position, positions(m), position);
      if (!Entries::kGiven || (position + 1) % kRatio != 0) continue;
      if constexpr (Entries::kGiven) {
        if (is_own(m, 1))
          keep_one<Entries>(board(m, Keep::kTo + Entries::kPlace), entry * kRatio, entries<Entries>(m), entry);
      }
      if constexpr (kIndexed) {
        if (is_own(m, 2)) keep_one<Keys>(board(m, Keep::kTo + Keys::kPlace), entry * kRatio, entries<Keys>(m), entry);
      }
    }
  }

  // Finishes the vector on a board and writes it to a cache as vector `number`.
  template <class Own>
  LF_DEVICE void keep_one(const u64* words, int position, char* cache, i64 number) const {
    constexpr int n = Own::kChannels;
    gather<kThreads>(words, n, tag, scratch, watch, kAtAttention);
    sync_cta();
    if (warp() == 0) finish<Own>(scratch, position);
    sync_cta();
    for (int i = opaque(thread()); i < n; i += kThreads) put_element<kCache>(cache, number * n + i, scratch[i]);
    sync_cta();
  }
};

}  // namespace gpu
}  // namespace laneformer
