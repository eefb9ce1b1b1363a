// What a decode step's attention did not read, by pages of text positions. Fidelity measures with it; no policy does.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>
#include <kvlab/workspace.hpp>

#include <cstdint>

namespace kvlab::ops {

struct UnreadMass {
  PagedKv kv;                       // the cache that attention read; pages that it did not read may lack frames
  const PageList* pages = nullptr;  // what attention read: one list, or everything
  const TokenList* tokens = nullptr;
  View<const float, 3> mass;           // [row, query head, text position] of attention to all tokens
  const std::int32_t* last = nullptr;  // [row] the newest text position; those behind it do not count
  int window = 0;                      // attention read this many newest text positions at most; 0 = no limit
  int page = 0;                        // text positions of a page
  // [row, kv_head, page] the first of `sums` where it is known, of mass that is finite; on the CPU alone.
  const double* known = nullptr;
  // Out. sums: of a page's mass, and of the mass of its tokens that were not read, over the query heads of a KV head.
  View<double, 4> sums;             // [row, kv_head, page, 2]
  View<std::int32_t, 3> read;       // [row, kv_head, page] 1 where a token of the page was read, else 0
  View<std::int32_t, 2> nonfinite;  // [row, kv_head] numbers of the mass that are not finite
};
void unread_mass(const UnreadMass& a, Workspace& scratch, Stream s);

void unread_mass_reference(const UnreadMass& a);

}  // namespace kvlab::ops
