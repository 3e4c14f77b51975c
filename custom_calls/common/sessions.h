// What the C interfaces of cpu/ and gpu/host/ share: sessions by number, and errors as text.
#pragma once

#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>

namespace laneformer {

// T: of a session. A call that runs keeps its session, also when that is closed meanwhile.
template <class T>
class Sessions {
 public:
  int64_t add(std::shared_ptr<T> session) {
    const std::lock_guard<std::mutex> lock(lock_);
    sessions_[next_] = std::move(session);
    return next_++;
  }

  std::shared_ptr<T> find(int64_t id) {
    const std::lock_guard<std::mutex> lock(lock_);
    const auto found = sessions_.find(id);
    return found == sessions_.end() ? nullptr : found->second;
  }

  void close(int64_t id) {
    std::shared_ptr<T> last;  // destroyed outside of the lock, when no call uses it any more
    const std::lock_guard<std::mutex> lock(lock_);
    const auto found = sessions_.find(id);
    if (found == sessions_.end()) return;
    last = std::move(found->second);
    sessions_.erase(found);
  }

 private:
  std::mutex lock_;
  std::map<int64_t, std::shared_ptr<T>> sessions_;
  int64_t next_ = 1;
};

inline void put_text(const char* text, char* to, int64_t size) {
  std::strncpy(to, text, (size_t)size - 1);
  to[size - 1] = 0;
}

// Runs `action`; what it throws becomes text in `error` and the result -1.
template <class Action>
int64_t guarded(char* error, int64_t size, Action action) {
  try {
    return action();
  } catch (const std::exception& e) {
    put_text(e.what(), error, size);
    return -1;
  }
}

}  // namespace laneformer
