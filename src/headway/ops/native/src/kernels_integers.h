// Linear layers over integer weights where the machine sums four products of bytes into 32 bits. Included per instruction
// set, before kernels_linear.h, or kernels_pairs.h in its place.
#pragma once

#include <cmath>

#include "kernels_slice.h"

namespace headway {
namespace {

constexpr int INTEGER_ROWS = Simd::ROWS;
constexpr bool PAIRED = false;
HW_INLINE void store_turned(uint8_t*, Simd::I) {}

// dots[row][vector] += codes of INPUTS inputs times activations. SMALL: 8-bit codes are at most 127.
// Unrolled as a whole: in a loop GCC moves every sum from register to register.
template <int INPUTS, int BITS, bool SMALL, int ROWS>
HW_INLINE void dot_codes(Simd::I (&dots)[ROWS][VECTORS], const uint8_t* codes, const Slice& s, const int8_t* a, size_t stride) {
  constexpr int AT_ONCE = 32 / BITS;  // inputs whose codes share a lane
#pragma GCC unroll 8
  for (int k = 0; k < INPUTS; k += AT_ONCE, codes += 4 * TILE) {
    fetch_ahead(codes, s);
#pragma GCC unroll 2
    for (int half = 0; half < AT_ONCE; half += 4) {
      Simd::I w[VECTORS];
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        w[v] = Simd::load_i(codes + v * Simd::W * 4);
        if constexpr (BITS == 4) w[v] = half == 0 ? Simd::low_nibbles(w[v]) : Simd::high_nibbles(w[v]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const Simd::I x = Simd::broadcast4(a + r * stride + k + half);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
          dots[r][v] = BITS == 4 || SMALL ? Simd::dot4(dots[r][v], w[v], x) : Simd::dot8(dots[r][v], w[v], x);
        }
      }
    }
  }
}

template <int BITS, bool MIN, int ROWS>
void integer_rows(const Matrix& m, const Slice& s, const Activations& a, int row, float* acc, size_t acc_stride) {
  const size_t groups = a.groups(), stride = a.stride, first = row * groups + s.begin / m.group;
  const int8_t* q = a.q + row * stride + s.begin;
  const float *scales = a.scale + first, *totals = a.sum + first;
  const int32_t* offsets = (BITS == 8 ? a.offset8 : a.offset4) + first;
  const uint8_t* w = s.weights;
  Simd::F sums[ROWS][VECTORS];
  load_sums<ROWS>(sums, s.first, acc, acc_stride);
  for (int left = s.end - s.begin; left > 0; left -= m.group, ++scales, ++totals, ++offsets) {
    const uint16_t* by = reinterpret_cast<const uint16_t*>(w);
    fetch_ahead(w, s);
    w += (MIN ? 4 : 2) * TILE;
    Simd::I dots[ROWS][VECTORS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      Simd::I offset = Simd::zero_i();
      if constexpr (!MIN) offset = Simd::broadcast4(offsets + r * groups);
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) dots[r][v] = offset;
    }
    int inputs = (int)least(m.group, left);
    for (; inputs >= 32; inputs -= 32, q += 32, w += TILE * BITS * 4) dot_codes<32, BITS, MIN, ROWS>(dots, w, s, q, stride);
    if (inputs > 0) {
      dot_codes<16, BITS, MIN, ROWS>(dots, w, s, q, stride);
      q += 16;
      w += TILE * BITS * 2;
    }
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const Simd::F scale = Simd::load_f16(by + v * Simd::W);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const Simd::F whole = Simd::mul(scale, Simd::set1(scales[r * groups]));
        sums[r][v] = Simd::fma(Simd::to_float(dots[r][v]), whole, sums[r][v]);
      }
    }
    if constexpr (MIN) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        const Simd::F minimum = Simd::load_f16(by + TILE + v * Simd::W);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) sums[r][v] = Simd::fma(minimum, Simd::set1(totals[r * groups]), sums[r][v]);
      }
    }
  }
  store_sums<ROWS>(sums, acc, acc_stride);
}

template <int ROWS>
void integer_rows(const Matrix& m, const Slice& s, const Activations& a, int row, float* acc, size_t acc_stride) {
  const bool bytes = m.storage == Storage::int8;
  const auto rows = m.has_min ? (bytes ? integer_rows<8, true, ROWS> : integer_rows<4, true, ROWS>)
                              : (bytes ? integer_rows<8, false, ROWS> : integer_rows<4, false, ROWS>);
  rows(m, s, a, row, acc, acc_stride);
}

}  // namespace
}  // namespace headway
