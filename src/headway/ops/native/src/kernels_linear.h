// Linear layers: token rows times one tile of 32 outputs, for every storage format. Included per instruction set.
//
// The inner kernels take up to Simd::ROWS rows and keep all sums in registers. Order of a sum, whatever the number of
// rows: integers are exact within a group; groups are added in order.
#pragma once

#include <cmath>

#include "kernels_slice.h"

namespace headway {
namespace {

constexpr int MOST_ROWS = INTEGER_ROWS > Simd::ROWS ? INTEGER_ROWS : Simd::ROWS;

template <int ROWS>
void bf16_rows(const Matrix& m, const Slice& s, const Activations& a, int row, float* acc, size_t acc_stride) {
  Simd::F sums[ROWS][VECTORS];
  load_sums<ROWS>(sums, s.first, acc, acc_stride);
  const uint16_t* w = reinterpret_cast<const uint16_t*>(s.weights);
  const int end = (int)least(s.end, m.depth);
  for (int k = s.begin; k < end; k += 2, w += 2 * TILE) {
    fetch_ahead(w, s);
    Simd::I both[VECTORS];
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) both[v] = Simd::load_i(w + v * Simd::W * 2);
    if constexpr (Simd::BF16_DOT) {
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const Simd::I x = Simd::broadcast4(a.bf16 + (row + r) * a.stride + k);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = Simd::dot_bf16(sums[r][v], both[v], x);
      }
    } else {
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        const float* x = a.f32 + (size_t)(row + r) * a.width + k;
        const Simd::F even = Simd::set1(x[0]), odd = Simd::set1(k + 1 < a.width ? x[1] : 0.0f);
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) {
          sums[r][v] = Simd::fma(Simd::even_bf16(both[v]), even, sums[r][v]);
          sums[r][v] = Simd::fma(Simd::odd_bf16(both[v]), odd, sums[r][v]);
        }
      }
    }
  }
  store_sums<ROWS>(sums, acc, acc_stride);
}

template <bool HALF, int ROWS>
void float_rows(const Matrix& m, const Slice& s, const Activations& a, int row, float* acc, size_t acc_stride) {
  Simd::F sums[ROWS][VECTORS];
  load_sums<ROWS>(sums, s.first, acc, acc_stride);
  const int end = (int)least(s.end, m.in);
  const float* x = a.f32 + (size_t)row * a.width;
  const uint8_t* w = s.weights;
  for (int k = s.begin; k < end; ++k, w += TILE * (HALF ? 2 : 4)) {
    fetch_ahead(w, s);
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; ++v) {
      const Simd::F by = HALF ? Simd::load_f16(reinterpret_cast<const uint16_t*>(w) + v * Simd::W)
                              : Simd::load(reinterpret_cast<const float*>(w) + v * Simd::W);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) sums[r][v] = Simd::fma(by, Simd::set1(x[(size_t)r * a.width + k]), sums[r][v]);
    }
  }
  store_sums<ROWS>(sums, acc, acc_stride);
}

template <int ROWS>
void rows_of_tile(const Matrix& m, const Slice& s, const Activations& a, int row, float* acc, size_t acc_stride) {
  if constexpr (ROWS <= INTEGER_ROWS) {
    if (m.quantised()) return integer_rows<ROWS>(m, s, a, row, acc, acc_stride);
  }
  if constexpr (ROWS <= Simd::ROWS) {
    if (m.storage == Storage::bf16) return bf16_rows<ROWS>(m, s, a, row, acc, acc_stride);
    if (m.storage == Storage::f16) return float_rows<true, ROWS>(m, s, a, row, acc, acc_stride);
    return float_rows<false, ROWS>(m, s, a, row, acc, acc_stride);
  }
}

void rows_of_tile(int rows, const Matrix& m, const Slice& s, const Activations& a, int row, float* acc, size_t stride) {
  switch (rows) {
    case 1:
      return rows_of_tile<1>(m, s, a, row, acc, stride);
    case 2:
      return rows_of_tile<2>(m, s, a, row, acc, stride);
    default:
      break;
  }
  if constexpr (MOST_ROWS >= 4) {
    if (rows == 3) return rows_of_tile<3>(m, s, a, row, acc, stride);
    if (rows == 4) return rows_of_tile<4>(m, s, a, row, acc, stride);
  }
  if constexpr (MOST_ROWS == 6) {
    if (rows == 5) return rows_of_tile<5>(m, s, a, row, acc, stride);
    return rows_of_tile<6>(m, s, a, row, acc, stride);
  }
}

HW_INLINE size_t bytes_before(const Matrix& m, int input) {  // of a tile; input: multiple of LARGEST_GROUP or the depth
  if (m.quantised()) {
    const int rest = input % m.group;
    return input / m.group * group_bytes(m, m.group) + (rest ? group_bytes(m, rest) : 0);
  }
  return (size_t)input * TILE * (m.storage == Storage::f32 ? 4 : 2);
}

constexpr int PASS = 8 * LARGEST_GROUP;  // inputs whose weights stay in the second cache
constexpr ptrdiff_t AHEAD = PAIRED ? 2048 : 8192;  // bytes: how far a single stream is fetched ahead

// Rows from which on a single stream is: with little to compute per byte the prefetching of processors that have AVX-512 is
// as fast as memory, and with more it falls behind; that of Zen 3 reaches two thirds of it from one row on.
int fetched_from(const Matrix& m) {
  if (PAIRED && m.quantised()) return 1;
  return m.storage == Storage::int4 ? 2 : 5;
}

// Several row blocks walk the inputs in passes, whose weights stay in the second cache from the first block to the last.
// The first block would wait for memory; so the first two fetch, half each, the next pass, or what this thread will
// probably do next. Fetching into the first cache instead would be half as fast: few of its misses fit in flight.
void matmul(const Matrix& m, int tile, int tiles, int next_tile, const Activations& a, int row, int rows, float* acc) {
  const size_t stride = (size_t)tiles * TILE;
  const int blocks = (int)ceil_div(rows, m.quantised() ? INTEGER_ROWS : Simd::ROWS);
  if (blocks == 1) {
    const ptrdiff_t ahead = rows >= fetched_from(m) ? AHEAD : 0;
    for (int t = 0; t < tiles; ++t) {
      const Slice slice{m.tile(tile + t), 0, m.depth, true, ahead, ahead};
      rows_of_tile(rows, m, slice, a, row, acc + t * TILE, stride);
    }
    return;
  }
  for (int begin = 0; begin < m.depth; begin += PASS) {
    const int end = (int)least(begin + PASS, m.depth);
    for (int block = 0, first = 0; block < blocks; ++block) {
      const int count = (int)ceil_div(rows - first, blocks - block);
      for (int t = 0; t < tiles; ++t) {
        const uint8_t* w = m.tile(tile + t) + bytes_before(m, begin);
        const uint8_t* next = end < m.depth ? m.tile(tile + t) + bytes_before(m, end) : m.tile(next_tile + t);
        const Slice slice{w, begin, end, begin == 0, block == 0 ? next - w : 0, block == 1 ? next - w : 0};
        rows_of_tile(count, m, slice, a, row + first, acc + first * stride + t * TILE, stride);
      }
      first += count;
    }
  }
}

}  // namespace
}  // namespace headway
