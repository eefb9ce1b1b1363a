// A list of pages that attention can read as it is, so that the store need not make one of it (Store::resolve_attend).
// The store gives an object before a selection. IndexList::final carries it to the op that chooses.
#pragma once
#include <kvlab/kv.hpp>

namespace kvlab::ops {

// What the store counts on the device: an attend that leaves pages out is an edit that fired. The first such head of an
// edit counts.
struct FiredCount {
  unsigned long long *fired = nullptr, *last_edit = nullptr;
  unsigned long long edit = 0;
};

struct FinalList {
  FiredCount count;
  Pins pins;  // of the attention
  // The list that score_pages wrote on CUDA, where it chose among all pages of all heads of `kv` and the pins add
  // nothing. Any other op that writes a list with this object clears it. null = no such list.
  const std::int32_t *index = nullptr, *counts = nullptr;
  const std::int32_t *length = nullptr, *slots = nullptr;  // of `kv`, as `rows`
  int rows = 0;

  void set(const IndexList& list, const PagedKv& kv) {
    index = list.index.data, counts = list.count.data;
    length = kv.length.data, slots = kv.slots, rows = kv.rows;
  }
  void clear() { index = nullptr; }
  bool is(const IndexList& list, const std::int32_t* lengths, const std::int32_t* of_slots, int of_rows) const {
    return index && index == list.index.data && counts == list.count.data && !list.slots && length == lengths &&
           slots == of_slots && rows == of_rows;
  }
};

}  // namespace kvlab::ops
