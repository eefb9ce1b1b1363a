#include "experiment/composition.hpp"

#include <fmt/format.h>

namespace kvlab {

using yaml::Node;

void read_budget(const Node& node, UseReader& uses, PolicySpec& policy, bool split_alone) {
  Problems& problems = uses.problems();
  static const ParamSpec tokens = make_param("tokens", 1, 1, 1e9, "tokens per KV head, pins included");
  static const ParamSpec ratio = make_param("ratio", 1.0, 1e-6, 1, "share of the tokens seen so far");
  const char* const wanted = "wanted one of tokens: N, ratio: R and bytes: B (and split: NAME)";
  if (!node.is(Node::Kind::map)) {
    problems.add(node.place, fmt::format("got {} for 'budget', {}", yaml::describe(node), wanted));
    return;
  }
  MapReader map(node, "budget", problems);
  int amounts = 0;
  const auto set = [&](BudgetAmount::Kind kind, double value) {
    policy.budget.kind = kind, policy.budget.value = value;
  };
  if (const Node* n = map.take("tokens"); n && ++amounts)
    if (const auto v = read_value(*n, tokens, problems))
      set(BudgetAmount::tokens, static_cast<double>(std::get<std::int64_t>(*v)));
  if (const Node* n = map.take("ratio"); n && ++amounts)
    if (const auto v = read_value(*n, ratio, problems)) set(BudgetAmount::ratio, std::get<double>(*v));
  if (const Node* n = map.take("bytes"); n && ++amounts)
    if (const auto v = read_bytes(*n, problems)) set(BudgetAmount::bytes, static_cast<double>(*v));
  if (const Node* n = map.take("split")) policy.split = uses.use(*n, Role::budget);
  map.finish();
  if (amounts == 0 && split_alone && policy.split) return;
  if (amounts != 1) problems.add(node.place, fmt::format("got a budget with {} amounts, {}", amounts, wanted));
}

void read_schedule(const Node& node, Problems& problems, Schedule& out) {
  MapReader map(node, "schedule", problems);
  out.prefill = map.get<bool>(make_param("prefill", true, "compress when the prompt ends"));
  const ParamSpec every = make_param("every", 0, 0, 1e6, "decode steps between evictions, 0 = never");
  if (map.node().find("every"))
    out.every = map.get<int>(every);
  else
    map.take("every");
  map.finish();
}

void read_placement(const Node& node, UseReader& uses, Placement& out) {
  Problems& problems = uses.problems();
  MapReader map(node, "placement", problems);
  const bool host = map.word("tier", {"device", "host"}, {"disk"}, "where the pages live") == "host";
  const Tier tier = host ? Tier::host : Tier::device;
  out.tier = tier;
  out.resident = map.get<int>(make_param("resident", 0, 0, 1e9, "tokens per KV head that stay on the device"));
  if (const Node* n = map.take("codec")) out.codec = uses.use(*n, Role::codec);
  map.finish();
  if (tier == Tier::device && (out.resident || out.codec))
    problems.add(node.place, "got placement on the device with resident or codec, wanted tier: host");
}

}  // namespace kvlab
