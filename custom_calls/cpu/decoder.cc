#include "decoder.h"

#include <sys/mman.h>

#include <algorithm>
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
  if (threads > default_threads()) spin_ns_ = 500;  // others wait for this core

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
    product.gated = op.gated;
    product.activation = op.activation;
    product.rows = op.channels();
    product.columns = op.columns;
    product.reads = op.reads;
    product.writes = op.writes;
    product.normed = op.norm.has_value();
    if (product.normed) product.norm = *op.norm;
    for (const plan::Matrix& matrix : op.matrices)
      if (matrix.bias) product.biases.push_back({*matrix.bias, matrix.first});
    if (product.gated && !product.biases.empty())
      throw std::runtime_error("the CPU kernel has no biases in a gated product: use backend xla");
    if (product.normed && op.reads != plan::Value::stream)
      throw std::runtime_error("the CPU kernel norms the stream, and nothing else, before a product: use backend xla");
    return product;
  };
  for (size_t m = 0; m < plan_.modules.size(); m++) {
    std::vector<Op>& module = modules_.emplace_back();
    for (const plan::Op& op : plan_.modules[m])
      if (const auto* product = std::get_if<plan::Product>(&op)) {
        module.push_back(made(*product));
      } else if (const auto* attend = std::get_if<plan::Attend>(&op)) {
        module.push_back(Attention{(int)m / 2, *attend});
      }  // the norm of the output is applied where the schedule reads it: exchange.cc
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

}  // namespace laneformer
