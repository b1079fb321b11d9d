// From a row of logits to a token, looking only at the tiles of the vocabulary that can matter. The specification is
// headway/sampling/pipeline.py, which looks at everything; both give the same token, always.
#pragma once

#include <vector>

#include "kernels.h"

namespace headway {

// One draw; the arrays of headway/sampling/table.py, a row each.
struct Draw {
  float temperature;  // 0 = the likeliest token
  int top_k;          // 0 = off
  double top_p;       // 1 = off
  float min_p;        // 0 = off
  uint64_t seed;
  uint32_t choice, position;
};

// Logits of one row and their summary (headway/sampling/logits.py).
struct LogitRow {
  const float* logits;  // [vocab]
  const float* peaks;   // [tiles]
  double logsumexp;
  int vocab;
};

constexpr int NOT_FINITE = -1, NOTHING_ALLOWED = -2;  // instead of a token

// Memory that draws use again and again.
struct DrawMemory {
  struct Candidate {
    float logit, weight;
    int id;
  };
  std::vector<float> peaks;
  std::vector<Candidate> candidates;
};

// Forbid the tokens of a row that have no bit in a mask, which has a word per tile, the lowest bit first; those behind it
// too. Peaks are kept true.
void mask(float* logits, float* peaks, int vocab, const uint32_t* words, int count);

int draw(const Kernels& kernels, const LogitRow& row, const Draw& how, DrawMemory& memory);

// log(sum(exp)) of a row from the peaks and sums of its tiles.
double logsumexp(const Kernels& kernels, const float* peaks, const float* sums, int tiles);

}  // namespace headway
