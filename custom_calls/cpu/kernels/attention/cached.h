// Reads cached keys, values and latents as float32. The files of attention/ and kernels.cc use it.
//
// Invariant: widening a 16-bit number to float32 is exact.
#pragma once

#include "../kernels.h"
#include "../simd.h"

namespace LF_ISA {
namespace {

using laneformer::Dtype;

// Elements i to i + kWidth - 1 of an array.
LF_INLINE vf element(Dtype dtype, const void* p, int64_t i) {
  switch (dtype) {
    case Dtype::bf16: return widen_bf16(load<vh>((const uint16_t*)p + i));
    case Dtype::f16: return widen_f16(load<vh>((const uint16_t*)p + i));
    default: return loadf((const float*)p + i);
  }
}

// Elements i to i + n - 1, n < kWidth, then zeros.
LF_INLINE vf first_elements(Dtype dtype, const void* p, int64_t i, int n) {
  switch (dtype) {
    case Dtype::bf16: return widen_bf16(load_first<vh>((const uint16_t*)p + i, n));
    case Dtype::f16: return widen_f16(load_first<vh>((const uint16_t*)p + i, n));
    default: return load_first<vf>((const float*)p + i, n);
  }
}

// Rows of a lane's keys, values or latents.
struct Rows {
  const void* data;
  int64_t offset, stride;  // elements from `data` to the first row, and from row to row
};

// The first `count` rows of e channels as float32: the cache itself, or widened into `space` [count][e]. stride: floats
// from row to row.
template <Dtype dtype>
const float* widened(Rows rows, int count, int e, float* space, int64_t* stride) {
  if (dtype == Dtype::f32) {
    *stride = rows.stride;
    return (const float*)rows.data + rows.offset;
  }
  *stride = e;
  for (int j = 0; j < count; j++) {
    const int64_t at = rows.offset + j * rows.stride;
    int i = 0;
    for (; i + kWidth <= e; i += kWidth) storef(space + j * e + i, element(dtype, rows.data, at + i));
    if (i < e) {
      const vf rest = first_elements(dtype, rows.data, at + i, e - i);
      std::memcpy(space + j * e + i, &rest, (e - i) * sizeof(float));
    }
  }
  return space;
}

}  // namespace
}  // namespace LF_ISA
