// The platform layer: the functions and macros that differ between CUDA, HIP and, for tests, GPU threads emulated on a
// CPU. LF_EMULATED names the header of the emulation (tests/support/emulator/port_host.h). No other file of this folder
// names a platform. Code that depends on a feature tests LF_BULK (bulk copies into shared memory) or LF_TENSOR (matrix
// products of bytes).
#pragma once

#ifndef LF_OUT_OF_LINE  // defined by model.h for the variant of that name
#define LF_OUT_OF_LINE 0
#endif
#ifndef LF_STEPS
#define LF_STEPS 0
#endif

namespace laneformer {
namespace gpu {

using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;

struct alignas(16) Vec {  // 16 bytes: one load or store of a thread
  u32 word[4];
};

struct Words {  // two neighbouring words of a board
  u64 a, b;
};

struct alignas(8) Pair {
  float a, b;
};

constexpr bool kSteps = LF_STEPS;  // whether a launch is one op of one pass (steps.cu) or a whole answer (decode.cu)

}  // namespace gpu
}  // namespace laneformer

#if defined(LF_EMULATED)
#include LF_EMULATED
#elif defined(__HIP__)

#define LF_DEVICE __attribute__((device)) inline __attribute__((always_inline))
#define LF_COLD __attribute__((device)) static inline __attribute__((always_inline))
#define LF_OUTLINED static LF_DEVICE
#define LF_KERNEL extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(1, kThreads)))
#define LF_CONSTANT static __attribute__((constant)) const
#define LF_SHARED(name) extern __attribute__((shared)) __attribute__((aligned(128))) char name[]
#define LF_UNROLL _Pragma("unroll")
#define LF_PARAMS const Params
#define LF_BULK 0  // no bulk copies into shared memory: the stream goes through registers
#define LF_TENSOR 0

namespace laneformer {
namespace gpu {

constexpr int kWarpSize = 64, kSelectorBits = 8;  // bits of a byte's number in `permute`

LF_DEVICE int thread() { return __builtin_amdgcn_workitem_id_x(); }
LF_DEVICE int cta() { return __builtin_amdgcn_workgroup_id_x(); }
LF_DEVICE void sync_cta() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
LF_DEVICE void sync_warp() { __builtin_amdgcn_wave_barrier(); }
LF_DEVICE u32 shuffle_bits(u32 v, int mask) {
  return __builtin_amdgcn_ds_bpermute((int)((thread() ^ mask) << 2), (int)v);
}
LF_DEVICE u32 broadcast(u32 v, int lane) {  // v of thread `lane`; all threads name the same one
  return __builtin_amdgcn_readlane((int)v, __builtin_amdgcn_readfirstlane(lane));
}
LF_DEVICE u32 shuffle_from(u32 v, int lane) { return __builtin_amdgcn_ds_bpermute(lane << 2, (int)v); }
// Four bytes of a (numbers 0 to 3) and b (4 to 7), named by the bytes of the selector; 12 names a zero.
LF_DEVICE u32 permute(u32 a, u32 b, u32 selector) { return __builtin_amdgcn_perm(b, a, selector); }

// Returns v, but hides from the compiler that it does. Values derived from it are then computed where they are used;
// kept over the loop of all passes, they would take registers from the weights.
LF_DEVICE int opaque(int v) {
  asm volatile("" : "+v"(v));
  return v;
}
// v, which is equal in all threads of the warp, in a scalar register.
LF_DEVICE int same_in_warp(int v) { return __builtin_amdgcn_readfirstlane(v); }

// A pointer to device memory. Other pointers may lead into shared memory too, and take slower instructions.
template <class T>
LF_DEVICE __attribute__((address_space(1))) T* in_global(T* p) {
  return (__attribute__((address_space(1))) T*)p;
}

// Exchanged words use relaxed accesses of system scope: these go to the memory that all dies and GPUs share, and write
// back no cache.
LF_DEVICE u64 load_word(const u64* p) {
  return __hip_atomic_load(in_global(p), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
LF_DEVICE Words load_words(const u64* p) { return {load_word(p), load_word(p + 1)}; }
LF_DEVICE void store_word(u64* p, u64 v) {
  __hip_atomic_store(in_global(p), v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
}
// No variant that needs these is compiled for AMD GPUs, which promise no access of 16 bytes as a whole.
LF_DEVICE Words load_line(const u64* p) { return load_words(p); }
LF_DEVICE void store_line(u64* p, const Words& v) { store_word(p, v.a), store_word(p + 1, v.b); }
LF_DEVICE u64 exchange_word(u64* p, u64 v) {  // returns the word before
  return __hip_atomic_exchange(in_global(p), v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
LF_DEVICE void fence_device() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "agent"); }
LF_DEVICE void fence_system() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, ""); }

typedef u32 NativeVec __attribute__((ext_vector_type(4)));
// Reads what other workgroups wrote in earlier passes; fences order these writes before it.
template <class T>
LF_DEVICE T load_between_ctas(const T* p) {
  return *in_global((const volatile T*)p);
}
LF_DEVICE Vec load_vec_between_ctas(const void* p) {
  const u64 a = __hip_atomic_load(in_global((const u64*)p), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  const u64 b = __hip_atomic_load(in_global((const u64*)p + 1), __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  return {{(u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32)}};
}
LF_DEVICE Pair load_pair(const float* p) {
  typedef float NativePair __attribute__((ext_vector_type(2)));
  const NativePair v = *in_global((const NativePair*)p);
  return {v[0], v[1]};
}
LF_DEVICE Vec load_stream(const void* p) {  // loads weights, which are read once per token
  const NativeVec v = __builtin_nontemporal_load(in_global((const NativeVec*)p));
  return {{v[0], v[1], v[2], v[3]}};
}
LF_DEVICE u64 clock_ns() { return __builtin_amdgcn_s_memrealtime() * 10; }  // the counter runs at 100 MHz
LF_DEVICE void pause() { __builtin_amdgcn_s_sleep(1); }
LF_DEVICE void join_launches() {}

// a b + c, rounded once. Compilers may not fuse anything else (compile.py), so the source decides each bit.
LF_DEVICE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
LF_DEVICE float bits_to_float(u32 v) { return __builtin_bit_cast(float, v); }
LF_DEVICE u32 float_to_bits(float v) { return __builtin_bit_cast(u32, v); }
LF_DEVICE float half_to_float(u16 v) { return (float)__builtin_bit_cast(_Float16, v); }
LF_DEVICE u16 float_to_half(float v) { return __builtin_bit_cast(u16, (_Float16)v); }
typedef _Float16 HalfPair __attribute__((ext_vector_type(2)));
LF_DEVICE u32 subtract_halves(u32 a, u32 b) {
  return __builtin_bit_cast(u32, __builtin_bit_cast(HalfPair, a) - __builtin_bit_cast(HalfPair, b));
}
LF_DEVICE u32 fma_halves(u32 a, u32 b, u32 c) {
  return __builtin_bit_cast(u32,
                            __builtin_elementwise_fma(__builtin_bit_cast(HalfPair, a), __builtin_bit_cast(HalfPair, b),
                                                      __builtin_bit_cast(HalfPair, c)));
}
// The hardware's E4M3 has a bias of 8 (FNUZ): its values are half of OCP's, and the code of -0 is NaN.
constexpr float kE4M3Unit = 2;
LF_DEVICE void unpack_e4m3(u32 word, float* out) {
  const auto low = __builtin_amdgcn_cvt_pk_f32_fp8((int)word, false);
  const auto high = __builtin_amdgcn_cvt_pk_f32_fp8((int)word, true);
  out[0] = low[0], out[1] = low[1], out[2] = high[0], out[3] = high[1];
}
LF_DEVICE float exp2_of(float v) { return __builtin_amdgcn_exp2f(v); }
LF_DEVICE float exp_of(float v) { return __builtin_amdgcn_exp2f(v * 1.44269504088896341f); }
LF_DEVICE float log_of(float v) { return __builtin_amdgcn_logf(v) * 0.693147180559945309f; }
LF_DEVICE float rsqrt_of(float v) { return __builtin_amdgcn_rsqf(v); }
LF_DEVICE void add_shared(u64* p, u64 v) {
  __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
}

}  // namespace gpu
}  // namespace laneformer

#else  // CUDA

#define LF_DEVICE __device__ __forceinline__
#define LF_COLD static __device__ __noinline__  // not inlined: it takes no registers of its callers
#if LF_OUT_OF_LINE                              // what the variant of that name does not inline
#define LF_OUTLINED LF_COLD
#else
#define LF_OUTLINED static LF_DEVICE
#endif
#define LF_KERNEL extern "C" __global__ __launch_bounds__(kThreads, 1)
#define LF_CONSTANT static __constant__ const
#define LF_SHARED(name) extern __shared__ __align__(128) char name[]
#define LF_UNROLL _Pragma("unroll")
#define LF_PARAMS const __grid_constant__ Params
#define LF_BULK 1
#define LF_TENSOR 1  // has multiply_bytes, permute_or_sign and round_to_int

namespace laneformer {
namespace gpu {

constexpr int kWarpSize = 32, kSelectorBits = 4;

LF_DEVICE int thread() { return threadIdx.x; }
LF_DEVICE int cta() { return blockIdx.x; }
LF_DEVICE void sync_cta() { __syncthreads(); }
LF_DEVICE void sync_warp() { __syncwarp(); }
LF_DEVICE int opaque(int v) {
  asm volatile("" : "+r"(v));
  return v;
}
LF_DEVICE int same_in_warp(int v) { return v; }
LF_DEVICE u32 shuffle_bits(u32 v, int mask) { return __shfl_xor_sync(0xffffffffu, v, mask); }
LF_DEVICE u32 broadcast(u32 v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
LF_DEVICE u32 shuffle_from(u32 v, int lane) { return __shfl_sync(0xffffffffu, v, lane); }
#define LF_WARP_MAXIMUM
LF_DEVICE u32 largest_in_warp(u32 v) { return __reduce_max_sync(0xffffffffu, v); }
// Four bytes of a (numbers 0 to 3) and b (4 to 7), named by the four low nibbles of the selector.
LF_DEVICE u32 permute(u32 a, u32 b, u32 selector) { return __byte_perm(a, b, selector); }

LF_DEVICE u64 load_word(const u64* p) {
  u64 v;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
LF_DEVICE Words load_words(const u64* p) {
  Words v;
  asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(v.a), "=l"(v.b) : "l"(p) : "memory");
  return v;
}
LF_DEVICE void store_word(u64* p, u64 v) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// 16 bytes that are read and written as a whole: PTX has accesses of type .b128 since version 8.3 (sm_70), which are
// scalar for its memory model, while those of vectors (v2.u64) may be torn between their elements.
LF_DEVICE Words load_line(const u64* p) {
  Words v;
  asm volatile("{\n\t.reg .b128 line;\n\tld.relaxed.sys.global.b128 line, [%2];\n\tmov.b128 {%0, %1}, line;\n\t}"
               : "=l"(v.a), "=l"(v.b)
               : "l"(p)
               : "memory");
  return v;
}
LF_DEVICE void store_line(u64* p, const Words& v) {
  asm volatile(
      "{\n\t.reg .b128 line;\n\tmov.b128 line, {%1, %2};\n\tst.relaxed.sys.global.b128 [%0], line;\n\t}" ::"l"(p),
      "l"(v.a), "l"(v.b)
      : "memory");
}
LF_DEVICE u64 exchange_word(u64* p, u64 v) { return atomicExch(p, v); }  // returns the word before
LF_DEVICE void fence_device() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }
LF_DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }

template <class T>
LF_DEVICE T load_between_ctas(const T* p) {  // past the first-level cache, which other CTAs' writes do not update
  return __ldcg(p);
}
LF_DEVICE Vec load_vec_between_ctas(const void* p) {
  const uint4 v = __ldcg((const uint4*)p);
  return {{v.x, v.y, v.z, v.w}};
}
LF_DEVICE Vec load_vec(const void* p) {
  const uint4 v = *(const uint4*)p;
  return {{v.x, v.y, v.z, v.w}};
}
LF_DEVICE Pair load_pair(const float* p) {
  const float2 v = *(const float2*)p;
  return {v.x, v.y};
}
LF_DEVICE u64 clock_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}
LF_DEVICE void pause() {}

// For launches that overlap: lets the next launch's CTAs start as CTAs of this one end, and waits until what earlier
// launches wrote is visible.
LF_DEVICE void join_launches() {
  asm volatile("griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;" ::: "memory");
}

LF_DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
LF_DEVICE float bits_to_float(u32 v) { return __uint_as_float(v); }
LF_DEVICE u32 float_to_bits(float v) { return __float_as_uint(v); }
LF_DEVICE float half_to_float(u16 v) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
  return f;
}
LF_DEVICE u16 float_to_half(float v) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(v));
  return h;
}
LF_DEVICE u32 subtract_halves(u32 a, u32 b) {  // two float16 in a word
  u32 v;
  asm("sub.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}
LF_DEVICE u32 fma_halves(u32 a, u32 b, u32 c) {
  u32 v;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
  return v;
}
constexpr float kE4M3Unit = 1;  // factor on the results of unpack_e4m3
LF_DEVICE void unpack_e4m3(u32 word, float* out) {
  u32 low, high;
  asm("{\n\t.reg .b16 a, b;\n\tmov.b32 {a, b}, %2;\n\tcvt.rn.f16x2.e4m3x2 %0, a;\n\tcvt.rn.f16x2.e4m3x2 %1, b;\n\t}"
      : "=r"(low), "=r"(high)
      : "r"(word));
  out[0] = half_to_float((u16)low), out[1] = half_to_float((u16)(low >> 16));
  out[2] = half_to_float((u16)high), out[3] = half_to_float((u16)(high >> 16));
}
// As permute, but a nibble of 8 or more gives the sign bit of byte nibble - 8, repeated eight times.
LF_DEVICE u32 permute_or_sign(u32 a, u32 b, u32 selector) {
  u32 v;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(selector));
  return v;
}
LF_DEVICE int round_to_int(float v) { return __float2int_rn(v); }
// Multiplies two matrices of signed bytes by all threads of a warp: sums = before + a b, in 32 bits, for a [16][32] (or
// [16][16]) and b [32][8]. Thread 4 g + t has bytes 4 t to 4 t + 3 of each 16 columns of a, of rows g and g + 8
// alternately; the same bytes of column g of b; and sums in columns 2 t and 2 t + 1 of row g, then of row g + 8.
LF_DEVICE void multiply_bytes(const u32 (&a)[4], const u32 (&b)[2], const u32 (&before)[4], u32 (&sums)[4]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=r"(sums[0]), "=r"(sums[1]), "=r"(sums[2]), "=r"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(before[0]), "r"(before[1]),
        "r"(before[2]), "r"(before[3]));
}
LF_DEVICE void multiply_bytes(const u32 (&a)[2], const u32 (&b)[1], const u32 (&before)[4], u32 (&sums)[4]) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
               : "=r"(sums[0]), "=r"(sums[1]), "=r"(sums[2]), "=r"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(before[0]), "r"(before[1]), "r"(before[2]), "r"(before[3]));
}
LF_DEVICE float exp2_of(float v) { return exp2f(v); }
LF_DEVICE float exp_of(float v) { return expf(v); }
LF_DEVICE float log_of(float v) { return logf(v); }
LF_DEVICE float rsqrt_of(float v) { return rsqrtf(v); }
LF_DEVICE void add_shared(u64* p, u64 v) { atomicAdd(p, v); }

// Bulk copies into shared memory. A copy completes on a barrier in shared memory.
LF_DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
LF_DEVICE void barrier_init(u64* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
LF_DEVICE void barrier_init_done() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
LF_DEVICE u64 stream_policy() {  // weights, read once per token, must not evict the exchanged words
  u64 policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Orders this thread's reads of shared memory before a copy over them that another thread issues after a barrier. The
// barrier alone does not: it orders loads and stores, but bulk copies use another proxy.
LF_DEVICE void reads_done() {
#if !defined(LF_UNFENCED)  // defined to measure what the fence costs
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
LF_DEVICE void bulk_copy(void* to, const void* from, u32 bytes, u64* barrier, u64 policy) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
      : "memory");
}
LF_DEVICE bool barrier_passed(u64* barrier, u32 parity) {
  u32 done;
  asm volatile(
      "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
  return done != 0;
}
[[noreturn]] LF_DEVICE void trap() {  // ends the launch with a driver's error
  asm volatile("trap;");
  __builtin_unreachable();
}

}  // namespace gpu
}  // namespace laneformer

#endif

namespace laneformer {
namespace gpu {

constexpr int smaller_of(int a, int b) { return a < b ? a : b; }
constexpr int larger_of(int a, int b) { return a > b ? a : b; }

LF_DEVICE int warp() { return same_in_warp(thread() / kWarpSize); }
LF_DEVICE int warp_lane() { return thread() % kWarpSize; }
LF_DEVICE float shuffle(float v, int mask) { return bits_to_float(shuffle_bits(float_to_bits(v), mask)); }
LF_DEVICE float larger(float a, float b) { return a > b ? a : b; }
LF_DEVICE int smaller(int a, int b) { return a < b ? a : b; }
LF_DEVICE int larger(int a, int b) { return a > b ? a : b; }

#ifndef LF_WARP_MAXIMUM
LF_DEVICE u32 largest_in_warp(u32 v) {
  LF_UNROLL for (int mask = kWarpSize / 2; mask > 0; mask /= 2) {
    const u32 other = shuffle_bits(v, mask);
    v = v > other ? v : other;
  }
  return v;
}
#endif
LF_DEVICE float sum_over_warp(float v) {
  LF_UNROLL for (int mask = kWarpSize / 2; mask > 0; mask /= 2) v += shuffle(v, mask);
  return v;
}
LF_DEVICE float max_over_warp(float v) {
  LF_UNROLL for (int mask = kWarpSize / 2; mask > 0; mask /= 2) v = larger(v, shuffle(v, mask));
  return v;
}

}  // namespace gpu
}  // namespace laneformer
