// Attention of a step: which thread computes which queries over which part of the cache.
//
// Rows with many new tokens are cut into blocks of queries, each walking all it sees. Rows with few (decode) are cut at
// ranges of the cache instead, whose sums the last one to finish merges, in order. Both ways give the same bits.
#include <algorithm>
#include <cmath>

#include "ops.h"

namespace headway {

namespace {

constexpr int QUERY_ROWS = 32;  // query rows (queries * heads of the group) per item of a long chunk

struct Bounds {
  int first, last;  // ranges [first, last) that the queries [a, b) of positions see
};

Bounds ranges(const Cache& cache, int window, int first_position, int last_position) {
  const int tokens = split_blocks(cache) * cache.block_size;
  const int low = window > 0 ? std::max(0, first_position - window + 1) : 0;
  return {low / tokens, last_position / tokens + 1};
}

}  // namespace

AttentionPlan plan_attention(const BatchView& batch, const Cache& cache, int window, int group, int threads) {
  AttentionPlan plan;
  for (int row = 0; row < batch.rows; ++row) {
    const int begin = batch.query_start[row], end = batch.query_start[row + 1];
    if (begin == end) continue;
    const Bounds bounds = ranges(cache, window, batch.positions[begin], batch.positions[end - 1]);
    const int splits = bounds.last - bounds.first;
    if (end - begin <= FEW_QUERIES && splits > 1 && threads > 1) {
      for (int split = bounds.first; split < bounds.last; ++split) {
        plan.items.push_back({row, begin, end - begin, split, plan.partials++, splits, plan.counters});
      }
      ++plan.counters;
      continue;
    }
    const int at_once = std::max(1, QUERY_ROWS / group);
    for (int first = begin; first < end; first += at_once) {
      plan.items.push_back({row, first, std::min(at_once, end - first)});
    }
  }
  // The longest first, so that threads finish together.
  const auto work = [&](const AttentionItem& item) {
    return item.split >= 0 ? 0 : item.queries * (batch.positions[item.first] + 1);
  };
  std::stable_sort(plan.items.begin(), plan.items.end(), [&](auto& a, auto& b) { return work(a) > work(b); });
  return plan;
}

namespace {

// Sums of `rows` query rows in partial_floats() of memory.
Partial partial_at(int rows, float* memory) {
  return {memory, memory + rows, memory + round_up(2 * rows, 16)};
}

}  // namespace

void AttentionOp::run(Step& step, Worker& worker) const {
  const Kernels& kernels = step.engine.kernels;
  const auto [number, index] = step.engine.find(layer);
  const CacheGroup& cached = step.engine.groups[number];
  const Cache& cache = cached.caches[index];
  const AttentionPlan& plan = step.attention[number];
  const BatchView::Group& batch = step.batch.groups[number];
  const int heads = cache.heads, width = cached.layout.key_width, out_width = cached.layout.value_width;
  const int group = step.values[q].width / width / heads, blocks = split_blocks(cache);
  const int most_rows = std::max(QUERY_ROWS, FEW_QUERIES * group);
  const size_t q_stride = step.values[q].width, out_stride = step.values[out].width;
  const float* queries = step.floats(q);
  float* outputs = step.floats(out);
  const size_t partial = partial_floats(cache, FEW_QUERIES * group), sums = partial_floats(cache, most_rows);
  const size_t prepared_bytes = (size_t)round_up(most_rows * cache.key_width * 4, 64);
  worker.scratch->grow(attend_scratch(cache, most_rows) + prepared_bytes + 2 * sums * sizeof(float));
  uint8_t* scratch = worker.scratch->as() + attend_scratch(cache, most_rows);
  float* sum_memory = reinterpret_cast<float*>(scratch + prepared_bytes);

  const auto write = [&](const AttentionItem& item, int head, Partial total) {
    for (int r = 0; r < item.queries * group; ++r) {
      float* to = outputs + (item.first + r / group) * out_stride + (size_t)(head * group + r % group) * out_width;
      kernels.normalise(total, r, cache.value_width, out_width, to);
    }
  };

  step.share(worker, (int)plan.items.size() * heads, [&](int task) {
    const AttentionItem& item = plan.items[task / heads];
    const int head = task % heads, rows = item.queries * group;
    const int32_t* positions = step.batch.positions + item.first;
    const int window = cached.layout.window;
    const Attend attend{cache, batch.table + (size_t)item.row * batch.max_blocks, head, group, item.queries,
                        queries + item.first * q_stride + (size_t)head * group * width, q_stride, width, out_width,
                        positions, scale, softcap, window};
    const int low = window > 0 ? std::max(0, positions[0] - window + 1) / cache.block_size : 0;
    kernels.prepare_queries(attend, scratch);
    const auto range = [&](int split, Partial to) {
      kernels.attend(attend, scratch, std::max(split * blocks, low), (split + 1) * blocks, worker.scratch->as(), to);
    };
    if (item.split < 0) {
      const Bounds bounds = ranges(cache, window, positions[0], positions[item.queries - 1]);
      const Partial total = partial_at(rows, sum_memory), more = partial_at(rows, sum_memory + sums);
      range(bounds.first, total);
      for (int split = bounds.first + 1; split < bounds.last; ++split) {
        range(split, more);
        kernels.merge(total, more, rows, cache.value_width);
      }
      write(item, head, total);
      return;
    }
    float* mine = step.partials.as<float>() + ((size_t)item.partial * heads + head) * partial;
    range(item.split, partial_at(rows, mine));
    std::atomic<int>& done = step.done[(size_t)item.done * heads + head];
    if (done.fetch_add(1, std::memory_order_acq_rel) + 1 < item.splits) return;
    done.store(0, std::memory_order_relaxed);  // for the next layer
    const int first = item.partial - (item.split - ranges(cache, window, positions[0], positions[0]).first);
    const auto at = [&](int i) {
      return partial_at(rows, step.partials.as<float>() + ((size_t)(first + i) * heads + head) * partial);
    };
    for (int i = 1; i < item.splits; ++i) kernels.merge(at(0), at(i), rows, cache.value_width);
    write(item, head, at(0));
  });
}

}  // namespace headway
