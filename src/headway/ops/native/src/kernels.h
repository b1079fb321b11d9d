// What each instruction set provides: one table of functions, chosen at run time.
//
// One rule holds for all of them: the value computed for a token row, a query or a cached token does not depend on
// how many rows are computed together, in which blocks, or by which thread. Every sum has one fixed order.
#pragma once

#include "common.h"
#include "matrix.h"

namespace headway {

// Token rows in the forms linear kernels read. A form that is not wanted is null.
struct Activations {
  int width = 0;               // numbers per row
  int depth = 0;               // width, padded to a multiple of SMALLEST_GROUP; the padding of q and bf16 is zero
  const float* f32 = nullptr;  // [rows][width]

  uint16_t* bf16 = nullptr;    // [rows][stride]
  int8_t* q = nullptr;         // [rows][stride]
  size_t stride = 0;           // of bf16 and q, in elements
  uint8_t* turned = nullptr;   // [rows][2 * stride], of paired kernels: per four inputs their magnitudes, and what turns codes

  // Inputs that share a scale are the weights' groups: x = scale * q.
  int group = 0;
  float* scale = nullptr;      // [rows][groups]
  float* sum = nullptr;        // [rows][groups]: scale times the sum of q, what a group's minimum is multiplied by
  int32_t* offset8 = nullptr;  // [rows][groups]: -zero times the sum of q, with the zero of 8-bit codes; of paired kernels what
                               // turning codes takes from a group: the sum of the magnitudes of its negative q
  int32_t* offset6 = nullptr;  // the same for narrow ones, less what paired kernels take from those
  int32_t* offset4 = nullptr;  // the same for 4-bit codes

  int groups() const { return (int)ceil_div(depth, group); }
};

enum class CacheFormat { f32, bf16, int8 };
constexpr int CACHE_BYTES[] = {4, 2, 1};  // of a number

// A layer's keys and values: [block][head] chunks, each holding `slots` tokens (the block's, padded to 16).
//   f32:  key chunk [key_width][slots],      value chunk [slots][value_width]
//   bf16: key chunk [key_width/2][slots][2], value chunk [slots/2][value_width][2]
//   int8: as bf16, then [slots] float16: what a token's numbers are multiples of
// Widths are padded: key_width to 2, value_width to 16. Of latent attention there are key chunks only. Numbers, or tokens, of
// a pair lie side by side, so that dot-product instructions find their operands without shuffles.
struct Cache {
  CacheFormat format;
  int heads, slots, block_size;
  int key_width, value_width;  // padded
  bool latent;                 // the values are the first numbers of the keys, and not kept again
  void* keys;
  void* values;

  size_t chunk(int width) const {
    return (size_t)width * slots * CACHE_BYTES[(int)format] + (format == CacheFormat::int8 ? slots * sizeof(uint16_t) : 0);
  }
  size_t key_chunk() const { return chunk(key_width); }                    // bytes
  size_t value_chunk() const { return latent ? 0 : chunk(value_width); }  // bytes
  void* key_at(size_t number) const { return static_cast<uint8_t*>(keys) + number * key_chunk(); }
  void* value_at(size_t number) const { return static_cast<uint8_t*>(values) + number * value_chunk(); }
};

// Of an int8 chunk: what each token's numbers are multiples of.
HW_INLINE uint16_t* units(const Cache& c, void* chunk, int width) {
  return reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(chunk) + (size_t)width * c.slots);
}

// Some key/value heads of one row of the batch: `queries` tokens, `group` query heads for each of them.
// Query rows are numbered [head][query][query head of the group].
struct Attend {
  Cache cache;
  const int32_t* table;      // the row's blocks
  int head, heads;           // key/value heads [head, head + heads)
  int group;                 // query heads per key/value head
  int queries;
  const float* q;            // of the first query's first head: [queries][q_stride], heads of `width` side by side
  size_t q_stride;
  int width, out_width;      // unpadded key and value width
  const int32_t* positions;  // [queries], ascending
  float scale, softcap;      // softcap 0 = none
  int window;                // 0 = none
};

// Sum over one range of cached tokens: the largest score, the sum of exp(score - largest), and the weighted values.
struct Partial {
  float* largest;  // [rows]
  float* total;    // [rows]
  float* values;   // [rows][value_width]
};

enum class Activation { silu, gelu_tanh, gelu, relu, relu2 };

// What a draw's noise depends on besides the token id (see headway/sampling/noise.py).
struct NoiseKey {
  uint32_t low, high;  // words of the seed
  uint32_t position, choice, purpose;
};
constexpr int NOISE_SPAN = 64;  // neighbouring token ids whose noise is made at once

struct Kernels {
  const char* name;
  bool bf16_dot;  // bf16 weights and caches take activations rounded to bf16
  bool paired;    // of kernels_pairs.h: 8-bit codes take activations' magnitudes

  // acc[row][tiles * TILE] = rows [row, row + rows) of `a` times tiles [tile, tile + tiles), without the matrix's unit.
  // next_tile: what this thread will probably multiply next, to fetch it meanwhile; may lie past the end.
  void (*matmul)(const Matrix& w, int tile, int tiles, int next_tile, const Activations& a, int row, int rows, float* acc);

  // Fill the integer form of inputs [begin, end) of a row (begin: multiple of the group) from x, which starts there.
  void (*quantise)(const float* x, int begin, int end, Activations& a, int row);
  void (*to_bf16)(const float* x, int begin, int end, Activations& a, int row);

  void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);
  // The same of x less its mean; then the bias is added, if there is one.
  void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int n, float* out);
  // out = acc * unit + bias + residual; bias and residual may be null.
  void (*finish)(const float* acc, float unit, const float* bias, const float* residual, int n, float* out);
  // out = activation(gate * gate_unit) * (up * up_unit); without an up, of the activation alone.
  void (*gate)(Activation kind, const float* gate, float gate_unit, const float* up, float up_unit, int n, float* out);
  // g = min(gate * gate_unit, limit), u = up * up_unit within [-limit, limit]: out = g * sigmoid(alpha * g) * (u + 1)
  void (*clamped_gate)(const float* gate, float gate_unit, const float* up, float up_unit, float alpha, float limit, int n, float* out);
  // x = softcap * tanh(x * scale / softcap); softcap 0 = only scale
  void (*cap)(float* x, float scale, float softcap, int n);

  // Queries, scaled and in the form `attend` reads, to prepared [query rows][key_width] (floats' room).
  void (*prepare_queries)(const Attend& task, void* prepared);
  // One range of blocks for all query rows. scores: scratch, attend_scratch() bytes.
  void (*attend)(const Attend& task, const void* prepared, int first_block, int last_block, void* scores, Partial out);
  // total = total merged with `more`, row by row; an empty side leaves the other untouched.
  void (*merge)(Partial total, Partial more, int rows, int value_width);
  // out[value] = values / total
  void (*normalise)(Partial total, int row, int value_width, int out_width, float* out);

  // The sampler's (see kernels_sampling.h): the same bits on every instruction set.
  void (*summarise)(const float* logits, int n, float* peaks, float* sums);
  float (*share_of_tiles)(const float* peaks, const float* sums, int n, float top);
  void (*weights)(const float* logits, int n, float peak, float inverse_temperature, float* out);
  int64_t (*mass)(const float* logits, int n, float peak, float inverse_temperature, float least);
  float (*largest)(const float* x, int n);
  uint32_t (*noise)(const NoiseKey& key, uint32_t block, uint32_t (*words)[NOISE_SPAN / 4]);

  double (*probe_read)(const uint8_t* data, size_t bytes);  // sums memory; returns something that depends on it
  // 12 independent chains of multiply-adds; kind 0 fp32, 1 bf16, 2 int8; opaque must be 1.
  double (*probe_dot)(int kind, long rounds, int opaque);
  int probe_lanes;                                          // multiply-adds of one fp32 instruction
};

constexpr int SPLIT = 256;  // cached tokens per partial sum of attention, at absolute positions

// Blocks per partial sum.
HW_INLINE int split_blocks(const Cache& c) { return c.block_size >= SPLIT ? 1 : SPLIT / c.block_size; }

// Bytes of scratch that `attend` needs for `rows` query rows.
HW_INLINE size_t attend_scratch(const Cache& c, int rows) {
  return (size_t)rows * split_blocks(c) * c.slots * 6 + 64 + (c.latent ? (size_t)c.value_width * c.slots * 4 + 64 : 0);
}

// Tables of the instruction sets; call only what the machine supports.
const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_bf16_kernels();

// Best table of the machine, or the one named. Throws std::invalid_argument.
const Kernels& choose_kernels(const char* name);

}  // namespace headway
