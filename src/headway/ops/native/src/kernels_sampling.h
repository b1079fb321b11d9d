// What the sampler needs of an instruction set: summaries and weights of logits, and noise. Included per instruction set.
//
// Other kernels may round as it suits their instruction set. These may not: they make the same bits as
// headway/sampling/arithmetic.py, whose sums and products are rounded one by one and never fused.
#pragma once

#include <cfloat>

#include "kernels_vector.h"

namespace headway {
namespace {

HW_INLINE Simd::F plus_product(Simd::F sum, Simd::F a, float b) { return Simd::add(sum, Simd::mul(a, Simd::set1(b))); }

// e^x for x <= 0; 0 below -86, NaN stays NaN.
HW_INLINE Simd::F falling_exponential(Simd::F x) {
  const Simd::F low = Simd::set1(-86.0f);
  const Simd::F clamped = Simd::max(low, x);
  const Simd::F n = Simd::round(Simd::mul(clamped, Simd::set1(LOG2_E)));
  const Simd::F r = plus_product(plus_product(clamped, n, -0.693359375f), n, 2.12194440e-4f);
  Simd::F p = Simd::set1(1.0f / 720);
  p = Simd::add(Simd::mul(p, r), Simd::set1(1.0f / 120));
  p = Simd::add(Simd::mul(p, r), Simd::set1(1.0f / 24));
  p = Simd::add(Simd::mul(p, r), Simd::set1(1.0f / 6));
  p = Simd::add(Simd::mul(p, r), Simd::set1(0.5f));
  p = Simd::add(Simd::mul(p, r), Simd::set1(1.0f));
  p = Simd::add(Simd::mul(p, r), Simd::set1(1.0f));
  return Simd::unless_below(x, low, Simd::times_power_of_2(p, n));
}

// Up to one vector of n floats; lanes past n are `filler`.
HW_INLINE Simd::F load_part(const float* p, int n, float filler) {
  if (n >= Simd::W) return Simd::load(p);
  float lanes[Simd::W];
  for (int i = 0; i < Simd::W; ++i) lanes[i] = i < n ? p[i] : filler;
  return Simd::load(lanes);
}

constexpr int PARTS = TILE / Simd::W;

// Sum of a tile by halves: 16 + 16, 8 + 8, ...; Simd::sum goes on like this within a vector.
HW_INLINE float sum_by_halves(Simd::F (&x)[PARTS]) {
  for (int half = PARTS / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x[i] = Simd::add(x[i], x[i + half]);
  }
  return Simd::sum(x[0]);
}

// Per tile of n logits, the largest and the sum of exp(logit - largest).
void summarise(const float* logits, int n, float* peaks, float* sums) {
  for (int tile = 0; tile * TILE < n; ++tile, logits += TILE) {
    const int left = n - tile * TILE;
    Simd::F x[PARTS];
    for (int i = 0; i < PARTS; ++i) x[i] = load_part(logits + i * Simd::W, left - i * Simd::W, -INFINITY);
    Simd::F largest = x[0];
    for (int i = 1; i < PARTS; ++i) largest = Simd::max(largest, x[i]);
    const float peak = Simd::largest(largest);
    const Simd::F base = Simd::set1(peak > -FLT_MAX ? peak : -FLT_MAX);
    for (int i = 0; i < PARTS; ++i) x[i] = falling_exponential(Simd::sub(x[i], base));
    peaks[tile] = peak;
    sums[tile] = sum_by_halves(x);
  }
}

// Sum over up to TILE tiles of sums * exp(peaks - top).
float share_of_tiles(const float* peaks, const float* sums, int n, float top) {
  Simd::F x[PARTS];
  for (int i = 0; i < PARTS; ++i) {
    const int left = n - i * Simd::W;
    const Simd::F factor = falling_exponential(Simd::sub(load_part(peaks + i * Simd::W, left, -INFINITY), Simd::set1(top)));
    x[i] = Simd::mul(load_part(sums + i * Simd::W, left, 0.0f), factor);
  }
  return sum_by_halves(x);
}

HW_INLINE Simd::F weight(Simd::F logit, float peak, float inverse_temperature) {
  return falling_exponential(Simd::mul(Simd::sub(logit, Simd::set1(peak)), Simd::set1(inverse_temperature)));
}

// exp((logit - peak) * inverse_temperature) of n logits.
void weights(const float* logits, int n, float peak, float inverse_temperature, float* out) {
  for (int i = 0; i < n; i += Simd::W) {
    store_part(out + i, weight(load_part(logits + i, n - i, -INFINITY), peak, inverse_temperature), n - i);
  }
}

// Sum of the weights that are at least `least`, in whole numbers of 2^-42.
int64_t mass(const float* logits, int n, float peak, float inverse_temperature, float least) {
  const Simd::F low = Simd::set1(least), unit = Simd::set1(4398046511104.0f);
  Simd::Mass total = Simd::no_mass();
  for (int i = 0; i < n; i += Simd::W) {
    const Simd::F w = weight(load_part(logits + i, n - i, -INFINITY), peak, inverse_temperature);
    Simd::add_mass(total, Simd::mul(Simd::unless_below(w, low, w), unit));
  }
  return Simd::sum_mass(total);
}

float largest(const float* x, int n) {
  Simd::F most = Simd::set1(-INFINITY);
  for (int i = 0; i < n; i += Simd::W) most = Simd::max(most, load_part(x + i, n - i, -INFINITY));
  return Simd::largest(most);
}

// Words of Philox4x32-10 for token ids [4 * block, 4 * block + NOISE_SPAN): words[j][i] is of id 4 * (block + i) + j.
// Returns the largest.
uint32_t noise(const NoiseKey& key, uint32_t block, uint32_t (*words)[NOISE_SPAN / 4]) {
  const Simd::I sign = Simd::set1_i(INT32_MIN);
  Simd::I largest = sign;
  for (int first = 0; first < NOISE_SPAN / 4; first += Simd::W) {
    int32_t counters[Simd::W];
    for (int i = 0; i < Simd::W; ++i) counters[i] = (int32_t)(block + first + i);
    Simd::I a = Simd::load_i(counters), b = Simd::set1_i((int32_t)key.position), c = Simd::set1_i((int32_t)key.choice);
    Simd::I d = Simd::set1_i((int32_t)key.purpose);
    const Simd::I by_a = Simd::set1_i((int32_t)0xD2511F53), by_c = Simd::set1_i((int32_t)0xCD9E8D57);
    uint32_t low = key.low, high = key.high;
    for (int turn = 0; turn < 10; ++turn, low += 0x9E3779B9, high += 0xBB67AE85) {
      Simd::I a_high, a_low, c_high, c_low;
      Simd::multiply_wide(a, by_a, a_high, a_low);
      Simd::multiply_wide(c, by_c, c_high, c_low);
      a = Simd::xor_i(Simd::xor_i(c_high, b), Simd::set1_i((int32_t)low));
      c = Simd::xor_i(Simd::xor_i(a_high, d), Simd::set1_i((int32_t)high));
      b = c_low;
      d = a_low;
    }
    const Simd::I made[4] = {a, b, c, d};
    for (int j = 0; j < 4; ++j) {
      Simd::store_i(words[j] + first, made[j]);
      largest = Simd::max_i(largest, Simd::xor_i(made[j], sign));
    }
  }
  return (uint32_t)Simd::largest_i(largest) ^ 0x80000000u;
}

}  // namespace
}  // namespace headway
