// The persistent decode kernel: a model packed for this machine's worker threads, and one call that generates a whole
// answer.
#pragma once

#include <functional>

#include "state.h"

namespace laneformer {

class Worker;
struct Bf12Codes;

class Decoder {
 public:
  Decoder(plan::Plan, const Options&);  // throws std::runtime_error for what this machine or this code cannot run
  ~Decoder();

  // Copies a weight, by its number in the plan, into its place; count: its elements, those of all lanes. Throws
  // std::runtime_error for one that the model does not have.
  // Returns the place of the first value that is not finite, -1 if all are.
  int64_t pack(int weight, const void* data, int64_t count, Dtype dtype);
  // Uses all tiles of a product that is not packed yet where they are, lane by lane, in 12 bits; product: its number,
  // or kEmbedding. table: the values of e >> 1 of eight codes. Throws std::runtime_error for what does not fit.
  void map(int product, const char* tiles, int64_t bytes, const uint8_t* table, const uint32_t* exceptions,
           int64_t count);
  // The same with weights of 8 and 4 bits; product: never the embedding. Pieces have all its tiles.
  void map(int product, std::vector<Piece> pieces);
  static constexpr int kEmbedding = -1;
  double
  read_pass();  // seconds in which all workers read their weights once, and do nothing else: the bound of decoding
  // The whole answer, beside those of other slots; throws std::runtime_error when a worker does not come, and
  // std::invalid_argument for a recurrent state of another position.
  End run(const Call&, int slot = 0);
  // What passes cost that draw from these numbers of rows: seconds of the fastest of some times `passes` passes.
  std::vector<double> time_passes(const std::vector<int>& rows, int passes);

  // Texts of the next call of a slot, and the most drafts of its passes; throws std::runtime_error for tokens outside
  // the vocabulary.
  void give_texts(std::vector<int32_t> before, std::vector<int32_t> forced, std::vector<int32_t> given, int most,
                  int slot = 0);

  // How the next call of a slot adjusts its logits; throws std::runtime_error for tokens outside the vocabulary.
  void give_adjustment(float presence, float frequency, const std::vector<int32_t>& tokens,
                       const std::vector<float>& biases, bool masked, int slot);

  // What a masked call's token of that number may be, a bit for each token of the vocabulary; at least one must be set.
  // Throws std::runtime_error unless it is the next token and has no mask yet.
  void give_mask(int32_t number, const uint32_t* words, int64_t count, int slot);

  // Streaming: what the running call of a slot has drawn so far. Returns the tokens drawn, early when there are more
  // than `have` or the call has ended.
  int32_t wait(int32_t have, int timeout_ms, int slot = 0);
  Schedule& schedule() { return state_.schedule; }
  Slot& slot(int number = 0) { return state_.schedule.slot(number); }

  const plan::Plan& plan() const { return state_.plan; }
  const Options& options() const { return state_.options; }
  const std::vector<plan::KeptArray>& kept() const { return state_.kept; }
  bool recurrent() const;  // whether layers keep a state of the whole text, which cannot be cut
  const char* instructions() const { return state_.instructions.name; }
  int threads() const { return (int)workers_.size(); }
  int64_t packed_bytes() const;
  struct Bf12Weights {                                            // of the matrices that are packed
    int64_t weights = 0, exceptions = 0, matrices = 0, left = 0;  // left: matrices with too many exceptions
  };
  Bf12Weights bf12_weights() const;
  void trace(int64_t spans_per_worker);
  const std::vector<Span>& spans(int worker) const;

 private:
  void check_tokens(const std::vector<int32_t>& tokens, int32_t least) const;
  void check_states(const Call&) const;
  void find_places();
  void lead(const Slot& slot);
  void on_all(const std::function<void(int)>&);
  struct Rows {  // where a matrix lies
    const Product* product;
    int64_t first;  // row
    bool second;    // the partner of a gate
  };
  int64_t pack_rows(const Rows&, const plan::Weight&, const void* data, Dtype dtype);
  void stage(int weight);
  void settle_form(int weight);
  void choose_form(const Product& product);
  void encode_experts(const Product& product, const Bf12Codes& codes, Form& form);

  DecodeState state_;
  std::vector<std::vector<Rows>> places_;  // of each weight, if it is a matrix
  std::vector<std::vector<int>> missing_;  // of each product that may become bf12: weights that are not packed yet

  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<std::thread> threads_;
  Counter work_;  // raised when there is something to do
  std::unique_ptr<Counter[]> idle_;
  std::function<void(int)> job_;
  bool closing_ = false;
  uint32_t jobs_ = 0;
};

#if defined(__x86_64__)
// Whether AMX can be used: in this order, up to the first no.
struct AmxQueries {
  bool (*in_processor)();
  bool (*in_system)();  // it saves the registers of its threads
  bool (*permitted)();  // for this process; makes the request
  bool (*agrees)();     // the instructions work
};
extern const AmxQueries kAmxQueries;                                  // of this machine
std::vector<InstructionSet> instruction_sets(const AmxQueries& amx);  // the best first, AMX last
#endif

double read_bandwidth(int64_t bytes, int threads);  // bytes per second of one pass over a buffer that stays allocated
struct Way {                                        // of multiplying bf16 weights by one position
  const char* instructions;
  bool bf12;  // weights in 12 bits
};
// Of reading from memory, negative if the shortest times do not agree; 0: unknown instructions.
double speedup(const Way&, const Way& over, int threads);
double arithmetic_peak(int64_t count, int threads);  // float32 multiply-adds per second, each thread making `count`

}  // namespace laneformer
