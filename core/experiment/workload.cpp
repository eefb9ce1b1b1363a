#include "experiment/workload.hpp"

#include <fmt/format.h>

namespace kvlab {

const std::vector<ParamSpec>& workload_keys() {
  static const std::vector<ParamSpec> keys = {
      make_param("requests", 0, 0, 1'000'000, "0 = one for each prompt, or each line of the file"),
      make_choice("arrivals", {"all", "poisson", "trace"}, "when requests arrive"),
      make_param("rate", 0., 0., 1e6, "requests per second"),
      make_param("file", std::string(), "arrivals in seconds, one a line"),
      make_param("ignore_eos", false, "answers go on to their longest, past end tokens and stop texts"),
      make_choice("preemption", {"swap", "recompute"}, "a preempted request's cache waits on the host, or is lost"),
  };
  return keys;
}

WorkloadSpec read_workload(const yaml::Node& node, Problems& problems) {
  WorkloadSpec w;
  w.where = problems.document().where(node.place);
  MapReader map(node, "workload", problems);
  const Params given = map.params(workload_keys());
  w.requests = given.get<int>("requests");
  const auto arrivals = given.get<std::string>("arrivals");
  w.arrivals = arrivals == "poisson" ? Arrivals::poisson : arrivals == "trace" ? Arrivals::trace : Arrivals::all;
  w.rate = given.get<double>("rate");
  w.file = given.get<std::string>("file");
  w.ignore_eos = given.get<bool>("ignore_eos");
  w.recompute = given.get<std::string>("preemption") == "recompute";
  const yaml::Node *rate = map.take("rate"), *file = map.take("file");
  map.finish();
  if (w.arrivals == Arrivals::poisson && !(w.rate > 0))
    problems.add(rate ? rate->place : node.place,
                 "got arrivals: poisson without a rate, wanted rate: REQUESTS_PER_SECOND");
  if (w.arrivals != Arrivals::poisson && rate)
    problems.add(rate->place, "got a rate with arrivals: " + arrivals + ", wanted it with arrivals: poisson");
  if (w.arrivals == Arrivals::trace && w.file.empty())
    problems.add(file ? file->place : node.place, "got arrivals: trace without a file, wanted file: FILE");
  if (w.arrivals != Arrivals::trace && file)
    problems.add(file->place, "got a file with arrivals: " + arrivals + ", wanted it with arrivals: trace");
  return w;
}

std::string WorkloadSpec::text() const {
  std::string out = requests > 0 ? fmt::format("{} {}, ", requests, requests == 1 ? "request" : "requests") : "";
  if (arrivals == Arrivals::poisson)
    out += fmt::format("poisson {:g}/s", rate);
  else if (arrivals == Arrivals::trace)
    out += "arrivals of " + file;
  else
    out += "all at once";
  if (ignore_eos) out += ", longest answers";
  return recompute ? out + ", recomputed when preempted" : out;
}

}  // namespace kvlab
