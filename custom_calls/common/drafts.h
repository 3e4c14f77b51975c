// Drafts of the next tokens, copied from the text itself: the tokens after the newest earlier match of the text's end.
// A pass may check several drafts (cpu/sample.cc). Whether they are right changes its speed, never its tokens. How many
// are checked depends on their prices, which are corrected by the measured times of passes. That choice therefore
// depends on a clock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "request.h"

namespace laneformer {

constexpr int kMostRows = 16;  // most rows of a pass: the last token and its drafts

// Options of the drafts of a call.
struct Speculation {
  int most = 0;  // most drafts in a pass; 0: no drafts
  // [rows - 1]: time of a pass with that number of rows, as a multiple of the time of a pass of one row.
  std::array<float, kMostRows> prices = [] {
    std::array<float, kMostRows> equal;
    equal.fill(1);
    return equal;
  }();
  bool corrected = false;       // whether the times of passes correct the prices
  std::vector<int32_t> before;  // tokens before the prompt, or another text, which ends with kEndOfText
  std::vector<int32_t> forced;  // first tokens of the answer, which replace those drawn: for measurements
  std::vector<int32_t> given;   // draft of each token of the answer, -1 for none, at any price: for tests
};

// Prices of passes by their number of rows: times in units of a pass of one row. They start as a list, and the times of
// passes correct them. This class reads no clock. It lives as long as a session.
class Prices {
 public:
  void begin(const Speculation& speculation);  // starts a call; a list other than the last one resets all corrections
  float of(int rows) const { return prices_[rows - 1]; }
  float listed(int rows) const { return list_[rows - 1]; }  // price before any correction
  int most_rows() const { return most_rows_; }  // at most twice the rows of measured passes: limits a wrong list's cost
  float took(int rows, double time);            // records the time of a pass; returns its cost in passes of one row
  float cost(double time) const;                // cost of a pass with this time; 0 while that is unknown
  bool knows(int rows) const;                   // whether passes with about this number of rows were measured
  // Whether to measure a pass that is expected to lose `cost`. A share of each pass's time is saved for such trials.
  bool try_for(float cost);

 private:
  static constexpr int kPasses = 32, kSingles = 9;
  struct Passed {  // a measured pass of several rows
    int rows;
    float ratio;   // logarithm of its time over the time by the list
    float weight;  // reduced by each later pass, most by passes with a similar number of rows
  };
  void add(int rows, float ratio);
  void correct();

  std::array<float, kMostRows> list_{}, prices_{};
  bool corrected_ = false;
  int most_rows_ = kMostRows;
  std::vector<Passed> passed_;   // in the order of their ratios
  std::vector<double> singles_;  // times of passes of one row, the newest first
  float savings_ = 0;            // saved for trials, in passes of one row
};

// The text so far, and tables of its n-grams.
class Drafts {
 public:
  void begin(const Speculation& speculation, Prices& prices);  // both must outlive this object's use
  void add(int32_t token);
  // Writes drafts of the answer's tokens from number `next` on, and returns their number: the number with the most
  // expected tokens per time, at most `most`. beside: rows of other calls in the pass.
  int propose(int next, int most, int32_t* to, int beside = 0);
  // Compares the drawn tokens with the last drafts, including drafts that were too expensive to check. cost: cost of
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
  std::vector<int32_t> tables_[kNumLengths];  // newest place after each n-gram, a hash table; 0: an empty entry
  std::vector<int32_t> drafts_;               // the last drafts, including those that were not checked
  int class_ = 0;                             // class of their match
  float rates_[kClasses] = {};                // running share of right drafts in each class
  int64_t other_ = 0;                         // end of the last other text in text_
  bool from_other_ = false;
  float credit_ = 0;  // what one pass may lose, in passes of one row: savings by drafts, and a share of the passes
};

}  // namespace laneformer
