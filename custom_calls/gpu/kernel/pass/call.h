// The start and the end of a call in a CTA: the check of its numbers, the check-in, and the results. decode.cu and
// steps.cu call these around their passes. All CTAs check the same numbers, so they accept or refuse a call together.
#pragma once

#include "decoder.h"

namespace laneformer {
namespace gpu {

// The sampler of CTA c of a lane, with the CTA's range of tokens.
LF_DEVICE Sampler sampler_of(const Params& p, Shared& shared, Watch& watch, int lane, int c) {
  if (is_spare()) return {p, shared.logits, shared.z, shared.scratch, shared.end, watch, 0, 0, 0, true};
  const int place = lane * kCtas + c;
  const int first =
      Head::kKind == HeadKind::kVocabParallel ? lane * (kVocab / kLanes) + c * kHeadRows : place * kHeadRows;
  const int rows = Decoder::rows_of(first, kHeadRows,
                                    Head::kKind == HeadKind::kVocabParallel ? (lane + 1) * (kVocab / kLanes) : kVocab);
  return {p, shared.logits, shared.z, shared.scratch, shared.end, watch, place, first, rows, is_leader()};
}

// place: number of the CTA among all, the spare ones last. Waits until all CTAs of all devices have started this call,
// and so have ended the one before: what they read in that call may be written again.
LF_DEVICE void check_in(const Params& p, Watch& watch, int place, u32 tag) {
  if (thread() == 0)
    for (int d = 0; d < p.devices; d++) store_word(p.shared[d] + kCheckInAt + place, word_of(0, tag));
  for (int from = opaque(thread()); from < kPackets; from += kThreads)
    wait_for(p.shared[p.device] + kCheckInAt + from, tag, watch, kAtCheckIn, from / kCtas);
  if (kSpares > 0 && thread() < kSpares)
    wait_for(p.shared[p.device] + kCheckInAt + kPackets + thread(), tag, watch, kAtCheckIn, thread() * kLanesHere);
  sync_cta();
}

// Writes a slot's results on this device; one CTA calls it. The device that reports to the host (Params::reports) also
// reports a failure of another device.
LF_DEVICE void write_results(const Params& p, int drawn, int end, int position, int slot = 0) {
  const int first = slot * p.room;
  for (int i = drawn + thread(); i < p.room; i += kThreads) p.tokens[first + i] = 0, p.logprobs[first + i] = 0;
  sync_cta();  // another thread emitted the last token
  if (thread() != 0) return;
  if (kPeerCtas > 0) store_word(p.shared[0] + 1, p.pass_tag);
  int* status = p.status + 3 * slot;
  status[0] = drawn;
  const u64 failure = load_word(p.shared[p.device]);
  const bool failed = has_failed(failure, p.pass_tag);
  status[1] = failed ? (int)kFailed : end;
  status[2] = position;
  if (!p.reports) return;
  if (failed) p.host->failure = failure;
  *(volatile unsigned*)&p.host->ended = p.pass_tag;
  fence_system();
  if (kRequests == 1 || (Control(p, slot).prompt != 0 && (failed || end != kYielded)))
    *(volatile int*)&p.host->done[slot] = 1;
}

// Whether a slot's numbers are valid. The host cannot check them, because they are in device memory.
LF_DEVICE bool possible(const Params& p, const Control& control, int slot) {
  const auto [prompt, start, limit] = control;
  if (prompt < 1 || prompt > p.room_of_prompt || start < 0 || limit < 1 || limit > p.room) return false;
  if ((i64)start + prompt + limit - 1 > p.capacity) return false;
  for (int i = 0; i < prompt; i++)
    if (prompt_of(p, slot)[i] < 0 || prompt_of(p, slot)[i] >= kVocab) return false;
  for (int layer = 0; layer < kLayers && start > 0; layer++)
    if (!continues(p, layer, start, slot)) return false;
  return true;
}
// Whether the numbers of all slots that take part are valid, and at least one takes part.
LF_DEVICE bool possible(const Params& p) {
  bool any = false;
  for (int slot = 0; slot < kRequests; slot++) {
    const Control control(p, slot);
    if (control.prompt == 0) continue;
    if (!possible(p, control, slot)) return false;
    any = true;
  }
  return any;
}

// Whether the call can run. If not, writes the results of a failed call.
LF_DEVICE bool accept(const Params& p, const Control& control) {
  if (kRequests == 1 ? possible(p, control, 0) : possible(p)) return true;
  if (is_leader() && thread() == 0) p.host->failure = failure_word(p.pass_tag, kBadCall, 0, -1, 0);
  if (is_leader()) write_results(p, 0, kFailed, control.start);
  for (int slot = 1; slot < kRequests && is_leader(); slot++)
    write_results(p, 0, kFailed, Control(p, slot).start, slot);
  return false;
}

// Writes the results when the passes have ended.
LF_DEVICE void finish(const Params& p, const Control& control, const Progress& now) {
  if (is_leader()) write_results(p, now.drawn, now.end, control.start + smaller(now.pass, control.prompt) + now.drawn);
}

LF_DEVICE void finish(const Params& p, const Requests& requests) {
  if (!is_leader()) return;
  if (thread() == 0 && p.reports) {
    p.host->passes = requests.passes();
    requests.report_drafts();
  }
  for (int slot = 0; slot < kRequests; slot++) {
    const RequestState& own = requests.of(slot);
    write_results(p, own.drawn, own.end, own.start + own.passed + own.drawn, slot);
  }
}

LF_DEVICE const char* weights_of_cta(const Params& p) {
  const int own = is_spare() ? 0 : cta();  // a spare CTA fills its ring once and reads nothing of it
  return (const char*)p.weights + (i64)own * kWarps * kRowLines * kLineBytes;
}

}  // namespace gpu
}  // namespace laneformer
