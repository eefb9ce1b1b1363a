// `workload:` of an experiment: requests that a task's prompts make, and when they arrive.
#pragma once
#include <cstdint>
#include <string>

#include "experiment/reader.hpp"

namespace kvlab {

enum class Arrivals : std::uint8_t {
  all,
  poisson,
  trace
};  // at the start | at random times of a rate | a file's times

struct WorkloadSpec {
  int requests = 0;  // the task's prompts, again from the first when there are fewer; 0 = one of each, or the file's
  Arrivals arrivals = Arrivals::all;
  double rate = 0;          // requests per second, of poisson
  std::string file;         // of trace, as written
  bool ignore_eos = false;  // answers go on to their longest
  std::string where;

  std::string text() const;  // "64 requests, poisson 2/s"
};

// `node` holds no lists (expand_axes). What is wrong is noted.
WorkloadSpec read_workload(const yaml::Node& node, Problems& problems);

}  // namespace kvlab
