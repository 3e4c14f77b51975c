// Quantized weights. custom_calls/gpu/codes.py packs their lines, and product.h multiplies them by Codes::add, with
// vector code. tensor.h multiplies 4 bits by tensor cores instead.
//
// A vector has 8 codes; a line has two vectors of 8 bits or four of 4. Codes become float32 exactly. The eight products
// of a vector are added by FMA, then multiplied by the scale of its block and added to the row's sum. A row's factor
// multiplies the sum over all warps. Codes are stored as follows:
//
//   int8  the code + 128
//   E4M3  the code; -0 is stored as 0
//   int4  weight k in nibble k
//   E2M1  index and sign in the nibbles that Bf12 uses (look_up); the table has the high bytes of the values in float16
#pragma once

#include "params.h"
#include "stream.h"

namespace laneformer {
namespace gpu {

class Lists;

LF_DEVICE constexpr u32 selector(u32 a, u32 b, u32 c, u32 d) {  // for permute
  return a | b << kSelectorBits | c << 2 * kSelectorBits | d << 3 * kSelectorBits;
}

// Looks up eight codes, each an index of three bits and a sign, in a table of eight bytes. `first` gets the bytes of
// codes 0 to 3, `second` those of 4 to 7, with the sign in the highest bit. Where selectors have four bits, the word
// itself is one: index k is in nibble k. The signs of codes 0 to 3 are the highest bits of its bytes, those of codes 4
// to 7 are four bits lower. Where selectors have eight bits, a code is a nibble, 4 to 7 the upper ones of the bytes.
LF_DEVICE void look_up(u32 table0, u32 table1, u32 codes, u32& first, u32& second) {
  if (kSelectorBits == 4) {
    const u32 indices = codes & 0x77777777;
    first = permute(table0, table1, indices) | (codes & 0x80808080);
    second = permute(table0, table1, indices >> 16) | (codes << 4 & 0x80808080);
  } else {
    first = permute(table0, table1, codes & 0x07070707) | (codes << 4 & 0x80808080);
    second = permute(table0, table1, codes >> 4 & 0x07070707) | (codes & 0x80808080);
  }
}

LF_DEVICE void unpack_halves(u32 pair, float& low, float& high) {
  low = half_to_float((u16)pair), high = half_to_float((u16)(pair >> 16));
}

// Unpacks four bytes to float32. Below the exponent of 2^23 a byte is 2^23 + byte; 2^23 + 128 is subtracted.
LF_DEVICE void unpack_int8(u32 word, float* out) {
  LF_UNROLL for (u32 i = 0; i < 4; i++) out[i] =
      bits_to_float(permute(word, 0x4b000000, selector(i, 4, 4, 7))) - (8388608.0f + 128.0f);
}

// Unpacks eight nibbles u to float32, less their zero point. Below the exponent of 2^10 in float16 a nibble is 1024 +
// u, or 1024 + 16 u. zeros: 1024 + the zero point in float16, twice.
LF_DEVICE void unpack_int4(u32 word, u32 zeros, float* out) {
  const u32 sixteenth = 0x2c002c00, less = 0xd400d400 | (zeros & 0x000f000f) << 4;  // -64 - zero point
  LF_UNROLL for (int i = 0; i < 4; i += 2) {
    const u32 even = (word & 0x000f000f) | 0x64006400, odd = (word & 0x00f000f0) | 0x64006400;
    unpack_halves(subtract_halves(even, zeros), out[i], out[i + 4]);
    unpack_halves(fma_halves(odd, sixteenth, less), out[i + 1], out[i + 5]);
    word >>= 8;
  }
}

LF_DEVICE void unpack_e2m1(u32 word, float* out) {
  u32 high[2];  // high bytes of float16; the tables: 0, 0.5, 1, 1.5 and 2, 3, 4, 6
  look_up(0x3e3c3800, 0x46444240, word, high[0], high[1]);
  LF_UNROLL for (int i = 0; i < 4; i++) {
    const u32 pair = permute(high[i / 2], 0, i % 2 ? selector(4, 2, 4, 3) : selector(4, 0, 4, 1));
    unpack_halves(pair, out[2 * i], out[2 * i + 1]);
  }
}

// scale: dtype of the scales of blocks; zeros: whether zero points are beside them; factors: whether rows have factors.
template <Code code, Scale scale, bool zeros, bool factors>
struct Codes {
  static constexpr bool kEight = code == Code::kInt8 || code == Code::kE4M3;
  static constexpr int kPer = 8, kWords = kEight ? 2 : 1,
                       kVectors = 4 / kWords;  // words of a vector, vectors of a line
  static constexpr bool kScaled = scale != Scale::kNone;
  static constexpr int kScaleBytes = zeros || scale == Scale::kFloat32                       ? 4
                                     : scale == Scale::kBfloat16 || scale == Scale::kFloat16 ? 2
                                                                                             : 1;
  // The factor that decoding E4M3 codes and scales leaves out.
  static constexpr float kUnit = (code == Code::kE4M3 ? kE4M3Unit : 1.0f) * (scale == Scale::kE4M3 ? kE4M3Unit : 1.0f);
  template <int vectors>
  static constexpr int kLines = (vectors + kVectors - 1) / kVectors;

  // The scales of n vectors, and their zero points in the form that unpack_int4 takes, or as for_bytes says.
  template <int n>
  struct Scales {
    float value[n];
    u32 zero[n];
  };

  // The scales of steps of n vectors, `count` for each step. Each thread of a cluster has `own` of them, in its lowest
  // words. for_bytes: a zero point is one byte, four times. more: lines to take together beyond those of one step.
  template <int n, int cluster, int count = n, bool for_bytes = false, int more = 0>
  class Scaled {
    static constexpr int own = (count + cluster - 1) / cluster, bytes = own * kScaleBytes,
                         lines = (bytes + 15) / 16 + more, served = 16 * lines / bytes, words = 4 * lines,
                         used = (bytes + 3) / 4;
    // Whether the scales are in the last words of the step's last line.
    static constexpr bool inside = bytes <= 16 * kLines<n> - 4 * kWords * n;

   public:
    // Lines of scales of `steps` steps, beside the lines of codes.
    static constexpr int lines_of(int steps) { return inside ? 0 : (steps + served - 1) / served * lines; }

    // Takes lines of scales if the next step needs them; precedes the step's own lines.
    LF_DEVICE void take(Stream& stream) {
      if constexpr (inside) return;
      if (turn_ == 0) {
        Vec taken[lines];
        stream.take(taken);
        LF_UNROLL for (int i = 0; i < words; i++) words_[i] = taken[i / 4].word[i % 4];
      } else if constexpr (served > 1) {
        constexpr int whole = bytes / 4, bits = bytes % 4 * 8;
        LF_UNROLL for (int i = 0; i + whole < words; i++) {
          const u32 low = words_[i + whole], high = i + whole + 1 < words ? words_[i + whole + 1] : 0;
          words_[i] = bits ? (u32)(((u64)high << 32 | low) >> bits) : low;
        }
      }
      if (++turn_ == served) turn_ = 0;
    }

    // The scales of the step whose lines were taken last.
    LF_DEVICE Scales<count> scales(const Vec (&taken)[kLines<n>]) const {
      Scales<count> out;
      constexpr int per = 4 / kScaleBytes;  // scales of a word
      const int first = warp_lane() & ~(cluster - 1);
      LF_UNROLL for (int member = 0; member < cluster && member * own < count; member++) {
        LF_UNROLL for (int word = 0; word * per < own; word++) {
          const u32 own_bits = inside ? taken[kLines<n> - 1].word[(4 - used + word) % 4] : words_[word];
          const u32 bits = shuffle_from(own_bits, first + member);
          float found[4];
          unpack_scales(bits, found);
          LF_UNROLL for (int i = 0; i < per; i++) {
            const int slot = word * per + i, at = member * own + slot;
            if (slot < own && at < count) {
              out.value[at] = found[i];
              if constexpr (zeros)
                out.zero[at] = permute(bits, 0, for_bytes ? selector(2, 2, 2, 2) : selector(2, 3, 2, 3));
            }
          }
        }
      }
      return out;
    }

   private:
    u32 words_[words];
    int turn_ = 0;
  };

  class Reader {
   public:
    LF_DEVICE Reader(const Params& p, Lists&, int product) : p_(p), product_(product) {}
    LF_DEVICE void begin() {}
    LF_DEVICE void end() {}

    // Loads factors of the CTA's rows; each warp's list has some of them.
    template <int rows, int n>
    LF_DEVICE void load_factors(float (&out)[n]) const {
      constexpr int each = (rows + kWarps - 1) / kWarps;
      const u32 begin = load_between_ctas(p_.coding + 4 * product_ + 2);
      LF_UNROLL for (int i = 0; i < n; i++) {
        const int row = opaque(thread()) + i * kWarps * kWarpSize;
        const i64 of_warp = (i64)(cta() * kWarps + row / each) * p_.listed_words;
        out[i] = row < rows ? kUnit * bits_to_float(load_between_ctas(p_.listed + of_warp + begin + row % each)) : 0.0f;
      }
    }

   private:
    const Params& p_;
    int product_;
  };

  // Returns sum + the products of vector `at` of the lines with x, times the vector's scale.
  template <int n, class Held>
  LF_DEVICE static float add(float sum, const Vec (&lines)[kLines<n>], const Held& scales, int at,
                             const float (&x)[kPer]) {
    float w[kPer];
    LF_UNROLL for (int i = 0; i < kWords; i++) {
      const u32 word = lines[at / kVectors].word[at % kVectors * kWords + i];
      if constexpr (code == Code::kInt8) unpack_int8(word, w + 4 * i);
      if constexpr (code == Code::kE4M3) unpack_e4m3(word, w + 4 * i);
      if constexpr (code == Code::kInt4) unpack_int4(word, zero_of(scales, at), w);
      if constexpr (code == Code::kE2M1) unpack_e2m1(word, w);
    }
    float part = kScaled ? 0.0f : sum;
    LF_UNROLL for (int i = 0; i < kPer; i++) part = fma(w[i], x[i], part);
    if constexpr (kScaled) part = fma(part, scales.value[at], sum);
    return part;
  }

 private:
  template <class Held>
  LF_DEVICE static u32 zero_of(const Held& scales, int at) {
    if constexpr (zeros) return scales.zero[at];
    return 0x64086408;  // 8
  }
  LF_DEVICE static void unpack_scales(u32 bits, float (&out)[4]) {
    if constexpr (zeros) {
      out[0] = scale == Scale::kBfloat16 ? bits_to_float(bits << 16) : half_to_float((u16)bits);
    } else if constexpr (scale == Scale::kE8M0) {
      LF_UNROLL for (int i = 0; i < 4; i++) out[i] = bits_to_float((bits >> 8 * i & 255) << 23);
    } else if constexpr (scale == Scale::kE4M3) {
      unpack_e4m3(bits, out);
    } else if constexpr (scale == Scale::kBfloat16) {
      out[0] = bits_to_float(bits << 16), out[1] = bits_to_float(bits & 0xffff0000u);
    } else if constexpr (scale == Scale::kFloat16) {
      unpack_halves(bits, out[0], out[1]);
    } else {
      out[0] = bits_to_float(bits);
    }
    if constexpr (kUnit != 1.0f && !factors) LF_UNROLL for (int i = 0; i < 4 / kScaleBytes; i++) out[i] *= kUnit;
  }
};

// What a format takes from the stream beside the lines of steps: nothing, or scales.
struct NothingBeside {
  static constexpr int lines_of(int) { return 0; }
  LF_DEVICE void take(Stream&) {}
  template <class Lines>
  LF_DEVICE int scales(const Lines&) const {
    return 0;
  }
};
template <class Format, int n, int cluster>
struct Beside : NothingBeside {};
template <Code code, Scale scale, bool zeros, bool factors, int n, int cluster>
struct Beside<Codes<code, scale, zeros, factors>, n, cluster>
    : Codes<code, scale, zeros, factors>::template Scaled<n, cluster> {};
template <Code code, bool zeros, bool factors, int n, int cluster>
struct Beside<Codes<code, Scale::kNone, zeros, factors>, n, cluster> : NothingBeside {};

template <class Format>
constexpr bool kQuantized = false;
template <class Format>
constexpr bool kHasFactors = false;
template <Code code, Scale scale, bool zeros, bool factors>
constexpr bool kQuantized<Codes<code, scale, zeros, factors>> = true;
template <Code code, Scale scale, bool zeros, bool factors>
constexpr bool kHasFactors<Codes<code, scale, zeros, factors>> = factors;

}  // namespace gpu
}  // namespace laneformer
