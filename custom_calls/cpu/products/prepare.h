// Turns a plan's products into products that workers run.
#pragma once

#include "../ops/op.h"

namespace laneformer {

// The product with the fields that packing and computing need. Throws std::runtime_error for experts that this kernel
// does not compute.
Product prepare_product(const plan::Product&, const Setup&);
// A product with float32 weights, which are not streamed, and a vector that is not rounded.
Product prepare_unstreamed(const plan::Matrix&, plan::Value reads, plan::Value writes, const std::optional<plan::Norm>&,
                           const Setup&);
// The product that makes logits in ROUTES from the stream.
Product prepare_logits(const plan::Matrix&, const std::optional<plan::Norm>&, const Setup&);

}  // namespace laneformer
