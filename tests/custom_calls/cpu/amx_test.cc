// AMX's products against the documented sums of TDPBF16PS, number by number; the choice of instructions; and on
// processors without AMX the library's machine code, instruction by instruction.
#include <cmath>
#include <string>

#include "decoder.h"
#include "latents.h"
#if defined(__x86_64__)
#include <immintrin.h>

#include "amx_trap.h"
#endif

// amx.cc with emulated tile registers, if test_native.py links it.
extern "C" __attribute__((weak)) const Kernels* laneformer_kernels_amx_emulated(const Kernels*);
extern "C" __attribute__((weak)) bool laneformer_agrees_amx_emulated();

namespace {

float flushed(float x) { return std::fabs(x) < std::ldexp(1.0f, -126) ? std::copysign(0.0f, x) : x; }

// The number with the upper 8 bits of its significand, rounded towards zero.
float upper(float x) {
  int exponent;
  const double fraction = std::frexp((double)x, &exponent);
  return (float)std::ldexp(std::trunc(std::ldexp(fraction, 8)), exponent - 8);
}

// The product of a row w of bf16 numbers and a vector x, in the instruction's order of sums: 32 columns of each part at
// a time. exact: x is float32, in three parts.
float documented(const std::vector<float>& w, const std::vector<float>& x, bool exact) {
  float sum = 0;
  for (size_t first = 0; first < w.size(); first += 32) {
    std::vector<float> left(x.begin() + (long)first, x.begin() + (long)std::min(first + 32, x.size()));
    left.resize(32);
    for (int part = 0; part < (exact ? 3 : 1); part++) {
      float chains[2] = {0, 0};
      for (size_t c = 0; c < 32; c++) {
        const float some = exact ? upper(left[c]) : left[c], weight = first + c < w.size() ? w[first + c] : 0;
        left[c] = flushed(left[c] - some);
        chains[c % 2] = flushed(std::fma(flushed(some), flushed(weight), chains[c % 2]));
      }
      sum = flushed(sum + flushed(chains[0] + chains[1]));
    }
  }
  return sum;
}

// A random number of bf16 or of float32, sometimes zero, and with a large spread subnormal or with subnormal products.
float any_number(Random& random, bool bf16, int spread) {
  if (random.below(50) == 0) return random.below(2) ? 0.0f : -0.0f;
  const float x = std::ldexp(random.uniform(1, 2), -random.below(spread)) * (random.below(2) ? 1 : -1);
  return bf16 ? upper(x) : x;
}

void documented_sums(const Kernels& k, int64_t columns, int tiles, int positions, int spread) {
  Random random(columns + 1000 * tiles + 10 * positions + spread);
  const int64_t stored = stored_columns(Dtype::bf16, columns), rows = tiles * kTile, ldy = rows + 1;
  std::vector<std::vector<float>> w(rows, std::vector<float>(columns)), x(positions, std::vector<float>(columns));
  std::vector<float> flat;
  std::vector<uint16_t> packed(rows * stored);
  for (int64_t r = 0; r < rows; r++)
    for (int64_t c = 0; c < columns; c++) {
      w[r][c] = any_number(random, true, spread);
      packed[r / kTile * stored * kTile + c / 2 * 2 * kTile + 2 * (r % kTile) + c % 2] =
          (uint16_t)(bits_of(w[r][c]) >> 16);
    }
  for (const Activations activations : {Activations::exact, Activations::rounded}) {
    const bool exact = activations == Activations::exact;
    flat.clear();
    for (auto& vector : x)
      for (float& number : vector) flat.push_back(number = any_number(random, !exact, spread));
    std::vector<float> prepared(prepared_floats(columns, positions), NAN), y(positions * ldy, 7);
    k.prepare(Dtype::bf16, activations, flat.data(), columns, columns, positions, prepared.data());
    k.product(Dtype::bf16, activations, packed.data(), prepared.data(), columns, tiles, positions, y.data(), ldy);
    for (int p = 0; p < positions; p++) {
      for (int64_t r = 0; r < rows; r++) {
        const float expected = documented(w[r], x[p], exact);
        CHECK(bits_of(y[p * ldy + r]) == bits_of(expected),
              "%s %s: %ld columns, row %ld of %ld, position %d of %d: %a, not %a", k.name, exact ? "exact" : "rounded",
              (long)columns, (long)r, (long)rows, p, positions, y[p * ldy + r], expected);
      }
      CHECK(y[p * ldy + rows] == 7, "%s wrote beyond the last row", k.name);
    }
  }
}

// Sums whose result is -0, and zeros that a register adds beyond the last column.
void signed_zeros(const Kernels& k) {
  constexpr int kColumns = 66;
  std::vector<float> w(kColumns), x(kColumns);
  for (const int c : {0, 32, 64, 65}) w[c] = x[c] = std::ldexp(1.0f, c < 64 ? -63 : -70);
  w[32] *= -1 - 0x1p-7f, w[64] *= -1, w[65] *= -1;
  std::vector<uint16_t> packed(kColumns * kTile);
  for (int i = 0; i < kColumns * kTile; i++) packed[i] = (uint16_t)(bits_of(w[i / (2 * kTile) * 2 + i % 2]) >> 16);
  for (const int positions : {1, 2}) {
    std::vector<float> both = x, prepared(prepared_floats(kColumns, positions)), y(positions * kTile);
    both.insert(both.end(), x.begin(), x.end());
    k.prepare(Dtype::bf16, Activations::rounded, both.data(), kColumns, kColumns, positions, prepared.data());
    k.product(Dtype::bf16, Activations::rounded, packed.data(), prepared.data(), kColumns, 1, positions, y.data(),
              kTile);
    CHECK(bits_of(y[0]) == bits_of(documented(w, x, false)), "%s: %a of %d positions", k.name, y[0], positions);
  }
}

// An infinity or NaN gives NaN, only in its own position.
void no_numbers(const Kernels& k) {
  constexpr int64_t kColumns = 70;
  const std::vector<uint16_t> w(kColumns * kTile, 0x3f80);
  for (const float number : {kInfinity, -kInfinity, NAN})
    for (const int positions : {1, 5, 20}) {
      std::vector<float> x(kColumns * positions, 1), prepared(prepared_floats(kColumns, positions)),
          y(positions * kTile);
      x[(positions - 1) * kColumns + 40] = number;
      k.prepare(Dtype::bf16, Activations::exact, x.data(), kColumns, kColumns, positions, prepared.data());
      k.product(Dtype::bf16, Activations::exact, w.data(), prepared.data(), kColumns, 1, positions, y.data(), kTile);
      for (int p = 0; p < positions; p++)
        CHECK(p + 1 < positions ? y[p * kTile + 3] == kColumns : std::isnan(y[p * kTile + 3]),
              "%s: %g in position %d of %d gives %g", k.name, number, positions - 1, positions, y[p * kTile + 3]);
    }
}

void all_of(const Kernels& k, bool whole) {
#if defined(__x86_64__)
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040);  // as workers compute
#endif
  for (const int spread : {6, 100}) {
    for (const int64_t columns : {1, 2, 31, 32, 33, 70, 130})
      for (const int positions : {1, 2, 16, 17, 33}) documented_sums(k, columns, 1 + positions % 3, positions, spread);
    for (const int positions : {3, 15, 31, 32, 48, 49, 65, 97, 128}) documented_sums(k, 40, 2, positions, spread);
    for (const int tiles : {4, 5, 6, 7}) documented_sums(k, 64, tiles, 1, spread);
  }
  for (const int positions : {1, 49}) documented_sums(k, 550, 2, positions, 6);  // several pieces of a tile
  signed_zeros(k);
  no_numbers(k);
#if defined(__x86_64__)
  _mm_setcsr(saved);
#endif
  if (!whole) return;
  all_latents(k);
  products(k);
  packed(k);
}

#if defined(__x86_64__)
int asked = 0;  // a bit for each query that was made
template <int number, bool answer>
bool ask() {
  asked |= 1 << number;
  return answer;
}

// AMX is available if all queries succeed, and is the last of the sets. After the first query that fails, no other is
// made.
void chooses() {
  const AmxQueries fine{ask<0, true>, ask<1, true>, ask<2, true>, ask<3, true>};
  const auto sets = [](const AmxQueries& queries) {
    asked = 0;
    std::vector<std::string> names;
    for (const InstructionSet& set : instruction_sets(queries)) names.push_back(set.name);
    return names;
  };
  const AmxQueries refusing[] = {{ask<0, false>, fine.in_system, fine.permitted, fine.agrees},
                                 {fine.in_processor, ask<1, false>, fine.permitted, fine.agrees},
                                 {fine.in_processor, fine.in_system, ask<2, false>, fine.agrees},
                                 {fine.in_processor, fine.in_system, fine.permitted, ask<3, false>}};
  std::vector<std::string> others = sets(refusing[0]);
  CHECK(others.back() == "portable", "%s is the last set without AMX", others.back().c_str());
  const bool able = others.front() == "avx512_bf16";  // the set to which AMX is added
  for (int i = 0; i < 4; i++) {
    CHECK(sets(refusing[i]) == others, "other sets after query %d failed", i);
    CHECK(asked == (able ? (2 << i) - 1 : 0), "queries %x were made, although %d failed", asked, i);
  }
  CHECK(choose_instructions(nullptr)->name == others.front(), "the default is not the first set");
  if (able) others.push_back("amx");
  CHECK(sets(fine) == others, "%zu sets with AMX", sets(fine).size());
}
#endif

}  // namespace

int main() {
  const Kernels& others = *choose_kernels("portable");
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool fused = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  const bool fused = true;
#endif
  if (laneformer_kernels_amx_emulated && fused) {
    CHECK(laneformer_agrees_amx_emulated(), "one position and several differ");
    all_of(*laneformer_kernels_amx_emulated(&others), true);
    std::printf("amx, emulated\n");
  }
#if defined(__x86_64__)
  if (!laneformer_emulates_amx()) chooses();
  const Kernels* kernels = choose_kernels("amx");
  // The set to which AMX is added may not be compiled, and a processor with AMX does not trap all of its instructions.
  const bool runs = kAmxQueries.in_processor() && kAmxQueries.in_system() && kAmxQueries.permitted();
  if (runs && !kernels) kernels = laneformer_kernels_amx(&others);
  if (kernels) {
    all_of(*kernels, true);
    std::printf("amx\n");
  } else if (choose_kernels("avx512") && !kAmxQueries.in_processor()) {
    trap_tiles();
    CHECK(laneformer_agrees_amx(), "one position and several differ");
    all_of(*laneformer_kernels_amx(&others), false);
    CHECK(trapped_tiles() > 10000, "%ld instructions", trapped_tiles());
    std::printf("amx, instruction by instruction\n");
  }
#endif
  return 0;
}
