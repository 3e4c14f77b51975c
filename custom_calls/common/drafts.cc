#include "drafts.h"

#include <algorithm>
#include <cmath>

namespace laneformer {

namespace {

constexpr int64_t kLongest = 64;       // most tokens of a match that are compared
constexpr size_t kSmallest = 1 << 10;  // entries of a table at first
constexpr float kLearned = 1.0f / 16;  // weight of one draft in the running rate

// Classes of matches by their length: less than 3, 6 or 16 tokens, and longer.
constexpr int64_t kBelow[] = {3, 6, 16};
constexpr int kMostDrafts[] = {2, 4, 7, kMostRows - 1};
constexpr float kRates[] = {0.1f, 0.3f, 0.6f, 0.9f};  // at first: low, because unchecked drafts are compared for free
constexpr float kLeastGain = 1.03f;                   // above 1, because prices have errors and rates are guesses
// What an answer may lose, in passes of one row: kLoss at the start, kLossShare of its passes, and all of its gains.
constexpr float kLoss = 0.1f, kLossShare = 0.005f;
constexpr float kTrusted = 0.8f, kTrustedLoss = 1;  // from this rate on, one pass may lose kTrustedLoss more

// A later pass with the same number of rows leaves the share kKept of a pass's weight, with another number more of it.
// From the weight kKnown on, a number of rows counts as measured.
constexpr float kKept = 0.8f, kKnown = 0.5f;
constexpr float kFaster = 0.9f;  // cost of several rows below which the times of one row must have been disturbed
constexpr float kSaved = 0.003f, kMostSaved = 1;  // saved for trials per pass, and in total, in passes of one row

// Weight of a pass with `other` rows for the price of `rows` rows, 0 to 1. The table saves some microseconds per pass.
float nearness(int rows, int other) {
  static const auto table = [] {
    std::array<std::array<float, kMostRows + 1>, kMostRows + 1> made{};
    for (int a = 1; a <= kMostRows; a++)
      for (int b = 1; b <= kMostRows; b++) {
        const float octaves = std::log2((float)a / (float)b);
        made[a][b] = 1 / (1 + 16 * octaves * octaves);
      }
    return made;
  }();
  return table[rows][other];
}

}  // namespace

// ------------------------------------------------------------------------------------------------------------- prices

void Prices::begin(const Speculation& speculation) {
  std::array<float, kMostRows> list = speculation.prices;
  for (int rows = 1; speculation.corrected && rows <= kMostRows; rows++)
    list[rows - 1] = std::clamp(list[rows - 1], 1.0f, (float)rows);  // `rows` passes of one row cost that much
  if (corrected_ == speculation.corrected && list_ == list) return;
  corrected_ = speculation.corrected;
  prices_ = list_ = list;
  passed_.clear(), singles_.clear();
  most_rows_ = corrected_ ? 2 : kMostRows;
  savings_ = 0;
}

// Uses medians, because other processes may disturb a pass, and lower medians, because that only makes it longer.
float Prices::took(int rows, double time) {
  if (!corrected_) return of(rows);
  savings_ = std::min(savings_ + kSaved, kMostSaved);
  float found = cost(time);
  if (rows == 1 || (found > 0 && found < kFaster)) {  // a pass of one row would take no longer
    singles_.insert(singles_.begin(), time);
    if (singles_.size() > kSingles) singles_.pop_back();
    if (rows == 1) return 1;
    found = cost(time);
  }
  if (found == 0) return of(rows);
  add(rows, std::log(found / list_[rows - 1]));
  most_rows_ = std::min(std::max(most_rows_, 2 * rows), kMostRows);
  correct();
  return std::clamp(found, of(rows), (float)rows);
}

float Prices::cost(double time) const {
  if (singles_.empty() || !corrected_) return 0;
  std::vector<double> sorted = singles_;
  const auto middle = sorted.begin() + (int64_t)(sorted.size() - 1) / 2;
  std::nth_element(sorted.begin(), middle, sorted.end());
  return (float)(std::max(time, 1e-9) / std::max(*middle, 1e-9));
}

void Prices::add(int rows, float ratio) {
  for (Passed& passed : passed_) passed.weight *= std::pow(kKept, nearness(rows, passed.rows));
  if (passed_.size() == kPasses)
    passed_.erase(std::min_element(passed_.begin(), passed_.end(),
                                   [](const Passed& a, const Passed& b) { return a.weight < b.weight; }));
  const auto place = std::find_if(passed_.begin(), passed_.end(), [&](const Passed& p) { return p.ratio > ratio; });
  passed_.insert(place, {rows, ratio, 1});
}

void Prices::correct() {
  for (int rows = 2; rows <= kMostRows; rows++) {
    float weights[kPasses], sum = 0, listed = 0;  // the list has the largest weight of a pass
    for (size_t i = 0; i < passed_.size(); i++) {
      sum += weights[i] = passed_[i].weight * nearness(rows, passed_[i].rows);
      listed = std::max(listed, weights[i]);
    }
    float left = (sum + listed) / 2, ratio = 0;
    for (size_t i = 0; i <= passed_.size() && left > 0; i++) {
      if (listed > 0 && (i == passed_.size() || passed_[i].ratio >= 0)) left -= listed, ratio = listed = 0;
      if (i < passed_.size() && left > 0) left -= weights[i], ratio = passed_[i].ratio;
    }
    prices_[rows - 1] = std::clamp(list_[rows - 1] * std::exp(ratio), prices_[rows - 2], (float)rows);
  }
}

bool Prices::knows(int rows) const {
  return std::any_of(passed_.begin(), passed_.end(),
                     [&](const Passed& passed) { return passed.weight * nearness(rows, passed.rows) > kKnown; });
}

bool Prices::try_for(float cost) {
  if (!corrected_ || cost > savings_) return false;
  savings_ -= std::max(cost, 0.0f);
  return true;
}

// ------------------------------------------------------------------------------------------------------------- drafts

void Drafts::begin(const Speculation& speculation, Prices& prices) {
  speculation_ = &speculation;
  prices_ = &prices;
  prices.begin(speculation);
  text_.clear();
  drafts_.clear();
  for (auto& table : tables_) table.assign(kSmallest, 0);
  std::copy_n(kRates, kClasses, rates_);
  credit_ = kLoss;
  other_ = 0, from_other_ = false;
  for (const int32_t token : speculation.before) {
    add(token);
    if (token == kEndOfText) other_ = (int64_t)text_.size();
  }
}

// Calls f(index of the length, hash) for each n-gram that ends before `end`, the shortest first.
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

// The table entry of the n-gram that ends before `end`. It contains the newest place after that n-gram, or 0.
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

// An n-gram is inserted when the token after it is known, so the end of the text never matches itself.
void Drafts::add(int32_t token) {
  if (2 * text_.size() == tables_[0].size()) {
    for (auto& table : tables_) table.assign(4 * text_.size(), 0);
    for (size_t end = 1; end < text_.size(); end++) insert(end);
  }
  insert(text_.size());
  text_.push_back(token);
}

// Number of equal tokens before `place` and before the end of the text.
int64_t Drafts::follow(int64_t place) const {
  const int32_t *const there = text_.data() + place, *const here = text_.data() + text_.size();
  int64_t n = 0;
  while (n < std::min(place, kLongest) && there[-1 - n] == here[-1 - n]) n++;
  return n;
}

int Drafts::propose(int next, int most, int32_t* to, int beside) {
  drafts_.clear();
  from_other_ = false;
  most = std::min({most, speculation_->most, kMostRows - 1});
  const std::vector<int32_t>& given = speculation_->given;
  if (!given.empty()) {
    int count = 0;
    for (size_t at = next; count < most && at < given.size() && given[at] >= 0; at++) to[count++] = given[at];
    return count;
  }
  int64_t place = 0;
  each_hash(text_.size(), [&](int number, uint64_t hash) {  // the longest match is last
    if (const int32_t found = entry(number, hash, text_.size())) place = found;
  });
  if (place == 0) return 0;
  from_other_ = place < other_;
  const int64_t length = follow(place);
  class_ = (int)(std::upper_bound(kBelow, kBelow + kClasses - 1, length) - kBelow);
  for (int64_t i = 0; i < kMostDrafts[class_]; i++) {  // after the end of the text, drafts continue from drafts
    const int64_t at = place + i, beyond = at - (int64_t)text_.size();
    const int32_t token = beyond < 0 ? text_[at] : drafts_[beyond];
    if (token == kEndOfText) break;
    drafts_.push_back(token);
  }
  const int count = worth(std::min(most, (int)drafts_.size()), beside);
  std::copy_n(drafts_.begin(), count, to);
  return count;
}

// The number of drafts with the most expected tokens per time; 0 if there is no gain. A trial, paid from savings, takes
// another number now and then: any number if none gains, or a larger one whose pass has not been measured.
int Drafts::worth(int most, int beside) const {
  const auto price = [&](int drafts) { return prices_->of(beside + 1 + drafts) / prices_->of(beside + 1); };
  const float rate = rates_[class_], most_loss = credit_ + (rate < kTrusted ? 0 : kTrustedLoss);
  float right = 1, tokens[kMostRows] = {1}, best = kLeastGain;
  int count = 0, last = 0;
  most = std::min(most, prices_->most_rows() - 1 - beside);
  for (int n = 1; n <= most && price(n) - 1 <= most_loss; n++) {
    tokens[n] = tokens[n - 1] + (right *= rate);
    const float gain = tokens[n] / price(n);
    if (gain > best) best = gain, count = n;
    last = n;
  }
  const float pace = count ? best : 1;
  float least = INFINITY;
  int trial = 0;
  for (int n = count + 1; n <= last; n++) {
    const float loss = price(n) - tokens[n] / pace;
    if ((count ? !prices_->knows(beside + 1 + n) : tokens[n] > kLeastGain) && loss < least) least = loss, trial = n;
  }
  return trial && prices_->try_for(least) ? trial : count;
}

void Drafts::learn(const int32_t* drawn, int count, float cost) {
  credit_ += (float)count - (1 - kLossShare) * cost;
  float& rate = rates_[class_];
  for (int i = 0; i < std::min(count, (int)drafts_.size()); i++) {
    const bool right = drawn[i] == drafts_[i];
    rate += kLearned * ((float)right - rate);
    if (!right) break;
  }
}

}  // namespace laneformer
