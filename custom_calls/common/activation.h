// Activations of a product's rows, and the softcap of scores and logits, written once for vectors on a CPU and single
// numbers on a GPU. GPU kernels are compiled with a copy of this file in their folder. The kinds are those of
// laneformer.ops.Activation.
#pragma once

#ifndef LF_MATH  // GPU kernels define their own
#define LF_MATH static inline __attribute__((always_inline))
#endif

namespace laneformer {

enum class Activation : int { kNone, kSilu, kGelu, kGeluPytorchTanh, kRelu2, kQuickGelu };
constexpr int kActivations = 6;

// Phi(-x) exp(x^2 / 2) for x in 0 .. 13.4, with a relative error of at most 4e-7, where Phi is the normal distribution
// function. A minimax polynomial in 1 / (1 + 0.35 x).
template <class Number>
LF_MATH Number normal_tail(Number x) {
  const Number t = 1.0f / (1.0f + 0.35f * x);
  Number p = t * -0.029120702296495438f + 0.14384661614894867f;
  p = p * t - 0.2554505169391632f;
  p = p * t + 0.15886609256267548f;
  p = p * t - 0.022892504930496216f;
  p = p * t + 0.10541350394487381f;
  p = p * t + 0.11985751241445541f;
  p = p * t + 0.13985836505889893f;
  p = p * t + 0.13962161540985107f;
  return p * t;
}

// Math provides exp(x) for x up to 87, and at_least(x, low), for numbers or vectors of numbers. A NaN stays NaN.
template <class Math, class Number>
LF_MATH Number sigmoid(Number x) {
  return 1.0f / (1.0f + Math::exp(-Math::at_least(x, -87.0f)));  // exp(87) is finite
}

// cap tanh(x / cap), with an absolute error of at most 2e-7 cap. A NaN or an infinity becomes NaN.
template <class Math, class Number>
LF_MATH Number softcapped(Number x, float cap) {
  const Number e = Math::exp(-Math::at_least(x * (2.0f / cap), -87.0f));
  return cap * (1.0f - e) / (1.0f + e) + (x - x);
}

// If exp is exact to 2 units in the last place, gelu and its approximation have an absolute error of at most 2e-7 |x|,
// and a relative error of at most 4e-6 for values of at least 1e-12.
template <Activation kind, class Math, class Number>
LF_MATH Number activated(Number x) {
  if constexpr (kind == Activation::kSilu) {
    return x / (1.0f + Math::exp(-Math::at_least(x, -87.0f)));
  } else if constexpr (kind == Activation::kGelu) {
    const Number positive = Math::at_least(x, 0.0f), size = positive + (positive - x);
    return positive - size * normal_tail(size) * Math::exp(-0.5f * size * size);
  } else if constexpr (kind == Activation::kGeluPytorchTanh) {  // (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u))
    const Number twice_u = x * (1.5957691216057308f + 0.07135481627260025f * x * x);
    return x / (1.0f + Math::exp(-Math::at_least(twice_u, -87.0f)));
  } else if constexpr (kind == Activation::kRelu2) {
    return x * Math::at_least(x, 0.0f);
  } else if constexpr (kind == Activation::kQuickGelu) {
    return x / (1.0f + Math::exp(-Math::at_least(1.702f * x, -87.0f)));
  } else {
    return x;
  }
}

}  // namespace laneformer
