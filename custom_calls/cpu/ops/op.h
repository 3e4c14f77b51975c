// An op of a module as workers run it. A kind of op in laneformer/ops.py has a file in this folder with a class derived
// from Op, a function `make_op`, and its check (common/checks.h); nothing outside of the file names the kind. EACH_OP,
// which is generated, is the only list of kinds.
//
// Ops of a module run one after the other, and workers that share lanes meet between two of them. All workers run the
// same object, so what a worker writes while it runs is in its own arena, or in a part of a shared buffer that no other
// worker reads before they meet.
#pragma once

#include <memory>
#include <vector>

#include "../../common/plan.h"
#include "../kernels/kernels.h"
#include "../memory.h"
#include "../products/product.h"

namespace laneformer {

struct DecodeState;
class Router;
class Worker;

class Op {
 public:
  Op() = default;
  Op(const Op&) = delete;
  virtual ~Op() = default;

  // The products that it contains, in the order in which they are numbered.
  virtual std::vector<Product*> products() { return {}; }
  // Takes the buffers that `run` takes, which is how their sizes are known: own ones of a worker, and ones that all
  // workers share. The contents of own ones are lost after `run`, those of shared ones when another op takes some. A
  // module's first op must not take shared ones: other workers may still be in the module before.
  virtual void scratch(Arena& own, Arena& shared) const { (void)own, (void)shared; }
  virtual void run(Worker&, int module) const = 0;

  int trace = 0;  // its number in a trace, a TraceOp
};

// The heads' results that a block of a product reads, at all positions of a pass.
struct Heads {
  int lane, block;
  int64_t columns;  // of the block
};

// An op that computes ATTENDED only where a product reads it.
class Attention : public Op {
 public:
  // Writes the wanted heads' results to `to` [positions][columns].
  virtual void merge(Worker&, const Heads& wanted, float* to) const = 0;
};

// What a kind's `make_op` is given when a session is opened: the session, and what the module's earlier ops are to the
// later ones.
struct Setup {
  DecodeState& state;
  const Attention* attention = nullptr;  // makes ATTENDED; null: it is written already
  const Router* router = nullptr;        // makes ROUTES
  bool chosen = false;                   // an op before chooses the router's experts
};

#define DECLARE(Kind) std::unique_ptr<Op> make_op(const plan::Kind&, Setup&);
EACH_OP(DECLARE)
#undef DECLARE

}  // namespace laneformer
