#include "experiment/policy_spec.hpp"

#include <fmt/format.h>

#include "experiment/composition.hpp"
#include "experiment/entry.hpp"

namespace kvlab {

using yaml::Entry;
using yaml::Node;

namespace {

constexpr const char* full_name = "full";
constexpr Role main_roles[] = {Role::policy, Role::scorer, Role::selector};

void main_plugin(const Node& name, const MapReader& map, bool named, UseReader& uses, PolicySpec& policy) {
  Problems& problems = uses.problems();
  std::optional<PluginUse>* const slots[] = {&policy.policy, &policy.scorer, &policy.selector};
  const bool composed = map.node().find("policy") || map.node().find("scorer") || map.node().find("selector");
  const std::vector<std::string> also = names_of(policy_keys());

  // A name beside explicit roles is only a name.
  if (named || !composed) {
    if (name.text == full_name) {
      for (const Entry* e : map.rest()) problems.add(e->key.place, unknown_key(e->key.text, also));
      return;
    }
    for (std::size_t r = 0; r < std::size(main_roles); ++r) {
      if (slots[r]->has_value() || map.node().find(name_of(main_roles[r]))) continue;
      if (const PluginInfo* plugin = uses.find(main_roles[r], name.text, name.place)) {
        uses.check_names(*plugin, policy_keys(), name.place);
        *slots[r] = PluginUse{main_roles[r], name.text, uses.params(*plugin, map.rest(), also)};
        return;
      }
    }
    if (!composed) {
      if (!named) {
        problems.add(
            name.place,
            fmt::format("got the name '{}' without a plugin, wanted scorer, selector or policy beside it", name.text),
            Errc::plugin);
        return;
      }
      std::vector<std::string> known{full_name};
      for (const Role role : main_roles)
        for (std::string& n : uses.catalog().names(role))
          if (n != full_name) known.push_back(std::move(n));
      uses.unknown("policy", name.text, std::move(known), name.place);
      return;
    }
  }
  const auto given = map.rest();
  if (given.empty()) return;
  std::vector<std::optional<PluginUse>*> mine;
  for (auto* slot : slots)
    if (slot->has_value()) mine.push_back(slot);
  if (mine.size() == 1) {
    // The plugin's own map, if it has one, was read already. Parameters beside the map complete it.
    PluginUse& use = **mine.front();
    const PluginInfo* plugin = uses.find(use.role, use.name, name.place);
    if (!plugin) return;
    auto values = use.params.values();
    const Params beside = uses.params(*plugin, given, also);
    for (const Entry* e : given)
      if (const auto it = beside.values().find(e->key.text); it != beside.values().end())
        values[it->first] = it->second;
    use.params = Params(std::move(values));
  } else {
    for (const Entry* e : given) problems.add(e->key.place, unknown_key(e->key.text, also));
  }
}

void check_combination(const Node& entry, const Node& body, Problems& problems, const PolicySpec& policy) {
  const auto place = [&](const char* key) {
    const Entry* e = body.find(key);
    return e ? e->key.place : entry.place;
  };
  if (policy.policy && (policy.scorer || policy.selector))
    problems.add(place(policy.scorer ? "scorer" : "selector"),
                 fmt::format("got policy '{}' with a scorer or selector, wanted it alone: it is a whole life cycle",
                             policy.policy->name));
  const bool codes = policy.placement.codec && policy.placement.resident == 0;  // of its own pages there (build_policy)
  if (policy.policy && body.find("placement") && !codes)
    problems.add(place("placement"),
                 fmt::format("got a placement beside policy '{}', wanted none: a policy plugin alone "
                             "says where its pages are kept",
                             policy.policy->name));
  if (policy.pruner && policy.scorer)
    problems.add(place("pruner"),
                 fmt::format("got a pruner beside scorer '{}', wanted a selector or a policy: a pruner goes by places, "
                             "and a scorer evicts",
                             policy.scorer->name));
  if (policy.rescorer && !policy.scorer)
    problems.add(place("rescorer"), "got a rescorer without a scorer, wanted one: it ranks the scorer's tokens anew");
  const bool none = !policy.policy && !policy.scorer && !policy.selector;
  if (none && policy.budget.kind != BudgetAmount::unlimited)
    problems.add(place("budget"),
                 "got a budget for the policy that keeps everything, wanted a scorer, selector or policy");
  if (policy.split && !policy.scorer && !policy.selector)
    problems.add(place("budget"), "got a split of the budget without a scorer or selector to apply it to");
  if (policy.rescorer && !policy.schedule.prefill)
    problems.add(place("rescorer"),
                 "got a rescorer with schedule.prefill: false, wanted true: it acts when a prompt ends");
  if (body.find("schedule") && !policy.scorer)
    problems.add(place("schedule"), "got a schedule without a scorer, wanted one: the schedule says when it evicts");
}

}  // namespace

std::optional<PolicySpec> read_policy(const Node& entry, int page_size, const PluginCatalog& catalog,
                                      Problems& problems, bool amount_follows) {
  UseReader uses(catalog, problems);
  const std::size_t before = problems.size();
  auto parts = split_entry(entry, "policy", problems);
  if (!parts) return std::nullopt;
  auto& [name, body, named] = *parts;

  PolicySpec policy;
  policy.where = problems.document().where(entry.place);
  MapReader map(body, name.text, problems);
  if (!named) map.take("name");
  std::optional<PluginUse>* const slots[] = {&policy.policy, &policy.scorer, &policy.selector};
  for (std::size_t r = 0; r < std::size(main_roles); ++r)
    if (const Node* n = map.take(name_of(main_roles[r]))) {
      if (main_roles[r] != Role::policy || use_name(*n) != full_name) *slots[r] = uses.use(*n, main_roles[r]);
      if (name.text.empty()) name.text = use_name(*n);
    }
  if (const Node* n = map.take("pruner")) policy.pruner = uses.use(*n, Role::pruner);
  if (const Node* n = map.take("rescorer")) policy.rescorer = uses.use(*n, Role::rescorer);
  if (const Node* n = map.take("budget")) read_budget(*n, uses, policy, amount_follows);
  if (const Node* n = map.take("schedule")) read_schedule(*n, problems, policy.schedule);
  if (const Node* n = map.take("codec")) policy.codec = uses.use(*n, Role::codec);
  if (const Node* n = map.take("placement")) read_placement(*n, uses, policy.placement);
  policy.page_size = map.get<int>(make_param("page_size", page_size, 1, 1024, "tokens per page"));
  policy.profile = map.get<std::string>(make_param("profile", std::string(), "a profile file"));
  if (const Entry* e = body.find("profile"); e && e->value.is(Node::Kind::scalar) && e->value.text.empty())
    problems.add(e->value.place, "got empty text for 'profile', wanted a path");
  if (name.text.empty()) {
    problems.add(entry.place, "got a policy without a name, wanted name, policy, scorer or selector");
    return std::nullopt;
  }
  policy.name = name.text;
  main_plugin(name, map, named, uses, policy);
  if (problems.size() == before) check_combination(entry, body, problems, policy);
  if (problems.size() != before) return std::nullopt;
  return policy;
}

}  // namespace kvlab
