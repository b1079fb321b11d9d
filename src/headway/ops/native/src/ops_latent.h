// Multi-head latent attention (DeepSeek V2): a token's cache is one latent vector and one rotary key, for all heads.
//
//   LatentCacheOp   vector normed, key rotated -> cache
//   HeadRowsOp      queries, head by head: plain parts as rows of their own, rotary parts rotated into the wide queries
//   HeadLinearOp    plain parts times each head's key projection -> the rest of the wide queries
//   AttentionOp     wide queries over the cached numbers themselves, one key/value head for all
//   HeadRowsOp      what they found, head by head
//   HeadLinearOp    times each head's value projection
//
// The same for one new token and for many, so that the same bits come out.
#pragma once

#include "ops.h"

namespace headway {

struct LatentCacheOp : Op {
  int x, angles, layer;
  Vector norm;
  float eps;
  bool interleaved;
  const char* name() const override { return "latent"; }
  void run(Step& step, Worker& worker) const override;
};

// Numbers [0, width) of every head of x as rows: of head h and token t row h * tokens + t.
struct HeadRowsOp : Op {
  int x, out, heads;
  int wide = -1, angles = -1;  // numbers behind `width`, rotated, go to the end of each head here
  bool interleaved = false;
  const char* name() const override { return "latent"; }
  bool makes_forms() const override { return true; }
  void run(Step& step, Worker& worker) const override;
};

// out[t][h * pitch ...] = weights[h] times row (h, t) of x.
struct HeadLinearOp : Op {
  int x, out, pitch;
  Weights weights;
  const char* name() const override { return "latent"; }
  void run(Step& step, Worker& worker) const override;
};

}  // namespace headway
