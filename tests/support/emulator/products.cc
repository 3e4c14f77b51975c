// The host's part of products.cu.
#include "params.h"

extern "C" int laneformer_emulate(const laneformer::gpu::Params*, int grid, int64_t shared_bytes, uint64_t seed);

// Runs products.cu on the emulator. Returns what laneformer_emulate returns.
extern "C" int laneformer_products(const void* weights, const float* vectors, const unsigned* coding,
                                   const unsigned* listed, int listed_words, float* sums, int grid, uint64_t seed) {
  using namespace laneformer::gpu;
  Params p = {};
  p.weights = weights, p.small = vectors, p.coding = coding, p.listed = listed, p.listed_words = listed_words;
  p.logits = sums;
  for (unsigned long long& timeout : p.timeouts_ns) timeout = 60'000'000'000;
  return laneformer_emulate(&p, grid, kRingBytes + 8 * kWarps * kSlots + 4 * kFloats, seed);
}
