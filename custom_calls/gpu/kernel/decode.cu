// The persistent decode kernel: one launch generates a whole answer. host/session.cc launches it cooperatively with
// kCtas CTAs for each lane of the device, all of them resident.
//
// laneformer_decode checks the call (call.h), starts the weight stream (stream.h) and then makes passes: the embedding,
// the ops of every layer and the head (decoder.h), and the draw (sampling.h). All CTAs make the same passes, because
// each of them computes the next token and the end of the call from the same packets. CTAs synchronize only through the
// words of edges.h.
#include "call.h"
#include "drafts.h"
#include "peers.h"
#include "read.h"

namespace laneformer {
namespace gpu {

constexpr int kSeveral = larger_of(2, kPassRows);  // rows of the code for several; Run<1> is the code for one

// Runs a pass up to the logits. rows.token(m): the token of row m. draws: whether any row draws; if none does, the head
// is skipped. head_rows: the CTA's rows of the head.
template <int most, class Rows>
LF_DEVICE void run_pass(Decoder& decoder, const Run<most>& run, const Rows& rows, bool draws, int head_rows,
                        Stream& stream, u32 tag, u32 sequence) {
  if (is_spare()) return;
  decoder.embed(run, [&](int m) { return rows.token(m); }, tag);
  for (int layer = 0; layer < kLayers; layer++) decoder.run(run, layer, tag, sequence);
  stream.skip_padding(kLayerPadding);
  if (!draws) return;
  decoder.final(run, tag, sequence);
  decoder.head(run, tag, head_rows);
}

// Generates an answer in passes of several rows. The first passes read the prompt except its last token. Each later
// pass has the newest token of the text and drafts of the tokens after it.
template <int most>
LF_DEVICE void decode_rows(const Params& p, const Control& control, Decoder& decoder, Sampler& sampler, Stream& stream,
                           Drafts& drafts) {
  Progress now = {0, 0, 0, kLength, 0};  // pass: tokens of the prompt that were in passes
  int got = 0;                           // tokens that the last pass drew
  drafts.begin(control.prompt);
  for (u32 tag = p.pass_tag + 1, sequence = p.exchange_tag;; tag += kPassTags, sequence += kNumSums + 1) {
    const int left = control.prompt - 1 - now.pass;
    const bool draws = left <= 0;
    if (!draws) {
      drafts.take_prompt(now.pass, smaller(left, kPassRows));
    } else if (now.drawn == 0) {
      drafts.first(p.prompt[control.prompt - 1], control.limit - 1);
    } else {
      drafts.next(now.drawn - got, got, control.limit - now.drawn - 1);
    }
    const int rows = drafts.rows(), position = control.start + smaller(now.pass, control.prompt - 1) + now.drawn;
    if (rows == 1) {
      run_pass(decoder, Run<1>{position}, drafts, draws, sampler.count, stream, tag, sequence);
    } else {
      const Run<most> run = {position, rows};
      run_pass(decoder, run, drafts, draws, sampler.count, stream, tag, sequence);
    }
    if (draws) {
      now.pass = control.prompt;
      got = decoder.draw(sampler, drafts, position, tag, now);
    } else {
      now.end = sampler.end_of_pass(tag, (int)(tag / kPassTags & 1));
      now.pass += rows;
    }
    if (now.end != kLength || now.drawn == control.limit) break;
  }
  if (thread() == 0 && is_leader() && p.reports) drafts.report(now.drawn - got, got);
  finish(p, control, now);
}

// Serves several requests, each in its slot, until one of them ends or the call must yield. Every pass computes the
// head, because the weight stream runs ahead of the passes, before it is decided which of them draw.
template <int most>
LF_DEVICE void decode_requests(const Params& p, Decoder& decoder, Sampler& sampler, Stream& stream,
                               Requests& requests) {
  requests.begin();
  for (u32 tag = p.pass_tag + 1, sequence = p.exchange_tag;; tag += kPassTags, sequence += kNumSums + 1) {
    requests.choose();
    if (requests.rows() == 1) {
      run_pass(decoder, Run<1>::of(requests.position(0), requests.row(0).slot), requests, true, sampler.count, stream,
               tag, sequence);
    } else {
      const Run<most> run = requests.run<most>();
      run_pass(decoder, run, requests, true, sampler.count, stream, tag, sequence);
    }
    if (requests.end_pass(decoder.draw(sampler, requests, tag))) break;
  }
  finish(p, requests);
}

LF_KERNEL void laneformer_decode(LF_PARAMS p) {
  LF_SHARED(memory);
  u64* barriers = (u64*)(memory + kRingBytes);
  Shared shared((float*)(memory + kRingBytes + kBarrierBytes));
  const int last = kLanesHere - 1, lane_here = is_spare() ? last : cta() / kCtas, c = is_spare() ? 0 : cta() % kCtas,
            lane = p.first_lane + lane_here, place = is_spare() ? kPackets + p.device : lane * kCtas + c;
  Watch watch(p, p.shared[p.device], lane);
  const Control control(p);
  if (!accept(p, control)) return;
  if constexpr (kPeerCtas > 0) {
    if (lane_here >= kLanesHere)
      return Peers{p, cta() - kLanesHere * kCtas - (kSpares > 0)}.run(control.prompt + control.limit);
  }
  Stream stream(weights_of_cta(p), memory, barriers,
                Course{kRequests > 1 ? 0 : (control.prompt - 1 + kPassRows - 1) / kPassRows}, watch);
  Drafts drafts(p, shared.drafts);
  if constexpr (kDrafting && kRequests == 1) drafts.bring_texts(control.prompt);
  if constexpr (kDrafting && kRequests > 1) {
    for (int slot = 0; slot < kRequests; slot++) Drafts(p, shared.drafts, slot).bring_texts(Control(p, slot).prompt);
  }
  check_in(p, watch, place, p.pass_tag);

  Decoder decoder(p, shared, stream, watch, lane_here, c);
  Sampler sampler = sampler_of(p, shared, watch, lane, c);
  sampler.configure();
  if constexpr (kRequests > 1) {
    Requests requests(p, shared.drafts);
    decode_requests<kSeveral>(p, decoder, sampler, stream, requests);
    return stream.drain();
  } else if constexpr (kPassRows > 1) {
    decode_rows<kSeveral>(p, control, decoder, sampler, stream, drafts);
    return stream.drain();
  }

  Progress now = {0, p.prompt[0], 0, kLength, 0};
  for (u32 tag = p.pass_tag + 1, sequence = p.exchange_tag;; tag += kPassTags, sequence += kNumSums + 1) {
    const Run<1> run = {control.start + now.pass};
    if (!is_spare()) {
      decoder.embed(run, [&](int) { return now.token; }, tag);
      for (int layer = 0; layer < kLayers; layer++) decoder.run(run, layer, tag, sequence);
      stream.skip_padding(kLayerPadding);
      if (now.pass + 1 >= control.prompt) {
        decoder.final(run, tag, sequence);
        decoder.head(run, tag, sampler.count);
      }
    }
    decoder.next(sampler, control, tag, now);
    if (now.over) {
      finish(p, control, now);
      break;
    }
  }
  stream.drain();
}

}  // namespace gpu
}  // namespace laneformer
