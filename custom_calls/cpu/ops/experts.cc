// A mixture of experts: routers, the choice of each position's experts, products with the chosen experts alone, and the
// shared expert. Worker::module runs routers and the shared expert, Worker::run the products. Uses are grouped by
// expert, so a worker reads its rows of an expert once for all positions of a pass.
//
// Invariant: a position's products depend on its vector alone, and its experts' results are added in the order of its
// choices. So a position has the same bits whichever positions are in the pass. Every worker chooses from the logits of
// all experts and finds the same.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "../worker.h"

namespace laneformer {

// Computes the logits of all positions. `run_experts` chooses, after workers have met.
void Worker::run(const Router& op, int module) {
  run(op.logits, module);
  router_ = &op;
}

void Worker::run(const SigmoidRouter& op, int module) { run((const Router&)op, module); }
void Worker::run(const RootRouter& op, int module) { run((const Router&)op, module); }

// This worker's part of `count` things in a lane. A lane is divided into count_ shares; counted through all lanes,
// worker w has m_.lanes shares from number m_.lanes * w on. The things are divided in proportion.
Worker::Part Worker::part_of(int lane, int64_t count) const {
  const auto before = [&](int index) {  // things that belong to workers before this one
    const int64_t share = std::clamp<int64_t>((int64_t)m_.lanes * index - (int64_t)lane * count_, 0, count_);
    return count * share / count_;
  };
  return {before(index_), before(index_ + 1)};
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
template <class Op, class Score>
void share_by(const Op& op, const Score& score, int used, const int32_t* numbers, float* shares) {
  float sum = 1e-20f;
  for (int j = 0; j < used; j++) sum += shares[j] = score(numbers[j]);
  for (int j = 0; j < used; j++) shares[j] *= op.factor / (op.normalized ? sum : 1);
}

}  // namespace

// Chooses a position's experts by the largest logits. Shares are their softmax, over the chosen or over all experts.
void Worker::weigh(const float* logits, int experts, int used, int32_t* numbers, float* shares) const {
  largest_of(logits, experts, used, numbers);
  const float largest = logits[numbers[0]];
  float sum = 0;
  for (int j = 0; j < used; j++) {
    shares[j] = std::exp(logits[numbers[j]] - largest);
    if (router_->normalized) sum += shares[j];
  }
  for (int e = 0; e < experts && !router_->normalized; e++) sum += std::exp(logits[e] - largest);
  for (int j = 0; j < used; j++) shares[j] /= sum;
}

// The same with sigmoids of the logits as scores (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). A correction is added
// to the scores for the choice, not for the shares. With groups, the experts are chosen from the best groups.
void Worker::weigh_sigmoids(const float* logits, int experts, int used, int lane, int32_t* numbers, float* shares) {
  const plan::SigmoidRoute& op = *router_->sigmoids;
  const auto score = [&](int e) { return 1 / (1 + std::exp(-logits[e])); };
  const float* const correction = op.correction ? d_.small(*op.correction, lane) : nullptr;
  for (int e = 0; e < experts; e++) choice_[e] = score(e) + (correction ? correction[e] : 0);
  if (op.groups > 1) {
    const int each = experts / op.groups;
    float* const sums = choice_.data() + experts;
    std::vector<int32_t>& best = groups_;
    for (int g = 0; g < op.groups; g++) {
      const float* of_group = choice_.data() + g * each;
      largest_of(of_group, each, 2, best.data());
      sums[g] = of_group[best[0]] + of_group[best[1]];
    }
    largest_of(sums, op.groups, op.groups_used, best.data());
    for (int g = 0; g < op.groups; g++)
      if (std::count(best.begin(), best.begin() + op.groups_used, g) == 0)
        std::fill_n(choice_.begin() + g * each, each, -INFINITY);
  }
  largest_of(choice_.data(), experts, used, numbers);
  share_by(op, score, used, numbers, shares);
}

// The same with roots of the softplus as scores, or with a table of the token's experts (DeepSeek-V4).
void Worker::weigh_roots(const float* logits, int experts, int used, int lane, int p, int32_t* numbers, float* shares) {
  const plan::RootRoute& op = *router_->roots;
  const auto score = [&](int e) {
    return std::sqrt(std::max(logits[e], 0.0f) + std::log1p(std::exp(-std::fabs(logits[e]))));
  };
  if (op.by_token) {
    const float* const row = d_.small(*op.by_token, lane) + (int64_t)pass_->tokens[p] * used;
    for (int j = 0; j < used; j++) numbers[j] = (int32_t)row[j];
  } else {
    const float* const correction = op.correction ? d_.small(*op.correction, lane) : nullptr;
    for (int e = 0; e < experts; e++) choice_[e] = score(e) + (correction ? correction[e] : 0);
    largest_of(choice_.data(), experts, used, numbers);
  }
  share_by(op, score, used, numbers, shares);
}

// Chooses the experts of all positions of a lane from their logits, and groups the uses by expert.
void Worker::choose(const Product& product, int lane) {
  const int used = product.used, experts = product.experts;
  const int64_t uses = (int64_t)positions_ * used;
  Routes& routes = routes_[lane - first_lane_];
  for (auto* numbers : {&routes.experts, &routes.members, &routes.places}) numbers->resize(uses);
  routes.shares.resize(uses);
  int64_t stride;
  const float* logits = target(plan::Value::routes, 0, lane, &stride);
  for (int p = 0; p < positions_; p++, logits += stride) {
    int32_t* const numbers = routes.experts.data() + p * used;
    float* const shares = routes.shares.data() + p * used;
    if (router_->roots) {
      weigh_roots(logits, experts, used, lane, p, numbers, shares);
    } else if (router_->sigmoids) {
      weigh_sigmoids(logits, experts, used, lane, numbers, shares);
    } else {
      weigh(logits, experts, used, numbers, shares);
    }
  }
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

// Runs a product with experts. The first one after a router chooses the experts.
void Worker::run_experts(const Product& product, int module) {
  for (int lane = first_lane_; lane < last_lane_; lane++) {
    if (router_) choose(product, lane);
    product.summed ? write_sum(product, lane, module) : write_each(product, lane, module);
  }
  router_ = nullptr;
}

// The vectors that a group's members read, copied to own_ if there are several. x: the vectors of all positions; step:
// floats from one rank's vector to the next one's, 0 if all ranks read the same.
Worker::Vectors Worker::read_by(const Routes& routes, const Group& group, int used, const Vectors& x, int64_t step,
                                int64_t columns) {
  const auto from = [&](int64_t member) {
    const int32_t use = routes.members[member];
    return x.x + use / used * x.stride + use % used * step;
  };
  const int count = (int)(group.last - group.first);
  if (count == 1) return {from(group.first), 0, 1};
  for (int i = 0; i < count; i++)
    std::memcpy(own_.data() + i * columns, from(group.first + i), columns * sizeof(float));
  return {own_.data(), columns, count};
}

// Computes a product whose experts all read the same vector and write one after the other. Workers share out the units
// of all chosen experts as if they were one matrix. A unit costs as much as its reading, which counts as kReading
// positions, and its positions.
void Worker::write_each(const Product& product, int lane, int module) {
  constexpr int64_t kReading = 8;
  const Routes& routes = routes_[lane - first_lane_];
  const int64_t units = product.units(), of = product.unit_tiles();
  const auto cost = [&](const Group& group) { return kReading + group.last - group.first; };
  int64_t all = 0;
  for (const Group& group : routes.groups) all += units * cost(group);
  const Part part = part_of(lane, all);
  if (part.first == part.last) return;
  const Vectors x = vectors_of(product, lane);
  int64_t stride, before = 0;
  float* const to = target(product.writes, module, lane, &stride);
  for (const Group& group : routes.groups) {
    const auto unit_at = [&](int64_t place) {
      return std::clamp<int64_t>((place - before + cost(group) - 1) / cost(group), 0, units);
    };
    const Share share{lane * product.experts + group.expert, unit_at(std::max(part.first, before)),
                      unit_at(std::max(part.last, before))};
    before += units * cost(group);
    if (share.first == share.last) continue;
    const int64_t own = share.last - share.first, ldy = own * of * kTile,
                  tile = (share.matrix * units + share.first) * of;
    const Vectors read = read_by(routes, group, product.used, x, 0, product.columns);
    times(product, share, tile, read, y_.data(), ldy);
    add_biases(product, lane, share, read.positions, y_.data(), ldy);
    for (int i = 0; i < read.positions; i++) {
      const int32_t use = routes.members[group.first + i];
      activate(product, own, y_.data() + i * ldy,
               to + use / product.used * stride + use % product.used * product.written_step() + share.first * kTile);
    }
  }
}

// Computes a product whose experts' results are summed, times their shares. Workers share out its rows: a worker has
// the same rows of all experts, so it adds them itself.
void Worker::write_sum(const Product& product, int lane, int module) {
  const Routes& routes = routes_[lane - first_lane_];
  const Part part = part_of(lane, product.units());
  const int64_t units = product.units(), rows = (part.last - part.first) * kTile, used = product.used;
  if (rows == 0) return;
  Vectors x{nullptr, 0, positions_};
  x.x = target(product.reads, 0, lane, &x.stride);
  for (const Group& group : routes.groups) {
    const Share share{lane * product.experts + group.expert, part.first, part.last};
    float* const y = each_.floats() + group.first * rows;
    const Vectors read = read_by(routes, group, product.used, x, product.read_step(), product.columns);
    times(product, share, share.matrix * units + part.first, read, y, rows);
    add_biases(product, lane, share, read.positions, y, rows);
  }
  int64_t stride;
  float* const to = target(product.writes, module, lane, &stride) + part.first * kTile;
  for (int p = 0; p < positions_; p++) {
    std::memset(to + p * stride, 0, rows * sizeof(float));
    for (int64_t use = p * used; use < (p + 1) * used; use++)
      k_.add_scaled(to + p * stride, each_.floats() + routes.places[use] * rows, routes.shares[use], rows);
  }
}

// Runs the shared expert's products; the last one is added to the output. The gate's logit overwrites the router's,
// from which all workers have chosen already.
void Worker::run(const SharedExpert& op, int module) {
  if (op.gate) run(*op.gate, module);
  for (const Product& product : op.products) {
    if (product.added) {
      add(product, op.gate.has_value(), module);
    } else {
      run(product, module);
      meet_if_shared();
    }
  }
}

// Adds a product's result to the value that it writes; gated: times the sigmoid of the gate's logit.
void Worker::add(const Product& product, bool gated, int module) {
  int64_t tile = 0;
  for (const Share& share : shares(product)) {
    const int64_t rows = (share.last - share.first) * kTile;
    const int lane = share.matrix;
    int64_t stride, step;
    const Vectors x = vectors_of(product, lane);
    float* const to = target(product.writes, module, lane, &stride) + share.first * kTile;
    const float* const logits = target(plan::Value::routes, 0, lane, &step);
    tile = times(product, share, tile, x, y_.data(), rows);
    add_biases(product, lane, share, positions_, y_.data(), rows);
    for (int p = 0; p < positions_; p++)
      k_.add_scaled(to + p * stride, y_.data() + p * rows, gated ? 1 / (1 + std::exp(-logits[p * step])) : 1, rows);
  }
}

// Reads what this worker would read for one position, for `Worker::read`. It uses experts that are far from each other.
uint64_t Worker::read_experts(const Product& product) const {
  const int64_t units = product.units();
  uint64_t sum = 0;
  for (int lane = first_lane_; lane < last_lane_; lane++) {
    const Part rows = part_of(lane, units), all = part_of(lane, product.used * units);
    for (int64_t j = 0; j < product.used; j++) {
      const int64_t first = product.summed ? rows.first : std::clamp<int64_t>(all.first - j * units, 0, units);
      const int64_t last = product.summed ? rows.last : std::clamp<int64_t>(all.last - j * units, 0, units);
      const int matrix = lane * product.experts + (int)(j * product.experts / product.used);
      if (first < last)
        sum += read_tiles(product, {matrix, first, last}, (matrix * units + first) * product.unit_tiles());
    }
  }
  return sum;
}

}  // namespace laneformer
