#include "store/host_tier.hpp"

#include <algorithm>
#include <kvlab/error.hpp>
#include <string>

#include "base/host_memory.hpp"

namespace kvlab {

std::int64_t host_tier_limit(const StoreOptions& o) {
  constexpr double share = 0.8;  // the rest is for the process and for others
  return o.host_limit >= 0 ? o.host_limit : static_cast<std::int64_t>(share * static_cast<double>(free_host_bytes()));
}

void check_host_tier(const StoreOptions& o, std::int64_t free) {
  const Shape& s = o.shape;
  const std::int64_t frame = frame_layout(o, o.host_codec).bytes, limit = host_tier_limit(o),
                     all = std::int64_t{s.layers} * s.max_slots * s.kv_heads * s.max_pages();
  if (limit < frame) {
    const std::string room = " bytes for pages on the host, wanted at least " + std::to_string(frame) + ", a page of " +
                             std::to_string(s.page_size) + " tokens of one KV head";
    if (o.host_limit >= 0) throw Error(Errc::config, "got host_memory of " + std::to_string(limit) + room);
    throw Error(Errc::config, "got " + std::to_string(limit) + room + ": 80 % of the free memory of this machine");
  }
  const std::int64_t bytes = std::min(all, limit / frame) * frame;
  if (free < 0) free = free_host_bytes();
  if (o.host_limit >= 0 && bytes > free)
    throw Error(Errc::config, "got host_memory for " + std::to_string(bytes) + " bytes of pages, wanted at most " +
                                  std::to_string(free) + ", the free memory of this machine");
}

}  // namespace kvlab
