#include "driver.h"

#include <dlfcn.h>

namespace laneformer {
namespace gpu {

namespace {

// The two drivers differ in the names of functions and the numbers of attributes. Arguments are the same in both unless
// a comment says otherwise.
constexpr int kMultiprocessors[2] = {16, 63};  // CU_DEVICE_ATTRIBUTE_*, hipDeviceAttribute_t
constexpr int kDynamicShared = 8;              // attribute of a function
constexpr unsigned kPortable = 1 | 2;          // flags of host memory: portable, mapped
constexpr unsigned kNonBlocking = 1;           // flag of a stream
constexpr int kThisThread = 1;                 // captures only what this thread launches

// CUlaunchConfig and CUlaunchAttribute of cuda.h.
struct Attribute {
  int id, padding;
  union {
    char room[64];
    int value;
  };
};
struct Launch {
  unsigned grid[3], block[3], shared_bytes;
  void* stream;
  Attribute* attributes;
  unsigned num_attributes;
};
constexpr int kProgrammaticSerialization = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
static_assert(sizeof(Attribute) == 72 && sizeof(Launch) == 56, "as in cuda.h");

}  // namespace

Driver::Driver(const std::string& name, const char* library) : hip_(name == "hip") {
  const char* file = library ? library : hip_ ? "libamdhip64.so" : "libcuda.so.1";
  void* handle = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (!handle) throw std::runtime_error(std::string("the GPU's driver cannot be loaded: ") + dlerror());
  const auto find = [&](auto& to, const char* cuda, const char* hip) {
    const char* symbol = hip_ ? hip : cuda;
    if (!symbol) return;
    to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(dlsym(handle, symbol));
    if (!to) throw std::runtime_error(std::string(file) + " has no function " + symbol + ": update the GPU's driver");
  };
  find(error_text_, "cuGetErrorString", nullptr);
  find(hip_error_text_, nullptr, "hipGetErrorString");
  find(init_, "cuInit", "hipInit");
  find(count_, "cuDeviceGetCount", "hipGetDeviceCount");
  find(attribute_, "cuDeviceGetAttribute", "hipDeviceGetAttribute");
  find(retain_, "cuDevicePrimaryCtxRetain", nullptr);
  find(set_context_, "cuCtxSetCurrent", nullptr);
  find(set_device_, nullptr, "hipSetDevice");
  find(load_, "cuModuleLoadData", "hipModuleLoadData");
  find(unload_, "cuModuleUnload", "hipModuleUnload");
  find(function_, "cuModuleGetFunction", "hipModuleGetFunction");
  if (!hip_) load_function_ = (int (*)(void*))dlsym(handle, "cuFuncLoad");  // CUDA 12.4 or newer
  find(set_attribute_, "cuFuncSetAttribute", nullptr);
  find(occupancy_, "cuOccupancyMaxActiveBlocksPerMultiprocessor", "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor");
  find(allocate_, "cuMemAlloc_v2", "hipMalloc");
  find(release_, "cuMemFree_v2", "hipFree");
  find(clear_, "cuMemsetD8_v2", "hipMemsetD8");
  find(copy_, "cuMemcpyDtoH_v2", "hipMemcpyDtoH");
  find(allocate_host_, "cuMemHostAlloc", "hipHostMalloc");
  find(release_host_, "cuMemFreeHost", "hipHostFree");
  find(can_share_, "cuDeviceCanAccessPeer", "hipDeviceCanAccessPeer");
  find(share_, "cuCtxEnablePeerAccess", nullptr);
  find(share_device_, nullptr, "hipDeviceEnablePeerAccess");
  find(export_, "cuIpcGetMemHandle", "hipIpcGetMemHandle");
  find(open_, "cuIpcOpenMemHandle_v2", "hipIpcOpenMemHandle");
  find(close_, "cuIpcCloseMemHandle", "hipIpcCloseMemHandle");
  find(launch_, "cuLaunchCooperativeKernel", "hipModuleLaunchCooperativeKernel");
  find(synchronize_, "cuCtxSynchronize", "hipDeviceSynchronize");
  find(make_stream_, "cuStreamCreate", "hipStreamCreateWithFlags");
  find(end_stream_, "cuStreamDestroy_v2", "hipStreamDestroy");
  find(begin_capture_, "cuStreamBeginCapture_v2", "hipStreamBeginCapture");
  find(end_capture_, "cuStreamEndCapture", "hipStreamEndCapture");
  find(instantiate_, "cuGraphInstantiateWithFlags", "hipGraphInstantiateWithFlags");
  find(launch_graph_, "cuGraphLaunch", "hipGraphLaunch");
  find(destroy_graph_, "cuGraphDestroy", "hipGraphDestroy");
  find(destroy_executable_, "cuGraphExecDestroy", "hipGraphExecDestroy");
  find(launch_configured_, "cuLaunchKernelEx", nullptr);
  find(launch_plain_, nullptr, "hipModuleLaunchKernel");
  check(init_(0), "start");
}

void Driver::check(int status, const char* what) const {
  if (status == 0) return;
  const char* text = nullptr;
  if (hip_) {
    text = hip_error_text_(status);
  } else {
    error_text_(status, &text);
  }
  throw std::runtime_error(std::string("the GPU's driver could not ") + what + ": " + (text ? text : "error") + " (" +
                           std::to_string(status) + ")");
}

int Driver::devices() const {
  int count = 0;
  check(count_(&count), "count the devices");
  return count;
}

// The primary context of a device, as in JAX. It is retained only for devices in use, because a context takes memory
// and may be forbidden.
void* Driver::context(int device) const {
  const std::lock_guard<std::mutex> lock(retaining_);
  void*& context = contexts_[device];
  if (!context) check(retain_(&context, device), "use the device");
  return context;
}

void Driver::use(int device) const {
  check(hip_ ? set_device_(device) : set_context_(context(device)), "use the device");
}

int Driver::multiprocessors(int device) const {
  int value = 0;
  check(attribute_(&value, kMultiprocessors[hip_], device), "count the multiprocessors");
  return value;
}

void* Driver::load(const void* image) const {
  void* module = nullptr;
  check(load_(&module, image), "load the kernel");
  return module;
}

void Driver::unload(void* module) const { unload_(module); }

void* Driver::function(void* module, const char* name, int shared_bytes) const {
  void* function = nullptr;
  check(function_(&function, module, name), "find the kernel");
  if (load_function_) check(load_function_(function), "load the kernel");
  if (!hip_) check(set_attribute_(function, kDynamicShared, shared_bytes), "set the kernel's shared memory");
  return function;
}

int Driver::resident(void* function, int threads, int shared_bytes) const {
  int ctas = 0;
  check(occupancy_(&ctas, function, threads, (size_t)shared_bytes), "count the CTAs that fit");
  return ctas;
}

Address Driver::allocate(size_t bytes) const {
  Address address = 0;
  check(allocate_(&address, bytes), "allocate memory");
  clear(address, bytes);
  return address;
}

void Driver::release(Address address) const { release_(address); }
void Driver::clear(Address address, size_t bytes) const {
  check(clear_(address, 0, bytes), "clear memory");
  synchronize();  // the stream of the next launch does not wait for this
}
void Driver::copy_from(void* to, Address from, size_t bytes) const {
  check(copy_(to, from, bytes), "copy from the device");
}

void* Driver::allocate_host(size_t bytes) const {
  void* memory = nullptr;
  check(allocate_host_(&memory, bytes, kPortable), "allocate pinned memory of the host");
  __builtin_memset(memory, 0, bytes);
  return memory;
}

void Driver::release_host(void* memory) const { release_host_(memory); }

void Driver::share(int device, int peer) const {
  int can = 0;
  check(can_share_(&can, device, peer), "query access to another device's memory");
  if (!can)
    throw std::runtime_error(
        "devices " + std::to_string(device) + " and " + std::to_string(peer) +
        " cannot write to each other's memory: use devices with NVLink or xGMI between them, or one device");
  constexpr int kAlready = 704;  // access is enabled already
  const int status = hip_ ? share_device_(peer, 0) : share_(context(peer), 0);
  if (status != kAlready) check(status, "enable access to another device's memory");
}

Handle Driver::export_memory(Address address) const {
  Handle handle;
  check(export_(&handle, address), "export memory to other processes");
  return handle;
}

Address Driver::open(const Handle& handle) const {
  constexpr unsigned kLazyPeerAccess = 1;
  Address address = 0;
  check(open_(&address, handle, kLazyPeerAccess), "open memory of another process");
  return address;
}

void Driver::close(Address address) const { close_(address); }

void Driver::synchronize() const { check(synchronize_(), "synchronize"); }

void Driver::launch(void* function, int grid, int threads, int shared_bytes, void* stream, void** arguments) const {
  check(launch_(function, (unsigned)grid, 1, 1, (unsigned)threads, 1, 1, (unsigned)shared_bytes, stream, arguments),
        "launch the kernel");
}

void* Driver::record(const std::function<void(void*)>& launches) const {
  void *stream = nullptr, *graph = nullptr, *executable = nullptr;
  check(make_stream_(&stream, kNonBlocking), "make a stream");
  try {
    check(begin_capture_(stream, kThisThread), "start recording launches");
    try {
      launches(stream);
    } catch (...) {
      end_capture_(stream, &graph);
      throw;
    }
    check(end_capture_(stream, &graph), "record launches");
    check(instantiate_(&executable, graph, 0), "make a graph of launches");
  } catch (...) {
    if (graph) destroy_graph_(graph);
    end_stream_(stream);
    throw;
  }
  destroy_graph_(graph);
  end_stream_(stream);
  return executable;
}

void Driver::add(void* function, int grid, int threads, int shared_bytes, void* stream, void** arguments,
                 bool overlapping) const {
  if (hip_) {
    check(launch_plain_(function, (unsigned)grid, 1, 1, (unsigned)threads, 1, 1, (unsigned)shared_bytes, stream,
                        arguments, nullptr),
          "launch the kernel");
    return;
  }
  Attribute serialization{};
  serialization.id = kProgrammaticSerialization;
  serialization.value = 1;
  const unsigned attributes = overlapping ? 1 : 0;
  const Launch launch = {
      {(unsigned)grid, 1, 1}, {(unsigned)threads, 1, 1}, (unsigned)shared_bytes, stream, &serialization, attributes};
  check(launch_configured_(&launch, function, arguments, nullptr), "launch the kernel");
}

void Driver::launch_recorded(void* graph, void* stream) const { check(launch_graph_(graph, stream), "launch a graph"); }
void Driver::release_recorded(void* graph) const { destroy_executable_(graph); }

}  // namespace gpu
}  // namespace laneformer
