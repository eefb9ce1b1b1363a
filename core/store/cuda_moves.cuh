// A warp moves tokens of one head by short lists: of evictions and exchanges.
#pragma once
#include "store/cuda_tokens.cuh"

namespace kvlab::device_store {

// Evicts at most one token of a head: its last token takes the place. Returns whether one left. rank [place] moves too,
// unless it is null.
template <class Unit, bool Mixed>
__device__ bool evict_one(const CudaStoreLayer& s, const CudaStoreList& a, int row, int head, std::int32_t* rank,
                          int lane) {
  const int count = a.count(row, head), p = s.layout.page_size;
  if (count == 0) return false;
  const Head h = head_of(s, a.slots[row], head);
  const int before = *h.length, to = a.index(row, head, 0), from = before - 1;
  if (count != 1 || to < 0 || to >= before) {
    if (lane == 0) fail(s, store_bad_list);
    return false;
  }
  const int last = from / p, hole = to / p;
  if (to != from) {
    std::byte *source = page_at(s, h, last), *target = page_at(s, h, hole);
    const PageLayout &there = Mixed ? layout_at(s, h, last) : s.layout,
                     &here = Mixed ? layout_at(s, h, hole) : s.layout;
    if (!Mixed || &there == &here) {  // a conversion is much more code
      for (int u = lane; u < Token<Unit>::units(here); u += 32)
        *Token<Unit>::unit(target, here, to % p, u) = *Token<Unit>::unit(source, here, from % p, u);
      if (lane < fields_of(here)) *field(target, here, to % p, lane) = *field(source, here, from % p, lane);
    } else {
      Carried x;
      x.read(source, there, from % p, here, lane);
      x.write(target, here, to % p, lane);
    }
    if (rank && lane == 0) rank[to] = rank[from];
  }
  __syncwarp();
  const bool emptied = last * p == from;
  if (lane == 0) {
    *h.length = from;
    if (emptied) {
      for (int tier = 0; tier < 2; ++tier) give_back(s, tier, h.table[tier][last]);
      if (h.lower_pages) *h.lower_pages = min(*h.lower_pages, last);
      fewer_pages(s, 1);
    } else {
      PageEntry& upper = h.table[0][last].frame >= 0 ? h.table[0][last] : h.table[1][last];
      upper.tokens = static_cast<std::uint16_t>(from - last * p);
    }
  }
  // The lower copy of a device page whose tokens have changed is stale, and so is the summary.
  const auto outdated = [&](int page) {
    if (lane == 0 && h.table[0][page].frame >= 0) give_back(s, 1, h.table[1][page]);
    __syncwarp();
    summarize(s, h, page, min(p, from - page * p), lane);
  };
  __syncwarp();
  if (to != from) outdated(hole);
  if (!emptied && (to == from || hole != last)) outdated(last);
  return true;
}

// Swaps a head's pairs in order. Returns whether there was one.
template <class Unit, bool Mixed>
__device__ bool swap_pairs(const CudaStoreLayer& s, const CudaStoreList& a, int row, int head, int lane) {
  const Head h = head_of(s, a.slots[row], head);
  const int n = *h.length, count = a.count(row, head), p = s.layout.page_size;
  bool bad = count < 0 || count > a.index.extent[2] || count % 2, swapped = false;
  for (int i = lane; !bad && i < count; i += 32) bad = a.index(row, head, i) < 0 || a.index(row, head, i) >= n;
  if (__any_sync(~0u, bad)) {
    if (lane == 0) fail(s, store_bad_list);
    return false;
  }
  for (int i = 0; i < count; i += 2) {
    const int x = a.index(row, head, i), y = a.index(row, head, i + 1);
    if (x == y) continue;
    std::byte *fx = page_at(s, h, x / p), *fy = page_at(s, h, y / p);
    const PageLayout &lx = Mixed ? layout_at(s, h, x / p) : s.layout, &ly = Mixed ? layout_at(s, h, y / p) : s.layout;
    if (Mixed && &lx != &ly) {
      Carried there, back;
      there.read(fx, lx, x % p, ly, lane);
      back.read(fy, ly, y % p, lx, lane);
      __syncwarp();
      there.write(fy, ly, y % p, lane);
      back.write(fx, lx, x % p, lane);
    } else {
      const PageLayout& l = lx;
      const int units = Token<Unit>::units(l);
      for (int u = lane; u < units; u += 32) {
        Unit* ux = Token<Unit>::unit(fx, l, x % p, u);
        Unit* uy = Token<Unit>::unit(fy, l, y % p, u);
        const Unit hold = *ux;
        *ux = *uy;
        *uy = hold;
      }
      if (lane < fields_of(l)) {
        unsigned *ux = field(fx, l, x % p, lane), *uy = field(fy, l, y % p, lane), hold = *ux;
        *ux = *uy;
        *uy = hold;
      }
    }
    __syncwarp();
    for (const int page : {x / p, y / p}) {
      if (lane == 0 && h.table[0][page].frame >= 0) give_back(s, 1, h.table[1][page]);
      __syncwarp();
      summarize(s, h, page, min(p, n - page * p), lane);
    }
    __syncwarp();
    swapped = true;
  }
  return swapped;
}

}  // namespace kvlab::device_store
