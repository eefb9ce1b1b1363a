#include "run/requests.hpp"

#include <kvlab/error.hpp>
#include <kvlab/random.hpp>

#include <charconv>
#include <cmath>
#include <sstream>

#include "base/regular_file.hpp"
#include "model/bundled.hpp"

namespace kvlab {
namespace {

// Reads the first field, in seconds, of each line that is neither empty nor a comment.
std::vector<double> read_arrivals(const std::filesystem::path& path) {
  std::istringstream in(read_file(path, "a file of arrivals"));
  std::vector<double> out;
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    const std::size_t first = line.find_first_not_of(" \t\r");
    if (first == std::string::npos || line[first] == '#') continue;
    const std::size_t end = std::min(line.find_first_of(", \t\r", first), line.size());
    double seconds = -1;
    const auto read = std::from_chars(line.data() + first, line.data() + end, seconds);
    if (read.ec != std::errc() || read.ptr != line.data() + end || !(seconds >= 0 && seconds <= 1e9))
      throw Error(Errc::data, "got '" + line.substr(first, end - first) + "', wanted an arrival in seconds, 0 or more",
                  path.string() + ":" + std::to_string(number));
    out.push_back(seconds);
  }
  if (out.empty()) throw Error(Errc::data, "got no arrivals, wanted one a line", path.string());
  return out;
}

}  // namespace

std::vector<Request> make_requests(const WorkloadSpec& workload, const std::vector<Item>& items, std::int64_t seed,
                                   const std::filesystem::path& folder) {
  for (const Item& item : items) {
    if (!item.forced.empty())
      throw Error(Errc::unsupported,
                  "got a task with forced tokens under a workload, wanted one that asks for answers");
    if (item.follows) throw Error(Errc::unsupported, "got a task with turns under a workload, wanted turns: 1");
  }
  std::vector<double> trace;
  std::size_t count = static_cast<std::size_t>(workload.requests);
  if (workload.arrivals == Arrivals::trace) {
    const auto path = resolve_data_path(workload.file, folder);
    trace = read_arrivals(path);
    if (count == 0) count = trace.size();
    if (count > trace.size())
      throw Error(Errc::data,
                  "got " + std::to_string(trace.size()) + " arrivals for " + std::to_string(count) + " requests",
                  path.string());
  }
  if (count == 0) count = items.size();
  Random random(static_cast<std::uint64_t>(seed), 0x61727269);  // a stream of its own
  std::vector<Request> out(count);
  double at = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const Item& item = items[i % items.size()];
    out[i].prompt = item.prompt;
    out[i].fed = item.fed;
    out[i].max_new = item.max_new;
    out[i].sequence = static_cast<std::uint32_t>(item.sample);
    out[i].question = static_cast<std::uint32_t>(i % items.size());
    if (workload.arrivals == Arrivals::poisson) at -= std::log(1 - random.unit()) / workload.rate;
    out[i].arrival_ms = 1000 * (trace.empty() ? at : trace[i]);
  }
  return out;
}

}  // namespace kvlab
