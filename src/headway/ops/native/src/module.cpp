// The Python module. Arrays are passed without copies; the interpreter is free while a step or a packing runs.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <stdexcept>

#include "adapter.h"
#include "ops_experts.h"
#include "replica.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace headway {
namespace {

template <class T, int N>
using Array = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

Weights pack_matrices(Engine& engine, const std::vector<Array<uint8_t, 1>>& data, const std::string& format, int out, int in,
                      const std::string& target, int group) {
  std::vector<const uint8_t*> each;
  for (const auto& matrix : data) {
    if (matrix.size() != data[0].size()) throw std::invalid_argument("the matrices of a stack differ in length");
    each.push_back(matrix.data());
  }
  nb::gil_scoped_release release;
  return std::make_shared<Matrix>(pack(each, data.empty() ? 0 : data[0].size(), format, out, in, target, group, engine.for_each()));
}

// What was packed before, from a file at `offset`; none if it is damaged. Only weights that were quantised at load.
Weights read_matrix(Engine& engine, int file, size_t offset, const std::string& target, int group, int count, int out, int in,
                    float unit, uint64_t checksum) {
  nb::gil_scoped_release release;
  auto m = std::make_shared<Matrix>();
  m->storage = target == "int8" ? Storage::int8 : Storage::int4;
  m->group = group;
  m->count = count;
  m->out = out;
  m->in = in;
  m->unit = unit;
  m->lay_out();
  return m->read(file, offset, checksum, engine.for_each()) ? m : nullptr;
}

uint64_t checksum(Engine& engine, const Matrix& m) {
  nb::gil_scoped_release release;
  return m.checksum(engine.for_each());
}

nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>> data_of(nb::object self) {
  const Matrix& m = nb::cast<const Matrix&>(self);
  return {m.data.as(), {m.bytes()}, self};
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> unpack(const Matrix& m) {
  const int rows = m.count * m.out;
  auto* floats = new std::vector<float>((size_t)rows * m.in);
  nb::capsule owner(floats, [](void* p) noexcept { delete static_cast<std::vector<float>*>(p); });
  for (int n = 0; n < rows; ++n) m.unpack_row(n, floats->data() + (size_t)n * m.in);
  return {floats->data(), {(size_t)rows, (size_t)m.in}, owner};
}

template <class T, int N>
using Result = nb::ndarray<nb::numpy, T, nb::ndim<N>>;
// Rows, peaks and logsumexp of logits; hidden states of the rows that are pooled.
using Logits = std::tuple<Result<float, 2>, Result<float, 2>, Result<double, 1>, Result<float, 2>>;

Logits run(Program& program, Array<int32_t, 1> ids, Array<int32_t, 1> positions, Array<int32_t, 1> query_start,
           Array<int32_t, 1> known, Array<int32_t, 1> logit_index, std::vector<Array<int32_t, 2>> tables,
           std::vector<Array<int64_t, 1>> slots, Array<int32_t, 1> adapter, Array<int32_t, 1> pool_index) {
  if (positions.size() != ids.size()) throw std::invalid_argument("positions must be as many as ids");
  if (query_start.size() != known.size() + 1) throw std::invalid_argument("query_start must hold one more than known");
  if (adapter.size() != known.size()) throw std::invalid_argument("adapter must be as many as known");
  if (tables.size() != slots.size()) throw std::invalid_argument("block tables and slots must be as many");
  BatchView batch{(int)ids.size(), (int)known.size(), (int)logit_index.size(), (int)pool_index.size(), ids.data(),
                  positions.data(), query_start.data(), known.data(), logit_index.data(), pool_index.data(),
                  adapter.data(), {}};
  for (size_t g = 0; g < tables.size(); ++g) {
    if (slots[g].size() != ids.size()) throw std::invalid_argument("slots must be as many as ids");
    if (tables[g].shape(0) != known.size()) throw std::invalid_argument("a block table must have a line per row");
    batch.groups.push_back({tables[g].data(), (int)tables[g].shape(1), slots[g].data()});
  }
  LogitRows result;
  {
    nb::gil_scoped_release release;
    result = program.run(batch);
  }
  const size_t rows = result.rows, vocab = result.vocab, tiles = ceil_div(vocab, TILE);
  const nb::object owner = nb::find(program);
  return {{const_cast<float*>(result.logits), {rows, vocab}, owner},
          {const_cast<float*>(result.peaks), {rows, tiles}, owner},
          {const_cast<double*>(result.logsumexp), {rows}, owner},
          {const_cast<float*>(program.pooled_floats()), {pool_index.size(), (size_t)program.pooled_width()}, owner}};
}

void draw_tokens(Engine& engine, Array<float, 2> rows, Array<float, 2> peaks, Array<double, 1> logsumexp,
                 Array<int32_t, 1> slots, Array<int32_t, 1> draw_rows, Array<int32_t, 1> positions,
                 Array<float, 1> temperature, Array<int32_t, 1> top_k, Array<double, 1> top_p, Array<float, 1> min_p,
                 Array<uint64_t, 1> seed, Array<int32_t, 1> choice,
                 nb::ndarray<int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu> tokens) {
  const size_t count = slots.size(), capacity = temperature.size();
  const bool fits = peaks.shape(0) == rows.shape(0) && logsumexp.size() == rows.shape(0) && rows.shape(1) > 0 &&
                    peaks.shape(1) == (size_t)ceil_div(rows.shape(1), TILE) && draw_rows.size() == count &&
                    positions.size() == count && tokens.size() == count && top_k.size() == capacity && top_p.size() == capacity &&
                    min_p.size() == capacity && seed.size() == capacity && choice.size() == capacity;
  if (!fits) throw std::invalid_argument("the arrays of the draws do not fit together");
  const LogitRows logits{(int)rows.shape(0), (int)rows.shape(1), rows.data(), peaks.data(), logsumexp.data()};
  const Draws draws{(int)count,       (int)capacity, slots.data(), draw_rows.data(), positions.data(), temperature.data(),
                    top_k.data(), top_p.data(),  min_p.data(), seed.data(),      choice.data()};
  nb::gil_scoped_release release;
  engine.draw(logits, draws, tokens.data());
}

template <class T, int N>
using Changed = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

void mask_logits(Engine& engine, Changed<float, 2> rows, Changed<float, 2> peaks, Array<int32_t, 1> numbers,
                 Array<uint32_t, 2> masks) {
  const size_t vocab = rows.shape(1), tiles = peaks.shape(1), words = masks.shape(1);
  const bool fits = masks.shape(0) == numbers.size() && peaks.shape(0) == rows.shape(0) && tiles == (size_t)ceil_div(vocab, TILE);
  if (!fits) throw std::invalid_argument("the arrays of the masks do not fit together");
  for (size_t i = 0; i < numbers.size(); ++i) {
    if (numbers.data()[i] < 0 || (size_t)numbers.data()[i] >= rows.shape(0)) throw std::invalid_argument("a mask is of no row");
  }
  nb::gil_scoped_release release;
  engine.team.for_each((int)numbers.size(), [&](int i) {
    const size_t row = numbers.data()[i];
    mask(rows.data() + row * vocab, peaks.data() + row * tiles, (int)vocab, masks.data() + i * words, (int)words);
  });
}

// Bytes per second of reading `bytes` of memory with all threads: the median of `rounds`.
double probe_bandwidth(Engine& engine, size_t bytes, int rounds) {
  nb::gil_scoped_release release;
  const size_t piece = 2u << 20;
  const int pieces = (int)most(1, bytes / piece);
  Buffer memory((size_t)pieces * piece);
  engine.team.for_each(pieces, [&](int i) { memset(memory.as(i * piece), 1, piece); });
  std::vector<double> times;
  for (int round = 0; round < rounds; ++round) {
    const auto start = std::chrono::steady_clock::now();
    std::atomic<double> sink{0};
    engine.team.for_each(pieces, [&](int i) { sink = engine.kernels.probe_read(memory.as(i * piece), piece); });
    times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(times.begin(), times.end());
  return pieces * (double)piece / times[times.size() / 2];
}

// Operations (a multiply and an add are two) per second of all threads. kind: "fp32", "bf16" or "int8".
double probe_compute(Engine& engine, const std::string& kind, double seconds) {
  const int number = kind == "fp32" ? 0 : kind == "bf16" ? 1 : kind == "int8" ? 2 : -1;
  if (number < 0) throw std::invalid_argument("kind must be fp32, bf16 or int8");
  nb::gil_scoped_release release;
  constexpr long ROUNDS = 100000;
  const double per_round = 12.0 * 2 * engine.kernels.probe_lanes * (1 << number);
  long done = 0;
  std::atomic<double> sink{0};
  volatile int opaque = 1;
  const auto start = std::chrono::steady_clock::now();
  double elapsed = 0;
  for (; elapsed < seconds; ++done) {
    engine.team.for_each(engine.team.threads() * 4, [&](int) { sink = engine.kernels.probe_dot(number, ROUNDS, opaque); });
    elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  return (double)done * engine.team.threads() * 4 * ROUNDS * per_round / elapsed;
}

nb::object as_array(std::vector<int64_t>&& values) {
  auto* kept = new std::vector<int64_t>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<int64_t>*>(p); });
  return nb::cast(nb::ndarray<nb::numpy, int64_t, nb::ndim<1>>(kept->data(), {kept->size()}, owner));
}

nb::dict play(const ReplicaSetup& setup, const Array<int64_t, 1>& at, const Array<int64_t, 1>& prompt, const Array<int64_t, 1>& output,
              const Array<int64_t, 1>& max_len, const Array<uint8_t, 1>& refused, const Array<uint8_t, 1>& detailed, int64_t open,
              int64_t think, StepPrices& prices, Look look) {
  const auto same = [&](size_t size) { return size == prompt.size(); };
  if (!same(output.size()) || !same(max_len.size()) || !same(refused.size()) || !same(detailed.size()) ||
      (int64_t)at.size() < std::min<int64_t>(open, prompt.size())) {
    throw std::invalid_argument("the columns of a load differ in length");
  }
  const auto column = [](const auto& array) { return std::vector(array.data(), array.data() + array.size()); };
  const PlainLoad load{column(at), column(prompt), column(output), column(max_len), column(refused), column(detailed), open, think};
  PlainOutcome out = PlainReplica(setup, load, prices, std::move(look)).play();
  nb::dict found;
  found["at"] = as_array(std::move(out.at));
  found["admitted"] = as_array(std::move(out.admitted));
  found["first"] = as_array(std::move(out.first));
  found["last"] = as_array(std::move(out.last));
  found["tokens"] = as_array(std::move(out.tokens));
  found["ended"] = as_array(std::move(out.ended));
  found["preemptions"] = as_array(std::move(out.preemptions));
  found["how"] = as_array(std::move(out.how));
  nb::list times;
  for (auto& each : out.times) times.append(as_array(std::move(each)));
  found["times"] = times;
  found["totals"] = nb::make_tuple(out.steps, out.step_tokens, out.step_rows, out.busy, out.end);
  return found;
}

}  // namespace
}  // namespace headway

NB_MODULE(_native, m) {
  using namespace headway;
  nb::set_leak_warnings(false);  // a process that is told to stop ends with its model loaded
  m.doc() = "Headway's native CPU kernels. Use headway.ops.native.";

  nb::class_<ReplicaSetup>(m, "ReplicaSetup")
      .def(
          "__init__",
          [](ReplicaSetup* s, int64_t block_size, int64_t blocks, int64_t max_rows, int64_t max_tokens_per_step,
             int64_t max_model_len, int64_t step_tokens, int64_t prompt_tokens, bool shortest_first, bool headroom,
             int64_t strict_after, int64_t idle_step) {
            new (s) ReplicaSetup{block_size,    blocks,         max_rows, max_tokens_per_step, max_model_len, step_tokens,
                                 prompt_tokens, shortest_first, headroom, strict_after,        idle_step};
          },
          nb::kw_only(), "block_size"_a, "blocks"_a, "max_rows"_a, "max_tokens_per_step"_a, "max_model_len"_a, "step_tokens"_a,
          "prompt_tokens"_a, "shortest_first"_a, "headroom"_a, "strict_after"_a, "idle_step"_a);
  m.def("play", &play, "setup"_a, nb::kw_only(), "at"_a, "prompt"_a, "output"_a, "max_len"_a, "refused"_a, "detailed"_a, "open"_a,
        "think"_a, "prices"_a, "look"_a);

  nb::class_<StepPrices>(m, "StepPrices")
      .def(
          "__init__",
          [](StepPrices* s, AskStep ask, std::optional<std::function<Array<int64_t, 1>(int64_t, int64_t, int64_t)>> steady) {
            if (!steady) {
              new (s) StepPrices(std::move(ask), nullptr);
              return;
            }
            new (s) StepPrices(std::move(ask), [steady = std::move(*steady)](int64_t rows, int64_t first, int64_t count) {
              const auto prices = steady(rows, first, count);
              return std::vector(prices.data(), prices.data() + prices.size());
            });
          },
          "ask"_a, "steady"_a = nb::none())
      .def("__call__", &StepPrices::operator());

  nb::class_<Matrix>(m, "Matrix")
      .def_prop_ro("shape", [](const Matrix& w) { return std::make_pair(w.out, w.in); })
      .def_prop_ro("nbytes", &Matrix::bytes)
      .def_prop_ro("data", &data_of)
      .def_ro("unit", &Matrix::unit)
      .def_ro("finite", &Matrix::finite)
      .def("unpack", &unpack);

  nb::class_<DenseVector>(m, "Vector")
      .def("__init__", [](DenseVector* v, Array<float, 1> x) { new (v) DenseVector{{x.data(), x.data() + x.size()}}; })
      .def_prop_ro("shape", [](const DenseVector& v) { return nb::make_tuple(v.width()); });

  nb::class_<GroupLayout>(m, "GroupLayout")
      .def(nb::init<std::vector<int>, int, int, int, int, int, bool>(), "layers"_a, "heads"_a, "key_width"_a, "value_width"_a,
           "window"_a, "blocks"_a, "latent"_a = false);

  nb::enum_<CacheFormat>(m, "CacheFormat")
      .value("f32", CacheFormat::f32)
      .value("bf16", CacheFormat::bf16)
      .value("int8", CacheFormat::int8);

  nb::class_<Ranks>(m, "Ranks")
      .def(nb::init<int, int, int, int>(), "file"_a, "rank"_a, "ranks"_a, "threads"_a)
      .def_static("bytes", &Ranks::bytes, "ranks"_a, "threads"_a)
      .def(
          "all_reduce",
          [](Ranks& ranks, Changed<float, 1> x, int worker) {
            if (worker < 0 || worker >= ranks.threads()) throw std::invalid_argument("no such worker");
            ranks.all_reduce(x.data(), x.size(), worker);
          },
          "x"_a, "worker"_a = 0, nb::call_guard<nb::gil_scoped_release>())
      .def("tell", [](Ranks& ranks, nb::bytes message) {
        nb::gil_scoped_release release;
        ranks.tell(static_cast<const uint8_t*>(message.data()), message.size());
      })
      .def("hear", [](Ranks& ranks) {
        std::string message;
        {
          nb::gil_scoped_release release;
          message = ranks.hear();
        }
        return nb::bytes(message.data(), message.size());
      })
      .def("leave", &Ranks::leave);

  nb::class_<Engine>(m, "Engine")
      .def(nb::init<int, std::string, CacheFormat>(), "threads"_a, "kernels"_a = "", "cache"_a = CacheFormat::bf16)
      .def_prop_ro("kernels", [](const Engine& e) { return e.kernels.name; })
      .def_prop_ro("threads", [](const Engine& e) { return e.team.threads(); })
      .def("pack", &pack_matrices, "data"_a, "format"_a, "out"_a, "in"_a, "target"_a = "", "group"_a = 0)
      .def("read", &read_matrix, "file"_a, "offset"_a, "target"_a, "group"_a, "count"_a, "out"_a, "in"_a, "unit"_a, "checksum"_a)
      .def("checksum", &checksum, "matrix"_a)
      .def("join", [](Engine& e, std::shared_ptr<Ranks> ranks) {
        if (ranks->threads() != e.team.threads()) throw std::invalid_argument("every rank computes on as many threads");
        e.ranks = std::move(ranks);
      })
      .def("allocate", &Engine::allocate, "groups"_a, "block_size"_a)
      .def("block_bytes", &Engine::block_bytes, "group"_a, "block_size"_a)
      .def("copy_blocks", &Engine::copy_blocks, "group"_a, "pairs"_a)
      .def("read_block", [](Engine& e, int group, int block, Changed<uint8_t, 1> to) {
        e.read_block(group, block, to.data(), to.size());
      })
      .def("write_block", [](Engine& e, int group, int block, Array<uint8_t, 1> from) {
        e.write_block(group, block, from.data(), from.size());
      })
      .def("draw", &draw_tokens)
      .def("mask", &mask_logits)
      .def("probe_bandwidth", &probe_bandwidth, "bytes"_a, "rounds"_a)
      .def("probe_compute", &probe_compute, "kind"_a, "seconds"_a);

  nb::class_<RopeTable>(m, "Rope")
      .def("__init__", [](RopeTable* rope, std::vector<float> inv_freq, bool interleaved, float magnitude,
                          std::vector<float> longer, int original) {
        new (rope) RopeTable{std::move(inv_freq), interleaved, magnitude, std::move(longer), original};
      });

  nb::enum_<Activation>(m, "Activation").value("silu", Activation::silu).value("gelu_tanh", Activation::gelu_tanh)
      .value("gelu", Activation::gelu).value("relu", Activation::relu).value("relu2", Activation::relu2);

  nb::class_<AdapterSlots>(m, "AdapterSlots")
      .def(nb::init<int, int, int, int>(), "out"_a, "inputs"_a, "count"_a, "most_rank"_a)
      .def("put", &AdapterSlots::put)
      .def("clear", &AdapterSlots::clear);

  nb::class_<Routing>(m, "Routing")
      .def(nb::init<int, bool, bool, float, int, int, int>(), "active"_a, "sigmoid"_a, "renormalise"_a, "scale"_a, "groups"_a,
           "kept_groups"_a, "merit"_a);

  nb::class_<Program>(m, "Program")
      .def(nb::init<std::shared_ptr<Engine>>())
      .def("embed", &Program::embed, "table"_a, "scale"_a, "positions"_a.none())
      .def("rms_norm", &Program::rms_norm)
      .def("linear", &Program::linear, "x"_a, "weight"_a, "bias"_a.none(), "residual"_a)
      .def("rope_and_cache", &Program::rope_and_cache)
      .def("attention", &Program::attention, "q"_a, "layer"_a, "scale"_a, "softcap"_a, "sinks"_a.none())
      .def("gated_mlp", &Program::gated_mlp, "x"_a, "gate"_a, "up"_a, "down"_a, "activation"_a, "residual"_a,
           "gate_bias"_a.none(), "up_bias"_a.none(), "down_bias"_a.none())
      .def("add_low_rank", &Program::add_low_rank)
      .def("layer_norm", &Program::layer_norm, "x"_a, "weight"_a, "bias"_a.none(), "eps"_a, "parts"_a)
      .def("gated", &Program::gated)
      .def(
          "experts",
          [](Program& program, int x, Weights router, Weights gate, Weights up, Weights down, const Routing& routing,
             Activation activation, float alpha, float limit, Vector router_bias, Vector correction, Vector gate_bias,
             Vector up_bias, Vector down_bias, int residual) {
            return program.experts(x, router, gate, up, down, routing, activation, alpha, limit,
                                   {router_bias, correction, gate_bias, up_bias, down_bias}, residual);
          },
          "x"_a, "router"_a, "gate"_a, "up"_a, "down"_a, "routing"_a, "activation"_a, "alpha"_a, "limit"_a,
          "router_bias"_a.none(), "correction"_a.none(), "gate_bias"_a.none(), "up_bias"_a.none(), "down_bias"_a.none(),
          "residual"_a)
      .def("sigmoid_gate", &Program::sigmoid_gate)
      .def("latent_attention", &Program::latent_attention)
      .def("all_reduce", &Program::all_reduce)
      .def("logit_rows", &Program::logit_rows)
      .def("pool_rows", &Program::pool_rows)
      .def("pooled", &Program::pooled)
      .def("logits", &Program::logits, "x"_a, "head"_a, "scale"_a, "softcap"_a, "bias"_a.none())
      .def("finish", &Program::finish)
      .def("step_bytes", &Program::step_bytes, "tokens"_a, "rows"_a, "logit_rows"_a, "cached"_a)
      .def("run", &run)
      .def_prop_ro("touched", &Program::touched)
      .def_prop_ro("seconds", &Program::seconds);
}
