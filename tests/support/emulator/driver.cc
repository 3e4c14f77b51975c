// A CUDA driver whose devices are emulated on the CPU, for tests, in place of libcuda.so.1: the functions that
// custom_calls/gpu/host/driver.cc loads. A module's image is the path of a library made from kernel.cc and emulator.cc.
// A launch runs the kernel to its end on the calling thread.
//
// Environment variables: EMULATOR_SEED (of the order of threads), EMULATOR_MULTIPROCESSORS (132), EMULATOR_PEERS (0: no
// peer access).
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "params.h"

namespace {

constexpr int kDevices = 8;
using Emulate = int (*)(const void*, int, int64_t, uint64_t);
std::atomic<uint64_t> launches{0};
std::atomic<int64_t> allocations{0};
std::atomic<int> running{0};      // kernels
std::atomic<int64_t> delayed{0};  // calls for which a real driver may wait for kernels that were running

// Functions that a real driver may delay until running kernels have ended call this.
void may_wait() { delayed += running > 0; }

// A launch of a graph. A stream is the list of the launches that it records.
struct Recorded {
  void* function;
  unsigned grid, shared;
  laneformer::gpu::Params params;
};
using Graph = std::vector<Recorded>;

struct Config {  // CUlaunchConfig
  unsigned grid[3], block[3], shared;
  void* stream;
  const void* attributes;
  unsigned num_attributes;
};

struct Handle {  // CUipcMemHandle
  char bytes[64];
};

// A device's memory is a file without a name, which other processes can open. It exists while any process has it open.
struct Memory {
  int process, file;
  size_t bytes;
};
static_assert(sizeof(Memory) <= sizeof(Handle), "a handle must have room for Memory");
std::mutex memory_lock;
auto& memories =
    *new std::map<uint64_t, Memory>;  // by address, own and opened memory; never freed: sessions may end later

int map(uint64_t* address, const Memory& memory) {
  void* mapped = mmap(nullptr, memory.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.file, 0);
  if (mapped == MAP_FAILED) return 1;
  *address = (uint64_t)mapped;
  allocations++;
  const std::lock_guard<std::mutex> lock(memory_lock);
  memories[*address] = memory;
  return 0;
}

int unmap(uint64_t address) {
  const std::lock_guard<std::mutex> lock(memory_lock);
  const auto found = memories.find(address);
  if (found == memories.end()) return 1;
  allocations--;
  munmap((void*)address, found->second.bytes);
  close(found->second.file);
  memories.erase(found);
  return 0;
}

int number(const char* variable, int otherwise) {
  const char* value = std::getenv(variable);
  return value ? std::atoi(value) : otherwise;
}

std::mutex loaded_lock;
auto& loaded = *new std::set<void*>;  // functions with code on the device; others are loaded when they are launched

int load(void* function) {
  const std::lock_guard<std::mutex> lock(loaded_lock);
  if (loaded.insert(function).second) may_wait();
  return 0;
}

int launch(void* function, unsigned grid, unsigned shared, const void* params) {
  load(function);
  running++;
  const int result =
      ((Emulate)function)(params, (int)grid, shared, (uint64_t)number("EMULATOR_SEED", 1) + 1000 * launches++);
  running--;
  if (result)
    std::fprintf(stderr, "the emulated kernel %s\n",
                 result == 1   ? "is deadlocked"
                 : result == 2 ? "ended with bulk copies in flight"
                               : "has trapped");
  return result;
}

}  // namespace

extern "C" {

int cuGetErrorString(int, const char** text) {
  *text = "an error of the emulated driver";
  return 0;
}
int cuInit(unsigned) { return 0; }
int cuDeviceGetCount(int* count) {
  *count = kDevices;
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 16 ? number("EMULATOR_MULTIPROCESSORS", 132) : 232448;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = (void*)(intptr_t)(device + 1);
  return 0;
}
int cuCtxSetCurrent(void* context) { return context == nullptr; }
int cuModuleLoadData(void** module, const void* image) {
  may_wait();
  *module = dlopen((const char*)image, RTLD_NOW | RTLD_LOCAL);
  if (!*module) std::fprintf(stderr, "%s\n", dlerror());
  return *module == nullptr;
}
int cuModuleUnload(void*) { return 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function =
      dlsym(module, std::strcmp(name, "laneformer_read") == 0 ? "laneformer_emulate_read" : "laneformer_emulate");
  return *function == nullptr;
}
int cuFuncLoad(void* function) { return load(function); }
int cuFuncSetAttribute(void*, int, int) { return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* ctas, void*, int, size_t) {
  *ctas = 1;
  return 0;
}
int cuMemAlloc_v2(uint64_t* address, size_t bytes) {
  may_wait();
  const int file = memfd_create("emulated device", 0);
  return file < 0 || ftruncate(file, (off_t)bytes) != 0 || map(address, {getpid(), file, bytes});
}
int cuMemFree_v2(uint64_t address) {
  may_wait();
  return unmap(address);
}
int cuIpcGetMemHandle(Handle* handle, uint64_t address) {
  const std::lock_guard<std::mutex> lock(memory_lock);
  const auto found = memories.find(address);
  if (found == memories.end()) return 1;
  std::memcpy(handle, &found->second, sizeof(Memory));
  return 0;
}
int cuIpcOpenMemHandle_v2(uint64_t* address, Handle handle, unsigned) {
  Memory memory;
  std::memcpy(&memory, &handle, sizeof memory);
  if (memory.process == getpid()) return 1;  // as the real driver
  char path[64];
  std::snprintf(path, sizeof path, "/proc/%d/fd/%d", memory.process, memory.file);
  memory.file = open(path, O_RDWR);
  return memory.file < 0 || map(address, memory);
}
int cuIpcCloseMemHandle(uint64_t address) { return unmap(address); }
int cuMemsetD8_v2(uint64_t address, unsigned char value, size_t bytes) {
  may_wait();
  std::memset((void*)address, value, bytes);
  return 0;
}
int cuMemcpyDtoH_v2(void* to, uint64_t from, size_t bytes) {
  std::memcpy(to, (void*)from, bytes);
  return 0;
}
int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
  may_wait();
  allocations++;
  *memory = std::malloc(bytes);
  return *memory == nullptr;
}
int cuMemFreeHost(void* memory) {
  allocations--;
  std::free(memory);
  return 0;
}
int cuCtxSynchronize() {
  may_wait();
  return 0;
}
int cuDeviceCanAccessPeer(int* can, int, int) {
  *can = number("EMULATOR_PEERS", 1);
  return 0;
}
int cuCtxEnablePeerAccess(void*, unsigned) { return 0; }
int cuLaunchCooperativeKernel(void* function, unsigned grid, unsigned, unsigned, unsigned, unsigned, unsigned,
                              unsigned shared, void*, void** arguments) {
  return launch(function, grid, shared, arguments[0]);
}

int cuStreamCreate(void** stream, unsigned) {
  allocations++;
  *stream = new Graph;
  return 0;
}
int cuStreamDestroy_v2(void* stream) {
  allocations--;
  delete (Graph*)stream;
  return 0;
}
int cuStreamBeginCapture_v2(void*, int) { return 0; }
int cuStreamEndCapture(void* stream, void** graph) {
  allocations++;
  *graph = new Graph(std::move(*(Graph*)stream));
  return 0;
}
int cuGraphInstantiateWithFlags(void** executable, void* graph, uint64_t) {
  may_wait();
  allocations++;
  *executable = new Graph(*(Graph*)graph);
  return 0;
}
int cuGraphDestroy(void* graph) { return cuStreamDestroy_v2(graph); }
int cuGraphExecDestroy(void* executable) { return cuStreamDestroy_v2(executable); }
int cuLaunchKernelEx(const Config* config, void* function, void** arguments, void**) {
  ((Graph*)config->stream)
      ->push_back({function, config->grid[0], config->shared, *(const laneformer::gpu::Params*)arguments[0]});
  return 0;
}
int cuGraphLaunch(void* executable, void*) {
  for (const Recorded& one : *(Graph*)executable)
    if (const int result = launch(one.function, one.grid, one.shared, &one.params)) return result;
  return 0;
}

int64_t emulated_allocations() { return allocations; }
uint64_t emulated_launches() { return launches; }
int64_t emulated_delayed() { return delayed; }
}
