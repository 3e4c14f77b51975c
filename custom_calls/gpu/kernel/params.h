// What a launch is given. Host and device read this file.
#pragma once

#ifndef LF_KEPT
#define LF_KEPT kMaxKept  // the host's; a kernel's is in model.h
#endif

namespace laneformer {
namespace gpu {

constexpr int kMaxLayers = 128, kMaxDevices = 8;
constexpr int kMaxKept = 6 * kMaxLayers;  // arrays that layers keep between tokens, as many as compressed attention's

enum Ends { kLength, kStop, kCancelled, kFailed, kYielded };

// What a thread waited for when it timed out: a device-side error.
enum Waits { kNothing, kAtCheckIn, kAtVector, kAtAttention, kAtLanding, kAtPacket, kAtLogits, kBadCall };

constexpr int kPacketWords = 6;  // of a CTA, at the end of a pass

constexpr int kMaxRows = 8;  // of a pass, and slots of a call
constexpr int kMaxTop = 20, kControls = 5;

// What the host may ask of a running call: bit s cancels the one of slot s, and this one ends the pass for all.
constexpr int kYield = 1 << kMaxRows;

struct EmittedToken {  // in memory of the host
  int token;
  float logprob;
  unsigned long long time_ns;
};

// What drafts were worth to a slot in a call: passes after the prompt's by its rows, right drafts by their place, and
// those from another text.
struct DraftCounts {
  int passes[kMaxRows], accepted[kMaxRows - 1], other, other_accepted;
};

// Memory of the host that the kernel sees; one for all devices of a process.
struct Host {
  int asked;                   // by the host: bits of slots to cancel, and kYield
  int count[kMaxRows];         // of each slot: tokens emitted so far
  int done[kMaxRows];          //   it has ended, and not yielded
  unsigned long long failure;  // failure_word of edges.h; 0 for none
  unsigned read;
  unsigned ended;                // the first pass tag of the last call that has ended
  DraftCounts drafts[kMaxRows];  // of each slot
  int passes;                    // of the last call of several slots
};

// What a slot of a call drafts from.
struct Texts {
  const int* given;        // in memory of the host, one after the other:
  int before;              //   another text, and what is before the prompt
  int forced;              //   the answer's first tokens, whatever is drawn
  int drafts;              //   drafts of the answer's tokens by number, -1 for none, for tests: at any price
  int other;               // tokens of `before` that are another text
  int most;                // drafts of a pass; 0: none
  int room;                // tokens of before, prompt and answer
  float prices[kMaxRows];  // time of a pass of 1, 2, ... rows over that of one
  int* text;               // of the device: [room], then forced and drafts
};

// What a launch of steps.cu does. kStepOp and those after it: the first, second, ... op of a layer.
enum Steps { kStepBegin, kStepEmbed, kStepFinal, kStepHead, kStepOp };

// How far an answer has got; the same in every CTA.
struct Progress {
  int pass, token, drawn;
  int end;  // a value of Ends
  int over;
};

struct Span {
  int op, layer;
  unsigned long long begin_ns, end_ns;
};

struct Params {
  // Of the model, on this device: its own lanes first.
  const void* weights;     // [lanes here][CTAs][warps][lines of a pass][warp size] of 16 bytes
  const void* embedding;   // [vocab][hidden]
  const float* small;      // norm gains and biases of all lanes, at the offsets that model.h has
  const float* rotations;  // tables [context][2][head_dim / 2] of cosines and sines
  const unsigned* coding;  // of each product, 4 words: see formats.h
  const unsigned* listed;  // [lanes here][CTAs][warps][listed_words]: what is listed beside a warp's stream
  int listed_words;

  // Of the call. What a request has alone is here once for each slot.
  const int* prompt;
  const int* control;     // tokens of the prompt, position of the first, tokens to draw at most, top_k, drawn before
  const float* settings;  // temperature, top_p, min_p, repetition penalty
  const unsigned int* key;
  const int* stops;
  unsigned char* seen;
  long long capacity;
  int* tokens;
  float* logprobs;
  int* top_tokens;
  float* top_logprobs;
  float* logits;  // [room][vocab] or null
  int* status;
  int room_of_prompt, num_stops, room, top;

  // Of the session.
  unsigned long long* boards;               // between CTAs of a lane, [lanes here][kLaneWords]
  unsigned long long* shared[kMaxDevices];  // between lanes, one on each device of all processes
  int devices, device, first_lane;
  int reports;  // whether this device reports the call to the host and polls for a cancellation: one of each process
  unsigned int pass_tag,
      exchange_tag;                   // the first of this call; that of its passes is a multiple of kPassTags and not 0
  unsigned long long timeouts_ns[3];  // of the check-in, of waits for other lanes, and of waits that these may cause
  unsigned long long chaos_ns, peer_delay_ns;
  Host* host;
  int passes;             // after which a call of several slots yields; 0: none
  int emitted_room;       // the context
  EmittedToken* emitted;  // [slots][context]
  int* emitted_tokens;    // [slots][context][top], of several slots [kMaxTop]
  float* emitted_logprobs;
  Span* spans;     // [CTAs][max_spans], null for no trace
  int* num_spans;  // [CTAs]
  int max_spans;

  // Of a launch of steps.cu: the op, and what the CTAs keep from one launch to the next.
  int op, layer;
  Progress* progress;  // [CTAs]
  float* kept;         // [CTAs][1 + kHistory][rows]: of the residual stream

  Texts texts[kMaxRows];  // of each slot

  // Of the call. A kernel takes as many of the host's as its model has, so that few models need more than the 4 KiB of
  // parameters that CUDA had before 12.1.
  void* caches[LF_KEPT];  // [lanes here][slots][capacity or 1][...]: what layers keep (custom_calls/plan.py), by layer
};

}  // namespace gpu
}  // namespace laneformer
