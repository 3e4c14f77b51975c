// A model as the kernels know it: its ops, its small weights and its schedule, decoded from the words that
// custom_calls/words.py writes. The structs follow the dataclasses of laneformer/ops.py and custom_calls/plan.py.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "activation.h"

namespace laneformer {
namespace plan {

// One array. Vectors lie among the small weights (float32): that of lane l at offset + l * stride.
struct Weight {
  bool lane_sharded;           // each lane has its own
  int64_t offset, stride;      // -1 and 0 of a matrix
  std::vector<int64_t> shape;  // of one lane's share

  bool is_matrix() const { return shape.size() > 1; }
  int64_t elements() const;  // of one lane's share
};

struct Vector {  // a small weight in its place
  int64_t offset, stride, size;
};

struct Norm {  // RMSNorm
  Vector gain;
  float eps;
};

struct Rotary {
  std::vector<float> frequencies;  // radians per position of each pair
  float factor;                    // on cos and sin
};

enum class Value : int32_t { stream, projected, attended, hidden, output };
enum class HeadKind : int32_t { replicate, lane, vocab_parallel };

struct Matrix {
  int weight;
  int64_t rows, first;  // first: among the rows of the product
  std::optional<Vector> bias;
};

struct Product {
  int name;  // of laneformer.ops.ProductName
  std::vector<Matrix> matrices;
  Value reads, writes;
  std::optional<Norm> norm;
  Activation activation;
  bool gated;             // of two matrices, the first is a factor on the other, row by row
  int64_t rows, columns;  // of all matrices

  int64_t channels() const { return gated ? rows / 2 : rows; }  // that it writes
};

struct Attend {
  int heads, kv_heads, head_dim;
  float scale;                         // on the scores
  std::optional<int64_t> window;       // keys seen, the own position included
  int rotary;                          // index into Plan::rotaries, -1 for none
  std::optional<Norm> q_norm, k_norm;  // over each head, or over all heads, as the gain has channels
  bool gated;                          // sigmoids of channels behind the values are factors on the result

  int64_t values_end() const { return ((int64_t)heads + 2 * (int64_t)kv_heads) * head_dim; }  // of what is projected
  int64_t width() const { return (int64_t)heads * head_dim; }                                 // of the result
};

struct OutputNorm {
  Norm norm;
  bool of_sum;  // of the sum over the lanes, where it lands
};

using Op = std::variant<Product, Attend, OutputNorm>;
using Module = std::vector<Op>;

// The norm of a module's output, its last op; null if it has none.
inline const OutputNorm* output_norm(const Module& module) { return std::get_if<OutputNorm>(&module.back()); }

struct Head {
  HeadKind kind;
  Norm norm;
  bool norm_of_sum;
  int weight;
};

struct Part {
  int module;
  float weight;
};

// What happens to a lane's stream at one time of the schedule.
struct Event {
  int payload;              // the sum that lands; -1: an own output is added
  int module;               // own: whose output
  float weight;             // own: its scale
  std::vector<Part> apart;  // landing: own parts that the lane adds by itself, taken out again
};

// One sum over the lanes: of weighted module outputs, the first `width` channels, perhaps with the mean of the streams.
struct Sum {
  int width, complete_at;
  bool stream_mean;
  std::vector<Part> parts;
};

struct Plan {
  std::vector<Weight> weights;
  std::vector<Rotary> rotaries;
  int64_t small_size;  // floats of all small weights

  int lanes, hidden_size, vocab_size, context;
  int embedding;                // weight
  std::vector<Module> modules;  // two of each layer: attention, feed forward
  Head head;

  std::vector<std::vector<Event>> events;  // by time: modules + 1
  std::vector<Sum> sums;                   // in the order in which they are issued
  int weight_dtype, cache_dtype;           // 0: float32, 1: bfloat16, 2: float16
  bool rounded_activations;

  int layers() const { return (int)modules.size() / 2; }
};

// Throws std::runtime_error for words that are damaged or do not fit together.
Plan decode(const int32_t* words, int64_t num_words, const float* floats, int64_t num_floats);

}  // namespace plan
}  // namespace laneformer
