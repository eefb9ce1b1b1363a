// `workload:` of an experiment: requests that a task's prompts make, and when they arrive.
#pragma once
#include <cstdint>
#include <string>

#include "experiment/reader.hpp"

namespace kvlab {

// Requests arrive all at the start, at random times of a rate, or at a file's times.
enum class Arrivals : std::uint8_t { all, poisson, trace };

struct WorkloadSpec {
  int requests = 0;  // the prompts repeat when there are fewer; 0 = one per prompt or line of the file
  Arrivals arrivals = Arrivals::all;
  double rate = 0;          // requests per second, for poisson
  std::string file;         // for trace, as written
  bool ignore_eos = false;  // answers go on to their longest
  bool recompute = false;   // the cache of a preempted request is lost; else it waits in host memory
  std::string where;

  std::string text() const;  // "64 requests, poisson 2/s"
};

const std::vector<ParamSpec>& workload_keys();
// `node` holds no lists (expand_axes). Errors are noted.
WorkloadSpec read_workload(const yaml::Node& node, Problems& problems);

}  // namespace kvlab
