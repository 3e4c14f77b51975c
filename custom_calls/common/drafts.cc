#include "drafts.h"

#include <algorithm>

namespace laneformer {

namespace {

constexpr int64_t kLongest = 64;  // tokens of a match, beyond which it is not followed
constexpr size_t kSmallest = 1 << 10;
constexpr float kLearned = 1.0f / 16;  // weight of one draft in the running rate

// Classes of matches by their length: below 3, 6, 16 tokens, and longer.
constexpr int64_t kBelow[] = {3, 6, 16};
constexpr int kMostDrafts[] = {2, 4, 7, kMostRows - 1};
constexpr float kRates[] = {0.1f, 0.3f, 0.6f, 0.9f};  // before anything is known: low, as watching costs nothing
constexpr float kLeastGain = 1.03f;                   // prices are measured, and rates guessed

}  // namespace

void Drafts::begin(const Speculation& speculation) {
  speculation_ = &speculation;
  text_.clear();
  drafts_.clear();
  for (auto& table : tables_) table.assign(kSmallest, 0);
  std::copy_n(kRates, kClasses, rates_);
  for (const int32_t token : speculation.before) add(token);
}

// f(number of a length, hash) of the n-grams that end before `end`.
template <class F>
void Drafts::each_hash(size_t end, const F& f) const {
  uint64_t hash = 0;
  size_t n = 0;
  for (int length = kNumLengths - 1; length >= 0 && end >= (size_t)kLengths[length]; length--) {
    for (; n < (size_t)kLengths[length]; n++) {
      hash = (hash + (uint32_t)text_[end - 1 - n] + 1) * 0x9E3779B97F4A7C15u;
      hash ^= hash >> 32;
    }
    f(length, hash);
  }
}

// The entry of the n-gram that ends before `end`: with its newest place, or empty.
int32_t& Drafts::entry(int length, uint64_t hash, size_t end) {
  std::vector<int32_t>& table = tables_[length];
  const int32_t* const last = text_.data() + end;
  const auto same = [&](const int32_t* other) {
    return std::equal(last - kLengths[length], last, other - kLengths[length]);
  };
  for (size_t at = hash;; at++) {
    int32_t& place = table[at & (table.size() - 1)];
    if (place == 0 || same(text_.data() + place)) return place;
  }
}

void Drafts::insert(size_t end) {
  each_hash(end, [&](int length, uint64_t hash) { entry(length, hash, end) = (int32_t)end; });
}

// An n-gram is entered when the token after it is known: so the end of the text never finds itself.
void Drafts::add(int32_t token) {
  if (2 * text_.size() == tables_[0].size()) {
    for (auto& table : tables_) table.assign(4 * text_.size(), 0);
    for (size_t end = 1; end < text_.size(); end++) insert(end);
  }
  insert(text_.size());
  text_.push_back(token);
}

// Tokens before a place that are those before the end.
int64_t Drafts::follow(int64_t place) const {
  const int32_t *const there = text_.data() + place, *const here = text_.data() + text_.size();
  int64_t n = 0;
  while (n < std::min(place, kLongest) && there[-1 - n] == here[-1 - n]) n++;
  return n;
}

int Drafts::propose(int next, int most, int32_t* to) {
  drafts_.clear();
  most = std::min({most, speculation_->most, kMostRows - 1});
  const std::vector<int32_t>& given = speculation_->given;
  if (!given.empty()) {
    int count = 0;
    for (size_t at = next; count < most && at < given.size() && given[at] >= 0; at++) to[count++] = given[at];
    return count;
  }
  int64_t place = 0;
  each_hash(text_.size(), [&](int number, uint64_t hash) {  // the shortest first
    if (const int32_t found = entry(number, hash, text_.size())) place = found;
  });
  if (place == 0) return 0;
  const int64_t length = follow(place);
  class_ = (int)(std::upper_bound(kBelow, kBelow + kClasses - 1, length) - kBelow);
  for (int64_t i = 0; i < kMostDrafts[class_]; i++) {  // beyond the end it goes on in itself
    const int64_t at = place + i, beyond = at - (int64_t)text_.size();
    const int32_t token = beyond < 0 ? text_[at] : drafts_[beyond];
    if (token == kEndOfText) break;
    drafts_.push_back(token);
  }
  const int count = worth(std::min(most, (int)drafts_.size()));
  std::copy_n(drafts_.begin(), count, to);
  return count;
}

// How many drafts promise the most tokens per time.
int Drafts::worth(int most) const {
  float right = 1, tokens = 1, best = kLeastGain;
  int count = 0;
  for (int n = 1; n <= most; n++) {
    tokens += right *= rates_[class_];
    const float gain = tokens / speculation_->prices[n];
    if (gain > best) best = gain, count = n;
  }
  return count;
}

void Drafts::learn(const int32_t* drawn, int count) {
  float& rate = rates_[class_];
  for (int i = 0; i < std::min(count, (int)drafts_.size()); i++) {
    const bool right = drawn[i] == drafts_[i];
    rate += kLearned * ((float)right - rate);
    if (!right) break;
  }
}

}  // namespace laneformer
