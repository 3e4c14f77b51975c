// One worker thread's part in the decode kernel: its lanes, its weights in streaming order, and the steps from token to
// token.
#pragma once

#include <variant>
#include <vector>

#include "packing/bf12.h"
#include "state.h"

namespace laneformer {

class Worker {
 public:
  Worker(DecodeState& state, int index);

  // What this worker packs of a product, which is what it multiplies unless that depends on a position's experts.
  const std::vector<Share>& shares(const Product& product) const { return packed_[product.number].shares; }
  char* weights(const Product& product) const {  // its first tile of these
    const Packed& packed = packed_[product.number];
    if (product.experts) return d_.forms[product.number].experts.data + packed.first_unit * product.unit_bytes();
    return packed.apart.data ? packed.apart.data : stream_.data + packed.offset;
  }
  uint64_t read() const;  // all that it streams for a token, without computing anything
  int64_t packed_bytes() const;

  // A product whose form is chosen when all its weights are in: until then its tiles are apart from the stream.
  void stage(const Product& product);
  void count(const Product& product, Bf12Counts& counts) const;
  void place(const Product& product, const Bf12Codes* codes);  // null: as bf16
  struct Exceptions {                                          // of bf12
    std::vector<uint32_t> list, starts;
  };
  Exceptions encode_experts(const Product& product, const Bf12Codes& codes, char* all) const;
  void name_head_tiles();                   // once the head's are in their places
  void use_pieces(const Product& product);  // makes room for their vectors

  void reset();
  void generate();

  void trace(int64_t spans);
  const std::vector<Span>& spans() const { return spans_; }

 private:
  struct Stopped {};
  struct Keys {  // positions first <= t < last of a lane's cache
    int lane;
    int64_t first, last;
  };

  // Meeting the others. All workers reach the same points in the same order.
  uint32_t arrive();
  void wait_for(uint32_t point);
  void meet() { wait_for(arrive()); }
  void meet_if_shared() {
    if (d_.lanes_shared) meet();
  }
  void delay();

  // The positions of a pass through the model.
  void step();
  void turn(int p, int64_t position);
  void module(int number);
#define DECLARE(Kind) void run(const Prepared<plan::Kind>& op, int module);
  EACH_OP(DECLARE)
#undef DECLARE
  void head();
  struct Vectors {
    const float* x;
    int64_t stride;
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

  // A mixture of experts.
  struct Group {  // of positions that use an expert
    int expert;
    int64_t first, last;  // members
  };
  struct Routes {                  // of a lane. A use is a position and a rank, position * used + rank
    std::vector<int32_t> experts;  // of each use
    std::vector<float> shares;
    std::vector<Group> groups;     // in the order of the experts' numbers
    std::vector<int32_t> members;  // uses, group by group
    std::vector<int32_t> places;   // of each use among the members
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
  Part part_of(int lane, int64_t count) const;  // of things in a lane that its workers share out
  Vectors read_by(const Routes& routes, const Group& group, int used, const Vectors& x, int64_t step, int64_t columns);
  uint64_t read_experts(const Product& product) const;
  void turn_pairs(float* x, const plan::RotaryIndex& rotary, int p) const;
  void turn_last(float* x, int64_t channels, const plan::RotaryIndex& rotary, int p, bool back = false) const;
  void rotate(float* heads, int count, const plan::Attend& op, const std::optional<plan::Norm>& norm, int lane, int p);
  static constexpr int64_t kNoWindow = INT64_MAX / 2;
  struct Unit {  // of attention
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
  struct Heads {  // of all positions of a lane: those that a block of a product reads
    int lane, block;
    int64_t columns;
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
  float* joins(int lane, int p) {  // what is written to each stream, then what is between them
    return joins_.data() + ((int64_t)(lane - first_lane_) * kBlock + p) * m_.streams() * (m_.streams() + 1);
  }
  void gather(const plan::GatherStreams& op, int lane, int p, const float* parts);
  void join(int lane, int p, const float* output);

  // Gated DeltaNet.
  struct Recurrence {  // space for a key head
    explicit Recurrence(const plan::DeltaNet&);
    std::vector<float> inputs;            // [taps - 1 + B][channels]
    std::vector<float> mixed;             // [B][channels, padded]
    std::vector<float> rows;              // [2 kTile][key_dim]: keys, then queries
    std::vector<float> products;          // [2 kTile][delta_width]: with the matrices
    std::vector<float> likeness;          // [2 kTile][kTile]: with the keys of a stretch
    std::vector<float> scaled;            // [kTile][value_dim, padded]
    std::vector<float> scratch;           // the matrices after positions that may be taken back
    std::vector<float> unit, unit_query;  // [key_dim]
  };
  struct Stretch {
    float *keys, *deltas, *decays;  // [key_dim][kTile], [kTile][delta_width], [kTile][value heads]
  };
  struct Rows {  // block positions from `first` on of a lane and key head; the first one's place in its stretch
    int lane, head, first, count, at;
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
  void adjust(const Adjustment& by, float temperature, float* z) const;
  float threshold(const Sampling& s, int row, float best);
  void accept(const Run& run, const float* largest, float cost);
  static void count(Slot& slot, int rows, int drawn);
  void emit(Slot& slot, int row, int32_t token, float largest);
  void best_tokens(Slot& slot, const float* logits, float lse) const;

  template <class F>
  void each_row(const F& f) const {  // f(its run, which of the run's rows)
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
  bool owns(int lane) const { return lane * count_ / m_.lanes == index_; }  // the first worker that has the lane

  DecodeState& d_;
  const plan::Plan& m_;
  const Kernels& k_;
  Counter& progress_;
  const int index_, count_;
  const int first_lane_, last_lane_;  // first <= lane < last
  struct Packed {
    std::vector<Share> shares;
    int64_t first_unit = 0;         // of the shares, counted through the matrices
    int64_t offset = 0, bytes = 0;  // in stream_; as bf16 or the session's dtype
    Region apart;                   // instead: of a router, or until the form is chosen
    Exceptions bf12;
  };
  template <class F>
  void each_tile(const Product& product, const F& f) const;  // f(its address, rows that are no padding)
  std::vector<Packed> packed_;                               // by the products' numbers
  Region stream_;
  int64_t used_ = 0;  // bytes of it
  int64_t vocab_first_ = 0, vocab_last_ = 0;

  uint32_t point_ = 0;
  std::vector<uint32_t> module_points_;  // the point at which its output of that module is written
  uint32_t tags_ = 1, token_tags_ = 1;   // of exchanges by message
  uint64_t random_;

  const Pass* pass_ = nullptr;
  int positions_ = 0;  // of the pass
  // The module's op whose parts are to be merged into ATTENDED; none: it is written already.
  std::variant<std::monostate, const plan::Attend*, const plan::LatentAttend*, const plan::CompressedAttend*> attended_;
  int chunks_[kMostRows] = {};  // into which it cut a lane's keys, of each run
  std::vector<Unit> units_;     // of these, the worker's

  std::vector<float> x_;                      // [own lanes][B][hidden_size]
  std::vector<float> streams_;                // [own lanes][B][streams][hidden_size], where there are several
  std::vector<float> joins_;                  // [own lanes][B][streams (streams + 1)]
  std::vector<float> rows_;                   // of a mixture
  std::vector<float> joined_;                 // [streams][hidden_size]
  std::vector<const float*> parts_of_entry_;  // vectors, gates and biases
  std::vector<int32_t> order_;                // of entries
  std::vector<float> h_, a_;                  // [B][widest]
  std::vector<float> gathered_;               // [B][columns], in the order of a piece
  std::vector<float> prepared_;               // as the products read it
  std::vector<float> y_;                      // [B][own gate and up rows], or the own logits
  std::vector<Routes> routes_;                // of the own lanes
  const Router* router_ = nullptr;            // the module's, until its experts are chosen
  std::vector<float> choice_;                 // [experts], by which they are chosen, and of groups of them
  std::vector<int32_t> groups_;               // the chosen ones
  std::vector<float> own_;                    // [B][columns], what the members of a group read
  Region each_;                               // [B used][own rows], before they are summed
  std::unique_ptr<Recurrence> recurrence_;
  std::vector<float> q_, key_;  // [B][heads][head_dim], [kv_heads][head_dim]
  std::vector<float> space_;    // of attention to latents
  struct Turns {                // of each position, [B][pairs]
    std::vector<float> cos, sin;
  };
  std::vector<Turns> turns_;         // of each rotary
  std::vector<float> total_;         // [B][hidden_size]
  std::vector<float> share_;         // [lanes][hidden_size]
  std::vector<const float*> added_;  // of a sum
  std::vector<float> factors_;       // of those
  std::vector<float> finals_;        // exchange by message: [rows][lanes][hidden_size]
  std::vector<float> received_;      // exchange by message: [sums][B][hidden_size]
  std::vector<uint8_t> has_;         // which of them
  std::vector<float> weights_of_;    // [vocab_size], for the filters

  std::vector<Span> spans_;
  size_t max_spans_ = 0;
  bool tracing_ = false;
};

}  // namespace laneformer
