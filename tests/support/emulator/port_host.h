// The CPU's part of custom_calls/gpu/kernel/port.h, for tests; LF_EMULATED names this file. Every GPU thread is a
// fiber, and one thread of the host runs all fibers of a device, in an order that a seed determines (emulator.cc). A
// bulk copy overwrites its target with NaN at once and completes late, so that a reader that does not wait reads NaN.
// x86-64 only.
#pragma once

#include <cstring>
#include <ctime>

#include "emulator.h"

#define LF_DEVICE inline
#define LF_COLD inline
#define LF_OUTLINED static inline
#define LF_KERNEL extern "C"
#define LF_PARAMS const Params
#define LF_CONSTANT static const
#define LF_SHARED(name) char* name = ::emulator::self()->shared
#define LF_UNROLL
#ifndef LF_BULK
#define LF_BULK 1
#endif
#ifndef LF_WARP_SIZE
#define LF_WARP_SIZE 32
#endif

namespace laneformer {
namespace gpu {

constexpr int kWarpSize = LF_WARP_SIZE, kSelectorBits = LF_WARP_SIZE == 32 ? 4 : 8;

LF_DEVICE int thread() { return emulator::self()->thread; }
LF_DEVICE int cta() { return emulator::self()->cta; }
LF_DEVICE void sync_cta() { emulator::meet(emulator::self()->block); }
LF_DEVICE void sync_warp() { emulator::meet(emulator::self()->warp); }
LF_DEVICE int opaque(int v) { return v; }
LF_DEVICE int same_in_warp(int v) { return v; }
LF_DEVICE u32 shuffle_bits(u32 v, int mask) { return emulator::value_of(v, emulator::self()->lane ^ mask); }
LF_DEVICE u32 broadcast(u32 v, int lane) { return emulator::value_of(v, lane); }
LF_DEVICE u32 shuffle_from(u32 v, int lane) { return broadcast(v, lane); }
LF_DEVICE u32 permute(u32 a, u32 b, u32 selector) {  // NVIDIA's or AMD's, by kSelectorBits
  const u64 bytes = (u64)b << 32 | a;
  u32 found = 0;
  for (int i = 0; i < 4; i++) {
    const u32 which = selector >> kSelectorBits * i & ((1u << kSelectorBits) - 1);
    const bool zero = kSelectorBits == 8 && which == 12;
    if (!zero && which > 7)
      std::fprintf(stderr, "permute: the selector names byte %u, which must be at most 7\n", which), std::abort();
    found |= zero ? 0 : (u32)(bytes >> 8 * which & 0xff) << 8 * i;
  }
  return found;
}

#define LF_TENSOR (LF_WARP_SIZE == 32)
LF_DEVICE u32 permute_or_sign(u32 a, u32 b, u32 selector) {
  u32 found = 0;
  for (int i = 0; i < 4; i++) {
    const u32 which = selector >> 4 * i & 15, byte = permute(a, b, which & 7) & 255;
    found |= (which < 8 ? byte : byte >> 7 ? 255 : 0) << 8 * i;
  }
  return found;
}
LF_DEVICE int round_to_int(float v) {  // ties to even; saturates; 0 for NaN
  if (v != v) return 0;
  return __builtin_fabsf(v) < 2147483648.0f ? (int)__builtin_nearbyintf(v) : v < 0 ? INT32_MIN : INT32_MAX;
}
template <int of_a>
LF_DEVICE void multiply_bytes(const u32 (&a)[of_a], const u32 (&b)[of_a / 2], const u32 (&before)[4], u32 (&sums)[4]) {
  emulator::Group* warp = emulator::self()->warp;
  const int lane = emulator::self()->lane, side = (int)(warp->generation & 1);
  auto* all = warp->matrices[side];
  for (int i = 0; i < of_a; i++) all[lane][i] = a[i];
  for (int i = 0; i < of_a / 2; i++) all[lane][4 + i] = b[i];
  emulator::meet(warp);
  const auto byte = [](u32 word, int i) { return (int)(int8_t)(word >> 8 * i); };
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4, column = lane % 4 * 2 + i % 2;
    u32 sum = before[i];
    for (int k = 0; k < 8 * of_a; k++) {
      const u32 weights = all[row * 4 + k % 16 / 4][k / 16 * 2 + i / 2],
                numbers = all[column * 4 + k % 16 / 4][4 + k / 16];
      sum += (u32)(byte(weights, k % 4) * byte(numbers, k % 4));
    }
    sums[i] = sum;
  }
}

LF_DEVICE u64 load_word(const u64* p) { return *(const volatile u64*)p; }
LF_DEVICE Words load_words(const u64* p) {
  if ((uintptr_t)p % 16)
    std::fprintf(stderr, "load_words: %p is not aligned to 16 bytes\n", (const void*)p), std::abort();
  return {load_word(p), load_word(p + 1)};
}
LF_DEVICE void store_word(u64* p, u64 v) {
  if (emulator::self()->careless && emulator::loses_word()) return;
  *(volatile u64*)p = v;
}
LF_DEVICE Words load_line(const u64* p) { return load_words(p); }  // no fiber runs between the two
LF_DEVICE void store_line(u64* p, const Words& v) {
  if ((uintptr_t)p % 16)
    std::fprintf(stderr, "store_line: %p is not aligned to 16 bytes\n", (const void*)p), std::abort();
  if (emulator::self()->careless && emulator::loses_word()) return;
  *(volatile u64*)p = v.a, *(volatile u64*)(p + 1) = v.b;
}
LF_DEVICE u64 exchange_word(u64* p, u64 v) {
  const u64 before = load_word(p);
  store_word(p, v);
  return before;
}
LF_DEVICE void fence_device() {}
LF_DEVICE void fence_system() {}
template <class T>
LF_DEVICE T load_between_ctas(const T* p) {
  return *(const volatile T*)p;
}
LF_DEVICE Vec load_vec(const void* p) {
  if ((uintptr_t)p % 16) std::fprintf(stderr, "load_vec: %p is not aligned to 16 bytes\n", p), std::abort();
  emulator::read(p);
  Vec v;
  std::memcpy(&v, p, 16);
  return v;
}
LF_DEVICE Pair load_pair(const float* p) {
  if ((uintptr_t)p % 8) std::fprintf(stderr, "load_pair: %p is not aligned to 8 bytes\n", (const void*)p), std::abort();
  return {p[0], p[1]};
}
LF_DEVICE Vec load_vec_between_ctas(const void* p) { return load_vec(p); }
LF_DEVICE Vec load_stream(const void* p) { return load_vec(p); }
LF_DEVICE u64 clock_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (u64)t.tv_sec * 1000000000ull + (u64)t.tv_nsec;
}
LF_DEVICE void pause() { emulator::yield(); }
LF_DEVICE void join_launches() {}

LF_DEVICE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
LF_DEVICE float bits_to_float(u32 v) {
  float f;
  std::memcpy(&f, &v, 4);
  return f;
}
LF_DEVICE u32 float_to_bits(float v) {
  u32 bits;
  std::memcpy(&bits, &v, 4);
  return bits;
}
LF_DEVICE float half_to_float(u16 v) {
  _Float16 half;
  std::memcpy(&half, &v, 2);
  return (float)half;
}
LF_DEVICE u16 float_to_half(float v) {
  const _Float16 half = (_Float16)v;
  u16 bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
LF_DEVICE u32 fma_halves(u32 a, u32 b, u32 c) {
  u32 found = 0;
  for (int shift = 0; shift < 32; shift += 16) {
    const auto half = [&](u32 pair) { return (double)half_to_float((u16)(pair >> shift)); };
    found |= (u32)float_to_half((float)(half(a) * half(b) + half(c))) << shift;
  }
  return found;
}
LF_DEVICE u32 subtract_halves(u32 a, u32 b) { return fma_halves(b, 0xbc00bc00, a); }
constexpr float kE4M3Unit = kWarpSize == 64 ? 2 : 1;
LF_DEVICE void unpack_e4m3(u32 word, float* out) {  // OCP's codes, or AMD's FNUZ
  for (int i = 0; i < 4; i++) {
    const u32 code = word >> 8 * i & 255, exponent = code >> 3 & 15, mantissa = code & 7;
    const double size = exponent ? __builtin_ldexp(8 + mantissa, (int)exponent - 10) : __builtin_ldexp(mantissa, -9);
    const bool is_nan = kWarpSize == 64 ? code == 0x80 : (code & 127) == 127;
    out[i] = is_nan ? __builtin_nanf("") : (float)((code >> 7 ? -size : size) / kE4M3Unit);
  }
}
LF_DEVICE float exp2_of(float v) { return __builtin_exp2f(v); }
LF_DEVICE float rsqrt_of(float v) { return 1.0f / __builtin_sqrtf(v); }
// exp and log as nvcc 13 computes them, with the same bits except for those of the GPU's own 2^x.
LF_DEVICE float exp_of(float v) {
  // The lowest byte of `power` is one above the biased exponent of the power of two next to exp(v), or 0.
  const float part = fma(v, bits_to_float(0x3bbb989d), 0.5f), within = part > 0 ? part < 1 ? part : 1.0f : 0.0f;
  const float power = (float)(12582913 + __builtin_floor(252.0 * within));
  const float rest = fma(v, bits_to_float(0x32a57060), fma(v, bits_to_float(0x3fb8aa3b), -(power - 12583039.0f)));
  return __builtin_exp2f(rest) * bits_to_float(float_to_bits(power) << 23);
}
LF_DEVICE float log_of(float v) {
  const bool tiny = v < 0x1p-126f;
  if (tiny) v *= 0x1p23f;
  const u32 bits = float_to_bits(v), exponent = (bits - 0x3f2aaaab) & 0xff800000;
  const float power = fma((float)(int)exponent, 0x1p-23f, tiny ? -23.0f : 0.0f), x = bits_to_float(bits - exponent) - 1;
  constexpr u32 factors[] = {0xbe055027, 0x3e1039f6, 0xbdf8cdcc, 0x3e0f2955, 0xbe2ad8b9,
                             0x3e4ced0b, 0xbe7fff22, 0x3eaaaa78, 0xbf000000};
  float sum = bits_to_float(factors[0]);
  for (int i = 1; i < 9; i++) sum = fma(sum, x, bits_to_float(factors[i]));
  const float result = fma(power, bits_to_float(0x3f317218), fma(x * sum, x, x));
  if (v == 0) return -__builtin_inff();
  return bits < 0x7f800000 ? result : fma(v, __builtin_inff(), __builtin_inff());
}
LF_DEVICE void add_shared(u64* p, u64 v) { *p += v; }

LF_DEVICE uint64_t* barrier_at(u64* barrier) { return (uint64_t*)barrier; }
LF_DEVICE void barrier_init(u64* barrier) { emulator::barrier_init(barrier_at(barrier), 1); }
LF_DEVICE void barrier_init_done() {}
LF_DEVICE u64 stream_policy() { return 0; }
LF_DEVICE void reads_done() { emulator::self()->num_reads = 0; }
LF_DEVICE void bulk_copy(void* to, const void* from, u32 bytes, u64* barrier, u64) {
  emulator::arrive(barrier_at(barrier), bytes);
  emulator::bulk_copy(to, from, bytes, barrier_at(barrier));
}
LF_DEVICE bool barrier_passed(u64* barrier, u32 parity) { return emulator::passed(barrier_at(barrier), parity); }
[[noreturn]] LF_DEVICE void trap() { emulator::trap(); }

}  // namespace gpu
}  // namespace laneformer
