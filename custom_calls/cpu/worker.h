// One worker thread of a session: its lanes, its weights in the order in which it reads them, and the steps from token
// to token. A Decoder owns the workers. The functions are in worker.cc, ops/, exchange.cc, head.cc, sample.cc and
// packing/; start reading at `step` in worker.cc.
//
// All workers run the same ops in the same order. Each computes its share: units of a product, chunks of attention, a
// part of the vocabulary. A worker that reads what others have written first waits until they have reached the same
// point (`meet`). Invariant: one worker computes each sum, in an order that depends neither on the number of workers
// nor on the other positions of the pass. So a position's results have the same bits for any number of threads, and
// whether it is computed alone or with others.
#pragma once

#include <variant>
#include <vector>

#include "packing/bf12.h"
#include "state.h"

namespace laneformer {

class Worker {
 public:
  Worker(DecodeState& state, int index);

  // The worker's shares of a product. It packs them, and multiplies them too unless the product has experts.
  const std::vector<Share>& shares(const Product& product) const { return packed_[product.number].shares; }
  char* weights(const Product& product) const {  // the first tile of its shares
    const Packed& packed = packed_[product.number];
    if (product.experts) return d_.forms[product.number].experts.data + packed.first_unit * product.unit_bytes();
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
  struct Keys {       // positions first <= t < last of a lane's cache
    int lane;
    int64_t first, last;
  };

  // Synchronisation. All workers reach the same points in the same order; a point's number is a count of them.
  uint32_t arrive();              // reaches the next point and returns its number
  void wait_for(uint32_t point);  // until all workers have reached it; throws Stopped after the session's timeout
  void meet() { wait_for(arrive()); }
  void meet_if_shared() {
    if (d_.lanes_shared) meet();
  }
  void delay();  // for a random time, if the session was opened so

  // The positions of a pass through the model.
  void step();
  void turn(int p, int64_t position);
  void module(int number);
#define DECLARE(Kind) void run(const Prepared<plan::Kind>& op, int module);
  EACH_OP(DECLARE)
#undef DECLARE
  void head();
  struct Vectors {  // the vectors that a product reads, one per position
    const float* x;
    int64_t stride;  // floats
    int positions;
  };
  Vectors vectors_of(const Product& product, int lane, int block = 0);
  int64_t times(const Product& product, const Share& share, int64_t tile, const Vectors& x, float* y, int64_t ldy);
  void add_biases(const Product& product, int lane, const Share& share, int positions, float* y, int64_t ldy) const;
  void activate(const Product& product, int64_t units, float* tiles, float* out) const;
  void prepare(const Product& product, const Piece& piece, const Vectors& x);
  const char* tiles(const Product& product, int64_t tile) const;
  Bf12 bf12(const Product& product, int64_t tile) const;
  int64_t mapped_tiles(const Product& product) const;
  uint64_t read_tiles(const Product& product, const Share& share, int64_t tile) const;
  float* target(plan::Value value, int module, int lane, int64_t* stride) const;

  // A mixture of experts. A use is an expert that a position has chosen; its number is position * used + rank.
  struct Group {  // the uses of one expert
    int expert;
    int64_t first, last;  // members first <= m < last of its Routes
  };
  struct Routes {                  // the choices of a lane's positions
    std::vector<int32_t> experts;  // by use
    std::vector<float> shares;     // by use: factor on the expert's result
    std::vector<Group> groups;     // in the order of the experts' numbers
    std::vector<int32_t> members;  // uses, group by group
    std::vector<int32_t> places;   // by use: its index in `members`
  };
  void choose(const Product& product, int lane);
  void weigh(const float* logits, int experts, int used, int32_t* numbers, float* shares) const;
  void weigh_sigmoids(const float* logits, int experts, int used, int lane, int32_t* numbers, float* shares);
  void weigh_roots(const float* logits, int experts, int used, int lane, int p, int32_t* numbers, float* shares);
  void add(const Product& product, bool gated, int module);
  void run_experts(const Product& product, int module);
  void run_blocks(const Product& product, int module);
  void write_each(const Product& product, int lane, int module);
  void write_sum(const Product& product, int lane, int module);
  struct Part {
    int64_t first, last;
  };
  Part part_of(int lane, int64_t count) const;  // this worker's part of `count` things that a lane's workers share out
  Vectors read_by(const Routes& routes, const Group& group, int used, const Vectors& x, int64_t step, int64_t columns);
  uint64_t read_experts(const Product& product) const;
  void turn_pairs(float* x, const plan::RotaryIndex& rotary, int p) const;
  void turn_last(float* x, int64_t channels, const plan::RotaryIndex& rotary, int p, bool back = false) const;
  void rotate(float* heads, int count, const plan::Attend& op, const std::optional<plan::Norm>& norm, int lane, int p);
  static constexpr int64_t kNoWindow = INT64_MAX / 2;
  struct Unit {  // unit of attention: a run's queries for some heads of a lane, over one chunk of keys
    const Run* run;
    int chunk;
    Keys keys;
    int first_head, last_head;
  };
  std::vector<Unit>& share_units(int heads, int least);
  const std::vector<Unit>& cut_keys(int64_t window, int heads, int least);
  void queries(const plan::Attend& op, const Run& run, int lane);
  void attend(const plan::Attend& op, int layer, const Unit& unit, const Unit* next, int64_t window);
  void merge_chunks(int run, int lane, int p, int64_t head, int64_t heads, int64_t channels, float sink, float* a);
  struct Heads {  // the heads' results that a block of a product reads, at all positions
    int lane, block;
    int64_t columns;  // of the block
  };
  void merge_heads(const Heads& wanted, int64_t heads, int64_t channels, const float* sinks);
  void merge(const plan::Attend& op, const Heads& wanted);
  void queries(const plan::LatentAttend& op, const Unit& unit);
  void attend(const plan::LatentAttend& op, int layer, const Unit& unit, const Unit* next);
  void merge(const plan::LatentAttend& op, const Heads& wanted);
  void round_trip(float* x, int64_t n);

  // Compressed attention.
  void compress(const plan::Compressor& op, const Run& run, int lane, int layer, plan::Kept kind, plan::Kept tail);
  void keep_tail(const plan::Compressor& op, const Run& run, int lane, int layer, plan::Kept tail);
  void score_entries(const plan::CompressedAttend& op, int layer, const Run& run, int lane);
  void choose_entries(const plan::CompressedAttend& op, const Run& run, int lane);
  static int plain_positions(const plan::CompressedAttend& op, const Run& run);
  int32_t* chosen_entries(int lane, int p) {
    return (int32_t*)d_.index_numbers.data + ((int64_t)lane * kBlock + p) * d_.index_most;
  }
  float* scores_of_entries(int lane, int p) {
    return d_.index_scores.floats() + ((int64_t)lane * kBlock + p) * d_.index_entries;
  }
  void queries(const plan::CompressedAttend& op, const Unit& unit);
  void attend(const plan::CompressedAttend& op, int layer, const Unit& unit);
  void merge(const plan::CompressedAttend& op, const Heads& wanted);

  // Several residual streams.
  float* streams(int lane, int p) {
    return streams_.data() + ((int64_t)(lane - first_lane_) * kBlock + p) * m_.streams() * m_.hidden_size;
  }
  // Factors with which the output joins the streams: on the output [streams], between the streams [streams][streams].
  float* joins(int lane, int p) {
    return joins_.data() + ((int64_t)(lane - first_lane_) * kBlock + p) * m_.streams() * (m_.streams() + 1);
  }
  void gather(const plan::GatherStreams& op, int lane, int p, const float* parts);
  void join(int lane, int p, const float* output);

  // Gated DeltaNet.
  struct Recurrence {  // buffers for one key head
    explicit Recurrence(const plan::DeltaNet&);
    std::vector<float> inputs;            // [taps - 1 + B][channels]: what the convolution reads
    std::vector<float> mixed;             // [B][channels, padded]: its results, q, k and v
    std::vector<float> rows;              // [2 kTile][key_dim]: keys, then queries
    std::vector<float> products;          // [2 kTile][delta_width]: these rows times the matrices
    std::vector<float> likeness;          // [2 kTile][kTile]: these rows times the keys of a stretch
    std::vector<float> scaled;            // [kTile][value_dim, padded]: deltas times later decays
    std::vector<float> scratch;           // the matrices after positions that are not certain yet
    std::vector<float> unit, unit_query;  // [key_dim]: gains that make unit vectors of keys and queries
  };
  struct Stretch {                  // the entries of kTile positions
    float *keys, *deltas, *decays;  // [key_dim][kTile], [kTile][delta_width], [kTile][value heads of the key head]
  };
  struct Rows {                        // `count` block positions from `first` on, of a lane and key head
    int lane, head, first, count, at;  // at: place of the first one in its stretch
  };
  void recur(const plan::DeltaNet& op, int layer, const Run& run, int lane, int head);
  void read_inputs(const plan::DeltaNet& op, const Run& run, int lane, int head, char* kept);
  int64_t convolve(const plan::DeltaNet& op, const Run& run, int lane, int head);
  Stretch stretch_of(const plan::DeltaNet& op, float* entries, int64_t from) const;
  void advance(const plan::DeltaNet& op, const float* from, const Stretch& by, float* to);
  void respond(const plan::DeltaNet& op, const Rows& rows, const float* matrices, float* x, int64_t stride,
               const Stretch& stretch);
  void write_row(const plan::DeltaNet& op, const Rows& rows, int i, int head, float* values, const Stretch& stretch);

  // The schedule.
  void keep_streams(int payload);
  float* kept_stream(int payload, int lane, int position) const;
  const float* share_of(int payload, int lane, int position, float* space);
  const float* total(int payload);
  void apply(int time);
  void send(int module);
  float* message(int position) { return total_.data() + position * m_.hidden_size; }
  void post(uint32_t tag, int64_t floats);
  void fetch(int from, uint32_t tag, int64_t floats);

  // The next tokens from the logits of the pass's rows.
  void sample();
  void await_masks();
  void apply_mask(const std::vector<uint32_t>& mask, float* z) const;
  void temper();
  void adjust(const Adjustment& by, const SamplingOptions& s, float* z) const;
  float threshold(const SamplingOptions& s, int row, float best);
  void accept(const Run& run, const float* largest, float cost);
  static void count(Slot& slot, int rows, int drawn);
  void emit(Slot& slot, int row, int32_t token, float largest);
  void best_tokens(Slot& slot, const float* logits, float lse) const;

  template <class F>
  void each_row(const F& f) const {  // f(run, i) for each row i of each run
    for (int r = 0; r < pass_->runs; r++)
      for (int i = 0; i < pass_->run[r].rows; i++) f(pass_->run[r], i);
  }

  void mark(int op, int layer, int64_t began);
  int64_t clock() const { return tracing_ ? now_ns() : 0; }

  float* output(int module, int lane, int position) const {
    const auto& outputs = d_.of(plan::Value::output);
    return outputs.floats() + (((int64_t)module * m_.lanes + lane) * kBlock + position) * outputs.padded;
  }
  float* stream(int lane, int position) {
    return x_.data() + ((int64_t)(lane - first_lane_) * kBlock + position) * m_.hidden_size;
  }
  bool owns(int lane) const { return lane * count_ / m_.lanes == index_; }  // whether it is the lane's first worker

  DecodeState& d_;
  const plan::Plan& m_;
  const Kernels& k_;
  Counter& progress_;
  const int index_, count_;           // the worker's number, how many workers there are
  const int first_lane_, last_lane_;  // its lanes: first <= lane < last
  struct Packed {                     // the worker's shares of a product
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

  const Pass* pass_ = nullptr;
  int positions_ = 0;  // of the pass
  // The module's attention, whose chunks are merged where ATTENDED is read; none: ATTENDED is written already.
  std::variant<std::monostate, const plan::Attend*, const plan::LatentAttend*, const plan::CompressedAttend*> attended_;
  int chunks_[kMostRows] = {};  // by run: chunks of a lane's keys
  std::vector<Unit> units_;     // this worker's units of attention

  // B: kBlock. Own lanes are first_lane_ <= lane < last_lane_.
  std::vector<float> x_;                      // [own lanes][B][hidden_size]: the stream
  std::vector<float> streams_;                // [own lanes][B][streams][hidden_size], if there are several
  std::vector<float> joins_;                  // [own lanes][B][streams (streams + 1)]
  std::vector<float> rows_;                   // rows of MIXTURE at one position
  std::vector<float> joined_;                 // [streams][hidden_size]
  std::vector<const float*> parts_of_entry_;  // vectors, gates and biases of a compressed entry
  std::vector<int32_t> order_;                // numbers of entries, in the order in which an index sorts them
  std::vector<float> h_, a_;                  // [B][widest]: normed vectors; merged heads
  std::vector<float> gathered_;               // [B][columns] in a piece's order of columns
  std::vector<float> prepared_;               // vectors as the kernels' products read them
  std::vector<float> y_;                      // [B][own rows of a product, gate and up], or its logits
  std::vector<Routes> routes_;                // by own lane
  const Router* router_ = nullptr;            // the module's router, until its experts are chosen
  std::vector<float> choice_;                 // [experts]: scores by which experts are chosen; then those of groups
  std::vector<int32_t> groups_;               // the best numbers within a group, then of groups
  std::vector<float> own_;                    // [B][columns]: what the members of a group read
  Region each_;                               // [B used][own rows]: experts' results before they are summed
  std::unique_ptr<Recurrence> recurrence_;
  std::vector<float> q_, key_;  // [B][heads][head_dim], [kv_heads][head_dim]
  std::vector<float> space_;    // for attention to latents and for the index
  struct Turns {                // cos and sin of the angles, [B][pairs]
    std::vector<float> cos, sin;
  };
  std::vector<Turns> turns_;         // by rotary
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
