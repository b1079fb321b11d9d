// Mixtures of experts: a row goes through the few experts that its router chooses, rows of one expert together.
//
//   LinearOp      numbers of the router, float32
//   RouteOp       choice and weights of every row; slots (row, rank) sorted by expert, cut into blocks
//   ExpertGateUp  activation(gate x) * (up x) of every slot, expert by expert; experts that no row chose are not read
//   ExpertDown    down of every slot
//   CombineOp     every row's weighted sum, in the order of its ranks: it does not depend on the other rows
#pragma once

#include "ops.h"

namespace headway {

// See headway/ops/routing.py.
struct Routing {
  int active;
  bool sigmoid, renormalise;
  float scale;
  int groups, kept_groups, merit;
};

// The experts of one row: their numbers [experts] -> `active` of them, best first, and their weights. scratch: [2 * experts].
void route(const float* numbers, int experts, const Routing& routing, const float* correction, float* scratch, int32_t* chosen,
           float* weights);

// Where the rows of a step go, until the next RouteOp.
struct Routed {
  struct Block {
    int expert, first, count;  // sorted slots [first, first + count)
  };
  Buffer chosen, weights;  // [slots]: expert and weight
  Buffer order, place;     // [slots]: sorted position -> slot, and back
  std::vector<Block> blocks;
  std::vector<int> ends;   // per expert, while sorting
  int touched = 0;

  void fit(int slots);
  static size_t bytes(int slots);  // what `fit` takes
  void sort(int slots, int experts);
};

struct RouteOp : Op {
  int numbers;
  Routing routing;
  Vector correction;
  int index;  // among the program's
  const char* name() const override { return "route"; }
  void run(Step& step, Worker& worker) const override;
};

struct ExpertGateUpOp : Op {
  int x, out, active;
  Weights gate, up;
  Vector gate_bias, up_bias;
  Activation activation;
  float alpha, limit;  // limit > 0: of the clamped activation, instead of the other
  const char* name() const override { return "experts"; }
  bool makes_forms() const override { return true; }
  size_t scratch(int rows) const override;
  void run(Step& step, Worker& worker) const override;
};

struct ExpertDownOp : Op {
  int x, out;
  Weights down;
  Vector bias;
  const char* name() const override { return "experts"; }
  size_t scratch(int rows) const override;
  void run(Step& step, Worker& worker) const override;
};

struct CombineOp : Op {
  int x, out, residual, active;
  const char* name() const override { return "experts"; }
  void run(Step& step, Worker& worker) const override;
};

// sigmoid(gate) * x (+ residual): a number per row says how much of it counts.
struct SigmoidGateOp : Op {
  int x, gate, out, residual;
  const char* name() const override { return "experts"; }
  void run(Step& step, Worker& worker) const override;
};

}  // namespace headway
