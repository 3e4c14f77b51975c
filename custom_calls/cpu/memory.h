// Memory of a session: regions of the system's memory, and arenas, which ops cut into the buffers that they use while
// they run.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

namespace laneformer {

// Zeroed memory, reserved at once; the system adds a page when it is first written.
struct Region {
  Region() = default;
  explicit Region(int64_t bytes);
  ~Region();
  Region(Region&& other) noexcept : data(other.data), bytes(other.bytes) { other.data = nullptr; }
  Region& operator=(Region&& other) noexcept;
  char* data = nullptr;
  int64_t bytes = 0;
  float* floats() const { return (float*)data; }
};

inline Region::Region(int64_t size) : bytes(std::max<int64_t>(size, 1)) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    throw std::runtime_error("out of memory: cannot reserve " + std::to_string(bytes) + " bytes for the model");
#if defined(MADV_HUGEPAGE)
  madvise(p, bytes, MADV_HUGEPAGE);  // fewer page faults and table walks; only a hint, so its result does not matter
#endif
  data = (char*)p;
}

inline Region::~Region() {
  if (data) munmap(data, bytes);
}

inline Region& Region::operator=(Region&& other) noexcept {
  std::swap(data, other.data);
  std::swap(bytes, other.bytes);
  return *this;
}

// Hands out parts of a region, one after the other. Ops run one after the other, so each begins at the front of the
// same region. Without a region it measures: parts are null, and `bytes` says how large the region must be.
class Arena {
 public:
  Arena() = default;
  explicit Arena(const Region& region) : data_(region.data) {}

  // The next n elements. They contain what an op before has left there.
  template <class T>
  T* take(int64_t n) {
    T* const part = data_ ? (T*)(data_ + bytes_) : nullptr;
    bytes_ += (n * (int64_t)sizeof(T) + 63) / 64 * 64;
    return part;
  }
  float* floats(int64_t n) { return take<float>(n); }
  int64_t bytes() const { return bytes_; }

 private:
  char* data_ = nullptr;
  int64_t bytes_ = 0;
};

}  // namespace laneformer
