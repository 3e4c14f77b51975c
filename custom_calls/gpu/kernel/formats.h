// Formats: how the lines of a product encode its weights. custom_calls/gpu/formats.py packs the lines, and product.h
// decodes them with these structs. A format is a struct with
//   kPer       weights of a vector
//   kLines<n>  lines that hold n vectors of each thread
//   Reader     constructed for each product, before its vector has arrived. begin() precedes the first lines, end()
//              follows the last. read<n>(lines, at, weights) decodes vector `at` of kLines<n> lines; it is called for
//              each vector, in order.
// Quantized weights (codes.h) have `add` in place of `read`: it multiplies a vector and adds the products.
#pragma once

#include "codes.h"

namespace laneformer {
namespace gpu {

// Words that a warp reads beside its stream (Params::listed), in the order of its products. Each thread has one of the
// next words in a register, and one of those that follow is in flight.
class Lists {
 public:
  LF_DEVICE explicit Lists(const Params& p) : p_(p) {}

  LF_DEVICE void begin(u32 at) {
    at_ = at;
    words_ = load(0);
    following_ = load(1);
  }

  LF_DEVICE u32 word() const { return broadcast(words_, (int)(at_ % kWarpSize)); }

  LF_DEVICE void pass() {
    if (++at_ % kWarpSize == 0) advance();
  }

  // Skips the words before `at`.
  LF_DEVICE void go_to(u32 at) {
    const u32 parts = at / kWarpSize - at_ / kWarpSize;
    if (parts > 1) return begin(at);
    at_ = at;
    if (parts) advance();
  }

 private:
  LF_DEVICE void advance() {
    words_ = following_;
    following_ = load(1);
  }
  LF_DEVICE u32 load(u32 parts_ahead) const {
    const u32 part = at_ / kWarpSize + parts_ahead;
    const i64 warps = cta() * kWarps + warp();
    return load_between_ctas(p_.listed + warps * p_.listed_words + part * kWarpSize + warp_lane());
  }

  const Params& p_;
  u32 at_, words_, following_;
};

// Weights in their own dtype: a line is a vector.
template <Dtype dtype>
struct Plain {
  static constexpr int kPer = kPerVec<dtype>;
  template <int vectors>
  static constexpr int kLines = vectors;

  struct Reader {
    LF_DEVICE Reader(const Params&, Lists&, int) {}
    LF_DEVICE void begin() {}

    template <int n>
    LF_DEVICE void read(const Vec (&lines)[n], int at, float (&weights)[kPer]) {
      unpack<dtype>(lines[at], weights);
    }
    LF_DEVICE void end() {}
  };
};

// bfloat16 in 12 bits without loss (docs/bf12.md). Four vectors are a unit of three lines: a line of codes, a word for
// each vector, and two lines of low bytes, two words for each vector. Vectors of a step that fill no unit are bfloat16.
//
// A product has four words in Params::coding: a table of eight high bytes, and where its exceptions begin and end in
// the list of each warp. An exception is a word unit << 19 | thread << 13 | slot << 8 | high byte, where slot is the
// place of the weight among the thread's 32. Words ascend by unit, and ~0 follows the last.
struct Bf12 {
  static constexpr int kPer = 8, kVectors = 4, kUnitLines = 3, kUnitShift = 19;
  template <int vectors>
  static constexpr int kLines = vectors / kVectors * kUnitLines + vectors % kVectors;

  class Reader {
   public:
    LF_DEVICE Reader(const Params& p, Lists& lists, int product)
        : lists_(lists), coding_(load_vec_between_ctas(p.coding + 4 * product)) {}

    LF_DEVICE void begin() {
      if (kSteps) lists_.begin(coding_.word[2]);  // otherwise the previous product has ended there
      word_ = lists_.word();
    }

    template <int n>
    LF_DEVICE void read(const Vec (&lines)[kLines<n>], int at, float (&weights)[kPer]) {
      constexpr int units = n / kVectors;
      const int unit = at / kVectors, vector = at % kVectors;
      if (unit == units) return unpack<kBfloat16>(lines[units * kUnitLines + vector], weights);
      if (vector == 0) begin_unit(lines[unit * kUnitLines]);
      const Vec& low = lines[unit * kUnitLines + 1 + vector / 2];
      LF_UNROLL for (int half = 0; half < 2; half++)
          join(low.word[vector % 2 * 2 + half], high_[2 * vector + half], weights + 4 * half);
    }

    LF_DEVICE void end() { lists_.go_to(coding_.word[3]); }

   private:
    LF_DEVICE void begin_unit(const Vec& codes) {
      LF_UNROLL for (int v = 0; v < kVectors; v++)
          look_up(coding_.word[0], coding_.word[1], codes.word[v], high_[2 * v], high_[2 * v + 1]);
      unit_end_ += 1u << kUnitShift;
      while (word_ < unit_end_) {
        put(word_);
        lists_.pass();
        word_ = lists_.word();
      }
    }

    // Puts the high byte of an exception in its place.
    LF_DEVICE void put(u32 word) {
      const int slot = (int)(word >> 8 & 31), shift = 8 * (slot % 4);
      const int place = (int)(word >> 13 & 63) == warp_lane() ? slot / 4 : -1;
      LF_UNROLL for (int i = 0; i < 2 * kVectors; i++) if (i == place) high_[i] =
          (high_[i] & ~(255u << shift)) | (word & 255) << shift;
    }

    // Joins the low and high bytes of four weights.
    LF_DEVICE static void join(u32 low, u32 high, float* weights) {
      if (kSelectorBits == 4) {
        const u32 pairs[2] = {permute(low, high, 0x5140), permute(low, high, 0x7362)};
        LF_UNROLL for (int i = 0; i < 4; i++) weights[i] =
            bits_to_float(i % 2 ? pairs[i / 2] & 0xffff0000u : pairs[i / 2] << 16);
      } else {
        LF_UNROLL for (int i = 0; i < 4; i++) weights[i] =
            bits_to_float(permute(low, high, (u32)(4 + i) << 24 | (u32)i << 16 | 0x0c0c));
      }
    }

    Lists& lists_;
    const Vec coding_;
    u32 word_, unit_end_ = 0, high_[2 * kVectors];
  };
};

}  // namespace gpu
}  // namespace laneformer
