// Checks the latent attention of a table of kernels against sums in double, and each query alone against all queries
// together.
#pragma once

#include <algorithm>

#include "products.h"

namespace {

struct LatentCase {
  Dtype dtype;
  int e, values, heads, of;
  int64_t first, last, start;
  int positions;
  int64_t window = INT64_MAX / 2, every = 1;
  bool listed = false;
};

// Calls attend_latents for a case. The result has `values` + 2 floats for each position and each of the `of` heads.
std::vector<float> attend_latents(const Kernels& k, const LatentCase& c, const std::vector<float>& q,
                                  const char* entries, const std::vector<int32_t>& list) {
  std::vector<float> out((int64_t)c.positions * c.of * (c.values + 2) + 1, 7), space(latent_floats(c.e, c.values), NAN);
  AttendLatents a{};
  a.q = q.data(), a.entries = entries, a.out = out.data(), a.dtype = c.dtype;
  a.heads = c.heads, a.of = c.of, a.e = c.e, a.values = c.values;
  a.first = c.first, a.last = c.last, a.start = c.start, a.positions = c.positions;
  a.next = entries, a.next_bytes = c.last % 2 ? c.last * c.e : 0, a.space = space.data();
  a.window = c.window, a.every = c.every;
  if (c.listed) a.list = list.data();
  k.attend_latents(a);
  return out;
}

void latents(const Kernels& k, const LatentCase& c) {
  Random random(c.e + 7 * c.heads + (uint64_t)c.last);
  const std::vector<float> q = random.floats((int64_t)c.positions * c.of * c.e, -2, 2);
  const int64_t stored = c.listed ? 3 * c.last : c.last;
  const Stored entries(k, c.dtype, random.floats(stored * c.e));
  std::vector<int32_t> list(c.last);
  for (int64_t t = 0; t < c.last; t++) list[t] = (int32_t)(3 * t + random.below(3));
  const std::vector<float> out = attend_latents(k, c, q, entries.data.data(), list);
  const int64_t row = c.values + 2;
  CHECK(out.back() == 7, "%s: attend_latents wrote beyond its result", k.name);
  for (int p = 0; p < c.positions; p++) {
    const int64_t own = (c.start + p + 1) / c.every - 1, low = std::max(c.first, own - c.window + 1),
                  high = std::min(c.last, own + 1);
    for (int h = 0; h < c.of; h++) {
      const float* const got = out.data() + ((int64_t)p * c.of + h) * row;
      if (h >= c.heads) {
        for (int i = 0; i < row; i++) CHECK(got[i] == 7, "%s: head %d was not requested", k.name, h);
        continue;
      }
      if (low >= high) {
        CHECK(got[c.values + 1] == 0 || got[c.values] == -kInfinity, "%s: a query that sees nothing has %g, %g", k.name,
              got[c.values], got[c.values + 1]);
        continue;
      }
      const auto entry = [&](int64_t t) { return entries.values.data() + (c.listed ? list[t] : t) * c.e; };
      std::vector<double> weights;
      for (int64_t t = low; t < high; t++) {
        double score = 0;
        for (int i = 0; i < c.e; i++) score += q[((int64_t)p * c.of + h) * c.e + i] * entry(t)[i];
        weights.push_back(score);
      }
      const double largest = *std::max_element(weights.begin(), weights.end()), tolerance = 2e-5 + 2e-6 * largest;
      double sum = 0;
      for (double& weight : weights) sum += weight = std::exp(weight - largest);
      CHECK(std::fabs(got[c.values] - largest) < tolerance && std::fabs(got[c.values + 1] / sum - 1) < 1e-4,
            "%s dtype %d e %d p %d h %d: largest %g, sum %g; not %g, %g", k.name, (int)c.dtype, c.e, p, h,
            got[c.values], got[c.values + 1], largest, sum);
      for (int i = 0; i < c.values; i++) {
        double exact = 0;
        for (int64_t t = low; t < high; t++) exact += weights[t - low] / sum * entry(t)[i];
        CHECK(std::fabs(got[i] / got[c.values + 1] - exact) < tolerance,
              "%s dtype %d e %d entries %ld..%ld: p %d h %d i %d: %g, not %g", k.name, (int)c.dtype, c.e, (long)c.first,
              (long)c.last, p, h, i, got[i] / got[c.values + 1], exact);
      }
    }
    LatentCase alone = c;  // the query alone must have the same bits; blocks begin at multiples of their size
    alone.start = c.start + p, alone.positions = 1;
    const int64_t before = std::max(low, c.first) - c.first;
    alone.first = c.first + before / kLatentEntries * kLatentEntries, alone.last = high;
    if (low >= high) continue;
    const std::vector<float> own_q(q.begin() + (int64_t)p * c.of * c.e, q.begin() + (int64_t)(p + 1) * c.of * c.e);
    const std::vector<float> got = attend_latents(k, alone, own_q, entries.data.data(), list);
    CHECK(std::memcmp(got.data(), out.data() + (int64_t)p * c.of * row, c.heads * row * sizeof(float)) == 0,
          "%s dtype %d e %d heads %d: position %d of %d depends on the others", k.name, (int)c.dtype, c.e, c.heads, p,
          c.positions);
  }
}

// An entry that a query does not see does not change it, even if it is not finite. Queries that see it are not finite.
void broken_latents(const Kernels& k) {
  constexpr int kPositions = 40, kPoisoned = 20;
  for (const float number : {kInfinity, -kInfinity, NAN}) {
    const LatentCase c{Dtype::f32, 20, 18, 3, 3, 0, kPositions, 0, kPositions, 30};
    Random random(3);
    const std::vector<float> q = random.floats(kPositions * c.of * c.e);
    std::vector<float> entries = random.floats(kPositions * c.e);
    entries[kPoisoned * c.e + 17] = number;
    const std::vector<float> out = attend_latents(k, c, q, (const char*)entries.data(), {});
    for (int query = 0; query < kPositions * c.of; query++) {
      const float *const got = out.data() + query * (c.values + 2), result = got[17] / got[c.values + 1];
      CHECK(std::isfinite(result) == (query / c.of < kPoisoned), "%s: %g in entry %d makes query %d %g", k.name, number,
            kPoisoned, query, result);
      for (int i = 0; i < c.values + 2 && query / c.of < kPoisoned; i++)
        CHECK(std::isfinite(got[i]), "%s: %g in entry %d changed query %d", k.name, number, kPoisoned, query);
    }
  }
}

void all_latents(const Kernels& k) {
  for (const Dtype dtype : kDtypes) {
    latents(k, {dtype, 576, 512, 4, 4, 0, 200, 198, 2});  // the sizes of DeepSeek-V3, and those of V4
    latents(k, {dtype, 64, 64, 64, 64, 0, 7, 5, 2, 4});
    for (const int e : {2, 6, 31, 33, 48, 96, 130}) {  // heads of several positions in a panel
      latents(k, {dtype, e, e - e / 3, 3, 5, 0, 110, 80, 30});
      latents(k, {dtype, e, e, 1, 1, 0, 1, 0, 1});
    }
    latents(k, {dtype, 40, 32, 16, 16, 192, 300, 270, 30});  // some of the entries
    latents(k, {dtype, 40, 40, 5, 8, 96, 250, 202, 48, 100});
    latents(k, {dtype, 40, 40, 16, 16, 0, 60, 200, 43, INT64_MAX / 2, 4});  // entries of four positions
    latents(k, {dtype, 40, 40, 7, 7, 0, 130, 129, 1, INT64_MAX / 2, 1, true});
    latents(k, {dtype, 24, 24, 7, 7, 0, 2 * kLatentEntries + 1, 2 * kLatentEntries, 1});
  }
  broken_latents(k);
}

}  // namespace
