// What translated instructions do: the meanings of the PTX ISA for sm_90a. See __init__.py.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <limits>
#include <type_traits>

#include "emulator.h"

namespace {

using uint128_t = unsigned __int128;

[[noreturn, gnu::noinline, gnu::cold]] void stop(const char* why) {
  std::fprintf(stderr, "PTX: %s (CTA %d, thread %d)\n", why, emulator::self()->cta, emulator::self()->thread);
  std::abort();
}

template <class To, class From>
inline To same_bits(From v) {
  static_assert(sizeof(To) == sizeof(From));
  To found;
  std::memcpy(&found, &v, sizeof v);
  return found;
}
inline float as_f32(uint32_t v) { return same_bits<float>(v); }
inline double as_f64(uint64_t v) { return same_bits<double>(v); }
inline uint32_t bits_of(float v) { return same_bits<uint32_t>(v); }
inline uint64_t bits_of(double v) { return same_bits<uint64_t>(v); }

// ---- memory

// An address in shared memory has 32 bits and counts from 0; the first KiB of a CTA's memory belongs to the driver.
// Generic addresses and those of device memory are addresses of the host.
constexpr uint32_t kSharedBase = 1024;

[[noreturn, gnu::noinline, gnu::cold]] inline void misaligned(uint64_t address, int bytes) {
  std::fprintf(stderr, "PTX: an access of %d bytes at %#llx\n", bytes, (unsigned long long)address);
  stop("an access is misaligned");
}
[[noreturn, gnu::noinline, gnu::cold]] inline void outside(uint32_t address, uint32_t bytes) {
  std::fprintf(stderr, "PTX: %u bytes at %lld of %lld bytes of shared memory\n", bytes,
               (long long)address - kSharedBase, (long long)emulator::self()->shared_bytes);
  stop("an access is outside shared memory");
}
inline void* aligned(uint64_t address, int bytes) {
  if (address % bytes) misaligned(address, bytes);
  return (void*)(uintptr_t)address;
}
// The place of `bytes` bytes, all of which must be in the CTA's shared memory.
inline char* shared_range(uint32_t address, uint32_t bytes) {
  const uint32_t offset = address - kSharedBase;
  if ((uint64_t)offset + bytes > emulator::self()->shared_bytes) outside(address, bytes);
  return emulator::self()->shared + offset;
}
inline void* shared(uint32_t address, int bytes) {
  if (address % bytes) misaligned(address, bytes);
  return shared_range(address, bytes);
}
inline uint64_t generic_of_shared(uint32_t address) {
  return (uint64_t)(uintptr_t)emulator::self()->shared + address - kSharedBase;
}
inline uint64_t shared_of_generic(uint64_t address) {
  const uint64_t offset = address - (uint64_t)(uintptr_t)emulator::self()->shared;
  if (offset > emulator::self()->shared_bytes)
    stop("an address that is converted to one of shared memory is not in it");
  return offset + kSharedBase;
}
inline bool loses_word() { return emulator::self()->careless && emulator::loses_word(); }
inline void bulk_copy(uint32_t to, uint64_t from, uint32_t bytes, uint64_t* barrier) {
  if (bytes == 0 || to % 16) stop("a bulk copy is empty or not aligned to 16 bytes");
  emulator::bulk_copy(shared_range(to, bytes), (const void*)(uintptr_t)from, bytes, barrier);
}

inline uint64_t nanoseconds() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * 1'000'000'000 + (uint64_t)t.tv_nsec;
}

// ---- integers

template <class T>
inline T high_product(T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  return (T)((Wide)a * (Wide)b >> 8 * sizeof(T));
}
template <class T>
inline T shifted_left(T v, uint32_t n) {
  return n < 8 * sizeof(T) ? (T)((uint64_t)v << n) : 0;
}
template <class T>
inline T shifted_right(T v, uint32_t n) {
  return (T)(n < 8 * sizeof(T) ? v >> n : v < 0 ? -1 : 0);
}
inline uint64_t pair(uint32_t high, uint32_t low) { return (uint64_t)high << 32 | low; }
inline uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t found = 0;
  for (int i = 0; i < 8; i++)
    if (table >> i & 1) found |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return found;
}
// Four bytes of a and b. A nibble of the selector names a byte; its highest bit asks for that byte's sign, repeated.
inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t found = 0;
  for (int i = 0; i < 4; i++) {
    const uint32_t nibble = selector >> 4 * i & 15, byte = (uint32_t)(pair(b, a) >> 8 * (nibble & 7)) & 255;
    found |= (nibble & 8 ? byte >> 7 ? 255 : 0 : byte) << 8 * i;
  }
  return found;
}
// `length` bits from `first` on; bits beyond the number, and above the field, are zeros or the field's sign.
template <class T>
inline T extracted(T v, uint32_t first, uint32_t length) {
  constexpr uint32_t bits = 8 * sizeof(T);
  using U = std::make_unsigned_t<T>;
  first &= 255, length &= 255;
  if (length == 0) return 0;
  const uint32_t last = first + length - 1 < bits - 1 ? first + length - 1 : bits - 1;
  const bool sign = std::is_signed_v<T> && (U)v >> last & 1;
  U found = 0;
  for (uint32_t i = 0; i < bits; i++)
    found |= (U)(i < length && first + i < bits ? (U)v >> (first + i) & 1 : sign) << i;
  return (T)found;
}
template <class T>
inline T inserted(T field, T into, uint32_t first, uint32_t length) {
  first &= 255, length &= 255;
  for (uint32_t i = 0; i < length && first + i < 8 * sizeof(T); i++)
    into = (into & ~((T)1 << (first + i))) | (field >> i & 1) << (first + i);
  return into;
}
template <class T>
inline uint32_t leading_zeros(T v) {
  return v == 0 ? 8 * sizeof(T) : (uint32_t)__builtin_clzll(v) - (64 - 8 * sizeof(T));
}
template <class T>
inline T reversed(T v) {
  T found = 0;
  for (size_t i = 0; i < 8 * sizeof(T); i++) found |= (v >> i & 1) << (8 * sizeof(T) - 1 - i);
  return found;
}

// ---- floating point

inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fused(double a, double b, double c) { return __builtin_fma(a, b, c); }
// a b + c, rounded down. The product is exact in double, and so is the error of the sum (Knuth's 2Sum).
inline float fused_down(float a, float b, float c) {
  const double product = (double)a * b, sum = product + c, second = sum - product;
  const double error = (product - (sum - second)) + (c - second);
  const float near = (float)sum;
  return near > sum || (near == sum && error < 0) ? std::nextafterf(near, -INFINITY) : near;
}
template <class T>
inline T smaller_number(T a, T b) {  // the other one if one is NaN; -0 is smaller than 0
  return a != a ? b : b != b ? a : a < b || (a == b && std::signbit(a)) ? a : b;
}
template <class T>
inline T larger_number(T a, T b) {
  return a != a ? b : b != b ? a : a > b || (a == b && std::signbit(b)) ? a : b;
}
inline float flushed(float v) { return std::fabs(v) < 0x1p-126f ? std::copysign(0.0f, v) : v; }
inline float saturated(float v) { return v > 0 ? v < 1 ? v : 1.0f : 0.0f; }  // 0 for NaN
template <class T>
inline T rounded_rni(T v) {
  return std::nearbyint(v);
}  // ties to even
template <class T>
inline T rounded_rzi(T v) {
  return std::trunc(v);
}
template <class T>
inline T rounded_rmi(T v) {
  return std::floor(v);
}
template <class T>
inline T rounded_rpi(T v) {
  return std::ceil(v);
}
// An integral value as an integer. It saturates; NaN becomes 0.
template <class T, class F>
inline T to_integer(F v) {
  using Limits = std::numeric_limits<T>;
  if (v != v) return 0;
  if ((double)v >= std::ldexp(1.0, Limits::digits)) return Limits::max();
  return (double)v <= (double)Limits::min() ? Limits::min() : (T)v;
}

inline float from_half(uint16_t v) { return (float)same_bits<_Float16>(v); }
inline uint16_t to_half(float v) { return same_bits<uint16_t>((_Float16)v); }
// f of each half of a word, computed in double, which has all bits of a product and of its sum, then rounded once.
template <class F>
inline uint32_t of_halves(F f) {
  return (uint32_t)same_bits<uint16_t>((_Float16)f(0)) | (uint32_t)same_bits<uint16_t>((_Float16)f(16)) << 16;
}
inline double half_at(uint32_t v, int shift) { return from_half((uint16_t)(v >> shift)); }
inline uint32_t add_halves(uint32_t a, uint32_t b) {
  return of_halves([=](int i) { return half_at(a, i) + half_at(b, i); });
}
inline uint32_t sub_halves(uint32_t a, uint32_t b) {
  return of_halves([=](int i) { return half_at(a, i) - half_at(b, i); });
}
inline uint32_t mul_halves(uint32_t a, uint32_t b) {
  return of_halves([=](int i) { return half_at(a, i) * half_at(b, i); });
}
inline uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c) {
  return of_halves([=](int i) { return half_at(a, i) * half_at(b, i) + half_at(c, i); });
}
inline uint32_t from_e4m3(uint16_t codes) {
  return of_halves([=](int i) {
    const int code = codes >> i / 2 & 255, exponent = code >> 3 & 15, mantissa = code & 7;
    const double size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
    return (code & 127) == 127 ? NAN : code >> 7 ? -size : size;
  });
}

// ---- warps

inline uint32_t lane() { return (uint32_t)emulator::self()->lane; }
inline uint32_t of_lane(uint32_t v, uint32_t wanted) { return emulator::value_of(v, (int)(wanted & 31)); }
inline uint32_t largest_of_warp(uint32_t v) {
  for (uint32_t mask = 16; mask > 0; mask /= 2) {
    const uint32_t other = of_lane(v, lane() ^ mask);
    v = v > other ? v : other;
  }
  return v;
}

// d = a b + c for signed bytes: a [16][8 words] by rows, b [8 words][8] by columns, c and d [16][8]. With g = lane / 4
// and t = lane % 4, a thread has
//   of a, in register r: row g + 8 (r % 2), columns 4 t + 16 (r / 2) and the three after it;
//   of b, in register r: column g, rows 4 t + 16 r and the three after it;
//   of c and d, in register r: row g + 8 (r / 2), column 2 t + r % 2.
template <int words>
inline void multiply_bytes(const uint32_t (&a)[words], const uint32_t (&b)[words / 2], const uint32_t (&c)[4],
                           uint32_t (&d)[4]) {
  emulator::Group* const warp = emulator::self()->warp;
  auto* const all = warp->matrices[warp->generation & 1];
  for (int r = 0; r < words; r++) all[lane()][r] = a[r];
  for (int r = 0; r < words / 2; r++) all[lane()][4 + r] = b[r];
  emulator::meet(warp);
  const auto byte = [](uint32_t word, int i) { return (int32_t)(int8_t)(word >> 8 * i); };
  for (int r = 0; r < 4; r++) {
    const int row = (int)lane() / 4 + 8 * (r / 2), column = (int)lane() % 4 * 2 + r % 2;
    d[r] = c[r];
    for (int k = 0; k < 8 * words; k++) {
      const uint32_t of_a = all[row % 8 * 4 + k % 16 / 4][row / 8 + k / 16 * 2];
      const uint32_t of_b = all[column * 4 + k % 16 / 4][4 + k / 16];
      d[r] += (uint32_t)(byte(of_a, k % 4) * byte(of_b, k % 4));
    }
  }
}

}  // namespace
