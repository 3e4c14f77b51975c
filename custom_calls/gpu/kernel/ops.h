// Lists of ops as types, functions over such lists, and the arithmetic of activation.h. model.h includes this file.
//
// model.h, which custom_calls/gpu/header.py writes, has a struct of constants for each op. The ops of one kind of
// module are Ops<...>, and all kinds are AllKinds = Kinds<...>. Modules of one kind differ only in weights and windows,
// so they share code. Attentions and FeedForwards are the two modules of a layer: All is the list of their kinds, and
// kind_of(layer) the number of a layer's kind in it.
#pragma once

#include "numbers.h"

#define LF_MATH LF_DEVICE
#include "activation.h"

namespace laneformer {
namespace gpu {

struct Numbers {  // functions of float32 for activation.h
  LF_DEVICE static float exp(float x) { return exp_of(x); }
  LF_DEVICE static float at_least(float x, float low) { return larger(x, low); }
};

// log(1 + x) for x in 0 .. 1, by the series of 2 atanh(x / (2 + x)).
LF_DEVICE float log_of_one_and(float x) {
  const float y = x / (2 + x), square = y * y;
  float sum = 1.0f / 15;
  LF_UNROLL for (int i = 13; i > 0; i -= 2) sum = fma(sum, square, 1.0f / i);
  return 2 * y * sum;
}

// log(1 + exp(x))
LF_DEVICE float softplus_of(float x) { return larger(x, 0.0f) + log_of_one_and(exp_of(-larger(x, -x))); }

template <class... Op>
struct Ops {};

template <class... Kind>
struct Kinds {};

// Calls body with the ops of kind number `kind`.
template <class Body, class... Kind>
LF_DEVICE void with_kind(Kinds<Kind...>, int kind, Body body) {
  int number = 0;
  ((kind == number++ ? body(Kind{}) : void()), ...);
}
// Calls body with the ops of a layer. Module: Attentions or FeedForwards.
template <class Module, class Body>
LF_DEVICE void with_ops(int layer, Body body) {
  with_kind(typename Module::All{}, Module::kind_of(layer), body);
}

// The number of ops of a list, or of kind number `kind`.
template <class... Op>
LF_DEVICE constexpr int count_of(Ops<Op...>) {
  return sizeof...(Op);
}

template <class... Kind>
LF_DEVICE constexpr int count_of(Kinds<Kind...>, int kind) {
  int number = 0, found = 0;
  ((kind == number++ ? void(found = count_of(Kind{})) : void()), ...);
  return found;
}

// The largest Measure::of<Op>() of the ops.
template <class Measure, class... Op>
constexpr int most_of(Ops<Op...>) {
  int most = 0;
  ((most = larger_of(most, Measure::template of<Op>())), ...);
  return most;
}
template <class Measure, class... Kind>
constexpr int most_of(Kinds<Kind...>) {
  int most = 0;
  ((most = larger_of(most, most_of<Measure>(Kind{}))), ...);
  return most;
}

}  // namespace gpu
}  // namespace laneformer
