#include "ops_experts.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace headway {

namespace {

constexpr int FEW_ROWS = 4;  // are routed by one thread at once: cheaper than to wait for others

// Merit of the experts of groups that are not kept: none.
void drop_groups(const Routing& routing, int experts, float* merit) {
  const int size = experts / routing.groups;
  std::vector<std::pair<float, int>> best(routing.groups);
  std::vector<float> sorted(size);
  for (int g = 0; g < routing.groups; ++g) {
    std::partial_sort_copy(merit + g * size, merit + (g + 1) * size, sorted.begin(), sorted.end(), std::greater<float>());
    const float sum = std::accumulate(sorted.begin(), sorted.begin() + std::min(routing.merit, size), 0.0f);
    best[g] = {sum == sum ? -sum : INFINITY, g};
  }
  std::sort(best.begin(), best.end());
  for (int i = routing.kept_groups; i < routing.groups; ++i) {
    std::fill_n(merit + best[i].second * size, size, -INFINITY);
  }
}

}  // namespace

void route(const float* numbers, int experts, const Routing& routing, const float* correction, float* scratch, int32_t* chosen,
           float* weights) {
  float *scores = scratch, *merit = scratch + experts;
  if (routing.sigmoid) {
    for (int e = 0; e < experts; ++e) scores[e] = 1 / (1 + expf(-numbers[e]));
  } else {
    const float top = *std::max_element(numbers, numbers + experts);
    float sum = 0;
    for (int e = 0; e < experts; ++e) sum += scores[e] = expf(numbers[e] - top);
    for (int e = 0; e < experts; ++e) scores[e] /= sum;
  }
  for (int e = 0; e < experts; ++e) merit[e] = correction ? scores[e] + correction[e] : scores[e];
  if (routing.kept_groups < routing.groups) drop_groups(routing, experts, merit);
  float total = 0;
  for (int rank = 0; rank < routing.active; ++rank) {
    int best = -1;  // a NaN loses against nothing and wins against nothing, and stays in its weight
    for (int e = 0; e < experts; ++e) {
      if (std::find(chosen, chosen + rank, e) != chosen + rank) continue;
      if (best < 0 || merit[e] > merit[best]) best = e;
    }
    chosen[rank] = best;
    total += weights[rank] = scores[best];
  }
  const float by = routing.renormalise ? routing.scale / (total + 1e-20f) : routing.scale;
  for (int rank = 0; rank < routing.active; ++rank) weights[rank] *= by;
}

void Routed::fit(int slots) {
  for (Buffer* buffer : {&chosen, &weights, &order, &place}) buffer->grow((size_t)slots * 4);
}

size_t Routed::bytes(int slots) { return (size_t)slots * 4 * 4; }

void Routed::sort(int slots, int experts) {
  const int32_t* of = chosen.as<int32_t>();
  ends.assign(experts + 1, 0);
  for (int slot = 0; slot < slots; ++slot) ++ends[of[slot] + 1];
  blocks.clear();
  touched = 0;
  for (int e = 0; e < experts; ++e) {
    const int begin = ends[e], end = ends[e + 1] += begin;
    touched += end > begin;
    for (int first = begin; first < end; first += ROWS_AT_ONCE) blocks.push_back({e, first, std::min(ROWS_AT_ONCE, end - first)});
  }
  for (int slot = 0; slot < slots; ++slot) {
    const int at = ends[of[slot]]++;  // where an expert begins, until all its slots are placed
    order.as<int32_t>()[at] = slot;
    place.as<int32_t>()[slot] = at;
  }
}

void RouteOp::run(Step& step, Worker& worker) const {
  const int experts = step.values[numbers].width, rows = step.rows(numbers), active = routing.active;
  Routed& routed = *step.routed;
  worker.scratch->grow((size_t)2 * experts * sizeof(float));
  const auto choose = [&](int row) {
    route(step.floats(numbers) + (size_t)row * experts, experts, routing, correction ? correction->data() : nullptr,
          worker.scratch->as<float>(), routed.chosen.as<int32_t>() + row * active, routed.weights.as<float>() + row * active);
  };
  const auto sort = [&] {
    routed.sort(rows * active, experts);
    step.touched[index] = routed.touched;
  };
  if (rows <= FEW_ROWS) {
    step.share(worker, 1, [&](int) {
      for (int row = 0; row < rows; ++row) choose(row);
      sort();
    });
    return;
  }
  step.share_runs(worker, rows, choose);
  step.share(worker, 1, [&](int) { sort(); });
}

namespace {

size_t gathered_bytes(int width, int rows) { return rows * (stride_of(width) * 4 + ceil_div(width, SMALLEST_GROUP) * 20) + 64 * 7; }

// The rows of a block side by side, in the form that `w` meets: where they are if it is one, else copies in `scratch`.
Activations gather(const Step& step, int x, const Matrix& w, const int32_t* slots, int active, int rows, uint8_t* scratch, int& row) {
  Activations a = step.activations(x, w.group);
  row = slots[0] / active;
  if (rows == 1) return a;
  row = 0;
  const auto copy = [&](auto*& from, size_t stride) {
    using Element = std::remove_const_t<std::remove_reference_t<decltype(*from)>>;
    Element* to = reinterpret_cast<Element*>(scratch);
    for (int r = 0; r < rows; ++r) memcpy(to + r * stride, from + slots[r] / active * stride, stride * sizeof(Element));
    from = to;
    scratch += round_up(rows * stride * sizeof(Element), 64);
  };
  if (!w.quantised()) {
    if (w.storage == Storage::bf16 && step.engine.kernels.bf16_dot) {
      copy(a.bf16, a.stride);
    } else {
      copy(a.f32, a.width);
    }
    return a;
  }
  copy(a.q, a.stride);
  if (step.engine.kernels.paired) copy(a.turned, 2 * a.stride);
  copy(a.scale, a.groups());
  copy(a.sum, a.groups());
  copy(a.offset8, a.groups());
  copy(a.offset6, a.groups());
  copy(a.offset4, a.groups());
  return a;
}

constexpr int TILES = LARGEST_GROUP / TILE;  // a whole group of the hidden value per task, so that it can be quantised
constexpr size_t HIDDEN_SCRATCH = (2 * ROWS_AT_ONCE + 1) * LARGEST_GROUP * sizeof(float);

}  // namespace

size_t ExpertGateUpOp::scratch(int rows) const {
  return HIDDEN_SCRATCH + gathered_bytes(gate->in, (int)least(rows, ROWS_AT_ONCE));
}

void ExpertGateUpOp::run(Step& step, Worker& worker) const {
  const Kernels& kernels = step.engine.kernels;
  const Value& value = step.values[out];
  const Routed& routed = *step.routed;
  const int pieces = (int)ceil_div(value.width, LARGEST_GROUP), threads = step.engine.team.threads();
  worker.scratch->grow(scratch(step.rows(x)));
  step.share(worker, (int)routed.blocks.size() * pieces, [&](int task) {
    const auto [expert, first, count] = routed.blocks[task / pieces];
    const int tile = task % pieces * TILES, tiles = (int)least(TILES, gate->tiles() - tile);
    const int column = tile * TILE, columns = (int)least(tiles * TILE, value.width - column);
    float *gates = worker.scratch->as<float>(), *ups = gates + ROWS_AT_ONCE * LARGEST_GROUP, *hidden = ups + ROWS_AT_ONCE * LARGEST_GROUP;
    const auto multiply = [&](const Matrix& w, float* acc) {
      int row;
      const Activations a = gather(step, x, w, routed.order.as<int32_t>() + first, active, count, worker.scratch->as(HIDDEN_SCRATCH), row);
      kernels.matmul(w, expert * w.tiles() + tile, tiles, expert * w.tiles() + tile + TILES * threads, a, row, count, acc);
    };
    multiply(*gate, gates);
    multiply(*up, ups);
    const auto biased = [&](float* row, const Matrix& w, const Vector& bias) {  // -> the unit that is still to be applied
      if (!bias) return w.unit;
      kernels.finish(row, w.unit, bias->data() + (size_t)expert * value.width + column, nullptr, columns, row);
      return 1.0f;
    };
    for (int r = 0; r < count; ++r) {
      float *g = gates + (size_t)r * tiles * TILE, *u = ups + (size_t)r * tiles * TILE;
      float* to = value.forms & FLOATS ? step.floats(out) + (size_t)(first + r) * value.width + column : hidden;
      const float gate_unit = biased(g, *gate, gate_bias), up_unit = biased(u, *up, up_bias);
      if (limit > 0) {
        kernels.clamped_gate(g, gate_unit, u, up_unit, alpha, limit, columns, to);
      } else {
        kernels.gate(activation, g, gate_unit, u, up_unit, columns, to);
      }
      step.convert(out, first + r, to, column, column + columns, value.forms);
    }
  });
}

size_t ExpertDownOp::scratch(int) const { return 4 * ROWS_AT_ONCE * TILE * sizeof(float); }

void ExpertDownOp::run(Step& step, Worker& worker) const {
  const Kernels& kernels = step.engine.kernels;
  const Routed& routed = *step.routed;
  const int threads = step.engine.team.threads(), all = (int)routed.blocks.size() * down->tiles();
  const int width = (int)most(1, least(4, all / (threads * 3)));
  const int pieces = (int)ceil_div(down->tiles(), width);
  worker.scratch->grow(scratch(0));
  step.share(worker, (int)routed.blocks.size() * pieces, [&](int task) {
    const auto [expert, first, count] = routed.blocks[task / pieces];
    const int tile = task % pieces * width, tiles = (int)least(width, down->tiles() - tile);
    const int column = tile * TILE, columns = (int)least(tiles * TILE, down->out - column);
    float* acc = worker.scratch->as<float>();
    const int at = expert * down->tiles() + tile;
    kernels.matmul(*down, at, tiles, at + tiles * threads, step.activations(x, down->group), first, count, acc);
    for (int r = 0; r < count; ++r) {
      kernels.finish(acc + (size_t)r * tiles * TILE, down->unit, bias ? bias->data() + (size_t)expert * down->out + column : nullptr,
                     nullptr, columns, step.floats(out) + (size_t)(first + r) * down->out + column);
    }
  });
}

void CombineOp::run(Step& step, Worker& worker) const {
  const int width = step.values[out].width;
  const Routed& routed = *step.routed;
  step.share_runs(worker, step.rows(out), [&](int row) {
    float* to = step.floats(out) + (size_t)row * width;
    if (residual >= 0) {
      memcpy(to, step.floats(residual) + (size_t)row * width, width * sizeof(float));
    } else {
      memset(to, 0, width * sizeof(float));
    }
    for (int slot = row * active; slot < (row + 1) * active; ++slot) {
      const float* from = step.floats(x) + (size_t)routed.place.as<int32_t>()[slot] * width;
      const float weight = routed.weights.as<float>()[slot];
      for (int i = 0; i < width; ++i) to[i] += weight * from[i];
    }
  });
}

void SigmoidGateOp::run(Step& step, Worker& worker) const {
  const int width = step.values[out].width;
  step.share_runs(worker, step.rows(out), [&](int row) {
    const float by = 1 / (1 + expf(-step.floats(gate)[row]));
    const float *from = step.floats(x) + (size_t)row * width, *added = residual < 0 ? nullptr : step.floats(residual) + (size_t)row * width;
    float* to = step.floats(out) + (size_t)row * width;
    for (int i = 0; i < width; ++i) to[i] = added ? added[i] + by * from[i] : by * from[i];
  });
}

// ---- building

int Program::experts(int x, Weights router, Weights gate, Weights up, Weights down, const Routing& routing, Activation activation,
                     float alpha, float limit, const ExpertBiases& biases, int residual) {
  const Value in = values_.at(x);
  const int count = gate->count, width = gate->out;
  need(router->out == count && up->count == count && down->count == count, "experts: router, gate, up and down are not of as many experts");
  need(gate->in == in.width && up->in == in.width && up->out == width && down->in == width && down->out == in.width,
       "experts: the shapes of gate, up and down do not fit");
  const auto fits = [](const Vector& bias, int length) { return !bias || bias->width() == length; };
  need(fits(biases.correction, count) && fits(biases.gate, count * width) && fits(biases.up, count * width) &&
           fits(biases.down, count * in.width),
       "experts: a bias is not as long as there are numbers to add it to");
  need(routing.groups >= 1 && count % routing.groups == 0 && routing.kept_groups >= 1 && routing.active >= 1 &&
           routing.active <= std::min(routing.kept_groups, routing.groups) * (count / routing.groups),
       "experts: more are active than there are to choose from");
  if (residual >= 0) {
    need(values_.at(residual).width == in.width && values_[residual].axis == in.axis, "experts: the residual's shape is not the input's");
    use(residual, FLOATS);
  }
  use(x, wanted(*gate) | wanted(*up));
  auto route = std::make_unique<RouteOp>();
  const int numbers = route->numbers = add_linear(x, router, biases.router, -1, 0, 0);
  route->routing = routing;
  route->correction = biases.correction;
  route->index = (int)routed_.size();
  routed_.push_back({numbers, routing.active});
  push(std::move(route), {numbers});

  auto first = std::make_unique<ExpertGateUpOp>();
  first->x = x;
  first->active = routing.active;
  first->gate = gate;
  first->up = up;
  first->gate_bias = biases.gate;
  first->up_bias = biases.up;
  first->activation = activation;
  first->alpha = alpha;
  first->limit = limit;
  const int hidden = first->out = make(in.axis, width, routing.active);
  push(std::move(first), {x});

  use(hidden, wanted(*down));
  auto second = std::make_unique<ExpertDownOp>();
  second->x = hidden;
  second->down = down;
  second->bias = biases.down;
  const int each = second->out = make(in.axis, in.width, routing.active);
  values_[each].forms = FLOATS;
  push(std::move(second), {hidden});

  auto combine = std::make_unique<CombineOp>();
  combine->x = each;
  combine->residual = residual;
  combine->active = routing.active;
  const int out = combine->out = make(in.axis, in.width);
  values_[out].forms = FLOATS;
  push(std::move(combine), {each, residual});
  return out;
}

int Program::sigmoid_gate(int x, int gate, int residual) {
  const Value in = values_.at(x);
  need(values_.at(gate).width == 1 && values_[gate].axis == in.axis, "sigmoid_gate: the gate is not one number per row");
  for (int value : {x, gate, residual}) {
    if (value >= 0) use(value, FLOATS);
  }
  need(residual < 0 || (values_[residual].width == in.width && values_[residual].axis == in.axis),
       "sigmoid_gate: the residual's shape is not the input's");
  auto op = std::make_unique<SigmoidGateOp>();
  op->x = x;
  op->gate = gate;
  op->residual = residual;
  const int out = op->out = make(in.axis, in.width);
  values_[out].forms = FLOATS;
  push(std::move(op), {x, gate, residual});
  return out;
}

}  // namespace headway
