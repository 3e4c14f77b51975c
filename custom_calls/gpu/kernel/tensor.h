// Weights of 4 bits times a vector by tensor cores that multiply bytes, for product.h. custom_calls/gpu/codes.py packs
// the codes for groups of four threads. docs/quantized.md states the scheme, the order of sums and the bounds.
//
// A block is 32 columns. In a block the vector is whole numbers of 24 bits times a power of two, and each number is
// three signed bytes, its digits. Codes become signed bytes too. The product of multiply_bytes has
//
//   weights  eight rows of the matrix: a block of theirs as rows 0 to 7, and the next block as rows 8 to 15
//   vector   the digits of the first block in columns 0, 2 and 4, those of the second in 1, 3 and 5; zeros in 6 and 7
//
// So thread t of the four that share a row gets the sums of digit t: with the first block in register 0, with the
// second in register 3. Registers 1 and 2 mix the blocks and are not used. Sums of a block are exact, because they are
// integers of at most 2^19 in size. Where 16 columns have a scale, the two parts are the halves of one block.
#pragma once

#include "codes.h"

namespace laneformer {
namespace gpu {

template <class Format>
constexpr bool kByTensor = false;
template <class Codes, int halves, int joined, int more>
constexpr bool kByTensor<ByTensor<Codes, halves, joined, more>> = true;

// The shape (product.h) by which a warp loads a vector for Digits: each thread loads other columns.
template <class Shape>
struct Spread {
  struct Weights {
    static constexpr int kPer = Shape::kVectors % 4 == 0 ? 4 : 2;
  };
  static constexpr int kGroup = kWarpSize, kCluster = 4, kVectors = Shape::kVectors / Weights::kPer,
                       kSegments = Shape::kSegments, kColumns = Shape::kColumns, kColumnParts = Shape::kColumnParts;
};

template <class Shape, bool by_tensor>
struct ReadingOf {
  using Type = Shape;
};
template <class Shape>
struct ReadingOf<Shape, true> {
  using Type = Spread<Shape>;
};
// The shape by which a product loads its vector.
template <class Shape>
using Reading = typename ReadingOf<Shape, kByTensor<typename Shape::Weights>>::Type;

#if LF_TENSOR

// The format: a code becomes kTerms signed bytes, whose sum times kStep is its number. halves: scales of a block, 1 or
// 2; joined: blocks that share a scale; more: see Codes::Scaled.
template <Code code, Scale scale, bool zeros, bool factors, int halves, int joined, int more>
struct ByTensor<Codes<code, scale, zeros, factors>, halves, joined, more> : Codes<code, scale, zeros, factors> {
  static_assert(code == Code::kInt4 || code == Code::kE2M1, "tensor cores multiply codes of 4 bits only");
  static_assert(halves == 1 || joined == 1, "a scale is of half a block or of several blocks, not both");
  static constexpr bool kZeros = zeros;
  static constexpr int kHalves = halves, kJoined = joined, kTerms = code == Code::kE2M1 || zeros ? 2 : 1;
  static constexpr float kStep = code == Code::kE2M1 ? 0.5f : zeros ? 1.0f : 0.0625f;

  // The terms of eight codes: `first` of codes 0 to 3, `second` of codes 4 to 7.
  //
  //   int4  weight k in nibble 2 k, weight 4 + k in nibble 2 k + 1. One term, 16 (code - 8). With zero points two: the
  //         code, and minus its zero point, which `less` has four times for each four codes
  //   E2M1  weight k in nibble k. With s twice the magnitude, the terms are 2 s, or 0 for a negative number, and -s
  LF_DEVICE static void terms(u32 word, const u32 (&less)[2], u32 (&first)[kTerms], u32 (&second)[kTerms]) {
    if constexpr (code == Code::kE2M1) {
      const u32 sizes = word & 0x77777777;
      first[0] = permute_or_sign(0x06040200, 0x18100c08, word);
      second[0] = permute_or_sign(0x06040200, 0x18100c08, word >> 16);
      first[1] = permute_or_sign(0xfdfeff00, 0xf4f8fafc, sizes);
      second[1] = permute_or_sign(0xfdfeff00, 0xf4f8fafc, sizes >> 16);
    } else if constexpr (zeros) {
      first[0] = word & 0x0f0f0f0f, second[0] = word >> 4 & 0x0f0f0f0f;
      first[1] = less[0], second[1] = less[1];
    } else {
      first[0] = word << 4 & 0xf0f0f0f0, second[0] = word & 0xf0f0f0f0;
    }
  }
};

// A warp's columns of a vector as signed bytes, in the registers of multiply_bytes; it replaces Floats (product.h).
template <class Shape>
class Digits {
  using Weights = typename Shape::Weights;
  using Read = Spread<Shape>;
  static constexpr int vectors = Shape::kVectors, per = Read::Weights::kPer, units = Read::kVectors,
                       halves = Weights::kHalves, tiles = vectors * halves / 2, words = 24;
  static constexpr u32 zero_sum = 0x4b400000;  // bits of 1.5 2^23; an integer below 2^22 in size adds its value

 public:
  static constexpr int kFloats = vectors * (words + 1);  // of a warp in shared memory: digits and powers of blocks

  struct Part {
    u32 digits[tiles][3 - halves];
    float power[vectors], less[vectors];  // of each block: its power of two, and what takes zero_sum away
  };

  template <int rows, class Load>
  LF_DEVICE static void bring(int segment, float* shared, Load load, Part (&parts)[rows]) {
    float x[rows][units][per];
    load(segment, x);
    LF_UNROLL for (int m = 0; m < rows; m++) bring_one(shared, x[m], parts[m]);
  }

  // The products of the thread's digit with row `at` of the lines; over the group's threads they add up to the row's.
  template <int n, int rows, class Held>
  LF_DEVICE static void sum(typename Weights::Reader& weights, const Vec (&lines)[Weights::template kLines<n>],
                            const Held& scales, int at, const Part (&parts)[rows], float (&sums)[rows]) {
    LF_UNROLL for (int m = 0; m < rows; m++) sums[m] = sum_of_one<n>(weights, lines, scales, at, parts[m]);
  }

 private:
  LF_DEVICE static void bring_one(float* shared, const float (&x)[units][per], Part& part) {
    u32* bytes = (u32*)shared;
    float* powers = shared + vectors * words;
    constexpr int threads = 32 / per;  // that load a block
    const int lane = opaque(warp_lane());
    sync_warp();  // the digits of the last segment or row have been read
    LF_UNROLL for (int u = 0; u < units; u++) {
      u32 largest = 0;
      LF_UNROLL for (int i = 0; i < per; i++) {
        const u32 size = float_to_bits(x[u][i]) & 0x7fffffff;
        largest = largest > size ? largest : size;
      }
      LF_UNROLL for (int mask = 1; mask < threads; mask *= 2) {
        const u32 other = shuffle_bits(largest, mask);
        largest = largest > other ? largest : other;
      }
      // The power of two is 2^(exponent - 149): no number is above 0x7f7f7f, the largest of three signed bytes.
      const int found = (int)((largest + 0x10200) >> 23), exponent = larger(found, 27);
      const float inverse = bits_to_float((u32)(276 - exponent) << 23);
      u32 number[per];
      LF_UNROLL for (int i = 0; i < per; i++) number[i] = ((u32)round_to_int(x[u][i] * inverse) + 0x808080) ^ 0x808080;
      const int block = u * per + lane / threads;
      store(number, bytes + block * words + lane % 4 * 2, lane % threads / 4);
      if (lane % threads == 0) powers[block] = bits_to_float(found < 254 ? (u32)(exponent - 22) << 23 : 0x7fc00000);
    }
    sync_warp();
    const int column = lane / 4, digit = column / 2, second = column % 2, own = digit * 8 + lane % 4 * 2;
    LF_UNROLL for (int tile = 0; tile < tiles; tile++) {
      const u32* from = bytes + own + (halves == 1 ? (2 * tile + second) * words : tile * words + second);
      LF_UNROLL for (int i = 0; i < 3 - halves; i++) part.digits[tile][i] = digit < 3 ? from[i] : 0;
    }
    LF_UNROLL for (int v = 0; v < vectors; v++) {
      part.power[v] = powers[v] * Weights::kStep;
      part.less[v] = -bits_to_float(zero_sum) * part.power[v];
    }
  }

  template <int n, class Held>
  LF_DEVICE static float sum_of_one(typename Weights::Reader&, const Vec (&lines)[Weights::template kLines<n>],
                                    const Held& scales, int at, const Part& part) {
    constexpr int terms = Weights::kTerms;
    float sum = 0;
    LF_UNROLL for (int tile = 0; tile < tiles; tile++) {
      u32 first[2][terms], second[2][terms], sums[terms + 1][4] = {{zero_sum, zero_sum, zero_sum, zero_sum}};
      LF_UNROLL for (int i = 0; i < 3 - halves; i++) {
        const int vector = at * vectors + (3 - halves) * tile + i;
        u32 less[2] = {};
        if constexpr (Weights::kZeros) {
          LF_UNROLL for (int half = 0; half < 2; half++) less[half] =
              scales.zero[(vector * halves + half * (halves - 1)) / Weights::kJoined];
        }
        Weights::terms(lines[vector / 4].word[vector % 4], less, first[i], second[i]);
      }
      LF_UNROLL for (int i = 0; i < terms; i++) {
        if constexpr (halves == 1) {
          multiply_bytes({first[0][i], first[1][i], second[0][i], second[1][i]}, part.digits[tile], sums[i],
                         sums[i + 1]);
        } else {
          multiply_bytes({first[0][i], second[0][i]}, part.digits[tile], sums[i], sums[i + 1]);
        }
      }
      LF_UNROLL for (int i = 0; i < 2; i++) {
        const int block = halves == 1 ? 2 * tile + i : tile;
        const float product = fma(bits_to_float(sums[terms][3 * i]), part.power[block], part.less[block]);
        if constexpr (Weights::kScaled) {
          sum = fma(product, scales.value[(at * tiles * 2 + 2 * tile + i) / Weights::kJoined], sum);
        } else {
          sum += product;
        }
      }
    }
    return sum * bits_to_float((u32)(127 + 8 * (warp_lane() % 4)) << 23);
  }

  // Stores the digits of a thread's neighbouring numbers as words, or halves of words, of a block.
  LF_DEVICE static void store(const u32 (&number)[per], u32* to, int part) {
    u32 low[per / 2], high[per / 2];  // of pairs of numbers: digits 0 and 1, and digit 2
    LF_UNROLL for (int i = 0; i < per / 2; i++) {
      low[i] = permute(number[2 * i], number[2 * i + 1], selector(0, 4, 1, 5));
      high[i] = permute(number[2 * i], number[2 * i + 1], selector(2, 6, 2, 6));
    }
    if constexpr (per == 4) {
      to += part;
      to[0] = permute(low[0], low[1], selector(0, 1, 4, 5));
      to[8] = permute(low[0], low[1], selector(2, 3, 6, 7));
      to[16] = permute(high[0], high[1], selector(0, 1, 4, 5));
    } else {
      u16* half = (u16*)to + part;
      half[0] = (u16)low[0], half[16] = (u16)(low[0] >> 16), half[32] = (u16)high[0];
    }
  }
};

#endif

template <class Codes, int halves, int joined, int more>
constexpr bool kQuantized<ByTensor<Codes, halves, joined, more>> = true;
template <class Codes, int halves, int joined, int more>
constexpr bool kHasFactors<ByTensor<Codes, halves, joined, more>> = kHasFactors<Codes>;

template <Code code, Scale scale, bool zeros, bool factors, int halves, int joined, int more, int n, int cluster>
struct Beside<ByTensor<Codes<code, scale, zeros, factors>, halves, joined, more>, n, cluster>
    : Codes<code, scale, zeros, factors>::template Scaled<n, cluster, n * halves / joined, true, more> {};
template <Code code, bool zeros, bool factors, int halves, int joined, int more, int n, int cluster>
struct Beside<ByTensor<Codes<code, Scale::kNone, zeros, factors>, halves, joined, more>, n, cluster> : NothingBeside {};

}  // namespace gpu
}  // namespace laneformer
