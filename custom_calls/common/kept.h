// The arrays that layers keep between tokens (plan.h), as operands of a call that updates them in place.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "plan.h"
#include "xla/ffi/api/ffi.h"

namespace laneformer {
namespace plan {

inline xla::ffi::DataType type_of(const KeptArray& array, const Plan& plan) {
  namespace ffi = xla::ffi;
  if (array.dtype != KeptDtype::cache) return array.dtype == KeptDtype::float32 ? ffi::F32 : ffi::S32;
  return plan.cache_dtype == 0 ? ffi::F32 : plan.cache_dtype == 1 ? ffi::BF16 : ffi::F16;
}

// Whether `shape` is [lanes, slots, t, *array.shape], where t is the number of entries for `positions` positions.
// positions: -1 if it is not known yet; then any t fits.
inline bool fits(const KeptArray& array, xla::ffi::Span<const int64_t> shape, int64_t lanes, int64_t slots,
                 int64_t positions) {
  const std::vector<int64_t>& entry = array.shape;
  return shape.size() == 3 + entry.size() && shape[0] == lanes && shape[1] == slots &&
         std::equal(entry.begin(), entry.end(), shape.begin() + 3) &&
         ((!array.fixed && positions < 0) || shape[2] == array.entries(positions));
}

// What an array must be, as text.
inline std::string described(const KeptArray& array, const Plan& plan, int64_t lanes, int64_t slots,
                             int64_t positions) {
  const int dtype = array.dtype == KeptDtype::cache ? plan.cache_dtype : array.dtype == KeptDtype::float32 ? 0 : 3;
  const bool known = array.fixed || positions >= 0;
  std::string shape = std::to_string(lanes) + ", " + std::to_string(slots) + ", " +
                      (known ? std::to_string(array.entries(positions)) : "entries");
  for (const int64_t size : array.shape) shape += ", " + std::to_string(size);
  constexpr const char* kNames[] = {"float32", "bfloat16", "float16", "int32"};
  return std::string(kKeptNames[(int)array.kind]) + " of layer " + std::to_string(array.layer) + " must be " +
         kNames[dtype] + " [" + shape + "] on each device";
}

// Calls take(number, address) for each of a device's arrays, which contain `lanes` lanes each. Sets `positions` to the
// number of positions for which the arrays have room. Returns an error message, or an empty string.
template <class Take>
std::string take_kept(const std::vector<KeptArray>& kept, const Plan& plan, int64_t lanes, int64_t slots,
                      const xla::ffi::RemainingArgs& before, xla::ffi::RemainingRets& after, int64_t& positions,
                      Take take) {
  if (before.size() != kept.size() || after.size() != kept.size())
    return "the decode call's state must contain exactly the arrays that the layers keep";
  positions = -1;
  for (size_t i = 0; i < kept.size(); i++) {
    const auto given = before.get<xla::ffi::AnyBuffer>(i);
    auto changed = after.get<xla::ffi::AnyBuffer>(i);
    const KeptArray& array = kept[i];
    if (!given.has_value() || !changed.has_value()) return "cache " + std::to_string(i) + " cannot be read";
    const auto shape = given->dimensions();
    if (given->element_type() != type_of(array, plan) || !fits(array, shape, lanes, slots, positions))
      return "the decode call's " + described(array, plan, lanes, slots, positions);
    if (given->untyped_data() != (*changed)->untyped_data())
      return "the decode call's cache was not donated: it is updated in place (jax.jit(..., donate_argnums=...))";
    if (!array.fixed && array.every == 1) positions = shape[2];
    take(i, given->untyped_data());
  }
  return "";
}

}  // namespace plan
}  // namespace laneformer
