// A decode session: one model, packed for this machine's worker threads, and calls that each generate a whole answer.
// api.cc opens sessions and makes their calls. decoder.cc has the threads and the start of a call, packing/ has `pack`
// and `map`, worker.h has what each thread computes, machine.cc has the functions about the machine.
//
// Invariant: worker threads act only inside a job that `on_all` gives them, and `on_all` returns once all of them are
// idle again. One thread at a time calls it, as worker 0: while calls run, the leader of schedule.h. So that thread may
// change the state before and after a job without locks. Other threads reach a running call only through its Slot.
#pragma once

#include <functional>

#include "state.h"

namespace laneformer {

class Worker;
struct Bf12Codes;

class Decoder {
 public:
  Decoder(plan::Plan, const Options&);  // throws std::runtime_error for a plan or option that cannot run here
  ~Decoder();

  // Packs the weight with this number in the plan. data: all its elements, lane by lane; count: how many. Returns the
  // index of the first element that is not finite as packed, or -1. Throws std::runtime_error unless the model has a
  // weight of this number and size; in 12 bits also for a weight that is packed already.
  int64_t pack(int weight, const void* data, int64_t count, Dtype dtype);
  // Uses all tiles of a product in 12 bits (packing/bf12.h) without copying them: they must outlive the session.
  // product: its number, or kEmbedding; it must not be packed yet. tiles: lane by lane, `bytes` bytes. table: [8], the
  // value of e >> 1 of each code. exceptions: [count], an end after those of each tile. Throws std::runtime_error for
  // another size.
  void map(int product, const char* tiles, int64_t bytes, const uint8_t* table, const uint32_t* exceptions,
           int64_t count);
  // The same for a product with quantized matrices (kernels/quantized.h), never the embedding. Together, the pieces
  // have all its tiles.
  void map(int product, std::vector<Piece> pieces);
  static constexpr int kEmbedding = -1;
  // Seconds in which all workers read their weights once without computing: the least time of a pass.
  double read_pass();
  // Generates the whole answer of a call, together with the running calls of other slots. Throws std::runtime_error
  // when a worker times out, and std::invalid_argument when the recurrent state is that of another position.
  End run(const Call&, int slot = 0);
  // For each of these numbers of rows, the seconds of a pass that draws from them: the fastest of several rounds of
  // `passes` passes. Throws std::runtime_error for passes that do not fit the context.
  std::vector<double> time_passes(const std::vector<int>& rows, int passes);

  // Throws std::invalid_argument for a request with tokens outside the vocabulary, or with a source that no call can
  // copy from.
  void check(const Request&) const;

  // Gives a masked call the mask of its token `number`: words [count] have one bit for each token of the vocabulary,
  // set if the call may draw it; at least one must be set. Throws std::runtime_error unless `number` is the next token
  // and has no mask yet.
  void give_mask(int32_t number, const uint32_t* words, int64_t count, int slot);

  // Waits until the call of a slot has drawn more than `have` tokens or has ended, for at most timeout_ms. Returns how
  // many tokens it has drawn.
  int32_t wait(int32_t have, int timeout_ms, int slot = 0);
  Schedule& schedule() { return state_.schedule; }
  Slot& slot(int number = 0) { return state_.schedule.slot(number); }

  const plan::Plan& plan() const { return state_.plan; }
  const Options& options() const { return state_.options; }
  const std::vector<plan::KeptArray>& kept() const { return state_.kept; }
  bool recurrent() const;  // whether a layer keeps a state of the whole text, which cannot be cut at a position
  const char* instructions() const { return state_.instructions.name; }
  int threads() const { return (int)workers_.size(); }
  int64_t packed_bytes() const;
  // weights, exceptions: in 12 bits, read per token. matrices: products in 12 bits; left: products left in 16 bits
  // because of too many exceptions.
  struct Bf12Weights {
    int64_t weights = 0, exceptions = 0, matrices = 0, left = 0;
  };
  Bf12Weights bf12_weights() const;
  void trace(int64_t spans_per_worker);
  const std::vector<Span>& spans(int worker) const;

 private:
  void check_token(int64_t token, int32_t least) const;
  void check_states(const Call&) const;
  void find_places();
  void lead(const Slot& slot);
  void on_all(const std::function<void(int)>&);
  struct Rows {  // the place of a weight's matrix in a product
    const Product* product;
    int64_t first;  // its first row there
    bool second;    // it is the up matrix of a gated product
  };
  int64_t pack_rows(const Rows&, const plan::Weight&, const void* data, Dtype dtype);
  void stage(int weight);
  void settle_form(int weight);
  void choose_form(const Product& product);
  void encode_experts(const Product& product, const Bf12Codes& codes, Form& form);

  DecodeState state_;
  std::vector<std::vector<Rows>> places_;  // by weight: its places, none for vectors
  std::vector<std::vector<int>> missing_;  // by product that may become bf12: weights that are not packed yet

  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<std::thread> threads_;
  Counter work_;                     // number of the newest job; raised to start it
  std::unique_ptr<Counter[]> idle_;  // by worker: number of the last job that it has done
  std::function<void(int)> job_;
  bool closing_ = false;
  uint32_t jobs_ = 0;
};

#if defined(__x86_64__)
// Whether AMX can be used: all must hold. They are called in this order, up to the first that does not.
struct AmxQueries {
  bool (*in_processor)();
  bool (*in_system)();  // the system saves the tile registers of its threads
  bool (*permitted)();  // the system permits them to this process; makes the request
  bool (*agrees)();     // a trial product has the same bits for one position and several
};
extern const AmxQueries kAmxQueries;                                  // of this machine
std::vector<InstructionSet> instruction_sets(const AmxQueries& amx);  // what this machine runs: best first, AMX last
#endif

// Bytes per second with which the threads read `bytes` bytes once. The buffer stays allocated.
double read_bandwidth(int64_t bytes, int threads);
struct Way {  // a way to multiply bf16 weights by one position
  const char* instructions;
  bool bf12;  // weights in 12 bits
};
// How many times as fast as `over` one way is, with weights read from memory. Negative if the shortest times do not
// agree, 0 if this machine does not have the instructions.
double speedup(const Way&, const Way& over, int threads);
// Float32 multiply-adds per second, when each thread makes `count` of them.
double arithmetic_peak(int64_t count, int threads);

}  // namespace laneformer
