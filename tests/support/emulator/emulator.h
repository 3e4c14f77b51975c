// What a kernel's code (port_host.h, kernel.cc) and emulator.cc, which runs its threads, have in common.
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

struct Fiber {
  void* stack_pointer;
  char* stack;
  char* shared;
  int thread, cta;
  bool ended;
  struct Group *warp, *block;
  uint64_t blocked_until;  // generation of `waits` that it waits for
  Group* waits;
  int num_reads;
  const void* reads[512];  // that a bulk copy may still overtake
};

struct Group {  // threads that meet
  int size, arrived;
  uint64_t generation;
  uint32_t values[2][64];
  uint32_t matrices[2][64][6];  // registers of multiply_bytes
};

extern __thread Fiber* self;  // that runs
void yield();                 // lets others run
void meet(Group*);            // waits for all of the group
void read(const void* from);  // 16 bytes
void bulk_copy(void* to, const void* from, unsigned bytes, unsigned long long* barrier);

// What kernel.cc says of its model's kernel.
struct Kernel {
  int threads, warp_size, ring_bytes;
  void (*run)(const laneformer::gpu::Params&);      // of a thread of a CTA
  void (*read)(const laneformer::gpu::Params&);     // the kernel that reads all weights
  bool (*in_turn)(const laneformer::gpu::Params&);  // whether no CTA of this launch may wait for another
};

}  // namespace emulator
