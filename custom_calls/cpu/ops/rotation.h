// Rotation of pairs of channels by their positions' angles, for all ops that rotate queries or keys. A worker computes
// the angles of a pass's positions once, before the first module.
#pragma once

#include <cstdint>
#include <vector>

#include "../../common/plan.h"

namespace laneformer {

class Rotations {
 public:
  explicit Rotations(const plan::Plan& plan);

  // Computes cos and sin of all angles at block position p, which is position `position` of its text.
  void set_position(int p, int64_t position);
  // Rotates the pairs of x [2 * pairs] by the angles of block position p.
  void rotate(float* x, const plan::RotaryIndex& rotary, int p) const;
  // Rotates the last pairs of x [channels]; back: by the negative angles.
  void rotate_last(float* x, int64_t channels, const plan::RotaryIndex& rotary, int p, bool back = false) const;

 private:
  const std::vector<plan::Rotary>& rotaries_;
  struct Angles {  // [kBlock][pairs]
    std::vector<float> cos, sin;
  };
  std::vector<Angles> angles_;  // by rotary
};

// Rotates x [2 * pairs] by the angles of a position that is not in the pass.
void rotate_to(float* x, const plan::Rotary& rotary, int64_t position);

}  // namespace laneformer
