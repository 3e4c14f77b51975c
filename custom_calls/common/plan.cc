#include "plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace laneformer {
namespace plan {

int64_t Weight::elements() const {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

namespace {

constexpr int kFormat = 2;  // custom_calls/words.py
constexpr int kMostDimensions = 4;
constexpr int kMostLanes = 1 << 16, kMostHeads = 1 << 20;
constexpr int64_t kMostElements = int64_t{1} << 44;  // of a lane's weight: times the lanes it fits 64 bits

[[noreturn]] void damaged(const std::string& what) { throw std::runtime_error("damaged plan: " + what); }

void require(bool fits, const char* what) {
  if (!fits) damaged(what);
}

class Reader {
 public:
  Reader(const int32_t* words, int64_t num_words, const float* floats, int64_t num_floats)
      : words_(words), num_words_(num_words), floats_(floats), num_floats_(num_floats) {}

  Plan plan() {
    header();
    weights();
    rotaries();
    ops();
    schedule();
    plan_.weight_dtype = index(3, "dtype");
    plan_.cache_dtype = index(3, "dtype");
    plan_.rounded_activations = flag();
    require(at_ == num_words_, "words follow its end");
    return std::move(plan_);
  }

 private:
  // ---- words

  int32_t word() {
    require(at_ < num_words_, "it is truncated");
    return words_[at_++];
  }
  int size(const char* what, int least = 1, int most = INT32_MAX) {  // a number of things
    const int32_t value = word();
    if (value < least || value > most) damaged(std::string(what) + " = " + std::to_string(value));
    return value;
  }
  int index(int64_t count, const char* what) {  // a number below count
    const int32_t value = word();
    if (value < 0 || value >= count) damaged(std::string(what) + " " + std::to_string(value) + " does not exist");
    return value;
  }
  int64_t count() {  // elements that follow, each a word at least
    const int32_t value = word();
    require(value >= 0 && value <= num_words_ - at_, "a list is longer than the words");
    return value;
  }
  bool flag() { return index(2, "truth value") == 1; }
  float number() { return floats_[index(num_floats_, "float")]; }

  // ---- tables

  void header() {
    require(num_words_ >= 4 && word() == kFormat,
            "it has another format: rebuild the library (python -m custom_calls)");
    require(word() == num_words_ && word() == num_floats_, "its number of words or floats is wrong");
    plan_.small_size = size("small weights", 0);
  }

  void weights() {
    plan_.weights.resize(count());
    for (Weight& weight : plan_.weights) {
      weight.lane_sharded = flag();
      weight.offset = word();
      weight.stride = word();
      weight.shape.resize(size("number of dimensions", 1, kMostDimensions));
      int64_t elements = 1;
      for (int64_t& length : weight.shape) {
        length = size("dimension");
        require(length <= kMostElements / elements, "a weight is too large");
        elements *= length;
      }
      require(weight.is_matrix() || (weight.offset >= 0 && weight.stride >= 0), "a vector has no place");
    }
  }

  void rotaries() {
    plan_.rotaries.resize(count());
    for (Rotary& rotary : plan_.rotaries) {
      const int64_t pairs = size("pairs"), first = index(num_floats_, "float");
      require(first + pairs <= num_floats_, "frequencies are truncated");
      rotary.frequencies.assign(floats_ + first, floats_ + first + pairs);
      rotary.factor = number();
    }
  }

  int matrix_weight(const char* what) {
    const int weight = index((int64_t)plan_.weights.size(), "weight");
    if (plan_.weights[weight].shape.size() != 2) damaged(std::string(what) + " is not a matrix");
    return weight;
  }

  Vector vector(int64_t size, const char* what) {
    const Weight& weight = plan_.weights[index((int64_t)plan_.weights.size(), "weight")];
    const int64_t last = weight.lane_sharded ? plan_.lanes - 1 : 0;
    if (weight.is_matrix() || weight.shape[0] != size) damaged(std::string(what) + " has another size than its vector");
    require(weight.lane_sharded ? weight.stride >= size : weight.stride == 0, "lanes' vectors overlap");
    require(weight.offset + last * weight.stride + size <= plan_.small_size, "a vector lies beyond the small weights");
    return {weight.offset, weight.stride, size};
  }

  Norm norm(int64_t size) {
    const Vector gain = vector(size, "a norm");
    return {gain, number()};
  }
  std::optional<Norm> maybe_norm(int64_t size) {
    if (!flag()) return std::nullopt;
    return norm(size);
  }
  std::optional<Norm> maybe_norm_of_heads(int64_t heads, int64_t head_dim) {
    if (!flag()) return std::nullopt;
    const int64_t weight = at_ < num_words_ ? words_[at_] : -1;  // of the gain
    const bool all =
        weight >= 0 && weight < (int64_t)plan_.weights.size() && plan_.weights[weight].elements() == heads * head_dim;
    return norm(all ? heads * head_dim : head_dim);
  }

  // ---- ops

  // Channels of each value of the module that is read, 0 before it is written.
  int64_t& channels(Value value) { return channels_[(int)value]; }

  Product product() {
    Product product;
    product.name = size("product's name", 0);
    product.matrices.resize(count());
    product.rows = product.columns = 0;
    require(!product.matrices.empty(), "a product without matrices");
    for (Matrix& matrix : product.matrices) {
      matrix.weight = matrix_weight("a product's weight");
      const std::vector<int64_t>& shape = plan_.weights[matrix.weight].shape;
      require(product.columns == 0 || product.columns == shape[1], "matrices of one product differ in columns");
      matrix.first = product.rows;
      matrix.rows = shape[0];
      product.rows += shape[0];
      product.columns = shape[1];
      if (flag()) matrix.bias = vector(matrix.rows, "a bias");
    }
    product.reads = (Value)index(5, "value");
    product.writes = (Value)index(5, "value");
    product.norm = maybe_norm(product.columns);
    product.activation = (Activation)index(kActivations, "activation");
    product.gated = flag();
    require(!product.gated || (product.matrices.size() == 2 && product.matrices[0].rows == product.matrices[1].rows),
            "a gated product needs two equal matrices");
    require(channels(product.reads) == product.columns, "a product has other columns than the value that it reads");
    require(product.writes != Value::stream && product.writes != Value::attended, "a product writes what it must not");
    require(product.writes != Value::output || product.channels() == plan_.hidden_size,
            "a module's output has another size than the stream");
    channels(product.writes) = product.channels();
    return product;
  }

  Attend attend() {
    Attend attend;
    attend.heads = size("heads", 1, kMostHeads);
    attend.kv_heads = size("kv_heads", 1, kMostHeads);
    attend.head_dim = size("head_dim", 1, kMostHeads);
    attend.scale = number();
    if (flag()) attend.window = size("window");
    attend.rotary = flag() ? index((int64_t)plan_.rotaries.size(), "rotation") : -1;
    attend.q_norm = maybe_norm_of_heads(attend.heads, attend.head_dim);
    attend.k_norm = maybe_norm_of_heads(attend.kv_heads, attend.head_dim);
    attend.gated = flag();
    require(attend.heads % attend.kv_heads == 0, "heads are not a multiple of kv_heads");
    require(attend.rotary < 0 || 2 * (int64_t)plan_.rotaries[attend.rotary].frequencies.size() == attend.head_dim,
            "a rotation has other channels than a head");
    require(channels(Value::projected) == attend.values_end() + (attend.gated ? attend.width() : 0),
            "attention reads another number of channels than are projected");
    channels(Value::attended) = attend.width();
    return attend;
  }

  Module module() {
    Module ops;
    for (int64_t& size : channels_) size = 0;
    channels(Value::stream) = plan_.hidden_size;
    for (int64_t left = count(); left > 0; left--) {
      const int kind = index(3, "kind of op");
      const int64_t length = count(), begin = at_;
      if (kind == 0) {
        ops.push_back(product());
      } else if (kind == 1) {
        ops.push_back(attend());
      } else {
        require(left == 1, "an op follows the norm of the output");
        const Norm own = norm(plan_.hidden_size);
        ops.push_back(OutputNorm{own, flag()});
      }
      require(at_ == begin + length, "an op has another number of words than it says");
    }
    require(channels(Value::output) > 0, "a module has no output");
    return ops;
  }

  void ops() {
    plan_.lanes = size("lanes", 1, kMostLanes);
    plan_.hidden_size = size("hidden_size");
    plan_.vocab_size = size("vocab_size");
    plan_.context = size("context");
    plan_.embedding = matrix_weight("the embedding");
    const Weight& embedding = plan_.weights[plan_.embedding];
    require(
        !embedding.lane_sharded && embedding.shape[0] == plan_.vocab_size && embedding.shape[1] == plan_.hidden_size,
        "the embedding has another shape than vocab_size x hidden_size");
    for (int64_t left = 2 * count(); left > 0; left--) plan_.modules.push_back(module());
    head();
  }

  void head() {
    Head& head = plan_.head;
    head.kind = (HeadKind)index(3, "kind of head");
    head.norm = norm(plan_.hidden_size);
    head.norm_of_sum = flag();
    head.weight = matrix_weight("the head");
    const Weight& weight = plan_.weights[head.weight];
    const int slices = head.kind == HeadKind::vocab_parallel ? plan_.lanes : 1;
    require(weight.lane_sharded == (head.kind != HeadKind::replicate) && weight.shape[1] == plan_.hidden_size &&
                weight.shape[0] * slices == plan_.vocab_size,
            "the head has another shape than its kind asks for");
    require(!head.norm_of_sum || head.kind == HeadKind::replicate, "a norm of the sum needs head replicate");
  }

  // ---- schedule

  std::vector<Part> parts(int time) {  // of modules that have computed by then
    std::vector<Part> list(count());
    for (Part& part : list) {
      part.module = index(std::min<int64_t>(time + 1, (int64_t)plan_.modules.size()), "module");
      part.weight = number();
    }
    return list;
  }

  void schedule() {
    const int64_t modules = (int64_t)plan_.modules.size();
    plan_.events.resize(count());
    require((int64_t)plan_.events.size() == modules + 1, "the schedule is for another number of layers");
    for (int time = 0; time <= modules; time++) {
      plan_.events[time].resize(count());
      for (Event& event : plan_.events[time]) {
        event.payload = word();
        event.module = index(modules, "module");
        event.weight = number();
        event.apart = parts(time);
        require(event.payload >= 0 || event.module <= time, "an output is added before it is computed");
      }
    }
    plan_.sums.resize(count());
    for (Sum& sum : plan_.sums) {
      sum.width = size("width", 0);
      sum.complete_at = index(modules, "module");
      sum.stream_mean = flag();
      sum.parts = parts(sum.complete_at);
      require(sum.width <= plan_.hidden_size, "a sum is wider than the stream");
      require(!sum.stream_mean || sum.width == plan_.hidden_size, "a mean of the streams needs all channels");
    }
    for (int time = 0; time <= modules; time++)
      for (const Event& event : plan_.events[time])
        require(event.payload < 0 ||
                    (event.payload < (int64_t)plan_.sums.size() && plan_.sums[event.payload].complete_at <= time),
                "a sum lands that does not exist or is not complete");
    for (int m = 0; m < modules; m++)
      if (const OutputNorm* normed = output_norm(plan_.modules[m]); normed && normed->of_sum) {
        require(normed->norm.gain.stride == 0, "a norm of a sum has a gain for each lane");
        require(added_as_sum(m), "a norm of a sum, but the module's output is also added otherwise");
      }
  }

  // Whether one sum has this module, and nothing else, in it, and its output is added in no other way.
  bool added_as_sum(int module) const {
    int sums = 0;
    for (const Sum& sum : plan_.sums)
      for (const Part& part : sum.parts) {
        if (part.module != module) continue;
        sums++;
        if (sum.parts.size() > 1 || part.weight != 1.0f || sum.stream_mean || sum.width != plan_.hidden_size)
          return false;
      }
    for (const std::vector<Event>& now : plan_.events)
      for (const Event& event : now) {
        if (event.payload < 0 && event.module == module) return false;
        for (const Part& part : event.apart)
          if (part.module == module) return false;
      }
    return sums == 1;
  }

  const int32_t* words_;
  const int64_t num_words_;
  const float* floats_;
  const int64_t num_floats_;
  int64_t at_ = 0;
  int64_t channels_[5];
  Plan plan_;
};

}  // namespace

Plan decode(const int32_t* words, int64_t num_words, const float* floats, int64_t num_floats) {
  return Reader(words, num_words, floats, num_floats).plan();
}

}  // namespace plan
}  // namespace laneformer
