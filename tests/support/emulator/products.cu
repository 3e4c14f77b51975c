// A kernel for tests of products, in place of the decode kernel: tests/custom_calls/gpu/test_products.py compiles it
// for the emulator and calls laneformer_products (products.cc). It computes the products of model.h's shapes one after
// the other. Vectors are in Params::small; the sums of rows go to Params::logits.
#include "product.h"

namespace laneformer {
namespace gpu {

template <class... Shape>
struct Shapes {};

template <class Shape>
LF_DEVICE void multiply(const Params& p, Stream& stream, Lists& lists, float* shared) {
  float* brought = shared + kPartials<Shape> + kPartials<Shape> % 2;
  product<Shape>(stream, typename Shape::Weights::Reader(p, lists, Shape::kProduct), shared, brought,
                 FromShared<Reading<Shape>>{p.small + Shape::kVector});
  sync_cta();
  for (int r = thread(); r < Shape::kRows; r += kThreads)
    p.logits[Shape::kSums + cta() * Shape::kRows + r] = row_sum<Shape>(shared, r);
  sync_cta();
}

template <class... Shape>
LF_DEVICE void multiply_all(Shapes<Shape...>, const Params& p, Stream& stream, Lists& lists, float* shared) {
  (multiply<Shape>(p, stream, lists, shared), ...);
}

LF_KERNEL void laneformer_decode(LF_PARAMS p) {
  LF_SHARED(memory);
  Watch watch(p, nullptr, 0);
  Stream stream((const char*)p.weights + (i64)cta() * kWarps * kLayerLines * kLineBytes, memory,
                (u64*)(memory + kRingBytes), Passes{0}, watch);
  Lists lists(p);
  multiply_all(AllShapes{}, p, stream, lists, (float*)(memory + kRingBytes + 8 * kWarps * kSlots));
  stream.skip_padding(kPadding);
  stream.drain();
}

LF_KERNEL void laneformer_read(LF_PARAMS) {}

}  // namespace gpu
}  // namespace laneformer
