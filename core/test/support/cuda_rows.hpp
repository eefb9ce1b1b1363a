// The tokens of StoreFixture in a store on the GPU.
#pragma once
#include <catch2/catch.hpp>
#include <vector>

#include "cases/place.hpp"
#include "store/cuda_store.hpp"
#include "support/store_fixture.hpp"

namespace kvlab::test {

// StoreFixture::fill for a CudaStore.
inline Applied append_rows(CudaStore& store, const StoreFixture& f, cases::OnDevice& memory, int slot, int count,
                           bool decode = false) {
  const Shape& s = store.shape();
  const int first = store.position(slot);
  for (int layer = 0; layer < s.layers; ++layer) {
    std::vector<float> rows[2];
    for (const int side : {0, 1})
      for (int t = 0; t < count; ++t)
        for (int h = 0; h < s.kv_heads; ++h) {
          const auto row = f.row(side, layer, slot, h, first + t);
          rows[side].insert(rows[side].end(), row.begin(), row.end());
        }
    cases::OnDevice chunk;
    REQUIRE(store.append(layer, slot, chunk.put(rows[0].data(), rows[0].size()),
                         chunk.put(rows[1].data(), rows[1].size()), DType::f32, std::int64_t{s.kv_heads} * s.head_dim,
                         count, first) == Fit::ok);
    memory.synchronize();
  }
  return store.advance(slot, count, decode);
}

// A slot's entries of a tier, [kv_head, page].
inline std::vector<PageEntry> entries_of(const CudaStore& store, cases::OnDevice& memory, int layer, int slot,
                                         Tier tier = Tier::device) {
  const PagedKv kv = store.view(layer, {slot}, tier);
  memory.synchronize();
  const auto all = memory.get(kv.table);
  const auto each = static_cast<std::ptrdiff_t>(kv.table.extent[1] * kv.table.extent[2]);
  return {all.begin() + slot * each, all.begin() + (slot + 1) * each};
}

}  // namespace kvlab::test
