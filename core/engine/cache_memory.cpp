#include "engine/cache_memory.hpp"

#include "base/stream_memory.hpp"

namespace kvlab {

std::string CacheMemory::text() const {
  const std::pair<const char*, std::int64_t> parts[] = {
      {"tables and lists ", tables},  {"page summaries ", summaries},
      {"the policy's state ", state}, {"queries of a chunked prompt ", queries},
      {"attention mass ", mass},      {"scratch of callbacks ", scratch}};
  std::string out;
  for (const auto& [name, bytes] : parts) out += name + std::to_string(bytes) + ", ";
  return out + "a page of each KV head " + std::to_string(heads * page);
}

std::int64_t CacheMemory::frames_within(std::int64_t all) const {
  if (all < least())
    throw NoRoom("got device_memory of " + std::to_string(all) + " bytes, wanted at least " + std::to_string(least()) +
                 " for " + std::to_string(slots) + (slots == 1 ? " sequence" : " sequences at once") + ": " + text());
  return (all - beside_pages()) / page * frame;
}

}  // namespace kvlab
