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

// The spare CTA of a device (custom_calls/gpu/variants.py) follows all lanes' CTAs. It makes the same passes without
// their ops and writes the device's results; otherwise the first CTA does.
LF_DEVICE bool is_spare() { return kSpares > 0 && cta() == kLanesHere * kCtas; }
LF_DEVICE bool is_leader() { return kSpares > 0 ? is_spare() : cta() == 0; }

// The word that ends a failed call: in the upper half its pass_tag plus the layer + 1 (the low bits of a pass_tag are
// 0), then 20 bits of what was waited for, 8 of the lane that waited, and 4 of Waits. It is the first word of the
// memory between lanes (Params::shared) on every device, and is reported to the host.
LF_DEVICE u64 failure_word(u32 tag, Waits where, int lane, int layer, int waited_for) {
  return (u64)(tag + layer + 1) << 32 | ((u32)waited_for << 12 | (u32)(lane << 4 | where));
}
LF_DEVICE bool has_failed(u64 word, u32 tag) { return (u32)(word >> 32) - tag < kPassTags; }

// Where a thread is in the call, for reports of failures.
struct Whereabouts {
  int lane, layer, op;
};

// Ends a call in which a thread gave up to wait. Records what this CTA waits for, unless another of its threads has
// done so in this call, and reports the failure to the host and to all devices, unless the call has failed already.
// word: what it waits for, or null; its upper half is a tag.
LF_COLD void fail(const Params& p, Whereabouts at, Waits where, int waited_for, const u64* word, u32 tag) {
  if (p.stuck && exchange_word(p.shared[p.device] + kClaimsAt + cta(), p.pass_tag) != p.pass_tag) {
    const u32 seen = word ? (u32)(load_word(word) >> 32) : 0;
    const int c = cta() - (at.lane - p.first_lane) * kCtas;
    p.stuck[cta()] = {p.pass_tag, where, at.lane, c, at.layer, at.op, waited_for, tag, seen, clock_ns()};
    fence_system();
  }
  if (has_failed(load_word(p.shared[p.device]), p.pass_tag)) return;
  const u64 failure = failure_word(p.pass_tag, where, at.lane, at.layer, waited_for);
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

  int layer = -1, op = -1;

  // Called after a read that found no valid word. word: the one that is missing, or another 8 bytes whose upper half is
  // its tag. Returns whether to read again.
  LF_DEVICE bool keep_waiting(u32& spins, Waits where, int waited_for, const u64* word, u32 tag) {
    if (ended_) return false;
    if (spins++ % 64 != 63) {  // the clock and the failure word are read every 64th time
      pause();
      return true;
    }
    began_ = look(p_, abort_, spins == 64 ? 0 : began_, whereabouts(), where, waited_for, word, tag);
    ended_ = began_ == 0;
    return !ended_;
  }

  LF_DEVICE bool ended() const { return ended_; }
  LF_DEVICE const Params& params() const { return p_; }
  LF_DEVICE Whereabouts whereabouts() const { return {lane_, layer, op}; }

  // For tests: delays an edge by a random time.
  LF_DEVICE void delay() {
    if (p_.chaos_ns == 0) return;
    random_ ^= random_ << 13, random_ ^= random_ >> 17, random_ ^= random_ << 5;
    const u64 until = clock_ns() + random_ % p_.chaos_ns;
    while (clock_ns() < until) pause();
  }

 private:
  // The rest of keep_waiting. began: the time of the wait's first look, or 0. Returns that time, or 0 to give up.
  LF_OUTLINED u64 look(const Params& p, const u64* abort, u64 began, Whereabouts at, Waits where, int waited_for,
                       const u64* word, u32 tag) {
    const u64 now = clock_ns();
    const bool failed = has_failed(load_word(abort), p.pass_tag);
    if (!failed && began == 0) return now;
    if (!failed && now - began <= p.timeouts_ns[where == kAtCheckIn ? 0 : where == kAtLanding ? 1 : 2]) return began;
    fail(p, at, where, waited_for, word, tag);
    return 0;
  }

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
    if (!watch.keep_waiting(spins, where, waited_for, word, tag)) break;
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
      if (!watch.keep_waiting(spins, where, first, own, tag)) break;
  for (;;) {
    bool all = true;
    int missing = 0;
    const u64* board = own;  // of the missing word
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
            if (!arrived(words.a, tag) || (both && !arrived(words.b, tag)))
              all = false, missing = first + at + arrived(words.a, tag), board = of_row;
          } else {
            out[m][v][i] = out[m][v][i + 1] = 0;
          }
        }
      }
    }
    if (all || !watch.keep_waiting(spins, where, missing, board + missing - first, tag)) return;
  }
}
template <bool whole, bool patient = true, int n, int per, class Distance>
LF_DEVICE void read_words(const u64* board, int first, int end, u32 tag, Distance distance, float (&out)[n][per],
                          Watch& watch, Waits where) {
  read_words<whole, patient>(Boards<1>(board), first, end, tag, distance, reinterpret_cast<float (&)[1][n][per]>(out),
                             watch, where);
}

// Threes: boards of the variant "triples", on which 16 bytes are three values and a tag. Each CTA that writes to such a
// board has `own` channels, which begin at the start of a line of 16 bytes.
template <int own>
struct Threes {
  static constexpr int kLines = (own + 2) / 3;  // of a CTA

  LF_DEVICE static int line_of(int channel) { return channel / own * kLines + channel % own / 3; }
  // The first of a line's channels, and the end of its CTA's channels.
  LF_DEVICE static int first_of(int line) { return line / kLines * own + line % kLines * 3; }
  LF_DEVICE static int end_of(int line) { return (line / kLines + 1) * own; }

  LF_DEVICE static float value_of(const Words& line, int i) {
    return bits_to_float(i == 0 ? (u32)line.a : i == 1 ? (u32)(line.a >> 32) : (u32)line.b);
  }
  LF_DEVICE static u64* at(u64* board, int channel) { return board + 2 * (i64)line_of(channel); }
  LF_DEVICE static const u64* at(const u64* board, int channel) { return board + 2 * (i64)line_of(channel); }

  // Publishes a CTA's channels, of which there are `count`, from `first` on, a multiple of `own`. value(r): channel
  // first + r. All threads of the CTA call it.
  template <class Value>
  LF_DEVICE static void publish(u64* board, int first, int count, u32 tag, Value value) {
    for (int from = 0; from < 4 * kLines;
         from += kWarps * kWarpSize) {  // four threads to a line, the last of them idle
      const int i = from + opaque(thread()), r = i / 4 * 3 + i % 4;
      const float v = i % 4 < 3 && r < count ? value(r) : 0.0f;
      const u32 second = shuffle_bits(float_to_bits(v), 1), third = shuffle_bits(float_to_bits(v), 2);
      if (i % 4 == 0 && r < count)
        store_line(at(board, first + r), {(u64)second << 32 | float_to_bits(v), (u64)tag << 32 | third});
    }
  }

  // Waits for a channel and returns its value.
  LF_DEVICE static float wait_for(const u64* board, int channel, u32 tag, Watch& watch, Waits where) {
    const u64* line = at(board, channel);
    Words v;
    for (u32 spins = 0; !arrived((v = load_line(line)).b, tag);)
      if (!watch.keep_waiting(spins, where, channel, line + 1, tag)) break;
    return value_of(v, channel % own % 3);
  }

  // Each warp waits for n channels from `first` on, a multiple of n, below `end`, and writes them to its n floats of
  // shared memory. whole: none of the n is beyond the end. patient: as in read_words.
  template <int n, bool whole>
  LF_DEVICE static void bring(const u64* board, int first, int end, u32 tag, float* staged, Watch& watch, Waits where) {
    constexpr bool even = own % 3 == 0 && n % 3 == 0;  // parts begin and end with lines
    constexpr int most = even           ? n / 3
                         : own % 3 == 0 ? n / 3 + 2
                                        : (n / own + 2) * kLines,
                  each = (most + kWarpSize - 1) / kWarpSize;
    const int count = whole ? n : smaller(n, end - first), begin = line_of(first), lane = opaque(warp_lane()),
              lines = whole && even ? most
                      : count > 0   ? line_of(first + count - 1) + 1 - begin
                                    : 0;
    const u64* own_line = board + 2 * (i64)(begin + lane);
    const auto wait = [&](u32& spins, int line) {
      return watch.keep_waiting(spins, where, first_of(begin + lane + line), own_line + 2 * line + 1, tag);
    };
    sync_warp();  // all threads have read what was there
    u32 spins = 0;
    if (!kSteps && lane < lines)  // words of earlier launches are valid
      while (!arrived(load_line(own_line).b, tag) && wait(spins, 0)) continue;
    Words found[each];
    for (int missing = 0; missing >= 0;) {
      missing = -1;
      LF_UNROLL for (int i = 0; i < each; i++) {
        if (lane + i * kWarpSize >= lines) continue;
        found[i] = load_line(own_line + 2 * i * kWarpSize);
        if (!arrived(found[i].b, tag)) missing = i * kWarpSize;
      }
      if (missing >= 0 && !wait(spins, missing)) break;
    }
    LF_UNROLL for (int i = 0; i < each; i++) {
      const int line = lane + i * kWarpSize, channel = even ? first + 3 * line : first_of(begin + line);
      if (line >= lines) continue;
      LF_UNROLL for (int k = 0; k < 3; k++) {
        const int at = even ? 3 * line + k : channel + k - first;
        const bool inside =
            even ? whole || at < count : at >= 0 && at < count && (own % 3 == 0 || channel + k < end_of(begin + line));
        if (inside) staged[at] = value_of(found[i], k);
      }
    }
    sync_warp();
  }
};

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
    int missing = 0;
    do {
      all = true;
      u64 words[each] = {};  // uninitialised, they would take registers over all passes
      LF_UNROLL for (int i = 0; i < each; i++) {
        const int at = first + i * threads + own;
        if (at < n) words[i] = load_word(board + place(at));
      }
      LF_UNROLL for (int i = 0; i < each; i++) {
        values[i] = value_of(words[i]);
        const int at = first + i * threads + own;
        if (at < n && !arrived(words[i], tag)) all = false, missing = at;
      }
    } while (!all && watch.keep_waiting(spins, where, missing, board + place(missing), tag));
    LF_UNROLL for (int i = 0; i < each; i++) {
      const int at = first + i * threads + own;
      if (at < n) out[into(at)] = values[i];
    }
  }
}

}  // namespace gpu
}  // namespace laneformer
