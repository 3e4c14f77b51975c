// Checks every table of kernels that this machine supports against sums in double, and against conversions by the
// definition of the formats.
#include "latents.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <algorithm>
#include <numeric>

namespace {

// The float32 bits of every 16-bit pattern.
std::vector<uint32_t> all_widened(Dtype dtype) {
  std::vector<uint32_t> bits(1 << 16);
  for (size_t i = 0; i < bits.size(); i++) bits[i] = bits_of((float)value_of(dtype, (uint16_t)i));
  return bits;
}

// Converts every pattern to float32 and back. The comparison uses integers, because this also runs while arithmetic
// treats subnormals as zero.
void round_trips(const Kernels& k, Dtype dtype, const std::vector<uint32_t>& expected) {
  std::vector<uint16_t> all(1 << 16), back(all.size());
  for (size_t i = 0; i < all.size(); i++) all[i] = (uint16_t)i;
  std::vector<float> wide(all.size());
  k.widen(dtype, all.data(), (int64_t)all.size(), wide.data());
  k.narrow(dtype, wide.data(), (int64_t)all.size(), back.data());
  const int infinity = dtype == Dtype::bf16 ? 0x7f80 : 0x7c00;
  for (size_t i = 0; i < all.size(); i++) {
    const uint32_t bits = bits_of(wide[i]);
    if ((i & 0x7fff) > (size_t)infinity) {
      CHECK((bits & 0x7fffffff) > 0x7f800000 && (back[i] & 0x7fff) > infinity, "%s: NaN %04zx became %08x, %04x",
            k.name, i, bits, back[i]);
    } else {
      CHECK(bits == expected[i] && back[i] == i, "%s dtype %d: %04zx became %08x and %04x", k.name, (int)dtype, i, bits,
            back[i]);
    }
  }
}

void halves(const Kernels& k, Dtype dtype) {
  for (int n = 1; n < 40; n++) {  // the ends of vectors, and no write beyond them
    std::vector<uint16_t> from(n);
    for (int i = 0; i < n; i++) from[i] = (uint16_t)(0x3c00 + i);
    std::vector<float> some(n + 1, 7);
    k.widen(dtype, from.data(), n, some.data());
    for (int i = 0; i < n; i++) CHECK(some[i] == value_of(dtype, from[i]), "%s: %d of %d is %g", k.name, i, n, some[i]);
    CHECK(some[n] == 7, "%s: widen wrote beyond %d", k.name, n);
  }
  // A value between two neighbours is rounded to the nearer one, in the middle to the even one. Beyond the largest
  // number, the upper neighbour is infinity.
  for (uint32_t i = 0; i < 0x7fff; i++) {
    const double low = value_of(dtype, (uint16_t)i);
    if (std::isnan(low) || std::isinf(low)) break;
    const double next = value_of(dtype, (uint16_t)(i + 1)),
                 high = std::isinf(next) ? 2 * low - value_of(dtype, (uint16_t)(i - 1)) : next;
    const float middle = (float)((low + high) / 2);
    for (const float sign : {1.0f, -1.0f}) {
      const float x[3] = {sign * std::nextafter(middle, 0.0f), sign * middle, sign * std::nextafter(middle, kInfinity)};
      uint16_t got[3];
      k.narrow(dtype, x, 3, got);
      const uint16_t side = sign < 0 ? 0x8000 : 0;
      const uint16_t even = (uint16_t)(i + i % 2);
      CHECK(got[0] == (i | side) && got[1] == (even | side) && got[2] == ((i + 1) | side),
            "%s: around %a got %04x %04x %04x", k.name, middle, got[0], got[1], got[2]);
    }
  }
}

// Checks attention against sums in double over the keys that each query sees among first..last - 1.
void attend(const Kernels& k, Dtype dtype, int e, int kv_heads, int group, int64_t first, int64_t last, int64_t start,
            int64_t window, int positions) {
  Random random(e + 7 * kv_heads + (uint64_t)last);
  const int heads = kv_heads * group;
  const int64_t stride = (int64_t)kv_heads * e;
  const float softcap = (last + group) % 3 ? 0 : 2.5f;  // in a third of the cases
  const std::vector<float> q = random.floats((int64_t)positions * heads * e, -3, 3);
  const Stored keys(k, dtype, random.floats(last * stride)), values(k, dtype, random.floats(last * stride));
  std::vector<float> out((int64_t)positions * heads * (e + 2) + 1, 7);
  k.attend({q.data(), keys.data.data(), values.data.data(), out.data(), dtype, kv_heads, group, e, first, last, start,
            window, positions, keys.data.data(), values.data.data(), last % 2 ? first : 0, softcap});
  CHECK(out.back() == 7, "%s: attend wrote beyond its result", k.name);
  for (int p = 0; p < positions; p++)
    for (int h = 0; h < heads; h++) {
      const float* got = out.data() + ((int64_t)p * heads + h) * (e + 2);
      const int64_t low = std::max(first, start + p - window + 1), high = std::min(last, start + p + 1);
      std::vector<double> scores;
      for (int64_t t = low; t < high; t++) {
        const double* key = keys.values.data() + t * stride + h / group * e;
        const double score = std::inner_product(key, key + e, q.data() + ((int64_t)p * heads + h) * e, 0.0);
        scores.push_back(softcap > 0 ? softcap * std::tanh(score / softcap) : score);
      }
      if (scores.empty()) {
        CHECK(got[e] == -kInfinity && got[e + 1] == 0, "%s: a query that sees nothing has %g, %g", k.name, got[e],
              got[e + 1]);
        for (int i = 0; i < e; i++) CHECK(got[i] == 0, "%s: a query that sees nothing has %g", k.name, got[i]);
        continue;
      }
      const double largest = *std::max_element(scores.begin(), scores.end());
      const double tolerance = 2e-5 + 1e-6 * std::fabs(largest);
      double sum = 0;
      for (double& score : scores) sum += score = std::exp(score - largest);  // a weight from here on
      CHECK(std::fabs(got[e] - largest) < tolerance && std::fabs(got[e + 1] / sum - 1) < 1e-4 + tolerance,
            "%s: largest %g, sum %g; not %g, %g", k.name, got[e], got[e + 1], largest, sum);
      for (double& weight : scores) weight /= sum;
      std::vector<double> exact(e);
      for (size_t t = 0; t < scores.size(); t++) {
        const double* value = values.values.data() + (low + (int64_t)t) * stride + h / group * e;
        for (int i = 0; i < e; i++) exact[i] += scores[t] * value[i];
      }
      for (int i = 0; i < e; i++)
        CHECK(std::fabs(got[i] / got[e + 1] - exact[i]) < tolerance,
              "%s dtype %d e %d window %ld keys %ld..%ld: p %d h %d i %d: %g, not %g", k.name, (int)dtype, e,
              (long)window, (long)first, (long)last, p, h, i, got[i] / got[e + 1], exact[i]);
    }
  std::vector<float> alone((int64_t)heads * (e + 2));
  for (int p = 0; p < positions; p++) {  // each position alone must have the same bits
    const int64_t low = std::max(first, start + p - window + 1), high = std::min(last, start + p + 1);
    if (low >= high) continue;
    k.attend({q.data() + (int64_t)p * heads * e, keys.data.data(), values.data.data(), alone.data(), dtype, kv_heads,
              group, e, low, high, start + p, window, 1, nullptr, nullptr, 0, softcap});
    CHECK(std::memcmp(alone.data(), out.data() + (int64_t)p * heads * (e + 2), alone.size() * sizeof(float)) == 0,
          "%s dtype %d e %d group %d window %ld: position %d of %d depends on the others", k.name, (int)dtype, e, group,
          (long)window, p, positions);
  }
}

void attends(const Kernels& k) {
  constexpr int64_t all = INT64_MAX / 2;
  for (const Dtype dtype : kDtypes) {
    for (const int e : {2, 6, 16, 24, 40, 64, 96, 128, 130}) {
      attend(k, dtype, e, 1, 1, 0, 1, 0, all, 1);
      attend(k, dtype, e, 2, 3, 0, 70, 69, all, 1);
      attend(k, dtype, e, 1, 2, 0, 21, 5, 3, 16);
    }
    attend(k, dtype, 24, 3, 1, 64, 200, 190, 100, 10);  // some of the keys, of which some queries see none
    attend(k, dtype, 24, 1, 4, 10, 40, 24, 1, 16);
    attend(k, dtype, 24, 1, 2, 0, 16, 20, 8, 4);
    for (int last = 1; last < 12; last++) attend(k, dtype, 8, 1, 1, 0, last, last - 1, all, 1);
    const int channels[] = {5, 64, 256, 260}, groups[] = {1, 3, 8};
    const int64_t windows[] = {all, 20, 60};
    for (int i = 0; i < 12; i++)  // all pairs of channels and groups
      attend(k, dtype, channels[i / 3], 2, groups[i % 3], 0, 150, 118, windows[(i / 3 + i % 3) % 3], 32);
    attend(k, dtype, 24, 1, 2, 64, 128, 110, 40, 32);  // some queries do not see the first keys, some not the last
    for (int group = 1; group < 20; group++) attend(k, dtype, 40, 2, group, 3, 60, 55, 30, 5);
    for (int positions = 2; positions < 49; positions++)
      for (const int64_t window : {all, int64_t{45}})
        attend(k, dtype, 24, 1, 2, 0, 77 + positions, 77, window, positions);
  }
}

// Keys and values of a later position do not change an earlier one, even if they are not finite.
void causal(const Kernels& k) {
  constexpr int kPositions = 32, kE = 24, kHeads = 2, kPoisoned = 20;
  Random random(3);
  const std::vector<float> q = random.floats(kPositions * kHeads * kE);
  std::vector<float> keys = random.floats(kPositions * kE), values = random.floats(kPositions * kE),
                     out(kPositions * kHeads * (kE + 2));
  for (auto* rows : {&keys, &values})
    for (int i = 0; i < kE; i++) (*rows)[kPoisoned * kE + i] = i % 2 ? kInfinity : NAN;
  k.attend({q.data(), keys.data(), values.data(), out.data(), Dtype::f32, 1, kHeads, kE, 0, kPositions, 0,
            INT64_MAX / 2, kPositions, nullptr, nullptr, 0, 0});
  for (int i = 0; i < kPoisoned * kHeads * (kE + 2); i++)
    CHECK(std::isfinite(out[i]), "%s: a later position changed number %d", k.name, i);
}

void norms(const Kernels& k) {
  for (const int n : {1, 2, 6, 15, 16, 17, 63, 64, 65, 130, 257}) {
    Random random(n);
    const std::vector<float> x = random.floats(n, -4, 4), scale = random.floats(n);
    for (const float eps : {1e-6f, 1e-1f}) {
      double squares = 0;
      for (const float v : x) squares += (double)v * v;
      std::vector<float> y = x;
      k.rms_norm(y.data(), scale.data(), eps, n, y.data());  // in place, as for heads
      for (int i = 0; i < n; i++) {
        const double exact = x[i] / std::sqrt(squares / n + eps) * scale[i];
        CHECK(std::fabs(y[i] - exact) <= 1e-6 * std::fabs(exact), "%s: norm of %d: %g, not %g", k.name, n, y[i], exact);
      }
    }
    std::vector<float> total = scale;
    k.add_scaled(total.data(), x.data(), 0.3f, n);
    for (int i = 0; i < n; i++)
      CHECK(std::fabs(total[i] - (scale[i] + 0.3f * (double)x[i])) < 1e-6, "%s: add_scaled %d of %d", k.name, i, n);
  }
}

// States advance from zero, into other memory and in place, with whole and partial groups of columns.
void states(const Kernels& k) {
  for (const int64_t columns : {1, 2, 7, 8, 24, 129})
    for (const int64_t tiles : {1, 3}) {
      Random random((unsigned)(columns * tiles));
      const int64_t n = tiles * columns * kTile;
      const float decay = 0.75f;
      const std::vector<float> from = random.floats(n), keys = random.floats(columns * kTile),
                               deltas = random.floats(kTile * tiles * kTile);
      std::vector<float> fresh(n + 1, 7), moved(n + 1, 7), same = from;
      k.advance(nullptr, decay, keys.data(), deltas.data(), columns, tiles, fresh.data());
      k.advance(from.data(), decay, keys.data(), deltas.data(), columns, tiles, moved.data());
      k.advance(same.data(), decay, keys.data(), deltas.data(), columns, tiles, same.data());
      CHECK(fresh[n] == 7 && moved[n] == 7, "%s: advance wrote beyond %d columns", k.name, (int)columns);
      for (int64_t i = 0; i < n; i++) {
        const int64_t t = i / (columns * kTile), column = i / kTile % columns, row = i % kTile;
        double added = 0;
        for (int64_t j = 0; j < kTile; j++)
          added += (double)keys[column * kTile + j] * deltas[(j * tiles + t) * kTile + row];
        CHECK(std::fabs(fresh[i] - added) < 1e-5, "%s: advance from zero: %g, not %g", k.name, fresh[i], added);
        const double exact = (double)decay * from[i] + added;
        CHECK(std::fabs(moved[i] - exact) < 1e-5, "%s: advance: %g, not %g", k.name, moved[i], exact);
        CHECK(same[i] == moved[i], "%s: advance in place differs at %d", k.name, (int)i);
      }
    }
}

double exactly(Activation kind, double x) {
  switch (kind) {
    case Activation::kNone: return x;
    case Activation::kSilu: return x / (1 + std::exp(-x));
    case Activation::kGelu: return x / 2 * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeluPytorchTanh:  // 1 + tanh(u) without the cancellation where tanh is nearly -1
      return x / (1 + std::exp(-2 * std::sqrt(2 / std::acos(-1.0)) * (x + 0.044715 * x * x * x)));
    case Activation::kRelu2: return x > 0 ? x * x : 0;
    case Activation::kQuickGelu: return x / (1 + std::exp(-1.702 * x));
  }
  return NAN;
}

// Activations with a gate and in place. Errors are relative to |x| everywhere, and to the result unless it is tiny.
void activations(const Kernels& k) {
  constexpr int kTiles = 4001;
  for (int number = 0; number < kActivations; number++) {
    const Activation kind = (Activation)number;
    std::vector<float> x = Random(3).floats(kTiles * 2 * kTile, -6, 6), out(kTiles * kTile);
    x[0] = -200, x[1] = 200, x[2] = -88, x[3] = 0, x[4] = -14, x[5] = -1e10f, x[6] = 1e10f, x[7] = NAN;
    x[8] = -100, x[9] = -177, x[10] = -10.6f;  // the exponential of -x, or of the approximation's argument, overflows
    k.activate(kind, true, x.data(), kTiles, out.data());
    const auto check = [&](double gate, double up, float got) {
      const double exact = exactly(kind, gate) * up, error = std::fabs(got - exact);
      CHECK(std::isnan(gate) ? std::isnan(got)
                             : error <= 2e-7 * std::fabs(gate * up) + 1e-7 * std::fabs(exact) &&
                                   (std::fabs(exact) < 1e-12 || error <= 4e-6 * std::fabs(exact)),
            "%s: activation %d of %g, times %g, is %g, not %g", k.name, number, gate, up, got, exact);
    };
    for (int i = 0; i < kTiles * kTile; i++) {
      const int at = i / kTile * 2 * kTile + i % kTile;
      check(x[at], x[at + kTile], out[i]);
    }
    std::vector<float> own = x;
    k.activate(kind, false, own.data(), 2 * kTiles, own.data());
    for (size_t i = 0; i < own.size(); i++) check(x[i], 1, own[i]);
  }
}

void limits(const Kernels& k) {
  const std::vector<float> x = {-9, 9, 7, NAN, -7, 0.5f, -kInfinity, kInfinity};
  std::vector<float> tile(2 * 2 * kTile);
  for (size_t i = 0; i < tile.size(); i++) tile[i] = x[i % x.size()];
  k.limit_gated(7, 1, 2, tile.data());
  const float gates[] = {-9, 7, 7, NAN, -7, 0.5f, -kInfinity, 7}, ups[] = {-6, 8, 8, NAN, -6, 1.5f, -6, 8};
  for (size_t i = 0; i < tile.size(); i++) {
    const size_t at = i % x.size();
    const float wanted = i / kTile % 2 ? ups[at] : gates[at];
    CHECK(std::isnan(wanted) ? std::isnan(tile[i]) : tile[i] == wanted, "%s: %g within limits is %g", k.name, x[at],
          tile[i]);
  }
}

void gates(const Kernels& k) {
  for (const int n : {1, 3, 16, 17, 50, 4000}) {
    std::vector<float> gates = Random(n).floats(n, -20, 20), x = Random(n + 1).floats(n + 1, -6, 6);
    gates[0] = n == 1 ? -200 : n == 3 ? 200 : 0;
    std::vector<float> out = x;
    k.gate(gates.data(), n, out.data());
    for (int i = 0; i < n; i++) {
      const double exact = x[i] / (1 + std::exp(-(double)gates[i]));
      CHECK(std::fabs(out[i] - exact) <= 4e-7 * std::fabs(exact) + 1e-35, "%s: %g gated by %g is %g, not %g", k.name,
            x[i], gates[i], out[i], exact);
    }
    CHECK(out[n] == x[n], "%s: gate wrote beyond %d", k.name, n);
  }
}

// Logits with a softcap: any sizes, and a NaN stays one.
void softcaps(const Kernels& k) {
  for (const int n : {1, 3, 16, 17, 4000}) {
    std::vector<float> x = Random(n).floats(n + 1, -100, 100), out = x;
    for (const float cap : {0.5f, 30.0f}) {
      out = x;
      k.softcap(cap, n, out.data());
      for (int i = 0; i < n; i++) {
        const double exact = cap * std::tanh((double)x[i] / cap);
        CHECK(std::fabs(out[i] - exact) <= 2e-7 * cap, "%s: softcap %g of %g is %g, not %g", k.name, cap, x[i], out[i],
              exact);
      }
      CHECK(out[n] == x[n], "%s: softcap wrote beyond %d", k.name, n);
    }
    out[0] = NAN;
    k.softcap(1, 1, out.data());
    CHECK(std::isnan(out[0]), "%s: softcap of NaN is %g", k.name, out[0]);
  }
}

void exponentials(const Kernels& k) {
  std::vector<float> z = Random(4).floats(200001, -87.3f, 88);  // an odd count, so that the last vector is partial
  z[0] = 0, z[1] = -87.3f, z[2] = 88;
  std::vector<float> out(z.size());
  k.exp_from(z.data(), 0, (int64_t)z.size(), out.data());
  for (size_t i = 0; i < z.size(); i++) {
    const double exact = std::exp((double)z[i]), unit = std::ldexp(1, std::ilogb(exact) - 23);
    CHECK(std::fabs(out[i] - exact) <= 2 * unit, "%s: exp(%a) is %a, not %a", k.name, z[i], out[i], exact);
  }
  CHECK(out[0] == 1, "%s: exp(0) is %a", k.name, out[0]);
  const float low[] = {-87.4f, -1000, -kInfinity};
  k.exp_from(low, 0, 3, out.data());
  for (int i = 0; i < 3; i++) CHECK(out[i] == 0, "%s: exp(%g) is %g", k.name, low[i], out[i]);
}

void sums(const Kernels& k) {
  const std::vector<float> ones(70001, 2.5f);
  CHECK(k.sum_exp(ones.data(), 2.5f, (int64_t)ones.size()) == ones.size() << 40, "%s: a sum of ones", k.name);
  for (const int n : {1, 5, 16, 97, 5000, 40003}) {
    const std::vector<float> z = Random(n).floats(n, -20, 3);
    const float largest = *std::max_element(z.begin(), z.end());
    CHECK(k.largest(z.data(), n) == largest, "%s: the largest of %d", k.name, n);
    const uint64_t whole = k.sum_exp(z.data(), largest, n);
    double exact = 0;
    for (const float v : z) exact += std::exp((double)v - largest);
    CHECK(std::fabs((double)whole * 0x1p-40 / exact - 1) < 1e-6, "%s: sum of %d is %g, not %g", k.name, n,
          (double)whole * 0x1p-40, exact);
    for (int at = 0; at <= n; at += n < 100 ? 1 : 1 + n / 61)
      CHECK(k.sum_exp(z.data(), largest, at) + k.sum_exp(z.data() + at, largest, n - at) == whole,
            "%s: a sum of %d split at %d", k.name, n, at);
  }
  for (int n = 1; n < 40; n++)  // a NaN at any place is the largest
    for (int at = 0; at < n; at++) {
      std::vector<float> z(n, 1);
      z[at] = NAN;
      CHECK(std::isnan(k.largest(z.data(), n)), "%s: a NaN at %d of %d is lost", k.name, at, n);
    }
}

// Gumbel noise as infer/noise.py defines it.
double gumbel(const uint32_t key[2], uint32_t position, uint32_t token) {
  const uint32_t keys[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDAu};
  const int rotations[8] = {13, 15, 26, 6, 17, 29, 16, 24};
  uint32_t a = position + keys[0], b = token + keys[1];
  for (int round = 0; round < 20; round++) {
    a += b;
    const int by = rotations[round % 8];
    b = (b << by | b >> (32 - by)) ^ a;
    if (round % 4 == 3) {
      const int group = round / 4 + 1;
      a += keys[group % 3];
      b += keys[(group + 1) % 3] + (uint32_t)group;
    }
  }
  return -std::log(-std::log(((a >> 9) + 0.5) * 0x1p-23));
}

void draws(const Kernels& k) {
  const uint32_t key[2] = {0x12345678u, 0x9abcdef0u};
  const std::vector<float> zeros(50000, 0.0f);
  for (int token = 0; token < 50000; token++) {  // the noise of each token alone, for the accuracy of the logarithm
    const Best best = k.draw(zeros.data(), -kInfinity, true, key, 77, token, token + 1);
    const double exact = gumbel(key, 77, (uint32_t)token);
    CHECK(best.token == token && std::fabs(best.value - exact) <= 5e-7 * std::max(1.0, std::fabs(exact)),
          "%s: noise of %d is %g, not %g", k.name, token, best.value, exact);
  }
  Random random(5);
  for (int trial = 0; trial < 300; trial++) {
    const int n = 1 + random.below(200), first = random.below(n), last = first + 1 + random.below(n - first);
    std::vector<float> z(n);
    for (float& v : z) v = (float)random.below(12) - 6;  // some logits are equal
    const float least = trial % 3 ? (float)random.below(12) - 6 : -kInfinity;
    const bool noise = trial % 2;
    int32_t expected = -1;
    double most = -kInfinity;
    for (int i = first; i < last; i++) {
      const double value = z[i] + (noise ? gumbel(key, (uint32_t)trial, (uint32_t)i) : 0);
      if (z[i] >= least && value > most) most = value, expected = i;
    }
    const Best whole = k.draw(z.data(), least, noise, key, (uint32_t)trial, first, last);
    CHECK(whole.token == expected, "%s: drew %d from %d..%d of %d, not %d", k.name, whole.token, first, last, n,
          expected);
    const int at = first + random.below(last - first);
    if (at == first) continue;
    const Best a = k.draw(z.data(), least, noise, key, (uint32_t)trial, first, at),
               b = k.draw(z.data(), least, noise, key, (uint32_t)trial, at, last);
    const Best both = b.token >= 0 && (a.token < 0 || b.value > a.value) ? b : a;
    CHECK(both.token == whole.token, "%s: drew %d and %d in halves, %d at once", k.name, a.token, b.token, whole.token);
    CHECK(whole.token < 0 || both.value == whole.value, "%s: %g in halves, %g at once", k.name, both.value,
          whole.value);
  }
}

void tempers(const Kernels& k) {
  const float logits[] = {2, -2, 2, -2, 0};
  const uint8_t seen[] = {1, 1, 0, 0, 1};
  float z[5];
  k.temper(logits, seen, 2, 0.5f, 5, z);
  const float warm[] = {2, -8, 4, -4, 0};
  CHECK(std::memcmp(z, warm, sizeof z) == 0, "%s: %g %g %g %g", k.name, z[0], z[1], z[2], z[3]);
  k.temper(logits, seen, 4, 0, 5, z);
  const float greedy[] = {0.5f, -8, 2, -2, 0};
  CHECK(std::memcmp(z, greedy, sizeof z) == 0, "%s: %g %g %g %g", k.name, z[0], z[1], z[2], z[3]);
}

void reads(const Kernels& k) {  // the result depends on every byte
  std::vector<char> data(4096);
  for (size_t i = 0; i < data.size(); i++) data[i] = (char)i;
  const uint64_t before = k.read(data.data(), (int64_t)data.size());
  for (size_t i = 0; i < data.size(); i++) {
    data[i] ^= 16;
    CHECK(k.read(data.data(), (int64_t)data.size()) != before, "%s: byte %zu was not read", k.name, i);
    data[i] ^= 16;
  }
}

void all_of(const Kernels& k) {
  for (const Dtype dtype : {Dtype::bf16, Dtype::f16}) {
    const std::vector<uint32_t> expected = all_widened(dtype);
    halves(k, dtype);
    round_trips(k, dtype, expected);
#if defined(__x86_64__)
    _mm_setcsr(_mm_getcsr() |
               0x8040);  // as in the workers: arithmetic treats subnormals as zero, and conversions must keep them
    round_trips(k, dtype, expected);
    _mm_setcsr(_mm_getcsr() & ~0x8040u);
#endif
  }
  products(k);
  packed(k);
  attends(k);
  causal(k);
  all_latents(k);
  norms(k);
  states(k);
  activations(k);
  limits(k);
  gates(k);
  softcaps(k);
  exponentials(k);
  sums(k);
  draws(k);
  tempers(k);
  reads(k);
}

}  // namespace

int main() {
  int tables = 0;
  for (const char* name : {"portable", "avx2", "avx512", "avx512_bf16", "amx"}) {
    const Kernels* kernels = choose_kernels(name);
    if (kernels == nullptr) continue;
    all_of(*kernels);
    std::printf("%s\n", name);
    tables++;
  }
  CHECK(tables > 0 && choose_kernels("none") == nullptr && choose_kernels(nullptr) != nullptr, "%d tables", tables);
  return 0;
}
