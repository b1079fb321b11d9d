// Linear layers over integer weights where the machine sums four products of bytes into 32 bits. Included per instruction
// set, before kernels_linear.h, or kernels_pairs.h in its place.
#pragma once

#include <cmath>

#include "kernels_slice.h"

namespace headway {
namespace {

constexpr int INTEGER_ROWS = Simd::ROWS;
constexpr bool STEPS = true;  // small groups of activations have steps, see HALF_STEP
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

// STEPPED: the activations' scales are steps (see Activations). A vector of weight scales then meets a row's scale in an
// integer addition, which costs no time on the units that multiply.
template <int BITS, bool MIN, bool STEPPED, int ROWS>
void integer_rows(const Matrix& m, const Slice& s, const Activations& a, int row, float* acc, size_t acc_stride) {
  const size_t groups = a.groups(), stride = a.stride, first = row * groups + s.begin / m.group;
  const int8_t* q = a.q + row * stride + s.begin;
  const float *scales = a.scale + first, *totals = a.sum + first;
  const int32_t *steps = a.step + first, *offsets = (BITS == 8 ? a.offset8 : a.offset4) + first;
  const uint8_t* w = s.weights;
  Simd::F sums[ROWS][VECTORS];
  load_sums<ROWS>(sums, s.first, acc, acc_stride);
  alignas(64) float variants[3][TILE];  // of the weights' scales: as they are, for half steps, for what is no number
  if constexpr (STEPPED) {
    for (int v = 0; v < VECTORS; ++v) Simd::store(variants[2] + v * Simd::W, Simd::set1(NAN));
  }
  for (int left = s.end - s.begin; left > 0; left -= m.group, ++scales, ++totals, ++steps, ++offsets) {
    const uint16_t* by = reinterpret_cast<const uint16_t*>(w);
    fetch_ahead(w, s);
    w += (MIN ? 4 : 2) * TILE;
    if constexpr (STEPPED) {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        const Simd::F scale = Simd::load_f16(by + v * Simd::W);
        Simd::store(variants[0] + v * Simd::W, scale);
        Simd::store(variants[1] + v * Simd::W, Simd::mul(scale, Simd::set1(HALF_STEP)));
      }
    }
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
    if constexpr (STEPPED) {
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const float* variant = variants[steps[r * groups] & 3];
        const Simd::I step = Simd::broadcast4(steps + r * groups);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
          const Simd::F scale = Simd::add_exponent(Simd::load(variant + v * Simd::W), step);
          sums[r][v] = Simd::fma(Simd::to_float(dots[r][v]), scale, sums[r][v]);
        }
      }
    } else {
#pragma GCC unroll 4
      for (int v = 0; v < VECTORS; ++v) {
        const Simd::F scale = Simd::load_f16(by + v * Simd::W);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          const Simd::F part = Simd::mul(Simd::to_float(dots[r][v]), scale);
          sums[r][v] = Simd::fma(part, Simd::set1(scales[r * groups]), sums[r][v]);
        }
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

template <int BITS, int ROWS>
void scaled_rows(const Matrix& m, const Slice& s, const Activations& a, int row, float* acc, size_t acc_stride) {
  const bool stepped = m.group <= LARGEST_STEPPED;
  const auto rows = m.has_min ? (stepped ? integer_rows<BITS, true, true, ROWS> : integer_rows<BITS, true, false, ROWS>)
                              : (stepped ? integer_rows<BITS, false, true, ROWS> : integer_rows<BITS, false, false, ROWS>);
  rows(m, s, a, row, acc, acc_stride);
}

template <int ROWS>
void integer_rows(const Matrix& m, const Slice& s, const Activations& a, int row, float* acc, size_t acc_stride) {
  if (m.storage == Storage::int8) return scaled_rows<8, ROWS>(m, s, a, row, acc, acc_stride);
  return scaled_rows<4, ROWS>(m, s, a, row, acc, acc_stride);
}

}  // namespace
}  // namespace headway
