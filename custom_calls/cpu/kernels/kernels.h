// The arithmetic of the decode kernel as a table of functions, one table per instruction set; see kernels.cc.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../common/activation.h"

namespace laneformer {

constexpr int kTile =
    16;  // rows of a weight tile: a line of 64 bytes holds 16 rows of one (float32) or two (bf16) columns

constexpr int kMostPositions = 128;  // of a product

enum class Dtype : int32_t { f32 = 0, bf16 = 1, f16 = 2 };

inline int bytes_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// Columns as stored: bf16 weights lie in pairs.
inline int64_t stored_columns(Dtype dtype, int64_t columns) {
  return dtype == Dtype::bf16 ? (columns + 1) / 2 * 2 : columns;
}

inline int64_t tile_bytes(Dtype dtype, int64_t columns) {
  return stored_columns(dtype, columns) * kTile * bytes_of(dtype);
}

// Tiles of bf16 weights in 12 bits each: see bf12_decode.h. Beside each other in `data`; the exceptions of tile t begin
// at exceptions[starts[t]].
constexpr int kUnitColumns = 8;
constexpr int64_t kUnitBytes = 3 * 64;

struct Bf12 {
  const char* data;
  const uint8_t* table;  // [16]: a high byte for each code
  const uint32_t *exceptions, *starts;
};

inline int64_t bf12_tile_bytes(int64_t columns) { return (columns + kUnitColumns - 1) / kUnitColumns * kUnitBytes; }

// How a product reads its vector: as float32 (exact), rounded to the weights' 16-bit dtype, or as packed bf16 pairs for
// the dot instruction.
enum class Activations : int32_t { exact = 0, rounded = 1 };

struct Attend {
  const float* q;      // [positions][heads][e], rotated, times 1 / sqrt(e)
  const void* keys;    // this lane's cache [t][n][e]
  const void* values;  // likewise
  float* out;          // [positions][heads][e + 2]: unnormalised sum of values, largest score, sum of exponentials
  Dtype dtype;         // of the cache
  int kv_heads, group, e;
  int64_t first, last;  // keys of this part: first <= t < last
  int64_t start;        // position of query 0
  int64_t window;       // keys seen, own position included
  int positions;
  const void *next_keys, *next_values;  // rows that will be wanted after these
  int64_t next;                         // how many of each; 0 where that is not known
};

constexpr int kLatentEntries = 96;       // blocks of entries begin at multiples of this
constexpr int kLatentQueries = 64;       // that use a block before the next one is read
constexpr int kLatentTileQueries = 256;  // the same on tile registers, where a block is packed for them

struct AttendLatents {
  const float* q;       // [positions][of][e], of which the first `heads` count, times the scale
  const void* entries;  // this lane's cache [t][e]: keys of all heads, of which the first `values` channels are values
  float* out;           // [positions][of][values + 2], as Attend's
  Dtype dtype;          // of the cache
  int heads, of, e, values;
  int64_t first, last;  // entries of this part: first <= t < last
  int64_t start;        // position of query 0
  int positions;
  const char* next;                // what will be wanted after these
  int64_t next_bytes;              // 0 where that is not known
  float* space;                    // latent_floats()
  int64_t window = INT64_MAX / 2;  // entries seen, that of the own position included
  int64_t every = 1;               // positions of an entry, which is seen from the last of them on
  const int32_t* list = nullptr;   // where it is given, entry t is that of number list[t] in the cache
};

// Of entries first <= t < last: scores[t] = the sum over heads of weights[head] * max(q[head] . keys[t], 0).
struct IndexScores {
  const float* q;        // [heads][e]
  const float* weights;  // [heads]
  const void* keys;      // this lane's cache [t][e]
  Dtype dtype;           // of the cache
  int heads, e;
  int64_t first, last;
  float* scores;
  float* space;  // index_floats()
};

// Floats of memory for attention to latents.
inline int64_t latent_floats(int64_t e, int64_t values) {
  const int64_t read = (e + 31) / 32 * 32, mixed = (values + 31) / 32 * 32, entries = kLatentEntries * e;
  const int64_t of_tiles =
      e + kLatentTileQueries * (read * 3 / 2 + mixed + 16) + kLatentEntries * (read + mixed) * 3 / 2;
  const int64_t of_vectors = kLatentQueries * (e + values);
  return (of_tiles > of_vectors ? of_tiles : of_vectors) + entries + 16;
}

inline int64_t index_floats(int64_t heads, int64_t e) {
  return (heads + 31) / 32 * 32 * (e + 1) + kLatentEntries * e + 16;
}

struct Best {
  float value;
  int32_t token;
};

struct Kernels {
  const char* name;

  // Rows 16 t .. 16 t + 15 of `tiles` tiles times a prepared vector per position: y[p ldy + 16 t + r].
  void (*product)(Dtype, Activations, const void* w, const void* x, int64_t columns, int64_t tiles, int positions,
                  float* y, int64_t ldy);
  // The same with weights in 12 bits, from x as `prepare` writes it for bf16; the same bits.
  void (*product_bf12)(Activations, const Bf12&, const void* x, int64_t columns, int64_t tiles, int positions, float* y,
                       int64_t ldy);
  // The vectors x[p ldx + k] as `product` reads them; out has room for prepared_floats().
  void (*prepare)(Dtype, Activations, const float* x, int64_t ldx, int64_t columns, int positions, void* out);

  void (*rms_norm)(const float* x, const float* scale, float eps, int64_t n, float* y);
  void (*add_scaled)(float* total, const float* part, float weight, int64_t n);  // total += weight * part
  // parts[0] + weights[1] * parts[1] + weights[2] * parts[2] + ..., in this order; onto: added to what `total` has.
  void (*add_parts)(const float* const* parts, const float* weights, int count, bool onto, int64_t n, float* total);
  // Tiles of [columns][16]: decay * from + the sum over j of keys[column][j] * deltas[j][row], in the order of j from 0
  // to 15. from: null for zero, or the same memory as `to`. deltas: [16][16 tiles].
  void (*advance)(const float* from, float decay, const float* keys, const float* deltas, int64_t columns,
                  int64_t tiles, float* to);
  // [tiles][16] -> activation(x) [tiles][16], which may be the same memory; gated: [tiles][gate 16 | up 16] ->
  // activation(gate) * up.
  void (*activate)(Activation, bool gated, const float* x, int64_t tiles, float* out);
  // In place: [tiles][gate 16 | up 16] -> min(gate, limit), up between -limit and limit, + offset.
  void (*limit_gated)(float limit, float offset, int64_t tiles, float* x);
  void (*gate)(const float* gates, int64_t n, float* x);  // x *= sigmoid(gates)
  void (*attend)(const Attend&);
  void (*attend_latents)(const AttendLatents&);
  // out[c] = the sum over i of vectors[i][c] times the softmax over i of gates[i][c] + biases[i][c].
  void (*compress)(const float* const* vectors, const float* const* gates, const float* const* biases, int count,
                   int64_t channels, float* out);
  void (*index_scores)(const IndexScores&);
  void (*widen)(Dtype, const void* from, int64_t n, float* to);
  void (*narrow)(Dtype, const float* from, int64_t n, void* to);

  uint64_t (*read)(const void* data, int64_t bytes);  // every 64 bytes once, as fast as the machine reads
  float (*multiply_adds)(int64_t count);              // of float32 in registers, as fast as the machine computes

  // Sampling over a range of the vocabulary (infer/sampling.py has the definition).
  float (*largest)(const float* z, int64_t n);
  void (*temper)(const float* logits, const uint8_t* seen, float penalty, float temperature, int64_t n, float* z);
  uint64_t (*sum_exp)(const float* z, float largest,
                      int64_t n);  // sum of exp(z - largest) in units of 2^-40, the same in any order
  void (*exp_from)(const float* z, float largest, int64_t n, float* out);  // exp(z - largest)
  Best (*draw)(const float* z, float least, bool noise, const uint32_t key[2], uint32_t position, int64_t first,
               int64_t last);
};

// Floats (4 bytes) that `prepare` may write for a block of positions: every part of them is padded, by up to three, and
// columns to what a tile register holds.
inline int64_t prepared_floats(int64_t columns, int positions) {
  return (columns + 31) / 32 * 32 * (positions + positions / 2 + 3);
}

extern "C" {
extern const Kernels laneformer_kernels_portable;
#if defined(__x86_64__)  // null where a set was not compiled
extern const Kernels laneformer_kernels_avx2 __attribute__((weak));
extern const Kernels laneformer_kernels_avx512 __attribute__((weak));
extern const Kernels laneformer_kernels_avx512_bf16 __attribute__((weak));
// Those of `others` with products of bf16 weights on tile registers (amx.cc). There is one such table.
const Kernels* laneformer_kernels_amx(const Kernels* others);
bool laneformer_agrees_amx();    // whether one position and several have the same bits: runs the instructions
bool laneformer_emulates_amx();  // them as plain code, for tests
#endif
}

struct QuantizedKernels;  // quantized.h

struct InstructionSet {
  const char* name;
  const Kernels* kernels;
  const QuantizedKernels* quantized;
};

// The best set that this machine runs, or the one of that name; null if it is unknown or cannot run here.
const InstructionSet* choose_instructions(const char* name);
const Kernels* choose_kernels(const char* name);  // of that set, or null

}  // namespace laneformer
