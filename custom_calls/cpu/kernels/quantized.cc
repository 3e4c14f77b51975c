// The table of products with weights of 8 and 4 bits for one instruction set: reads scales and codes from memory, has
// digits.h or eights.h multiply blocks of columns, and adds the blocks times their scales. custom_calls/build.py
// compiles this file once per set, with LF_ISA as its name; quantized.h has the table's functions and the layout of
// tiles.
//
// Invariant: a row's sum adds its blocks in the order of the columns, each times its scale, whatever is multiplied
// beside it. The compiler must not contract a product and a sum (-ffp-contract=off), so all sets round alike and give
// the same bits.
//
// No library templates in here, as in kernels.cc.
#include "quantized.h"

#include "digits.h"
#include "eights.h"
#include "simd.h"

namespace LF_ISA {
namespace {

using laneformer::Activations;
using laneformer::kChunkColumns;
using laneformer::Quantized;
using laneformer::ScaleType;

#if defined(__AVX512F__)
constexpr int kTogether = 2;  // tiles of a pair that share the loads of digits
#else
constexpr int kTogether = 1;
#endif

// How weights are read from memory. With AVX-512, AMD's prefetchers follow a single stream best, and lose it when code
// prefetches lines that they would have fetched. With AVX2 (Zen 3), three streams are faster.
// kStreams: streams that are multiplied together at most. kFewPositions: positions that do so at most; the sums of all
// streams then stay in the first-level cache.
constexpr int kStreams = 4, kFewPositions = 16;
struct Reading {
  int streams;        // streams that few positions multiply together
  int64_t far, near;  // bytes that lines are prefetched ahead, into the second- and the first-level cache
};
LF_INLINE Reading reading() {
#if defined(__x86_64__)
  if (__builtin_cpu_is("amd")) return kWidth == 8 ? Reading{3, 768, 768} : Reading{1, 0, 0};
#endif
  return {kStreams, 4096, 1536};
}

// Prefetches two lines. Assembly keeps this where it is in the code: compilers would move all prefetches of a block
// together, and these would wait for each other.
LF_INLINE void fetch(const char* far, const char* near) {
#if defined(__x86_64__)
  __asm__ volatile("prefetcht1 %0\n\tprefetcht0 %1" : : "m"(*far), "m"(*near));
#else
  __builtin_prefetch(far, 0, 2);
  __builtin_prefetch(near);
#endif
}

// ------------------------------------------------------------------------------------------------------------ scales

typedef uint8_t vq __attribute__((vector_size(kWidth)));

LF_INLINE vu widen_bytes(const char* from) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  return __builtin_convertvector(load<vq>(from), vu);
#endif
}

// Vector v of 16 scales, as float32.
LF_INLINE vf scale_vector(ScaleType type, const char* from, int v) {
  switch (type) {
    case ScaleType::e8m0: return as_float(widen_bytes(from + v * kWidth) << 23);
    case ScaleType::e4m3: return widen_e4m3(widen_bytes(from + v * kWidth)) * splat(256);
    case ScaleType::bf16: return widen_bf16(load<vh>(from + v * sizeof(vh)));
    case ScaleType::f16: return widen_f16(load<vh>(from + v * sizeof(vh)));
    default: return load<vf>(from + v * sizeof(vf));
  }
}

// The same for every type, and for one scale that all rows share.
__attribute__((noinline)) vf any_scale(ScaleType type, bool shared, const char* from, int v) {
  if (!shared) return scale_vector(type, from, v);
  alignas(64) char padded[64] = {};
  std::memcpy(padded, from, laneformer::bytes_of(type));
  return splat(scale_vector(type, padded, 0)[0]);
}

// The same. Only rare types take the function call; without it the portable code would be several times as long.
template <Code code>
LF_INLINE vf scale_of(ScaleType type, bool shared, const char* from, int v) {
  if (code == Code::e4m3 && shared && type == ScaleType::f32) return splat(load<float>(from));
  if (kWidth > 4 && !shared) {
    if constexpr (code == Code::e2m1) {
      if (type == ScaleType::e8m0) return scale_vector(ScaleType::e8m0, from, v);
      if (type == ScaleType::e4m3) return scale_vector(ScaleType::e4m3, from, v);
    } else {
      if (type == ScaleType::bf16) return scale_vector(ScaleType::bf16, from, v);
      if (type == ScaleType::f16) return scale_vector(ScaleType::f16, from, v);
      if (type == ScaleType::f32) return scale_vector(ScaleType::f32, from, v);
    }
  }
  return any_scale(type, shared, from, v);
}

// A block of columns in one stream. kFetch: lines are prefetched with each line of codes.
template <class Format, bool kFetch>
struct Block {
  const char* codes;
  int tiles;  // tiles of the stream, whose lines alternate
  ScaleType type;
  bool shared;
  const char *scales, *zeros;  // as stored, `apart` bytes from tile to tile
  int64_t apart;
  int64_t far, near;  // bytes from a line of codes to the lines to prefetch with it

  // Address of line `number` of tile t's codes, of which the caller reads vector v.
  template <class V>
  LF_INLINED const char* line(int number, int t, V v) const {
    const char* const at = codes + (number * tiles + t) * 64;
    if (v() == 0 && kFetch) fetch(at + far, at + near);
    return at;
  }
  LF_INLINED vf scale(int t, int v) const {
    const char* const from = scales + t * apart;
    if (type == ScaleType::none) return splat(Format::factor);
    const vf found = scale_of<Format::code>(type, shared, from, v);
    return Format::factor == 1 ? found : found * splat(Format::factor);
  }
  // Zero points less the offset of the codes, which Head has corrected already.
  LF_INLINED vf zero(int t, int v) const {
    const vf wide = __builtin_convertvector((vi)widen_bytes(zeros + t * apart + v * kWidth), vf);
    return wide - splat((float)kOffset<Format::code>);
  }
};

// ---------------------------------------------------------------------------------------------------------- products

// The format of weights of 4 bits and int8; P: digits of each value of a vector. Formats have these members: `prepare`
// writes a vector's block; `add` multiplies a block of tiles by one position; `decode` and `times` do the same in two
// steps, for several positions.
template <Code code_, int P, int columns_, bool zeros_>
struct Digits {
  static constexpr Code code = code_;
  static constexpr int columns = columns_;
  static constexpr bool zeros = zeros_;
  static constexpr int bytes = columns * kTile / (code == Code::int8 ? 1 : 2);  // bytes of a block's codes in a tile
  static constexpr int digits = digit_bytes<code, P, columns>();
  static constexpr int step = digits + (int)sizeof(Head);  // bytes of a prepared block
  static constexpr float factor = 1;                       // on all scales
  static constexpr int together = kTogether;               // tiles that are multiplied together
  struct Weights {                                         // a block's quads for a vector of rows
    vb of[columns / 4];
  };

  LF_INLINE void prepare(const float* x, int64_t count, char* to) { prepare_block<code, P, columns>(x, count, to); }

  // The block's sum of weights times values of x, for a vector of rows.
  template <class SumsOf>
  LF_INLINE vf total(const SumsOf& sums, const Head& head, vf zero) {
    if constexpr (P == 3 && kFits<code, columns> && !zeros) {  // one integer: rounds once, as the sum below does
      return __builtin_convertvector(sums.low() + (vi)((vu)sums.high() << 8), vf) * splat(head.unit);
    }
    const vf low = without_zeros(sums.low(), head.low_digits, zero);
    if constexpr (P == 3) {
      return without_zeros(sums.high(), head.high_digits, zero) * splat(head.high_unit) + low * splat(head.unit);
    } else {
      return low * splat(head.unit);
    }
  }

  // A sum less the zero points times the sum of the digits, exactly: in float32 for int4, in integers for int8.
  LF_INLINE vf without_zeros(vi sum, float digit_sum, [[maybe_unused]] vf zero) {
    if constexpr (zeros && code == Code::int8)
      sum -= __builtin_convertvector(zero, vi) * (vi)splat_u((uint32_t)(int32_t)digit_sum);
    vf found = __builtin_convertvector(sum, vf);
    if constexpr (zeros && code == Code::int4) found -= zero * splat(digit_sum);
    return found;
  }

  // One position: adds the block times its scales to y, for vector v of the rows of T tiles from number t0 on.
  template <int T, class Block, class V>
  LF_INLINE void add(const Block& block, int t0, V v, const char* x, float* y) {
    const Head& head = *(const Head*)(x + digits);
    Sums<code, P, columns> sums[T];
    each<T>([&](auto t) LF_INLINED { sums[t()].begin(head); });
    const auto line_of = [&](int number, int t)
                             LF_INLINED { return load_once(block.line(number, t0 + t, v) + v() * sizeof(vb)); };
    if constexpr (code == Code::int8) {
      each<columns / 4>([&](auto q) LF_INLINED {
        each<T>([&](auto t) LF_INLINED { sums[t()].template add<q()>(line_of(q(), t()), x); });
      });
    } else {
      each<columns / 8>([&](auto line) LF_INLINED {
        vb first[T], second[T];
        each<T>([&](auto t) LF_INLINED { quads_of<code>(line_of(line(), t()), first[t()], second[t()]); });
        each<T>([&](auto t) LF_INLINED { sums[t()].template add<2 * line()>(first[t()], x); });
        each<T>([&](auto t) LF_INLINED { sums[t()].template add<2 * line() + 1>(second[t()], x); });
      });
    }
    each<T>([&](auto t) LF_INLINED {
      float* const to = y + t() * kTile + v() * kWidth;
      const vf zero = zeros ? block.zero(t0 + t(), v()) : vf{};
      storef(to, loadf(to) + total(sums[t()], head, zero) * block.scale(t0 + t(), v()));
    });
  }

#if defined(__AVX2__) && !defined(__AVX512F__)
  // The same for all rows of tile t.
  template <class Block>
  LF_INLINE void add_tile(const Block& block, int t, const char* x, float* y) {
    const Head& head = *(const Head*)(x + digits);
    BothSums<code, P, columns> sums;
    sums.add(head, x, [&](int number) LF_INLINED { return block.line(number, t, Count<0>{}); });
    each<kVectors>([&](auto v) LF_INLINED {
      float* const to = y + v() * kWidth;
      const vf zero = zeros ? block.zero(t, v()) : vf{};
      storef(to, loadf(to) + total(sums.of(v()), head, zero) * block.scale(t, v()));
    });
  }
#endif

  template <class Block, class V>
  LF_INLINE void decode(const Block& block, int t, V v, Weights& to) {
    each_quad<code, columns>([&](int number) LF_INLINED { return block.line(number, t, v) + v() * sizeof(vb); },
                             [&](auto q, vb weights) LF_INLINED { to.of[q()] = weights; });
  }
  // Calls f(t, sum of the block of tile t) for T tiles and one position.
  template <int T, class F>
  LF_INLINE void times(const Weights (&weights)[T], const char* x, const vf (&zero)[T], const F& f) {
    const Head& head = *(const Head*)(x + digits);
    Sums<code, P, columns> sums[T];
    each<T>([&](auto t) LF_INLINED { sums[t()].begin(head); });
    each<columns / 4>([&](auto q) LF_INLINED {
      each<T>([&](auto t) LF_INLINED { sums[t()].template add<q()>(weights[t()].of[q()], x); });
    });
    each<T>([&](auto t) LF_INLINED { f(t, total(sums[t()], head, zero[t()])); });
  }
};

// `count` streams, `apart` bytes from one to the next. Each has `tiles` tiles, and those from number `member` on are
// multiplied.
struct Streams {
  const char* first;
  int64_t apart;
  int count, tiles, member;
};

// Calls f(stream, block, x) for each block of columns and each stream. x: the prepared vectors, `step` bytes per block.
// Prefetches as if as many streams followed the last one.
template <class Format, int T, bool kFetch, class F>
LF_INLINE void each_block(const Quantized& format, const Streams& streams, int64_t columns, const Reading& way,
                          const char* x, int64_t step, const F& f) {
  const int tiles = T == 2 ? 2 : streams.tiles, member = T == 2 ? 0 : streams.member;  // constants for T == 2
  const auto fetch_line = [&](const char* from) LF_INLINED {
    for (int s = 0; s < streams.count; s++) __builtin_prefetch(from + s * streams.apart, 0, 2);
  };
  const int row = (format.shared ? 1 : kTile) * laneformer::bytes_of(format.scale);  // bytes of a group's scales
  const int repeat = format.group / Format::columns;
  const int64_t skipped = (streams.count - 1) * streams.apart;
  const char* at = streams.first + (format.rows ? tiles * 4 * kTile : 0);
  const char *ahead = at + way.far, *last = streams.first + streams.apart;
  for (int64_t first = 0; first < columns; first += kChunkColumns) {
    const int64_t here = columns - first < kChunkColumns ? columns - first : kChunkColumns;
    const int64_t bytes = laneformer::scale_bytes(format, here), groups = laneformer::groups_of(format, here);
    const char *scales = at + member * bytes, *zeros = scales + groups * row;
    if (!kFetch)  // prefetches the scales alone, in the order of memory
      for (const char* line = scales; line < scales + T * bytes; line += 64) fetch_line(line);
    at += tiles * bytes;
    int64_t blocks = laneformer::padded_columns(here) / Format::columns;
    const int64_t more = tiles * bytes / blocks;                             // bytes of scales to prefetch per block
    if (format.group && groups * repeat < blocks) blocks = groups * repeat;  // the padding has no scales
    const char* const end = at + blocks * tiles * Format::bytes;
    int64_t due = 0;
    int left = repeat;
    for (; at < end; at += tiles * Format::bytes, x += step) {
      if (ahead >= last) ahead += skipped, last += skipped + streams.apart;
      for (int s = 0; s < streams.count; s++) {
        const int64_t offset = s * streams.apart;
        f(s,
          Block<Format, kFetch>{at + offset + member * 64, tiles, format.scale, format.shared, scales + offset,
                                zeros + offset, bytes, ahead - at, way.near},
          x);
      }
      ahead += tiles * Format::bytes;
      if (kFetch)
        for (due += more; due >= 64; due -= 64, ahead += 64) fetch_line(ahead);
      if (--left == 0) left = repeat, scales += row, zeros += kTile;
    }
  }
}

// Calls f(v) for each vector of a tile's rows. v() is a constant, but in portable code the number of a loop, which
// compiles in a third of the time.
struct Variable {
  int number;
  int operator()() const { return number; }
};
template <class F>
LF_INLINE void each_vector(F f) {
  if constexpr (kWidth > 4) {
    each<kVectors>(f);
  } else {
    for (int v = 0; v < kVectors; v++) f(Variable{v});
  }
}

// One position: multiplies T tiles of each stream and writes y [streams][T][kTile].
template <class Format, int T, bool kFetch>
__attribute__((noinline)) void multiply_one(const Quantized& format, const Streams& streams, const char* x,
                                            int64_t columns, const Reading& way, float* y) {
  constexpr int kSide = T < Format::together ? T : Format::together;
  alignas(64) float sums[kStreams][T * kTile] = {};
  each_block<Format, T, kFetch>(format, streams, columns, way, x, Format::step,
                                [&](int s, const Block<Format, kFetch>& block, const char* digits) LF_INLINED {
#if defined(__AVX2__) && !defined(__AVX512F__)
                                  if constexpr (laneformer::in_pairs(Format::code)) {
                                    each<T>([&](auto t) LF_INLINED {
                                      __asm__("" : "+r"(digits));
                                      Format::add_tile(block, t(), digits, sums[s] + t() * kTile);
                                    });
                                    return;
                                  }
#endif
                                  each<T / kSide>([&](auto side) LF_INLINED {
                                    each_vector([&](auto v) LF_INLINED {
                                      // Makes each vector load the digits again: registers cannot keep them.
                                      __asm__("" : "+r"(digits));
                                      constexpr int t = side() * kSide;
                                      Format::template add<kSide>(block, t, v, digits, sums[s] + t * kTile);
                                    });
                                  });
                                });
  for (int s = 0; s < streams.count; s++) {
    const char* const factors = streams.first + s * streams.apart + streams.member * 4 * kTile;
    for (int i = 0; i < T * kTile; i += kWidth) {
      vf total = loadf(sums[s] + i);
      if (format.rows) total *= load<vf>(factors + 4 * i);
      storef(y + s * T * kTile + i, total);
    }
  }
}

// Several positions: decodes a block once for all of them, and keeps the sums in y. x has the blocks of all positions
// side by side.
template <class Format, int T>
__attribute__((noinline)) void multiply_several(const Quantized& format, const Streams& streams, const char* x,
                                                int64_t columns, const Reading& way, int positions, float* y,
                                                int64_t ldy) {
  constexpr int kSide = T < Format::together ? T : Format::together;
  for (int p = 0; p < positions; p++) std::memset(y + p * ldy, 0, streams.count * T * kTile * sizeof(float));
  each_block<Format, T, true>(format, streams, columns, way, x, positions * Format::step,
                              [&](int s, const Block<Format, true>& block, const char* digits) LF_INLINED {
                                each<T / kSide>([&](auto side) LF_INLINED {
                                  each_vector([&](auto v) LF_INLINED {
                                    constexpr int t0 = side() * kSide;
                                    typename Format::Weights weights[kSide];
                                    vf factors[kSide], zeros[kSide] = {};
                                    each<kSide>([&](auto t) LF_INLINED {
                                      Format::decode(block, t0 + t(), v, weights[t()]);
                                      factors[t()] = block.scale(t0 + t(), v());
                                      if constexpr (Format::zeros) zeros[t()] = block.zero(t0 + t(), v());
                                    });
                                    float* to = y + (s * T + t0) * kTile + v() * kWidth;
                                    const char* from = digits;
                                    for (int p = 0; p < positions; p++, to += ldy, from += Format::step)
                                      Format::template times<kSide>(
                                          weights, from, zeros, [&](auto t, vf sum) LF_INLINED {
                                            storef(to + t() * kTile, loadf(to + t() * kTile) + sum * factors[t()]);
                                          });
                                  });
                                });
                              });
  for (int s = 0; format.rows && s < streams.count; s++) {
    const char* const factors = streams.first + s * streams.apart + streams.member * 4 * kTile;
    for (int p = 0; p < positions; p++)
      for (int i = 0; i < T * kTile; i += kWidth) {
        float* const to = y + p * ldy + s * T * kTile + i;
        storef(to, loadf(to) * load<vf>(factors + 4 * i));
      }
  }
}

// Multiplies the tiles stream by stream, or several streams together if positions are few. lane: the matrix's first
// tile; all: how many it has. A tile whose partner belongs to another worker is multiplied by itself.
template <class Format>
void product_of(const Quantized& format, const char* lane, int64_t all, int64_t first, int64_t count, const char* x,
                int64_t columns, int positions, float* y, int64_t ldy) {
  constexpr bool kPairs = laneformer::in_pairs(Format::code);
  constexpr int kBoth = kPairs && kWidth > 4 ? 2 : 1;  // SSE and NEON do not have enough registers for both
  const int64_t bytes = laneformer::tile_bytes(format, columns), end = first + count;
  const Reading way = reading();
  for (int64_t t = first; t < end;) {
    const int member = kPairs ? t % 2 : 0, tiles = kPairs && t - member + 1 < all ? 2 : 1;
    const bool both = kBoth == 2 && member == 0 && tiles == 2 && t + 1 < end;
    const int at_once = both ? 2 : 1;
    Streams streams{lane + (t - member) * bytes, tiles * bytes, 1, tiles, member};
    if (positions <= kFewPositions && at_once == tiles) {  // several whole streams
      const int64_t more = (end - t) / tiles;
      streams.count = (int)(more < way.streams ? more : way.streams);
    }
    float* const to = y + (t - first) * kTile;
    if (positions > 1) {
      both ? multiply_several<Format, kBoth>(format, streams, x, columns, way, positions, to, ldy)
           : multiply_several<Format, 1>(format, streams, x, columns, way, positions, to, ldy);
    } else {
      const auto with = [&](auto fetched) {
        both ? multiply_one<Format, kBoth, fetched() != 0>(format, streams, x, columns, way, to)
             : multiply_one<Format, 1, fetched() != 0>(format, streams, x, columns, way, to);
      };
      way.far ? with(Count<1>{}) : with(Count<0>{});
    }
    t += at_once * streams.count;
  }
}

// Writes the blocks of the vectors: [block][position].
template <class Format>
void prepare_of(const float* x, int64_t ldx, int64_t columns, int positions, char* out) {
  for (int64_t k = 0; k < laneformer::padded_columns(columns); k += Format::columns)
    for (int p = 0; p < positions; p++, out += Format::step) Format::prepare(x + p * ldx + k, columns - k, out);
}

// Calls f(Digits<...>{}) or f(Eights{}), with the class for these weights.
template <class F>
void with_format(const Quantized& format, Activations activations, F f) {
  const auto with = [&](auto p) {
    switch (format.code) {
      case Code::int4:
        return format.zeros ? f(Digits<Code::int4, p(), 32, true>{}) : f(Digits<Code::int4, p(), 32, false>{});
      case Code::e2m1:
        return format.group == 16 ? f(Digits<Code::e2m1, p(), 16, false>{}) : f(Digits<Code::e2m1, p(), 32, false>{});
      case Code::int8:
        return format.zeros ? f(Digits<Code::int8, p(), 32, true>{}) : f(Digits<Code::int8, p(), 32, false>{});
      case Code::e4m3: return f(Eights{});
    }
  };
  activations == Activations::exact ? with(Count<3>{}) : with(Count<2>{});
}

int64_t prepared_bytes(const Quantized& format, Activations activations, int64_t columns, int positions) {
  int64_t bytes = 0;
  with_format(format, activations,
              [&](auto of) { bytes = laneformer::padded_columns(columns) / of.columns * of.step * positions; });
  return bytes;
}

void prepare(const Quantized& format, Activations activations, const float* x, int64_t ldx, int64_t columns,
             int positions, void* out) {
  with_format(format, activations, [&](auto of) { prepare_of<decltype(of)>(x, ldx, columns, positions, (char*)out); });
}

void product(const Quantized& format, Activations activations, const char* tiles, int64_t all, int64_t first,
             int64_t count, const void* x, int64_t columns, int positions, float* y, int64_t ldy) {
  with_format(format, activations, [&](auto of) {
    product_of<decltype(of)>(format, tiles, all, first, count, (const char*)x, columns, positions, y, ldy);
  });
}

}  // namespace
}  // namespace LF_ISA

#define LF_TEXT2(x) #x
#define LF_TEXT(x) LF_TEXT2(x)
#define LF_JOIN2(a, b) a##b
#define LF_JOIN(a, b) LF_JOIN2(a, b)

extern "C" const laneformer::QuantizedKernels LF_JOIN(laneformer_quantized_, LF_ISA);
const laneformer::QuantizedKernels LF_JOIN(laneformer_quantized_, LF_ISA) = {LF_TEXT(LF_ISA), LF_ISA::prepared_bytes,
                                                                             LF_ISA::prepare, LF_ISA::product};
