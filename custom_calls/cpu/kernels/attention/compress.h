// `compress` and `index_scores` of the table of kernels: makes an entry of compressed attention from the vectors of
// several positions, and scores entries for an index (ops/compressed.cc). Included by kernels.cc alone.
//
// Invariant: an entry is a sum over its positions in their order, and the score of an entry depends on that entry and
// on the query alone.
#pragma once

#include "latents.h"

namespace LF_ISA {
namespace {

using laneformer::IndexScores;

// See kernels.h. Sums are in the order of i.
void compress(const float* const* vectors, const float* const* gates, const float* const* biases, int count,
              int64_t channels, float* out) {
  for (int64_t c = 0; c < channels; c += kWidth) {
    const auto gate = [&](int i)
                          LF_INLINED { return columns_of(gates[i], c, channels) + columns_of(biases[i], c, channels); };
    vf largest = gate(0), total = {}, sum = {};
    for (int i = 1; i < count; i++) largest = max(largest, gate(i));
    for (int i = 0; i < count; i++) {
      const vf weight = exp(gate(i) - largest);
      total += weight;
      sum += weight * columns_of(vectors[i], c, channels);
    }
    const vf mean = sum / total;
    std::memcpy(out + c, &mean, (channels - c < kWidth ? channels - c : kWidth) * sizeof(float));
  }
}

// Vectors run over heads. Each element of a vector is a chain over the heads at its place, and a key's score is the sum
// of these chains, whichever keys are computed beside it.
template <Dtype dtype>
void index_scores_as(const IndexScores& a) {
  const int heads = (a.heads + kAcross - 1) / kAcross * kAcross;   // padding heads have weight 0
  float* const q = (float*)(((uintptr_t)a.space + 63) / 64 * 64);  // [e][heads]
  float* const weights = q + (int64_t)a.e * heads;
  float* const widened_rows = weights + heads;
  std::memset(q, 0, ((int64_t)a.e + 1) * heads * sizeof(float));
  for (int h = 0; h < a.heads; h++) {
    for (int i = 0; i < a.e; i++) q[(int64_t)i * heads + h] = a.q[(int64_t)h * a.e + i];
    weights[h] = a.weights[h];
  }
  for (int64_t low = a.first; low < a.last; low += kSums) {
    const int count = (int)(a.last - low < kSums ? a.last - low : kSums);
    int64_t stride;
    const float* const rows = widened<dtype>({a.keys, low * a.e, a.e}, count, a.e, widened_rows, &stride);
    const float* row[kSums];
    each<kSums>([&](auto c) LF_INLINED { row[c()] = rows + (c() < count ? c() : count - 1) * stride; });
    vf total[kSums] = {};
    for (int h = 0; h < heads; h += kAcross) {
      vf acc[kSums][2] = {};
      for (int i = 0; i < a.e; i++) {
        const vf x = loadf(q + (int64_t)i * heads + h), y = loadf(q + (int64_t)i * heads + h + kWidth);
        each<kSums>([&](auto c) LF_INLINED {
          const vf key = splat(row[c()][i]);
          acc[c()][0] += key * x;
          acc[c()][1] += key * y;
        });
      }
      each<kSums>([&](auto c) LF_INLINED {
        total[c()] += max(vf{}, acc[c()][0]) * loadf(weights + h);  // max in this order keeps NaN
        total[c()] += max(vf{}, acc[c()][1]) * loadf(weights + h + kWidth);
      });
    }
    for (int c = 0; c < count; c++) a.scores[low + c] = sum(total[c]);
  }
}

void index_scores(const IndexScores& a) {
  switch (a.dtype) {
    case Dtype::bf16: return index_scores_as<Dtype::bf16>(a);
    case Dtype::f16: return index_scores_as<Dtype::f16>(a);
    case Dtype::f32: return index_scores_as<Dtype::f32>(a);
  }
}

}  // namespace
}  // namespace LF_ISA
