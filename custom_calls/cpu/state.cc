#include "state.h"

#include <sys/mman.h>

#include <algorithm>
#include <stdexcept>

namespace laneformer {

Region::Region(int64_t size) : bytes(std::max<int64_t>(size, 1)) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    throw std::runtime_error("out of memory: " + std::to_string(bytes) + " bytes for the model's weights");
#if defined(MADV_HUGEPAGE)
  madvise(p, bytes, MADV_HUGEPAGE);  // fewer page faults and table walks; a hint that may be refused
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

// A product with what packing and computing must know of it. dtype, activations: how it multiplies.
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
  int64_t first = 0;
  for (const plan::Matrix& matrix : op.matrices) {
    product.parts.push_back({matrix.weight.number, first});
    if (matrix.bias) product.biases.push_back({*matrix.bias, first});
    first += matrix.weight.size;
  }
  const auto beside = product.summed ? op.reads : op.writes;
  if (product.experts && (beside != plan::Value::hidden || (product.summed && product.activation != Activation::kNone)))
    throw std::runtime_error("the CPU kernel has experts with HIDDEN between two products alone: use backend xla");
  if (product.normed && op.reads != plan::Value::stream)
    throw std::runtime_error("the CPU kernel norms the stream, and nothing else, before a product: use backend xla");
  return product;
}

// Its logits are float32, from vectors that are not rounded.
Router prepared_of(const plan::Route& op, int lanes) {
  plan::Product logits{};
  logits.matrices = {op.matrix};
  logits.reads = plan::Value::stream;
  logits.writes = plan::Value::routes;
  logits.norm = op.norm;
  Router router{prepared_of(logits, lanes, Dtype::f32, Activations::exact), op.normalized};
  router.logits.apart = true;
  return router;
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
      spin_ns(threads > default_threads() ? 500 : kSpinNs),  // 500: others wait for this core
      progress(std::make_unique<Counter[]>(threads)),
      schedule(options.slots, options.most_slowdown) {
  if (options.bf12 && weights != Dtype::bf16) throw std::runtime_error("weights in 12 bits must be bfloat16");
  make_ops();
  make_buffers();
}

void DecodeState::make_ops() {
  for (int m = 0; m < plan.num_modules(); m++) {
    std::vector<Op>& module = modules.emplace_back();
    for (const plan::Op& op : plan.module(m).ops)
      std::visit(
          [&](const auto& one) {
            if constexpr (std::is_same_v<decltype(one), const plan::Product&>) {
              module.push_back(prepared_of(one, plan.lanes, weights, activations));
            } else if constexpr (std::is_same_v<decltype(one), const plan::Route&>) {
              module.push_back(prepared_of(one, plan.lanes));
            } else {
              module.push_back(one);
            }
          },
          op);
  }
  for (std::vector<Op>& module : modules)
    for (Op& op : module)
      if (auto* product = std::get_if<Product>(&op)) {
        product->number = (int)products.size();
        products.push_back(product);
      }
  for (int layer = 0; layer < plan.num_layers(); layer++) attend_of(layer);

  const plan::HeadKind kind = plan.head.kind;
  head.number = (int)products.size();
  head.matrices = kind == plan::HeadKind::vocab_parallel ? plan.lanes : 1;
  head.dtype = weights;
  head.activations = activations;
  head.rows = plan.vocab_size / head.matrices;
  head.columns = (int64_t)plan.hidden_size * (kind == plan::HeadKind::lane ? plan.lanes : 1);
  head.parts.push_back({plan.head.weight.number, 0});
  products.push_back(&head);
  for (std::vector<Op>& module : modules)
    for (Op& op : module)
      if (auto* router = std::get_if<Router>(&op)) {
        router->logits.number = (int)products.size();
        products.push_back(&router->logits);
      }
  head_tiles.resize(head.units());
  forms.resize(products.size());
  for (const Product* product : products)
    if (product->experts) forms[product->number].experts = Region(product->bytes());
}

void DecodeState::make_buffers() {
  const int64_t lanes = plan.lanes, d = plan.hidden_size, count = plan.num_modules();
  const auto widen_to = [](int64_t& padded, int64_t n) { padded = std::max(padded, (n + kTile - 1) / kTile * kTile); };
  for (const Product* product : products)
    if (product != &head)
      widen_to(product->writes == plan::Value::projected ? projected_padded
               : product->writes == plan::Value::hidden  ? hidden_padded
               : product->writes == plan::Value::routes  ? routes_padded
                                                         : output_padded,
               product->experts && !product->summed ? product->used * product->written_step() : product->rows);
  int64_t part = 0;  // floats that a chunk of keys gives
  for (int layer = 0; layer < plan.num_layers(); layer++)
    part = std::max(part, (int64_t)attend_of(layer).heads * (attend_of(layer).head_dim + 2));

  small_weights.resize(plan.small_size);
  outputs = Region(4 * count * lanes * kBlock * output_padded);
  streams = Region(4 * (int64_t)plan.sums.size() * lanes * kBlock * d);
  projected = Region(4 * lanes * kBlock * projected_padded);
  parts = Region(4 * lanes * kChunks * kBlock * part);
  hiddens = Region(4 * lanes * kBlock * hidden_padded);
  routes = Region(4 * lanes * kBlock * routes_padded);
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
    exchanges.push_back({(int)count, (int)count});  // the head's
    int slots = 1;
    while (slots < ring_slots(exchanges)) slots *= 2;
    mail = std::make_unique<Mailboxes>(plan.lanes, slots, kBlock * d);
  }
}

const plan::Attend& DecodeState::attend_of(int layer) const {
  const plan::Attend* found = nullptr;
  for (int m = 2 * layer; m < 2 * layer + 2; m++)
    for (const plan::Op& op : plan.module(m).ops)
      if (const auto* attend = std::get_if<plan::Attend>(&op)) {
        if (found) throw std::runtime_error("the CPU kernel attends once per layer: use backend xla");
        found = attend;
      }
  if (!found) throw std::runtime_error("the CPU kernel attends in every layer: use backend xla");
  return *found;
}

void DecodeState::fail(const std::string& why) {
  const std::lock_guard<std::mutex> lock(reason_lock);
  if (reason.empty()) reason = why;
  stopped.store(1);
}

}  // namespace laneformer
