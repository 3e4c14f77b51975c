#include "plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "checks.h"

namespace laneformer {
namespace plan {

int64_t Weight::elements() const {
  int64_t count = copies();
  for (const int64_t size : shape) count *= size;
  return count;
}

int64_t rows(const Product& product) {
  int64_t rows = 0;
  for (const Matrix& matrix : product.matrices) rows += matrix.weight.size;
  return rows;
}

[[noreturn]] void damaged(const std::string& what) { throw std::runtime_error("damaged plan: " + what); }

void require(bool fits, const char* what) {
  if (!fits) damaged(what);
}

Checks::Checks(const Plan& plan, const Module* module) : plan(plan), module_(module) {
  if (module && !plan.streams()) channels_of(Value::stream) = plan.hidden_size;
}

void Checks::matrix(const Array& array, const char* what, int64_t experts) const {
  if (array.columns == 0) damaged(std::string(what) + " is not a matrix");
  if (array.experts != experts) damaged(std::string(what) + " is of another number of experts");
}

void Checks::vector(const Array& array, int64_t size, const char* what, int64_t experts) const {
  if (array.columns > 0 || array.size != size || array.experts != experts)
    damaged(std::string(what) + " has another size than its vector");
}

void Checks::vector(const std::optional<Array>& array, int64_t size, const char* what) const {
  if (array) vector(*array, size, what);
}

void Checks::norm(const std::optional<Norm>& norm, int64_t size) const {
  if (norm) vector(norm->gain, size, "a norm");
}

void Checks::reads_stream() {
  require(channels_of(Value::stream) > 0,
          "modules begin with a mixture of streams if the head does, and have no other");
}

namespace {

constexpr int kFormat = 6;  // custom_calls/words.py
constexpr int kMostDimensions = 4;
constexpr int kMostStreams = 64, kMostLanes = 1 << 16;
constexpr int64_t kMostElements = int64_t{1} << 44;  // of a lane's weight: times the lanes it fits 64 bits

class Reader {
 public:
  Reader(const int32_t* words, int64_t num_words, const float* floats, int64_t num_floats)
      : words_(words), num_words_(num_words), floats_(floats), num_floats_(num_floats) {}

  Plan plan() {
    header();
    weights();
    rotaries();
    read("ops", static_cast<DecoderOps&>(plan_));
    check_ops();
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
      weight.experts = size("number of experts", 0, kMostExperts);
      weight.offset = word();
      weight.stride = word();
      weight.shape.resize(size("number of dimensions", 1, kMostDimensions));
      int64_t elements = weight.copies();
      for (int64_t& length : weight.shape) {
        length = size("dimension");
        require(length <= kMostElements / elements, "a weight is too large");
        elements *= length;
      }
      require(weight.is_matrix() ? weight.shape.size() > 1 : weight.stride >= 0, "a vector has no place");
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

  // ---- ops: fields in the order of laneformer/ops.py, as custom_calls/words.py writes them

  void read(const char* what, int64_t& value) { value = size(what); }
  void read(const char*, float& value) { value = number(); }
  void read(const char*, bool& value) { value = flag(); }
  void read(const char* what, RotaryIndex& value) {
    value.index = index((int64_t)plan_.rotaries.size(), what);
    value.pairs = (int64_t)plan_.rotaries[value.index].frequencies.size();
  }

  void read(const char* what, Array& value) {
    value.number = index((int64_t)plan_.weights.size(), what);
    const Weight& weight = plan_.weights[value.number];
    require(weight.shape.size() <= 2, "a weight has more than two dimensions");
    const int64_t columns = weight.is_matrix() ? weight.shape[1] : 0;
    const int64_t size = weight.is_matrix() ? weight.shape[0] : weight.elements() / weight.copies();
    value = {value.number, size, columns, weight.offset, weight.stride, weight.experts};
    if (weight.is_matrix()) return;
    const int64_t last = weight.lane_sharded ? plan_.lanes - 1 : 0, all = weight.elements();
    require(weight.lane_sharded ? value.stride >= all : value.stride == 0, "lanes' vectors overlap");
    require(value.offset + last * value.stride + all <= plan_.small_size, "a vector lies beyond the small weights");
  }

  template <class T>
  void read(const char* what, std::optional<T>& value) {
    if (flag()) read(what, value.emplace());
  }

  template <class T>
  void read(const char* what, std::vector<T>& values) {
    values.resize(count());
    for (T& value : values) read(what, value);
  }

  template <class... T>
  void read(const char* what, std::variant<T...>& value) {
    const int kind = index(sizeof...(T), what);
    const int64_t length = count(), begin = at_;
    int alternative = 0;
    ((alternative++ == kind ? read(what, value.template emplace<T>()) : void()), ...);
    require(at_ == begin + length, "an op has another number of words than it says");
  }

  template <class T>
  void read(const char* what, T& value) {
    if constexpr (std::is_enum_v<T>) {
      value = (T)index(count_of(T{}), what);
    } else {
      value.visit([&](const char* name, auto& field) { read(name, field); });
    }
  }

  // ---- checks beyond the types of fields; those of an op are in checks.h

  void check_ops() {
    require(plan_.lanes <= kMostLanes, "too many lanes");
    require(plan_.streams() <= kMostStreams, "too many residual streams");
    Checks checks(plan_);
    checks.matrix(plan_.embedding, "the embedding");
    require(!plan_.weights[plan_.embedding.number].lane_sharded && plan_.embedding.size == plan_.vocab_size &&
                plan_.embedding.columns == plan_.hidden_size,
            "the embedding has another shape than vocab_size x hidden_size");
    for (Layer& layer : plan_.layers) check_module(layer.attention), check_module(layer.feed_forward);
    const Head& head = plan_.head;
    checks.norm(head.norm, plan_.hidden_size);
    if (head.gather) check(*head.gather, checks);
    checks.matrix(head.weight, "the head");
    const int slices = head.kind == HeadKind::vocab_parallel ? plan_.lanes : 1;
    require(plan_.weights[head.weight.number].lane_sharded == (head.kind != HeadKind::replicate) &&
                head.weight.columns == plan_.hidden_size && head.weight.size * slices == plan_.vocab_size,
            "the head has another shape than its kind asks for");
    require(!head.norm_of_sum || head.kind == HeadKind::replicate, "a norm of the sum needs head replicate");
  }

  void check_module(Module& module) {
    Checks checks(plan_, &module);
    for (Op& op : module.ops) {
      std::visit(
          [&](auto& one) {
            check(one, checks);
            one.visit_vectors(
                [&](const char* name, const auto& array, int64_t size) { checks.vector(array, size, name); });
          },
          op);
      checks.next();
    }
    require(checks.channels_of(Value::output) > 0, "a module has no output");
    checks.norm(module.sum_norm, plan_.hidden_size);
  }

  // ---- schedule

  std::vector<Part> parts(int time) {  // of modules that have computed by then
    std::vector<Part> list(count());
    for (Part& part : list) {
      part.module = index(std::min<int64_t>(time + 1, (int64_t)plan_.num_modules()), "module");
      part.weight = number();
    }
    return list;
  }

  void schedule() {
    const int64_t modules = (int64_t)plan_.num_modules();
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
    if (plan_.streams()) check_streams();
    for (int time = 0; time <= modules; time++)
      for (const Event& event : plan_.events[time])
        require(event.payload < 0 ||
                    (event.payload < (int64_t)plan_.sums.size() && plan_.sums[event.payload].complete_at <= time),
                "a sum lands that does not exist or is not complete");
  }

  // Several streams: the sum of each module's outputs lands at once, as a whole.
  void check_streams() {
    require((int)plan_.sums.size() == plan_.num_modules() && plan_.events[plan_.num_modules()].empty(),
            "several streams need one sum for each module");
    for (int time = 0; time < plan_.num_modules(); time++) {
      const Sum& sum = plan_.sums[time];
      const std::vector<Event>& now = plan_.events[time];
      require(now.size() == 1 && now[0].payload == time && now[0].apart.empty() && !sum.stream_mean &&
                  sum.width == plan_.hidden_size && sum.complete_at == time && sum.parts.size() == 1 &&
                  sum.parts[0].module == time && sum.parts[0].weight == 1,
              "several streams need one sum for each module");
    }
  }

  const int32_t* words_;
  const int64_t num_words_;
  const float* floats_;
  const int64_t num_floats_;
  int64_t at_ = 0;
  Plan plan_;
};

}  // namespace

std::vector<KeptArray> kept_arrays(const Plan& plan) {
  std::vector<KeptArray> found;
  for (int time = 0; time < plan.num_modules(); time++) {
    const auto add = [&](Kept kind, std::vector<int64_t> shape, KeptDtype dtype, bool fixed, int64_t every) {
      found.push_back({time / 2, kind, std::move(shape), dtype, fixed, every});
    };
    for (const Op& op : plan.module(time).ops) std::visit([&](const auto& one) { one.visit_kept(add); }, op);
  }
  return found;
}

Plan decode(const int32_t* words, int64_t num_words, const float* floats, int64_t num_floats) {
  return Reader(words, num_words, floats, num_floats).plan();
}

}  // namespace plan
}  // namespace laneformer
