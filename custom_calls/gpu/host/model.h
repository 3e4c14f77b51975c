// A model on the host: its plan, and the numbers of its layout (custom_calls/gpu/layout.py).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "../../common/plan.h"

namespace laneformer {
namespace gpu {

// Numbers by name, read from a text with one line for each name: "name number number ...".
class Numbers {
 public:
  explicit Numbers(const char* text);

  // Both throw std::runtime_error for an unknown name; `one` also for a name with several numbers.
  int64_t one(const char* name) const;
  std::vector<int> many(const char* name) const;

 private:
  const std::vector<int64_t>& find(const char* name) const;

  std::map<std::string, std::vector<int64_t>> lines_;
};

// The fields have the names under which custom_calls/gpu/session.py passes the numbers.
struct Model {
  Model(plan::Plan, const Numbers&);

  plan::Plan plan;
  std::vector<plan::KeptArray> kept;  // in the order of a call's operands and of Params::caches

  int lanes_here;                         // lanes of each device
  int64_t packed_words;                   // words of a device's packed weights
  int ctas, grid, threads, shared_bytes;  // CTAs of a lane and of a launch; threads and shared memory of a CTA
  int64_t lane_words, shared_words;       // words of a lane's boards, and of the memory that all lanes share
  int pass_tags, exchanges, rows;         // tags, lane exchanges and most rows of a pass
  int requests, drafting;                 // slots of a call; whether passes may have drafts
  std::vector<int> steps;                 // op (kernel/params.h), layer, ... of a pass; empty: the persistent kernel
  int overlapping, kept_floats;           // whether launches overlap; floats that a CTA keeps between launches

  std::vector<int> devices, places;  // this process's devices: driver's ordinals, and places among all devices
  int all_devices;                   // devices of all processes
  int64_t timeout_ms, chaos_us, peer_delay_us;
};

}  // namespace gpu
}  // namespace laneformer
