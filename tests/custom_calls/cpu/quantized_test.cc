// Products with weights of 8 and 4 bits on every instruction set that this machine supports: they are within bounds of
// sums in double, and have the same bits on all sets, for any number of positions and tiles. This file writes the tiles
// by the description in kernels/quantized.h.
#include "kernels/quantized.h"

#include <algorithm>
#include <random>
#include <vector>

#include "check.h"

using namespace laneformer;

namespace {

enum class Values { normal, outliers, zero_blocks, tiny, huge, equal };

double e4m3(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const double size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return code & 128 ? -size : size;
}

double value_of(Code code, int bits, int zero) {
  static const double e2m1[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  switch (code) {
    case Code::int4: return bits - zero;
    case Code::e2m1: return bits & 8 ? -e2m1[bits & 7] : e2m1[bits & 7];
    case Code::int8: return (int8_t)bits - zero;
    default: return e4m3(bits);
  }
}

struct Matrix {
  Quantized format;
  int64_t columns;
  int tiles;
  std::vector<char> data;
  std::vector<double> values;  // [rows][columns]

  Matrix(const Quantized& of, int64_t k, int count, Values kind, std::mt19937& random)
      : format(of), columns(k), tiles(count), data(count * tile_bytes(of, k)), values(count * kTile * k) {
    std::uniform_int_distribution<int> any(0, 255);
    const bool nibbles = bits_of(of.code) == 4;
    for (int t = 0; t < tiles; t++) {
      const bool alone = of.code == Code::e4m3 || (t % 2 == 0 && t + 1 == tiles);
      const int pair = alone ? 1 : 2, member = alone ? 0 : t % 2;
      char* at = data.data() + (t - member) * tile_bytes(of, k);
      std::vector<double> factors(kTile, 1);
      for (int r = 0; r < kTile && of.rows; r++) {
        const float factor = 0.001f * (float)(1 + any(random));
        std::memcpy(at + 4 * (member * kTile + r), &factor, 4);
        factors[r] = factor;
      }
      at += of.rows ? pair * 4 * kTile : 0;
      for (int64_t first = 0; first < columns; first += kChunkColumns) {
        const int64_t here = std::min(kChunkColumns, columns - first),
                      groups = of.group ? (here + of.group - 1) / of.group : 0;
        std::vector<double> scales(std::max<int64_t>(groups, 1) * kTile, 1);
        std::vector<int> zeros(scales.size(), nibbles ? 8 : 0);
        char* to = at + member * scale_bytes(of, here);
        for (int64_t g = 0; g < groups; g++)
          for (int r = 0; r < kTile; r++) {
            if (of.shared && r) {
              scales[g * kTile + r] = scales[g * kTile];
              continue;
            }
            scales[g * kTile + r] = put_scale(to, any(random));
          }
        for (int64_t i = 0; i < groups * kTile && of.zeros; i++) {
          const int most = nibbles ? 15 : 255,
                    stored = kind == Values::equal ? most * (int)(i % 2) : any(random) & most;
          *to++ = (char)stored;
          zeros[i] = nibbles ? stored : stored - 128;
        }
        at += pair * scale_bytes(of, here);
        CHECK(to <= at, "scales take %ld bytes", (long)scale_bytes(of, here));
        const int64_t padded = padded_columns(here);
        for (int64_t c = 0; c < padded; c++)
          for (int r = 0; r < kTile; r++) {
            int bits = kind == Values::equal ? (of.code == Code::e4m3   ? 0x7e
                                                : of.code == Code::e2m1 ? 7
                                                : of.code == Code::int8 ? 0x80
                                                                        : 15)
                                             : any(random) & (nibbles ? 15 : 255);
            if (of.code == Code::e4m3 && (bits & 0x7f) == 0x7f) bits ^= 1;
            if (of.code == Code::e4m3 && c % 3 == 0 && kind != Values::equal) bits &= 0x87;  // subnormal
            const int64_t place = of.group ? c / of.group * kTile + r : r;
            if (c >= here) {
              bits = of.code == Code::int4 ? 8 : 0;
            } else {
              values[(t * kTile + r) * columns + first + c] =
                  value_of(of.code, bits, zeros[place]) * scales[of.group ? place : 0] * factors[r];
            }
            put_code(at + member * 64, pair, c, r, bits);
          }
        at += pair * code_bytes(of, here);
      }
    }
  }

  double put_scale(char*& to, int random) {
    switch (format.scale) {
      case ScaleType::e8m0: *to++ = (char)(120 + random % 16); return std::ldexp(1, random % 16 - 7);
      case ScaleType::e4m3: *to++ = (char)(random % 127); return e4m3(random % 127);
      case ScaleType::bf16:
      case ScaleType::f16: {
        const bool bf16 = format.scale == ScaleType::bf16;
        const uint16_t bits = (uint16_t)((bf16 ? 0x3c00 : 0x2c00) + random);
        std::memcpy(to, &bits, 2), to += 2;
        return bf16 ? std::ldexp(128 + (bits & 127), (bits >> 7) - 134)
                    : std::ldexp(1024 + (bits & 1023), (bits >> 10) - 25);
      }
      default: {
        const float scale = 0.01f * (float)(1 + random);
        std::memcpy(to, &scale, 4), to += 4;
        return scale;
      }
    }
  }

  void put_code(char* codes, int pair, int64_t c, int r, int bits) const {
    if (bits_of(format.code) == 4) {
      codes[c / 8 * 64 * pair + 4 * r + c % 4] |= (char)(bits << (c % 8 / 4 * 4));
    } else if (format.code == Code::int8) {
      codes[c / 4 * 64 * pair + 4 * r + c % 4] = (char)(bits ^ 128);
    } else {
      codes[c / 4 * 64 * pair + c % 4 / 2 * 32 + 2 * r + c % 2] = (char)bits;
    }
  }
};

std::vector<float> vectors(Values kind, int64_t columns, int positions, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> x(columns * positions);
  for (size_t i = 0; i < x.size(); i++) {
    x[i] = normal(random);
    if (kind == Values::outliers && i % 64 == 5) x[i] *= 30;
    if (kind == Values::zero_blocks && i / 32 % 3 != 1) x[i] = 0;
    if (kind == Values::tiny) x[i] *= 1e-30f;
    if (kind == Values::huge) x[i] *= 1e30f;
    if (kind == Values::equal) x[i] = -1.9999f;
  }
  return x;
}

std::vector<float> products(const QuantizedKernels& k, const Matrix& w, Activations activations,
                            const std::vector<float>& x, int positions, int at_once, int tiles_at_once) {
  const int64_t ldy = w.tiles * kTile + 5;
  std::vector<float> y(positions * ldy, 7);
  for (int p = 0; p < positions; p += at_once) {
    const int count = std::min(at_once, positions - p);
    const int64_t bytes = k.prepared_bytes(w.format, activations, w.columns, count);
    std::vector<char> prepared(bytes);
    k.prepare(w.format, activations, x.data() + p * w.columns, w.columns, w.columns, count, prepared.data());
    for (int t = 0; t < w.tiles; t += tiles_at_once)
      k.product(w.format, activations, w.data.data(), w.tiles, t, std::min(tiles_at_once, w.tiles - t), prepared.data(),
                w.columns, count, y.data() + p * ldy + t * kTile, ldy);
  }
  return y;
}

std::vector<const InstructionSet*> sets() {
  std::vector<const InstructionSet*> found;
  for (const char* name : {"avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable"})
    if (const InstructionSet* set = choose_instructions(name)) found.push_back(set);
  return found;
}

void products_of(const Quantized& format, int64_t columns, Values kind, int tiles = 3) {
  std::mt19937 random(columns + (int)kind);
  constexpr int positions = 5;
  const Matrix w(format, columns, tiles, kind, random);
  const std::vector<float> x = vectors(kind, columns, positions, random);
  const int64_t ldy = tiles * kTile + 5;
  for (const Activations activations : {Activations::exact, Activations::rounded}) {
    const std::vector<float> y = products(*sets()[0]->quantized, w, activations, x, positions, 1, tiles);
    const double unit = activations == Activations::exact || format.code == Code::e4m3 ? 0x1p-22 : 0x1p-14;
    for (int p = 0; p < positions; p++)
      for (int r = 0; r < tiles * kTile; r++) {
        double sum = 0, sizes = 0, bound = 0;
        for (int64_t first = 0; first < columns; first += kBlockColumns) {
          double largest = 0, weights = 0;
          for (int64_t c = first; c < std::min(columns, first + kBlockColumns); c++) {
            const double value = x[p * columns + c], weight = w.values[r * columns + c];
            sum += weight * value, sizes += std::fabs(weight * value), weights += std::fabs(weight);
            largest = std::max(largest, std::fabs(value));
          }
          bound += unit * largest * weights;
        }
        bound += 0x1p-21 * sizes;
        const double found = y[p * ldy + r];
        CHECK(std::fabs(found - sum) <= bound, "code %d, group %d, %ld columns, values %d: row %d is %g, not %g +- %g",
              (int)format.code, format.group, (long)columns, (int)kind, r, found, sum, bound);
      }
    for (const InstructionSet* set : sets())
      for (const int at_once : {1, 2, positions})
        for (const int tiles_at_once : {1, 5, tiles}) {
          const std::vector<float> other =
              products(*set->quantized, w, activations, x, positions, at_once, tiles_at_once);
          CHECK(std::memcmp(other.data(), y.data(), y.size() * 4) == 0,
                "%s differs: code %d, group %d, %ld columns, values %d, %d positions, %d tiles at once", set->name,
                (int)format.code, format.group, (long)columns, (int)kind, at_once, tiles_at_once);
        }
  }
}

void a_vector_that_is_not_finite_gives_nan(const Quantized& format) {
  std::mt19937 random(1);
  const Matrix w(format, 64, 1, Values::normal, random);
  for (const float bad : {INFINITY, -INFINITY, NAN}) {
    std::vector<float> x(64, 1);
    x[40] = bad;
    for (const InstructionSet* set : sets())
      for (const Activations activations : {Activations::exact, Activations::rounded}) {
        const std::vector<float> y = products(*set->quantized, w, activations, x, 1, 1, 1);
        CHECK(!std::isfinite(y[3]), "%s: %g", set->name, y[3]);
      }
  }
}

}  // namespace

int main() {
  const Quantized formats[] = {
      {Code::int4, ScaleType::bf16, 32, false, false, false}, {Code::int4, ScaleType::f16, 64, false, true, false},
      {Code::int4, ScaleType::f32, 128, false, false, false}, {Code::e2m1, ScaleType::e8m0, 32, false, false, false},
      {Code::e2m1, ScaleType::e4m3, 16, false, false, true},  {Code::int8, ScaleType::none, 0, false, false, true},
      {Code::int8, ScaleType::bf16, 32, false, false, false}, {Code::int8, ScaleType::f16, 64, false, true, false},
      {Code::e4m3, ScaleType::none, 0, false, false, true},   {Code::e4m3, ScaleType::f32, 128, true, false, false},
      {Code::e4m3, ScaleType::f32, 128, false, false, false}};
  for (const Quantized& format : formats) {
    for (const int64_t columns : {1, 37, 64, 300}) products_of(format, columns, Values::normal);
    for (const Values kind : {Values::outliers, Values::zero_blocks, Values::tiny, Values::huge, Values::equal})
      products_of(format, 300, kind);
    products_of(format, 2880, Values::outliers);
    products_of(format, 600, Values::normal, 11);  // streams side by side, a pair and a tile without a partner
    a_vector_that_is_not_finite_gives_nan(format);
  }
  return 0;
}
