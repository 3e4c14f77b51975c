// The host's part of functions.cu.
#include "params.h"

extern "C" int laneformer_emulate(const laneformer::gpu::Params*, int grid, int64_t shared_bytes, uint64_t seed);

// Runs functions.cu on the emulator. Returns what laneformer_emulate returns.
extern "C" int laneformer_functions(const int* in, const void* weights, unsigned long long* words, int* out,
                                    uint64_t seed) {
  using namespace laneformer::gpu;
  Params p = {};
  p.prompt = in, p.weights = weights, p.boards = words, p.tokens = out;
  for (unsigned long long& timeout : p.timeouts_ns) timeout = 60'000'000'000;
  return laneformer_emulate(&p, 1, kRingBytes + 8 * (kWarps * kSlots + 1), seed);
}
