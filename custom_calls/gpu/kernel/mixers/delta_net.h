// Gated DeltaNet, as on the CPU: custom_calls/cpu/ops/delta_net.cc has the equations. What a layer keeps is the same
// (custom_calls/plan.py): matrices as they were at a base, a multiple of kEntries, entries of the positions since, and
// what the convolution has read. So a position reads its matrices once, kEntries positions write them once, and drafts
// that are wrong leave entries that the next pass overwrites.
//
// A task is a tile, 16 channels of a value head, in one CTA, which convolves queries and keys of the key head itself.
// Its matrix is in registers while the rows of a pass follow each other. The first tile of a key head keeps what its
// tiles share: keys and inputs of the convolution; the first tile of a value head keeps its decays. Other CTAs read
// these in later passes, as they read the cache of attention.
//
// A task publishes its channels, under their gains and gates, and the sum of their squares. The product that follows
// divides by the root of the mean of these.
#pragma once

#include "product.h"

namespace laneformer {
namespace gpu {

// Columns of a product as a board has them, each times the factor of its head.
template <class Shape, int head_channels, int rows>
struct ScaledFromBoard {
  FromBoard<Shape, rows> board;
  const float* factors;  // in shared memory, of each head
  int stride;            // between two rows'

  LF_DEVICE void operator()(int segment, float (&x)[rows][Shape::kVectors][kPer<Shape>]) const {
    board(segment, x);
    const int first = column<Shape>(segment);
    LF_UNROLL for (int m = 0; m < rows; m++) {
      LF_UNROLL for (int v = 0; v < Shape::kVectors; v++) {
        LF_UNROLL for (int i = 0; i < kPer<Shape>; i++) {
          const int at = first + distance<Shape>(v, i / 2 * 2) + i % 2;
          if (kWhole<Shape> || at < Shape::kColumns) x[m][v][i] *= factors[m * stride + at / head_channels];
        }
      }
    }
  }
};

// Whether what an op keeps of a layer for a slot can be continued at a position.
template <class Op>
LF_DEVICE bool continues(const Params& p, int layer, int position, int slot) {
  if constexpr (Op::kBases > 0) {
    const int base = load_between_ctas((const int*)p.caches[Op::cache(layer)] + slot * Op::kBases);
    return base <= position && position < base + 2 * kEntries;
  }
  return true;
}
template <class... Op>
LF_DEVICE bool continues(Ops<Op...>, const Params& p, int layer, int position, int slot) {
  return (continues<Op>(p, layer, position, slot) && ...);
}
LF_DEVICE bool continues(const Params& p, int layer, int position, int slot) {
  bool found = true;
  with_ops<Attentions>(layer, [&](auto ops) { found = continues(ops, p, layer, position, slot); });
  return found;
}

template <class Op, int most = 1>
struct DeltaNet {
  static constexpr int kKeyDim = Op::kKeyDim, kValueDim = Op::kValueDim, kHeadTiles = Op::kHeadTiles;
  static constexpr int kRatio = Op::kRatio, kTiles = kRatio * kHeadTiles;  // of a key head
  static constexpr int kTile = 16, kQuarters = kTile / 4;
  static_assert(kEntries == kTile, "keys of kEntries positions are a tile");

  // What is projected: of each key head q, k, v and z, then of each key head b and a.
  static constexpr int kValues = kRatio * kValueDim, kChannels = Op::kHeadChannels, kHeadRows = Op::kHeadRows;

  // What a layer keeps of a key head: 16-byte pieces of a tile, entries of a stretch of positions and, in a ring of
  // positions, inputs of the convolution.
  static constexpr int kPieces = kKeyDim * kQuarters, kOwnPieces = (kPieces + kThreads - 1) / kThreads;
  static constexpr int kStretch = Op::kStretchFloats;
  static constexpr int kBefore = Op::kTaps - 1, kRing = kBefore + kEntries;
  static constexpr i64 kInputBytes = (i64)kRing * kChannels * bytes_of(kCache);

  // What a task reads of what is projected: q, k and its channels of v, which are convolved, of z, and b and a.
  static constexpr int kMixed = 2 * kKeyDim + kTile, kOwnMixed = (kMixed + kThreads - 1) / kThreads;
  static constexpr int kGates = kMixed, kSteps = kGates + kTile, kRead = kSteps + 2;

  // Sums over the channels of a key, and the board of a row: channels, then the squares of each tile.
  enum Sums { kStateKey = 0, kStateQuery = kTile, kKeysKey = 2 * kTile, kKeysQuery = 3 * kTile };
  static constexpr int kKeySquares = 4 * kTile, kQuerySquares = kKeySquares + 1, kKeyQuery = kKeySquares + 2,
                       kSums = kKeySquares + 3;
  static constexpr int kSquares = Op::kWidth, kAllSquares = Op::kValueHeads * kHeadTiles;

  // Shared memory, in floats; `merge` uses it too.
  static constexpr int kDeltasAt = 0, kDecaysAt = kEntries * kTile, kReadAt = kDecaysAt + kEntries,
                       kSumsAt = kReadAt + kRead;
  static constexpr int kFloats = larger_of(kSumsAt + kWarps * kSums, kAllSquares);
  static constexpr int kMerged = Op::kValueHeads;  // of each row

  const Params& p;
  u64* boards_of_first;  // of the first row
  float* scratch;
  Watch& watch;
  int lane_here, layer;
  Run<most> pass;
  u32 tag;
  int slot = 0;  // whose rows a task computes

  LF_DEVICE const u64* projected(int m) const { return boards_of_first + Op::kFrom + (i64)m * kLaneWords; }
  LF_DEVICE u64* found(int m) const { return boards_of_first + kPartsBoard + (i64)m * kLaneWords; }
  LF_DEVICE const float* small(int offset, int stride) const {
    return p.small + offset + (i64)(p.first_lane + lane_here) * stride;
  }

  // What the layer keeps of a key head: `number` among its arrays, `each` values of a head.
  template <class T>
  LF_DEVICE T* kept(int number, int head, i64 each) const {
    return (T*)p.caches[Op::cache(layer) + number] + ((i64)kept_part(lane_here, slot) * Op::kKeyHeads + head) * each;
  }
  LF_DEVICE int* base(int head) const { return kept<int>(0, head, 1); }
  LF_DEVICE float* keys(int head, int position) const {
    return kept<float>(1, head, 2 * kStretch) + position / kEntries % 2 * kStretch;
  }
  LF_DEVICE float* deltas(int head, int position, int tile) const {
    return keys(head, position) + kEntries * kKeyDim + (position % kEntries * kTiles + tile) * kTile;
  }
  LF_DEVICE float* decay(int head, int position, int tile) const {
    return keys(head, position) + kEntries * (kKeyDim + kTiles * kTile) + position % kEntries * kRatio +
           tile / kHeadTiles;
  }
  LF_DEVICE float* matrix(int head, int tile) const {
    return kept<float>(3, head, (i64)kTiles * kKeyDim * kTile) + tile * kKeyDim * kTile;
  }

  LF_DEVICE void run(int cta) const {
    for (int task = cta; task < Op::kKeyHeads * kTiles; task += kCtas) {
      if constexpr (kRequests == 1) {
        run_task(task / kTiles, task % kTiles, 0, pass.count());
      } else {
        for (int m = 0, end; m < pass.count(); m = end) {
          for (end = m + 1; end < pass.count() && pass.first_of(end) == m;) end++;
          of(pass.slot_of(m)).run_task(task / kTiles, task % kTiles, m, end);
        }
      }
    }
  }

 private:
  LF_DEVICE DeltaNet of(int slot) const {
    return {p, boards_of_first, scratch, watch, lane_here, layer, pass, tag, slot};
  }

  // A thread's pieces of a tile [key_dim][16]: of channel `column` of the key, four rows.
  struct Tile {
    float of[kOwnPieces][4];
  };
  LF_DEVICE static int piece(int i) { return i * kThreads + opaque(thread()); }
  LF_DEVICE static bool real(int piece) { return kPieces % kThreads == 0 || piece < kPieces; }
  LF_DEVICE static int column(int piece) { return piece / kQuarters; }
  LF_DEVICE static int first_row() { return thread() % kQuarters * 4; }  // kThreads is a multiple of kQuarters

  LF_DEVICE static void load(const float* from, Tile& tile) {
    LF_UNROLL for (int i = 0; i < kOwnPieces; i++) {
      const int at = piece(i);
      const Vec vec = load_vec_between_ctas(from + smaller(at, kPieces - 1) * 4);
      LF_UNROLL for (int r = 0; r < 4; r++) tile.of[i][r] = real(at) ? bits_to_float(vec.word[r]) : 0.0f;
    }
  }
  LF_DEVICE static void store(const Tile& tile, float* to) {
    LF_UNROLL for (int i = 0; i < kOwnPieces; i++) {
      const int at = piece(i);
      if (!real(at)) continue;
      Vec vec;
      LF_UNROLL for (int r = 0; r < 4; r++) vec.word[r] = float_to_bits(tile.of[i][r]);
      *(Vec*)(to + at * 4) = vec;
    }
  }
  // Of rows from `count` on, zeros.
  LF_DEVICE static void keep_rows(Tile& tile, int count) {
    LF_UNROLL for (int i = 0; i < kOwnPieces; i++) {
      LF_UNROLL for (int r = 0; r < 4; r++) if (first_row() + r >= count) tile.of[i][r] = 0;
    }
  }

  // Deltas and decays of a stretch, into shared memory; zeros and ones of positions from `count` on.
  LF_DEVICE void bring_entries(int head, int tile, int from, int count) const {
    for (int i = opaque(thread()); i < kEntries * kTile; i += kThreads) {
      const int j = i / kTile;
      scratch[kDeltasAt + i] = j < count ? load_between_ctas(deltas(head, from + j, tile) + i % kTile) : 0.0f;
    }
    for (int j = opaque(thread()); j < kEntries; j += kThreads)
      scratch[kDecaysAt + j] = j < count ? load_between_ctas(decay(head, from + j, tile)) : 1.0f;
  }

  // The product of the decays of a stretch behind entry `after`, up to `last`.
  LF_DEVICE float decayed(int after, int last) const {
    float product = 1;
    LF_UNROLL for (int j = kEntries - 1; j >= 0; j--) if (j > after && j <= last) product *= scratch[kDecaysAt + j];
    return product;
  }

  // The matrix after a whole stretch. The deltas in shared memory are then those of no entry.
  LF_DEVICE void advance(Tile& matrix, const Tile& keys) const {
    sync_cta();
    for (int i = opaque(thread()); i < kEntries * kTile; i += kThreads)
      scratch[kDeltasAt + i] *= decayed(i / kTile, kEntries - 1);
    const float left = decayed(-1, kEntries - 1);
    sync_cta();
    LF_UNROLL for (int i = 0; i < kOwnPieces; i++) {
      LF_UNROLL for (int r = 0; r < 4; r++) matrix.of[i][r] *= left;
      LF_UNROLL for (int j = 0; j < kEntries; j++) {
        const u32 own = float_to_bits(keys.of[i][j % 4]);
        const float key = bits_to_float(shuffle_from(own, warp_lane() / kQuarters * kQuarters + j / 4));
        const float* delta = scratch + kDeltasAt + j * kTile + first_row();
        LF_UNROLL for (int r = 0; r < 4; r++) matrix.of[i][r] += key * delta[r];
      }
    }
    sync_cta();
  }

  // A thread's channels of the convolution: weights, and inputs of the last positions.
  struct Channels {
    float weight[kOwnMixed][Op::kTaps], before[kOwnMixed][larger_of(kBefore, 1)];
  };

  // The number of a task's channel among those of the key head.
  LF_DEVICE static int channel_of(int i, int tile) {
    if (i < 2 * kKeyDim) return i;
    const int within = smaller(tile % kHeadTiles * kTile + i - 2 * kKeyDim, kValueDim - 1);  // the last one again
    return 2 * kKeyDim + tile / kHeadTiles * kValueDim + within;
  }

  LF_DEVICE void load_channels(int head, int tile, int position, Channels& channels) const {
    const float* weights = small(Op::convolution(layer), Op::kConvolutionStride);
    const void* inputs = inputs_of(head);
    LF_UNROLL for (int n = 0; n < kOwnMixed; n++) {
      const int i = smaller(n * kThreads + opaque(thread()), kMixed - 1), channel = channel_of(i, tile);
      const int part = i / kKeyDim;  // the convolution has all queries, then keys, then values
      const int of_all = part == 0   ? head * kKeyDim + channel
                         : part == 1 ? Op::kKeyHeads * kKeyDim + head * kKeyDim + channel - kKeyDim
                                     : 2 * Op::kKeyHeads * kKeyDim + head * kValues + channel - 2 * kKeyDim;
      LF_UNROLL for (int tap = 0; tap < Op::kTaps; tap++) channels.weight[n][tap] = weights[of_all * Op::kTaps + tap];
      LF_UNROLL for (int b = 0; b < kBefore; b++) {
        const int t = position - kBefore + b;
        channels.before[n][b] =
            t < 0 ? 0.0f : element_between_ctas<kCache>(inputs, (i64)(t % kRing) * kChannels + channel);
      }
    }
  }
  LF_DEVICE void* inputs_of(int head) const { return kept<char>(2, head, kInputBytes); }

  // What a task reads of row m, its queries, keys and values convolved, into shared memory.
  LF_DEVICE void read(int head, int tile, int m, Channels& channels) const {
    float* x = scratch + kReadAt;
    gather<kThreads>(projected(m), kRead, tag, x, watch, kAtVector, [&](int i) {
      if (i < kMixed) return head * kHeadRows + channel_of(i, tile);
      if (i < kSteps) return head * kHeadRows + kValues + channel_of(i - kTile, tile);  // z is behind v
      return Op::kStepsBegin + (2 * head + i - kSteps) * kRatio + tile / kHeadTiles;
    });
    const int position = pass.position_of(m);
    LF_UNROLL for (int n = 0; n < kOwnMixed; n++) {
      const int i = n * kThreads + opaque(thread());  // the thread brought it itself
      if (i >= kMixed) continue;
      const float input = rounded_to<kCache>(x[i]);
      float sum = 0;
      LF_UNROLL for (int b = 0; b < kBefore; b++) sum += channels.weight[n][b] * channels.before[n][b];
      sum += channels.weight[n][kBefore] * input;
      x[i] = activated<Activation::kSilu, Numbers>(sum);
      LF_UNROLL for (int b = 0; b + 1 < kBefore; b++) channels.before[n][b] = channels.before[n][b + 1];
      if (kBefore > 0) channels.before[n][kBefore - 1] = input;
      if (i < 2 * kKeyDim ? tile == 0 : i - 2 * kKeyDim < own_channels(tile))
        put_element<kCache>(inputs_of(head), (i64)(position % kRing) * kChannels + channel_of(i, tile), input);
    }
    sync_cta();
  }

  LF_DEVICE static int own_channels(int tile) { return smaller(kTile, kValueDim - tile % kHeadTiles * kTile); }

  // Each warp's sums of products with the query and the key, before they are scaled.
  LF_DEVICE void multiply(const Tile& matrix, const Tile& keys) const {
    const float *query = scratch + kReadAt, *key = query + kKeyDim;
    float sums[4][4] = {}, squares[3] = {};
    LF_UNROLL for (int i = 0; i < kOwnPieces; i++) {
      const int at = piece(i), c = smaller(column(at), kKeyDim - 1);
      const float k = real(at) ? key[c] : 0.0f, q = real(at) ? query[c] : 0.0f;
      LF_UNROLL for (int r = 0; r < 4; r++) {
        sums[0][r] += matrix.of[i][r] * k, sums[1][r] += matrix.of[i][r] * q;
        sums[2][r] += keys.of[i][r] * k, sums[3][r] += keys.of[i][r] * q;
      }
      squares[0] += k * k, squares[1] += q * q, squares[2] += k * q;
    }
    float* out = scratch + kSumsAt + warp() * kSums;
    const auto over_columns = [](float sum) {
      LF_UNROLL for (int mask = kQuarters; mask < kWarpSize; mask *= 2) sum += shuffle(sum, mask);
      return sum;
    };
    LF_UNROLL for (int kind = 0; kind < 4; kind++) {
      LF_UNROLL for (int r = 0; r < 4; r++) {
        const float sum = over_columns(sums[kind][r]);
        if (warp_lane() < kQuarters) out[kind * kTile + first_row() + r] = sum;
      }
    }
    LF_UNROLL for (int kind = 0; kind < 3; kind++) {
      const float sum = over_columns(squares[kind]);
      if (warp_lane() == 0) out[kKeySquares + kind] = sum;
    }
    sync_cta();
  }

  LF_DEVICE float sum_of(int which) const {
    float sum = 0;
    LF_UNROLL for (int w = 0; w < kWarps; w++) sum += scratch[kSumsAt + w * kSums + which];
    return sum;
  }
  LF_DEVICE float key_factor() const { return rsqrt_of(sum_of(kKeySquares) + Op::kUnitEps); }

  // Of a value head at a position.
  struct Gates {
    float step, rate, gain;
  };
  LF_DEVICE Gates load_gates(int head, int tile) const {
    const int value_head = head * kRatio + tile / kHeadTiles;
    const int channel = smaller(tile % kHeadTiles * kTile + warp_lane() % kTile, kValueDim - 1);
    return {small(Op::step(layer), Op::kStepStride)[value_head], small(Op::decay(layer), Op::kDecayStride)[value_head],
            small(Op::norm(layer), Op::kNormStride)[channel]};
  }

  // The delta and the result of row m, by the first warp: each of 16 threads has an entry and a channel.
  LF_DEVICE void respond(int head, int tile, int m, const Gates& gates) const {
    const int position = pass.position_of(m), at = position % kEntries, own = warp_lane() % kTile;
    const float* x = scratch + kReadAt;
    const float beta = sigmoid<Numbers>(x[kSteps]), step = x[kSteps + 1] + gates.step;
    const float softplus = softplus_of(step);
    if (warp_lane() == 0) {
      const float decay_now = exp_of(-exp_of(gates.rate) * softplus);
      scratch[kDecaysAt + at] = decay_now;
      if (tile % kHeadTiles == 0) *decay(head, position, tile) = decay_now;
    }
    sync_warp();

    const float of_key = key_factor(), of_query = rsqrt_of(sum_of(kQuerySquares) + Op::kUnitEps) * Op::kQueryScale;
    // How much the entry of the thread, a delta along its key, is left and in the direction of the key and the query.
    const float left = own <= at ? decayed(own, at) : 0.0f;
    const float by_key = own < at ? left * (sum_of(kKeysKey + own) * of_key) : 0.0f;
    const float by_query = left * (own == at ? sum_of(kKeyQuery) * of_key : sum_of(kKeysQuery + own)) * of_query;
    float of_deltas = 0, result = 0;
    LF_UNROLL for (int j = 0; j < kEntries; j++) {
      const float delta = scratch[kDeltasAt + j * kTile + own];
      of_deltas += bits_to_float(shuffle_from(float_to_bits(by_key), j)) * delta;
      result += bits_to_float(shuffle_from(float_to_bits(by_query), j)) * delta;
    }
    const float of_state = decayed(-1, at);
    const bool real = own < own_channels(tile);
    const float value = real ? x[2 * kKeyDim + own] : 0.0f;
    const float delta = beta * (value - of_state * (sum_of(kStateKey + own) * of_key) - of_deltas);
    result += of_state * (sum_of(kStateQuery + own) * of_query);
    result += bits_to_float(shuffle_from(float_to_bits(by_query), at)) * delta;
    const bool first = warp_lane() < kTile;
    if (first) {
      scratch[kDeltasAt + at * kTile + own] = delta;
      deltas(head, position, tile)[own] = delta;
    }

    float squares = real ? result * result : 0.0f;
    LF_UNROLL for (int mask = 1; mask < kTile; mask *= 2) squares += shuffle(squares, mask);
    watch.delay();
    const int value_head = head * kRatio + tile / kHeadTiles, channel = tile % kHeadTiles * kTile + own;
    const float gate = activated<Activation::kSilu, Numbers>(x[kGates + own]);
    if (first && real)
      store_word(found(m) + value_head * kValueDim + channel, word_of(result * gates.gain * gate, tag));
    if (warp_lane() == 0)
      store_word(found(m) + kSquares + value_head * kHeadTiles + tile % kHeadTiles, word_of(squares, tag));
  }

  // The key of a row joins those of its stretch.
  LF_DEVICE void keep_key(int head, int tile, int position, Tile& keys) const {
    const float *key = scratch + kReadAt + kKeyDim, factor = key_factor();
    const int at = position % kEntries;
    LF_UNROLL for (int i = 0; i < kOwnPieces; i++) {
      const int own = piece(i);
      const float value = real(own) ? key[column(own)] * factor : 0.0f;
      LF_UNROLL for (int r = 0; r < 4; r++) if (first_row() + r == at) keys.of[i][r] = value;
      if (tile == 0 && real(own) && first_row() == at / 4 * 4)
        this->keys(head, position)[column(own) * kEntries + at] = value;
    }
  }

  // rows: those of a slot, from `begin` to `end`.
  LF_DEVICE void run_task(int head, int tile, int begin, int end) const {
    const int first = pass.start_of(begin), from = first / kEntries * kEntries;
    // All of it is on its way before the queries arrive.
    Tile matrix, keys;
    Channels channels;
    load(this->matrix(head, tile), matrix);
    load(this->keys(head, first), keys);
    int base = first == 0 ? 0 : load_between_ctas(this->base(head));
    load_channels(head, tile, first, channels);
    const Gates gates = load_gates(head, tile);
    if (base == 0) keep_rows(matrix, 0);
    if (base < from) {  // all entries of a stretch are those of the text
      for (; base < from; base += kEntries) {
        Tile of_stretch;
        load(this->keys(head, base), of_stretch);
        bring_entries(head, tile, base, kEntries);
        advance(matrix, of_stretch);
      }
      store(matrix, this->matrix(head, tile));
    }
    keep_rows(keys, first - from);
    bring_entries(head, tile, from, first - from);

    for (int m = begin; m < end; m++) {
      const int position = first + m - begin;
      if (most > 1 && m > begin && position % kEntries == 0) {  // entries of drafts, perhaps: the matrix is not stored
        advance(matrix, keys);
        keep_rows(keys, 0);
        bring_entries(head, tile, position, 0);
      }
      read(head, tile, m, channels);
      multiply(matrix, keys);
      if (warp() == 0) respond(head, tile, m, gates);
      keep_key(head, tile, position, keys);
      sync_cta();
    }
  }

 public:
  // The factors of row m's heads into shared memory, by all CTAs of the lane; a sync_cta makes them visible. All tiles
  // have read the base of their matrices then, and have moved them on.
  LF_DEVICE void merge(int m, float* out) const {
    gather<kThreads>(found(m) + kSquares, kAllSquares, tag, scratch, watch, kAtVector);
    sync_cta();
    for (int head = opaque(thread()); head < Op::kValueHeads; head += kThreads) {
      float squares = 0;
      LF_UNROLL for (int tile = 0; tile < kHeadTiles; tile++) squares += scratch[head * kHeadTiles + tile];
      out[head] = rsqrt_of(squares / (float)kValueDim + Op::kNormEps);
      if (m == pass.first_of(m) && cta() % kCtas == 0 && head < Op::kKeyHeads)
        *of(pass.slot_of(m)).base(head) = pass.start_of(m) / kEntries * kEntries;
    }
  }

  template <class Shape>
  LF_DEVICE ScaledFromBoard<Shape, kValueDim, most> reader(const float* merged, int stride) const {
    return {{boards_of(boards_of_first + kPartsBoard, pass), tag, watch}, merged, stride};
  }
};

}  // namespace gpu
}  // namespace laneformer
