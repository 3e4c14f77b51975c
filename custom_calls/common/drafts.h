// Drafts of the next tokens, copied from the text itself: what followed the newest place that reads as its end does. A
// pass may check several (cpu/sample.cc); whether they are right decides its speed, never its tokens. How many are
// checked follows from their prices, which the times of the passes correct; so a choice may depend on a clock.
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
  bool corrected = false;       // the prices, by the times of the passes
  std::vector<int32_t> before;  // text before the prompt, or another one that ends with kEndOfText
  std::vector<int32_t> forced;  // the answer's first tokens, whatever is drawn: for measurements
  std::vector<int32_t> given;   // drafts of the answer's tokens by their number, -1 for none, at any price: for tests
};

constexpr int32_t kEndOfText = -1;

// What passes cost by their rows, in passes of one row: a list to begin with, corrected by what they took. Knows no
// clock; lives as long as a session.
class Prices {
 public:
  void begin(const Speculation& speculation);  // a call; with another list it forgets what it has measured
  float of(int rows) const { return prices_[rows - 1]; }
  float listed(int rows) const { return list_[rows - 1]; }  // before any correction
  int most_rows() const { return most_rows_; }  // twice those that were measured: a wrong list is found out cheaply
  float took(int rows, double time);            // a pass; returns what it has cost
  float cost(double time) const;                // of a pass that took so long; 0 while that is unknown
  bool knows(int rows) const;                   // from passes of about that many
  // Whether to make a pass that seems to lose `cost`, to see what it takes: some of each pass's time is saved for that.
  bool try_for(float cost);

 private:
  static constexpr int kPasses = 32, kSingles = 9;
  struct Passed {  // a pass of several rows
    int rows;
    float ratio;   // logarithm of its time over what the list says
    float weight;  // less with each later pass, the more the nearer that one's rows
  };
  void add(int rows, float ratio);
  void correct();

  std::array<float, kMostRows> list_{}, prices_{};
  bool corrected_ = false;
  int most_rows_ = kMostRows;
  std::vector<Passed> passed_;   // by their ratios
  std::vector<double> singles_;  // times of passes of one row, the newest first
  float savings_ = 0;
};

// The text so far and tables of its n-grams.
class Drafts {
 public:
  void begin(const Speculation& speculation, Prices& prices);  // which must live as long as this is used
  void add(int32_t token);
  // Writes drafts of the tokens from number `next` of the answer on, and returns how many: at most `most`, and as many
  // as promise the most tokens per time. beside: rows of other calls in the pass.
  int propose(int next, int most, int32_t* to, int beside = 0);
  // Compares what was drawn from there on with the drafts, also with those that were too dear to be checked. cost: of
  // the pass, in passes of one row.
  void learn(const int32_t* drawn, int count, float cost);
  bool from_other() const { return from_other_; }  // whether the last drafts were copied from another text

 private:
  static constexpr int kLengths[] = {8, 6, 4, 3, 2};
  static constexpr int kNumLengths = 5, kClasses = 4;

  template <class F>
  void each_hash(size_t end, const F& f) const;
  int32_t& entry(int length, uint64_t hash, size_t end);
  void insert(size_t end);
  int64_t follow(int64_t place) const;
  int worth(int most, int beside) const;

  const Speculation* speculation_ = nullptr;
  Prices* prices_ = nullptr;
  std::vector<int32_t> text_;
  std::vector<int32_t> tables_[kNumLengths];  // newest places after n-grams, by hashes, half empty; 0: none
  std::vector<int32_t> drafts_;               // the last ones, before some were cut off
  int class_ = 0;                             // of their match
  float rates_[kClasses] = {};                // of drafts that were right
  int64_t other_ = 0;                         // where the last other text ends
  bool from_other_ = false;
  float credit_ = 0;  // passes that drafts have saved in this answer, and a share of it: what one pass may lose
};

}  // namespace laneformer
