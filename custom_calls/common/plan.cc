#include "plan.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <type_traits>

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

namespace {

constexpr int kFormat = 6;  // custom_calls/words.py
constexpr int kMostDimensions = 4;
constexpr int kMostStreams = 64;
constexpr int kMostLanes = 1 << 16, kMostHeads = 1 << 20, kMostExperts = 1 << 16;
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

  // ---- checks of ops beyond the types of their fields

  void check_matrix(const Array& array, const char* what, int64_t experts = 0) {
    if (array.columns == 0) damaged(std::string(what) + " is not a matrix");
    if (array.experts != experts) damaged(std::string(what) + " is of another number of experts");
  }
  void check_vector(const Array& array, int64_t size, const char* what, int64_t experts = 0) {
    if (array.columns > 0 || array.size != size || array.experts != experts)
      damaged(std::string(what) + " has another size than its vector");
  }
  void check_norm(const std::optional<Norm>& norm, int64_t size) {
    if (norm) check_vector(norm->gain, size, "a norm");
  }
  void check_norm_of_heads(const std::optional<Norm>& norm, int64_t heads, int64_t head_dim) {
    if (norm) check_norm(norm, norm->gain.size == heads * head_dim ? heads * head_dim : head_dim);
  }

  // Channels of each value of the module that is checked, 0 before it is written.
  int64_t& channels_of(Value value) { return channels_[(int)value]; }

  void check_small(const char* what, const Array& array, int64_t size) { check_vector(array, size, what); }
  void check_small(const char* what, const std::optional<Array>& array, int64_t size) {
    if (array) check_vector(*array, size, what);
  }

  // All norms and vectors have the stream's channels.
  template <class T>
  void check_of_stream(T& value) {
    value.visit([&](const char* name, auto& field) {
      using Field = std::decay_t<decltype(field)>;
      if constexpr (std::is_same_v<Field, Norm> || std::is_same_v<Field, std::optional<Norm>>)
        check_norm(field, plan_.hidden_size);
      if constexpr (std::is_same_v<Field, Array> || std::is_same_v<Field, std::optional<Array>>)
        check_small(name, field, plan_.hidden_size);
    });
  }

  // The check of an op that has no overload below.
  template <class T>
  void check(T& op) {
    check_of_stream(op);
  }

  void check(Product& product) {
    const std::vector<Matrix>& matrices = product.matrices;
    require(!matrices.empty(), "a product without matrices");
    const int64_t experts = product.chosen   ? matrices[0].weight.experts
                            : product.blocks ? (int64_t)product.blocks->count
                                             : 0;
    if (product.blocks) check_blocks(product);
    if (product.chosen) {
      require(channels_of(Value::routes) == product.chosen->used, "a product uses another number of experts");
      require(experts == experts_, "a product has other experts than its router");
    }
    for (const Matrix& matrix : matrices) {
      check_matrix(matrix.weight, "a product's weight", experts);
      require(matrix.weight.columns == columns(product), "matrices of one product differ in columns");
      if (matrix.bias) check_vector(*matrix.bias, matrix.weight.size, "a bias", experts);
    }
    check_norm(product.norm, columns(product));
    require(!product.gated || (matrices.size() == 2 && matrices[0].weight.size == matrices[1].weight.size),
            "a gated product needs two equal matrices");
    require(product.gated || (!product.limit && product.up_offset == 0), "only a gated product has limits");
    const int64_t read = product.blocks ? (int64_t)product.blocks->count * product.blocks->step
                                        : columns(product) * read_experts(product);
    require(product.reads != Value::routes && channels_of(product.reads) == read,
            "a product has other columns than the value that it reads");
    require(product.reads != Value::attended || columns(product) % attended_heads_ == 0,
            "a product reads a part of a head's result");
    for (const Value value : {Value::stream, Value::attended, Value::routes, Value::streams, Value::mixture})
      require(product.writes != value, "a product writes what it must not");
    const int64_t written = channels(product) * written_experts(product) * blocks(product);
    require(product.writes != Value::output || written == plan_.hidden_size,
            "a module's output has another size than the stream");
    channels_of(product.writes) = written;
  }

  void check(SharedExpert& op) {
    require(channels_of(Value::output) > 0, "a shared expert adds to an output that is not written");
    require(!op.products.empty(), "a shared expert without products");
    for (Product& product : op.products) {
      require(!product.chosen, "a shared expert chooses no experts");
      check(product);
      require((product.writes == Value::output) == (&product == &op.products.back()),
              "a shared expert's last product, and no other, writes the output");
    }
    require(op.products.back().activation == Activation::kNone && !op.products.back().gated,
            "a shared expert's last product has an activation");
    if (!op.gate) return;
    check_matrix(op.gate->weight, "a shared expert's gate");
    require(op.gate->weight.columns == plan_.hidden_size && op.gate->weight.size == 1,
            "a shared expert's gate is not one row of the stream's size");
    if (op.gate->bias) check_vector(*op.gate->bias, 1, "a bias");
  }

  void check_blocks(const Product& product) {
    require(product.blocks->count <= kMostExperts, "too many blocks");
    require(columns(product) <= product.blocks->step, "the blocks of a product overlap in what they read");
    require(!product.chosen && !product.gated && !product.norm && product.activation == Activation::kNone,
            "a product of blocks is gated, normed or of experts");
    for (const Matrix& matrix : product.matrices) require(!matrix.bias, "a product of blocks has a bias");
  }

  void check_router(Matrix& matrix, std::optional<Norm>& norm, int used) {
    check_matrix(matrix.weight, "a router");
    require(matrix.weight.columns == plan_.hidden_size, "a router has other columns than the stream");
    require(used <= matrix.weight.size, "a router chooses more experts than it has");
    if (matrix.bias) check_vector(*matrix.bias, matrix.weight.size, "a bias");
    check_norm(norm, plan_.hidden_size);
    channels_of(Value::routes) = used;
    experts_ = matrix.weight.size;
  }

  void check(Route& op) { check_router(op.matrix, op.norm, op.used); }

  void check(SigmoidRoute& op) {
    check_router(op.matrix, op.norm, op.used);
    if (op.correction) check_vector(*op.correction, op.matrix.weight.size, "a correction");
    require(op.groups == 1 || op.matrix.weight.size % op.groups == 0, "a router's groups differ in size");
    const int64_t each = op.matrix.weight.size / op.groups;
    require(op.groups == 1 || each >= 2, "a router's groups have less than two experts");
    require(op.groups_used <= op.groups && op.used <= op.groups_used * each,
            "a router chooses from too few groups of experts");
  }

  void check(RootRoute& op) {
    check_router(op.matrix, op.norm, op.used);
    if (op.correction) check_vector(*op.correction, op.matrix.weight.size, "a correction");
    if (op.by_token) check_vector(*op.by_token, (int64_t)plan_.vocab_size * op.used, "a table of experts");
  }

  void check_gather(const GatherStreams& op, bool of_head) {
    const int64_t count = op.count, rows = of_head ? count : 2 * count + count * count;
    require(count == plan_.streams(), "a mixture is of another number of streams");
    check_matrix(op.mix.weight, "a mixture");
    require(op.mix.weight.size == rows && op.mix.weight.columns == count * plan_.hidden_size && !op.mix.bias,
            "a mixture has another shape than its streams");
    check_vector(op.factors, of_head ? 1 : 3, "factors");
    check_vector(op.offsets, rows, "offsets");
  }

  void check(GatherStreams& op) { check_gather(op, false); }

  // The rotated channels are the last ones of a head with this many.
  void check_rotary(const RotaryIndex& rotary, int64_t channels) {
    require(rotary.channels() <= channels, "a rotation has more channels than a head");
  }

  void check_compressor(const std::optional<Compressor>& op, const char* what) {
    if (!op) return;
    require(op->channels <= kMostHeads && op->ratio <= kMostHeads, what);
    require(op->first + 2 * op->width() <= channels_of(Value::projected), what);
    check_vector(op->biases, op->ratio * op->width(), "a compressor's biases");
    check_vector(op->norm.gain, op->channels, "a norm");
    check_rotary(op->rotary, op->channels);
  }

  void check(CompressedKeep& op) {
    check_vector(op.norm.gain, op.channels, "a norm");
    check_rotary(op.rotary, op.channels);
    require(op.channels <= channels_of(Value::projected), "a position has more channels than are projected");
    check_compressor(op.entries, "entries have another size than what is projected");
    check_compressor(op.keys, "keys of an index have another size than what is projected");
    require(!op.keys || (op.entries && op.entries->ratio == op.keys->ratio),
            "an index has keys for other entries than there are");
    require(!op.entries || op.entries->channels == op.channels, "entries have other channels than positions");
    keep_ = &op;
  }

  void check(CompressedAttend& op) {
    require(op.heads <= kMostHeads && op.head_dim <= kMostHeads, "too many heads");
    require(keep_ && keep_->channels == op.head_dim, "heads have other channels than what is kept");
    require(op.ratio ? keep_->entries && keep_->entries->ratio == *op.ratio : !keep_->entries,
            "compressed attention has other entries than are kept");
    require(channels_of(Value::queries) == op.width(), "compressed attention reads another number of queries");
    check_rotary(op.rotary, op.head_dim);
    if (op.index) {
      require(keep_->keys && keep_->keys->channels == op.index->channels, "an index has no keys");
      check_rotary(op.rotary, op.index->channels);
      require(op.index->heads <= kMostHeads &&
                  channels_of(Value::index) == (int64_t)op.index->heads * op.index->channels &&
                  op.index->first + (int64_t)op.index->heads <= channels_of(Value::projected),
              "an index reads another number of channels than are projected");
    }
    attended_heads_ = op.head_dim;
    channels_of(Value::attended) = op.width();
  }

  void check(Attend& op) {
    require(op.heads <= kMostHeads && op.kv_heads <= kMostHeads && op.head_dim <= kMostHeads, "too many heads");
    require(op.heads % op.kv_heads == 0, "heads are not a multiple of kv_heads");
    require(!op.rotary || op.rotary->channels() == op.head_dim, "a rotation has other channels than a head");
    check_norm_of_heads(op.q_norm, op.heads, op.head_dim);
    check_norm_of_heads(op.k_norm, op.kv_heads, op.head_dim);
    require(channels_of(Value::projected) == op.projected(),
            "attention reads another number of channels than are projected");
    channels_of(Value::attended) = op.width();
  }

  void check(LatentKeep& op) {
    check_vector(op.norm.gain, op.rank, "a norm");
    require(channels_of(Value::projected) == op.channels(), "latents have another size than what is projected");
  }

  void check(LatentAttend& op) {
    const int64_t rotating = op.rotating();
    require(op.heads <= kMostHeads && op.rank <= kMostHeads && op.still <= kMostHeads, "too many heads");
    require(channels_of(Value::projected) == op.rank + rotating &&
                channels_of(Value::queries) == op.heads * (op.still + rotating) &&
                channels_of(Value::absorbed) == (int64_t)op.heads * op.rank,
            "latent attention reads another number of channels than are projected");
    channels_of(Value::attended) = (int64_t)op.heads * op.rank;
  }

  void check(DeltaNet& op) {
    require(op.key_heads <= kMostHeads && op.value_heads <= kMostHeads && op.key_dim <= kMostHeads &&
                op.value_dim <= kMostHeads,
            "too many heads");
    require(op.value_heads % op.key_heads == 0, "value heads are not a multiple of key heads");
    require(op.convolution.columns == 0 && op.convolution.size % op.channels() == 0,
            "a convolution has other channels than its heads");
    check_vector(op.norm.gain, op.value_dim, "a norm");
    require(channels_of(Value::projected) == op.projected(),
            "DeltaNet reads another number of channels than are projected");
    channels_of(Value::attended) = op.width();
  }

  void check_ops() {
    require(plan_.lanes <= kMostLanes, "too many lanes");
    require(plan_.streams() <= kMostStreams, "too many residual streams");
    check_matrix(plan_.embedding, "the embedding");
    require(!plan_.weights[plan_.embedding.number].lane_sharded && plan_.embedding.size == plan_.vocab_size &&
                plan_.embedding.columns == plan_.hidden_size,
            "the embedding has another shape than vocab_size x hidden_size");
    for (Layer& layer : plan_.layers) check_module(layer.attention), check_module(layer.feed_forward);
    Head& head = plan_.head;
    check_norm(head.norm, plan_.hidden_size);
    if (head.gather) check_gather(*head.gather, true);
    check_matrix(head.weight, "the head");
    const int slices = head.kind == HeadKind::vocab_parallel ? plan_.lanes : 1;
    require(plan_.weights[head.weight.number].lane_sharded == (head.kind != HeadKind::replicate) &&
                head.weight.columns == plan_.hidden_size && head.weight.size * slices == plan_.vocab_size,
            "the head has another shape than its kind asks for");
    require(!head.norm_of_sum || head.kind == HeadKind::replicate, "a norm of the sum needs head replicate");
  }

  void check_module(Module& module) {
    for (int64_t& size : channels_) size = 0;
    channels_of(Value::stream) = plan_.hidden_size;
    keep_ = nullptr;
    attended_heads_ = 1;
    for (Op& op : module.ops) {
      require(std::holds_alternative<GatherStreams>(op) == (plan_.streams() && &op == &module.ops.front()),
              "modules begin with a mixture of streams if the head does, and have no other");
      std::visit(
          [&](auto& one) {
            check(one);
            one.visit_vectors([&](const char* name, auto& array, int64_t size) { check_small(name, array, size); });
          },
          op);
    }
    require(channels_of(Value::output) > 0, "a module has no output");
    check_of_stream(module);
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
  int64_t channels_[count_of(Value{})];
  int64_t experts_ = 0;                   // number of experts of the module's router
  const CompressedKeep* keep_ = nullptr;  // the module's op of this kind, if one was read
  int64_t attended_heads_ = 1;            // channels of a head's result, which are merged together
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
