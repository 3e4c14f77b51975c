#include "model.h"

#include <sstream>
#include <stdexcept>
#include <utility>

#include "../kernel/params.h"

namespace laneformer {
namespace gpu {

Numbers::Numbers(const char* text) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string name;
    words >> name;
    std::vector<int64_t>& numbers = lines_[name];
    for (int64_t number; words >> number;) numbers.push_back(number);
    if (!words.eof()) throw std::runtime_error("a line of the session's numbers contains other text: " + line);
  }
}

const std::vector<int64_t>& Numbers::find(const char* name) const {
  const auto found = lines_.find(name);
  if (found == lines_.end()) throw std::runtime_error(std::string("the session's numbers have no ") + name);
  return found->second;
}

int64_t Numbers::one(const char* name) const {
  const std::vector<int64_t>& numbers = find(name);
  if (numbers.size() != 1)
    throw std::runtime_error(std::string(name) + " must be one number, got " + std::to_string(numbers.size()));
  return numbers[0];
}

std::vector<int> Numbers::many(const char* name) const {
  const std::vector<int64_t>& numbers = find(name);
  return {numbers.begin(), numbers.end()};
}

Model::Model(plan::Plan decoded, const Numbers& numbers)
    : plan(std::move(decoded)),
      kept(plan::kept_arrays(plan)),
      lanes_here((int)numbers.one("lanes_here")),
      packed_words(numbers.one("packed_words")),
      ctas((int)numbers.one("ctas")),
      grid((int)numbers.one("grid")),
      threads((int)numbers.one("threads")),
      shared_bytes((int)numbers.one("shared_bytes")),
      lane_words(numbers.one("lane_words")),
      shared_words(numbers.one("shared_words")),
      pass_tags((int)numbers.one("pass_tags")),
      exchanges((int)numbers.one("exchanges")),
      rows((int)numbers.one("rows")),
      requests((int)numbers.one("requests")),
      drafting((int)numbers.one("drafting")),
      steps(numbers.many("steps")),
      overlapping((int)numbers.one("overlapping")),
      kept_floats((int)numbers.one("kept_floats")),
      devices(numbers.many("devices")),
      places(numbers.many("places")),
      all_devices((int)numbers.one("all_devices")),
      timeout_ms(numbers.one("timeout_ms")),
      chaos_us(numbers.one("chaos_us")),
      peer_delay_us(numbers.one("peer_delay_us")) {
  if (kept.size() > kMaxKept)
    throw std::runtime_error("the layers keep more than " + std::to_string(kMaxKept) + " arrays: use backend xla");
}

}  // namespace gpu
}  // namespace laneformer
