#include "matrix.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <iterator>
#include <stdexcept>
#include <vector>

#include <unistd.h>

#include "blocks.h"

namespace headway {

namespace {

struct Source {
  const std::vector<const uint8_t*>& data;  // of each matrix
  std::string format;
  int out, in;  // of one
  const BlockFormat* blocks;  // null: 16 or 32-bit numbers

  size_t row_bytes() const {
    return blocks ? (size_t)in / blocks->numbers * blocks->bytes : (size_t)in * (format == "f32" ? 4 : 2);
  }
  const uint8_t* row(int n) const { return data[n / out] + n % out * row_bytes(); }

  // Inputs [from, from + count) of a row of a 16 or 32-bit format.
  void part(int n, int from, int count, float* to) const {
    const uint8_t* p = row(n) + (size_t)from * (format == "f32" ? 4 : 2);
    if (format == "f32") {
      memcpy(to, p, (size_t)count * 4);
      return;
    }
    const auto widen = [&](auto number) {
      for (int k = 0; k < count; ++k) {
        uint16_t h;
        memcpy(&h, p + 2 * k, 2);
        to[k] = number(h);
      }
    };
    if (format == "bf16") {
      widen([](uint16_t h) { return bf16_to_float(h); });
    } else {
      widen([](uint16_t h) { return f16_to_float(h); });
    }
  }
};

// The rows of a tile, numbered through all matrices.
struct Lanes {
  int first, count;
};

Lanes lanes_of(const Matrix& m, int tile) {
  const int row = tile % m.tiles() * TILE;
  return {tile / m.tiles() * m.out + row, std::min(TILE, m.out - row)};
}

// Codes of up to one group of one output, to where the kernels want them.
void scatter(const Matrix& m, const uint8_t* codes, int inputs, int lane, uint8_t* to) {
  if (m.storage == Storage::int8) {
    for (int k = 0; k < inputs; k += 4) memcpy(to + (k / 4) * TILE * 4 + lane * 4, codes + k, 4);
    return;
  }
  for (int k = 0; k < inputs; k += 8) {
    uint32_t low, high;
    memcpy(&low, codes + k, 4);
    memcpy(&high, codes + k + 4, 4);
    low |= high << 4;
    memcpy(to + (k / 8) * TILE * 4 + lane * 4, &low, 4);
  }
}

// The kernels multiply by adding to exponents, so no scale is 0: such a group has codes of 0 instead.
constexpr uint16_t SMALLEST_SCALE = 1;
bool is_zero(uint16_t half) { return (half & 0x7fff) == 0; }

// The packing functions fill one tile and say whether all its weights are finite.
bool pack_blocks(const Source& source, const Matrix& m, int tile, uint8_t* to) {
  const BlockFormat& format = *source.blocks;
  const int groups = format.numbers / format.group, blocks = m.in / format.numbers;
  const size_t header = (m.has_min ? 4 : 2) * TILE, bytes = group_bytes(m, m.group);
  const float by = 1 / m.unit;  // exact: a power of two
  uint8_t codes[LARGEST_BLOCK];
  float scales[MOST_GROUPS], minima[MOST_GROUPS] = {};
  bool finite = true;
  const Lanes lanes = lanes_of(m, tile);
  for (int b = 0; b < blocks; ++b) {
    for (int lane = 0; lane < lanes.count; ++lane) {
      const uint8_t* block = source.row(lanes.first + lane) + (size_t)b * format.bytes;
      format.scales(block, scales, minima);
      format.codes(block, codes);
      uint8_t* at = to + (size_t)b * groups * bytes;
      for (int g = 0; g < groups; ++g, at += bytes) {
        uint16_t* of_tile = reinterpret_cast<uint16_t*>(at);
        finite &= std::isfinite(scales[g]) && std::isfinite(minima[g]);
        of_tile[lane] = float_to_f16(scales[g] * by);
        if (is_zero(of_tile[lane])) {
          of_tile[lane] = SMALLEST_SCALE;
          memset(codes + g * m.group, m.zero(), m.group);
        }
        if (m.has_min) of_tile[TILE + lane] = float_to_f16(minima[g] * by);
        scatter(m, codes + g * m.group, m.group, lane, at + header);
      }
    }
  }
  return finite;
}

// Nearest integers for the scale float16 can hold -> squared error. n <= LARGEST_GROUP. `limit` is the codes' range,
// -limit..limit-1 (8 bits leave -128 out, so that codes negate).
float try_scale(const float* w, int n, float scale, int limit, uint8_t* codes, uint16_t* stored) {
  constexpr float ROUND = 12582912.0f;  // 1.5 * 2^23: adding and taking it away again rounds to an integer
  *stored = float_to_f16(scale);
  const float s = f16_to_float(*stored), inverse = s != 0 ? 1 / s : 0;
  const float low = limit == 128 ? -127 : -limit, high = limit - 1;
  float q[LARGEST_GROUP];
  for (int k = 0; k < n; ++k) {
    const float x = w[k] * inverse, capped = x < low ? low : x > high ? high : x;
    q[k] = (capped + ROUND) - ROUND;
  }
  for (int k = 0; k < n; ++k) codes[k] = (uint8_t)((int)q[k] + limit);
  float errors[4] = {};  // apart, so that the compiler may add four at a time; n is a multiple of 16
  for (int k = 0; k < n; k += 4) {
    for (int i = 0; i < 4; ++i) errors[i] += (w[k + i] - q[k + i] * s) * (w[k + i] - q[k + i] * s);
  }
  return (errors[0] + errors[1]) + (errors[2] + errors[3]);
}

// 8 bits: largest magnitude at 127. 4 bits: of scales around the one that puts the largest weight at -8, the best.
void quantise_group(const float* w, int n, int limit, uint8_t* codes, uint16_t* stored) {
  float extreme = 0;
  for (int k = 0; k < n; ++k) extreme = fabsf(w[k]) > fabsf(extreme) ? w[k] : extreme;
  if (limit == 128) {
    try_scale(w, n, fabsf(extreme) / 127, limit, codes, stored);
    return;
  }
  uint8_t trial[LARGEST_GROUP];
  float best = INFINITY;
  for (int step = -5; step <= 5; ++step) {
    uint16_t candidate;
    const float error = try_scale(w, n, extreme / (-8.0f + 0.2f * step), limit, trial, &candidate);
    if (error < best) {
      best = error;
      *stored = candidate;
      memcpy(codes, trial, n);
    }
  }
}

bool pack_quantising(const Source& source, const Matrix& m, int tile, uint8_t* to) {
  const int limit = m.storage == Storage::int8 ? 128 : 8;
  const Lanes lanes = lanes_of(m, tile);
  const float by = 1 / m.unit;  // exact: a power of two
  float weights[LARGEST_GROUP];
  uint8_t codes[LARGEST_GROUP];
  for (int k = 0; k < m.depth; k += m.group) {
    const int inputs = std::min(m.group, m.depth - k), used = std::min(inputs, m.in - k);
    uint16_t scales[TILE] = {};
    for (int lane = 0; lane < lanes.count; ++lane) {
      source.part(lanes.first + lane, k, used, weights);
      for (int i = 0; i < used; ++i) weights[i] *= by;
      for (int i = used; i < inputs; ++i) weights[i] = 0;
      quantise_group(weights, inputs, limit, codes, &scales[lane]);
      if (is_zero(scales[lane])) scales[lane] = SMALLEST_SCALE;  // the codes stand for 0
      scatter(m, codes, inputs, lane, to + sizeof scales);
    }
    memcpy(to, scales, sizeof scales);
    to += group_bytes(m, inputs);
  }
  return true;  // else there would be no unit
}

template <class Number>
bool pack_numbers(const Source& source, const Matrix& m, int tile, Number exponent, uint8_t* to) {
  const size_t pair = m.storage == Storage::bf16 ? 2 : 1;
  bool finite = true;
  const Lanes lanes = lanes_of(m, tile);
  for (int lane = 0; lane < lanes.count; ++lane) {
    const uint8_t* row = source.row(lanes.first + lane);
    for (size_t k = 0; k < (size_t)m.in; ++k) {
      Number bits;
      memcpy(&bits, row + k * sizeof bits, sizeof bits);
      finite &= (bits & exponent) != exponent;
      memcpy(to + ((k / pair * TILE + lane) * pair + k % pair) * sizeof bits, &bits, sizeof bits);
    }
  }
  return finite;
}

bool pack_floats(const Source& source, const Matrix& m, int tile, uint8_t* to) {
  if (m.storage == Storage::f32) return pack_numbers<uint32_t>(source, m, tile, 0x7f800000, to);
  return pack_numbers<uint16_t>(source, m, tile, m.storage == Storage::bf16 ? 0x7f80 : 0x7c00, to);
}

// Of a row's weights, or of its blocks' scales and minima; infinity if one is not finite.
float largest_of_row(const Source& source, int n) {
  uint32_t most = 0;  // magnitudes order like their bits, infinities and NaN on top
  const auto see = [&](const float* x, int count) {
    for (int i = 0; i < count; ++i) most = std::max(most, float_to_bits(x[i]) & 0x7fffffff);
  };
  if (source.blocks) {
    const BlockFormat& format = *source.blocks;
    float scales[MOST_GROUPS], minima[MOST_GROUPS];
    for (int b = 0; b < source.in / format.numbers; ++b) {
      format.scales(source.row(n) + (size_t)b * format.bytes, scales, minima);
      see(scales, format.numbers / format.group);
      if (format.has_min) see(minima, format.numbers / format.group);
    }
  } else {
    float part[LARGEST_GROUP];
    for (int k = 0; k < source.in; k += LARGEST_GROUP) {
      const int count = std::min(LARGEST_GROUP, source.in - k);
      source.part(n, k, count, part);
      see(part, count);
    }
  }
  return most < 0x7f800000 ? bits_to_float(most) : INFINITY;
}

float largest(const Source& source, int out, const ForEach& for_each) {
  std::vector<float> of_row(out);
  for_each(out, [&](int n) { of_row[n] = largest_of_row(source, n); });
  return *std::max_element(of_row.begin(), of_row.end());
}

// A power of two: divided by it, numbers up to `most` use float16's whole range.
float unit_for(float most) { return most > 0 ? ldexpf(1.0f, std::max(-120, std::min(120, ilogbf(most) - 14))) : 1.0f; }

// Of bytes that nobody forges: tells a damaged file. Four words at a time, which do not wait for each other.
uint64_t checksum_of(const uint8_t* data, size_t bytes, uint64_t seed) {
  constexpr uint64_t ODD = 0x9e3779b97f4a7c15u;
  uint64_t sums[4] = {seed, seed + 1, seed + 2, seed + 3};
  for (size_t at = 0; at < bytes; at += 32) {
    uint64_t words[4] = {};
    memcpy(words, data + at, std::min<size_t>(32, bytes - at));
    for (int i = 0; i < 4; ++i) {
      sums[i] = (sums[i] ^ words[i]) * ODD;
      sums[i] ^= sums[i] >> 32;
    }
  }
  for (int i = 1; i < 4; ++i) sums[0] = (sums[0] ^ sums[i]) * ODD;
  return sums[0];
}

constexpr size_t PIECE = 1 << 20;  // bytes that are read and checked at once

}  // namespace

void Matrix::lay_out() {
  if (quantised()) {
    depth = (int)round_up(in, SMALLEST_GROUP);
    const int whole = depth / group, rest = depth % group;
    tile_bytes = whole * group_bytes(*this, group) + (rest ? group_bytes(*this, rest) : 0);
  } else {
    depth = (int)round_up(in, 2);
    tile_bytes = (size_t)depth * TILE * (storage == Storage::f32 ? 4 : 2);
  }
  data = Buffer(bytes());
}

uint64_t Matrix::checksum(const ForEach& for_each) const {
  std::atomic<uint64_t> sum{0};
  for_each((int)ceil_div(bytes(), PIECE), [&](int i) {
    const size_t at = i * PIECE;
    sum += checksum_of(data.as(at), std::min(PIECE, bytes() - at), i);
  });
  return sum;
}

bool Matrix::read(int file, size_t offset, uint64_t expected, const ForEach& for_each) {
  std::atomic<uint64_t> sum{0};
  std::atomic<bool> whole{true};
  for_each((int)ceil_div(bytes(), PIECE), [&](int i) {
    const size_t at = i * PIECE, count = std::min(PIECE, bytes() - at);
    for (size_t done = 0; done < count;) {
      const ssize_t got = pread(file, data.as(at + done), count - done, (off_t)(offset + at + done));
      if (got <= 0) {
        whole = false;
        return;
      }
      done += (size_t)got;
    }
    sum += checksum_of(data.as(at), count, i);
  });
  return whole && sum == expected;
}

Matrix pack(const std::vector<const uint8_t*>& data, size_t bytes, const std::string& format, int out, int in, const std::string& target,
            int group, const ForEach& for_each) {
  const Source source{data, format, out, in, block_format(format)};
  if (data.empty() || out < 1 || in < 1) throw std::invalid_argument("a weight matrix has at least one row and one column");
  if (source.blocks && in % source.blocks->numbers != 0) {
    throw std::invalid_argument("rows of " + format + " must be a multiple of " + std::to_string(source.blocks->numbers) + " long");
  }
  if (bytes != (size_t)out * source.row_bytes()) throw std::invalid_argument("the data's length does not fit its shape");
  const auto unit = [&] {
    const float most = largest(source, (int)data.size() * out, for_each);
    if (!std::isfinite(most)) throw std::invalid_argument("a weight is infinite or not a number");
    return unit_for(most);
  };

  Matrix m;
  m.count = (int)data.size();
  m.out = out;
  m.in = in;
  auto fill = pack_floats;
  if (source.blocks) {
    m.storage = source.blocks->storage;
    m.has_min = source.blocks->has_min;
    m.narrow = source.blocks->narrow;
    m.group = source.blocks->group;
    if (source.blocks->products) m.unit = unit();
    fill = pack_blocks;
  } else if (!target.empty()) {
    if (std::find(std::begin(GROUPS), std::end(GROUPS), group) == std::end(GROUPS)) {
      throw std::invalid_argument("the group must be 16, 32, 64 or 128");
    }
    m.storage = target == "int8" ? Storage::int8 : Storage::int4;
    m.group = group;
    m.unit = unit();
    fill = pack_quantising;
  } else {
    m.storage = format == "f32" ? Storage::f32 : format == "f16" ? Storage::f16 : Storage::bf16;
  }
  m.lay_out();
  std::atomic<bool> finite{true};
  for_each(m.count * m.tiles(), [&](int tile) {
    if (!fill(source, m, tile, m.data.as(tile * m.tile_bytes))) finite = false;
  });
  m.finite = finite;
  return m;
}

void Matrix::unpack_row(int n, float* row) const {
  const uint8_t* p = tile(n / out * tiles() + n % out / TILE);
  const int lane = n % out % TILE;
  if (!quantised()) {
    for (int k = 0; k < in; ++k) {
      if (storage == Storage::f32) {
        row[k] = reinterpret_cast<const float*>(p)[(size_t)k * TILE + lane];
      } else if (storage == Storage::f16) {
        row[k] = f16_to_float(reinterpret_cast<const uint16_t*>(p)[(size_t)k * TILE + lane]);
      } else {
        row[k] = bf16_to_float(reinterpret_cast<const uint16_t*>(p)[((size_t)k / 2 * TILE + lane) * 2 + k % 2]);
      }
    }
    return;
  }
  for (int start = 0; start < in; start += group) {
    const int inputs = (int)least(group, depth - start), used = (int)least(inputs, in - start);
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(p);
    const float scale = f16_to_float(scales[lane]), minimum = has_min ? f16_to_float(scales[TILE + lane]) : 0.0f;
    const uint8_t* codes = p + (has_min ? 4 : 2) * TILE;
    for (int k = 0; k < used; ++k) {
      int code;
      if (storage == Storage::int8) {
        code = codes[(k / 4) * TILE * 4 + lane * 4 + k % 4];
      } else {
        const uint8_t both = codes[(k / 8) * TILE * 4 + lane * 4 + k % 4];
        code = k % 8 < 4 ? both & 15 : both >> 4;
      }
      row[start + k] = (scale * (float)(code - zero()) + minimum) * unit;
    }
    p += group_bytes(*this, inputs);
  }
}

}  // namespace headway
