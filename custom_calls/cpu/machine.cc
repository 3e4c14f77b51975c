// This machine: its instruction sets, cores, memory bandwidth and arithmetic. state.cc chooses a session's kernels and
// reads the number of cores; api.cc exports all functions to Python.
//
// Invariant: a set is offered only if it was compiled and the processor runs it, and AMX only if a trial product also
// has the same bits for one position and several. Sets are in order, the best first; the first is the default.
#include <sched.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cstring>
#include <fstream>

#include "decoder.h"
#include "kernels/quantized.h"
#include "packing/bf12.h"

namespace laneformer {

#if defined(__x86_64__)
namespace {

bool processor_has_amx() {
  unsigned a, b, c, d;
  constexpr unsigned kBf16 = 1 << 22, kTile = 1 << 24;
  return laneformer_emulates_amx() || (__get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBf16) && (d & kTile));
}

bool system_saves_tiles() {
  if (laneformer_emulates_amx()) return true;
  constexpr unsigned kTiles = 3 << 17;  // their shapes and their data
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & kTiles) == kTiles;
}

bool tiles_permitted() {
  if (laneformer_emulates_amx()) return true;
#if defined(__linux__)
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

}  // namespace

const AmxQueries kAmxQueries = {processor_has_amx, system_saves_tiles, tiles_permitted, laneformer_agrees_amx};

std::vector<InstructionSet> instruction_sets(const AmxQueries& amx) {
  std::vector<InstructionSet> sets;
  __builtin_cpu_init();
  const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512cd");
  const bool vnni = v4 && __builtin_cpu_supports("avx512vnni");
  const bool dot = vnni && __builtin_cpu_supports("avx512bf16") && &laneformer_kernels_avx512_bf16;
  const auto add = [&](bool able, const InstructionSet& set) {
    if (able && set.kernels && set.quantized) sets.push_back(set);  // null kernels: not compiled
  };
  add(dot, {"avx512_bf16", &laneformer_kernels_avx512_bf16, &laneformer_quantized_avx512_vnni});
  add(vnni, {"avx512_vnni", &laneformer_kernels_avx512, &laneformer_quantized_avx512_vnni});
  add(v4, {"avx512", &laneformer_kernels_avx512, &laneformer_quantized_avx512});
  add(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"),
      {"avx2", &laneformer_kernels_avx2, &laneformer_quantized_avx2});
  add(true, {"portable", &laneformer_kernels_portable, &laneformer_quantized_portable});
  if ((dot || laneformer_emulates_amx()) && amx.in_processor() && amx.in_system() && amx.permitted() && amx.agrees())
    sets.push_back({"amx", laneformer_kernels_amx(sets[0].kernels), sets[0].quantized});  // last: never by default
  return sets;
}
#endif

const InstructionSet* choose_instructions(const char* name) {
#if defined(__x86_64__)
  static const std::vector<InstructionSet> able = instruction_sets(kAmxQueries);
#else
  static const std::vector<InstructionSet> able = {
      {"portable", &laneformer_kernels_portable, &laneformer_quantized_portable}};
#endif
  for (const InstructionSet& set : able)
    if (name == nullptr || std::string(name) == set.name) return &set;
  return nullptr;
}

const Kernels* choose_kernels(const char* name) {
  const InstructionSet* set = choose_instructions(name);
  return set ? set->kernels : nullptr;
}

int default_threads() {
  int cores = (int)std::thread::hardware_concurrency();
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) cores = CPU_COUNT(&set);
  std::ifstream quota("/sys/fs/cgroup/cpu.max");  // "max 100000", or microseconds per period
  double allowed, period;
  if (quota >> allowed >> period) cores = std::min(cores, std::max(1, (int)(allowed / period)));
#endif
  return std::max(1, cores);
}

namespace {

// Starts this many threads together; thread i runs job(i). Returns the seconds from the first start to the last end.
template <class Job>
double seconds_of(int threads, const Job& job) {
  std::atomic<int> ready{0};
  std::vector<int64_t> began(threads), ended(threads);
  const auto part = [&](int i) {
    for (ready++; ready.load() < threads;) std::this_thread::yield();
    began[i] = now_ns();
    job(i);
    ended[i] = now_ns();
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; i++) others.emplace_back(part, i);
  part(0);
  for (std::thread& thread : others) thread.join();
  return 1e-9 * (double)(*std::max_element(ended.begin(), ended.end()) - *std::min_element(began.begin(), began.end()));
}

// Uses the results, so that the compiler does not remove their computation.
template <class T>
void keep(const std::vector<T>& results) {
  volatile T total = 0;
  for (const T result : results) total = total + result;
}

}  // namespace

double read_bandwidth(int64_t bytes, int threads) {
  static std::mutex lock;
  static Region buffer;
  const std::lock_guard<std::mutex> alone(lock);
  const Kernels& kernels = *choose_kernels(nullptr);
  const int64_t each = bytes / threads / 256 * 256;
  const bool fresh = buffer.bytes < bytes;
  if (fresh) {
    buffer = Region(bytes);
    // Each thread first writes the part that it will read.
    seconds_of(threads, [&](int i) { std::memset(buffer.data + i * each, 1, each); });
  }
  std::vector<uint64_t> sums(threads);
  const double seconds = seconds_of(threads, [&](int i) { sums[i] = kernels.read(buffer.data + i * each, each); });
  keep(sums);
  return (double)(each * threads) / seconds;
}

double speedup(const Way& way, const Way& over, int threads) {
  const Kernels* const kernels[] = {choose_kernels(way.instructions), choose_kernels(over.instructions)};
  const bool narrow[] = {way.bf12, over.bf12};
  if (kernels[0] == nullptr || kernels[1] == nullptr) return 0;
  constexpr int64_t kColumns = 3072, kBytes = 128 << 20;  // kBytes: of weights as bf16, more than most caches hold
  constexpr int kLeastRounds = 9, kMostRounds = 40, kAgreeing = 4;
  constexpr uint16_t kOne = 0x3f80;
  const int64_t sizes[] = {tile_bytes(Dtype::bf16, kColumns), bf12_tile_bytes(kColumns)};
  const int64_t tiles = std::max<int64_t>(1, kBytes / sizes[0] / threads), rows = tiles * kTile;
  // All tiles are alike, with the share of exceptions that trained weights have, 1.2e-4.
  std::vector<uint16_t> tile(sizes[0] / 2, kOne);
  for (size_t i = 0; i < tile.size(); i += tile.size() / 6) tile[i] = 0;
  Bf12Counts counts{};
  for (int high = 0x3c; high < 0x44; high++) counts[high] = 1;  // without 0: zeros are the exceptions
  const Bf12Codes codes(counts);
  std::vector<char> units(sizes[1]);
  std::vector<uint32_t> exceptions;
  encode(tile.data(), kTile, kColumns, codes, units.data(), exceptions);
  const std::vector<uint32_t> starts(tiles, 0);
  const std::vector<float> x(kColumns, 1);
  std::vector<float> prepared[2], y(threads * rows);
  int64_t each = 0, offsets[2];  // bytes of a thread's tiles; where those of each way begin among them
  for (int i = 0; i < 2; i++) {
    prepared[i].resize(prepared_floats(kColumns, 1));
    kernels[i]->prepare(Dtype::bf16, Activations::exact, x.data(), kColumns, kColumns, 1, prepared[i].data());
    offsets[i] = each, each += tiles * sizes[narrow[i]];
  }
  Region all(threads * each);
  seconds_of(threads, [&](int thread) {
    for (int i = 0; i < 2; i++)
      for (int64_t t = 0, bytes = sizes[narrow[i]]; t < tiles; t++)
        std::memcpy(all.data + thread * each + offsets[i] + t * bytes,
                    narrow[i] ? (const void*)units.data() : tile.data(), bytes);
  });
  const auto seconds = [&](int i) {
    return seconds_of(threads, [&](int thread) {
      const char* const data = all.data + thread * each + offsets[i];
      float* const to = y.data() + thread * rows;
      if (narrow[i])
        kernels[i]->product_bf12(Activations::exact, {data, codes.high, exceptions.data(), starts.data()},
                                 prepared[i].data(), kColumns, tiles, 1, to, rows);
      else
        kernels[i]->product(Dtype::bf16, Activations::exact, data, prepared[i].data(), kColumns, tiles, 1, to, rows);
    });
  };
  // Other processes make some rounds longer. So the shortest times count, once kAgreeing of them agree within 5 %.
  std::vector<double> found[2];
  const auto agree = [](const std::vector<double>& times) { return times[kAgreeing - 1] < 1.05 * times[0]; };
  bool steady = false;
  for (int round = 1; round <= kMostRounds && !steady; round++) {
    for (const int i : {1, 0}) {
      const double time = seconds(i);
      found[i].insert(std::upper_bound(found[i].begin(), found[i].end(), time), time);
    }
    steady = round >= kLeastRounds && agree(found[0]) && agree(found[1]);
  }
  const double gain = found[1][0] / found[0][0];
  return steady ? gain : -gain;
}

double arithmetic_peak(int64_t count, int threads) {
  const Kernels& kernels = *choose_kernels(nullptr);
  std::vector<float> sums(threads);
  const double seconds = seconds_of(threads, [&](int i) { sums[i] = kernels.multiply_adds(count); });
  keep(sums);
  return (double)(count * threads) / seconds;
}

}  // namespace laneformer
