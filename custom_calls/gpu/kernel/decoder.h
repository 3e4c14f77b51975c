// What a CTA does for a token, op by op. decode.cu does it all in one launch, steps.cu an op in each.
//
// Specialised for one model: model.h is made by custom_calls/gpu/layout.py.
#pragma once

#include "attention.h"
#include "experts.h"
#include "residual.h"
#include "sampling.h"

namespace laneformer {
namespace gpu {

// Tags of a pass: the residual stream's edges, by time, and the last one of the head.
constexpr u32 kStreamEdges = 2 * kLayers + 1, kHeadEdge = kStreamEdges;

// Names in a trace, as custom_calls/gpu/session.py has them; then those of ops (laneformer.ops.TRACE_NAMES).
enum Names { kNameEmbed, kNameMerge, kNameFinal, kNameHead, kNameSample, kNameOp };

struct Partials {
  template <class Op>
  static constexpr int of() {
    if constexpr (Op::kTiled) return kPartials<Op> * Op::kSumSets;
    return 0;
  }
};
struct BroughtFloats {
  template <class Op>
  static constexpr int of() {
    if constexpr (Op::kTiled) return kBrought<Op>;
    return 0;
  }
};
struct AttentionFloats {
  template <class Op>
  static constexpr int of() {
    if constexpr (Op::kIsAttend) return Attention<Op>::kFloats;
    return 0;
  }
};
struct MergedFloats {
  template <class Op>
  static constexpr int of() {
    if constexpr (Op::kIsAttend) return Op::kHeads * Op::kHeadDim;
    return 0;
  }
};

constexpr int kPartialFloats = larger_of(most_of<Partials>(Layers{}), kPartials<Head>);
constexpr int kBroughtFloats = larger_of(most_of<BroughtFloats>(Layers{}), kBrought<Head>);
constexpr int kScratchFloats = larger_of(most_of<AttentionFloats>(Layers{}), kSampleFloats);
constexpr int kMergedFloats = most_of<MergedFloats>(Layers{});
constexpr int even(int n) { return n + n % 2; }

static_assert(2 * kWarps + kStreamRows <= kScratchFloats, "the residual stream uses it too");
static_assert(kPassTags > 2 * kLayers + 2, "every edge of a pass has its own tag");

// Shared memory after the ring: barriers, then floats.
struct Shared {
  float *partial[2], *squares[2], *scratch, *merged, *brought, *x, *history, *logits, *z;
  int* end;

  static constexpr int kFloats = 2 * even(kPartialFloats) + 2 * even(kWarps) + even(kScratchFloats) +
                                 even(kMergedFloats) + even(kBroughtFloats) + even(kStreamRows) +
                                 even(kHistory * kStreamRows) + (kZInMerged ? 1 : 2) * even(kHeadRows) + 2;

  static_assert(kFloats == kSharedFloats, "custom_calls/gpu/layout.py counts otherwise");

  LF_DEVICE Shared(float* at) {
    const auto take = [&](int n) {
      float* taken = at;
      at += n + n % 2;
      return taken;
    };
    scratch = take(kScratchFloats);  // first, for it holds 8-byte numbers
    partial[0] = take(kPartialFloats), partial[1] = take(kPartialFloats);
    squares[0] = take(kWarps), squares[1] = take(kWarps);
    merged = take(kMergedFloats);
    brought = take(kBroughtFloats);
    x = take(kStreamRows), history = take(kHistory * kStreamRows);
    logits = take(kHeadRows);
    z = kZInMerged ? merged : take(kHeadRows);  // the layers and the sampler take turns
    end = (int*)take(1);
  }
};

constexpr bool kHeadOfAll =
    Head::kKind != HeadKind::kVocabParallel && kLanes > 1;  // it reads what the lanes have made together

struct Control {
  int prompt, start, limit;

  LF_DEVICE explicit Control(const Params& p) : prompt(p.control[0]), start(p.control[1]), limit(p.control[2]) {}
};

LF_DEVICE float norm_factor(const float* squares, float eps) {
  float sum = 0;
  LF_UNROLL for (int w = 0; w < kWarps; w++) sum += squares[w];
  return rsqrt_of(sum / (float)kHidden + eps);
}

class Decoder {
 public:
  LF_DEVICE Decoder(const Params& p, Shared& shared, Stream& stream, Watch& watch, int lane_here, int c)
      : residual{p,
                 shared.x,
                 shared.history,
                 shared.scratch,
                 watch,
                 p.first_lane + lane_here,
                 c * kStreamRows,
                 rows_of(c * kStreamRows, kStreamRows, kHidden)},
        p_(p),
        shared_(shared),
        stream_(stream),
        watch_(watch),
        lane_here_(lane_here),
        lane_(p.first_lane + lane_here),
        c_(c),
        lists_(p),
        boards_(p.boards + (i64)lane_here * kLaneWords) {}

  Residual residual;

  LF_DEVICE void embed(int token, u32 tag) {
    const Clock clock(*this, kNameEmbed, -1);
    if (kListed) lists_.begin(0);
    residual.begin(token);
    residual.publish(stream_board(0), tag);
    clock.end();
  }

  // All ops of a layer.
  LF_DEVICE void run(int layer, int position, u32 tag, u32 sequence) {
    watch_.layer = layer;
    run_layer(Layers{}, layer, position, tag, sequence);
    if constexpr (kAnyExperts) end_part(stream_);
  }

  // One of them, by its place among them.
  LF_DEVICE void run_one(int number, int layer, int position, u32 tag, u32 sequence) {
    run_one_of(Layers{}, number, layer, position, tag, sequence);
  }

  // What a head over all lanes needs of them.
  LF_DEVICE void final(u32 tag, u32 sequence) {
    const Clock clock(*this, kNameFinal, kLayers);
    if (kHeadOfAll) combine_lanes(final_gains(), tag, sequence);
    clock.end();
  }

  // Logits of the CTA's rows into shared memory.
  LF_DEVICE void head(u32 tag, int rows) {
    const Clock clock(*this, kNameHead, kLayers);
    constexpr bool normed = !kHeadOfAll || Head::kNormOfSum;
    for (int turn = 0; turn < kHeadTurns; turn++) {
      float* partial = next_partial();
      const u64* vector = kHeadOfAll ? boards_ + kHeadBoard : stream_board(2 * kLayers);
      const FromBoard<Reading<Head>> board = {vector, tag + (kHeadOfAll ? kHeadEdge : 2 * kLayers), watch_};
      float* squares = this->squares(turn_);
      if constexpr (normed) {
        if constexpr (Head::kColumns == kHidden)
          product<Head>(stream_, weights<Head>(0), partial, shared_.brought,
                        NormedFromBoard<Reading<Head>>{board, final_gains(), squares});
      } else {
        product<Head>(stream_, weights<Head>(0), partial, shared_.brought, board);
      }
      if (!kSteps && turn == kHeadTurns - 1) stream_.skip_padding(kHeadPadding);
      sync_cta();
      const float factor = normed ? norm_factor(squares, Head::kNormEps) : 1.0f;
      float* logits = shared_.logits + turn * Head::kRows;
      const int here = kHeadTurns == 1 ? rows : smaller(rows - turn * Head::kRows, Head::kRows);
      for (int r = opaque(thread()); r < here; r += kThreads) logits[r] = row_sum<Head>(partial, r) * factor;
    }
    if constexpr (kHeadTurns > 1) sync_cta();  // the sampler's threads have other rows than those that wrote them
    clock.end();
  }

  // The end of a pass: the token of the next one, which the prompt has or the sampler draws.
  LF_DEVICE void next(Sampler& sampler, const Control& control, u32 tag, Progress& now) {
    const Clock clock(*this, kNameSample, kLayers);
    const int parity = (int)(tag / kPassTags & 1);
    if (now.pass + 1 < control.prompt) {
      if (const int end = sampler.end_of_pass(tag, parity)) now.end = end;
      now.token = p_.prompt[now.pass + 1];
    } else {
      const Sampled sampled = sampler.sample(tag, parity, control.start + now.pass + 1, now.drawn);
      now.token = sampled.token;
      if (sampled.end) {
        now.end = sampled.end;
      } else {
        now.drawn++;
        for (int i = 0; i < p_.num_stops; i++)
          if (p_.stops[i] == now.token) now.end = kStop;
      }
    }
    clock.end();
    now.over = now.end != kLength || now.drawn == control.limit;
    now.pass++;
  }

  // One op on the trace.
  struct Clock {
    Decoder& d;
    int op, layer;
    u64 began;
    LF_DEVICE Clock(Decoder& d, int op, int layer) : d(d), op(op), layer(layer), began(d.p_.spans ? clock_ns() : 0) {}
    LF_DEVICE void end() const {
      if (!d.p_.spans || thread() != 0) return;
      int& n = d.p_.num_spans[cta()];
      if (n < d.p_.max_spans) d.p_.spans[(i64)cta() * d.p_.max_spans + n++] = {op, layer, began, clock_ns()};
    }
  };

  LF_DEVICE static int rows_of(int first, int rows, int all) { return larger(0, smaller(rows, all - first)); }

 private:
  LF_DEVICE u64* stream_board(int time) const { return boards_ + (time % 2 == 0 ? kStreamBoard : kOtherStreamBoard); }

  // Partial sums of one op are read while those of the next one are written.
  LF_DEVICE float* next_partial() {
    turn_ ^= 1;
    return shared_.partial[0] +
           turn_ * (shared_.partial[1] - shared_.partial[0]);  // an array of pointers would be kept in memory
  }
  LF_DEVICE float* squares(int turn) const {
    return shared_.squares[0] + turn * (shared_.squares[1] - shared_.squares[0]);
  }

  template <class Shape>
  LF_DEVICE typename Shape::Weights::Reader weights(int layer) {
    return {p_, lists_, Shape::product(layer)};
  }

  // A small weight of this lane.
  LF_DEVICE const float* small(int offset, int stride) const { return p_.small + offset + (i64)lane_ * stride; }
  LF_DEVICE const float* final_gains() const { return small(Head::norm(0), Head::kNormStride); }

  template <class Op>
  LF_DEVICE float biased(float value, int layer, int row) const {
    if constexpr (Op::kBiased) return value + small(Op::bias(layer), Op::kBiasStride)[row];
    return value;
  }

  template <class... Kind>
  LF_DEVICE void run_layer(Kinds<Kind...>, int layer, int position, u32 tag, u32 sequence) {
    const int kind = kind_of(layer);
    int number = 0;
    ((kind == number++ ? run_all(Kind{}, layer, position, tag, sequence) : void()), ...);
  }
  template <class... Op>
  LF_DEVICE void run_all(Ops<Op...>, int layer, int position, u32 tag, u32 sequence) {
    (run_op<Op>(layer, position, tag, sequence), ...);
  }
  template <class... Kind>
  LF_DEVICE void run_one_of(Kinds<Kind...>, int wanted, int layer, int position, u32 tag, u32 sequence) {
    const int kind = kind_of(layer);
    int number = 0;
    ((kind == number++ ? run_number(Kind{}, wanted, layer, position, tag, sequence) : void()), ...);
  }
  template <class... Op>
  LF_DEVICE void run_number(Ops<Op...>, int wanted, int layer, int position, u32 tag, u32 sequence) {
    int number = 0;
    ((wanted == number++ ? run_op<Op>(layer, position, tag, sequence) : void()), ...);
  }

  template <class Op>
  LF_DEVICE void run_op(int layer, int position, u32 tag, u32 sequence) {
    if constexpr (Op::kChosen) {
      multiply_chosen<Op>(layer, tag, sequence);
    } else if constexpr (Op::kIsProduct) {
      multiply<Op>(layer, position, tag, sequence);
    } else {
      const Clock clock(*this, kNameOp + Op::kTraced, layer);
      if constexpr (Op::kIsAttend) {
        attention<Op>(layer, position, tag).run(c_, Attention<Op>::splits_of(position, Op::window(layer)));
      } else if constexpr (Op::kIsRoute) {
        route<Op>(layer, tag);
      } else {
        residual.run<Op>(layer, tag);
        if constexpr (Op::kEndsModule) end_module<Op>(layer, tag, sequence);
      }
      clock.end();
    }
  }

  template <class Op>
  LF_DEVICE Attention<Op> attention(int layer, int position, u32 tag) const {
    return {p_,
            boards_ + kProjectedBoard,
            boards_ + kPartsBoard,
            shared_.scratch,
            watch_,
            lane_here_,
            layer,
            position,
            tag + layer};
  }

  template <class Op>
  LF_DEVICE void multiply(int layer, int position, u32 tag, u32 sequence) {
    if constexpr (Op::kReads == Value::kAttended) {
      using Attended = typename Op::Attended;
      const Clock clock(*this, kNameMerge, layer);
      attention<Attended>(layer, position, tag)
          .merge(Attention<Attended>::splits_of(position, Attended::window(layer)), shared_.merged);
      sync_cta();
      clock.end();
    }
    const Clock clock(*this, kNameOp + Op::kTraced, layer);
    const int time = 2 * layer + Op::kModule;
    float* partial = next_partial();
    if constexpr (Op::kReads == Value::kStream) {
      multiply_stream<Op>(layer, tag, partial);
    } else if constexpr (Op::kReads == Value::kAttended) {
      product<Op>(stream_, weights<Op>(layer), partial, shared_.brought, FromShared<Reading<Op>>{shared_.merged});
    } else {
      product<Op>(stream_, weights<Op>(layer), partial, shared_.brought,
                  FromBoard<Reading<Op>>{boards_ + kHiddenBoard, tag + layer, watch_});
    }
    sync_cta();
    if constexpr (Op::kWrites == Value::kOutput) {
      residual.set_output(time, [&](int r) { return biased<Op>(row_sum<Op>(partial, r), layer, residual.first + r); });
      if constexpr (Op::kEndsModule) end_module<Op>(layer, tag, sequence);
    } else {
      watch_.delay();
      write<Op>(partial, layer, tag + layer);
    }
    clock.end();
  }

  template <class Op>
  LF_DEVICE void multiply_stream(int layer, u32 tag, float* partial) {
    const int time = 2 * layer + Op::kModule;
    const FromBoard<Reading<Op>> board = {stream_board(time), tag + time, watch_};
    if constexpr (Op::kNormed) {
      const float* gains = small(Op::norm(layer), Op::kNormStride);
      product<Op>(stream_, weights<Op>(layer), partial, shared_.brought,
                  NormedFromBoard<Reading<Op>>{board, gains, squares(turn_)});
    } else {
      product<Op>(stream_, weights<Op>(layer), partial, shared_.brought, board);
    }
  }

  // The router's logits of the CTA's experts, for all CTAs of the lane.
  template <class Op>
  LF_DEVICE void route(int layer, u32 tag) {
    float* partial = next_partial();
    multiply_stream<Op>(layer, tag, partial);
    end_part(stream_);
    sync_cta();
    watch_.delay();
    float factor = 1;
    if constexpr (Op::kNormed) factor = norm_factor(squares(turn_), Op::kNormEps);
    const int first = c_ * Op::kRows, count = rows_of(first, Op::kRows, Op::kAllRows);
    for (int r = opaque(thread()); r < count; r += kThreads)
      store_word(boards_ + kRoutesBoard + first + r,
                 word_of(biased<Op>(row_sum<Op>(partial, r) * factor, layer, first + r), tag + layer));
  }

  // A product with the chosen experts' matrices.
  template <class Op>
  LF_DEVICE void multiply_chosen(int layer, u32 tag, u32 sequence) {
    const Clock clock(*this, kNameOp + Op::kTraced, layer);
    if constexpr (kSteps || !Op::kSummed) {
      routes_ = choose<typename Op::Router>(boards_ + kRoutesBoard, tag + layer, watch_);
      order<Op>(stream_, layer, c_, routes_);
    }
    float* partial = next_partial();
    const Pieces<Op> pieces = {c_};
    const int count = pieces.count();
    if constexpr (Op::kSummed) {
      if (count == 0)
        for (int r = warp_lane(); r < kPaddedRows<Op>; r += kWarpSize) partial[warp() * kPaddedRows<Op> + r] = 0;
    }
    for (int i = 0; i < count; i++) {
      if constexpr (Op::kSummed) {
        const int rank = pieces.rank(i);
        const float share = bits_to_float(broadcast(float_to_bits(routes_.share), rank));
        const u64* board = boards_ + kHiddenBoard + rank * kEven<Op::kColumns>;
        product<Op>(stream_, weights<Op>(layer), partial, shared_.brought,
                    FromExpert<Reading<Op>>{board, tag + layer, watch_, pieces.part(i), share}, i > 0);
      } else {
        multiply_stream<Op>(layer, tag, partial + i * kPartials<Op>);
      }
      end_part(stream_);
    }
    if constexpr (kSteps || Op::kSummed) close(stream_);
    sync_cta();
    if constexpr (Op::kSummed) {
      add_experts<Op>(partial, layer, tag, sequence);
    } else {
      watch_.delay();
      for (int i = 0; i < count; i++) write_expert<Op>(partial + i * kPartials<Op>, layer, tag + layer, pieces, i);
    }
    clock.end();
  }

  // Hidden channels of an expert, for all CTAs of the lane.
  template <class Op>
  LF_DEVICE void write_expert(const float* partial, int layer, u32 tag, const Pieces<Op>& pieces, int i) {
    constexpr int of = Op::kGated ? 2 : 1, own = Op::kRows / of, all = Op::kAllRows / of;
    const int rank = pieces.rank(i), expert = (int)broadcast((u32)routes_.expert, rank);
    float factor = 1;
    if constexpr (Op::kNormed) factor = norm_factor(squares(turn_), Op::kNormEps);
    const int first = pieces.part(i) * own, count = rows_of(first, own, all);
    u64* board = boards_ + kHiddenBoard + rank * kEven<all>;
    for (int r = opaque(thread()); r < count; r += kThreads)
      store_word(
          board + first + r,
          word_of(finished<Op>(partial, r, factor, layer, expert * all + first + r, Op::Router::kAllRows * all), tag));
  }

  // The sum of the chosen experts' outputs: their channels were multiplied by their shares, their biases are here.
  template <class Op>
  LF_DEVICE void add_experts(const float* partial, int layer, u32 tag, u32 sequence) {
    int expert[Op::kUsed];
    float share[Op::kUsed];
    LF_UNROLL for (int j = 0; j < Op::kUsed; j++) {
      expert[j] = (int)broadcast((u32)routes_.expert, j);
      share[j] = bits_to_float(broadcast(float_to_bits(routes_.share), j));
    }
    residual.set_output(2 * layer + Op::kModule, [&](int r) {
      float sum = row_sum<Op>(partial, r);
      if constexpr (Op::kBiased) {
        const float* biases = small(Op::bias(layer), Op::kBiasStride) + residual.first + r;
        LF_UNROLL for (int j = 0; j < Op::kUsed; j++) sum += share[j] * biases[(i64)expert[j] * Op::kAllRows];
      }
      return sum;
    });
    if constexpr (Op::kEndsModule) end_module<Op>(layer, tag, sequence);
  }

  // The output goes where the schedule says, and the stream to all CTAs of the lane.
  template <class Op>
  LF_DEVICE void end_module(int layer, u32 tag, u32 sequence) {
    const int time = 2 * layer + Op::kModule;
    residual.add_output(time, tag, sequence);
    if (Op::kModule == 1 && layer == kLayers - 1) residual.apply(2 * kLayers, tag, sequence);
    residual.publish(stream_board(time + 1), tag + time + 1);
  }

  // The CTA's rows of a product of the stream, for all CTAs of the lane.
  template <class Op>
  LF_DEVICE void write(const float* partial, int layer, u32 tag) {
    constexpr int own = Op::kGated ? Op::kRows / 2 : Op::kRows;
    u64* board = boards_ + (Op::kWrites == Value::kProjected ? kProjectedBoard : kHiddenBoard);
    float factor = 1;
    if constexpr (Op::kNormed) factor = norm_factor(squares(turn_), Op::kNormEps);
    const int first = c_ * own, count = rows_of(first, own, Op::kChannels);
    for (int r = opaque(thread()); r < count; r += kThreads) {
      const float value = finished<Op>(partial, r, factor, layer, first + r, Op::kChannels);
      store_word(board + first + r, word_of(value, tag));
    }
  }

  // What is written of a row, or of a pair of them. row: of the bias; up: biases between those of gate and up.
  template <class Op>
  LF_DEVICE float finished(const float* partial, int r, float factor, int layer, int row, int up_row) const {
    if constexpr (Op::kGated) {  // the rows of gate and up take turns
      float gate = biased<Op>(row_sum<Op>(partial, 2 * r) * factor, layer, row),
            up = biased<Op>(row_sum<Op>(partial, 2 * r + 1) * factor, layer, up_row + row);
      if constexpr (Op::kLimited) {  // a NaN stays one
        gate = gate > Op::kLimit ? Op::kLimit : gate;
        up = up > Op::kLimit ? Op::kLimit : up < -Op::kLimit ? -Op::kLimit : up;
      }
      if constexpr (Op::kUpOffset != 0) up += Op::kUpOffset;
      return activated<Op::kActivation, Numbers>(gate) * up;
    } else {
      return activated<Op::kActivation, Numbers>(biased<Op>(row_sum<Op>(partial, r) * factor, layer, row));
    }
  }

  // What a head over all lanes reads: the mean of their norms, the sum of their streams, or their norms end to end.
  LF_DEVICE void combine_lanes(const float* gains, u32 tag, u32 sequence) {
    float factor = 1;
    if (!Head::kNormOfSum) {
      float sum = 0;
      float* squares = this->squares(turn_ ^ 1);
      constexpr int each = ((kHidden + 1) / 2 + kThreads - 1) / kThreads;
      float values[each][2];
      read_words<kHidden % (2 * kThreads) == 0>(
          stream_board(2 * kLayers), 2 * thread(), kHidden, tag + 2 * kLayers,
          [](int v, int) { return 2 * v * kThreads; }, values, watch_, kAtVector);
      LF_UNROLL for (int i = 0; i < each; i++) sum += values[i][0] * values[i][0] + values[i][1] * values[i][1];
      sum = sum_over_warp(sum);
      if (warp_lane() == 0) squares[warp()] = sum;
      sync_cta();
      factor = norm_factor(squares, Head::kNormEps);
    }
    watch_.delay();
    residual.each([&](int r) {
      const int row = residual.first + r;
      LaneExchange::push(p_, kMailAt, sequence + kNumSums, lane_, row,
                         Head::kNormOfSum ? shared_.x[r] : shared_.x[r] * factor * gains[row]);
    });
    residual.each([&](int r) {
      const int row = residual.first + r;
      float values[kLanes];
      LaneExchange::pull(p_.shared[p_.device] + kMailAt, sequence + kNumSums, row, values, watch_, kAtLanding);
      if (Head::kKind == HeadKind::kLane) {
        LF_UNROLL for (int l = 0; l < kLanes; l++)
            store_word(boards_ + kHeadBoard + (i64)l * kHidden + row, word_of(values[l], tag + kHeadEdge));
      } else {
        float total = values[0];
        LF_UNROLL for (int l = 1; l < kLanes; l++) total += values[l];
        store_word(boards_ + kHeadBoard + row,
                   word_of(Head::kNormOfSum ? total : total / (float)kLanes, tag + kHeadEdge));
      }
    });
  }

  const Params& p_;
  Shared& shared_;
  Stream& stream_;
  Watch& watch_;
  const int lane_here_, lane_, c_;
  Lists lists_;
  u64* boards_;
  int turn_ = 0;
  Routes routes_ = {0, 0};
};

LF_DEVICE Sampler sampler_of(const Params& p, Shared& shared, Watch& watch, int lane, int c) {
  const int place = lane * kCtas + c;
  const int first =
      Head::kKind == HeadKind::kVocabParallel ? lane * (kVocab / kLanes) + c * kHeadRows : place * kHeadRows;
  const int rows = Decoder::rows_of(first, kHeadRows,
                                    Head::kKind == HeadKind::kVocabParallel ? (lane + 1) * (kVocab / kLanes) : kVocab);
  return {p, shared.logits, shared.z, shared.scratch, shared.end, watch, place, first, rows, cta() == 0};
}

// Waits until all CTAs of all devices have ended the call before: what they read in it may be written again.
LF_DEVICE void check_in(const Params& p, Watch& watch, int place, u32 tag) {
  if (thread() == 0)
    for (int d = 0; d < p.devices; d++) store_word(p.shared[d] + kCheckInAt + place, word_of(0, tag));
  for (int from = opaque(thread()); from < kPackets; from += kThreads)
    for (u32 spins = 0; !arrived(load_word(p.shared[p.device] + kCheckInAt + from), tag);)
      if (!watch.keep_waiting(spins, kAtCheckIn, from / kCtas)) break;
  sync_cta();
}

// The results of a device, by one of its CTAs. One device of a process reports to its host, also another one's failure.
LF_DEVICE void write_results(const Params& p, int drawn, int end, int position) {
  for (int i = drawn + thread(); i < p.room; i += kThreads) p.tokens[i] = 0, p.logprobs[i] = 0;
  sync_cta();  // another thread emitted the last token
  if (thread() != 0) return;
  if (kPeerCtas > 0) store_word(p.shared[0] + 1, p.pass_tag);
  p.status[0] = drawn;
  const u64 failure = load_word(p.shared[p.device]);
  const bool failed = has_failed(failure, p.pass_tag);
  p.status[1] = failed ? (int)kFailed : end;
  p.status[2] = position;
  if (!p.reports) return;
  if (failed) p.host->failure = failure;
  *(volatile unsigned*)&p.host->ended = p.pass_tag;
  fence_system();
  *(volatile int*)&p.host->done = 1;
}

// The host does not see these numbers: they are on the device.
LF_DEVICE bool possible(const Params& p, const Control& control) {
  const auto [prompt, start, limit] = control;
  if (prompt < 1 || prompt > p.room_of_prompt || start < 0 || limit < 1 || limit > p.room) return false;
  if ((i64)start + prompt + limit - 1 > p.capacity) return false;
  for (int i = 0; i < prompt; i++)
    if (p.prompt[i] < 0 || p.prompt[i] >= kVocab) return false;
  return true;
}

// Whether there is a call to run; if not, that is its result.
LF_DEVICE bool accept(const Params& p, const Control& control) {
  if (possible(p, control)) return true;
  if (cta() == 0 && thread() == 0) p.host->failure = failure_word(p.pass_tag, kBadCall, 0, -1, 0);
  if (cta() == 0) write_results(p, 0, kFailed, control.start);
  return false;
}

LF_DEVICE void finish(const Params& p, const Control& control, const Progress& now) {
  if (cta() == 0) write_results(p, now.drawn, now.end, control.start + smaller(now.pass, control.prompt) + now.drawn);
}

LF_DEVICE const char* weights_of_cta(const Params& p) {
  return (const char*)p.weights + (i64)cta() * kWarps * kRowLines * kLineBytes;
}

}  // namespace gpu
}  // namespace laneformer
