// Chooses the pages that stay on the device where there is no room for all.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

namespace kvlab::ops {

struct PlacementArgs {
  PagedKv device, host;                // the same tokens in both tiers
  const PageList* attended = nullptr;  // pages that attention is about to read; null = every page
  Pins pins;                           // attention also reads the pages of these tokens
  int resident_tokens = 0;             // tokens per KV head that the device has room for; attended pages always fit
  PageList recall, offload, drop;      // out; each has room for every page of a head
};

// Runs before attention. recall: pages that attention reads and that are not on the device. drop: device pages that
// attention does not read and that have no room; the oldest go first, the newest page stays. offload: pages of `drop`
// without a copy on the host. Throws Errc::plugin for an attended page that does not exist; on CUDA the op skips it.
// Bytes: both tables.
void place_pages(const PlacementArgs& a, Stream s);

}  // namespace kvlab::ops
