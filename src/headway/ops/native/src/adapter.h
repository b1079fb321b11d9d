// What adapters (LoRA) add to linear layers: y += scale * up (down x), for the tokens of rows that have an adapter.
//
//   AdapterSlots   one layer's pairs of matrices, by the adapter's number; changed between steps only
//   AdapterRun     consecutive tokens of a step whose rows have the same adapter
//
// A token without an adapter is not touched, and one with one is changed by its own numbers alone.
#pragma once

#include "program.h"

namespace headway {

class AdapterSlots {
 public:
  // For adapters numbered from 1 to `count`, of at most `most_rank`, over a layer [out, in].
  AdapterSlots(int out, int in, int count, int most_rank);

  struct Pair {
    Weights down, up;  // [rank][in], [out][rank], in 16 or 32-bit floats; null = this adapter leaves the layer alone
    float scale = 0;
  };

  // Throws std::invalid_argument: the shapes do not fit, or there is no such number.
  void put(int number, Weights down, Weights up, float scale);
  void clear(int number);
  const Pair& of(int number) const { return pairs_[number - 1]; }
  int count() const { return (int)pairs_.size(); }

  const int out, in, most_rank;

 private:
  Pair& at(int number);

  std::vector<Pair> pairs_;
};

// The additions to several layers of the same input, in place.
struct AdapterOp : Op {
  struct Part {
    std::shared_ptr<const AdapterSlots> slots;
    int out;  // the value that is added to
  };
  int x;
  std::vector<Part> parts;
  const char* name() const override { return "adapter"; }
  void run(Step& step, Worker& worker) const override;
  int most_rank() const;
};

// activation(gate) * up, made at once in the form the next layer wants: what `GateUpOp` does behind its matrices.
struct GateOp : Op {
  int gate, up, out;
  Activation activation;
  const char* name() const override { return "gate_up"; }
  bool makes_forms() const override { return true; }
  void run(Step& step, Worker& worker) const override;
};

// Tokens of a step by adapter, at most ROWS_AT_ONCE in each run. adapter: [rows], 0 = none.
std::vector<AdapterRun> adapter_runs(const BatchView& batch);

}  // namespace headway
