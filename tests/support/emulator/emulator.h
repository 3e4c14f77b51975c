// The interface between a kernel's code (port_host.h, kernel.cc) and emulator.cc, which runs its threads.
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

struct Wait {                  // what a fiber waits for, apart from it, since a round looks at those of all fibers
  const uint64_t* generation;  // null if the fiber can run
  uint64_t blocked_until;      // the fiber waits while the generation is this

  bool over() const { return !generation || *generation != blocked_until; }
};

struct Fiber {  // a thread of a kernel
  void* stack_pointer;
  void** main_stack;  // the stack pointer of the loop that runs the fibers
  char* shared;
  struct Group *warp, *block;
  Wait* wait;
  const void** reads;  // [kMostReads] of the weights' ring, which a bulk copy may still overtake
  int num_reads, thread, cta;
  bool ended;
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
  int size, arrived;
  uint64_t generation;
  uint32_t values[2][64];       // of shuffles, by the parity of the generation
  uint32_t matrices[2][64][6];  // registers of multiply_bytes
};

void yield();                 // lets others run
void meet(Group*);            // waits for all threads of the group
void read(const void* from);  // records a read of 16 bytes
void bulk_copy(void* to, const void* from, unsigned bytes, unsigned long long* barrier);

// kernel.cc describes its model's kernel in this form.
struct Kernel {
  int threads, warp_size, ring_bytes;
  void (*run)(const laneformer::gpu::Params&);      // one thread
  void (*read)(const laneformer::gpu::Params&);     // the kernel that reads all weights
  bool (*in_turn)(const laneformer::gpu::Params&);  // whether no CTA of this launch may wait for another
};

}  // namespace emulator
