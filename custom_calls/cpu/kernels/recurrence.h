// `advance` of the table of kernels: the state of gated DeltaNet after kTile positions (ops/delta_net.cc). Included by
// kernels.cc alone.
//
// Invariant: each element is decayed, then the products of the positions are added in their order, however many columns
// are computed together.
#pragma once

#include "formats.h"
#include "kernels.h"
#include "simd.h"

namespace LF_ISA {
namespace {

// Columns that are computed together: as many as have sums in registers, beside the vectors of a delta and a key. They
// are enough that a multiply-add need not wait for the one before it in the same column.
constexpr int kStateColumns = kVectors == 1 ? 8 : kVectors == 2 ? 4 : 2;
constexpr int64_t kStateAhead = 2048;  // bytes that `from` is prefetched ahead

// Advances C columns of one tile. stride: floats from one position's deltas to the next one's.
template <int C>
LF_INLINE void advance_columns(const float* from, float decay, const float* keys, const float* deltas, int64_t stride,
                               float* to) {
  vf sums[C][kVectors] = {};
  if (from) {
    each<C>([&](auto c) LF_INLINED {
      __builtin_prefetch((const char*)(from + c() * kTile) + kStateAhead, 1);
      each<kVectors>([&](auto v)
                         LF_INLINED { sums[c()][v()] = splat(decay) * loadf(from + c() * kTile + v() * kWidth); });
    });
  }
  for (int j = 0; j < kTile; j++, deltas += stride) {
    vf delta[kVectors];
    each<kVectors>([&](auto v) LF_INLINED { delta[v()] = loadf(deltas + v() * kWidth); });
    each<C>([&](auto c) LF_INLINED {
      const vf key = splat(keys[c() * kTile + j]);
      each<kVectors>([&](auto v) LF_INLINED { multiply_add<false>(sums[c()][v()], delta[v()], key); });
    });
  }
  each<C>([&](auto c) LF_INLINED {
    each<kVectors>([&](auto v) LF_INLINED { storef(to + c() * kTile + v() * kWidth, sums[c()][v()]); });
  });
}

// See kernels.h.
void advance(const float* from, float decay, const float* keys, const float* deltas, int64_t columns, int64_t tiles,
             float* to) {
  for (int64_t t = 0; t < tiles; t++) {
    int64_t k = 0;
    const auto some = [&](auto count) LF_INLINED {
      for (; k + count() <= columns; k += count()) {
        const int64_t at = (t * columns + k) * kTile;
        advance_columns<count()>(from ? from + at : nullptr, decay, keys + k * kTile, deltas + t * kTile, tiles * kTile,
                                 to + at);
      }
    };
    some(Count<kStateColumns>{});
    some(Count<1>{});
  }
}

}  // namespace
}  // namespace LF_ISA
