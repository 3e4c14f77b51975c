// A model's kernel, translated from its PTX, and its description for emulator.cc. tests/support/emulated.py compiles
// this file in a folder that has the kernel's headers, model.h and translated.h. Only sizes come from those headers.
#include "params.h"
#include "runtime.h"
#include "stream.h"
#include "translated.h"

#if __has_include("host.cc")  // what a test calls instead of a driver
#include "host.cc"
#endif

namespace {

using laneformer::gpu::Params;

void run(const Params& p) { translated_kernel((char*)&p); }
void read(const Params& p) { laneformer_read_((char*)&p); }
bool in_turn(const Params&) { return false; }  // all launches run as if CTAs could wait for each other

}  // namespace

extern "C" const emulator::Kernel laneformer_kernel;
const emulator::Kernel laneformer_kernel = {laneformer::gpu::kWarps * laneformer::gpu::kWarpSize,
                                            laneformer::gpu::kWarpSize,
                                            laneformer::gpu::kRingBytes,
                                            run,
                                            read,
                                            in_turn};
