// A model's kernel, compiled for emulator.cc, and its description. tests/support/emulated.py compiles this file in the
// folder that has the kernel's sources and model.h.
#include "kernel.cu"

#if __has_include("host.cc")  // what a test calls instead of a driver
#include "host.cc"
#endif

namespace {

using namespace laneformer::gpu;

// Whether no CTA of a launch may wait for another. CTAs then run one after the other, and a wait would be a deadlock.
bool in_turn(const Params& p) {
  if (!kSteps || p.op == kStepBegin || p.op == kStepHead) return false;
  if (p.op == kStepEmbed) return true;
#if LF_STEPS
  return p.op >= kStepOp && !step_of(p.op, p.layer).waits;
#else
  return false;
#endif
}

#if LF_STEPS
constexpr auto run = laneformer_step;
#else
constexpr auto run = laneformer_decode;
#endif

}  // namespace

extern "C" const emulator::Kernel laneformer_kernel;
const emulator::Kernel laneformer_kernel = {
    kThreads, kWarpSize, kRingBytes, [](const Params& p) { run(p); }, [](const Params& p) { laneformer_read(p); },
    in_turn};
