// A family's forward pass as a list of operations, and the machine that runs a step of it.
//
//   Engine    kernels, team, caches: what a backend owns
//   Program   operations over values; built once, run per step by all threads together, operation by operation
//   Step      what changes from step to step, and where each value lies during it
#pragma once

#include <climits>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.h"
#include "ranks.h"
#include "sampling.h"
#include "team.h"

namespace headway {

// Layers that share block ids; mirrors KVGroup.
struct GroupLayout {
  std::vector<int> layers;
  int heads, key_width, value_width;
  int window;  // 0 = none
  int blocks;
  bool latent;  // keys are a latent vector as wide as values, which also is the value, and a rotary part of key_width

  int query_width() const { return latent ? value_width + key_width : key_width; }
};

struct CacheGroup {
  GroupLayout layout;
  std::vector<Cache> caches;  // per layer of the group
  std::vector<Buffer> memory;
};

// Logits of several rows and their summary, as arrays of headway/sampling/logits.py.
struct LogitRows {
  int rows, vocab;
  const float *logits, *peaks;
  const double* logsumexp;
};

// Draws from rows of logits, with the parameters in the slots of a table: headway/sampling/table.py.
struct Draws {
  int count, capacity;
  const int32_t *slots, *rows, *positions;  // [count]
  const float* temperature;                 // [capacity], as the others
  const int32_t* top_k;
  const double* top_p;
  const float* min_p;
  const uint64_t* seed;
  const int32_t* choice;
};

class Engine {
 public:
  Engine(int threads, const std::string& kernels, CacheFormat cache_format);

  void allocate(const std::vector<GroupLayout>& groups, int block_size);
  // What `allocate` takes for one block of a group.
  size_t block_bytes(const GroupLayout& group, int block_size) const;
  void copy_blocks(int group, const std::vector<std::pair<int, int>>& pairs);
  // A block of every layer of a group, one after another, keys before values: out of the cache and back into it.
  // Throws std::invalid_argument: no such block, or `size` is not its bytes.
  void read_block(int group, int block, uint8_t* to, size_t size);
  void write_block(int group, int block, const uint8_t* from, size_t size);
  // (group, index within the group) of a layer. Throws std::invalid_argument.
  std::pair<int, int> find(int layer) const;
  ForEach for_each();
  // A token per draw, or what `draw` says instead of one.
  void draw(const LogitRows& logits, const Draws& draws, int32_t* tokens);

  const Kernels& kernels;
  const CacheFormat cache_format;
  Team team;
  std::shared_ptr<Ranks> ranks;  // null: this process computes alone
  int block_size = 0;
  std::vector<CacheGroup> groups;

 private:
  template <class Each>
  void each_chunk(int group, int block, size_t size, Each&& each);

  std::vector<DrawMemory> draw_memory_;  // per worker
};

// Forms in which a value's rows are wanted.
enum Form : unsigned { FLOATS = 1, BF16 = 2 };  // and one flag per group of integers: 4, 8, 16, 32
HW_INLINE unsigned integers(int group) { return group / 4; }

// What a value has rows for: tokens of the step, those whose logits are wanted, those whose hidden states are.
enum Axis { TOKENS, LOGITS, POOLED };

struct Value {
  Axis axis;
  int times;  // rows for each of those
  int width;
  unsigned forms = 0;
  int buffer = -1;
  int producer = -1, last_use = -1;  // operations
};

struct BatchView {  // mirrors StepBatch; all arrays outlive the step
  int tokens, rows, logit_rows, pooled_rows;
  const int32_t *ids, *positions, *query_start, *known, *logit_index, *pool_index, *adapter;
  struct Group {
    const int32_t* table;  // [rows][max_blocks]
    int max_blocks;
    const int64_t* slots;  // [tokens]
  };
  std::vector<Group> groups;

  int along(Axis axis) const { return axis == TOKENS ? tokens : axis == LOGITS ? logit_rows : pooled_rows; }
};

// A share of attention: some queries and key/value heads of a row, over all they see or over one range of it.
struct AttentionItem {
  int row, first, queries;  // first: token index
  int head, heads;
  int split = -1;           // range of the cache, or -1: all ranges, in order
  int first_split = 0, splits = 0;  // ranges that the queries see
  size_t partial = 0;       // where the first range's sums lie, in floats; the next range's lie behind
  int done = 0;             // counter of the ranges done
};

struct AttentionPlan {
  std::vector<AttentionItem> items;
  size_t partial_floats = 0;
  int counters = 0;
  int most_rows = 0;  // query rows of an item
};

struct AdapterRun {  // consecutive tokens of rows with the same adapter
  int number, first, count;
};

struct Step;

struct Worker {
  int id;
  int phase = 0;
  Buffer* scratch;
  const uint8_t* ahead = nullptr;  // weights this worker will read soon; fetched before it waits for the others
  size_t ahead_bytes = 0;
};

struct Op {
  virtual ~Op() = default;
  virtual const char* name() const = 0;
  virtual void run(Step& step, Worker& worker) const = 0;
  // What this operation will read first on a worker, given how many rows it has; (null, 0) if that is not much.
  virtual std::pair<const uint8_t*, size_t> first_read(int /*worker*/, int /*threads*/, int /*rows*/) const { return {nullptr, 0}; }
  virtual int input() const { return -1; }  // the value whose rows it computes with
  virtual bool makes_forms() const { return false; }  // its output's rows in any form, not as floats only
  virtual size_t scratch(int /*rows*/) const { return 0; }  // bytes per worker, beyond LINEAR_SCRATCH and a row
};

// Memory of one value's rows, in all the forms that a value which lies there is wanted in.
struct RowBuffer {
  int width = 0;
  unsigned forms = 0;
  Buffer floats, bf16;
  struct Integers {
    Buffer q, turned, scale, sum, offset8, offset6, offset4;
  } integers[std::size(GROUPS)];
  void fit(int rows);
  size_t bytes(int rows) const;  // what `fit` takes

 private:
  template <class Self, class Each>
  static void each(Self& self, int rows, Each&& each);  // each(buffer, bytes)
};

// Of a step's logits, tile by tile and row by row.
struct LogitSummary {
  int tiles = 0;
  Buffer peaks, sums;  // float [rows][tiles]
  Buffer logsumexp;    // double [rows]
  void fit(int rows, int vocab);
  static size_t bytes(int rows, int vocab);  // what `fit` takes
  // The tiles of logits [column, column + n) of a row; column: multiple of TILE.
  void add(const Kernels& kernels, int row, int column, const float* logits, int n);
};

struct Routed;
struct Routing;

struct Step {
  Engine& engine;
  const BatchView& batch;
  const std::vector<Value>& values;
  std::vector<RowBuffer>& buffers;
  std::vector<AttentionPlan> attention;  // per cache group
  std::unique_ptr<std::atomic<int>[]> done;
  Buffer& partials;
  LogitSummary& summary;
  Buffer& low_rank;
  std::vector<AdapterRun> adapter_runs;
  Routed* routed;  // of the last router
  int* touched;    // experts with rows, per router

  int rows(int value) const { return values[value].times * batch.along(values[value].axis); }
  float* floats(int value) const { return buffers[values[value].buffer].floats.as<float>(); }
  Activations activations(int value, int group = 0) const;  // group: of the integer form; 0 = none
  // Make the other forms of inputs [begin, end) of a row out of floats x, which start at begin (multiple of 128).
  void convert(int value, int row, const float* x, int begin, int end, unsigned forms) const;

  template <class Body>
  void share(Worker& worker, int n, Body&& body) {
    const auto fetch = [&] {
      for (size_t i = 0; i < worker.ahead_bytes; i += 64) __builtin_prefetch(worker.ahead + i, 0, 1);
    };
    engine.team.share(worker.id, worker.phase, n, body, fetch);
  }

  // The same for small bodies: in runs, since a shared counter costs as much as some of them.
  template <class Body>
  void share_runs(Worker& worker, int n, Body&& body) {
    const int run = (int)most(1, n / (8 * engine.team.threads()));
    share(worker, (int)ceil_div(n, run), [&](int task) {
      for (int i = task * run; i < least(n, (int64_t)(task + 1) * run); ++i) body(i);
    });
  }
};

using Weights = std::shared_ptr<const Matrix>;
struct DenseVector {  // of a norm or a bias
  std::vector<float> numbers;
  int width() const { return (int)numbers.size(); }
  const float* data() const { return numbers.data(); }
};
using Vector = std::shared_ptr<const DenseVector>;
class AdapterSlots;

struct ExpertBiases {  // each may be null; of gate, up and down expert by expert
  Vector router, correction, gate, up, down;
};

struct RopeTable {  // mirrors Rope of headway/ops/protocol.py
  std::vector<float> inv_freq;
  bool interleaved;
  float magnitude;
  std::vector<float> longer;
  int original;
};

class Program {
 public:
  explicit Program(std::shared_ptr<Engine> engine);
  ~Program();

  // Building. Each returns the number of the value it makes; widths are checked. Throw std::invalid_argument.
  int embed(Weights table, float scale, Weights positions);  // positions may be null
  int rms_norm(int x, Vector weight, float eps, int residual);
  int linear(int x, Weights weight, Vector bias, int residual);  // residual -1 = none
  int rope_and_cache(int q, int k, int v, int layer, const RopeTable& rope);
  int attention(int q, int layer, float scale, float softcap, Vector sinks);  // bias and sinks may be null
  int gated_mlp(int x, Weights gate, Weights up, Weights down, Activation activation, int residual, Vector gate_bias,
                Vector up_bias, Vector down_bias);
  // y, the output of a linear layer of x, with what the rows' adapters add.
  int add_low_rank(int y, int x, std::shared_ptr<const AdapterSlots> slots);
  int layer_norm(int x, Vector weight, Vector bias, float eps, int parts);  // bias may be null
  int gated(int gate, int up, Activation activation);  // up -1 = none
  int experts(int x, Weights router, Weights gate, Weights up, Weights down, const Routing& routing, Activation activation,
              float alpha, float limit, const ExpertBiases& biases, int residual);
  int sigmoid_gate(int x, int gate, int residual);
  int latent_attention(int q, int latent, Vector norm, Weights key_up, Weights value_up, int layer, float scale,
                       const RopeTable& rope, float eps);
  int all_reduce(int x);  // x, summed over the engine's ranks in place
  int logit_rows(int x);
  int pool_rows(int x);
  void pooled(int x);  // x, of pool_rows, is kept to the end of the step
  int logits(int x, Weights head, float scale, float softcap, Vector bias);
  void finish(int result);

  // Run one step -> the result's rows and summary, valid until the next.
  LogitRows run(const BatchView& batch);
  // Bytes that a step of such a size takes at most, besides weights and cache. cached: tokens that its rows see in all.
  size_t step_bytes(int tokens, int rows, int logit_rows, int64_t cached) const;
  int result_width() const { return values_.at(result_).width; }
  // What the last step made of the rows that are pooled: [rows][width], valid until the next.
  const float* pooled_floats() const { return pooled_ < 0 ? nullptr : buffers_[values_[pooled_].buffer].floats.as<float>(); }
  int pooled_width() const { return pooled_ < 0 ? 0 : values_[pooled_].width; }
  int value_width(int value) const { return values_.at(value).width; }
  // Seconds of the last step by kind of operation, as the first thread saw them.
  const std::vector<std::pair<std::string, double>>& seconds() const { return seconds_; }
  // Experts that the last step's rows went to, per router.
  const std::vector<int>& touched() const { return touched_; }

 private:
  int make(Axis axis, int width, int times = 1);
  int gather(int x, Axis axis);
  void push(std::unique_ptr<Op> op, std::vector<int> uses);
  void use(int value, unsigned forms);
  unsigned wanted(const Matrix& m) const;
  int add_linear(int x, Weights weight, Vector bias, int residual, float scale, float softcap);
  int add_angles(const RopeTable& rope);
  void add_head_linear(int x, Weights weights, int out);
  void check(const BatchView& batch) const;
  int query_heads_per_kv(size_t group) const;
  size_t low_rank_floats(int tokens) const;
  void look_ahead(const Step& step, size_t op, Worker& worker) const;

  std::shared_ptr<Engine> engine_;
  std::vector<Value> values_;
  std::vector<std::unique_ptr<Op>> ops_;
  std::vector<RowBuffer> buffers_;
  std::vector<int> ropes_;      // value of each rope's table, in order of their first use
  struct Router {
    int numbers, active;  // value; experts per row
  };
  std::vector<Router> routed_;
  std::unique_ptr<Routed> slots_;
  std::vector<int> touched_;
  int vocab_ = 0, most_positions_ = INT_MAX;
  int result_ = -1, pooled_ = -1;  // values
  std::vector<Buffer> scratch_;  // per worker
  Buffer partials_;
  LogitSummary summary_;
  int adapters_ = 0;  // numbers that rows may have
  Buffer low_rank_;
  std::vector<std::pair<std::string, double>> seconds_;
};

// Floats that the sums of `rows` query rows over a range of the cache take.
HW_INLINE size_t partial_floats(const Cache& cache, int rows) {
  return (size_t)(round_up(2 * rows, 16) + (int64_t)rows * cache.value_width);
}

inline void need(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(what);
}

// Elements from row to row; no multiple of a power of two, else rows would share cache sets.
HW_INLINE size_t stride_of(int width) { return round_up(width, LARGEST_GROUP) + 64; }

// Bytes of a worker's scratch for an item of `rows` query rows, and the most such rows that an item of a step has.
size_t attention_scratch(const Cache& cache, int rows);
int most_query_rows(const Cache& cache, int query_heads_per_kv, int tokens);

// Work lists of a step's attention over one cache group.
AttentionPlan plan_attention(const BatchView& batch, const Cache& cache, int window, int query_heads_per_kv, int threads);

}  // namespace headway
