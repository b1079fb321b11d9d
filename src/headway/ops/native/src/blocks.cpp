#include "blocks.h"

#include <cmath>

namespace headway {

namespace {

float half_at(const uint8_t* p) {
  uint16_t h;
  memcpy(&h, p, 2);
  return f16_to_float(h);
}

// 4-bit codes of 2 * half weights: byte j holds weight j in its low half and weight j + half in its high half.
void nibbles(const uint8_t* packed, int half, uint8_t* codes) {
  for (int j = 0; j < half; ++j) {
    codes[j] = packed[j] & 15;
    codes[j + half] = packed[j] >> 4;
  }
}

void one_scale(const uint8_t* b, float* scale, float*) { *scale = half_at(b); }

void scale_and_minimum(const uint8_t* b, float* scale, float* minimum) {
  *scale = half_at(b);
  *minimum = half_at(b + 2);
}

void q8_0(const uint8_t* b, uint8_t* codes) {
  for (int i = 0; i < 32; ++i) codes[i] = (uint8_t)(b[2 + i] ^ 0x80);
}

void q4_0(const uint8_t* b, uint8_t* codes) { nibbles(b + 2, 16, codes); }
void q4_1(const uint8_t* b, uint8_t* codes) { nibbles(b + 4, 16, codes); }

void fifth_bits(const uint8_t* bits, uint8_t* codes) {
  uint32_t high;
  memcpy(&high, bits, 4);
  for (int i = 0; i < 32; ++i) codes[i] |= (high >> i & 1) << 4;
}

void q5_0(const uint8_t* b, uint8_t* codes) {
  nibbles(b + 6, 16, codes);
  fifth_bits(b + 2, codes);
  for (int i = 0; i < 32; ++i) codes[i] += 128 - 16;
}

void q5_1(const uint8_t* b, uint8_t* codes) {
  nibbles(b + 8, 16, codes);
  fifth_bits(b + 4, codes);
}

void q2_k_scales(const uint8_t* b, float* scale, float* minimum) {
  const float d = half_at(b + 80), dmin = half_at(b + 82);
  for (int g = 0; g < 16; ++g) {
    scale[g] = d * (b[g] & 15);
    minimum[g] = -dmin * (b[g] >> 4);
  }
}

// Two bits of a weight: of every 128, byte j holds weights j, j + 32, j + 64 and j + 96, lowest bits first.
int two_bits(const uint8_t* packed, int i) { return packed[i / 128 * 32 + i % 32] >> (i / 32 % 4 * 2) & 3; }

void q2_k(const uint8_t* b, uint8_t* codes) {
  for (int i = 0; i < 256; ++i) codes[i] = two_bits(b + 16, i);
}

void q3_k_scales(const uint8_t* b, float* scale, float*) {
  const uint8_t* packed = b + 96;
  const float d = half_at(b + 108);
  for (int g = 0; g < 16; ++g) {
    const int low = packed[g % 8] >> (g / 8 * 4) & 15, high = packed[8 + g % 4] >> (g / 4 * 2) & 3;
    scale[g] = d * ((low | high << 4) - 32);
  }
}

void q3_k(const uint8_t* b, uint8_t* codes) {
  for (int i = 0; i < 256; ++i) codes[i] = two_bits(b + 32, i) + (b[i % 32] >> (i / 32) & 1) * 4 + (8 - 4);
}

// Of 8 groups: 6-bit scales and minima in 12 bytes.
void q4_k_scales(const uint8_t* b, float* scale, float* minimum) {
  const float d = half_at(b), dmin = half_at(b + 2);
  const uint8_t* p = b + 4;
  for (int g = 0; g < 4; ++g) {
    scale[g] = d * (p[g] & 63);
    minimum[g] = -dmin * (p[4 + g] & 63);
    scale[4 + g] = d * ((p[8 + g] & 15) | p[g] >> 6 << 4);
    minimum[4 + g] = -dmin * (p[8 + g] >> 4 | p[4 + g] >> 6 << 4);
  }
}

void q4_k(const uint8_t* b, uint8_t* codes) {
  for (int i = 0; i < 4; ++i) nibbles(b + 16 + 32 * i, 32, codes + 64 * i);
}

void q5_k(const uint8_t* b, uint8_t* codes) {
  for (int i = 0; i < 4; ++i) nibbles(b + 48 + 32 * i, 32, codes + 64 * i);
  for (int i = 0; i < 256; ++i) codes[i] |= (b[16 + i % 32] >> (i / 32) & 1) << 4;
}

void q6_k_scales(const uint8_t* b, float* scale, float*) {
  const float d = half_at(b + 208);
  for (int g = 0; g < 16; ++g) scale[g] = d * (int8_t)b[192 + g];
}

void q6_k(const uint8_t* b, uint8_t* codes) {
  nibbles(b, 64, codes);
  nibbles(b + 64, 64, codes + 128);
  for (int i = 0; i < 256; ++i) codes[i] = (codes[i] | two_bits(b + 128, i) << 4) + (128 - 32);
}

// Not evenly spaced: more of them near zero.
constexpr int8_t IQ4[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};

void iq4_nl(const uint8_t* b, uint8_t* codes) {
  nibbles(b + 2, 16, codes);
  for (int i = 0; i < 32; ++i) codes[i] = (uint8_t)(IQ4[codes[i]] + 128);
}

void iq4_xs_scales(const uint8_t* b, float* scale, float*) {
  const float d = half_at(b);
  uint16_t high;
  memcpy(&high, b + 2, 2);
  for (int g = 0; g < 8; ++g) scale[g] = d * (((b[4 + g / 2] >> (g % 2 * 4) & 15) | (high >> (2 * g) & 3) << 4) - 32);
}

void iq4_xs(const uint8_t* b, uint8_t* codes) {
  for (int g = 0; g < 8; ++g) nibbles(b + 8 + 16 * g, 16, codes + 32 * g);
  for (int i = 0; i < 256; ++i) codes[i] = (uint8_t)(IQ4[codes[i]] + 128);
}

// One exponent, in halves of the values below.
void mxfp4_scale(const uint8_t* b, float* scale, float*) { *scale = b[0] == 255 ? NAN : ldexpf(1.0f, b[0] - 128); }

constexpr int8_t E2M1[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // twice what they stand for

void mxfp4(const uint8_t* b, uint8_t* codes) {
  nibbles(b + 1, 16, codes);
  for (int i = 0; i < 32; ++i) codes[i] = (uint8_t)(E2M1[codes[i]] + 128);
}

constexpr BlockFormat FORMATS[] = {
    {"q8_0", 32, 34, Storage::int8, false, 32, false, false, one_scale, q8_0},
    {"q4_0", 32, 18, Storage::int4, false, 32, false, false, one_scale, q4_0},
    {"q4_1", 32, 20, Storage::int4, true, 32, false, false, scale_and_minimum, q4_1},
    {"q5_0", 32, 22, Storage::int8, false, 32, true, false, one_scale, q5_0},
    {"q5_1", 32, 24, Storage::int8, true, 32, false, false, scale_and_minimum, q5_1},
    {"q2_k", 256, 84, Storage::int4, true, 16, false, true, q2_k_scales, q2_k},
    {"q3_k", 256, 110, Storage::int4, false, 16, false, true, q3_k_scales, q3_k},
    {"q4_k", 256, 144, Storage::int4, true, 32, false, true, q4_k_scales, q4_k},
    {"q5_k", 256, 176, Storage::int8, true, 32, false, true, q4_k_scales, q5_k},
    {"q6_k", 256, 210, Storage::int8, false, 16, true, true, q6_k_scales, q6_k},
    {"iq4_nl", 32, 18, Storage::int8, false, 32, false, false, one_scale, iq4_nl},
    {"mxfp4", 32, 17, Storage::int8, false, 32, true, true, mxfp4_scale, mxfp4},
    {"iq4_xs", 256, 136, Storage::int8, false, 32, false, true, iq4_xs_scales, iq4_xs},
};

}  // namespace

const BlockFormat* block_format(const std::string& name) {
  for (const BlockFormat& format : FORMATS) {
    if (name == format.name) return &format;
  }
  return nullptr;
}

}  // namespace headway
