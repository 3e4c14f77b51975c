// The kernels of micro.cu. Every wait has a watchdog.
#pragma once

#include <cooperative_groups.h>

#include "exchange.h"
#include "product.h"

namespace laneformer {
namespace gpu {

constexpr int kSharedBytes = kRingBytes + 8 * kWarps * kSlots;
constexpr i64 kShare = (i64)kWarps * kLayerLines * kLineBytes;  // bytes of weights for each CTA
constexpr int kTake = 4;                                        // lines that a warp takes at once
constexpr int kWidest = 3072, kRows = 24;                       // most words of an edge; rows of a CTA in the exchange
using Mail = Exchange<2, 8, kWidest>;

struct Stamp {
  u64 begin, end;
};

// The arguments of all kernels in this file beside Params. Times are written to `stamps`, not to p.spans.
struct Job {
  char* weights;
  Stamp* stamps;  // [rounds][CTAs]
  u64* done;      // some words in the device's memory
  u32 first_tag;
  int rounds, lines, steps, group, words;
  bool edges, flags, at_once, ping, pairs;
  i64 bytes, buffer;
};

LF_DEVICE void begin(const Job& job, int n) {
  sync_cta();
  if (thread() == 0) job.stamps[(i64)n * gridDim.x + cta()].begin = clock_ns();
}

LF_DEVICE void end(const Job& job, int n) {
  sync_cta();
  if (thread() == 0) job.stamps[(i64)n * gridDim.x + cta()].end = clock_ns();
}

LF_DEVICE void keep(const Job& job, u32 value) {  // so that the compiler keeps the computation of `value`
  if (value == 0x9e3779b9u) job.done[1] = value;
}

LF_DEVICE u32 mix(const Vec& v) { return v.word[0] ^ v.word[1] ^ v.word[2] ^ v.word[3]; }

template <int n>
LF_DEVICE u32 take(Stream& stream, int lines) {
  u32 mixed = 0;
  for (int line = 0; line < lines; line += n) {
    Vec vecs[n];
    stream.take(vecs);
    LF_UNROLL for (int i = 0; i < n; i++) mixed ^= mix(vecs[i]);
  }
  return mixed;
}

LF_KERNEL void fill(LF_PARAMS, const Job job) {
  for (i64 at = (i64)cta() * kThreads + thread(); at < job.buffer / 4; at += (i64)gridDim.x * kThreads) {
    u32 v = (u32)at * 0x9e3779b9u;
    v = (v ^ v >> 16) * 0x85ebca6bu;
    ((u32*)job.weights)[at] = v ^ v >> 13;
  }
}

LF_KERNEL void empty(LF_PARAMS, const Job) {}

// Measures the step of the global timer, and the clock rate of the multiprocessor.
LF_KERNEL void clocks(LF_PARAMS, const Job job) {
  if (cta() || thread()) return;
  u64 finest = ~0ull, last = clock_ns();
  const u64 from = last;
  const long long cycles = clock64();
  while (last - from < 2000000) {
    const u64 now = clock_ns();
    if (now != last && now - last < finest) finest = now - last;
    last = now;
  }
  job.done[2] = finest;
  job.done[3] = (u64)(clock64() - cycles) * 1000 / (last - from);  // MHz
}

LF_KERNEL void ring(LF_PARAMS p, const Job job) {
  LF_SHARED(memory);
  const Watch watch(p, p.shared[0], 0);
  begin(job, 0);
  Stream stream(job.weights + cta() * kShare, memory, (u64*)(memory + kRingBytes), Passes{0}, watch);
  keep(job, take<kTake>(stream, job.lines));
  end(job, 0);
  stream.drain();
}

// A shape for reading the stream in steps of a product (product.h): each thread has four rows of three vectors, or with
// tensor cores one row of twelve. Bf12 has one exception in eight units, as trained weights do.
template <class Format, int cluster>
struct Multiplied {
  using Weights = Format;
  static constexpr int kTogether = kByTensor<Format> ? 1 : 4, kVectors = 12 / kTogether, kSegments = 1,
                       kColumnParts = kWarps, kColumns = 32 * kVectors * kWarps;
  using Scales = Beside<Weights, kTogether * kVectors, cluster>;
  static constexpr int kLines = Weights::template kLines<kTogether * kVectors>;

  static constexpr int lines_of(int steps) { return kLines * steps + Scales::lines_of(steps); }
};

template <class Shape>
__global__ void __launch_bounds__(kThreads, 1) multiply(LF_PARAMS p, const Job job) {
  LF_SHARED(product_memory);  // another name than `memory` of the extern "C" kernels
  __shared__ float brought[kBrought<Shape> + 1];
  constexpr int rows = Shape::kTogether, vectors = rows * Shape::kVectors;
  const Watch watch(p, p.shared[0], 0);
  begin(job, 0);
  Stream stream(job.weights + cta() * kShare, product_memory, (u64*)(product_memory + kRingBytes), Passes{0}, watch);
  Lists lists(p);
  lists.begin(0);
  typename Shape::Weights::Reader weights(p, lists, 0);
  weights.begin();
  typename Operand<Shape>::Part x[1];
  const auto load = [](int, auto& own) {
    constexpr int n = sizeof own[0] / sizeof own[0][0], per = sizeof own[0][0] / sizeof(float);
    LF_UNROLL for (int v = 0; v < n; v++) {
      LF_UNROLL for (int i = 0; i < per; i++) own[0][v][i] = (float)(thread() + v * i);
    }
  };
  Operand<Shape>::bring(0, brought + warp() * (kBrought<Shape> / kWarps), load, x);
  float sums[rows] = {};
  typename Shape::Scales beside;
  for (int step = 0; step < job.steps; step++) {
    Vec taken[Shape::kLines];
    beside.take(stream);
    stream.take(taken);
    [[maybe_unused]] const auto scales = beside.scales(taken);
    LF_UNROLL for (int r = 0; r < rows; r++) {
      float own[1];
      Operand<Shape>::template sum<vectors>(weights, taken, scales, r, x, own);
      sums[r] += own[0];
    }
  }
  end(job, 0);
  stream.drain();
  float total = 0;
  LF_UNROLL for (int r = 0; r < rows; r++) total += sums[r];
  keep(job, float_to_bits(total));
}

// Writes what bf12 stores beside the stream: a table, and the exceptions of each warp.
LF_KERNEL void list(LF_PARAMS p, const Job) {
  u32* coding = (u32*)p.coding;
  u32* listed = (u32*)p.listed;
  if (cta() == 0 && thread() < 4) coding[thread()] = thread() == 0 ? 0x3a3b3c3d : thread() == 1 ? 0x36373839 : 0;
  for (i64 at = (i64)cta() * kThreads + thread(); at < (i64)gridDim.x * kWarps * p.listed_words;
       at += (i64)gridDim.x * kThreads) {
    const u32 n = (u32)(at % p.listed_words);
    listed[at] = 8 * n << Bf12::kUnitShift | (n * 5 % 32) << 13 | (n * 7 % 32) << 8 | 0x35;
  }
}

LF_KERNEL void plain(LF_PARAMS, const Job job) {
  constexpr int each = 8;
  begin(job, 0);
  u32 mixed = 0;
  const i64 step = (i64)gridDim.x * kThreads * 16;
  for (i64 at = ((i64)cta() * kThreads + thread()) * 16; at + (each - 1) * step < job.bytes; at += each * step) {
    Vec vecs[each];
    LF_UNROLL for (int i = 0; i < each; i++) {
      const uint4 v = __ldcs((const uint4*)(job.weights + at + i * step));
      vecs[i] = {{v.x, v.y, v.z, v.w}};
    }
    LF_UNROLL for (int i = 0; i < each; i++) mixed ^= mix(vecs[i]);
  }
  keep(job, mixed);
  end(job, 0);
}

// Bursts: all CTAs together read a number of bytes that are in no cache, with bulk copies of 4 KiB in every warp. The
// memory is idle before each burst.
LF_KERNEL void burst(LF_PARAMS p, const Job job) {
  constexpr int bytes = 4096, slots = kRingBytes / kWarps / bytes;
  LF_SHARED(memory);
  __shared__ u64 barriers[kWarps][slots];
  const Watch watch(p, p.shared[0], 0);
  char* own = memory + warp() * slots * bytes;
  const u64 policy = stream_policy();
  if (warp_lane() == 0) {
    for (int s = 0; s < slots; s++) barrier_init(&barriers[warp()][s]);
    barrier_init_done();
  }
  sync_cta();
  const int copies = (int)(job.bytes / bytes), warps = gridDim.x * kWarps, first = cta() * kWarps + warp();
  u32 mixed = 0, taken = 0;
  for (int round = 0; round < job.rounds; round++) {
    const char* from = job.weights + round % (job.buffer / job.bytes) * job.bytes;
    cooperative_groups::this_grid().sync();
    const u64 idle = clock_ns();
    while (clock_ns() - idle < 20000) pause();
    cooperative_groups::this_grid().sync();
    begin(job, round);
    const int count = first < copies ? (copies - first + warps - 1) / warps : 0;
    const auto issue = [&](int n) {
      if (warp_lane() == 0)
        bulk_copy(own + (taken + n) % slots * bytes, from + (i64)(first + n * warps) * bytes, bytes,
                  &barriers[warp()][(taken + n) % slots], policy);
    };
    for (int n = 0; n < smaller(count, slots); n++) issue(n);
    for (int n = 0; n < count; n++) {
      const u32 at = taken + n;
      await_copy(&barriers[warp()][at % slots], at / slots & 1, at % slots, watch);
      for (int i = warp_lane() * 16; i < bytes; i += kLineBytes) mixed ^= mix(load_vec(own + at % slots * bytes + i));
      reads_done();
      sync_warp();
      if (n + slots < count) issue(n + slots);
    }
    taken += count;
    end(job, round);
  }
  keep(job, mixed);
}

LF_KERNEL void grid_sync(LF_PARAMS, const Job job) {
  begin(job, 0);
  for (int round = 0; round < job.rounds; round++) cooperative_groups::this_grid().sync();
  end(job, 0);
}

// In each round, every CTA publishes its part of the words, and all CTAs of the group read all words. Between rounds,
// each warp takes some lines.
LF_KERNEL void edge(LF_PARAMS p, const Job job) {
  LF_SHARED(memory);
  constexpr int each = (kWidest / 8 + kThreads - 1) / kThreads;
  Watch watch(p, p.shared[0], cta() / job.group);
  Stream stream(job.weights + cta() * kShare, memory, (u64*)(memory + kRingBytes), Passes{0}, watch);
  const int c = cta() % job.group, rows = job.words / job.group;
  u64* boards = p.boards + (i64)(cta() / job.group) * 2 * kWidest;
  u64* flags = p.boards + (i64)gridDim.x * 2 * kWidest + (i64)(cta() / job.group) * job.group * 16;
  float total = 0;
  u32 mixed = 0;
  cooperative_groups::this_grid().sync();
  begin(job, 0);
  for (int round = 0; round < job.rounds; round++) {
    const u32 tag = job.first_tag + round;
    mixed ^= take<2>(stream, job.lines);
    if (!job.edges) continue;
    u64* board = boards + round % 2 * kWidest;
    if (job.flags) {
      float* data = (float*)board;
      for (int r = thread(); r < rows; r += kThreads) data[c * rows + r] = total + r;
      sync_cta();
      if (thread() == 0) {
        fence_device();
        store_word(flags + c * 16, tag);
      }
      if (thread() < job.group) {
        for (u32 spins = 0; (int)((u32)load_word(flags + thread() * 16) - tag) < 0;)
          if (!watch.keep_waiting(spins, kAtVector, thread(), flags + thread() * 16, tag)) break;
        fence_device();
      }
      sync_cta();
      for (int at = thread() * 4; at < job.words; at += kThreads * 4)
        total += bits_to_float(load_vec_between_ctas(data + at).word[0]) * 1e-9f;
    } else {
      for (int r = thread(); r < rows; r += kThreads) store_word(board + c * rows + r, word_of(total + r, tag));
      float x[each][8];
      const auto distance = [](int v, int i) { return (v * 8 + i) * kThreads; };
      if (job.at_once) {
        read_words<false, false>(board, thread() * 2, job.words, tag, distance, x, watch, kAtVector);
      } else {
        read_words<false>(board, thread() * 2, job.words, tag, distance, x, watch, kAtVector);
      }
      LF_UNROLL for (int v = 0; v < each; v++) total += x[v][0] * 1e-9f;
    }
    sync_cta();
  }
  end(job, 0);
  stream.drain();
  keep(job, mixed ^ float_to_bits(total));
}

// Whether 16 bytes that are stored and loaded as one access can be torn between two writes, which `triples` relies on.
// Thread t of writer w stores {n, n} into its line again and again, that of reader w loads it. Counts the lines read
// whose halves differ, and those that differ from the line read before, which shows that both ran at once.
LF_KERNEL void torn(LF_PARAMS p, const Job job) {
  const int writers = gridDim.x / 2, writer = cta() % writers;
  u64* line = p.boards + 2 * ((i64)writer * kThreads + thread());
  u64 differing = 0, changes = 0, before = 0;
  cooperative_groups::this_grid().sync();
  begin(job, 0);
  for (int n = 1; n <= job.rounds; n++) {
    if (cta() < writers) {
      store_line(line, {(u64)n, (u64)n});
      continue;
    }
    const Words seen = job.pairs ? load_words(line) : load_line(line);
    differing += seen.a != seen.b;
    changes += seen.a != before;
    before = seen.a;
  }
  end(job, 0);
  atomicAdd((unsigned long long*)job.done + 4, (unsigned long long)differing);
  atomicAdd((unsigned long long*)job.done + 5, (unsigned long long)changes);
}

// The first 2 * group CTAs are two lanes that exchange rows, CTA c with CTA c. The other CTAs, if any, put load on the
// memory meanwhile.
LF_KERNEL void lanes(LF_PARAMS p, const Job job) {
  LF_SHARED(memory);
  const int lane = cta() / job.group, c = cta() % job.group, row = c * kRows + thread();
  Watch watch(p, p.shared[0], lane);
  if (cta() >= 2 * job.group) {
    Stream stream(job.weights + cta() * kShare, memory, (u64*)(memory + kRingBytes), Passes{0}, watch);
    u32 mixed = 0;
    begin(job, 0);
    while (!__any_sync(0xffffffffu, load_word(job.done) == job.first_tag || load_word(p.shared[0]) != 0))
      mixed ^= take<kTake>(stream, 64);
    end(job, 0);
    stream.drain();
    keep(job, mixed);
    return;
  }
  const u64 from = clock_ns();
  while (clock_ns() - from < 50000) pause();  // until the streams of the other CTAs run
  begin(job, 0);
  float total = 0;
  if (thread() < kRows) {
    for (int round = 0; round < job.rounds; round++) {
      const u32 sequence = job.first_tag + round;
      if (job.ping && lane == 1)
        wait_for(p.shared[0] + 16 + Mail::at(sequence, 0, row), sequence, watch, kAtLanding, 0);
      Mail::push(p, 16, sequence, lane, row, total);
      float values[2];
      Mail::pull(p.shared[0] + 16, sequence, row, values, watch, kAtLanding);
      total += values[0] - values[1] + 1;
    }
  }
  end(job, 0);
  if (cta() == 0 && thread() == 0) store_word(job.done, job.first_tag);
  keep(job, float_to_bits(total));
}

}  // namespace gpu
}  // namespace laneformer
