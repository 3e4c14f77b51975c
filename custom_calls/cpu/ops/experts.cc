// A mixture of experts: routers, products with the chosen experts alone, and the shared expert. Uses are grouped by
// expert, so a worker reads its rows of an expert once for all positions of a pass.
//
// Invariant: a position's products depend on its vector alone, and its experts' results are added in the order of its
// choices. So a position has the same bits whichever positions are in the pass.
#include "experts.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../../common/checks.h"
#include "../products/prepare.h"
#include "../worker.h"
#include "product.h"

namespace laneformer {

// ---------------------------------------------------------------------------------------------------------- routers

Router::Router(Product logits, int64_t used, const Setup& setup)
    : experts_((int)logits.rows),
      used_((int)used),
      logits_(std::move(logits)),
      routes_(std::make_unique<std::unique_ptr<Routes[]>[]>(setup.state.threads)) {
  const int lanes =
      (setup.state.plan.lanes + setup.state.threads - 1) / setup.state.threads + 1;  // of a worker at most
  for (int worker = 0; worker < setup.state.threads; worker++) routes_[worker] = std::make_unique<Routes[]>(lanes);
}

void Router::run(Worker& w, int module) const { run_product(w, logits_, module); }

Router::Space Router::space(Arena& own) const {
  return {own.floats(2 * experts_), own.take<int32_t>(std::max(2 * experts_, 2))};
}

Routes& Router::routes_of(const Worker& w, int lane) const { return routes_[w.index][lane - w.first_lane]; }

const Routes& Router::routes(const Worker& w, int lane) const { return routes_of(w, lane); }

void Router::choose(Worker& w, int lane, const Space& space) const {
  const int64_t uses = (int64_t)w.positions * used_;
  Routes& routes = routes_of(w, lane);
  for (auto* numbers : {&routes.experts, &routes.members, &routes.places}) numbers->resize(uses);
  routes.shares.resize(uses);
  for (int p = 0; p < w.positions; p++)
    weigh(w, w.state.of(plan::Value::routes).row(lane, p), lane, p, space, routes.experts.data() + p * used_,
          routes.shares.data() + p * used_);
  for (int64_t i = 0; i < uses; i++) routes.members[i] = (int32_t)i;
  std::sort(routes.members.begin(), routes.members.end(),
            [&](int32_t a, int32_t b) { return std::pair(routes.experts[a], a) < std::pair(routes.experts[b], b); });
  routes.groups.clear();
  for (int64_t i = 0; i < uses; i++) {
    const int expert = routes.experts[routes.members[i]];
    routes.places[routes.members[i]] = (int32_t)i;
    if (routes.groups.empty() || routes.groups.back().expert != expert) routes.groups.push_back({expert, i, i});
    routes.groups.back().last = i + 1;
  }
}

namespace {

bool larger(float a, float b) { return a > b || (a != a && b == b); }  // NaN is largest, so that the result shows it

// Writes the numbers of the `used` largest logits of [experts], the largest first, and the lowest number among equals.
void largest_of(const float* logits, int experts, int used, int32_t* numbers) {
  int count = 0;
  for (int e = 0; e < experts; e++) {
    if (count == used && !larger(logits[e], logits[numbers[used - 1]])) continue;
    int at = count < used ? count++ : used - 1;
    for (; at > 0 && larger(logits[e], logits[numbers[at - 1]]); at--) numbers[at] = numbers[at - 1];
    numbers[at] = e;
  }
}

// Writes the shares of the chosen experts: their scores times the op's factor, normalized if the op says so.
template <class Kind, class Score>
void share_by(const Kind& op, const Score& score, int used, const int32_t* numbers, float* shares) {
  float sum = 1e-20f;
  for (int j = 0; j < used; j++) sum += shares[j] = score(numbers[j]);
  for (int j = 0; j < used; j++) shares[j] *= op.factor / (op.normalized ? sum : 1);
}

template <class Kind>
class RouterOf : public Router {
 public:
  RouterOf(const Kind& op, const Setup& setup)
      : Router(prepare_logits(op.matrix, op.norm, setup), op.used, setup), op_(op) {}

 protected:
  void weigh(Worker& w, const float* logits, int lane, int p, const Space& space, int32_t* numbers,
             float* shares) const override;

  const Kind op_;
};

// Chooses a position's experts by the largest logits. Shares are their softmax, over the chosen or over all experts.
template <>
void RouterOf<plan::Route>::weigh(Worker&, const float* logits, int, int, const Space&, int32_t* numbers,
                                  float* shares) const {
  largest_of(logits, experts_, used_, numbers);
  const float largest = logits[numbers[0]];
  float sum = 0;
  for (int j = 0; j < used_; j++) {
    shares[j] = std::exp(logits[numbers[j]] - largest);
    if (op_.normalized) sum += shares[j];
  }
  for (int e = 0; e < experts_ && !op_.normalized; e++) sum += std::exp(logits[e] - largest);
  for (int j = 0; j < used_; j++) shares[j] /= sum;
}

// The same with sigmoids of the logits as scores (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). A correction is added
// to the scores for the choice, not for the shares. With groups, the experts are chosen from the best groups.
template <>
void RouterOf<plan::SigmoidRoute>::weigh(Worker& w, const float* logits, int lane, int, const Space& space,
                                         int32_t* numbers, float* shares) const {
  const auto score = [&](int e) { return 1 / (1 + std::exp(-logits[e])); };
  const float* const correction = op_.correction ? w.state.small(*op_.correction, lane) : nullptr;
  float* const choice = space.scores;
  int32_t* const best = space.best;
  for (int e = 0; e < experts_; e++) choice[e] = score(e) + (correction ? correction[e] : 0);
  const int groups = (int)op_.groups, groups_used = (int)op_.groups_used;
  if (groups > 1) {
    const int each = experts_ / groups;
    float* const sums = choice + experts_;
    for (int g = 0; g < groups; g++) {
      const float* of_group = choice + g * each;
      largest_of(of_group, each, 2, best);
      sums[g] = of_group[best[0]] + of_group[best[1]];
    }
    largest_of(sums, groups, groups_used, best);
    for (int g = 0; g < groups; g++)
      if (std::count(best, best + groups_used, g) == 0) std::fill_n(choice + g * each, each, -INFINITY);
  }
  largest_of(choice, experts_, used_, numbers);
  share_by(op_, score, used_, numbers, shares);
}

// The same with roots of the softplus as scores, or with a table of the token's experts (DeepSeek-V4).
template <>
void RouterOf<plan::RootRoute>::weigh(Worker& w, const float* logits, int lane, int p, const Space& space,
                                      int32_t* numbers, float* shares) const {
  const auto score = [&](int e) {
    return std::sqrt(std::max(logits[e], 0.0f) + std::log1p(std::exp(-std::fabs(logits[e]))));
  };
  if (op_.by_token) {
    const float* const row = w.state.small(*op_.by_token, lane) + (int64_t)w.pass->tokens[p] * used_;
    for (int j = 0; j < used_; j++) numbers[j] = (int32_t)row[j];
  } else {
    const float* const correction = op_.correction ? w.state.small(*op_.correction, lane) : nullptr;
    for (int e = 0; e < experts_; e++) space.scores[e] = score(e) + (correction ? correction[e] : 0);
    largest_of(space.scores, experts_, used_, numbers);
  }
  share_by(op_, score, used_, numbers, shares);
}

template <class Kind>
std::unique_ptr<Op> make_router(const Kind& op, Setup& setup) {
  auto made = std::make_unique<RouterOf<Kind>>(op, setup);
  setup.router = made.get();
  setup.chosen = false;
  return made;
}

// -------------------------------------------------------------------------------------------------- chosen experts

class ExpertsOp final : public Op {
 public:
  ExpertsOp(Product product, const Setup& setup)
      : product_(std::move(product)), router_(setup.router), chooses_(!setup.chosen) {}

  std::vector<Product*> products() override { return {&product_}; }
  void scratch(Arena& own, Arena&) const override { Buffers(*this, own); }
  // Runs the product. The first one after a router chooses the experts.
  void run(Worker& w, int module) const override {
    Arena own = w.arena();
    const Buffers buffers(*this, own);
    for (int lane = w.first_lane; lane < w.last_lane; lane++) {
      if (chooses_) router_->choose(w, lane, buffers.choice);
      product_.summed ? write_sum(w, buffers, lane, module) : write_each(w, buffers, lane, module);
    }
  }

 private:
  struct Buffers {
    Buffers(const ExpertsOp& of, Arena& own)
        : choice(of.router_->space(own)),
          reads(own.floats(kBlock * of.product_.columns)),
          each(own.floats(of.product_.summed ? kBlock * of.product_.used * of.product_.written_step() : 0)) {}
    Router::Space choice;
    float *reads, *each;  // [kBlock][columns]: what a group reads; [uses][own rows]: results before they are summed
  };
  Vectors read_by(Worker& w, const Buffers& buffers, const Routes& routes, const Routes::Group& group, const Vectors& x,
                  int64_t step) const;
  void write_each(Worker& w, const Buffers& buffers, int lane, int module) const;
  void write_sum(Worker& w, const Buffers& buffers, int lane, int module) const;

  Product product_;
  const Router* const router_;
  const bool chooses_;
};

// The vectors that a group's members read, copied if there are several. x: the vectors of all positions; step: floats
// from one rank's vector to the next one's, 0 if all ranks read the same.
Vectors ExpertsOp::read_by(Worker&, const Buffers& buffers, const Routes& routes, const Routes::Group& group,
                           const Vectors& x, int64_t step) const {
  const int used = product_.used;
  const auto from = [&](int64_t member) {
    const int32_t use = routes.members[member];
    return x.x + use / used * x.stride + use % used * step;
  };
  const int count = (int)(group.last - group.first);
  const int64_t columns = product_.columns;
  if (count == 1) return {from(group.first), 0, 1};
  for (int i = 0; i < count; i++)
    std::memcpy(buffers.reads + i * columns, from(group.first + i), columns * sizeof(float));
  return {buffers.reads, columns, count};
}

// Computes a product whose experts all read the same vector and write one after the other. Workers share out the units
// of all chosen experts as if they were one matrix. A unit costs as much as its reading, which counts as kReading
// positions, and its positions.
void ExpertsOp::write_each(Worker& w, const Buffers& buffers, int lane, int module) const {
  constexpr int64_t kReading = 8;
  const Routes& routes = router_->routes(w, lane);
  const int64_t units = product_.units(), of = product_.unit_tiles();
  const auto cost = [&](const Routes::Group& group) { return kReading + group.last - group.first; };
  int64_t all = 0;
  for (const Routes::Group& group : routes.groups) all += units * cost(group);
  const Interval part = w.part_of(lane, all);
  if (part.first == part.last) return;
  const Vectors x = w.products.vectors_of(product_, lane);
  int64_t stride, before = 0;
  float* const to = w.target(product_.writes, module, lane, &stride);
  for (const Routes::Group& group : routes.groups) {
    const auto unit_at = [&](int64_t place) {
      return std::clamp<int64_t>((place - before + cost(group) - 1) / cost(group), 0, units);
    };
    const Share share{lane * product_.experts + group.expert, unit_at(std::max(part.first, before)),
                      unit_at(std::max(part.last, before))};
    before += units * cost(group);
    if (share.first == share.last) continue;
    const int64_t own = share.last - share.first, ldy = own * of * kTile,
                  tile = (share.matrix * units + share.first) * of;
    const Vectors read = read_by(w, buffers, routes, group, x, 0);
    float* const y = w.products.results();
    w.products.multiply(product_, share, tile, read, y, ldy);
    w.products.add_biases(product_, lane, share, read.positions, y, ldy);
    for (int i = 0; i < read.positions; i++) {
      const int32_t use = routes.members[group.first + i];
      w.products.activate(
          product_, own, y + i * ldy,
          to + use / product_.used * stride + use % product_.used * product_.written_step() + share.first * kTile);
    }
  }
}

// Computes a product whose experts' results are summed, times their shares. Workers share out its rows: a worker has
// the same rows of all experts, so it adds them itself.
void ExpertsOp::write_sum(Worker& w, const Buffers& buffers, int lane, int module) const {
  const Routes& routes = router_->routes(w, lane);
  const Interval part = w.part_of(lane, product_.units());
  const int64_t units = product_.units(), rows = (part.last - part.first) * kTile, used = product_.used;
  if (rows == 0) return;
  Vectors x{nullptr, 0, w.positions};
  x.x = w.target(product_.reads, 0, lane, &x.stride);
  for (const Routes::Group& group : routes.groups) {
    const Share share{lane * product_.experts + group.expert, part.first, part.last};
    float* const y = buffers.each + group.first * rows;
    const Vectors read = read_by(w, buffers, routes, group, x, product_.read_step());
    w.products.multiply(product_, share, share.matrix * units + part.first, read, y, rows);
    w.products.add_biases(product_, lane, share, read.positions, y, rows);
  }
  int64_t stride;
  float* const to = w.target(product_.writes, module, lane, &stride) + part.first * kTile;
  for (int p = 0; p < w.positions; p++) {
    std::memset(to + p * stride, 0, rows * sizeof(float));
    for (int64_t use = p * used; use < (p + 1) * used; use++)
      w.kernels.add_scaled(to + p * stride, buffers.each + routes.places[use] * rows, routes.shares[use], rows);
  }
}

// ---------------------------------------------------------------------------------------------------- shared expert

class SharedExpertOp final : public Op {
 public:
  SharedExpertOp(const plan::SharedExpert& op, const Setup& setup) {
    for (const plan::Product& product : op.products) products_.push_back(prepare_product(product, setup));
    products_.back().added = true;
    if (op.gate) gate_ = prepare_logits(*op.gate, op.products[0].norm, setup);
  }

  std::vector<Product*> products() override {
    std::vector<Product*> found;
    for (Product& product : products_) found.push_back(&product);
    if (gate_) found.push_back(&*gate_);
    return found;
  }
  // Runs the products; the last one is added to the output. The gate's logit overwrites the router's, from which all
  // workers have chosen already.
  void run(Worker& w, int module) const override {
    if (gate_) run_product(w, *gate_, module);
    for (const Product& product : products_) {
      if (product.added) {
        add(w, product, module);
      } else {
        run_product(w, product, module);
        w.barrier_if_shared();
      }
    }
  }

 private:
  void add(Worker& w, const Product& product, int module) const;

  std::vector<Product> products_;  // the last one is `added`
  std::optional<Product> gate_;    // has one row
};

// Adds a product's result to the value that it writes, times the sigmoid of the gate's logit if there is a gate.
void SharedExpertOp::add(Worker& w, const Product& product, int module) const {
  int64_t tile = 0;
  for (const Share& share : w.weights.shares(product)) {
    const int64_t rows = (share.last - share.first) * kTile;
    const int lane = share.matrix;
    int64_t stride, step;
    const Vectors x = w.products.vectors_of(product, lane);
    float* const to = w.target(product.writes, module, lane, &stride) + share.first * kTile;
    const float* const logits = w.target(plan::Value::routes, 0, lane, &step);
    float* const y = w.products.results();
    tile = w.products.multiply(product, share, tile, x, y, rows);
    w.products.add_biases(product, lane, share, w.positions, y, rows);
    for (int p = 0; p < w.positions; p++)
      w.kernels.add_scaled(to + p * stride, y + p * rows, gate_ ? 1 / (1 + std::exp(-logits[p * step])) : 1, rows);
  }
}

}  // namespace

std::unique_ptr<Op> make_op(const plan::Route& op, Setup& setup) { return make_router(op, setup); }
std::unique_ptr<Op> make_op(const plan::SigmoidRoute& op, Setup& setup) { return make_router(op, setup); }
std::unique_ptr<Op> make_op(const plan::RootRoute& op, Setup& setup) { return make_router(op, setup); }

std::unique_ptr<Op> make_op(const plan::SharedExpert& op, Setup& setup) {
  return std::make_unique<SharedExpertOp>(op, setup);
}

std::unique_ptr<Op> make_experts(const plan::Product& op, Setup& setup) {
  auto made = std::make_unique<ExpertsOp>(prepare_product(op, setup), setup);
  setup.chosen = true;
  return made;
}

namespace plan {

namespace {

// Any kind of router.
template <class Kind>
void check_router(const Kind& op, Checks& checks) {
  const Array& weight = op.matrix.weight;
  checks.reads_stream();
  checks.matrix(weight, "a router");
  require(weight.columns == checks.plan.hidden_size, "a router has other columns than the stream");
  require(op.used <= weight.size, "a router chooses more experts than it has");
  checks.vector(op.matrix.bias, weight.size, "a bias");
  checks.norm(op.norm, checks.plan.hidden_size);
  checks.channels_of(Value::routes) = op.used;
  checks.experts = weight.size;
}

}  // namespace

void check(const Route& op, Checks& checks) { check_router(op, checks); }

void check(const SigmoidRoute& op, Checks& checks) {
  check_router(op, checks);
  checks.vector(op.correction, op.matrix.weight.size, "a correction");
  require(op.groups == 1 || op.matrix.weight.size % op.groups == 0, "a router's groups differ in size");
  const int64_t each = op.matrix.weight.size / op.groups;
  require(op.groups == 1 || each >= 2, "a router's groups have less than two experts");
  require(op.groups_used <= op.groups && op.used <= op.groups_used * each,
          "a router chooses from too few groups of experts");
}

void check(const RootRoute& op, Checks& checks) {
  check_router(op, checks);
  checks.vector(op.correction, op.matrix.weight.size, "a correction");
  checks.vector(op.by_token, checks.plan.vocab_size * op.used, "a table of experts");
}

void check(const SharedExpert& op, Checks& checks) {
  require(checks.channels_of(Value::output) > 0, "a shared expert adds to an output that is not written");
  require(!op.products.empty(), "a shared expert without products");
  for (const Product& product : op.products) {
    require(!product.chosen, "a shared expert chooses no experts");
    check(product, checks);
    require((product.writes == Value::output) == (&product == &op.products.back()),
            "a shared expert's last product, and no other, writes the output");
  }
  require(op.products.back().activation == Activation::kNone && !op.products.back().gated,
          "a shared expert's last product has an activation");
  if (!op.gate) return;
  checks.matrix(op.gate->weight, "a shared expert's gate");
  require(op.gate->weight.columns == checks.plan.hidden_size && op.gate->weight.size == 1,
          "a shared expert's gate is not one row of the stream's size");
  checks.vector(op.gate->bias, 1, "a bias");
}

}  // namespace plan

}  // namespace laneformer
