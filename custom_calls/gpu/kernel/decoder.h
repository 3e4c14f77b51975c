// What a CTA does for a token, op by op. decode.cu does it all in one launch, steps.cu an op in each.
//
// Specialised for one model: model.h is made by custom_calls/gpu/layout.py.
#pragma once

#include "attention.h"
#include "delta_net.h"
#include "drafts.h"
#include "experts.h"
#include "residual.h"
#include "sampling.h"

namespace laneformer {
namespace gpu {

// Tags of a pass: the residual stream's edges, by time, and the last one of the head.
constexpr u32 kStreamEdges = 2 * kLayers + 1, kHeadEdge = kStreamEdges;

// Names in a trace, as custom_calls/gpu/session.py has them; then those of ops (laneformer.ops.TRACE_NAMES).
enum Names { kNameEmbed, kNameMerge, kNameFinal, kNameHead, kNameSample, kNameOp };

// What computes ATTENDED: `run` a CTA's part of it, `merge` and `reader` what the product needs that reads it.
template <class Op, int most, bool is_delta_net = Op::kIsDeltaNet>
struct AttendingBy {
  using Type = Attention<Op, most>;
};
template <class Op, int most>
struct AttendingBy<Op, most, true> {
  using Type = DeltaNet<Op, most>;
};
template <class Op, int most>
using Attending = typename AttendingBy<Op, most>::Type;

struct Partials {
  template <class Op>
  static constexpr int of() {
    if constexpr (Op::kTiled) {
      constexpr int rows = Op::kChosen ? 1 : kPassRows;  // experts' rows take turns
      return kPartials<Op, rows> * Op::kSumSets;
    }
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
    if constexpr (Op::kAttends) return Attending<Op, kPassRows>::kFloats;
    return 0;
  }
};
struct MergedFloats {
  template <class Op>
  static constexpr int of() {
    if constexpr (Op::kAttends) return Attending<Op, kPassRows>::kMerged;
    return 0;
  }
};

constexpr int kPartialFloats =
    larger_of(most_of<Partials>(Layers{}), larger_of(kPartials<Head>, kPartials<Head, kPassRows, kHeadParts>));
constexpr int kBroughtFloats = larger_of(most_of<BroughtFloats>(Layers{}), kBrought<Head>);
constexpr int kScratchFloats = larger_of(most_of<AttentionFloats>(Layers{}), kSampleFloats);
constexpr int kMergedFloats = most_of<MergedFloats>(Layers{});
constexpr int even(int n) { return n + n % 2; }

static_assert(2 * kWarps + kPassRows * kStreamRows <= kScratchFloats, "the residual stream uses it too");
static_assert(kPassTags > 2 * kLayers + 2, "every edge of a pass has its own tag");

// Shared memory after the ring: barriers, then floats.
struct Shared {
  float *partial[2], *squares[2], *scratch, *merged, *brought, *x, *history, *logits, *z;
  int *end, *drafts;

  static constexpr int kFloats = 2 * even(kPartialFloats) + 2 * even(kPassRows * kWarps) + even(kScratchFloats) +
                                 even(kPassRows * kMergedFloats) + even(kBroughtFloats) +
                                 even(kPassRows * kStreamRows) + even(kPassRows * kHistory * kStreamRows) +
                                 (kZInMerged ? 1 : 2) * even(kPassRows * kHeadRows) + 2 + even(kDraftInts);

  static_assert(kFloats == kSharedFloats, "custom_calls/gpu/layout.py counts otherwise");

  LF_DEVICE Shared(float* at) {
    const auto take = [&](int n) {
      float* taken = at;
      at += n + n % 2;
      return taken;
    };
    scratch = take(kScratchFloats);  // first, for it holds 8-byte numbers
    partial[0] = take(kPartialFloats), partial[1] = take(kPartialFloats);
    squares[0] = take(kPassRows * kWarps), squares[1] = take(kPassRows * kWarps);
    merged = take(kPassRows * kMergedFloats);
    brought = take(kBroughtFloats);
    x = take(kPassRows * kStreamRows), history = take(kPassRows * kHistory * kStreamRows);
    logits = take(kPassRows * kHeadRows);
    z = kZInMerged ? merged : take(kPassRows * kHeadRows);  // the layers and the sampler take turns
    end = (int*)take(1);
    drafts = (int*)take(kDraftInts);
  }
};

constexpr bool kHeadOfAll =
    Head::kKind != HeadKind::kVocabParallel && kLanes > 1;  // it reads what the lanes have made together

struct Control {
  int prompt, start, limit;

  LF_DEVICE explicit Control(const Params& p, int slot = 0)
      : prompt(p.control[slot * kControls]),
        start(p.control[slot * kControls + 1]),
        limit(p.control[slot * kControls + 2]) {}
};

// Of a vector of n channels.
template <int n = kHidden>
LF_DEVICE float norm_factor(const float* squares, float eps) {
  float sum = 0;
  LF_UNROLL for (int w = 0; w < kWarps; w++) sum += squares[w];
  return rsqrt_of(sum / (float)n + eps);
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
        boards_(p.boards + (i64)lane_here * kPassRows * kLaneWords) {}

  Residual residual;

  // token(m): of row m.
  template <int most, class Token>
  LF_DEVICE void embed(const Run<most>& run, Token token, u32 tag) {
    const Clock clock(*this, kNameEmbed, -1);
    if (kListed) lists_.begin(0);
    residual.begin(run, token);
    residual.publish(run, stream_board(0), tag);
    clock.end();
  }

  // All ops of a layer.
  template <int most>
  LF_DEVICE void run(const Run<most>& run, int layer, u32 tag, u32 sequence) {
    watch_.layer = layer;
    run_layer(Layers{}, run, layer, tag, sequence);
  }

  // One of them, by its place among them.
  LF_DEVICE void run_one(const Run<1>& run, int number, int layer, u32 tag, u32 sequence) {
    run_one_of(Layers{}, run, number, layer, tag, sequence);
  }

  // What a head over all lanes needs of them.
  template <int most>
  LF_DEVICE void final(const Run<most>& run, u32 tag, u32 sequence) {
    const Clock clock(*this, kNameFinal, kLayers);
    if (kHeadOfAll) combine_lanes(run, final_gains(), tag, sequence);
    clock.end();
  }

  // Logits of the CTA's rows of the head into shared memory.
  template <int most>
  LF_DEVICE void head(const Run<most>& run, u32 tag, int rows) {
    const Clock clock(*this, kNameHead, kLayers);
    constexpr bool normed = !kHeadOfAll || Head::kNormOfSum;
    constexpr int parts = most == 1 ? 1 : kHeadParts, part_rows = kPaddedRows<Head> / parts;
    for (int turn = 0; turn < kHeadTurns; turn++) {
      float* partial = next_partial();
      const u64* vector = kHeadOfAll ? boards_ + kHeadBoard : stream_board(2 * kLayers);
      const FromBoard<Reading<Head>, most> board = {boards_of(vector, run),
                                                    tag + (kHeadOfAll ? kHeadEdge : 2 * kLayers), watch_};
      float* squares = this->squares(turn_);
      const int here = kHeadTurns == 1 ? rows : smaller(rows - turn * Head::kRows, Head::kRows);
      // What a part has of them.
      const auto finish = [&](int part) {
        float factor = 1;
        if constexpr (normed && most == 1) factor = norm_factor(squares, Head::kNormEps);
        float* logits = shared_.logits + turn * Head::kRows + part * part_rows;
        each_of_rows<part_rows>(
            run, parts == 1 ? here : smaller(here - part * part_rows, part_rows), [&](int m, int r) {
              if constexpr (normed && most > 1) factor = norm_factor(squares + m * kWarps, Head::kNormEps);
              logits[m * kHeadRows + r] = row_sum<Head, most, parts>(partial, r, m, part * part_rows) * factor;
            });
      };
      const auto each_part = [&](int part) {
        sync_cta();
        finish(part);
        sync_cta();
      };
      if constexpr (normed) {
        if constexpr (Head::kColumns == kHidden)
          product<Head, most, parts>(stream_, weights<Head>(0), partial, shared_.brought,
                                     NormedFromBoard<Reading<Head>, most>{board, final_gains(), squares}, false,
                                     each_part);
      } else {
        product<Head, most, parts>(stream_, weights<Head>(0), partial, shared_.brought, board, false, each_part);
      }
      if (!kSteps && turn == kHeadTurns - 1) stream_.skip_padding(kHeadPadding);
      sync_cta();
      if constexpr (parts == 1) finish(0);
    }
    if constexpr (kHeadTurns > 1 || most > 1)
      sync_cta();  // the sampler's threads have other rows than those that wrote them
    clock.end();
  }

  // The end of a pass of one row: the token of the next one, which the prompt has or the sampler draws.
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

  // The end of a pass whose rows draw, the first one's position being `position`. A draft is right if it is what the
  // row before it has drawn; the first row whose token is another ends the run. Returns the tokens that are drawn.
  LF_DEVICE int draw(Sampler& sampler, const Drafts& drafts, int position, u32 tag, Progress& now) {
    const Clock clock(*this, kNameSample, kLayers);
    const int parity = (int)(tag / kPassTags & 1), rows = drafts.rows(), before = now.drawn;
    for (int m = 0; m < rows; m++)
      sampler.offer_row(tag, parity, m, position + m + 1, drafts.tokens(), drafts.forced(before + m));
    for (int m = 0; m < rows; m++) {
      const Sampled sampled = sampler.settle_row(tag, parity, m, now.drawn);
      if (sampled.end) {
        now.end = sampled.end;
        break;
      }
      drafts.draw(m, sampled.token);
      now.drawn++;
      if (stops(sampled.token)) now.end = kStop;
      if (now.end != kLength || (m + 1 < rows && drafts.token(m + 1) != sampled.token)) break;
    }
    clock.end();
    return now.drawn - before;
  }

  // The same where a pass has rows of several requests. Returns what the host has asked, or kFailure.
  LF_DEVICE int draw(Sampler& sampler, Requests& requests, u32 tag) {
    const Clock clock(*this, kNameSample, kLayers);
    const int parity = (int)(tag / kPassTags & 1);
    int offered = 0, settled = 0, asked = 0;
    for (int m = 0; m < requests.rows(); m++) {
      if (!requests.draws(m)) continue;
      sampler.use(requests.row(m).slot);
      sampler.offer_row(tag, parity, m, requests.position(m) + 1, offered++ == 0);
    }
    if (offered == 0) asked = sampler.end_of_pass(tag, parity);
    for (int m = 0; m < requests.rows() && asked < kFailure; m++) {
      if (!requests.draws(m)) continue;
      const int slot = requests.row(m).slot;
      sampler.slot = slot;
      const Sampled sampled = sampler.settle_row(tag, parity, m, settled++ == 0, requests.drawn(slot), asked);
      if (!sampled.end) requests.draw(m, sampled.token);
    }
    clock.end();
    return asked;
  }

  LF_DEVICE bool stops(int token) const {
    bool found = false;
    for (int i = 0; i < p_.num_stops; i++)
      if (p_.stops[i] == token) found = true;
    return found;
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

  template <int most, class... Kind>
  LF_DEVICE void run_layer(Kinds<Kind...>, const Run<most>& run, int layer, u32 tag, u32 sequence) {
    const int kind = kind_of(layer);
    int number = 0;
    ((kind == number++ ? run_all(Kind{}, run, layer, tag, sequence) : void()), ...);
  }
  template <int most, class... Op>
  LF_DEVICE void run_all(Ops<Op...>, const Run<most>& run, int layer, u32 tag, u32 sequence) {
    (run_op<Op>(run, layer, tag, sequence), ...);
  }
  template <class... Kind>
  LF_DEVICE void run_one_of(Kinds<Kind...>, const Run<1>& run, int wanted, int layer, u32 tag, u32 sequence) {
    const int kind = kind_of(layer);
    int number = 0;
    ((kind == number++ ? run_number(Kind{}, run, wanted, layer, tag, sequence) : void()), ...);
  }
  template <class... Op>
  LF_DEVICE void run_number(Ops<Op...>, const Run<1>& run, int wanted, int layer, u32 tag, u32 sequence) {
    int number = 0;
    ((wanted == number++ ? run_op<Op>(run, layer, tag, sequence) : void()), ...);
  }

  template <class Op, int most>
  LF_DEVICE void run_op(const Run<most>& run, int layer, u32 tag, u32 sequence) {
    if constexpr (Op::kChosen) {
      multiply_chosen<Op>(run, layer, tag, sequence);
    } else if constexpr (Op::kIsProduct) {
      if constexpr (Op::kOfBlocks) {
        multiply_blocks<Op>(run, layer, tag);
      } else {
        multiply<Op>(run, layer, tag, sequence);
      }
    } else {
      const Clock clock(*this, kNameOp + Op::kTraced, layer);
      if constexpr (Op::kAttends) {
        attending<Op>(run, layer, tag).run(c_);
      } else if constexpr (Op::kIsRouter) {
        route<Op>(run, layer, tag);
      } else {
        residual.template run<Op>(run, layer, tag);
        if constexpr (Op::kEndsModule) end_module<Op>(run, layer, tag, sequence);
      }
      clock.end();
    }
  }

  template <class Op, int most>
  LF_DEVICE Attending<Op, most> attending(const Run<most>& run, int layer, u32 tag) const {
    return {p_, boards_, shared_.scratch, watch_, lane_here_, layer, run, tag + layer};
  }

  template <class Op, int most>
  LF_DEVICE void multiply(const Run<most>& run, int layer, u32 tag, u32 sequence) {
    if constexpr (Op::kReads == Value::kAttended) {
      using Attended = typename Op::Attended;
      const Clock clock(*this, kNameMerge, layer);
      const auto attended = attending<Attended>(run, layer, tag);
      for (int m = 0; m < run.count(); m++) {
        attended.merge(m, shared_.merged + m * kMergedFloats);
        sync_cta();
      }
      clock.end();
    }
    const Clock clock(*this, kNameOp + Op::kTraced, layer);
    const int time = 2 * layer + Op::kModule;
    float* partial = next_partial();
    if constexpr (Op::kReads == Value::kAttended) {
      const auto attended = attending<typename Op::Attended>(run, layer, tag);
      product<Op, most>(stream_, weights<Op>(layer), partial, shared_.brought,
                        attended.template reader<Reading<Op>>(shared_.merged, kMergedFloats));
    } else {
      multiply_board<Op>(run, layer, tag, partial);
    }
    sync_cta();
    if constexpr (Op::kWrites == Value::kOutput) {
      float scale = 1;
      if constexpr (most == 1) scale = scale_of<Op>(0, layer, tag);
      residual.set_output(run, time, [&](int m, int r) {
        if constexpr (most > 1) scale = scale_of<Op>(m, layer, tag);
        const float value = biased<Op>(row_sum<Op, most>(partial, r, m), layer, residual.first + r);
        return Op::kAdds ? residual.output(time, m, r) + scale * value : value;
      });
      if constexpr (Op::kEndsModule) end_module<Op>(run, layer, tag, sequence);
    } else {
      constexpr int own = Op::kGated ? Op::kRows / 2 : Op::kRows;
      watch_.delay();
      write<Op>(run, partial, layer, tag + layer, c_ * own, rows_of(c_ * own, own, Op::kChannels));
    }
    clock.end();
  }

  // The factor on a product of row m: the gate of a shared expert.
  template <class Op>
  LF_DEVICE float scale_of(int m, int layer, u32 tag) {
    if constexpr (Op::kScaled) {
      const u64* gate = boards_ + (i64)m * kLaneWords + kRoutesBoard + Op::Router::kExperts;
      return wait_for(gate, tag + layer, watch_, kAtVector, Op::Router::kExperts);
    }
    return 1;
  }

  // A block-diagonal product, kTurns times some rows of a block: each reads the channels of its block.
  template <class Op, int most>
  LF_DEVICE void multiply_blocks(const Run<most>& run, int layer, u32 tag) {
    const Clock clock(*this, kNameOp + Op::kTraced, layer);
    for (int turn = 0; turn < Op::kTurns; turn++) {
      const int part = c_ * Op::kTurns + turn, block = smaller(part / Op::kBlockParts, Op::kBlocks - 1),
                first = part % Op::kBlockParts * Op::kRows;
      float* partial = next_partial();
      if constexpr (Op::kReads == Value::kAttended) {
        const auto attended = attending<typename Op::Attended>(run, layer, tag);
        for (int m = 0; m < run.count(); m++) {
          attended.merge(m, shared_.merged + m * kMergedFloats, block);
          sync_cta();
        }
        product<Op, most>(stream_, weights<Op>(layer), partial, shared_.brought,
                          FromShared<Reading<Op>, most>{shared_.merged, kMergedFloats});
      } else {
        const u64* board = boards_ + Op::kFrom + block * Op::kBlockStep;
        product<Op, most>(stream_, weights<Op>(layer), partial, shared_.brought,
                          FromBoard<Reading<Op>, most>{boards_of(board, run), tag + layer, watch_});
      }
      sync_cta();
      watch_.delay();
      const int count = part / Op::kBlockParts > block ? 0 : rows_of(first, Op::kRows, Op::kBlockRows);
      write<Op>(run, partial, layer, tag + layer, block * Op::kBlockRows + first, count);
    }
    clock.end();
  }

  // A product of the stream, or of what is on another board. row: of the pass, the first of the run.
  template <class Op, int most>
  LF_DEVICE void multiply_board(const Run<most>& run, int layer, u32 tag, float* partial, int row = 0) {
    constexpr bool of_stream = Op::kReads == Value::kStream;
    const int time = of_stream ? 2 * layer + Op::kModule : layer;
    const u64* vector = (of_stream ? stream_board(time) : boards_ + Op::kFrom) + (i64)row * kLaneWords;
    const FromBoard<Reading<Op>, most> board = {boards_of(vector, run), tag + time, watch_};
    if constexpr (Op::kNormed) {
      const float* gains = small(Op::norm(layer), Op::kNormStride);
      product<Op, most>(stream_, weights<Op>(layer), partial, shared_.brought,
                        NormedFromBoard<Reading<Op>, most>{board, gains, squares(turn_)});
    } else {
      product<Op, most>(stream_, weights<Op>(layer), partial, shared_.brought, board);
    }
  }

  // The router's logits of the CTA's experts, or their scores, for all CTAs of the lane. Behind those of all experts
  // there may be the gate of a shared one.
  template <class Op, int most>
  LF_DEVICE void route(const Run<most>& run, int layer, u32 tag) {
    float* partial = next_partial();
    multiply_board<Op>(run, layer, tag, partial);
    sync_cta();
    watch_.delay();
    float factor = 1;
    if constexpr (Op::kNormed && most == 1) factor = norm_factor(squares(turn_), Op::kNormEps);
    const int first = c_ * Op::kRows, count = rows_of(first, Op::kRows, Op::kAllRows);
    each_of_rows<Op::kRows>(run, count, [&](int m, int r) {
      if constexpr (Op::kNormed && most > 1) factor = norm_factor(squares(turn_) + m * kWarps, Op::kNormEps);
      const bool is_gate = Op::kAllRows > Op::kExperts && first + r == Op::kExperts;
      float value = row_sum<Op, most>(partial, r, m) * factor;
      if (!is_gate) value = biased<Op>(value, layer, first + r);
      if (Op::kIsSigmoidRoute || is_gate) value = sigmoid<Numbers>(value);
      store_word(boards_ + (i64)m * kLaneWords + kRoutesBoard + first + r, word_of(value, tag + layer));
    });
  }

  // Products with the chosen experts' matrices, of one row of the pass after the other.
  template <class Op, int most>
  LF_DEVICE void multiply_chosen(const Run<most>& run, int layer, u32 tag, u32 sequence) {
    const Clock clock(*this, kNameOp + Op::kTraced, layer);
    if constexpr (kSteps || !Op::kSummed) {
      if constexpr (!Op::kSummed) end_part(stream_);
      using Router = typename Op::Router;
      const float* correction = nullptr;
      if constexpr (Router::kCorrectionGiven) correction = small(Router::correction(layer), Router::kCorrectionStride);
      for (int m = 0; m < run.count(); m++) {
        const u64* board = boards_ + (i64)m * kLaneWords + kRoutesBoard;
        const Routes found = choose<Router>(board, tag + layer, watch_, correction);
        LF_UNROLL for (int row = 0; row < most; row++) if (row == m) routes_[row] = found;
      }
      order<Op>(stream_, layer, c_, routes_, run);
    }
    for (int m = 0; m < run.count(); m++) {
      Routes routes = routes_[0];  // an array of which one is asked for would be kept in memory
      LF_UNROLL for (int row = 1; row < most; row++) if (row == m) routes = routes_[row];
      multiply_experts<Op>(run, m, routes, layer, tag);
    }
    if constexpr (Op::kSummed && Op::kEndsModule) end_module<Op>(run, layer, tag, sequence);
    clock.end();
  }

  // Those of row m.
  template <class Op, int most>
  LF_DEVICE void multiply_experts(const Run<most>& run, int m, const Routes& routes, int layer, u32 tag) {
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
        const float share = bits_to_float(broadcast(float_to_bits(routes.share), rank));
        const u64* board = boards_ + (i64)m * kLaneWords + Op::kFrom + rank * kEven<Op::kColumns>;
        product<Op>(stream_, weights<Op>(layer), partial, shared_.brought,
                    FromExpert<Reading<Op>>{board, tag + layer, watch_, pieces.part(i), share}, i > 0);
      } else {
        multiply_board<Op>(Run<1>::of(run.position_of(m), run.slot_of(m)), layer, tag, partial + i * kPartials<Op>, m);
      }
      end_part(stream_);
    }
    if constexpr (kSteps || Op::kSummed) {
      if (m + 1 == run.count()) close(stream_);
    }
    sync_cta();
    if constexpr (Op::kSummed) {
      add_experts<Op>(run, m, routes, partial, layer);
    } else {
      watch_.delay();
      for (int i = 0; i < count; i++)
        write_expert<Op>(partial + i * kPartials<Op>, m, routes, layer, tag + layer, pieces, i);
    }
  }

  // Hidden channels of an expert, for all CTAs of the lane.
  template <class Op>
  LF_DEVICE void write_expert(const float* partial, int m, const Routes& routes, int layer, u32 tag,
                              const Pieces<Op>& pieces, int i) {
    constexpr int of = Op::kGated ? 2 : 1, own = Op::kRows / of, all = Op::kAllRows / of;
    const int rank = pieces.rank(i), expert = (int)broadcast((u32)routes.expert, rank);
    float factor = 1;
    if constexpr (Op::kNormed) factor = norm_factor(squares(turn_), Op::kNormEps);
    const int first = pieces.part(i) * own, count = rows_of(first, own, all);
    u64* board = boards_ + (i64)m * kLaneWords + Op::kTo + rank * kEven<all>;
    for (int r = opaque(thread()); r < count; r += kThreads)
      store_word(
          board + first + r,
          word_of(finished<Op>(partial, r, factor, layer, expert * all + first + r, Op::Router::kExperts * all), tag));
  }

  // The sum of the chosen experts' outputs: their channels were multiplied by their shares, their biases are here.
  template <class Op, int most>
  LF_DEVICE void add_experts(const Run<most>& run, int m, const Routes& routes, const float* partial, int layer) {
    int expert[Op::kUsed];
    float share[Op::kUsed];
    LF_UNROLL for (int j = 0; j < Op::kUsed; j++) {
      expert[j] = (int)broadcast((u32)routes.expert, j);
      share[j] = bits_to_float(broadcast(float_to_bits(routes.share), j));
    }
    residual.each(run, [&](int row, int r) {
      if (most > 1 && row != m) return;
      float sum = row_sum<Op>(partial, r);
      if constexpr (Op::kBiased) {
        const float* biases = small(Op::bias(layer), Op::kBiasStride) + residual.first + r;
        LF_UNROLL for (int j = 0; j < Op::kUsed; j++) sum += share[j] * biases[(i64)expert[j] * Op::kAllRows];
      }
      residual.output(2 * layer + Op::kModule, row, r) = sum;
    });
  }

  // The output goes where the schedule says, and the stream to all CTAs of the lane.
  template <class Op, int most>
  LF_DEVICE void end_module(const Run<most>& run, int layer, u32 tag, u32 sequence) {
    const int time = 2 * layer + Op::kModule;
    residual.add_output(run, time, tag, sequence);
    if (Op::kModule == 1 && layer == kLayers - 1) residual.apply(run, 2 * kLayers, tag, sequence);
    residual.publish(run, stream_board(time + 1), tag + time + 1);
  }

  // The CTA's rows of a product, from the one that is channel `first` on, for all CTAs of the lane.
  template <class Op, int most>
  LF_DEVICE void write(const Run<most>& run, const float* partial, int layer, u32 tag, int first, int count) {
    constexpr int own = Op::kGated ? Op::kRows / 2 : Op::kRows, columns = Op::kColumns;
    u64* board = boards_ + Op::kTo;
    float factor = 1;
    if constexpr (Op::kNormed && most == 1) factor = norm_factor<columns>(squares(turn_), Op::kNormEps);
    each_of_rows<own>(run, count, [&](int m, int r) {
      if constexpr (Op::kNormed && most > 1) factor = norm_factor<columns>(squares(turn_) + m * kWarps, Op::kNormEps);
      const float value = finished<Op, most>(partial, r, factor, layer, first + r, Op::kChannels, m);
      u64* to = board + (i64)m * kLaneWords + first + r;
      if constexpr (Op::kOddHead > 0) to += (first + r) / Op::kOddHead;  // each head begins at an even word
      store_word(to, word_of(value, tag));
    });
  }

  // What is written of a row, or of a pair of them. row: of the bias; up: biases between those of gate and up.
  template <class Op, int most = 1>
  LF_DEVICE float finished(const float* partial, int r, float factor, int layer, int row, int up_row, int m = 0) const {
    if constexpr (Op::kGated) {  // the rows of gate and up take turns
      float gate = biased<Op>(row_sum<Op, most>(partial, 2 * r, m) * factor, layer, row),
            up = biased<Op>(row_sum<Op, most>(partial, 2 * r + 1, m) * factor, layer, up_row + row);
      if constexpr (Op::kLimited) {  // a NaN stays one
        gate = gate > Op::kLimit ? Op::kLimit : gate;
        up = up > Op::kLimit ? Op::kLimit : up < -Op::kLimit ? -Op::kLimit : up;
      }
      if constexpr (Op::kUpOffset != 0) up += Op::kUpOffset;
      return activated<Op::kActivation, Numbers>(gate) * up;
    } else {
      return activated<Op::kActivation, Numbers>(biased<Op>(row_sum<Op, most>(partial, r, m) * factor, layer, row));
    }
  }

  // What a head over all lanes reads: the mean of their norms, the sum of their streams, or their norms end to end.
  template <int most>
  LF_DEVICE void combine_lanes(const Run<most>& run, const float* gains, u32 tag, u32 sequence) {
    float* squares = this->squares(turn_ ^ 1);
    if (!Head::kNormOfSum) {
      constexpr int each = ((kHidden + 1) / 2 + kThreads - 1) / kThreads;
      float values[most][each][2];
      read_words<kHidden % (2 * kThreads) == 0>(
          boards_of(stream_board(2 * kLayers), run), 2 * thread(), kHidden, tag + 2 * kLayers,
          [](int v, int) { return 2 * v * kThreads; }, values, watch_, kAtVector);
      LF_UNROLL for (int m = 0; m < most; m++) {
        float sum = 0;
        LF_UNROLL for (int i = 0; i < each; i++) sum +=
            values[m][i][0] * values[m][i][0] + values[m][i][1] * values[m][i][1];
        sum = sum_over_warp(sum);
        if (warp_lane() == 0) squares[m * kWarps + warp()] = sum;
      }
      sync_cta();
    }
    const auto factor = [&](int m) {
      return Head::kNormOfSum ? 1.0f : norm_factor(squares + m * kWarps, Head::kNormEps);
    };
    float of_first = 1;
    if constexpr (most == 1) of_first = factor(0);
    watch_.delay();
    residual.each(run, [&](int m, int r) {
      const int row = residual.first + r;
      const float own = most == 1 ? of_first : factor(m), value = residual.stream(m, r);
      LaneExchange::push(p_, kMailAt, sequence + kNumSums, lane_, m * kHidden + row,
                         Head::kNormOfSum ? value : value * own * gains[row]);
    });
    residual.each(run, [&](int m, int r) {
      const int row = residual.first + r;
      u64* board = boards_ + (i64)m * kLaneWords + kHeadBoard + row;
      float values[kLanes];
      LaneExchange::pull(p_.shared[p_.device] + kMailAt, sequence + kNumSums, m * kHidden + row, values, watch_,
                         kAtLanding);
      if (Head::kKind == HeadKind::kLane) {
        LF_UNROLL for (int l = 0; l < kLanes; l++)
            store_word(board + (i64)l * kHidden, word_of(values[l], tag + kHeadEdge));
      } else {
        float total = values[0];
        LF_UNROLL for (int l = 1; l < kLanes; l++) total += values[l];
        store_word(board, word_of(Head::kNormOfSum ? total : total / (float)kLanes, tag + kHeadEdge));
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
  Routes routes_[kPassRows] = {{0, 0}};  // with `{}` clang unrolls fewer loops
};

}  // namespace gpu
}  // namespace laneformer
