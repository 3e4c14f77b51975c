// The exchange between lanes, on one device or several. Residual and Decoder push a lane's values into the memory of
// every device, and later pull the values of all lanes from the memory of their own device. Values travel as the words
// of edges.h, whose tag is the sequence number of the exchange: they may arrive in any order. CTA c of a lane exchanges
// with CTA c of the other lanes, which own the same channels.
//
// Exchange q is in slot q % slots of a ring, and a slot is written again without an acknowledgement. This is right
// because exchange q from another lane, once received, shows that the other lane had issued q, and so had read all
// exchanges that were due before q. custom_calls/cpu/exchange.h computes how many slots a schedule needs for that
// (ring_slots). Sequence numbers continue from call to call and recur after 2^32, so words of an ended call are never
// taken for data.
#pragma once

#include "edges.h"

namespace laneformer {
namespace gpu {

// The ring in the memory of each device: [slots][lanes][width] words.
template <int lanes, int slots, int width>
struct Exchange {
  static_assert((slots & (slots - 1)) == 0, "slots must be a power of two, because sequence numbers wrap around");
  static constexpr i64 kWords = (i64)slots * lanes * width;

  LF_DEVICE static i64 at(u32 sequence, int lane, int row) {
    return ((i64)(sequence % slots) * lanes + lane) * width + row;
  }

  // Sends one value of a lane to all devices. base: the ring's first word in Params::shared.
  LF_DEVICE static void push(const Params& p, i64 base, u32 sequence, int lane, int row, float value) {
    const u64 word = word_of(value, sequence);
    for (int d = 0; d < p.devices; d++) store_word(p.shared[d] + base + at(sequence, lane, row), word);
  }

  // Waits for the values of all lanes, which may have arrived long before. memory: the ring on this device.
  LF_DEVICE static void pull(const u64* memory, u32 sequence, int row, float (&values)[lanes], Watch& watch,
                             Waits where) {
    u32 spins = 0;
    for (;;) {
      u64 words[lanes];
      LF_UNROLL for (int lane = 0; lane < lanes; lane++) words[lane] = load_word(memory + at(sequence, lane, row));
      int missing = -1;
      LF_UNROLL for (int lane = 0; lane < lanes; lane++) {
        values[lane] = value_of(words[lane]);
        if (!arrived(words[lane], sequence)) missing = lane;
      }
      if (missing < 0) return;
      if (!watch.keep_waiting(spins, where, missing, memory + at(sequence, missing, row), sequence)) return;
    }
  }
};

}  // namespace gpu
}  // namespace laneformer
