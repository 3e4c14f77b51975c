#include "decoder.h"

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <stdexcept>

#include "worker.h"

namespace laneformer {

Region::Region(int64_t size) : bytes(std::max<int64_t>(size, 1)) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    throw std::runtime_error("out of memory: " + std::to_string(bytes) + " bytes for the model's weights");
#if defined(MADV_HUGEPAGE)
  madvise(p, bytes, MADV_HUGEPAGE);  // fewer page faults and table walks; a hint that may be refused
#endif
  data = (char*)p;
}

Region::~Region() {
  if (data) munmap(data, bytes);
}

Region& Region::operator=(Region&& other) noexcept {
  std::swap(data, other.data);
  std::swap(bytes, other.bytes);
  return *this;
}

const Kernels* choose_kernels(const char* name) {
  std::vector<const Kernels*> able;  // best first
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                  __builtin_cpu_supports("avx512cd");
  if (v4 && __builtin_cpu_supports("avx512bf16")) able.push_back(&laneformer_kernels_avx512_bf16);
  if (v4) able.push_back(&laneformer_kernels_avx512);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) able.push_back(&laneformer_kernels_avx2);
#endif
  able.push_back(&laneformer_kernels_portable);
  for (const Kernels* kernels : able)
    if (name == nullptr || std::string(name) == kernels->name) return kernels;
  return nullptr;
}

// ------------------------------------------------------------------------------------------------------------- making

Decoder::Decoder(const LaneformerModel& model, const LaneformerOptions& options)
    : model_(model), options_(options), kernels_(choose_kernels(options.instructions)) {
  if (kernels_ == nullptr)
    throw std::runtime_error(std::string("this machine cannot run the instructions ") + options.instructions);
  frequencies_.assign(model.rope_frequencies, model.rope_frequencies + model.head_dim / 2);
  windows_.assign(model.windows, model.windows + model.layers);
  events_words_.assign(model.events, model.events + model.num_events);
  weights_ = (Dtype)model.weight_dtype;
  cache_ = (Dtype)model.cache_dtype;
  activations_ = model.rounded_activations ? Activations::rounded : Activations::exact;
  read_events();

  const int threads = options.one_thread_per_lane ? model.lanes : std::max(1, options.threads);
  lanes_shared_ = model.lanes % threads != 0;
  if (threads > default_threads()) spins_ = 20;  // others wait for this core
  const auto padded = [](int64_t n) { return (n + kTile - 1) / kTile * kTile; };
  hidden_padded_ = padded(model.hidden);
  ff_padded_ = padded(model.ff);
  qkv_padded_ = padded(rows(kQkv));

  const int64_t lanes = model.lanes, d = model.hidden, layers = model.layers;
  attention_norms_.resize(layers * d * (model.lane_norms ? lanes : 1));
  ffn_norms_.resize(attention_norms_.size());
  final_norm_.resize(d * (model.lane_final_norm ? lanes : 1));
  if (model.qkv_bias) biases_.resize(layers * lanes * rows(kQkv));
  if (model.qk_norm) {
    q_norms_.resize(layers * model.head_dim);
    k_norms_.resize(layers * model.head_dim);
  }

  outputs_ = Region(4 * 2 * layers * lanes * kBlock * hidden_padded_);
  streams_ = Region(4 * (int64_t)payloads_.size() * lanes * kBlock * d);
  qkv_ = Region(4 * lanes * kBlock * qkv_padded_);
  parts_ = Region(4 * lanes * kChunks * kBlock * model.heads * (model.head_dim + 2));
  hiddens_ = Region(4 * lanes * kBlock * ff_padded_);
  finals_ = Region(4 * lanes * d);
  logits_ = Region(4 * (int64_t)model.vocab);
  z_ = Region(4 * (int64_t)model.vocab);
  packets_.resize(threads);
  idle_ = std::make_unique<Counter[]>(threads);

  if (options.one_thread_per_lane) {
    std::vector<Exchange> exchanges;
    for (size_t i = 0; i < payloads_.size(); i++) {
      int last = payloads_[i].complete_at;
      for (size_t t = 0; t < events_.size(); t++)
        for (const Event& event : events_[t])
          if (event.kind == Event::landing && event.payload == (int)i) last = (int)t;
      exchanges.push_back({payloads_[i].complete_at, last});
    }
    exchanges.push_back({2 * model.layers, 2 * model.layers});  // the head's
    int slots = 1;
    while (slots < ring_slots(exchanges)) slots *= 2;
    mail_ = std::make_unique<Mailboxes>(model.lanes, slots, kBlock * d);
  }

  for (int w = 0; w < threads; w++) workers_.push_back(std::make_unique<Worker>(*this, w, threads));
  for (int w = 1; w < threads; w++)
    threads_.emplace_back([this, w] {
      for (uint32_t job = 1;; job++) {
        std::atomic<int> never{0};
        while (!work_.wait(job, never, INT64_MAX)) {
        }
        if (closing_) return;
        job_(w);
        idle_[w].raise(job);
      }
    });
}

Decoder::~Decoder() {
  closing_ = true;
  work_.raise(++jobs_);
  for (std::thread& thread : threads_) thread.join();
}

// The table as words, by time: 2 layers + 1 groups [count, events...], then the payloads [count, payloads...].
//   own:      0, module, weight
//   landing:  1, payload, count of apart, (module, weight)...
//   payload:  width, complete_at, stream_mean, count of parts, (module, weight)...
// A weight is an index into event_weights. custom_calls/session.py writes it.
void Decoder::read_events() {
  size_t at = 0;
  const auto next = [&] {
    if (at >= events_words_.size()) throw std::runtime_error("the schedule table is too short");
    return events_words_[at++];
  };
  const auto weight = [&] { return model_.event_weights[next()]; };
  const auto parts = [&] {
    std::vector<Part> list(next());
    for (Part& part : list) {
      part.module = next();
      part.weight = weight();
    }
    return list;
  };
  events_.resize(2 * model_.layers + 1);
  for (auto& events : events_) {
    events.resize(next());
    for (Event& event : events) {
      event.kind = next() == 0 ? Event::own : Event::landing;
      if (event.kind == Event::own) {
        event.module = next();
        event.weight = weight();
      } else {
        event.payload = next();
        event.apart = parts();
      }
    }
  }
  payloads_.resize(next());
  for (Payload& payload : payloads_) {
    payload.width = next();
    payload.complete_at = next();
    payload.stream_mean = next() != 0;
    payload.parts = parts();
  }
}

int64_t Decoder::rows(Op op) const {
  switch (op) {
    case kQkv: return (int64_t)(model_.heads + 2 * model_.kv_heads) * model_.head_dim;
    case kGateUp: return model_.ff;
    case kHead: return model_.head_type == 2 ? model_.vocab / model_.lanes : model_.vocab;
    default: return model_.hidden;
  }
}

int64_t Decoder::columns(Op op) const {
  switch (op) {
    case kOut: return (int64_t)model_.heads * model_.head_dim;
    case kDown: return model_.ff;
    case kHead: return (int64_t)model_.hidden * (model_.head_type == 1 ? model_.lanes : 1);
    default: return model_.hidden;
  }
}

int Decoder::lanes(Op op) const { return op == kHead && model_.head_type != 2 ? 1 : model_.lanes; }

int64_t Decoder::unit_bytes(Op op) const { return tile_bytes(weights_, columns(op)) * (op == kGateUp ? 2 : 1); }

// ------------------------------------------------------------------------------------------------------------ packing

namespace {

// Element k of row r of a tile.
inline int64_t place(Dtype dtype, int64_t r, int64_t k) {
  return dtype == Dtype::bf16 ? k / 2 * 2 * kTile + 2 * r + k % 2 : k * kTile + r;
}

template <class T>
void place_row(Dtype dtype, int64_t r, int64_t first, const T* row, int64_t n, T* tile) {
  int64_t k = 0;
  if (sizeof(T) == 2 && dtype == Dtype::bf16 && first % 2 == 0)
    for (; k + 2 <= n; k += 2) std::memcpy(tile + place(dtype, r, first + k), row + k, 4);
  for (; k < n; k++) tile[place(dtype, r, first + k)] = row[k];
}

}  // namespace

// Rows first .. first + count of the op, of each lane; second: of the two matrices of kGateUp.
void Decoder::pack_rows(Op op, int layer, int64_t first, int64_t count, bool second, const void* data, Dtype dtype) {
  const int64_t k = columns(op), per_lane = op == kHead && model_.head_type == 1 ? model_.hidden : k;
  const int sources =
      op == kHead && model_.head_type == 1 ? model_.lanes : 1;  // stretches of columns, one after the other
  on_all([&](int w) {
    std::vector<float> wide(per_lane);
    std::vector<char> row(per_lane * 4);
    char* unit = workers_[w]->weights(op, layer);
    for (const Share& share : workers_[w]->shares(op))
      for (int64_t u = share.first; u < share.last; u++, unit += unit_bytes(op)) {
        char* tile = unit + (second ? tile_bytes(weights_, k) : 0);
        for (int64_t r = 0; r < kTile; r++) {
          const int64_t source = u * kTile + r - first;
          if (source < 0 || source >= count) continue;
          for (int s = 0; s < sources; s++) {
            const int64_t index = ((int64_t)(sources > 1 ? s : share.lane) * count + source) * per_lane;
            const char* from = (const char*)data + index * bytes_of(dtype);
            if (dtype != weights_) {
              kernels_->widen(dtype, from, per_lane, wide.data());
              kernels_->narrow(weights_, wide.data(), per_lane, row.data());
              from = row.data();
            }
            if (weights_ == Dtype::f32) {
              place_row(weights_, r, s * per_lane, (const float*)from, per_lane, (float*)tile);
            } else {
              place_row(weights_, r, s * per_lane, (const uint16_t*)from, per_lane, (uint16_t*)tile);
            }
          }
        }
      }
  });
}

void Decoder::pack(const std::string& name, int layer, const void* data, int64_t count, Dtype dtype) {
  const int64_t d = model_.hidden, e = model_.head_dim, q = model_.heads * e, kv = model_.kv_heads * e,
                lanes = model_.lanes, ff = model_.ff;
  if (layer < 0 || layer >= model_.layers)
    throw std::runtime_error("there is no layer " + std::to_string(layer) + " for " + name);
  const auto expect = [&](int64_t wanted) {
    if (count != wanted)
      throw std::runtime_error(name + " has " + std::to_string(count) + " elements, the model's has " +
                               std::to_string(wanted));
  };
  const auto floats = [&](std::vector<float>& all, int64_t each) {
    expect(each);
    kernels_->widen(dtype, data, each, all.data() + layer * each);
  };
  const auto matrix = [&](Op op, int64_t first, int64_t rows, bool second = false) {
    expect((op == kHead && model_.head_type == 1 ? 1 : this->lanes(op)) * rows * columns(op));
    pack_rows(op, layer, first, rows, second, data, dtype);
  };
  if (name == "tok_embeddings") {
    expect(model_.vocab * d);
    if (model_.tied_head) matrix(kHead, 0, model_.vocab);
    embedding_dtype_ = dtype;
    if (!model_.tied_head || dtype != weights_) {
      const int64_t bytes = (int64_t)model_.vocab * d * bytes_of(dtype);
      embedding_ = Region(bytes);
      on_all([&](int w) {
        const int64_t n = threads(), first = bytes * w / n, last = bytes * (w + 1) / n;
        std::memcpy(embedding_.data + first, (const char*)data + first, last - first);
      });
    }
  } else if (name == "attention_norm") {
    floats(attention_norms_, attention_norms_.size() / model_.layers);
  } else if (name == "ffn_norm") {
    floats(ffn_norms_, ffn_norms_.size() / model_.layers);
  } else if (name == "norm") {
    floats(final_norm_, final_norm_.size());
  } else if (name == "attention.q_norm" && model_.qk_norm) {
    floats(q_norms_, e);
  } else if (name == "attention.k_norm" && model_.qk_norm) {
    floats(k_norms_, e);
  } else if (name == "attention.wq") {
    matrix(kQkv, 0, q);
  } else if (name == "attention.wk") {
    matrix(kQkv, q, kv);
  } else if (name == "attention.wv") {
    matrix(kQkv, q + kv, kv);
  } else if (name == "attention.wo") {
    matrix(kOut, 0, d);
  } else if (name == "feed_forward.w1") {
    matrix(kGateUp, 0, ff);
  } else if (name == "feed_forward.w3") {
    matrix(kGateUp, 0, ff, true);
  } else if (name == "feed_forward.w2") {
    matrix(kDown, 0, d);
  } else if (name == "lm_head" && !model_.tied_head) {
    matrix(kHead, 0, rows(kHead));
  } else if (model_.qkv_bias &&
             (name == "attention.wq_bias" || name == "attention.wk_bias" || name == "attention.wv_bias")) {
    const int64_t first = name[11] == 'q' ? 0 : name[11] == 'k' ? q : q + kv, each = name[11] == 'q' ? q : kv;
    expect(lanes * each);
    for (int l = 0; l < lanes; l++)
      kernels_->widen(dtype, (const char*)data + l * each * bytes_of(dtype), each,
                      biases_.data() + (layer * lanes + l) * rows(kQkv) + first);
  } else {
    throw std::runtime_error("the model has no weight called " + name);
  }
}

int64_t Decoder::packed_bytes() const {
  int64_t bytes = embedding_.bytes;
  for (const auto& worker : workers_) bytes += worker->packed_bytes();
  return bytes;
}

// The row of the embedding table, float32.
void Decoder::embed(int32_t token, float* row) const {
  const int64_t d = model_.hidden;
  if (embedding_.data) {
    kernels_->widen(embedding_dtype_, embedding_.data + token * d * bytes_of(embedding_dtype_), d, row);
    return;
  }
  const int64_t tile = token / kTile, r = token % kTile;  // the head's rows are the table
  const char* data = nullptr;
  for (const auto& worker : workers_)
    for (const Share& share : worker->shares(kHead))
      if (share.first <= tile && tile < share.last)
        data = worker->weights(kHead, 0) + (tile - share.first) * unit_bytes(kHead);
  for (int64_t k = 0; k < d; k++)
    kernels_->widen(weights_, data + place(weights_, r, k) * bytes_of(weights_), 1, row + k);
}

// ------------------------------------------------------------------------------------------------------------ running

void Decoder::on_all(const std::function<void(int)>& job) {
  job_ = job;
  const uint32_t number = ++jobs_;
  work_.raise(number);
  job(0);
  std::atomic<int> never{0};
  for (int w = 1; w < threads(); w++)
    while (!idle_[w].wait(number, never, INT64_MAX)) {
    }
}

void Decoder::fail(const std::string& why) {
  const std::lock_guard<std::mutex> lock(reason_lock_);
  if (reason_.empty()) reason_ = why;
  stopped_.store(1);
}

void Decoder::begin() {
  armed_ = true;
  cancel_.store(0);
  count_.raise(0);
  done_.store(0);
}

void Decoder::settle() {
  const std::unique_lock<std::mutex> alone(running_, std::try_to_lock);
  if (!alone.owns_lock()) return;  // another call runs
  armed_ = false;
  done_.store(1, std::memory_order_release);
}

int32_t Decoder::wait(int32_t have, int timeout_ms) {
  const int64_t until = now_ns() + timeout_ms * 1'000'000LL;
  while (drawn() <= have && !finished() && now_ns() < until) {
    count_.wait((uint32_t)have + 1, done_, std::max<int64_t>(0, until - now_ns()), 0);
  }
  return drawn();
}

End Decoder::run(const Call& call) {
  const std::unique_lock<std::mutex> alone(running_, std::try_to_lock);
  if (!alone.owns_lock()) throw std::runtime_error("this model is already generating: wait for that call to end");
  if (!armed_) begin();
  armed_ = false;
  tokens.resize(call.limit);
  logprobs.resize(call.limit);
  times_ns.resize(call.limit);
  top_tokens.resize((int64_t)call.limit * call.top);
  top_logprobs.resize(top_tokens.size());
  stopped_.store(0);
  reason_.clear();
  for (auto& worker : workers_) worker->reset();
  call_ = &call;
  on_all([&](int w) { workers_[w]->generate(); });
  call_ = nullptr;
  done_.store(1, std::memory_order_release);
  wake_all(count_.value);
  if (stopped_.load()) throw std::runtime_error(reason_);
  return end_;
}

double Decoder::read_pass() {
  const std::lock_guard<std::mutex> alone(running_);
  const int64_t began = now_ns();
  on_all([&](int w) { packets_[w].sum = kernels_->read(workers_[w]->weights(kQkv, 0), workers_[w]->packed_bytes()); });
  return 1e-9 * (double)(now_ns() - began);
}

void Decoder::trace(int64_t spans) {
  for (auto& worker : workers_) worker->trace(spans);
}

const std::vector<Span>& Decoder::spans(int worker) const { return workers_.at(worker)->spans(); }

// ------------------------------------------------------------------------------------------------------------ machine

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

double read_bandwidth(int64_t bytes, int threads) {
  static std::mutex lock;
  static Region buffer;
  const std::lock_guard<std::mutex> alone(lock);
  const Kernels& kernels = *choose_kernels(nullptr);
  const int64_t each = bytes / threads / 256 * 256;
  const bool fresh = buffer.bytes < bytes;
  if (fresh) buffer = Region(bytes);
  std::atomic<int> ready{0};
  std::vector<int64_t> began(threads), ended(threads);
  std::vector<uint64_t> sums(threads);
  const auto pass = [&](int i) {
    if (fresh) std::memset(buffer.data + i * each, 1, each);
    for (ready++; ready.load() < threads;) std::this_thread::yield();
    began[i] = now_ns();
    sums[i] = kernels.read(buffer.data + i * each, each);
    ended[i] = now_ns();
  };
  std::vector<std::thread> others;
  for (int i = 1; i < threads; i++) others.emplace_back(pass, i);
  pass(0);
  for (std::thread& thread : others) thread.join();
  volatile uint64_t keep = 0;  // so that the reads are not optimised away
  for (const uint64_t sum : sums) keep = keep + sum;
  const int64_t ns = *std::max_element(ended.begin(), ended.end()) - *std::min_element(began.begin(), began.end());
  return (double)(each * threads) / (1e-9 * (double)ns);
}

}  // namespace laneformer
