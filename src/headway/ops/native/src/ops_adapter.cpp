#include "adapter.h"

#include <algorithm>
#include <stdexcept>

#include "ops.h"

namespace headway {

AdapterSlots::AdapterSlots(int out, int in, int count, int most_rank) : out(out), in(in), most_rank(most_rank) {
  if (out < 1 || in < 1 || count < 1 || most_rank < 1) throw std::invalid_argument("adapter slots: sizes must be positive");
  pairs_.resize(count);
}

AdapterSlots::Pair& AdapterSlots::at(int number) {
  if (number < 1 || number > count()) throw std::invalid_argument("adapter slots: no such number");
  return pairs_[number - 1];
}

void AdapterSlots::put(int number, Weights down, Weights up, float scale) {
  Pair& pair = at(number);
  const auto floats = [](const Matrix& m) { return m.storage == Storage::f32 || m.storage == Storage::f16; };
  if (down->in != in || up->out != out || down->out != up->in || down->out > most_rank || !floats(*down) || !floats(*up)) {
    throw std::invalid_argument("adapter slots: the matrices do not fit");
  }
  pair = {std::move(down), std::move(up), scale};
}

void AdapterSlots::clear(int number) { at(number) = {}; }

std::vector<AdapterRun> adapter_runs(const BatchView& batch) {
  std::vector<AdapterRun> runs;
  for (int r = 0; r < batch.rows; ++r) {
    const int number = batch.adapter[r], end = batch.query_start[r + 1];
    for (int t = batch.query_start[r]; number != 0 && t < end;) {
      AdapterRun* last = runs.empty() ? nullptr : &runs.back();
      if (!last || last->number != number || last->first + last->count != t || last->count == ROWS_AT_ONCE) {
        runs.push_back({number, t, 0});
        last = &runs.back();
      }
      const int more = (int)least(ROWS_AT_ONCE - last->count, end - t);
      last->count += more;
      t += more;
    }
  }
  return runs;
}

int AdapterOp::most_rank() const {
  int rank = 0;
  for (const Part& part : parts) rank = (int)most(rank, part.slots->most_rank);
  return rank;
}

int Program::add_low_rank(int y, int x, std::shared_ptr<const AdapterSlots> slots) {
  const Value &in = values_.at(x), &out = values_.at(y);
  if (in.axis != TOKENS || out.axis != TOKENS) throw std::invalid_argument("add_low_rank: the input must have a row per token");
  if (in.width != slots->in || out.width != slots->out) throw std::invalid_argument("add_low_rank: the widths are not the layer's");
  auto* linear = dynamic_cast<LinearOp*>(ops_.at(out.producer).get());
  if (!linear || linear->x != x || out.forms != FLOATS) throw std::invalid_argument("add_low_rank: y is no linear layer of x");
  use(x, FLOATS);
  adapters_ = adapters_ ? (int)least(adapters_, slots->count()) : slots->count();
  auto* last = dynamic_cast<AdapterOp*>(ops_.back().get());
  if (!last || last->x != x) {
    auto op = std::make_unique<AdapterOp>();
    op->x = x;
    last = op.get();
    push(std::move(op), {x});
  }
  last->parts.push_back({std::move(slots), y});
  values_[y].last_use = (int)ops_.size() - 1;
  return y;
}

int Program::gated(int gate, int up, Activation activation) {
  const Value in = values_.at(gate), other = values_.at(up < 0 ? gate : up);
  if (in.width != other.width || in.axis != other.axis) throw std::invalid_argument("gated: the shapes differ");
  use(gate, FLOATS);
  if (up >= 0) use(up, FLOATS);
  auto op = std::make_unique<GateOp>();
  op->gate = gate;
  op->up = up;
  op->activation = activation;
  const int out = op->out = make(in.axis, in.width);
  push(std::move(op), {gate, up});
  return out;
}

size_t Program::low_rank_floats(int tokens) const {
  size_t floats = 0;
  for (const auto& op : ops_) {
    const auto* adapter = dynamic_cast<const AdapterOp*>(op.get());
    if (adapter) floats = std::max(floats, adapter->parts.size() * tokens * (size_t)adapter->most_rank());
  }
  return floats;
}

void AdapterOp::run(Step& step, Worker& worker) const {
  if (step.adapter_runs.empty()) return;
  const Kernels& kernels = step.engine.kernels;
  const int tokens = step.batch.tokens, runs = (int)step.adapter_runs.size();
  constexpr int TILES = 4;  // of outputs per task
  worker.scratch->grow((size_t)ROWS_AT_ONCE * TILES * TILE * sizeof(float));
  float* acc = worker.scratch->as<float>();

  const int most_rank = this->most_rank();
  int most_out = 0;
  for (const Part& part : parts) most_out = (int)most(most_out, part.slots->out);
  // Where down x of a run's tokens lies: rows of the pair's own rank, so that they are activations of `up`.
  const auto low_rank = [&](int part, const AdapterRun& run) {
    return step.low_rank.as<float>() + ((size_t)part * tokens + run.first) * most_rank;
  };
  // Tasks are numbered [part][run][piece], with as many pieces as the largest matrix has.
  const auto share = [&](int pieces, auto&& body) {
    step.share(worker, (int)parts.size() * runs * pieces, [&](int task) {
      const AdapterRun& run = step.adapter_runs[task / pieces % runs];
      const int part = task / pieces / runs;
      const AdapterSlots::Pair& pair = parts[part].slots->of(run.number);
      if (pair.down) body(part, run, pair, task % pieces);
    });
  };

  share((int)ceil_div(most_rank, TILE), [&](int part, const AdapterRun& run, const AdapterSlots::Pair& pair, int tile) {
    const Matrix& w = *pair.down;
    if (tile >= w.tiles()) return;
    const int column = tile * TILE, columns = (int)least(TILE, w.out - column);
    kernels.matmul(w, tile, 1, tile, step.activations(x), run.first, run.count, acc);
    float* to = low_rank(part, run) + column;
    for (int r = 0; r < run.count; ++r) {
      kernels.finish(acc + (size_t)r * TILE, w.unit, nullptr, nullptr, columns, to + (size_t)r * w.out);
    }
  });
  share((int)ceil_div(most_out, TILES * TILE), [&](int part, const AdapterRun& run, const AdapterSlots::Pair& pair, int piece) {
    const Matrix& w = *pair.up;
    const int tile = piece * TILES, tiles = (int)least(TILES, w.tiles() - tile);
    if (tiles <= 0) return;
    Activations a;
    a.width = a.depth = w.in;
    a.f32 = low_rank(part, run);
    kernels.matmul(w, tile, tiles, tile, a, 0, run.count, acc);
    const int column = tile * TILE, columns = (int)least(tiles * TILE, w.out - column);
    for (int r = 0; r < run.count; ++r) {
      float* y = step.floats(parts[part].out) + (size_t)(run.first + r) * w.out + column;
      kernels.finish(acc + (size_t)r * tiles * TILE, w.unit * pair.scale, nullptr, y, columns, y);
    }
  });
}

void GateOp::run(Step& step, Worker& worker) const {
  const Value& value = step.values[out];
  const int groups = (int)ceil_div(value.width, LARGEST_GROUP);
  const float *gates = step.floats(gate), *ups = up < 0 ? nullptr : step.floats(up);
  worker.scratch->grow(LARGEST_GROUP * sizeof(float));
  step.share_runs(worker, step.rows(out) * groups, [&](int task) {
    const int row = task / groups, begin = task % groups * LARGEST_GROUP, end = (int)least(begin + LARGEST_GROUP, value.width);
    const size_t at = (size_t)row * value.width + begin;
    float* to = value.forms & FLOATS ? step.floats(out) + at : worker.scratch->as<float>();
    step.engine.kernels.gate(activation, gates + at, 1, ups ? ups + at : nullptr, 1, end - begin, to);
    step.convert(out, row, to, begin, end, value.forms);
  });
}

}  // namespace headway
