// What the worker threads of a decode kernel share: the model, where its weights lie, the buffers between ops, and the
// running call. Plain data: workers write it between the points at which they meet (worker.h).
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <variant>
#include <vector>

#include "../common/plan.h"
#include "exchange.h"
#include "kernels/kernels.h"
#include "kernels/quantized.h"
#include "schedule.h"
#include "sync.h"

namespace laneformer {

struct Options {
  int threads = 1;
  bool one_thread_per_lane = false;  // exchange by tagged messages, as between GPUs
  int chaos_us = 0;                  // random delays up to this at every exchange, for tests
  int timeout_ms = 60'000;           // for a worker or a device that is missing
  std::string instructions;          // empty: the best that this machine has
  bool bf12 = false;                 // bf16 weights in 12 bits, matrix by matrix where few are exceptions
  int slots = 1;                     // calls that may run together
  double most_slowdown = 1.5;        // of a pass, over a pass of one row, through other calls
};

// A range of units of one matrix: a worker's share of it.
struct Share {
  int matrix;
  int64_t first, last;
};

// A matrix product as it is packed: tiles of kTile rows, those of a gate and of its partner one after the other.
struct Product {
  int number;  // among the products of the model: those of layers in their order, the head's, those of routers
  plan::ProductName name;
  int matrices;           // each lane's, or expert or block e's of lane l at number l * experts + e
  int64_t rows, columns;  // of each, rows of a gate and its partner counted once
  bool gated;
  Activation activation;
  std::optional<float> limit;
  float up_offset;
  plan::Value reads, writes;
  plan::Norm norm;
  bool normed;
  Dtype dtype;  // of its weights, unless they have another form
  Activations activations;
  int experts = 0, used = 0;  // of a lane, and those of a position; 0: it is not made with experts
  bool summed = false;
  int blocks = 0;          // of a lane, each with its own matrix; 0: it is not block-diagonal
  int64_t block_step = 0;  // channels from block to block in what it reads
  bool apart = false;      // from the workers' streams: a router's, the gate of a shared expert, a mixture
  bool added = false;      // to what its target holds
  struct Part {            // a matrix
    int weight;            // its number in the plan
    int64_t first;         // row
  };
  std::vector<Part> parts;
  struct Bias {
    plan::Array vector;
    int64_t first;  // row
  };
  std::vector<Bias> biases;

  int64_t units() const { return (rows + kTile - 1) / kTile; }  // what workers share out: tiles, or pairs of them
  int unit_tiles() const { return gated ? 2 : 1; }
  int64_t tiles() const { return matrices * units() * unit_tiles(); }
  int64_t unit_bytes() const { return tile_bytes(dtype, columns) * unit_tiles(); }
  int64_t bytes() const { return tile_bytes(dtype, columns) * tiles(); }
  // Channels of one expert in what it reads and writes, which begin at a multiple of kTile.
  int64_t read_step() const { return (columns + kTile - 1) / kTile * kTile; }
  int64_t written_step() const { return units() * kTile; }
};

struct Router {
  Product logits;
  bool normalized;
  // Scores are the sigmoids of the logits, or roots; otherwise the logits.
  std::optional<plan::SigmoidRoute> sigmoids = {};
  std::optional<plan::RootRoute> roots = {};
};
struct SigmoidRouter : Router {};
struct RootRouter : Router {};

struct Mixer {
  Product rows;
  plan::GatherStreams op;
};

struct SharedExpert {
  std::vector<Product> products;  // the last one is added
  std::optional<Product> gate;    // of one row
};

// Ops as workers run them: a product as it is packed, others with such products, or as in the plan.
template <class T>
struct PreparedOp {
  using type = T;
};
template <>
struct PreparedOp<plan::Product> {
  using type = Product;
};
template <>
struct PreparedOp<plan::Route> {
  using type = Router;
};
template <>
struct PreparedOp<plan::SigmoidRoute> {
  using type = SigmoidRouter;
};
template <>
struct PreparedOp<plan::RootRoute> {
  using type = RootRouter;
};
template <>
struct PreparedOp<plan::GatherStreams> {
  using type = Mixer;
};
template <>
struct PreparedOp<plan::SharedExpert> {
  using type = SharedExpert;
};
template <class T>
using Prepared = typename PreparedOp<T>::type;
template <class... T>
std::variant<Prepared<T>...> prepared(const std::variant<T...>&);
using Op = decltype(prepared(plan::Op()));
static_assert(std::is_same_v<std::variant_alternative_t<0, Op>, Product>, "the others are numbered from 1 in a trace");

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

// Ops of a trace (custom_calls/cpu/session.py): those of layers follow, as in laneformer.ops.TRACE_NAMES.
enum TraceOp { kEmbed, kExchange, kSample, kHead, kOps };

constexpr int kChunks = 18;  // most parts of a lane's keys that are attended to apart

// Entries of compressed attention in a chunk, a function of the session alone; the newest positions are another chunk.
inline int64_t entries_of_chunk(const plan::CompressedAttend& op, int64_t context) {
  constexpr int64_t kLeast = 2;  // blocks
  const int64_t all = op.ratio ? (context + *op.ratio - 1) / *op.ratio : 0;
  const int64_t most = op.index ? std::min<int64_t>(all, op.index->most) : all;
  return kLatentEntries * std::max(kLeast, (most + kLatentEntries * 16 - 1) / (kLatentEntries * 16));
}

// Tiles of a product with quantized matrices, of those that have one format and one order of columns.
struct Piece {
  int64_t first, step;  // its tile j is tile first + j step of a matrix
  int64_t count;        // of a matrix
  const char* tiles;    // in the caller's memory, matrix by matrix; null: the worker's, in the session's dtype
  int64_t bytes;        // of these
  Quantized format;
  int64_t columns;             // of a tile
  std::vector<int32_t> order;  // the entry of the vector that each column multiplies, -1 for 0; empty: its own

  // How many of its tiles are before a tile of a matrix.
  int64_t before(int64_t tile) const {
    const int64_t found = (tile - first + step - 1) / step;
    return found < 0 ? 0 : found < count ? found : count;
  }
  const char* of_matrix(int matrix) const { return tiles + matrix * count * tile_bytes(format, columns); }
};

// How a product's weights are packed: in the session's dtype, unless it has bf12 or pieces.
struct Form {
  bool bf12 = false;
  std::vector<Piece> pieces;
  uint8_t table[16] = {};  // of bf12: high byte of each code
  int64_t weights = 0, exceptions = 0;
  Region experts;  // all tiles of a product with experts, unless they are in the caller's memory
  // All its tiles in the caller's memory, with the exceptions of bf12; null: each worker has its own.
  const char* mapped = nullptr;
  std::vector<uint32_t> list, starts;
  int64_t bytes = 0;  // of these
  Bf12 tiles(int64_t first, int64_t columns) const {
    return {mapped + first * bf12_tile_bytes(columns), table, list.data(), starts.data() + first};
  }
};

struct DecodeState {
  DecodeState(plan::Plan, const Options&);  // throws std::runtime_error for what this machine cannot run

  void* kept_of(const Call& call, plan::Kept kind, int layer, int lane) const {
    return call.caches[(int64_t)kept_numbers[layer * plan::kKept + (int)kind] * plan.lanes + lane];
  }
  const float* small(const plan::Array& vector, int lane) const {
    return small_weights.data() + vector.offset + lane * vector.stride;
  }
  void embed(int32_t token, float* row) const;  // a row of the embedding table in float32
  void fail(const std::string& why);            // ends the call for all workers

  const plan::Plan plan;
  const Options options;
  const InstructionSet& instructions;
  const Kernels* const kernels;
  const Dtype weights, cache;
  const Activations activations;
  const int threads;
  const bool lanes_shared;              // whether workers share lanes, and so meet after every op
  const int64_t spin_ns;                // before a waiting worker sleeps
  std::unique_ptr<Counter[]> progress;  // of each worker: the point that it has reached

  const std::vector<plan::KeptArray> kept;  // in the order of a call's caches
  std::vector<int> kept_numbers;            // [layers][kinds]; -1: the layer has none
  std::vector<std::vector<Op>> modules;     // two of each layer
  std::vector<const Product*> products;     // by number
  Product head{};
  std::optional<Mixer> head_mixer;  // where there are several residual streams
  std::vector<bool> transposed;     // whether a small weight is packed so, by number: a convolution's channels
  std::vector<float> ones;          // a gain
  std::vector<Form> forms;          // by the products' numbers

  // Weights that are not streamed.
  Region embedding;       // [vocab_size][hidden_size] as stored; empty when the head is the same matrix, or if it is
  Form mapped_embedding;  // in tiles of 12 bits
  Dtype embedding_dtype = Dtype::f32;
  std::vector<float> small_weights;
  std::vector<Bf12> head_tiles;  // of lane 0's matrix, in the workers' streams; `data` alone unless it is in 12 bits

  // Buffers. B: kBlock.
  struct Held {
    int64_t padded = 0;  // floats of a position
    Region data;         // [lanes][B][padded]; of outputs [modules][lanes][B][padded]
    float* floats() const { return data.floats(); }
  };
  Held held[plan::count_of(plan::Value{})];  // values that products write, of routes the experts' logits; DeltaNet's
  Held& of(plan::Value value) { return held[(int)value]; }
  const Held& of(plan::Value value) const { return held[(int)value]; }
  Region streams;  // [sums][lanes][B][hidden_size], touched for those with a mean
  Region parts;    // [lanes][kChunks][B][heads][head_dim + 2], of the widest attention
  Region finals;   // [kMostRows][lanes][hidden_size]
  // Of the entries that an index chooses: scores of all [lanes][B][index_entries], and numbers [lanes][B][index_most].
  int64_t index_entries = 0, index_most = 0;
  Region index_scores, index_numbers;
  Region logits, z;  // [kMostRows][vocab]: as the model makes them; with penalty and temperature
  struct Drawn {
    float largest, largest_z;
    uint64_t sum;
    Best best;
  };
  struct alignas(128) Packet {
    Drawn rows[kMostRows];
  };
  std::vector<Packet> packets;
  float least[kMostRows] = {};  // of the filters
  std::unique_ptr<Mailboxes> mail;

  // The running calls.
  Schedule schedule;
  const Slot* leader = nullptr;  // whose thread is worker 0
  Pass passes[2];                // in turns: worker 0 plans the next one while others finish
  std::atomic<int> stopped{0};
  std::mutex reason_lock;
  std::string reason;

 private:
  void check_sizes() const;
  void make_ops();
  void number_caches();
  void make_buffers();
};

int default_threads();  // the cores that this process may use

}  // namespace laneformer
