// The arithmetic of the decode kernel as tables of functions, one table (`Kernels`) per instruction set. machine.cc
// chooses a session's table, and its workers compute with that alone. kernels.cc defines the tables, amx.cc the one for
// AMX; quantized.h has products with weights of 8 and 4 bits.
//
// Invariant: with one table, the result of a position has the same bits whichever positions are computed together with
// it. Tables differ in the order of their sums, so other instructions may compute other bits.
//
// A product's weights are stored in tiles of kTile rows; a line of a tile has these rows of one column, or of two in
// bf16. Arrays are contiguous, the last index fastest.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../common/activation.h"

namespace laneformer {

// Rows of a weight tile. A line is 64 bytes: 16 rows of one float32 column or of two bf16 columns; 32 bytes in float16.
constexpr int kTile = 16;

constexpr int kMostPositions = 128;  // positions of a product at most

enum class Dtype : int32_t { f32 = 0, bf16 = 1, f16 = 2 };

inline int bytes_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

// Columns of a tile as stored: bf16 columns are stored in pairs.
inline int64_t stored_columns(Dtype dtype, int64_t columns) {
  return dtype == Dtype::bf16 ? (columns + 1) / 2 * 2 : columns;
}

inline int64_t tile_bytes(Dtype dtype, int64_t columns) {
  return stored_columns(dtype, columns) * kTile * bytes_of(dtype);
}

// Tiles of bf16 weights in 12 bits, one after the other in `data`, in units of kUnitColumns columns (bf12_decode.h).
// The exceptions of tile t begin at exceptions[starts[t]].
constexpr int kUnitColumns = 8;
constexpr int64_t kUnitBytes = 3 * 64;

struct Bf12 {
  const char* data;
  const uint8_t* table;  // [16]: high byte of each code
  const uint32_t *exceptions, *starts;
};

inline int64_t bf12_tile_bytes(int64_t columns) { return (columns + kUnitColumns - 1) / kUnitColumns * kUnitBytes; }

// How a product reads its vectors: as float32 (exact), or rounded to the weights' 16-bit dtype.
enum class Activations : int32_t { exact = 0, rounded = 1 };

// Attention of a lane's query heads at some positions over one chunk of its keys.
struct Attend {
  const float* q;      // [positions][heads][e], rotated and scaled
  const void* keys;    // this lane's cache [t][kv_heads][e]
  const void* values;  // likewise
  float* out;   // [positions][heads][e + 2]: sum of exponentials times values, largest score, sum of exponentials
  Dtype dtype;  // of the cache
  int kv_heads, group, e;  // group: query heads per key/value head; e: channels of a head
  int64_t first, last;     // keys of this chunk: first <= t < last
  int64_t start;           // position of the first query
  int64_t window;          // how many of the newest keys a position attends to, its own included
  int positions;
  const void *next_keys, *next_values;  // rows that are read after this chunk, to prefetch
  int64_t next;                         // how many of each; 0 if unknown
  float softcap;                        // of the scores; 0: none
};

constexpr int kLatentEntries = 96;       // blocks of entries begin at multiples of this
constexpr int kLatentQueries = 64;       // queries that use a block before the next block is read
constexpr int kLatentTileQueries = 256;  // the same with tile registers, where a block is first packed

// Attention over vectors that are both key and value: latents, positions or entries of compressed attention.
struct AttendLatents {
  const float* q;       // [positions][of][e], scaled; only the first `heads` of each position are used
  const void* entries;  // this lane's cache [t][e]: keys of all heads; the first `values` channels are the values
  float* out;           // [positions][of][values + 2], as in Attend
  Dtype dtype;          // of the cache
  int heads, of, e, values;
  int64_t first, last;  // entries of this chunk: first <= t < last
  int64_t start;        // position of the first query
  int positions;
  const char* next;                // entries that are read after this chunk, to prefetch
  int64_t next_bytes;              // their bytes; 0 if unknown
  float* space;                    // [latent_floats()]
  int64_t window = INT64_MAX / 2;  // newest entries that a position attends to, its own included
  int64_t every = 1;               // positions per entry; the last of them is the first to attend to it
  const int32_t* list = nullptr;   // numbers of entries: entry t is entry list[t] of the cache; null: entry t itself
};

// For entries first <= t < last: scores[t] = the sum over heads of weights[head] * max(q[head] . keys[t], 0).
struct IndexScores {
  const float* q;        // [heads][e]
  const float* weights;  // [heads]
  const void* keys;      // this lane's cache [t][e]
  Dtype dtype;           // of the cache
  int heads, e;
  int64_t first, last;
  float* scores;  // [last], written from `first` on
  float* space;   // [index_floats()]
};

// Floats of AttendLatents::space, for vectors and for tile registers.
inline int64_t latent_floats(int64_t e, int64_t values) {
  const int64_t read = (e + 31) / 32 * 32, mixed = (values + 31) / 32 * 32, entries = kLatentEntries * e;
  const int64_t of_tiles =
      e + kLatentTileQueries * (read * 3 / 2 + mixed + 16) + kLatentEntries * (read + mixed) * 3 / 2;
  const int64_t of_vectors = kLatentQueries * (e + values);
  return (of_tiles > of_vectors ? of_tiles : of_vectors) + entries + 16;
}

// Floats of IndexScores::space.
inline int64_t index_floats(int64_t heads, int64_t e) {
  return (heads + 31) / 32 * 32 * (e + 1) + kLatentEntries * e + 16;
}

struct Best {
  float value;
  int32_t token;  // -1: none
};

struct Kernels {
  const char* name;

  // Multiplies `tiles` tiles w by a vector per position, as `prepare` has written them to x. Row r of tile t at
  // position p goes to y[p * ldy + 16 * t + r].
  void (*product)(Dtype, Activations, const void* w, const void* x, int64_t columns, int64_t tiles, int positions,
                  float* y, int64_t ldy);
  // The same with weights in 12 bits and x as `prepare` writes it for bf16. The results have the bits of `product`.
  void (*product_bf12)(Activations, const Bf12&, const void* x, int64_t columns, int64_t tiles, int positions, float* y,
                       int64_t ldy);
  // Writes the vectors x[p * ldx + k] in the form that `product` reads. out: [prepared_floats(columns, positions)].
  void (*prepare)(Dtype, Activations, const float* x, int64_t ldx, int64_t columns, int positions, void* out);

  void (*rms_norm)(const float* x, const float* scale, float eps, int64_t n, float* y);  // x and y may be the same
  void (*add_scaled)(float* total, const float* part, float weight, int64_t n);          // total += weight * part
  // total = parts[0] + weights[1] * parts[1] + weights[2] * parts[2] + ..., in this order; onto: added to `total`.
  void (*add_parts)(const float* const* parts, const float* weights, int count, bool onto, int64_t n, float* total);
  // For tiles of [columns][16]: to = decay * from + the sum over j = 0 .. 15, in this order, of keys[column][j] *
  // deltas[j][row]. from: null for zero; it may be `to`. keys: [columns][16]. deltas: [16][tiles * 16].
  void (*advance)(const float* from, float decay, const float* keys, const float* deltas, int64_t columns,
                  int64_t tiles, float* to);
  // out = activation(x), both [tiles][16]; x and out may be the same. Gated: out = activation(gate) * up, from x
  // [tiles][gate 16 | up 16].
  void (*activate)(Activation, bool gated, const float* x, int64_t tiles, float* out);
  // In place on x [tiles][gate 16 | up 16]: gate = min(gate, limit), up = (up clamped to -limit .. limit) + offset.
  void (*limit_gated)(float limit, float offset, int64_t tiles, float* x);
  void (*gate)(const float* gates, int64_t n, float* x);  // x *= sigmoid(gates)
  void (*softcap)(float cap, int64_t n, float* x);        // x = cap * tanh(x / cap)
  void (*attend)(const Attend&);
  void (*attend_latents)(const AttendLatents&);
  // out[c] = the sum over i < count of vectors[i][c] * (softmax over i of gates[i][c] + biases[i][c]).
  void (*compress)(const float* const* vectors, const float* const* gates, const float* const* biases, int count,
                   int64_t channels, float* out);
  void (*index_scores)(const IndexScores&);
  void (*widen)(Dtype, const void* from, int64_t n, float* to);
  void (*narrow)(Dtype, const float* from, int64_t n, void* to);

  // Measurements: reads all lines of 64 bytes once, and makes float32 multiply-adds, as fast as the machine can.
  // Returns a result so that the work is not optimised away.
  uint64_t (*read)(const void* data, int64_t bytes);
  float (*multiply_adds)(int64_t count);

  // Sampling over a range of the vocabulary, as infer/sampling.py defines it.
  float (*largest)(const float* z, int64_t n);  // NaN if one of z is
  void (*temper)(const float* logits, const uint8_t* seen, float penalty, float temperature, int64_t n, float* z);
  // The sum of exp(z - largest) as an integer in units of 2^-40, so that it is the same in any order.
  uint64_t (*sum_exp)(const float* z, float largest, int64_t n);
  void (*exp_from)(const float* z, float largest, int64_t n, float* out);  // exp(z - largest)
  // The token first <= t < last with the largest z[t], plus Gumbel noise of (key, position, t) if `noise`, among those
  // with z[t] >= least; the lowest token among equals.
  Best (*draw)(const float* z, float least, bool noise, const uint32_t key[2], uint32_t position, int64_t first,
               int64_t last);
};

// Floats of memory that `prepare` needs. Parts of positions are padded by up to three positions, and columns to those
// of a tile register.
inline int64_t prepared_floats(int64_t columns, int positions) {
  return (columns + 31) / 32 * 32 * (positions + positions / 2 + 3);
}

extern "C" {
extern const Kernels laneformer_kernels_portable;
#if defined(__x86_64__)  // weak: the address is null if the set was not compiled
extern const Kernels laneformer_kernels_avx2 __attribute__((weak));
extern const Kernels laneformer_kernels_avx512 __attribute__((weak));
extern const Kernels laneformer_kernels_avx512_bf16 __attribute__((weak));
// The table of amx.cc: products of bf16 weights and latent attention on tile registers, and the functions of `others`
// for everything else. There is one such table.
const Kernels* laneformer_kernels_amx(const Kernels* others);
bool laneformer_agrees_amx();    // whether trial products have the same bits for one position and several
bool laneformer_emulates_amx();  // whether tile instructions were compiled as plain code, for tests
#endif
}

struct QuantizedKernels;  // quantized.h

struct InstructionSet {
  const char* name;
  const Kernels* kernels;
  const QuantizedKernels* quantized;
};

// The set of this name, or the best one if `name` is null. Returns null if this machine does not have the set.
const InstructionSet* choose_instructions(const char* name);
const Kernels* choose_kernels(const char* name);  // the kernels of that set, or null

}  // namespace laneformer
