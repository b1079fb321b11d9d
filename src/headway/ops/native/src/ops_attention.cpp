// Attention of a step: which thread computes which queries over which part of the cache.
//
// Rows with many new tokens are cut into blocks of queries and single heads, each walking all it sees. Rows with few
// (decode) are cut at ranges of the cache instead, whose sums the last one to finish merges, in order; their heads stay
// together as far as there is work for all threads, because heads are neighbours in memory. All ways give the same bits.
#include <algorithm>
#include <cmath>

#include "ops.h"

namespace headway {

namespace {

constexpr int QUERY_ROWS = 32;   // query rows per item of a long chunk
constexpr int FEW_QUERIES = 8;   // a row with at most so many new tokens is cut along the cache
constexpr int DECODE_ROWS = 64;  // query rows per item of such a row: their scores stay in the second cache

struct Bounds {
  int first, last;  // ranges [first, last) of the cache
};

// What queries from first_position to last_position see.
Bounds ranges(const Cache& cache, int window, int first_position, int last_position) {
  const int tokens = split_blocks(cache) * cache.block_size;
  const int low = window > 0 ? std::max(0, first_position - window + 1) : 0;
  return {low / tokens, last_position / tokens + 1};
}

size_t scores_bytes(const Cache& cache, int rows) { return round_up(attend_scratch(cache, rows), 64); }
size_t prepared_bytes(const Cache& cache, int rows) { return round_up((int64_t)rows * cache.key_width * 4, 64); }

// Items of a long chunk have so many queries of one head; those of a row with few queries so many heads.
int queries_at_once(int group) { return std::max(1, QUERY_ROWS / group); }
int heads_at_once(int heads, int queries, int group) { return (int)most(1, least(heads, DECODE_ROWS / (queries * group))); }

}  // namespace

// Scores, prepared queries, the sums so far, the sums of a range.
size_t attention_scratch(const Cache& cache, int rows) {
  return scores_bytes(cache, rows) + prepared_bytes(cache, rows) + 2 * partial_floats(cache, rows) * sizeof(float);
}

int most_query_rows(const Cache& cache, int group, int tokens) {
  int rows = queries_at_once(group) * group;
  for (int queries = 1; queries <= std::min(FEW_QUERIES, tokens); ++queries) {
    rows = std::max(rows, heads_at_once(cache.heads, queries, group) * queries * group);
  }
  return rows;
}

AttentionPlan plan_attention(const BatchView& batch, const Cache& cache, int window, int group, int threads) {
  AttentionPlan plan;
  const auto count = [&](int row) { return batch.query_start[row + 1] - batch.query_start[row]; };
  const auto seen = [&](int row) {
    return ranges(cache, window, batch.positions[batch.query_start[row]], batch.positions[batch.query_start[row + 1] - 1]);
  };
  int few = 0;  // ranges of all rows with few queries
  for (int row = 0; row < batch.rows; ++row) {
    if (count(row) > 0 && count(row) <= FEW_QUERIES) few += seen(row).last - seen(row).first;
  }
  const int pieces = few == 0 ? 1 : (int)ceil_div(4 * threads, few);  // of the heads, so that nobody is idle

  for (int row = 0; row < batch.rows; ++row) {
    const int begin = batch.query_start[row], queries = count(row);
    if (queries == 0) continue;
    if (queries > FEW_QUERIES) {
      const int at_once = queries_at_once(group);
      for (int first = 0; first < queries; first += at_once) {
        for (int head = 0; head < cache.heads; ++head) {
          plan.items.push_back({row, begin + first, std::min(at_once, queries - first), head, 1});
        }
      }
      continue;
    }
    const Bounds bounds = seen(row);
    const int splits = bounds.last - bounds.first;
    const int heads = heads_at_once((int)ceil_div(cache.heads, pieces), queries, group);
    for (int head = 0; head < cache.heads; head += heads) {
      AttentionItem item{row, begin, queries, head, std::min(heads, cache.heads - head)};
      if (splits == 1) {
        plan.items.push_back(item);
        continue;
      }
      item.first_split = bounds.first;
      item.splits = splits;
      item.partial = plan.partial_floats;
      item.done = plan.counters++;
      plan.partial_floats += splits * partial_floats(cache, item.heads * queries * group);
      for (item.split = bounds.first; item.split < bounds.last; ++item.split) plan.items.push_back(item);
    }
  }
  for (const AttentionItem& item : plan.items) plan.most_rows = std::max(plan.most_rows, item.heads * item.queries * group);
  // The longest first, so that threads finish together.
  const auto work = [&](const AttentionItem& item) {
    return item.split >= 0 ? 0 : (int64_t)item.queries * (batch.positions[item.first] + 1);
  };
  std::stable_sort(plan.items.begin(), plan.items.end(), [&](auto& a, auto& b) { return work(a) > work(b); });
  return plan;
}

namespace {

// Sums of `rows` query rows in partial_floats() of memory.
Partial partial_at(int rows, float* memory) { return {memory, memory + rows, memory + round_up(2 * rows, 16)}; }

}  // namespace

void AttentionOp::run(Step& step, Worker& worker) const {
  const Kernels& kernels = step.engine.kernels;
  const auto [number, index] = step.engine.find(layer);
  const CacheGroup& cached = step.engine.groups[number];
  const Cache& cache = cached.caches[index];
  const AttentionPlan& plan = step.attention[number];
  const BatchView::Group& batch = step.batch.groups[number];
  const int width = cached.layout.query_width(), out_width = cached.layout.value_width, window = cached.layout.window;
  const int group = step.values[q].width / width / cache.heads, blocks = split_blocks(cache);
  const size_t q_stride = step.values[q].width, out_stride = step.values[out].width;
  const float* queries = step.floats(q);
  float* outputs = step.floats(out);

  const size_t scores = scores_bytes(cache, plan.most_rows), prepared = prepared_bytes(cache, plan.most_rows);
  const size_t sums = partial_floats(cache, plan.most_rows);
  worker.scratch->grow(attention_scratch(cache, plan.most_rows));
  void* prepared_at = worker.scratch->as(scores);
  float* sums_at = worker.scratch->as<float>(scores + prepared);

  const auto write = [&](const AttentionItem& item, Partial total) {
    const int per_head = item.queries * group;
    for (int r = 0; r < item.heads * per_head; ++r) {
      const int head = (item.head + r / per_head) * group + r % group;
      float* to = outputs + (item.first + r % per_head / group) * out_stride + (size_t)head * out_width;
      if (sinks) total.total[r] += exp2f(sinks->data()[head] * LOG2_E - total.largest[r]);  // scores are in units of log 2
      kernels.normalise(total, r, cache.value_width, out_width, to);
    }
  };

  step.share(worker, (int)plan.items.size(), [&](int task) {
    const AttentionItem& item = plan.items[task];
    const int rows = item.heads * item.queries * group;
    const int32_t* positions = step.batch.positions + item.first;
    const Attend attend{cache, batch.table + (size_t)item.row * batch.max_blocks, item.head, item.heads, group, item.queries,
                        queries + item.first * q_stride + (size_t)item.head * group * width, q_stride, width, out_width,
                        positions, scale, softcap, window};
    const int low = window > 0 ? std::max(0, positions[0] - window + 1) / cache.block_size : 0;
    kernels.prepare_queries(attend, prepared_at);
    const auto range = [&](int split, Partial to) {
      kernels.attend(attend, prepared_at, std::max(split * blocks, low), (split + 1) * blocks, worker.scratch->as(), to);
    };
    if (item.split < 0) {
      const Bounds bounds = ranges(cache, window, positions[0], positions[item.queries - 1]);
      const Partial total = partial_at(rows, sums_at), more = partial_at(rows, sums_at + sums);
      range(bounds.first, total);
      for (int split = bounds.first + 1; split < bounds.last; ++split) {
        range(split, more);
        kernels.merge(total, more, rows, cache.value_width);
      }
      write(item, total);
      return;
    }
    const auto of_range = [&](int i) {
      return partial_at(rows, step.partials.as<float>() + item.partial + i * partial_floats(cache, rows));
    };
    range(item.split, of_range(item.split - item.first_split));
    std::atomic<int>& done = step.done[item.done];
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < item.splits) return;
    done.store(0, std::memory_order_relaxed);  // for the next layer
    for (int i = 1; i < item.splits; ++i) kernels.merge(of_range(0), of_range(i), rows, cache.value_width);
    write(item, of_range(0));
  });
}

}  // namespace headway
