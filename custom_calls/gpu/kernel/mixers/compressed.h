// Compressed attention (DeepSeek-V4), which Decoder runs as an op. A row attends to one list of keys, which are its
// values too: the newest positions, then entries, each made of several positions. The list has all complete entries, or
// those that the index has chosen. compressed_keep.h makes and keeps entries, compressed_index.h chooses among them.
//
// The op has up to three edges: the scores of entries; the splits of the keys, as in attention.h; and the heads'
// results, each channel of which one thread merges and rotates back.
#pragma once

#include "attention.h"
#include "compressed_index.h"

namespace laneformer {
namespace gpu {

template <class Op, int most = 1>
struct CompressedAttention : CompressedIndex<Op, most> {
  using Base = CompressedIndex<Op, most>;
  using Base::kIndexed, Base::kFloats, Base::kHeads, Base::kHeadDim, Base::kGroupHeads, Base::kRotating, Base::kRatio,
      Base::kOwn, Base::kHeadsAtOnce, Base::kKeyThreads, Base::kKeysAtOnce, Base::kNewAt, Base::kSumsAt, Base::kListAt;
  using Base::p, Base::boards_of_first, Base::scratch, Base::watch, Base::lane_here, Base::layer, Base::pass, Base::tag,
      Base::board, Base::small, Base::positions, Base::first_new_entry, Base::row_of_entry;
  using typename Base::Keep, typename Base::Entries, typename Base::Seen;
  using typename Base::Splitting;
  using Pieces = typename Splitting::Pieces;

  static constexpr int kMerged = 0;

  LF_DEVICE static Splits splits_of(int keys) {
    const int wanted = smaller((keys + Op::kLeastKeys - 1) / Op::kLeastKeys, Op::kMaxSplits);
    const int size = (keys + wanted - 1) / wanted;
    return {0, size, (keys + size - 1) / size};
  }

  LF_DEVICE void run(int cta) const {
    if constexpr (kIndexed) this->score(cta);
    int before = 0;  // tasks of earlier rows
    for (int m = 0; m < pass.count(); m++) {
      const Splits splits = splits_of(this->seen(m).keys);
      const int first = most == 1 ? cta : (cta + kCtas - before % kCtas) % kCtas;
      for (int task = first; task < Op::kGroups * splits.count; task += kCtas) {
        run_task(m, task % Op::kGroups, task / Op::kGroups, splits.size);
        sync_cta();  // before the next task overwrites the scratch
      }
      before += Op::kGroups * splits.count;
    }
    merge(cta);
    this->keep(cta);
  }

 private:
  static constexpr float kLog2OfE = 1.44269504f;

  LF_DEVICE void run_task(int m, int group, int split, int size) const {
    const Seen seen = this->seen(m);
    const int first = split * size, last = smaller(first + size, seen.keys), start = pass.start_of(m),
              old = Entries::kGiven ? first_new_entry(m) : 0;
    const int first_entry = larger(0, first - seen.positions), last_entry = last - seen.positions;
    const char *const of_positions = positions(m), *of_entries = nullptr;
    if constexpr (Entries::kGiven) of_entries = this->template entries<Entries>(m);
    [[maybe_unused]] const int* const list = (const int*)scratch + kListAt;
    if constexpr (kIndexed) {
      if (seen.chosen && last_entry > 0) this->choose(m, seen.closed, first_entry, last_entry);
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

    // The first keys are loaded before the queries arrive. A thread without a key loads one that it does not use.
    const int lane_key = opaque(warp() * (kWarpSize / kKeyThreads) + warp_lane() / kKeyThreads);
    int key = first + lane_key;
    Pieces k;
    load(key, k);

    // Keys that are not in the cache yet: positions from `from` on, and entries from `old` on.
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
    for (int h = same_in_warp(opaque(warp())); h < kGroupHeads + new_positions + entries_until - old; h += kWarps) {
      if (h < kGroupHeads) {
        finish_query(heads + h * kHeadDim, pass.position_of(m));
      } else if (h < kGroupHeads + new_positions) {
        const int i = h - kGroupHeads;
        this->template finish<Keep>(news + i * kHeadDim, from + i);
      } else if constexpr (Entries::kGiven) {
        const int i = h - kGroupHeads - new_positions;
        this->template finish<Entries>(new_entries + i * kHeadDim, (old + i) * kRatio);
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
      // All threads of a warp make the same number of turns, because they shuffle.
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
        float* out = sums + (same_in_warp(opaque(warp())) * kHeadsAtOnce + h) * (kHeadDim + 2);
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

  // Divides a query by its root mean square, rotates and scales it, by one warp.
  LF_DEVICE void finish_query(float* x, int position) const {
    float sum = 0;
    for (int i = opaque(warp_lane()); i < kHeadDim; i += kWarpSize) sum = fma(x[i], x[i], sum);
    const float factor = rsqrt_of(sum_over_warp(sum) / (float)kHeadDim + Op::kNormEps) * Op::kScale;
    for (int i = opaque(warp_lane()); i < kHeadDim; i += kWarpSize) x[i] *= factor;
    sync_warp();
    rotate_last<kHeadDim, kRotating>(x, p.rotations + Op::kRotations + (i64)position * kRotating);
  }

  // Publishes the CTA's channels of the heads' results to all CTAs of the lane.
  LF_DEVICE void merge(int cta) const {
    constexpr int all = kHeads * kHeadDim, each = (all + kCtas - 1) / kCtas, still = kHeadDim - kRotating;
    watch.delay();
    for (int m = 0; m < pass.count(); m++) {
      const int splits = splits_of(this->seen(m).keys).count;
      const float* rotation = p.rotations + Op::kRotations + (i64)pass.position_of(m) * kRotating;
      for (int i = opaque(thread()); i < smaller(each, all - cta * each); i += kThreads) {
        const int at = cta * each + i, head = at / kHeadDim, turning = at % kHeadDim - still;
        float value = merged(m, head, at % kHeadDim, splits);
        if (turning >= 0) {  // rotates back
          const float other = merged(m, head, still + (turning ^ 1), splits), cosine = rotation[turning / 2],
                      sine = rotation[kRotating / 2 + turning / 2];
          value = fma(value, cosine, turning % 2 == 0 ? other * sine : -(other * sine));
        }
        store_word(boards_of_first + Op::kTo + (i64)m * kLaneWords + at, word_of(value, tag));
      }
    }
  }

  // Merges the splits of one channel of a head's result, which is not rotated back yet.
  LF_DEVICE float merged(int m, int head, int channel, int splits) const {
    const u64* parts = board(m, kPartsBoard) + (i64)head * Op::kMaxSplits * Splitting::kPartWords;
    float top = kLog2OfE * small(Op::sinks(layer), Op::kSinksStride)[head], weight = 1, sum = 0;
    constexpr int each = 4;
    for (int s0 = 0; s0 < splits; s0 += each) {
      float found[each][3];
      u32 spins = 0;
      for (;;) {
        bool all = true;
        LF_UNROLL for (int i = 0; i < each; i++) {  // beyond the last split: the last again, not used
          const u64* part = parts + smaller(s0 + i, splits - 1) * Splitting::kPartWords;
          const u64 words[3] = {load_word(part + channel), load_word(part + kHeadDim), load_word(part + kHeadDim + 1)};
          LF_UNROLL for (int k = 0; k < 3; k++) {
            found[i][k] = value_of(words[k]);
            all = all && arrived(words[k], tag);
          }
        }
        if (all || !watch.keep_waiting(spins, kAtAttention, s0, parts + s0 * Splitting::kPartWords + channel, tag))
          break;
      }
      LF_UNROLL for (int i = 0; i < each; i++) {
        if (s0 + i >= splits) continue;
        const float now = larger(top, found[i][1]), before = exp2_of(top - now), own = exp2_of(found[i][1] - now);
        weight = fma(own, found[i][2], weight * before);
        sum = fma(own, found[i][0], sum * before);
        top = now;
      }
    }
    return sum / weight;
  }
};

}  // namespace gpu
}  // namespace laneformer
