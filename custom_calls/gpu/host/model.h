// What the host must know of a model on its devices: its plan, and how custom_calls/gpu/layout.py has laid it out.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "../../common/plan.h"

namespace laneformer {
namespace gpu {

// Numbers by name: one line for each name, "name number number ...".
class Numbers {
 public:
  explicit Numbers(const char* text);

  // Throw std::runtime_error if there is none of that name; `one`: also if there are several numbers.
  int64_t one(const char* name) const;
  std::vector<int> many(const char* name) const;

 private:
  const std::vector<int64_t>& find(const char* name) const;

  std::map<std::string, std::vector<int64_t>> lines_;
};

// The names are those that custom_calls/gpu/session.py gives the numbers.
struct Model {
  Model(plan::Plan, const Numbers&);

  plan::Plan plan;
  std::vector<plan::Attend> attends;  // of each layer: whose keys and values are its cache

  int lanes_here;  // of each device
  int64_t packed_elements;
  int ctas, grid, threads, shared_bytes;  // of a lane; of a launch; of a CTA
  int64_t lane_words, shared_words;       // of the boards of a lane; between lanes
  int pass_tags, exchanges;               // of a pass
  std::vector<int> steps;                 // ops (kernel/params.h) and layers of a pass; empty: the persistent kernel
  int overlapping, kept_floats;           // whether a launch begins while another one ends; floats of a CTA

  std::vector<int> devices, places;  // of this process: ordinals of the driver; places among those of all processes
  int all_devices;
  int64_t timeout_ms, chaos_us, peer_delay_us;
};

}  // namespace gpu
}  // namespace laneformer
