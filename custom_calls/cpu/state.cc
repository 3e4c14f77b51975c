// Makes the shared state of a session when a Decoder is constructed: turns the plan's ops into ops with packed
// products, numbers products and caches, sizes the buffers, and refuses models that this kernel does not compute.
#include "state.h"

#include <sys/mman.h>

#include <algorithm>
#include <stdexcept>

namespace laneformer {

Region::Region(int64_t size) : bytes(std::max<int64_t>(size, 1)) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    throw std::runtime_error("out of memory: cannot reserve " + std::to_string(bytes) + " bytes for the model");
#if defined(MADV_HUGEPAGE)
  madvise(p, bytes, MADV_HUGEPAGE);  // fewer page faults and table walks; only a hint, so its result does not matter
#endif
  data = (char*)p;
}

Region::~Region() {
  if (data) munmap(data, bytes);
}

Region& Region::operator=(Region&& other) noexcept {
  std::swap(data, other.data);
  std::swap(bytes, other.bytes);
  return *this;
}

// -------------------------------------------------------------------------------------------------------------- state

namespace {

// The plan's product with the fields that packing and computing need. Throws std::runtime_error for experts that this
// kernel does not compute.
Product prepared_of(const plan::Product& op, int lanes, Dtype dtype, Activations activations) {
  Product product{};
  product.name = op.name;
  product.matrices = lanes;
  product.gated = op.gated;
  product.activation = op.activation;
  product.limit = op.limit;
  product.up_offset = op.up_offset;
  product.rows = plan::channels(op);
  product.columns = plan::columns(op);
  product.reads = op.reads;
  product.writes = op.writes;
  product.normed = op.norm.has_value();
  if (product.normed) product.norm = *op.norm;
  product.dtype = dtype;
  product.activations = activations;
  if (op.chosen) {
    product.experts = (int)op.matrices[0].weight.experts;
    product.used = op.chosen->used;
    product.summed = op.chosen->summed;
    product.matrices *= product.experts;
  }
  if (op.blocks) {
    product.blocks = op.blocks->count;
    product.block_step = op.blocks->step;
    product.matrices *= product.blocks;
  }
  int64_t first = 0;
  for (const plan::Matrix& matrix : op.matrices) {
    product.parts.push_back({matrix.weight.number, first});
    if (matrix.bias) product.biases.push_back({*matrix.bias, first});
    first += matrix.weight.size;
  }
  const auto beside = product.summed ? op.reads : op.writes;
  if (product.experts && (beside != plan::Value::hidden || (product.summed && product.activation != Activation::kNone)))
    throw std::runtime_error("the CPU kernel supports experts only as two products through HIDDEN: use backend xla");
  if (product.normed && product.summed)
    throw std::runtime_error("the CPU kernel supports no norm between the two products of experts: use backend xla");
  return product;
}

// A product with float32 weights, which are not streamed, and a vector that is not rounded.
Product apart_of(const plan::Matrix& matrix, plan::Value reads, plan::Value writes,
                 const std::optional<plan::Norm>& norm, int lanes) {
  plan::Product op{};
  op.matrices = {matrix};
  op.reads = reads;
  op.writes = writes;
  op.norm = norm;
  Product product = prepared_of(op, lanes, Dtype::f32, Activations::exact);
  product.apart = true;
  return product;
}

// The product that makes logits in ROUTES from the stream.
Product logits_of(const plan::Matrix& matrix, const std::optional<plan::Norm>& norm, int lanes) {
  return apart_of(matrix, plan::Value::stream, plan::Value::routes, norm, lanes);
}

// The product that makes MIXTURE from the streams over their root mean square, which is a norm without a gain. Its
// columns are split into a block for each stream, so that more workers share its few rows; `gather` adds the blocks.
Mixer mixer_of(const plan::GatherStreams& op, int lanes) {
  Mixer mixer{apart_of(op.mix, plan::Value::streams, plan::Value::mixture, {}, lanes), op};
  Product& rows = mixer.rows;
  rows.blocks = op.count;
  rows.matrices *= op.count;
  rows.columns /= op.count;
  rows.block_step = rows.columns;
  rows.normed = true;
  rows.norm.eps = op.norm_eps;
  return mixer;
}

// Turns an op of the plan into one that workers run.
struct Prepare {
  const plan::Plan& plan;
  const Dtype dtype;
  const Activations activations;

  Product operator()(const plan::Product& op) const { return prepared_of(op, plan.lanes, dtype, activations); }
  Router operator()(const plan::Route& op) const { return {logits_of(op.matrix, op.norm, plan.lanes), op.normalized}; }
  SigmoidRouter operator()(const plan::SigmoidRoute& op) const {
    return {{logits_of(op.matrix, op.norm, plan.lanes), op.normalized, op}};
  }
  RootRouter operator()(const plan::RootRoute& op) const {
    return {{logits_of(op.matrix, op.norm, plan.lanes), op.normalized, {}, op}};
  }
  Mixer operator()(const plan::GatherStreams& op) const { return mixer_of(op, plan.lanes); }
  SharedExpert operator()(const plan::SharedExpert& op) const {
    SharedExpert expert;
    for (const plan::Product& product : op.products) expert.products.push_back((*this)(product));
    expert.products.back().added = true;
    if (op.gate) expert.gate = logits_of(*op.gate, op.products[0].norm, plan.lanes);
    return expert;
  }
  template <class T>
  T operator()(const T& op) const {
    return op;
  }
};

// The products in an op, in the order in which they are numbered.
std::vector<Product*> products_in(Op& op) {
  if (auto* product = std::get_if<Product>(&op)) return {product};
  if (auto* router = std::get_if<Router>(&op)) return {&router->logits};
  if (auto* router = std::get_if<SigmoidRouter>(&op)) return {&router->logits};
  if (auto* router = std::get_if<RootRouter>(&op)) return {&router->logits};
  if (auto* mixer = std::get_if<Mixer>(&op)) return {&mixer->rows};
  std::vector<Product*> found;
  if (auto* expert = std::get_if<SharedExpert>(&op)) {
    for (Product& product : expert->products) found.push_back(&product);
    if (expert->gate) found.push_back(&*expert->gate);
  }
  return found;
}

const InstructionSet& instructions_of(const std::string& name) {
  const InstructionSet* set = choose_instructions(name.empty() ? nullptr : name.c_str());
  if (set == nullptr) throw std::runtime_error("this machine cannot run the instructions " + name);
  return *set;
}

}  // namespace

DecodeState::DecodeState(plan::Plan of, const Options& with)
    : plan(std::move(of)),
      options(with),
      instructions(instructions_of(options.instructions)),
      kernels(instructions.kernels),
      weights((Dtype)plan.weight_dtype),
      cache((Dtype)plan.cache_dtype),
      activations(plan.rounded_activations ? Activations::rounded : Activations::exact),
      threads(options.one_thread_per_lane ? plan.lanes : std::max(1, options.threads)),
      lanes_shared(plan.lanes % threads != 0),
      spin_ns(threads > default_threads() ? 500 : kSpinNs),  // more threads than cores: do not hold a core for long
      progress(std::make_unique<Counter[]>(threads)),
      kept(plan::kept_arrays(plan)),
      schedule(options.slots, options.most_slowdown) {
  if (options.bf12 && weights != Dtype::bf16) throw std::runtime_error("weights in 12 bits must be bfloat16");
  check_sizes();
  make_ops();
  make_buffers();
}

void DecodeState::make_ops() {
  const Prepare prepare{plan, weights, activations};
  for (int m = 0; m < plan.num_modules(); m++) {
    std::vector<Op>& module = modules.emplace_back();
    for (const plan::Op& op : plan.module(m).ops)
      std::visit([&](const auto& one) { module.push_back(prepare(one)); }, op);
  }
  transposed.resize(plan.weights.size());
  for (int m = 0; m < plan.num_modules(); m++)
    for (const plan::Op& op : plan.module(m).ops)
      if (const auto* delta = std::get_if<plan::DeltaNet>(&op)) transposed[delta->convolution.number] = true;
  const auto number = [&](bool apart) {
    for (std::vector<Op>& module : modules)
      for (Op& op : module)
        for (Product* product : products_in(op)) {
          if (product->apart != apart) continue;
          product->number = (int)products.size();
          products.push_back(product);
        }
  };
  number(false);
  number_caches();

  const plan::HeadKind kind = plan.head.kind;
  head.number = (int)products.size();
  head.matrices = kind == plan::HeadKind::vocab_parallel ? plan.lanes : 1;
  head.dtype = weights;
  head.activations = activations;
  head.rows = plan.vocab_size / head.matrices;
  head.columns = (int64_t)plan.hidden_size * (kind == plan::HeadKind::lane ? plan.lanes : 1);
  head.parts.push_back({plan.head.weight.number, 0});
  products.push_back(&head);
  number(true);
  if (plan.head.gather) {
    head_mixer = mixer_of(*plan.head.gather, plan.lanes);
    head_mixer->rows.number = (int)products.size();
    products.push_back(&head_mixer->rows);
  }
  head_tiles.resize(head.units());
  forms.resize(products.size());
  for (const Product* product : products)
    if (product->experts) forms[product->number].experts = Region(product->bytes());
}

void DecodeState::make_buffers() {
  const int64_t lanes = plan.lanes, d = plan.hidden_size, count = plan.num_modules();
  const auto pad = [&](plan::Value value, int64_t floats) {
    int64_t& padded = of(value).padded;
    padded = std::max(padded, (floats + kTile - 1) / kTile * kTile);
  };
  for (const Product* product : products) {
    if (product == &head) continue;
    const int64_t rows = product->experts && !product->summed ? product->used * product->written_step()
                         : product->blocks                    ? product->blocks * product->rows
                                                              : product->rows;
    pad(product->writes, rows);
  }
  int64_t part = 0, gain = plan.streams() * d;  // part: floats of one chunk's result for one position
  const auto widen = [&](int64_t heads, int64_t channels) { part = std::max(part, heads * (channels + 2)); };
  for (int m = 0; m < count; m++)
    for (const plan::Op& op : plan.module(m).ops) {
      if (const auto* attend = std::get_if<plan::Attend>(&op)) widen(attend->heads, attend->head_dim);
      if (const auto* attend = std::get_if<plan::LatentAttend>(&op)) widen(attend->heads, attend->rank);
      if (const auto* delta = std::get_if<plan::DeltaNet>(&op)) pad(plan::Value::attended, delta->width());
      if (const auto* attend = std::get_if<plan::CompressedAttend>(&op)) {
        widen(attend->heads, attend->head_dim);
        gain = std::max<int64_t>(gain, attend->head_dim);
        if (!attend->index) continue;
        index_entries = std::max<int64_t>(index_entries, plan.context / *attend->ratio);
        index_most = std::max<int64_t>(index_most, attend->index->most);
      }
    }
  ones.assign(gain, 1.0f);
  index_scores = Region(4 * lanes * kBlock * index_entries);
  index_numbers = Region(4 * lanes * kBlock * index_most);

  small_weights.resize(plan.small_size);
  for (Held& value : held)
    value.data = Region(4 * (&value == &of(plan::Value::output) ? count : 1) * lanes * kBlock * value.padded);
  streams = Region(4 * (int64_t)plan.sums.size() * lanes * kBlock * d);
  parts = Region(4 * lanes * kChunks * kBlock * part);
  finals = Region(4 * kMostRows * lanes * d);
  logits = Region(4 * kMostRows * (int64_t)plan.vocab_size);
  z = Region(4 * kMostRows * (int64_t)plan.vocab_size);
  packets.resize(threads);

  if (options.one_thread_per_lane) {
    std::vector<Exchange> exchanges;
    for (size_t i = 0; i < plan.sums.size(); i++) {
      int last = plan.sums[i].complete_at;
      for (size_t t = 0; t < plan.events.size(); t++)
        for (const plan::Event& event : plan.events[t])
          if (event.payload == (int)i) last = (int)t;
      exchanges.push_back({plan.sums[i].complete_at, last});
    }
    exchanges.push_back({(int)count, (int)count});  // for the head
    int slots = 1;
    while (slots < ring_slots(exchanges)) slots *= 2;
    mail = std::make_unique<Mailboxes>(plan.lanes, slots, kBlock * d);
  }
}

// Maps layer and kind to the array's number: this kernel allows one array of each kind per layer.
void DecodeState::number_caches() {
  kept_numbers.assign(plan.num_layers() * kKinds, -1);
  for (size_t i = 0; i < kept.size(); i++) {
    int& number = kept_numbers[kept[i].layer * kKinds + (int)kept[i].kind];
    if (number >= 0)
      throw std::runtime_error("the CPU kernel supports one attention or DeltaNet per layer: use backend xla");
    number = (int)i;
  }
  for (int layer = 0; layer < plan.num_layers(); layer++) {
    const int* numbers = &kept_numbers[layer * kKinds];
    if (std::count(numbers, numbers + kKinds, -1) == kKinds)
      throw std::runtime_error("the CPU kernel needs attention or DeltaNet in every layer: use backend xla");
  }
  if (std::all_of(kept.begin(), kept.end(), [](const plan::KeptArray& array) { return array.fixed; }))
    throw std::runtime_error("the CPU kernel needs attention in at least one layer: use backend xla");
}

// Refuses DeltaNet ops of different sizes: a worker has buffers for one size.
void DecodeState::check_sizes() const {
  const plan::DeltaNet* first = nullptr;
  for (int m = 0; m < plan.num_modules(); m++)
    for (const plan::Op& op : plan.module(m).ops) {
      const auto* delta = std::get_if<plan::DeltaNet>(&op);
      if (!delta) continue;
      if (!first) first = delta;
      if (delta->key_heads != first->key_heads || delta->value_heads != first->value_heads ||
          delta->key_dim != first->key_dim || delta->value_dim != first->value_dim ||
          delta->convolution.size != first->convolution.size)
        throw std::runtime_error("the CPU kernel needs the same sizes in every DeltaNet layer: use backend xla");
    }
}

void DecodeState::fail(const std::string& why) {
  const std::lock_guard<std::mutex> lock(reason_lock);
  if (reason.empty()) reason = why;
  stopped.store(1);
}

}  // namespace laneformer
