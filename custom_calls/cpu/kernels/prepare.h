// `prepare` of the table of kernels: writes the vectors of positions in the form that product.h and bf12.h read, column
// by column, with the values of a part's positions side by side: [part][column][position of the part]. Workers call it
// before each product. Included by kernels.cc alone.
//
// Invariant: a value is at most rounded, to the weights' dtype if activations are rounded. Columns and positions that
// pad are zeros.
#pragma once

#include "product.h"

namespace LF_ISA {
namespace {

// The elements of a and b in turn: a[from], b[from], a[from + 1], b[from + 1], ...
template <int from, int... I>
LF_INLINE vf in_turn(vf a, vf b, Numbers<I...>) {
  return __builtin_shufflevector(a, b, (from + I / 2 + I % 2 * kWidth)...);
}

// Turns rows into columns. Each round moves one bit of a number's row into its place within the row.
LF_INLINE void transpose(vf (&rows)[kWidth]) {
  for (int round = 1; round < kWidth; round *= 2) {
    vf next[kWidth];
    each<kWidth / 2>([&](auto i) LF_INLINED {
      const vf a = rows[i()], b = rows[i() + kWidth / 2];
      next[2 * i()] = in_turn<0>(a, b, CountUp<kWidth>{});
      next[2 * i() + 1] = in_turn<kWidth / 2>(a, b, CountUp<kWidth>{});
    });
    each<kWidth>([&](auto i) LF_INLINED { rows[i()] = next[i()]; });
  }
}

LF_INLINE vf rounded(Dtype dtype, vf x) {
  if (dtype == Dtype::bf16) return as_float(narrowed_bf16(x) << 16);
  vh h;
  for (int i = 0; i < kWidth; i++) h[i] = narrow_f16(x[i]);
  return widen_f16(h);
}

// Stores the first n elements.
LF_INLINE void store_first(float* to, vf v, int n) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, (__mmask16)((1u << n) - 1), (__m512)v);
#else
  std::memcpy(to, &v, n * sizeof(float));
#endif
}

void prepare(Dtype dtype, Activations activations, const float* x, int64_t ldx, int64_t columns, int positions,
             void* out) {
  const bool dot = uses_dot(dtype, activations);
  const bool round = activations == Activations::rounded && dtype != Dtype::f32;
  const int64_t stored = laneformer::stored_columns(dtype, columns), words = dot ? stored / 2 : stored;
  float* to = (float*)out;
  if (positions == 1 && !round) {
    std::memcpy(to, x, columns * sizeof(float));
    if (stored > columns) to[columns] = 0;
    return;
  }
  const int part = part_of(positions);
  for (int first = 0; first < positions; first += part, to += words * part)
    for (int64_t k = 0; k < words; k += kWidth) {
      const int count = words - k < kWidth ? (int)(words - k) : kWidth;
      for (int p = 0; p < part; p += kWidth) {
        const int some = part - p < kWidth ? part - p : kWidth;
        vf rows[kWidth];
        each<kWidth>([&](auto i) LF_INLINED {
          const float* from = x + (first + p + i()) * ldx;
          if (i() >= some || first + p + i() >= positions) {
            rows[i()] = vf{};
          } else if (dot) {
            rows[i()] = pairs(narrowed_bf16(columns_of(from, 2 * k, columns)),
                              narrowed_bf16(columns_of(from, 2 * k + kWidth, columns)), CountUp<kWidth>{});
          } else {
            rows[i()] = columns_of(from, k, columns);
            if (round) rows[i()] = rounded(dtype, rows[i()]);
          }
        });
        transpose(rows);
        for (int c = 0; c < count; c++) {
          float* const column = to + (k + c) * part + p;
          if (part <= kWidth && k + c + kWidth < words) {  // the next columns overwrite the surplus elements
            storef(column, rows[c]);
          } else {
            store_first(column, rows[c], some);
          }
        }
      }
    }
}

}  // namespace
}  // namespace LF_ISA
