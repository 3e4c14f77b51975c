// The same ops with one launch for each op of each pass, to measure what the persistent kernel (decode.cu) saves.
// host/session.cc records the launches of a pass as a graph and launches it until the answer has ended.
//
// CTAs synchronize at the borders of launches, so the words of earlier launches are valid. Only the exchange between
// lanes, norms after modules, mixtures of streams, compressed attention and the sampling wait within a launch; for them
// the whole grid must be resident. The weights' ring starts empty in every launch and has only the lines of its op. The
// residual stream is kept in memory from launch to launch (Params::kept), the progress of the answer likewise.
#define LF_STEPS 1
#include "call.h"
#include "read.h"

namespace laneformer {
namespace gpu {

// Properties of the op of a launch.
struct Step {
  Stretch weights;   // its lines in a pass
  bool of_residual;  // whether it adds the module's output or reads several streams
  bool waits;        // whether it waits for other CTAs of the launch
};

template <class Op>
LF_DEVICE Step step_of(u32 line) {
  // These wait within the launch: sums over lanes, norms and mixtures of streams.
  constexpr bool of_residual = Op::kWrites == Value::kOutput || Op::kIsGatherStreams;
  Step step = {{0, 0}, of_residual, of_residual || Op::kIsCompressedAttend};
  if constexpr (Op::kStreamed) step.weights = {line + Op::kFirstLine, Op::kLines};
  return step;
}
template <class... Op>
LF_DEVICE Step step_of(Ops<Op...>, int wanted, u32 line) {
  Step found = {{0, 0}, false, false};
  int number = 0;
  ((wanted == number++ ? void(found = step_of<Op>(line)) : void()), ...);
  return found;
}
LF_DEVICE Step step_of_layer(int number, int layer) {
  Step found = {{0, 0}, false, false};
  with_ops<Attentions>(layer, [&](auto ops) {
    found = step_of(ops, number, Attentions::first_line(layer));
    number -= count_of(ops);
  });
  if (number >= 0)
    with_ops<FeedForwards>(layer, [&](auto ops) { found = step_of(ops, number, FeedForwards::first_line(layer)); });
  return found;
}
LF_DEVICE Step step_of(int step, int layer) {
  if (step >= kStepOp) return step_of_layer(step - kStepOp, layer);
  if (kGatherLines > 0 && step == kStepFinal) return {{kLayerLines, kGatherLines}, false, true};
  if (step == kStepHead) return {{kLayerLines + kGatherLines, kHeadLines - kHeadPadding - kGatherLines}, false, true};
  return {{0, 0}, false, false};
}

// Floats of several residual streams that a CTA keeps between launches.
constexpr int kKeptStreams = kStreams * kStreamRows;
LF_DEVICE float* kept_by(const Params& p) { return p.kept + (i64)cta() * kKeptFloats; }

// recall reads from memory, and keep writes to it, the CTA's channels of the residual stream and of the last modules'
// outputs; with several streams also these, and how an output joins them.
LF_DEVICE void recall(const Params& p, const Residual& residual) {
  const float* kept = kept_by(p);
  residual.each(Run<1>{0}, [&](int, int r) {
    residual.x[r] = kept[r];
    LF_UNROLL for (int h = 0; h < kHistory; h++) residual.history[h * kStreamRows + r] =
        kept[(h + 1) * kStreamRows + r];
  });
  if constexpr (kStreams > 0) {
    kept += (1 + kHistory) * kStreamRows;
    for (int i = thread(); i < kKeptStreams; i += kThreads) residual.streams[i] = kept[i];
    for (int i = thread(); i < kJoinFloats; i += kThreads) residual.joins[i] = kept[kKeptStreams + i];
    sync_cta();
  }
}

LF_DEVICE void keep(const Params& p, const Residual& residual) {
  float* kept = kept_by(p);
  residual.each(Run<1>{0}, [&](int, int r) {
    kept[r] = residual.x[r];
    LF_UNROLL for (int h = 0; h < kHistory; h++) kept[(h + 1) * kStreamRows + r] =
        residual.history[h * kStreamRows + r];
  });
  if constexpr (kStreams > 0) {
    sync_cta();
    kept += (1 + kHistory) * kStreamRows;
    for (int i = thread(); i < kKeptStreams; i += kThreads) kept[i] = residual.streams[i];
    for (int i = thread(); i < kJoinFloats; i += kThreads) kept[kKeptStreams + i] = residual.joins[i];
  }
}

LF_KERNEL void laneformer_step(LF_PARAMS p) {
  LF_SHARED(memory);
  const Step step = step_of(p.op, p.layer);
  const int lane_here = cta() / kCtas, c = cta() % kCtas, lane = p.first_lane + lane_here, place = lane * kCtas + c;
  Watch watch(p, p.shared[p.device], lane);
  Stream stream(weights_of_cta(p), memory, (u64*)(memory + kRingBytes), step.weights, watch);
  join_launches();
  Shared shared((float*)(memory + kRingBytes + kBarrierBytes));
  const int op = p.op, layer = watch.layer = p.layer;
  const Control control(p);
  if (op == kStepBegin) {
    const bool accepted = accept(p, control);
    if (accepted) check_in(p, watch, place, p.pass_tag);
    if (thread() == 0) p.progress[cta()] = {0, accepted ? p.prompt[0] : 0, 0, kLength, !accepted};
    return;
  }
  Progress now = p.progress[cta()];
  if (now.over) return stream.drain();

  Decoder decoder(p, shared, stream, watch, lane_here, c);
  const Run<1> run = {control.start + now.pass};
  const u32 tag = p.pass_tag + 1 + now.pass * kPassTags, sequence = p.exchange_tag + now.pass * (kNumSums + 1);
  const bool draws = now.pass + 1 >= control.prompt;
  switch (op) {
    case kStepEmbed:
      decoder.embed(run, [&](int) { return now.token; }, tag);
      keep(p, decoder.residual);
      break;
    case kStepFinal:
      recall(p, decoder.residual);
      if (draws) {
        decoder.final(run, tag, sequence);
      } else if (kGatherLines > 0) {
        stream.drain();
      }
      break;
    case kStepHead: {
      Sampler sampler = sampler_of(p, shared, watch, lane, c);
      sampler.configure();
      sync_cta();
      if (sampler.polls_host()) *sampler.end = Sampler::ending(sampler.asked_by_host());
      sync_cta();
      if (thread() == 0 && has_failed(load_word(p.shared[p.device]), p.pass_tag))
        *sampler.end = kFailed;  // an earlier launch has failed
      if (draws) {
        decoder.head(run, tag, sampler.count);
      } else {
        stream.drain();
      }
      decoder.next(sampler, control, tag, now);
      if (now.over) finish(p, control, now);
      if (thread() == 0) p.progress[cta()] = now;
      break;
    }
    default:
      if (step.of_residual) recall(p, decoder.residual);
      decoder.keep_tokens(run, [&](int) { return now.token; });
      if constexpr (kByToken) sync_cta();
      decoder.run_one(run, op - kStepOp, layer, tag, sequence);
      if (step.of_residual) keep(p, decoder.residual);
  }
}

}  // namespace gpu
}  // namespace laneformer
