#include "program.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

#include "adapter.h"
#include "ops_experts.h"

namespace headway {

Program::Program(std::shared_ptr<Engine> engine) : engine_(std::move(engine)), slots_(std::make_unique<Routed>()) {}
Program::~Program() = default;

template <class Self, class Each>
void RowBuffer::each(Self& self, int rows, Each&& each) {
  if (self.forms & FLOATS) each(self.floats, (size_t)rows * self.width * sizeof(float) + 64);
  if (self.forms & BF16) each(self.bf16, rows * stride_of(self.width) * 2);
  for (size_t i = 0; i < std::size(GROUPS); ++i) {
    if (!(self.forms & headway::integers(GROUPS[i]))) continue;
    auto& form = self.integers[i];
    each(form.q, rows * stride_of(self.width));
    each(form.turned, rows * stride_of(self.width) * 2);
    for (auto* buffer : {&form.scale, &form.sum, &form.offset8, &form.offset6, &form.offset4}) {
      each(*buffer, (size_t)rows * ceil_div(self.width, GROUPS[i]) * 4);
    }
  }
}

void RowBuffer::fit(int rows) {
  each(*this, rows, [](Buffer& buffer, size_t bytes) { buffer.grow(bytes); });
}

size_t RowBuffer::bytes(int rows) const {
  size_t all = 0;
  each(*this, rows, [&](const Buffer&, size_t bytes) { all += bytes; });
  return all;
}

Activations Step::activations(int number, int group) const {
  const Value& value = values[number];
  const RowBuffer& buffer = buffers[value.buffer];
  Activations a;
  a.width = value.width;
  a.depth = (int)round_up(value.width, SMALLEST_GROUP);
  a.stride = stride_of(value.width);
  a.f32 = buffer.floats.as<float>();
  a.bf16 = buffer.bf16.as<uint16_t>();
  a.group = group;
  for (size_t i = 0; i < std::size(GROUPS); ++i) {
    if (GROUPS[i] != group) continue;
    a.q = buffer.integers[i].q.as<int8_t>();
    a.turned = buffer.integers[i].turned.as<uint8_t>();
    a.scale = buffer.integers[i].scale.as<float>();
    a.sum = buffer.integers[i].sum.as<float>();
    a.offset8 = buffer.integers[i].offset8.as<int32_t>();
    a.offset6 = buffer.integers[i].offset6.as<int32_t>();
    a.offset4 = buffer.integers[i].offset4.as<int32_t>();
  }
  return a;
}

void Step::convert(int value, int row, const float* x, int begin, int end, unsigned forms) const {
  if (forms & BF16) {
    Activations a = activations(value);
    engine.kernels.to_bf16(x, begin, end, a, row);
  }
  for (int group : GROUPS) {
    if (!(forms & integers(group))) continue;
    Activations a = activations(value, group);
    engine.kernels.quantise(x, begin, end, a, row);
  }
}

// ---- building

int Program::make(Axis axis, int width, int times) {
  Value value;
  value.axis = axis;
  value.times = times;
  value.width = width;
  value.producer = (int)ops_.size();
  values_.push_back(value);
  return (int)values_.size() - 1;
}

void Program::push(std::unique_ptr<Op> op, std::vector<int> uses) {
  for (int value : uses) {
    if (value >= 0) values_.at(value).last_use = (int)ops_.size();
  }
  ops_.push_back(std::move(op));
}

unsigned Program::wanted(const Matrix& m) const {
  if (m.quantised()) return integers(m.group);
  return m.storage == Storage::bf16 && engine_->kernels.bf16_dot ? BF16 : FLOATS;
}

// Make sure that a value exists in `forms`: a norm makes them along with its rows, other values are converted.
void Program::use(int number, unsigned forms) {
  Value& value = values_.at(number);
  const unsigned missing = forms & ~value.forms;
  if (!missing) return;
  const Op* producer = ops_.at(value.producer).get();
  value.forms |= missing;
  if (producer->makes_forms() || missing == FLOATS) return;
  value.forms |= FLOATS;
  auto op = std::make_unique<ConvertOp>();
  op->x = number;
  op->forms = missing & ~FLOATS;
  push(std::move(op), {number});
}

int Program::embed(Weights table, float scale, Weights positions) {
  need(!positions || positions->in == table->in, "embed: the positions are not as wide as the table");
  if (positions) most_positions_ = std::min(most_positions_, positions->out);
  auto op = std::make_unique<EmbedOp>();
  vocab_ = vocab_ == 0 ? table->out : std::min(vocab_, table->out);
  op->table = table;
  op->positions = positions;
  op->scale = scale;
  const int out = op->out = make(TOKENS, table->in);
  values_[out].forms = FLOATS;
  push(std::move(op), {});
  return out;
}

int Program::rms_norm(int x, Vector weight, float eps, int residual) {
  const Value in = values_.at(x);
  need(weight->width() > 0 && in.width % weight->width() == 0, "rms_norm: the input is not a whole number of the weight's width");
  use(x, FLOATS);
  if (residual >= 0) {
    const Value& added = values_.at(residual);
    need(added.width == in.width && added.axis == in.axis, "rms_norm: the residual's shape is not the input's");
    use(residual, FLOATS);
  }
  auto op = std::make_unique<NormOp>();
  op->x = x;
  op->residual = residual;
  op->parts = in.width / weight->width();
  op->weight = weight;
  op->eps = eps;
  const int out = op->out = make(in.axis, in.width);
  push(std::move(op), {x, residual});
  return out;
}

int Program::layer_norm(int x, Vector weight, Vector bias, float eps, int parts) {
  const Value in = values_.at(x);
  need(parts > 0 && in.width % parts == 0, "layer_norm: a row is not a whole number of parts");
  for (const Vector& v : {weight, bias}) {
    need(!v || v->width() == in.width || v->width() == in.width / parts, "layer_norm: a vector is no wide as a part nor as a row");
  }
  use(x, FLOATS);
  auto op = std::make_unique<NormOp>();
  op->x = x;
  op->parts = parts;
  op->centred = true;
  op->weight = weight;
  op->bias = bias;
  op->eps = eps;
  const int out = op->out = make(in.axis, in.width);
  push(std::move(op), {x});
  return out;
}

int Program::add_linear(int x, Weights weight, Vector bias, int residual, float scale, float softcap) {
  const Value in = values_.at(x);
  need(weight->in == in.width, "linear: the weight's inputs are not the input's width");
  need(!bias || bias->width() == weight->out, "linear: the bias is not as long as the weight has outputs");
  if (residual >= 0) {
    const Value& added = values_.at(residual);
    need(added.width == weight->out && added.axis == in.axis, "linear: the residual's shape is not the output's");
    use(residual, FLOATS);
  }
  use(x, wanted(*weight));
  // Layers of one input that follow each other become one operation, unless one adds what another makes.
  int at = (int)ops_.size() - 1;
  if (at > 0 && dynamic_cast<AdapterOp*>(ops_[at].get())) --at;  // it adds to the layers just before it
  LinearOp* last = at < 0 ? nullptr : dynamic_cast<LinearOp*>(ops_[at].get());
  if (last && (last->x != x || (residual >= 0 && values_[residual].producer == at))) last = nullptr;
  if (!last) {
    auto op = std::make_unique<LinearOp>();
    op->x = x;
    last = op.get();
    push(std::move(op), {});
    at = (int)ops_.size() - 1;
  }
  const int out = make(in.axis, weight->out);
  values_[out].producer = at;
  values_[out].forms = FLOATS;
  values_[x].last_use = std::max(values_[x].last_use, at);
  if (residual >= 0) values_[residual].last_use = std::max(values_[residual].last_use, at);
  last->parts.push_back({weight, bias, residual, out, scale, softcap, false});
  return out;
}

int Program::linear(int x, Weights weight, Vector bias, int residual) { return add_linear(x, weight, bias, residual, 0, 0); }

int Program::logits(int x, Weights head, float scale, float softcap, Vector bias) {
  need(values_.at(x).axis == LOGITS, "logits: the input must be logit rows");
  need(scale != 0, "logits: the scale must not be 0");
  return add_linear(x, head, bias, -1, scale, softcap);
}

int Program::gated_mlp(int x, Weights gate, Weights up, Weights down, Activation activation, int residual, Vector gate_bias,
                       Vector up_bias, Vector down_bias) {
  const Value in = values_.at(x);
  need(gate->in == in.width && up->in == in.width && up->out == gate->out && down->in == gate->out && down->out == in.width,
       "gated_mlp: the shapes of gate, up and down do not fit");
  for (const Vector& bias : {gate_bias, up_bias}) {
    need(!bias || bias->width() == gate->out, "gated_mlp: a bias is not as long as its weight has outputs");
  }
  use(x, wanted(*gate) | wanted(*up));
  auto op = std::make_unique<GateUpOp>();
  op->x = x;
  op->gate = gate;
  op->up = up;
  op->gate_bias = gate_bias;
  op->up_bias = up_bias;
  op->activation = activation;
  const int hidden = op->out = make(in.axis, gate->out);
  push(std::move(op), {x});
  return add_linear(hidden, down, down_bias, residual, 0, 0);
}

int Program::add_angles(const RopeTable& rope) {
  need(rope.longer.empty() || rope.longer.size() == rope.inv_freq.size(), "a rope has other pairs for long rows");
  for (int value : ropes_) {
    const auto* made = dynamic_cast<const AnglesOp*>(ops_[values_[value].producer].get());
    const RopeTable& known = made->rope;
    if (known.inv_freq == rope.inv_freq && known.magnitude == rope.magnitude && known.longer == rope.longer &&
        known.original == rope.original) {
      return value;
    }
  }
  auto op = std::make_unique<AnglesOp>();
  op->rope = rope;
  const int angles = op->out = make(TOKENS, 2 * (int)rope.inv_freq.size());
  values_[angles].forms = FLOATS;
  push(std::move(op), {});
  ropes_.push_back(angles);
  return angles;
}

int Program::rope_and_cache(int q, int k, int v, int layer, const RopeTable& rope) {
  const CacheGroup& group = engine_->groups[engine_->find(layer).first];
  const GroupLayout& layout = group.layout;
  for (int x : {q, k, v}) {
    need(values_.at(x).axis == TOKENS, "rope_and_cache: the inputs must have a row per token");
    use(x, FLOATS);
  }
  need(values_[k].width == layout.heads * layout.key_width, "rope_and_cache: k is not as wide as the cache's keys");
  need(values_[v].width == layout.heads * layout.value_width, "rope_and_cache: v is not as wide as the cache's values");
  need(values_[q].width % (layout.heads * layout.key_width) == 0, "rope_and_cache: q is not a whole number of heads per group");
  need(2 * (int)rope.inv_freq.size() <= layout.key_width, "rope_and_cache: more rotary pairs than a head has");
  const int angles = add_angles(rope);
  auto op = std::make_unique<RopeOp>();
  op->q = q;
  op->k = k;
  op->v = v;
  op->angles = angles;
  op->layer = layer;
  op->interleaved = rope.interleaved;
  const int out = op->out = make(TOKENS, values_[q].width);
  values_[out].forms = FLOATS;
  push(std::move(op), {q, k, v, angles});
  return out;
}

int Program::attention(int q, int layer, float scale, float softcap, Vector sinks) {
  const GroupLayout& layout = engine_->groups[engine_->find(layer).first].layout;
  need(values_.at(q).axis == TOKENS, "attention: the queries must have a row per token");
  need(values_[q].width % (layout.heads * layout.query_width()) == 0, "attention: q is not a whole number of heads per group");
  need(!sinks || sinks->width() == values_[q].width / layout.query_width(), "attention: sinks are not as many as query heads");
  use(q, FLOATS);
  auto op = std::make_unique<AttentionOp>();
  op->q = q;
  op->layer = layer;
  op->scale = scale;
  op->softcap = softcap;
  op->sinks = sinks;
  const int out = op->out = make(TOKENS, values_[q].width / layout.query_width() * layout.value_width);
  values_[out].forms = FLOATS;
  push(std::move(op), {q});
  return out;
}

int Program::all_reduce(int x) {
  if (!engine_->ranks) return x;
  use(x, FLOATS);
  auto op = std::make_unique<AllReduceOp>();
  op->x = x;
  push(std::move(op), {x});
  return x;
}

int Program::logit_rows(int x) { return gather(x, LOGITS); }

int Program::pool_rows(int x) { return gather(x, POOLED); }

int Program::gather(int x, Axis axis) {
  need(values_.at(x).axis == TOKENS, "logit_rows, pool_rows: the input must have a row per token");
  use(x, FLOATS);
  auto op = std::make_unique<GatherOp>();
  op->x = x;
  const int out = op->out = make(axis, values_[x].width);
  values_[out].forms = FLOATS;
  push(std::move(op), {x});
  return out;
}

void Program::pooled(int x) {
  need(values_.at(x).axis == POOLED && pooled_ < 0, "pooled: one value, made of pool_rows");
  use(x, FLOATS);
  pooled_ = x;
}

// Values get buffers of their width; a buffer is free again after the operation that last read its value.
void Program::finish(int result) {
  need(values_.at(result).axis == LOGITS, "the result must be logit rows");
  use(result, FLOATS);
  result_ = result;
  auto summary = std::make_unique<SummaryOp>();
  summary->x = result;
  summary->tiles_made = false;
  if (auto* linear = dynamic_cast<LinearOp*>(ops_.at(values_[result].producer).get())) {
    for (LinearOp::Part& part : linear->parts) part.summarised = part.out == result;
    summary->tiles_made = true;
  }
  push(std::move(summary), {result});
  values_[result].last_use = (int)ops_.size();
  if (pooled_ >= 0) values_[pooled_].last_use = (int)ops_.size();
  std::vector<int> free;
  for (int op = 0; op < (int)ops_.size(); ++op) {
    for (Value& value : values_) {
      if (value.producer != op) continue;
      const auto fits = std::find_if(free.begin(), free.end(), [&](int b) { return buffers_[b].width == value.width; });
      if (fits != free.end()) {
        value.buffer = *fits;
        free.erase(fits);
      } else {
        value.buffer = (int)buffers_.size();
        buffers_.emplace_back();
        buffers_.back().width = value.width;
      }
      buffers_[value.buffer].forms |= value.forms;
    }
    for (const Value& value : values_) {
      if (value.buffer >= 0 && std::max(value.last_use, value.producer) == op) free.push_back(value.buffer);
    }
  }
  for (int i = 0; i < engine_->team.threads(); ++i) scratch_.emplace_back();
}

// ---- running

void Program::check(const BatchView& batch) const {
  need(result_ >= 0, "the program is not finished");
  need(batch.groups.size() == engine_->groups.size(), "the batch has another number of cache groups than the cache");
  need(batch.query_start[0] == 0 && batch.query_start[batch.rows] == batch.tokens, "query_start must run from 0 to the number of tokens");
  for (int t = 0; t < batch.tokens; ++t) {
    need(batch.ids[t] >= 0 && batch.ids[t] < vocab_, "a token id is outside the vocabulary");
    need(batch.positions[t] < most_positions_, "a position has no embedding");
  }
  for (int r = 0; r < batch.rows; ++r) need(batch.adapter[r] >= 0 && batch.adapter[r] <= adapters_, "a row's adapter is none of the program's");
  for (int r = 0; r < batch.logit_rows; ++r) {
    need(batch.logit_index[r] >= 0 && batch.logit_index[r] < batch.tokens, "logit_index points outside the tokens");
  }
  need(batch.pooled_rows == 0 || pooled_ >= 0, "the program pools nothing");
  need(batch.pooled_rows <= batch.tokens, "more rows are pooled than there are tokens");
  for (int r = 0; r < batch.pooled_rows; ++r) {
    need(batch.pool_index[r] >= 0 && batch.pool_index[r] < batch.tokens, "pool_index points outside the tokens");
  }
  for (size_t g = 0; g < batch.groups.size(); ++g) {
    const GroupLayout& layout = engine_->groups[g].layout;
    const BatchView::Group& group = batch.groups[g];
    const int64_t slots = (int64_t)layout.blocks * engine_->block_size;
    for (int t = 0; t < batch.tokens; ++t) need(group.slots[t] >= 0 && group.slots[t] < slots, "a slot is outside the cache");
    for (int r = 0; r < batch.rows; ++r) {
      const int begin = batch.query_start[r], end = batch.query_start[r + 1];
      need(begin <= end, "query_start must not decrease");
      if (begin == end) continue;
      for (int t = begin + 1; t < end; ++t) need(batch.positions[t] > batch.positions[t - 1], "positions of a row must increase");
      need(batch.positions[begin] >= 0, "a position is negative");
      const int low = layout.window > 0 ? std::max(0, batch.positions[begin] - layout.window + 1) : 0;
      const int last = batch.positions[end - 1] / engine_->block_size;
      need(last < group.max_blocks, "a block table is too short for a position");
      for (int b = low / engine_->block_size; b <= last; ++b) {
        const int block = group.table[(size_t)r * group.max_blocks + b];
        need(block >= 0 && block < layout.blocks, "a block table names a block outside the cache");
      }
    }
  }
}

// With few rows, memory decides; it would be idle while the threads compute something small or wait for each other.
void Program::look_ahead(const Step& step, size_t op, Worker& worker) const {
  constexpr size_t FAR = 2, MOST_BYTES = 48 << 10;
  constexpr int FEW_ROWS = 12;
  worker.ahead_bytes = 0;
  for (size_t next = op + 1; next <= op + FAR && next < ops_.size(); ++next) {
    const int rows = ops_[next]->input() < 0 ? 0 : step.rows(ops_[next]->input());
    if (rows == 0) continue;
    if (rows > FEW_ROWS) return;
    const auto [memory, bytes] = ops_[next]->first_read(worker.id, engine_->team.threads(), rows);
    worker.ahead = memory;
    worker.ahead_bytes = std::min(bytes, MOST_BYTES);
    return;
  }
}

int Program::query_heads_per_kv(size_t group) const {
  const GroupLayout& layout = engine_->groups[group].layout;
  int per_head = 1;
  for (const auto& op : ops_) {
    const auto* attention = dynamic_cast<const AttentionOp*>(op.get());
    if (!attention || engine_->find(attention->layer).first != (int)group) continue;
    per_head = std::max(per_head, values_[attention->q].width / layout.query_width() / layout.heads);
  }
  return per_head;
}

size_t Program::step_bytes(int tokens, int rows, int logit_rows, int64_t cached) const {
  need(result_ >= 0, "the program is not finished");
  std::vector<int> most(buffers_.size(), 0);
  size_t scratch = LINEAR_SCRATCH, partials = 0;
  for (const Value& value : values_) {
    most[value.buffer] = std::max(most[value.buffer], value.times * (value.axis == LOGITS ? logit_rows : tokens));
    scratch = std::max(scratch, value.width * sizeof(float));
  }
  size_t all = LogitSummary::bytes(logit_rows, result_width());
  for (size_t i = 0; i < buffers_.size(); ++i) all += buffers_[i].bytes(most[i]);
  for (size_t g = 0; g < engine_->groups.size(); ++g) {
    const Cache& cache = engine_->groups[g].caches[0];
    const int per_head = query_heads_per_kv(g);
    const int64_t ranges = cached / (split_blocks(cache) * cache.block_size) + rows;
    scratch = std::max(scratch, attention_scratch(cache, most_query_rows(cache, per_head, tokens)));
    partials = std::max(partials, ranges * cache.heads * partial_floats(cache, per_head) * sizeof(float));
  }
  for (const auto& op : ops_) scratch = std::max(scratch, op->scratch(std::max(tokens, logit_rows)));
  size_t slots = 0;
  for (const Router& router : routed_) slots = std::max(slots, (size_t)std::max(tokens, logit_rows) * router.active);
  all += scratch * engine_->team.threads() + partials + low_rank_floats(tokens) * sizeof(float) + Routed::bytes((int)slots);
  return all + all / 4;  // `Buffer::grow` takes more than it was asked for
}

LogitRows Program::run(const BatchView& batch) {
  check(batch);
  touched_.assign(routed_.size(), 0);
  Step step{*engine_, batch, values_, buffers_, {}, nullptr, partials_, summary_, low_rank_, adapter_runs(batch),
            slots_.get(), touched_.data()};
  for (size_t i = 0; i < values_.size(); ++i) buffers_[values_[i].buffer].fit(step.rows((int)i));
  summary_.fit(batch.logit_rows, result_width());
  for (const Router& router : routed_) slots_->fit(step.rows(router.numbers) * router.active);
  if (!step.adapter_runs.empty()) low_rank_.grow(low_rank_floats(batch.tokens) * sizeof(float));
  size_t counters = 0, partials = 0;
  for (size_t g = 0; g < engine_->groups.size(); ++g) {
    const CacheGroup& group = engine_->groups[g];
    step.attention.push_back(
        plan_attention(batch, group.caches[0], group.layout.window, query_heads_per_kv(g), engine_->team.threads()));
    counters = std::max(counters, (size_t)step.attention.back().counters);
    partials = std::max(partials, step.attention.back().partial_floats);
  }
  step.done = std::make_unique<std::atomic<int>[]>(counters);
  partials_.grow(partials * sizeof(float));

  std::vector<double> spent(ops_.size());
  engine_->team.run([&](int id) {
    Worker worker{id, 0, &scratch_[id]};
    auto before = std::chrono::steady_clock::now();
    for (size_t i = 0; i < ops_.size(); ++i) {
      look_ahead(step, i, worker);
      ops_[i]->run(step, worker);
      if (id == 0) {
        const auto now = std::chrono::steady_clock::now();
        spent[i] = std::chrono::duration<double>(now - before).count();
        before = now;
      }
    }
  });
  seconds_.clear();
  for (size_t i = 0; i < ops_.size(); ++i) {
    const std::string name = ops_[i]->name();
    auto at = std::find_if(seconds_.begin(), seconds_.end(), [&](const auto& kind) { return kind.first == name; });
    if (at == seconds_.end()) at = seconds_.insert(at, {name, 0.0});
    at->second += spent[i];
  }
  return {batch.logit_rows, result_width(), step.floats(result_), summary_.peaks.as<float>(), summary_.logsumexp.as<double>()};
}

}  // namespace headway
