// Row-wise kernels: norm, quantisation, gates, soft caps, and the exponential under them. Included per instruction set.
#pragma once

#include <cmath>

#include "kernels.h"

namespace headway {
namespace {

// Up to one vector of n floats; lanes past n are 0.
HW_INLINE Simd::F load_part(const float* p, int n) {
  if (n >= Simd::W) return Simd::load(p);
  float lanes[Simd::W] = {};
  memcpy(lanes, p, n * sizeof(float));
  return Simd::load(lanes);
}

HW_INLINE void store_part(float* p, Simd::F x, int n) {
  if (n >= Simd::W) return Simd::store(p, x);
  float lanes[Simd::W];
  Simd::store(lanes, x);
  memcpy(p, lanes, n * sizeof(float));
}

// e^x within 2 units in the last place for x in [-87, 88]; clamped outside. NaN stays NaN.
HW_INLINE Simd::F exponential(Simd::F x) {
  x = Simd::max(Simd::set1(-87.0f), Simd::min(Simd::set1(88.0f), x));  // constant first: min and max keep a NaN on the right
  const Simd::F n = Simd::round(Simd::mul(x, Simd::set1(LOG2_E)));
  Simd::F r = Simd::fma(n, Simd::set1(-0.693359375f), x);  // ln 2 in two pieces, the first exact in few bits
  r = Simd::fma(n, Simd::set1(2.12194440e-4f), r);
  Simd::F p = Simd::set1(1.0f / 720);
  p = Simd::fma(p, r, Simd::set1(1.0f / 120));
  p = Simd::fma(p, r, Simd::set1(1.0f / 24));
  p = Simd::fma(p, r, Simd::set1(1.0f / 6));
  p = Simd::fma(p, r, Simd::set1(0.5f));
  p = Simd::fma(p, r, Simd::set1(1.0f));
  p = Simd::fma(p, r, Simd::set1(1.0f));
  return Simd::times_power_of_2(p, n);
}

// 2^x for x <= 0, within 2 units in the last place; 0 far below. NaN stays NaN.
HW_INLINE Simd::F power_of_2(Simd::F x) {
  const Simd::F n = Simd::round(x), r = Simd::sub(x, n);
  Simd::F p = Simd::set1(1.54035304e-4f);
  p = Simd::fma(p, r, Simd::set1(1.33335581e-3f));
  p = Simd::fma(p, r, Simd::set1(9.61812911e-3f));
  p = Simd::fma(p, r, Simd::set1(5.55041087e-2f));
  p = Simd::fma(p, r, Simd::set1(2.40226507e-1f));
  p = Simd::fma(p, r, Simd::set1(6.93147181e-1f));
  p = Simd::fma(p, r, Simd::set1(1.0f));
  return Simd::times_power_of_2(p, n);
}

// tanh x = sign(x) (1 - e^-2|x|) / (1 + e^-2|x|), near 0 by its series, where the difference would cancel.
HW_INLINE Simd::F hyperbolic_tangent(Simd::F x) {
  const Simd::F one = Simd::set1(1.0f), minus = Simd::sub(Simd::zero(), x), size = Simd::max(minus, x);
  const Simd::F e = exponential(Simd::mul(Simd::set1(-2.0f), size));
  const Simd::F far = Simd::div(Simd::sub(one, e), Simd::add(one, e));
  const Simd::F square = Simd::mul(x, x);
  Simd::F series = Simd::set1(-17.0f / 315);
  series = Simd::fma(series, square, Simd::set1(2.0f / 15));
  series = Simd::fma(series, square, Simd::set1(-1.0f / 3));
  series = Simd::fma(Simd::mul(series, square), x, x);
  float lanes[3][Simd::W];
  Simd::store(lanes[0], x);
  Simd::store(lanes[1], far);
  Simd::store(lanes[2], series);
  for (int i = 0; i < Simd::W; ++i) {
    const float v = lanes[0][i];
    lanes[0][i] = v > -0.1f && v < 0.1f ? lanes[2][i] : v < 0 ? -lanes[1][i] : lanes[1][i];
  }
  return Simd::load(lanes[0]);
}

void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
  Simd::F squares = Simd::zero();
  for (int i = 0; i < n; i += Simd::W) {
    const Simd::F v = load_part(x + i, n - i);
    squares = Simd::fma(v, v, squares);
  }
  const Simd::F by = Simd::set1(1.0f / sqrtf(Simd::sum(squares) / (float)n + eps));
  for (int i = 0; i < n; i += Simd::W) {
    const Simd::F v = Simd::mul(load_part(x + i, n - i), by);
    store_part(out + i, Simd::mul(v, load_part(weight + i, n - i)), n - i);
  }
}

void layer_norm(const float* x, const float* weight, const float* bias, float eps, int n, float* out) {
  Simd::F sum = Simd::zero();
  for (int i = 0; i < n; i += Simd::W) sum = Simd::add(sum, load_part(x + i, n - i));
  const Simd::F mean = Simd::set1(Simd::sum(sum) / (float)n);
  for (int i = 0; i < n; i += Simd::W) store_part(out + i, Simd::sub(load_part(x + i, n - i), mean), n - i);
  rms_norm(out, weight, eps, n, out);
  if (!bias) return;
  for (int i = 0; i < n; i += Simd::W) {
    store_part(out + i, Simd::add(load_part(out + i, n - i), load_part(bias + i, n - i)), n - i);
  }
}

// Inputs [g, g + n) of a row, a group, from p. A group with an infinity or NaN gets the scale NaN, so its row's results
// are NaN and nothing is hidden.
HW_INLINE void quantise_group(const float* p, int g, int n, Activations& a, int row) {
  int8_t* q = a.q + row * a.stride + g;
  Simd::I bits = Simd::zero_i();
  for (int i = 0; i < n; i += Simd::W) bits = Simd::max_i(bits, Simd::magnitude_bits(load_part(p + i, n - i)));
  const float largest = bits_to_float((uint32_t)Simd::largest_i(bits));
  const bool broken = !(largest < INFINITY), none = largest < 1e-35f;  // of such, 127 / largest would overflow
  const float scale = broken ? NAN : none ? 0.0f : largest / 127.0f;
  const Simd::F by = Simd::set1(broken || none ? 0.0f : 127.0f / largest);
  Simd::I sum = Simd::zero_i(), positive = Simd::zero_i();
  for (int i = 0; i < round_up(n, SMALLEST_GROUP); i += Simd::W) {
    Simd::I v = Simd::zero_i();
    if (i < n && !broken) v = Simd::to_int(Simd::mul(load_part(p + i, n - i), by));
    sum = Simd::add_i(sum, v);
    Simd::store_bytes(q + i, v);
    if constexpr (PAIRED) {
      positive = Simd::add_i(positive, Simd::max_i(v, Simd::zero_i()));
      store_turned(a.turned + 2 * (row * a.stride + g + i), v);
    }
  }
  const int32_t total = Simd::sum_i(sum);
  const size_t at = (size_t)row * a.groups() + g / a.group;
  a.scale[at] = scale;
  a.sum[at] = scale * (float)total;
  a.offset8[at] = PAIRED ? Simd::sum_i(positive) - total : -128 * total;
  a.offset6[at] = -32 * total;
  a.offset4[at] = -8 * total;
}

void quantise(const float* x, int begin, int end, Activations& a, int row) {
  for (int g = begin; g < end; g += a.group) {
    const float* p = x + (g - begin);
    const int n = (int)least(a.group, end - g);
    if (n == 16) {  // known to the compiler, which then needs no loops
      quantise_group(p, g, 16, a, row);
    } else if (n == 32) {
      quantise_group(p, g, 32, a, row);
    } else {
      quantise_group(p, g, n, a, row);
    }
  }
}

void to_bf16(const float* x, int begin, int end, Activations& a, int row) {
  uint16_t* out = a.bf16 + row * a.stride;
  int i = begin;
  for (; i + Simd::W <= end; i += Simd::W) Simd::store_bf16(out + i, Simd::load(x + i - begin));
  for (; i < end; ++i) out[i] = float_to_bf16(x[i - begin]);
  if (end == a.width && end < a.depth) out[end] = 0;
}

void finish(const float* acc, float unit, const float* bias, const float* residual, int n, float* out) {
  const Simd::F by = Simd::set1(unit);
  for (int i = 0; i < n; i += Simd::W) {
    Simd::F v = Simd::mul(load_part(acc + i, n - i), by);
    if (bias) v = Simd::add(v, load_part(bias + i, n - i));
    if (residual) v = Simd::add(v, load_part(residual + i, n - i));
    store_part(out + i, v, n - i);
  }
}

// x times the share of the normal distribution below x, whose tail is e^(-x^2/2) times a polynomial of t within 8e-8
// (Abramowitz and Stegun 7.1.26).
HW_INLINE Simd::F gelu(Simd::F x) {
  const Simd::F one = Simd::set1(1.0f), size = Simd::max(Simd::sub(Simd::zero(), x), x);
  const Simd::F t = Simd::div(one, Simd::fma(size, Simd::set1(0.3275911f * 0.70710678f), one));
  Simd::F p = Simd::set1(1.061405429f / 2);
  p = Simd::fma(p, t, Simd::set1(-1.453152027f / 2));
  p = Simd::fma(p, t, Simd::set1(1.421413741f / 2));
  p = Simd::fma(p, t, Simd::set1(-0.284496736f / 2));
  p = Simd::fma(p, t, Simd::set1(0.254829592f / 2));
  const Simd::F tail = Simd::mul(Simd::mul(p, t), exponential(Simd::mul(Simd::mul(size, size), Simd::set1(-0.5f))));
  return Simd::sub(Simd::max(Simd::zero(), x), Simd::mul(size, tail));
}

HW_INLINE Simd::F activated(Activation kind, Simd::F x) {
  const Simd::F one = Simd::set1(1.0f);
  if (kind == Activation::gelu) return gelu(x);
  if (kind == Activation::relu || kind == Activation::relu2) {
    const Simd::F positive = Simd::max(Simd::zero(), x);
    return kind == Activation::relu ? positive : Simd::mul(positive, positive);
  }
  Simd::F minus = Simd::sub(Simd::zero(), x);
  if (kind == Activation::gelu_tanh) {  // (1 + tanh y) / 2 = 1 / (1 + e^-2y), y = sqrt(2/pi) (x + 0.044715 x^3)
    const Simd::F inner = Simd::fma(Simd::mul(x, x), Simd::set1(0.044715f), one);
    minus = Simd::mul(Simd::mul(minus, inner), Simd::set1(1.5957691216f));
  }
  return Simd::div(x, Simd::add(one, exponential(minus)));
}

void gate(Activation kind, const float* gate, float gate_unit, const float* up, float up_unit, int n, float* out) {
  for (int i = 0; i < n; i += Simd::W) {
    Simd::F x = activated(kind, Simd::mul(load_part(gate + i, n - i), Simd::set1(gate_unit)));
    if (up) x = Simd::mul(x, Simd::mul(load_part(up + i, n - i), Simd::set1(up_unit)));
    store_part(out + i, x, n - i);
  }
}

void clamped_gate(const float* gate, float gate_unit, const float* up, float up_unit, float alpha, float limit, int n, float* out) {
  const Simd::F one = Simd::set1(1.0f), most = Simd::set1(limit), least = Simd::set1(-limit), slope = Simd::set1(-alpha);
  for (int i = 0; i < n; i += Simd::W) {  // constants first: min and max keep a NaN on the right
    const Simd::F g = Simd::min(most, Simd::mul(load_part(gate + i, n - i), Simd::set1(gate_unit)));
    const Simd::F u = Simd::max(least, Simd::min(most, Simd::mul(load_part(up + i, n - i), Simd::set1(up_unit))));
    const Simd::F activated = Simd::div(g, Simd::add(one, exponential(Simd::mul(g, slope))));
    store_part(out + i, Simd::mul(activated, Simd::add(u, one)), n - i);
  }
}

void cap(float* x, float scale, float softcap, int n) {
  const Simd::F by = Simd::set1(softcap > 0 ? scale / softcap : scale), top = Simd::set1(softcap);
  for (int i = 0; i < n; i += Simd::W) {
    Simd::F v = Simd::mul(load_part(x + i, n - i), by);
    if (softcap > 0) v = Simd::mul(hyperbolic_tangent(v), top);
    store_part(x + i, v, n - i);
  }
}

}  // namespace
}  // namespace headway
