#include "experiment/policy_spec.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "base/text.hpp"
#include "experiment/entry_keys.hpp"
#include "host/parameters.hpp"

namespace kvlab {
namespace {

using yaml::Entry;
using yaml::Node;
using Json = nlohmann::ordered_json;

constexpr std::int64_t most_int = 2147483647;
constexpr const char* full_name = "full";
constexpr Role main_roles[] = {Role::policy, Role::scorer, Role::selector};

bool is_body_key(std::string_view key) {
  return std::any_of(policy_keys().begin(), policy_keys().end(), [&](const EntryKey& k) { return key == k.name; });
}

// With the label's key, for messages.
std::vector<std::string> names_of(const std::vector<EntryKey>& keys) {
  std::vector<std::string> names{"name"};
  for (const EntryKey& key : keys) names.emplace_back(key.name);
  return names;
}

// {NAME: {...}} as opposed to {name: LABEL, ...}.
const Entry* named_form(const Node& entry) {
  if (!entry.is(Node::Kind::map) || entry.entries.empty()) return nullptr;
  for (const char* key : {"name", "policy", "scorer", "selector", "task"})
    if (entry.find(key)) return nullptr;
  const Entry& first = entry.entries.front();
  return is_body_key(first.key.text) ? nullptr : &first;
}

// The name in `X` or `{X: {...}}`.
std::string use_name(const Node& node) {
  if (node.is(Node::Kind::scalar)) return node.text;
  if (node.is(Node::Kind::map) && node.entries.size() == 1) return node.entries.front().key.text;
  return "";
}

class EntryReader {
 public:
  EntryReader(const PluginCatalog& catalog, Problems& problems) : catalog_(catalog), problems_(problems) {}

  const PluginInfo* find(Role role, const std::string& name, yaml::Place place) {
    try {
      return catalog_.find(role, name);
    } catch (const Error& e) {
      problems_.add(place, e.message(), e.code());
      return nullptr;
    }
  }

  void unknown(const std::string& what, const std::string& name, std::vector<std::string> known, yaml::Place place) {
    std::string message = fmt::format("got unknown {} '{}', wanted one of: {}", what, name,
                                      known.empty() ? "(there is none)" : join(known)) +
                          did_you_mean(name, known);
    if (message.find("did you mean") == message.npos) message += "; plugin_path names folders with plugins of yours";
    for (std::uint32_t r = 0; r < role_count; ++r)
      if (find(static_cast<Role>(r), name, place))
        message += fmt::format("; '{}' is a {}", name, name_of(static_cast<Role>(r)));
    if (const std::size_t n = catalog_.broken())
      message +=
          fmt::format("; {} plugin {} could not be loaded: see `kvlab doctor`", n, n == 1 ? "library" : "libraries");
    problems_.add(place, message, Errc::plugin);
  }

  // A parameter that an entry's own keys hide could never be set.
  void check_names(const PluginInfo& plugin, const std::vector<EntryKey>& keys, yaml::Place place) {
    for (const EntryKey& key : keys)
      if (find_param(plugin, key.name))
        problems_.add(place,
                      fmt::format("got plugin '{}' with a parameter '{}', wanted another name: it is a key of every {}",
                                  plugin.name, key.name, plugin.role == Role::task ? "task" : "policy"),
                      Errc::plugin);
  }

  // Defaults, replaced by what `given` says. `also` = keys that may stand beside the parameters, for the message.
  Params params(const PluginInfo& plugin, const std::vector<const Entry*>& given, std::vector<std::string> also = {}) {
    std::map<std::string, ParamValue, std::less<>> values;
    for (const ParamSpec& spec : plugin.params) values[spec.name] = spec.value;
    for (const Entry* e : given) {
      const ParamSpec* spec = find_param(plugin, e->key.text);
      if (!spec) {
        std::vector<std::string> known;
        for (const ParamSpec& s : plugin.params) known.push_back(s.name);
        known.insert(known.end(), also.begin(), also.end());
        if (known.empty())
          problems_.add(e->key.place,
                        fmt::format("got key '{}', wanted none: {} has no parameters", e->key.text, plugin.name));
        else
          problems_.add(e->key.place, unknown_key(e->key.text, known));
      } else if (auto value = read_value(e->value, *spec, problems_)) {
        // Without a declared limit, plugins read integers as int.
        if (const auto* i = std::get_if<std::int64_t>(&*value); i && spec->high == any && *i > most_int)
          problems_.add(e->value.place, fmt::format("got {} for '{}', wanted at most {}", *i, spec->name, most_int));
        values[spec->name] = std::move(*value);
      }
    }
    return Params(std::move(values));
  }

  // `X` or `{X: {...}}`.
  std::optional<PluginUse> use(const Node& node, Role role) {
    const std::string name = use_name(node);
    if (name.empty()) {
      problems_.add(node.place, fmt::format("got {} for '{}', wanted NAME or {{NAME: {{...}}}}", yaml::describe(node),
                                            name_of(role)));
      return std::nullopt;
    }
    const PluginInfo* plugin = find(role, name, node.place);
    if (!plugin) {
      unknown(name_of(role), name, catalog_.names(role), node.place);
      return std::nullopt;
    }
    PluginUse result{role, name, {}};
    const Node none;
    const Node& body = node.is(Node::Kind::map) ? node.entries.front().value : none;
    MapReader map(body, name, problems_);
    result.params = params(*plugin, map.rest());
    return result;
  }

  void budget(const Node& node, PolicySpec& policy) {
    static const ParamSpec tokens = make_param("tokens", 1, 1, 1e9, "tokens per KV head, pins included");
    static const ParamSpec ratio = make_param("ratio", 1.0, 1e-6, 1, "share of the tokens seen so far");
    const char* const wanted = "wanted one of tokens: N, ratio: R and bytes: B (and split: NAME)";
    if (!node.is(Node::Kind::map)) {
      problems_.add(node.place, fmt::format("got {} for 'budget', {}", yaml::describe(node), wanted));
      return;
    }
    MapReader map(node, "budget", problems_);
    int amounts = 0;
    const auto set = [&](BudgetAmount::Kind kind, double value) {
      policy.budget.kind = kind, policy.budget.value = value;
    };
    if (const Node* n = map.take("tokens"); n && ++amounts)
      if (const auto v = read_value(*n, tokens, problems_))
        set(BudgetAmount::tokens, static_cast<double>(std::get<std::int64_t>(*v)));
    if (const Node* n = map.take("ratio"); n && ++amounts)
      if (const auto v = read_value(*n, ratio, problems_)) set(BudgetAmount::ratio, std::get<double>(*v));
    if (const Node* n = map.take("bytes"); n && ++amounts)
      if (const auto v = read_bytes(*n, problems_)) set(BudgetAmount::bytes, static_cast<double>(*v));
    if (const Node* n = map.take("split")) policy.split = use(*n, Role::budget);
    map.finish();
    if (amounts != 1) problems_.add(node.place, fmt::format("got a budget with {} amounts, {}", amounts, wanted));
  }

  void schedule(const Node& node, Schedule& out) {
    MapReader map(node, "schedule", problems_);
    out.prefill = map.get<bool>(make_param("prefill", true, "compress when the prompt ends"));
    const ParamSpec every = make_param("every", 0, 0, 1e6, "decode steps between evictions, 0 = never");
    if (map.node().find("every"))
      out.every = map.get<int>(every);
    else
      map.take("every");
    map.finish();
  }

  void placement(const Node& node, Placement& out) {
    MapReader map(node, "placement", problems_);
    const bool host = map.word("tier", {"device", "host"}, {"disk"}, "where the pages live") == "host";
    const Tier tier = host ? Tier::host : Tier::device;
    out.tier = tier;
    out.resident = map.get<int>(make_param("resident", 0, 0, 1e9, "tokens per KV head that stay on the device"));
    if (const Node* n = map.take("codec")) out.codec = use(*n, Role::codec);
    map.finish();
    if (tier == Tier::device && (out.resident || out.codec))
      problems_.add(node.place, "got placement on the device with resident or codec, wanted tier: host");
  }

  std::optional<PolicySpec> policy(const Node& entry, int page_size);
  std::optional<TaskSpec> task(const Node& entry);
  std::optional<PluginUse> profiler(const Node& entry) { return use(entry, Role::profiler); }

 private:
  // Key and body of an entry, both forms; false and a note when the entry has neither.
  bool split_entry(const Node& entry, const char* kind, Node& name, Node& body, bool& named);
  void main_plugin(const Node& name, const MapReader& map, bool named, PolicySpec& policy);
  void check_combination(const Node& entry, const Node& body, const PolicySpec& policy);

  const PluginCatalog& catalog_;
  Problems& problems_;
};

bool EntryReader::split_entry(const Node& entry, const char* kind, Node& name, Node& body, bool& named) {
  named = true;
  if (entry.is(Node::Kind::scalar)) {
    name = entry;
    return true;
  }
  if (!entry.is(Node::Kind::map) || entry.entries.empty()) {
    problems_.add(entry.place,
                  fmt::format("got {} as a {}, wanted NAME or {{NAME: {{...}}}}", yaml::describe(entry), kind));
    return false;
  }
  if (const Entry* first = named_form(entry)) {
    if (entry.entries.size() > 1) {
      const Node& second = entry.entries[1].key;
      problems_.add(second.place, fmt::format("got key '{}' beside '{}', wanted it inside: indent it further than '{}'",
                                              second.text, first->key.text, first->key.text));
      return false;
    }
    name = first->key;
    body = first->value;
    return true;
  }
  named = false;
  body = entry;
  if (const Entry* e = body.find("name")) {
    if (!e->value.is(Node::Kind::scalar) || e->value.text.empty()) {
      problems_.add(e->value.place, "got " + yaml::describe(e->value) + " for 'name', wanted a word");
      return false;
    }
    name = e->value;
  }
  return true;
}

void EntryReader::main_plugin(const Node& name, const MapReader& map, bool named, PolicySpec& policy) {
  std::optional<PluginUse>* const slots[] = {&policy.policy, &policy.scorer, &policy.selector};
  const bool composed = map.node().find("policy") || map.node().find("scorer") || map.node().find("selector");
  const std::vector<std::string> also = names_of(policy_keys());

  // A label beside explicit roles is only a label.
  if (named || !composed) {
    if (name.text == full_name) {
      for (const Entry* e : map.rest()) problems_.add(e->key.place, unknown_key(e->key.text, also));
      return;
    }
    for (std::size_t r = 0; r < std::size(main_roles); ++r) {
      if (slots[r]->has_value() || map.node().find(name_of(main_roles[r]))) continue;
      if (const PluginInfo* plugin = find(main_roles[r], name.text, name.place)) {
        check_names(*plugin, policy_keys(), name.place);
        *slots[r] = PluginUse{main_roles[r], name.text, params(*plugin, map.rest(), also)};
        return;
      }
    }
    if (!composed) {
      std::vector<std::string> known{full_name};
      for (const Role role : main_roles)
        for (std::string& n : catalog_.names(role))
          if (n != full_name) known.push_back(std::move(n));
      unknown("policy", name.text, std::move(known), name.place);
      return;
    }
  }
  const auto given = map.rest();
  if (given.empty()) return;
  std::vector<std::optional<PluginUse>*> uses;
  for (auto* slot : slots)
    if (slot->has_value()) uses.push_back(slot);
  if (uses.size() == 1) {
    // Its own map, if it has one, was read already; parameters beside it complete it.
    PluginUse& use = **uses.front();
    const PluginInfo* plugin = find(use.role, use.name, name.place);
    if (!plugin) return;
    auto values = use.params.values();
    const Params beside = params(*plugin, given, also);
    for (const Entry* e : given)
      if (const auto it = beside.values().find(e->key.text); it != beside.values().end())
        values[it->first] = it->second;
    use.params = Params(std::move(values));
  } else {
    for (const Entry* e : given) problems_.add(e->key.place, unknown_key(e->key.text, also));
  }
}

void EntryReader::check_combination(const Node& entry, const Node& body, const PolicySpec& policy) {
  const auto place = [&](const char* key) {
    const Entry* e = body.find(key);
    return e ? e->key.place : entry.place;
  };
  if (policy.policy && (policy.scorer || policy.selector))
    problems_.add(place(policy.scorer ? "scorer" : "selector"),
                  fmt::format("got policy '{}' with a scorer or selector, wanted it alone: it is a whole life cycle",
                              policy.policy->name));
  const bool none = !policy.policy && !policy.scorer && !policy.selector;
  if (none && policy.budget.kind != BudgetAmount::unlimited)
    problems_.add(place("budget"),
                  "got a budget for the policy that keeps everything, wanted a scorer, selector or policy");
  if (policy.split && !policy.scorer && !policy.selector)
    problems_.add(place("budget"), "got a split of the budget without a scorer or selector to apply it to");
  if (body.find("schedule") && !policy.scorer)
    problems_.add(place("schedule"), "got a schedule without a scorer, wanted one: the schedule says when it evicts");
}

std::optional<PolicySpec> EntryReader::policy(const Node& entry, int page_size) {
  const std::size_t before = problems_.size();
  Node name, body;
  bool named = false;
  if (!split_entry(entry, "policy", name, body, named)) return std::nullopt;

  PolicySpec policy;
  policy.where = problems_.document().where(entry.place);
  MapReader map(body, name.text, problems_);
  if (!named) map.take("name");
  std::optional<PluginUse>* const slots[] = {&policy.policy, &policy.scorer, &policy.selector};
  for (std::size_t r = 0; r < std::size(main_roles); ++r)
    if (const Node* n = map.take(name_of(main_roles[r]))) {
      if (main_roles[r] != Role::policy || use_name(*n) != full_name) *slots[r] = use(*n, main_roles[r]);
      if (name.text.empty()) name.text = use_name(*n);
    }
  if (const Node* n = map.take("budget")) budget(*n, policy);
  if (const Node* n = map.take("schedule")) schedule(*n, policy.schedule);
  if (const Node* n = map.take("codec")) policy.codec = use(*n, Role::codec);
  if (const Node* n = map.take("placement")) placement(*n, policy.placement);
  policy.page_size = map.get<int>(make_param("page_size", page_size, 1, 1024, "tokens per page"));
  if (name.text.empty()) {
    problems_.add(entry.place, "got a policy without a name, wanted name, policy, scorer or selector");
    return std::nullopt;
  }
  policy.name = name.text;
  main_plugin(name, map, named, policy);
  if (problems_.size() == before) check_combination(entry, body, policy);
  if (problems_.size() != before) return std::nullopt;
  return policy;
}

std::optional<TaskSpec> EntryReader::task(const Node& entry) {
  const std::size_t before = problems_.size();
  Node name, body;
  bool named = false;
  if (!split_entry(entry, "task", name, body, named)) return std::nullopt;
  TaskSpec task;
  task.where = problems_.document().where(entry.place);
  MapReader map(body, name.text, problems_);
  task.name = name.text;
  if (!named) {
    map.take("name");
    const Node* plugin = map.take("task");
    if (plugin) name = *plugin;
    if (!name.is(Node::Kind::scalar) || name.text.empty()) {
      problems_.add(entry.place, "got a task without a name, wanted {NAME: {...}} or {name: LABEL, task: NAME, ...}");
      return std::nullopt;
    }
    if (task.name.empty()) task.name = name.text;
  }
  const PluginInfo* plugin = find(Role::task, name.text, name.place);
  if (!plugin) {
    unknown("task", name.text, catalog_.names(Role::task), name.place);
    return std::nullopt;
  }
  check_names(*plugin, task_keys(), name.place);
  const ParamSpec question = make_choice("question", {"prompt", "decode"}, "when the policy sees the question");
  task.question = map.get<std::string>(question) == "decode" ? Question::decode : Question::prompt;
  task.questions = map.get<int>(make_param("questions", 1, 1, 100000, "questions over one context"));
  task.turns = map.get<int>(make_param("turns", 1, 1, 100000, "turns of a conversation"));
  if (map.node().find("seed"))
    task.seed = map.get<std::int64_t>(make_param("seed", 0, 0, 9e15, "seed of the samples"));
  else
    map.take("seed");
  task.task = {Role::task, name.text, params(*plugin, map.rest(), names_of(task_keys()))};
  if (problems_.size() != before) return std::nullopt;
  return task;
}

template <class Policy, class Visit>
void for_each_use(Policy& policy, Visit visit) {
  for (auto* use :
       {&policy.policy, &policy.scorer, &policy.selector, &policy.split, &policy.codec, &policy.placement.codec})
    if (use->has_value()) visit(**use);
}

Json to_json(const ParamValue& value) {
  return std::visit([](const auto& v) { return Json(v); }, value);
}

}  // namespace

std::string entry_label(const Node& entry) {
  if (entry.is(Node::Kind::scalar)) return entry.text;
  if (const Entry* named = named_form(entry)) return named->key.text;
  for (const char* key : {"name", "policy", "scorer", "selector", "task"})
    if (const Entry* e = entry.find(key)) return use_name(e->value);
  return "";
}

Node& entry_body(Node& entry) {
  if (entry.is(Node::Kind::scalar)) {
    Node map;
    map.kind = Node::Kind::map;
    map.place = entry.place;
    map.entries.push_back({entry, Node{}});
    map.entries.front().value.place = entry.place;
    entry = std::move(map);
  }
  return named_form(entry) ? entry.entries.front().value : entry;
}

std::optional<PolicySpec> read_policy(const Node& entry, int page_size, const PluginCatalog& catalog,
                                      Problems& problems) {
  return EntryReader(catalog, problems).policy(entry, page_size);
}

std::optional<TaskSpec> read_task(const Node& entry, const PluginCatalog& catalog, Problems& problems) {
  return EntryReader(catalog, problems).task(entry);
}

std::optional<PluginUse> read_profiler(const Node& entry, const PluginCatalog& catalog, Problems& problems) {
  return EntryReader(catalog, problems).profiler(entry);
}

std::optional<PolicySpec> without(const PolicySpec& policy, const std::string& component,
                                  const PluginCatalog& catalog) {
  PolicySpec variant = policy;
  variant.name += " -" + component;
  bool found = false;
  for_each_use(variant, [&](PluginUse& use) {
    const PluginInfo* plugin = catalog.find(use.role, use.name);
    const ParamSpec* spec = plugin ? find_param(*plugin, component) : nullptr;
    if (!spec || !spec->component || !use.params.get<bool>(component)) return;
    auto values = use.params.values();
    values[component] = false;
    use.params = Params(std::move(values));
    found = true;
  });
  if (!found) return std::nullopt;
  return variant;
}

std::vector<std::string> components(const PolicySpec& policy, const PluginCatalog& catalog) {
  std::vector<std::string> names;
  for_each_use(policy, [&](const PluginUse& use) {
    if (const PluginInfo* plugin = catalog.find(use.role, use.name))
      for (const ParamSpec& spec : plugin->params)
        if (spec.component && std::find(names.begin(), names.end(), spec.name) == names.end())
          names.push_back(spec.name);
  });
  return names;
}

Json to_json(const Params& params) {
  Json json = Json::object();
  for (const auto& [name, value] : params.values()) json[name] = to_json(value);
  return json;
}

Json to_json(const PolicySpec& policy) {
  const auto use = [](const PluginUse& u) { return Json{{u.name, to_json(u.params)}}; };
  static constexpr const char* amounts[] = {"unlimited", "tokens", "ratio", "bytes"};
  Json json = Json::object();
  if (policy.policy) json["policy"] = use(*policy.policy);
  if (policy.scorer) json["scorer"] = use(*policy.scorer);
  if (policy.selector) json["selector"] = use(*policy.selector);
  if (policy.budget.kind != BudgetAmount::unlimited) {
    Json budget = Json::object();
    if (policy.budget.kind == BudgetAmount::ratio)
      budget["ratio"] = policy.budget.value;
    else
      budget[amounts[policy.budget.kind]] = static_cast<std::int64_t>(policy.budget.value);
    if (policy.split) budget["split"] = use(*policy.split);
    json["budget"] = budget;
  }
  if (policy.scorer) {
    json["schedule"] = {{"prefill", policy.schedule.prefill}};
    if (policy.schedule.every) json["schedule"]["every"] = *policy.schedule.every;
  }
  if (policy.codec) json["codec"] = use(*policy.codec);
  if (policy.placement.tier != Tier::device) {
    json["placement"] = {{"tier", "host"}, {"resident", policy.placement.resident}};
    if (policy.placement.codec) json["placement"]["codec"] = use(*policy.placement.codec);
  }
  json["page_size"] = policy.page_size;
  return json;
}

Json to_json(const TaskSpec& task) {
  Json json = {{task.task.name, to_json(task.task.params)}};
  json["question"] = task.question == Question::decode ? "decode" : "prompt";
  json["questions"] = task.questions;
  if (task.turns > 1) json["turns"] = task.turns;
  return json;
}

}  // namespace kvlab
