// Microbenchmarks of the parts of the decode kernel, compiled with its headers: the weight stream, products, edges, the
// lane exchange, launches. NVIDIA only.
//
//   micro [--quick] [NAME ...]     by default all: ring product plain copy burst sync edge lanes launch torn
//
// Prints one JSON object per line. Times are measured with the device's global timer inside a kernel, from the start of
// the first CTA to the end of the last one, or with events or the host's clock where the field "clock" names these.
// Every wait in a kernel has a watchdog. A failed measurement ends the program with status 1. Build options choose the
// ring: -DLF_WARPS, -DLF_SLOT_LINES (of 512 bytes), -DLF_SLOTS.
#include <cuda_runtime.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "micro_kernels.h"

using namespace laneformer::gpu;

namespace {

[[noreturn]] void give_up(const char* what, const char* why) {
  std::printf("{\"test\": \"error\", \"at\": \"%s\", \"why\": \"%s\"}\n", what, why);
  std::fflush(stdout);
  _exit(1);
}

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) give_up(what, cudaGetErrorString(status));
}

void too_late(int) { give_up("the whole program", "timed out"); }

struct Numbers {
  double median, least, p95;
};

Numbers summary(std::vector<double> samples) {
  std::sort(samples.begin(), samples.end());
  const size_t n = samples.size();
  return {(samples[(n - 1) / 2] + samples[n / 2]) / 2, samples[0],
          samples[std::min(n - 1, (size_t)(0.95 * (double)n))]};
}

using Kernel = void (*)(Params, Job);

struct Bench {
  Params params = {};
  Job job = {};
  int sms = 0, repetitions = 20;
  std::vector<Stamp> stamps;
  cudaEvent_t before, after;
  u32 next_tag = 1;

  static constexpr int kMost = 1024, kRounds = 24,
                       kBoards = 256;  // most CTAs with time stamps, most stamps of each, most CTAs with boards

  Bench() {
    check(cudaSetDevice(0), "cudaSetDevice");
    check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "multiprocessors");
    job.buffer = (sms + 1) * kShare;
    check(cudaMalloc(&job.weights, job.buffer), "the buffer");
    check(cudaMalloc(&job.stamps, sizeof(Stamp) * kMost * kRounds), "time stamps");
    check(cudaMalloc(&job.done, 128), "words");
    check(cudaMemset(job.done, 0, 128), "words");
    const size_t boards = 8 * ((size_t)2 * kWidest * kBoards + 16 * kBoards), shared = 8 * (16 + (size_t)Mail::kWords);
    check(cudaMalloc(&params.boards, boards), "boards");
    check(cudaMemset(params.boards, 0, boards), "boards");
    check(cudaMalloc(&params.shared[0], shared), "mail");
    check(cudaMemset(params.shared[0], 0, shared), "mail");
    check(cudaHostAlloc(&params.host, sizeof(Host), cudaHostAllocPortable), "memory of the host");
    std::memset(params.host, 0, sizeof(Host));
    params.devices = 1;
    params.pass_tag = kPassTags;  // zeros are not a failure with this tag
    for (auto& timeout : params.timeouts_ns) timeout = 1000000000;
    check(cudaEventCreate(&before), "event");
    check(cudaEventCreate(&after), "event");
    launch(fill, 4 * sms, false);
    params.listed_words = 2048;
    check(cudaMalloc(&params.coding, 16), "lists");
    check(cudaMalloc(&params.listed, (size_t)4 * sms * kWarps * params.listed_words), "lists");
    launch(list, sms, false);
  }

  // Launches a kernel. Returns its milliseconds, measured with events.
  double launch(Kernel kernel, int grid, bool cooperative = true, const char* what = "launch") {
    const int bytes = kernel == fill || kernel == list || kernel == empty || kernel == clocks || kernel == plain ||
                              kernel == grid_sync || kernel == torn
                          ? 0
                          : kSharedBytes;
    check(cudaFuncSetAttribute((const void*)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), what);
    job.first_tag = next_tag;
    next_tag += (u32)job.rounds + 16;
    void* arguments[] = {&params, &job};
    check(cudaEventRecord(before), what);
    check(cooperative ? cudaLaunchCooperativeKernel((const void*)kernel, grid, kThreads, arguments, bytes, 0)
                      : cudaLaunchKernel((const void*)kernel, grid, kThreads, arguments, bytes, 0),
          what);
    check(cudaEventRecord(after), what);
    check(cudaDeviceSynchronize(), what);
    if (params.host->failure) give_up(what, "a wait timed out");
    float ms = 0;
    check(cudaEventElapsedTime(&ms, before, after), what);
    return ms;
  }

  // Microseconds from the start of the first of the CTAs first .. last - 1 to the end of the last one, in round n.
  double span(int n, int first, int last, int grid) {
    stamps.resize((size_t)grid);
    check(cudaMemcpy(stamps.data(), job.stamps + (i64)n * grid, sizeof(Stamp) * (size_t)grid, cudaMemcpyDeviceToHost),
          "time stamps");
    u64 begin = ~0ull, end = 0;
    for (int c = first; c < last; c++) begin = std::min(begin, stamps[c].begin), end = std::max(end, stamps[c].end);
    return (double)(end - begin) / 1000;
  }

  Numbers repeat(const std::function<double()>& once) {
    once();  // warm-up
    std::vector<double> samples;
    for (int i = 0; i < repetitions; i++) samples.push_back(once());
    return summary(samples);
  }

  static void print(const std::string& conditions, const Numbers& us, const std::string& more = "") {
    std::printf("{%s, \"median\": %.4f, \"min\": %.4f, \"p95\": %.4f%s}\n", conditions.c_str(), us.median, us.least,
                us.p95, more.c_str());
    std::fflush(stdout);
  }

  std::string conditions(const char* test, const char* unit, int ctas, const std::string& more) const {
    return "\"test\": \"" + std::string(test) + "\", \"unit\": \"" + unit + "\", \"ctas\": " + std::to_string(ctas) +
           ", \"threads\": " + std::to_string(kThreads) + ", \"repetitions\": " + std::to_string(repetitions) +
           (more.empty() ? "" : ", " + more);
  }

  static std::string rate(i64 bytes, const Numbers& us) {
    char text[160];
    std::snprintf(text, sizeof text, ", \"bytes\": %lld, \"gb_per_s\": %.1f", bytes, (double)bytes / us.median / 1000);
    return text;
  }

  static std::string field(const char* name, i64 value) {
    return "\"" + std::string(name) + "\": " + std::to_string(value);
  }

  std::vector<int> counts(std::vector<int> wanted) const {
    wanted.push_back(sms);
    wanted.erase(std::remove_if(wanted.begin(), wanted.end(), [&](int n) { return n > sms; }), wanted.end());
    std::sort(wanted.begin(), wanted.end());
    wanted.erase(std::unique(wanted.begin(), wanted.end()), wanted.end());
    return wanted;
  }

  void machine() {
    cudaDeviceProp prop;
    check(cudaGetDeviceProperties(&prop, 0), "properties");
    int driver = 0, runtime = 0, clock = 0, memory = 0;
    cudaDriverGetVersion(&driver), cudaRuntimeGetVersion(&runtime);
    cudaDeviceGetAttribute(&clock, cudaDevAttrClockRate, 0),
        cudaDeviceGetAttribute(&memory, cudaDevAttrMemoryClockRate, 0);
    launch(clocks, 1, false, "clocks");
    u64 seen[4];
    check(cudaMemcpy(seen, job.done, sizeof seen, cudaMemcpyDeviceToHost), "clocks");
    std::printf(
        "{\"test\": \"machine\", \"device\": \"%s\", \"multiprocessors\": %d, \"l2_bytes\": %d, \"memory_bytes\": %zu, "
        "\"sm_mhz_most\": %d, "
        "\"memory_mhz_most\": %d, \"sm_mhz_seen\": %llu, \"timer_step_ns\": %llu, \"driver\": %d, \"runtime\": %d, "
        "\"buffer_bytes\": %lld, "
        "\"warps\": %d, \"slot_bytes\": %d, \"slots\": %d}\n",
        prop.name, sms, prop.l2CacheSize, prop.totalGlobalMem, clock / 1000, memory / 1000, seen[3], seen[2], driver,
        runtime, job.buffer, kWarps, kSlotBytes, kSlots);
    std::fflush(stdout);
  }

  std::string ring_fields() const {
    return field("slot_bytes", kSlotBytes) + ", " + field("slots", kSlots) + ", " +
           field("in_flight_bytes", kRingBytes);
  }

  void read_ring() {
    for (const int ctas : counts({64, 96, 112, 128})) {
      job.lines = 4 * kLayerLines;
      const Numbers us = repeat([&] {
        launch(ring, ctas, true, "ring");
        return span(0, 0, ctas, ctas);
      });
      print(conditions("ring", "us", ctas, ring_fields()), us, rate(4 * kShare * ctas, us));
    }
  }

  // Products with the same number of weights in each format. Formats with fewer bits take fewer lines.
  void products() {
    const auto measured = [&](auto format, auto of_cluster, const char* name) {
      using Shape = Multiplied<decltype(format), decltype(of_cluster)::value>;  // threads that share a scale
      // Builds with a smaller ring measure only reading.
      if constexpr (Shape::kLines + kSlotLines - 1 <= kRingLines) {
        job.steps = 4 * kLayerLines / 12;
        const int ctas = std::min(sms, 128);
        const Numbers us = repeat([&] {
          launch(multiply<Shape>, ctas, true, "product");
          return span(0, 0, ctas, ctas);
        });
        print(conditions("product", "us", ctas, std::string("\"format\": \"") + name + "\", " + ring_fields()), us,
              rate((i64)Shape::lines_of(job.steps) * kWarps * kLineBytes * ctas, us));
      }
    };
    const std::integral_constant<int, 2> two;
    const std::integral_constant<int, 4> four;
    measured(Plain<kBfloat16>{}, four, "bfloat16");
    measured(Bf12{}, four, "bf12");
    measured(Codes<Code::kInt8, Scale::kNone, false, true>{}, four, "int8");
    measured(Codes<Code::kE4M3, Scale::kNone, false, true>{}, four, "fp8");
    using Int4 = Codes<Code::kInt4, Scale::kBfloat16, false, false>;
    using Mxfp4 = Codes<Code::kE2M1, Scale::kE8M0, false, false>;
    using Nvfp4 = Codes<Code::kE2M1, Scale::kE4M3, false, true>;
    measured(Int4{}, four, "int4");
    measured(Mxfp4{}, four, "mxfp4");
    measured(Nvfp4{}, two, "nvfp4");
    measured(ByTensor<Int4, 1, 1, 2>{}, four, "int4 by tensor cores");
    measured(ByTensor<Mxfp4, 1, 1, 0>{}, four, "mxfp4 by tensor cores");
    measured(ByTensor<Nvfp4, 2, 1, 2>{}, four, "nvfp4 by tensor cores");
  }

  void read_plain() {
    for (const int per : {1, 2, 4}) {
      const int ctas = per * sms;
      if (ctas > kMost) continue;
      job.bytes = job.buffer / ((i64)ctas * kThreads * 128) * ((i64)ctas * kThreads * 128);
      const Numbers us = repeat([&] {
        launch(plain, ctas, false, "plain");
        return span(0, 0, ctas, ctas);
      });
      print(conditions("plain", "us", ctas, field("loads_in_flight", 8)), us, rate(job.bytes, us));
    }
  }

  void copy() {
    const i64 half = job.buffer / 2 / 256 * 256;
    const Numbers us = repeat([&] {
      float ms = 0;
      check(cudaEventRecord(before), "copy");
      check(cudaMemcpyAsync(job.weights + half, job.weights, half, cudaMemcpyDeviceToDevice, 0), "copy");
      check(cudaEventRecord(after), "copy");
      check(cudaDeviceSynchronize(), "copy");
      check(cudaEventElapsedTime(&ms, before, after), "copy");
      return 1000.0 * ms;
    });
    print(conditions("copy", "us", 0, "\"clock\": \"events\", \"counted\": \"bytes read and written\""), us,
          rate(2 * half, us));
  }

  void bursts() {
    for (const i64 megabytes : {17, 34, 68, 268}) {
      job.bytes = megabytes * 1000000 / 4096 * 4096;
      job.rounds = kRounds;
      launch(burst, sms, true, "burst");
      launch(burst, sms, true, "burst");
      std::vector<double> samples;
      for (int n = 4; n < job.rounds; n++) samples.push_back(span(n, 0, sms, sms));
      const Numbers us = summary(samples);
      print("\"test\": \"burst\", \"unit\": \"us\", \"ctas\": " + std::to_string(sms) + ", " +
                field("threads", kThreads) + ", " + field("repetitions", (i64)samples.size()) +
                ", \"idle_before_us\": 20",
            us, rate(job.bytes, us));
    }
  }

  void syncs() {
    for (const int ctas : counts({16, 64, 128})) {
      job.rounds = 1000;
      const Numbers us = repeat([&] {
        launch(grid_sync, ctas, true, "sync");
        return span(0, 0, ctas, ctas) / job.rounds;
      });
      print(conditions("grid_sync", "us", ctas, field("rounds", job.rounds)), us);
    }
  }

  void edges() {
    if (sms < 128 || 2 * sms > kMost) give_up("edge", "the device must have 128 to 512 multiprocessors");
    job.rounds = 1000, job.group = 128, job.words = 384;
    const auto measured = [&](bool with_edges, int lines) {
      job.edges = with_edges, job.lines = lines;
      return repeat([&] {
        launch(edge, 128, true, "edge");
        return span(0, 0, 128, 128) / job.rounds;
      });
    };
    constexpr int lines = 112 / kWarps / 2 * 2;  // 56 KB for each CTA: a fifth of a layer of the 2B on 8 GPUs
    const Numbers stream = measured(false, lines);
    print(conditions("edge", "us", 128,
                     field("rounds", job.rounds) + ", \"form\": \"none\", " + field("lines_between", lines)),
          stream, rate((i64)128 * kWarps * lines * kLineBytes, stream));
    for (const int words : {384, 1536, kWidest})
      for (const int group : {16, 32, 64, 128})
        for (const std::string form : {"tags", "tags, all looked at", "flags"})
          for (const int between : {0, lines}) {
            job.words = words, job.group = group, job.flags = form == "flags",
            job.at_once = form == "tags, all looked at";
            const Numbers us = measured(true, between);
            char more[80] = "";
            if (between) std::snprintf(more, sizeof more, ", \"above_stream_us\": %.4f", us.median - stream.median);
            print(conditions("edge", "us", 128,
                             field("rounds", job.rounds) + ", \"form\": \"" + form + "\", " + field("words", words) +
                                 ", " + field("group", group) + ", " + field("lines_between", between)),
                  us, more);
          }
  }

  // The last test, because it leaves other words on the boards. A torn line of one access of 16 bytes is an error: the
  // variant `triples` would compute with it.
  void tear() {
    job.rounds = 100000, repetitions = 1;
    for (const bool pairs : {false, true}) {
      job.pairs = pairs;
      const char* const form = pairs ? "v2.u64" : "b128";
      const int writers = std::min(sms, 2 * kBoards) / 2, ctas = 2 * writers;
      check(cudaMemset(params.boards, 0, (size_t)16 * writers * kThreads), "lines");
      check(cudaMemset(job.done + 4, 0, 16), "counts");
      launch(torn, ctas, true, "torn");
      const double us = span(0, 0, ctas, ctas);
      u64 seen[2];
      check(cudaMemcpy(seen, job.done + 4, sizeof seen, cudaMemcpyDeviceToHost), "counts");
      std::printf("{%s, \"median\": %.4f}\n",
                  conditions("torn", "us", ctas,
                             std::string("\"form\": \"") + form + "\", " +
                                 field("lines_read", (i64)job.rounds * writers * kThreads) + ", " +
                                 field("lines_changed", (i64)seen[1]) + ", " + field("lines_torn", (i64)seen[0]))
                      .c_str(),
                  us);
      std::fflush(stdout);
      if (!pairs && seen[0]) give_up("torn", "lines of 16 bytes were read between two writes");
      if (!pairs && !seen[1]) give_up("torn", "no line changed while it was read");
    }
  }

  void exchange() {
    job.rounds = 2000;
    for (const int group : {16, 64})
      for (const bool ping : {true, false})
        for (const int loading : {0, sms - 2 * group}) {
          if (loading < 0) continue;
          job.group = group, job.ping = ping;
          const Numbers us = repeat([&] {
            launch(lanes, 2 * group + loading, true, "lanes");
            return span(0, 0, 2 * group, 2 * group + loading) / job.rounds / (ping ? 2 : 1);
          });
          print(conditions("lanes", "us", 2 * group,
                           std::string("\"form\": \"") + (ping ? "half of a round trip" : "both at once") + "\", " +
                               field("rows_of_a_cta", kRows) + ", " + field("rounds", job.rounds) + ", " +
                               field("ctas_that_load_memory", loading)),
                us);
        }
  }

  void launches() {
    const Numbers one = repeat([&] {
      const auto from = std::chrono::steady_clock::now();
      launch(empty, sms, true, "launch");
      return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - from).count();
    });
    print(conditions("launch", "us", sms,
                     "\"clock\": \"host\", \"what\": \"empty cooperative launch until synchronized, with two events\""),
          one);
    void* arguments[] = {&params, &job};
    const Numbers many = repeat([&] {
      float ms = 0;
      check(cudaEventRecord(before), "launch");
      for (int i = 0; i < 200; i++)
        check(cudaLaunchCooperativeKernel((const void*)empty, sms, kThreads, arguments, 0, 0), "launch");
      check(cudaEventRecord(after), "launch");
      check(cudaDeviceSynchronize(), "launch");
      check(cudaEventElapsedTime(&ms, before, after), "launch");
      return 1000.0 * ms / 200;
    });
    print(conditions("launch", "us", sms,
                     "\"clock\": \"events\", \"what\": \"empty cooperative launches one after the other\""),
          many);
  }
};

}  // namespace

int main(int count, char** words) {
  std::signal(SIGALRM, too_late);
  alarm(150);
  std::vector<std::string> wanted(words + 1, words + count);
  Bench bench;
  if (!wanted.empty() && wanted[0] == "--quick") bench.repetitions = 3, wanted.erase(wanted.begin());
  const std::vector<std::pair<std::string, void (Bench::*)()>> all = {
      {"ring", &Bench::read_ring}, {"product", &Bench::products}, {"plain", &Bench::read_plain},
      {"copy", &Bench::copy},      {"burst", &Bench::bursts},     {"sync", &Bench::syncs},
      {"edge", &Bench::edges},     {"lanes", &Bench::exchange},   {"launch", &Bench::launches},
      {"torn", &Bench::tear}};
  for (const std::string& name : wanted)
    if (std::none_of(all.begin(), all.end(), [&](const auto& one) { return one.first == name; }))
      give_up(name.c_str(), "unknown measurement; the head of micro.cu lists the names");
  bench.machine();
  for (const auto& [name, measure] : all)
    if (wanted.empty() || std::find(wanted.begin(), wanted.end(), name) != wanted.end()) (bench.*measure)();
  return 0;
}
