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

Decoder::Decoder(plan::Plan plan, const Options& options)
    : plan_(std::move(plan)),
      options_(options),
      kernels_(choose_kernels(options.instructions.empty() ? nullptr : options.instructions.c_str())),
      weights_((Dtype)plan_.weight_dtype),
      cache_((Dtype)plan_.cache_dtype),
      activations_(plan_.rounded_activations ? Activations::rounded : Activations::exact) {
  if (kernels_ == nullptr) throw std::runtime_error("this machine cannot run the instructions " + options.instructions);
  make_ops();

  const int threads = options.one_thread_per_lane ? plan_.lanes : std::max(1, options.threads);
  lanes_shared_ = plan_.lanes % threads != 0;
  if (threads > default_threads()) spins_ = 20;  // others wait for this core

  const int64_t lanes = plan_.lanes, d = plan_.hidden_size, modules = (int64_t)plan_.modules.size();
  const auto widen_to = [](int64_t& padded, int64_t n) { padded = std::max(padded, (n + kTile - 1) / kTile * kTile); };
  for (const Product* product : products_)
    if (product != &head_)
      widen_to(product->writes == plan::Value::projected ? projected_padded_
               : product->writes == plan::Value::hidden  ? hidden_padded_
                                                         : output_padded_,
               product->rows);
  int64_t part = 0;  // floats that a chunk of keys gives
  for (int layer = 0; layer < plan_.layers(); layer++)
    part = std::max(part, (int64_t)attend_of(layer).heads * (attend_of(layer).head_dim + 2));

  small_.resize(plan_.small_size);
  outputs_ = Region(4 * modules * lanes * kBlock * output_padded_);
  streams_ = Region(4 * (int64_t)plan_.sums.size() * lanes * kBlock * d);
  projected_ = Region(4 * lanes * kBlock * projected_padded_);
  parts_ = Region(4 * lanes * kChunks * kBlock * part);
  hiddens_ = Region(4 * lanes * kBlock * hidden_padded_);
  finals_ = Region(4 * lanes * d);
  logits_ = Region(4 * (int64_t)plan_.vocab_size);
  z_ = Region(4 * (int64_t)plan_.vocab_size);
  packets_.resize(threads);
  idle_ = std::make_unique<Counter[]>(threads);

  if (options.one_thread_per_lane) {
    std::vector<Exchange> exchanges;
    for (size_t i = 0; i < plan_.sums.size(); i++) {
      int last = plan_.sums[i].complete_at;
      for (size_t t = 0; t < plan_.events.size(); t++)
        for (const plan::Event& event : plan_.events[t])
          if (event.payload == (int)i) last = (int)t;
      exchanges.push_back({plan_.sums[i].complete_at, last});
    }
    exchanges.push_back({(int)modules, (int)modules});  // the head's
    int slots = 1;
    while (slots < ring_slots(exchanges)) slots *= 2;
    mail_ = std::make_unique<Mailboxes>(plan_.lanes, slots, kBlock * d);
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

// The plan's ops with what packing and computing must know of them, and where each matrix lies.
void Decoder::make_ops() {
  places_.resize(plan_.weights.size());
  const auto made = [&](const plan::Product& op) {
    Product product{};
    product.name = op.name;
    product.lanes = plan_.lanes;
    product.gated = op.gated();
    product.rows = op.channels();
    product.columns = op.columns;
    product.reads = op.reads;
    product.writes = op.writes;
    product.normed = op.norm.has_value();
    if (product.normed) product.norm = *op.norm;
    for (const plan::Matrix& matrix : op.matrices)
      if (matrix.bias) product.biases.push_back({*matrix.bias, matrix.first});
    if (product.gated && !product.biases.empty())
      throw std::runtime_error("the CPU kernel has no biases before a gated activation: use backend xla");
    if ((op.reads == plan::Value::stream) != product.normed)
      throw std::runtime_error("the CPU kernel norms the stream, and nothing else, before a product: use backend xla");
    return product;
  };
  for (size_t m = 0; m < plan_.modules.size(); m++) {
    std::vector<Op>& module = modules_.emplace_back();
    for (const plan::Op& op : plan_.modules[m])
      if (const auto* product = std::get_if<plan::Product>(&op)) {
        module.push_back(made(*product));
      } else {
        module.push_back(Attention{(int)m / 2, std::get<plan::Attend>(op)});
      }
  }
  for (size_t m = 0; m < modules_.size(); m++)
    for (size_t i = 0; i < modules_[m].size(); i++)
      if (auto* product = std::get_if<Product>(&modules_[m][i])) {
        product->number = (int)products_.size();
        products_.push_back(product);
        for (const plan::Matrix& matrix : std::get<plan::Product>(plan_.modules[m][i]).matrices)
          places_[matrix.weight].push_back(
              {product, product->gated ? 0 : matrix.first, product->gated && matrix.first > 0});
      }
  for (int layer = 0; layer < plan_.layers(); layer++) attend_of(layer);

  const plan::Head& head = plan_.head;
  head_.number = (int)products_.size();
  head_.lanes = head.kind == plan::HeadKind::vocab_parallel ? plan_.lanes : 1;
  head_.rows = plan_.vocab_size / head_.lanes;
  head_.columns = (int64_t)plan_.hidden_size * (head.kind == plan::HeadKind::lane ? plan_.lanes : 1);
  products_.push_back(&head_);
  places_[head.weight].push_back({&head_, 0, false});
}

const plan::Attend& Decoder::attend_of(int layer) const {
  const plan::Attend* found = nullptr;
  for (int m = 2 * layer; m < 2 * layer + 2; m++)
    for (const plan::Op& op : plan_.modules[m])
      if (const auto* attend = std::get_if<plan::Attend>(&op)) {
        if (found) throw std::runtime_error("the CPU kernel attends once per layer: use backend xla");
        found = attend;
      }
  if (!found) throw std::runtime_error("the CPU kernel attends in every layer: use backend xla");
  return *found;
}

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

// All rows of a weight, of each lane.
void Decoder::pack_rows(const Rows& rows, const plan::Weight& weight, const void* data, Dtype dtype) {
  const Product& product = *rows.product;
  const int64_t count = weight.shape[0], stretch = weight.shape[1];
  const int64_t stretches = product.columns / stretch;  // a head over all lanes: their columns one after the other
  on_all([&](int w) {
    std::vector<float> wide(stretch);
    std::vector<char> row(stretch * 4);
    char* unit = workers_[w]->weights(product);
    for (const Share& share : workers_[w]->shares(product))
      for (int64_t u = share.first; u < share.last; u++, unit += product.unit_bytes(weights_)) {
        char* tile = unit + (rows.second ? tile_bytes(weights_, product.columns) : 0);
        for (int64_t r = 0; r < kTile; r++) {
          const int64_t source = u * kTile + r - rows.first;
          if (source < 0 || source >= count) continue;
          for (int64_t s = 0; s < stretches; s++) {
            const int64_t lane = stretches > 1 ? s : weight.lane_sharded ? share.lane : 0;
            const char* from = (const char*)data + (lane * count + source) * stretch * bytes_of(dtype);
            if (dtype != weights_) {
              kernels_->widen(dtype, from, stretch, wide.data());
              kernels_->narrow(weights_, wide.data(), stretch, row.data());
              from = row.data();
            }
            if (weights_ == Dtype::f32) {
              place_row(weights_, r, s * stretch, (const float*)from, stretch, (float*)tile);
            } else {
              place_row(weights_, r, s * stretch, (const uint16_t*)from, stretch, (uint16_t*)tile);
            }
          }
        }
      }
  });
}

void Decoder::pack(int number, const void* data, int64_t count, Dtype dtype) {
  if (number < 0 || number >= (int)plan_.weights.size())
    throw std::runtime_error("the model has no weight " + std::to_string(number));
  const plan::Weight& weight = plan_.weights[number];
  const int64_t lanes = weight.lane_sharded ? plan_.lanes : 1, each = weight.elements();
  if (count != lanes * each)
    throw std::runtime_error("weight " + std::to_string(number) + " has " + std::to_string(count) +
                             " elements, the model's has " + std::to_string(lanes * each));
  if (!weight.is_matrix())
    for (int64_t lane = 0; lane < lanes; lane++)
      kernels_->widen(dtype, (const char*)data + lane * each * bytes_of(dtype), each,
                      small_.data() + weight.offset + lane * weight.stride);
  for (const Rows& rows : places_[number]) pack_rows(rows, weight, data, dtype);
  if (number == plan_.embedding) {
    embedding_dtype_ = dtype;
    if (number != plan_.head.weight || dtype != weights_) {
      const int64_t bytes = each * bytes_of(dtype);
      embedding_ = Region(bytes);
      on_all([&](int w) {
        const int64_t n = threads(), first = bytes * w / n, last = bytes * (w + 1) / n;
        std::memcpy(embedding_.data + first, (const char*)data + first, last - first);
      });
    }
  }
}

int64_t Decoder::packed_bytes() const {
  int64_t bytes = embedding_.bytes;
  for (const auto& worker : workers_) bytes += worker->packed_bytes();
  return bytes;
}

// The row of the embedding table, float32.
void Decoder::embed(int32_t token, float* row) const {
  const int64_t d = plan_.hidden_size;
  if (embedding_.data) {
    kernels_->widen(embedding_dtype_, embedding_.data + token * d * bytes_of(embedding_dtype_), d, row);
    return;
  }
  const int64_t tile = token / kTile, r = token % kTile;  // the head's rows are the table
  const char* data = nullptr;
  for (const auto& worker : workers_)
    for (const Share& share : worker->shares(head_))
      if (share.first <= tile && tile < share.last)
        data = worker->weights(head_) + (tile - share.first) * head_.unit_bytes(weights_);
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
  on_all([&](int w) {
    packets_[w].sum = kernels_->read(workers_[w]->weights(*products_[0]), workers_[w]->packed_bytes());
  });
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
