// Products with weights of 8 and 4 bits, compiled once per instruction set (LF_ISA names it), without contracting a
// product and a sum: all sets round alike. No library templates in here, as in kernels.cc.
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

// How many bytes ahead a stream is fetched. AMD's prefetchers lose it where lines that they would bring are asked for.
LF_INLINE int64_t reading_ahead() {
#if defined(__x86_64__)
  if (__builtin_cpu_is("amd")) return 0;
#endif
  return 2048;
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

// 16 scales as float32, vector v.
LF_INLINE vf scale_vector(ScaleType type, const char* from, int v) {
  switch (type) {
    case ScaleType::e8m0: return as_float(widen_bytes(from + v * kWidth) << 23);
    case ScaleType::e4m3: return widen_e4m3(widen_bytes(from + v * kWidth)) * splat(256);
    case ScaleType::bf16: return widen_bf16(load<vh>(from + v * sizeof(vh)));
    case ScaleType::f16: return widen_f16(load<vh>(from + v * sizeof(vh)));
    default: return load<vf>(from + v * sizeof(vf));
  }
}

// One scale of a whole tile.
LF_INLINE float shared_scale(ScaleType type, const char* from) {
  alignas(64) char padded[64] = {};
  std::memcpy(padded, from, laneformer::bytes_of(type));
  return scale_vector(type, padded, 0)[0];
}

// Of a chunk's blocks, 16 values of each of T tiles.
template <int T>
struct Scales {
  alignas(64) float of[kChunkColumns / 16][T][kTile];
  float zeros[kChunkColumns / 32][T][kTile];  // less the offset of codes
};

// Where the scales or zero points of a tile's groups go: `repeat` rows for each, `step` floats apart.
struct Rows {
  int64_t groups;
  int repeat, step;
  float* to;
};
template <class F>
LF_INLINE void each_group(const Rows& rows, const F& values) {
  float* to = rows.to;
  for (int64_t g = 0; g < rows.groups; g++) {
    vf of[kVectors];
    each<kVectors>([&](auto v) LF_INLINED { of[v()] = values(g, v()); });
    for (int i = 0; i < rows.repeat; i++, to += rows.step)
      each<kVectors>([&](auto v) LF_INLINED { storef(to + v() * kWidth, of[v()]); });
  }
}

template <ScaleType type>
LF_INLINE void widen_groups(const Rows& rows, const char* from, float factor) {
  each_group(rows, [&](int64_t g, int v) LF_INLINED {
    return scale_vector(type, from + g * kTile * laneformer::bytes_of(type), v) * splat(factor);
  });
}

// The scales of a tile's chunk, times `factor`, and its zero points less the offset of codes.
__attribute__((noinline)) void widen_scales(const Quantized& format, const char* from, const Rows& rows, float factor,
                                            float* zeros) {
  if (format.shared) {
    each_group(rows, [&](int64_t g, int) LF_INLINED {
      return splat(shared_scale(format.scale, from + g * laneformer::bytes_of(format.scale)) * factor);
    });
  } else {
    switch (format.scale) {
      case ScaleType::e8m0: widen_groups<ScaleType::e8m0>(rows, from, factor); break;
      case ScaleType::e4m3: widen_groups<ScaleType::e4m3>(rows, from, factor); break;
      case ScaleType::bf16: widen_groups<ScaleType::bf16>(rows, from, factor); break;
      case ScaleType::f16: widen_groups<ScaleType::f16>(rows, from, factor); break;
      default: widen_groups<ScaleType::f32>(rows, from, factor);
    }
  }
  if (!format.zeros) return;
  from += rows.groups * kTile * laneformer::bytes_of(format.scale);
  each_group({rows.groups, rows.repeat, rows.step, zeros}, [&](int64_t g, int v) LF_INLINED {
    const vf wide = __builtin_convertvector((vi)widen_bytes(from + g * kTile + v * kWidth), vf);
    return wide - splat((float)(format.code == Code::int4 ? kOffset<Code::int4> : kOffset<Code::int8>));
  });
}

// ---------------------------------------------------------------------------------------------------------- products

// Weights of 4 bits and int8 with P digits of each value.
template <Code code_, int P, int columns_, bool zeros_>
struct Digits {
  static constexpr Code code = code_;
  static constexpr int columns = columns_;
  static constexpr bool zeros = zeros_;
  static constexpr int bytes = columns * kTile / (code == Code::int8 ? 1 : 2);  // of a block's codes
  static constexpr int digits = digit_bytes<code, P, columns>();
  static constexpr int step = digits + (int)sizeof(Head);  // of a prepared block
  static constexpr float factor = 1;
  static constexpr int together = kTogether;
  struct Weights {  // of a vector of rows
    vb of[columns / 4];
  };

  LF_INLINE void prepare(const float* x, int64_t count, char* to) { prepare_block<code, P, columns>(x, count, to); }

  template <class SumsOf>
  LF_INLINE vf total(const SumsOf& sums, const Head& head, [[maybe_unused]] const float* zero) {
    if constexpr (P == 3 && kFits<code, columns> && !zeros) {  // rounds as the sum of both does
      return __builtin_convertvector(sums.low() + (vi)((vu)sums.high() << 8), vf) * splat(head.unit);
    }
    const vf low = without_zeros(sums.low(), head.low_digits, zero);
    if constexpr (P == 3) {
      return without_zeros(sums.high(), head.high_digits, zero) * splat(head.high_unit) + low * splat(head.unit);
    } else {
      return low * splat(head.unit);
    }
  }

  // A sum less the zero points times the sum of the digits: exact, in float32 for int4, as integers for int8.
  LF_INLINE vf without_zeros(vi sum, float digit_sum, [[maybe_unused]] const float* zero) {
    if constexpr (zeros && code == Code::int8)
      sum -= __builtin_convertvector(loadf(zero), vi) * (vi)splat_u((uint32_t)(int32_t)digit_sum);
    vf found = __builtin_convertvector(sum, vf);
    if constexpr (zeros && code == Code::int4) found -= loadf(zero) * splat(digit_sum);
    return found;
  }

  // One position, T of `tiles` in a stream: y[t] += their block times its scales.
  template <int T, int v>
  LF_INLINE void add(const char* codes, int tiles, const char* x, const float* scales, const float* zero, vf* y) {
    Head head;
    std::memcpy(&head, x + digits, sizeof head);
    Sums<code, P, columns> sums[T];
    each<T>([&](auto t) LF_INLINED { sums[t()].begin(head); });
    const auto line_of = [&](int number, int t)
                             LF_INLINED { return load_once(codes + (number * tiles + t) * 64 + v * sizeof(vb)); };
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
      constexpr int at = t() * kTile + v * kWidth;
      y[t()] += total(sums[t()], head, zeros ? zero + at : nullptr) * loadf(scales + at);
    });
  }

  template <int v>
  LF_INLINE void decode(const char* codes, int tiles, Weights& to) {
    each_quad<code, columns>(codes, tiles, v, [&](auto q, vb weights) LF_INLINED { to.of[q()] = weights; });
  }
  // f(t, sum of tile t's block), of T tiles.
  template <int T, class F>
  LF_INLINE void times(const Weights (&weights)[T], const char* x, const float* zero, const F& f) {
    Head head;
    std::memcpy(&head, x + digits, sizeof head);
    Sums<code, P, columns> sums[T];
    each<T>([&](auto t) LF_INLINED { sums[t()].begin(head); });
    each<columns / 4>([&](auto q) LF_INLINED {
      each<T>([&](auto t) LF_INLINED { sums[t()].template add<q()>(weights[t()].of[q()], x); });
    });
    each<T>([&](auto t) LF_INLINED { f(t, total(sums[t()], head, zero + t() * kTile)); });
  }
};

// Calls f(codes, scales and zeros of a block's T tiles) for each block, where `stream` has `tiles` and those of T begin
// with number `member`.
template <class Format, int T, class F>
LF_INLINE void each_block(const Quantized& format, const char* stream, int tiles, int member, int64_t columns,
                          const F& f) {
  constexpr int kBlock = Format::columns;
  const int64_t ahead = reading_ahead();
  Scales<T> scales;
  if (!format.group)
    for (auto& tile : scales.of[0])
      for (float& one : tile) one = Format::factor;
  const int step = format.group ? T * kTile : 0;
  const char* at = stream + (format.rows ? tiles * 4 * kTile : 0);
  for (int64_t first = 0; first < columns; first += kChunkColumns) {
    const int64_t here = columns - first < kChunkColumns ? columns - first : kChunkColumns;
    if (format.group) {
      const int64_t bytes = laneformer::scale_bytes(format, here), groups = laneformer::groups_of(format, here);
      for (int t = 0; t < T; t++)
        widen_scales(format, at + (member + t) * bytes, {groups, format.group / kBlock, T * kTile, scales.of[0][t]},
                     Format::factor, scales.zeros[0][t]);
      for (int64_t b = groups * (format.group / kBlock); b < laneformer::padded_columns(here) / kBlock; b++)
        std::memset(scales.of[b], 0, sizeof scales.of[b]);
      at += tiles * bytes;
    }
    const char* const end = at + tiles * laneformer::code_bytes(format, here);
    const float *scale = scales.of[0][0], *zero = scales.zeros[0][0];
    for (; at < end; at += tiles * Format::bytes, scale += step, zero += T * kTile) {
      if (ahead)
        each<T * Format::bytes / 64>([&](auto line) LF_INLINED {
          __builtin_prefetch(at + ahead + (line() / T * tiles + line() % T + member) * 64);
        });
      f(at + member * 64, scale, zero);
    }
  }
}

// One position.
template <class Format, int T>
__attribute__((noinline)) void multiply_one(const Quantized& format, const char* stream, int tiles, int member,
                                            const char* x, int64_t columns, float* y) {
  if (T == 2) tiles = 2, member = 0;  // which the compiler knows
  constexpr int kSide = T < Format::together ? T : Format::together;
  vf sums[kVectors][T] = {};
  each_block<Format, T>(format, stream, tiles, member, columns,
                        [&](const char* codes, const float* scale, const float* zero) LF_INLINED {
                          each<T / kSide>([&](auto side) LF_INLINED {
                            constexpr int t = side() * kSide;
                            each<kVectors>([&](auto v) LF_INLINED {
                              Format::template add<kSide, v()>(codes + t * 64, tiles, x, scale + t * kTile,
                                                               zero + t * kTile, sums[v()] + t);
                              // The next vector of rows loads the digits again.
                              if (kVectors * T > kSide) __asm__("" : "+r"(x));
                            });
                          });
                          x += Format::step;
                        });
  each<T>([&](auto t) LF_INLINED {
    each<kVectors>([&](auto v) LF_INLINED {
      vf total = sums[v()][t()];
      if (format.rows) total *= load<vf>(stream + (member + t()) * 4 * kTile + v() * sizeof(vf));
      storef(y + t() * kTile + v() * kWidth, total);
    });
  });
}

// Several positions: a block is decoded once for all of them. The blocks of all positions are beside each other in x.
template <class Format, int T>
__attribute__((noinline)) void multiply_several(const Quantized& format, const char* stream, int tiles, int member,
                                                const char* x, int64_t columns, int positions, float* y, int64_t ldy) {
  if (T == 2) tiles = 2, member = 0;
  constexpr int kSide = T < Format::together ? T : Format::together;
  for (int p = 0; p < positions; p++) std::memset(y + p * ldy, 0, T * kTile * sizeof(float));
  each_block<Format, T>(
      format, stream, tiles, member, columns, [&](const char* codes, const float* scale, const float* zero) LF_INLINED {
        each<T / kSide>([&](auto side) LF_INLINED {
          each<kVectors>([&](auto v) LF_INLINED {
            constexpr int begin = side() * kSide * kTile + v() * kWidth;
            typename Format::Weights weights[kSide];
            vf factors[kSide];
            each<kSide>([&](auto t) LF_INLINED {
              Format::template decode<v()>(codes + (side() * kSide + t()) * 64, tiles, weights[t()]);
              factors[t()] = loadf(scale + begin + t() * kTile);
            });
            float* to = y + begin;
            const char* from = x;
            for (int p = 0; p < positions; p++, to += ldy, from += Format::step)
              Format::template times<kSide>(weights, from, zero + begin, [&](auto t, vf sum) LF_INLINED {
                storef(to + t() * kTile, loadf(to + t() * kTile) + sum * factors[t()]);
              });
          });
        });
        x += positions * Format::step;
      });
  if (format.rows)
    for (int p = 0; p < positions; p++)
      for (int i = 0; i < T * kTile; i += kWidth) {
        float* const to = y + p * ldy + i;
        storef(to, loadf(to) * load<vf>(stream + (member * kTile + i) * 4));
      }
}

template <class Format>
void product_of(const Quantized& format, const char* lane, int64_t all, int64_t first, int64_t count, const char* x,
                int64_t columns, int positions, float* y, int64_t ldy) {
  constexpr int kPair = laneformer::in_pairs(Format::code) && kWidth > 4 ? 2 : 1;  // SSE and NEON lack the registers
  const int64_t bytes = laneformer::tile_bytes(format, columns), end = first + count;
  for (int64_t t = first; t < end;) {
    const int member = laneformer::in_pairs(Format::code) ? t % 2 : 0;
    const int tiles = laneformer::in_pairs(Format::code) && t - member + 1 < all ? 2 : 1;
    const char* const stream = lane + (t - member) * bytes;
    float* const to = y + (t - first) * kTile;
    const bool both = kPair == 2 && member == 0 && tiles == 2 && t + 1 < end;
    if (positions > 1) {
      both ? multiply_several<Format, kPair>(format, stream, tiles, member, x, columns, positions, to, ldy)
           : multiply_several<Format, 1>(format, stream, tiles, member, x, columns, positions, to, ldy);
    } else {
      both ? multiply_one<Format, kPair>(format, stream, tiles, member, x, columns, to)
           : multiply_one<Format, 1>(format, stream, tiles, member, x, columns, to);
    }
    t += both ? 2 : 1;
  }
}

template <class Format>
void prepare_of(const float* x, int64_t ldx, int64_t columns, int positions, char* out) {
  for (int64_t k = 0; k < laneformer::padded_columns(columns); k += Format::columns)
    for (int p = 0; p < positions; p++, out += Format::step) Format::prepare(x + p * ldx + k, columns - k, out);
}

// f(Digits<...>{}) or f(Eights{}).
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
