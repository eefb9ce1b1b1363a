// A layer of a decode step on the CPU, for timed cases: one sequence in SmolLM2-135M's shape.
#pragma once
#include <vector>

#include "cases/case.hpp"
#include "cases/paged_fixture.hpp"

namespace kvlab::cases {

struct Layer {
  static constexpr int query_heads = 9, kv_heads = 3, head_dim = 64, page_size = 16, tokens = 4096;
  static constexpr int copies = 30;  // the model's layers: caches hold no more of them than in a real step

  PagedFixture cache{{1, kv_heads, head_dim, page_size, tokens / page_size, DType::bf16, {}, 1}};
  PagedKv plain;
  std::vector<PagedKv> there;  // copies of it at the place

  Layer(Place& place, int count) {
    for (int h = 0; h < kv_heads; ++h) cache.fill_pooled(0, h, tokens);
    plain = cache.view();
    for (int i = 0; i < count; ++i) there.push_back(place.put(plain, cache.arena_bytes()));
  }
};

// A case that the CPU times on the copies of a layer.
template <class SceneOfLayer>
Case on_layer(std::string shape, Work work) {
  Case c{"score", std::move(shape)};
  c.make = [](Place& place, int copies) { return std::make_unique<SceneOfLayer>(place, copies); };
  c.timed_cpu = true;
  c.copies = Layer::copies;
  c.work = work;
  return c;
}

}  // namespace kvlab::cases
