// What a product does to its rows, written once for the CPU's vectors and the GPU's numbers. GPU kernels are compiled
// with a copy of this file beside their own. Kinds as in laneformer.ops.Activation.
#pragma once

#ifndef LF_MATH  // GPU kernels have their own
#define LF_MATH static inline __attribute__((always_inline))
#endif

namespace laneformer {

enum class Activation : int { kNone, kSilu };
constexpr int kActivations = 2;

// Math has, for numbers or vectors of them: exp(x), for x up to 87, and at_least(x, low).
template <Activation kind, class Math, class Number>
LF_MATH Number activated(Number x) {
  if constexpr (kind == Activation::kSilu) {
    return x / (1.0f + Math::exp(-Math::at_least(x, -87.0f)));  // exp(87) is finite
  } else {
    return x;
  }
}

}  // namespace laneformer
