// The driver of NVIDIA or AMD, loaded at run time: this library needs no toolkit to build or to run.
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

using Address = uint64_t;  // of a device's memory

struct Handle {  // of memory, for other processes: CUipcMemHandle, hipIpcMemHandle_t
  char bytes[64];
};

class Driver {
 public:
  // name: "cuda" or "hip"; library: its file, null for the usual one. Throws std::runtime_error with what is missing.
  Driver(const std::string& name, const char* library);

  int devices() const;
  void use(int device) const;  // on this thread, from now on
  int multiprocessors(int device) const;

  void* load(const void* image) const;  // a module, as a whole: nothing is loaded while a kernel runs
  void unload(void* module) const;
  void* function(void* module, const char* name, int shared_bytes) const;
  int resident(void* function, int threads, int shared_bytes) const;  // CTAs on a multiprocessor

  Address allocate(size_t bytes) const;  // zeros
  void release(Address) const;
  void clear(Address, size_t bytes) const;
  void copy_from(void* to, Address from, size_t bytes) const;
  void* allocate_host(size_t bytes) const;  // zeros, at the same address for every device
  void release_host(void*) const;
  void share(int device, int peer) const;  // lets `device`, which is in use, write to memory of `peer`
  Handle export_memory(Address) const;     // all of an allocation
  Address open(const Handle&) const;       // memory of another process on this machine, for the device in use
  void close(Address) const;               // what was opened, likewise

  void synchronize() const;  // with the device in use

  // All CTAs run at the same time, or none does.
  void launch(void* function, int grid, int threads, int shared_bytes, void* stream, void** arguments) const;

  // A graph of what `launches` puts on the stream that it is given. Each launch waits for the one before.
  void* record(const std::function<void(void* stream)>& launches) const;
  // overlapping: the launch starts while the one before ends, and the kernel waits (join_launches of gpu/kernel/port.h;
  // CUDA only).
  void add(void* function, int grid, int threads, int shared_bytes, void* stream, void** arguments,
           bool overlapping) const;
  void launch_recorded(void* graph, void* stream) const;
  void release_recorded(void* graph) const;  // takes effect once all of its launches have ended; returns at once

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
