// Gated DeltaNet, which Decoder runs in place of attention. custom_calls/cpu/ops/delta_net.cc has the equations.
//
// A layer keeps the same state as on the CPU (custom_calls/plan.py): matrices as they were at a base, a multiple of
// kEntries positions; entries (a key, a delta and a decay) of the positions since; and the last inputs of the
// convolution. So a position reads the matrices once, and kEntries positions write them once. Wrong drafts leave only
// entries, which the next pass overwrites.
//
// A task is a tile, 16 channels of a value head, computed by one CTA. The CTA convolves the queries and keys of the key
// head by itself and has the tile's matrix in registers for all rows of a pass. The first tile of a key head writes to
// the state what its tiles share, keys and inputs of the convolution; the first tile of a value head writes its decays.
// Other CTAs read these only in later passes, as they read the cache of attention.
//
// The norm of a head needs all of its channels, which several CTAs have. A task publishes its channels, times gains and
// gates, and the sum of their squares, and the product that follows multiplies each channel by the factor of its head.
#pragma once

#include "product.h"

namespace laneformer {
namespace gpu {

// Loads the thread's part of a vector from a board, each channel times the factor of its head.
template <class Shape, int head_channels, int rows>
struct ScaledFromBoard {
  FromBoard<Shape, rows> board;
  const float* factors;  // in shared memory, [rows][heads]
  int stride;            // floats between two rows

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

// Whether the state that an op keeps in a layer for a slot can continue at a position.
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

  // The projected vector: q, k, v and z of each key head, then b and a of each key head.
  static constexpr int kValues = kRatio * kValueDim, kChannels = Op::kHeadChannels, kHeadRows = Op::kHeadRows;

  // Sizes of a key head's state: 16-byte pieces of a tile; floats of the entries of a stretch, kEntries positions;
  // bytes of the ring with the convolution's inputs, by position.
  static constexpr int kPieces = kKeyDim * kQuarters, kOwnPieces = (kPieces + kThreads - 1) / kThreads;
  static constexpr int kStretch = Op::kStretchFloats;
  static constexpr int kBefore = Op::kTaps - 1, kRing = kBefore + kEntries;
  static constexpr i64 kInputBytes = (i64)kRing * kChannels * bytes_of(kCache);

  // What a task reads of the projected vector: q, k and its channels of v, which it convolves, its channels of z, b and
  // a of its heads.
  static constexpr int kMixed = 2 * kKeyDim + kTile, kOwnMixed = (kMixed + kThreads - 1) / kThreads;
  static constexpr int kGates = kMixed, kSteps = kGates + kTile, kRead = kSteps + 2;

  // Places of sums over the channels of a key; and of a row's board: channels, then the squares of each tile.
  enum Sums { kStateKey = 0, kStateQuery = kTile, kKeysKey = 2 * kTile, kKeysQuery = 3 * kTile };
  static constexpr int kKeySquares = 4 * kTile, kQuerySquares = kKeySquares + 1, kKeyQuery = kKeySquares + 2,
                       kSums = kKeySquares + 3;
  static constexpr int kSquares = Op::kWidth, kAllSquares = Op::kValueHeads * kHeadTiles;

  // Places in scratch memory, in floats; `merge` uses the same memory.
  static constexpr int kDeltasAt = 0, kDecaysAt = kEntries * kTile, kReadAt = kDecaysAt + kEntries,
                       kSumsAt = kReadAt + kRead;
  static constexpr int kFloats = larger_of(kSumsAt + kWarps * kSums, kAllSquares);
  static constexpr int kMerged = Op::kValueHeads;  // factors of a row's heads

  const Params& p;
  u64* boards_of_first;  // the boards of the pass's first row
  float* scratch;
  Watch& watch;
  int lane_here, layer;
  Run<most> pass;
  u32 tag;
  int slot = 0;  // the slot whose rows a task computes

  LF_DEVICE const u64* projected(int m) const { return boards_of_first + Op::kFrom + (i64)m * kLaneWords; }
  LF_DEVICE u64* found(int m) const { return boards_of_first + kPartsBoard + (i64)m * kLaneWords; }
  LF_DEVICE const float* small(int offset, int stride) const {
    return p.small + offset + (i64)(p.first_lane + lane_here) * stride;
  }

  // A key head's part of the layer's kept array `number`, which has `each` values for a head.
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

  // A thread's pieces of a tile [key_dim][16]. A piece is four rows of channel `column` of the key.
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
  // Zeros the rows from `count` on.
  LF_DEVICE static void keep_rows(Tile& tile, int count) {
    LF_UNROLL for (int i = 0; i < kOwnPieces; i++) {
      LF_UNROLL for (int r = 0; r < 4; r++) if (first_row() + r >= count) tile.of[i][r] = 0;
    }
  }

  // Brings the deltas and decays of a stretch to shared memory. Positions from `count` on get zeros and ones.
  LF_DEVICE void bring_entries(int head, int tile, int from, int count) const {
    for (int i = opaque(thread()); i < kEntries * kTile; i += kThreads) {
      const int j = i / kTile;
      scratch[kDeltasAt + i] = j < count ? load_between_ctas(deltas(head, from + j, tile) + i % kTile) : 0.0f;
    }
    for (int j = opaque(thread()); j < kEntries; j += kThreads)
      scratch[kDecaysAt + j] = j < count ? load_between_ctas(decay(head, from + j, tile)) : 1.0f;
  }

  // The product of a stretch's decays from entry `after` + 1 to entry `last`.
  LF_DEVICE float decayed(int after, int last) const {
    float product = 1;
    LF_UNROLL for (int j = kEntries - 1; j >= 0; j--) if (j > after && j <= last) product *= scratch[kDecaysAt + j];
    return product;
  }

  // Advances the matrix by a whole stretch. The deltas in shared memory are not valid afterwards.
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
        LF_UNROLL for (int r = 0; r < 4; r++) matrix.of[i][r] = fma(key, delta[r], matrix.of[i][r]);
      }
    }
    sync_cta();
  }

  // A thread's channels of the convolution: weights, and inputs of the last positions.
  struct Channels {
    float weight[kOwnMixed][Op::kTaps], before[kOwnMixed][larger_of(kBefore, 1)];
  };

  // The number of a task's channel i among those of the key head.
  LF_DEVICE static int channel_of(int i, int tile) {
    if (i < 2 * kKeyDim) return i;
    const int within = smaller(tile % kHeadTiles * kTile + i - 2 * kKeyDim, kValueDim - 1);  // padding: the last one
    return 2 * kKeyDim + tile / kHeadTiles * kValueDim + within;
  }

  LF_DEVICE void load_channels(int head, int tile, int position, Channels& channels) const {
    const float* weights = small(Op::convolution(layer), Op::kConvolutionStride);
    const void* inputs = inputs_of(head);
    LF_UNROLL for (int n = 0; n < kOwnMixed; n++) {
      const int i = smaller(n * kThreads + opaque(thread()), kMixed - 1), channel = channel_of(i, tile);
      const int part = i / kKeyDim;  // the weights are of all queries, then keys, then values
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

  // Brings what a task reads of row m to shared memory, and convolves its queries, keys and values.
  LF_DEVICE void read(int head, int tile, int m, Channels& channels) const {
    float* x = scratch + kReadAt;
    gather<kThreads>(projected(m), kRead, tag, x, watch, kAtVector, [&](int i) {
      if (i < kMixed) return head * kHeadRows + channel_of(i, tile);
      if (i < kSteps) return head * kHeadRows + kValues + channel_of(i - kTile, tile);  // z follows v
      return Op::kStepsBegin + (2 * head + i - kSteps) * kRatio + tile / kHeadTiles;
    });
    const int position = pass.position_of(m);
    LF_UNROLL for (int n = 0; n < kOwnMixed; n++) {
      const int i = n * kThreads + opaque(thread());  // the thread itself brought x[i]
      if (i >= kMixed) continue;
      const float input = rounded_to<kCache>(x[i]);
      float sum = 0;
      LF_UNROLL for (int b = 0; b < kBefore; b++) sum = fma(channels.weight[n][b], channels.before[n][b], sum);
      sum = fma(channels.weight[n][kBefore], input, sum);
      x[i] = activated<Activation::kSilu, Numbers>(sum);
      LF_UNROLL for (int b = 0; b + 1 < kBefore; b++) channels.before[n][b] = channels.before[n][b + 1];
      if (kBefore > 0) channels.before[n][kBefore - 1] = input;
      if (i < 2 * kKeyDim ? tile == 0 : i - 2 * kKeyDim < own_channels(tile))
        put_element<kCache>(inputs_of(head), (i64)(position % kRing) * kChannels + channel_of(i, tile), input);
    }
    sync_cta();
  }

  LF_DEVICE static int own_channels(int tile) { return smaller(kTile, kValueDim - tile % kHeadTiles * kTile); }

  // Each warp's sums of the products of matrix and keys with the query and the key, before the norms of these.
  LF_DEVICE void multiply(const Tile& matrix, const Tile& keys) const {
    const float *query = scratch + kReadAt, *key = query + kKeyDim;
    float sums[4][4] = {}, squares[3] = {};
    LF_UNROLL for (int i = 0; i < kOwnPieces; i++) {
      const int at = piece(i), c = smaller(column(at), kKeyDim - 1);
      const float k = real(at) ? key[c] : 0.0f, q = real(at) ? query[c] : 0.0f;
      LF_UNROLL for (int r = 0; r < 4; r++) {
        sums[0][r] = fma(matrix.of[i][r], k, sums[0][r]), sums[1][r] = fma(matrix.of[i][r], q, sums[1][r]);
        sums[2][r] = fma(keys.of[i][r], k, sums[2][r]), sums[3][r] = fma(keys.of[i][r], q, sums[3][r]);
      }
      squares[0] = fma(k, k, squares[0]), squares[1] = fma(q, q, squares[1]), squares[2] = fma(k, q, squares[2]);
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

  // Small weights of a value head, and the gain of the thread's channel.
  struct Gates {
    float step, rate, gain;
  };
  LF_DEVICE Gates load_gates(int head, int tile) const {
    const int value_head = head * kRatio + tile / kHeadTiles;
    const int channel = smaller(tile % kHeadTiles * kTile + warp_lane() % kTile, kValueDim - 1);
    return {small(Op::step(layer), Op::kStepStride)[value_head], small(Op::decay(layer), Op::kDecayStride)[value_head],
            small(Op::norm(layer), Op::kNormStride)[channel]};
  }

  // Computes the delta and the result of row m, by the first warp. Thread i of 16 has entry i and channel i.
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
    // How much of the thread's entry, a delta along its key, is left; and its part along the key and the query.
    const float left = own <= at ? decayed(own, at) : 0.0f;
    const float by_key = own < at ? left * (sum_of(kKeysKey + own) * of_key) : 0.0f;
    const float by_query = left * (own == at ? sum_of(kKeyQuery) * of_key : sum_of(kKeysQuery + own)) * of_query;
    float of_deltas = 0, result = 0;
    LF_UNROLL for (int j = 0; j < kEntries; j++) {
      const float delta = scratch[kDeltasAt + j * kTile + own];
      of_deltas = fma(bits_to_float(shuffle_from(float_to_bits(by_key), j)), delta, of_deltas);
      result = fma(bits_to_float(shuffle_from(float_to_bits(by_query), j)), delta, result);
    }
    const float of_state = decayed(-1, at);
    const bool real = own < own_channels(tile);
    const float value = real ? x[2 * kKeyDim + own] : 0.0f;
    const float delta = beta * (fma(-of_state, sum_of(kStateKey + own) * of_key, value) - of_deltas);
    result = fma(of_state, sum_of(kStateQuery + own) * of_query, result);
    result = fma(bits_to_float(shuffle_from(float_to_bits(by_query), at)), delta, result);
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

  // Adds the key of a position to those of its stretch, in registers and in the state.
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

  // Computes a tile for rows `begin` to `end` - 1 of the pass, which are of one slot.
  LF_DEVICE void run_task(int head, int tile, int begin, int end) const {
    const int first = pass.start_of(begin), from = first / kEntries * kEntries;
    // All of this is loaded before the queries arrive.
    Tile matrix, keys;
    Channels channels;
    load(this->matrix(head, tile), matrix);
    load(this->keys(head, first), keys);
    int base = first == 0 ? 0 : load_between_ctas(this->base(head));
    load_channels(head, tile, first, channels);
    const Gates gates = load_gates(head, tile);
    if (base == 0) keep_rows(matrix, 0);
    if (base < from) {  // stretches whose entries are all of the text, not of drafts
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
      if (most > 1 && m > begin && position % kEntries == 0) {  // entries may be of drafts: the matrix is not stored
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
  // Computes the factors of row m's heads in shared memory, in every CTA of the lane; a sync_cta must follow. Once the
  // squares have arrived, all tiles have read the base and advanced their matrices, so the new base is written here.
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
