// Whole generations of a small random model: any number of threads draws the same, whatever delays them; cancelling,
// and workers that do not come. For ThreadSanitizer above all, which knows when two of them touch the same memory
// without having met.
#include "decoder.h"

#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "check.h"

using namespace laneformer;

namespace {

constexpr int kLayers = 2, kHidden = 20, kHeads = 2, kKvHeads = 1, kHeadDim = 6, kFf = 10, kVocab = 45, kCapacity = 80;

enum class Layout { delayed, ladder, desync, early };

// A model and its schedule, by hand: the table of Decoder::read_events.
struct Table {
  std::vector<int32_t> words, windows{0, 9};
  std::vector<float> weights, frequencies;
  LaneformerModel model{};

  Table(int lanes, Layout layout, int head_type) {
    constexpr int modules = 2 * kLayers;
    const auto weight = [&](float value) {
      weights.push_back(value);
      return (int32_t)weights.size() - 1;
    };
    const auto add = [&](std::initializer_list<int32_t> more) { words.insert(words.end(), more); };
    for (int t = 0; t <= modules; t++) {
      switch (layout) {
        case Layout::delayed:  // own parts at once, the others' one module later
          if (t == 0) add({1, 0, t, weight(1.5f)});
          if (t > 0 && t < modules) add({2, 0, t, weight(1), 1, t - 1, 1, t - 1, weight(1)});
          if (t == modules) add({1, 1, t - 1, 1, t - 1, weight(1)});
          break;
        case Layout::ladder:  // the whole sum one module later
          if (t == 0) add({0});
          if (t > 0) add({1, 1, t - 1, 0});
          break;
        case Layout::desync:  // every module is summed, with the mean of the streams
          if (t < modules) add({2, 0, t, weight(1), 1, t, 0});
          if (t == modules) add({0});
          break;
        case Layout::early:  // summed at once, and landing again two modules later
          if (t < 2) add({1, 1, t, 0});
          if (t >= 2 && t < modules) add({2, 0, t, weight(1), 1, t - 2, 1, t - 2, weight(1)});
          if (t == modules) add({0});
          break;
      }
    }
    const int sums = layout == Layout::early ? 2 : modules;
    add({sums});
    for (int m = 0; m < sums; m++)
      add({layout == Layout::ladder ? kHidden / 2 : kHidden, m, layout == Layout::desync, 1, m, weight(1)});
    for (int i = 0; i < kHeadDim / 2; i++) frequencies.push_back(std::pow(100.0f, -2.0f * (float)i / kHeadDim));
    model.layers = kLayers, model.lanes = lanes, model.hidden = kHidden, model.heads = kHeads,
    model.kv_heads = kKvHeads;
    model.head_dim = kHeadDim, model.ff = kFf, model.vocab = head_type == 2 ? kVocab / lanes * lanes : kVocab,
    model.context = kCapacity;
    model.head_type = head_type, model.norm_of_sum = layout == Layout::early && head_type == 0, model.weight_dtype = 1,
    model.cache_dtype = 2;
    model.norm_eps = 1e-5f, model.rope_factor = 1;
    model.rope_frequencies = frequencies.data(), model.windows = windows.data();
    model.events = words.data(), model.event_weights = weights.data(), model.num_events = (int32_t)words.size();
  }
};

void pack(Decoder& decoder) {
  const LaneformerModel& m = decoder.model();
  Random random(9);
  const auto give = [&](const char* name, int layer, int64_t count, float size) {
    decoder.pack(name, layer, random.floats(count, -size, size).data(), count, Dtype::f32);
  };
  const auto norm = [&](const char* name, int layer) {
    decoder.pack(name, layer, random.floats(m.hidden, 0.5f, 1.5f).data(), m.hidden, Dtype::f32);
  };
  give("tok_embeddings", 0, m.vocab * m.hidden, 1);
  for (int layer = 0; layer < m.layers; layer++) {
    norm("attention_norm", layer);
    const int64_t into = (int64_t)m.lanes * m.hidden;
    give("attention.wq", layer, into * m.heads * m.head_dim, 0.4f);
    give("attention.wk", layer, into * m.kv_heads * m.head_dim, 0.4f);
    give("attention.wv", layer, into * m.kv_heads * m.head_dim, 0.4f);
    give("attention.wo", layer, into * m.heads * m.head_dim, 0.4f);
    norm("ffn_norm", layer);
    give("feed_forward.w1", layer, into * m.ff, 0.4f);
    give("feed_forward.w3", layer, into * m.ff, 0.4f);
    give("feed_forward.w2", layer, into * m.ff, 0.4f);
  }
  norm("norm", 0);
  give("lm_head", 0, (int64_t)m.vocab * m.hidden * (m.head_type == 1 ? m.lanes : 1), 0.5f);
}

// A call with buffers of its own.
struct Buffers {
  std::vector<std::vector<uint16_t>> caches;
  std::vector<uint8_t> seen;
  std::vector<float> logits;
  Call call;

  Buffers(const LaneformerModel& m, int prompt, int limit) : seen(m.vocab), logits((int64_t)limit * m.vocab) {
    const int64_t size = (int64_t)kCapacity * m.kv_heads * m.head_dim;
    caches.assign(2 * m.layers * m.lanes, std::vector<uint16_t>(size));
    for (int i = 0; i < m.layers * m.lanes; i++) {
      call.keys.push_back(caches[i].data());
      call.values.push_back(caches[m.layers * m.lanes + i].data());
    }
    for (int i = 0; i < prompt; i++) call.prompt.push_back(7 * i % m.vocab);
    call.limit = limit;
    call.top = 3;
    call.seen = seen.data();
    call.logits = logits.data();
    call.sampling = {0.9f, 0.95f, 0.01f, 1.1f, 30, {3, 4}};
  }
};

struct Result {
  std::vector<int32_t> tokens, top_tokens;
  std::vector<float> logits, logprobs;
};

Result generate(Decoder& decoder, int prompt = 17, int limit = 12) {
  Buffers buffers(decoder.model(), prompt, limit);
  const End end = decoder.run(buffers.call);
  CHECK(end == End::length && decoder.drawn() == limit, "ended by %d after %d tokens", (int)end, decoder.drawn());
  return {decoder.tokens, decoder.top_tokens, buffers.logits, decoder.logprobs};
}

void same(const Result& a, const Result& b, const char* what) {
  const auto equal = [](const auto& x, const auto& y) {
    return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof x[0]) == 0;
  };
  CHECK(equal(a.logits, b.logits), "%s: other logits", what);
  CHECK(a.tokens == b.tokens && equal(a.logprobs, b.logprobs) && a.top_tokens == b.top_tokens, "%s: other tokens",
        what);
}

// Tokens do not depend on who computes them, nor on when.
void any_threads(int lanes, Layout layout, int head_type) {
  const Table table(lanes, layout, head_type);
  Decoder one(table.model, {1, 0, 0, 60000, nullptr});
  pack(one);
  const Result expected = generate(one), longer = generate(one, 40, 5);
  for (size_t i = 1; i < expected.tokens.size() && layout == Layout::delayed; i++)
    if (expected.tokens[i] != expected.tokens[0])
      break;
    else
      CHECK(i + 1 < expected.tokens.size(), "all tokens are %d: this proves little", expected.tokens[0]);
  struct {
    int threads, messages, chaos_us;
  } const ways[] = {{2, 0, 0}, {3, 0, 0}, {lanes, 0, 30}, {3, 0, 30}, {1, 1, 0}, {1, 1, 30}};
  for (const auto& way : ways) {
    Decoder decoder(table.model, {way.threads, way.messages, way.chaos_us, 60000, nullptr});
    pack(decoder);
    char what[100];
    std::snprintf(what, sizeof what, "%d lanes, layout %d, head %d, %d threads%s, chaos %d", lanes, (int)layout,
                  head_type, decoder.threads(), way.messages ? " by message" : "", way.chaos_us);
    same(expected, generate(decoder), what);
    same(longer, generate(decoder, 40, 5), what);
    same(expected, generate(decoder), what);
  }
}

void cancelling(bool messages) {
  const Table table(2, Layout::delayed, 0);
  Decoder decoder(table.model, {2, messages, 200, 60000, nullptr});
  pack(decoder);
  Buffers buffers(table.model, 20, kCapacity - 20);
  decoder.begin();
  int32_t seen = 0;
  std::thread other([&] {
    while (seen < 3) seen = decoder.wait(seen, 50);
    for (int32_t i = 0; i < seen; i++)
      CHECK(decoder.tokens[i] >= 0 && decoder.tokens[i] < kVocab, "token %d is %d", i, decoder.tokens[i]);
    decoder.cancel();
  });
  const End end = decoder.run(buffers.call);
  other.join();
  CHECK(end == End::cancelled && decoder.finished(), "ended by %d", (int)end);
  CHECK(decoder.drawn() >= seen && decoder.drawn() < buffers.call.limit, "%d tokens, %d were seen", decoder.drawn(),
        seen);
  CHECK(decoder.wait(decoder.drawn(), 60000) == decoder.drawn(), "waiting for an ended call");
  decoder.begin();
  decoder.cancel();  // before it begins
  CHECK(decoder.run(buffers.call) == End::cancelled && decoder.drawn() == 0, "%d tokens of a cancelled call",
        decoder.drawn());
  buffers.call.limit = 4;
  CHECK(decoder.run(buffers.call) == End::length && decoder.drawn() == 4, "the next call drew %d tokens",
        decoder.drawn());
}

// Delays about as long as the patience: some calls fail, and leave nothing behind that the others could take for
// theirs. How much patience that takes depends on what else the machine does.
void failing(bool messages) {
  constexpr int kDelayMs = 30;
  const Table table(2, Layout::delayed, 0);
  Decoder one(table.model, {1, 0, 0, 60000, nullptr});
  pack(one);
  const Result expected = generate(one, 2, 2);
  int failed = 0, came = 0;
  for (int patience = kDelayMs; patience < 2000 && (failed == 0 || came == 0); patience = patience * 5 / 4) {
    Decoder hasty(table.model, {2, messages, 1000 * kDelayMs, patience, nullptr});
    pack(hasty);
    failed = came = 0;
    for (int i = 0; i < 20 && (failed == 0 || came == 0); i++) {
      try {
        same(expected, generate(hasty, 2, 2), "after a failure");
        came += failed > 0;
      } catch (const std::runtime_error& error) {
        const std::string text = error.what();
        CHECK(text.find(" within " + std::to_string(patience) + " ms") != std::string::npos, "%s", text.c_str());
        CHECK(hasty.finished(), "a failed call goes on");
        failed++;
      }
    }
  }
  CHECK(failed > 0 && came > 0, "%d calls failed, %d came after one that did", failed, came);
}

void refusing() {
  Table table(2, Layout::delayed, 0);
  const auto refused = [](const auto& action) {
    try {
      action();
    } catch (const std::runtime_error&) {
      return true;
    }
    return false;
  };
  CHECK(refused([&] { Decoder(table.model, {1, 0, 0, 1000, "avx9000"}); }), "unknown instructions");
  table.model.num_events -= 3;
  CHECK(refused([&] { Decoder(table.model, {1, 0, 0, 1000, nullptr}); }), "half of a schedule");
  table.model.num_events += 3;
  Decoder decoder(table.model, {2, 0, 3000, 60000, nullptr});
  pack(decoder);
  CHECK(refused([&] { decoder.pack("attention.wx", 0, nullptr, 1, Dtype::f32); }), "an unknown weight");
  Buffers first(table.model, 1, 20), second(table.model, 1, 2);
  decoder.begin();
  std::thread other([&] {
    decoder.wait(0, 60000);
    CHECK(refused([&] { decoder.run(second.call); }), "two calls at once");
  });
  CHECK(decoder.run(first.call) == End::length, "the first of two calls at once");
  other.join();
  CHECK(decoder.drawn() == 20, "the second of two calls at once changed the first: %d tokens", decoder.drawn());
  CHECK(decoder.read_pass() > 0, "a pass over the weights");
}

}  // namespace

int main() {
  for (const int lanes : {2, 3})
    for (const Layout layout : {Layout::delayed, Layout::ladder, Layout::desync, Layout::early})
      any_threads(lanes, layout, (int)layout % 3);
  any_threads(4, Layout::early, 0);
  any_threads(1, Layout::delayed, 0);
  cancelling(false);
  cancelling(true);
  failing(true);
  failing(false);
  refusing();
  return 0;
}
