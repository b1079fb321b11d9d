#include "ops.h"

#include <algorithm>
#include <cmath>

namespace headway {

void EmbedOp::run(Step& step, Worker& worker) const {
  const int width = table->in;
  float* rows = step.floats(out);
  worker.scratch->grow(width * sizeof(float));
  step.share_runs(worker, step.batch.tokens, [&](int t) {
    float* row = rows + (size_t)t * width;
    table->unpack_row(step.batch.ids[t], row);
    if (scale != 1) step.engine.kernels.cap(row, scale, 0, width);
    if (!positions) return;
    float* position = worker.scratch->as<float>();
    positions->unpack_row(step.batch.positions[t], position);
    step.engine.kernels.finish(row, 1, position, nullptr, width, row);
  });
}

void AllReduceOp::run(Step& step, Worker& worker) const {
  step.engine.ranks->all_reduce(step.floats(x), (size_t)step.rows(x) * step.values[x].width, worker.id);
  step.engine.team.barrier(worker.id);
}

void NormOp::run(Step& step, Worker& worker) const {
  const Value& value = step.values[out];
  const float* in = step.floats(x);
  const bool keep = value.forms & FLOATS;
  const int part = value.width / parts;
  float* kept = step.floats(out);
  const float* added = residual < 0 ? nullptr : step.floats(residual);
  if (!keep) worker.scratch->grow(value.width * sizeof(float));
  step.share_runs(worker, step.rows(out), [&](int row) {
    float* to = keep ? kept + (size_t)row * value.width : worker.scratch->as<float>();
    for (int at = 0; at < value.width; at += part) {
      const float* from = in + (size_t)row * value.width + at;
      const auto of = [&](const Vector& v) { return v ? v->data() + (v->width() == part ? 0 : at) : nullptr; };
      if (centred) {
        step.engine.kernels.layer_norm(from, of(weight), of(bias), eps, part, to + at);
      } else {
        step.engine.kernels.rms_norm(from, of(weight), eps, part, to + at);
      }
    }
    if (added) step.engine.kernels.finish(to, 1, nullptr, added + (size_t)row * value.width, value.width, to);
    step.convert(out, row, to, 0, value.width, value.forms);
  });
}

void ConvertOp::run(Step& step, Worker& worker) const {
  const int width = step.values[x].width, rows = step.rows(x);
  const float* in = step.floats(x);
  // Few rows are cut at groups, so that one token's conversion keeps all threads busy.
  const int groups = (int)ceil_div(width, LARGEST_GROUP), pieces = rows < 8 ? (int)least(groups, 8) : 1;
  step.share_runs(worker, rows * pieces, [&](int task) {
    const int row = task / pieces, piece = task % pieces;
    const int begin = groups * piece / pieces * LARGEST_GROUP;
    const int end = (int)least((int64_t)groups * (piece + 1) / pieces * LARGEST_GROUP, width);
    step.convert(x, row, in + (size_t)row * width + begin, begin, end, forms);
  });
}

// As few tasks as share out evenly. For many rows, tiles that are together save fetching activations; for few, they make
// longer runs of memory, and more than 64 KiB make no difference.
int LinearOp::tiles_per_task(int threads, int rows) const {
  int all = 0;
  for (const Part& part : parts) all += part.weight->tiles();
  if (rows > 6) return (int)most(1, least(4, all / (threads * 8)));
  return (int)most(1, least(ceil_div(65536, parts[0].weight->tile_bytes), all / (threads * 3)));
}

std::pair<const uint8_t*, size_t> LinearOp::first_read(int worker, int threads, int rows) const {
  const Matrix& w = *parts[0].weight;
  const int width = tiles_per_task(threads, rows), tile = worker * width;
  if (tile >= w.tiles()) return {nullptr, 0};
  return {w.tile(tile), least(width, w.tiles() - tile) * w.tile_bytes};
}

std::pair<const uint8_t*, size_t> GateUpOp::first_read(int worker, int /*threads*/, int /*rows*/) const {
  const int tiles = LARGEST_GROUP / TILE, tile = worker * tiles;
  if (tile >= gate->tiles()) return {nullptr, 0};
  return {gate->tile(tile), least(tiles, gate->tiles() - tile) * gate->tile_bytes};
}

void LinearOp::run(Step& step, Worker& worker) const {
  const Kernels& kernels = step.engine.kernels;
  const int rows = step.rows(x), row_blocks = (int)ceil_div(rows, ROWS_AT_ONCE);
  const int threads = step.engine.team.threads(), width = tiles_per_task(threads, rows);
  int tasks = 0;
  for (const Part& part : parts) tasks += (int)ceil_div(part.weight->tiles(), width);

  worker.scratch->grow((size_t)least(rows, ROWS_AT_ONCE) * width * TILE * sizeof(float));
  step.share(worker, tasks * row_blocks, [&](int task) {
    const int first = task / tasks * ROWS_AT_ONCE, count = (int)least(ROWS_AT_ONCE, rows - first);
    int piece = task % tasks;
    const Part* part = parts.data();
    for (; piece >= ceil_div(part->weight->tiles(), width); ++part) piece -= (int)ceil_div(part->weight->tiles(), width);
    const Matrix& w = *part->weight;
    const int tile = piece * width, tiles = (int)least(width, w.tiles() - tile);
    const int column = tile * TILE, columns = (int)least(tiles * TILE, w.out - column);
    float* acc = worker.scratch->as<float>();
    kernels.matmul(w, tile, tiles, tile + tiles * threads, step.activations(x, w.group), first, count, acc);
    float* out = step.floats(part->out);
    const float* residual = part->residual < 0 ? nullptr : step.floats(part->residual);
    for (int r = 0; r < count; ++r) {
      const size_t at = (size_t)(first + r) * w.out + column;
      kernels.finish(acc + (size_t)r * tiles * TILE, w.unit, part->bias ? part->bias->data() + column : nullptr,
                     residual ? residual + at : nullptr, columns, out + at);
      if (part->softcap > 0 || (part->scale != 0 && part->scale != 1)) kernels.cap(out + at, part->scale, part->softcap, columns);
      if (part->summarised) step.summary.add(kernels, first + r, column, out + at, columns);
    }
  });
}

void GateUpOp::run(Step& step, Worker& worker) const {
  const Kernels& kernels = step.engine.kernels;
  const Value& value = step.values[out];
  constexpr int TILES = LARGEST_GROUP / TILE;  // a whole group of the output per task, so that it can be quantised
  const int rows = step.rows(x), row_blocks = (int)ceil_div(rows, ROWS_AT_ONCE), tasks = (int)ceil_div(value.width, LARGEST_GROUP);
  const size_t at_once = (size_t)least(rows, ROWS_AT_ONCE);
  const int threads = step.engine.team.threads();
  worker.scratch->grow((2 * at_once + 1) * LARGEST_GROUP * sizeof(float));
  step.share(worker, tasks * row_blocks, [&](int task) {
    const int first = task / tasks * ROWS_AT_ONCE, count = (int)least(ROWS_AT_ONCE, rows - first);
    const int tile = task % tasks * TILES, tiles = (int)least(TILES, gate->tiles() - tile);
    const int column = tile * TILE, columns = (int)least(tiles * TILE, value.width - column);
    float *gates = worker.scratch->as<float>(), *ups = gates + at_once * LARGEST_GROUP, *hidden = ups + at_once * LARGEST_GROUP;
    kernels.matmul(*gate, tile, tiles, tile + TILES * threads, step.activations(x, gate->group), first, count, gates);
    kernels.matmul(*up, tile, tiles, tile + TILES * threads, step.activations(x, up->group), first, count, ups);
    for (int r = 0; r < count; ++r) {
      const size_t from = (size_t)r * tiles * TILE;
      const auto biased = [&](float* acc, const Matrix& w, const Vector& bias) {
        if (!bias) return w.unit;
        kernels.finish(acc, w.unit, bias->data() + column, nullptr, columns, acc);
        return 1.0f;
      };
      const float gate_unit = biased(gates + from, *gate, gate_bias), up_unit = biased(ups + from, *up, up_bias);
      float* to = value.forms & FLOATS ? step.floats(out) + (size_t)(first + r) * value.width + column : hidden;
      kernels.gate(activation, gates + from, gate_unit, ups + from, up_unit, columns, to);
      step.convert(out, first + r, to, column, column + columns, value.forms);
    }
  });
}

void AnglesOp::run(Step& step, Worker& worker) const {
  const int pairs = (int)rope.inv_freq.size();
  const float magnitude = rope.magnitude;
  const BatchView& batch = step.batch;
  float* table = step.floats(out);
  step.share_runs(worker, step.batch.tokens, [&](int t) {
    float* row = table + (size_t)t * 2 * pairs;
    const float* inv_freq = rope.inv_freq.data();
    if (!rope.longer.empty()) {
      const auto of = std::upper_bound(batch.query_start, batch.query_start + batch.rows, t) - batch.query_start - 1;
      if (batch.known[of] > rope.original) inv_freq = rope.longer.data();
    }
    for (int i = 0; i < pairs; ++i) {
      const double angle = (float)step.batch.positions[t] * inv_freq[i];  // the product rounded as float, like the reference
      row[i] = (float)cos(angle) * magnitude;
      row[pairs + i] = (float)sin(angle) * magnitude;
    }
  });
}

namespace {

template <bool INTERLEAVED>
void rotate_pairs(const float* __restrict x, const float* __restrict angles, int pairs, float* __restrict out) {
  const float *cosines = angles, *sines = angles + pairs;
  for (int i = 0; i < pairs; ++i) {
    const int a = INTERLEAVED ? 2 * i : i, b = INTERLEAVED ? 2 * i + 1 : i + pairs;
    const float first = x[a], second = x[b];
    out[a] = first * cosines[i] - second * sines[i];
    out[b] = second * cosines[i] + first * sines[i];
  }
}

}  // namespace

void rotate(const float* x, const float* angles, int pairs, bool interleaved, int width, float* out) {
  (interleaved ? rotate_pairs<true> : rotate_pairs<false>)(x, angles, pairs, out);
  for (int i = 2 * pairs; i < width; ++i) out[i] = x[i];
}

namespace {

// A token's numbers of a head at 8 bits: what they are multiples of, and the nearest multiples, pairs of them `step` bytes
// apart and the second of a pair `odd` bytes behind the first. The float16 is rounded up, so that the largest fits. An infinity or NaN makes all of the token NaN.
void write_int8(int8_t* numbers, size_t step, int odd, uint16_t* unit, const float* x, int width) {
  uint32_t largest = 0;  // as bits, of which those of a NaN are the largest
  for (int d = 0; d < width; ++d) largest = std::max(largest, float_to_bits(x[d]) & 0x7fffffff);
  const float most = bits_to_float(largest);
  uint16_t half = float_to_f16(most * (1 / 127.0f));
  if (f16_to_float(half) * 127 < most) ++half;
  *unit = most != most ? 0x7e00 : half;
  const float scale = f16_to_float(half), inverse = scale > 0 && scale < INFINITY ? 1 / scale : 0;
  constexpr float ROUND = 12582912;  // 1.5 * 2^23: adding it leaves the nearest whole number in a float's low bits
  for (int d = 0; d < width; ++d) numbers[d / 2 * step + d % 2 * odd] = (int8_t)((int32_t)float_to_bits(x[d] * inverse + ROUND) & 0xff);
}

}  // namespace

void write_key(const Cache& c, size_t chunk, int slot, const float* key, int width) {
  void* const memory = c.key_at(chunk);
  if (c.format == CacheFormat::int8) {
    int8_t* numbers = static_cast<int8_t*>(memory) + 2 * slot;
    return write_int8(numbers, 2 * c.slots, 1, units(c, memory, c.key_width) + slot, key, width);
  }
  if (c.format == CacheFormat::f32) {
    float* to = static_cast<float*>(memory) + slot;
    for (int d = 0; d < width; ++d) to[(size_t)d * c.slots] = key[d];
    return;
  }
  uint32_t* to = static_cast<uint32_t*>(memory) + slot;
  for (int d = 0; d < width; d += 2) {
    const uint32_t odd = d + 1 < width ? float_to_bf16(key[d + 1]) : 0;
    to[(size_t)(d / 2) * c.slots] = float_to_bf16(key[d]) | odd << 16;
  }
}

namespace {

void write_value(const Cache& c, size_t chunk, int slot, const float* value, int width) {
  void* const memory = c.value_at(chunk);
  if (c.format == CacheFormat::int8) {
    int8_t* numbers = static_cast<int8_t*>(memory) + (size_t)(slot / 2) * c.value_width * 2 + slot % 2;
    return write_int8(numbers, 4, 2, units(c, memory, c.value_width) + slot, value, width);
  }
  if (c.format == CacheFormat::f32) {
    memcpy(static_cast<float*>(memory) + (size_t)slot * c.value_width, value, width * sizeof(float));
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(memory) + (size_t)(slot / 2) * c.value_width * 2 + slot % 2;
  for (int d = 0; d < width; ++d) to[2 * d] = float_to_bf16(value[d]);
}

}  // namespace

void RopeOp::run(Step& step, Worker& worker) const {
  const auto [number, index] = step.engine.find(layer);
  const CacheGroup& group = step.engine.groups[number];
  const Cache& cache = group.caches[index];
  const int heads = cache.heads, key_width = group.layout.key_width, value_width = group.layout.value_width;
  const int q_heads = step.values[q].width / key_width, per_head = q_heads / heads, pairs = step.values[angles].width / 2;
  const int64_t* slots = step.batch.groups[number].slots;
  const float *queries = step.floats(q), *keys = step.floats(k), *values = step.floats(v), *table = step.floats(angles);
  float* rotated = step.floats(out);
  worker.scratch->grow(key_width * sizeof(float));
  step.share_runs(worker, step.batch.tokens * heads, [&](int task) {
    const int t = task / heads, h = task % heads;
    const float* turn = table + (size_t)t * 2 * pairs;
    for (int g = h * per_head; g < (h + 1) * per_head; ++g) {
      const size_t at = ((size_t)t * q_heads + g) * key_width;
      rotate(queries + at, turn, pairs, interleaved, key_width, rotated + at);
    }
    float* key = worker.scratch->as<float>();
    rotate(keys + ((size_t)t * heads + h) * key_width, turn, pairs, interleaved, key_width, key);
    const size_t chunk = (size_t)(slots[t] / cache.block_size) * heads + h;
    const int slot = (int)(slots[t] % cache.block_size);
    write_key(cache, chunk, slot, key, key_width);
    write_value(cache, chunk, slot, values + ((size_t)t * heads + h) * value_width, value_width);
  });
}

void GatherOp::run(Step& step, Worker& worker) const {
  const size_t width = step.values[x].width;
  const float* from = step.floats(x);
  float* to = step.floats(out);
  const int32_t* index = step.values[out].axis == LOGITS ? step.batch.logit_index : step.batch.pool_index;
  step.share_runs(worker, step.rows(out), [&](int r) {
    memcpy(to + r * width, from + index[r] * width, width * sizeof(float));
  });
}

}  // namespace headway
