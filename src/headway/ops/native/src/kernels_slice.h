// What the kernels of linear layers share. Included per instruction set.
#pragma once

#include "kernels.h"

namespace headway {
namespace {

constexpr int VECTORS = TILE / Simd::W;

// The part of a tile a kernel works on.
struct Slice {
  const uint8_t* weights;  // at input `begin`
  int begin, end;          // inputs; begin is a multiple of LARGEST_GROUP
  bool first;              // sums start at 0, else at what was stored

  // Weights are read two cache lines at a time. Each time the kernels fetch, into the second cache, what lies so many
  // bytes behind the first and behind the second. 0 = nothing new.
  ptrdiff_t even, odd;
};

HW_INLINE void fetch_ahead(const void* lines, const Slice& s) {
  const uint8_t* p = static_cast<const uint8_t*>(lines);
  Simd::prefetch_far(p + s.even);
  Simd::prefetch_far(p + 64 + s.odd);
}

template <int ROWS>
HW_INLINE void load_sums(Simd::F (&sums)[ROWS][VECTORS], bool first, const float* acc, size_t stride) {
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) sums[r][v] = first ? Simd::zero() : Simd::load(acc + r * stride + v * Simd::W);
}

template <int ROWS>
HW_INLINE void store_sums(const Simd::F (&sums)[ROWS][VECTORS], float* acc, size_t stride) {
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) Simd::store(acc + r * stride + v * Simd::W, sums[r][v]);
}

}  // namespace
}  // namespace headway
