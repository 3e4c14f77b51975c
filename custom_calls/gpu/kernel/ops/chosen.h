// The ops of a mixture of experts, as a base of Decoder: the router, and products with the matrices of the experts that
// it chooses (experts.h). The CTAs of a lane publish the router's logits, and every warp chooses from all of them by
// itself. All warps read the same words, so all choose the same experts, and no further edge is needed.
#pragma once

#include "experts.h"
#include "streams.h"

namespace laneformer {
namespace gpu {

class ChosenOps : public StreamOps {
 public:
  using StreamOps::StreamOps;

 protected:
  // Publishes the router's logits, or scores, of the CTA's experts to all CTAs of the lane. The gate of a shared expert
  // follows those of all experts.
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
      const float sum = row_sum<Op, most>(partial, r, m);
      float value = is_gate ? sum * factor : biased<Op>(sum, factor, layer, first + r);
      if (Op::kIsSigmoidRoute || is_gate) {
        value = sigmoid<Numbers>(value);
      } else if (Op::kIsRootRoute) {
        value = root_of_softplus(value);
      }
      store_word(boards_ + (i64)m * kLaneWords + kRoutesBoard + first + r, word_of(value, tag + layer));
    });
  }

  // A product with the chosen experts' matrices, of one row of the pass after the other. The first product of a layer
  // chooses the experts and orders the weights of both; in steps.cu each product does so for itself.
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
        Routes found;
        bool has_table = false;
        if constexpr (Router::kByTokenGiven) {
          has_table = Router::by_token(layer) >= 0;
          if (has_table) {
            const float* table = small(Router::by_token(layer), Router::kByTokenStride);
            found = look_up<Router>(board, tag + layer, watch_, table + (i64)shared_.tokens[m] * Router::kUsed);
          }
        }
        if (!has_table) found = choose<Router>(board, tag + layer, watch_, correction);
        LF_UNROLL for (int row = 0; row < most; row++) if (row == m) routes_[row] = found;
      }
      order<Op>(stream_, layer, c_, routes_, run);
    }
    for (int m = 0; m < run.count(); m++) {
      Routes routes = routes_[0];  // a dynamic index would keep the array in memory
      LF_UNROLL for (int row = 1; row < most; row++) if (row == m) routes = routes_[row];
      multiply_experts<Op>(run, m, routes, layer, tag);
    }
    if constexpr (Op::kSummed && Op::kEndsModule) end_module<Op>(run, layer, tag, sequence);
    clock.end();
  }

  // The product of row m.
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

  // Publishes the CTA's hidden channels of an expert, those of piece i, to all CTAs of the lane.
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

  // Stores the sum of the chosen experts' outputs as the module's output. Channels were multiplied by their experts'
  // shares when they were read; biases are multiplied here.
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
        LF_UNROLL for (int j = 0; j < Op::kUsed; j++) sum = fma(share[j], biases[(i64)expert[j] * Op::kAllRows], sum);
      }
      residual.output(2 * layer + Op::kModule, row, r) = sum;
    });
  }

  Routes routes_[kPassRows] = {{0, 0}};  // with `{}` clang unrolls fewer loops
};

}  // namespace gpu
}  // namespace laneformer
