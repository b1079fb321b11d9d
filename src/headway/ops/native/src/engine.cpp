// What a backend owns: threads, kernels, and the paged cache.
#include <stdexcept>

#include "program.h"

namespace headway {

namespace {

constexpr int SLOT_STEP = 16;  // slots of a chunk are padded to this: every kernel reads whole vectors of them

int positive(int n, const char* what) {
  if (n < 1) throw std::invalid_argument(std::string(what) + " must be positive");
  return n;
}

// A layer's cache of a group, without memory.
Cache cache_of(const GroupLayout& layout, int block_size, CacheFormat format) {
  positive(layout.key_width, "key_width");
  return {format, positive(layout.heads, "heads"), (int)round_up(positive(block_size, "block_size"), SLOT_STEP), block_size,
          (int)round_up(layout.query_width(), 2), (int)round_up(positive(layout.value_width, "value_width"), SLOT_STEP),
          layout.latent, nullptr, nullptr};
}

}  // namespace

Engine::Engine(int threads, const std::string& name, CacheFormat format)
    : kernels(choose_kernels(name.c_str())), cache_format(format), team(threads) {}

void Engine::allocate(const std::vector<GroupLayout>& layouts, int size) {
  block_size = size;
  groups.clear();
  for (const GroupLayout& layout : layouts) {
    CacheGroup group;
    group.layout = layout;
    for (size_t i = 0; i < layout.layers.size(); ++i) {
      Cache cache = cache_of(layout, size, cache_format);
      const size_t chunks = (size_t)layout.blocks * layout.heads;
      group.memory.emplace_back(chunks * cache.key_chunk());
      cache.keys = group.memory.back().as();
      group.memory.emplace_back(chunks * cache.value_chunk());
      cache.values = group.memory.back().as();
      group.caches.push_back(cache);
    }
    groups.push_back(std::move(group));
  }
}

size_t Engine::block_bytes(const GroupLayout& layout, int size) const {
  const Cache cache = cache_of(layout, size, cache_format);
  return layout.layers.size() * cache.heads * (cache.key_chunk() + cache.value_chunk());
}

void Engine::copy_blocks(int number, const std::vector<std::pair<int, int>>& pairs) {
  CacheGroup& group = groups.at(number);
  for (const auto& [source, target] : pairs) {
    if (source < 0 || target < 0 || source >= group.layout.blocks || target >= group.layout.blocks) {
      throw std::invalid_argument("a block to copy is outside the cache");
    }
  }
  for (const Cache& cache : group.caches) {
    const size_t heads = cache.heads;
    for (const auto& [source, target] : pairs) {
      memcpy(cache.key_at(target * heads), cache.key_at(source * heads), heads * cache.key_chunk());
      memcpy(cache.value_at(target * heads), cache.value_at(source * heads), heads * cache.value_chunk());
    }
  }
}

// each(chunks of a block in a layer, their bytes, where they are in the block as a whole).
template <class Each>
void Engine::each_chunk(int number, int block, size_t size, Each&& each) {
  const CacheGroup& group = groups.at(number);
  if (block < 0 || block >= group.layout.blocks) throw std::invalid_argument("there is no such block in the cache");
  if (size != block_bytes(group.layout, block_size)) throw std::invalid_argument("a block is not of this size");
  size_t at = 0;
  for (const Cache& cache : group.caches) {
    const size_t heads = cache.heads, first = block * heads;
    each(cache.key_at(first), heads * cache.key_chunk(), at);
    at += heads * cache.key_chunk();
    each(cache.value_at(first), heads * cache.value_chunk(), at);
    at += heads * cache.value_chunk();
  }
}

void Engine::read_block(int group, int block, uint8_t* to, size_t size) {
  each_chunk(group, block, size, [to](void* chunk, size_t bytes, size_t at) { memcpy(to + at, chunk, bytes); });
}

void Engine::write_block(int group, int block, const uint8_t* from, size_t size) {
  each_chunk(group, block, size, [from](void* chunk, size_t bytes, size_t at) { memcpy(chunk, from + at, bytes); });
}

std::pair<int, int> Engine::find(int layer) const {
  for (size_t g = 0; g < groups.size(); ++g) {
    const std::vector<int>& layers = groups[g].layout.layers;
    for (size_t i = 0; i < layers.size(); ++i) {
      if (layers[i] == layer) return {(int)g, (int)i};
    }
  }
  throw std::invalid_argument("layer " + std::to_string(layer) + " caches nothing");
}

ForEach Engine::for_each() {
  return [this](int n, const std::function<void(int)>& body) { team.for_each(n, body); };
}

}  // namespace headway
