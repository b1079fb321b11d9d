// Linear layers over integer weights where the machine multiplies unsigned bytes by signed ones and adds pairs into 16 bits
// (AVX2's vpmaddubsw), as often as vectors can be added. Included per instruction set, before kernels_linear.h, in place
// of kernels_integers.h.
//
// What limits a kernel is then how often 16-bit sums must be widened, so small codes are added up in 16 bits as long as
// they fit. Sums of floats stay in the first cache: registers hold the integers of four rows.
#pragma once

#include "kernels_slice.h"

namespace headway {
namespace {

constexpr int INTEGER_ROWS = 4;
constexpr bool PAIRED = true;

// How codes of a matrix meet activations within -127..127:
//   nibbles  4 bits, 0..15                small  8 bits, 0..31: those with minima
//   narrow   8 bits, 128 - 32..128 + 32   wide   8 bits, 128 - 128..128 + 127
//
// Wide codes are too large to be multiplied as unsigned numbers. So activations' magnitudes are, and codes become signed by
// an exclusive or: with 128 code - 128, with 127, where the activation is negative, -(code - 128) - 1. The 1 is made good once
// per group (offset8). Giving activations the signs of codes instead would keep the units busy that multiply.
enum class Codes { nibbles, small, narrow, wide };
constexpr int NARROW = 32;  // what narrow codes are at most from their zero

// Quads of inputs whose pairs of products a 16-bit sum has room for; of wide codes one.
constexpr int added(Codes codes) { return codes == Codes::nibbles ? 8 : codes == Codes::small ? 4 : codes == Codes::narrow ? 2 : 1; }
constexpr int V = 2;  // vectors of outputs at once
constexpr int bytes(Codes codes) { return TILE / (codes == Codes::nibbles ? 2 : 1); }  // of an input of a tile
constexpr int turns(Codes codes) { return codes == Codes::wide ? 2 : 1; }  // bytes of an input of a row

// Eight activations as wide codes meet them, see Activations::turned.
HW_INLINE void store_turned(uint8_t* to, Simd::I q) { Simd::store_magnitudes(to, q); }

// 32-bit sums of QUADS times 4 inputs: += where they have begun, else = offsets +.
template <Codes CODES, int QUADS, int ROWS>
HW_INLINE void add_quads(Simd::I (&dots)[ROWS][V], bool begun, const int32_t* offsets, size_t groups, const uint8_t* codes,
                         const int8_t* const (&rows)[ROWS], int from) {
  Simd::I pairs[ROWS][V];
#pragma GCC unroll 8
  for (int k = 0; k < QUADS; ++k) {
    Simd::I w[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      w[v] = Simd::load_i(codes + (CODES == Codes::nibbles ? k / 2 : k) * 4 * TILE + v * Simd::W * 4);
      if constexpr (CODES == Codes::nibbles) w[v] = k % 2 == 0 ? Simd::low_nibbles(w[v]) : Simd::high_nibbles(w[v]);
      if constexpr (CODES == Codes::narrow) w[v] = Simd::sub_bytes(w[v], 128 - NARROW);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const int8_t* at = rows[r] + (from + 4 * k) * turns(CODES);
      const Simd::I x = Simd::broadcast4(at), turn = CODES == Codes::wide ? Simd::broadcast4(at + 4) : x;
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        const Simd::I two = CODES == Codes::wide ? Simd::multiply_pairs(x, Simd::xor_i(w[v], turn)) : Simd::multiply_pairs(w[v], x);
        pairs[r][v] = k == 0 ? two : Simd::add_16(pairs[r][v], two);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
    Simd::I offset = Simd::zero_i();
    if (!begun && offsets) offset = Simd::broadcast4(offsets + r * groups);
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) dots[r][v] = Simd::add_32(begun ? dots[r][v] : offset, Simd::widen_pairs(pairs[r][v]));
  }
}

template <Codes CODES, int INPUTS, int ROWS>
HW_INLINE void add_inputs(Simd::I (&dots)[ROWS][V], bool begun, const int32_t* offsets, size_t groups, const uint8_t* codes,
                          const int8_t* const (&rows)[ROWS], int from) {
  constexpr int QUADS = added(CODES) < INPUTS / 4 ? added(CODES) : INPUTS / 4;
#pragma GCC unroll 8
  for (int k = 0; k < INPUTS; k += 4 * QUADS) {
    add_quads<CODES, QUADS>(dots, begun || k > 0, offsets, groups, codes + k * bytes(CODES), rows, from + k);
  }
}

// Where the rows of a kernel are in their activations: at the next group.
template <int ROWS>
struct Cursor {
  const int8_t* q[ROWS];
  const float *scales, *totals;  // of the first row; the next rows' lie `groups` further
  const int32_t* offsets;        // null: there are none
  size_t groups;
};

// One group of a tile: sums += its inputs, INPUTS or, where that is 0, `inputs`, a multiple of 16.
template <Codes CODES, bool MIN, int INPUTS, int ROWS>
HW_INLINE void add_group(float (&sums)[ROWS][TILE], const uint8_t*& w, int inputs, Cursor<ROWS>& at, const Slice& s) {
  constexpr int LEAST = INPUTS == 0 || INPUTS == 16 ? 16 : 32;
  if constexpr (INPUTS > 0) inputs = INPUTS;
  const uint16_t* by = reinterpret_cast<const uint16_t*>(w);
  const uint8_t* codes = w + (MIN ? 4 : 2) * TILE;
  const uint8_t* const end = codes + (size_t)inputs * bytes(CODES);
  for (; w < end; w += 128) fetch_ahead(w, s);
  w = end;
#pragma GCC unroll 1
  for (int v = 0; v < TILE / Simd::W; v += V) {
    asm volatile("" : : : "memory");  // what all parts read is not to be kept: there are no registers for it
    Simd::I dots[ROWS][V];
    const uint8_t* part = codes + v * Simd::W * 4;
    add_inputs<CODES, LEAST>(dots, false, at.offsets, at.groups, part, at.q, 0);
    for (int k = LEAST; k < inputs; k += LEAST) add_inputs<CODES, LEAST>(dots, true, nullptr, 0, part + k * bytes(CODES), at.q, k);
#pragma GCC unroll 2
    for (int i = 0; i < V; ++i) {
      const Simd::F scale = Simd::load_f16(by + (v + i) * Simd::W);
      Simd::F minimum = Simd::zero();
      if constexpr (MIN) minimum = Simd::load_f16(by + TILE + (v + i) * Simd::W);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        float* to = sums[r] + (v + i) * Simd::W;
        const Simd::F whole = Simd::mul(scale, Simd::set1(at.scales[r * at.groups]));
        Simd::F sum = Simd::fma(Simd::to_float(dots[r][i]), whole, Simd::load(to));
        if constexpr (MIN) sum = Simd::fma(minimum, Simd::set1(at.totals[r * at.groups]), sum);
        Simd::store(to, sum);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) at.q[r] += inputs * turns(CODES);
  ++at.scales, ++at.totals;
  if constexpr (!MIN) ++at.offsets;
}

template <Codes CODES, bool MIN, int GROUP, int ROWS>
void paired_rows(const Slice& s, const Activations& a, int row, float* acc, size_t acc_stride) {
  const size_t groups = a.groups(), first = row * groups + s.begin / GROUP;
  const int32_t* of_zero = CODES == Codes::wide ? a.offset8 : CODES == Codes::narrow ? a.offset6 : a.offset4;
  const int32_t* offsets = MIN ? nullptr : of_zero + first;
  const int8_t* numbers = CODES == Codes::wide ? reinterpret_cast<const int8_t*>(a.turned) : a.q;
  Cursor<ROWS> at{{}, a.scale + first, a.sum + first, offsets, groups};
  alignas(64) float sums[ROWS][TILE];
  for (int r = 0; r < ROWS; ++r) {
    at.q[r] = numbers + ((row + r) * a.stride + s.begin) * turns(CODES);
    for (int v = 0; v < TILE; v += Simd::W) Simd::store(sums[r] + v, s.first ? Simd::zero() : Simd::load(acc + r * acc_stride + v));
  }
  const uint8_t* w = s.weights;
  int left = s.end - s.begin;
  for (; left >= GROUP; left -= GROUP) add_group<CODES, MIN, GROUP>(sums, w, GROUP, at, s);
  if (left > 0) add_group<CODES, MIN, 0>(sums, w, left, at, s);
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < TILE; v += Simd::W) Simd::store(acc + r * acc_stride + v, Simd::load(sums[r] + v));
}

template <Codes CODES, bool MIN, int ROWS>
void paired_rows(int group, const Slice& s, const Activations& a, int row, float* acc, size_t acc_stride) {
  if (group == 16) return paired_rows<CODES, MIN, 16, ROWS>(s, a, row, acc, acc_stride);
  if (group == 32) return paired_rows<CODES, MIN, 32, ROWS>(s, a, row, acc, acc_stride);
  if constexpr (!MIN && CODES != Codes::narrow) {  // those are formats of files, whose groups are no larger
    if (group == 64) return paired_rows<CODES, MIN, 64, ROWS>(s, a, row, acc, acc_stride);
    return paired_rows<CODES, MIN, 128, ROWS>(s, a, row, acc, acc_stride);
  }
}

template <int ROWS>
void integer_rows(const Matrix& m, const Slice& s, const Activations& a, int row, float* acc, size_t acc_stride) {
  const auto rows = m.storage == Storage::int4 ? (m.has_min ? paired_rows<Codes::nibbles, true, ROWS> : paired_rows<Codes::nibbles, false, ROWS>)
                    : m.has_min                ? paired_rows<Codes::small, true, ROWS>
                    : m.narrow                 ? paired_rows<Codes::narrow, false, ROWS>
                                               : paired_rows<Codes::wide, false, ROWS>;
  rows(m.group, s, a, row, acc, acc_stride);
}

}  // namespace
}  // namespace headway
