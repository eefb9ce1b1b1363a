// How much memory the pages on the host may take.
#pragma once
#include <kvlab/kv.hpp>

#include <cstdint>

#include "store/store.hpp"

namespace kvlab {

// Whether a store takes its host tier at the start.
inline bool takes_host_tier(const StoreOptions& o) { return o.host_pages || o.archive || o.offloads; }

// Bytes that pages on the host may take: host_limit, and without one 80 % of the memory that is free now.
std::int64_t host_tier_limit(const StoreOptions& options);

// Throws Errc::config if a host tier may take less than one page, or if its frames for all slots' pages, at most
// host_limit, are more than `free` bytes. free: -1 = of this machine; that of a run on another
// machine is not known, so pass the greatest number for one.
void check_host_tier(const StoreOptions& options, std::int64_t free = -1);

}  // namespace kvlab
