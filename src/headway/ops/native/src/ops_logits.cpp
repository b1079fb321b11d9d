// What becomes of logits: the summary that is made with them, and the tokens drawn from them.
#include <stdexcept>

#include "ops.h"
#include "sampling.h"

namespace headway {

void LogitSummary::fit(int rows, int vocab) {
  tiles = (int)ceil_div(vocab, TILE);
  peaks.grow((size_t)rows * tiles * sizeof(float));
  sums.grow((size_t)rows * tiles * sizeof(float));
  logsumexp.grow(rows * sizeof(double));
}

size_t LogitSummary::bytes(int rows, int vocab) {
  return (size_t)rows * (2 * ceil_div(vocab, TILE) * sizeof(float) + sizeof(double));
}

void LogitSummary::add(const Kernels& kernels, int row, int column, const float* logits, int n) {
  const size_t at = (size_t)row * tiles + column / TILE;
  kernels.summarise(logits, n, peaks.as<float>() + at, sums.as<float>() + at);
}

void SummaryOp::run(Step& step, Worker& worker) const {
  const int vocab = step.values[x].width;
  LogitSummary& summary = step.summary;
  step.share(worker, step.rows(x), [&](int row) {
    if (!tiles_made) summary.add(step.engine.kernels, row, 0, step.floats(x) + (size_t)row * vocab, vocab);
    const size_t at = (size_t)row * summary.tiles;
    summary.logsumexp.as<double>()[row] =
        logsumexp(step.engine.kernels, summary.peaks.as<float>() + at, summary.sums.as<float>() + at, summary.tiles);
  });
}

void Engine::draw(const LogitRows& logits, const Draws& draws, int32_t* tokens) {
  int racing = 0;
  for (int i = 0; i < draws.count; ++i) {
    const int slot = draws.slots[i], row = draws.rows[i];
    if (slot < 0 || slot >= draws.capacity || row < 0 || row >= logits.rows) throw std::invalid_argument("a draw is of no row");
    racing += draws.temperature[slot] != 0;
  }
  const int tiles = (int)ceil_div(logits.vocab, TILE);
  const auto one = [&](int i, DrawMemory& memory) {
    const int slot = draws.slots[i];
    const size_t row = draws.rows[i];
    const LogitRow of{logits.logits + row * logits.vocab, logits.peaks + row * tiles, logits.logsumexp[row], logits.vocab};
    const Draw how{draws.temperature[slot], draws.top_k[slot], draws.top_p[slot], draws.min_p[slot],
                   draws.seed[slot],        (uint32_t)draws.choice[slot], (uint32_t)draws.positions[i]};
    tokens[i] = headway::draw(kernels, of, how, memory);
  };
  draw_memory_.resize(team.threads());
  if (racing < 2 || team.threads() == 1) {  // waking the others would take longer than the likeliest tokens do
    for (int i = 0; i < draws.count; ++i) one(i, draw_memory_[0]);
    return;
  }
  std::atomic<int> next{0};
  team.run([&](int worker) {
    for (int i = next.fetch_add(1); i < draws.count; i = next.fetch_add(1)) one(i, draw_memory_[worker]);
  });
}

}  // namespace headway
