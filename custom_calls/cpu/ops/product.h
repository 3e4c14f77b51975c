// The product that an op contains, for ops that compute one beside what is their own.
#pragma once

#include "op.h"

namespace laneformer {

// Computes this worker's shares of a product without experts and writes them to its value.
void run_product(Worker&, const Product&, int module);
// Makes the op of a product with experts (experts.cc).
std::unique_ptr<Op> make_experts(const plan::Product&, Setup&);

}  // namespace laneformer
