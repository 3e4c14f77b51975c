// Shared by the native tests: a check that reports its place, and random numbers that are equal on all machines.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

// Ends the program with a message if the condition is false. The other arguments are those of printf.
#define CHECK(condition, ...)                                              \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition); \
      std::fprintf(stderr, __VA_ARGS__);                                   \
      std::fputc('\n', stderr);                                            \
      std::exit(1);                                                        \
    }                                                                      \
  } while (0)

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}

  uint32_t bits() {
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    return (uint32_t)(state_ >> 32);
  }
  int below(int n) { return (int)(bits() % (uint32_t)n); }
  float uniform(float low, float high) { return low + (high - low) * (float)(bits() * 0x1p-32); }

  std::vector<float> floats(int64_t n, float low = -1, float high = 1) {
    std::vector<float> values(n);
    for (float& value : values) value = uniform(low, high);
    return values;
  }

 private:
  uint64_t state_;
};
