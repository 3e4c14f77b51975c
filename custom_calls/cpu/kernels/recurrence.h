// The state of gated DeltaNet after several positions. Included by kernels.cc alone, as simd.h is.
#pragma once

#include "formats.h"
#include "kernels.h"
#include "simd.h"

namespace LF_ISA {
namespace {

// Columns whose sums fit the registers, beside a delta's vectors and a key; two multiply-adds at a time do not wait for
// the last of their column.
constexpr int kStateColumns = kVectors == 1 ? 8 : kVectors == 2 ? 4 : 2;
constexpr int64_t kStateAhead = 2048;  // bytes

// C columns of one tile. stride: from one position's deltas to the next.
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
