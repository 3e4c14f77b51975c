// Runs the threads of a kernel on the CPU. driver.cc calls laneformer_emulate for each launch. This file is compiled
// once and linked to the kernel of each model (kernel.cc or ptx/kernel.cc).
//
// A grid runs in rounds. In each round CTAs and warps take turns in random order, and copies complete at random. In its
// turn, a warp runs for a random number of passes, and in each pass each thread until it waits or yields. A run also
// checks that threads never all wait for each other, that no copy may overtake a read of its target, and that none is
// in flight at the end.
#include "emulator.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "params.h"

extern "C" const emulator::Kernel laneformer_kernel;

namespace emulator {

namespace {

// Ends with a jump, since a processor predicts that `ret` returns to the caller. The threads of a warp mostly continue
// at the same place.
extern "C" void laneformer_switch(void** from, void* to);
asm(R"(
.text
.globl laneformer_switch
.type laneformer_switch,@function
laneformer_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmp *%rcx
)");

struct Copy {
  void* to;
  const void* from;
  unsigned bytes;
  uint64_t* barrier;
};

// The contents of an mbarrier.
struct Barrier {
  uint64_t phase : 1;      // of its number, the lowest bit
  uint64_t expected : 15;  // arrivals of a phase
  uint64_t missing : 15;   // arrivals that this phase still waits for
  int64_t announced : 33;  // bytes announced and not yet copied; negative if copied first
};
static_assert(sizeof(Barrier) == 8);
constexpr uint64_t kUntouched = ~0ull;         // shared memory starts with all bits set
constexpr int64_t kMostBytes = (1 << 20) - 1;  // announced at once, by the PTX ISA

// The slots of a launch's fibers, kept for the next launch. Variables of a thread, because each device has its own
// thread of the host.
class Slots {
 public:
  Slots() = default;
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;
  ~Slots() { std::free(memory_); }

  // Makes room for `count` fibers.
  void resize(int count) {
    if (count > count_) {
      std::free(memory_);
      memory_ = (char*)std::aligned_alloc(kSlotBytes, (size_t)count * kSlotBytes);
      reads_.resize((size_t)count * kMostReads);
    }
    count_ = std::max(count_, count);
  }
  uintptr_t at(int i) { return (uintptr_t)memory_ + (uintptr_t)i * kSlotBytes; }
  Fiber& operator[](int i) { return *fiber_at(at(i)); }
  const void** reads(int i) { return &reads_[(size_t)i * kMostReads]; }

 private:
  char* memory_ = nullptr;
  int count_ = 0;
  std::vector<const void*> reads_;
};

thread_local Slots slots;
thread_local int num_threads = 0;  // of a CTA
thread_local std::vector<Copy> copies;
thread_local const laneformer::gpu::Params* parameters = nullptr;
thread_local bool reading = false;  // whether laneformer_read runs
thread_local uint64_t random_state = 1;

uint64_t random_bits() {
  random_state ^= random_state << 13, random_state ^= random_state >> 7, random_state ^= random_state << 17;
  return random_state;
}

// For tests: pauses one CTA once TOKENS tokens have been emitted, until the others have timed out
// (EMULATOR_STILL=CTA,TOKENS) or for good (EMULATOR_STILL=CTA,TOKENS,lost).
struct Still {
  int cta = -1, tokens = 0;
  bool lost = false;

  Still() {
    char word[8] = "";
    if (const char* value = std::getenv("EMULATOR_STILL"))
      if (std::sscanf(value, "%d,%d,%7s", &cta, &tokens, word) < 2)
        std::fprintf(stderr, "EMULATOR_STILL must be CTA,TOKENS or CTA,TOKENS,lost, got %s\n", value), std::abort();
    lost = word[0] != 0;
  }
  bool pauses(int c) const {
    const auto* host = parameters->host;
    return c == cta && !reading && host->count[0] >= tokens && (lost || host->failure == 0);
  }
};

// For tests: a CTA's first thread loses its N-th word (EMULATOR_LOST=CTA,N,word) or copy (EMULATOR_LOST=CTA,N,copy).
struct Lost {
  int cta = -1, left = 0;
  bool word = false;

  void read() {
    *this = {};
    char what[8] = "";
    const char* value = std::getenv("EMULATOR_LOST");
    if (!value) return;
    if (std::sscanf(value, "%d,%d,%7s", &cta, &left, what) < 3)
      std::fprintf(stderr, "EMULATOR_LOST must be CTA,N,word or CTA,N,copy, got %s\n", value), std::abort();
    word = what[0] == 'w';
  }
  bool loses(bool a_word) { return word == a_word && left-- == 1; }
};
thread_local Lost lost;
thread_local bool trapped = false;

// Takes the next thread of a pass.
Fiber* next_of(Group* warp) {
  const int lane = __builtin_ctzll(warp->pending);
  warp->pending &= warp->pending - 1;
  return fiber_at(warp->slots + lane * kSlotBytes);
}

// Continues with the pass of the thread's warp.
inline void leave(Fiber* self) {
  Group* const warp = self->warp;
  laneformer_switch(&self->stack_pointer, warp->pending ? next_of(warp)->stack_pointer : *self->main_stack);
}

inline void meet_all(Fiber* self, Group* group) {
  if (++group->arrived < group->size) {
    self->warp->ready &= ~self->bit;
    return leave(self);
  }
  group->arrived = 0;
  group->generation++;
  for (int w = 0; w < group->num_warps; w++) group->warps[w].ready = group->warps[w].all;
}

void body() {
  (reading ? laneformer_kernel.read : laneformer_kernel.run)(*parameters);
  Fiber* const fiber = self();
  fiber->warp->ready &= ~fiber->bit;
  fiber->block->ended++;
  leave(fiber);
}

[[noreturn]] void fail(const char* what) {
  std::fprintf(stderr, "%s\n", what);
  std::abort();
}

Barrier* barrier_at(uint64_t* place) {
  if (*place == kUntouched) fail("an mbarrier is used before it is initialized");
  return (Barrier*)place;
}

void end_phase(Barrier* barrier) {
  if (barrier->missing == 0 && barrier->announced == 0) barrier->missing = barrier->expected, barrier->phase ^= 1;
}

void complete(const Copy& copy) {
  std::memcpy(copy.to, copy.from, copy.bytes);
  Barrier* const barrier = barrier_at(copy.barrier);
  barrier->announced -= copy.bytes;
  if (barrier->missing == 0 && barrier->announced < 0) fail("more bytes are copied than were announced to an mbarrier");
  end_phase(barrier);
}

}  // namespace

void yield() {
  Fiber* const fiber = self();
  fiber->warp->yielded |= fiber->bit;
  leave(fiber);
}

void meet(Group* group) { meet_all(self(), group); }

uint32_t value_of(uint32_t value, int lane) {
  Fiber* const fiber = self();
  Group* const warp = fiber->warp;
  const int side = (int)(warp->generation & 1);
  warp->values[side][fiber->lane] = value;
  meet_all(fiber, warp);
  return warp->values[side][lane];
}

bool loses_word() { return lost.loses(true); }

void trap() {
  trapped = true;
  for (;;) yield();
}

void read(const void* from) {
  Fiber* const fiber = self();
  if (from < fiber->shared || from >= fiber->shared + laneformer_kernel.ring_bytes) return;
  if (fiber->num_reads == kMostReads) fail("a thread has read the ring too often without reads_done");
  fiber->reads[fiber->num_reads++] = from;
}

void barrier_init(uint64_t* place, unsigned arrivals) { *(Barrier*)place = {0, arrivals, arrivals, 0}; }

void arrive(uint64_t* place, unsigned bytes) {
  Barrier* const barrier = barrier_at(place);
  if (barrier->missing == 0) fail("more threads arrive at an mbarrier than it expects");
  if (barrier->announced + bytes > kMostBytes) fail("too many bytes are announced to an mbarrier");
  barrier->announced += bytes;
  barrier->missing--;
  end_phase(barrier);
}

bool passed(uint64_t* place, unsigned parity) { return barrier_at(place)->phase != (parity & 1); }

void bulk_copy(void* to, const void* from, unsigned bytes, uint64_t* barrier) {
  barrier_at(barrier);
  const auto inside = [&](const void* read) { return read >= to && read < (char*)to + bytes; };
  const int first = self()->cta * num_threads;
  for (int i = first; i < first + num_threads; i++)
    if (std::any_of(slots[i].reads, slots[i].reads + slots[i].num_reads, inside))
      fail("a bulk copy may overwrite data before it has been read");
  if (((uintptr_t)to | (uintptr_t)from | bytes) % 16) fail("a bulk copy is not aligned to 16 bytes");
  std::memset(to, 0xff, bytes);
  if (self()->careless && lost.loses(false)) return;
  copies.push_back({to, from, bytes, barrier});
}

}  // namespace emulator

// Runs a grid to its end. Returns 0, or 1 if all threads wait for each other, or 2 if copies are in flight at the end,
// or 3 if a thread has called `trap`.
extern "C" int laneformer_emulate(const laneformer::gpu::Params* params, int grid, int64_t shared_bytes,
                                  uint64_t seed) {
  using namespace emulator;
  const int threads = laneformer_kernel.threads, warp_size = laneformer_kernel.warp_size;
  parameters = params;
  random_state = seed * 0x9e3779b97f4a7c15ull + 1;
  copies.clear();
  trapped = false;
  lost.read();
  const int warps = threads / warp_size, count = grid * threads;
  num_threads = threads;
  slots.resize(count);
  Slots& fibers = slots;
  void* main_stack = nullptr;
  std::vector<Group> blocks(grid), warp_groups((size_t)grid * warps);
  std::vector<char*> shared(grid);
  for (int c = 0; c < grid; c++) {
    blocks[c] = {};
    blocks[c].size = threads, blocks[c].warps = &warp_groups[(size_t)c * warps], blocks[c].num_warps = warps;
    shared[c] = (char*)std::aligned_alloc(
        128, (size_t)(shared_bytes + 127) / 128 * 128);  // not more: a sanitizer detects accesses beyond
    std::memset(shared[c], 0xff, shared_bytes);
    for (int w = 0; w < warps; w++) {
      Group& warp = blocks[c].warps[w];
      warp = {};
      warp.size = warp_size, warp.warps = &warp, warp.num_warps = 1;
      warp.all = warp.ready = ~0ull >> (64 - warp_size);
      warp.slots = fibers.at(c * threads + w * warp_size);
    }
  }
  for (int i = 0; i < count; i++) {
    Fiber& f = fibers[i];
    const int c = i / threads, t = i % threads;
    f = {};
    f.main_stack = &main_stack;
    f.shared = shared[c], f.shared_bytes = shared_bytes;
    f.thread = t, f.lane = t % warp_size, f.cta = c;
    f.warp = &blocks[c].warps[t / warp_size], f.block = &blocks[c];
    f.bit = 1ull << f.lane;
    f.careless = c == lost.cta && t == 0 && !reading;
    f.reads = fibers.reads(i);
    void** top = (void**)((uintptr_t)&f & ~(uintptr_t)15);
    *--top = nullptr;  // a function's stack starts 8 bytes off a multiple of 16
    *--top = (void*)body;
    for (int r = 0; r < 6; r++) *--top = nullptr;
    f.stack_pointer = top;
  }
  std::vector<int> asleep((size_t)grid * warps);  // rounds for which a warp still sleeps
  // Whether CTAs run one after the other, because none may wait for another.
  const bool alone = !reading && laneformer_kernel.in_turn(*params);
  const Still still;
  int running = count, result = 0;
  for (uint64_t idle = 0; running > 0;) {
    bool moved = false;
    // A round starts at any CTA, and a CTA at any of its warps, in either direction. Some CTAs skip a round, and some
    // warps sleep for up to 16 rounds, in which the CTA's other warps run as far as a barrier lets them.
    const int first = alone ? 0 : (int)(random_bits() % (uint64_t)grid);
    for (int n = 0; n < grid; n++) {
      const int c = (first + n) % grid;
      if (alone && c > 0 && blocks[c - 1].ended < threads) break;
      if (!alone && idle < 100 && still.pauses(c)) {  // after that only this CTA is left
        if (!still.lost) continue;
        for (int w = 0; w < warps; w++) blocks[c].warps[w].ready = 0;
        running -= threads - blocks[c].ended;
        blocks[c].ended = threads;
      }
      if (random_bits() % 8 == 0) continue;
      const int first_warp = (int)(random_bits() % (uint64_t)warps), step = random_bits() % 2 ? 1 : warps - 1;
      for (int k = 0, w = first_warp; k < warps; k++, w = (w + step) % warps) {
        int& rounds = asleep[c * warps + w];
        if (rounds == 0 && random_bits() % 16 == 0) rounds = 1 << random_bits() % 5;
        if (rounds > 0) {
          rounds--;
          continue;
        }
        Group& warp = blocks[c].warps[w];
        warp.yielded = 0;
        const int ended = blocks[c].ended;
        for (int passes = 1 << random_bits() % 7; passes > 0; passes--) {
          warp.pending = warp.ready & ~warp.yielded;
          if (!warp.pending) break;
          laneformer_switch(&main_stack, next_of(&warp)->stack_pointer);
          moved = true;
        }
        running -= blocks[c].ended - ended;
      }
    }
    for (size_t i = 0; i < copies.size();) {
      if (random_bits() % 2) {
        i++;
        continue;
      }
      // Copies complete in any order, because a slot has one at a time.
      complete(copies[i]);
      copies[i] = copies.back();
      copies.pop_back();
      moved = true;
    }
    if (trapped) {
      result = 3;
      break;
    }
    idle = moved ? 0 : idle + 1;
    if (idle > 1000) {
      result = 1;
      break;
    }
  }
  if (result == 0 && !copies.empty()) result = 2;
  for (char* s : shared) std::free(s);
  return result;
}

extern "C" int laneformer_emulate_read(const laneformer::gpu::Params* params, int grid, int64_t shared_bytes,
                                       uint64_t seed) {
  emulator::reading = true;
  const int result = laneformer_emulate(params, grid, shared_bytes, seed);
  emulator::reading = false;
  return result;
}
