// How a CTA begins and ends a call.
#pragma once

#include "decoder.h"

namespace laneformer {
namespace gpu {

LF_DEVICE Sampler sampler_of(const Params& p, Shared& shared, Watch& watch, int lane, int c) {
  const int place = lane * kCtas + c;
  const int first =
      Head::kKind == HeadKind::kVocabParallel ? lane * (kVocab / kLanes) + c * kHeadRows : place * kHeadRows;
  const int rows = Decoder::rows_of(first, kHeadRows,
                                    Head::kKind == HeadKind::kVocabParallel ? (lane + 1) * (kVocab / kLanes) : kVocab);
  return {p, shared.logits, shared.z, shared.scratch, shared.end, watch, place, first, rows, cta() == 0};
}

// Waits until all CTAs of all devices have ended the call before: what they read in it may be written again.
LF_DEVICE void check_in(const Params& p, Watch& watch, int place, u32 tag) {
  if (thread() == 0)
    for (int d = 0; d < p.devices; d++) store_word(p.shared[d] + kCheckInAt + place, word_of(0, tag));
  for (int from = opaque(thread()); from < kPackets; from += kThreads)
    for (u32 spins = 0; !arrived(load_word(p.shared[p.device] + kCheckInAt + from), tag);)
      if (!watch.keep_waiting(spins, kAtCheckIn, from / kCtas)) break;
  sync_cta();
}

// The results of a device, by one of its CTAs. One device of a process reports to its host, also another one's failure.
LF_DEVICE void write_results(const Params& p, int drawn, int end, int position) {
  for (int i = drawn + thread(); i < p.room; i += kThreads) p.tokens[i] = 0, p.logprobs[i] = 0;
  sync_cta();  // another thread emitted the last token
  if (thread() != 0) return;
  if (kPeerCtas > 0) store_word(p.shared[0] + 1, p.pass_tag);
  p.status[0] = drawn;
  const u64 failure = load_word(p.shared[p.device]);
  const bool failed = has_failed(failure, p.pass_tag);
  p.status[1] = failed ? (int)kFailed : end;
  p.status[2] = position;
  if (!p.reports) return;
  if (failed) p.host->failure = failure;
  *(volatile unsigned*)&p.host->ended = p.pass_tag;
  fence_system();
  *(volatile int*)&p.host->done = 1;
}

// The host does not see these numbers: they are on the device.
LF_DEVICE bool possible(const Params& p, const Control& control) {
  const auto [prompt, start, limit] = control;
  if (prompt < 1 || prompt > p.room_of_prompt || start < 0 || limit < 1 || limit > p.room) return false;
  if ((i64)start + prompt + limit - 1 > p.capacity) return false;
  for (int i = 0; i < prompt; i++)
    if (p.prompt[i] < 0 || p.prompt[i] >= kVocab) return false;
  for (int layer = 0; layer < kLayers && start > 0; layer++)
    if (!continues(Layers{}, p, layer, start)) return false;
  return true;
}

// Whether there is a call to run; if not, that is its result.
LF_DEVICE bool accept(const Params& p, const Control& control) {
  if (possible(p, control)) return true;
  if (cta() == 0 && thread() == 0) p.host->failure = failure_word(p.pass_tag, kBadCall, 0, -1, 0);
  if (cta() == 0) write_results(p, 0, kFailed, control.start);
  return false;
}

LF_DEVICE void finish(const Params& p, const Control& control, const Progress& now) {
  if (cta() == 0) write_results(p, now.drawn, now.end, control.start + smaller(now.pass, control.prompt) + now.drawn);
}

LF_DEVICE const char* weights_of_cta(const Params& p) {
  return (const char*)p.weights + (i64)cta() * kWarps * kRowLines * kLineBytes;
}

}  // namespace gpu
}  // namespace laneformer
