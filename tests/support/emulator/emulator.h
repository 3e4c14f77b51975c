// The interface between a kernel's code (port_host.h and kernel.cc, or ptx/) and emulator.cc, which runs its threads.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace laneformer {
namespace gpu {
struct Params;
}
}  // namespace laneformer

namespace emulator {

constexpr int kMostReads = 512;

struct Fiber {  // a thread of a kernel
  void* stack_pointer;
  void** main_stack;  // the stack pointer of the loop that runs the fibers
  char* shared;
  int64_t shared_bytes;
  struct Group *warp, *block;
  uint64_t bit;        // of the thread among those of its warp
  const void** reads;  // [kMostReads] of the weights' ring, which a bulk copy may still overtake
  int num_reads, thread, lane, cta;
  bool careless;  // loses a word or a copy (EMULATOR_LOST)
};

// Each fiber has a slot of kSlotBytes, aligned to its size: its Fiber, and below it its stack. A fiber thus finds
// itself by its stack pointer. Where the Fiber lies differs from slot to slot, since a cache keeps few lines whose
// addresses differ by multiples of kSlotBytes.
constexpr uintptr_t kSlotBytes = 64 << 10, kFiberBytes = 5 * 64;  // an odd number of lines
static_assert(sizeof(Fiber) <= kFiberBytes, "a fiber must fit");
inline Fiber* fiber_at(uintptr_t slot) {
  return (Fiber*)(slot + kSlotBytes - kFiberBytes * (1 + slot / kSlotBytes % 64));
}
inline Fiber* self() {
  uintptr_t stack_pointer;
  asm("movq %%rsp, %0" : "=r"(stack_pointer));
  return fiber_at(stack_pointer & ~(kSlotBytes - 1));
}

struct Group {  // threads that synchronize: a warp or a CTA
  int size, arrived, ended;
  uint64_t generation;
  Group* warps;  // the warps of the group
  int num_warps;
  // Of a warp, by the bits of its threads: those that do not wait for others, those that have yielded in this turn, and
  // those that are still to run in this pass.
  uint64_t all, ready, yielded, pending;
  uintptr_t slots;              // of a warp: the slot of its first thread
  uint32_t values[2][64];       // of shuffles, by the parity of the generation
  uint32_t matrices[2][64][6];  // registers of multiply_bytes
};

#pragma GCC visibility push(hidden)           // calls that need no table of addresses
void yield();                                 // lets others run
void meet(Group*);                            // waits for all threads of the group
uint32_t value_of(uint32_t value, int lane);  // of a thread of the warp; all threads call it with their own value
void read(const void* from);                  // records a read of 16 bytes
bool loses_word();                            // of a careless thread: whether the word that it stores is lost
[[noreturn]] void trap();                     // ends the launch with an error

// Barriers in shared memory (mbarriers). A phase ends when all threads that the barrier expects have arrived and all
// bytes that they announced have been copied. bulk_copy completes its bytes on a barrier, late.
void barrier_init(uint64_t* barrier, unsigned arrivals);
void arrive(uint64_t* barrier, unsigned bytes);   // announces the bytes first
bool passed(uint64_t* barrier, unsigned parity);  // whether the phase of this parity has ended
void bulk_copy(void* to, const void* from, unsigned bytes, uint64_t* barrier);
#pragma GCC visibility pop

// A model's kernel.
struct Kernel {
  int threads, warp_size, ring_bytes;
  void (*run)(const laneformer::gpu::Params&);      // one thread
  void (*read)(const laneformer::gpu::Params&);     // the kernel that reads all weights
  bool (*in_turn)(const laneformer::gpu::Params&);  // whether no CTA of this launch may wait for another
};

}  // namespace emulator
