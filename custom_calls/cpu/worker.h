// One worker thread's part in the decode kernel: its lanes, its weights in streaming order, and the steps from token to
// token.
#pragma once

#include <vector>

#include "decoder.h"

namespace laneformer {

class Worker {
 public:
  Worker(Decoder& decoder, int index, int count);

  const std::vector<Share>& shares(Decoder::Op op) const { return shares_[op]; }
  char* weights(Decoder::Op op, int layer) const {
    return stream_.data + (op == Decoder::kHead ? head_ : layer * layer_bytes_ + offsets_[op]);
  }
  int64_t packed_bytes() const { return stream_.bytes; }

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
  using Op = Decoder::Op;

  // Meeting the others. All workers come to the same points in the same order.
  uint32_t arrive();
  void wait_for(uint32_t point);
  void meet() { wait_for(arrive()); }
  void meet_if_shared() {
    if (d_.lanes_shared_) meet();
  }
  void delay();

  // One block of positions through the model.
  void step(const int32_t* tokens, int64_t start, int positions, bool last);
  void attention(int layer);
  void feed_forward(int layer);
  void head();
  const float* normed(int lane, const std::vector<float>& scales, int layer);
  void times(Op op, const Share& share, const char*& weights, const float* prepared, float* y, int64_t ldy);
  void turn(float* head, const std::vector<float>& norms, int layer, int p);
  void queries(int layer, int lane);
  void attend(int layer, Keys part, Keys next, int chunk, int64_t window);
  void merge(int lane, int chunks);
  void round_trip(float* x, int64_t n);

  // The schedule.
  void keep_streams(int payload);
  float* kept_stream(int payload, int lane, int position) const;
  const float* share_of(int payload, int lane, int position);
  const float* total(int payload);
  void apply(int time);
  void send(int module);
  float* message(int position) { return total_.data() + position * m_.hidden; }
  void post(uint32_t tag, int64_t floats);
  void fetch(int from, uint32_t tag, int64_t floats);

  // The next token from the logits; whether to go on.
  bool sample(int64_t position);
  float threshold(float best);
  void best_tokens(float lse);

  void mark(int op, int layer, int64_t began);
  int64_t clock() const { return tracing_ ? now_ns() : 0; }

  float* output(int module, int lane, int position) const {
    return d_.outputs_.floats() + (((int64_t)module * m_.lanes + lane) * kBlock + position) * d_.hidden_padded_;
  }
  float* stream(int lane, int position) {
    return x_.data() + ((int64_t)(lane - first_lane_) * kBlock + position) * m_.hidden;
  }
  bool owns(int lane) const { return lane * count_ / m_.lanes == index_; }  // the first worker that has the lane

  Decoder& d_;
  const LaneformerModel& m_;
  const Kernels& k_;
  const int index_, count_;
  const int first_lane_, last_lane_;  // first <= lane < last
  std::vector<Share> shares_[Decoder::kOps];
  Region stream_;
  int64_t offsets_[Decoder::kOps] = {}, layer_bytes_ = 0, head_ = 0;
  int64_t vocab_first_ = 0, vocab_last_ = 0;

  Counter progress_;
  uint32_t point_ = 0;
  std::vector<uint32_t> module_points_;  // the point that a worker has come to when its output of that module is there
  uint32_t tags_ = 1, token_tags_ = 1;   // of exchanges by message
  uint64_t random_;

  enum { kEmbed = Decoder::kOps, kAttend, kExchange, kSample };  // further spans of a trace

  int64_t start_ = 0;
  int positions_ = 0;
  int32_t drawn_ = 0;
  int blocks_ = 0;

  std::vector<float> x_;              // [own lanes][B][hidden]
  std::vector<float> h_, a_;          // [B][widest]
  std::vector<float> prepared_;       // as the products read it
  std::vector<float> y_;              // [B][own gate and up rows], or the own logits
  std::vector<float> q_, key_;        // [B][heads][head_dim], [head_dim]
  std::vector<float> cos_, sin_;      // [B][head_dim / 2]
  std::vector<float> total_, share_;  // [B][hidden]
  std::vector<float> finals_;         // exchange by message: [lanes][hidden]
  std::vector<float> received_;       // exchange by message: [payloads][B][hidden]
  std::vector<uint8_t> has_;          // which of them
  std::vector<float> weights_of_;     // [vocab], for the filters

  std::vector<Span> spans_;
  size_t max_spans_ = 0;
  bool tracing_ = false;
};

}  // namespace laneformer
