#include "request.h"

#include <cstring>
#include <stdexcept>
#include <string>

namespace laneformer {
namespace {

class Reader {
 public:
  Reader(const int32_t* words, int64_t count) : words_(words), count_(count) {}

  // Fields in the order of custom_calls/request.py. A whole number has two words, the low one first.
  void read(int64_t& value) {
    const uint64_t low = (uint32_t)word(), high = (uint32_t)word();
    value = (int64_t)(high << 32 | low);
  }
  void read(float& value) {
    const int32_t bits = word();
    std::memcpy(&value, &bits, sizeof value);
  }
  void read(bool& value) { value = word() != 0; }
  void read(std::vector<int32_t>& values) {
    const int64_t count = list();
    values.assign(words_ + at_, words_ + at_ + count);
    at_ += count;
  }
  template <class T>
  void read(std::optional<T>& value) {
    if (word() != 0) read(value.emplace());
  }
  template <class... T>
  void read(std::tuple<T...>& values) {
    std::apply([&](auto&... value) { (read(value), ...); }, values);
  }
  template <class T>
  void read(std::vector<T>& values) {
    values.resize(list());
    for (T& value : values) read(value);
  }
  template <class T>
  void read(T& value) {
    value.visit([&](const char*, auto& field) { read(field); });
  }

  void finish() const {
    if (at_ != count_) throw std::runtime_error("damaged request: words follow its end");
  }

 private:
  int32_t word() {
    if (at_ >= count_) throw std::runtime_error("damaged request: it is truncated");
    return words_[at_++];
  }
  int64_t list() {  // elements that follow, each a word at least
    const int32_t count = word();
    if (count < 0 || count > count_ - at_)
      throw std::runtime_error("damaged request: a list of " + std::to_string(count) + " elements is truncated");
    return count;
  }

  const int32_t* words_;
  const int64_t count_;
  int64_t at_ = 0;
};

}  // namespace

Request decode_request(const int32_t* words, int64_t room) {
  if (room < 1 || words[0] < 1 || words[0] > room)
    throw std::runtime_error("damaged request: it has " + std::to_string(room < 1 ? 0 : words[0]) +
                             " words in an array of " + std::to_string(room));
  Reader reader(words + 1, words[0] - 1);
  Request request;
  reader.read(request);
  reader.finish();
  return request;
}

}  // namespace laneformer
