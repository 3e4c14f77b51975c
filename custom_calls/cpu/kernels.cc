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
#if defined(__AVX512BF16__) || defined(LF_DOT)  // LF_DOT: with plain arithmetic, to test its order of operands on any machine
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
  constexpr int kSums = kVectors * N, kChains = kSums >= 4 ? 1 : 2, kTiles = kSums == 1 ? 8 : 1;
  const int64_t lines = (columns + Line::columns - 1) / Line::columns, tile = lines * Line::bytes;
  const int64_t block = lines * Line::step * N;  // floats of x for N positions
  int64_t t = 0;
  const auto several = [&](auto count) {
    for (int p = 0; p < positions; p += N)
      some_tiles<Line, N, count(), kChains>(w + t * tile, x + p / N * block, lines, positions - p, y + p * ldy + t * kTile, ldy);
    t += count();
  };
  while (t + kTiles <= tiles) several(Count<kTiles>{});
  if constexpr (kTiles > 1) {
    if (t + kTiles / 2 <= tiles) several(Count<kTiles / 2>{});
  }
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
constexpr int kQueries = kWidth < 8 ? kWidth : 8;  // of one key/value head, that share what is loaded of it
constexpr int kMixed = kWidth == 16 ? 16 : 8;      // accumulators of a mixture that stay in registers

// Lines of keys and of values that will be wanted soon, fetched in so many steps while others are used: memory is never idle, nor is one
// burst more than it takes.
struct Ahead {
  const char *keys, *values;
  int64_t lines;  // of each
  int64_t due = 0;

  __attribute__((always_inline)) void step(int steps) {
    for (due += lines; due >= steps; due -= steps, keys += 64, values += 64) {
      __builtin_prefetch(keys);
      __builtin_prefetch(values);
    }
  }
};

// Some rows of a lane's keys or values.
struct Rows {
  const void* data;
  int64_t offset, stride;  // elements to the first row, and from row to row
};

template <int S, int... I>
LF_INLINE vf exchange(vf v, Numbers<I...>) {
  return __builtin_shufflevector(v, v, (I ^ S)...);
}

// Element i becomes the largest, or the sum, of all whose numbers leave the same rest divided by G.
template <int G, int S = kWidth / 2>
LF_INLINE vf largest_by_rest(vf v) {
  if constexpr (S < G) {
    return v;
  } else {
    return largest_by_rest<G, S / 2>(max(v, exchange<S>(v, CountUp<kWidth>{})));
  }
}
template <int G, int S = kWidth / 2>
LF_INLINE vf sum_by_rest(vf v) {
  if constexpr (S < G) {
    return v;
  } else {
    return sum_by_rest<G, S / 2>(v + exchange<S>(v, CountUp<kWidth>{}));
  }
}

// scores[j G + g] = q[g] . key[j] for G queries of e channels, -inf up to a whole vector behind them.
template <Dtype dtype, int G>
void score(const float* q, Rows keys, int count, int e, float* scores, Ahead ahead) {
  constexpr int kAtOnce = kWidth / G;  // keys, whose sums make a vector
  const int whole = e / kWidth * kWidth, rest = e - whole, steps = (count + kAtOnce - 1) / kAtOnce * ((e + kWidth - 1) / kWidth);
  for (int j = 0; j < count; j += kAtOnce) {
    int64_t row[kAtOnce];
    for (int c = 0; c < kAtOnce; c++) row[c] = keys.offset + (j + c < count ? j + c : count - 1) * keys.stride;
    vf acc[kWidth];
    for (int c = 0; c < kWidth; c++) acc[c] = vf{};
    for (int i = 0; i < whole; i += kWidth) {
      ahead.step(steps);
      for (int c = 0; c < kAtOnce; c++) {
        const vf key = element(dtype, keys.data, row[c] + i);
        for (int g = 0; g < G; g++) acc[c * G + g] += loadf(q + g * e + i) * key;
      }
    }
    if (rest) {
      ahead.step(steps);
      for (int c = 0; c < kAtOnce; c++) {
        const vf key = first_elements(dtype, keys.data, row[c] + whole, rest);
        for (int g = 0; g < G; g++) acc[c * G + g] += load_first<vf>(q + g * e + whole, rest) * key;
      }
    }
    storef(scores + j * G, sums(acc));
  }
  for (int i = count * G; i % kWidth; i++) scores[i] = -INFINITY;
}

// out[g][i] = out[g][i] shrink[g] + sum_j weights[j G + g] value[j][i] over N vectors of channels, the last one with `rest` of them if
// that is not 0.
template <Dtype dtype, int G, int N>
void mix_channels(const float* weights, Rows values, int count, int rest, const float* shrink, float* out, int64_t ldo, Ahead& ahead,
                  int steps) {
  constexpr int last = (N - 1) * kWidth;
  vf acc[G][N];
  for (int g = 0; g < G; g++)
    for (int n = 0; n < N; n++) {
      const float* from = out + g * ldo + n * kWidth;
      acc[g][n] = (n == N - 1 && rest ? load_first<vf>(from, rest) : loadf(from)) * splat(shrink[g]);
    }
  const auto add = [&](int j, auto ragged) {
    for (int n = 0; n < N; n++) {
      const int64_t at = values.offset + j * values.stride + n * kWidth;
      const vf value = n == N - 1 && ragged() ? first_elements(dtype, values.data, at, rest) : element(dtype, values.data, at);
      for (int g = 0; g < G; g++) acc[g][n] += splat(weights[j * G + g]) * value;
    }
  };
  for (int j = 0; j < count; j++) {
    ahead.step(steps);
    if (rest) {
      add(j, Count<1>{});
    } else {
      add(j, Count<0>{});
    }
  }
  for (int g = 0; g < G; g++) {
    for (int n = 0; n < N - 1; n++) storef(out + g * ldo + n * kWidth, acc[g][n]);
    std::memcpy(out + g * ldo + last, &acc[g][N - 1], rest ? rest * sizeof(float) : sizeof(vf));
  }
}

template <Dtype dtype, int G, int N = kMixed / G>
void mix(const float* weights, Rows values, int count, int e, const float* shrink, float* out, int64_t ldo, Ahead& ahead, int steps) {
  // As many channels at a time as registers hold, then what is left.
  for (; e >= N * kWidth; e -= N * kWidth, values.offset += N * kWidth, out += N * kWidth)
    mix_channels<dtype, G, N>(weights, values, count, 0, shrink, out, ldo, ahead, steps);
  if (e > (N - 1) * kWidth) return mix_channels<dtype, G, N>(weights, values, count, e % kWidth, shrink, out, ldo, ahead, steps);
  if constexpr (N > 1) {
    if (e > 0) mix<dtype, G, N - 1>(weights, values, count, e, shrink, out, ldo, ahead, steps);
  }
}

// G queries of one key/value head and position over a block of keys.
template <Dtype dtype, int G>
void attend_block(const float* q, Rows keys, Rows values, int count, int e, float* out, Ahead first_half, Ahead second_half) {
  const int64_t ldo = e + 2;
  const int end = (count * G + kWidth - 1) / kWidth * kWidth;
  float scores[kKeys * G], shrink[G], before[kWidth], most[kWidth];
  score<dtype, G>(q, keys, count, e, scores, first_half);
  for (int i = 0; i < kWidth; i++) before[i] = out[i % G * ldo + e];
  vf largest = loadf(before);
  for (int i = 0; i < end; i += kWidth) largest = max(largest, loadf(scores + i));
  largest = largest_by_rest<G>(largest);
  storef(most, largest);
  for (int g = 0; g < G; g++) {
    shrink[g] = before[g] == most[g] ? 1.0f : std::exp(before[g] - most[g]);
    out[g * ldo + e] = most[g];
  }
  vf total = {};
  for (int i = 0; i < end; i += kWidth) {
    const vf weight = exp(loadf(scores + i) - largest);
    storef(scores + i, weight);
    total += weight;
  }
  storef(most, sum_by_rest<G>(total));
  constexpr int channels = kMixed / G * kWidth;
  mix<dtype, G>(scores, values, count, e, shrink, out, ldo, second_half, count * ((e + channels - 1) / channels));
  for (int g = 0; g < G; g++) out[g * ldo + e + 1] = out[g * ldo + e + 1] * shrink[g] + most[g];
}

template <Dtype dtype>
void attend_in(const Attend& a) {
  const int heads = a.kv_heads * a.group;
  const int64_t stride = (int64_t)a.kv_heads * a.e;
  const int64_t row = stride * (dtype == Dtype::f32 ? 4 : 2);
  for (int p = 0; p < a.positions; p++)
    for (int h = 0; h < heads; h++) {
      float* out = a.out + ((int64_t)p * heads + h) * (a.e + 2);
      std::memset(out, 0, a.e * sizeof(float));
      out[a.e] = -INFINITY;
      out[a.e + 1] = 0;
    }
  // Blocks of keys outermost, then heads and queries: keys and values come from memory once.
  for (int64_t t0 = a.first; t0 < a.last; t0 += kKeys) {
    const bool more = a.last - t0 > kKeys;
    const int64_t end = more ? t0 + kKeys : a.last;
    // What comes next, in the order of memory: a share with each head's scores, and with its mixture.
    const int64_t rows = more ? a.last - end : a.next;
    const Ahead next = {(const char*)(more ? a.keys : a.next_keys) + (more ? end * row : 0),
                        (const char*)(more ? a.values : a.next_values) + (more ? end * row : 0),
                        ((rows < kKeys ? rows : kKeys) * row + 63) / 64};
    for (int n = 0; n < a.kv_heads; n++)
      for (int p = 0; p < a.positions; p++) {
        const int64_t position = a.start + p, oldest = position - a.window + 1;
        const int64_t low = t0 > oldest ? t0 : oldest;
        const int64_t high = end < position + 1 ? end : position + 1;
        const int count = (int)(high - low);
        if (count <= 0) continue;
        const int64_t offset = low * stride + (int64_t)n * a.e;
        for (int g = 0; g < a.group;) {
          const auto share = [&](int part) {  // for the first to read this block
            const int64_t begin = next.lines * part / (2 * a.kv_heads), stop = next.lines * (part + 1) / (2 * a.kv_heads);
            return Ahead{next.keys + 64 * begin, next.values + 64 * begin, p == 0 && g == 0 ? stop - begin : 0};
          };
          const int64_t head = (int64_t)p * heads + n * a.group + g;
          const auto some = [&](auto queries) {
            attend_block<dtype, queries()>(a.q + head * a.e, {a.keys, offset, stride}, {a.values, offset, stride}, count, a.e,
                                           a.out + head * (a.e + 2), share(2 * n), share(2 * n + 1));
            g += queries();
          };
          const int left = a.group - g;
          if (left >= 8 && kQueries >= 8) {
            some(Count<kQueries>{});
          } else if (left >= 4) {
            some(Count<4>{});
          } else if (left >= 2) {
            some(Count<2>{});
          } else {
            some(Count<1>{});
          }
        }
      }
  }
}

// A prompt's queries are enough for vectors that run over them: a panel of two vectors shares every key and value, and nothing is summed
// across a vector.
constexpr int kPanel = 2 * kWidth;
constexpr int kTogether = kWidth == 16 ? 8 : 4;  // keys, or channels, whose sums stay in registers
constexpr int kLongestHead = 256;

struct Panel {
  float q[kLongestHead][kPanel], mixed[kLongestHead][kPanel], scores[kKeys][kPanel], rows[kKeys * kLongestHead];
  vf largest[2], total[2];
  vi first[2], last[2];  // the keys of a block that each query sees
};

// Rows as float32, where they are or widened into `space`.
template <Dtype dtype>
const float* widened(Rows rows, int count, int e, float* space, int64_t* stride) {
  if (dtype == Dtype::f32) {
    *stride = rows.stride;
    return (const float*)rows.data + rows.offset;
  }
  *stride = e;
  for (int j = 0; j < count; j++) {
    const int64_t at = rows.offset + j * rows.stride;
    int i = 0;
    for (; i + kWidth <= e; i += kWidth) storef(space + j * e + i, element(dtype, rows.data, at + i));
    if (i < e) {
      const vf rest = first_elements(dtype, rows.data, at + i, e - i);
      std::memcpy(space + j * e + i, &rest, (e - i) * sizeof(float));
    }
  }
  return space;
}

// The scores of a block of keys, -inf where a query does not see one.
template <Dtype dtype>
void score_panel(Panel& panel, Rows keys, int count, int e, bool all) {
  int64_t stride;
  const float* rows = widened<dtype>(keys, count, e, panel.rows, &stride);
  for (int j = 0; j < count; j += kTogether) {
    const float* key[kTogether];
    vf acc[kTogether][2];
    for (int c = 0; c < kTogether; c++) key[c] = rows + (j + c < count ? j + c : count - 1) * stride, acc[c][0] = acc[c][1] = vf{};
    for (int i = 0; i < e; i++) {
      const vf low = loadf(panel.q[i]), high = loadf(panel.q[i] + kWidth);
      for (int c = 0; c < kTogether; c++) {
        const vf x = splat(key[c][i]);
        acc[c][0] += x * low;
        acc[c][1] += x * high;
      }
    }
    for (int c = 0; c < kTogether && j + c < count; c++)
      for (int v = 0; v < 2; v++) {
        const vi number = vi{} + (j + c);
        const vf seen = all ? acc[c][v] : select((number >= panel.first[v]) & (number <= panel.last[v]), acc[c][v], splat(-INFINITY));
        storef(panel.scores[j + c] + v * kWidth, seen);
      }
  }
}

// mixed = mixed * shrink + sum_j scores[j] value[j]. A value that a query does not see does not reach it, were it not even a number.
template <Dtype dtype, bool all>
void mix_panel(Panel& panel, Rows values, int count, int e, const vf (&shrink)[2]) {
  int64_t stride;
  const float* rows = widened<dtype>(values, count, e, panel.rows, &stride);
  for (int i = 0; i < e; i += kTogether) {
    int channel[kTogether];
    vf acc[kTogether][2];
    for (int c = 0; c < kTogether; c++) {
      channel[c] = i + c < e ? i + c : e - 1;
      for (int v = 0; v < 2; v++) acc[c][v] = loadf(panel.mixed[channel[c]] + v * kWidth) * shrink[v];
    }
    for (int j = 0; j < count; j++) {
      const vf weight[2] = {loadf(panel.scores[j]), loadf(panel.scores[j] + kWidth)};
      for (int c = 0; c < kTogether; c++) {
        const vf x = splat(rows[j * stride + channel[c]]);
        for (int v = 0; v < 2; v++)
          acc[c][v] = all ? acc[c][v] + x * weight[v] : select(weight[v] != vf{}, acc[c][v] + x * weight[v], acc[c][v]);
      }
    }
    for (int c = 0; c < kTogether; c++)
      for (int v = 0; v < 2; v++) storef(panel.mixed[channel[c]] + v * kWidth, acc[c][v]);
  }
}

template <Dtype dtype>
void attend_panels(const Attend& a) {
  const int heads = a.kv_heads * a.group, queries = a.positions * a.group;
  const int64_t stride = (int64_t)a.kv_heads * a.e;
  Panel panel;
  for (int n = 0; n < a.kv_heads; n++)
    for (int begin = 0; begin < queries; begin += kPanel) {
      const int used = queries - begin < kPanel ? queries - begin : kPanel;
      int position[kPanel];
      int64_t row[kPanel];  // of q and out; the last one again where there is none
      for (int c = 0; c < kPanel; c++) {
        const int query = begin + (c < used ? c : used - 1);
        position[c] = query / a.group;
        row[c] = (int64_t)position[c] * heads + n * a.group + query % a.group;
        for (int i = 0; i < a.e; i++) panel.q[i][c] = a.q[row[c] * a.e + i];
      }
      std::memset(panel.mixed, 0, a.e * sizeof panel.mixed[0]);
      for (int v = 0; v < 2; v++) panel.largest[v] = splat(-INFINITY), panel.total[v] = vf{};
      const int64_t oldest = a.start + position[0], newest = a.start + position[kPanel - 1];  // of the panel's positions
      for (int64_t t0 = a.first; t0 < a.last; t0 += kKeys) {
        int64_t low = t0, high = t0 + kKeys < a.last ? t0 + kKeys : a.last;
        if (low < oldest - a.window + 1) low = oldest - a.window + 1;
        if (high > newest + 1) high = newest + 1;
        if (high <= low) continue;
        const int count = (int)(high - low);
        const bool all = high <= oldest + 1 && low >= newest - a.window + 1;
        for (int c = 0; c < kPanel && !all; c++) {
          const int64_t last = a.start + position[c] - low, first = last - a.window + 1;
          panel.first[c / kWidth][c % kWidth] = first < 0 ? 0 : first > kKeys ? kKeys : (int)first;
          panel.last[c / kWidth][c % kWidth] = last < 0 ? -1 : last > kKeys ? kKeys : (int)last;
        }
        const int64_t offset = low * stride + (int64_t)n * a.e;
        score_panel<dtype>(panel, {a.keys, offset, stride}, count, a.e, all);
        vf shrink[2];
        for (int v = 0; v < 2; v++) {
          vf most = panel.largest[v];
          for (int j = 0; j < count; j++) most = max(most, loadf(panel.scores[j] + v * kWidth));
          const vf from = max(most, splat(-3e38f));  // a number even before anything was seen
          shrink[v] = exp(panel.largest[v] - from);
          panel.total[v] *= shrink[v];
          for (int j = 0; j < count; j++) {
            const vf weight = exp(loadf(panel.scores[j] + v * kWidth) - from);
            storef(panel.scores[j] + v * kWidth, weight);
            panel.total[v] += weight;
          }
          panel.largest[v] = most;
        }
        if (all) {
          mix_panel<dtype, true>(panel, {a.values, offset, stride}, count, a.e, shrink);
        } else {
          mix_panel<dtype, false>(panel, {a.values, offset, stride}, count, a.e, shrink);
        }
      }
      for (int c = 0; c < used; c++) {
        float* out = a.out + row[c] * (a.e + 2);
        for (int i = 0; i < a.e; i++) out[i] = panel.mixed[i][c];
        out[a.e] = panel.largest[c / kWidth][c % kWidth];
        out[a.e + 1] = panel.total[c / kWidth][c % kWidth];
      }
    }
}

template <Dtype dtype>
void attend_as(const Attend& a) {
  const bool panels = a.positions > 1 && a.positions * a.group >= kWidth && a.e <= kLongestHead;
  return panels ? attend_panels<dtype>(a) : attend_in<dtype>(a);
}

void attend(const Attend& a) {
  switch (a.dtype) {
    case Dtype::bf16: return attend_as<Dtype::bf16>(a);
    case Dtype::f16: return attend_as<Dtype::f16>(a);
    case Dtype::f32: return attend_as<Dtype::f32>(a);
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
