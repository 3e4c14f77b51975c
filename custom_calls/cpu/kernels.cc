// The arithmetic of the decode kernel, compiled once per instruction set (LF_ISA names it). No library templates in here: the linker
// keeps one copy of each, which might be the one for another machine.
#include "kernels.h"

#include <cmath>

#include "simd.h"

#define LF_JOIN2(a, b) a##b
#define LF_JOIN(a, b) LF_JOIN2(a, b)

namespace LF_ISA {
namespace {

using laneformer::Activations;
using laneformer::Attend;
using laneformer::Best;
using laneformer::Dtype;
using laneformer::kTile;

template <int N>
struct Count {
  constexpr int operator()() const { return N; }
};

constexpr int kVectors = kTile / kWidth;                         // of one line of a tile
constexpr int kBatch = kWidth == 16 ? 16 : kWidth == 8 ? 4 : 2;  // accumulators: kVectors x kBatch registers
#if defined(__AVX512BF16__)
constexpr bool kHasDot = true;
#else
constexpr bool kHasDot = false;
#endif

bool uses_dot(Dtype dtype, Activations activations) { return kHasDot && dtype == Dtype::bf16 && activations == Activations::rounded; }

int group_of(int positions) {  // positions served together: 1, 2, 4, ... kBatch
  int group = 1;
  while (group < positions && group < kBatch) group *= 2;
  return group;
}

// One line of a tile into the accumulators. The vector of each position lies beside the others': x[k][position].
struct Bf16Line {
  static constexpr int columns = 2, bytes = 4 * kTile, step = 2;  // step: x values per position
  template <int N>
  LF_INLINE void run(const char* w, const float* x, vf (&acc)[kVectors][N]) {
    for (int v = 0; v < kVectors; v++) {
      const vu pair = load<vu>(w + v * sizeof(vu));
      const vf even = as_float(pair << 16), odd = as_float(pair & 0xffff0000);
      for (int p = 0; p < N; p++) acc[v][p] += even * splat(x[p]);
      for (int p = 0; p < N; p++) acc[v][p] += odd * splat(x[N + p]);
    }
  }
};

struct Bf16DotLine {
  static constexpr int columns = 2, bytes = 4 * kTile, step = 1;
  template <int N>
  LF_INLINE void run(const char* w, const float* x, vf (&acc)[kVectors][N]) {
    for (int v = 0; v < kVectors; v++) {
      const vu pair = load<vu>(w + v * sizeof(vu));
      for (int p = 0; p < N; p++) {
        uint32_t both;
        std::memcpy(&both, x + p, 4);
        acc[v][p] = dot_bf16(acc[v][p], pair, splat_u(both));
      }
    }
  }
};

struct F16Line {
  static constexpr int columns = 1, bytes = 2 * kTile, step = 1;
  template <int N>
  LF_INLINE void run(const char* w, const float* x, vf (&acc)[kVectors][N]) {
    for (int v = 0; v < kVectors; v++) {
      const vf row = widen_f16(load<vh>(w + v * sizeof(vh)));
      for (int p = 0; p < N; p++) acc[v][p] += row * splat(x[p]);
    }
  }
};

struct F32Line {
  static constexpr int columns = 1, bytes = 4 * kTile, step = 1;
  template <int N>
  LF_INLINE void run(const char* w, const float* x, vf (&acc)[kVectors][N]) {
    for (int v = 0; v < kVectors; v++) {
      const vf row = load<vf>(w + v * sizeof(vf));
      for (int p = 0; p < N; p++) acc[v][p] += row * splat(x[p]);
    }
  }
};

constexpr int kAhead = 1024;  // bytes; measured: 0.98 of a pure read of the same bytes with it, 0.91 without (Xeon, 2 threads, bf16)

// T tiles side by side times N vectors. Several chains of sums hide the latency of a multiply-add, and several tiles are as many streams
// from memory, for prefetchers that stop at the end of a page. A row's sums are the same for every T.
template <class Line, int N, int T, int kChains>
void some_tiles(const char* w, const float* x, int64_t lines, int positions, float* y, int64_t ldy) {
  vf acc[T][kChains][kVectors][N] = {};
  const int64_t tile = lines * Line::bytes;
  int64_t i = 0;
  for (; i + kChains <= lines; i += kChains) {
    const int64_t ahead = kAhead + (i * Line::bytes + kAhead < tile ? 0 : (T - 1) * tile);  // behind a tile comes that of the next T tiles
    for (int c = 0; c < kChains; c++)
      for (int t = 0; t < T; t++) {
        const char* line = w + t * tile + (i + c) * Line::bytes;
        __builtin_prefetch(line + ahead);
        Line::run(line, x + (i + c) * Line::step * N, acc[t][c]);
      }
  }
  for (; i < lines; i++)
    for (int t = 0; t < T; t++) Line::run(w + t * tile + i * Line::bytes, x + i * Line::step * N, acc[t][0]);
  for (int t = 0; t < T; t++)
    for (int v = 0; v < kVectors; v++)
      for (int p = 0; p < N && p < positions; p++) {
        vf total = acc[t][0][v][p];
        for (int c = 1; c < kChains; c++) total += acc[t][c][v][p];
        storef(y + p * ldy + t * kTile + v * kWidth, total);
      }
}

template <class Line, int N>
void tiles_times(const char* w, const float* x, int64_t columns, int64_t tiles, int positions, float* y, int64_t ldy) {
  constexpr int kSums = kVectors * N, kChains = kSums >= 4 ? 1 : 2, kTiles = kSums == 1 ? 4 : 1;
  const int64_t lines = (columns + Line::columns - 1) / Line::columns, tile = lines * Line::bytes;
  const int64_t block = lines * Line::step * N;  // floats of x for N positions
  int64_t t = 0;
  const auto several = [&](auto count) {
    for (int p = 0; p < positions; p += N)
      some_tiles<Line, N, count(), kChains>(w + t * tile, x + p / N * block, lines, positions - p, y + p * ldy + t * kTile, ldy);
    t += count();
  };
  while (t + kTiles <= tiles) several(Count<kTiles>{});
  while (t < tiles) several(Count<1>{});
}

template <class Line>
void product_of(const char* w, const float* x, int64_t columns, int64_t tiles, int positions, float* y, int64_t ldy) {
  switch (group_of(positions)) {
    case 1: return tiles_times<Line, 1>(w, x, columns, tiles, positions, y, ldy);
    case 2: return tiles_times<Line, 2>(w, x, columns, tiles, positions, y, ldy);
    case 4:
      if constexpr (kBatch >= 4) return tiles_times<Line, 4>(w, x, columns, tiles, positions, y, ldy);
    case 8:
      if constexpr (kBatch >= 8) return tiles_times<Line, 8>(w, x, columns, tiles, positions, y, ldy);
    default:
      if constexpr (kBatch >= 16) return tiles_times<Line, 16>(w, x, columns, tiles, positions, y, ldy);
  }
}

void product(Dtype dtype, Activations activations, const void* w, const void* x, int64_t columns, int64_t tiles, int positions, float* y,
             int64_t ldy) {
  const char* bytes = (const char*)w;
  const float* xs = (const float*)x;
  if (uses_dot(dtype, activations)) return product_of<Bf16DotLine>(bytes, xs, columns, tiles, positions, y, ldy);
  switch (dtype) {
    case Dtype::bf16: return product_of<Bf16Line>(bytes, xs, columns, tiles, positions, y, ldy);
    case Dtype::f16: return product_of<F16Line>(bytes, xs, columns, tiles, positions, y, ldy);
    case Dtype::f32: return product_of<F32Line>(bytes, xs, columns, tiles, positions, y, ldy);
  }
}

float rounded(Dtype dtype, float x) {
  if (dtype == Dtype::bf16) {
    const uint32_t bits = (uint32_t)narrow_bf16(x) << 16;
    std::memcpy(&x, &bits, 4);
  } else if (dtype == Dtype::f16) {
    vh h = {};
    h[0] = narrow_f16(x);
    x = widen_f16(h)[0];
  }
  return x;
}

void prepare(Dtype dtype, Activations activations, const float* x, int64_t ldx, int64_t columns, int positions, void* out) {
  const int group = group_of(positions);
  const int64_t stored = laneformer::stored_columns(dtype, columns);
  const bool round = activations == Activations::rounded && dtype != Dtype::f32;
  float* to = (float*)out;
  if (positions == 1 && !round) {
    std::memcpy(to, x, columns * sizeof(float));
    if (stored > columns) to[columns] = 0;
    return;
  }
  for (int p0 = 0; p0 < positions; p0 += group) {
    for (int64_t k = 0; k < stored; k++)
      for (int p = p0; p < p0 + group; p++) {
        const float value = k < columns && p < positions ? x[p * ldx + k] : 0.0f;
        if (!uses_dot(dtype, activations)) {
          to[k * group + p - p0] = round ? rounded(dtype, value) : value;
        } else {
          const uint16_t half = narrow_bf16(value);  // the even column in the lower half
          std::memcpy((char*)(to + k / 2 * group + p - p0) + 2 * (k % 2), &half, 2);
        }
      }
    to += group * (uses_dot(dtype, activations) ? stored / 2 : stored);
  }
}

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

void swiglu(const float* gate_up, int64_t pairs, float* out) {
  for (int64_t t = 0; t < pairs; t++)
    for (int v = 0; v < kTile; v += kWidth) {
      const vf gate = loadf(gate_up + 2 * kTile * t + v), up = loadf(gate_up + 2 * kTile * t + kTile + v);
      const vf bounded = select(gate < splat(-87.0f), splat(-87.0f), gate);  // exp(87) is finite
      storef(out + kTile * t + v, gate / (splat(1.0f) + exp(-bounded)) * up);
    }
}

LF_INLINE vf element(Dtype dtype, const void* p, int64_t i) {
  switch (dtype) {
    case Dtype::bf16: return widen_bf16(load<vh>((const uint16_t*)p + i));
    case Dtype::f16: return widen_f16(load<vh>((const uint16_t*)p + i));
    default: return loadf((const float*)p + i);
  }
}

LF_INLINE vf first_elements(Dtype dtype, const void* p, int64_t i, int n) {
  switch (dtype) {
    case Dtype::bf16: return widen_bf16(load_first<vh>((const uint16_t*)p + i, n));
    case Dtype::f16: return widen_f16(load_first<vh>((const uint16_t*)p + i, n));
    default: return load_first<vf>((const float*)p + i, n);
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
  for (int64_t i = 0; i < n; i++) ((uint16_t*)to)[i] = dtype == Dtype::bf16 ? narrow_bf16(from[i]) : narrow_f16(from[i]);
}

constexpr int kKeys = 32;  // positions whose scores are made together: their keys and values stay in the first-level cache

// Rows that will be wanted soon, fetched bit by bit while others are used.
struct Ahead {
  const char* next;
  int64_t stride;   // bytes from row to row
  int bytes, rows;  // of a row; left

  void fetch(int count) {
    for (; count > 0 && rows > 0; count--, rows--, next += stride)
      for (int i = 0; i < bytes; i += 64) __builtin_prefetch(next + i);
  }
};

// scores[j] = q . key[j], -inf up to a whole vector behind them; returns the largest.
template <Dtype dtype>
float score(const float* q, const void* keys, int64_t offset, int64_t stride, int count, int e, float* scores, Ahead ahead) {
  const int whole = e / kWidth * kWidth, rest = e - whole, share = (ahead.rows * kWidth + count - 1) / count;
  int j = 0;
  for (; j + kWidth <= count; j += kWidth) {  // so many keys at once, whose sums make a vector
    vf acc[kWidth] = {};
    ahead.fetch(share);
    for (int i = 0; i < whole; i += kWidth) {
      const vf qv = loadf(q + i);
      for (int c = 0; c < kWidth; c++) acc[c] += qv * element(dtype, keys, offset + (j + c) * stride + i);
    }
    if (rest) {
      const vf qv = load_first<vf>(q + whole, rest);
      for (int c = 0; c < kWidth; c++) acc[c] += qv * first_elements(dtype, keys, offset + (j + c) * stride + whole, rest);
    }
    storef(scores + j, sums(acc));
  }
  for (; j < count; j++) {
    vf acc = {};
    for (int i = 0; i < whole; i += kWidth) acc += loadf(q + i) * element(dtype, keys, offset + j * stride + i);
    if (rest) acc += load_first<vf>(q + whole, rest) * first_elements(dtype, keys, offset + j * stride + whole, rest);
    scores[j] = sum(acc);
    ahead.fetch(share);
  }
  for (j = count; j % kWidth; j++) scores[j] = -INFINITY;
  vf best = loadf(scores);
  for (int i = kWidth; i < j; i += kWidth) best = max(best, loadf(scores + i));
  return largest(best);
}

// out[i] = out[i] shrink + sum_j weights[j] value[j][i] over N vectors of channels, the last one with `rest` of them if that is not 0.
template <Dtype dtype, int N>
void mix_channels(const float* weights, const void* values, int64_t offset, int64_t stride, int count, int rest, float shrink, float* out,
                  Ahead ahead) {
  const int share = ahead.rows;
  vf acc[N];
  constexpr int last = (N - 1) * kWidth;
  for (int n = 0; n < N; n++) acc[n] = (n == N - 1 && rest ? load_first<vf>(out + last, rest) : loadf(out + n * kWidth)) * splat(shrink);
  if (!rest) {
    for (int j = 0, due = 0; j < count; j++) {
      for (due += ahead.rows ? share : 0; due >= count; due -= count) ahead.fetch(1);
      for (int n = 0; n < N; n++) acc[n] += splat(weights[j]) * element(dtype, values, offset + j * stride + n * kWidth);
    }
  } else {
    for (int j = 0; j < count; j++) {
      for (int n = 0; n < N - 1; n++) acc[n] += splat(weights[j]) * element(dtype, values, offset + j * stride + n * kWidth);
      acc[N - 1] += splat(weights[j]) * first_elements(dtype, values, offset + j * stride + last, rest);
    }
  }
  for (int n = 0; n < N - 1; n++) storef(out + n * kWidth, acc[n]);
  std::memcpy(out + last, &acc[N - 1], rest ? rest * sizeof(float) : sizeof(vf));
}

template <Dtype dtype>
void mix(const float* weights, const void* values, int64_t offset, int64_t stride, int count, int e, float shrink, float* out,
         Ahead ahead) {
  for (int i = 0; i < e; i += 8 * kWidth) {
    const int channels = e - i < 8 * kWidth ? e - i : 8 * kWidth, rest = channels % kWidth;
    switch ((channels + kWidth - 1) / kWidth) {
#define LF_MIX(N) \
  case N: mix_channels<dtype, N>(weights, values, offset + i, stride, count, rest, shrink, out + i, ahead); break;
      LF_MIX(1) LF_MIX(2) LF_MIX(3) LF_MIX(4) LF_MIX(5) LF_MIX(6) LF_MIX(7) LF_MIX(8)
#undef LF_MIX
    }
  }
}

template <Dtype dtype>
void attend_in(const Attend& a) {
  const int heads = a.kv_heads * a.group;
  const int64_t stride = (int64_t)a.kv_heads * a.e;
  constexpr int kQueries = 8, width = dtype == Dtype::f32 ? 4 : 2;
  float scores[kQueries][kKeys];
  for (int p = 0; p < a.positions; p++)
    for (int h = 0; h < heads; h++) {
      float* out = a.out + ((int64_t)p * heads + h) * (a.e + 2);
      std::memset(out, 0, a.e * sizeof(float));
      out[a.e] = -INFINITY;
      out[a.e + 1] = 0;
    }
  // Blocks of keys outermost, then heads and queries: keys and values come from memory once.
  for (int64_t t0 = a.first; t0 < a.last; t0 += kKeys) {
    const int64_t end = t0 + kKeys < a.last ? t0 + kKeys : a.last, next = end + kKeys < a.last ? end + kKeys : a.last;
    for (int n = 0; n < a.kv_heads; n++)
      for (int p = 0; p < a.positions; p++) {
        const int64_t position = a.start + p, oldest = position - a.window + 1;
        const int64_t low = t0 > oldest ? t0 : oldest;
        const int64_t high = end < position + 1 ? end : position + 1;
        const int count = (int)(high - low);
        if (count <= 0) continue;
        const int64_t offset = low * stride + (int64_t)n * a.e;
        for (int g0 = 0; g0 < a.group; g0 += kQueries) {
          const int queries = a.group - g0 < kQueries ? a.group - g0 : kQueries;
          const bool first = p == 0 && g0 == 0;  // to read these keys and values
          // A query's share of the values that will be mixed, and of the next block's keys.
          const auto ahead = [&](const void* data, int64_t from, int64_t to, int g) {
            const int64_t begin = from + (to - from) * g / queries, stop = from + (to - from) * (g + 1) / queries;
            return Ahead{(const char*)data + (begin * stride + (int64_t)n * a.e) * width, stride * width, a.e * width,
                         first && stop > begin ? (int)(stop - begin) : 0};
          };
          float largest[kQueries];
          for (int g = 0; g < queries; g++)
            largest[g] = score<dtype>(a.q + ((int64_t)p * heads + n * a.group + g0 + g) * a.e, a.keys, offset, stride, count, a.e,
                                      scores[g], ahead(a.values, low, high, g));
          for (int g = 0; g < queries; g++) {
            float* out = a.out + ((int64_t)p * heads + n * a.group + g0 + g) * (a.e + 2);
            const float before = out[a.e], m = largest[g] > before ? largest[g] : before;
            const float shrink = before == m ? 1.0f : std::exp(before - m);
            vf total = {};
            for (int j = 0; j < count; j += kWidth) {
              const vf weight = exp(loadf(scores[g] + j) - splat(m));
              storef(scores[g] + j, weight);
              total += weight;
            }
            mix<dtype>(scores[g], a.values, offset, stride, count, a.e, shrink, out, ahead(a.keys, end, next, g));
            out[a.e] = m;
            out[a.e + 1] = out[a.e + 1] * shrink + sum(total);
          }
        }
      }
  }
}

void attend(const Attend& a) {
  switch (a.dtype) {
    case Dtype::bf16: return attend_in<Dtype::bf16>(a);
    case Dtype::f16: return attend_in<Dtype::f16>(a);
    case Dtype::f32: return attend_in<Dtype::f32>(a);
  }
}

uint64_t read(const void* data, int64_t bytes) {
  constexpr int kStreams = 4;  // several at once: what the memory controller likes best
  const int64_t lines = bytes / 64 / kStreams;
  vu total[kStreams] = {};
  for (int64_t i = 0; i < lines; i++)
    for (int s = 0; s < kStreams; s++)
      for (int v = 0; v < 16 / kWidth; v++) total[s] ^= load<vu>((const char*)data + ((int64_t)s * lines + i) * 64 + v * sizeof(vu));
  uint64_t sum = 0;
  for (int s = 0; s < kStreams; s++)
    for (int c = 0; c < kWidth; c++) sum += total[s][c];
  return sum;
}

// NaN wins, so that a damaged model is noticed.
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

// Gumbel noise of infer/noise.py: Threefry-2x32, 20 rounds, of (position, token).
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

Best draw(const float* z, float least, bool noise, const uint32_t key[2], uint32_t position, int64_t first, int64_t last) {
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
    const vi better = v > best;  // the lowest id among equals: later ones must be larger
    best = select(better, v, best);
    tokens = (tokens & ~better) | (ids & better);
  }
  Best found = {-INFINITY, -1};
  for (int c = 0; c < kWidth; c++)
    if (tokens[c] >= 0 && (best[c] > found.value || found.token < 0 || (best[c] == found.value && tokens[c] < found.token)))
      found = {best[c], tokens[c]};
  return found;
}

}  // namespace
}  // namespace LF_ISA

#define LF_TEXT2(x) #x
#define LF_TEXT(x) LF_TEXT2(x)

extern "C" const laneformer::Kernels LF_JOIN(laneformer_kernels_, LF_ISA);
const laneformer::Kernels LF_JOIN(laneformer_kernels_, LF_ISA) = {
    LF_TEXT(LF_ISA), LF_ISA::kBatch,  LF_ISA::product,  LF_ISA::prepare, LF_ISA::rms_norm, LF_ISA::add_scaled,
    LF_ISA::swiglu,  LF_ISA::attend,  LF_ISA::widen,    LF_ISA::narrow,  LF_ISA::read,     LF_ISA::largest_of,
    LF_ISA::temper,  LF_ISA::sum_exp, LF_ISA::exp_from, LF_ISA::draw};
