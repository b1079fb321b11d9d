// A latent cache's chunk as one of values, which are the first numbers of its keys: its numbers become rows of tokens.
// Included per instruction set.
#pragma once

#include "kernels.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace headway {
namespace {

#if defined(__AVX2__)

// Rows of 8 numbers of 4 bytes turned into columns.
HW_INLINE void turn(__m256i (&r)[8]) {
  __m256i pairs[8], quads[8];
#pragma GCC unroll 4
  for (int i = 0; i < 8; i += 2) {
    pairs[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
    pairs[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const int at = i / 2 * 4 + i % 2;
    quads[i / 2 * 4 + i % 2 * 2] = _mm256_unpacklo_epi64(pairs[at], pairs[at + 2]);
    quads[i / 2 * 4 + i % 2 * 2 + 1] = _mm256_unpackhi_epi64(pairs[at], pairs[at + 2]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2x128_si256(quads[i], quads[i + 4], 0x20);
    r[i + 4] = _mm256_permute2x128_si256(quads[i], quads[i + 4], 0x31);
  }
}

// Rows of 4 numbers of 8 bytes turned into columns.
HW_INLINE void turn(__m256i (&r)[4]) {
  const __m256i a = _mm256_unpacklo_epi64(r[0], r[1]), b = _mm256_unpackhi_epi64(r[0], r[1]);
  const __m256i c = _mm256_unpacklo_epi64(r[2], r[3]), d = _mm256_unpackhi_epi64(r[2], r[3]);
  r[0] = _mm256_permute2x128_si256(a, c, 0x20);
  r[1] = _mm256_permute2x128_si256(b, d, 0x20);
  r[2] = _mm256_permute2x128_si256(a, c, 0x31);
  r[3] = _mm256_permute2x128_si256(b, d, 0x31);
}

// The same of chunks: rows of `bytes` with `count` numbers of SIZE bytes, a multiple of 32 / SIZE, become rows of `width`
// bytes. Numbers that are two tokens' pairs change their middle: PAIR is the size of a pair. -> rows that are done
template <int SIZE, int PAIR>
int turn_rows(const uint8_t* from, size_t bytes, int rows, int count, uint8_t* to, size_t width) {
  constexpr int N = 32 / SIZE;
  const __m256i middle = PAIR == 4 ? _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,  //
                                                      0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15)
                                   : _mm256_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15,  //
                                                      0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  int row = 0;
  for (; row + N <= rows; row += N) {
    for (int at = 0; at < count; at += N) {
      __m256i block[N];
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) {
        block[i] = _mm256_loadu_si256((const __m256i*)(from + (row + i) * bytes + (size_t)at * SIZE));
        if (PAIR > 0) block[i] = _mm256_shuffle_epi8(block[i], middle);
      }
      turn(block);
#pragma GCC unroll 8
      for (int i = 0; i < N; ++i) _mm256_storeu_si256((__m256i*)(to + (at + i) * width + (size_t)row * SIZE), block[i]);
    }
  }
  return row;
}

#else

template <int SIZE, int PAIR>
int turn_rows(const uint8_t*, size_t, int, int, uint8_t*, size_t) {
  return 0;
}

#endif

// PAIRs of neighbouring numbers become pairs of neighbouring tokens. What lies behind `used` tokens may be copied too.
template <class PAIR>
void to_values(const Cache& c, const void* keys, int used, void* values) {
  constexpr int HALF = 4 * sizeof(PAIR), SIZE = 2 * sizeof(PAIR);  // bits of a number; bytes of two pairs
  constexpr PAIR LOW = ((PAIR)1 << HALF) - 1;
  const PAIR* from = static_cast<const PAIR*>(keys);
  PAIR* to = static_cast<PAIR*>(values);
  const int pairs = (int)least(c.value_width, c.key_width) / 2, two = (int)round_up(ceil_div(used, 2), 32 / SIZE);
  const int done = turn_rows<SIZE, sizeof(PAIR)>(static_cast<const uint8_t*>(keys), c.slots * sizeof(PAIR), pairs, two,
                                                 static_cast<uint8_t*>(values), c.value_width * sizeof(PAIR));
  for (int s = 0; s < used; s += 2, to += c.value_width) {
    for (int i = done; i < pairs; ++i) {
      const PAIR even = from[(size_t)i * c.slots + s], odd = from[(size_t)i * c.slots + s + 1];
      to[2 * i] = (PAIR)((even & LOW) | odd << HALF);
      to[2 * i + 1] = (PAIR)(even >> HALF | (odd & (PAIR)~LOW));
    }
  }
}

void float_to_values(const Cache& c, const void* keys, int used, void* values) {
  const float* from = static_cast<const float*>(keys);
  float* to = static_cast<float*>(values);
  const int width = (int)least(c.value_width, c.key_width);
  const int done = turn_rows<4, 0>(static_cast<const uint8_t*>(keys), c.slots * sizeof(float), width, (int)round_up(used, 8),
                                   static_cast<uint8_t*>(values), c.value_width * sizeof(float));
  for (int s = 0; s < used; ++s) {
    for (int d = done; d < width; ++d) to[(size_t)s * c.value_width + d] = from[(size_t)d * c.slots + s];
  }
}

}  // namespace
}  // namespace headway
