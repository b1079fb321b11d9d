// Plain C++: right on every machine. Vectors are arrays of 8, which compilers map to what the base line has.
#pragma once

#include <cmath>

#include "common.h"

namespace headway {
namespace {

struct Floats {
  float v[8];
};
struct Ints {
  int32_t v[8];
};

template <class Fn>
HW_INLINE Floats floats(Fn fn) {
  Floats r;
  for (int i = 0; i < 8; ++i) r.v[i] = fn(i);
  return r;
}

template <class Fn>
HW_INLINE Ints ints(Fn fn) {
  Ints r;
  for (int i = 0; i < 8; ++i) r.v[i] = fn(i);
  return r;
}

struct Simd {
  using F = Floats;
  using I = Ints;
  static constexpr int W = 8;
  static constexpr int ROWS = 2;
  static constexpr bool BF16_DOT = false;

  HW_INLINE F zero() { return set1(0.0f); }
  HW_INLINE F set1(float x) { return floats([=](int) { return x; }); }
  HW_INLINE F load(const float* p) { return floats([=](int i) { return p[i]; }); }
  HW_INLINE void store(float* p, F x) { memcpy(p, x.v, sizeof x.v); }
  HW_INLINE F load_f16(const uint16_t* p) { return floats([=](int i) { return f16_to_float(p[i]); }); }
  HW_INLINE F add(F a, F b) { return floats([&](int i) { return a.v[i] + b.v[i]; }); }
  HW_INLINE F sub(F a, F b) { return floats([&](int i) { return a.v[i] - b.v[i]; }); }
  HW_INLINE F mul(F a, F b) { return floats([&](int i) { return a.v[i] * b.v[i]; }); }
  HW_INLINE F div(F a, F b) { return floats([&](int i) { return a.v[i] / b.v[i]; }); }
  HW_INLINE F fma(F a, F b, F c) { return floats([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
  HW_INLINE F max(F a, F b) { return floats([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
  HW_INLINE F min(F a, F b) { return floats([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
  HW_INLINE F round(F a) { return floats([&](int i) { return nearbyintf(a.v[i]); }); }
  HW_INLINE F times_power_of_2(F a, F n) { return floats([&](int i) { return n.v[i] == n.v[i] ? ldexpf(a.v[i], (int)(n.v[i] < -300 ? -300 : n.v[i])) : n.v[i]; }); }
  HW_INLINE float sum(F a) { return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7])); }
  HW_INLINE float largest(F a) {
    float m = a.v[0];
    for (int i = 1; i < 8; ++i) m = a.v[i] > m ? a.v[i] : m;
    return m;
  }
  HW_INLINE F keep(F a, int from, int to, F other) {
    return floats([&](int i) { return i >= from && i < to ? a.v[i] : other.v[i]; });
  }

  // value where x is not below `low` (a NaN is not), else 0
  HW_INLINE F unless_below(F x, F low, F value) { return floats([&](int i) { return x.v[i] < low.v[i] ? 0.0f : value.v[i]; }); }

  // Sums of floats rounded to whole numbers, exactly.
  using Mass = int64_t;
  HW_INLINE Mass no_mass() { return 0; }
  HW_INLINE void add_mass(Mass& sum, F x) {
    for (int i = 0; i < 8; ++i) sum += (int64_t)nearbyintf(x.v[i]);
  }
  HW_INLINE int64_t sum_mass(Mass sum) { return sum; }

  HW_INLINE I zero_i() { return set1_i(0); }
  HW_INLINE I set1_i(int32_t x) { return ints([=](int) { return x; }); }
  HW_INLINE I load_i(const void* p) {
    I r;
    memcpy(r.v, p, sizeof r.v);
    return r;
  }
  HW_INLINE void store_i(void* p, I x) { memcpy(p, x.v, sizeof x.v); }
  HW_INLINE I xor_i(I a, I b) { return ints([&](int i) { return a.v[i] ^ b.v[i]; }); }
  // Both halves of unsigned products.
  HW_INLINE void multiply_wide(I a, I b, I& high, I& low) {
    for (int i = 0; i < 8; ++i) {
      const uint64_t product = (uint64_t)(uint32_t)a.v[i] * (uint32_t)b.v[i];
      high.v[i] = (int32_t)(product >> 32);
      low.v[i] = (int32_t)(uint32_t)product;
    }
  }
  HW_INLINE I broadcast4(const void* p) {
    int32_t x;
    memcpy(&x, p, 4);
    return set1_i(x);
  }
  HW_INLINE I add_i(I a, I b) { return ints([&](int i) { return a.v[i] + b.v[i]; }); }
  HW_INLINE I max_i(I a, I b) { return ints([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
  HW_INLINE int32_t sum_i(I a) {
    int32_t s = 0;
    for (int i = 0; i < 8; ++i) s += a.v[i];
    return s;
  }
  HW_INLINE int32_t largest_i(I a) {
    int32_t m = a.v[0];
    for (int i = 1; i < 8; ++i) m = a.v[i] > m ? a.v[i] : m;
    return m;
  }
  HW_INLINE F to_float(I a) { return floats([&](int i) { return (float)a.v[i]; }); }
  HW_INLINE I to_int(F a) { return ints([&](int i) { return (int32_t)nearbyintf(a.v[i]); }); }
  HW_INLINE I magnitude_bits(F a) { return ints([&](int i) { return (int32_t)(float_to_bits(a.v[i]) & 0x7fffffff); }); }
  HW_INLINE void store_bytes(int8_t* p, I a) {
    for (int i = 0; i < 8; ++i) p[i] = (int8_t)a.v[i];
  }
  HW_INLINE I low_nibbles(I a) { return ints([&](int i) { return a.v[i] & 0x0f0f0f0f; }); }
  HW_INLINE I high_nibbles(I a) { return ints([&](int i) { return (int32_t)((uint32_t)a.v[i] >> 4) & 0x0f0f0f0f; }); }

  HW_INLINE I dot8(I acc, I weights, I activations) {
    uint8_t w[32];
    int8_t a[32];
    memcpy(w, weights.v, 32);
    memcpy(a, activations.v, 32);
    for (int i = 0; i < 32; ++i) acc.v[i / 4] += (int32_t)w[i] * a[i];
    return acc;
  }
  HW_INLINE I dot4(I acc, I weights, I activations) { return dot8(acc, weights, activations); }

  HW_INLINE I widen(const int8_t* p) {
    return ints([=](int i) { return (int32_t)((uint16_t)p[2 * i] | (uint32_t)(uint16_t)p[2 * i + 1] << 16); });
  }
  HW_INLINE I dot16(I acc, I a, I b) {
    return ints([&](int i) { return acc.v[i] + (int16_t)a.v[i] * (int16_t)b.v[i] + (a.v[i] >> 16) * (b.v[i] >> 16); });
  }
  HW_INLINE void store_int16(int16_t* p, I a) {
    for (int i = 0; i < 8; ++i) p[i] = (int16_t)a.v[i];
  }

  HW_INLINE F even_bf16(I a) { return floats([&](int i) { return bits_to_float((uint32_t)a.v[i] << 16); }); }
  HW_INLINE F odd_bf16(I a) { return floats([&](int i) { return bits_to_float((uint32_t)a.v[i] & 0xffff0000); }); }
  HW_INLINE I even_only(I a) { return ints([&](int i) { return a.v[i] & 0xffff; }); }
  HW_INLINE F dot_bf16(F acc, I a, I b) { return fma(odd_bf16(a), odd_bf16(b), fma(even_bf16(a), even_bf16(b), acc)); }
  HW_INLINE void store_bf16(uint16_t* p, F a) { store_rounded<Simd>(p, a); }
  HW_INLINE void prefetch(const void*) {}
  HW_INLINE void prefetch_far(const void*) {}
};

}  // namespace
}  // namespace headway
