// What a store on the CPU holds, as numbers.
#pragma once
#include <cstdint>
#include <vector>

#include "ops/page/paged.hpp"
#include "store/store.hpp"

namespace kvlab::test {

// The keys or values of a head, place by place. All of its pages lie on the device.
inline std::vector<std::vector<float>> stored_rows(const Store& store, int layer, int slot, int head, KvSide side) {
  const std::vector<std::int32_t> slots{slot};
  const PagedKv kv = store.view(layer, slots);
  std::vector<std::vector<float>> out;
  for (int t = 0; t < kv.tokens(0, head); ++t) {
    const PageEntry& e = kv.entry(0, head, t / kv.page_size);
    ops::read_row(kv.frame(e), kv.layout(e), side, t % kv.page_size,
                  out.emplace_back(static_cast<std::size_t>(kv.head_dim)).data());
  }
  return out;
}

}  // namespace kvlab::test
