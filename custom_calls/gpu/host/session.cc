#include "session.h"

#include <algorithm>
#include <chrono>
#include <thread>

namespace laneformer {
namespace gpu {

namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

Session::Session(Model numbers, const char* driver, const char* library, const void* image)
    : model_(std::move(numbers)), driver_(driver, library) {
  const Model& model = model_;
  given_.resize((size_t)model.requests);
  forget_texts();
  try {
    for (size_t d = 0; d < model.devices.size(); d++) {
      const int ordinal = model.devices[d];
      if (ordinal >= driver_.devices())
        throw std::runtime_error("device " + std::to_string(ordinal) +
                                 " does not exist; devices of the driver: " + std::to_string(driver_.devices()));
      driver_.use(ordinal);
      devices_.emplace_back();
      Device& device = devices_.back();
      device.ordinal = ordinal;
      device.place = model.places[d];
      device.module = driver_.load(image);
      device.function = driver_.function(device.module, model_.steps.empty() ? "laneformer_decode" : "laneformer_step",
                                         model.shared_bytes);
      device.read = driver_.function(device.module, "laneformer_read", model.shared_bytes);
      const int grid = model.grid;
      const int room =
          driver_.resident(device.function, model.threads, model.shared_bytes) * driver_.multiprocessors(ordinal);
      if (room < grid)
        throw std::runtime_error("device " + std::to_string(ordinal) + " holds " + std::to_string(room) + " of the " +
                                 std::to_string(grid) + " CTAs that must run together");
      device.boards = driver_.allocate((size_t)(8 * model.lane_words * model.lanes_here));
      device.shared = driver_.allocate((size_t)(8 * model.shared_words));
      if (!model_.steps.empty()) {
        device.progress = driver_.allocate(sizeof(Progress) * (size_t)grid);
        device.kept = driver_.allocate(sizeof(float) * (size_t)grid * (size_t)model.kept_floats);
      }
      if (model.drafting) give_room(device, 0);
      for (const int peer : model.devices)
        if (peer != ordinal) driver_.share(ordinal, peer);
    }
    for (Device& device : devices_) {
      device.peers.resize((size_t)model.all_devices);
      for (const Device& peer : devices_) device.peers[(size_t)peer.place] = peer.shared;
    }
    host_ = (Host*)driver_.allocate_host(sizeof(Host));
    const size_t emitted = (size_t)model.plan.context * (size_t)model.requests;
    emitted_ = (EmittedToken*)driver_.allocate_host(sizeof(EmittedToken) * emitted);
    emitted_tokens_ = (int*)driver_.allocate_host(sizeof(int) * emitted * kMaxTop);
    emitted_logprobs_ = (float*)driver_.allocate_host(sizeof(float) * emitted * kMaxTop);
    stuck_ = (Stuck*)driver_.allocate_host(sizeof(Stuck) * devices_.size() * (size_t)model.grid);
    std::fill(std::begin(host_->done), std::end(host_->done), 1);
  } catch (...) {
    free_all();
    throw;
  }
}

Session::~Session() { free_all(); }

void Session::export_memory(Handle* handles) const {
  for (const Device& device : devices_) {
    driver_.use(device.ordinal);
    *handles++ = driver_.export_memory(device.shared);
  }
}

void Session::connect(const Handle* handles) {
  const std::lock_guard<std::mutex> lock(launching_);
  for (Device& device : devices_) {
    driver_.use(device.ordinal);
    for (size_t place = 0; place < device.peers.size(); place++)
      if (!device.peers[place]) device.peers[place] = driver_.open(handles[place]);
  }
}

bool Session::connected() const {
  return std::all_of(devices_[0].peers.begin(), devices_[0].peers.end(), [](Address a) { return a != 0; });
}

void Session::leave() {
  const std::lock_guard<std::mutex> lock(launching_);
  for (Device& device : devices_) {
    driver_.use(device.ordinal);
    driver_.synchronize();
    close_peers(device);
  }
}

void Session::close_peers(Device& device) {
  for (const Device& own : devices_)
    if (!device.peers.empty()) device.peers[(size_t)own.place] = 0;
  for (Address& peer : device.peers)
    if (peer) driver_.close(peer), peer = 0;
}

void Session::free_all() {
  for (Device& device : devices_) {
    try {
      driver_.use(device.ordinal);
    } catch (const std::exception&) {
      continue;  // the process is exiting, and the driver is unloaded already
    }
    close_peers(device);
    for (const Address address :
         {device.boards, device.shared, device.spans, device.num_spans, device.progress, device.kept, device.text})
      if (address) driver_.release(address);
    if (device.module) driver_.unload(device.module);
  }
  for (void* memory : {(void*)host_, (void*)stuck_, (void*)emitted_, (void*)emitted_tokens_, (void*)emitted_logprobs_})
    if (memory) driver_.release_host(memory);
  for (const Given& given : given_)
    if (given.memory) driver_.release_host(given.memory);
}

void Session::begin(int slot) {
  __atomic_fetch_and(&host_->asked, ~(1 << slot), __ATOMIC_RELAXED);
  *(volatile int*)&host_->count[slot] = *(volatile int*)&host_->done[slot] = 0;
  if (model_.requests > 1) return;
  begin_call();
  armed_ = true;
}

void Session::begin_call() {
  const std::lock_guard<std::mutex> lock(launching_);
  __atomic_fetch_and(&host_->asked, ~kYield, __ATOMIC_RELAXED);
  if (host_->failure) {  // clear the failure's word, because its tag will recur; no call reads it now
    for (const Device& device : devices_) {
      driver_.use(device.ordinal);
      driver_.clear(device.shared, 8);
    }
  }
  host_->failure = 0;
}

void Session::launch(int index, Params params, int64_t passes, void* stream) {
  std::unique_lock<std::mutex> lock(launching_);
  Device& device = devices_[(size_t)index];
  device.pass_tag += (uint32_t)model_.pass_tags;
  if (device.pass_tag == 0) device.pass_tag += (uint32_t)model_.pass_tags;  // 0 is the tag of cleared memory
  params.pass_tag = device.pass_tag;
  params.exchange_tag = device.exchange_tag;
  // All devices of all processes count the same passes, even for a call that fails or is rejected.
  device.pass_tag += (uint32_t)(passes * model_.pass_tags);
  device.exchange_tag += (uint32_t)(passes * model_.exchanges);
  if (!connected()) throw std::runtime_error("the decode session was closed");
  if (host_->failure && (uint32_t)(host_->failure >> 32) - params.pass_tag >= (uint32_t)model_.pass_tags)
    throw std::runtime_error("the previous call failed (" + failure() + "): call begin first");
  if (index == 0) {
    if (!armed_ && model_.requests == 1) host_->asked = host_->count[0] = host_->done[0] = 0;
    std::fill(std::begin(host_->drafts), std::end(host_->drafts), DraftCounts{});
    armed_ = false;
  }
  params.boards = (unsigned long long*)device.boards;
  params.devices = (int)device.peers.size();
  for (size_t d = 0; d < device.peers.size(); d++) params.shared[d] = (unsigned long long*)device.peers[d];
  params.device = device.place;
  params.first_lane = device.place * model_.lanes_here;
  params.reports = index == 0;
  set_timeouts(params);
  params.chaos_ns = (unsigned long long)model_.chaos_us * 1'000ull;
  params.peer_delay_ns = (unsigned long long)model_.peer_delay_us * 1'000ull;
  params.host = host_;
  params.stuck = stuck_ + (size_t)index * (size_t)model_.grid;
  params.passes = passes_;
  params.emitted_room = (int)model_.plan.context;
  params.emitted = emitted_;
  params.emitted_tokens = emitted_tokens_;
  params.emitted_logprobs = emitted_logprobs_;
  params.spans = (Span*)device.spans;
  params.num_spans = (int*)device.num_spans;
  params.max_spans = (int)max_spans_;
  params.progress = (Progress*)device.progress;
  params.kept = (float*)device.kept;
  if (model_.drafting) give_texts_to(device, params);
  lock.unlock();
  driver_.use(device.ordinal);
  void* pass = model_.steps.empty() ? nullptr : record_pass(device, params);
  try {
    meet();
    params.op = kStepBegin, params.layer = -1;
    void* arguments[] = {&params};
    driver_.launch(device.function, model_.grid, model_.threads, model_.shared_bytes, stream, arguments);
    if (pass) launch_steps(pass, params.pass_tag, passes, stream);
  } catch (...) {
    if (pass) driver_.release_recorded(pass);
    throw;
  }
  if (pass) driver_.release_recorded(pass);
}

// Waits until all devices of this process have come to their launches. A kernel waits for the other devices, and a
// driver may wait for a kernel when it loads programs or makes a graph, so nothing of the kind may follow a launch.
void Session::meet() {
  std::unique_lock<std::mutex> lock(meeting_);
  const uint64_t meeting = meetings_;
  if (++arrived_ == devices_.size()) {
    arrived_ = 0, meetings_++;
    all_arrived_.notify_all();
    return;
  }
  const auto limit = std::chrono::milliseconds(timeout_ms(kAtCheckIn));
  if (all_arrived_.wait_for(lock, limit, [&] { return meetings_ != meeting; })) return;
  const size_t arrived = arrived_--;
  throw std::runtime_error(std::to_string(arrived) + " of the " + std::to_string(devices_.size()) +
                           " devices began the call within " + std::to_string(limit.count()) +
                           " ms: see the errors of the others");
}

void* Session::record_pass(const Device& device, Params params) const {
  void* arguments[] = {&params};
  return driver_.record([&](void* recording) {
    for (size_t i = 0; i < model_.steps.size(); i += 2) {
      params.op = model_.steps[i], params.layer = model_.steps[i + 1];
      const bool overlapping = model_.overlapping && i > 0;
      driver_.add(device.function, model_.grid, model_.threads, model_.shared_bytes, recording, arguments, overlapping);
    }
  });
}

// Enqueues as many passes as the call may take, because only the device determines how many it needs. A launch after
// the end of the call returns at once.
void Session::launch_steps(void* pass, uint32_t tag, int64_t passes, void* stream) const {
  const auto ended = [&] { return *(volatile unsigned*)&host_->ended == tag; };
  for (int64_t i = 0; i + 1 < passes && !ended(); i++) driver_.launch_recorded(pass, stream);
}

// Allocates memory for the tokens of each slot: prompt, answer and `texts` tokens of other texts.
void Session::give_room(Device& device, size_t texts) {
  const size_t wanted = texts + 2 * (size_t)model_.plan.context;
  if (device.text_ints >= wanted) return;
  if (device.text) driver_.release(device.text);
  device.text = 0, device.text_ints = 0;
  device.text = driver_.allocate(sizeof(int) * wanted * (size_t)model_.requests);
  device.text_ints = wanted;
}

void Session::speculate(int most, const std::vector<float>& prices) {
  const std::lock_guard<std::mutex> lock(launching_);
  if (most < 0 || most >= std::max(model_.rows, 1) || (int)prices.size() != model_.rows)
    throw std::runtime_error("a pass of at most " + std::to_string(model_.rows) +
                             " rows needs fewer drafts than rows, and a price for each number of rows: got " +
                             std::to_string(most) + " drafts and " + std::to_string(prices.size()) + " prices");
  if (most > 0 && !model_.drafting) throw std::runtime_error("the kernel was compiled without drafts");
  most_drafts_ = most;
  prices_ = prices;
}

void Session::give_texts(int slot, const std::vector<int>& before, const std::vector<int>& forced,
                         const std::vector<int>& drafts, int most) {
  const std::lock_guard<std::mutex> lock(launching_);
  if (!model_.drafting) throw std::runtime_error("the kernel was compiled without drafts, so it takes no texts");
  for (const std::vector<int>* text : {&before, &forced, &drafts})
    for (const int token : *text)
      if (token >= model_.plan.vocab_size || token < (text == &forced ? 0 : -1))
        throw std::runtime_error("token " + std::to_string(token) + " is outside the vocabulary of " +
                                 std::to_string(model_.plan.vocab_size));
  Given& given = given_[(size_t)slot];
  const size_t all = before.size() + forced.size() + drafts.size();
  if (all > given.ints) {
    if (given.memory) driver_.release_host(given.memory);
    given.memory = nullptr, given.ints = 0;
    given.memory = (int*)driver_.allocate_host(sizeof(int) * 2 * all);
    given.ints = 2 * all;
  }
  for (Device& device : devices_) {
    driver_.use(device.ordinal);
    give_room(device, all);
  }
  int* end = given.memory;
  for (const std::vector<int>* text : {&before, &forced, &drafts}) end = std::copy(text->begin(), text->end(), end);
  Texts& texts = given.texts = {};
  texts.given = given.memory;
  texts.before = (int)before.size(), texts.forced = (int)forced.size(), texts.drafts = (int)drafts.size();
  texts.other = (int)(before.rend() - std::find(before.rbegin(), before.rend(), -1));
  texts.most = most;
  launches_left_ = devices_.size();
}

// Sets the texts from which a call drafts on a device.
void Session::give_texts_to(const Device& device, Params& params) {
  for (size_t slot = 0; slot < given_.size(); slot++) {
    Texts& texts = params.texts[slot] = given_[slot].texts;
    texts.most = std::min(texts.most, most_drafts_);
    std::fill_n(texts.prices, kMaxRows, 1.0f);
    std::copy(prices_.begin(), prices_.end(), texts.prices);
    texts.room = texts.before + 2 * (int)model_.plan.context;  // prompt and answer fit in the context
    texts.text = (int*)device.text + slot * device.text_ints;
  }
  if (launches_left_ > 0 && --launches_left_ == 0) forget_texts();
}

void Session::forget_texts() {
  for (Given& given : given_) {
    given.texts = {};
    given.texts.most = kMaxRows;
  }
}

int32_t Session::wait(int slot, int32_t have, int timeout_ms) {
  const int64_t until = now_ns() + timeout_ms * 1'000'000LL;
  const auto count = [&] { return *(volatile int*)&host_->count[slot]; };
  int32_t seen = count();
  while (seen <= have && !finished(slot) && now_ns() < until) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    seen = count();
  }
  seen = count();  // again, because the call may have emitted tokens and ended since
  if (seen > 0) {  // the token was emitted before now, so the smallest offset is the most exact one
    const int64_t offset = now_ns() - (int64_t)emitted_[slot * model_.plan.context + seen - 1].time_ns;
    if (offset < clock_offset_.load()) clock_offset_.store(offset);
  }
  return seen;
}

void Session::drawn(int slot, int32_t first, int32_t count, int32_t top, int32_t* tokens, float* logprobs,
                    int64_t* times_ns, int32_t* top_tokens, float* top_logprobs) const {
  const int64_t offset = clock_offset_.load(), at = (int64_t)slot * model_.plan.context + first;
  const int stride = model_.requests == 1 ? top : kMaxTop;
  for (int32_t i = 0; i < count; i++) {
    const EmittedToken& token = emitted_[at + i];
    tokens[i] = token.token;
    logprobs[i] = token.logprob;
    times_ns[i] = (int64_t)token.time_ns + offset;
    std::copy_n(emitted_tokens_ + (at + i) * stride, top, top_tokens + (int64_t)i * top);
    std::copy_n(emitted_logprobs_ + (at + i) * stride, top, top_logprobs + (int64_t)i * top);
  }
}

// Timeout of a wait. At the check-in other processes may still compile. Waits for lanes and for copies of weights time
// out first, so that the error names these.
int64_t Session::timeout_ms(int where) const {
  return where == kAtCheckIn                          ? 6 * model_.timeout_ms
         : where == kAtLanding || where == kAtWeights ? model_.timeout_ms
                                                      : model_.timeout_ms / 8 * 9;
}

void Session::set_timeouts(Params& params) const {
  const Waits waits[] = {kAtCheckIn, kAtLanding, kAtVector};
  for (int i = 0; i < 3; i++) params.timeouts_ns[i] = (unsigned long long)timeout_ms(waits[i]) * 1'000'000ull;
}

std::string Session::failure() const {
  static const char* const missing[] = {"",
                                        "the check-in of lane",
                                        "channels of a vector from",
                                        "attention's split",
                                        "the part of lane",
                                        "",
                                        "the logit of token",
                                        "",
                                        "a copy of weights, ring slot",
                                        "the spare CTA of device"};
  const unsigned long long failed = *(volatile unsigned long long*)&host_->failure;
  if (failed == 0) return "";
  const int what = failed & 15, lane = failed >> 4 & 0xff, waited_for = failed >> 12 & 0xfffff;
  const int layer = (int)((failed >> 32) % (unsigned)model_.pass_tags) - 1;
  if (what == kBadCall)
    return "prompt, position and limit do not fit the cache or the result, or a token is outside the vocabulary, or "
           "the recurrent state belongs to another position";
  std::string which = std::string(missing[what]) + " " + std::to_string(waited_for);
  if (what == kAtPacket) {
    const int cta = waited_for / kPacketWords;
    which = "the draw of CTA " + std::to_string(cta % model_.ctas) + " of lane " + std::to_string(cta / model_.ctas);
  }
  return "lane " + std::to_string(lane) + (layer < 0 ? "" : ", layer " + std::to_string(layer)) +
         ": timed out waiting for " + which + " after " + std::to_string(timeout_ms(what)) + " ms";
}

std::vector<Stuck> Session::stuck() const {
  std::vector<Stuck> found;
  const uint32_t call =
      (uint32_t)(*(volatile unsigned long long*)&host_->failure >> 32) & ~(uint32_t)(model_.pass_tags - 1);
  for (size_t i = 0; call && i < devices_.size() * (size_t)model_.grid; i++)
    if (stuck_[i].call == call) found.push_back(stuck_[i]);
  std::stable_sort(found.begin(), found.end(), [](const Stuck& a, const Stuck& b) { return a.time_ns < b.time_ns; });
  return found;
}

double Session::read_pass(const void* const* weights) {
  const std::lock_guard<std::mutex> lock(launching_);
  double longest = 0;
  for (size_t d = 0; d < devices_.size(); d++) {
    const Device& device = devices_[d];
    driver_.use(device.ordinal);
    Params params{};
    params.weights = weights[d];
    params.host = host_;
    set_timeouts(params);
    void* arguments[] = {&params};
    const auto seconds = [&](int passes) {
      params.room = passes;
      driver_.synchronize();
      const int64_t began = now_ns();
      driver_.launch(device.read, model_.lanes_here * model_.ctas, model_.threads, model_.shared_bytes, nullptr,
                     arguments);
      driver_.synchronize();
      return 1e-9 * (double)(now_ns() - began);
    };
    constexpr int kFew = 1, kMore = 5;  // their difference does not contain the time of the launch
    const double few = seconds(kFew), more = seconds(kMore);
    longest = std::max(longest, (more - few) / (kMore - kFew));
  }
  return longest;
}

void Session::trace(int64_t spans) {
  const std::lock_guard<std::mutex> lock(launching_);
  max_spans_ = spans;
  for (Device& device : devices_) {
    driver_.use(device.ordinal);
    for (Address* address : {&device.spans, &device.num_spans}) {
      if (*address) driver_.release(*address);
      *address = 0;
    }
    if (spans == 0) continue;
    const size_t ctas = (size_t)model_.grid;
    device.spans = driver_.allocate(ctas * (size_t)spans * sizeof(Span));
    device.num_spans = driver_.allocate(ctas * sizeof(int));
  }
}

int64_t Session::spans(int cta, Span* to, int64_t room) const {
  const int each = model_.lanes_here * model_.ctas;
  const Device& device = devices_[(size_t)(cta / each)];
  if (!device.spans) return 0;
  driver_.use(device.ordinal);
  int count = 0;
  driver_.copy_from(&count, device.num_spans + sizeof(int) * (cta % each), sizeof count);
  const int64_t n = std::min<int64_t>(count, room);
  if (to && n)
    driver_.copy_from(to, device.spans + sizeof(Span) * (Address)(cta % each) * (Address)max_spans_,
                      (size_t)n * sizeof(Span));
  return count;
}

}  // namespace gpu
}  // namespace laneformer
