// Numbers in memory: the three dtypes of weights and caches, conversions between them and float32, and declarations of
// the weight formats. The three dtypes convert to float32 exactly.
#pragma once

#include "port.h"

namespace laneformer {
namespace gpu {

enum Dtype { kFloat32, kBfloat16, kFloat16 };

// Of quantized weights: the numbers that codes stand for, and the dtype of the scales of blocks.
enum class Code { kInt8, kE4M3, kInt4, kE2M1 };
enum class Scale { kNone, kE8M0, kE4M3, kBfloat16, kFloat16, kFloat32 };

template <Dtype dtype>
struct Plain;  // this and the next are defined in formats.h, codes.h and tensor.h
struct Bf12;
template <Code code, Scale scale, bool zeros, bool factors>
struct Codes;
template <class Codes, int halves, int joined, int more>
struct ByTensor;

constexpr int bytes_of(Dtype dtype) { return dtype == kFloat32 ? 4 : 2; }

LF_DEVICE u16 float_to_bfloat(float v) {
  const u32 bits = float_to_bits(v);
  if (v != v) return (u16)(bits >> 16 | 0x40);  // a NaN stays NaN
  return (u16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <Dtype dtype>
LF_DEVICE float widen(u16 v) {
  return dtype == kBfloat16 ? bits_to_float((u32)v << 16) : half_to_float(v);
}

// Element i of an array, as float32.
template <Dtype dtype>
LF_DEVICE float element(const void* data, i64 i) {
  if (dtype == kFloat32) return ((const float*)data)[i];
  return widen<dtype>(((const u16*)data)[i]);
}

template <Dtype dtype>
LF_DEVICE void put_element(void* data, i64 i, float v) {
  if (dtype == kFloat32) {
    ((float*)data)[i] = v;
  } else {
    ((u16*)data)[i] = dtype == kBfloat16 ? float_to_bfloat(v) : float_to_half(v);
  }
}

// Element i of an array that other CTAs write, as float32.
template <Dtype dtype>
LF_DEVICE float element_between_ctas(const void* data, i64 i) {
  if constexpr (dtype == kFloat32) return load_between_ctas((const float*)data + i);
  return widen<dtype>(load_between_ctas((const u16*)data + i));
}

// v as it will be read from an array of this dtype.
template <Dtype dtype>
LF_DEVICE float rounded_to(float v) {
  if constexpr (dtype == kFloat32) return v;
  return widen<dtype>(dtype == kBfloat16 ? float_to_bfloat(v) : float_to_half(v));
}

// Maps float32 to uint32 in the same order; float_of_order maps back.
LF_DEVICE u32 order_of(float z) {
  const u32 bits = float_to_bits(z + 0.0f);  // -0 and 0 are equal
  return bits >> 31 ? ~bits : bits | 1u << 31;
}
LF_DEVICE float float_of_order(u32 order) { return bits_to_float(order >> 31 ? order & ~(1u << 31) : ~order); }

template <Dtype dtype>
constexpr int kPerVec = 16 / bytes_of(dtype);

// Unpacks the elements of 16 bytes to float32.
template <Dtype dtype>
LF_DEVICE void unpack(const Vec& vec, float (&out)[kPerVec<dtype>]) {
  if constexpr (dtype == kFloat32) {
    LF_UNROLL for (int i = 0; i < 4; i++) out[i] = bits_to_float(vec.word[i]);
  } else {
    LF_UNROLL for (int i = 0; i < 4; i++) {
      const u32 pair = vec.word[i];
      if constexpr (dtype == kBfloat16) {
        out[2 * i] = bits_to_float(pair << 16);
        out[2 * i + 1] = bits_to_float(pair & 0xffff0000u);
      } else {
        out[2 * i] = half_to_float((u16)pair);
        out[2 * i + 1] = half_to_float((u16)(pair >> 16));
      }
    }
  }
}

}  // namespace gpu
}  // namespace laneformer
