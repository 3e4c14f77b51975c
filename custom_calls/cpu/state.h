// What the worker threads of a session share: the model, the places of its weights, the buffers between ops and the
// running calls. A Decoder owns one DecodeState, and every Worker has a reference to it.
//
// Invariant: between two points at which workers meet (worker.h), a part of a buffer is written by one worker, and no
// other worker reads it. Buffers therefore need no locks.
//
// Sizes are those of one lane unless they say otherwise. A product's rows are packed in tiles of kTile rows. A unit is
// what workers share out: a tile, or the tile of a gate and that of its up rows.
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
  int chaos_us = 0;                  // longest random delay at each exchange, for tests
  int timeout_ms = 60'000;           // how long to wait for a worker or a device
  std::string instructions;          // name of a set; empty: the best that this machine has
  bool bf12 = false;                 // pack bf16 weights in 12 bits, except products with many exceptions
  int slots = 1;                     // calls that may run together
  double most_slowdown = 1.5;        // time of a pass over that of one row, up to which other calls join it
};

// A worker's share of one matrix: its units first <= unit < last.
struct Share {
  int matrix;
  int64_t first, last;
};

// A matrix product as it is packed. The tiles of gate and up rows alternate.
struct Product {
  int number;  // in the model: first the layers' products in their order, then the head, then those that are `apart`
  plan::ProductName name;
  int matrices;           // in all lanes; expert or block e of lane l is number l * experts + e, or l * blocks + e
  int64_t rows, columns;  // of one matrix; a gate row and its up row count once
  bool gated;
  Activation activation;
  std::optional<float> limit;
  float up_offset;
  plan::Value reads, writes;
  plan::Norm norm;
  bool normed;
  Dtype dtype;  // of the packed weights, unless the product has another Form
  Activations activations;
  int experts = 0, used = 0;  // experts of a lane, and how many of them a position uses; 0: no experts
  bool summed = false;        // the results of a position's experts are summed, as in plan::Chosen
  int blocks = 0;             // blocks of a lane, each with its own matrix; 0: not block-diagonal
  int64_t block_step = 0;     // channels from one block's first to the next one's in the vector read
  bool apart = false;         // packed apart from the workers' streams: router, gate of a shared expert, mixture
  bool added = false;         // the result is added to the value written
  struct Part {               // one weight
    int weight;               // its number in the plan
    int64_t first;            // its first row in the product
  };
  std::vector<Part> parts;
  struct Bias {
    plan::Array vector;
    int64_t first;  // its first row in the product
  };
  std::vector<Bias> biases;

  int64_t units() const { return (rows + kTile - 1) / kTile; }  // of one matrix
  int unit_tiles() const { return gated ? 2 : 1; }
  int64_t tiles() const { return matrices * units() * unit_tiles(); }
  int64_t unit_bytes() const { return tile_bytes(dtype, columns) * unit_tiles(); }
  int64_t bytes() const { return tile_bytes(dtype, columns) * tiles(); }
  // Channels from one expert's first to the next one's, in the value read and in the value written: whole tiles.
  int64_t read_step() const { return (columns + kTile - 1) / kTile * kTile; }
  int64_t written_step() const { return units() * kTile; }
};

struct Router {
  Product logits;
  bool normalized;  // as in plan::Route
  // The op that defines the scores, if they are sigmoids or roots of softplus; neither: the softmax of the logits.
  std::optional<plan::SigmoidRoute> sigmoids = {};
  std::optional<plan::RootRoute> roots = {};
};
struct SigmoidRouter : Router {};
struct RootRouter : Router {};

struct Mixer {
  Product rows;  // makes the rows of MIXTURE
  plan::GatherStreams op;
};

struct SharedExpert {
  std::vector<Product> products;  // the last one is `added`
  std::optional<Product> gate;    // has one row
};

// An op of the plan as workers run it: a product as it is packed, an op that has such products, or the plan's op.
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

// Zeroed memory, reserved at once; the system adds a page when it is first written.
struct Region {
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

// Numbers of ops in a trace (`ops` of custom_calls/cpu/session.py). From kOps on they are those of
// laneformer.ops.TRACE_NAMES.
enum TraceOp { kEmbed, kExchange, kSample, kHead, kOps };

constexpr int kChunks = 18;  // chunks of a lane's keys at most; each is attended to by itself, then they are merged

// Entries in a chunk of compressed attention. It depends on the session alone, so a position's sums do not depend on
// the pass. The newest positions are a chunk by themselves.
inline int64_t entries_of_chunk(const plan::CompressedAttend& op, int64_t context) {
  constexpr int64_t kLeast = 2;  // blocks
  const int64_t all = op.ratio ? (context + *op.ratio - 1) / *op.ratio : 0;
  const int64_t most = op.index ? std::min<int64_t>(all, op.index->most) : all;
  return kLatentEntries * std::max(kLeast, (most + kLatentEntries * 16 - 1) / (kLatentEntries * 16));
}

// The tiles of a product that have one format and one order of columns. A product with a quantized matrix consists of
// such pieces.
struct Piece {
  int64_t first, step;  // tile j of the piece is tile first + j * step of a matrix
  int64_t count;        // tiles of the piece in one matrix
  const char* tiles;    // in the caller's memory, matrix by matrix; null: not quantized, in the worker's memory
  int64_t bytes;        // of `tiles`
  Quantized format;
  int64_t columns;             // of a tile
  std::vector<int32_t> order;  // by column: the entry of the vector that it multiplies, -1 for 0; empty: in order

  // How many of the piece's tiles are before this tile of a matrix.
  int64_t before(int64_t tile) const {
    const int64_t found = (tile - first + step - 1) / step;
    return found < 0 ? 0 : found < count ? found : count;
  }
  const char* of_matrix(int matrix) const { return tiles + matrix * count * tile_bytes(format, columns); }
};

// How a product's weights are packed: in 12 bits, in pieces, or else in the session's dtype.
struct Form {
  bool bf12 = false;
  std::vector<Piece> pieces;
  uint8_t table[16] = {};               // bf12: high byte of each code
  int64_t weights = 0, exceptions = 0;  // bf12: how many; counted also for a product that stays in 16 bits
  Region experts;                       // all tiles of a product with experts, unless the caller has them
  // bf12: all tiles in one place, the caller's memory or `experts`, their exceptions, and where those of each tile
  // begin. Null: each worker has its own tiles and exceptions.
  const char* mapped = nullptr;
  std::vector<uint32_t> list, starts;
  int64_t bytes = 0;  // of these tiles, list and starts, or of the pieces
  Bf12 tiles(int64_t first, int64_t columns) const {
    return {mapped + first * bf12_tile_bytes(columns), table, list.data(), starts.data() + first};
  }
};

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
  void embed(int32_t token, float* row) const;  // writes the token's row of the embedding table in float32
  void fail(const std::string& why);            // ends all running calls with this error

  const plan::Plan plan;
  const Options options;
  const InstructionSet& instructions;
  const Kernels* const kernels;
  const Dtype weights, cache;
  const Activations activations;
  const int threads;
  const bool lanes_shared;              // some workers share a lane, so that workers meet after every op
  const int64_t spin_ns;                // how long a waiting worker spins before it sleeps
  std::unique_ptr<Counter[]> progress;  // by worker: the point that it has reached

  const std::vector<plan::KeptArray> kept;  // in the order of a call's caches
  std::vector<int> kept_numbers;            // [layers][kinds]: index into `kept`; -1: the layer has none
  std::vector<std::vector<Op>> modules;     // by time; each layer has two
  std::vector<const Product*> products;     // by number
  Product head{};
  std::optional<Mixer> head_mixer;  // set if the model has several residual streams
  std::vector<bool> transposed;     // by weight: a small weight that is packed transposed, a convolution
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
  };
  // By Value: what products and DeltaNet write. ROUTES holds the logits of all experts.
  Held held[plan::count_of(plan::Value{})];
  Held& of(plan::Value value) { return held[(int)value]; }
  const Held& of(plan::Value value) const { return held[(int)value]; }
  Region streams;  // [sums][lanes][B][hidden_size]: streams kept for a sum with a mean; other sums do not touch theirs
  Region parts;    // [lanes][kChunks][B][heads][head_dim + 2], sized for the widest attention
  Region finals;   // [kMostRows][lanes][hidden_size]: what the head reads
  // Compressed attention with an index: scores of all entries [lanes][B][index_entries], and the numbers of the chosen
  // ones [lanes][B][index_most].
  int64_t index_entries = 0, index_most = 0;
  Region index_scores, index_numbers;
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
  std::string reason;  // of `fail`

 private:
  void check_sizes() const;
  void make_ops();
  void number_caches();
  void make_buffers();
};

int default_threads();  // the cores that this process may use

}  // namespace laneformer
