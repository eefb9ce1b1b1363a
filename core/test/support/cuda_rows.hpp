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

// Appends a decode step's token to one layer, with angles that turn nothing.
inline void append_step(CudaStore& store, const StoreFixture& f, cases::OnDevice& memory, int layer, int slot) {
  const Shape& s = store.shape();
  const std::int32_t position = store.position(slot);
  std::vector<float> qkv(static_cast<std::size_t>(s.query_heads * s.head_dim), 0.25f);
  for (const int side : {0, 1})
    for (int h = 0; h < s.kv_heads; ++h) {
      const auto row = f.row(side, layer, slot, h, position);
      qkv.insert(qkv.end(), row.begin(), row.end());
    }
  const auto angles = static_cast<std::size_t>(s.max_tokens * s.head_dim / 2);
  const std::vector<float> one(angles, 1.f), zero(angles, 0.f);
  cases::OnDevice chunk;
  ops::RopeAppendArgs a;
  a.heads = s.query_heads, a.kv_heads = s.kv_heads, a.head_dim = s.head_dim;
  a.qkv = chunk.put(qkv.data(), qkv.size());
  a.qkv_stride = static_cast<std::int64_t>(qkv.size());
  a.cosine = chunk.put(one.data(), angles);
  a.sine = chunk.put(zero.data(), angles);
  a.angles = s.max_tokens;
  a.position = chunk.put(&position, 1);
  REQUIRE(store.before_step(layer, {slot}, a) == Fit::ok);
  ops::rope_append(a, memory.stream());
  memory.synchronize();
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
