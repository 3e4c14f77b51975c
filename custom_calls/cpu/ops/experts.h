// Routers, the ops that choose each position's experts. A router op is a class derived from Router; products with
// experts use the choices of the module's newest router (experts.cc).
//
// Invariant: every worker chooses from the logits of all experts and finds the same.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "op.h"

namespace laneformer {

// A use is an expert that a position has chosen; its number is position * used + rank.
struct Routes {   // the choices of a lane's positions
  struct Group {  // the uses of one expert
    int expert;
    int64_t first, last;  // members first <= m < last
  };
  std::vector<int32_t> experts;  // by use
  std::vector<float> shares;     // by use: factor on the expert's result
  std::vector<Group> groups;     // in the order of the experts' numbers
  std::vector<int32_t> members;  // uses, group by group
  std::vector<int32_t> places;   // by use: its index in `members`
};

class Router : public Op {
 public:
  Router(Product logits, int64_t used, const Setup&);

  std::vector<Product*> products() override { return {&logits_}; }
  void run(Worker&, int module) const override;  // computes the logits of all positions

  // Space in which `weigh` chooses: [2 experts] scores, then those of groups; numbers of the best ones.
  struct Space {
    float* scores;
    int32_t* best;
  };
  Space space(Arena& own) const;
  // Chooses the experts of all positions of a lane from their logits, and groups the uses by expert. Workers must have
  // met since `run`.
  void choose(Worker&, int lane, const Space&) const;
  const Routes& routes(const Worker&, int lane) const;  // as `choose` has left them

 protected:
  // Writes the numbers of a position's experts and their shares, [used] each. logits: [experts].
  virtual void weigh(Worker&, const float* logits, int lane, int p, const Space&, int32_t* numbers,
                     float* shares) const = 0;

  const int experts_, used_;

 private:
  Routes& routes_of(const Worker&, int lane) const;

  Product logits_;
  std::unique_ptr<std::unique_ptr<Routes[]>[]> routes_;  // by worker, by own lane
};

}  // namespace laneformer
