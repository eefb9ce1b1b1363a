#include "experiment/sampling.hpp"

#include <fmt/format.h>

namespace kvlab {

const std::vector<ParamSpec>& sampling_keys() {
  static const std::vector<ParamSpec> keys = {
      make_param("temperature", 0., 0, 100, "logits are divided by it; 0 = the most likely token"),
      make_param("top_p", 1., 0, 1, "the most likely tokens with so much of the probability, above 0"),
      make_param("top_k", 0, 0, 1 << 24, "so many of the most likely tokens; 0 = all"),
      make_param("draws", 1, 1, 1000, "answers to each question"),
      make_param("seed", 0, 0, 9e15, "of the draws; the experiment's seed counts, too"),
  };
  return keys;
}

SamplingSpec read_sampling(const yaml::Node& node, Problems& problems) {
  SamplingSpec out;
  MapReader map(node, "sampling", problems);
  const std::size_t before = problems.size();
  const Params given = map.params(sampling_keys());
  out.temperature = given.get<double>("temperature");
  out.top_p = given.get<double>("top_p");
  out.top_k = given.get<int>("top_k");
  out.draws = given.get<int>("draws");
  out.seed = given.get<std::int64_t>("seed");
  const yaml::Node *temperature = map.take("temperature"), *top_p = map.take("top_p"), *draws = map.take("draws");
  map.finish();
  if (problems.size() != before) return {};
  if (!temperature)
    problems.add(node.place, "got no temperature for 'sampling', wanted one, e.g. {temperature: 0.6, top_p: 0.95}");
  else if (top_p && !(out.top_p > 0))
    problems.add(top_p->place, "got 0 for 'top_p', wanted more than 0, at most 1");
  else if (!out.on() && out.draws > 1)
    problems.add(draws->place,
                 fmt::format("got {} draws at temperature 0, wanted 1: they would all be the same answer", out.draws));
  return out;
}

std::string SamplingSpec::text() const {
  if (!on()) return "";
  std::string out = fmt::format("temperature {:g}", temperature);
  if (top_k > 0) out += fmt::format(", top_k {}", top_k);
  if (top_p < 1) out += fmt::format(", top_p {:g}", top_p);
  return out + fmt::format(", {} {}, seed {}", draws, draws == 1 ? "draw" : "draws", seed);
}

}  // namespace kvlab
