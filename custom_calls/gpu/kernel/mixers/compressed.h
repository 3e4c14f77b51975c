// Compressed attention (DeepSeek-V4), as on the CPU: laneformer/blocks/compressed_attention.py has the equations,
// custom_calls/cpu/ops/compressed.cc keeps the same arrays. A row sees one list of keys, which are values too: the
// newest positions, then entries, all that are complete or those that the index has chosen.
//
// Entries are made in their own op, which waits for what is projected while queries are computed: a task has some
// channels of all rows' entries, and of the ring of vectors and gates that wait for their window. It publishes sums
// before their norm, which every reader applies. Only that CTA reads the ring, and no row of a pass overwrites what
// another one reads: the ring has room for them.
//
// Attention has up to three edges: scores of entries, shared out over the CTAs of a lane; parts of the keys, as in
// attention.h; and the heads' results, each channel merged and rotated back by one thread. A task with chosen entries
// finds them itself, from the scores of all. What a pass adds to the caches is written at the end, when the CTA would
// wait: until then it is on boards, from which tasks take it.
#pragma once

#include "attention.h"
#include "experts.h"

namespace laneformer {
namespace gpu {

// The last channels of x, which turn, by a warp.
template <int n, int rotating>
LF_DEVICE void rotate_last(float* x, const float* rotation) {
  constexpr int half = rotating / 2;
  for (int i = warp_lane(); i < half; i += kWarpSize) {
    float* pair = x + n - rotating + 2 * i;
    const float even = pair[0], odd = pair[1], cosine = rotation[i], sine = rotation[half + i];
    pair[0] = even * cosine - odd * sine;
    pair[1] = even * sine + odd * cosine;
  }
}

// Entries of a pass and what waits for them.
template <class Op, int most = 1>
struct Compressing {
  using Entries = typename Op::Entries;
  using Keys = typename Op::Keys;

  template <class Own>
  static constexpr int kTiles = (Own::kChannels + kWarpSize - 1) / kWarpSize;
  static constexpr int kFloats = Entries::kGiven ? 3 * kThreads : 0, kMerged = 0;

  const Params& p;
  u64* boards_of_first;  // of the first row
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

  // Those channels of the rows, each a thread's of every warp; the warps share the positions of an entry.
  template <class Own>
  LF_DEVICE void compress(int tile) const {
    constexpr int n = Own::kChannels, width = Own::kWidth, parts = 2 * width / n, window = Own::kEarlier + 1;
    const int own = tile * kWarpSize + opaque(warp_lane()), c = smaller(own, n - 1);
    const auto ring = [&](int m, int position) {
      return (float*)p.caches[Op::cache(layer) + Own::kArray + 1] +
             ((i64)kept_part(lane_here, pass.slot_of(m)) * Own::kTail + position % Own::kTail) * (2 * width) + c;
    };
    for (int i = warp(); i < pass.count() * parts; i += kWarps) {
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
      for (int i0 = warp(); i0 < count; i0 += kWarps * each) {
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
          total += weight, sum += weight * value[j];
        }
      }
      float* sums = scratch + thread();
      sums[0] = top, sums[kThreads] = total, sums[2 * kThreads] = sum;
      sync_cta();
      if (warp() == 0) publish<Own>(m, own);
      sync_cta();
    }
  }

  // Over the warps, in their order.
  template <class Own>
  LF_DEVICE void publish(int m, int own) const {
    float top = kMinusInfinity, total = 0, sum = 0;
    LF_UNROLL for (int w = 0; w < kWarps; w++) top = larger(top, scratch[w * kWarpSize + warp_lane()]);
    LF_UNROLL for (int w = 0; w < kWarps; w++) {
      const float *sums = scratch + w * kWarpSize + warp_lane(), keep = exp_of(sums[0] - top);
      total += keep * sums[kThreads], sum += keep * sums[2 * kThreads];
    }
    watch.delay();
    u64* board = boards_of_first + Op::kTo + (i64)m * kLaneWords + Own::kPlace;
    if (own < Own::kChannels) store_word(board + own, word_of(sum / total, tag));
  }
};

template <class Op, int most = 1>
struct CompressedAttention {
  using Keep = typename Op::Keep;
  using Entries = typename Keep::Entries;
  using Keys = typename Keep::Keys;
  using Splitting = Attention<Op, most>;
  using Pieces = typename Splitting::Pieces;

  static constexpr bool kIndexed = Keys::kGiven;
  static constexpr int kHeads = Op::kHeads, kHeadDim = Op::kKeyDim, kGroupHeads = kHeads / Op::kGroups,
                       kRotating = Op::kRotating;
  static constexpr int kRatio = Entries::kRatio;
  static constexpr int kNewEntries = Entries::kGiven ? (most - 1) / kRatio + 1 : 0;  // of a pass, in a slot
  static constexpr int kOwn = Splitting::kOwn, kHeadsAtOnce = Splitting::kHeadsAtOnce,
                       kKeyThreads = Splitting::kKeyThreads, kKeysAtOnce = Splitting::kKeysAtOnce;

  // Shared memory of a task, in floats: queries, new positions and entries, sums of the warps.
  static constexpr int kNewAt = kGroupHeads * kHeadDim, kSumsAt = kNewAt + (most + kNewEntries) * kHeadDim;
  static constexpr int kTaskFloats = kSumsAt + kWarps * kHeadsAtOnce * (kHeadDim + 2);
  // Of scores: queries, whose heads begin in different banks, weights, new keys, and those that a warp has.
  static constexpr int kIndexHeads = Op::kIndexHeads, kIndexChannels = Op::kIndexChannels,
                       kIndexStride = kIndexChannels + 1 - kIndexChannels % 2, kWarpKeys = 4;
  static constexpr int kWeightsAt = kIndexHeads * kIndexStride, kFreshAt = kWeightsAt + kIndexHeads,
                       kWarpsAt = kFreshAt + kNewEntries * kIndexChannels,
                       kScoreFloats = kWarpsAt + kWarps * kWarpKeys * kIndexChannels;
  // Of the choice: a histogram, sums of the warps, what is found, and the scores if they are few.
  static constexpr int kDigit = 11, kBuckets = 1 << kDigit;
  static constexpr int kCountsAt = 2 * kBuckets, kFoundAt = kCountsAt + 2 * kWarps, kPlacesAt = kFoundAt + 2,
                       kLeastPlaces = 32;
  static constexpr int kLargest = larger_of(kTaskFloats, larger_of(kScoreFloats, kPlacesAt + kLeastPlaces));
  static constexpr int kListAt = kIndexed ? kLargest : kTaskFloats, kPlaces = kListAt - kPlacesAt;
  static constexpr int kFloats = kListAt + (kIndexed ? Op::kMostListed : 0);
  static constexpr int kMerged = 0;

  const Params& p;
  u64* boards_of_first;  // of the first row
  float* scratch;
  Watch& watch;
  int lane_here, layer;
  Run<most> pass;
  u32 tag;

  // Keys of row m, by number: positions from `oldest` on, then entries.
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
  LF_DEVICE static Splits splits_of(int keys) {
    const int wanted = smaller((keys + Op::kLeastKeys - 1) / Op::kLeastKeys, Op::kMaxSplits);
    const int size = (keys + wanted - 1) / wanted;
    return {0, size, (keys + size - 1) / size};
  }

  LF_DEVICE void run(int cta) const {
    if constexpr (kIndexed) score(cta);
    int before = 0;  // tasks of the rows before
    for (int m = 0; m < pass.count(); m++) {
      const Splits splits = splits_of(seen(m).keys);
      const int first = most == 1 ? cta : (cta + kCtas - before % kCtas) % kCtas;
      for (int task = first; task < Op::kGroups * splits.count; task += kCtas) {
        run_task(m, task % Op::kGroups, task / Op::kGroups, splits.size);
        sync_cta();  // before the next one overwrites the scratch
      }
      before += Op::kGroups * splits.count;
    }
    merge(cta);
    keep(cta);
  }

 private:
  static constexpr float kLog2OfE = 1.44269504f;

  LF_DEVICE const u64* board(int m, int at) const { return boards_of_first + at + (i64)m * kLaneWords; }
  LF_DEVICE const float* small(int offset, int stride) const {
    return p.small + offset + (i64)(p.first_lane + lane_here) * stride;
  }
  // What the layer keeps, its array of that number: one vector for each `every` positions.
  LF_DEVICE char* kept(int array, int m, int channels, int every) const {
    const i64 each = (p.capacity + every - 1) / every * channels * Splitting::kKvBytes;
    return (char*)p.caches[Op::cache(layer) + array] + kept_part(lane_here, pass.slot_of(m)) * each;
  }
  LF_DEVICE char* positions(int m) const { return kept(Keep::kArray, m, kHeadDim, 1); }
  template <class Own>
  LF_DEVICE char* entries(int m) const {
    return kept(Own::kArray, m, Own::kChannels, Own::kRatio);
  }
  // Entries from this one on are those that rows of the pass complete, and the row that completes one.
  LF_DEVICE int first_new_entry(int m) const { return pass.start_of(m) / kRatio; }
  LF_DEVICE int row_of_entry(int m, int entry) const {
    return pass.first_of(m) + (entry + 1) * kRatio - 1 - pass.start_of(m);
  }

  // Norm and rotation of a vector in shared memory, as it will be read from the cache, by a warp.
  template <class Own>
  LF_DEVICE void finish(float* x, int position) const {
    constexpr int n = Own::kChannels;
    const float* gains = small(Own::norm(layer), Own::kNormStride);
    float sum = 0;
    for (int i = warp_lane(); i < n; i += kWarpSize) sum += x[i] * x[i];
    const float factor = rsqrt_of(sum_over_warp(sum) / (float)n + Own::kNormEps);
    for (int i = warp_lane(); i < n; i += kWarpSize) x[i] *= factor * gains[i];
    sync_warp();
    rotate_last<n, Own::kRotating>(x, p.rotations + Own::kRotations + (i64)position * Own::kRotating);
    sync_warp();
    for (int i = warp_lane(); i < n; i += kWarpSize) x[i] = rounded_to<kCache>(x[i]);
  }

  // ---- the index

  struct Padded {  // where heads begin at odd distances
    LF_DEVICE int operator()(int i) const { return i + i / kIndexChannels * (kIndexStride - kIndexChannels); }
  };

  // Of each row that sees only some entries, those of the CTA.
  LF_DEVICE void score(int cta) const {
    constexpr int n = kIndexChannels;
    for (int m = 0; m < pass.count(); m++) {
      const Seen seen = this->seen(m);
      const int each = (seen.closed + kCtas - 1) / kCtas, first = cta * each, last = smaller(first + each, seen.closed);
      if (!seen.chosen || first >= last) continue;
      const int old = first_new_entry(m), fresh = larger(old, first);
      float *queries = scratch, *weights = scratch + kWeightsAt, *news = scratch + kFreshAt;
      gather<kThreads>(board(m, Op::kIndex), kIndexHeads * n, tag, queries, watch, kAtAttention, InOrder{}, Padded{});
      gather<kThreads>(board(m, Keep::kFrom + Op::kIndexFirst), kIndexHeads, tag, weights, watch, kAtAttention);
      for (int entry = fresh; entry < last; entry++)
        gather<kThreads>(board(row_of_entry(m, entry), Keep::kTo + Keys::kPlace), n, tag, news + (entry - old) * n,
                         watch, kAtAttention);
      sync_cta();
      for (int h = warp(); h < kIndexHeads + larger(0, last - fresh); h += kWarps) {
        if (h < kIndexHeads) {
          rotate_last<n, kRotating>(queries + h * kIndexStride,
                                    p.rotations + Op::kRotations + (i64)pass.position_of(m) * kRotating);
        } else {
          const int entry = fresh + h - kIndexHeads;
          finish<Keys>(news + (entry - old) * n, entry * kRatio);
        }
      }
      sync_cta();
      watch.delay();
      for (int from = first + warp() * kWarpKeys; from < last; from += kWarps * kWarpKeys)
        score_keys(m, from, last, old);
      sync_cta();
    }
  }

  // A few keys by a warp, whose threads have some of the heads each.
  LF_DEVICE void score_keys(int m, int from, int last, int old) const {
    constexpr int n = kIndexChannels;
    float* keys = scratch + kWarpsAt + warp() * kWarpKeys * n;  // [channels][keys]
    const char* const cache = entries<Keys>(m);
    for (int c = warp_lane(); c < n; c += kWarpSize) {
      LF_UNROLL for (int j = 0; j < kWarpKeys; j++) {
        const int entry = smaller(from + j, last - 1);
        keys[c * kWarpKeys + j] = entry >= old ? scratch[kFreshAt + (entry - old) * n + c]
                                               : element_between_ctas<kCache>(cache, (i64)entry * n + c);
      }
    }
    sync_warp();
    float sums[kWarpKeys] = {};
    for (int h = warp_lane(); h < kIndexHeads; h += kWarpSize) {
      const float *query = scratch + h * kIndexStride, weight = scratch[kWeightsAt + h];
      float scores[kWarpKeys] = {};
      for (int c = 0; c < n; c++) {
        LF_UNROLL for (int j = 0; j < kWarpKeys; j++) scores[j] += query[c] * keys[c * kWarpKeys + j];
      }
      LF_UNROLL for (int j = 0; j < kWarpKeys; j++) sums[j] += weight * larger(0.0f, scores[j]);  // a NaN stays one
    }
    LF_UNROLL for (int j = 0; j < kWarpKeys; j++) {
      const float sum = sum_over_warp(sums[j]);
      if (warp_lane() == j && from + j < last)
        store_word(const_cast<u64*>(board(m, kScoresBoard)) + from + j, word_of(sum, tag));
    }
    sync_warp();
  }

  // ---- the choice

  // Calls body(number, place) for scores of the thread in the order of all: place_of is larger for larger ones.
  template <class Body>
  LF_DEVICE void each_score(const u64* scores, int count, Body body) const {
    constexpr int each = 8;
    const int own = opaque(thread());
    for (int first = 0; first < count; first += kThreads * each) {
      float values[each];
      bool all;
      u32 spins = 0;
      do {
        all = true;
        LF_UNROLL for (int i = 0; i < each; i++) {
          const int at = first + i * kThreads + own;
          const u64 word = load_word(scores + smaller(at, count - 1));
          values[i] = value_of(word);
          all = all && arrived(word, tag);
        }
      } while (!all && watch.keep_waiting(spins, kAtAttention, first));
      LF_UNROLL for (int i = 0; i < each; i++) {
        const int at = first + i * kThreads + own;
        if (at < count) body(at, place_of(values[i]));
      }
    }
  }

  // The sum of what the warp's threads up to this one have.
  LF_DEVICE static u32 sum_up_to(u32 v) {
    LF_UNROLL for (int step = 1; step < kWarpSize; step *= 2) {
      const u32 before = shuffle_from(v, larger(0, warp_lane() - step));
      if (warp_lane() >= step) v += before;
    }
    return v;
  }

  // Into the list: of the chosen entries, in the order of their numbers, those from `first` to `last`.
  LF_DEVICE void choose(int m, int count, int first, int last) const {
    u64* const histogram = (u64*)scratch;
    u32 *const sums = (u32*)scratch + kCountsAt, *const found = (u32*)scratch + kFoundAt,
               *const places = (u32*)scratch + kPlacesAt;
    int* const list = (int*)scratch + kListAt;
    const u64* const scores = board(m, kScoresBoard);
    const bool few = count <= kPlaces;
    if (few) each_score(scores, count, [&](int i, u32 place) { places[i] = place; });
    for (int i = opaque(thread()); i < last - first; i += kThreads) list[i] = 0;  // of a pass that has failed

    // The place of the last one that is chosen, digit by digit, and how many of that place are.
    u32 chosen = 0, left = Op::kIndexMost;
    for (int shift = 32 - kDigit, bits = kDigit;; bits = smaller(kDigit, shift), shift -= bits) {
      sync_cta();
      for (int i = opaque(thread()); i < kBuckets; i += kThreads) histogram[i] = 0;
      sync_cta();
      const u32 digits = (1u << bits) - 1, above = ~(digits << shift | ((1u << shift) - 1));
      const auto count_one = [&](int, u32 place) {
        if (((place ^ chosen) & above) == 0) add_shared(histogram + (place >> shift & digits), 1);
      };
      if (few) {
        for (int i = opaque(thread()); i < count; i += kThreads) count_one(i, places[i]);
      } else {
        each_score(scores, count, count_one);
      }
      sync_cta();
      // Threads have buckets one after the other, the first one the highest.
      constexpr int each = (kBuckets + kThreads - 1) / kThreads;
      u32 own = 0;
      const int highest = kBuckets - 1 - opaque(thread()) * each;
      for (int i = 0; i < each; i++) own += highest - i >= 0 ? (u32)histogram[highest - i] : 0u;
      u32 before = sum_up_to(own);
      if (warp_lane() == kWarpSize - 1) sums[warp()] = before;
      before -= own;
      sync_cta();
      for (int w = 0; w < warp(); w++) before += sums[w];
      if (before < left && left <= before + own) {
        int bucket = highest;
        for (; before + (u32)histogram[bucket] < left; bucket--) before += (u32)histogram[bucket];
        found[0] = (u32)bucket, found[1] = left - before;
      }
      sync_cta();
      chosen |= found[0] << shift, left = found[1];
      if (shift == 0) break;
    }

    // Each warp has a stretch of the entries: how many are above that place, and how many on it.
    constexpr int each = 4;
    const int stretch = (count + kThreads * each - 1) / (kThreads * each) * kWarpSize * each;
    const int begin = warp() * stretch, end = smaller(begin + stretch, count);
    const auto each_of_stretch = [&](auto body) {
      for (int from = begin; from < end; from += kWarpSize * each) {
        u32 own[each];
        LF_UNROLL for (int i = 0; i < each; i++) {
          const int at = smaller(from + i * kWarpSize + warp_lane(), count - 1);
          own[i] = few ? places[at] : place_of(value_of(load_word(scores + at)));
        }
        LF_UNROLL for (int i = 0; i < each; i++) {
          const int at = from + i * kWarpSize + warp_lane();
          body(at, at < end && own[i] > chosen, at < end && own[i] == chosen);
        }
      }
    };
    u32 above = 0, equal = 0;
    each_of_stretch([&](int, bool is_above, bool is_equal) { above += is_above, equal += is_equal; });
    above = sum_up_to(above), equal = sum_up_to(equal);
    if (warp_lane() == kWarpSize - 1) sums[2 * warp()] = above, sums[2 * warp() + 1] = equal;
    sync_cta();
    above = equal = 0;
    for (int w = 0; w < warp(); w++) above += sums[2 * w], equal += sums[2 * w + 1];
    each_of_stretch([&](int at, bool is_above, bool is_equal) {
      const u32 own = (u32)is_above << 16 | (u32)is_equal, up_to = sum_up_to(own);
      const u32 equal_before = equal + (up_to & 0xffff) - is_equal;
      const int rank = (int)(above + (up_to >> 16) - is_above + (equal_before < left ? equal_before : left));
      if ((is_above || (is_equal && equal_before < left)) && rank >= first && rank < last) list[rank - first] = at;
      const u32 all = broadcast(up_to, kWarpSize - 1);
      above += all >> 16, equal += all & 0xffff;
    });
    sync_cta();
  }

  // ---- attention

  LF_DEVICE void run_task(int m, int group, int split, int size) const {
    const Seen seen = this->seen(m);
    const int first = split * size, last = smaller(first + size, seen.keys), start = pass.start_of(m),
              old = Entries::kGiven ? first_new_entry(m) : 0;
    const int first_entry = larger(0, first - seen.positions), last_entry = last - seen.positions;
    const char *const of_positions = positions(m), *of_entries = nullptr;
    if constexpr (Entries::kGiven) of_entries = entries<Entries>(m);
    [[maybe_unused]] const int* const list = (const int*)scratch + kListAt;
    if constexpr (kIndexed) {
      if (seen.chosen && last_entry > 0) choose(m, seen.closed, first_entry, last_entry);
    }
    const auto entry_of = [&](int key) {
      const int number = key - seen.positions;
      if constexpr (kIndexed) return seen.chosen ? list[number - first_entry] : number;
      return number;
    };
    const auto load = [&](int key, Pieces& out) {
      key = smaller(key, last - 1);
      if (!Entries::kGiven || key < seen.positions) {
        Splitting::load(of_positions, seen.oldest + key, 0, out);
      } else {
        Splitting::load(of_entries, entry_of(key), 0, out);
      }
    };

    // The first keys are on their way before the queries arrive. Those that a thread has none of are read and not used.
    const int lane_key = opaque(warp() * (kWarpSize / kKeyThreads) + warp_lane() / kKeyThreads);
    int key = first + lane_key;
    Pieces k;
    load(key, k);

    // Keys that are not in the cache yet: of positions from `from` on, and entries from `old` on.
    float *heads = scratch, *news = scratch + kNewAt, *new_entries = news + most * kHeadDim;
    const int from = larger(start, seen.oldest + first), until = seen.oldest + smaller(last, seen.positions);
    for (int t = from; t < until; t++)
      gather<kThreads>(board(pass.first_of(m) + t - start, Keep::kFrom), kHeadDim, tag, news + (t - from) * kHeadDim,
                       watch, kAtAttention);
    const int entries_until = last_entry > 0 && entry_of(last - 1) >= old ? seen.closed : old;
    if constexpr (Entries::kGiven) {
      for (int entry = old; entry < entries_until; entry++)
        gather<kThreads>(board(row_of_entry(m, entry), Keep::kTo + Entries::kPlace), kHeadDim, tag,
                         new_entries + (entry - old) * kHeadDim, watch, kAtAttention);
    }
    const int first_head = group * kGroupHeads;
    gather<kThreads>(board(m, Op::kFrom) + first_head * kHeadDim, kGroupHeads * kHeadDim, tag, heads, watch,
                     kAtAttention);
    sync_cta();
    const int new_positions = larger(0, until - from);
    for (int h = warp(); h < kGroupHeads + new_positions + entries_until - old; h += kWarps) {
      if (h < kGroupHeads) {
        finish_query(heads + h * kHeadDim, pass.position_of(m));
      } else if (h < kGroupHeads + new_positions) {
        const int i = h - kGroupHeads;
        finish<Keep>(news + i * kHeadDim, from + i);
      } else if constexpr (Entries::kGiven) {
        const int i = h - kGroupHeads - new_positions;
        finish<Entries>(new_entries + i * kHeadDim, (old + i) * kRatio);
      }
    }
    sync_cta();

    const Splitting splitting = {p, boards_of_first, scratch, watch, lane_here, layer, pass, tag};
    float* sums = scratch + kSumsAt;
    for (int h0 = 0; h0 < kGroupHeads; h0 += kHeadsAtOnce) {
      float largest[kHeadsAtOnce], weight[kHeadsAtOnce], sum[kHeadsAtOnce][kOwn];
      LF_UNROLL for (int h = 0; h < kHeadsAtOnce; h++) {
        largest[h] = Splitting::kMinusInfinity;
        weight[h] = 0;
        LF_UNROLL for (int i = 0; i < kOwn; i++) sum[h][i] = 0;
      }
      if (h0 > 0) {
        key = first + lane_key;
        load(key, k);
      }
      // All threads of a warp make the same number of turns: they shuffle.
      for (int turn = first; turn < last; turn += kKeysAtOnce) {
        Pieces next;
        load(key + kKeysAtOnce, next);
        float own[kOwn], score[kHeadsAtOnce];
        Splitting::unpack_pieces(k, own);
        if (key < last) {
          if (!Entries::kGiven || key < seen.positions) {
            if (seen.oldest + key >= start) Splitting::own_part(news + (seen.oldest + key - from) * kHeadDim, own);
          } else {
            const int entry = entry_of(key);
            if (entry >= old) Splitting::own_part(new_entries + (entry - old) * kHeadDim, own);
          }
        }
        Splitting::score_key(heads, h0, own, score);
        if (key < last) Splitting::add_value(score, own, largest, weight, sum);
        key += kKeysAtOnce;
        k = next;
      }
      Splitting::merge_warp(largest, weight, sum);
      LF_UNROLL for (int h = 0; h < kHeadsAtOnce; h++) {
        float* out = sums + (warp() * kHeadsAtOnce + h) * (kHeadDim + 2);
        if (warp_lane() < kKeyThreads) {
          LF_UNROLL for (int i = 0; i < kOwn; i++) {
            const int element = Splitting::own_element(i);
            if (element < kHeadDim) out[element] = sum[h][i];
          }
        }
        if (warp_lane() == 0) out[kHeadDim] = largest[h], out[kHeadDim + 1] = weight[h];
      }
      sync_cta();
      splitting.publish(splitting.parts(m), first_head + h0, smaller(kHeadsAtOnce, kGroupHeads - h0), split, sums);
      if (h0 + kHeadsAtOnce < kGroupHeads) sync_cta();
    }
  }

  // Over its root mean square, rotated and scaled, by a warp.
  LF_DEVICE void finish_query(float* x, int position) const {
    float sum = 0;
    for (int i = warp_lane(); i < kHeadDim; i += kWarpSize) sum += x[i] * x[i];
    const float factor = rsqrt_of(sum_over_warp(sum) / (float)kHeadDim + Op::kNormEps) * Op::kScale;
    for (int i = warp_lane(); i < kHeadDim; i += kWarpSize) x[i] *= factor;
    sync_warp();
    rotate_last<kHeadDim, kRotating>(x, p.rotations + Op::kRotations + (i64)position * kRotating);
  }

  // The heads' results of the CTA's channels, for all CTAs of the lane.
  LF_DEVICE void merge(int cta) const {
    constexpr int all = kHeads * kHeadDim, each = (all + kCtas - 1) / kCtas, still = kHeadDim - kRotating;
    watch.delay();
    for (int m = 0; m < pass.count(); m++) {
      const int splits = splits_of(seen(m).keys).count;
      const float* rotation = p.rotations + Op::kRotations + (i64)pass.position_of(m) * kRotating;
      for (int i = opaque(thread()); i < smaller(each, all - cta * each); i += kThreads) {
        const int at = cta * each + i, head = at / kHeadDim, turning = at % kHeadDim - still;
        float value = merged(m, head, at % kHeadDim, splits);
        if (turning >= 0) {  // back
          const float other = merged(m, head, still + (turning ^ 1), splits), cosine = rotation[turning / 2],
                      sine = rotation[kRotating / 2 + turning / 2];
          value = turning % 2 == 0 ? value * cosine + other * sine : value * cosine - other * sine;
        }
        store_word(boards_of_first + Op::kTo + (i64)m * kLaneWords + at, word_of(value, tag));
      }
    }
  }

  // A channel of a head's result, before it is rotated back.
  LF_DEVICE float merged(int m, int head, int channel, int splits) const {
    const u64* parts = board(m, kPartsBoard) + (i64)head * Op::kMaxSplits * Splitting::kPartWords;
    float top = kLog2OfE * small(Op::sinks(layer), Op::kSinksStride)[head], weight = 1, sum = 0;
    constexpr int each = 4;
    for (int s0 = 0; s0 < splits; s0 += each) {
      float found[each][3];
      u32 spins = 0;
      for (;;) {
        bool all = true;
        LF_UNROLL for (int i = 0; i < each; i++) {
          if (s0 + i >= splits) continue;
          const u64* part = parts + (s0 + i) * Splitting::kPartWords;
          const u64 words[3] = {load_word(part + channel), load_word(part + kHeadDim), load_word(part + kHeadDim + 1)};
          LF_UNROLL for (int k = 0; k < 3; k++) {
            found[i][k] = value_of(words[k]);
            all = all && arrived(words[k], tag);
          }
        }
        if (all || !watch.keep_waiting(spins, kAtAttention, s0)) break;
      }
      LF_UNROLL for (int i = 0; i < each; i++) {
        if (s0 + i >= splits) continue;
        const float now = larger(top, found[i][1]), before = exp2_of(top - now), own = exp2_of(found[i][1] - now);
        weight = weight * before + own * found[i][2];
        sum = sum * before + own * found[i][0];
        top = now;
      }
    }
    return sum / weight;
  }

  // ---- what is kept

  // Vectors that the rows add to the caches, each by one CTA.
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
