// Linear layers: token rows times one tile of 32 outputs, for every storage format. Included per instruction set.
//
// The inner kernels take up to Simd::ROWS rows and keep all sums in registers. Order of a sum, whatever the number of
// rows: integers are exact within a group; groups are added in order.
#pragma once

#include <cmath>

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
      if constexpr (!MIN && (BITS == 4 || Simd::ZERO8 != 0)) offset = Simd::broadcast4(offsets + r * groups);
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

template <int BITS, int ROWS>
void scaled_rows(const Matrix& m, const Slice& s, const Activations& a, int row, float* acc, size_t acc_stride) {
  const bool stepped = m.group <= LARGEST_STEPPED;
  const auto rows = m.has_min ? (stepped ? integer_rows<BITS, true, true, ROWS> : integer_rows<BITS, true, false, ROWS>)
                              : (stepped ? integer_rows<BITS, false, true, ROWS> : integer_rows<BITS, false, false, ROWS>);
  rows(m, s, a, row, acc, acc_stride);
}

template <int ROWS>
void rows_of_tile(const Matrix& m, const Slice& s, const Activations& a, int row, float* acc, size_t acc_stride) {
  switch (m.storage) {
    case Storage::int8:
      return scaled_rows<8, ROWS>(m, s, a, row, acc, acc_stride);
    case Storage::int4:
      return scaled_rows<4, ROWS>(m, s, a, row, acc, acc_stride);
    case Storage::bf16:
      return bf16_rows<ROWS>(m, s, a, row, acc, acc_stride);
    case Storage::f16:
      return float_rows<true, ROWS>(m, s, a, row, acc, acc_stride);
    case Storage::f32:
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
  if constexpr (Simd::ROWS == 6) {
    switch (rows) {
      case 3:
        return rows_of_tile<3>(m, s, a, row, acc, stride);
      case 4:
        return rows_of_tile<4>(m, s, a, row, acc, stride);
      case 5:
        return rows_of_tile<5>(m, s, a, row, acc, stride);
      default:
        return rows_of_tile<6>(m, s, a, row, acc, stride);
    }
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
constexpr ptrdiff_t AHEAD = 8192;  // bytes: how far a single stream is fetched ahead

// Several row blocks walk the inputs in passes, whose weights stay in the second cache from the first block to the last.
// The first block would wait for memory; so the first two fetch, half each, the next pass, or what this thread will
// probably do next. Fetching into the first cache instead would be half as fast: few of its misses fit in flight.
void matmul(const Matrix& m, int tile, int tiles, int next_tile, const Activations& a, int row, int rows, float* acc) {
  const size_t stride = (size_t)tiles * TILE;
  const int blocks = (int)ceil_div(rows, Simd::ROWS);
  if (blocks == 1) {
    // With little to compute per byte the processor's own prefetching is as fast as memory; with more it falls behind.
    const ptrdiff_t ahead = rows >= (m.storage == Storage::int4 ? 2 : 5) ? AHEAD : 0;
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
