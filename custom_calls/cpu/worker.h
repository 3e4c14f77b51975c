// One worker thread of a session: its lanes, its weights in the order in which it reads them, and the steps from token
// to token. A Decoder owns the workers. The functions are in worker.cc, ops/, exchange.cc, head.cc, sample.cc and
// packing/; start reading at `step` in worker.cc.
//
// All workers run the same ops in the same order. Each computes its share: units of a product, chunks of attention, a
// part of the vocabulary. A worker that reads what others have written first waits until they have reached the same
// point (`barrier`). Invariant: one worker computes each sum, in an order that depends neither on the number of workers
// nor on the other positions of the pass. So a position's results have the same bits for any number of threads, and
// whether it is computed alone or with others.
#pragma once

#include <vector>

#include "ops/rotation.h"
#include "ops/streams.h"
#include "packing/bf12.h"
#include "state.h"

namespace laneformer {

struct Interval {
  int64_t first, last;  // first <= i < last
};

// The vectors that a product reads, one per position.
struct Vectors {
  const float* x;
  int64_t stride;  // floats
  int positions;
};

class Worker {
 public:
  Worker(DecodeState& state, int index);

  DecodeState& state;
  const plan::Plan& plan;
  const Kernels& kernels;
  const int index, workers;         // the worker's number, how many workers there are
  const int first_lane, last_lane;  // its lanes: first <= lane < last
  const Pass* pass = nullptr;
  int positions = 0;  // of the pass
  Rotations rotations;
  ResidualStreams streams;

  // Waits for all workers; `barrier_if_shared` only if some of them share a lane.
  void barrier() { wait_for(arrive()); }
  void barrier_if_shared() {
    if (state.lanes_shared) barrier();
  }

  bool owns(int lane) const { return lane * workers / plan.lanes == index; }  // whether it is the lane's first worker
  Interval part_of(int lane, int64_t count) const;  // its part of `count` things that a lane's workers share out

  // The memory of Op::scratch, from its front.
  Arena arena() const { return Arena(arena_); }
  Arena shared_arena() const { return Arena(state.scratch); }

  float* stream(int lane, int position) {
    return x_.data() + ((int64_t)(lane - first_lane) * kBlock + position) * plan.hidden_size;
  }
  float* output(int module, int lane, int position) const {
    const auto& outputs = state.of(plan::Value::output);
    return outputs.floats() + (((int64_t)module * plan.lanes + lane) * kBlock + position) * outputs.padded;
  }
  // Address of a lane's value at block position 0. stride: floats from one position to the next.
  float* target(plan::Value value, int module, int lane, int64_t* stride) const;

  // Products.
  Vectors vectors_of(const Product& product, int lane, int block = 0);
  int64_t multiply(const Product& product, const Share& share, int64_t tile, const Vectors& x, float* y, int64_t ldy);
  void add_biases(const Product& product, int lane, const Share& share, int positions, float* y, int64_t ldy) const;
  void activate(const Product& product, int64_t units, float* tiles, float* out) const;
  float* results() { return y_.data(); }  // [B][own rows of a product, gate and up], for `multiply`

  // The worker's shares of a product. It packs them, and multiplies them too unless the product has experts.
  const std::vector<Share>& shares(const Product& product) const { return packed_[product.number].shares; }
  char* weights(const Product& product) const {  // the first tile of its shares
    const Packed& packed = packed_[product.number];
    if (product.experts) return state.forms[product.number].experts.data + packed.first_unit * product.unit_bytes();
    return packed.apart.data ? packed.apart.data : stream_.data + packed.offset;
  }
  uint64_t read() const;  // reads the weights that it multiplies for one token, without computing; returns a sum
  int64_t packed_bytes() const;

  // Packing in 12 bits. A product's form is chosen once all its weights are packed; until then its tiles are apart
  // from the stream.
  void stage(const Product& product);                            // reserves that memory
  void count(const Product& product, Bf12Counts& counts) const;  // adds the weights of its shares
  void place(const Product& product, const Bf12Codes* codes);    // moves the tiles into the stream; null: as bf16
  struct Exceptions {
    std::vector<uint32_t> list, starts;  // by tile: where its exceptions begin in the list
  };
  // Writes its share of all experts' tiles to its place in `all`.
  Exceptions encode_experts(const Product& product, const Bf12Codes& codes, char* all) const;
  void name_head_tiles();                   // stores the places of the head's tiles, whenever they have moved
  void use_pieces(const Product& product);  // makes room for the vectors that the product's pieces read

  void reset();     // before `generate`, while all workers are idle
  void generate();  // runs the planned passes until the leading call has ended

  void trace(int64_t spans);
  const std::vector<Span>& spans() const { return spans_; }

 private:
  struct Stopped {};  // thrown to leave a pass after `fail`

  // Synchronisation. All workers reach the same points in the same order; a point's number is a count of them.
  uint32_t arrive();              // reaches the next point and returns its number
  void wait_for(uint32_t point);  // until all workers have reached it; throws Stopped after the session's timeout
  void delay();                   // for a random time, if the session was opened so

  // The positions of a pass through the model.
  void step();
  void module(int number);
  void head();
  void prepare(const Product& product, const Piece& piece, const Vectors& x);
  const char* tiles(const Product& product, int64_t tile) const;
  Bf12 bf12(const Product& product, int64_t tile) const;
  int64_t mapped_tiles(const Product& product) const;
  uint64_t read_tiles(const Product& product, const Share& share, int64_t tile) const;
  uint64_t read_experts(const Product& product) const;

  // The schedule.
  void keep_streams(int payload);
  float* kept_stream(int payload, int lane, int position) const;
  const float* share_of(int payload, int lane, int position, float* space);
  const float* total(int payload);
  void apply(int time);
  void send(int module);
  float* message(int position) { return total_.data() + position * plan.hidden_size; }
  void post(uint32_t tag, int64_t floats);
  void fetch(int from, uint32_t tag, int64_t floats);

  // The next tokens from the logits of the pass's rows.
  void sample();
  void await_masks();
  void apply_mask(const std::vector<uint32_t>& mask, float* z) const;
  void scale_logits();
  void adjust(const Adjustment& by, const SamplingOptions& s, float* z) const;
  float threshold(const SamplingOptions& s, int row, float best);
  void accept(const Run& run, const float* largest, float cost);
  static void count(Slot& slot, int rows, int drawn);
  void emit(Slot& slot, int row, int32_t token, float largest);
  void best_tokens(Slot& slot, const float* logits, float lse) const;

  template <class F>
  void each_row(const F& f) const {  // f(run, i) for each row i of each run
    for (int r = 0; r < pass->runs; r++)
      for (int i = 0; i < pass->run[r].rows; i++) f(pass->run[r], i);
  }

  void mark(int op, int layer, int64_t began);
  int64_t clock() const { return tracing_ ? now_ns() : 0; }

  Counter& progress_;
  struct Packed {  // the worker's shares of a product
    std::vector<Share> shares;
    int64_t first_unit = 0;         // its first unit, counted through all matrices
    int64_t offset = 0, bytes = 0;  // place in stream_; size as bf16 or in the session's dtype
    Region apart;                   // tiles outside of stream_: of a router, or until the form is chosen
    Exceptions bf12;
  };
  // f(tile, rows that are not padding) for each bf16 tile of its shares.
  template <class F>
  void each_tile(const Product& product, const F& f) const;
  std::vector<Packed> packed_;                // by product
  Region stream_;                             // its tiles of all products, in the order of the ops
  int64_t used_ = 0;                          // bytes of stream_ in use
  int64_t vocab_first_ = 0, vocab_last_ = 0;  // its part of the vocabulary: first <= token < last

  uint32_t point_ = 0;                   // the last point that it has reached
  std::vector<uint32_t> module_points_;  // by module: the point that a worker reaches once it has written its output
  uint32_t tags_ = 1, token_tags_ = 1;   // exchange by message: the next free tag, the first tag of this pass
  uint64_t random_;                      // state of the generator of delays

  // B: kBlock. Own lanes are first_lane <= lane < last_lane.
  std::vector<float> x_;             // [own lanes][B][hidden_size]: the stream
  std::vector<float> h_, a_;         // [B][widest]: normed vectors; merged heads
  std::vector<float> gathered_;      // [B][columns] in a piece's order of columns
  std::vector<float> prepared_;      // vectors as the kernels' products read them
  std::vector<float> y_;             // [B][own rows of a product, gate and up], or its logits
  Region arena_;                     // what ops take from `own` in Op::scratch
  std::vector<float> total_;         // [B][hidden_size]: a sum over the lanes, or a message
  std::vector<float> share_;         // [lanes][hidden_size]: the lanes' shares of a sum
  std::vector<const float*> added_;  // parts of a sum
  std::vector<float> factors_;       // on these parts
  std::vector<float> finals_;        // exchange by message: [rows][lanes][hidden_size]
  std::vector<float> received_;      // exchange by message: [sums][B][hidden_size]
  std::vector<uint8_t> has_;         // exchange by message: which sums are received
  std::vector<float> weights_of_;    // [vocab_size]: exponentials, for the filters

  std::vector<Span> spans_;
  size_t max_spans_ = 0;
  bool tracing_ = false;
};

}  // namespace laneformer
