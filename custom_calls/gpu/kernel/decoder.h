// The ops of a pass in a CTA, in their order: embedding, layers, head and draw. decode.cu calls them all in one launch,
// steps.cu one op in each launch.
//
// Decoder is the last of a chain of classes: DenseOps (ops/dense.h) has products, StreamOps (ops/streams.h) several
// residual streams, ChosenOps (ops/chosen.h) experts. They are compiled for one model: model.h, which
// custom_calls/gpu/header.py writes, has the ops of a layer as types, and run_op chooses the code of each op by its
// type.
//
// All CTAs of a lane run the same ops in the same order with the same tags, and within an op each CTA publishes its
// words before it waits for words that others publish in that op. So every awaited word is written, and CTAs never wait
// for each other in a circle.
#pragma once

#include "chosen.h"

namespace laneformer {
namespace gpu {

constexpr bool kHeadOfAll =
    Head::kKind != HeadKind::kVocabParallel && kLanes > 1;  // the head reads a combination of all lanes

// A slot's numbers in Params::control.
struct Control {
  int prompt, start, limit;

  LF_DEVICE explicit Control(const Params& p, int slot = 0)
      : prompt(p.control[slot * kControls]),
        start(p.control[slot * kControls + 1]),
        limit(p.control[slot * kControls + 2]) {}
};

class Decoder : public ChosenOps {
 public:
  using ChosenOps::ChosenOps;

  // Starts a pass with the embeddings of its tokens; token(m) is the token of row m.
  template <int most, class Token>
  LF_DEVICE void embed(const Run<most>& run, Token token, u32 tag) {
    const Clock clock(*this, kNameEmbed, -1);
    keep_tokens(run, token);
    if (kListed) lists_.begin(0);
    residual.begin(run, token);
    if (kStreams == 0) residual.publish(run, stream_board(0), tag);
    clock.end();
  }

  // Keeps the tokens of the pass's rows in shared memory, where routers choose by token.
  template <int most, class Token>
  LF_DEVICE void keep_tokens(const Run<most>& run, Token token) {
    if constexpr (kByToken) {
      for (int m = thread(); m < run.count(); m += kThreads) shared_.tokens[m] = token(m);
    }
  }

  // Runs all ops of a layer.
  template <int most>
  LF_DEVICE void run(const Run<most>& run, int layer, u32 tag, u32 sequence) {
    watch_.layer = layer;
    run_module(Attentions::All{}, Attentions::kind_of(layer), run, layer, tag, sequence);
    run_module(FeedForwards::All{}, FeedForwards::kind_of(layer), run, layer, tag, sequence);
  }

  // Runs op `number` of a layer.
  LF_DEVICE void run_one(const Run<1>& run, int number, int layer, u32 tag, u32 sequence) {
    const int attention = Attentions::kind_of(layer), before = count_of(Attentions::All{}, attention);
    if (number < before) {
      run_one_of(Attentions::All{}, attention, run, number, layer, tag, sequence);
    } else {
      run_one_of(FeedForwards::All{}, FeedForwards::kind_of(layer), run, number - before, layer, tag, sequence);
    }
  }

  // Prepares what the head reads: from several residual streams, and from all lanes if the head is over all lanes.
  template <int most>
  LF_DEVICE void final(const Run<most>& run, u32 tag, u32 sequence) {
    const Clock clock(*this, kNameFinal, kLayers);
    gather_for_head(HeadGather{}, run, tag);
    if (kHeadOfAll) combine_lanes(run, final_gains(), tag, sequence);
    clock.end();
  }

  // Writes the logits of the CTA's `rows` rows of the head to shared memory.
  template <int most>
  LF_DEVICE void head(const Run<most>& run, u32 tag, int rows) {
    const Clock clock(*this, kNameHead, kLayers);
    constexpr bool normed = !kHeadOfAll || Head::kNormOfSum;
    constexpr int parts = most == 1 ? 1 : kHeadParts, part_rows = kPaddedRows<Head> / parts;
    for (int turn = 0; turn < kHeadTurns; turn++) {
      float* partial = next_partial();
      const u64* vector = kHeadOfAll ? boards_ + kHeadBoard : stream_board(2 * kLayers);
      constexpr int threes = kHeadOfAll ? 0 : kStreamTriples;
      const FromBoard<Reading<Head>, most, threes> board = {
          boards_of(vector, run), tag + (kHeadOfAll ? kHeadEdge : 2 * kLayers), watch_, shared_.stages};
      float* squares = this->squares(turn_);
      const int here = kHeadTurns == 1 ? rows : smaller(rows - turn * Head::kRows, Head::kRows);
      // Writes the logits of a part's rows.
      const auto finish = [&](int part) {
        float factor = 1;
        if constexpr (normed && most == 1) factor = norm_factor(squares, Head::kNormEps);
        float* logits = shared_.logits + turn * Head::kRows + part * part_rows;
        each_of_rows<part_rows>(run, parts == 1 ? here : smaller(here - part * part_rows, part_rows),
                                [&](int m, int r) {
                                  if constexpr (normed && most > 1)
                                    factor = norm_factor(squares + m * kWarps, Head::kNormEps);
                                  float logit = row_sum<Head, most, parts>(partial, r, m, part * part_rows) * factor;
                                  if constexpr (Head::kSoftcap > 0) logit = softcapped<Numbers>(logit, Head::kSoftcap);
                                  logits[m * kHeadRows + r] = logit;
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
                                     NormedFromBoard<Reading<Head>, most, threes>{board, final_gains(), squares}, false,
                                     each_part);
      } else {
        product<Head, most, parts>(stream_, weights<Head>(0), partial, shared_.brought, board, false, each_part);
      }
      if (!kSteps && turn == kHeadTurns - 1) stream_.skip_padding(kHeadPadding);
      sync_cta();
      if constexpr (parts == 1) finish(0);
    }
    if constexpr (kHeadTurns > 1 || most > 1) sync_cta();  // the sampler's threads read logits that others wrote
    clock.end();
  }

  // Ends a pass of one row: the next pass gets the prompt's next token, or the one that the sampler draws.
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

  // Ends a pass whose rows draw, the first at `position`. A draft is right if it equals the token that the row before
  // it draws; rows from the first wrong draft on draw nothing. Returns the number of tokens drawn.
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

  // Ends a pass with rows of several requests. Returns Host::asked as the packets report it, or kFailure.
  LF_DEVICE int draw(Sampler& sampler, Requests& requests, u32 tag) {
    const Clock clock(*this, kNameSample, kLayers);
    const int parity = (int)(tag / kPassTags & 1);
    int offered = 0, settled = 0, asked = 0;
    for (int m = 0; m < requests.rows(); m++) {
      if (!requests.draws(m)) continue;
      sampler.use(requests.row(m).slot);
      sampler.offer_row(tag, parity, m, requests.position(m) + 1, offered++ == 0, requests.place(m), requests.text(m),
                        requests.forced(m));
    }
    if (offered == 0) asked = sampler.end_of_pass(tag, parity);
    bool right = false;  // whether the row before has drawn this row's token
    for (int m = 0; m < requests.rows() && asked < kFailure; m++) {
      if (!requests.draws(m) || (requests.place(m) > 0 && !right)) continue;
      const int slot = requests.row(m).slot, drawn = requests.drawn(slot) + requests.place(m);
      sampler.slot = slot;
      const Sampled sampled = sampler.settle_row(tag, parity, m, settled++ == 0, drawn, asked);
      if (!sampled.end) requests.draw(m, sampled.token);
      if constexpr (kDrafting) right = !sampled.end && requests.goes_on(m, sampled.token);
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

 private:
  LF_DEVICE const float* final_gains() const { return small(Head::norm(0), Head::kNormStride); }

  // These are functions because they are always inlined. A call of a lambda would keep its references in memory.
  template <int most, class... Kind>
  LF_DEVICE void run_module(Kinds<Kind...>, int kind, const Run<most>& run, int layer, u32 tag, u32 sequence) {
    int number = 0;
    ((kind == number++ ? run_all(Kind{}, run, layer, tag, sequence) : void()), ...);
  }
  template <int most, class... Op>
  LF_DEVICE void run_all(Ops<Op...>, const Run<most>& run, int layer, u32 tag, u32 sequence) {
    (run_op<Op>(run, layer, tag, sequence), ...);
  }
  template <class... Kind>
  LF_DEVICE void run_one_of(Kinds<Kind...>, int kind, const Run<1>& run, int wanted, int layer, u32 tag, u32 sequence) {
    int number = 0;
    ((kind == number++ ? run_number(Kind{}, run, wanted, layer, tag, sequence) : void()), ...);
  }
  template <class... Op>
  LF_DEVICE void run_number(Ops<Op...>, const Run<1>& run, int wanted, int layer, u32 tag, u32 sequence) {
    int number = 0;
    ((wanted == number++ ? run_op<Op>(run, layer, tag, sequence) : void()), ...);
  }

  template <int most>
  LF_DEVICE void gather_for_head(Ops<>, const Run<most>&, u32) {}
  template <class Op, int most>
  LF_DEVICE void gather_for_head(Ops<Op>, const Run<most>& run, u32 tag) {
    gather_streams<Op>(run, 0, 2 * kLayers, tag);
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
      } else if constexpr (Op::kIsGatherStreams) {
        gather_streams<Op>(run, layer, 2 * layer + Op::kModule, tag);
      } else {
        residual.template run<Op>(run, layer, tag);
        if constexpr (Op::kEndsModule) end_module<Op>(run, layer, tag, sequence);
      }
      clock.end();
    }
  }

  // Publishes what a head over all lanes reads: the mean of the lanes' normed streams, the sum of their streams, or
  // their normed streams end to end.
  template <int most>
  LF_DEVICE void combine_lanes(const Run<most>& run, const float* gains, u32 tag, u32 sequence) {
    float* squares = this->squares(turn_ ^ 1);
    if (!Head::kNormOfSum) {
      constexpr int each = ((kHidden + 1) / 2 + kThreads - 1) / kThreads;
      float values[most][each][2];
      const Boards<most> boards = boards_of(stream_board(2 * kLayers), run);
      if constexpr (kStreamTriples == 0) {
        read_words<kHidden % (2 * kThreads) == 0>(
            boards, 2 * thread(), kHidden, tag + 2 * kLayers, [](int v, int) { return 2 * v * kThreads; }, values,
            watch_, kAtVector);
      } else {
        LF_UNROLL for (int m = 0; m < most; m++) {
          LF_UNROLL for (int i = 0; i < 2 * each; i++) {
            const int at = 2 * (i / 2 * kThreads + thread()) + i % 2;
            values[m][i / 2][i % 2] =
                at < kHidden ? Threes<kStreamTriples>::wait_for(boards.of(m), at, tag + 2 * kLayers, watch_, kAtVector)
                             : 0.0f;
          }
        }
      }
      LF_UNROLL for (int m = 0; m < most; m++) {
        float sum = 0;
        LF_UNROLL for (int i = 0; i < each; i++) {
          LF_UNROLL for (int k = 0; k < 2; k++) sum = fma(values[m][i][k], values[m][i][k], sum);
        }
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
};

}  // namespace gpu
}  // namespace laneformer
