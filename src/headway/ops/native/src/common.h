// Number formats, sizes and aligned memory shared by every translation unit.
//
// Several translation units are compiled for instruction sets the machine may not have. So nothing here may be an
// ordinary inline function that the linker could pick from one of those: everything is forced inline.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#define HW_INLINE static inline __attribute__((always_inline))

namespace headway {

constexpr int TILE = 32;  // outputs of a weight tile: two AVX-512 or four AVX2 vectors
constexpr int GROUPS[] = {16, 32, 64, 128};  // inputs that may share a scale
constexpr int SMALLEST_GROUP = GROUPS[0], LARGEST_GROUP = GROUPS[3];
constexpr float LOG2_E = 1.44269504f;

HW_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
HW_INLINE int64_t ceil_div(int64_t n, int64_t by) { return (n + by - 1) / by; }
HW_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
HW_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

HW_INLINE float bits_to_float(uint32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

HW_INLINE uint32_t float_to_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  return bits;
}

HW_INLINE float bf16_to_float(uint16_t h) { return bits_to_float((uint32_t)h << 16); }

// Round to nearest, ties to even; NaN stays NaN.
HW_INLINE uint16_t float_to_bf16(float x) {
  uint32_t bits = float_to_bits(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)((bits >> 16) | 0x40);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// A vector of floats, rounded one by one: for instruction sets without the conversion.
template <class Simd>
HW_INLINE void store_rounded(uint16_t* p, typename Simd::F x) {
  float lanes[Simd::W];
  Simd::store(lanes, x);
  for (int i = 0; i < Simd::W; ++i) p[i] = float_to_bf16(lanes[i]);
}

HW_INLINE float f16_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return bits_to_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest < 0x400) {  // subnormal: rest * 2^-24
    const float x = (float)rest * 5.9604644775390625e-8f;
    return sign ? -x : x;
  }
  return bits_to_float(sign | ((rest << 13) + (112u << 23)));
}

// Round to nearest, ties to even; too large becomes infinity.
HW_INLINE uint16_t float_to_f16(float x) {
  const uint32_t bits = float_to_bits(x), sign = (bits >> 16) & 0x8000, rest = bits & 0x7fffffff;
  if (rest >= 0x7f800000) return (uint16_t)(sign | 0x7c00 | (rest > 0x7f800000 ? 0x200 : 0));
  if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (rest < 0x38800000) {  // below the smallest normal: let an addition do the rounding
    return (uint16_t)(sign | (float_to_bits(bits_to_float(rest) + 0.5f) - 0x3f000000));
  }
  return (uint16_t)(sign | ((rest - (112u << 23) + 0xfff + ((rest >> 13) & 1)) >> 13));
}

// Memory on a 64-byte border (huge pages asked for when large). Starts as zeros. Movable, not copyable.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t bytes);
  Buffer(Buffer&& other) noexcept;
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer();

  template <class T = uint8_t>
  T* as(size_t offset_bytes = 0) const {
    return reinterpret_cast<T*>(data_ + offset_bytes);
  }
  size_t size() const { return bytes_; }
  void grow(size_t bytes);  // contents are lost when it has to grow

 private:
  uint8_t* data_ = nullptr;
  void* base_ = nullptr;  // what to free
  size_t bytes_ = 0;
  size_t mapped_ = 0;  // bytes to unmap; 0 = from the heap
};

}  // namespace headway
