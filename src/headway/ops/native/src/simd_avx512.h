// 512-bit vectors: F, BW, DQ, VL, VNNI; and BF16 where the compiler was told so. Included by one translation unit each.
#pragma once

#include <immintrin.h>

#include "common.h"

namespace headway {
namespace {

struct Simd {
  using F = __m512;   // 16 floats
  using I = __m512i;  // 16 int32 or 64 bytes
  static constexpr int W = 16;
  static constexpr int ROWS = 6;   // token rows of a linear micro-kernel: 6 x 2 int and 6 x 2 float accumulators
#if defined(__AVX512BF16__)
  static constexpr bool BF16_DOT = true;
#else
  static constexpr bool BF16_DOT = false;
#endif

  HW_INLINE F zero() { return _mm512_setzero_ps(); }
  HW_INLINE F set1(float x) { return _mm512_set1_ps(x); }
  HW_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
  HW_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  HW_INLINE F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
  HW_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
  HW_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  HW_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  HW_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
  HW_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }  // a * b + c
  HW_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }            // b if either is NaN
  HW_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }            // b if either is NaN
  HW_INLINE F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  HW_INLINE F times_power_of_2(F a, F n) { return _mm512_scalef_ps(a, n); }
  HW_INLINE float sum(F a) { return _mm512_reduce_add_ps(a); }
  HW_INLINE float largest(F a) { return _mm512_reduce_max_ps(a); }
  // Lanes [from, to) of a, `other` elsewhere.
  HW_INLINE F keep(F a, int from, int to, F other) {
    const uint32_t low = from <= 0 ? 0 : from >= W ? 0xffff : (1u << from) - 1;
    const uint32_t high = to <= 0 ? 0 : to >= W ? 0xffff : (1u << to) - 1;
    return _mm512_mask_mov_ps(other, (__mmask16)(high & ~low), a);
  }

  // value where x is not below `low` (a NaN is not), else 0
  HW_INLINE F unless_below(F x, F low, F value) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, low, _CMP_NLT_UQ), value); }

  // Sums of floats rounded to whole numbers, exactly.
  using Mass = I;
  HW_INLINE Mass no_mass() { return _mm512_setzero_si512(); }
  HW_INLINE void add_mass(Mass& sum, F x) {
    const I low = _mm512_cvtps_epi64(_mm512_castps512_ps256(x)), high = _mm512_cvtps_epi64(_mm512_extractf32x8_ps(x, 1));
    sum = _mm512_add_epi64(sum, _mm512_add_epi64(low, high));
  }
  HW_INLINE int64_t sum_mass(Mass sum) { return _mm512_reduce_add_epi64(sum); }

  HW_INLINE I zero_i() { return _mm512_setzero_si512(); }
  HW_INLINE I set1_i(int32_t x) { return _mm512_set1_epi32(x); }
  HW_INLINE I load_i(const void* p) { return _mm512_loadu_si512(p); }
  HW_INLINE void store_i(void* p, I x) { _mm512_storeu_si512(p, x); }
  HW_INLINE I xor_i(I a, I b) { return _mm512_xor_si512(a, b); }
  // Both halves of unsigned products.
  HW_INLINE void multiply_wide(I a, I b, I& high, I& low) {
    const I even = _mm512_mul_epu32(a, b), odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
    low = _mm512_mask_mov_epi32(even, 0xaaaa, _mm512_slli_epi64(odd, 32));
    high = _mm512_mask_mov_epi32(_mm512_srli_epi64(even, 32), 0xaaaa, odd);
  }
  HW_INLINE I broadcast4(const void* p) {  // the four bytes at p in every lane
    int32_t x;
    memcpy(&x, p, 4);
    return _mm512_set1_epi32(x);
  }
  HW_INLINE I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
  HW_INLINE I max_i(I a, I b) { return _mm512_max_epi32(a, b); }
  HW_INLINE int32_t sum_i(I a) { return _mm512_reduce_add_epi32(a); }
  HW_INLINE int32_t largest_i(I a) { return _mm512_reduce_max_epi32(a); }
  HW_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  HW_INLINE I to_int(F a) { return _mm512_cvtps_epi32(a); }  // to nearest even
  HW_INLINE I magnitude_bits(F a) { return _mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff)); }
  HW_INLINE void store_bytes(int8_t* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(a)); }
  HW_INLINE I low_nibbles(I a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
  HW_INLINE I high_nibbles(I a) { return _mm512_and_si512(_mm512_srli_epi16(a, 4), _mm512_set1_epi8(15)); }

  // acc[lane] += sum of 4 products weight (unsigned) * activation (signed)
  // As assembly, because GCC 12 copies the accumulators of the intrinsic around, and then runs out of registers; volatile,
  // like the prefetch below, because it would gather the prefetches of a group, and in bursts they stall.
  HW_INLINE I dot8(I acc, I weights, I activations) {
    asm volatile("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(weights), "v"(activations));
    return acc;
  }
  HW_INLINE I dot4(I acc, I weights, I activations) { return dot8(acc, weights, activations); }

  // 8-bit integers as pairs of 16 bits in each lane; acc[lane] += sum of both products
  HW_INLINE I widen(const int8_t* p) { return _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p)); }
  HW_INLINE I dot16(I acc, I a, I b) {
    asm volatile("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
  }
  HW_INLINE void store_int16(int16_t* p, I a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtsepi32_epi16(a)); }

  // Pairs of bfloat16 in each lane.
  HW_INLINE F even_bf16(I a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
  HW_INLINE F odd_bf16(I a) { return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32((int)0xffff0000))); }
  HW_INLINE I even_only(I a) { return _mm512_and_si512(a, _mm512_set1_epi32(0xffff)); }
#if defined(__AVX512BF16__)
  HW_INLINE F dot_bf16(F acc, I a, I b) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
  }
  HW_INLINE void store_bf16(uint16_t* p, F a) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(a)); }
#else
  HW_INLINE F dot_bf16(F acc, I a, I b) { return fma(odd_bf16(a), odd_bf16(b), fma(even_bf16(a), even_bf16(b), acc)); }
  HW_INLINE void store_bf16(uint16_t* p, F a) { store_rounded<Simd>(p, a); }
#endif
  HW_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
  HW_INLINE void prefetch_far(const void* p) { asm volatile("prefetcht2 %0" : : "m"(*(const char*)p)); }
};

}  // namespace
}  // namespace headway
