// Latent attention: ops LatentKeep and LatentAttend. The cache keeps one vector per position, the latent, from which
// all heads' keys and values could be made. Queries are transformed instead, so that attention reads the latents
// themselves.
#include <cstring>

#include "../../common/checks.h"
#include "../worker.h"
#include "attention.h"

namespace laneformer {

namespace {

class LatentKeepOp final : public Op {
 public:
  explicit LatentKeepOp(const plan::LatentKeep& op) : op_(op) {}

  void scratch(Arena& own, Arena&) const override { own.floats(op_.channels()); }
  void run(Worker& w, int module) const override;

 private:
  const plan::LatentKeep op_;
};

// Writes the latents of the pass's positions to the cache. Workers that share a lane share out its positions.
void LatentKeepOp::run(Worker& w, int module) const {
  const int64_t n = op_.channels(), width = bytes_of(w.state.cache);
  float* const latent = w.arena().floats(n);
  for (int r = 0; r < w.pass->runs; r++) {
    const Run& run = w.pass->run[r];
    for (int lane = w.first_lane; lane < w.last_lane; lane++) {
      char* const latents = (char*)w.state.kept_of(*run.slot->call, plan::Kept::latents, module / 2, lane);
      const Interval part = w.part_of(lane, run.count);
      for (int64_t i = part.first; i < part.last; i++) {
        const int p = run.first + (int)i;
        const float* x = w.state.of(plan::Value::projected).row(lane, p);
        w.kernels.rms_norm(x, w.state.small(op_.norm.gain, lane), op_.norm.eps, op_.rank, latent);
        std::memcpy(latent + op_.rank, x + op_.rank, (n - op_.rank) * sizeof(float));
        w.rotations.rotate(latent + op_.rank, op_.rotary, p);
        w.kernels.narrow(w.state.cache, latent, n, latents + (run.start + i) * n * width);
      }
    }
  }
}

class LatentAttendOp final : public Attention {
 public:
  LatentAttendOp(const plan::LatentAttend& op, const Setup& setup)
      : op_(op), lanes_((int)setup.state.plan.lanes), channels_(op.rank + op.rotating()) {}

  void scratch(Arena& own, Arena& shared) const override { Buffers(*this, own, shared); }
  void run(Worker& w, int module) const override;
  void merge(Worker& w, const Heads& wanted, float* to) const override;

 private:
  struct Buffers {
    Buffers(const LatentAttendOp& of, Arena& own, Arena& shared)
        : queries(own.floats(kBlock * of.op_.heads * of.channels_)),
          space(own.floats(latent_floats(of.channels_, of.op_.rank))),
          parts(shared, of.lanes_, of.op_.heads, of.op_.rank) {}
    float *queries, *space;  // [kBlock][heads][channels]; of the kernel
    Parts parts;
  };
  void write_queries(Worker& w, const Buffers& buffers, const Unit& unit) const;
  void attend(Worker& w, const Buffers& buffers, int layer, const Unit& unit, const Unit* next) const;

  const plan::LatentAttend op_;
  const int lanes_;
  const int64_t channels_;  // of a latent
};

void LatentAttendOp::run(Worker& w, int module) const {
  constexpr int kLeast = 16;  // heads, which fill one vector (AVX-512) or two (AVX2)
  Arena own = w.arena(), shared = w.shared_arena();
  const Buffers buffers(*this, own, shared);
  const std::vector<Unit> units = cut_keys(w, chunks_of_keys(w, kNoWindow), kNoWindow, (int)op_.heads, kLeast);
  for (size_t i = 0; i < units.size(); i++) {
    if (i == 0 || units[i].chunk == 0) write_queries(w, buffers, units[i]);
    attend(w, buffers, module / 2, units[i], i + 1 < units.size() ? &units[i + 1] : nullptr);
  }
}

// Writes the queries of a unit's heads and positions: from ABSORBED, then from QUERIES, rotated; both scaled.
void LatentAttendOp::write_queries(Worker& w, const Buffers& buffers, const Unit& unit) const {
  const int64_t rotating = op_.rotating(), of_head = op_.still + rotating;
  const int lane = unit.keys.lane;
  for (int p = unit.run->first; p < unit.run->first + unit.run->count; p++)
    for (int64_t head = unit.first_head; head < unit.last_head; head++) {
      float* const q = buffers.queries + (p * op_.heads + head) * channels_;
      std::memcpy(q, w.state.of(plan::Value::absorbed).row(lane, p) + head * op_.rank, op_.rank * sizeof(float));
      std::memcpy(q + op_.rank, w.state.of(plan::Value::queries).row(lane, p) + head * of_head + op_.still,
                  rotating * sizeof(float));
      w.rotations.rotate(q + op_.rank, op_.rotary, p);
      scale_queries(w, op_.scale, channels_, q, buffers.space);
    }
}

// Attends to the latents of a unit's chunk. next: the worker's next unit, whose latents are prefetched; may be null.
void LatentAttendOp::attend(Worker& w, const Buffers& buffers, int layer, const Unit& unit, const Unit* next) const {
  const Run& run = *unit.run;
  const Keys& part = unit.keys;
  const int64_t bytes = channels_ * bytes_of(w.state.cache);
  const auto latents = [&](const Unit& of) {
    return (const char*)w.state.kept_of(*of.run->slot->call, plan::Kept::latents, layer, of.keys.lane);
  };
  w.kernels.attend_latents({buffers.queries + (run.first * op_.heads + unit.first_head) * channels_, latents(unit),
                            buffers.parts.of(part.lane, unit.chunk, run.first, unit.first_head), w.state.cache,
                            unit.last_head - unit.first_head, (int)op_.heads, (int)channels_, (int)op_.rank, part.first,
                            part.last, run.start, run.count, next ? latents(*next) + next->keys.first * bytes : nullptr,
                            next ? (next->keys.last - next->keys.first) * bytes : 0, buffers.space});
}

void LatentAttendOp::merge(Worker& w, const Heads& wanted, float* to) const {
  Arena shared = w.shared_arena();
  Parts(shared, lanes_, op_.heads, op_.rank).merge(w, chunks_of_keys(w, kNoWindow), wanted, nullptr, to);
}

}  // namespace

std::unique_ptr<Op> make_op(const plan::LatentKeep& op, Setup&) { return std::make_unique<LatentKeepOp>(op); }

std::unique_ptr<Op> make_op(const plan::LatentAttend& op, Setup& setup) {
  return make_attention<LatentAttendOp>(op, setup);
}

namespace plan {

void check(const LatentKeep& op, Checks& checks) {
  checks.norm(op.norm, op.rank);
  require(checks.channels_of(Value::projected) == op.channels(), "latents have another size than what is projected");
}

void check(const LatentAttend& op, Checks& checks) {
  const int64_t rotating = op.rotating();
  require(op.heads <= kMostHeads && op.rank <= kMostHeads && op.still <= kMostHeads, "too many heads");
  require(checks.channels_of(Value::projected) == op.rank + rotating &&
              checks.channels_of(Value::queries) == op.heads * (op.still + rotating) &&
              checks.channels_of(Value::absorbed) == op.heads * op.rank,
          "latent attention reads another number of channels than are projected");
  checks.channels_of(Value::attended) = op.heads * op.rank;
}

}  // namespace plan

}  // namespace laneformer
