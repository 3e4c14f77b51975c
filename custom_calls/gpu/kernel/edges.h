// Edges: how CTAs pass values to each other. All ops use these functions; within a launch CTAs synchronize in no other
// way.
//
// A value travels as a word of 8 bytes, a float32 and a tag, written and read whole with relaxed accesses. A word is
// valid once it carries the tag that the reader waits for, so words may arrive in any order. Tags count up and recur
// after 2^32 others, so words are never cleared.
//
// A board is the memory of one kind of edge. It may be written again once every reader has read it. No reader
// acknowledges that; it follows from the order of the edges. A CTA that has passed an edge of the residual stream has
// read words of all CTAs of its lane, because each of them owns channels of the stream. So all of them have reached
// this edge and have finished reading the boards of earlier edges. They may still be reading the words of this edge
// itself. Therefore two boards take turns for the residual stream, and one is enough for every other kind of edge. See
// docs/gpu.md.
//
// What layers keep between passes, such as caches, has no tags. Fences order it: one before a CTA publishes its packet
// at the end of a pass, and one after it has read all packets (sampling.h).
#pragma once

#include "model.h"
#include "numbers.h"
#include "params.h"

namespace laneformer {
namespace gpu {

LF_DEVICE u64 word_of(float value, u32 tag) { return (u64)tag << 32 | float_to_bits(value); }
LF_DEVICE float value_of(u64 word) { return bits_to_float((u32)word); }
LF_DEVICE bool arrived(u64 word, u32 tag) { return (u32)(word >> 32) == tag; }

// The word that ends a failed call: in the upper half its pass_tag plus the layer + 1 (the low bits of a pass_tag are
// 0), then 21 bits of what was waited for, 8 of the lane that waited, and 3 of Waits. It is the first word of the
// memory between lanes (Params::shared) on every device, and is reported to the host.
LF_DEVICE u64 failure_word(u32 tag, Waits where, int lane, int layer, int waited_for) {
  return (u64)(tag + layer + 1) << 32 | ((u32)waited_for << 11 | (u32)(lane << 3 | where));
}
LF_DEVICE bool has_failed(u64 word, u32 tag) { return (u32)(word >> 32) - tag < kPassTags; }

// Reports a failure to the host and to all devices, unless the call has failed already.
LF_COLD void fail(const Params& p, Waits where, int lane, int layer, int waited_for) {
  if (has_failed(load_word(p.shared[p.device]), p.pass_tag)) return;
  const u64 failure = failure_word(p.pass_tag, where, lane, layer, waited_for);
  p.host->failure = failure;
  fence_system();
  for (int d = 0; d < p.devices; d++) store_word(p.shared[d], failure);
  fence_system();  // before this CTA's packet, which ends the call in all others
}

// The watchdog of every wait for another CTA. A thread that times out reports that to all devices. From then on no
// thread waits, and the kernel ends with the pass without emitting its token.
class Watch {
 public:
  LF_DEVICE Watch(const Params& p, u64* abort, int lane)
      : p_(p), abort_(abort), lane_(lane), random_(cta() * 0x9e3779b9u + thread() + 1) {}

  int layer = -1;

  // Called after a read that found no valid word. Returns whether to read again.
  LF_DEVICE bool keep_waiting(u32& spins, Waits where, int waited_for) {
    if (ended_) return false;
    if (spins++ % 64 != 63) {  // the clock and the failure word are read every 64th time
      pause();
      return true;
    }
    if (has_failed(load_word(abort_), p_.pass_tag)) {
      ended_ = true;
      return false;
    }
    const u64 now = clock_ns();
    if (spins == 64) {
      began_ = now;
    } else if (now - began_ > p_.timeouts_ns[where == kAtCheckIn ? 0 : where == kAtLanding ? 1 : 2]) {
      ended_ = true;
      fail(p_, where, lane_, layer, waited_for);
      return false;
    }
    return true;
  }

  LF_DEVICE bool ended() const { return ended_; }

  // For tests: delays an edge by a random time.
  LF_DEVICE void delay() {
    if (p_.chaos_ns == 0) return;
    random_ ^= random_ << 13, random_ ^= random_ >> 17, random_ ^= random_ << 5;
    const u64 until = clock_ns() + random_ % p_.chaos_ns;
    while (clock_ns() < until) pause();
  }

 private:
  const Params& p_;
  u64* abort_;
  int lane_;
  u32 random_;
  bool ended_ = false;
  u64 began_ = 0;
};

// Waits for a word and returns its value.
LF_DEVICE float wait_for(const u64* word, u32 tag, Watch& watch, Waits where, int waited_for) {
  u64 v;
  for (u32 spins = 0; !arrived(v = load_word(word), tag);)
    if (!watch.keep_waiting(spins, where, waited_for)) break;
  return value_of(v);
}

// The boards of a pass's rows, `stride` words apart. Rows beyond the pass's last one have the last one's board.
template <int rows>
struct Boards {
  const u64* first;
  int stride, last;

  LF_DEVICE const u64* of(int row) const { return first + (i64)smaller(row, last) * stride; }
};
template <>
struct Boards<1> {
  const u64* first;

  LF_DEVICE Boards(const u64* board) : first(board) {}
  LF_DEVICE const u64* of(int) const { return first; }
};

// Each thread waits for n * per words of each row's board: out[m][v][i] and [i + 1] are the pair at word first +
// distance(v, i) of row m's board. Words from `end` on are 0; whole states that there are none. patient: polls the
// thread's first word alone until it is valid, because polling all words would take bandwidth from the weights.
template <bool whole, bool patient = true, int rows, int n, int per, class Distance>
LF_DEVICE void read_words(const Boards<rows>& boards, int first, int end, u32 tag, Distance distance,
                          float (&out)[rows][n][per], Watch& watch, Waits where) {
  static_assert(per % 2 == 0, "words are read in pairs");
  const u64* own = boards.of(0) + first;
  u32 spins = 0;
  if (patient && (!kSteps || where == kAtPacket) && (whole || first < end))  // words of earlier launches are valid
    while (!arrived(load_word(own), tag))
      if (!watch.keep_waiting(spins, where, first)) break;
  for (;;) {
    bool all = true;
    int missing = 0;
    LF_UNROLL for (int m = 0; m < rows; m++) {
      const u64* of_row = rows == 1 ? own : boards.of(m) + first;
      LF_UNROLL for (int v = 0; v < n; v++) {
        LF_UNROLL for (int i = 0; i < per; i += 2) {
          const int at = distance(v, i);
          if (whole || first + at < end) {  // boards have an even number of words
            const Words words = load_words(of_row + at);
            const bool both = whole || first + at + 1 < end;
            out[m][v][i] = value_of(words.a);
            out[m][v][i + 1] = both ? value_of(words.b) : 0.0f;
            if (!arrived(words.a, tag) || (both && !arrived(words.b, tag))) all = false, missing = first + at;
          } else {
            out[m][v][i] = out[m][v][i + 1] = 0;
          }
        }
      }
    }
    if (all || !watch.keep_waiting(spins, where, missing)) return;
  }
}
template <bool whole, bool patient = true, int n, int per, class Distance>
LF_DEVICE void read_words(const u64* board, int first, int end, u32 tag, Distance distance, float (&out)[n][per],
                          Watch& watch, Waits where) {
  read_words<whole, patient>(Boards<1>(board), first, end, tag, distance, reinterpret_cast<float (&)[1][n][per]>(out),
                             watch, where);
}

struct InOrder {
  LF_DEVICE int operator()(int i) const { return i; }
};

// Waits for n words and writes their values to shared memory, by all threads of the CTA: thread t has words t, t +
// threads, ... A sync_cta must follow. place(i): where word i is on the board; into(i): where its value goes in `out`.
template <int threads, class Place = InOrder, class Into = InOrder>
LF_DEVICE void gather(const u64* board, int n, u32 tag, float* out, Watch& watch, Waits where, Place place = {},
                      Into into = {}) {
  constexpr int each = 4;
  const int own = opaque(thread());
  for (int first = 0; first < n; first += threads * each) {
    float values[each];
    bool all;
    u32 spins = 0;
    do {
      all = true;
      u64 words[each] = {};  // uninitialised, they would take registers over all passes
      LF_UNROLL for (int i = 0; i < each; i++) {
        const int at = first + i * threads + own;
        if (at < n) words[i] = load_word(board + place(at));
      }
      LF_UNROLL for (int i = 0; i < each; i++) {
        values[i] = value_of(words[i]);
        all = all && (first + i * threads + own >= n || arrived(words[i], tag));
      }
    } while (!all && watch.keep_waiting(spins, where, first));
    LF_UNROLL for (int i = 0; i < each; i++) {
      const int at = first + i * threads + own;
      if (at < n) out[into(at)] = values[i];
    }
  }
}

}  // namespace gpu
}  // namespace laneformer
