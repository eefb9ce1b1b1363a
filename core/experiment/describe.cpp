#include "experiment/describe.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/text.hpp"
#include "experiment/entry_keys.hpp"
#include "plugin/parameters.hpp"

namespace kvlab {
namespace {

using Row = std::vector<std::string>;

constexpr const char* full_help = "keeps everything: the uncompressed cache (part of kvlab)";

// Pads columns to their widest entry, with two blanks between them.
std::string table(const std::vector<Row>& rows, const std::string& indent) {
  std::vector<std::size_t> width;
  for (const Row& row : rows) {
    width.resize(std::max(width.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  }
  std::string text;
  for (const Row& row : rows) {
    std::string line = indent;
    for (std::size_t i = 0; i < row.size(); ++i)
      if (width[i] > 0) line += fmt::format("{:<{}}  ", row[i], width[i]);
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

struct Kind {
  const char* word;
  std::vector<Role> roles;
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {{"policies", {Role::policy, Role::scorer, Role::selector}},
                                        {"scorers", {Role::scorer}},
                                        {"selectors", {Role::selector}},
                                        {"budgets", {Role::budget}},
                                        {"codecs", {Role::codec}},
                                        {"profilers", {Role::profiler}},
                                        {"tasks", {Role::task}}};
  return all;
}

std::vector<Role> roles_of(const std::string& kind) {
  if (kind.empty())
    return {Role::policy, Role::scorer, Role::selector, Role::budget, Role::codec, Role::profiler, Role::task};
  std::vector<std::string> words;
  for (const Kind& k : kinds()) {
    if (k.word == kind) return k.roles;
    words.emplace_back(k.word);
  }
  words.emplace_back("models");
  throw Error(Errc::config, "got '" + kind + "', wanted one of: " + join(words) + did_you_mean(kind, words));
}

// The file's name for a plugin of kvlab, the whole path for any other.
std::string library_text(const PluginInfo& plugin) {
  if (plugin.library.empty()) return "kvlab";
  const auto folder = plugin.library.parent_path();
  if (folder == own_folder() / "plugins" || folder == own_folder() / "kvlab" / "plugins")
    return plugin.library.filename().string();
  return plugin.library.string();
}

// The default as YAML spells it.
std::string yaml_text(const ParamSpec& spec) {
  const std::string text = to_text(spec.value);
  const auto* word = std::get_if<std::string>(&spec.value);
  if (!word || word->empty() || word->find_first_of(":#{}[],&*!|>'\"%@`\\ \n\t") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : *word) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c == '\n' ? "\\n" : c == '\t' ? "\\t" : std::string(1, c);
  }
  return quoted + "\"";
}

// yaml_text, cut to fit into a column. The example has it whole.
std::string default_text(const ParamSpec& spec) {
  constexpr std::size_t longest = 32;
  const std::string text = yaml_text(spec);
  return text.size() <= longest ? text : text.substr(0, longest - 4) + "...\"";
}

std::string type_text(const ParamSpec& spec) { return spec.kind == ParamKind::choice ? "choice" : name_of(spec.kind); }

std::string keys_text(const std::vector<EntryKey>& keys) {
  std::vector<Row> rows;
  for (const EntryKey& key : keys) rows.push_back({key.name, key.form, key.help});
  return table(rows, "  ");
}

// "NAME: {budget: {tokens: 512}, window: 32}", without components and without texts that have no default.
std::string entry_text(const PluginInfo& plugin, const std::string& first) {
  Row pairs;
  if (!first.empty()) pairs.push_back(first);
  for (const ParamSpec& spec : plugin.params)
    if (!spec.component && spec.value != ParamValue(std::string())) pairs.push_back(spec.name + ": " + yaml_text(spec));
  return pairs.empty() ? plugin.name : plugin.name + ": {" + join(pairs) + "}";
}

std::string first_name(Registry& registry, Role role, const std::string& otherwise) {
  const auto names = registry.names({role});
  return names.empty() ? otherwise : names.front();
}

// The entry of the first task that needs no file.
std::string any_task(Registry& registry) {
  for (const PluginInfo* task : registry.list(Role::task)) {
    const auto is_file = [](const ParamSpec& spec) { return spec.value == ParamValue(std::string()); };
    if (std::none_of(task->params.begin(), task->params.end(), is_file)) return task->name;
  }
  return first_name(registry, Role::task, "TASK");
}

std::string experiment(const std::string& task, const std::string& policy) {
  return "model: {path: bundled/recall}\ntasks:\n  - " + task + "\npolicies:\n  - full\n" +
         (policy.empty() ? "" : "  - " + policy + "\n");
}

// A whole experiment file.
std::string example(Registry& registry, const PluginInfo& plugin) {
  switch (plugin.role) {
    case Role::scorer:
    case Role::selector:
    case Role::policy: {
      const std::string text = experiment(any_task(registry), entry_text(plugin, "budget: {tokens: 512}"));
      Row components;
      for (const ParamSpec& spec : plugin.params)
        if (spec.component) components.push_back(spec.name);
      return components.empty() ? text : text + "ablate: {" + plugin.name + ": [" + join(components) + "]}\n";
    }
    case Role::budget: {
      const std::string split = plugin.params.empty() ? plugin.name : "{" + entry_text(plugin, "") + "}";
      return experiment(any_task(registry), first_name(registry, Role::scorer, "SCORER") +
                                                ": {budget: {tokens: 512, split: " + split + "}}");
    }
    case Role::codec: {
      const std::string codec = plugin.params.empty() ? plugin.name : "{" + entry_text(plugin, "") + "}";
      return experiment(any_task(registry), "{name: full-" + plugin.name + ", policy: full, codec: " + codec + "}");
    }
    case Role::profiler: return "profilers:\n  - " + entry_text(plugin, "") + "\n";
    case Role::task: return experiment(entry_text(plugin, ""), "");
  }
  return "";
}

std::string describe_one(Registry& registry, const PluginInfo& plugin) {
  std::string text = fmt::format("{} ({}, version {})\n  {}\n  library: {}\n", plugin.name, name_of(plugin.role),
                                 plugin.version, plugin.help, library_text(plugin));
  std::vector<Row> rows{{"name", "type", "default", "range", "help"}};
  std::vector<Row> components;
  for (const ParamSpec& spec : plugin.params) {
    if (spec.component)
      components.push_back({spec.name, spec.help});
    else
      rows.push_back({spec.name, type_text(spec), default_text(spec), range_text(spec), spec.help});
  }
  text += rows.size() > 1 ? "\nparameters\n" + table(rows, "  ") : "\nno parameters\n";
  if (!components.empty())
    text +=
        "\ncomponents (true or false, on by default; `ablate` switches each off in turn)\n" + table(components, "  ");
  if (plugin.role == Role::scorer || plugin.role == Role::selector || plugin.role == Role::policy)
    text += "\nkeys of every policy\n" + keys_text(policy_keys());
  if (plugin.role == Role::task) text += "\nkeys of every task\n" + keys_text(task_keys());
  return text + "\nexample\n" + example(registry, plugin);
}

std::string diagnostics_text(Registry& registry) {
  std::string broken, shadowed;
  for (const Diagnostic& d : registry.diagnostics())
    (d.shadowed ? shadowed : broken) += fmt::format("  {}: {}\n", d.path.string(), d.message);
  std::string text;
  if (!broken.empty()) text += "\nnot usable\n" + broken;
  if (!shadowed.empty()) text += "\nhidden by an earlier place of the search path\n" + shadowed;
  return text;
}

}  // namespace

std::string list_text(Registry& registry, const std::string& kind) {
  std::vector<Row> rows{{"NAME", "ROLE", "VERSION", "LIBRARY", "HELP"}};
  const auto roles = roles_of(kind);
  const auto wanted = [&](Role role) { return std::find(roles.begin(), roles.end(), role) != roles.end(); };
  if (wanted(Role::policy) && !registry.find(Role::policy, "full"))
    rows.push_back({"full", name_of(Role::policy), KVLAB_VERSION, "kvlab", full_help});
  for (const Role role : roles)
    for (const PluginInfo* p : registry.list(role))
      rows.push_back({p->name, name_of(p->role), p->version, library_text(*p), p->help});
  return table(rows, "") + diagnostics_text(registry);
}

std::string describe_text(Registry& registry, const std::string& name) {
  std::string text;
  const auto add = [&](const std::string& one) { text += (text.empty() ? "" : "\n") + one; };
  for (const PluginInfo* plugin : registry.list())
    if (plugin->name == name) add(describe_one(registry, *registry.find(plugin->role, name)));
  if (!text.empty()) return text;
  if (name == "full")
    return fmt::format("full (policy, version {})\n  {}\n\nno parameters\n\nkeys of every policy\n{}\nexample\n{}",
                       KVLAB_VERSION, full_help, keys_text(policy_keys()), experiment(any_task(registry), ""));
  registry.require(roles_of(""), name, {"full"});
  return text;
}

}  // namespace kvlab
