// A kernel for tests of port.h, in place of the decode kernel: tests/custom_calls/gpu/test_port.py compiles it for the
// emulator and calls laneformer_functions (functions.cc). A thread has kInputs words of Params::prompt and writes its
// kOutputs results to Params::tokens. Then it reads the lines of its warp from the weights' ring, pass after pass.
#include "params.h"
#include "stream.h"

namespace laneformer {
namespace gpu {

constexpr int kThreads = kWarps * kWarpSize;

LF_KERNEL void laneformer_decode(LF_PARAMS p) {
  LF_SHARED(memory);
  u64* const barriers = (u64*)(memory + kRingBytes);
  u64* const sum = barriers + kWarps * kSlots;
  const u32* in = (const u32*)p.prompt + thread() * kInputs;
  int* out = p.tokens + thread() * kOutputs;
  if (thread() == 0) *sum = 0;
  sync_cta();

  const u32 a[4] = {in[0], in[1], in[2], in[3]}, b[2] = {in[4], in[5]}, before[4] = {in[6], in[7], in[8], in[9]};
  u32 sums[4];
  multiply_bytes(a, b, before, sums);
  for (u32 one : sums) *out++ = (int)one;
  const u32 half_a[2] = {in[0], in[1]}, half_b[1] = {in[4]};
  multiply_bytes(half_a, half_b, before, sums);
  for (u32 one : sums) *out++ = (int)one;

  *out++ = (int)permute(in[0], in[1], in[2] & 0x7777);
  *out++ = (int)permute_or_sign(in[0], in[1], in[2]);
  *out++ = (int)shuffle_bits(in[0], 5);
  *out++ = (int)shuffle_from(in[0], (int)(in[1] & 31));
  *out++ = (int)broadcast(in[0], 7);
  *out++ = (int)largest_in_warp(in[0]);
  *out++ = (int)subtract_halves(in[10], in[11]);
  *out++ = (int)fma_halves(in[10], in[11], in[12]);
  *out++ = float_to_half(bits_to_float(in[13]));
  *out++ = round_to_int(bits_to_float(in[13]));
  float four[4];
  unpack_e4m3(in[0], four);
  for (float one : four) *out++ = (int)float_to_bits(kE4M3Unit * one);

  // Words and arrays of device memory, and a sum in shared memory.
  u64* words = p.boards + 2 * thread();
  store_word(words, (u64)in[1] << 32 | in[0]);
  store_word(words + 1, (u64)in[3] << 32 | in[2]);
  fence_device();
  const Words found = load_words(words);
  *out++ = (int)((u32)found.a ^ (u32)(found.b >> 32));
  *out++ = (int)(load_word(words + 1) >> 32);
  *out++ = (int)load_vec_between_ctas(in + 4).word[3] ^ load_between_ctas((const int*)in + 6);
  const Pair pair = load_pair((const float*)in + 14);
  *out++ = (int)(float_to_bits(pair.a) ^ 3 * float_to_bits(pair.b));
  add_shared(sum, in[0]);
  sync_cta();
  *out++ = (int)*sum;

  Watch watch(p, nullptr, 0);
  Stream stream((const char*)p.weights, memory, barriers, Passes{0}, watch);
  u32 mixed = 0;
  for (int line = 0; line < kReadLines; line += 2) {
    Vec two[2];
    stream.take(two);
    for (const Vec& vec : two)
      for (u32 word : vec.word) mixed = 31 * mixed + word;
  }
  *out = (int)mixed;
  stream.drain();
}

LF_KERNEL void laneformer_read(LF_PARAMS) {}

}  // namespace gpu
}  // namespace laneformer
