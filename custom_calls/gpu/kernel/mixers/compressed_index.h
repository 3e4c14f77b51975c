// The index of compressed attention: it chooses entries where more are complete than a row may attend to. compressed.h
// calls `score` and `choose`. The CTAs of a lane divide the entries and publish their scores. Then every task that
// reads chosen entries finds them by itself from all scores. All tasks read the same words and break ties by the
// entries' numbers, so they choose the same entries without another edge.
#pragma once

#include "compressed_keep.h"
#include "experts.h"

namespace laneformer {
namespace gpu {

template <class Op, int most>
struct CompressedIndex : CompressedRows<Op, most> {
  using Base = CompressedRows<Op, most>;
  using Base::kDigit, Base::kBuckets, Base::kCountsAt, Base::kFoundAt, Base::kPlacesAt, Base::kListAt, Base::kPlaces;
  using Base::kRotating, Base::kRatio, Base::kIndexHeads, Base::kIndexChannels, Base::kIndexStride, Base::kWarpKeys,
      Base::kWeightsAt, Base::kFreshAt, Base::kWarpsAt;
  using Base::p, Base::scratch, Base::watch, Base::pass, Base::tag, Base::board, Base::first_new_entry,
      Base::row_of_entry;
  using typename Base::Keep, typename Base::Keys, typename Base::Seen;

  struct Padded {  // the queries in shared memory, whose heads are an odd number of floats apart
    LF_DEVICE int operator()(int i) const { return i + i / kIndexChannels * (kIndexStride - kIndexChannels); }
  };

  // Publishes the scores of the CTA's entries, for each row that attends to chosen entries only.
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
      for (int h = same_in_warp(opaque(warp())); h < kIndexHeads + larger(0, last - fresh); h += kWarps) {
        if (h < kIndexHeads) {
          rotate_last<n, kRotating>(queries + h * kIndexStride,
                                    p.rotations + Op::kRotations + (i64)pass.position_of(m) * kRotating);
        } else {
          const int entry = fresh + h - kIndexHeads;
          this->template finish<Keys>(news + (entry - old) * n, entry * kRatio);
        }
      }
      sync_cta();
      watch.delay();
      for (int from = first + same_in_warp(opaque(warp())) * kWarpKeys; from < last; from += kWarps * kWarpKeys)
        score_keys(m, from, last, old);
      sync_cta();
    }
  }

  // Scores of kWarpKeys keys from `from` on, by one warp. Each thread has some of the heads.
  LF_DEVICE void score_keys(int m, int from, int last, int old) const {
    constexpr int n = kIndexChannels;
    float* keys = scratch + kWarpsAt + same_in_warp(opaque(warp())) * kWarpKeys * n;  // [channels][keys]
    const char* const cache = this->template entries<Keys>(m);
    for (int c = opaque(warp_lane()); c < n; c += kWarpSize) {
      LF_UNROLL for (int j = 0; j < kWarpKeys; j++) {
        const int entry = smaller(from + j, last - 1);
        keys[c * kWarpKeys + j] = entry >= old ? scratch[kFreshAt + (entry - old) * n + c]
                                               : element_between_ctas<kCache>(cache, (i64)entry * n + c);
      }
    }
    sync_warp();
    float sums[kWarpKeys] = {};
    for (int h = opaque(warp_lane()); h < kIndexHeads; h += kWarpSize) {
      const float *query = scratch + h * kIndexStride, weight = scratch[kWeightsAt + h];
      float scores[kWarpKeys] = {};
      for (int c = 0; c < n; c++) {
        LF_UNROLL for (int j = 0; j < kWarpKeys; j++) scores[j] = fma(query[c], keys[c * kWarpKeys + j], scores[j]);
      }
      LF_UNROLL for (int j = 0; j < kWarpKeys; j++) sums[j] =
          fma(weight, larger(0.0f, scores[j]), sums[j]);  // NaN stays NaN
    }
    LF_UNROLL for (int j = 0; j < kWarpKeys; j++) {
      const float sum = sum_over_warp(sums[j]);
      if (warp_lane() == j && from + j < last)
        store_word(const_cast<u64*>(board(m, kScoresBoard)) + from + j, word_of(sum, tag));
    }
    sync_warp();
  }

  // Calls body(number, place) for the thread's share of the scores. place: place_of a score, larger for larger ones.
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
      } while (!all && watch.keep_waiting(spins, kAtAttention, first, scores + first, tag));
      LF_UNROLL for (int i = 0; i < each; i++) {
        const int at = first + i * kThreads + own;
        if (at < count) body(at, place_of(values[i]));
      }
    }
  }

  // The sum of v over the warp's threads up to this one.
  LF_DEVICE static u32 sum_up_to(u32 v) {
    const int own = opaque(warp_lane());
    LF_UNROLL for (int step = 1; step < kWarpSize; step *= 2) {
      const u32 before = shuffle_from(v, larger(0, own - step));
      if (own >= step) v += before;
    }
    return v;
  }

  // Writes to the list entries `first` to `last` - 1 of the chosen ones, in the order of their numbers.
  LF_DEVICE void choose(int m, int count, int first, int last) const {
    u64* const histogram = (u64*)scratch;
    u32 *const sums = (u32*)scratch + kCountsAt, *const found = (u32*)scratch + kFoundAt,
               *const places = (u32*)scratch + kPlacesAt;
    int* const list = (int*)scratch + kListAt;
    const u64* const scores = board(m, kScoresBoard);
    const bool few = count <= kPlaces;
    if (few) each_score(scores, count, [&](int i, u32 place) { places[i] = place; });
    for (int i = opaque(thread()); i < last - first; i += kThreads) list[i] = 0;  // for a pass that has failed

    // chosen: the place of the last chosen score, found digit by digit. left: how many scores of that place are chosen.
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
      // Each thread has neighbouring buckets, the first thread the highest ones.
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

    // Each warp has a stretch of the entries, and counts those above that place and those at it.
    constexpr int each = 4;
    const int stretch = (count + kThreads * each - 1) / (kThreads * each) * kWarpSize * each;
    const int begin = same_in_warp(opaque(warp())) * stretch, end = smaller(begin + stretch, count);
    const auto each_of_stretch = [&](auto body) {
      for (int from = begin; from < end; from += kWarpSize * each) {
        const int lane = opaque(warp_lane());
        u32 own[each];
        LF_UNROLL for (int i = 0; i < each; i++) {
          const int at = smaller(from + i * kWarpSize + lane, count - 1);
          own[i] = few ? places[at] : place_of(value_of(load_word(scores + at)));
        }
        LF_UNROLL for (int i = 0; i < each; i++) {
          const int at = from + i * kWarpSize + lane;
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
};

}  // namespace gpu
}  // namespace laneformer
