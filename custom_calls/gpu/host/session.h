// A model on the GPUs of this process, which have some or all of its lanes: the loaded kernel, the memory of its edges,
// and the running call.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../kernel/params.h"
#include "driver.h"
#include "model.h"

namespace laneformer {
namespace gpu {

class Session {
 public:
  // driver: "cuda" or "hip". library: file of the driver; null for the default. image: the compiled kernel.
  Session(Model model, const char* driver, const char* library, const void* image);
  ~Session();
  Session(const Session&) = delete;

  const Model& model() const { return model_; }

  // For processes that share the lanes. Each process exports the memory of its devices to which others write, and opens
  // the memory of all devices. The others may write there until they have left; destroy a session only after that.
  void export_memory(Handle* handles) const;  // handles: one for each device of this process
  void connect(const Handle* handles);        // handles: one for each device of all processes, by place
  void leave();                               // call it when no call runs and none will follow

  // Enqueues a call of one device on its stream, once every device of this process has called this on a thread of its
  // own. params: the operands; this function sets the other fields. passes: most passes that the call may take.
  void launch(int device, Params params, int64_t passes, void* stream);

  // Streaming, as on the CPU (cpu/decoder.h). If calls have several slots, use `begin` before a slot's next request and
  // `begin_call` before each call.
  void begin(int slot);
  void begin_call();
  int32_t wait(int slot, int32_t have, int timeout_ms);
  bool finished(int slot) const { return *(volatile int*)&host_->done[slot] != 0; }
  void cancel(int slot) { __atomic_fetch_or(&host_->asked, 1 << slot, __ATOMIC_RELAXED); }
  void drawn(int slot, int32_t first, int32_t count, int32_t top, int32_t* tokens, float* logprobs, int64_t* times_ns,
             int32_t* top_tokens, float* top_logprobs) const;
  // Ends the running call with several slots, or the next call, after its current pass.
  void yield() { __atomic_fetch_or(&host_->asked, kYield, __ATOMIC_RELAXED); }
  void yield_after(int passes) { passes_ = passes; }  // ends every later call after that many passes; 0: no limit
  int passes() const { return host_->passes; }        // passes of the last call with several slots
  // For a kernel with drafts; both throw std::runtime_error for invalid arguments. speculate: sets, for all later
  // calls, the most drafts of a slot in a pass (0: none) and the prices of passes of 1, 2, ... rows. give_texts: sets
  // the texts of a slot for the next call only; see Texts.
  void speculate(int most, const std::vector<float>& prices);
  void give_texts(int slot, const std::vector<int>& before, const std::vector<int>& forced,
                  const std::vector<int>& drafts, int most);
  DraftCounts draft_counts(int slot) const { return host_->drafts[slot]; }  // counts of the last call, after its end

  std::string failure() const;  // why the last call failed on the devices; empty if it did not fail
  // What each CTA of this process's devices waited for when the last call failed, the first one first. CTAs that did
  // not wait have no record.
  std::vector<Stuck> stuck() const;

  // Seconds that the slowest device takes to read the weights of one token without computing. weights: by device.
  double read_pass(const void* const* weights);

  void trace(int64_t spans);
  int64_t spans(int cta, Span* to, int64_t room) const;

 private:
  struct Device {
    int ordinal, place;
    void *module = nullptr, *function = nullptr, *read = nullptr;
    std::vector<Address> peers;  // addresses of all devices' shared memory on this one
    Address boards = 0, shared = 0, spans = 0, num_spans = 0, progress = 0, kept = 0, text = 0;
    size_t text_ints = 0;                     // tokens for which `text` has room, in each slot
    uint32_t pass_tag = 0, exchange_tag = 1;  // with these tags, no word of cleared memory is valid
  };

  bool connected() const;
  int64_t timeout_ms(int where) const;  // where: a value of Waits
  void set_timeouts(Params&) const;
  void close_peers(Device&);
  // The texts from which a slot's call drafts, and their memory.
  struct Given {
    Texts texts{};
    int* memory = nullptr;
    size_t ints = 0;
  };

  void give_texts_to(const Device&, Params&);
  void forget_texts();
  void give_room(Device&, size_t texts);
  void* record_pass(const Device&, Params) const;  // a graph of the launches of a pass
  void launch_steps(void* pass, uint32_t tag, int64_t passes, void* stream) const;
  void meet();
  void free_all();

  const Model model_;
  Driver driver_;
  std::vector<Device> devices_;
  Host* host_ = nullptr;
  Stuck* stuck_ = nullptr;  // [devices][grid]
  EmittedToken* emitted_ = nullptr;
  int* emitted_tokens_ = nullptr;
  float* emitted_logprobs_ = nullptr;
  std::vector<Given> given_;  // texts of the next call by slot, read by the launch of each device
  size_t launches_left_ = 0;
  int most_drafts_ = 0;
  std::vector<float> prices_;
  int64_t max_spans_ = 0;
  int passes_ = 0;
  bool armed_ = false;
  std::mutex launching_, meeting_;
  std::condition_variable all_arrived_;
  size_t arrived_ = 0;                            // devices of the call that wait for the others
  uint64_t meetings_ = 0;                         // meetings of all devices so far
  std::atomic<int64_t> clock_offset_{INT64_MAX};  // nanoseconds from the device's clock to the host's
};

}  // namespace gpu
}  // namespace laneformer
