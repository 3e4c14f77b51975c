// Op Attend. A unit writes the new keys and values of its chunk to the cache before it reads them; no other unit reads
// these. Options of attention belong here: on queries in `write_queries`, on keys and values in `attend`, on results in
// `merge`.
#include <cstring>

#include "../../common/checks.h"
#include "../worker.h"
#include "attention.h"

namespace laneformer {

namespace {

class AttendOp final : public Attention {
 public:
  AttendOp(const plan::Attend& op, const Setup& setup)
      : op_(op), lanes_((int)setup.state.plan.lanes), window_(op.window ? *op.window : kNoWindow) {}

  void scratch(Arena& own, Arena& shared) const override { Buffers(*this, own, shared); }
  void run(Worker& w, int module) const override;
  void merge(Worker& w, const Heads& wanted, float* to) const override;

 private:
  struct Buffers {
    Buffers(const AttendOp& of, Arena& own, Arena& shared)
        : queries(own.floats(kBlock * of.op_.heads * of.op_.head_dim)),
          key(own.floats(of.op_.kv_heads * of.op_.head_dim)),
          space(own.floats(of.op_.heads * of.op_.head_dim)),
          parts(shared, of.lanes_, of.op_.heads, of.op_.head_dim) {}
    float *queries, *key, *space;  // [kBlock][heads][head_dim], [kv_heads][head_dim], [heads][head_dim]
    Parts parts;
  };
  void write_queries(Worker& w, const Buffers& buffers, const Run& run, int lane) const;
  void norm_and_rotate(Worker& w, float* heads, int64_t count, const std::optional<plan::Norm>& norm, int lane,
                       int p) const;
  void attend(Worker& w, const Buffers& buffers, int layer, const Unit& unit, const Unit* next) const;

  const plan::Attend op_;
  const int lanes_;
  const int64_t window_;
};

void AttendOp::run(Worker& w, int module) const {
  Arena own = w.arena(), shared = w.shared_arena();
  const Buffers buffers(*this, own, shared);
  const int heads = (int)op_.heads;
  const std::vector<Unit> units = cut_keys(w, chunks_of_keys(w, window_), window_, heads, heads);
  for (size_t i = 0; i < units.size(); i++) {
    if (i == 0 || units[i].chunk == 0) write_queries(w, buffers, *units[i].run, units[i].keys.lane);
    attend(w, buffers, module / 2, units[i], i + 1 < units.size() ? &units[i + 1] : nullptr);
  }
}

// Norms `count` heads at block position p, each or all together, and rotates them, in place.
void AttendOp::norm_and_rotate(Worker& w, float* heads, int64_t count, const std::optional<plan::Norm>& norm, int lane,
                               int p) const {
  const int64_t e = op_.head_dim;
  if (norm)
    for (int64_t first = 0; first < count * e; first += norm->gain.size)
      w.kernels.rms_norm(heads + first, w.state.small(norm->gain, lane), norm->eps, norm->gain.size, heads + first);
  for (float* head = heads; op_.rotary && head < heads + count * e; head += e) w.rotations.rotate(head, *op_.rotary, p);
}

// Writes a run's queries: normed, rotated and scaled.
void AttendOp::write_queries(Worker& w, const Buffers& buffers, const Run& run, int lane) const {
  const int64_t n = op_.heads * op_.head_dim;
  for (int p = run.first; p < run.first + run.count; p++) {
    float* const q = buffers.queries + p * n;
    std::memcpy(q, w.state.of(plan::Value::projected).row(lane, p), n * sizeof(float));
    norm_and_rotate(w, q, op_.heads, op_.q_norm, lane, p);
    scale_queries(w, op_.scale, n, q, buffers.space);
  }
}

// Writes the new keys and values of a unit's chunk to the cache, then attends to all its keys with the run's queries.
// next: the worker's next unit, whose keys and values are prefetched; may be null.
void AttendOp::attend(Worker& w, const Buffers& buffers, int layer, const Unit& unit, const Unit* next) const {
  const Run& run = *unit.run;
  const Keys& part = unit.keys;
  const int64_t e = op_.head_dim, n = op_.kv_heads, width = bytes_of(w.state.cache);
  const auto cache = [&](const Call& call, plan::Kept kind, int lane) {
    return (char*)w.state.kept_of(call, kind, layer, lane);
  };
  const Call& call = *run.slot->call;
  char *keys = cache(call, plan::Kept::keys, part.lane), *values = cache(call, plan::Kept::values, part.lane);
  for (int64_t t = std::max(part.first, run.start); t < part.last; t++) {
    const int p = run.first + (int)(t - run.start);
    const float* k = w.state.of(plan::Value::projected).row(part.lane, p) + op_.heads * e;
    std::memcpy(buffers.key, k, n * e * sizeof(float));
    norm_and_rotate(w, buffers.key, n, op_.k_norm, part.lane, p);
    w.kernels.narrow(w.state.cache, buffers.key, n * e, keys + t * n * e * width);
    w.kernels.narrow(w.state.cache, k + n * e, n * e, values + t * n * e * width);
  }
  float* const out = buffers.parts.of(part.lane, unit.chunk, run.first, 0);
  const Call& after = next ? *next->run->slot->call : call;
  const Keys ahead = next ? next->keys : Keys{part.lane, 0, 0};
  w.kernels.attend({buffers.queries + run.first * op_.heads * e, keys, values, out, w.state.cache, (int)n,
                    (int)(op_.heads / n), (int)e, part.first, part.last, run.start, window_, run.count,
                    cache(after, plan::Kept::keys, ahead.lane) + ahead.first * n * e * width,
                    cache(after, plan::Kept::values, ahead.lane) + ahead.first * n * e * width,
                    ahead.last - ahead.first, op_.attn_logit_softcapping.value_or(0)});
}

// Each channel is multiplied by the sigmoid of its gate if the op has gates.
void AttendOp::merge(Worker& w, const Heads& wanted, float* to) const {
  Arena shared = w.shared_arena();
  const float* const sinks = op_.sinks ? w.state.small(*op_.sinks, wanted.lane) : nullptr;
  Parts(shared, lanes_, op_.heads, op_.head_dim).merge(w, chunks_of_keys(w, window_), wanted, sinks, to);
  for (int p = 0; p < w.positions && op_.attention_gate; p++)
    w.kernels.gate(w.state.of(plan::Value::projected).row(wanted.lane, p) + op_.values_end(), wanted.columns,
                   to + p * wanted.columns);
}

}  // namespace

std::unique_ptr<Op> make_op(const plan::Attend& op, Setup& setup) { return make_attention<AttendOp>(op, setup); }

namespace plan {

void check(const Attend& op, Checks& checks) {
  const auto check_heads = [&](const std::optional<Norm>& norm, int64_t heads) {  // of each head, or of all together
    if (norm) checks.norm(norm, norm->gain.size == heads * op.head_dim ? heads * op.head_dim : op.head_dim);
  };
  require(op.heads <= kMostHeads && op.kv_heads <= kMostHeads && op.head_dim <= kMostHeads, "too many heads");
  require(op.heads % op.kv_heads == 0, "heads are not a multiple of kv_heads");
  require(!op.rotary || op.rotary->channels() == op.head_dim, "a rotation has other channels than a head");
  check_heads(op.q_norm, op.heads);
  check_heads(op.k_norm, op.kv_heads);
  require(checks.channels_of(Value::projected) == op.projected(),
          "attention reads another number of channels than are projected");
  checks.channels_of(Value::attended) = op.width();
}

}  // namespace plan

}  // namespace laneformer
