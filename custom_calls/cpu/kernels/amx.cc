// The table of kernels for AMX: products of bf16 weights on tile registers for several positions, and the same sums on
// vectors for one position; latent attention is in attention/tile_latents.h. All other functions are those of another
// table. machine.cc makes the table and runs its trial product. Compiled for one instruction set, which LF_ISA names.
//
// A tile of weights has 16 rows and a line of it two columns, so 16 lines are a register as TDPBF16PS reads it.
//
// Invariant: the order of a sum is that of the instruction, for one position too, so a position has the same bits alone
// and with others. In 32 columns, the even and the odd ones are a chain of multiply-adds each, from zero. Both chains
// are added, then their sum is added to the total. For exact activations each float32 is the sum of three bf16 numbers,
// and 32 columns take three such steps, the largest parts first; products with bf16 weights are exact in float32's
// multiply-adds. The result of a vector with an infinity is NaN.
//
// No library templates in here, as in kernels.cc.
#include "attention/tile_latents.h"
#include "bf12_decode.h"
#include "formats.h"
#include "kernels.h"
#include "simd.h"
#include "tile_operands.h"

#define LF_JOIN2(a, b) a##b
#define LF_JOIN(a, b) LF_JOIN2(a, b)

namespace LF_ISA {
namespace {

using laneformer::Activations;
using laneformer::Dtype;
using laneformer::Kernels;

constexpr int kLines = kTileRows;                             // lines of weights in a register: one step
constexpr int64_t kStep = (int64_t)kLines * Bf16Line::bytes;  // bytes of these lines
constexpr int64_t kPieceLines = 256;                          // lines that all positions use before the next ones
constexpr int64_t kDecoded = kPiece / Bf16Line::bytes;        // the same for weights in 12 bits
constexpr int64_t kAhead = 1024;                              // bytes that one position prefetches ahead
static_assert(kDecoded % kLines == 0 && kPieceLines % kLines == 0, "whole registers");

const Kernels* others = nullptr;  // the table with all other functions

int64_t steps_of(int64_t columns) { return (columns + kColumns - 1) / kColumns; }  // of kColumns columns

// ------------------------------------------------------------------------------------------------------- one position

// Writes a position's parts as float32: [step][part][column].
template <int P>
void prepare_one(const float* x, int64_t columns, float* out) {
  for (int64_t k = 0; k < columns; k += kColumns, out += P * kColumns)
    for (int c = 0; c < kColumns; c += kWidth) {
      vf parts[P];
      split<P>(columns_of(x, k + c, columns), parts);
      each<P>([&](auto p) LF_INLINED { storef(out + p() * kColumns + c, parts[p()]); });
    }
}

// Multiplies `lines` lines of T tiles side by side, `tile` bytes apart, and prefetches `by` bytes ahead. earlier: y has
// the sums of earlier lines, whose number is a multiple of kLines. Between steps the sums are in memory, because the
// chains need the registers.
template <int P, int T>
__attribute__((noinline)) void multiply_lines(const char* w, int64_t tile, const float* x, int64_t lines, bool earlier,
                                              int64_t by, float* y) {
  for (; lines > 0; lines -= kLines, x += P * kColumns, earlier = true) {
    const int64_t ahead = lines * Bf16Line::bytes <= by ? by + (T - 1) * tile : by;  // at the end: of the next T tiles
    const bool padded = lines < kLines;
    const float *values = x, *const end = x + 2 * (padded ? lines : kLines);
    vf even[P][T][kVectors] = {}, odd[P][T][kVectors] = {};
    for (; values < end; values += 2, w += Bf16Line::bytes)
      each<T>([&](auto t) LF_INLINED {
        __builtin_prefetch(w + t() * tile + ahead);
        each<kVectors>([&](auto v) LF_INLINED {
          const vu pair = load<vu>(w + t() * tile + v() * sizeof(vu));
          const vf low = as_float(pair << 16), high = as_float(pair & 0xffff0000);
          each<P>([&](auto p) LF_INLINED {
            multiply_add<false>(even[p()][t()][v()], low, splat(values[p() * kColumns]));
            multiply_add<false>(odd[p()][t()][v()], high, splat(values[p() * kColumns + 1]));
          });
        });
      });
    each<T>([&](auto t) LF_INLINED {
      each<kVectors>([&](auto v) LF_INLINED {
        float* const to = y + t() * kTile + v() * kWidth;
        vf sum = earlier ? loadf(to) : vf{};
        each<P>([&](auto p) LF_INLINED {
          vf &a = even[p()][t()][v()], &b = odd[p()][t()][v()];
          if (padded) a += vf{}, b += vf{};  // like the zeros of a padded register: -0 becomes 0
          sum += a + b;
        });
        storef(to, sum);
      });
    });
  }
}

// Multiplies all tiles by one position, T at a time, then half as many.
template <int P, int T>
void tiles_of_one(const char* w, const float* x, int64_t lines, int64_t tiles, float* y) {
  const int64_t tile = lines * Bf16Line::bytes;
  for (; tiles >= T; tiles -= T, w += T * tile, y += T * kTile)
    multiply_lines<P, T>(w, tile, x, lines, false, kAhead, y);
  if constexpr (T > 1) {
    if (tiles) tiles_of_one<P, T / 2>(w, x, lines, tiles, y);
  }
}

// --------------------------------------------------------------------------------------------------- several positions

// How positions are divided among registers: `count` registers have `rows` positions each, the last one the rest. Two
// registers are multiplied at a time.
struct Registers {
  int positions, count, rows;
  explicit Registers(int of) : positions(of) {
    const int groups = (of + kAtOnce * kTileRows - 1) / (kAtOnce * kTileRows);
    count = of <= kTileRows ? 1 : kAtOnce * groups;
    rows = (of + count - 1) / count;
  }
  int rows_of(int number) const { return number + 1 < count ? rows : positions - number * rows; }
};

// Writes the positions' parts as bf16: [register][step][part][row][column].
template <int P>
void prepare_several(const float* x, int64_t ldx, int64_t columns, int positions, char* out) {
  const Registers registers(positions);
  const int64_t steps = steps_of(columns);
  for (int number = 0; number < registers.count; number++) {
    const int rows = registers.rows_of(number);
    for (int row = 0; row < rows; row++, x += ldx)
      for (int64_t step = 0; step < steps; step++)
        for (int c = 0; c < kColumns; c += 2 * kWidth) {
          vf low[P], high[P];
          split<P>(columns_of(x, step * kColumns + c, columns), low);
          split<P>(columns_of(x, step * kColumns + c + kWidth, columns), high);
          each<P>([&](auto p) LF_INLINED {
            const vf words = pairs(as_bits(low[p()]) >> 16, as_bits(high[p()]) >> 16, CountUp<kWidth>{});
            std::memcpy(out + ((step * P + p()) * rows + row) * kTileBytes + 2 * c, &words, sizeof words);
          });
        }
    out += steps * P * rows * kTileBytes;
  }
}

// Some steps of lines of tiles, `tile` bytes apart, and the vectors of one or two registers of positions.
struct Block {
  const char* w;
  int64_t tile, steps;
  const char* x;
  int64_t first_bytes, second_bytes, second;  // bytes of a step's part in each register; offset of the second register
  float* y;
  int64_t second_y, ldy;  // floats to the second register's positions, and from position to position
  bool earlier;           // y has the sums of earlier lines
  const char* ahead;      // what to prefetch, ahead_tile bytes apart: `fetched` lines per step
  int64_t ahead_tile;
  int fetched;
};

// Multiplies A registers of positions by T tiles.
template <int P, int A, int T>
__attribute__((noinline)) void multiply_tiles(const Block& block) {
  const int64_t ld = block.ldy * (int64_t)sizeof(float), tile = block.tile, ahead_tile = block.ahead_tile;
  float* const y[] = {block.y, block.y + block.second_y};
  each<A>([&](auto a) LF_INLINED {
    each<T>([&](auto t) LF_INLINED {
      constexpr int sum = a() * kAtOnce + t();
      block.earlier ? tile_load<sum>(y[a()] + t() * kTile, ld) : tile_zero<sum>();
    });
  });
  const char *w = block.w, *x = block.x, *next = block.x + block.second, *ahead = block.ahead;
  const char* const end = w + block.steps * kStep;
  const int64_t part = block.first_bytes, next_part = block.second_bytes, fetched = block.fetched * Bf16Line::bytes;
  for (; w < end; w += kStep, ahead += kStep) {
    for (int64_t line = 0; line < fetched; line += Bf16Line::bytes)
      each<T>([&](auto t) LF_INLINED { __builtin_prefetch(ahead + t() * ahead_tile + line); });
    each<T>([&](auto t) LF_INLINED { tile_load<6 + t()>(w + t() * tile, Bf16Line::bytes); });
    each<P>([&](auto) LF_INLINED {
      tile_load<4>(x, kTileBytes), x += part;
      if constexpr (A > 1) tile_load<5>(next, kTileBytes), next += next_part;
      each<A>([&](auto a) LF_INLINED {
        each<T>([&](auto t) LF_INLINED { tile_multiply<a() * kAtOnce + t(), 4 + a(), 6 + t()>(); });
      });
    });
  }
  each<A>([&](auto a) LF_INLINED {
    each<T>([&](auto t) LF_INLINED { tile_store<a() * kAtOnce + t()>(y[a()] + t() * kTile, ld); });
  });
}

// Multiplies all positions by `steps` steps of T tiles' lines, the first of which has number `first`, a multiple of
// kLines. w, tile: these lines, and bytes from tile to tile. ahead: what to prefetch meanwhile, or null.
template <int P, int T>
void all_positions(Configured& configured, const Registers& registers, const char* w, int64_t tile, int64_t steps,
                   const char* x, int64_t first, int64_t all_steps, float* y, int64_t ldy, const char* ahead,
                   int64_t ahead_tile) {
  const int groups = (registers.count + kAtOnce - 1) / kAtOnce, fetched = (kLines + groups - 1) / groups;
  const int64_t full = registers.rows * kTileBytes, done = first / kLines * P;
  for (int group = 0; group < groups; group++) {
    const int number = group * kAtOnce, rows = registers.rows_of(number);
    const int more = number + 1 < registers.count ? registers.rows_of(number + 1) : 0;
    const char* const vectors = x + number * full * all_steps * P + done * full;
    const int64_t bytes = more * kTileBytes, next = all_steps * P * full + done * (bytes - full);
    configured.use(rows, more);
    const Block block{w,
                      tile,
                      steps,
                      vectors,
                      full,
                      bytes,
                      next,
                      y + number * registers.rows * ldy,
                      registers.rows * ldy,
                      ldy,
                      first > 0,
                      ahead + group * fetched * Bf16Line::bytes,
                      ahead_tile,
                      ahead ? fetched : 0};
    more ? multiply_tiles<P, 2, T>(block) : multiply_tiles<P, 1, T>(block);
  }
}

// Multiplies all tiles by several positions, T at a time, then half as many.
template <int P, int T>
void tiles_of_several(Configured& configured, const char* w, const char* x, int64_t lines, int64_t tiles, int positions,
                      float* y, int64_t ldy) {
  const Registers registers(positions);
  const int64_t tile = lines * Bf16Line::bytes, all_steps = (lines + kLines - 1) / kLines;
  for (; tiles >= T; tiles -= T, w += T * tile, y += T * kTile) {
    const auto times = [&](const char* some, int64_t apart, int64_t steps, int64_t first, const char* ahead) {
      all_positions<P, T>(configured, registers, some, apart, steps, x, first, all_steps, y, ldy, ahead, tile);
    };
    const int64_t rest = lines % kLines, whole = lines - rest;
    for (int64_t first = 0; first < whole; first += kPieceLines) {
      const int64_t end = first + kPieceLines < whole ? first + kPieceLines : whole;
      times(w + first * Bf16Line::bytes, tile, (end - first) / kLines, first,
            end < whole ? w + end * Bf16Line::bytes : w + T * tile);
    }
    if (rest) {  // the last step, padded with zeros
      alignas(64) char padded[T * kStep] = {};
      for (int t = 0; t < T; t++)
        std::memcpy(padded + t * kStep, w + t * tile + whole * Bf16Line::bytes, rest * Bf16Line::bytes);
      times(padded, kStep, 1, whole, nullptr);
    }
  }
  if constexpr (T > 1) {
    if (tiles) tiles_of_several<P, T / 2>(configured, w, x, lines, tiles, positions, y, ldy);
  }
}

// Decodes T tiles in 12 bits piece by piece. Calls f(piece, count, first): `count` lines of each tile from number
// `first` on, kPiece bytes from tile to tile, padded with zeros to whole steps.
template <int T, class F>
void decoded(const laneformer::Bf12& weights, int64_t first_tile, int64_t lines, F f) {
  alignas(64) char piece[T * kPiece];
  const vb table = table_of(weights);
  const int64_t units = (lines + kUnitLines - 1) / kUnitLines;
  const uint32_t* exceptions[T];
  for (int t = 0; t < T; t++) exceptions[t] = weights.exceptions + weights.starts[first_tile + t];
  for (int64_t first = 0; first < lines; first += kDecoded) {
    const int64_t count = lines - first < kDecoded ? lines - first : kDecoded;
    const int64_t unit = first / kUnitLines, some = (count + kUnitLines - 1) / kUnitLines;
    for (int t = 0; t < T; t++) {
      const char* const from = weights.data + ((first_tile + t) * units + unit) * kUnitBytes;
      exceptions[t] = decode(from, table, exceptions[t], unit, some, kAhead, piece + t * kPiece);
      const int64_t padded = (count + kLines - 1) / kLines * kLines;
      std::memset(piece + t * kPiece + count * Bf16Line::bytes, 0, (padded - count) * Bf16Line::bytes);
    }
    f(piece, count, first);
  }
}

// Multiplies all tiles in 12 bits, T at a time, then half as many.
template <int P, int T>
void tiles_of_bf12(Configured& configured, const laneformer::Bf12& weights, int64_t first_tile, const void* x,
                   int64_t lines, int64_t tiles, int positions, float* y, int64_t ldy) {
  const Registers registers(positions);
  const int64_t all_steps = (lines + kLines - 1) / kLines;
  for (; tiles >= T; tiles -= T, first_tile += T, y += T * kTile)
    decoded<T>(weights, first_tile, lines, [&](const char* piece, int64_t count, int64_t first) {
      if (positions == 1) {
        multiply_lines<P, T>(piece, kPiece, (const float*)x + first / kLines * P * kColumns, count, first > 0, 0, y);
      } else {
        all_positions<P, T>(configured, registers, piece, kPiece, (count + kLines - 1) / kLines, (const char*)x, first,
                            all_steps, y, ldy, nullptr, 0);
      }
    });
  if constexpr (T > 1) {
    if (tiles) tiles_of_bf12<P, T / 2>(configured, weights, first_tile, x, lines, tiles, positions, y, ldy);
  }
}

// ---------------------------------------------------------------------------------------------------------- the table

// Calls f(Count<P>{}) with the number of parts of a float32.
template <class F>
void with_parts(Activations activations, F f) {
  activations == Activations::exact ? f(Count<3>{}) : f(Count<1>{});
}

void prepare(Dtype dtype, Activations activations, const float* x, int64_t ldx, int64_t columns, int positions,
             void* out) {
  if (dtype != Dtype::bf16) return others->prepare(dtype, activations, x, ldx, columns, positions, out);
  with_parts(activations, [&](auto p) {
    if (positions == 1) {
      prepare_one<p()>(x, columns, (float*)out);
    } else {
      prepare_several<p()>(x, ldx, columns, positions, aligned((char*)out));
    }
  });
}

void product(Dtype dtype, Activations activations, const void* w, const void* x, int64_t columns, int64_t tiles,
             int positions, float* y, int64_t ldy) {
  if (dtype != Dtype::bf16) return others->product(dtype, activations, w, x, columns, tiles, positions, y, ldy);
  const int64_t lines = (columns + 1) / 2;
  with_parts(activations, [&](auto p) {
    constexpr int kStreams = p() == 1 ? 4 : 2;  // tiles side by side; the chains of more would not fit in registers
    if (positions == 1) return tiles_of_one<p(), kStreams>((const char*)w, (const float*)x, lines, tiles, y);
    Configured configured;
    tiles_of_several<p(), kAtOnce>(configured, (const char*)w, aligned((const char*)x), lines, tiles, positions, y,
                                   ldy);
  });
}

void product_bf12(Activations activations, const laneformer::Bf12& weights, const void* x, int64_t columns,
                  int64_t tiles, int positions, float* y, int64_t ldy) {
  const int64_t lines = (columns + 1) / 2;
  with_parts(activations, [&](auto p) {
    Configured configured;
    tiles_of_bf12<p(), kAtOnce>(configured, weights, 0, positions == 1 ? x : aligned((const char*)x), lines, tiles,
                                positions, y, ldy);
  });
}

// Float32 multiply-adds as products of exact activations make them: three tile multiplications for one.
float multiply_adds(int64_t count) {
  constexpr int64_t kProducts = kTileRows * kTile * kColumns, kSums = kAtOnce * kAtOnce;
  Configured configured;
  configured.use(kTileRows, kTileRows);
  each<8>([&](auto tile) LF_INLINED { tile_zero<tile()>(); });
  for (int64_t i = 0; i < 3 * count; i += kSums * kProducts)
    each<kAtOnce>([&](auto a) LF_INLINED {
      each<kAtOnce>([&](auto t) LF_INLINED { tile_multiply<a() * kAtOnce + t(), 4 + a(), 6 + t()>(); });
    });
  float sums[kTileRows * kTile];
  tile_store<0>(sums, kTile * sizeof(float));
  return sums[0];
}

Kernels table;

// A pseudorandom number of either sign, with one of `spread` exponents.
float any_number(uint32_t& state, int spread) {
  state = state * 1664525 + 1013904223;
  const uint32_t bits = (state & 0x80000000) | (127 - state / 64 % spread) << 23 | (state >> 8 & 0x7fffff);
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Whether each of `positions` positions has the same bits alone and with the others, for numbers of `spread` exponents.
bool agrees(Activations activations, int positions, int spread) {
  constexpr int kMost = 49, kWide = 2 * kColumns * 5 + 3, kRows = 3 * kTile;
  const int64_t columns = kWide;
  static uint16_t w[(kWide + 1) * kRows];
  static float x[kMost * kWide], prepared[(kWide + kColumns) * (kMost + kMost / 2 + 3)], y[kMost * kRows], alone[kRows];
  uint32_t state = (uint32_t)(positions + spread);
  for (uint16_t& weight : w) weight = (uint16_t)(as_bits(splat(any_number(state, spread)))[0] >> 16);
  for (int64_t i = kRows / kTile; i > 0; i--)  // zeros for the padding of each tile's last line
    for (int r = 0; r < kTile; r++) w[i * (columns + 1) * kTile - 1 - 2 * r] = 0;
  for (float& number : x) number = any_number(state, spread);
  prepare(Dtype::bf16, activations, x, columns, columns, positions, prepared);
  product(Dtype::bf16, activations, w, prepared, columns, kRows / kTile, positions, y, kRows);
  for (int p = 0; p < positions; p++) {
    prepare(Dtype::bf16, activations, x + p * columns, columns, columns, 1, prepared);
    product(Dtype::bf16, activations, w, prepared, columns, kRows / kTile, 1, alone, kRows);
    if (std::memcmp(alone, y + p * kRows, sizeof alone) != 0) return false;
  }
  return true;
}

}  // namespace
}  // namespace LF_ISA

#define LF_TEXT2(x) #x
#define LF_TEXT(x) LF_TEXT2(x)

extern "C" const laneformer::Kernels* LF_JOIN(laneformer_kernels_, LF_ISA)(const laneformer::Kernels* others) {
  using namespace LF_ISA;
  LF_ISA::others = others;
  table = *others;
  table.name = LF_TEXT(LF_ISA);
  table.product = product, table.product_bf12 = product_bf12, table.prepare = prepare;
  table.attend_latents = attend_latents;
  table.multiply_adds = multiply_adds;
  return &table;
}

extern "C" bool LF_JOIN(laneformer_agrees_, LF_ISA)() {
#if defined(__x86_64__)  // flushes subnormals to zero, as workers do
  const unsigned saved = _mm_getcsr();
  _mm_setcsr(saved | 0x8040);
#endif
  constexpr laneformer::Activations kinds[] = {laneformer::Activations::exact, laneformer::Activations::rounded};
  constexpr int blocks[] = {2, 17, 49}, spreads[] = {8, 40, 120};
  bool same = true;
  for (const auto activations : kinds)
    for (const int positions : blocks)
      for (const int spread : spreads) same = same && LF_ISA::agrees(activations, positions, spread);
#if defined(__x86_64__)
  _mm_setcsr(saved);
#endif
  return same;
}

extern "C" bool LF_JOIN(laneformer_emulates_, LF_ISA)() {
#if defined(LF_EMULATE_TILES)
  return true;
#else
  return false;
#endif
}
