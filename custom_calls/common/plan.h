// A model as the kernels know it: its ops, its small weights and its schedule, decoded from the words that
// custom_calls/words.py writes. Ops have the structs of laneformer/ops.py, which custom_calls/ops_header.py writes into
// plan_ops.h; the structs of the schedule follow custom_calls/plan.py.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "activation.h"

namespace laneformer {

constexpr int count_of(Activation) { return kActivations; }

namespace plan {

// One array. Vectors are stored among the small weights (float32): lane l's at offset + l * stride, with those of its
// experts end to end.
struct Weight {
  bool lane_sharded;           // each lane has its own array
  int64_t experts;             // number of experts that have an array each, in each lane; 0: no such axis
  int64_t offset, stride;      // place among the small weights, in floats; -1 and 0 for a matrix
  std::vector<int64_t> shape;  // of one expert's array in one lane

  bool is_matrix() const { return offset < 0; }
  int64_t copies() const { return experts > 0 ? experts : 1; }  // in each lane
  int64_t elements() const;                                     // of all experts, in one lane
};

// A weight of an op.
struct Array {
  int number;              // its index in Plan::weights
  int64_t size, columns;   // one expert's: elements and 0 of a vector, rows and columns of a matrix
  int64_t offset, stride;  // as in Weight
  int64_t experts;         // as in Weight

  int64_t elements() const { return columns > 0 ? size * columns : size; }  // one expert's
};

struct Rotary {
  std::vector<float> frequencies;  // radians per position of each pair
  float factor;                    // factor on cos and sin
};

struct RotaryIndex {
  int index;      // into Plan::rotaries
  int64_t pairs;  // as many as it has frequencies

  int64_t channels() const { return 2 * pairs; }  // those that rotate
};

#include "plan_ops.h"

// Columns of each matrix of a product, rows of all its matrices together, and channels that it writes; those of one
// expert if the product is of experts.
inline int64_t columns(const Product& product) { return product.matrices[0].weight.columns; }
int64_t rows(const Product& product);
inline int64_t channels(const Product& product) { return product.gated ? rows(product) / 2 : rows(product); }
// Experts whose channels a product reads end to end, or writes end to end.
inline int64_t read_experts(const Product& product) {
  return product.chosen && product.chosen->summed ? product.chosen->used : 1;
}
inline int64_t written_experts(const Product& product) {
  return product.chosen && !product.chosen->summed ? product.chosen->used : 1;
}
// Blocks of a block-diagonal product; 1 for any other.
inline int blocks(const Product& product) { return product.blocks ? product.blocks->count : 1; }

struct Part {
  int module;
  float weight;
};

// What happens to a lane's stream at one time of the schedule.
struct Event {
  int payload;              // the sum that lands; -1: the lane's own output of a module is added
  int module;               // own output: its module
  float weight;             // own output: its scale
  std::vector<Part> apart;  // sum: parts that the lane has added before, which are subtracted
};

// A sum over the lanes: the first `width` channels of weighted module outputs and, if stream_mean, of the mean stream.
struct Sum {
  int width, complete_at;
  bool stream_mean;
  std::vector<Part> parts;
};

struct Plan : DecoderOps {
  std::vector<Weight> weights;
  std::vector<Rotary> rotaries;
  int64_t small_size;  // number of floats of all small weights

  std::vector<std::vector<Event>> events;  // by time: modules + 1
  std::vector<Sum> sums;                   // in the order in which they are issued
  int weight_dtype, cache_dtype;           // 0: float32, 1: bfloat16, 2: float16
  bool rounded_activations;

  int num_layers() const { return (int)layers.size(); }
  int streams() const { return head.gather ? head.gather->count : 0; }  // residual streams, where modules mix them
  int num_modules() const { return 2 * num_layers(); }                  // attention and feed forward of each layer
  const Module& module(int time) const {
    const Layer& layer = layers[time / 2];
    return time % 2 == 0 ? layer.attention : layer.feed_forward;
  }
};

// An array that a layer keeps between tokens: a `kept` property of laneformer/ops.py, whose name is the kind.
struct KeptArray {
  int layer;
  Kept kind;
  std::vector<int64_t> shape;  // of one entry in one lane
  KeptDtype dtype;
  bool fixed;  // one entry in all; otherwise one for each `every` positions
  int64_t every;

  int64_t elements() const {
    int64_t count = 1;
    for (const int64_t size : shape) count *= size;
    return count;
  }
  int64_t entries(int64_t positions) const { return fixed ? 1 : (positions + every - 1) / every; }
  // Bytes of one entry in one lane; width: bytes of a value of the cache.
  int64_t bytes(int64_t width) const { return elements() * (dtype == KeptDtype::cache ? width : 4); }
};
// All kept arrays of a plan, in the order of a call's operands (custom_calls/decode.py): layer by layer, op by op.
std::vector<KeptArray> kept_arrays(const Plan& plan);

// Decodes a plan. Throws std::runtime_error if the words are damaged or do not fit together.
Plan decode(const int32_t* words, int64_t num_words, const float* floats, int64_t num_floats);

}  // namespace plan
}  // namespace laneformer
