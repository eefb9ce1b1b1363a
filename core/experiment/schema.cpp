#include "experiment/schema.hpp"

#include <kvlab/error.hpp>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "experiment/entry_keys.hpp"
#include "experiment/experiment_keys.hpp"
#include "model/synthetic.hpp"

namespace kvlab {
namespace {

using Json = nlohmann::ordered_json;

Json value_json(const ParamValue& value) {
  return std::visit([](const auto& v) { return Json(v); }, value);
}

Json ref(const std::string& name) { return {{"$ref", "#/$defs/" + name}}; }

// One value, or a list of values, each a variant of the run.
Json axis(Json one) {
  Json list{{"type", "array"}, {"items", one}, {"minItems", 1}};
  return {{"anyOf", Json::array({std::move(one), std::move(list)})}};
}

Json number(const char* type, double low, double high) {
  Json schema{{"type", type}};
  const auto bound = [&](const char* key, double x) {
    if (!std::isfinite(x)) return;
    if (x == std::floor(x) && std::fabs(x) < 9e15)
      schema[key] = static_cast<std::int64_t>(x);
    else
      schema[key] = x;
  };
  bound("minimum", low);
  bound("maximum", high);
  return schema;
}

Json integer(double low, double high = any) { return number("integer", low, high); }

Json words(std::initializer_list<const char*> all) {
  Json list = Json::array();
  for (const char* word : all) list.push_back(word);
  return {{"enum", list}};
}

Json text() { return {{"type", "string"}}; }

Json described(Json schema, const std::string& help) {
  schema["description"] = help;
  return schema;
}

// A map with these keys only, or null for an empty one.
Json closed(Json properties) {
  return {{"type", {"object", "null"}}, {"properties", std::move(properties)}, {"additionalProperties", false}};
}

// The words of a choice. An editor takes a bare true or false for a boolean.
Json words(const std::vector<std::string>& choices) {
  Json out = choices;
  for (const bool truth : {true, false})
    if (std::find(choices.begin(), choices.end(), truth ? "true" : "false") != choices.end()) out.push_back(truth);
  return out;
}

Json value(const ParamSpec& spec) {
  switch (spec.kind) {
    case ParamKind::boolean: return {{"type", "boolean"}};
    case ParamKind::integer: return number("integer", spec.low, spec.high);
    case ParamKind::real: return number("number", spec.low, spec.high);
    case ParamKind::text: return text();
    case ParamKind::choice: return {{"enum", words(spec.choices)}};
  }
  return {};
}

Json with_default(Json schema, const ParamSpec& spec) {
  schema = described(std::move(schema), spec.help);
  schema["default"] = value_json(spec.value);
  return schema;
}

Json param(const ParamSpec& spec) { return with_default(axis(value(spec)), spec); }

Json params(const std::vector<ParamSpec>& specs) {
  Json properties = Json::object();
  for (const ParamSpec& spec : specs) properties[spec.name] = param(spec);
  return properties;
}

// {NAME: {...}} with one key of `properties`.
Json one_of_keys(Json properties) {
  return {{"type", "object"},
          {"properties", std::move(properties)},
          {"additionalProperties", false},
          {"minProperties", 1},
          {"maxProperties", 1}};
}

class Builder {
 public:
  explicit Builder(Registry& registry) : registry_(registry) {}

  Json build() {
    Json defs = Json::object();
    for (const Role role : {Role::policy, Role::scorer, Role::selector, Role::pruner, Role::rescorer, Role::budget,
                            Role::codec, Role::metric})
      defs[name_of(role)] = use(role);
    defs["bytes"] = {{"anyOf", {integer(1), {{"type", "string"}, {"pattern", "^[0-9.eE+]+ ?([KMGT]i?B|B)?$"}}}}};
    defs["budget_amount"] = {
        {"type", "object"},
        {"properties",
         {{"tokens", described(axis(integer(1)), "tokens per KV head, pins included")},
          {"ratio", described(axis(number("number", 0, 1)), "share of the tokens seen so far")},
          {"bytes", described(axis(ref("bytes")), "device bytes per sequence, metadata included")},
          {"split", described(axis(ref("budget")), "how it is divided over layers and heads")}}},
        {"additionalProperties", false},
        {"oneOf", {{{"required", {"tokens"}}}, {{"required", {"ratio"}}}, {{"required", {"bytes"}}}}}};
    defs["policy_entry"] = policy_entry();
    defs["task_entry"] = task_entry();
    return {{"$schema", "https://json-schema.org/draft/2020-12/schema"},
            {"title", "kvlab experiment"},
            {"type", "object"},
            {"properties", experiment()},
            {"required", {"model", "tasks"}},
            {"anyOf", {{{"required", {"policies"}}}, {{"required", {"profilers"}}}}},
            {"additionalProperties", false},
            {"$defs", std::move(defs)}};
  }

 private:
  // A plugin of a role as the value of a composition key.
  Json use(Role role) {
    Json all = Json::object(), names = Json::array();
    if (role == Role::policy) names.push_back("full");
    for (const PluginInfo* p : registry_.list(role)) {
      names.push_back(p->name);
      all[p->name] = described(closed(params(p->params)), p->help);
    }
    return {{"anyOf", {{{"enum", names}}, one_of_keys(std::move(all))}}};
  }

  Json composition() {
    Json keys = Json::object();
    for (const EntryKey& key : policy_keys()) keys[key.name] = {{"description", key.help}};
    const auto set = [&](const char* key, Json schema) { keys[key].update(axis(std::move(schema))); };
    for (const Role role : {Role::policy, Role::scorer, Role::selector, Role::pruner, Role::rescorer, Role::codec})
      set(name_of(role), ref(name_of(role)));
    set("budget", ref("budget_amount"));
    set("schedule", closed({{"prefill", axis({{"type", "boolean"}})}, {"every", axis(integer(0))}}));
    set("placement", closed({{"tier", axis(words({"device", "host"}))},
                             {"resident", axis(integer(0))},
                             {"codec", axis(ref("codec"))}}));
    set("page_size", integer(1, 1024));
    set("profile", text());
    return keys;
  }

  Json policy_entry() {
    const Json shared = composition();
    Json named = Json::object(), names = Json::array({"full"});
    named["full"] = closed(shared);
    for (const Role role : {Role::policy, Role::scorer, Role::selector})
      for (const PluginInfo* p : registry_.list(role)) {
        if (named.contains(p->name) && p->name != "full") continue;
        Json properties = params(p->params);
        properties.update(shared);
        if (p->name != "full") names.push_back(p->name);
        named[p->name] = described(closed(std::move(properties)), p->help);
      }
    Json composed = shared;
    composed["name"] = described(text(), "the entry's own name");
    const Json any_of = {
        {{"required", {"policy"}}}, {{"required", {"scorer"}}}, {{"required", {"selector"}}}, {{"required", {"name"}}}};
    return {{"anyOf",
             {{{"enum", names}},
              one_of_keys(std::move(named)),
              {{"type", "object"}, {"properties", std::move(composed)}, {"anyOf", any_of}}}}};
  }

  Json task_entry() {
    Json shared = Json::object();
    for (const EntryKey& key : task_keys()) shared[key.name] = {{"description", key.help}};
    shared["question"].update(axis(words({"prompt", "decode"})));
    shared["questions"].update(axis(integer(1)));
    shared["turns"].update(axis(integer(1)));
    shared["seed"].update(axis(integer(0)));
    shared["metric"].update(axis(ref("metric")));
    Json named = Json::object(), names = Json::array();
    for (const PluginInfo* p : registry_.list(Role::task)) {
      Json properties = params(p->params);
      properties.update(shared);
      names.push_back(p->name);
      named[p->name] = described(closed(std::move(properties)), p->help);
    }
    const Json labelled = {{"type", "object"},
                           {"properties", {{"name", text()}, {"task", {{"enum", names}}}}},
                           {"required", {"name", "task"}}};
    return {{"anyOf", {{{"enum", names}}, one_of_keys(std::move(named)), labelled}}};
  }

  // The keys that are no plain ones.
  Json structured(const std::string& key) {
    const Json model = {{"anyOf",
                         {text(),
                          {{"type", "object"},
                           {"properties",
                            {{"path", axis(text())},
                             {"dtype", axis(words({"bf16", "f32", "fp16"}))},
                             {"adapter", axis(text())},
                             {"synthetic", axis({{"enum", synthetic_names()}})}}},
                           {"additionalProperties", false}}}}};
    const auto list_of = [](Json item) { return Json{{"type", "array"}, {"items", item}, {"minItems", 1}}; };
    if (key == "model") return axis(model);
    if (key == "backend") return words({"auto", "cpu", "cuda"});
    if (key == "tasks") return list_of(ref("task_entry"));
    if (key == "policies") return list_of(ref("policy_entry"));
    if (key == "profilers") return {{"type", "array"}};
    if (key == "sweep" || key == "ablate") return {{"type", "object"}};
    if (key == "seed") return axis(integer(0));
    if (key == "metrics") return axis(words({"score", "fidelity", "memory", "latency", "trace", "parts"}));
    if (key == "fidelity") return closed({{"tokens", integer(1)}});
    if (key == "inject")
      return closed({{"overlap", number("number", 0, 1)},
                     {"rerank_overlap", number("number", 0, 1)},
                     {"correction", number("number", 0, 1)},
                     {"drift", number("number", 0, 1)},
                     {"trace", text()},
                     {"cell", text()}});
    if (key == "equal_bytes" || key == "device_memory" || key == "host_memory") return ref("bytes");
    if (key == "spill") return words({"pressure", "always"});
    if (key == "page_copies") return words({"kernel", "memcpy"});
    if (key == "sampling") return closed(params(sampling_keys()));
    if (key == "plugin_path") return axis(text());
    if (key == "workload") return closed(params(workload_keys()));
    if (key == "experiment" || key == "output") return text();
    throw Error(Errc::internal, "got the key '" + key + "', wanted one that the schema describes");
  }

  Json experiment() {
    Json properties = Json::object();
    for (const ExperimentKey& key : experiment_keys())
      properties[key.name] =
          key.plain ? with_default(value(*key.plain), *key.plain) : described(structured(key.name), key.help);
    return properties;
  }

  Registry& registry_;
};

}  // namespace

std::string schema_text(Registry& registry) { return Builder(registry).build().dump(2) + "\n"; }

}  // namespace kvlab
