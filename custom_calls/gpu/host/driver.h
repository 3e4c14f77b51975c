// The driver of NVIDIA or AMD GPUs, loaded at run time, so that this library needs no toolkit to build or to run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

namespace laneformer {
namespace gpu {

using Address = uint64_t;  // address in a device's memory

struct Handle {  // identifies memory for other processes: CUipcMemHandle, hipIpcMemHandle_t
  char bytes[64];
};

class Driver {
 public:
  // name: "cuda" or "hip". library: file of the driver; null for the default. Throws std::runtime_error if the driver
  // or one of its functions is missing.
  Driver(const std::string& name, const char* library);

  int devices() const;
  void use(int device) const;  // makes it the device of this thread
  int multiprocessors(int device) const;

  void* load(const void* image) const;
  void unload(void* module) const;
  // Finds a function and loads its code, which CUDA would otherwise do at the first launch, while other kernels run.
  void* function(void* module, const char* name, int shared_bytes) const;
  int resident(void* function, int threads, int shared_bytes) const;  // CTAs that fit on a multiprocessor

  Address allocate(size_t bytes) const;  // memory of the device in use, filled with zeros
  void release(Address) const;
  void clear(Address, size_t bytes) const;
  void copy_from(void* to, Address from, size_t bytes) const;
  void* allocate_host(size_t bytes) const;  // pinned memory with zeros, at the same address on every device
  void release_host(void*) const;
  void share(int device, int peer) const;  // lets `device`, which must be in use, write to memory of `peer`
  Handle export_memory(Address) const;     // a handle of a whole allocation
  Address open(const Handle&) const;       // opens memory of another process on this machine, for the device in use
  void close(Address) const;               // closes memory that `open` returned

  void synchronize() const;  // waits for the device in use

  // A cooperative launch: all CTAs run at the same time, or it fails.
  void launch(void* function, int grid, int threads, int shared_bytes, void* stream, void** arguments) const;

  // Records what `launches` puts on the stream that it gets, and returns it as a graph. Each launch waits for the
  // launch before it.
  void* record(const std::function<void(void* stream)>& launches) const;
  // Adds a launch to a recording. overlapping: it starts while the launch before it ends, and the kernel waits
  // (join_launches of gpu/kernel/port.h; CUDA only).
  void add(void* function, int grid, int threads, int shared_bytes, void* stream, void** arguments,
           bool overlapping) const;
  void launch_recorded(void* graph, void* stream) const;
  void release_recorded(void* graph) const;  // returns at once; the graph is freed after its launches have ended

 private:
  void check(int status, const char* what) const;
  void* context(int device) const;

  bool hip_;
  int (*error_text_)(int, const char**) = nullptr;
  const char* (*hip_error_text_)(int) = nullptr;
  int (*init_)(unsigned) = nullptr;
  int (*count_)(int*) = nullptr;
  int (*attribute_)(int*, int, int) = nullptr;
  int (*retain_)(void**, int) = nullptr;
  int (*set_context_)(void*) = nullptr;
  int (*set_device_)(int) = nullptr;
  int (*load_)(void**, const void*) = nullptr;
  int (*unload_)(void*) = nullptr;
  int (*function_)(void**, void*, const char*) = nullptr;
  int (*load_function_)(void*) = nullptr;
  int (*set_attribute_)(void*, int, int) = nullptr;
  int (*occupancy_)(int*, void*, int, size_t) = nullptr;
  int (*allocate_)(Address*, size_t) = nullptr;
  int (*release_)(Address) = nullptr;
  int (*clear_)(Address, unsigned char, size_t) = nullptr;
  int (*copy_)(void*, Address, size_t) = nullptr;
  int (*allocate_host_)(void**, size_t, unsigned) = nullptr;
  int (*release_host_)(void*) = nullptr;
  int (*can_share_)(int*, int, int) = nullptr;
  int (*share_)(void*, unsigned) = nullptr;
  int (*share_device_)(int, unsigned) = nullptr;
  int (*export_)(Handle*, Address) = nullptr;
  int (*open_)(Address*, Handle, unsigned) = nullptr;
  int (*close_)(Address) = nullptr;
  int (*launch_)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**) = nullptr;
  int (*synchronize_)() = nullptr;
  int (*make_stream_)(void**, unsigned) = nullptr;
  int (*end_stream_)(void*) = nullptr;
  int (*begin_capture_)(void*, int) = nullptr;
  int (*end_capture_)(void*, void**) = nullptr;
  int (*instantiate_)(void**, void*, unsigned long long) = nullptr;
  int (*launch_graph_)(void*, void*) = nullptr;
  int (*destroy_graph_)(void*) = nullptr;
  int (*destroy_executable_)(void*) = nullptr;
  int (*launch_configured_)(const void*, void*, void**, void**) = nullptr;
  int (*launch_plain_)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                       void**) = nullptr;
  mutable std::mutex retaining_;
  mutable std::map<int, void*> contexts_;
};

}  // namespace gpu
}  // namespace laneformer
