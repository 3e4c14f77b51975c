// Simulates drafts on known texts with a simulated clock. test_drafts.py supplies the texts, the prices at the start
// and the true prices.
//
// Arguments: a file of int32 that contains, for each text, the number of prompt tokens, the number of answer tokens and
// the tokens; whether each text has its own session; a seed; the deviation of pass times; the chance of a disturbed
// pass; the prices of 1, 2, ... rows at the start, then the true prices. Prints one line for each text: time as a
// multiple of the time without drafts, passes, drafts, right drafts, and the last prices of 2, 4, 8 and 16 rows.
#include <cmath>
#include <fstream>
#include <random>

#include "../common/drafts.h"
#include "check.h"

using namespace laneformer;

int main(int, char** arguments) {
  char** argument = arguments;
  std::ifstream file(*++argument, std::ios::binary);
  const bool fresh = std::atoi(*++argument);
  std::mt19937 random(std::atoi(*++argument));
  const double deviation = std::atof(*++argument), disturbed = std::atof(*++argument);
  Speculation speculation;
  speculation.most = kMostRows - 1;
  speculation.corrected = true;
  std::array<double, kMostRows> truth;
  for (float& price : speculation.prices) price = (float)std::atof(*++argument);
  for (double& price : truth) price = std::atof(*++argument);
  std::normal_distribution<double> noise(0, deviation);
  std::uniform_real_distribution<double> chance;
  const auto measured = [&](int rows) {  // the measured time; disturbances are independent of drafts
    return truth[rows - 1] * std::exp(noise(random)) * (chance(random) < disturbed ? 2 + 4 * chance(random) : 1);
  };
  Prices prices;
  int32_t sizes[2];
  while (file.read((char*)sizes, sizeof sizes)) {
    std::vector<int32_t> text(sizes[0] + sizes[1]);
    CHECK(file.read((char*)text.data(), (int64_t)text.size() * 4), "the file is truncated");
    if (fresh) prices = {};
    Drafts drafts;
    drafts.begin(speculation, prices);
    for (int i = 0; i <= sizes[0]; i++) drafts.add(text[i]);  // the prompt's pass draws the first token
    double time = 0;
    int passes = 0, drafted = 0, right = 0;
    const int32_t* const answer = text.data() + sizes[0];
    for (int drawn = 1; drawn < sizes[1]; passes++) {
      int32_t proposed[kMostRows];
      const int count = drafts.propose(drawn, sizes[1] - drawn - 1, proposed);
      int accepted = 0;
      while (accepted < count && proposed[accepted] == answer[drawn + accepted]) accepted++;
      time += truth[count];
      const float cost = prices.took(1 + count, measured(1 + count));
      drafts.learn(answer + drawn, 1 + accepted, cost);
      for (int i = 0; i <= accepted; i++, drawn++) drafts.add(answer[drawn]);
      drafted += count, right += accepted;
    }
    std::printf("%.4f %d %d %d", time / (sizes[1] - 1), passes, drafted, right);
    for (const int rows : {2, 4, 8, 16}) std::printf(" %.3f", prices.of(rows));
    std::printf("\n");
  }
  return 0;
}
