// A CTA's shared memory: arrays that all ops use one after the other, each as large as the op that needs most of it.
// decode.cu and steps.cu place them after the ring of weights. custom_calls/gpu/layout.py computes the same size, by
// which the host launches the kernel; a static_assert compares both.
#pragma once

#include "attention.h"
#include "compressed.h"
#include "delta_net.h"
#include "drafts.h"
#include "residual.h"
#include "sampling.h"

namespace laneformer {
namespace gpu {

template <class T>
struct Named {
  using Type = T;
};

// The class that runs an op of attention or DeltaNet. `run` computes a CTA's part. Where the result, ATTENDED, is on no
// board, `merge` and `reader` give it to the product that reads it.
template <class Op, int most>
constexpr auto attending_by() {
  if constexpr (Op::kIsDeltaNet) {
    return Named<DeltaNet<Op, most>>{};
  } else if constexpr (Op::kIsCompressedKeep) {
    return Named<Compressing<Op, most>>{};
  } else if constexpr (Op::kIsCompressedAttend) {
    return Named<CompressedAttention<Op, most>>{};
  } else {
    return Named<Attention<Op, most>>{};
  }
}
template <class Op, int most>
using Attending = typename decltype(attending_by<Op, most>())::Type;

// Measures for most_of (ops.h): how many floats of each array an op needs.
struct Partials {
  template <class Op>
  static constexpr int of() {
    if constexpr (Op::kTiled) {
      constexpr int rows = Op::kChosen ? 1 : kPassRows;  // rows use their experts one after the other
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

constexpr int kPartialFloats = larger_of(larger_of(most_of<Partials>(AllKinds{}), most_of<Partials>(HeadGather{})),
                                         larger_of(kPartials<Head>, kPartials<Head, kPassRows, kHeadParts>));
constexpr int kBroughtFloats = larger_of(most_of<BroughtFloats>(AllKinds{}), kBrought<Head>);
constexpr int kScratchFloats = larger_of(most_of<AttentionFloats>(AllKinds{}), kSampleFloats);
constexpr int kMergedFloats = most_of<MergedFloats>(AllKinds{});
constexpr int even(int n) { return n + n % 2; }

static_assert(2 * kWarps + kPassRows * kStreamRows <= kScratchFloats,
              "the scratch memory is too small for the residual stream");
static_assert(kPassTags > 2 * kLayers + 2, "kPassTags is too small: every edge of a pass has its own tag");

// Pointers to the arrays, which follow the ring and its barriers.
//
//   partial  sums of a product's warps; two sets, so that one op's are read while the next op's are written
//   squares  [rows of a pass][kWarps], sums of squares for the norm of a product's vector; two sets likewise
//   scratch  of attention, DeltaNet, mixtures and norms of the residual stream, and the sampler
//   merged   [rows][kMergedFloats], the result of attention where it is on no board
//   brought  vectors as bytes, for tensor cores (tensor.h)
//   stages   [kWarps][kStagedFloats], parts of vectors from boards of threes (edges.h)
//   x, history, streams, joins   see Residual
//   logits, z, end               see Sampler
//   drafts   states of drafts and slots (drafts.h, requests.h)
//   tokens   [rows], where routers choose by token
struct Shared {
  float *partial[2], *squares[2], *scratch, *merged, *brought, *stages, *x, *history, *streams, *joins, *logits, *z;
  int *end, *drafts, *tokens;

  static constexpr int kFloats =
      2 * even(kPartialFloats) + 2 * even(kPassRows * kWarps) + even(kScratchFloats) + even(kPassRows * kMergedFloats) +
      even(kBroughtFloats) + even(kWarps * kStagedFloats) + even(kPassRows * kStreams * kStreamRows) +
      even(kPassRows * kJoinFloats) + even(kPassRows * kStreamRows) + even(kPassRows * kHistory * kStreamRows) +
      (kZInMerged ? 1 : 2) * even(kPassRows * kHeadRows) + 2 + even(kDraftInts) + (kByToken ? even(kPassRows) : 0);

  static_assert(kFloats == kSharedFloats, "custom_calls/gpu/layout.py computes another size of shared memory");

  LF_DEVICE Shared(float* at) {
    const auto take = [&](int n) {
      float* taken = at;
      at += n + n % 2;
      return taken;
    };
    scratch = take(kScratchFloats);  // first, because it holds 8-byte numbers
    partial[0] = take(kPartialFloats), partial[1] = take(kPartialFloats);
    squares[0] = take(kPassRows * kWarps), squares[1] = take(kPassRows * kWarps);
    merged = take(kPassRows * kMergedFloats);
    brought = take(kBroughtFloats);
    stages = take(kWarps * kStagedFloats);
    streams = take(kPassRows * kStreams * kStreamRows), joins = take(kPassRows * kJoinFloats);
    x = take(kPassRows * kStreamRows), history = take(kPassRows * kHistory * kStreamRows);
    logits = take(kPassRows * kHeadRows);
    z = kZInMerged ? merged : take(kPassRows * kHeadRows);  // the sampler runs when no layer uses `merged`
    end = (int*)take(1);
    drafts = (int*)take(kDraftInts);
    tokens = (int*)take(kByToken ? kPassRows : 0);
  }
};

}  // namespace gpu
}  // namespace laneformer
