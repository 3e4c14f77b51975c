// Attention over the cache. Decoder calls `run` for the op, and `merge` for the product that reads the result.
//
// Keys are split over the CTAs of a lane: each (key/value head, split) is a task of one CTA. Where all heads attend to
// the same latents, a task has a group of heads instead. It loads a latent once for as many heads as a thread has sums
// for, and the loaded bytes serve as key and as value.
//
// A task's warps divide its keys, and a few threads share a key. Each thread keeps a softmax of its own keys; the
// warps' sums are merged in shared memory. For each query head a task publishes the weighted sum of the values, the
// largest score and the sum of the weights (Flash-Decoding's split; scores in units of log 2). Readers merge the
// splits.
//
// Queries and keys arrive as the product computed them; norm and rotation are applied here.
//
// Each row of a pass has its own splits, which follow from its position alone. Keys of earlier rows of the pass are not
// in the cache yet. A task takes them from the boards, rounded as the cache would round them, and adds them in the
// place where it would read them from the cache. So a row has the bits that it has alone. `from`, `until` and `row`
// count the rows of a slot from its first row on.
#pragma once

#include "product.h"

namespace laneformer {
namespace gpu {

// Threads that share a key of that many pieces of 16 bytes: as few as possible, so that a warp has more keys at once,
// but at most 4 pieces for each thread, because of its registers.
constexpr int threads_for_key(int pieces) {
  int threads = 1;
  while (threads < 32 && (pieces + threads - 1) / threads > 4) threads *= 2;
  return threads;
}

struct Splits {
  int first, size, count;  // the first key, keys of a split, splits; split s begins at key first + s * size
};

template <class Op, int most = 1>
struct Attention {
  static constexpr bool kLatent = Op::kIsLatentAttend;
  static constexpr int kHeads = Op::kHeads, kKvHeads = Op::kGroups, kHeadDim = Op::kKeyDim, kValueDim = Op::kValueDim,
                       kMaxSplits = Op::kMaxSplits;
  static constexpr int kGroupHeads = kHeads / kKvHeads, kPartWords = kValueDim + 2 + kValueDim % 2;
  static constexpr int kCacheHeads = Op::kSharedKeys ? 1 : kKvHeads, kNewArrays = kLatent ? 1 : 2;
  static constexpr int kKvBytes = bytes_of(kCache);
  static constexpr bool kKvVectors = kHeadDim * kKvBytes % 16 == 0;  // otherwise element by element
  static constexpr int kPerKv = kKvVectors ? kPerVec<kCache> : 1;
  static constexpr int kKvPieces = kHeadDim / kPerKv;
  static constexpr int kKeyThreads = threads_for_key(kKvPieces);
  static constexpr int kOwnPieces = (kKvPieces + kKeyThreads - 1) / kKeyThreads,
                       kOwn = kOwnPieces * kPerKv;  // channels of a key that a thread has
  static constexpr int kHeadsAtOnce = larger_of(1, smaller_of(kGroupHeads, 64 / kOwn));  // 64 registers for their sums
  static constexpr int kKeysAtOnce = kWarps * (kWarpSize / kKeyThreads);

  // Shared memory, in floats: of a row's merged result, and of scratch.
  static constexpr int kMerged = Op::kMergedHeads * kValueDim;
  static constexpr int kFloats = (kGroupHeads + kNewArrays * most) * kHeadDim +
                                 kWarps * kHeadsAtOnce * (kValueDim + 2) + 2 * kMaxSplits * Op::kMergedHeads;

  LF_DEVICE static Splits splits_of(int position, int window) {
    const int first = window > 0 && position + 1 > window ? position + 1 - window : 0, keys = position + 1 - first;
    const int wanted = smaller((keys + kSplitKeys - 1) / kSplitKeys, kMaxSplits), size = (keys + wanted - 1) / wanted;
    return {first, size, (keys + size - 1) / size};
  }

  const Params& p;
  u64* boards_of_first;  // the boards of the pass's first row
  float* scratch;
  Watch& watch;
  int lane_here, layer;
  Run<most> pass;
  u32 tag;

  LF_DEVICE const u64* qkv(int m) const { return boards_of_first + Op::kFrom + (i64)m * kLaneWords; }
  LF_DEVICE u64* parts(int m) const {  // [heads][kMaxSplits][kPartWords]
    return boards_of_first + kPartsBoard + (i64)m * kLaneWords;
  }
  LF_DEVICE Splits splits(int m) const { return splits_of(pass.position_of(m), Op::window(layer)); }

  // The thread's elements of a key or value, in the dtype of the cache.
  struct Pieces {
    Vec vec[kKvVectors ? kOwnPieces : 1];
    float element[kKvVectors ? 1 : kOwnPieces];
  };

  LF_DEVICE static void load(const void* data, i64 key, int head, Pieces& out) {
    const i64 base = (key * kCacheHeads + (kLatent ? 0 : head)) * kHeadDim;
    LF_UNROLL for (int i = 0; i < kOwnPieces; i++) {
      const int piece = i * kKeyThreads + warp_lane() % kKeyThreads;
      const bool real = kKvPieces % kKeyThreads == 0 || piece < kKvPieces;
      if constexpr (kKvVectors) {
        out.vec[i] = real ? load_vec_between_ctas((const char*)data + (base + piece * kPerKv) * kKvBytes) : Vec{};
      } else {
        out.element[i] = real ? element_between_ctas<kCache>(data, base + piece) : 0.0f;
      }
    }
  }

  LF_DEVICE static void load(const char* keys, const char* values, i64 key, int head, Pieces& k, Pieces& v) {
    load(keys, key, head, k);
    if constexpr (!kLatent) load(values, key, head, v);
  }

  LF_DEVICE static void unpack_pieces(const Pieces& pieces, float (&out)[kOwn]) {
    LF_UNROLL for (int i = 0; i < kOwnPieces; i++) {
      if constexpr (kKvVectors) {
        float values[kPerVec<kCache>];
        unpack<kCache>(pieces.vec[i], values);
        LF_UNROLL for (int k = 0; k < kPerKv; k++) out[i * kPerKv + k] = values[k];
      } else {
        out[i] = pieces.element[i];
      }
    }
  }

  // The number in its head of the thread's element i.
  LF_DEVICE static int own_element(int i) {
    return (i / kPerKv * kKeyThreads + warp_lane() % kKeyThreads) * kPerKv + i % kPerKv;
  }

  // Each warp's part of the sum of squares over the n channels of all heads, from the board.
  LF_DEVICE void add_squares(const u64* board, int n, float* squares) const {
    float sum = 0;
    for (int i = opaque(thread()); i < n; i += kThreads) {
      const float value = wait_for(board + i, tag, watch, kAtAttention, i);
      sum = fma(value, value, sum);
    }
    sum = sum_over_warp(sum);
    if (warp_lane() == 0) squares[warp()] = sum;
  }

  LF_DEVICE static float factor_of_all(const float* squares, int n, float eps) {
    float sum = 0;
    LF_UNROLL for (int w = 0; w < kWarps; w++) sum += squares[w];
    return rsqrt_of(sum / (float)n + eps);
  }

  // Norms and rotates heads in shared memory, each warp one at a time: row m's queries, then keys of the slot's rows
  // from `from` on. squares: [1 + most][kWarps], sums of squares for norms over all heads.
  LF_DEVICE void norm_and_rotate(float* heads, int m, int from, int count, int kv_head, const float* squares) const {
    const float* rotation = p.rotations + Op::kRotations + (i64)pass.start_of(m) * kHeadDim;
    for (int h = warp(); h < count; h += kWarps) {
      const bool is_key = most == 1 ? h == kGroupHeads : h >= kGroupHeads;
      const int key = most == 1 ? 0 : h - kGroupHeads;
      if constexpr (most > 1)
        rotation = p.rotations + Op::kRotations +
                   (i64)(pass.start_of(m) + (is_key ? from + key : pass.place_of(m))) * kHeadDim;
      const bool normed = is_key ? Op::kKNormed : Op::kQNormed;
      float* x = heads + h * kHeadDim;
      float factor = 1;
      const float* gains = p.small + (is_key ? Op::k_norm(layer) : Op::q_norm(layer)) +
                           (i64)(p.first_lane + lane_here) * (is_key ? Op::kKNormStride : Op::kQNormStride);
      if (is_key ? Op::kKNormOfAll : Op::kQNormOfAll) {
        gains += (is_key ? kv_head : kv_head * kGroupHeads + h) * kHeadDim;
        factor = is_key ? factor_of_all(squares + (1 + key) * kWarps, kKvHeads * kHeadDim, Op::kKNormEps)
                        : factor_of_all(squares, kHeads * kHeadDim, Op::kQNormEps);
      } else if (normed) {
        float sum = 0;
        for (int i = warp_lane(); i < kHeadDim; i += kWarpSize) sum = fma(x[i], x[i], sum);
        factor = rsqrt_of(sum_over_warp(sum) / (float)kHeadDim + (is_key ? Op::kKNormEps : Op::kQNormEps));
      }
      for (int i = warp_lane(); i < kHeadDim / 2; i += kWarpSize) {
        float even = x[2 * i] * factor, odd = x[2 * i + 1] * factor;
        if (normed) even *= gains[2 * i], odd *= gains[2 * i + 1];
        const float cosine = Op::kRotated ? rotation[i] : 1.0f, sine = Op::kRotated ? rotation[kHeadDim / 2 + i] : 0.0f;
        const float scale = is_key ? 1.0f : Op::kScale;
        x[2 * i] = fma(even, cosine, -(odd * sine)) * scale;
        x[2 * i + 1] = fma(even, sine, odd * cosine) * scale;
      }
    }
  }

  // The same for latents: all channels of a query are scaled, a key's value channels are normed, and the last channels
  // of both are rotated.
  LF_DEVICE void norm_and_rotate_latents(float* heads, int m, int from, int count) const {
    constexpr int half = Op::kRotating / 2;
    const float* gains = p.small + Op::norm(layer) + (i64)(p.first_lane + lane_here) * Op::kNormStride;
    for (int h = warp(); h < count; h += kWarps) {
      const bool is_key = h >= kGroupHeads;
      const int row = is_key ? from + h - kGroupHeads : pass.place_of(m);
      const float *rotation = p.rotations + Op::kRotations + (i64)(pass.start_of(m) + row) * Op::kRotating,
                  scale = is_key ? 1.0f : Op::kScale;
      float *x = heads + h * kHeadDim, *turning = x + kValueDim, factor = scale;
      if (is_key) {
        float sum = 0;
        for (int i = warp_lane(); i < kValueDim; i += kWarpSize) sum = fma(x[i], x[i], sum);
        factor = rsqrt_of(sum_over_warp(sum) / (float)kValueDim + Op::kNormEps);
      }
      for (int i = warp_lane(); i < kValueDim; i += kWarpSize) x[i] *= is_key ? factor * gains[i] : factor;
      for (int i = warp_lane(); i < half; i += kWarpSize) {
        const float even = turning[2 * i], odd = turning[2 * i + 1], cosine = rotation[i], sine = rotation[half + i];
        turning[2 * i] = fma(even, cosine, -(odd * sine)) * scale;
        turning[2 * i + 1] = fma(even, sine, odd * cosine) * scale;
      }
    }
  }

  // Brings a task's queries, as the products computed them.
  LF_DEVICE void bring_queries(int m, int kv_head, float* heads) const {
    const int first = kv_head * kGroupHeads;
    if constexpr (kLatent) {
      constexpr int channels = Op::kStill + Op::kRotating, of_head = channels + channels % 2;
      const u64* queries = boards_of_first + Op::kQueries + (i64)m * kLaneWords + first * of_head + Op::kStill;
      for (int h = 0; h < kGroupHeads; h++) {
        float* out = heads + h * kHeadDim;
        gather<kThreads>(qkv(m) + (first + h) * kValueDim, kValueDim, tag, out, watch, kAtAttention);
        gather<kThreads>(queries + h * of_head, Op::kRotating, tag, out + kValueDim, watch, kAtAttention);
      }
    } else {
      gather<kThreads>(qkv(m) + first * kHeadDim, kGroupHeads * kHeadDim, tag, heads, watch, kAtAttention);
    }
  }

  // Brings a row's new key and value; a latent is both.
  LF_DEVICE void bring_new(int row, int kv_head, float* key, float* value) const {
    if constexpr (kLatent) {
      const u64* latents = boards_of_first + Op::kLatents + (i64)row * kLaneWords;
      gather<kThreads>(latents, kHeadDim, tag, key, watch, kAtAttention);
    } else {
      const u64* of_row = qkv(row);
      gather<kThreads>(of_row + (kHeads + kv_head) * kHeadDim, kHeadDim, tag, key, watch, kAtAttention);
      gather<kThreads>(of_row + (kHeads + kKvHeads + kv_head) * kHeadDim, kHeadDim, tag, value, watch, kAtAttention);
    }
  }

  LF_DEVICE void run(int cta) const {
    int before = 0;  // tasks of earlier rows
    for (int m = 0; m < pass.count(); m++) {
      const Splits splits = this->splits(m);
      const int first = most == 1 ? cta : (cta + kCtas - before % kCtas) % kCtas;
      for (int task = first; task < kKvHeads * splits.count; task += kCtas) {
        run_task(m, task % kKvHeads, task / kKvHeads, splits);
        sync_cta();  // before the next task overwrites the scratch
      }
      before += kKvHeads * splits.count;
    }
  }

  LF_DEVICE void run_task(int m, int kv_head, int split, const Splits& splits) const {
    const int position = pass.position_of(m), start = pass.start_of(m), first_row = pass.first_of(m);
    const i64 lane_offset = (i64)kept_part(lane_here, pass.slot_of(m)) * p.capacity * kCacheHeads * kHeadDim * kKvBytes;
    char* keys = (char*)p.caches[Op::cache(layer)] + lane_offset;
    char* values = kLatent ? keys : (char*)p.caches[Op::cache(layer) + 1] + lane_offset;
    const int first = splits.first + split * splits.size, last = smaller(first + splits.size, position + 1);
    const bool newest = last == position + 1;  // the task has the row's own position, which is not in the cache yet
    const int old = newest ? last - 1 : last;
    // Rows of the slot whose keys the task has: the row itself and earlier ones.
    int from = 0, until = 1;
    bool any_new = newest;
    if constexpr (most > 1) {
      from = larger(0, first - start), until = last - start;
      any_new = until > from;
    }
    float* heads = scratch;  // queries, new keys, new values
    float* new_keys = heads + kGroupHeads * kHeadDim;
    float* new_values = kLatent ? new_keys : new_keys + most * kHeadDim;
    float* sums = new_values + most * kHeadDim;
    [[maybe_unused]] const u64* qkv = this->qkv(m);

    // The first keys are loaded before the queries arrive. A thread without a key loads one that it does not use.
    const int lane_key = opaque(warp() * (kWarpSize / kKeyThreads) + warp_lane() / kKeyThreads);
    int key = first + lane_key;
    Pieces k, v;
    load(keys, values, smaller(key, last - 1), kv_head, k, v);

    bring_queries(m, kv_head, heads);
    if (any_new) {
      for (int row = from; row < until; row++) {
        const int at = (row - from) * kHeadDim;
        bring_new(first_row + row, kv_head, new_keys + at, new_values + at);
      }
    }
    const int count = any_new ? kGroupHeads + until - from : kGroupHeads;
    if constexpr (kLatent) {
      sync_cta();
      norm_and_rotate_latents(heads, m, from, count);
    } else {
      if constexpr (Op::kQNormOfAll) add_squares(qkv, kHeads * kHeadDim, sums);
      if constexpr (Op::kKNormOfAll) {
        for (int row = from; row < until; row++)
          add_squares(this->qkv(first_row + row) + kHeads * kHeadDim, kKvHeads * kHeadDim,
                      sums + (1 + row - from) * kWarps);
      }
      sync_cta();
      norm_and_rotate(heads, m, from, count, kv_head, sums);
    }
    if (any_new) {
      sync_cta();
      // Writes to the cache, and rounds here what later passes will read from there.
      for (int row = from; row < until; row++) {
        const i64 at = ((i64)(start + row) * kCacheHeads + (kLatent ? 0 : kv_head)) * kHeadDim;
        float *new_key = new_keys + (row - from) * kHeadDim, *new_value = new_values + (row - from) * kHeadDim;
        for (int i = opaque(thread()); i < kHeadDim; i += kThreads) {
          new_key[i] = rounded_to<kCache>(new_key[i]);
          if constexpr (!kLatent) new_value[i] = rounded_to<kCache>(new_value[i]);
          if (most > 1 && row != pass.place_of(m)) continue;  // a task of that row writes it
          if (kLatent && kv_head != 0) continue;              // a task of the first group writes it
          put_element<kCache>(keys, at + i, new_key[i]);
          if constexpr (!kLatent) put_element<kCache>(values, at + i, new_value[i]);
        }
      }
    }
    sync_cta();

    for (int h0 = 0; h0 < kGroupHeads; h0 += kHeadsAtOnce) {
      float largest[kHeadsAtOnce], weight[kHeadsAtOnce], sum[kHeadsAtOnce][kOwn];
      LF_UNROLL for (int h = 0; h < kHeadsAtOnce; h++) {
        largest[h] = kMinusInfinity;
        weight[h] = 0;
        LF_UNROLL for (int i = 0; i < kOwn; i++) sum[h][i] = 0;
      }
      if (h0 > 0) {
        key = first + lane_key;
        load(keys, values, smaller(key, last - 1), kv_head, k, v);
      }
      // All threads of a warp make the same number of turns, because they shuffle.
      for (int turn = first; turn < old; turn += kKeysAtOnce) {
        Pieces next_k, next_v;
        const int next = key + kKeysAtOnce;
        load(keys, values, smaller(next, last - 1), kv_head, next_k, next_v);
        float own[kOwn], score[kHeadsAtOnce];
        const bool is_new = most > 1 && key >= start && key < old;
        const int of_row = (key - start - from) * kHeadDim;
        unpack_pieces(k, own);
        if (is_new) own_part(new_keys + of_row, own);
        score_key(heads, h0, own, score);
        if constexpr (!kLatent) {
          unpack_pieces(v, own);
          if (is_new) own_part(new_values + of_row, own);
        }
        if (key < old) add_value(score, own, largest, weight, sum);
        key = next;
        k = next_k;
        if constexpr (!kLatent) v = next_v;
      }
      if (newest && warp() == 0) {
        float own[kOwn], score[kHeadsAtOnce];
        const int of_row = most == 1 ? 0 : (pass.place_of(m) - from) * kHeadDim;
        own_part(new_keys + of_row, own);
        score_key(heads, h0, own, score);
        if constexpr (!kLatent) own_part(new_values + of_row, own);
        if (warp_lane() < kKeyThreads) add_value(score, own, largest, weight, sum);
      }
      merge_warp(largest, weight, sum);
      LF_UNROLL for (int h = 0; h < kHeadsAtOnce; h++) {
        float* out = sums + (warp() * kHeadsAtOnce + h) * (kValueDim + 2);
        if (warp_lane() < kKeyThreads) {
          LF_UNROLL for (int i = 0; i < kOwn; i++) if (own_element(i) < kValueDim) out[own_element(i)] = sum[h][i];
        }
        if (warp_lane() == 0) out[kValueDim] = largest[h], out[kValueDim + 1] = weight[h];
      }
      sync_cta();
      publish(parts(m), kv_head * kGroupHeads + h0, smaller(kHeadsAtOnce, kGroupHeads - h0), split, sums);
      if (h0 + kHeadsAtOnce < kGroupHeads) sync_cta();
    }
  }

  static constexpr float kMinusInfinity = -1e30f;

  // Reads the thread's elements of a head in shared memory.
  LF_DEVICE static void own_part(const float* head, float (&out)[kOwn]) {
    LF_UNROLL for (int i = 0; i < kOwn; i++) out[i] = own_element(i) < kHeadDim ? head[own_element(i)] : 0.0f;
  }

  // Scores of the thread's key with heads from h0 on. All threads of the warp call it: those of a key add their parts.
  LF_DEVICE static void score_key(const float* heads, int h0, const float (&k)[kOwn], float (&score)[kHeadsAtOnce]) {
    LF_UNROLL for (int h = 0; h < kHeadsAtOnce; h++) {
      const float* q = heads + smaller(h0 + h, kGroupHeads - 1) * kHeadDim;
      score[h] = 0;
      LF_UNROLL for (int i = 0; i < kOwn; i++) if (kKvPieces % kKeyThreads == 0 || own_element(i) < kHeadDim) score[h] =
          fma(q[own_element(i)], k[i], score[h]);
      LF_UNROLL for (int mask = 1; mask < kKeyThreads; mask *= 2) score[h] += shuffle(score[h], mask);
      if constexpr (Op::kSoftcap > 0) score[h] = softcapped<Numbers>(score[h], Op::kSoftcap);
    }
  }

  // Adds a value with its scores to the thread's softmax.
  LF_DEVICE static void add_value(const float (&score)[kHeadsAtOnce], const float (&v)[kOwn],
                                  float (&largest)[kHeadsAtOnce], float (&weight)[kHeadsAtOnce],
                                  float (&sum)[kHeadsAtOnce][kOwn]) {
    LF_UNROLL for (int h = 0; h < kHeadsAtOnce; h++) {
      const float top = larger(largest[h], score[h]), keep = exp2_of(largest[h] - top), own = exp2_of(score[h] - top);
      largest[h] = top;
      weight[h] = fma(weight[h], keep, own);
      LF_UNROLL for (int i = 0; i < kOwn; i++) sum[h][i] = fma(own, v[i], sum[h][i] * keep);
    }
  }

  // Merges the softmax of the warp's threads, which had different keys.
  LF_DEVICE static void merge_warp(float (&largest)[kHeadsAtOnce], float (&weight)[kHeadsAtOnce],
                                   float (&sum)[kHeadsAtOnce][kOwn]) {
    LF_UNROLL for (int h = 0; h < kHeadsAtOnce; h++) {
      float top = largest[h];
      LF_UNROLL for (int mask = kKeyThreads; mask < kWarpSize; mask *= 2) top = larger(top, shuffle(top, mask));
      const float keep = exp2_of(largest[h] - top);
      largest[h] = top;
      weight[h] *= keep;
      LF_UNROLL for (int i = 0; i < kOwn; i++) sum[h][i] *= keep;
      LF_UNROLL for (int mask = kKeyThreads; mask < kWarpSize; mask *= 2) {
        weight[h] += shuffle(weight[h], mask);
        LF_UNROLL for (int i = 0; i < kOwn; i++) sum[h][i] += shuffle(sum[h][i], mask);
      }
    }
  }

  // Merges the sums of the warps, in their order, and publishes a split of `count` heads from `head` on.
  LF_DEVICE void publish(u64* parts, int head, int count, int split, const float* sums) const {
    watch.delay();
    for (int at = opaque(thread()); at < count * kValueDim; at += kThreads) {
      const int h = at / kValueDim, element = at % kValueDim;
      float top = kMinusInfinity, weight = 0, sum = 0;
      LF_UNROLL for (int w = 0; w < kWarps; w++) top =
          larger(top, sums[(w * kHeadsAtOnce + h) * (kValueDim + 2) + kValueDim]);
      LF_UNROLL for (int w = 0; w < kWarps; w++) {
        const float* part = sums + (w * kHeadsAtOnce + h) * (kValueDim + 2);
        const float keep = exp2_of(part[kValueDim] - top);
        weight = fma(keep, part[kValueDim + 1], weight);
        sum = fma(keep, part[element], sum);
      }
      u64* out = parts + ((head + h) * kMaxSplits + split) * kPartWords;
      store_word(out + element, word_of(sum, tag));
      if (element == 0) {
        store_word(out + kValueDim, word_of(top, tag));
        store_word(out + kValueDim + 1, word_of(weight, tag));
      }
    }
  }

  // Merges the splits of row m into `out` in shared memory, [kMergedHeads][kValueDim], heads from `first` on. Every CTA
  // of the lane does so for itself. A sync_cta must follow.
  LF_DEVICE void merge(int m, float* out, int first = 0) const {
    const Splits splits = this->splits(m);
    [[maybe_unused]] const u64* qkv = this->qkv(m);
    const u64* parts = this->parts(m) + first * kMaxSplits * kPartWords;
    float* factors = scratch + kFloats - 2 * kMaxSplits * Op::kMergedHeads;  // [heads][splits][2]
    for (int at = opaque(thread()); at < Op::kMergedHeads * splits.count * 2; at += kThreads) {
      const int head = at / (2 * splits.count), split = at / 2 % splits.count;
      const u64* word = parts + (head * kMaxSplits + split) * kPartWords + kValueDim + at % 2;
      factors[at] = wait_for(word, tag, watch, kAtAttention, split);
    }
    sync_cta();
    for (int at = opaque(thread()); at < Op::kMergedHeads * kValueDim; at += kThreads) {
      const int head = at / kValueDim, element = at % kValueDim;
      const float* own = factors + head * splits.count * 2;
      const u64* board = parts + head * kMaxSplits * kPartWords + element;
      float top = kMinusInfinity;
      if constexpr (Op::kSinksGiven) top = sink(head);
      for (int s = 0; s < splits.count; s++) top = larger(top, own[2 * s]);
      const u64* gate = qkv + Op::kValuesEnd + at;
      const u64 early_gate = Op::kAttentionGate ? load_word(gate) : 0;  // arrives while the splits are merged
      float weight = 0, sum = 0;
      if constexpr (Op::kSinksGiven) weight = exp2_of(sink(head) - top);
      constexpr int each = 8;
      for (int s0 = 0; s0 < splits.count; s0 += each) {
        float values[each];
        u32 spins = 0;
        for (;;) {
          bool all = true;
          LF_UNROLL for (int i = 0; i < each; i++) {
            if (s0 + i >= splits.count) continue;
            const u64 word = load_word(board + (s0 + i) * kPartWords);
            values[i] = value_of(word);
            all = all && arrived(word, tag);
          }
          if (all || !watch.keep_waiting(spins, kAtAttention, s0, board + s0 * kPartWords, tag)) break;
        }
        LF_UNROLL for (int i = 0; i < each; i++) {
          if (s0 + i >= splits.count) continue;
          const float keep = exp2_of(own[2 * (s0 + i)] - top);
          weight = fma(keep, own[2 * (s0 + i) + 1], weight);
          sum = fma(keep, values[i], sum);
        }
      }
      float value = sum / weight;
      if constexpr (Op::kAttentionGate)
        value *= sigmoid<Numbers>(arrived(early_gate, tag) ? value_of(early_gate)
                                                           : wait_for(gate, tag, watch, kAtAttention, at));
      out[at] = value;
    }
  }

  template <class Shape>
  LF_DEVICE FromShared<Shape, most> reader(const float* merged, int stride) const {
    return {merged, stride};
  }

 private:
  // A head's sink in units of log 2, as scores are.
  LF_DEVICE float sink(int head) const {
    constexpr float kLog2OfE = 1.44269504f;
    return kLog2OfE * p.small[Op::sinks(layer) + (i64)(p.first_lane + lane_here) * Op::kSinksStride + head];
  }
};

}  // namespace gpu
}  // namespace laneformer
