// Drafts of the next tokens, copied from the text itself: what followed the newest place that reads as its end does. A
// pass may check several (cpu/sample.cc); whether they are right decides its speed, never its tokens.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace laneformer {

constexpr int kMostRows = 16;  // of a pass: the last token and its drafts

// What a call may draft, and from what.
struct Speculation {
  int most = 0;  // drafts of a pass; 0: none
  // [rows - 1]: time of a pass of that many rows over that of one row.
  std::array<float, kMostRows> prices = [] {
    std::array<float, kMostRows> equal;
    equal.fill(1);
    return equal;
  }();
  std::vector<int32_t> before;  // text before the prompt, or another one that ends with kEndOfText
  std::vector<int32_t> forced;  // the answer's first tokens, whatever is drawn: for measurements
  std::vector<int32_t> given;   // drafts of the answer's tokens by their number, -1 for none, at any price: for tests
};

constexpr int32_t kEndOfText = -1;

// The text so far and tables of its n-grams.
class Drafts {
 public:
  void begin(const Speculation& speculation);  // which must live as long as this is used
  void add(int32_t token);
  // Writes drafts of the tokens from number `next` of the answer on, and returns how many: at most `most`, and as many
  // as promise the most tokens per time.
  int propose(int next, int most, int32_t* to);
  // Compares what was drawn from there on with the drafts, also with those that were too dear to be checked.
  void learn(const int32_t* drawn, int count);

 private:
  static constexpr int kLengths[] = {8, 6, 4, 3, 2};
  static constexpr int kNumLengths = 5, kClasses = 4;

  template <class F>
  void each_hash(size_t end, const F& f) const;
  int32_t& entry(int length, uint64_t hash, size_t end);
  void insert(size_t end);
  int64_t follow(int64_t place) const;
  int worth(int most) const;

  const Speculation* speculation_ = nullptr;
  std::vector<int32_t> text_;
  std::vector<int32_t> tables_[kNumLengths];  // newest places after n-grams, by hashes, half empty; 0: none
  std::vector<int32_t> drafts_;               // the last ones, before some were cut off
  int class_ = 0;                             // of their match
  float rates_[kClasses] = {};                // of drafts that were right
};

}  // namespace laneformer
