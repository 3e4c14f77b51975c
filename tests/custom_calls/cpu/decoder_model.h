// A small random model for decoder_test.cc, and functions that call it.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "decoder.h"

namespace laneformer {

constexpr int kLayers = 2, kHidden = 20, kHeads = 2, kKvHeads = 1, kHeadDim = 6, kFf = 10, kVocab = 45, kCapacity = 80,
              kExperts = 5, kUsed = 2;

enum class Layout { delayed, ladder, desync, early };

// The weights of a layer in order. Weight 0 of the model is the embedding.
enum Weights { kNorm, kWq, kWk, kWv, kWo, kFfnNorm, kW1, kW3, kW2, kOfLayer };

// A model's plan as words in the format of custom_calls/words.py, written by hand.
struct Model {
  std::vector<int32_t> words;
  std::vector<float> floats;
  int lanes, head_type, vocab;
  bool experts;

  Model(int lanes, Layout layout, int head_type, int capacity = kCapacity, Dtype weight = Dtype::bf16,
        Dtype cache = Dtype::f16, bool rounded = false, bool experts = false)
      : lanes(lanes), head_type(head_type), vocab(head_type == 2 ? kVocab / lanes * lanes : kVocab), experts(experts) {
    add({6, 0, 0, (2 * kLayers + 1) * kHidden});  // the counts of words and floats are filled in at the end
    weights();
    add({1, kHeadDim / 2, (int)floats.size(), kHeadDim / 2});  // one rotation; its factor follows the frequencies
    for (int i = 0; i < kHeadDim / 2; i++) floats.push_back(std::pow(100.0f, -2.0f * (float)i / kHeadDim));
    floats.push_back(1);
    add({lanes, kHidden, vocab, capacity, 0, number(1.5f), kLayers});
    for (int layer = 0; layer < kLayers; layer++) ops(layer);
    add({head_type, kOfLayer * kLayers + 1, number(1e-5f), layout == Layout::early && head_type == 0,
         kOfLayer * kLayers + 2, 0, 1, number(3)});
    schedule(layout);
    add({(int32_t)weight, (int32_t)cache, rounded});
    words[1] = (int32_t)words.size(), words[2] = (int32_t)floats.size();
  }

  plan::Plan plan() const { return plan::decode(words.data(), words.size(), floats.data(), floats.size()); }

 private:
  void add(std::initializer_list<int32_t> more) { words.insert(words.end(), more); }
  int32_t number(float value) {
    floats.push_back(value);
    return (int32_t)floats.size() - 1;
  }

  void weights() {
    const auto vector = [&](int place) { add({0, 0, place * kHidden, 0, 1, kHidden}); };
    const auto matrix = [&](int rows, int columns, bool sharded = true, int experts = 0) {
      add({sharded, experts, -1, 0, 2, rows, columns});
    };
    const int each = experts ? kExperts : 0;
    add({kOfLayer * kLayers + 3 + experts});
    matrix(vocab, kHidden, false);
    for (int layer = 0; layer < kLayers; layer++) {
      vector(2 * layer);
      matrix(kHeads * kHeadDim, kHidden);
      matrix(kKvHeads * kHeadDim, kHidden);
      matrix(kKvHeads * kHeadDim, kHidden);
      matrix(kHidden, kHeads * kHeadDim);
      vector(2 * layer + 1);
      matrix(kFf, kHidden, true, each);
      matrix(kFf, kHidden, true, each);
      matrix(kHidden, kFf, true, each);
    }
    vector(2 * kLayers);
    matrix(head_type == 2 ? vocab / lanes : vocab, kHidden, head_type != 0);
    if (experts) matrix(kExperts, kHidden, false);  // one router for all layers
  }

  void ops(int layer) {
    const int32_t first = 1 + kOfLayer * layer, eps = number(1e-5f), zero = number(0);
    const int32_t scale = number(1.0f / std::sqrt((float)kHeadDim));
    const auto op = [&](int kind, std::initializer_list<int32_t> fields) {
      add({kind, (int32_t)fields.size()});
      add(fields);
    };
    add({3});
    op(0, {0, 3, first + kWq, 0, first + kWk, 0, first + kWv, 0, 0, 1, 1, first + kNorm, eps, 0, 0, 0, zero, 0, 0});
    if (layer == 1) {
      op(1,
         {0, 1, number(2), kHeads, kKvHeads, kHeadDim, scale, 1, 9, 1, 0, 0, 0, 0});  // a softcap, a window of 9 keys
    } else {
      op(1, {0, 0, kHeads, kKvHeads, kHeadDim, scale, 0, 1, 0, 0, 0, 0});
    }
    op(0, {1, 1, first + kWo, 0, 2, 4, 0, 0, 0, 0, zero, 0, 0});
    if (layer == 1) {
      add({1, first + kNorm, eps});  // of the sum
    } else {
      add({0});
    }
    add({2 + (layer == 0) + experts});
    if (experts) {
      op(3, {kOfLayer * kLayers + 3, 0, kUsed, 1, 1, first + kFfnNorm, eps});
      op(0, {2, 2, first + kW1, 0, first + kW3, 0, 0, 3, 1, first + kFfnNorm, eps, 1, 1, 0, zero, 1, kUsed, 0, 0});
      op(0, {3, 1, first + kW2, 0, 3, 4, 0, 0, 0, 0, zero, 1, kUsed, 1, 0});
    } else {
      op(0, {2, 2, first + kW1, 0, first + kW3, 0, 0, 3, 1, first + kFfnNorm, eps, 1, 1, 0, zero, 0, 0});
      op(0, {3, 1, first + kW2, 0, 3, 4, 0, 0, 0, 0, zero, 0, 0});
    }
    if (layer == 0) op(2, {first + kFfnNorm, eps});
    add({0});
  }

  void schedule(Layout layout) {
    constexpr int modules = 2 * kLayers;
    const int32_t one = number(1), more = number(1.5f);
    const auto own = [&](int module, int32_t weight) { add({-1, module, weight, 0}); };
    const auto lands = [&](int payload) { add({payload, 0, one, 0}); };
    const auto lands_without = [&](int payload, int apart) { add({payload, 0, one, 1, apart, one}); };
    add({modules + 1});
    for (int t = 0; t <= modules; t++) {
      switch (layout) {
        case Layout::delayed:  // own parts are added at once, those of other lanes one module later
          add({t == 0 || t == modules ? 1 : 2});
          if (t < modules) own(t, t == 0 ? more : one);
          if (t > 0) lands_without(t - 1, t - 1);
          break;
        case Layout::ladder:  // the whole sum lands one module later
          add({t > 0});
          if (t > 0) lands(t - 1);
          break;
        case Layout::desync:  // each module's sum lands at once, with the mean of the streams
          add({t < modules ? 2 : 0});
          if (t < modules) own(t, one), lands(t);
          break;
        case Layout::early:  // the first sums land at once, and again two modules later
          add({t == modules ? 0 : t < 2 ? 1 : 2});
          if (t < 2) lands(t);
          if (t >= 2 && t < modules) own(t, one), lands_without(t - 2, t - 2);
          break;
      }
    }
    const int sums = layout == Layout::early ? 2 : modules;
    add({sums});
    for (int m = 0; m < sums; m++)
      add({layout == Layout::ladder ? kHidden / 2 : kHidden, m, layout == Layout::desync, 1, m, one});
  }
};

inline void pack(Decoder& decoder) {
  Random random(9);
  const auto give = [&](int weight, float low, float high) {
    const plan::Weight& w = decoder.plan().weights[weight];
    const int64_t count = w.elements() * (w.lane_sharded ? decoder.plan().lanes : 1);
    decoder.pack(weight, random.floats(count, low, high).data(), count, Dtype::f32);
  };
  const int head = kOfLayer * kLayers + 2;
  give(0, -1, 1);
  for (int weight = 1; weight < (int)decoder.plan().weights.size(); weight++)
    if (weight == head) {
      continue;
    } else if (decoder.plan().weights[weight].is_matrix()) {
      give(weight, -0.4f, 0.4f);
    } else {
      give(weight, 0.5f, 1.5f);
    }
  give(head, -0.5f, 0.5f);
}

// A call with its own buffers.
struct Buffers {
  std::vector<std::vector<char>> caches;
  std::vector<uint8_t> seen;
  std::vector<float> logits;
  Call call;

  Buffers(const plan::Plan& m, int prompt, int limit) : seen(m.vocab_size), logits((int64_t)limit * m.vocab_size) {
    const int64_t size = (int64_t)m.context * kKvHeads * kHeadDim * bytes_of((Dtype)m.cache_dtype);
    caches.assign(2 * kLayers * m.lanes, std::vector<char>(size));
    for (std::vector<char>& cache : caches) {
      call.caches.push_back(cache.data());
      call.widths.push_back(kKvHeads * kHeadDim * bytes_of((Dtype)m.cache_dtype));
    }
    for (int i = 0; i < prompt; i++) call.prompt.push_back(7 * i % m.vocab_size);
    call.limit = limit;
    call.top = 3;
    call.seen = seen.data();
    call.logits = logits.data();
    call.sampling = {0.9f, 30, 0.95f, 0.01f, 1.1f, 4LL << 32 | 3, 0, 0, {}};
  }
};

struct Result {
  std::vector<int32_t> tokens, top_tokens;
  std::vector<float> logits, logprobs;
};

inline Result generate(Decoder& decoder, int prompt = 17, int limit = 12, const Speculation& speculation = {}) {
  Buffers buffers(decoder.plan(), prompt, limit);
  buffers.call.speculation = speculation;
  const End end = decoder.run(buffers.call);
  CHECK(end == End::length && decoder.slot().drawn_tokens() == limit, "ended by %d after %d tokens", (int)end,
        decoder.slot().drawn_tokens());
  return {decoder.slot().answer.tokens, decoder.slot().answer.top_tokens, buffers.logits,
          decoder.slot().answer.logprobs};
}

inline void same(const Result& a, const Result& b, const char* what) {
  const auto equal = [](const auto& x, const auto& y) {
    return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof x[0]) == 0;
  };
  CHECK(equal(a.logits, b.logits), "%s: other logits", what);
  CHECK(a.tokens == b.tokens && equal(a.logprobs, b.logprobs) && a.top_tokens == b.top_tokens, "%s: other tokens",
        what);
}

}  // namespace laneformer
