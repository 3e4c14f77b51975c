// Op OutputNorm: the norm of a module's output, before the schedule adds and sends it.
#include "../../common/checks.h"
#include "../worker.h"
#include "op.h"

namespace laneformer {

namespace {

class OutputNormOp final : public Op {
 public:
  explicit OutputNormOp(const plan::OutputNorm& op) : norm_(op.norm) {}

  // Norms each lane's output in place; the lane's first worker does it.
  void run(Worker& w, int module) const override {
    for (int lane = w.first_lane; lane < w.last_lane; lane++)
      for (int p = 0; p < w.positions && w.owns(lane); p++) {
        float* o = w.output(module, lane, p);
        w.kernels.rms_norm(o, w.state.small(norm_.gain, lane), norm_.eps, w.plan.hidden_size, o);
      }
  }

 private:
  const plan::Norm norm_;
};

}  // namespace

std::unique_ptr<Op> make_op(const plan::OutputNorm& op, Setup&) { return std::make_unique<OutputNormOp>(op); }

namespace plan {

void check(const OutputNorm& op, Checks& checks) { checks.norm(op.norm, checks.plan.hidden_size); }

}  // namespace plan

}  // namespace laneformer
