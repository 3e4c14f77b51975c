// Shared by the C interfaces of cpu/ and gpu/host/: sessions by number, and errors as text.
#pragma once

#include <cstdint>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>

namespace laneformer {

// All open sessions, of type T, by number. A running call keeps its session alive, even if the session is closed.
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
    std::shared_ptr<T> last;  // destroyed after the lock is released
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

// Runs `action` and returns its result. If it throws, writes the message to `error`, of `size` bytes, and returns -1.
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
