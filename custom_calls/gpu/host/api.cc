// The C interface of the GPU sessions (custom_calls/gpu/session.py), and the handler that XLA calls
// (custom_calls/decode.py).
#include <algorithm>
#include <iterator>

#include "../../common/kept.h"
#include "../../common/sessions.h"
#include "session.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace laneformer {
namespace gpu {
namespace {

Sessions<Session> sessions;

ffi::Error wrong(const std::string& what) { return ffi::Error::InvalidArgument(what); }

ffi::Error decode(void* stream, int32_t device, int64_t id, int64_t devices,
                  ffi::Span<const int32_t> position_of_device, ffi::BufferR1<ffi::S32> prompt,
                  ffi::BufferR1<ffi::S32> control, ffi::BufferR1<ffi::F32> settings, ffi::BufferR1<ffi::U32> key,
                  ffi::BufferR1<ffi::S32> stops, ffi::BufferR4<ffi::U32> packed, ffi::BufferR4<ffi::U32> listed,
                  ffi::AnyBuffer embedding, ffi::BufferR2<ffi::U32> coding, ffi::BufferR1<ffi::F32> small,
                  ffi::BufferR1<ffi::F32> rotations, ffi::BufferR1<ffi::U8> seen, ffi::RemainingArgs caches,
                  ffi::ResultBufferR1<ffi::S32> tokens, ffi::ResultBufferR1<ffi::F32> logprobs,
                  ffi::ResultBufferR2<ffi::S32> top_tokens, ffi::ResultBufferR2<ffi::F32> top_logprobs,
                  ffi::ResultBufferR2<ffi::F32> logits, ffi::ResultBufferR1<ffi::S32> state,
                  ffi::ResultBufferR1<ffi::U8> seen_after, ffi::RemainingRets caches_after) {
  const std::shared_ptr<Session> session = sessions.find(id);
  if (!session) return wrong("the decode session " + std::to_string(id) + " was closed");
  const Model& model = session->model();
  const int num_devices = (int)model.devices.size();
  const bool known = device < (int32_t)position_of_device.size();
  const int position = num_devices == 1 ? 0 : known ? position_of_device[(size_t)device] : -1;
  if (position < 0 || position >= devices || devices != num_devices)
    return wrong("device " + std::to_string(device) + " has no place among the " + std::to_string(num_devices) +
                 " devices of the decode session");
  const size_t slots = (size_t)model.requests;
  if (control.element_count() != kControls * slots || settings.element_count() != 4 * slots ||
      key.element_count() != 2 * slots || state->element_count() != 3 * slots)
    return wrong("control, settings, key and state must have 5, 4, 2 and 3 elements for each slot");
  if (seen.element_count() != (size_t)model.plan.vocab_size * slots)
    return wrong("seen must have an element for each token of the vocabulary");
  if (seen.untyped_data() != seen_after->untyped_data())
    return wrong("the decode call's `seen` was not donated: it is updated in place (jax.jit(..., donate_argnums=...))");
  if ((int64_t)packed.element_count() != model.packed_words)
    return wrong("the packed weights are not those of this session");
  Params p{};
  int64_t positions;
  const std::string problem =
      plan::take_kept(model.kept, model.plan, model.lanes_here, model.requests, caches, caches_after, positions,
                      [&](size_t i, void* array) { p.caches[i] = array; });
  if (!problem.empty()) return wrong(problem);
  if (positions > model.plan.context) return wrong("the cache has more positions than the model's context");
  p.capacity = positions;
  p.weights = packed.untyped_data();
  p.coding = coding.typed_data();
  p.listed = listed.typed_data();
  p.listed_words = (int)listed.dimensions()[3];
  p.embedding = embedding.untyped_data();
  p.small = small.typed_data();
  p.rotations = rotations.typed_data();
  p.prompt = prompt.typed_data();
  p.control = control.typed_data();
  p.settings = settings.typed_data();
  p.key = key.typed_data();
  p.stops = stops.typed_data();
  p.seen = seen_after->typed_data();
  p.tokens = tokens->typed_data();
  p.logprobs = logprobs->typed_data();
  p.top_tokens = top_tokens->typed_data();
  p.top_logprobs = top_logprobs->typed_data();
  p.logits = logits->element_count() ? logits->typed_data() : nullptr;
  p.status = state->typed_data();
  p.room_of_prompt = (int)(prompt.element_count() / slots);
  p.num_stops = (int)(stops.element_count() / slots);
  p.room = (int)(tokens->element_count() / slots);
  p.top = (int)top_tokens->dimensions()[1];
  if (p.top > kMaxTop || p.top > model.plan.vocab_size)
    return wrong("at most " + std::to_string(kMaxTop) +
                 " most likely tokens can be reported, and no more than the vocabulary has");
  if (p.room > model.plan.context) return wrong("the result has room for more tokens than the model's context");
  try {
    session->launch(position, p, (int64_t)p.room_of_prompt + p.room, stream);
  } catch (const std::exception& e) {
    return ffi::Error(ffi::ErrorCode::kInternal, e.what());
  }
  return ffi::Error::Success();
}

// `decode` for a driver with emulated devices, where XLA has no stream.
constexpr auto decode_emulated = [](auto... operands) { return decode(nullptr, operands...); };

#define LANEFORMER_BINDING(context)                         \
  context.Ctx<ffi::DeviceOrdinal>()                         \
      .Attr<int64_t>("session")                             \
      .Attr<int64_t>("devices")                             \
      .Attr<ffi::Span<const int32_t>>("position_of_device") \
      .Arg<ffi::BufferR1<ffi::S32>>()                       \
      .Arg<ffi::BufferR1<ffi::S32>>()                       \
      .Arg<ffi::BufferR1<ffi::F32>>()                       \
      .Arg<ffi::BufferR1<ffi::U32>>()                       \
      .Arg<ffi::BufferR1<ffi::S32>>()                       \
      .Arg<ffi::BufferR4<ffi::U32>>()                       \
      .Arg<ffi::BufferR4<ffi::U32>>()                       \
      .Arg<ffi::AnyBuffer>()                                \
      .Arg<ffi::BufferR2<ffi::U32>>()                       \
      .Arg<ffi::BufferR1<ffi::F32>>()                       \
      .Arg<ffi::BufferR1<ffi::F32>>()                       \
      .Arg<ffi::BufferR1<ffi::U8>>()                        \
      .RemainingArgs()                                      \
      .Ret<ffi::BufferR1<ffi::S32>>()                       \
      .Ret<ffi::BufferR1<ffi::F32>>()                       \
      .Ret<ffi::BufferR2<ffi::S32>>()                       \
      .Ret<ffi::BufferR2<ffi::F32>>()                       \
      .Ret<ffi::BufferR2<ffi::F32>>()                       \
      .Ret<ffi::BufferR1<ffi::S32>>()                       \
      .Ret<ffi::BufferR1<ffi::U8>>()                        \
      .RemainingRets()

}  // namespace

// XLA must not capture this call into a command buffer, because the exchange's tags are arguments of the launch.
XLA_FFI_DEFINE_HANDLER_SYMBOL(laneformer_decode_gpu, decode,
                              LANEFORMER_BINDING(ffi::Ffi::Bind().Ctx<ffi::PlatformStream<void*>>()));

XLA_FFI_DEFINE_HANDLER_SYMBOL(laneformer_decode_emulated, decode_emulated, LANEFORMER_BINDING(ffi::Ffi::Bind()));

extern "C" {

// words, floats: the plan. numbers: the text of Numbers (model.h). The other arguments are as in Session.
int64_t laneformer_gpu_open(const int32_t* words, int64_t num_words, const float* floats, int64_t num_floats,
                            const char* numbers, const char* driver, const char* library, const void* image,
                            char* error, int64_t size) {
  return guarded(error, size, [&] {
    Model model(plan::decode(words, num_words, floats, num_floats), Numbers(numbers));
    return sessions.add(std::make_shared<Session>(std::move(model), driver, library, image));
  });
}

void laneformer_gpu_close(int64_t id) { sessions.close(id); }

// Memory between processes: see session.h.
int64_t laneformer_gpu_export(int64_t id, Handle* handles, char* error, int64_t size) {
  return guarded(error, size, [&] {
    sessions.find(id)->export_memory(handles);
    return 0;
  });
}
int64_t laneformer_gpu_connect(int64_t id, const Handle* handles, char* error, int64_t size) {
  return guarded(error, size, [&] {
    sessions.find(id)->connect(handles);
    return 0;
  });
}
int64_t laneformer_gpu_leave(int64_t id, char* error, int64_t size) {
  return guarded(error, size, [&] {
    sessions.find(id)->leave();
    return 0;
  });
}

int64_t laneformer_gpu_begin(int64_t id, int32_t slot, char* error, int64_t size) {
  return guarded(error, size, [&] {
    sessions.find(id)->begin(slot);
    return 0;
  });
}
// For calls with several slots: `begin_call` before each call, and the functions that end it early.
int64_t laneformer_gpu_begin_call(int64_t id, char* error, int64_t size) {
  return guarded(error, size, [&] {
    sessions.find(id)->begin_call();
    return 0;
  });
}
void laneformer_gpu_yield(int64_t id) { sessions.find(id)->yield(); }
void laneformer_gpu_yield_after(int64_t id, int32_t passes) { sessions.find(id)->yield_after(passes); }
int32_t laneformer_gpu_passes(int64_t id) { return sessions.find(id)->passes(); }
int32_t laneformer_gpu_wait(int64_t id, int32_t slot, int32_t have, int32_t timeout_ms) {
  return sessions.find(id)->wait(slot, have, timeout_ms);
}
int32_t laneformer_gpu_finished(int64_t id, int32_t slot) { return sessions.find(id)->finished(slot); }
void laneformer_gpu_cancel(int64_t id, int32_t slot) { sessions.find(id)->cancel(slot); }
void laneformer_gpu_drawn(int64_t id, int32_t slot, int32_t first, int32_t count, int32_t top, int32_t* tokens,
                          float* logprobs, int64_t* times_ns, int32_t* top_tokens, float* top_logprobs) {
  sessions.find(id)->drawn(slot, first, count, top, tokens, logprobs, times_ns, top_tokens, top_logprobs);
}
int32_t laneformer_gpu_failure(int64_t id, char* text, int64_t size) {
  const std::string failure = sessions.find(id)->failure();
  put_text(failure.c_str(), text, size);
  return !failure.empty();
}
// Copies up to `room` records of Session::stuck and returns their number.
int64_t laneformer_gpu_stuck(int64_t id, Stuck* to, int64_t room) {
  const std::vector<Stuck> found = sessions.find(id)->stuck();
  std::copy_n(found.begin(), std::min<int64_t>((int64_t)found.size(), room), to);
  return (int64_t)found.size();
}
int64_t laneformer_gpu_speculate(int64_t id, int32_t most, const float* prices, int64_t count, char* error,
                                 int64_t size) {
  return guarded(error, size, [&] {
    sessions.find(id)->speculate(most, {prices, prices + count});
    return 0;
  });
}
int64_t laneformer_gpu_give_texts(int64_t id, int32_t slot, const int32_t* before, int64_t num_before,
                                  const int32_t* forced, int64_t num_forced, const int32_t* drafts, int64_t num_drafts,
                                  int32_t most, char* error, int64_t size) {
  return guarded(error, size, [&] {
    sessions.find(id)->give_texts(slot, {before, before + num_before}, {forced, forced + num_forced},
                                  {drafts, drafts + num_drafts}, most);
    return 0;
  });
}
// Writes the counts of the last call: passes after the prompt by their rows, accepted drafts by their place, drafts
// from another text, and accepted drafts among these.
void laneformer_gpu_drafting(int64_t id, int32_t slot, int64_t* to) {
  const DraftCounts found = sessions.find(id)->draft_counts(slot);
  to = std::copy(std::begin(found.passes), std::end(found.passes), to);
  to = std::copy(std::begin(found.accepted), std::end(found.accepted), to);
  to[0] = found.other, to[1] = found.other_accepted;
}
int64_t laneformer_gpu_read_pass(int64_t id, const void* const* weights, char* error, int64_t size) {
  return guarded(error, size, [&] { return (int64_t)(1e9 * sessions.find(id)->read_pass(weights)); });
}
int64_t laneformer_gpu_trace(int64_t id, int64_t spans, char* error, int64_t size) {
  return guarded(error, size, [&] {
    sessions.find(id)->trace(spans);
    return 0;
  });
}
int64_t laneformer_gpu_spans(int64_t id, int32_t cta, Span* to, int64_t room, char* error, int64_t size) {
  return guarded(error, size, [&] { return sessions.find(id)->spans(cta, to, room); });
}
}

}  // namespace gpu
}  // namespace laneformer
