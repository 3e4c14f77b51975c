// Whole answers of a small random model: any number of threads draws the same tokens under any delays. Also cancelled
// calls and late workers. ThreadSanitizer runs this program to find accesses to memory without synchronization.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>

#include "decoder_model.h"

using namespace laneformer;

namespace {

struct Counts {
  explicit Counts(const Drafting& of) {
    for (int rows = 1; rows <= kMostRows; rows++)
      passes += of.passes[rows - 1], drafted += (rows - 1) * of.passes[rows - 1];
  }
  int64_t passes = 0, drafted = 0;
};

// Passes of several rows draw the same tokens as passes of one row, with any drafts. most: how many drafts a pass has.
void any_drafts(Decoder& decoder, const Result& expected, int prompt, int limit, const char* what,
                const std::vector<int>& most = {1, 2, 5, kMostRows - 1}) {
  Speculation speculation;
  speculation.most = kMostRows - 1;
  same(expected, generate(decoder, prompt, limit, speculation), what);  // drafts from the text
  CHECK(Counts(decoder.slot().drafting).passes <= limit - 1, "%s: too many passes", what);
  speculation.corrected = true;  // by the times of the passes
  same(expected, generate(decoder, prompt, limit, speculation), what);
  speculation.corrected = false;
  speculation.given = expected.tokens;
  same(expected, generate(decoder, prompt, limit, speculation), what);
  const int rest = limit - 1;  // tokens after the one that the prompt draws
  CHECK(Counts(decoder.slot().drafting).passes == (rest + kMostRows - 1) / kMostRows, "%s: right drafts were dropped",
        what);
  for (size_t i = 0; i < expected.tokens.size(); i += 3)
    speculation.given[i] = (speculation.given[i] + 1) % decoder.plan().vocab_size;
  for (const int number : most) {
    speculation.most = number;
    same(expected, generate(decoder, prompt, limit, speculation), what);
    CHECK(Counts(decoder.slot().drafting).drafted > decoder.slot().drafting.accepted[0], "%s: no draft was wrong",
          what);
  }
}

struct Way {
  int threads;
  bool messages;
  int chaos_us;
};

// Tokens do not depend on the number of threads or on delays.
void any_threads(int lanes, Layout layout, int head_type, bool experts, const std::vector<Way>& ways) {
  const Model model(lanes, layout, head_type, kCapacity, Dtype::bf16, Dtype::f16, false, experts);
  Decoder one(model.plan(), {1, false, 0, 60000, ""});
  pack(one);
  const Result expected = generate(one), longer = generate(one, 40, 5);
  for (size_t i = 1; i < expected.tokens.size() && layout == Layout::delayed; i++)
    if (expected.tokens[i] != expected.tokens[0])
      break;
    else
      CHECK(i + 1 < expected.tokens.size(), "all tokens are %d, so this test proves little", expected.tokens[0]);
  for (const Way& way : ways) {
    Decoder decoder(model.plan(), {way.threads, way.messages, way.chaos_us, 60000, ""});
    pack(decoder);
    char what[100];
    std::snprintf(what, sizeof what, "%d lanes, layout %d, head %d, %d threads%s, chaos %d", lanes, (int)layout,
                  head_type, decoder.threads(), way.messages ? " by message" : "", way.chaos_us);
    same(expected, generate(decoder), what);
    same(longer, generate(decoder, 40, 5), what);
    any_drafts(decoder, expected, 17, 12, what, {2, kMostRows - 1});
  }
  any_drafts(one, longer, 40, 5, "one thread");
  any_drafts(one, generate(one, 3, 40), 3, 40, "one thread, three passes");
}

// Products in pieces: separate pieces of gate and up, quantized tiles before others, columns in another order, columns
// of zeros.
class Pieces {
 public:
  explicit Pieces(const plan::Plan& plan) : state_(plan, {1, false, 0, 60000, ""}) {
    for (const Product* product : state_.products) {
      const int64_t units = product->units(), first = product->gated || units == 1 ? units : 1;
      std::vector<Piece>& pieces = all_.emplace_back();
      pieces.push_back({0, product->gated ? 2 : 1, first, nullptr, 0, {}, product->columns + 3, {}});
      Piece& piece = pieces[0];
      piece.format.code = product->gated ? Code::int4 : Code::int8, piece.format.rows = true;
      for (int64_t k = -3; k < product->columns; k++) piece.order.push_back(k < 0 ? -1 : (int32_t)k);
      std::reverse(piece.order.begin(), piece.order.end());
      piece.bytes = product->matrices * first * tile_bytes(piece.format, piece.columns);
      tiles_.emplace_back(piece.bytes);
      for (char& byte : tiles_.back()) byte = (char)(0x38 + random_.below(5));  // factors from 4e-5 to 0.012, any codes
      piece.tiles = tiles_.back().data();
      const int64_t rest = (product->gated ? 2 : 1) * units - first;
      if (rest > 0)
        pieces.push_back({product->gated ? 1 : first, pieces[0].step, rest, nullptr, 0, {}, product->columns, {}});
    }
  }
  void map(Decoder& decoder) const {
    for (size_t i = 0; i < all_.size(); i++) decoder.map((int)i, all_[i]);
  }

 private:
  DecodeState state_;
  Random random_{5};
  std::vector<std::vector<Piece>> all_;
  std::vector<std::vector<char>> tiles_;
};

void any_threads_with_pieces() {
  const Model model(2, Layout::delayed, 0);
  const Pieces pieces(model.plan());
  Result expected;
  for (const int threads : {1, 2, 5}) {
    Decoder decoder(model.plan(), {threads, threads == 2, 0, 60000, ""});
    pack(decoder);
    const Result plain = generate(decoder);
    pieces.map(decoder);
    const Result found = generate(decoder);
    CHECK(found.logits != plain.logits && decoder.read_pass() > 0, "pieces change nothing");
    if (threads == 1) expected = found;
    same(expected, found, "pieces");
    any_drafts(decoder, expected, 17, 12, "pieces", {kMostRows - 1});
  }
}

// A prompt in calls of any length, also token by token, gives the logits and the caches of one call.
void any_company(const char* instructions, Dtype weight, Dtype cache, bool rounded, bool experts = false) {
  constexpr int kLong = 300, kDrawn = 3;  // two chunks of keys, and a window that begins inside a chunk
  const Model model(2, Layout::delayed, 0, 320, weight, cache, rounded, experts);
  // On a busy machine a call of several threads waits for the scheduler, and there are some 800 calls.
  const int threads = weight == Dtype::f32 ? 2 : 1;
  Decoder decoder(model.plan(), {threads, false, 0, 60000, instructions});
  pack(decoder);
  Buffers whole(decoder.plan(), kLong, kDrawn);
  CHECK(decoder.run(whole.call) == End::length, "the whole prompt");
  for (const int step : {1, 2, 3, 5, 7, 24, 33, 48, 50, 97, 250}) {
    Buffers pieces(decoder.plan(), kLong, kDrawn);
    const std::vector<int32_t> prompt = pieces.call.prompt;
    for (int first = 0; first < kLong; first += step) {
      const int last = std::min(first + step, kLong);
      pieces.call.prompt.assign(prompt.begin() + first, prompt.begin() + last);
      pieces.call.start = first;
      pieces.call.limit = last == kLong ? kDrawn : 1;
      std::fill(pieces.seen.begin(), pieces.seen.end(), 0);
      CHECK(decoder.run(pieces.call) == End::length, "tokens %d to %d", first, last);
    }
    CHECK(std::memcmp(whole.logits.data(), pieces.logits.data(), whole.logits.size() * sizeof(float)) == 0 &&
              whole.caches == pieces.caches,
          "%s, dtypes %d and %d%s: calls of %d tokens give other bits", instructions, (int)weight, (int)cache,
          rounded ? ", rounded" : "", step);
  }
}

// The mask of the tokens that a call may draw next, a few of them. It is a function of the call and the token's number.
std::vector<uint32_t> mask_of(int call, int number) {
  Random random(1000 * call + number + 1);
  std::vector<uint32_t> words((kVocab + 31) / 32);
  for (int i = 0; i < 3; i++) {
    const int token = random.below(kVocab);
    words[token / 32] |= 1u << token % 32;
  }
  return words;
}

// Acts as the host of a masked call. It takes up to delay_us microseconds for each mask.
void give_masks(Decoder& decoder, int slot, int call, int limit, int delay_us) {
  Random random(call);
  for (int32_t n = 0; n < limit; n++) {
    if (delay_us && random.below(2)) std::this_thread::sleep_for(std::chrono::microseconds(random.below(delay_us)));
    const std::vector<uint32_t> words = mask_of(call, n);
    decoder.give_mask(n, words.data(), (int64_t)words.size(), slot);
    while (decoder.wait(n, 50, slot) <= n)
      if (decoder.slot(slot).finished()) return;
  }
}

// Calls that run together draw the same tokens as each call alone, whichever calls join and leave meanwhile. Drafts,
// prices, late masks and copied prompts change the rows of passes, but no bit.
void together(int threads, bool messages, int chaos_us, bool experts) {
  constexpr int kSlots = 4, kEach = 6;
  const Model model(2, Layout::delayed, 0, kCapacity, Dtype::bf16, Dtype::f16, false, experts);
  Options options{threads, messages, chaos_us, 60000, ""};
  Decoder alone(model.plan(), {1, false, 0, 60000, ""});
  options.slots = kSlots;
  Decoder decoder(model.plan(), options);
  pack(alone), pack(decoder);
  Random random(31);
  struct Order {
    int prompt, limit, cancel_after;
    Call call;
    Adjustment adjustment;
  };
  std::vector<Order> orders;
  std::vector<std::unique_ptr<Buffers>> expected;
  std::vector<Answer> answers;
  for (int i = 0; i < kSlots * kEach; i++) {
    Order order{1 + random.below(i % 3 ? 12 : 30), 1 + random.below(50), -1, {}, {}};
    if (i % 7 == 3) order.cancel_after = random.below(order.limit);
    expected.push_back(std::make_unique<Buffers>(alone.plan(), order.prompt, order.limit));
    Call& call = expected.back()->call;
    call.sampling.temperature = 0.3f * (float)random.below(4);
    call.sampling.top_p = random.below(2) ? 0.9f : 1.0f;
    call.sampling.repetition_penalty = random.below(2) ? 1.2f : 1.0f;
    call.sampling.top_k = random.below(2) * 20;
    call.sampling.seed = 4LL << 32 | i;
    if (random.below(3) == 0) call.stops = {(int32_t)random.below(kVocab), (int32_t)random.below(kVocab)};
    if (i % 5 == 2) {
      call.sampling.logit_bias = {{random.below(kVocab), 3.0f}};
      call.sampling.presence_penalty = 0.5f, call.sampling.frequency_penalty = 0.25f;
    }
    order.adjustment = adjustment_of(call.sampling, kVocab);
    call.masked = i % 3 == 2;
    Adjustment adjustment = order.adjustment;
    if (!adjustment.bias.empty()) call.adjustment = &adjustment;
    alone.schedule().begin(0);
    std::thread host;
    if (call.masked) host = std::thread([&, i] { give_masks(alone, 0, i, order.limit, 0); });
    alone.run(call);
    if (host.joinable()) host.join();
    for (int n = 0; n < alone.slot().drawn && call.masked; n++)
      CHECK(mask_of(i, n)[alone.slot().answer.tokens[n] / 32] >> alone.slot().answer.tokens[n] % 32 & 1,
            "call %d: token %d is not in its mask", i, n);
    answers.push_back(alone.slot().answer);
    answers.back().tokens.resize(alone.slot().drawn);
    order.call = call;
    if (i % 2 && !call.masked) order.call.speculation.most = 1 + random.below(kMostRows - 1);
    if (i % 4 == 1 && !call.masked) {  // drafts that are right except for some
      order.call.speculation.given = answers.back().tokens;
      for (int32_t& token : order.call.speculation.given)
        if (random.below(5) == 0) token = (token + 1) % kVocab;
    }
    orders.push_back(order);
  }
  // Rows of a prompt beside other calls: a block, some, one, none. With delays only some and none.
  const std::vector<float> slopes = chaos_us ? std::vector{0.1f, 0.6f} : std::vector{0.0f, 0.1f, 0.4f, 0.6f};
  for (const float slope : slopes) {
    for (Order& order : orders)
      for (int i = 0; i < kMostRows; i++) order.call.speculation.prices[i] = 1 + slope * (float)i;
    std::atomic<int64_t> shared{0}, copied{0};
    std::atomic<int64_t> announced[kSlots] = {};  // number of the last call, and length of its prompt
    std::vector<std::thread> clients;
    for (int s = 0; s < kSlots; s++)
      clients.emplace_back([&, s] {
        Random waits(100 + s);
        for (int i = s; i < (int)orders.size(); i += kSlots) {
          const Order& order = orders[i];
          Buffers own(decoder.plan(), order.prompt, order.limit);
          const Buffers& right = *expected[i];
          Call call = order.call;
          call.caches = own.call.caches, call.seen = own.seen.data();
          call.logits = own.logits.data();
          Adjustment adjustment = order.adjustment;
          if (call.adjustment) call.adjustment = &adjustment;
          std::this_thread::sleep_for(std::chrono::microseconds(waits.below(300)));
          announced[s] = decoder.schedule().begin(s) << 8 | order.prompt;  // all prompts begin with the same tokens
          const int other = waits.below(kSlots);
          const int64_t theirs = announced[other];
          if (theirs && waits.below(4))
            call.source = Source{other, theirs >> 8, std::min(theirs & 255, (int64_t)order.prompt) - 1};
          std::thread canceller;
          if (order.cancel_after >= 0)
            canceller = std::thread([&] {
              decoder.wait(order.cancel_after, 60000, s);
              decoder.slot(s).cancel.store(1);
            });
          std::thread host;
          if (call.masked) host = std::thread([&] { give_masks(decoder, s, i, order.limit, 2500); });
          const End end = decoder.run(call, s);
          if (host.joinable()) host.join();
          if (canceller.joinable()) canceller.join();
          const Slot& slot = decoder.slot(s);
          shared += slot.shared, copied += slot.copied;
          const int drawn = slot.drawn, all = (int)answers[i].tokens.size();
          CHECK(end == End::cancelled ? order.cancel_after >= 0 && drawn <= all : drawn == all,
                "call %d ended by %d after %d of %d tokens", i, (int)end, drawn, all);
          CHECK(slot.finished() &&
                    std::equal(&slot.answer.tokens[0], &slot.answer.tokens[0] + drawn, &answers[i].tokens[0]) &&
                    std::memcmp(slot.answer.logprobs.data(), answers[i].logprobs.data(), drawn * sizeof(float)) == 0 &&
                    std::memcmp(slot.answer.top_tokens.data(), answers[i].top_tokens.data(), 3 * drawn * sizeof(int)) ==
                        0,
                "call %d of slot %d depends on other calls", i, s);
          CHECK(std::memcmp(own.logits.data(), right.logits.data(), (int64_t)drawn * kVocab * sizeof(float)) == 0,
                "call %d of slot %d: other logits beside other calls", i, s);
          // Rows of wrong drafts are beyond the end of the text.
          const int64_t filled = call.start + slot.absorbed + std::max(drawn - 1, 0);
          const int64_t bytes = filled * kKvHeads * kHeadDim * bytes_of((Dtype)decoder.plan().cache_dtype);
          for (size_t c = 0; c < own.caches.size(); c++)
            CHECK(std::memcmp(own.caches[c].data(), right.caches[c].data(), bytes) == 0,
                  "call %d of slot %d: another cache %zu beside other calls", i, s, c);
          if (end != End::cancelled) CHECK(own.seen == right.seen, "call %d: `seen` has other tokens", i);
        }
      });
    for (std::thread& client : clients) client.join();
    CHECK(copied > 0, "no prompt was copied with a price of %g", 1 + slope);
    CHECK(slope > 0.5f ? shared == 0 : shared > 0, "%d passes were shared with a price of %g", (int)shared, 1 + slope);
  }
}

void cancelling(bool messages) {
  const Model model(2, Layout::delayed, 0);
  Decoder decoder(model.plan(), {2, messages, 200, 60000, ""});
  pack(decoder);
  Buffers buffers(decoder.plan(), 20, kCapacity - 20);
  decoder.schedule().begin(0);
  int32_t seen = 0;
  std::thread other([&] {
    while (seen < 3) seen = decoder.wait(seen, 50);
    for (int32_t i = 0; i < seen; i++)
      CHECK(decoder.slot().answer.tokens[i] >= 0 && decoder.slot().answer.tokens[i] < kVocab, "token %d is %d", i,
            decoder.slot().answer.tokens[i]);
    decoder.slot().cancel.store(1);
  });
  buffers.call.speculation.most = kMostRows - 1;
  const End end = decoder.run(buffers.call);
  other.join();
  CHECK(end == End::cancelled && decoder.slot().finished(), "ended by %d", (int)end);
  CHECK(decoder.slot().drawn_tokens() >= seen && decoder.slot().drawn_tokens() < buffers.call.limit,
        "%d tokens, %d of them streamed", decoder.slot().drawn_tokens(), seen);
  CHECK(decoder.wait(decoder.slot().drawn_tokens(), 60000) == decoder.slot().drawn_tokens(),
        "wait after the end of the call");
  decoder.schedule().begin(0);
  decoder.slot().cancel.store(1);  // before the call starts
  CHECK(decoder.run(buffers.call) == End::cancelled && decoder.slot().drawn_tokens() == 0,
        "%d tokens of a cancelled call", decoder.slot().drawn_tokens());
  buffers.call.limit = 4;
  CHECK(decoder.run(buffers.call) == End::length && decoder.slot().drawn_tokens() == 4, "the next call drew %d tokens",
        decoder.slot().drawn_tokens());
}

// Delays are about as long as the timeout, so some calls fail. The next calls must not use anything that a failed call
// left. The timeout that lets only some calls fail depends on the machine's load, so several are tried.
void failing(bool messages) {
  constexpr int kDelayMs = 30;
  const Model model(2, Layout::delayed, 0);
  Decoder one(model.plan(), {1, false, 0, 60000, ""});
  pack(one);
  const Result expected = generate(one, 2, 2);
  int failed = 0, came = 0;
  for (int patience = kDelayMs; patience < 2000 && (failed == 0 || came == 0); patience = patience * 5 / 4) {
    Decoder hasty(model.plan(), {2, messages, 1000 * kDelayMs, patience, ""});
    pack(hasty);
    failed = came = 0;
    for (int i = 0; i < 20 && (failed == 0 || came == 0); i++) {
      try {
        same(expected, generate(hasty, 2, 2), "after a failure");
        came += failed > 0;
      } catch (const std::runtime_error& error) {
        const std::string text = error.what();
        CHECK(text.find(" " + std::to_string(patience) + " ms") != std::string::npos, "%s", text.c_str());
        CHECK(hasty.slot().finished(), "a failed call has not ended");
        failed++;
      }
    }
  }
  CHECK(failed > 0 && came > 0, "%d calls failed, %d succeeded after a failure", failed, came);
}

// Truncated or changed words cause an exception or decode as a valid plan, without accesses out of bounds.
void damaged_plans(bool experts) {
  const Model model(2, Layout::delayed, 0, kCapacity, Dtype::bf16, Dtype::f16, false, experts);
  const auto decodes = [](const std::vector<int32_t>& words, size_t floats, const std::vector<float>& values) {
    const std::vector<int32_t> exact(words);  // without spare capacity, so that sanitizers detect reads beyond the end
    try {
      plan::decode(exact.data(), exact.size(), values.data(), floats);
    } catch (const std::runtime_error& error) {
      CHECK(std::strstr(error.what(), "damaged plan: ") == error.what(), "another message: %s", error.what());
      return false;
    }
    return true;
  };
  CHECK(decodes(model.words, model.floats.size(), model.floats), "the whole plan");
  for (size_t length = 0; length < model.words.size(); length++) {
    std::vector<int32_t> words(model.words.begin(), model.words.begin() + (int64_t)length);
    CHECK(!decodes(words, model.floats.size(), model.floats), "%zu words", length);
    if (length > 1) words[1] = (int32_t)length;
    CHECK(!decodes(words, model.floats.size(), model.floats), "%zu words with that count", length);
  }
  CHECK(!decodes(model.words, model.floats.size() - 1, model.floats), "a float is missing");
  int refused = 0;
  for (size_t at = 0; at < model.words.size(); at++)
    for (const int32_t value : {-1, 0, 1, 2, 7, 1000, 1 << 20, INT32_MAX, INT32_MIN, model.words[at] + 1}) {
      std::vector<int32_t> words(model.words);
      words[at] = value;
      refused += !decodes(words, model.floats.size(), model.floats);
    }
  CHECK(refused > 7 * (int)model.words.size(), "of %zu changed plans %d were refused", 10 * model.words.size(),
        refused);
}

void refusing() {
  Model model(2, Layout::delayed, 0);
  const auto refused = [](const auto& action) {
    try {
      action();
    } catch (const std::runtime_error&) {
      return true;
    }
    return false;
  };
  CHECK(refused([&] { Decoder(model.plan(), {1, false, 0, 1000, "avx9000"}); }), "unknown instructions");
  Decoder decoder(model.plan(), {2, false, 3000, 60000, ""});
  pack(decoder);
  const std::vector<float> zeros(kHidden + 1);
  CHECK(refused([&] { decoder.pack(-1, zeros.data(), 1, Dtype::f32); }), "weight -1");
  CHECK(refused([&] { decoder.pack(kOfLayer * kLayers + 3, zeros.data(), 1, Dtype::f32); }), "an unknown weight");
  CHECK(refused([&] { decoder.pack(1, zeros.data(), kHidden + 1, Dtype::f32); }), "a norm with an extra gain");
  Buffers first(decoder.plan(), 1, 20), second(decoder.plan(), 1, 2);
  decoder.schedule().begin(0);
  std::thread other([&] {
    decoder.wait(0, 60000);
    CHECK(refused([&] { decoder.run(second.call); }), "two calls at once");
  });
  CHECK(decoder.run(first.call) == End::length, "the first of two calls at once");
  other.join();
  CHECK(decoder.slot().drawn_tokens() == 20, "the second of two calls at once changed the first: %d tokens",
        decoder.slot().drawn_tokens());
  CHECK(decoder.read_pass() > 0, "no time for a pass over the weights");
  CHECK(decoder.time_passes({1, kMostRows}, 2).at(1) > 0, "no time for a pass of several rows");
  CHECK(refused([&] { decoder.time_passes({kMostRows}, kCapacity); }), "more passes than the context has room for");
  CHECK(refused([&] { decoder.schedule().speculate(kMostRows, Speculation().prices.data(), false); }),
        "more drafts than rows");
  const auto invalid = [&](auto change) {
    Request request;
    change(request);
    try {
      decoder.check(request);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  CHECK(!invalid([](Request& r) { r.before = {kEndOfText}, r.forced = {kVocab - 1}, r.given = {-1}; }), "valid texts");
  CHECK(invalid([](Request& r) { r.before = {-2}; }), "a text of no token");
  CHECK(invalid([](Request& r) { r.forced = {kVocab}; }), "a token beyond the vocabulary");
  CHECK(invalid([](Request& r) { r.sampling.logit_bias = {{-1, 1.0f}}; }), "a bias of no token");
  CHECK(invalid([](Request& r) { r.source = Source{1, 1, 1}; }), "a source in a slot that does not exist");
}

}  // namespace

// Argument `instructions`: only the tests that depend on the instruction set. Argument `all`: every layout in every
// way.
int main(int count, char** arguments) {
  const std::string only = count > 1 ? arguments[1] : "";
  for (const char* instructions : {"portable", "avx2", "avx512", "avx512_bf16", "amx"}) {
    if (choose_kernels(instructions) == nullptr) continue;
    for (const Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::f16}) any_company(instructions, dtype, dtype, false);
    any_company(instructions, Dtype::bf16, Dtype::f32, false);
    any_company(instructions, Dtype::bf16, Dtype::bf16, true);
    any_company(instructions, Dtype::bf16, Dtype::bf16, true, true);
  }
  if (only == "instructions") return 0;
  // Each layout by message and in shared memory, with delays. A pass of several threads waits for the scheduler.
  any_threads(3, Layout::delayed, 0, false, {{3, false, 30}, {1, true, 30}});
  any_threads(2, Layout::ladder, 1, false, {{3, false, 30}, {1, true, 30}});
  any_threads(3, Layout::desync, 2, true, {{2, false, 30}, {1, true, 30}});
  any_threads(4, Layout::early, 0, false, {{4, false, 30}, {1, true, 0}});
  any_threads(1, Layout::delayed, 0, true, {{3, false, 0}});
  for (const int lanes : {1, 2, 3, 4})
    for (const Layout layout : {Layout::delayed, Layout::ladder, Layout::desync, Layout::early})
      if (only == "all")
        any_threads(lanes, layout, (int)layout % 3, lanes == 2,
                    {{2, false, 0}, {3, false, 0}, {lanes, false, 30}, {3, false, 30}, {1, true, 0}, {1, true, 30}});
  any_threads_with_pieces();
  together(2, false, 0, false);
  together(3, false, 30, true);
  together(2, true, 30, false);
  together(1, false, 0, true);
  if (only == "all") together(3, false, 30, false), together(2, true, 30, true);
  cancelling(false);
  cancelling(true);
  failing(true);
  failing(false);
  damaged_plans(false);
  damaged_plans(true);
  refusing();
  return 0;
}
