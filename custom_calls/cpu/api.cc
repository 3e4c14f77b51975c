// The library's C interface. Python calls the laneformer_* functions through ctypes (custom_calls/library.py, with the
// sessions of custom_calls/cpu/session.py): they open, fill and watch sessions. XLA calls the handler `decode`, which
// custom_calls/decode.py puts into a program.
//
// A program on several devices makes one handler call per device. The last device to arrive runs all lanes while the
// others sleep; then all devices get the same answer. After a failure no thread touches the devices' buffers. Functions
// with an `error` argument do not throw: `guarded` writes the message there and returns -1.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <map>
#include <memory>
#include <stdexcept>

#include "../common/kept.h"
#include "../common/sessions.h"
#include "decoder.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace laneformer {
namespace {

Sessions<Decoder> sessions;

// The buffers that XLA passed for one device.
struct Operands {
  Request request;
  int64_t capacity, top;
  std::vector<char*> caches;  // in the order of plan::kept_arrays
  uint8_t* seen;
  int32_t *tokens, *top_tokens, *state;  // state: tokens drawn, number of the End, position of the next token
  float *logprobs, *top_logprobs, *logits;
  int64_t room;  // tokens that fit in the results
};

// The devices of one launch.
struct Group {
  std::mutex lock;
  std::condition_variable changed;
  std::vector<Operands> operands;
  int arrived = 0;
  bool running = false, ended = false, failed = false;
  ffi::Error error = ffi::Error::Success();
};

std::mutex groups_lock;
std::map<std::pair<int64_t, int64_t>, std::shared_ptr<Group>> groups;

ffi::Error generate(Decoder& decoder, const std::vector<Operands>& devices) {
  const plan::Plan& model = decoder.plan();
  const Operands& first = devices[0];
  Call call;
  static_cast<Request&>(call) = first.request;
  call.top = (int32_t)first.top;
  call.seen = first.seen;
  call.logits = first.logits;
  if (call.prompt.empty() || call.start < 0 || call.limit < 1 || call.limit > first.room ||
      call.start + (int64_t)call.prompt.size() + call.limit - 1 > first.capacity)
    return ffi::Error::InvalidArgument("a prompt of " + std::to_string(call.prompt.size()) + " tokens at position " +
                                       std::to_string(call.start) + " and " + std::to_string(call.limit) +
                                       " more do not fit a cache of " + std::to_string(first.capacity) +
                                       " positions and room for " + std::to_string(first.room) + " tokens");
  try {
    decoder.check(call);
  } catch (const std::invalid_argument& e) {
    return ffi::Error::InvalidArgument(e.what());
  }
  call.speculation = decoder.schedule().speculation_of(call);
  Adjustment adjustment = adjustment_of(call.sampling, model.vocab_size);
  if (!adjustment.bias.empty()) call.adjustment = &adjustment;
  const int local = model.lanes / (int)devices.size();
  for (size_t i = 0; i < decoder.kept().size(); i++) {
    const plan::KeptArray& array = decoder.kept()[i];
    const int64_t width = array.bytes(bytes_of((Dtype)model.cache_dtype));
    for (int lane = 0; lane < model.lanes; lane++) {
      char* const own = devices[lane / local].caches[i] + lane % local * array.entries(first.capacity) * width;
      call.caches.push_back(own);
      if (!decoder.recurrent()) call.widths.push_back(width);
    }
  }
  End end;
  try {
    end = decoder.run(call, (int)call.slot);
  } catch (const std::invalid_argument& e) {
    return ffi::Error::InvalidArgument(e.what());
  } catch (const std::exception& e) {
    return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, e.what());
  }
  const Slot& slot = decoder.slot((int)call.slot);
  const int drawn = slot.drawn;
  for (const Operands& device : devices) {
    std::memcpy(device.tokens, slot.answer.tokens.data(), drawn * sizeof(int32_t));
    std::memset(device.tokens + drawn, 0, (device.room - drawn) * sizeof(int32_t));
    std::memcpy(device.logprobs, slot.answer.logprobs.data(), drawn * sizeof(float));
    std::memset(device.logprobs + drawn, 0, (device.room - drawn) * sizeof(float));
    if (call.top) {
      std::memcpy(device.top_tokens, slot.answer.top_tokens.data(), drawn * call.top * sizeof(int32_t));
      std::memcpy(device.top_logprobs, slot.answer.top_logprobs.data(), drawn * call.top * sizeof(float));
    }
    if (device.seen != first.seen) std::memcpy(device.seen, first.seen, model.vocab_size);
    if (device.logits && device.logits != first.logits)
      std::memcpy(device.logits, first.logits, (int64_t)drawn * model.vocab_size * sizeof(float));
    device.state[0] = drawn;
    device.state[1] = (int32_t)end;
    device.state[2] = (int32_t)(call.start + slot.absorbed + drawn);
  }
  return ffi::Error::Success();
}

// Adds a device to its launch and returns the launch's result. The last device to arrive runs all lanes. Fails for all
// devices if one is missing after timeout_ms.
ffi::Error join(Decoder& decoder, int64_t session, int64_t run, int position, int devices, int64_t timeout_ms,
                Operands operands) {
  std::shared_ptr<Group> group;
  {
    const std::lock_guard<std::mutex> lock(groups_lock);
    std::shared_ptr<Group>& entry = groups[{session, run}];
    if (!entry) entry = std::make_shared<Group>();
    group = entry;
  }
  const auto leave = [&] {
    const std::lock_guard<std::mutex> lock(groups_lock);
    groups.erase({session, run});
  };
  std::unique_lock<std::mutex> lock(group->lock);
  group->operands.resize(devices);
  if (group->failed) return group->error;
  group->operands[position] = std::move(operands);
  if (++group->arrived == devices) {
    group->running = true;
    lock.unlock();
    ffi::Error error = generate(decoder, group->operands);
    lock.lock();
    group->error = error;
    group->ended = true;
    leave();
    group->changed.notify_all();
    return error;
  }
  const auto settled = [&] { return group->running || group->failed; };
  if (!group->changed.wait_for(lock, std::chrono::milliseconds(timeout_ms),
                               [&] { return settled() || group->ended; }) &&
      !settled()) {
    group->failed = true;
    group->error = ffi::Error(ffi::ErrorCode::kDeadlineExceeded,
                              "only " + std::to_string(group->arrived) + " of " + std::to_string(devices) +
                                  " devices reached the decode call within " + std::to_string(timeout_ms) + " ms");
    leave();
    group->changed.notify_all();
    return group->error;
  }
  group->changed.wait(lock, [&] { return group->ended || group->failed; });
  return group->error;
}

ffi::Error wrong(const std::string& what) { return ffi::Error::InvalidArgument(what); }

ffi::Error decode(int32_t device, ffi::RunId run, int64_t session, int64_t devices,
                  ffi::Span<const int32_t> position_of_device, ffi::BufferR1<ffi::S32> request,
                  ffi::BufferR1<ffi::U8> seen, ffi::RemainingArgs caches, ffi::ResultBufferR1<ffi::S32> tokens,
                  ffi::ResultBufferR1<ffi::F32> logprobs, ffi::ResultBufferR2<ffi::S32> top_tokens,
                  ffi::ResultBufferR2<ffi::F32> top_logprobs, ffi::ResultBufferR2<ffi::F32> logits,
                  ffi::ResultBufferR1<ffi::S32> state, ffi::ResultBufferR1<ffi::U8> seen_after,
                  ffi::RemainingRets caches_after) {
  const std::shared_ptr<Decoder> decoder = sessions.find(session);
  if (!decoder) return wrong("the decode session " + std::to_string(session) + " was closed");
  Operands operands{};
  try {
    operands.request = decode_request(request.typed_data(), (int64_t)request.element_count());
  } catch (const std::exception& e) {
    return wrong(e.what());
  }
  if (state->element_count() != 3) return wrong("status must have 3 elements");
  const int64_t slot = operands.request.slot;
  if (slot < 0 || slot >= decoder->schedule().slots())
    return wrong("slot " + std::to_string(slot) + " is not among the " + std::to_string(decoder->schedule().slots()) +
                 " slots of this session");
  const struct Settle {
    Schedule& schedule;
    int slot;
    ~Settle() { schedule.settle(slot); }  // a call refused below has ended, too
  } settle{decoder->schedule(), (int)slot};
  const plan::Plan& model = decoder->plan();
  const int position = device < (int32_t)position_of_device.size() ? position_of_device[device] : -1;
  if (position < 0 || position >= devices || model.lanes % devices != 0)
    return wrong("device " + std::to_string(device) + " has no place among the " + std::to_string(devices) +
                 " devices of the decode call");
  if ((int64_t)seen.element_count() != model.vocab_size)
    return wrong("seen must have an element for each token of the vocabulary");
  if (seen.untyped_data() != seen_after->untyped_data())
    return wrong("the decode call's `seen` was not donated: it is updated in place");
  const std::string problem =
      plan::take_kept(decoder->kept(), model, model.lanes / devices, 1, caches, caches_after, operands.capacity,
                      [&](size_t, void* array) { operands.caches.push_back((char*)array); });
  if (!problem.empty()) return wrong(problem);
  operands.seen = seen_after->typed_data();
  operands.tokens = tokens->typed_data();
  operands.room = (int64_t)tokens->element_count();
  operands.logprobs = logprobs->typed_data();
  operands.top = top_tokens->dimensions()[1];
  if (operands.top > model.vocab_size)
    return wrong("top_tokens must not have more columns than the vocabulary has tokens");
  operands.top_tokens = top_tokens->typed_data();
  operands.top_logprobs = top_logprobs->typed_data();
  operands.logits = logits->element_count() ? logits->typed_data() : nullptr;
  operands.state = state->typed_data();
  if (devices == 1) return generate(*decoder, {operands});
  return join(*decoder, session, run.run_id, position, (int)devices, decoder->options().timeout_ms,
              std::move(operands));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(laneformer_decode_cpu, decode,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .Ctx<ffi::RunId>()
                                  .Attr<int64_t>("session")
                                  .Attr<int64_t>("devices")
                                  .Attr<ffi::Span<const int32_t>>("position_of_device")
                                  .Arg<ffi::BufferR1<ffi::S32>>()
                                  .Arg<ffi::BufferR1<ffi::U8>>()
                                  .RemainingArgs()
                                  .Ret<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::BufferR1<ffi::F32>>()
                                  .Ret<ffi::BufferR2<ffi::S32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Ret<ffi::BufferR2<ffi::F32>>()
                                  .Ret<ffi::BufferR1<ffi::S32>>()
                                  .Ret<ffi::BufferR1<ffi::U8>>()
                                  .RemainingRets());

extern "C" {

int32_t laneformer_ffi_version() { return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR; }

// Opens a session with the plan that custom_calls/words.py encodes and returns its number. instructions: name of an
// instruction set, or "" for the best one of this machine.
int64_t laneformer_open(const int32_t* words, int64_t num_words, const float* floats, int64_t num_floats,
                        int32_t threads, int32_t one_thread_per_lane, int32_t chaos_us, int32_t timeout_ms,
                        int32_t bf12, int32_t slots, double most_slowdown, const char* instructions, char* error,
                        int64_t size) {
  return guarded(error, size, [&] {
    const Options options{threads,      one_thread_per_lane != 0, chaos_us, timeout_ms, instructions, bf12 != 0, slots,
                          most_slowdown};
    return sessions.add(std::make_shared<Decoder>(plan::decode(words, num_words, floats, num_floats), options));
  });
}

void laneformer_close(int64_t id) { sessions.close(id); }

// Decoder::pack; returns 0, or 1 + the index of the first value that is not finite.
int64_t laneformer_pack(int64_t id, int32_t weight, const void* data, int64_t count, int32_t dtype, char* error,
                        int64_t size) {
  return guarded(error, size, [&] { return 1 + sessions.find(id)->pack(weight, data, count, (Dtype)dtype); });
}

// Decoder::map for tiles in 12 bits, which the session reads where they are.
int64_t laneformer_map(int64_t id, int32_t product, const char* tiles, int64_t bytes, const uint8_t* table,
                       const uint32_t* exceptions, int64_t count, char* error, int64_t size) {
  return guarded(error, size, [&] {
    sessions.find(id)->map(product, tiles, bytes, table, exceptions, count);
    return (int64_t)0;
  });
}

// Decoder::map for quantized tiles. pieces: [count][13], each the `words` of a Piece in custom_calls/cpu/tiles.py.
int64_t laneformer_map_quantized(int64_t id, int32_t product, const int64_t* pieces, int64_t count, char* error,
                                 int64_t size) {
  return guarded(error, size, [&] {
    std::vector<Piece> found;
    for (const int64_t* p = pieces; p < pieces + 13 * count; p += 13) {
      const Quantized format{(Code)p[5], (ScaleType)p[6], (int)p[7], p[8] != 0, p[9] != 0, p[10] != 0};
      const auto* order = (const int32_t*)p[12];
      found.push_back({p[0], p[1], p[2], (const char*)p[3], p[4], format, p[11], {}});
      if (order) found.back().order.assign(order, order + p[11]);
    }
    sessions.find(id)->map(product, std::move(found));
    return (int64_t)0;
  });
}

int64_t laneformer_begin(int64_t id, int32_t slot) { return sessions.find(id)->schedule().begin(slot); }
int32_t laneformer_wait(int64_t id, int32_t slot, int32_t have, int32_t timeout_ms) {
  return sessions.find(id)->wait(have, timeout_ms, slot);
}
int32_t laneformer_finished(int64_t id, int32_t slot) { return sessions.find(id)->slot(slot).finished(); }
void laneformer_cancel(int64_t id, int32_t slot) {
  const auto decoder = sessions.find(id);
  Slot& of = decoder->slot(slot);
  of.cancel.store(1);
  wake_all(of.masks.value);
}

// Copies tokens first .. first + count - 1 of a slot's running or last call; all of them must be drawn. Null pointers
// are skipped.
void laneformer_drawn(int64_t id, int32_t slot, int32_t first, int32_t count, int32_t top, int32_t* tokens,
                      float* logprobs, int64_t* times_ns, int32_t* top_tokens, float* top_logprobs) {
  const auto decoder = sessions.find(id);
  const Answer& answer = decoder->slot(slot).answer;
  const auto copy = [&](const auto& from, auto* to, int64_t each) {
    if (to && each) std::memcpy(to, from.data() + first * each, count * each * sizeof *to);
  };
  copy(answer.tokens, tokens, 1);
  copy(answer.logprobs, logprobs, 1);
  copy(answer.times_ns, times_ns, 1);
  copy(answer.top_tokens, top_tokens, top);
  copy(answer.top_logprobs, top_logprobs, top);
}

// For the same range of tokens: whether each was an accepted draft, and how many other calls had rows in its pass.
void laneformer_origins(int64_t id, int32_t slot, int32_t first, int32_t count, uint8_t* drafted, uint8_t* others) {
  const auto decoder = sessions.find(id);
  const Answer& answer = decoder->slot(slot).answer;
  std::copy_n(answer.drafted.begin() + first, count, drafted);
  std::copy_n(answer.others.begin() + first, count, others);
}

// most: drafts of a pass at most. prices: [kMostRows], time of a pass of 1, 2, ... rows over that of one row.
// corrected: whether the times of later passes correct the prices.
int64_t laneformer_speculate(int64_t id, int32_t most, const float* prices, int32_t corrected, char* error,
                             int64_t size) {
  return guarded(error, size, [&] {
    sessions.find(id)->schedule().speculate(most, prices, corrected != 0);
    return (int64_t)0;
  });
}

// Writes the prices [kMostRows] as the last call left them.
void laneformer_prices(int64_t id, float* to) {
  const auto decoder = sessions.find(id);
  for (int rows = 1; rows <= kMostRows; rows++) to[rows - 1] = decoder->schedule().prices().of(rows);
}

// Positions that the running or last call of a slot copied from another call; to be read after its first token.
int64_t laneformer_copied(int64_t id, int32_t slot) { return sessions.find(id)->slot(slot).copied; }

// Decoder::give_mask for the running call of a slot.
int64_t laneformer_give_mask(int64_t id, int32_t slot, int32_t number, const uint32_t* words, int64_t count,
                             char* error, int64_t size) {
  return guarded(error, size, [&] {
    sessions.find(id)->give_mask(number, words, count, slot);
    return (int64_t)0;
  });
}

// Writes counts of the last call of a slot: passes after the prompt by number of rows [kMostRows], accepted drafts by
// place in the pass [kMostRows - 1], drafts from another text, accepted ones of these, passes with rows of other calls.
void laneformer_drafting(int64_t id, int32_t slot, int64_t* to) {
  const auto decoder = sessions.find(id);
  const Drafting& found = decoder->slot(slot).drafting;
  to = std::copy(std::begin(found.passes), std::end(found.passes), to);
  to = std::copy(std::begin(found.accepted), std::end(found.accepted), to);
  to[0] = found.other, to[1] = found.other_accepted, to[2] = decoder->slot(slot).shared;
}

// Decoder::time_passes for `count` numbers of rows; writes seconds [count].
int64_t laneformer_time_passes(int64_t id, const int32_t* rows, int64_t count, int32_t passes, double* to, char* error,
                               int64_t size) {
  return guarded(error, size, [&] {
    const std::vector<double> seconds = sessions.find(id)->time_passes({rows, rows + count}, passes);
    std::copy(seconds.begin(), seconds.end(), to);
    return (int64_t)0;
  });
}

int64_t laneformer_packed_bytes(int64_t id) { return sessions.find(id)->packed_bytes(); }
// Writes the number of weights in 12 bits, of their exceptions, of matrices in 12 bits and of matrices left in 16 bits.
void laneformer_bf12_weights(int64_t id, int64_t* to) {
  const Decoder::Bf12Weights found = sessions.find(id)->bf12_weights();
  to[0] = found.weights, to[1] = found.exceptions, to[2] = found.matrices, to[3] = found.left;
}
int32_t laneformer_threads(int64_t id) { return sessions.find(id)->threads(); }
const char* laneformer_instructions(int64_t id) { return sessions.find(id)->instructions(); }
double laneformer_read_pass(int64_t id) { return sessions.find(id)->read_pass(); }

void laneformer_trace(int64_t id, int64_t spans) { sessions.find(id)->trace(spans); }
// Copies up to `room` spans of a worker to `to`, unless that is null; returns how many the worker has.
int64_t laneformer_spans(int64_t id, int32_t worker, Span* to, int64_t room) {
  const auto decoder = sessions.find(id);
  const std::vector<Span>& spans = decoder->spans(worker);
  const int64_t n = std::min<int64_t>(room, (int64_t)spans.size());
  if (to) std::memcpy(to, spans.data(), n * sizeof(Span));
  return (int64_t)spans.size();
}

// times: [count][2], the times at which each exchange is issued and last read, in order of issue.
int32_t laneformer_ring_slots(const int32_t* times, int32_t count) {
  std::vector<Exchange> exchanges;
  for (int i = 0; i < count; i++) exchanges.push_back({times[2 * i], times[2 * i + 1]});
  return ring_slots(exchanges);
}

int32_t laneformer_default_threads() { return default_threads(); }
double laneformer_read_bandwidth(int64_t bytes, int32_t threads) { return read_bandwidth(bytes, threads); }
double laneformer_speedup(const char* instructions, int32_t bf12, const char* over, int32_t over_bf12,
                          int32_t threads) {
  return speedup({instructions, bf12 != 0}, {over, over_bf12 != 0}, threads);
}
double laneformer_arithmetic_peak(int64_t count, int32_t threads) { return arithmetic_peak(count, threads); }
const char* laneformer_can_run(const char* instructions) {
  const InstructionSet* set = choose_instructions(instructions);
  return set ? set->name : nullptr;
}
}

}  // namespace laneformer
