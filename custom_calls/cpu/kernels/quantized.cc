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
constexpr int kTogether = 2;  // tiles that share the digits of a position
#else
constexpr int kTogether = 1;
#endif

// How one position reads: tiles at a time, and how many bytes ahead they are fetched. AMD's prefetchers follow one
// stream, and lose it where lines that they would bring are asked for.
struct Reading {
  int tiles;
  int64_t ahead;
};
LF_INLINE Reading reading() {
#if defined(__x86_64__)
  if (__builtin_cpu_is("amd")) return {1, 0};
#endif
  return {kTogether, 1024};
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

// Of a chunk's blocks, 16 values each.
struct Scales {
  alignas(64) float of[kChunkColumns / 16][kTile];
  float zeros[kChunkColumns / 32][kTile];  // less the offset of codes
};

// The scales of a chunk with `columns` columns, of blocks of `block`, times `factor`. Returns where the codes begin.
template <int block, bool with_zeros>
LF_INLINE const char* widen_scales(const Quantized& format, const char* from, int64_t columns, float factor,
                                   Scales& to) {
  const int64_t groups = laneformer::groups_of(format, columns);
  const int repeat = format.group / block, each_bytes = laneformer::bytes_of(format.scale);
  const char* const codes = from + laneformer::scale_bytes(format, columns);
  float (*row)[kTile] = to.of;
  for (int64_t g = 0; g < groups; g++, from += each_bytes * (format.shared ? 1 : kTile)) {
    each<kVectors>([&](auto v) LF_INLINED {
      vf scales;
      if (format.shared) {
        scales = splat(shared_scale(format.scale, from));
      } else {
        scales = scale_vector(format.scale, from, v());
      }
      for (int i = 0; i < repeat; i++) storef(row[i] + v() * kWidth, scales * splat(factor));
    });
    row += repeat;
  }
  for (; row < to.of + laneformer::padded_columns(columns) / block; row++) std::memset(*row, 0, sizeof *row);
  if constexpr (with_zeros) {
    float (*zero)[kTile] = to.zeros;
    for (int64_t g = 0; g < groups; g++, from += kTile)
      for (int i = 0; i < repeat; i++, zero++)
        each<kVectors>([&](auto v) LF_INLINED {
          const vf wide = __builtin_convertvector((vi)widen_bytes(from + v() * kWidth), vf);
          storef(*zero + v() * kWidth, wide - splat((float)kOffset<Code::int4>));
        });
  }
  return codes;
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
  struct Weights {  // of a vector of rows
    vb of[columns / 4];
  };

  LF_INLINE void prepare(const float* x, int64_t count, char* to) { prepare_block<code, P, columns>(x, count, to); }

  template <class SumsOf>
  LF_INLINE vf total(const SumsOf& sums, const Head& head, [[maybe_unused]] const float* zero) {
    vf low = __builtin_convertvector(sums.low(), vf);
    if constexpr (P == 3) {
      vf high = __builtin_convertvector(sums.high(), vf);
      if constexpr (zeros) {
        high -= loadf(zero) * splat(head.high_digits);
        low -= loadf(zero) * splat(head.low_digits);
      }
      return high * splat(head.high_unit) + low * splat(head.unit);
    } else {
      if constexpr (zeros) low -= loadf(zero) * splat(head.low_digits);
      return low * splat(head.unit);
    }
  }

  // One position, T tiles: y[t] += their block times its scales.
  template <int T, int v>
  LF_INLINE void add(const char* (&codes)[T], const char* x, const float* const (&scales)[T],
                     const float* const (&zero)[T], vf (&y)[T]) {
    Head head;
    std::memcpy(&head, x + digits, sizeof head);
    Sums<code, P, columns> sums[T];
    each<T>([&](auto t) LF_INLINED { sums[t()].begin(head); });
    if constexpr (code == Code::int8) {
      each<columns / 4>([&](auto q) LF_INLINED {
        each<T>([&](auto t)
                    LF_INLINED { sums[t()].template add<q()>(load<vb>(codes[t()] + q() * 64 + v * sizeof(vb)), x); });
      });
    } else {
      each<columns / 8>([&](auto line) LF_INLINED {
        vb first[T], second[T];
        each<T>([&](auto t) LF_INLINED {
          quads_of<code>(load<vb>(codes[t()] + line() * 64 + v * sizeof(vb)), first[t()], second[t()]);
        });
        each<T>([&](auto t) LF_INLINED { sums[t()].template add<2 * line()>(first[t()], x); });
        each<T>([&](auto t) LF_INLINED { sums[t()].template add<2 * line() + 1>(second[t()], x); });
      });
    }
    each<T>([&](auto t) LF_INLINED {
      y[t()] += total(sums[t()], head, zeros ? zero[t()] + v * kWidth : nullptr) * loadf(scales[t()] + v * kWidth);
    });
  }

  template <int v>
  LF_INLINE void decode(const char* codes, Weights& to) {
    each_quad<code, columns>(codes, v, [&](auto q, vb weights) LF_INLINED { to.of[q()] = weights; });
  }
  LF_INLINE vf times(const Weights& weights, const char* x, const float* zero) {
    Head head;
    std::memcpy(&head, x + digits, sizeof head);
    Sums<code, P, columns> sums;
    sums.begin(head);
    each<columns / 4>([&](auto q) LF_INLINED { sums.template add<q()>(weights.of[q()], x); });
    return total(sums, head, zero);
  }
};

// One position: T tiles side by side, which lie `tile` bytes apart.
template <class Format, int T>
__attribute__((noinline)) void multiply_one(const Quantized& format, const char* w, const char* x, int64_t columns,
                                            int64_t ahead, float* y) {
  constexpr int kBlock = Format::columns;
  const int64_t tile = laneformer::tile_bytes(format, columns);
  Scales scales[T];
  const int scale_step = format.group ? kTile : 0;
  if (!format.group)
    for (Scales& of : scales)
      for (float& one : of.of[0]) one = Format::factor;
  const char* at = w + (format.rows ? 4 * kTile : 0);
  vf sums[kVectors][T] = {};
  for (int64_t first = 0; first < columns; first += kChunkColumns) {
    const int64_t here = columns - first < kChunkColumns ? columns - first : kChunkColumns;
    const char* codes[T];
    each<T>([&](auto t) LF_INLINED {
      codes[t()] = at + t() * tile;
      if (format.group)
        codes[t()] = widen_scales<kBlock, Format::zeros>(format, codes[t()], here, Format::factor, scales[t()]);
    });
    const char* const end = codes[0] + laneformer::code_bytes(format, here);
    const float *scale[T], *zero[T];
    each<T>([&](auto t) LF_INLINED { scale[t()] = scales[t()].of[0], zero[t()] = scales[t()].zeros[0]; });
    for (; codes[0] < end; x += Format::step) {
      each<T>([&](auto t) LF_INLINED {
        each<Format::bytes / 64>([&](auto line) LF_INLINED { __builtin_prefetch(codes[t()] + ahead + 64 * line()); });
      });
      each<kVectors>([&](auto v) LF_INLINED {
        Format::template add<T, v()>(codes, x, scale, zero, sums[v()]);
        if (kVectors > 1) __asm__("" : "+r"(x));  // the next vector of rows loads the digits again
      });
      each<T>([&](auto t) LF_INLINED { codes[t()] += Format::bytes, scale[t()] += scale_step, zero[t()] += kTile; });
    }
    at = codes[0];
  }
  each<T>([&](auto t) LF_INLINED {
    each<kVectors>([&](auto v) LF_INLINED {
      vf total = sums[v()][t()];
      if (format.rows) total *= load<vf>(w + t() * tile + v() * sizeof(vf));
      storef(y + t() * kTile + v() * kWidth, total);
    });
  });
}

// Several positions: a block is decoded once for all of them. The blocks of all positions are beside each other in x.
template <class Format>
__attribute__((noinline)) void multiply_several(const Quantized& format, const char* w, const char* x, int64_t columns,
                                                int positions, float* y, int64_t ldy) {
  constexpr int kBlock = Format::columns;
  const int64_t ahead = reading().ahead;
  Scales scales;
  const int scale_step = format.group ? kTile : 0;
  if (!format.group)
    for (float& one : scales.of[0]) one = Format::factor;
  const char* codes = w + (format.rows ? 4 * kTile : 0);
  for (int p = 0; p < positions; p++) std::memset(y + p * ldy, 0, kTile * sizeof(float));
  for (int64_t first = 0; first < columns; first += kChunkColumns) {
    const int64_t here = columns - first < kChunkColumns ? columns - first : kChunkColumns;
    if (format.group) codes = widen_scales<kBlock, Format::zeros>(format, codes, here, Format::factor, scales);
    const char* const end = codes + laneformer::code_bytes(format, here);
    const float *scale = scales.of[0], *zero = scales.zeros[0];
    for (; codes < end; codes += Format::bytes, scale += scale_step, zero += kTile, x += positions * Format::step) {
      each<Format::bytes / 64>([&](auto line) LF_INLINED { __builtin_prefetch(codes + ahead + 64 * line()); });
      each<kVectors>([&](auto v) LF_INLINED {
        typename Format::Weights weights;
        Format::template decode<v()>(codes, weights);
        const vf factor = loadf(scale + v() * kWidth);
        float* to = y + v() * kWidth;
        const char* from = x;
        for (int p = 0; p < positions; p++, to += ldy, from += Format::step)
          storef(to, loadf(to) + Format::times(weights, from, zero + v() * kWidth) * factor);
      });
    }
  }
  if (format.rows)
    for (int p = 0; p < positions; p++)
      each<kVectors>([&](auto v) LF_INLINED {
        float* const to = y + p * ldy + v() * kWidth;
        storef(to, loadf(to) * load<vf>(w + v() * sizeof(vf)));
      });
}

template <class Format>
void product_of(const Quantized& format, const char* w, const char* x, int64_t columns, int64_t tiles, int positions,
                float* y, int64_t ldy) {
  const int64_t tile = laneformer::tile_bytes(format, columns);
  if (positions > 1) {
    for (; tiles > 0; tiles--, w += tile, y += kTile)
      multiply_several<Format>(format, w, x, columns, positions, y, ldy);
    return;
  }
  const Reading way = reading();
  if constexpr (kTogether > 1) {
    if (way.tiles > 1)
      for (; tiles >= kTogether; tiles -= kTogether, w += kTogether * tile, y += kTogether * kTile)
        multiply_one<Format, kTogether>(format, w, x, columns, way.ahead, y);
  }
  for (; tiles > 0; tiles--, w += tile, y += kTile) multiply_one<Format, 1>(format, w, x, columns, way.ahead, y);
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
      case Code::int8: return f(Digits<Code::int8, p(), 32, false>{});
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

void product(const Quantized& format, Activations activations, const char* tiles, const void* x, int64_t columns,
             int64_t count, int positions, float* y, int64_t ldy) {
  with_format(format, activations, [&](auto of) {
    product_of<decltype(of)>(format, tiles, (const char*)x, columns, count, positions, y, ldy);
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
