// Makes the shared state of a session when a Decoder is constructed: turns the plan's ops into ops with packed
// products, numbers products and caches, sizes the buffers, and refuses models that this kernel does not compute.
#include "state.h"

#include <algorithm>
#include <stdexcept>

namespace laneformer {

namespace {

// The number of an op in a trace: products by their names, the others by their kinds (laneformer.ops.TRACE_NAMES).
int trace_of(const plan::Op& op) {
  const auto* product = std::get_if<plan::Product>(&op);
  return kOps + (product ? (int)product->name : plan::count_of(plan::ProductName{}) + (int)op.index() - 1);
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
      progress(std::make_unique<Counter[]>(threads)),
      kept(plan::kept_arrays(plan)),
      schedule(options.slots, options.most_slowdown),
      waiting{threads,
              progress.get(),
              stopped,
              options.timeout_ms,
              threads > default_threads() ? 500 : kSpinNs,  // more threads than cores: do not hold a core for long
              options.chaos_us,
              [this](const std::string& why) { fail(why); }} {
  if (options.bf12 && weights != Dtype::bf16) throw std::runtime_error("weights in 12 bits must be bfloat16");
  make_ops();
  make_buffers();
}

void DecodeState::make_ops() {
  transposed.resize(plan.weights.size());
  for (int m = 0; m < plan.num_modules(); m++) {
    Setup setup{*this};
    std::vector<std::unique_ptr<Op>>& module = modules.emplace_back();
    for (const plan::Op& op : plan.module(m).ops) {
      module.push_back(std::visit([&](const auto& kind) { return make_op(kind, setup); }, op));
      module.back()->trace = trace_of(op);
    }
  }
  const auto number_in = [&](Op& op, bool unstreamed) {
    for (Product* product : op.products()) {
      if (product->unstreamed != unstreamed) continue;
      product->number = (int)products.size();
      products.push_back(product);
    }
  };
  const auto number = [&](bool unstreamed) {
    for (std::vector<std::unique_ptr<Op>>& module : modules)
      for (std::unique_ptr<Op>& op : module) number_in(*op, unstreamed);
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
    Setup setup{*this};
    head_gather = make_op(*plan.head.gather, setup);
    number_in(*head_gather, true);
  }
  head_tiles.resize(head.units());
  forms.resize(products.size());
  for (const Product* product : products)
    if (product->experts) forms[product->number].experts = Region(product->bytes());
}

void DecodeState::make_buffers() {
  const int64_t lanes = plan.lanes, d = plan.hidden_size, count = plan.num_modules();
  Arena shared;
  const auto most = [&](const Op& op) {
    Arena own, taken;
    op.scratch(own, taken);
    if (taken.bytes() > shared.bytes()) shared = taken;
  };
  for (const auto& module : modules)
    for (const auto& op : module) most(*op);
  scratch = Region(shared.bytes());
  ones.assign(plan.streams() * d, 1.0f);

  small_weights.resize(plan.small_size);
  for (Held& value : held)
    value.data = Region(4 * (&value == &of(plan::Value::output) ? count : 1) * lanes * kBlock * value.padded);
  streams = Region(4 * (int64_t)plan.sums.size() * lanes * kBlock * d);
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
      throw std::runtime_error("layer " + std::to_string(kept[i].layer) + " keeps two arrays of " +
                               plan::kKeptNames[(int)kept[i].kind] + ", the CPU kernel supports one: use backend xla");
    number = (int)i;
  }
  for (int layer = 0; layer < plan.num_layers(); layer++) {
    const int* numbers = &kept_numbers[layer * kKinds];
    if (std::count(numbers, numbers + kKinds, -1) == kKinds)
      throw std::runtime_error("layer " + std::to_string(layer) +
                               " keeps nothing between tokens, which the CPU kernel does not support: use backend xla");
  }
  if (std::all_of(kept.begin(), kept.end(), [](const plan::KeptArray& array) { return array.fixed; }))
    throw std::runtime_error("the CPU kernel needs attention in at least one layer: use backend xla");
}

// A lane is divided into `workers` shares; counted through all lanes, worker w has all_lanes shares from number
// all_lanes * w on. The things are divided in proportion.
Interval Lanes::part_of(int lane, int64_t count) const {
  const auto before = [&](int worker) {  // things that belong to workers before this one
    const int64_t share = std::clamp<int64_t>((int64_t)all_lanes * worker - (int64_t)lane * workers, 0, workers);
    return count * share / workers;
  };
  return {before(index), before(index + 1)};
}

void DecodeState::hold(plan::Value value, int64_t floats) {
  int64_t& padded = of(value).padded;
  padded = std::max(padded, (floats + kTile - 1) / kTile * kTile);
}

void DecodeState::fail(const std::string& why) {
  const std::lock_guard<std::mutex> lock(reason_lock);
  if (reason.empty()) reason = why;
  stopped.store(1);
}

}  // namespace laneformer
