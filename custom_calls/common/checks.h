// Checks of a decoded plan's ops beyond the types of their fields. The check of a kind is in the kind's file in
// custom_calls/cpu/ops/, because each kind has one; both kernels decode plans, so it holds for both.
//
// A check throws std::runtime_error unless the op's weights have the sizes of its fields, and unless it reads what the
// module's earlier ops have written. Code that runs the op relies on it: words may be damaged.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "plan.h"

namespace laneformer {
namespace plan {

constexpr int kMostHeads = 1 << 20, kMostExperts = 1 << 16;  // products of such sizes fit 64 bits

[[noreturn]] void damaged(const std::string& what);
void require(bool fits, const char* what);  // calls `damaged` unless it fits

// The checks of one module, op by op.
class Checks {
 public:
  // module: null for the head.
  explicit Checks(const Plan& plan, const Module* module = nullptr);

  void matrix(const Array& array, const char* what, int64_t experts = 0) const;
  void vector(const Array& array, int64_t size, const char* what, int64_t experts = 0) const;
  void vector(const std::optional<Array>& array, int64_t size, const char* what) const;
  void norm(const std::optional<Norm>& norm, int64_t size) const;

  // Channels of each value of the module, 0 before an op has written it. A check writes those of its op's results.
  int64_t& channels_of(Value value) { return channels_[(int)value]; }
  void reads_stream();  // several residual streams must be mixed before an op reads STREAM
  bool of_head() const { return module_ == nullptr; }
  // The newest of the module's earlier ops of this kind; null if there is none.
  template <class Kind>
  const Kind* earlier() const {
    for (int i = number_ - 1; i >= 0; i--)
      if (const auto* op = std::get_if<Kind>(&module_->ops[i])) return op;
    return nullptr;
  }
  void next() { number_++; }  // the next op follows

  const Plan& plan;
  int64_t experts = 0;         // of the module's newest router
  int64_t attended_heads = 1;  // channels of ATTENDED that are read together

 private:
  const Module* module_;
  int number_ = 0;  // of the op that is checked
  std::array<int64_t, count_of(Value{})> channels_{};
};

#define DECLARE(Kind) void check(const Kind&, Checks&);
EACH_OP(DECLARE)
#undef DECLARE

}  // namespace plan
}  // namespace laneformer
