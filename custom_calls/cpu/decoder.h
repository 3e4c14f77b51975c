// The persistent decode kernel: a model packed for this machine's worker threads, and one call that generates a whole
// answer.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "../common/plan.h"
#include "exchange.h"
#include "kernels/kernels.h"
#include "sync.h"

namespace laneformer {

struct Options {
  int threads = 1;
  bool one_thread_per_lane = false;  // exchange by tagged messages, as between GPUs
  int chaos_us = 0;                  // random delays up to this at every exchange, for tests
  int timeout_ms = 60'000;           // for a worker or a device that is missing
  std::string instructions;          // empty: the best that this machine has
};

struct Sampling {
  float temperature, top_p, min_p, repetition_penalty;
  int32_t top_k;
  uint32_t key[2];
};

struct Call {
  std::vector<int32_t> prompt;
  int64_t start = 0;  // position of prompt[0]; earlier ones are in the cache
  int32_t limit = 0, top = 0;
  Sampling sampling{};
  std::vector<int32_t> stops;
  std::vector<void*> keys, values;  // [layers][lanes] -> [t][kv_heads][head_dim]
  uint8_t* seen = nullptr;          // [vocab], updated
  float* logits = nullptr;          // [limit][vocab] or null: for tests
};

enum class End : int32_t { length = 0, stop = 1, cancelled = 2, failed = 3 };

// A range of tiles of one lane: a worker's share of a matrix.
struct Share {
  int lane;
  int64_t first, last;
};

// A matrix product as it is packed: tiles of kTile rows, those of a gate and of its partner one after the other.
struct Product {
  int number, name;       // number: among the products of the model, in the order of the stream; the head's is the last
  int lanes;              // that have a matrix
  int64_t rows, columns;  // of each, rows of a gate and its partner counted once
  bool gated;
  Activation activation;
  plan::Value reads, writes;
  plan::Norm norm;
  bool normed;
  struct Bias {
    plan::Vector vector;
    int64_t first;  // row
  };
  std::vector<Bias> biases;

  int64_t units() const { return (rows + kTile - 1) / kTile; }  // what workers share out: tiles, or pairs of them
  int64_t unit_bytes(Dtype dtype) const { return tile_bytes(dtype, columns) * (gated ? 2 : 1); }
};

struct Attention {
  int layer;  // whose cache it reads and writes
  plan::Attend op;
};

using Op = std::variant<Product, Attention>;

struct Region {  // memory that grows page by page as it is written
  Region() = default;
  explicit Region(int64_t bytes);
  ~Region();
  Region(Region&& other) noexcept : data(other.data), bytes(other.bytes) { other.data = nullptr; }
  Region& operator=(Region&& other) noexcept;
  char* data = nullptr;
  int64_t bytes = 0;
  float* floats() const { return (float*)data; }
};

struct Span {  // one op of one worker, for the trace
  int32_t op, layer;
  int64_t begin_ns, end_ns;
};

class Worker;

constexpr int kBlock = 48;   // positions of a prompt that go through the model together: 6 and 24 divide it
constexpr int kChunks = 18;  // parts of a lane's keys that are attended to apart

class Decoder {
 public:
  // Ops of a trace (custom_calls/cpu/session.py): a layer's products follow, by laneformer.ops.ProductName.
  enum TraceOp { kEmbed, kAttend, kExchange, kSample, kHead, kProducts };

  Decoder(plan::Plan, const Options&);  // throws std::runtime_error for what this machine or this code cannot run
  ~Decoder();

  // Copies a weight, by its number in the plan, into its place; count: its elements, those of all lanes. Throws
  // std::runtime_error for one that the model does not have.
  // Returns the place of the first value that is not finite, -1 if all are.
  int64_t pack(int weight, const void* data, int64_t count, Dtype dtype);
  double
  read_pass();  // seconds in which all workers read their weights once, and do nothing else: the bound of decoding
  End run(const Call&);  // the whole answer; throws std::runtime_error when a worker does not come

  // Streaming: what the running call has drawn so far, and telling it to end.
  void begin();
  void settle();  // after a call that was refused
  int32_t wait(int32_t have,
               int timeout_ms);  // tokens drawn; returns early when there are more than `have` or the call has ended
  bool finished() const { return done_.load(std::memory_order_acquire); }
  int32_t drawn() const { return (int32_t)count_.value.load(std::memory_order_acquire); }
  void cancel() { cancel_.store(1, std::memory_order_relaxed); }

  std::vector<int32_t> tokens, top_tokens;  // of the running call, readable up to `drawn`
  std::vector<float> logprobs, top_logprobs;
  std::vector<int64_t> times_ns;

  const plan::Plan& plan() const { return plan_; }
  const Options& options() const { return options_; }
  const plan::Attend& attend_of(int layer) const;  // whose keys and values are the layer's cache
  const Kernels& kernels() const { return *kernels_; }
  int threads() const { return (int)workers_.size(); }
  int64_t packed_bytes() const;
  void trace(int64_t spans_per_worker);
  const std::vector<Span>& spans(int worker) const;
  int64_t absorbed() const { return absorbed_; }

 private:
  friend class Worker;

  void make_ops();
  void on_all(const std::function<void(int)>&);
  void fail(const std::string& why);
  struct Rows {  // where a matrix lies
    const Product* product;
    int64_t first;  // row
    bool second;    // the partner of a gate
  };
  int64_t pack_rows(const Rows&, const plan::Weight&, const void* data, Dtype dtype);
  void embed(int32_t token, float* row) const;
  const float* small(const plan::Vector& vector, int lane) const {
    return small_.data() + vector.offset + lane * vector.stride;
  }

  const plan::Plan plan_;
  const Options options_;
  const Kernels* kernels_;
  std::vector<std::vector<Op>> modules_;  // two of each layer
  std::vector<const Product*> products_;  // by number
  Product head_{};
  std::vector<std::vector<Rows>> places_;  // of each weight, if it is a matrix

  bool lanes_shared_;  // whether workers share lanes, and so meet after every op
  int64_t output_padded_ = 0, hidden_padded_ = 0, projected_padded_ = 0;  // floats of a position, over all layers
  Dtype weights_, cache_;
  Activations activations_;

  // Weights that are not streamed.
  Region embedding_;  // [vocab_size][hidden_size] as stored; empty when the head is the same matrix
  std::vector<float> small_;
  Dtype embedding_dtype_ = Dtype::f32;

  // Shared between workers. B: kBlock.
  Region outputs_;     // [modules][lanes][B][output_padded]
  Region streams_;     // [sums][lanes][B][hidden_size], touched for those with a mean
  Region projected_;   // [lanes][B][projected_padded]
  Region parts_;       // [lanes][kChunks][B][heads][head_dim + 2], of the widest attention
  Region hiddens_;     // [lanes][B][hidden_padded]
  Region finals_;      // [lanes][hidden_size]
  Region logits_, z_;  // [vocab]: as the model makes them; with penalty and temperature
  struct alignas(128) Packet {
    float largest, largest_z;
    uint64_t sum;
    Best best;
  };
  std::vector<Packet> packets_;
  float least_ = 0;  // of the filters
  int cancelled_[3] =
      {};  // as worker 0 saw it, so that all end together: after blocks of the prompt, in turns, and after tokens
  int64_t absorbed_ = 0;  // tokens of the prompt that are in the cache
  std::unique_ptr<Mailboxes> mail_;

  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<std::thread> threads_;
  Counter work_;  // raised when there is something to do
  std::unique_ptr<Counter[]> idle_;
  std::function<void(int)> job_;
  bool closing_ = false;
  uint32_t jobs_ = 0;

  std::mutex running_;
  const Call* call_ = nullptr;
  std::atomic<int> stopped_{0};
  std::mutex reason_lock_;
  std::string reason_;
  Counter count_;
  std::atomic<int> done_{1};
  std::atomic<int> cancel_{0};
  bool armed_ = false;
  End end_ = End::length;
  int64_t spin_ns_ = kSpinNs;  // before a waiting worker sleeps
};

int default_threads();                               // the cores that this process may use
double read_bandwidth(int64_t bytes, int threads);   // bytes per second of one pass over a buffer that stays allocated
double arithmetic_peak(int64_t count, int threads);  // float32 multiply-adds per second, each thread making `count`

}  // namespace laneformer
