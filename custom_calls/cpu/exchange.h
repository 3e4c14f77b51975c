// The lane exchange as GPUs do it, between threads: one-shot pushes into the receivers' memory, no acknowledgements, no
// locks.
//
// Every 8 bytes carry one float32 and a tag, and are written and read whole: a reader recognises arrived data by its
// tag alone, in any order, with relaxed accesses. Tags are sequence numbers that never repeat within 2^32 exchanges, so
// a slot needs no clearing and words of an ended call are never taken for data. A slot may be written again once every
// lane has read it, which the schedule guarantees for a ring of `ring_slots` slots: a lane that has received exchange q
// knows that its sender has issued q.
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

  // Reads what lane `from` sent to lane `to` under `tag`. Calls `idle(spins)` until it arrives; false ends the wait and
  // is the result.
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

// The times at which an exchange is issued and last read, in modules.
struct Exchange {
  int issued, last_read;
};

// Slots of the smallest ring that is safe without acknowledgements, for exchanges in order of issue. A lane that issues
// exchange s has read all that were due before; the latest of those, q, proves that every other lane has reached the
// time at which it issued q, and so has read all exchanges that were last due before that time.
inline int ring_slots(const std::vector<Exchange>& exchanges) {
  int slots = 1;
  for (size_t s = 0; s < exchanges.size(); s++) {
    int proven = -1;  // all lanes have reached this time
    for (size_t q = 0; q < s; q++)
      if (exchanges[q].last_read < exchanges[s].issued && exchanges[q].issued > proven) proven = exchanges[q].issued;
    for (size_t r = 0; r < s; r++)
      if (exchanges[r].last_read >= proven && (int)(s - r) + 1 > slots) slots = (int)(s - r) + 1;
  }
  return slots;
}

}  // namespace laneformer
