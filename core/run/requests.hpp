// A workload's requests: a task's prompts and their arrivals.
#pragma once
#include <cstdint>
#include <filesystem>
#include <vector>

#include "engine/scheduler.hpp"
#include "experiment/workload.hpp"
#include "run/items.hpp"

namespace kvlab {

// Request i asks items[i % items]. Arrivals depend on the workload and the seed alone. Throws Errc::data (file and
// line) for a trace that cannot be read or is too short, and Errc::unsupported for items with forced tokens or turns.
std::vector<Request> make_requests(const WorkloadSpec& workload, const std::vector<Item>& items, std::int64_t seed,
                                   const std::filesystem::path& folder);

}  // namespace kvlab
