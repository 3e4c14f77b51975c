// The table of kernels of one instruction set: norms, sums, activations, rounding and sampling; products and attention
// come from the headers. custom_calls/build.py compiles this file once per set, with LF_ISA as its name; kernels.h has
// the table's functions, which workers call.
//
// Invariant: the code of this file and of its headers is in namespace LF_ISA, so code for one machine never replaces
// code for another. For the same reason it uses no library templates: the linker keeps one copy of each, which might
// have been compiled for another set.
#include "kernels.h"

#include <cmath>

#include "attention/attention.h"
#include "attention/compress.h"
#include "attention/latents.h"
#include "bf12.h"
#include "prepare.h"
#include "product.h"
#include "recurrence.h"
#include "simd.h"

#define LF_JOIN2(a, b) a##b
#define LF_JOIN(a, b) LF_JOIN2(a, b)

namespace LF_ISA {
namespace {

using laneformer::Activation;
using laneformer::Best;

void rms_norm(const float* x, const float* scale, float eps, int64_t n, float* y) {
  vf squares[4] = {};
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth)
    for (int c = 0; c < 4; c++) {
      const vf v = loadf(x + i + c * kWidth);
      squares[c] += v * v;
    }
  float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
  for (; i < n; i++) total += x[i] * x[i];
  const float factor = 1.0f / std::sqrt(total / (float)n + eps);
  for (i = 0; i + kWidth <= n; i += kWidth) storef(y + i, loadf(x + i) * splat(factor) * loadf(scale + i));
  for (; i < n; i++) y[i] = x[i] * factor * scale[i];
}

void add_scaled(float* total, const float* part, float weight, int64_t n) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) storef(total + i, loadf(total + i) + splat(weight) * loadf(part + i));
  for (; i < n; i++) total[i] += weight * part[i];
}

// Adds `at_once` vectors of each part, from element i on.
template <int at_once>
LF_INLINE void add_parts_at(const float* const* parts, const float* weights, int count, bool onto, int64_t i,
                            float* total) {
  vf acc[at_once];
  each<at_once>([&](auto v) LF_INLINED { acc[v()] = loadf(parts[0] + i + v() * kWidth); });
  for (int p = 1; p < count; p++) {
    const vf weight = splat(weights[p]);
    each<at_once>([&](auto v) LF_INLINED { acc[v()] += weight * loadf(parts[p] + i + v() * kWidth); });
  }
  each<at_once>([&](auto v) LF_INLINED {
    float* const to = total + i + v() * kWidth;
    storef(to, onto ? loadf(to) + acc[v()] : acc[v()]);
  });
}

void add_parts(const float* const* parts, const float* weights, int count, bool onto, int64_t n, float* total) {
  int64_t i = 0;
  for (; i + 4 * kWidth <= n; i += 4 * kWidth) add_parts_at<4>(parts, weights, count, onto, i, total);
  for (; i + kWidth <= n; i += kWidth) add_parts_at<1>(parts, weights, count, onto, i, total);
  for (; i < n; i++) {
    float sum = parts[0][i];
    for (int p = 1; p < count; p++) sum += weights[p] * parts[p][i];
    total[i] = onto ? total[i] + sum : sum;
  }
}

template <Activation kind>
void activate_with(bool gated, const float* x, int64_t tiles, float* out) {
  const int step = gated ? 2 * kTile : kTile;
  for (int64_t t = 0; t < tiles; t++)
    for (int v = 0; v < kTile; v += kWidth) {
      const float* from = x + step * t + v;
      const vf y = laneformer::activated<kind, Vectors>(loadf(from));
      storef(out + kTile * t + v, gated ? y * loadf(from + kTile) : y);
    }
}

template <int... kind>
void activate_with_any(Numbers<kind...>, Activation wanted, bool gated, const float* x, int64_t tiles, float* out) {
  (((int)wanted == kind ? activate_with<(Activation)kind>(gated, x, tiles, out) : void()), ...);
}

void activate(Activation wanted, bool gated, const float* x, int64_t tiles, float* out) {
  activate_with_any(CountUp<laneformer::kActivations>{}, wanted, gated, x, tiles, out);
}

void limit_gated(float limit, float offset, int64_t tiles, float* x) {
  const vf most = splat(limit), least = splat(-limit);  // comparisons with NaN are false, so NaN stays
  for (int64_t t = 0; t < tiles; t++, x += 2 * kTile)
    for (int v = 0; v < kTile; v += kWidth) {
      const vf gate = loadf(x + v), up = loadf(x + kTile + v), below = select(up > most, most, up);
      storef(x + v, select(gate > most, most, gate));
      storef(x + kTile + v, select(below < least, least, below) + splat(offset));
    }
}

void gate(const float* gates, int64_t n, float* x) {
  for (int64_t i = 0; i < n; i += kWidth) {
    const int count = n - i < kWidth ? (int)(n - i) : kWidth;
    const vf y = load_first<vf>(x + i, count) * laneformer::sigmoid<Vectors>(load_first<vf>(gates + i, count));
    std::memcpy(x + i, &y, count * sizeof(float));
  }
}

void softcap(float cap, int64_t n, float* x) {
  for (int64_t i = 0; i < n; i += kWidth) {
    const int count = n - i < kWidth ? (int)(n - i) : kWidth;
    const vf y = softcapped<Vectors>(load_first<vf>(x + i, count), cap);
    std::memcpy(x + i, &y, count * sizeof(float));
  }
}

void widen(Dtype dtype, const void* from, int64_t n, float* to) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) storef(to + i, element(dtype, from, i));
  if (i < n) {
    const vf rest = first_elements(dtype, from, i, n - i);
    std::memcpy(to + i, &rest, (n - i) * sizeof(float));
  }
}

void narrow(Dtype dtype, const float* from, int64_t n, void* to) {
  if (dtype == Dtype::f32) {
    std::memcpy(to, from, n * sizeof(float));
    return;
  }
  for (int64_t i = 0; i < n; i++)
    ((uint16_t*)to)[i] = dtype == Dtype::bf16 ? narrow_bf16(from[i]) : narrow_f16(from[i]);
}

uint64_t read(const void* data, int64_t bytes) {
  constexpr int kStreams = 4;  // several at once keep more requests to memory in flight
  const int64_t lines = bytes / 64 / kStreams;
  vu total[kStreams] = {};
  for (int64_t i = 0; i < lines; i++)
    for (int s = 0; s < kStreams; s++)
      for (int v = 0; v < 16 / kWidth; v++)
        total[s] ^= load<vu>((const char*)data + ((int64_t)s * lines + i) * 64 + v * sizeof(vu));
  uint64_t sum = 0;
  for (int s = 0; s < kStreams; s++)
    for (int c = 0; c < kWidth; c++) sum += total[s][c];
  return sum;
}

// As many chains as hide the latency of two multiply-adds per cycle. The chains differ, and each step multiplies the
// chain's last result, so that no step can be optimised away.
float multiply_adds(int64_t count) {
  constexpr int kChains = kRegisters == 32 ? 16 : 12;
  vf sums[kChains];
  each<kChains>([&](auto c) LF_INLINED { sums[c()] = splat((float)c()); });
  for (int64_t i = 0; i < count; i += kChains * kWidth)
    each<kChains>([&](auto c) LF_INLINED { sums[c()] = sums[c()] * splat(0.5f) + splat(1.0f); });
  each<kChains>([&](auto c) LF_INLINED { sums[0] += c() ? sums[c()] : vf{}; });
  return sum(sums[0]);
}

// NaN counts as largest, so that a damaged model is noticed.
float largest_of(const float* z, int64_t n) {
  vf best = splat(-INFINITY);
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const vf v = loadf(z + i);
    best = select((v > best) | (v != v), v, select(best != best, best, max(best, v)));
  }
  float m = -INFINITY;
  for (int c = 0; c < kWidth; c++) m = best[c] > m || best[c] != best[c] ? best[c] : m;
  for (; i < n; i++) m = z[i] > m || z[i] != z[i] ? z[i] : m;
  return m;
}

void temper(const float* logits, const uint8_t* seen, float penalty, float temperature, int64_t n, float* z) {
  for (int64_t i = 0; i < n; i++) {
    float value = logits[i];
    if (seen[i]) value = value > 0 ? value / penalty : value * penalty;
    z[i] = temperature > 0 ? value / temperature : value;
  }
}

uint64_t sum_exp(const float* z, float largest, int64_t n) {
  constexpr float kUnit = 1 << 20;
  uint64_t high = 0, low = 0;
  for (int64_t i = 0; i < n;) {
    vi highs = {}, lows = {};
    for (int steps = 0; i < n && steps < 1024; steps++, i += kWidth) {
      vf v = splat(-INFINITY);
      if (i + kWidth <= n) {
        v = loadf(z + i);
      } else {
        std::memcpy(&v, z + i, (n - i) * sizeof(float));
      }
      const vf scaled = exp(v - splat(largest)) * splat(kUnit);
      const vi whole = __builtin_convertvector(scaled, vi);
      highs += whole;
      lows += __builtin_convertvector((scaled - __builtin_convertvector(whole, vf)) * splat(kUnit), vi);
    }
    for (int c = 0; c < kWidth; c++) high += (uint32_t)highs[c], low += (uint32_t)lows[c];
  }
  return (high << 20) + low;
}

void exp_from(const float* z, float largest, int64_t n, float* out) {
  for (int64_t i = 0; i < n; i += kWidth) {
    vf v = {};
    const int64_t count = n - i < kWidth ? n - i : kWidth;
    std::memcpy(&v, z + i, count * sizeof(float));
    v = exp(v - splat(largest));
    std::memcpy(out + i, &v, count * sizeof(float));
  }
}

LF_INLINE vu rotate_left(vu x, int by) { return x << by | x >> (32 - by); }

// The Gumbel noise that infer/noise.py defines: Threefry-2x32 with 20 rounds of (position, token).
LF_INLINE vf gumbel(const uint32_t key[2], uint32_t position, vu token) {
  const uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDAu};
  constexpr int rotations[2][4] = {{13, 15, 26, 6}, {17, 29, 16, 24}};
  vu x0 = splat_u(position + keys[0]), x1 = token + keys[1];
  for (int group = 0; group < 5; group++) {
    for (int r = 0; r < 4; r++) {
      x0 += x1;
      x1 = rotate_left(x1, rotations[group % 2][r]) ^ x0;
    }
    x0 += keys[(group + 1) % 3];
    x1 += keys[(group + 2) % 3] + (uint32_t)(group + 1);
  }
  const vf uniform = (__builtin_convertvector((vi)(x0 >> 9), vf) + splat(0.5f)) * splat(1.1920928955078125e-07f);
  return -log(-log(uniform));
}

Best draw(const float* z, float least, bool noise, const uint32_t key[2], uint32_t position, int64_t first,
          int64_t last) {
  vf best = splat(-INFINITY);
  vi tokens = vi{} - 1;
  vi index;
  for (int c = 0; c < kWidth; c++) index[c] = c;
  for (int64_t i = first; i < last; i += kWidth) {
    vf v = splat(-INFINITY);
    if (i + kWidth <= last) {
      v = loadf(z + i);
    } else {
      std::memcpy(&v, z + i, (last - i) * sizeof(float));
    }
    const vi ids = index + (int32_t)i;
    const vi kept = v >= splat(least);
    if (!any(kept & (ids < (int32_t)last))) continue;
    if (noise) v += gumbel(key, position, (vu)ids);
    v = select(kept, v, splat(-INFINITY));
    const vi better = v > best;  // a later token must be larger: among equals the lowest id stays
    best = select(better, v, best);
    tokens = (tokens & ~better) | (ids & better);
  }
  Best found = {-INFINITY, -1};
  for (int c = 0; c < kWidth; c++)
    if (tokens[c] >= 0 &&
        (best[c] > found.value || found.token < 0 || (best[c] == found.value && tokens[c] < found.token)))
      found = {best[c], tokens[c]};
  return found;
}

}  // namespace
}  // namespace LF_ISA

#define LF_TEXT2(x) #x
#define LF_TEXT(x) LF_TEXT2(x)

extern "C" const laneformer::Kernels LF_JOIN(laneformer_kernels_, LF_ISA);
const laneformer::Kernels LF_JOIN(laneformer_kernels_, LF_ISA) = {
    LF_TEXT(LF_ISA),      LF_ISA::product,   LF_ISA::product_bf12, LF_ISA::prepare,        LF_ISA::rms_norm,
    LF_ISA::add_scaled,   LF_ISA::add_parts, LF_ISA::advance,      LF_ISA::activate,       LF_ISA::limit_gated,
    LF_ISA::gate,         LF_ISA::softcap,   LF_ISA::attend,       LF_ISA::attend_latents, LF_ISA::compress,
    LF_ISA::index_scores, LF_ISA::widen,     LF_ISA::narrow,       LF_ISA::read,           LF_ISA::multiply_adds,
    LF_ISA::largest_of,   LF_ISA::temper,    LF_ISA::sum_exp,      LF_ISA::exp_from,       LF_ISA::draw};
