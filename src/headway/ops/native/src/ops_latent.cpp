#include "ops_latent.h"

namespace headway {

void LatentCacheOp::run(Step& step, Worker& worker) const {
  const auto [number, index] = step.engine.find(layer);
  const Cache& cache = step.engine.groups[number].caches[index];
  const int width = step.values[x].width, rank = norm->width(), pairs = (width - rank) / 2;
  const int64_t* slots = step.batch.groups[number].slots;
  worker.scratch->grow(width * sizeof(float));
  step.share_runs(worker, step.batch.tokens, [&](int t) {
    const float* from = step.floats(x) + (size_t)t * width;
    float* key = worker.scratch->as<float>();
    step.engine.kernels.rms_norm(from, norm->data(), eps, rank, key);
    rotate(from + rank, step.floats(angles) + (size_t)t * 2 * pairs, pairs, interleaved, width - rank, key + rank);
    write_key(cache, (size_t)(slots[t] / cache.block_size), (int)(slots[t] % cache.block_size), key, width);
  });
}

void HeadRowsOp::run(Step& step, Worker& worker) const {
  const Value& value = step.values[out];
  const int tokens = step.batch.tokens, of_head = step.values[x].width / heads;
  step.share_runs(worker, tokens * heads, [&](int task) {
    const int t = task / heads, h = task % heads, row = h * tokens + t;
    const float* from = step.floats(x) + (size_t)task * of_head;
    if (value.forms & FLOATS) memcpy(step.floats(out) + (size_t)row * value.width, from, value.width * sizeof(float));
    step.convert(out, row, from, 0, value.width, value.forms);
    if (wide < 0) return;
    const int turned = of_head - value.width, pairs = turned / 2;
    float* to = step.floats(wide) + (size_t)(task + 1) * (step.values[wide].width / heads) - turned;
    rotate(from + value.width, step.floats(angles) + (size_t)t * 2 * pairs, pairs, interleaved, turned, to);
  });
}

void HeadLinearOp::run(Step& step, Worker& worker) const {
  const Kernels& kernels = step.engine.kernels;
  const Matrix& w = *weights;
  const int rows = step.rows(out), row_blocks = (int)ceil_div(rows, ROWS_AT_ONCE), threads = step.engine.team.threads();
  const int width = (int)most(1, least(4, (int64_t)w.count * w.tiles() / (threads * 3))), pieces = (int)ceil_div(w.tiles(), width);
  const size_t stride = step.values[out].width;
  const Activations a = step.activations(x, w.group);
  worker.scratch->grow((size_t)least(rows, ROWS_AT_ONCE) * width * TILE * sizeof(float));
  step.share(worker, w.count * row_blocks * pieces, [&](int task) {
    const int head = task / pieces / row_blocks, first = task / pieces % row_blocks * ROWS_AT_ONCE;
    const int count = (int)least(ROWS_AT_ONCE, rows - first), tile = task % pieces * width, tiles = (int)least(width, w.tiles() - tile);
    const int at = head * w.tiles() + tile, columns = (int)least(tiles * TILE, w.out - tile * TILE);
    float* acc = worker.scratch->as<float>();
    kernels.matmul(w, at, tiles, at + tiles * threads, a, head * rows + first, count, acc);
    for (int r = 0; r < count; ++r) {
      float* to = step.floats(out) + (first + r) * stride + (size_t)head * pitch + tile * TILE;
      kernels.finish(acc + (size_t)r * tiles * TILE, w.unit, nullptr, nullptr, columns, to);
    }
  });
}

// ---- building

int Program::latent_attention(int q, int latent, Vector norm, Weights key_up, Weights value_up, int layer, float scale,
                              const RopeTable& rope, float eps) {
  const GroupLayout& layout = engine_->groups[engine_->find(layer).first].layout;
  const int heads = key_up->count, rank = norm->width(), turned = 2 * (int)rope.inv_freq.size();
  need(layout.latent && layout.heads == 1 && layout.value_width == rank && layout.key_width == turned,
       "latent_attention: the cache does not hold what is to be written");
  need(key_up->out == rank && value_up->in == rank && value_up->count == heads, "latent_attention: the projections do not fit");
  need(values_.at(q).axis == TOKENS && values_[q].width == heads * (key_up->in + turned), "latent_attention: q does not fit the heads");
  need(values_.at(latent).axis == TOKENS && values_[latent].width == rank + turned, "latent_attention: the latent is not as wide as the cache");
  use(q, FLOATS);
  use(latent, FLOATS);
  const int angles = add_angles(rope);
  auto cached = std::make_unique<LatentCacheOp>();
  cached->x = latent;
  cached->angles = angles;
  cached->layer = layer;
  cached->norm = norm;
  cached->eps = eps;
  cached->interleaved = rope.interleaved;
  push(std::move(cached), {latent, angles});

  auto split = std::make_unique<HeadRowsOp>();
  split->x = q;
  split->heads = heads;
  split->angles = angles;
  split->interleaved = rope.interleaved;
  const int plain = split->out = make(TOKENS, key_up->in, heads);
  const int wide = split->wide = make(TOKENS, heads * (rank + turned));
  values_[wide].forms = FLOATS;
  push(std::move(split), {q, angles});
  add_head_linear(plain, key_up, wide);

  const int found = attention(wide, layer, scale, 0, nullptr);
  auto rows = std::make_unique<HeadRowsOp>();
  rows->x = found;
  rows->heads = heads;
  const int by_head = rows->out = make(TOKENS, rank, heads);
  push(std::move(rows), {found});
  const int out = make(TOKENS, heads * value_up->out);
  values_[out].forms = FLOATS;
  add_head_linear(by_head, value_up, out);
  return out;
}

void Program::add_head_linear(int x, Weights weights, int out) {
  use(x, wanted(*weights));
  auto op = std::make_unique<HeadLinearOp>();
  op->x = x;
  op->weights = weights;
  op->out = out;
  op->pitch = values_[out].width / weights->count;
  push(std::move(op), {x, out});
}

}  // namespace headway
