// What the worker threads of a session share: the model, the places of its weights, the buffers between ops and the
// running calls. A Decoder owns one DecodeState, and every Worker has a reference to it.
//
// Invariant: between two points at which workers meet (worker.h), a part of a buffer is written by one worker, and no
// other worker reads it. Buffers therefore need no locks.
//
// Sizes are those of one lane unless they say otherwise.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "../common/plan.h"
#include "exchange.h"
#include "kernels/kernels.h"
#include "memory.h"
#include "ops/op.h"
#include "products/product.h"
#include "schedule.h"
#include "sync.h"

namespace laneformer {

struct Options {
  int threads = 1;
  bool one_thread_per_lane = false;  // exchange by tagged messages, as between GPUs
  int chaos_us = 0;                  // longest random delay at each exchange, for tests
  int timeout_ms = 60'000;           // how long to wait for a worker or a device
  std::string instructions;          // name of a set; empty: the best that this machine has
  bool bf12 = false;                 // pack bf16 weights in 12 bits, except products with many exceptions
  int slots = 1;                     // calls that may run together
  double most_slowdown = 1.5;        // time of a pass over that of one row, up to which other calls join it
};

struct Interval {
  int64_t first, last;  // first <= i < last
};

// A worker's lanes: first_lane <= lane < last_lane. Several workers share a lane, or a worker has several lanes.
struct Lanes {
  Lanes(int lanes, int worker, int of)
      : index(worker),
        workers(of),
        all_lanes(lanes),
        first_lane(lanes * index / workers),
        last_lane((lanes * (index + 1) + workers - 1) / workers) {}

  bool owns(int lane) const { return lane * workers / all_lanes == index; }  // whether it is the lane's first worker
  Interval part_of(int lane, int64_t count) const;  // its part of `count` things that a lane's workers share out

  const int index, workers;  // the worker's number, how many workers there are
  const int all_lanes, first_lane, last_lane;
};

struct Span {  // one op of one worker, for the trace
  int32_t op, layer;
  int64_t begin_ns, end_ns;
};

// A worker's spans of the running or last call; none unless `start` was called.
class Trace {
 public:
  void start(int64_t spans) {  // spans: at most
    most_ = spans;
    spans_.clear();
    spans_.reserve(spans);
  }
  int64_t clock() const { return most_ > 0 ? now_ns() : 0; }
  void mark(int op, int layer, int64_t began) {
    if ((int64_t)spans_.size() < most_) spans_.push_back({op, layer, began, now_ns()});
  }
  const std::vector<Span>& spans() const { return spans_; }

 private:
  std::vector<Span> spans_;
  int64_t most_ = 0;
};

// Numbers of ops in a trace (`ops` of custom_calls/cpu/session.py). From kOps on they are those of
// laneformer.ops.TRACE_NAMES.
enum TraceOp { kEmbed, kExchange, kSample, kHead, kOps };

struct DecodeState {
  static constexpr int kKinds = plan::count_of(plan::Kept{});

  DecodeState(plan::Plan, const Options&);  // throws std::runtime_error for a plan or option that cannot run here

  // A call's array of this kind, of one layer and lane.
  void* kept_of(const Call& call, plan::Kept kind, int layer, int lane) const {
    return call.caches[(int64_t)kept_numbers[layer * kKinds + (int)kind] * plan.lanes + lane];
  }
  const float* small(const plan::Array& vector, int lane) const {
    return small_weights.data() + vector.offset + lane * vector.stride;
  }
  void embed(int32_t token, float* row) const;   // writes the token's row of the embedding table in float32
  void fail(const std::string& why);             // ends all running calls with this error
  void hold(plan::Value value, int64_t floats);  // makes room for what an op writes, before the buffers are made

  const plan::Plan plan;
  const Options options;
  const InstructionSet& instructions;
  const Kernels* const kernels;
  const Dtype weights, cache;
  const Activations activations;
  const int threads;
  const bool lanes_shared;              // some workers share a lane, so that workers meet after every op
  std::unique_ptr<Counter[]> progress;  // by worker: the point that it has reached

  const std::vector<plan::KeptArray> kept;                // in the order of a call's caches
  std::vector<int> kept_numbers;                          // [layers][kinds]: index into `kept`; -1: the layer has none
  std::vector<std::vector<std::unique_ptr<Op>>> modules;  // by time; each layer has two
  std::vector<const Product*> products;                   // by number
  Product head{};
  std::unique_ptr<Op> head_gather;  // how the head reads several residual streams; null: there is one stream
  std::vector<bool> transposed;     // by weight: whether this vector is packed transposed
  std::vector<float> ones;          // for norms without a gain
  std::vector<Form> forms;          // by product

  // Weights outside the workers' streams.
  Region embedding;       // [vocab_size][hidden_size] as stored; empty if the head is the same matrix or it is mapped
  Form mapped_embedding;  // the table as the caller's tiles in 12 bits
  Dtype embedding_dtype = Dtype::f32;
  std::vector<float> small_weights;
  std::vector<Bf12> head_tiles;  // by tile of lane 0's head matrix: its place; only `data` unless in 12 bits

  // Buffers. B: kBlock.
  struct Held {
    int64_t padded = 0;  // floats of a position
    Region data;         // [lanes][B][padded]; OUTPUT: [modules][lanes][B][padded]
    float* floats() const { return data.floats(); }
    float* row(int lane, int p) const { return floats() + ((int64_t)lane * kBlock + p) * padded; }
  };
  // By Value: what ops write. ROUTES holds the logits of all experts.
  Held held[plan::count_of(plan::Value{})];
  Held& of(plan::Value value) { return held[(int)value]; }
  const Held& of(plan::Value value) const { return held[(int)value]; }
  Region streams;  // [sums][lanes][B][hidden_size]: streams kept for a sum with a mean; other sums do not touch theirs
  Region scratch;  // what ops take from `shared` in Op::scratch
  Region finals;   // [kMostRows][lanes][hidden_size]: what the head reads
  Region logits, z;            // [kMostRows][vocab_size]: from the head; with penalties, biases, temperature and mask
  struct Drawn {               // what a worker found in its part of the vocabulary, for one row
    float largest, largest_z;  // largest logit and z
    uint64_t sum;              // of exp(logit - largest logit of all workers), in units of 2^-40
    Best best;
  };
  struct alignas(128) Packet {
    Drawn rows[kMostRows];
  };
  std::vector<Packet> packets;      // by worker
  float least[kMostRows] = {};      // least z that the filters keep
  std::unique_ptr<Mailboxes> mail;  // set with one thread per lane

  // The running calls.
  Schedule schedule;
  const Slot* leader = nullptr;  // the slot whose thread is worker 0
  Pass passes[2];                // alternate: worker 0 plans one while the other workers finish the other
  std::atomic<int> stopped{0};   // set by `fail`
  std::mutex reason_lock;
  std::string reason;     // of `fail`
  const Waiting waiting;  // how workers wait for each other

 private:
  void make_ops();
  void number_caches();
  void make_buffers();
};

int default_threads();  // the cores that this process may use

}  // namespace laneformer
