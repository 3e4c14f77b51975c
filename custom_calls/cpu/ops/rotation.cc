// The angles of a pass and the rotations by them; rotation.h says what for.
#include "rotation.h"

#include <cmath>

#include "../schedule.h"

namespace laneformer {

Rotations::Rotations(const plan::Plan& plan) : rotaries_(plan.rotaries), angles_(plan.rotaries.size()) {
  for (size_t i = 0; i < angles_.size(); i++) {
    angles_[i].cos.resize(kBlock * rotaries_[i].frequencies.size());
    angles_[i].sin.resize(angles_[i].cos.size());
  }
}

void Rotations::set_position(int p, int64_t position) {
  for (size_t r = 0; r < angles_.size(); r++) {
    const plan::Rotary& rotary = rotaries_[r];
    const size_t pairs = rotary.frequencies.size();
    for (size_t i = 0; i < pairs; i++) {
      const float angle = (float)position * rotary.frequencies[i];
      angles_[r].cos[p * pairs + i] = std::cos(angle) * rotary.factor;
      angles_[r].sin[p * pairs + i] = std::sin(angle) * rotary.factor;
    }
  }
}

void Rotations::rotate(float* x, const plan::RotaryIndex& rotary, int p) const {
  const float *cos = angles_[rotary.index].cos.data() + p * rotary.pairs,
              *sin = angles_[rotary.index].sin.data() + p * rotary.pairs;
  for (int64_t i = 0; i < rotary.pairs; i++) {
    const float even = x[2 * i], odd = x[2 * i + 1];
    x[2 * i] = even * cos[i] - odd * sin[i];
    x[2 * i + 1] = even * sin[i] + odd * cos[i];
  }
}

void Rotations::rotate_last(float* x, int64_t channels, const plan::RotaryIndex& rotary, int p, bool back) const {
  const float *cos = angles_[rotary.index].cos.data() + p * rotary.pairs,
              *sin = angles_[rotary.index].sin.data() + p * rotary.pairs;
  x += channels - 2 * rotary.pairs;
  for (int64_t i = 0; i < rotary.pairs; i++) {
    const float even = x[2 * i], odd = x[2 * i + 1], s = back ? -sin[i] : sin[i];
    x[2 * i] = even * cos[i] - odd * s;
    x[2 * i + 1] = even * s + odd * cos[i];
  }
}

void rotate_to(float* x, const plan::Rotary& rotary, int64_t position) {
  for (size_t i = 0; i < rotary.frequencies.size(); i++) {
    const float angle = (float)position * rotary.frequencies[i], even = x[2 * i], odd = x[2 * i + 1];
    const float cos = std::cos(angle) * rotary.factor, sin = std::sin(angle) * rotary.factor;
    x[2 * i] = even * cos - odd * sin;
    x[2 * i + 1] = even * sin + odd * cos;
  }
}

}  // namespace laneformer
