// The end of a module, where the schedule adds each lane's own outputs and sums over the lanes to the streams. Lanes
// share memory or, in a session with one thread per lane, send each other messages as GPUs do: a sender writes into the
// receivers' memory, without locks or acknowledgements (Mailboxes). api.cc exports `ring_slots`.
//
// Each word of 8 bytes has one float32 and a tag, and is written and read whole. So a word is valid once it carries the
// tag that the reader waits for: words may arrive in any order, and relaxed accesses suffice. A tag is a sequence
// number that does not repeat within 2^32 exchanges, so slots need no clearing, and a word of an ended call is never
// taken for data.
//
// Invariant: a slot is written again only after every lane has read it. The schedule guarantees this for a ring of
// `ring_slots` slots, because receiving exchange q proves that its sender has issued q.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace laneformer {

class Mailboxes {
 public:
  Mailboxes(int lanes, int slots, int64_t floats)
      : lanes_(lanes),
        slots_(slots),
        floats_(floats),
        words_(new std::atomic<uint64_t>[(size_t)lanes * lanes * slots * floats]()) {}

  int slots() const { return slots_; }

  // Lane `from` sends n floats to every other lane under `tag`.
  void push(int from, uint32_t tag, const float* data, int64_t n) {
    for (int to = 0; to < lanes_; to++) {
      if (to == from) continue;
      std::atomic<uint64_t>* slot = at(to, from, tag);
      for (int64_t i = 0; i < n; i++) {
        uint32_t bits;
        std::memcpy(&bits, data + i, 4);
        slot[i].store((uint64_t)tag << 32 | bits, std::memory_order_relaxed);
      }
    }
  }

  // Reads the n floats that lane `from` sent to lane `to` under `tag`. Calls `idle(spins)` while a word has not
  // arrived; if that returns false, stops and returns false.
  template <class Idle>
  bool pull(int to, int from, uint32_t tag, float* data, int64_t n, Idle idle) {
    const std::atomic<uint64_t>* slot = at(to, from, tag);
    for (int64_t i = 0; i < n; i++) {
      uint64_t word = slot[i].load(std::memory_order_relaxed);
      for (int64_t spins = 0; (uint32_t)(word >> 32) != tag; word = slot[i].load(std::memory_order_relaxed))
        if (!idle(spins++)) return false;
      const uint32_t bits = (uint32_t)word;
      std::memcpy(data + i, &bits, 4);
    }
    return true;
  }

 private:
  std::atomic<uint64_t>* at(int to, int from, uint32_t tag) {
    return words_.get() + (((size_t)to * lanes_ + from) * slots_ + tag % slots_) * floats_;
  }

  int lanes_, slots_;
  int64_t floats_;
  std::unique_ptr<std::atomic<uint64_t>[]> words_;
};

// The times of the schedule, counted in modules, at which an exchange is issued and last read.
struct Exchange {
  int issued, last_read;
};

// The number of slots of the smallest ring that is safe without acknowledgements, for exchanges in order of issue. A
// lane that issues exchange s has already read all exchanges whose last read is before that time. The one of these that
// was issued last, q, proves that every other lane has reached the time at which q is issued, and so has read all
// exchanges whose last read is before the issue of q.
inline int ring_slots(const std::vector<Exchange>& exchanges) {
  int slots = 1;
  for (size_t s = 0; s < exchanges.size(); s++) {
    int proven = -1;  // a time that all lanes have reached
    for (size_t q = 0; q < s; q++)
      if (exchanges[q].last_read < exchanges[s].issued && exchanges[q].issued > proven) proven = exchanges[q].issued;
    for (size_t r = 0; r < s; r++)
      if (exchanges[r].last_read >= proven && (int)(s - r) + 1 > slots) slots = (int)(s - r) + 1;
  }
  return slots;
}

class Worker;

// A worker's part in the schedule. Worker::step calls it around each module.
//
// Invariant: a sum adds the lanes' shares in the order of the lanes, whichever worker computes it and however the
// shares arrive. So the bits are the same with shared memory and with messages.
class LaneExchange {
 public:
  explicit LaneExchange(Worker&);

  void begin_pass();
  void begin_module(int module);  // keeps what a sum reads of the streams as they are now
  void end_module(int module);    // when the worker has written its output
  void apply(int time);           // applies the events that the schedule has at this time to the streams

  // Messages, which the head exchanges too.
  float* message(int position);  // [hidden_size]: what `post` sends and `fetch` receives; sums are computed here, too
  uint32_t head_tag() const;     // of the head's messages in this pass
  void post(uint32_t tag, int64_t floats);  // sends the first floats of the message to all other lanes
  // Receives them from a lane. Throws Stopped after the session's timeout or another failure.
  void fetch(int from, uint32_t tag, int64_t floats);

 private:
  void keep_streams(int payload);
  float* kept_stream(int payload, int lane, int position) const;
  const float* share_of(int payload, int lane, int position, float* space);
  const float* total(int payload);
  void send(int module);

  Worker& w_;
  std::vector<uint32_t> module_points_;  // by module: the point that a worker reaches once it has written its output
  uint32_t tags_ = 1, pass_tags_ = 1;    // by message: the next free tag, the first tag of this pass
  std::vector<float> total_;             // [kBlock][hidden_size]: a sum over the lanes, or a message
  std::vector<float> share_;             // [lanes][hidden_size]: the lanes' shares of a sum
  std::vector<const float*> added_;      // parts of a sum
  std::vector<float> factors_;           // on these parts
  std::vector<float> received_;          // by message: [sums][kBlock][hidden_size]
  std::vector<uint8_t> has_;             // by message: which sums are received
};

}  // namespace laneformer
