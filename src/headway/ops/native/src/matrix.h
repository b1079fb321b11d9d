// A weight matrix packed for the kernels: the one quantised tensor type, and its 16 and 32-bit siblings.
//
// Outputs are cut into tiles of 32, each tile is contiguous in memory and read once from front to back:
//
//   int8   per group of `group` inputs: float16 scale[32] (float16 minimum[32]), then uint8 code[group/4][32][4]
//   int4   the same with              uint8 code[group/8][32][4]: low nibbles input 8i..8i+3, high nibbles 8i+4..8i+7
//   bf16   bfloat16 [in/2][32][2]        f16  float16 [in][32]        f32  float [in][32]
//
// A weight is scale * (code - zero) * unit, zero = 128 (int8) or 8 (int4); with minima (scale * code + minimum) * unit.
// No scale is 0: a group of zeros has codes of 0. The last group of a row may be shorter; inputs are padded to a
// multiple of 16 with weights of zero effect.
// Codes with minima start at 0, and 8-bit ones are at most 31: so dot products need no correction for a zero.
// Scales are float16, so plain scales of GGUF files are kept bit by bit, and products of two numbers (K formats) are
// rounded to 11 bits; `unit`, a power of two, keeps those and the scales of tensors quantised here inside its range.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "common.h"

namespace headway {

enum class Storage { f32, f16, bf16, int8, int4 };

// Runs body(i) for i in [0, n), possibly on several threads.
using ForEach = std::function<void(int n, const std::function<void(int)>& body)>;

// Several matrices of one shape, of experts or of heads, may lie one after another; each begins with a tile of its own.
struct Matrix {
  Storage storage;
  bool has_min = false;
  int count = 1;
  int out, in;         // of one
  int group = 0;   // inputs per scale; 16, 32, 64 or 128
  int depth;       // in, padded
  float unit = 1;
  bool narrow = false;  // 8-bit codes without minima are within 32 of their zero
  bool finite = true;  // all weights are numbers
  size_t tile_bytes;
  Buffer data;

  bool quantised() const { return storage == Storage::int8 || storage == Storage::int4; }
  int tiles() const { return (int)ceil_div(out, TILE); }  // of one
  int zero() const { return has_min ? 0 : storage == Storage::int8 ? 128 : 8; }
  const uint8_t* tile(int t) const { return data.as(t * tile_bytes); }
  size_t bytes() const { return (size_t)count * tiles() * tile_bytes; }

  // Find depth and tile_bytes, and take memory for the data.
  void lay_out();
  // Of the data; the same on any number of threads.
  uint64_t checksum(const ForEach& for_each) const;
  // Fill the data from an open file, in parallel; false if it is too short or its checksum another.
  bool read(int file, size_t offset, uint64_t expected, const ForEach& for_each);

  // Row n, of all matrices' rows, as floats [in]: an embedding look-up, and the oracle of the packing tests.
  void unpack_row(int n, float* row) const;
};

// Bytes of `inputs` consecutive inputs of a tile that share a scale.
HW_INLINE size_t group_bytes(const Matrix& m, int inputs) {
  return (m.has_min ? 4 : 2) * TILE + (size_t)inputs * TILE / (m.storage == Storage::int8 ? 1 : 2);
}

// Pack matrices of one shape as stored in the file, one at each of `data`. source: "f32", "f16", "bf16" or a block format.
// bytes: of each.
// target: "" keeps the stored precision, "int8" and "int4" quantise 16 and 32-bit weights in groups of `group`.
// Throws std::invalid_argument, also where a weight to be scaled is not finite.
Matrix pack(const std::vector<const uint8_t*>& data, size_t bytes, const std::string& source, int out, int in, const std::string& target,
            int group, const ForEach& for_each);

}  // namespace headway
