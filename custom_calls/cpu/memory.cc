// Regions of the system's memory.
#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <stdexcept>
#include <string>

namespace laneformer {

Region::Region(int64_t size) : bytes(std::max<int64_t>(size, 1)) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    throw std::runtime_error("out of memory: cannot reserve " + std::to_string(bytes) + " bytes for the model");
#if defined(MADV_HUGEPAGE)
  madvise(p, bytes, MADV_HUGEPAGE);  // fewer page faults and table walks; only a hint, so its result does not matter
#endif
  data = (char*)p;
}

Region::~Region() {
  if (data) munmap(data, bytes);
}

Region& Region::operator=(Region&& other) noexcept {
  std::swap(data, other.data);
  std::swap(bytes, other.bytes);
  return *this;
}

}  // namespace laneformer
