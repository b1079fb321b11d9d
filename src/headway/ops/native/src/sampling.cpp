#include "sampling.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <limits>

namespace headway {

namespace {

constexpr float SLACK = 1 + 1e-5f;  // weights of smaller logits may come out larger by rounding, but never by this much
constexpr double UNIT = 4398046511104.0;  // 2^42: masses are whole numbers of its inverse
constexpr double LEAST_TIME = 1.1641532182693481e-10;  // 2^-33: -log of the largest uniform number

// As headway/sampling/arithmetic.py, bit for bit.
double natural_log(double x) {
  if (x == 0) return -INFINITY;
  if (!(x >= 0 && x < INFINITY)) return NAN;
  int e;
  double m = std::frexp(x, &e);
  if (m < 0.7071067811865476) {
    m *= 2.0;
    e -= 1;
  }
  const double s = (m - 1.0) / (m + 1.0), square = s * s;
  double p = 1.0 / 21;
  for (int n = 19; n > 0; n -= 2) p = p * square + 1.0 / n;
  return e * 0.6931471805599453 + 2.0 * s * p;
}

double uniform(uint32_t word) { return ((double)word + 0.5) * 2.3283064365386963e-10; }  // 2^-32

uint32_t noise_of(NoiseKey key, uint32_t id) {
  uint32_t a = id / 4, b = key.position, c = key.choice, d = key.purpose;
  for (int turn = 0; turn < 10; ++turn, key.low += 0x9E3779B9, key.high += 0xBB67AE85) {
    const uint64_t left = (uint64_t)a * 0xD2511F53u, right = (uint64_t)c * 0xCD9E8D57u;
    a = (uint32_t)(right >> 32) ^ b ^ key.low;
    b = (uint32_t)right;
    c = (uint32_t)(left >> 32) ^ d ^ key.high;
    d = (uint32_t)left;
  }
  const uint32_t words[4] = {a, b, c, d};
  return words[id % 4];
}

// Index of the first of n numbers that is the largest of them.
int where(const Kernels& kernels, const float* x, int n, float largest) {
  constexpr int PART = 128;
  int at = 0;
  while (kernels.largest(x + at, std::min(PART, n - at)) != largest) at += PART;
  while (x[at] != largest) ++at;
  return at;
}

// The first of the tokens to finish so far; equal times go to the lowest id.
struct Winner {
  double time = INFINITY;
  float weight = 0;
  int id = -1;

  void offer(int token, float its_weight, uint32_t word) {
    if (its_weight <= 0) return;  // never finishes
    const double finishes = -natural_log(uniform(word)) / its_weight;
    if (finishes < time || (finishes == time && token < id)) *this = {finishes, its_weight, token};
  }
};

// Draws of one row that is not greedy.
class Race {
 public:
  Race(const Kernels& kernels, const LogitRow& row, const Draw& how, float peak, DrawMemory& memory)
      : kernels_(kernels), row_(row), how_(how), inverse_temperature_(1 / std::max(how.temperature, FLT_MIN)), peak_(peak),
        memory_(memory), key_{(uint32_t)how.seed, (uint32_t)(how.seed >> 32), how.position, how.choice, 0} {}

  int among_top_k();
  int among_all();

 private:
  int tiles() const { return (int)ceil_div(row_.vocab, TILE); }
  bool likelier(float weight, int id) const { return weight > cut_weight_ || (weight == cut_weight_ && id < cut_id_); }
  void offer_span(int span, Winner& winner) const;
  int64_t mass_of(int first, int end, float least) const;
  int64_t mass_before(const Winner& token) const;

  const Kernels& kernels_;
  const LogitRow& row_;
  const Draw& how_;
  const float inverse_temperature_, peak_;
  DrawMemory& memory_;
  const NoiseKey key_;
  float floor_ = 0;                     // no token below this weight survives
  float cut_weight_ = -1;               // nor any at or behind this place in the order of likelihood
  int cut_id_ = 0;
  std::vector<float>& tile_weights_ = memory_.peaks;
};

// The k likeliest, listed. No tile takes part whose largest logit is below the k-th largest of the tiles.
int Race::among_top_k() {
  const int count = tiles(), k = how_.top_k;
  float bound = -INFINITY;
  if (k <= count) {
    std::vector<float>& peaks = memory_.peaks;
    peaks.assign(row_.peaks, row_.peaks + count);
    std::nth_element(peaks.begin(), peaks.begin() + (k - 1), peaks.end(), std::greater<float>());
    bound = peaks[k - 1];
  }
  std::vector<DrawMemory::Candidate>& found = memory_.candidates;
  found.clear();
  for (int tile = 0; tile < count; ++tile) {
    if (row_.peaks[tile] < bound) continue;
    for (int id = tile * TILE; id < std::min((tile + 1) * TILE, row_.vocab); ++id) {
      if (row_.logits[id] >= bound) found.push_back({row_.logits[id], 0, id});
    }
  }
  if (k < (int)found.size()) {
    const auto by_logit = [](const auto& a, const auto& b) { return a.logit > b.logit || (a.logit == b.logit && a.id < b.id); };
    std::nth_element(found.begin(), found.begin() + (k - 1), found.end(), by_logit);
    found.resize(k);
  }
  for (auto& one : found) kernels_.weights(&one.logit, 1, peak_, inverse_temperature_, &one.weight);
  if (how_.top_p < 1) {
    int64_t total = 0, before = 0;
    for (const auto& one : found) total += std::llrint(one.weight * UNIT);
    const auto by_weight = [](const auto& a, const auto& b) { return a.weight > b.weight || (a.weight == b.weight && a.id < b.id); };
    std::sort(found.begin(), found.end(), by_weight);
    size_t kept = 0;
    while (kept < found.size() && (kept == 0 || (double)before < how_.top_p * (double)total)) {
      before += std::llrint(found[kept++].weight * UNIT);
    }
    found.resize(kept);
  }
  Winner winner;
  for (const auto& one : found) {
    if (one.weight >= how_.min_p) winner.offer(one.id, one.weight, noise_of(key_, one.id));
  }
  return winner.id;
}

// Everybody runs, and whether the winner was allowed to is asked afterwards: leaving out others does not make it lose.
// If it was not, nor was any that is as unlikely, and the race is run again without them.
int Race::among_all() {
  const int count = tiles();
  tile_weights_.resize(count);
  kernels_.weights(row_.peaks, count, peak_, inverse_temperature_, tile_weights_.data());
  floor_ = how_.min_p;
  double target = INFINITY;
  if (how_.top_p < 1) {
    const double total = (double)mass_of(0, row_.vocab, 0);
    target = how_.top_p * total;
    // All tokens below this weight together are less than what may be missing, so none of them is needed.
    const double needless = (((1 - how_.top_p) * total / row_.vocab) - 0.5) / UNIT * (1 - 1e-6);
    floor_ = std::max(floor_, (float)(needless * (1 - 1e-6)));
  }
  const int likeliest = where(kernels_, row_.peaks, count, peak_) * TILE / NOISE_SPAN;
  for (;;) {
    Winner winner;
    offer_span(likeliest, winner);
    for (int span = 0; span < ceil_div(row_.vocab, NOISE_SPAN); ++span) {
      if (span != likeliest) offer_span(span, winner);
    }
    if (how_.top_p >= 1) return winner.id;
    const int64_t before = mass_before(winner);
    if (before == 0 || (double)before < target) return winner.id;
    cut_weight_ = winner.weight;
    cut_id_ = winner.id;
  }
}

void Race::offer_span(int span, Winner& winner) const {
  const int first = span * NOISE_SPAN, count = std::min(NOISE_SPAN, row_.vocab - first);
  float most = 0;
  for (int tile = first / TILE; tile < tiles() && tile * TILE < first + NOISE_SPAN; ++tile) most = std::max(most, tile_weights_[tile]);
  most *= SLACK;
  // A token of weight w beats the best time t only if -log(u) <= t w, and -log(u) >= 1 - u.
  const double bound = winner.time * most;
  if (most == 0 || most < floor_ || most < cut_weight_ || bound < LEAST_TIME) return;
  uint32_t words[4][NOISE_SPAN / 4];
  if (1 - uniform(kernels_.noise(key_, first / 4, words)) > bound) return;
  float weights[NOISE_SPAN];
  kernels_.weights(row_.logits + first, count, peak_, inverse_temperature_, weights);
  for (int i = 0; i < count; ++i) {
    const uint32_t word = words[i % 4][i / 4];
    if (1 - uniform(word) > bound || weights[i] < floor_ || !likelier(weights[i], first + i)) continue;
    winner.offer(first + i, weights[i], word);
  }
}

// Mass of the ids [first, end) whose weight is at least `least`. Tiles that hold none are passed over.
int64_t Race::mass_of(int first, int end, float least) const {
  const float matters = std::max(least, 1.0e-13f);  // below 2^-43 a weight rounds to no mass
  int64_t total = 0;
  for (int at = first; at < end;) {
    int tile = at / TILE;
    if (tile_weights_[tile] * SLACK < matters) {
      at = (tile + 1) * TILE;
      continue;
    }
    while (tile < tiles() && tile * TILE < end && tile_weights_[tile] * SLACK >= matters) ++tile;
    const int stop = std::min(tile * TILE, end);
    total += kernels_.mass(row_.logits + at, stop - at, peak_, inverse_temperature_, least);
    at = stop;
  }
  return total;
}

// Mass of the tokens that are likelier; equally likely ones are ordered by id.
int64_t Race::mass_before(const Winner& token) const {
  return mass_of(0, token.id, token.weight) + mass_of(token.id + 1, row_.vocab, std::nextafter(token.weight, 2.0f));
}

}  // namespace

double logsumexp(const Kernels& kernels, const float* peaks, const float* sums, int tiles) {
  const float top = std::max(kernels.largest(peaks, tiles), -FLT_MAX);
  double total = 0;
  for (int tile = 0; tile < tiles; tile += TILE) total += kernels.share_of_tiles(peaks + tile, sums + tile, std::min(TILE, tiles - tile), top);
  return top + natural_log(total);
}

int draw(const Kernels& kernels, const LogitRow& row, const Draw& how, DrawMemory& memory) {
  if (std::isnan(row.logsumexp)) return NOT_FINITE;
  const int tiles = (int)ceil_div(row.vocab, TILE);
  const float peak = kernels.largest(row.peaks, tiles);
  if (peak == -INFINITY) return NOTHING_ALLOWED;
  if (!std::isfinite(peak)) return NOT_FINITE;
  if (how.temperature == 0) {
    const int first = where(kernels, row.peaks, tiles, peak) * TILE;
    return first + where(kernels, row.logits + first, std::min(TILE, row.vocab - first), peak);
  }
  Race race(kernels, row, how, peak, memory);
  return how.top_k > 0 && how.top_k < row.vocab ? race.among_top_k() : race.among_all();
}

void mask(float* logits, float* peaks, int vocab, const uint32_t* words, int count) {
  static_assert(TILE == 32, "a tile's mask is a word");
  constexpr float NONE = -std::numeric_limits<float>::infinity();
  for (int tile = 0; tile * TILE < vocab; ++tile) {
    float* x = logits + (size_t)tile * TILE;
    const int n = std::min(TILE, vocab - tile * TILE);
    const uint32_t word = tile < count ? words[tile] : 0;
    if (word == ~0u) continue;
    if (word == 0) {
      std::fill_n(x, n, NONE);
      peaks[tile] = NONE;
      continue;
    }
    float peak = NONE;
    for (int i = 0; i < n; ++i) {
      if (!(word >> i & 1)) x[i] = NONE;
      peak = x[i] > peak || x[i] != x[i] ? x[i] : peak;
    }
    peaks[tile] = peak;
  }
}

}  // namespace headway
