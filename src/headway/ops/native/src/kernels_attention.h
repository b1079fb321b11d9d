// Attention of a row's queries over a range of cache blocks. Included per instruction set.
//
// A range (256 tokens at absolute positions) is summed by itself: all its scores, their largest, exponentials, weighted
// values. Ranges are then merged in order. So a query's result is the same bits whether it is computed alone, in a chunk,
// or with its ranges spread over threads.
#pragma once

#include <cmath>

#include "kernels.h"
#include "kernels_turn.h"
#include "kernels_vector.h"

namespace headway {
namespace {

constexpr int ROW_BLOCK = 4;                // query rows per micro-kernel
constexpr int COLUMNS = 2 * Simd::W;        // cached tokens per micro-kernel of scores
constexpr int VALUES = 4 * Simd::W;         // value numbers per micro-kernel of weighted values

enum class Form { f32, bf16, bf16_dot };    // cache in float; bf16 widened; bf16 with dot-product instructions

// Row r's elements of the prepared queries: floats, or pairs of bfloat16.
template <Form FORM>
HW_INLINE const void* query_row(const void* prepared, const Cache& c, int row) {
  return static_cast<const uint8_t*>(prepared) + (size_t)row * c.key_width * (FORM == Form::bf16_dot ? 2 : 4);
}

void prepare_int8(const Attend& t, void* prepared);

void prepare_queries(const Attend& t, void* prepared) {
  if (t.cache.format == CacheFormat::int8) return prepare_int8(t, prepared);
  const int padded = t.cache.key_width;
  const bool pairs = Simd::BF16_DOT && t.cache.format == CacheFormat::bf16;
  const Simd::F scale = Simd::set1(t.softcap > 0 ? t.scale : t.scale * LOG2_E);  // powers of 2 are cheaper than of e
  size_t at = 0;
  for (int h = 0; h < t.heads; ++h) {
    for (int row = 0; row < t.queries * t.group; ++row, at += padded) {
      const float* q = t.q + row / t.group * t.q_stride + (size_t)(h * t.group + row % t.group) * t.width;
      for (int d = 0; d < padded; d += Simd::W) {
        const Simd::F x = Simd::mul(load_part(q + d, t.width - d), scale);
        const int n = padded - d;
        if (!pairs) {
          store_part(static_cast<float*>(prepared) + at + d, x, n);
        } else if (n >= Simd::W) {
          Simd::store_bf16(static_cast<uint16_t*>(prepared) + at + d, x);
        } else {
          uint16_t lanes[Simd::W];
          Simd::store_bf16(lanes, x);
          memcpy(static_cast<uint16_t*>(prepared) + at + d, lanes, n * 2);
        }
      }
    }
  }
}

// A chunk of keys or values, and how far away the next one lies that this thread will read. The kernels fetch that one
// line by line while they read this one, so that neither computing nor memory waits.
struct Chunk {
  void* memory;
  int used;             // tokens of it that count; what lies behind may be left over from another request
  ptrdiff_t next;       // bytes from this chunk to the next
};

// scores[ROWS][N vectors] of one key chunk, from slot `slot`.
template <Form FORM, bool FETCH, int ROWS, int N>
HW_INLINE void score_rows(const Cache& c, const Chunk& chunk, int slot, const void* const* queries, float* scores, size_t stride) {
  Simd::F sums[ROWS][N];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < N; ++v) sums[r][v] = Simd::zero();
  if constexpr (FORM == Form::f32) {
    const float* k = static_cast<const float*>(chunk.memory) + slot;
    for (int d = 0; d < c.key_width; ++d, k += c.slots) {
#pragma GCC unroll 2
      for (int v = 0; v < N; ++v) {
        const Simd::F key = Simd::load(k + v * Simd::W);
        if (FETCH) Simd::prefetch_far(reinterpret_cast<const uint8_t*>(k + v * Simd::W) + chunk.next);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r)
          sums[r][v] = Simd::fma(key, Simd::set1(static_cast<const float*>(queries[r])[d]), sums[r][v]);
      }
    }
  } else {
    const uint16_t* k = static_cast<const uint16_t*>(chunk.memory) + 2 * slot;
    for (int d = 0; d < c.key_width; d += 2, k += 2 * c.slots) {
#pragma GCC unroll 2
      for (int v = 0; v < N; ++v) {
        const Simd::I pair = Simd::load_i(k + v * Simd::W * 2);
        if (FETCH) Simd::prefetch_far(reinterpret_cast<const uint8_t*>(k + v * Simd::W * 2) + chunk.next);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r) {
          if constexpr (FORM == Form::bf16_dot) {
            sums[r][v] = Simd::dot_bf16(sums[r][v], pair, Simd::broadcast4(static_cast<const uint16_t*>(queries[r]) + d));
          } else {
            const float* q = static_cast<const float*>(queries[r]) + d;
            sums[r][v] = Simd::fma(Simd::even_bf16(pair), Simd::set1(q[0]), sums[r][v]);
            sums[r][v] = Simd::fma(Simd::odd_bf16(pair), Simd::set1(q[1]), sums[r][v]);
          }
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
    for (int v = 0; v < N; ++v) Simd::store(scores + r * stride + slot + v * Simd::W, sums[r][v]);
}

template <Form FORM, bool FETCH, int ROWS>
void score_chunk(const Cache& c, const Chunk& chunk, const void* const* queries, float* scores, size_t stride) {
  int slot = 0;
  for (; slot < chunk.used && slot + COLUMNS <= c.slots; slot += COLUMNS)
    score_rows<FORM, FETCH, ROWS, 2>(c, chunk, slot, queries, scores, stride);
  for (; slot < chunk.used; slot += Simd::W) score_rows<FORM, FETCH, ROWS, 1>(c, chunk, slot, queries, scores, stride);
}

struct Range {
  int first_block, last_block, block_size, slots;
};

// Scores of a row, in units of log 2 -> their largest, the sum of weights 2^(score - largest), and the weights: floats in
// place of the scores, or bfloat16 in `weights`. Columns that the query may not see weigh 0.
template <Form FORM>
void soften(const Attend& t, const Range& range, int position, float* scores, uint16_t* weights, float* largest, float* total) {
  const int low = t.window > 0 ? position - t.window + 1 : 0;
  const Simd::F none = Simd::set1(-INFINITY), cap = Simd::set1(t.softcap * LOG2_E), inverse = Simd::set1(t.softcap > 0 ? 1 / t.softcap : 0);
  // body(column, first and last visible lane) for every vector of columns; to <= from: none is visible.
  const auto columns = [&](auto body) {
    for (int b = range.first_block; b < range.last_block; ++b) {
      const int start = b * range.block_size, to = (int)least(range.block_size, position + 1 - start), from = low - start;
      const size_t column = (size_t)(b - range.first_block) * range.slots;
      for (int s = 0; s < range.slots; s += Simd::W) body(column + s, from - s, to - s);
    }
  };
  const auto whole = [](int from, int to) { return from <= 0 && to >= Simd::W; };
  const auto hidden = [](int from, int to) { return to <= 0 || from >= Simd::W || to <= from; };

  Simd::F most = none;
  columns([&](size_t column, int from, int to) {
    if (hidden(from, to)) return;
    Simd::F x = Simd::load(scores + column);
    if (t.softcap > 0) {
      x = Simd::mul(hyperbolic_tangent(Simd::mul(x, inverse)), cap);
      Simd::store(scores + column, x);
    }
    if (!whole(from, to)) x = Simd::keep(x, from, to, none);
    most = Simd::max(most, x);  // a NaN in x stays
  });
  *largest = Simd::largest(most);
  const Simd::F top = Simd::set1(*largest == -INFINITY ? 0.0f : *largest);
  Simd::F sum = Simd::zero();
  columns([&](size_t column, int from, int to) {
    Simd::F p = Simd::zero();
    if (!hidden(from, to)) {
      p = power_of_2(Simd::sub(Simd::load(scores + column), top));
      if (!whole(from, to)) p = Simd::keep(p, from, to, Simd::zero());
      sum = Simd::add(sum, p);
    }
    if constexpr (FORM == Form::bf16_dot) {
      Simd::store_bf16(weights + column, p);
    } else {
      Simd::store(scores + column, p);
    }
  });
  *total = Simd::sum(sum);
}

// out[ROWS][N vectors] += weights times the values of one chunk.
template <Form FORM, bool FETCH, int ROWS, int N>
HW_INLINE void weigh_rows(const Cache& c, const Chunk& chunk, int first_value, const void* weights, size_t stride, float* out) {
  const int used = chunk.used;
  Simd::F sums[ROWS][N];
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) sums[r][v] = Simd::load(out + (size_t)r * c.value_width + first_value + v * Simd::W);
  if constexpr (FORM == Form::f32) {
    const float* values = static_cast<const float*>(chunk.memory) + first_value;
    for (int s = 0; s < used; ++s, values += c.value_width) {
      Simd::F value[N];
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) {
        value[v] = Simd::load(values + v * Simd::W);
        if (FETCH) Simd::prefetch_far(reinterpret_cast<const uint8_t*>(values + v * Simd::W) + chunk.next);
      }
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        const Simd::F p = Simd::set1(static_cast<const float*>(weights)[r * stride + s]);
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) sums[r][v] = Simd::fma(value[v], p, sums[r][v]);
      }
    }
  } else {
    const uint16_t* values = static_cast<const uint16_t*>(chunk.memory) + 2 * first_value;
    for (int s = 0; s < used; s += 2, values += 2 * c.value_width) {
      Simd::I value[N];
#pragma GCC unroll 4
      for (int v = 0; v < N; ++v) {
        value[v] = Simd::load_i(values + v * Simd::W * 2);
        if (FETCH) Simd::prefetch_far(reinterpret_cast<const uint8_t*>(values + v * Simd::W * 2) + chunk.next);
      }
      if (s + 1 == used) {
#pragma GCC unroll 4
        for (int v = 0; v < N; ++v) value[v] = Simd::even_only(value[v]);
      }
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r) {
        if constexpr (FORM == Form::bf16_dot) {
          const Simd::I p = Simd::broadcast4(static_cast<const uint16_t*>(weights) + r * stride + s);
#pragma GCC unroll 4
          for (int v = 0; v < N; ++v) sums[r][v] = Simd::dot_bf16(sums[r][v], value[v], p);
        } else {
          const float* p = static_cast<const float*>(weights) + r * stride + s;
          const Simd::F even = Simd::set1(p[0]), odd = Simd::set1(p[1]);
#pragma GCC unroll 4
          for (int v = 0; v < N; ++v) {
            sums[r][v] = Simd::fma(Simd::even_bf16(value[v]), even, sums[r][v]);
            sums[r][v] = Simd::fma(Simd::odd_bf16(value[v]), odd, sums[r][v]);
          }
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < N; ++v) Simd::store(out + (size_t)r * c.value_width + first_value + v * Simd::W, sums[r][v]);
}

template <Form FORM, bool FETCH, int ROWS>
void weigh_chunk(const Cache& c, const Chunk& chunk, const void* weights, size_t stride, float* out) {
  int d = 0;
  for (; d + VALUES <= c.value_width; d += VALUES) weigh_rows<FORM, FETCH, ROWS, 4>(c, chunk, d, weights, stride, out);
  for (; d < c.value_width; d += Simd::W) weigh_rows<FORM, FETCH, ROWS, 1>(c, chunk, d, weights, stride, out);
}

template <int N>
struct Count {
  static constexpr int value = N;
};

template <class Fn>
HW_INLINE void in_row_blocks(int rows, Fn fn) {  // fn(first row, Count of rows, whether it is the first block)
  int r = 0;
  if (rows >= ROW_BLOCK) fn(0, Count<ROW_BLOCK>(), Count<true>());
  for (r = ROW_BLOCK; r + ROW_BLOCK <= rows; r += ROW_BLOCK) fn(r, Count<ROW_BLOCK>(), Count<false>());
  if (rows == 1) fn(0, Count<1>(), Count<true>());
  if (rows == 2) fn(0, Count<2>(), Count<true>());
  if (rows == 3) fn(0, Count<3>(), Count<true>());
  if (rows - r == 1) fn(r, Count<1>(), Count<false>());
  if (rows - r == 2) fn(r, Count<2>(), Count<false>());
  if (rows - r == 3) fn(r, Count<3>(), Count<false>());
}

// Every chunk of the range, head by head within a block, as they lie in memory: memory is fastest when read in long runs.
// fn(block, head within the task, chunk).
template <class Fn>
HW_INLINE void in_chunks(const Attend& t, const Range& range, int end, void* memory, size_t bytes, Fn fn) {
  const Cache& c = t.cache;
  const auto at = [&](int b, int h) { return static_cast<uint8_t*>(memory) + ((size_t)t.table[b] * c.heads + t.head + h) * bytes; };
  for (int b = range.first_block; b < range.last_block; ++b) {
    const int used = (int)least(c.block_size, end - b * c.block_size);
    for (int h = 0; h < t.heads; ++h) {
      uint8_t *here = at(b, h), *next = h + 1 < t.heads ? at(b, h + 1) : b + 1 < range.last_block ? at(b + 1, 0) : here;
      fn(b, h, Chunk{here, used, next - here});
    }
  }
}

template <Form FORM>
void attend_form(const Attend& t, const void* prepared, int first_block, int last_block, void* scratch, Partial out) {
  const Cache& c = t.cache;
  const int per_head = t.queries * t.group, rows = t.heads * per_head, end = t.positions[t.queries - 1] + 1;
  const Range range{first_block, (int)least(last_block, ceil_div(end, c.block_size)), c.block_size, c.slots};
  const size_t stride = (size_t)split_blocks(c) * c.slots;
  float* scores = static_cast<float*>(scratch);
  uint16_t* weights = reinterpret_cast<uint16_t*>(scores + (size_t)rows * stride);
  void* transposed = reinterpret_cast<uint8_t*>(scratch) + round_up((int64_t)(rows * stride * 6), 64);  // of a latent cache

  in_chunks(t, range, end, c.keys, c.key_chunk(), [&](int b, int h, const Chunk& chunk) {
    in_row_blocks(per_head, [&](int first, auto count, auto fetch) {
      constexpr int ROWS = decltype(count)::value;
      const void* queries[ROWS];
      for (int r = 0; r < ROWS; ++r) queries[r] = query_row<FORM>(prepared, c, h * per_head + first + r);
      float* to = scores + (h * per_head + first) * stride + (size_t)(b - range.first_block) * c.slots;
      score_chunk<FORM, decltype(fetch)::value, ROWS>(c, chunk, queries, to, stride);
    });
  });
  for (int r = 0; r < rows; ++r) {
    const int position = t.positions[r % per_head / t.group];
    soften<FORM>(t, range, position, scores + r * stride, weights + r * stride, &out.largest[r], &out.total[r]);
  }
  memset(out.values, 0, (size_t)rows * c.value_width * sizeof(float));
  void* const memory = c.latent ? c.keys : c.values;
  in_chunks(t, range, end, memory, c.latent ? c.key_chunk() : c.value_chunk(), [&](int b, int h, Chunk chunk) {
    if (c.latent) {
      (c.format == CacheFormat::f32 ? float_to_values : to_values<uint32_t>)(c, chunk.memory, chunk.used, transposed);
      chunk = {transposed, chunk.used, 0};
    }
    in_row_blocks(per_head, [&](int first, auto count, auto fetch) {
      const size_t row = h * per_head + first, at = row * stride + (size_t)(b - range.first_block) * c.slots;
      const void* p = FORM == Form::bf16_dot ? static_cast<const void*>(weights + at) : scores + at;
      float* to = out.values + row * c.value_width;
      weigh_chunk<FORM, decltype(fetch)::value, decltype(count)::value>(c, chunk, p, stride, to);
    });
  });
}

void attend_int8(const Attend& t, const void* prepared, int first_block, int last_block, void* scratch, Partial out);

void attend(const Attend& t, const void* prepared, int first_block, int last_block, void* scratch, Partial out) {
  if (t.cache.format == CacheFormat::f32) return attend_form<Form::f32>(t, prepared, first_block, last_block, scratch, out);
  if (t.cache.format == CacheFormat::int8) return attend_int8(t, prepared, first_block, last_block, scratch, out);
  attend_form<Simd::BF16_DOT ? Form::bf16_dot : Form::bf16>(t, prepared, first_block, last_block, scratch, out);
}

void merge(Partial total, Partial more, int rows, int value_width) {
  for (int r = 0; r < rows; ++r) {
    if (more.largest[r] == -INFINITY) continue;  // nothing seen
    float* values = total.values + (size_t)r * value_width;
    const float* added = more.values + (size_t)r * value_width;
    if (total.largest[r] == -INFINITY) {
      total.largest[r] = more.largest[r];
      total.total[r] = more.total[r];
      memcpy(values, added, value_width * sizeof(float));
      continue;
    }
    const bool greater = more.largest[r] > total.largest[r];
    float factor[Simd::W];
    const float distance = greater ? total.largest[r] - more.largest[r] : more.largest[r] - total.largest[r];
    Simd::store(factor, power_of_2(Simd::set1(distance)));
    const Simd::F old = Simd::set1(greater ? factor[0] : 1.0f), fresh = Simd::set1(greater ? 1.0f : factor[0]);
    if (greater) total.largest[r] = more.largest[r];
    total.total[r] = greater ? total.total[r] * factor[0] + more.total[r] : total.total[r] + more.total[r] * factor[0];
    for (int d = 0; d < value_width; d += Simd::W) {
      const Simd::F scaled = Simd::mul(Simd::load(values + d), old);
      Simd::store(values + d, Simd::fma(Simd::load(added + d), fresh, scaled));
    }
  }
}

void normalise(Partial total, int row, int value_width, int out_width, float* out) {
  const Simd::F by = Simd::set1(total.total[row]);
  const float* values = total.values + (size_t)row * value_width;
  for (int d = 0; d < out_width; d += Simd::W) store_part(out + d, Simd::div(Simd::load(values + d), by), out_width - d);
}

}  // namespace
}  // namespace headway

#include "kernels_attention_int8.h"
