// The parameters of a launch, and the host memory that the kernel reads and writes while it runs. host/api.cc and
// host/session.cc fill Params; the host and the kernel compile this file, so both have the same structs. Array shapes
// are in brackets; [slots] is [1] in a kernel for one request.
#pragma once

#ifndef LF_KEPT
#define LF_KEPT kMaxKept  // on the host; model.h defines it for a kernel
#endif

namespace laneformer {
namespace gpu {

constexpr int kMaxLayers = 128, kMaxDevices = 8;
constexpr int kMaxKept = 6 * kMaxLayers;  // arrays kept between tokens; compressed attention has 6 in a layer

// How a call, or a slot's request in it, ended. A yielded request continues in another call.
enum Ends { kLength, kStop, kCancelled, kFailed, kYielded };

// What a thread was waiting for when it timed out. kBadCall: the call's numbers are invalid. kAtWeights: a copy of
// weights into shared memory. kAtSpare: the spare CTA that writes to the host (custom_calls/gpu/variants.py).
enum Waits {
  kNothing,
  kAtCheckIn,
  kAtVector,
  kAtAttention,
  kAtLanding,
  kAtPacket,
  kAtLogits,
  kBadCall,
  kAtWeights,
  kAtSpare
};

// What a CTA waited for when a call failed: the first of its threads that gave up. In host memory, where it outlasts a
// launch that ends in a driver's error. custom_calls/gpu/watchdog.py has the same fields.
struct Stuck {
  unsigned call;               // Params::pass_tag of the call; otherwise the record is of another call
  int where;                   // a value of Waits
  int lane, cta;               // cta: among those of its lane
  int layer, op;               // op: see Names in ops/dense.h; -1: none has begun
  int waited_for;              // the number of the word, CTA, lane, token or line, by `where`
  unsigned tag, seen;          // the tag that it waited for, and that of the word when it gave up
  unsigned long long time_ns;  // of the device's clock
};

constexpr int kPacketWords = 6;  // of the packet that a CTA publishes for a row (sampling.h)

constexpr int kMaxRows = 8;                 // rows of a pass, and slots of a call, at most
constexpr int kMaxTop = 20, kControls = 5;  // most likely tokens reported at most; ints of a slot in Params::control

// Bits of Host::asked: bit s cancels the request of slot s; kYield ends the call for all slots after the pass.
constexpr int kYield = 1 << kMaxRows;

struct EmittedToken {  // in host memory
  int token;
  float logprob;
  unsigned long long time_ns;
};

// Counts of a slot's drafts in a call, without the pass that draws the first token. passes[n]: passes that checked n
// drafts. accepted[i]: right drafts at place i. other, other_accepted: drafts from another text, and the right ones.
struct DraftCounts {
  int passes[kMaxRows], accepted[kMaxRows - 1], other, other_accepted;
};

// Host memory that the kernel reads and writes while it runs; one for all devices of a process.
struct Host {
  int asked;                     // by the host: bits of slots to cancel, and kYield
  int count[kMaxRows];           // by slot: tokens of its request emitted so far
  int done[kMaxRows];            // by slot: 1 once its request has ended, other than by yielding
  unsigned long long failure;    // failure_word of edges.h; 0 for none
  unsigned read;                 // written by laneformer_read, so that its loads are not removed
  unsigned ended;                // Params::pass_tag of the last call that has ended
  DraftCounts drafts[kMaxRows];  // by slot
  int passes;                    // of the last call of several slots
};

// The texts from which a slot's drafts are copied, and their limits (pass/drafts.h).
struct Texts {
  const int* given;        // host memory with three texts, one after the other; the next three are their sizes
  int before;              // tokens of another text and of the text before the prompt
  int forced;              // the answer's first tokens, taken whatever is drawn
  int drafts;              // for tests: a draft of each token of the answer, -1 for none, checked at any price
  int other;               // how many of the `before` tokens are another text
  int most;                // drafts of a pass at most; 0: none
  int room;                // tokens of text before the prompt, prompt and answer
  float prices[kMaxRows];  // time of a pass of 1, 2, ... rows over that of a pass of one
  int* text;               // device memory: [room], then the tokens of `forced` and `drafts`
};

// What a launch of steps.cu computes. kStepOp + n is op n of a layer.
enum Steps { kStepBegin, kStepEmbed, kStepFinal, kStepHead, kStepOp };

// The progress of an answer, the same in every CTA.
struct Progress {
  int pass, token, drawn;  // passes made; token of the next pass; tokens drawn
  int end;                 // a value of Ends
  int over;                // whether the call has ended
};

struct Span {  // of a trace; op: see Names in ops/dense.h
  int op, layer;
  unsigned long long begin_ns, end_ns;
};

struct Params {
  // The model on this device.
  const void* weights;     // [lanes here][CTAs][warps][lines of a warp][warp size] of 16 bytes
  const void* embedding;   // [vocab][hidden]
  const float* small;      // norm gains, biases and other vectors of all lanes, at the offsets in model.h
  const float* rotations;  // rotary tables [context][2][head_dim / 2] of cosines and sines
  const unsigned* coding;  // 4 words for each product: see formats.h
  const unsigned* listed;  // [lanes here][CTAs][warps][listed_words]: exceptions and factors beside the streams
  int listed_words;

  // The call. What belongs to one request exists once for each slot.
  const int* prompt;  // [slots][room_of_prompt]
  // [slots][kControls]: tokens of the prompt, position of the first, most tokens to draw, top_k, tokens drawn before
  const int* control;
  const float* settings;    // [slots][4]: temperature, top_p, min_p, repetition penalty
  const unsigned int* key;  // [slots][2], of the noise
  const int* stops;         // [slots][num_stops]
  unsigned char* seen;      // [slots][vocab]: 1 for a token of the text
  long long capacity;       // positions of the caches
  int* tokens;              // [slots][room]; so is logprobs
  float* logprobs;
  int* top_tokens;  // [slots][room][top]; so is top_logprobs
  float* top_logprobs;
  float* logits;  // [slots][room][vocab] or null
  int* status;    // [slots][3]: tokens drawn, a value of Ends, the next position
  int room_of_prompt, num_stops, room, top;

  // The session.
  unsigned long long* boards;               // between CTAs of a lane: [lanes here][rows of a pass][kLaneWords]
  unsigned long long* shared[kMaxDevices];  // between lanes: one on each device of all processes
  int devices, device, first_lane;
  int reports;  // whether this device reports the call to the host and polls Host::asked: one of each process
  unsigned int pass_tag,
      exchange_tag;  // the first of this call; pass_tag is a multiple of kPassTags and not 0
  // Of the check-in, of waits for other lanes and for copies of weights, and of waits that those may cause.
  unsigned long long timeouts_ns[3];
  unsigned long long chaos_ns, peer_delay_ns;  // longest random delay (Watch); delay of emulated lanes (peers.h)
  Host* host;
  Stuck* stuck;           // [CTAs], in host memory; null in benchmarks
  int passes;             // after which a call of several slots yields; 0: no limit
  int emitted_room;       // tokens of a slot in the arrays below: the context
  EmittedToken* emitted;  // [slots][context]
  int* emitted_tokens;    // [slots][context][top], with several slots [kMaxTop]; so is emitted_logprobs
  float* emitted_logprobs;
  Span* spans;     // [CTAs][max_spans]; null for no trace
  int* num_spans;  // [CTAs]
  int max_spans;

  // A launch of steps.cu: the op, and what the CTAs keep from one launch to the next.
  int op, layer;
  Progress* progress;  // [CTAs]
  float* kept;         // [CTAs][kKeptFloats]: the residual stream, see steps.cu

  Texts texts[kMaxRows];  // by slot

  // The call's caches. They are last, because a kernel takes only as many of the host's as its model has. So few models
  // exceed the 4 KiB of parameters that CUDA allowed before 12.1.
  void* caches[LF_KEPT];  // by layer, [lanes here][slots][capacity or 1][...]: see kept_of in custom_calls/plan.py
};

}  // namespace gpu
}  // namespace laneformer
