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

struct Fiber {  // a thread of a kernel
  void* stack_pointer;
  char* stack;
  char* shared;
  int thread, cta;
  bool ended;
  struct Group *warp, *block;
  uint64_t blocked_until;  // the fiber waits while waits->generation is this
  Group* waits;
  int num_reads;
  const void* reads[512];  // of the weights' ring, which a bulk copy may still overtake
};

struct Group {  // threads that synchronize: a warp or a CTA
  int size, arrived;
  uint64_t generation;
  uint32_t values[2][64];       // of shuffles, by the parity of the generation
  uint32_t matrices[2][64][6];  // registers of multiply_bytes
};

extern __thread Fiber* self;  // the running thread
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
