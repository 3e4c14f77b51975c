// Drafts from the text: what they copy, how many they are, and what they learn.
#include "../common/drafts.h"

#include <algorithm>
#include <vector>

#include "check.h"

using namespace laneformer;

namespace {

constexpr int kMost = kMostRows - 1;

// A text and its drafts.
struct Writer {
  Speculation speculation;
  std::vector<int32_t> text;
  Drafts drafts;

  explicit Writer(const Speculation& with = all()) : speculation(with), text(speculation.before) {
    drafts.begin(speculation);
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

// Drafts follow the newest place of the longest n-gram, as searching the whole text finds it.
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

// A long text that is written again is drafted whole, as soon as a few tokens agree.
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
  CHECK(writer.propose(3).size() == 3 && writer.propose(0).empty(), "the limit of a pass");
}

void the_newest_and_the_longest_match_wins() {
  Writer writer;
  writer.write({1, 2, 3, 4, 5, 9, 2, 3, 6, 7, 1, 2, 3});
  CHECK(writer.propose().at(0) == 4, "of three tokens");
  writer.write({8, 2, 3});
  CHECK(writer.propose().at(0) == 8, "of two tokens");
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
  const auto drafts = [&] {  // of a long match
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

// Wrong drafts are made no more where they cost something; once they would be right, they come back.
void rates_are_learned() {
  Speculation speculation = Writer::all();
  for (int rows = 1; rows < kMostRows; rows++) speculation.prices[rows] = 1.25f;
  Writer writer(speculation);
  const std::vector<int32_t> text = random_text(100, 1000, 3);
  writer.write(text), writer.write({text.begin(), text.begin() + 30});
  const int32_t wrong[] = {1000};
  int misses = 0;
  for (; misses < 200 && !writer.propose().empty(); misses++) writer.drafts.learn(wrong, 1);
  CHECK(misses > 3 && misses < 60, "%d wrong drafts", misses);
  int hits = 0;
  for (; hits < 200 && writer.propose().empty(); hits++) writer.drafts.learn(&text[30], 1);
  CHECK(hits > 0 && hits < 20, "%d right ones", hits);
}

void given_drafts() {
  Speculation speculation = Writer::all();
  speculation.given = {4, 5, -1, 6};
  Writer writer(speculation);
  CHECK(writer.propose() == std::vector<int32_t>({4, 5}), "up to the first that is none");
  int32_t found[kMost];
  CHECK(writer.drafts.propose(3, kMost, found) == 1 && found[0] == 6, "by number");
  CHECK(writer.drafts.propose(4, kMost, found) == 0, "beyond the last");
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
  return 0;
}
