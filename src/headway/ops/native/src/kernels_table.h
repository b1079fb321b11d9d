// The table of one instruction set, and the probes of its roofs. Included last, per instruction set.
#pragma once

#include "kernels_attention.h"
#include "kernels_linear.h"
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

void probe_dot(int kind, long rounds) {
  constexpr int CHAINS = 12;
  // The operands are opaque to the compiler, which would otherwise compute the sums at compile time or not at all.
  if (kind == 0) {
    Simd::F sums[CHAINS], x = Simd::set1(1.0f);
    for (Simd::F& sum : sums) sum = Simd::zero();
    for (long i = 0; i < rounds; ++i) {
      asm volatile("" : : "r"(&x) : "memory");
#pragma GCC unroll 12
      for (int c = 0; c < CHAINS; ++c) sums[c] = Simd::fma(x, x, sums[c]);
    }
    for (Simd::F& sum : sums) asm volatile("" : : "r"(&sum) : "memory");
    return;
  }
  Simd::I x = Simd::set1_i(0x01010101);
  if (kind == 1) {
    Simd::F sums[CHAINS];
    for (Simd::F& sum : sums) sum = Simd::zero();
    for (long i = 0; i < rounds; ++i) {
      asm volatile("" : : "r"(&x) : "memory");
#pragma GCC unroll 12
      for (int c = 0; c < CHAINS; ++c) sums[c] = Simd::dot_bf16(sums[c], x, x);
    }
    for (Simd::F& sum : sums) asm volatile("" : : "r"(&sum) : "memory");
    return;
  }
  Simd::I sums[CHAINS];
  for (Simd::I& sum : sums) sum = Simd::zero_i();
  for (long i = 0; i < rounds; ++i) {
    asm volatile("" : : "r"(&x) : "memory");
#pragma GCC unroll 12
    for (int c = 0; c < CHAINS; ++c) sums[c] = Simd::dot4(sums[c], x, x);
  }
  for (Simd::I& sum : sums) asm volatile("" : : "r"(&sum) : "memory");
}

constexpr Kernels table(const char* name) {
  return {name,    Simd::BF16_DOT, matmul, quantise,  to_bf16,    rms_norm,  finish, gate, cap, prepare_queries,
          attend,  merge,          normalise, probe_read, probe_dot, Simd::W};
}

}  // namespace
}  // namespace headway
