// The operations a program is made of. Every one is run by all threads of the team at once.
#pragma once

#include "program.h"

namespace headway {

constexpr int ROWS_AT_ONCE = 256;  // token rows of one linear task: their activations stay in the second cache
// Bytes of a worker's scratch that the operations other than attention need at most.
constexpr size_t LINEAR_SCRATCH = (2 * ROWS_AT_ONCE + 1) * LARGEST_GROUP * sizeof(float);

// The first 2 * pairs numbers of a head turned by a row of AnglesOp's table, the rest copied.
void rotate(const float* x, const float* angles, int pairs, bool interleaved, int width, float* out);
// One head's key to its slot of a chunk (see Cache).
void write_key(const Cache& c, size_t chunk, int slot, const float* key, int width);

struct EmbedOp : Op {
  Weights table, positions;  // positions null = none
  float scale;
  int out;
  const char* name() const override { return "embed"; }
  void run(Step& step, Worker& worker) const override;
};

// Of each of the equal parts of a row; then the residual is added. Weight and bias are as wide as a part, or as a row.
struct NormOp : Op {
  int x, out, residual = -1;  // residual -1 = none
  int parts;
  bool centred = false;  // a layer norm
  Vector weight, bias;   // bias null = none
  float eps;
  const char* name() const override { return "norm"; }
  bool makes_forms() const override { return true; }
  void run(Step& step, Worker& worker) const override;
};

// Makes the integer or bfloat16 form of a value whose producer could not.
struct AllReduceOp : Op {
  int x;
  const char* name() const override { return "all_reduce"; }
  void run(Step& step, Worker& worker) const override;
};

struct ConvertOp : Op {
  int x;
  unsigned forms;
  const char* name() const override { return "convert"; }
  void run(Step& step, Worker& worker) const override;
};

// Several linear layers of the same input, as one.
struct LinearOp : Op {
  struct Part {
    Weights weight;
    Vector bias;
    int residual;  // -1 = none
    int out;
    float scale, softcap;  // of logits
    bool summarised = false;  // they are the program's result
  };
  int x;
  std::vector<Part> parts;
  const char* name() const override { return parts[0].scale != 0 ? "logits" : "linear"; }
  std::pair<const uint8_t*, size_t> first_read(int worker, int threads, int rows) const override;
  int input() const override { return x; }
  int tiles_per_task(int threads, int rows) const;
  void run(Step& step, Worker& worker) const override;
};

// activation(gate x) * (up x), made at once in the form the next layer wants.
struct GateUpOp : Op {
  int x, out;
  Weights gate, up;
  Vector gate_bias, up_bias;  // null = none
  Activation activation;
  const char* name() const override { return "gate_up"; }
  bool makes_forms() const override { return true; }
  std::pair<const uint8_t*, size_t> first_read(int worker, int threads, int rows) const override;
  int input() const override { return x; }
  void run(Step& step, Worker& worker) const override;
};

// Row t of the table: cos then sin of each pair's angle at token t's position.
struct AnglesOp : Op {
  int out;
  RopeTable rope;
  const char* name() const override { return "rope"; }
  void run(Step& step, Worker& worker) const override;
};

struct RopeOp : Op {
  int q, k, v, out, angles, layer;
  bool interleaved;
  const char* name() const override { return "rope"; }
  void run(Step& step, Worker& worker) const override;
};

struct AttentionOp : Op {
  int q, out, layer;
  float scale, softcap;
  Vector sinks;  // per query head; null = none
  const char* name() const override { return "attention"; }
  void run(Step& step, Worker& worker) const override;
};

// The log of the sum of every row's exponentials; and the summary it is made from, unless that was made with the logits.
struct SummaryOp : Op {
  int x;
  bool tiles_made;
  const char* name() const override { return "logits"; }
  void run(Step& step, Worker& worker) const override;
};

struct GatherOp : Op {
  int x, out;
  const char* name() const override { return "gather"; }
  void run(Step& step, Worker& worker) const override;
};

}  // namespace headway
