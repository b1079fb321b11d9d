// The table of one instruction set, and the probes of its roofs. Included last, per instruction set.
#pragma once

#include "kernels_attention.h"
#include "kernels_linear.h"
#include "kernels_sampling.h"
#include "kernels_vector.h"

namespace headway {
namespace {

double probe_read(const uint8_t* data, size_t bytes) {
  constexpr size_t STEP = 8 * Simd::W * 4;
  Simd::I sums[8];
  for (int i = 0; i < 8; ++i) sums[i] = Simd::zero_i();
  for (size_t at = 0; at + STEP <= bytes; at += STEP) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      Simd::prefetch(data + at + 4096 + i * Simd::W * 4);
      sums[i] = Simd::add_i(sums[i], Simd::load_i(data + at + i * Simd::W * 4));
    }
  }
  double total = 0;
  for (int i = 0; i < 8; ++i) total += Simd::sum_i(sums[i]);
  return total;
}

template <class Number, class Multiply, class Add>
HW_INLINE Number probe_chains(Number x, long rounds, Multiply multiply, Add add) {
  constexpr int CHAINS = 12;
  Number sums[CHAINS];
  sums[0] = x;
#pragma GCC unroll 12
  for (int c = 1; c < CHAINS; ++c) sums[c] = add(sums[c - 1], x);  // all different, or one chain would do for all
  for (long i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < CHAINS; ++c) sums[c] = multiply(sums[c], x);
  }
#pragma GCC unroll 12
  for (int c = 1; c < CHAINS; ++c) sums[0] = add(sums[0], sums[c]);
  return sums[0];
}

// `opaque` is 1 and unknown to the compiler, which can neither compute the sums nor leave them out.
double probe_dot(int kind, long rounds, int opaque) {
  const auto add = [](Simd::F a, Simd::F b) { return Simd::add(a, b); };
  const Simd::F x = Simd::set1((float)opaque);
  const Simd::I bytes = Simd::set1_i(opaque * 0x01010101);
  if (kind == 0) {
    return Simd::sum(probe_chains(x, rounds, [](Simd::F sum, Simd::F y) { return Simd::fma(y, y, sum); }, add));
  }
  if (kind == 1) {
    const auto multiply = [&](Simd::F sum, Simd::F) { return Simd::dot_bf16(sum, bytes, bytes); };
    return Simd::sum(probe_chains(x, rounds, multiply, add));
  }
  return Simd::sum_i(probe_chains(bytes, rounds, [](Simd::I sum, Simd::I y) { return Simd::dot4(sum, y, y); },
                                  [](Simd::I a, Simd::I b) { return Simd::add_i(a, b); }));
}

constexpr Kernels table(const char* name) {
  return {name,    Simd::BF16_DOT, PAIRED, matmul, quantise,  to_bf16,    rms_norm, layer_norm, finish, gate, clamped_gate, cap, prepare_queries,
          attend,  merge,          normalise, summarise, share_of_tiles, weights, mass, largest, noise, probe_read, probe_dot, Simd::W};
}

}  // namespace
}  // namespace headway
