// Drafts from the text: the tokens that they copy, their number, and their running rates and prices.
#include "../common/drafts.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "check.h"

using namespace laneformer;

namespace {

constexpr int kMost = kMostRows - 1;

// A text, and the drafts made from it.
struct Writer {
  Speculation speculation;
  std::vector<int32_t> text;
  Prices prices;
  Drafts drafts;

  explicit Writer(const Speculation& with = all()) : speculation(with), text(speculation.before) {
    drafts.begin(speculation, prices);
  }
  static Speculation all() {
    Speculation speculation;
    speculation.most = kMost;
    return speculation;
  }
  void write(const std::vector<int32_t>& tokens) {
    for (const int32_t token : tokens) drafts.add(token), text.push_back(token);
  }
  std::vector<int32_t> propose(int most = kMost) {
    std::vector<int32_t> found(kMost + 1, -7);
    const int count = drafts.propose(0, most, found.data());
    CHECK(count <= most && found[count] == -7, "%d drafts", count);
    found.resize(count);
    return found;
  }
};

std::vector<int32_t> random_text(int n, int vocab, int seed) {
  Random random(seed);
  std::vector<int32_t> text(n);
  for (int32_t& token : text) token = random.below(vocab);
  return text;
}

// Drafts follow the newest place of the longest n-gram, which a search of the whole text finds too.
void drafts_are_those_of_a_search() {
  for (const int vocab : {1, 2, 3, 20, 300}) {
    Writer writer;
    int found = 0;
    for (const int32_t token : random_text(2500, vocab, vocab)) {
      writer.write({token});
      const std::vector<int32_t>& text = writer.text;
      const int64_t n = (int64_t)text.size();
      int64_t place = 0;
      for (const int64_t length : {8, 6, 4, 3, 2})
        for (int64_t end = n - 1; end >= length && place == 0; end--)
          if (std::equal(text.end() - length, text.end(), text.begin() + end - length)) place = end;
      const std::vector<int32_t> drafts = writer.propose();
      CHECK(drafts.empty() == (place == 0), "vocabulary of %d: %zu drafts after token %d", vocab, drafts.size(),
            (int)n);
      for (int64_t i = 0; i < (int64_t)drafts.size(); i++, found++)
        CHECK(drafts[i] == (place + i < n ? text[place + i] : drafts[place + i - n]), "vocabulary of %d: draft %d",
              vocab, (int)i);
    }
    CHECK(found > 50, "vocabulary of %d: %d drafts", vocab, found);
  }
}

// If a long text is repeated, all its tokens are drafted once a few tokens agree.
void a_copy_is_drafted() {
  const std::vector<int32_t> text = random_text(5000, 30000, 1);
  Writer writer;
  writer.write(text);
  writer.write({text[0], text[1]});
  std::vector<int32_t> drafts = writer.propose();
  CHECK(drafts == std::vector<int32_t>(text.begin() + 2, text.begin() + 4), "%zu drafts after 2 tokens", drafts.size());
  for (int i = 2; i < 40; i++) {
    writer.write({text[i]});
    drafts = writer.propose();
    const size_t expected = i + 1 < 3 ? 2 : i + 1 < 6 ? 4 : i + 1 < 16 ? 7 : kMost;
    CHECK(drafts.size() == expected, "%zu drafts after %d tokens", drafts.size(), i + 1);
    CHECK(std::equal(drafts.begin(), drafts.end(), text.begin() + i + 1), "other drafts after %d tokens", i + 1);
  }
  CHECK(writer.propose(3).size() == 3 && writer.propose(0).empty(), "more drafts than the limit of a pass");
}

void the_newest_and_the_longest_match_wins() {
  Writer writer;
  writer.write({1, 2, 3, 4, 5, 9, 2, 3, 6, 7, 1, 2, 3});
  CHECK(writer.propose().at(0) == 4, "not the match of three tokens");
  writer.write({8, 2, 3});
  CHECK(writer.propose().at(0) == 8, "not the newest match of two tokens");
}

void another_text_ends() {
  Speculation speculation = Writer::all();
  speculation.before = {5, 6, 7, 8, kEndOfText};
  Writer writer(speculation);
  writer.write({1, 5, 6});
  CHECK(writer.propose() == std::vector<int32_t>({7, 8}), "drafts beyond the end of a text");
}

void prices_decide() {
  Speculation speculation = Writer::all();
  const std::vector<int32_t> text = random_text(100, 1000, 2);
  const auto drafts = [&] {  // number of drafts after a long match
    Writer writer(speculation);
    writer.write(text), writer.write({text.begin(), text.begin() + 30});
    return (int)writer.propose().size();
  };
  for (int rows = 1; rows <= kMostRows; rows++) speculation.prices[rows - 1] = (float)rows;
  CHECK(drafts() == 0, "drafts that cost what they save");
  for (int rows = 2; rows <= 6; rows++) speculation.prices[rows - 1] = 1.5f;
  CHECK(drafts() == 5, "more than six rows, or fewer");
  speculation.prices.fill(1);
  CHECK(drafts() == kMost, "drafts that cost nothing");
}

// Drafts that cost time are no longer checked after they were wrong. Once they would have been right, they are checked
// again.
void rates_are_learned() {
  Speculation speculation = Writer::all();
  for (int rows = 1; rows < kMostRows; rows++) speculation.prices[rows] = 1.25f;
  Writer writer(speculation);
  const std::vector<int32_t> text = random_text(100, 1000, 3);
  writer.write(text), writer.write({text.begin(), text.begin() + 30});
  const int32_t wrong[] = {1000};
  int misses = 0;
  for (; misses < 200 && !writer.propose().empty(); misses++) writer.drafts.learn(wrong, 1, 1.25f);
  CHECK(misses > 1 && misses < 60, "%d wrong drafts", misses);
  int hits = 0;
  for (; hits < 200 && writer.propose().empty(); hits++) writer.drafts.learn(&text[30], 1, 1);
  CHECK(hits > 0 && hits < 20, "%d right drafts", hits);
}

void given_drafts() {
  Speculation speculation = Writer::all();
  speculation.given = {4, 5, -1, 6};
  Writer writer(speculation);
  CHECK(writer.propose() == std::vector<int32_t>({4, 5}), "not the drafts before the first -1");
  int32_t found[kMost];
  CHECK(writer.drafts.propose(3, kMost, found) == 1 && found[0] == 6, "not the draft of token 3");
  CHECK(writer.drafts.propose(4, kMost, found) == 0, "a draft beyond the last");
}

// ------------------------------------------------------------------------------------------------------------- prices

// The prices of a session, and passes with noisy times.
struct Clock {
  Speculation speculation = Writer::all();
  Prices prices;
  Random random{7};
  double unit = 0.013;  // time of a pass of one row; any value

  explicit Clock(const std::function<float(int)>& list) {
    speculation.corrected = true;
    for (int rows = 1; rows <= kMostRows; rows++) speculation.prices[rows - 1] = list(rows);
    prices.begin(speculation);
  }
  float pass(int rows, double time) { return prices.took(rows, unit * time * random.uniform(0.97f, 1.03f)); }
  double error(const std::function<float(int)>& truth, const std::vector<int>& of) const {
    double most = 0;
    for (const int rows : of) most = std::max(most, std::abs(std::log((double)prices.of(rows) / truth(rows))));
    return most;
  }
};

float cheap(int rows) { return 1 + 0.1f * (float)(rows - 1); }
float dear(int rows) { return 1 + 0.45f * (float)(rows - 1); }

void wrong_prices_converge() {
  const std::vector<int> sizes = {2, 3, 5, 8, 16};
  struct {
    float (*list)(int), (*truth)(int);
  } const ways[] = {{cheap, dear}, {dear, cheap}};
  for (const auto& [list, truth] : ways) {
    Clock clock(list);
    for (int i = 0; i < 5; i++) clock.pass(1, 1);
    for (const int rows : sizes) clock.pass(rows, truth(rows)), clock.pass(rows, truth(rows)), clock.pass(1, 1);
    CHECK(clock.error(truth, sizes) < 0.12, "off by %.2f after two passes of each", clock.error(truth, sizes));
    for (int rows = 2; rows <= kMostRows; rows++)
      CHECK(clock.prices.of(rows) >= clock.prices.of(rows - 1) && clock.prices.of(rows) <= (float)rows,
            "%d rows cost %.2f", rows, clock.prices.of(rows));
    for (int i = 0; i < 20; i++) clock.pass(2, truth(2));  // these say little about other numbers of rows
    CHECK(clock.error(truth, sizes) < 0.2, "off by %.2f after passes of two rows", clock.error(truth, sizes));
    for (int i = 0; i < 12; i++)
      for (const int rows : sizes) clock.pass(1, 1), clock.pass(rows, list(rows));  // times have changed
    CHECK(clock.error(list, sizes) < 0.12, "off by %.2f after a change", clock.error(list, sizes));
  }
}

void what_is_measured_helps_what_is_not() {
  Clock clock(cheap);
  clock.pass(1, 1);
  for (int i = 0; i < 3; i++) clock.pass(2, 1.8);
  CHECK(clock.prices.of(2) > 1.7f && clock.prices.of(4) > 1.5f * cheap(4), "four rows at %.2f", clock.prices.of(4));
}

void a_disturbed_pass_changes_nothing() {
  Clock clock(dear);
  const auto check = [&](const char* what) {
    for (int rows = 1; rows <= kMostRows; rows++)
      CHECK(std::abs(clock.prices.of(rows) / dear(rows) - 1) < 0.1f, "%s: %d rows at %.2f", what, rows,
            clock.prices.of(rows));
  };
  clock.pass(1, 1);
  clock.pass(4, 10 * dear(4));
  check("after the first pass");
  for (int i = 0; i < 40; i++) {
    const double slow = i % 7 == 6 ? 5 : 1;
    clock.pass(1, i % 5 == 4 ? 3 : 1);
    clock.pass(2 + 2 * (i % 3), slow * dear(2 + 2 * (i % 3)));
    check("with every seventh pass disturbed");
  }
  for (int i = 0; i < 100; i++) clock.pass(1, 1), clock.pass(4, dear(4));
  for (const double unit : {0.03, 0.001}) {  // all passes become slower or faster
    clock.unit = unit;
    for (int i = 0; i < 5; i++) clock.pass(1, 1);
    for (int i = 0; i < 9; i++) clock.pass(4, dear(4)), check("with another unit");
  }
}

void rows_are_tried_step_by_step() {
  Clock clock([](int) { return 1.0f; });
  Drafts drafts;
  drafts.begin(clock.speculation, clock.prices);
  const std::vector<int32_t> text = random_text(100, 1000, 4);
  for (const int32_t token : text) drafts.add(token);
  for (int i = 0; i < 30; i++) drafts.add(text[i]);
  int32_t found[kMost];
  for (int rows = 2; rows <= kMostRows; rows *= 2) {
    CHECK(clock.prices.most_rows() == rows, "%d", clock.prices.most_rows());
    CHECK(1 + drafts.propose(0, kMost, found) == rows, "not a pass of %d rows", rows);
    clock.pass(1, 1);
    clock.pass(rows, 1);
  }
  clock.prices.begin(clock.speculation);
  CHECK(clock.prices.most_rows() == kMostRows, "the next call starts with fewer rows");
  clock.speculation.prices[1] = 1.5f;
  clock.prices.begin(clock.speculation);
  CHECK(clock.prices.most_rows() == 2 && clock.prices.of(2) == 1.5f, "another list does not reset the prices");
}

void prices_that_are_not_corrected_stay() {
  Clock clock(cheap);
  clock.speculation.corrected = false;
  clock.prices.begin(clock.speculation);
  for (int i = 0; i < 50; i++) clock.pass(1, 1), clock.pass(4, 9);
  CHECK(clock.prices.of(4) == cheap(4) && !clock.prices.try_for(0) && clock.prices.most_rows() == kMostRows, "%.2f",
        clock.prices.of(4));
}

// An answer may lose little at its start. If nearly all drafts of a class are right, a pass may risk more.
void an_answer_loses_little() {
  Speculation speculation = Writer::all();
  for (int rows = 2; rows <= kMostRows; rows++) speculation.prices[rows - 1] = 1.2f;
  const std::vector<int32_t> text = random_text(100, 1000, 5);
  Writer other(speculation);
  other.write(text), other.write({text.begin(), text.begin() + 8});
  const int32_t drawn[] = {text[8]};
  const auto proposed = [&] { return !other.propose().empty(); };
  CHECK(!proposed(), "a pass risks 0.2 passes at the start");
  int passes = 1;
  for (; passes < 100; passes++) {  // each pass adds to what may be lost, and no draft is checked
    other.propose(0), other.drafts.learn(drawn, 1, 1);
    if (proposed()) break;
  }
  CHECK(passes > 10 && passes < 30, "%d passes", passes);
  Writer copy(speculation);
  copy.write(text), copy.write({text.begin(), text.begin() + 20});
  CHECK(copy.propose().size() == kMost, "fewer drafts after a long match");
  const int32_t right[] = {text[20], text[21]};
  copy.drafts.learn(right, 2, 4);
  CHECK(copy.propose().empty(), "drafts after a pass with a cost of four");
}

void trials_are_saved_for() {
  Clock clock(dear);
  for (int i = 0; i < 100; i++) clock.pass(1, 1);
  CHECK(!clock.prices.try_for(0.31f) && clock.prices.try_for(0.2f) && !clock.prices.try_for(0.2f),
        "100 passes do not save 0.3");
  for (int i = 0; i < 10000; i++) clock.pass(1, 1);
  CHECK(!clock.prices.try_for(1.01f) && clock.prices.try_for(0.9f), "10,000 passes do not save 1");
}

// While a text is copied, trials correct a list by which drafts never pay. A list that is right stays.
void drafts_start_again() {
  for (const bool wrong : {true, false}) {
    const auto never = [](int rows) { return 0.99f * (float)rows; };
    Clock clock(never);
    const std::vector<int32_t> text = random_text(1000, 30000, 8);
    Drafts drafts;
    drafts.begin(clock.speculation, clock.prices);
    for (const int32_t token : text) drafts.add(token);
    double time = 0, last = 0;
    int at = 0;
    while (at < 950) {
      int32_t proposed[kMostRows];
      const int count = drafts.propose(0, kMost, proposed);
      const double cost = wrong ? cheap(1 + count) : never(1 + count);
      int accepted = 0;
      while (accepted < count && proposed[accepted] == text[at + accepted]) accepted++;
      drafts.learn(&text[at], 1 + accepted, clock.pass(1 + count, cost));
      for (int i = 0; i <= accepted; i++) drafts.add(text[at + i]);
      at += 1 + accepted, time += cost;
      if (at < 800) last = time;
    }
    if (wrong) CHECK(time - last < 40, "%.0f passes for the last 150 tokens, %.0f in all", time - last, time);
    if (!wrong) CHECK(time < 1.01 * at, "%.0f passes for %d tokens", time, at);
  }
}

// An answer whose drafts are all wrong, or right up to the same place, loses at most 1 % and 0.5 passes. With a list
// that is too low, all answers together lose at most 1 %.
void drafts_of_an_adversary_cost_little() {
  for (const int right : {0, 1, 2, 5, 14})
    for (const bool low : {false, true}) {
      const auto free = [](int) { return 1.0f; };
      Clock clock(low ? std::function<float(int)>(free) : dear);
      double time = 0, lost = 0;
      int tokens = 0;
      for (int answer = 0; answer < 20; answer++) {
        Drafts drafts;
        drafts.begin(clock.speculation, clock.prices);
        const std::vector<int32_t> text = random_text(400, 30000, answer);
        for (const int32_t token : text) drafts.add(token);
        double here = 0;
        int drawn = 0;
        for (int at = 0; drawn < 300;) {  // the text again, except that some tokens out of 20 differ
          int32_t next[kMostRows], proposed[kMostRows];
          for (int i = 0; i < kMostRows; i++) next[i] = text[(at + i) % 400] + ((at + i) % 20 < 20 - right ? 0 : 30000);
          const int count = drafts.propose(0, kMost, proposed);
          int accepted = 0;
          while (accepted < count && proposed[accepted] == next[accepted]) accepted++;
          const double cost = dear(1 + count);
          here += cost;
          drafts.learn(next, 1 + accepted, clock.pass(1 + count, cost));
          for (int i = 0; i <= accepted; i++) drafts.add(next[i]);
          at += 1 + accepted, drawn += 1 + accepted;
        }
        time += here, tokens += drawn;
        if (!low) CHECK(here < 1.01 * drawn + 0.5, "%d right: %.1f passes for %d tokens", right, here, drawn);
        lost = std::max(lost, here - drawn);
      }
      CHECK(time < 1.01 * tokens, "%d right: %.0f passes for %d tokens, %.1f more in one answer", right, time, tokens,
            lost);
    }
}

}  // namespace

int main() {
  drafts_are_those_of_a_search();
  a_copy_is_drafted();
  the_newest_and_the_longest_match_wins();
  another_text_ends();
  prices_decide();
  rates_are_learned();
  given_drafts();
  wrong_prices_converge();
  what_is_measured_helps_what_is_not();
  a_disturbed_pass_changes_nothing();
  rows_are_tried_step_by_step();
  prices_that_are_not_corrected_stay();
  an_answer_loses_little();
  trials_are_saved_for();
  drafts_start_again();
  drafts_of_an_adversary_cost_little();
  return 0;
}
