// Vectors as integers, and exact sums of their products with weights of 4 bits and int8. Used by quantized.cc alone.
//
// A block of 32 columns (16 if scales are that fine) of a vector has a power of two s. q = round(x / s) has 23 bits, or
// 16 bits for rounded activations, and is stored as signed digits: q = d0 + 256 d1 + 65536 d2, each -128 .. 127. The
// sums over a block of weights w are high = sum w (d1 + 256 d2) and low = sum w d0; with 16 bits only low = sum w q.
//
// Invariant: these sums are exact integers below 2^31 in size, so every instruction set finds the same, in any order
// and with any instruction. Weights are stored unsigned; `Head` corrects the sums for that.
#pragma once

#include "quantized.h"
#include "simd.h"

namespace LF_ISA {
namespace {

using laneformer::Code;
using laneformer::kTile;

typedef uint8_t vb __attribute__((vector_size(4 * kWidth)));
typedef int16_t vs __attribute__((vector_size(4 * kWidth)));

constexpr int kVectors = kTile / kWidth;

// How digits are multiplied. bytes: four columns of one digit in an instruction, unsigned weights; words: two columns
// of 16 bits; floats: one column, exactly in float32.
enum class Way { bytes, words, floats };
template <Code code>
constexpr Way way_of() {
#if defined(__AVX512VNNI__)
  return Way::bytes;
#elif defined(__AVX2__)
  return code == Code::int8 ? Way::words : Way::bytes;  // pairs of 8-bit products would saturate
#else
  return Way::floats;
#endif
}

// An unsigned weight is 2^kDoubled times the weight, plus kOffset.
template <Code code>
constexpr int kOffset = code == Code::int4   ? 8
                        : code == Code::e2m1 ? 12
                                             : 128;
template <Code code>
constexpr int kDoubled = code == Code::e2m1 ? 1 : 0;

// Loads a vector into a register. Without the assembly GCC would load it again for each half of its bytes.
LF_INLINE vb load_once(const char* from) {
  vb line = load<vb>(from);
#if defined(__AVX512F__)
  __asm__("" : "+v"(line));
#endif
  return line;
}

// Whether a sum of unsigned weights times q over a block fits in 31 bits; q is at most 0x7f7f80.
template <Code code, int columns>
constexpr bool kFits = kOffset<code> * (int64_t)columns * 0x7f7f80 < (int64_t)1 << 31;

// What follows the digits of a block.
struct __attribute__((may_alias)) Head {
  int32_t low, high;      // -kOffset * sums of the digits: the sums with unsigned weights begin with these
  float unit, high_unit;  // s, divided by 2^kDoubled, and 256 times that; NaN if x has a number that is not finite
  float low_digits, high_digits;  // sums of the digits, for zero points
  float unused[2];
};

// Bytes of a block's digits. P: bytes of q, 3 or 2.
template <Code code, int P, int columns>
constexpr int digit_bytes() {
  return way_of<code>() == Way::bytes   ? P * columns
         : way_of<code>() == Way::words ? (P == 3 ? 4 : 2) * columns
                                        : 4 * P * columns;
}

// ------------------------------------------------------------------------------------------------------------ digits

LF_INLINE vi magnitude_bits(vf x) { return (vi)(as_bits(x) & 0x7fffffff); }
LF_INLINE vi larger(vi a, vi b) {
  const vi mask = a > b;
  return (a & mask) | (b & ~mask);
}
LF_INLINE float as_one_float(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Combines all elements with f, which is associative, by halves.
template <int step, class F, int... I>
LF_INLINE vi folded(vi v, F f, Numbers<I...> all) {
  v = f(v, __builtin_shufflevector(v, v, (I ^ step)...));
  if constexpr (step > 1) v = folded<step / 2>(v, f, all);
  return v;
}
template <class F>
LF_INLINE int32_t fold(vi v, F f) {
  return folded<kWidth / 2>(v, f, CountUp<kWidth>{})[0];
}
LF_INLINE int32_t total(vi v) {
  return fold(v, [](vi a, vi b) LF_INLINED { return a + b; });
}

#if defined(__AVX2__)
// Stores each 16 bytes of a vector to `to`, `step` bytes apart.
template <int step>
LF_INLINE void store_quads(vu v, char* to) {
#if defined(__AVX512F__)
  each<4>([&](auto i) LF_INLINED {
    _mm_storeu_si128((__m128i*)(to + i() * step), _mm512_extracti32x4_epi32((__m512i)v, i()));
  });
#else
  each<2>([&](auto i)
              LF_INLINED { _mm_storeu_si128((__m128i*)(to + i() * step), _mm256_extracti128_si256((__m256i)v, i())); });
#endif
}
// Reorders the bytes within each 16, so that those which one instruction multiplies are neighbours.
LF_INLINE vu shuffled_bytes(vu v, __m128i order) {
#if defined(__AVX512F__)
  return (vu)_mm512_shuffle_epi8((__m512i)v, _mm512_broadcast_i32x4(order));
#else
  return (vu)_mm256_shuffle_epi8((__m256i)v, _mm256_broadcastsi128_si256(order));
#endif
}
// In each 16 bytes: the first 8 of a, then the first 8 of b.
LF_INLINE vu low_halves(vu a, vu b) {
#if defined(__AVX512F__)
  return (vu)_mm512_unpacklo_epi64((__m512i)a, (__m512i)b);
#else
  return (vu)_mm256_unpacklo_epi64((__m256i)a, (__m256i)b);
#endif
}
// In each 16 bytes: the lower halves of four dwords c0 .. c3 as words c0, c2, c1, c3.
LF_INLINE vu word_pairs(vi v) {
  return shuffled_bytes((vu)v, _mm_setr_epi8(0, 1, 8, 9, 4, 5, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1));
}
#endif

// Writes the digits of kWidth columns of a block, from column k on. low = d0, high = d1 + 256 d2.
template <Code code, int P, int columns>
LF_INLINE void store_digits([[maybe_unused]] vi q, [[maybe_unused]] vi low, [[maybe_unused]] vi high, int k, char* to) {
  constexpr Way way = way_of<code>();
#if defined(__AVX2__)
  if constexpr (way == Way::bytes) {
    const vu bytes = (vu)(q + 0x808080) ^ 0x808080;
    const __m128i order = _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, -1, -1, -1, -1);
    store_quads<4 * P>(shuffled_bytes(bytes, order), to + k * P);
  } else if constexpr (way == Way::words && P == 3) {
    store_quads<16>(low_halves(word_pairs(high), word_pairs(low)), to + k * 4);
  } else {
    store_quads<8>(word_pairs(q), to + k * 2);
  }
#else
  static_assert(way == Way::floats, "");
  const auto plane = [&](int number, vi v)
                         LF_INLINED { storef((float*)to + number * columns + k, __builtin_convertvector(v, vf)); };
  plane(0, low);
  if constexpr (P == 3) {
    const vi middle = (vi)((vu)high << 24) >> 24;
    plane(1, middle), plane(2, (high - middle) >> 8);
  } else {
    plane(1, high);
  }
#endif
}

// Writes the digits and the Head of a vector's block. count: columns of x; others are zeros.
template <Code code, int P, int columns>
LF_INLINE void prepare_block(const float* x, int64_t count, char* to) {
  constexpr int n = columns / kWidth;
  constexpr int kBits = P == 3 ? 22 : 14;  // number of the highest bit of q, counted from 0
  vf values[n];
  vi most = {};
  each<n>([&](auto i) LF_INLINED {
    const int64_t here = count - i() * kWidth;
    values[i()] = here >= kWidth ? loadf(x + i() * kWidth)
                  : here > 0     ? load_first<vf>(x + i() * kWidth, (int)here)
                                 : vf{};
    most = larger(most, magnitude_bits(values[i()]));
  });
  const int32_t bits = fold(most, [](vi a, vi b) LF_INLINED { return larger(a, b); });
  // The largest q, rounded, must be at most 0x7f7f7f or 0x7f7f (all digits 127): else the exponent is one more.
  int exponent = (bits + (P == 3 ? 0x10101 : 0x10100)) >> 23;
  constexpr int kLeast = kBits + 1 + kDoubled<code>;  // then s is not subnormal
  if (exponent < kLeast) exponent = kLeast;
  const vf inverse = splat(as_one_float((uint32_t)(254 + kBits - exponent) << 23));
  vi low_sum = {}, high_sum = {};
  each<n>([&](auto i) LF_INLINED {
    const vf scaled = values[i()] * inverse;
    const vf half = as_float((as_bits(scaled) & 0x80000000) | as_bits(splat(0.5f)));
    const vi q = __builtin_convertvector(scaled + half, vi), low = (vi)((vu)q << 24) >> 24, high = (q - low) >> 8;
    low_sum += P == 3 ? low : q, high_sum += high;
    store_digits<code, P, columns>(q, low, high, i() * kWidth, to);
  });
  const bool finite = bits < 0x7f800000;  // else the digits mean nothing, and NaN as unit makes the result NaN
  const int32_t low = finite ? total(low_sum) : 0, high = finite ? total(high_sum) : 0;
  const uint32_t unit = (uint32_t)(exponent - kBits - kDoubled<code>) << 23;
  Head head{-kOffset<code> * low,
            -kOffset<code> * high,
            finite ? as_one_float(unit) : as_one_float(0x7fc00000),
            finite ? as_one_float(unit + (8u << 23)) : as_one_float(0x7fc00000),
            (float)low,
            (float)high,
            {}};
  std::memcpy(to + digit_bytes<code, P, columns>(), &head, sizeof head);
}

// ----------------------------------------------------------------------------------------------------------- weights

// A quad is four columns. A vector of a quad has four bytes for each row: unsigned weights, or e2m1 codes.
LF_INLINE vb low_nibbles(vb b) { return b & 15; }
LF_INLINE vb high_nibbles(vb b) { return (vb)((vu)b >> 4) & 15; }

// By e2m1 code: 2 w + 12. The table repeats in each 16 bytes.
alignas(64) constexpr uint8_t kE2m1[64] = {
#define LF_TABLE 12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0
    LF_TABLE, LF_TABLE, LF_TABLE, LF_TABLE
#undef LF_TABLE
};

// The two quads of a line of 4-bit codes.
template <Code code>
LF_INLINE void quads_of(vb line, vb& first, vb& second) {
  if constexpr (code == Code::int4) {
    first = low_nibbles(line), second = high_nibbles(line);
  } else {
#if defined(__AVX512VBMI__)  // the index has 6 bits; the table repeats, so the upper two do not matter
    const __m512i table = _mm512_load_si512(kE2m1);
    first = (vb)_mm512_permutexvar_epi8((__m512i)line, table);
    second = (vb)_mm512_permutexvar_epi8((__m512i)((vu)line >> 4), table);
#elif defined(__AVX512BW__)
    const __m512i table = _mm512_load_si512(kE2m1);
    first = (vb)_mm512_shuffle_epi8(table, (__m512i)low_nibbles(line));
    second = (vb)_mm512_shuffle_epi8(table, (__m512i)high_nibbles(line));
#elif defined(__AVX2__)
    const __m256i table = _mm256_load_si256((const __m256i*)kE2m1);
    first = (vb)_mm256_shuffle_epi8(table, (__m256i)low_nibbles(line));
    second = (vb)_mm256_shuffle_epi8(table, (__m256i)high_nibbles(line));
#else
    first = low_nibbles(line), second = high_nibbles(line);  // Sums decodes them
#endif
  }
}

// Calls f(q, weights of quad q) for each quad of a block. line(i): address of a vector of the block's line i.
template <Code code, int columns, class Line, class F>
LF_INLINE void each_quad(const Line& line, F f) {
  if constexpr (code == Code::int8) {
    each<columns / 4>([&](auto q) LF_INLINED { f(q, load<vb>(line(q()))); });
  } else {
    each<columns / 8>([&](auto number) LF_INLINED {
      vb first, second;
      quads_of<code>(load<vb>(line(number())), first, second);
      f(Count<2 * number()>{}, first);
      f(Count<2 * number() + 1>{}, second);
    });
  }
}

// -------------------------------------------------------------------------------------------------------------- sums

#if defined(__AVX512BW__)
LF_INLINE vi multiply_words(vs a, vs b) { return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
LF_INLINE vs multiply_bytes(vb a, vu b) { return (vs)_mm512_maddubs_epi16((__m512i)a, (__m512i)b); }
#elif defined(__AVX2__)
LF_INLINE vi multiply_words(vs a, vs b) { return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
LF_INLINE vs multiply_bytes(vb a, vu b) { return (vs)_mm256_maddubs_epi16((__m256i)a, (__m256i)b); }
#endif

LF_INLINE vu splat_word(const char* from) {
  uint32_t word;
  std::memcpy(&word, from, 4);
  return splat_u(word);
}

// The sums low and high of a block for a vector of rows: `begin`, then `add` for each quad of the block, in order.
template <Code code, int P, int columns, Way way = way_of<code>()>
struct Sums;

#if defined(__AVX2__)
#if defined(__AVX512VNNI__)
template <Code code, int P, int columns>
struct Sums<code, P, columns, Way::bytes> {
  vi of[P];
  LF_INLINED void begin(const Head& head) {
    of[P - 1] = vi{};
    of[0] = (vi)splat_u((uint32_t)head.low);
    if constexpr (P == 3) of[1] = (vi)splat_u((uint32_t)head.high);
  }
  template <int q>
  LF_INLINED void add(vb weights, const char* digits) {
    each<P>([&](auto d) LF_INLINED {
      of[d()] =
          (vi)_mm512_dpbusd_epi32((__m512i)of[d()], (__m512i)weights, (__m512i)splat_word(digits + (q * P + d()) * 4));
    });
  }
  LF_INLINED vi low() const { return P == 3 ? of[0] : of[0] + (vi)((vu)of[1] << 8); }
  LF_INLINED vi high() const { return of[1] + (vi)((vu)of[P - 1] << 8); }
};
#else
template <Code code, int P, int columns>
struct Sums<code, P, columns, Way::bytes> {
  static constexpr int kLargest = code == Code::int4 ? 15 : 24;
  static constexpr int kFit = 32767 / (2 * 128 * kLargest);  // quads whose sum fits in a word
  static constexpr int kQuads = columns / 4, kParts = kQuads > kFit ? 2 : 1;
  static_assert(kQuads / kParts <= kFit, "");
  vs of[P];
  vi whole[P];
  Head start;
  LF_INLINED void begin(const Head& head) { start = head; }
  template <int q>
  LF_INLINED void add(vb weights, const char* digits) {
    each<P>([&](auto d) LF_INLINED {
      const vs products = multiply_bytes(weights, splat_word(digits + (q * P + d()) * 4));
      of[d()] = q % (kQuads / kParts) ? of[d()] + products : products;
      if constexpr ((q + 1) % (kQuads / kParts) == 0) {
        const vi pairs = multiply_words(of[d()], vs{} + (int16_t)1);
        whole[d()] = q >= kQuads / kParts ? whole[d()] + pairs : pairs;
      }
    });
  }
  LF_INLINED vi low() const {
    const vi first = whole[0] + start.low;
    return P == 3 ? first : first + (vi)((vu)whole[1] << 8);
  }
  LF_INLINED vi high() const { return whole[1] + (vi)((vu)whole[P - 1] << 8) + start.high; }
};
#endif

template <Code code, int P, int columns>
struct Sums<code, P, columns, Way::words> {
  static constexpr int kSets = P == 3 ? 2 : 1;  // high and low, or only q
  vi of[kSets];
  LF_INLINED void begin(const Head& head) {
    if constexpr (P == 3) {
      of[0] = (vi)splat_u((uint32_t)head.high), of[1] = (vi)splat_u((uint32_t)head.low);
    } else {
      of[0] = (vi)splat_u((uint32_t)head.low);
    }
  }
  template <int q>
  LF_INLINED void add(vb weights, const char* digits) {
    const vs even = (vs)((vu)weights & 0x00ff00ff);
    typedef uint16_t vus __attribute__((vector_size(4 * kWidth)));
    const vs odd = (vs)((vus)weights >> 8);
    each<kSets>([&](auto s) LF_INLINED {
      const char* pairs = digits + (q * kSets + s()) * 8;
      of[s()] += multiply_words(even, (vs)splat_word(pairs));
      of[s()] += multiply_words(odd, (vs)splat_word(pairs + 4));
    });
  }
  LF_INLINED vi low() const { return of[kSets - 1]; }
  LF_INLINED vi high() const { return of[0]; }
};
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
// The sums of a block for both vectors of a tile's rows, which share the loads of digits. `in_order` keeps the sums in
// registers: without it GCC would compute all products first and put them into memory.
template <Code code, int P, int columns>
struct BothSums {
  struct Found {
    vi of_low, of_high;
    vi low() const { return of_low; }
    vi high() const { return of_high; }
  };
  vi low[kVectors], high[kVectors];

  // Adds a whole block. line(i): address of line i of its codes.
  template <class Line>
  LF_INLINED void add(const Head& head, const char* digits, const Line& line) {
    each<kVectors>([&](auto v) LF_INLINED {
      low[v()] = (vi)splat_u((uint32_t)head.low), high[v()] = (vi)splat_u((uint32_t)head.high);
    });
    if constexpr (way_of<code>() == Way::words) {
      each<columns / 4>([&](auto q) LF_INLINED { add_words(line(q()), digits + q() * (P - 1) * 8); });
    } else {
      constexpr int kLines = columns / 8 / Sums<code, P, columns>::kParts;  // lines whose sums fit in words
      each<columns / 8 / kLines>([&](auto part) LF_INLINED {
        vs of[P][kVectors] = {};
        each<kLines>([&](auto l) LF_INLINED {
          constexpr int number = part() * kLines + l();
          add_bytes(line(number), digits + number * 2 * P * 4, of);
        });
        each<kVectors>([&](auto v) LF_INLINED {
          vi whole[P];
          each<P>([&](auto d) LF_INLINED { whole[d()] = multiply_words(of[d()][v()], vs{} + (int16_t)1); });
          low[v()] += P == 3 ? whole[0] : whole[0] + (vi)((vu)whole[1] << 8);
          if constexpr (P == 3) high[v()] += whole[1] + (vi)((vu)whole[2] << 8);
        });
      });
    }
  }
  LF_INLINED Found of(int v) const { return {low[v], high[v]}; }

 private:
  LF_INLINED static void add_bytes(const char* line, const char* digits, vs (&of)[P][kVectors]) {
    vb quads[2][kVectors];
    each<kVectors>([&](auto v)
                       LF_INLINED { quads_of<code>(load<vb>(line + v() * sizeof(vb)), quads[0][v()], quads[1][v()]); });
    each<2>([&](auto q) LF_INLINED {
      each<P>([&](auto d) LF_INLINED {
        const vu digit = splat_word(digits + (q() * P + d()) * 4);
        each<kVectors>([&](auto v) LF_INLINED {
          of[d()][v()] += multiply_bytes(quads[q()][v()], digit);
          in_order(of[d()][v()]);
        });
      });
    });
  }
  LF_INLINED void add_words(const char* line, const char* digits) {
    vs even[kVectors], odd[kVectors];
    each<kVectors>([&](auto v) LF_INLINED {
      typedef uint16_t vus __attribute__((vector_size(4 * kWidth)));
      const vb weights = load<vb>(line + v() * sizeof(vb));
      even[v()] = (vs)((vu)weights & 0x00ff00ff), odd[v()] = (vs)((vus)weights >> 8);
    });
    each<P - 1>([&](auto s) LF_INLINED {
      const char* const pairs = digits + s() * 8;
      const vs first = (vs)splat_word(pairs), second = (vs)splat_word(pairs + 4);
      each<kVectors>([&](auto v) LF_INLINED {
        vi& sum = P == 3 && s() == 0 ? high[v()] : low[v()];
        sum += multiply_words(even[v()], first);
        in_order(sum);
        sum += multiply_words(odd[v()], second);
        in_order(sum);
      });
    });
  }
  template <class V>
  LF_INLINED static void in_order(V& sum) {
    __asm__("" : "+x"(sum));
  }
};
#endif

// Without such instructions: these products and their sums are below 2^24, so float32 computes them exactly.
template <Code code, int P, int columns>
struct Sums<code, P, columns, Way::floats> {
  vf of[P];
  LF_INLINED void begin(const Head&) {
    for (vf& sum : of) sum = vf{};
  }
  LF_INLINE vf weight(vu byte) {
    vi w = (vi)byte;
    if constexpr (code == Code::e2m1) {  // 2 w
      const vi m = w & 7, twice = m - (m > 4) - (m > 5) - (m > 6) * 3, sign = w > 7;
      w = (twice ^ sign) - sign;
    } else {
      w -= kOffset<code>;
    }
    return __builtin_convertvector(w, vf);
  }
  template <int q>
  LF_INLINED void add(vb weights, const char* digits) {
    each<4>([&](auto c) LF_INLINED {
      const vf w = weight((vu)weights >> (8 * c()) & 255);
      each<P>([&](auto d) LF_INLINED { of[d()] += w * splat(((const float*)digits)[d() * columns + 4 * q + c()]); });
    });
  }
  LF_INLINED vi low() const {
    const vi first = __builtin_convertvector(of[0], vi);
    return P == 3 ? first : first + (vi)((vu) __builtin_convertvector(of[1], vi) << 8);
  }
  LF_INLINED vi high() const {
    return __builtin_convertvector(of[1], vi) + (vi)((vu) __builtin_convertvector(of[P - 1], vi) << 8);
  }
};

}  // namespace
}  // namespace LF_ISA
