// 256-bit vectors: AVX2, FMA, F16C. Included by one translation unit.
#pragma once

#include <immintrin.h>

#include "common.h"

namespace headway {
namespace {

struct Simd {
  using F = __m256;   // 8 floats
  using I = __m256i;  // 8 int32 or 32 bytes
  static constexpr int W = 8;
  static constexpr int ROWS = 2;
  static constexpr bool BF16_DOT = false;

  HW_INLINE F zero() { return _mm256_setzero_ps(); }
  HW_INLINE F set1(float x) { return _mm256_set1_ps(x); }
  HW_INLINE F load(const float* p) { return _mm256_loadu_ps(p); }
  HW_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  HW_INLINE F load_f16(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
  HW_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
  HW_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  HW_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  HW_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
  HW_INLINE F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  HW_INLINE F max(F a, F b) { return _mm256_max_ps(a, b); }
  HW_INLINE F min(F a, F b) { return _mm256_min_ps(a, b); }
  HW_INLINE F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
  // In two halves, because 2^n itself may be too small for a float when the product is not.
  HW_INLINE F times_power_of_2(F a, F n) {
    const I whole = _mm256_cvtps_epi32(max(set1(-250.0f), min(set1(250.0f), n))), half = _mm256_srai_epi32(whole, 1);
    return mul(mul(a, power_of_2(half)), power_of_2(_mm256_sub_epi32(whole, half)));
  }
  HW_INLINE F power_of_2(I n) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
  }
  HW_INLINE float sum(F a) {
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
  }
  HW_INLINE float largest(F a) {
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
  }
  HW_INLINE F keep(F a, int from, int to, F other) {
    const I lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const I low = _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(from - 1)), high = _mm256_cmpgt_epi32(_mm256_set1_epi32(to), lane);
    return _mm256_blendv_ps(other, a, _mm256_castsi256_ps(_mm256_and_si256(low, high)));
  }

  // value where x is not below `low` (a NaN is not), else 0
  HW_INLINE F unless_below(F x, F low, F value) { return _mm256_and_ps(_mm256_cmp_ps(x, low, _CMP_NLT_UQ), value); }

  // Sums of floats below 2^51 rounded to whole numbers, exactly: adding 1.5 * 2^52 leaves them in a double's low bits.
  using Mass = I;
  HW_INLINE Mass no_mass() { return _mm256_setzero_si256(); }
  HW_INLINE void add_mass(Mass& sum, F x) {
    const __m256d magic = _mm256_set1_pd(6755399441055744.0);
    const I low = _mm256_castpd_si256(_mm256_add_pd(_mm256_cvtps_pd(_mm256_castps256_ps128(x)), magic));
    const I high = _mm256_castpd_si256(_mm256_add_pd(_mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)), magic));
    const I twice = _mm256_slli_epi64(_mm256_castpd_si256(magic), 1);
    sum = _mm256_add_epi64(sum, _mm256_sub_epi64(_mm256_add_epi64(low, high), twice));
  }
  HW_INLINE int64_t sum_mass(Mass sum) {
    int64_t lanes[4];
    memcpy(lanes, &sum, 32);
    return lanes[0] + lanes[1] + lanes[2] + lanes[3];
  }

  HW_INLINE I zero_i() { return _mm256_setzero_si256(); }
  HW_INLINE I set1_i(int32_t x) { return _mm256_set1_epi32(x); }
  HW_INLINE I load_i(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
  HW_INLINE void store_i(void* p, I x) { _mm256_storeu_si256((__m256i*)p, x); }
  HW_INLINE I xor_i(I a, I b) { return _mm256_xor_si256(a, b); }
  // Both halves of unsigned products.
  HW_INLINE void multiply_wide(I a, I b, I& high, I& low) {
    const I even = _mm256_mul_epu32(a, b), odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
    low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xaa);
    high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xaa);
  }
  HW_INLINE I broadcast4(const void* p) {
    int32_t x;
    memcpy(&x, p, 4);
    return _mm256_set1_epi32(x);
  }
  HW_INLINE I add_i(I a, I b) { return _mm256_add_epi32(a, b); }
  HW_INLINE I max_i(I a, I b) { return _mm256_max_epi32(a, b); }
  HW_INLINE int32_t sum_i(I a) {
    __m128i x = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    x = _mm_add_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
  }
  HW_INLINE int32_t largest_i(I a) {
    __m128i x = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    x = _mm_max_epi32(x, _mm_shuffle_epi32(x, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32(x, 0xb1)));
  }
  HW_INLINE F to_float(I a) { return _mm256_cvtepi32_ps(a); }
  HW_INLINE I to_int(F a) { return _mm256_cvtps_epi32(a); }
  HW_INLINE I magnitude_bits(F a) { return _mm256_and_si256(_mm256_castps_si256(a), _mm256_set1_epi32(0x7fffffff)); }
  HW_INLINE void store_bytes(int8_t* p, I a) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
  }
  HW_INLINE I low_nibbles(I a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
  HW_INLINE I high_nibbles(I a) { return _mm256_and_si256(_mm256_srli_epi16(a, 4), _mm256_set1_epi8(15)); }

  // Unsigned bytes times signed ones; 16-bit sums of two. They saturate beyond 129 * 127 * 2.
  HW_INLINE I multiply_pairs(I weights, I activations) { return _mm256_maddubs_epi16(weights, activations); }
  HW_INLINE I add_16(I a, I b) {  // as asm, or GCC would make a tree of a chain of sums, and keep its leaves in memory
    asm("vpaddw %1, %0, %0" : "+x"(a) : "x"(b));
    return a;
  }
  HW_INLINE I add_32(I a, I b) {
    asm("vpaddd %1, %0, %0" : "+x"(a) : "x"(b));
    return a;
  }
  HW_INLINE I widen_pairs(I a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
  // Of numbers within -127..127, four and four: their magnitudes, and bytes of 127 where one is negative, else 128.
  HW_INLINE void store_magnitudes(uint8_t* p, I a) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    const __m128i turns = _mm_xor_si128(_mm_srai_epi16(words, 15), _mm_set1_epi16(-128));
    _mm_storeu_si128((__m128i*)p, _mm_shuffle_epi32(_mm_packs_epi16(_mm_abs_epi16(words), turns), 0xd8));
  }
  HW_INLINE I sub_bytes(I a, int by) { return _mm256_sub_epi8(a, _mm256_set1_epi8((char)by)); }
  HW_INLINE I dot4(I acc, I weights, I activations) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(weights, activations), _mm256_set1_epi16(1)));
  }

  // 8-bit integers as pairs of 16 bits in each lane; acc[lane] += sum of both products
  HW_INLINE I widen(const int8_t* p) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)); }
  HW_INLINE I dot16(I acc, I a, I b) { return _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)); }
  HW_INLINE void store_int16(int16_t* p, I a) {
    _mm_storeu_si128((__m128i*)p, _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)));
  }

  HW_INLINE F even_bf16(I a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
  HW_INLINE F odd_bf16(I a) { return _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32((int)0xffff0000))); }
  HW_INLINE I even_only(I a) { return _mm256_and_si256(a, _mm256_set1_epi32(0xffff)); }
  HW_INLINE F dot_bf16(F acc, I a, I b) { return fma(odd_bf16(a), odd_bf16(b), fma(even_bf16(a), even_bf16(b), acc)); }
  HW_INLINE void store_bf16(uint16_t* p, F a) { store_rounded<Simd>(p, a); }
  HW_INLINE void prefetch(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T0); }
  HW_INLINE void prefetch_far(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T2); }
};

}  // namespace
}  // namespace headway
