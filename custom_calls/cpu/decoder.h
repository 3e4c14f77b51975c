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
#include <vector>

#include "exchange.h"
#include "kernels.h"
#include "sync.h"

namespace laneformer {

extern "C" {

// Shapes, dtypes and the schedule table, as Python writes them (custom_calls/session.py mirrors this struct). Heads,
// kv_heads and ff are those of one lane.
struct LaneformerModel {
  int32_t layers, lanes, hidden, heads, kv_heads, head_dim, ff, vocab, context;
  int32_t head_type;  // 0: one head over the lanes' mean (or norm of their sum), 1: over all lanes end to end, 2: each
                      // lane a slice of the vocabulary
  int32_t norm_of_sum, tied_head, lane_norms, lane_final_norm, qkv_bias, qk_norm;
  int32_t weight_dtype, cache_dtype, rounded_activations;
  float norm_eps, rope_factor;
  const float* rope_frequencies;  // [head_dim / 2], radians per position
  const int32_t* windows;         // [layers], 0 for none
  const int32_t* events;          // the schedule, see read_events
  const float* event_weights;
  int32_t num_events;
};

struct LaneformerOptions {
  int32_t threads;
  int32_t one_thread_per_lane;  // exchange by tagged messages, as between GPUs
  int32_t chaos_us;             // random delays up to this at every exchange, for tests
  int32_t timeout_ms;           // for any worker or device that does not come
  const char* instructions;     // null: the best that this machine has
};
}

struct Part {
  int module;
  float weight;
};

// What happens to a lane's stream at one time of the schedule.
struct Event {
  enum Kind { own, landing } kind;
  int payload;              // of a landing: its index among the payloads
  int module;               // own: whose output
  float weight;             // own: its scale
  std::vector<Part> apart;  // landing: own parts that the lane adds by itself, taken out again
};

// One sum over the lanes: of weighted module outputs, the first `width` channels, perhaps with the mean of the streams.
struct Payload {
  std::vector<Part> parts;
  int width, complete_at;
  bool stream_mean;
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

constexpr int kBlock = 32;   // positions of a prompt that go through the model together
constexpr int kChunks = 18;  // parts of a lane's keys that are attended to apart

class Decoder {
 public:
  enum Op { kQkv, kOut, kGateUp, kDown, kHead, kOps };  // the matrix products of a layer in their order, and the head

  Decoder(const LaneformerModel&, const LaneformerOptions&);
  ~Decoder();

  // Copies one weight into its place; `name` and `layer` as in laneformer's parameter table, `count` its elements.
  // Throws std::runtime_error for one that the model does not have.
  void pack(const std::string& name, int layer, const void* data, int64_t count, Dtype dtype);
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

  const LaneformerModel& model() const { return model_; }
  const LaneformerOptions& options() const { return options_; }
  const Kernels& kernels() const { return *kernels_; }
  int threads() const { return (int)workers_.size(); }
  int64_t packed_bytes() const;
  void trace(int64_t spans_per_worker);
  const std::vector<Span>& spans(int worker) const;
  int64_t absorbed() const { return absorbed_; }

 private:
  friend class Worker;

  void read_events();
  void on_all(const std::function<void(int)>&);
  void fail(const std::string& why);
  int lanes(Op op) const;                                                // that have a matrix of their own
  int64_t rows(Op op) const;                                             // of one of them
  int64_t columns(Op op) const;                                          // of one of them
  int64_t units(Op op) const { return (rows(op) + kTile - 1) / kTile; }  // what is shared out: tiles, or pairs of them
  int64_t unit_bytes(Op op) const;
  void pack_rows(Op op, int layer, int64_t first, int64_t count, bool second, const void* data, Dtype dtype);
  void embed(int32_t token, float* row) const;

  LaneformerModel model_;
  LaneformerOptions options_;
  const Kernels* kernels_;
  std::vector<float> frequencies_;
  std::vector<int32_t> windows_, events_words_;
  std::vector<std::vector<Event>> events_;  // by time
  std::vector<Payload> payloads_;

  bool lanes_shared_;  // whether workers share lanes, and so meet after every op
  int64_t hidden_padded_, ff_padded_, qkv_padded_;
  Dtype weights_, cache_;
  Activations activations_;

  // Weights that are not streamed.
  Region embedding_;  // [vocab][hidden] as stored; empty when the head is the same matrix
  std::vector<float> attention_norms_, ffn_norms_, final_norm_, biases_, q_norms_, k_norms_;
  Dtype embedding_dtype_ = Dtype::f32;

  // Shared between workers. B: kBlock.
  Region outputs_;     // [2 layers][lanes][B][hidden_padded]
  Region streams_;     // [payloads][lanes][B][hidden], touched for those with a mean
  Region qkv_;         // [lanes][B][qkv_padded]
  Region parts_;       // [lanes][kChunks][B][heads][head_dim + 2]
  Region hiddens_;     // [lanes][B][ff_padded]
  Region finals_;      // [lanes][hidden]
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
  int spins_ = 4000;  // before a waiting worker sleeps
};

int default_threads();                              // the cores that this process may use
double read_bandwidth(int64_t bytes, int threads);  // bytes per second of one pass over a buffer that stays allocated

}  // namespace laneformer
