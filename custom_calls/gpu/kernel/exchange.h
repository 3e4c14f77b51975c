// The lane exchange: one-shot pushes into the receivers' memory, fire and forget. Every 8 bytes carry their own tag, so
// that data is recognised by itself, in any order, and 8 bytes are written and read whole on every machine. CTA c of a
// lane talks to CTA c of the others.
//
// A slot of the ring is written again without acknowledgement: a lane that has received exchange q from another one
// knows that this one had issued q, and so had read what was due before. custom_calls/cpu/exchange.h computes how many
// slots a schedule needs for that (ring_slots). Sequence numbers continue from call to call and recur after 2^32, so an
// ended call leaves nothing behind that could be taken for data.
#pragma once

#include "edges.h"

namespace laneformer {
namespace gpu {

// Memory of each device: [slots][lanes][width] words. slots: a power of two, so that sequence numbers may wrap around.
template <int lanes, int slots, int width>
struct Exchange {
  static_assert((slots & (slots - 1)) == 0, "sequence numbers wrap around");
  static constexpr i64 kWords = (i64)slots * lanes * width;

  LF_DEVICE static i64 at(u32 sequence, int lane, int row) {
    return ((i64)(sequence % slots) * lanes + lane) * width + row;
  }

  // One value of a lane, to all devices.
  LF_DEVICE static void push(const Params& p, i64 base, u32 sequence, int lane, int row, float value) {
    const u64 word = word_of(value, sequence);
    for (int d = 0; d < p.devices; d++) store_word(p.shared[d] + base + at(sequence, lane, row), word);
  }

  // The values of all lanes, which may have arrived long ago.
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
      if (missing < 0 || !watch.keep_waiting(spins, where, missing)) return;
    }
  }
};

}  // namespace gpu
}  // namespace laneformer
