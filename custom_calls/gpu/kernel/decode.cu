// The persistent decode kernel: one launch generates a whole answer. A lane has kCtas CTAs, all resident; they meet
// only through edges.h.
#include "decoder.h"
#include "peers.h"
#include "read.h"

namespace laneformer {
namespace gpu {

LF_KERNEL void laneformer_decode(LF_PARAMS p) {
  LF_SHARED(memory);
  u64* barriers = (u64*)(memory + kRingBytes);
  Shared shared((float*)(memory + kRingBytes + kBarrierBytes));
  const int lane_here = cta() / kCtas, c = cta() % kCtas, lane = p.first_lane + lane_here, place = lane * kCtas + c;
  Watch watch(p, p.shared[p.device], lane);
  const Control control(p);
  if (!accept(p, control)) return;
  if constexpr (kPeerCtas > 0) {
    if (lane_here >= kLanesHere) return Peers{p, cta() - kLanesHere * kCtas}.run(control.prompt + control.limit);
  }
  Stream stream(weights_of_cta(p), memory, barriers, Course{control.prompt - 1});
  check_in(p, watch, place, p.pass_tag);

  Decoder decoder(p, shared, stream, watch, lane_here, c);
  Sampler sampler = sampler_of(p, shared, watch, lane, c);
  sampler.configure();

  Progress now = {0, p.prompt[0], 0, kLength, 0};
  for (u32 tag = p.pass_tag + 1, sequence = p.exchange_tag;; tag += kPassTags, sequence += kNumSums + 1) {
    const int position = control.start + now.pass;
    decoder.embed(now.token, tag);
    for (int layer = 0; layer < kLayers; layer++) decoder.run(layer, position, tag, sequence);
    stream.skip_padding(kLayerPadding);
    if (now.pass + 1 >= control.prompt) {
      decoder.final(tag, sequence);
      decoder.head(tag, sampler.count);
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
