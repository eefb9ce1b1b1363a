// Which pages are on the device when they need not all be there.
#pragma once
#include <kvlab/kv.hpp>
#include <kvlab/stream.hpp>

namespace kvlab::ops {

struct PlacementArgs {
  PagedKv device, host;                // the same tokens in both tiers
  const PageList* attended = nullptr;  // what attention is about to read; null = every page
  Pins pins;                           // and the pages of these tokens
  int resident_tokens = 0;             // room for that many tokens per KV head, or for what attention reads
  PageList recall, offload, drop;      // out, with room for every page of a head
};

// Before attention. recall: what it reads and is not on the device. drop: device pages that attention does not read,
// the oldest first, as far as there is no room; the newest page is never among them. offload: those of `drop` that have
// no copy on the host. Errc::plugin for an attended page that does not exist; on CUDA it is passed over. Bytes: both
// tables.
void place_pages(const PlacementArgs& a, Stream s);

}  // namespace kvlab::ops
