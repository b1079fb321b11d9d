// Attention over a cache of 8-bit numbers, in whole numbers: 16-bit queries times keys, 16-bit weights times values, which two
// instructions multiply twice as fast as floats. Included by kernels_attention.h, whose ranges, blocks and softmax these are.
#pragma once

namespace headway {
namespace {

// Sums of so many products of 127 with it fit in 32 bits.
HW_INLINE float largest_factor(int products) { return (float)least(32767, 16900000 / products); }

// What numbers are multiples of if the one with these bits, of the largest magnitude, becomes `top`; NaN if they are not finite.
HW_INLINE float unit_of(int32_t bits, float top) { return bits >= 0x7f800000 ? NAN : bits_to_float(bits) / top; }
HW_INLINE Simd::F inverse(float unit) { return Simd::set1(unit > 0 ? 1 / unit : 0.0f); }

// Of a prepared query: its numbers, and behind them what they are multiples of.
HW_INLINE const int16_t* query_numbers(const void* prepared, const Cache& c, int row) {
  return reinterpret_cast<const int16_t*>(static_cast<const uint8_t*>(prepared) + (size_t)row * c.key_width * 4);
}
HW_INLINE float query_unit(const void* prepared, const Cache& c, int row) {
  return *reinterpret_cast<const float*>(query_numbers(prepared, c, row) + c.key_width);
}

void prepare_int8(const Attend& t, void* prepared) {
  const int padded = t.cache.key_width;
  const Simd::F scale = Simd::set1(t.softcap > 0 ? t.scale : t.scale * LOG2_E);
  const float top = largest_factor(padded);
  uint8_t* at = static_cast<uint8_t*>(prepared);
  for (int h = 0; h < t.heads; ++h) {
    for (int row = 0; row < t.queries * t.group; ++row, at += (size_t)padded * 4) {
      const float* q = t.q + row / t.group * t.q_stride + (size_t)(h * t.group + row % t.group) * t.width;
      const auto numbers = [&](int d) { return Simd::mul(load_part(q + d, t.width - d), scale); };
      Simd::I most = Simd::zero_i();
      for (int d = 0; d < padded; d += Simd::W) most = Simd::max_i(most, Simd::magnitude_bits(numbers(d)));
      const float unit = unit_of(Simd::largest_i(most), top);
      int16_t* to = reinterpret_cast<int16_t*>(at);
      for (int d = 0; d < padded; d += Simd::W) {
        const Simd::I whole = Simd::to_int(Simd::mul(numbers(d), inverse(unit)));
        if (padded - d >= Simd::W) {
          Simd::store_int16(to + d, whole);
        } else {
          int16_t lanes[Simd::W];
          Simd::store_int16(lanes, whole);
          memcpy(to + d, lanes, (padded - d) * sizeof(int16_t));
        }
      }
      memcpy(to + padded, &unit, sizeof unit);
    }
  }
}

// Fetch what lies `next` bytes behind 2 * W numbers, once per line of memory.
HW_INLINE void fetch_line(const int8_t* chunk, const int8_t* numbers, ptrdiff_t next) {
  if ((numbers - chunk) % 64 < 2 * Simd::W) Simd::prefetch_far(numbers + next);
}

// As score_rows.
template <bool FETCH, int ROWS, int N>
HW_INLINE void score_int8(const Attend& t, const Chunk& chunk, int slot, const void* prepared, int first, float* scores, size_t stride) {
  const Cache& c = t.cache;
  Simd::I sums[ROWS][N];
  const int16_t* queries[ROWS];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
    queries[r] = query_numbers(prepared, c, first + r);
#pragma GCC unroll 2
    for (int v = 0; v < N; ++v) sums[r][v] = Simd::zero_i();
  }
  const int8_t *begin = static_cast<const int8_t*>(chunk.memory), *k = begin + 2 * slot;
  for (int d = 0; d < c.key_width; d += 2, k += 2 * c.slots) {
#pragma GCC unroll 2
    for (int v = 0; v < N; ++v) {
      const Simd::I keys = Simd::widen(k + v * Simd::W * 2);
      if (FETCH) fetch_line(begin, k + v * Simd::W * 2, chunk.next);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) sums[r][v] = Simd::dot16(sums[r][v], keys, Simd::broadcast4(queries[r] + d));
    }
  }
#pragma GCC unroll 2
  for (int v = 0; v < N; ++v) {
    const int column = slot + v * Simd::W;
    const Simd::F unit = Simd::load_f16(units(c, chunk.memory, c.key_width) + column);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const Simd::F by = Simd::mul(unit, Simd::set1(query_unit(prepared, c, first + r)));
      Simd::store(scores + r * stride + column, Simd::mul(Simd::to_float(sums[r][v]), by));
    }
  }
}

// As weigh_rows, but sums of whole numbers.
template <bool FETCH, int ROWS, int N>
HW_INLINE void weigh_int8(const Cache& c, const Chunk& chunk, int first_value, const int16_t* weights, size_t stride, int32_t* out) {
  Simd::I sums[ROWS][N];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) sums[r][v] = Simd::load_i(out + (size_t)r * c.value_width + first_value + v * Simd::W);
  const int8_t *begin = static_cast<const int8_t*>(chunk.memory), *values = begin + 2 * first_value;
  for (int s = 0; s < chunk.used; s += 2, values += 2 * c.value_width) {  // an odd one out has no weight
    Simd::I value[N];
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) {
      value[v] = Simd::widen(values + v * Simd::W * 2);
      if (FETCH) fetch_line(begin, values + v * Simd::W * 2, chunk.next);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      const Simd::I p = Simd::broadcast4(weights + r * stride + s);
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) sums[r][v] = Simd::dot16(sums[r][v], value[v], p);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) Simd::store_i(out + (size_t)r * c.value_width + first_value + v * Simd::W, sums[r][v]);
}

// Weights of a row, [blocks][slots], each times what its token's values are multiples of -> whole numbers in `to`, and what
// these are multiples of. chunk_of(b): the values of block b.
template <class Fn>
float whole_weights(const Attend& t, const Range& range, int end, int width, float* weights, int16_t* to, Fn chunk_of) {
  const Cache& c = t.cache;
  const int columns = (range.last_block - range.first_block) * range.slots;
  Simd::I most = Simd::zero_i();
  for (int b = range.first_block; b < range.last_block; ++b) {
    const uint16_t* unit = units(c, chunk_of(b), width);
    float* of_block = weights + (size_t)(b - range.first_block) * range.slots;
    const int used = (int)least(c.block_size, end - b * c.block_size);
    for (int s = 0; s < used; s += Simd::W) {  // a unit behind `used` may be left over, and NaN
      const Simd::F p = Simd::keep(Simd::mul(Simd::load(of_block + s), Simd::load_f16(unit + s)), 0, used - s, Simd::zero());
      Simd::store(of_block + s, p);
      most = Simd::max_i(most, Simd::magnitude_bits(p));
    }
  }
  const float unit = unit_of(Simd::largest_i(most), largest_factor(split_blocks(c) * c.block_size));
  for (int s = 0; s < columns; s += Simd::W) {
    Simd::store_int16(to + s, Simd::to_int(Simd::mul(Simd::load(weights + s), inverse(unit))));
  }
  return unit;
}

void attend_int8(const Attend& t, const void* prepared, int first_block, int last_block, void* scratch, Partial out) {
  const Cache& c = t.cache;
  const int per_head = t.queries * t.group, rows = t.heads * per_head, end = t.positions[t.queries - 1] + 1;
  const Range range{first_block, (int)least(last_block, ceil_div(end, c.block_size)), c.block_size, c.slots};
  const size_t stride = (size_t)split_blocks(c) * c.slots;
  float* scores = static_cast<float*>(scratch);
  int16_t* weights = reinterpret_cast<int16_t*>(scores + (size_t)rows * stride);
  void* transposed = static_cast<uint8_t*>(scratch) + round_up((int64_t)(rows * stride * 6), 64);  // of a latent cache

  in_chunks(t, range, end, c.keys, c.key_chunk(), [&](int b, int h, const Chunk& chunk) {
    in_row_blocks(per_head, [&](int first, auto count, auto fetch) {
      constexpr int ROWS = decltype(count)::value;
      constexpr bool FETCH = decltype(fetch)::value;
      const int row = h * per_head + first;
      float* to = scores + row * stride + (size_t)(b - range.first_block) * c.slots;
      int slot = 0;
      for (; slot < chunk.used && slot + COLUMNS <= c.slots; slot += COLUMNS)
        score_int8<FETCH, ROWS, 2>(t, chunk, slot, prepared, row, to, stride);
      for (; slot < chunk.used; slot += Simd::W) score_int8<FETCH, ROWS, 1>(t, chunk, slot, prepared, row, to, stride);
    });
  });

  const int width = c.latent ? c.key_width : c.value_width;
  const size_t bytes = c.latent ? c.key_chunk() : c.value_chunk();
  void* const memory = c.latent ? c.keys : c.values;
  for (int r = 0; r < rows; ++r) {
    float *row = scores + r * stride, *unit = row;  // which takes the place of the first weight, when that is whole
    soften<Form::f32>(t, range, t.positions[r % per_head / t.group], row, nullptr, &out.largest[r], &out.total[r]);
    const size_t head = t.head + r / per_head;
    *unit = whole_weights(t, range, end, width, row, weights + r * stride, [&](int b) {
      return static_cast<uint8_t*>(memory) + ((size_t)t.table[b] * c.heads + head) * bytes;
    });
  }

  int32_t* sums = reinterpret_cast<int32_t*>(out.values);
  memset(sums, 0, (size_t)rows * c.value_width * sizeof(int32_t));
  in_chunks(t, range, end, memory, bytes, [&](int b, int h, Chunk chunk) {
    if (c.latent) {
      to_values<uint16_t>(c, chunk.memory, chunk.used, transposed);
      chunk = {transposed, chunk.used, 0};
    }
    in_row_blocks(per_head, [&](int first, auto count, auto fetch) {
      constexpr int ROWS = decltype(count)::value;
      constexpr bool FETCH = decltype(fetch)::value;
      const size_t row = h * per_head + first;
      const int16_t* p = weights + row * stride + (size_t)(b - range.first_block) * c.slots;
      int32_t* to = sums + row * c.value_width;
      int d = 0;
      for (; d + VALUES <= c.value_width; d += VALUES) weigh_int8<FETCH, ROWS, 4>(c, chunk, d, p, stride, to);
      for (; d < c.value_width; d += Simd::W) weigh_int8<FETCH, ROWS, 1>(c, chunk, d, p, stride, to);
    });
  });
  for (int r = 0; r < rows; ++r) {
    float* values = out.values + (size_t)r * c.value_width;
    const Simd::F unit = Simd::set1(scores[r * stride]);
    for (int d = 0; d < c.value_width; d += Simd::W) Simd::store(values + d, Simd::mul(Simd::to_float(Simd::load_i(values + d)), unit));
  }
}

}  // namespace
}  // namespace headway
