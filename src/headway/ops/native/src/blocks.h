// GGUF's block formats: where a block's scales, minima and codes lie. Layouts are drawn in ops/blocks.py.
#pragma once

#include <string>

#include "matrix.h"

namespace headway {

constexpr int LARGEST_BLOCK = 256;  // weights
constexpr int MOST_GROUPS = 16;     // of a block

struct BlockFormat {
  const char* name;
  int numbers, bytes;  // of a block
  Storage storage;     // what it becomes
  bool has_min;
  int group;           // weights that share a scale
  bool narrow;         // 8-bit codes are within 32 of their zero
  bool products;       // scales are products of float16 and an integer, which float16 may be too short for

  // The scale, and what is added, of every group of a block.
  void (*scales)(const uint8_t* block, float* scale, float* minimum);
  // Codes as Matrix has them: zero at 128 (int8) or 8 (int4); with minima from 0, and 8-bit ones at most 31.
  void (*codes)(const uint8_t* block, uint8_t* codes);
};

// The format of that name, or null: not a block format.
const BlockFormat* block_format(const std::string& name);

}  // namespace headway
