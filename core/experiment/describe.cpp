#include "experiment/describe.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>

#include "base/content_hash.hpp"
#include "base/text.hpp"
#include "compose/coded.hpp"
#include "compose/pruning.hpp"
#include "compose/row_coded.hpp"
#include "experiment/entry_keys.hpp"
#include "ops/page/paged.hpp"
#include "plugin/library_note.hpp"
#include "plugin/loader.hpp"
#include "plugin/parameters.hpp"

namespace kvlab {
namespace {

using Json = nlohmann::ordered_json;
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
                                        {"pruners", {Role::pruner}},
                                        {"rescorers", {Role::rescorer}},
                                        {"budgets", {Role::budget}},
                                        {"codecs", {Role::codec}},
                                        {"profilers", {Role::profiler}},
                                        {"tasks", {Role::task}},
                                        {"metrics", {Role::metric}}};
  return all;
}

std::vector<Role> roles_of(const std::string& kind) {
  if (kind.empty())
    return {Role::policy, Role::scorer, Role::selector, Role::pruner, Role::rescorer,
            Role::budget, Role::codec,  Role::profiler, Role::task,   Role::metric};
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

// The plugin as a value: its name, or a map of its parameters.
std::string use_text(const PluginInfo& plugin) {
  const std::string entry = entry_text(plugin, "");
  return entry == plugin.name ? entry : "{" + entry + "}";
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

Needs needs_of(const PluginInfo& plugin) {
  const Params defaults = resolve(plugin, {});
  if (plugin.role == Role::scorer) return create<Scorer>(plugin, defaults)->needs();
  if (plugin.role == Role::selector) return create<Selector>(plugin, defaults)->needs();
  if (plugin.role == Role::pruner) return create<Pruner>(plugin, defaults)->needs();
  if (plugin.role == Role::rescorer) return create<Rescorer>(plugin, defaults)->needs();
  return create<Policy>(plugin, defaults)->needs();
}

bool splits_by_profile(const PluginInfo& budget) {
  try {
    return create<Budget>(budget, resolve(budget, {}))->reads_profile();
  } catch (const Error&) {  // not known without its parameters
    return false;
  }
}

// The keys of an example's entry, as far as they are known before the plugin has its parameters.
std::string first_keys(const PluginInfo& plugin) {
  const std::string budget = "budget: {tokens: 512}";
  try {
    const Needs needs = needs_of(plugin);
    if (needs.own_amount()) return needs.profile() ? "profile: FILE" : "";
    return needs.profile() ? budget + ", profile: FILE" : budget;
  } catch (const Error&) {
    return budget;
  }
}

// A whole experiment file.
std::string example(Registry& registry, const PluginInfo& plugin) {
  switch (plugin.role) {
    case Role::scorer:
    case Role::selector:
    case Role::policy: {
      const std::string text = experiment(any_task(registry), entry_text(plugin, first_keys(plugin)));
      Row components;
      for (const ParamSpec& spec : plugin.params)
        if (spec.component) components.push_back(spec.name);
      return components.empty() ? text : text + "ablate: {" + plugin.name + ": [" + join(components) + "]}\n";
    }
    case Role::pruner:
    case Role::rescorer: {
      const bool prunes = plugin.role == Role::pruner;
      const std::string first =
          prunes ? first_name(registry, Role::selector, "SELECTOR") : first_name(registry, Role::scorer, "SCORER");
      return experiment(any_task(registry), fmt::format("{}: {{{}: {}, budget: {{tokens: 512}}}}", first,
                                                        name_of(plugin.role), use_text(plugin)));
    }
    case Role::budget: {
      const std::string split = use_text(plugin);
      return experiment(any_task(registry), first_name(registry, Role::scorer, "SCORER") +
                                                ": {budget: {tokens: 512, split: " + split + "}" +
                                                (splits_by_profile(plugin) ? ", profile: FILE" : "") + "}");
    }
    case Role::codec: {
      return experiment(any_task(registry),
                        "{name: full-" + plugin.name + ", policy: full, codec: " + use_text(plugin) + "}");
    }
    case Role::profiler: return "profilers:\n  - " + entry_text(plugin, "") + "\n";
    case Role::task: return experiment(entry_text(plugin, ""), "");
    case Role::metric: return experiment(any_task(registry) + ": {metric: " + use_text(plugin) + "}", "");
  }
  return "";
}

template <class T>
std::string words_of(const std::vector<T>& some) {
  Row words;
  for (const T t : some) words.emplace_back(name_of(t));
  return some.empty() ? "all" : join(words);
}

template <class T>
const char* word_of(T value) {
  for (const auto& [one, word] : Choices<T>::all)
    if (one == value) return word;
  return "";
}

std::string summary_text(const Needs& n) {
  const Summary kind = n.page_summary();
  const char* what = kind == Summary::mean      ? "the mean of each page's keys"
                     : kind == Summary::min_max ? "minimum and maximum of each page's keys"
                                                : "centre and radius of each page's keys";
  return n.summary_bits() == 8 ? std::string(what) + ", in codes of 8 bits" : what;
}

// Whether cells with it carry the label `functional`, with default parameters.
bool is_functional(const PluginInfo& plugin) {
  try {
    if (plugin.role == Role::codec) return codes_rows(*create<Codec>(plugin, resolve(plugin, {})));
    return plugin.role == Role::policy && needs_of(plugin).functional();
  } catch (const Error&) {  // not known without its parameters
    return false;
  }
}

// With default parameters.
std::string needs_text(const PluginInfo& plugin) {
  try {
    const Needs n = needs_of(plugin);
    std::vector<Row> rows{{"devices", words_of(n.devices())}, {"dtypes", words_of(n.dtypes())}};
    rows.push_back(
        {"graphs", n.capturable() ? "a GPU may replay decode steps as a graph" : "none: each step is launched"});
    if (n.rope() != RopeRegime::original) rows.push_back({"RoPE", word_of(n.rope())});
    if (n.dense_layers() > 0) rows.push_back({"dense layers", fmt::format("the first {}", n.dense_layers())});
    if (n.min_pages() > 0)
      rows.push_back({"pages", fmt::format("at least {} of each KV head are read", n.min_pages())});
    if (n.page_summary() != Summary::none) rows.push_back({"summaries", summary_text(n)});
    if (n.own_amount()) rows.push_back({"budget", "none: it decides by itself how much it keeps"});
    if (n.oracle()) rows.push_back({"oracle", "it knows what no method can know in time, so its cells have no times"});
    if (n.functional())
      rows.push_back({"functional",
                      "it changes stored values; bytes and times are those of the full-width cache and of what the "
                      "method keeps beside it"});
    if (n.rebuilds_keys())
      rows.push_back({"keys", "pages come from the host without them, and factors on the device give them back"});
    if (n.future_mass())
      rows.push_back({"future", "the attention of a run of the full cache on the same prompts, which comes first"});
    if (n.all_layers()) rows.push_back({"layers", "all at once, after a step"});
    if (!n.token_state().empty()) rows.push_back({"token state", join(n.token_state())});
    if (n.host_pages()) rows.push_back({"host", "pages that the method places there"});
    if (n.archive()) rows.push_back({"host", "copies of heads, whose tokens the method fetches"});
    if (n.steps()) rows.push_back({"steps", "counted on the device"});
    if (n.token_ids()) rows.push_back({"text", "the ids of its tokens, and which are special or punctuation"});
    if (n.observe_beside()) rows.push_back({"observe", "beside the rest of the step, or at its end"});
    if (n.pauses()) rows.push_back({"pauses", "a sequence sits steps out while its pages are under way"});
    if (n.uniform_heads()) rows.push_back({"heads", "all KV heads of a layer hold the same tokens"});
    if (!n.chunked_prompts()) rows.push_back({"prompts", "whole, not in chunks"});
    if (n.window_queries() > 0) rows.push_back({"queries", fmt::format("the prompt's last {}", n.window_queries())});
    if (n.output_projection()) rows.push_back({"weights", "the output projection, for the size of projected values"});
    if (n.next_queries()) rows.push_back({"queries", "those that the next layer would have for a layer's input"});
    if (n.finish_prompt()) rows.push_back({"prompts", "a call for each layer once all layers have ended"});
    if (n.prompt_lse()) rows.push_back({"prompts", "the sums of their softmaxes, where attention leaves them"});
    if (n.profile()) rows.push_back({"profile", "a file of `kvlab profile`"});
    const auto of = [](Mass m) { return m == Mass::all ? "of prompts and steps" : "of steps"; };
    if (n.mass() != Mass::none) rows.push_back({"attention mass", of(n.mass())});
    if (const MassState& into = n.mass_into(); into.when != Mass::none)
      rows.push_back({"attention mass", fmt::format("{}, summed in '{}'", of(into.when), into.state)});
    return table(rows, "  ");
  } catch (const Error& e) {
    return fmt::format("  known once it has its parameters: {}\n", e.what());
  }
}

// How a codec with default parameters stores K and V.
std::string stores_text(const PluginInfo& plugin) {
  if (is_functional(plugin))
    return table({{"functional", "what its own codes give back, in the run's dtype; it saves no bytes"}}, "  ");
  try {
    const CodecSpec spec = create<Codec>(plugin, resolve(plugin, {}))->spec();
    const auto side = [](CodecSide s) {
      if (s.kind == CodeKind::e4m3) return std::string("FP8 (e4m3)");
      if (!s.bits) return std::string("in the run's dtype");
      return fmt::format("codes of {} bits{}", s.bits, s.kind == CodeKind::whole_zero ? ", one of which is zero" : "");
    };
    constexpr int page = 16, head_dim = 128;
    const auto bytes = [](const CodecSpec& s) {
      return ops::make_layout(DType::bf16, s, page, head_dim, 0).bytes / page;
    };
    return table({{"keys", side(spec.k)},
                  {"values", side(spec.v)},
                  {"a token", fmt::format("{} bytes of a KV head of {}, in pages of {}; {} without a codec",
                                          bytes(spec), head_dim, page, bytes({}))}},
                 "  ");
  } catch (const Error& e) {
    return fmt::format("  known once it has its parameters: {}\n", e.what());
  }
}

std::string title(const RoleDeclaration& role) {
  return fmt::format("{} ({}, version {})\n  {}\n", role.name, name_of(role.role), role.version, role.help);
}

std::string params_text(const std::vector<ParamSpec>& params) {
  std::vector<Row> rows{{"name", "type", "default", "range", "help"}};
  std::vector<Row> components;
  for (const ParamSpec& spec : params) {
    if (spec.component)
      components.push_back({spec.name, spec.help});
    else
      rows.push_back({spec.name, type_text(spec), default_text(spec), range_text(spec), spec.help});
  }
  std::string text = rows.size() > 1 ? "\nparameters\n" + table(rows, "  ") : "\nno parameters\n";
  if (!components.empty())
    text +=
        "\ncomponents (true or false, on by default; `ablate` switches each off in turn)\n" + table(components, "  ");
  return text;
}

std::vector<EntryKey> keys_without(std::initializer_list<std::string_view> some) {
  std::vector<EntryKey> keys = policy_keys();
  std::erase_if(keys, [&](const EntryKey& k) { return std::find(some.begin(), some.end(), k.name) != some.end(); });
  return keys;
}

// Whether a policy takes no pruner by default, nor with any one component off or other word of a choice.
bool never_takes_pruner(const PluginInfo& plugin) {
  const auto takes = [&](const std::map<std::string, ParamValue>& given) {
    try {
      return !takes_no_pruner(*create<Policy>(plugin, resolve(plugin, given)));
    } catch (const Error&) {  // not known without the plugin's parameters
      return given.empty();
    }
  };
  if (takes({})) return false;
  for (const ParamSpec& spec : plugin.params) {
    if (spec.component && takes({{spec.name, false}})) return false;
    for (const std::string& word : spec.choices)
      if (takes({{spec.name, word}})) return false;
  }
  return true;
}

// The keys that an entry of the plugin takes. A policy of its own has no parts but codecs.
std::vector<EntryKey> keys_of(const PluginInfo& plugin) {
  std::vector<EntryKey> keys =
      plugin.role == Role::policy   ? keys_without({"scorer", "selector", "rescorer", "schedule"})
      : plugin.role == Role::scorer ? keys_without({"policy", "selector", "pruner"})
                                    : keys_without({"policy", "scorer", "rescorer", "schedule"});
  for (EntryKey& key : keys)
    if (plugin.role != Role::scorer && key.name == std::string_view("budget"))
      key.form = unsplit_budget;
    else if (plugin.role == Role::policy && key.name == std::string_view("placement"))
      key = {"placement", "{tier: host, codec: NAME}", "the codec of the pages that it keeps on the host"};
  try {
    const Needs needs = needs_of(plugin);
    std::erase_if(keys, [&](const EntryKey& k) {
      return (k.name == std::string_view("profile") && !needs.profile() && plugin.role != Role::scorer) ||
             (k.name == std::string_view("placement") && plugin.role == Role::policy && !needs.host_pages()) ||
             (k.name == std::string_view("budget") && needs.own_amount());
    });
    if (plugin.role == Role::policy && takes_no_codec(*create<Policy>(plugin, resolve(plugin, {}))))
      std::erase_if(keys, [](const EntryKey& k) { return k.name == std::string_view("codec"); });
    if (plugin.role == Role::policy && never_takes_pruner(plugin))
      std::erase_if(keys, [](const EntryKey& k) { return k.name == std::string_view("pruner"); });
  } catch (const Error&) {  // not known without the plugin's parameters
  }
  return keys;
}

std::string describe_one(Registry& registry, const PluginInfo& plugin) {
  std::string text = title(plugin) + fmt::format("  library: {}\n", library_text(plugin)) + params_text(plugin.params);
  if (plugin.role == Role::scorer || plugin.role == Role::selector || plugin.role == Role::policy)
    text += "\nneeds\n" + needs_text(plugin) + "\nkeys of its entry\n" + keys_text(keys_of(plugin));
  if (plugin.role == Role::pruner || plugin.role == Role::rescorer) text += "\nneeds\n" + needs_text(plugin);
  if (plugin.role == Role::budget && splits_by_profile(plugin))
    text += "\nneeds\n" + table({{"profile", "a file of `kvlab profile`"}}, "  ");
  if (plugin.role == Role::codec) text += "\nstores\n" + stores_text(plugin);
  if (plugin.role == Role::task) text += "\nkeys of every task\n" + keys_text(task_keys());
  return text + "\nexample\n" + example(registry, plugin);
}

Json param_json(const ParamSpec& spec) {
  Json json{{"name", spec.name}, {"type", name_of(spec.kind)}};
  json["default"] = std::visit([](const auto& value) { return Json(value); }, spec.value);
  const auto bound = [&](const char* key, double limit) {
    if (!std::isfinite(limit)) return;
    if (spec.kind == ParamKind::integer && std::fabs(limit) < 9e15)
      json[key] = static_cast<std::int64_t>(limit);
    else
      json[key] = limit;
  };
  bound("low", spec.low);
  bound("high", spec.high);
  if (!spec.choices.empty()) json["choices"] = spec.choices;
  if (spec.component) json["component"] = true;
  json["help"] = spec.help;
  return json;
}

// Of text that need not be UTF-8.
std::string dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

// A list of objects: the keys of `head` with a line each, and "params" with a line for each parameter.
std::string roles_json(const std::vector<std::pair<Json, const std::vector<ParamSpec>*>>& roles,
                       const std::string& indent) {
  Row all;
  for (const auto& [head, params] : roles) {
    Row lines;
    for (const auto& [key, value] : head.items()) lines.push_back(indent + "    " + dump(key) + ": " + dump(value));
    Row one_line_each;
    for (const ParamSpec& spec : *params) one_line_each.push_back("\n" + indent + "      " + dump(param_json(spec)));
    lines.push_back(indent + "    \"params\": [" + join(one_line_each, ",") + "]");
    all.push_back(indent + "  {\n" + join(lines, ",\n") + "\n" + indent + "  }");
  }
  return "[\n" + join(all, ",\n") + "\n" + indent + "]";
}

Json head_json(const RoleDeclaration& role) {
  return {{"name", role.name}, {"role", name_of(role.role)}, {"version", role.version}, {"help", role.help}};
}

// What the note does not say, and why.
const char* missing_roles(const LibraryNote& note) {
  return note.abi == KVLAB_ABI
             ? "not known: its registration is no constant expression, so the compiler could not write the roles down"
             : "not known: the note is written for another ABI";
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
      rows.push_back({p->name, name_of(p->role) + std::string(is_functional(*p) ? ", functional" : ""), p->version,
                      library_text(*p), p->help});
  return table(rows, "") + diagnostics_text(registry);
}

std::string list_json(Registry& registry, const std::string& kind) {
  std::vector<std::pair<Json, const std::vector<ParamSpec>*>> roles;
  for (const Role role : roles_of(kind))
    for (const PluginInfo* p : registry.list(role)) {
      Json head = head_json(*p);
      head["library"] = library_text(*p);
      if (is_functional(*p)) head["functional"] = true;
      roles.emplace_back(std::move(head), &p->params);
    }
  return roles_json(roles, "") + "\n";
}

std::string inspect_text(const std::filesystem::path& file) {
  const LibraryNote note = library_note(file);
  const auto problem = build_problem(note.abi, note.size, note.build);
  std::string text = fmt::format("{}\n  ABI:     {}\n  build:   {}\n  sha256:  {}\n  loads:   {}\n", file.string(),
                                 note.abi, note.build, content_hashes().sha256_of(file),
                                 problem ? "no: " + *problem : "its build is this kvlab's");
  if (!note.roles) text += fmt::format("  roles:   {}\n", missing_roles(note));
  for (const RoleDeclaration& role : note.roles.value_or(std::vector<RoleDeclaration>()))
    text += "\n" + title(role) + params_text(role.params);
  return printable(text);
}

std::string inspect_json(const std::filesystem::path& file) {
  const LibraryNote note = library_note(file);
  const bool same = !build_problem(note.abi, note.size, note.build);
  const Json head{{"file", file.string()},
                  {"abi", note.abi},
                  {"build", note.build},
                  {"sha256", content_hashes().sha256_of(file)},
                  {"same_build", same}};
  std::string text = "{\n";
  for (const auto& [key, value] : head.items()) text += "  " + dump(key) + ": " + dump(value) + ",\n";
  std::vector<std::pair<Json, const std::vector<ParamSpec>*>> roles;
  if (note.roles)
    for (const RoleDeclaration& role : *note.roles) roles.emplace_back(head_json(role), &role.params);
  return text + "  \"roles\": " + (note.roles ? roles_json(roles, "  ") : "null") + "\n}\n";
}

std::string describe_text(Registry& registry, const std::string& name) {
  std::string text;
  const auto add = [&](const std::string& one) { text += (text.empty() ? "" : "\n") + one; };
  for (const PluginInfo* plugin : registry.list())
    if (plugin->name == name) add(describe_one(registry, *registry.find(plugin->role, name)));
  if (!text.empty()) return text;
  if (name == "full")
    return fmt::format("full (policy, version {})\n  {}\n\nno parameters\n\nkeys of its entry\n{}\nexample\n{}",
                       KVLAB_VERSION, full_help,
                       keys_text(keys_without({"scorer", "selector", "rescorer", "budget", "schedule", "profile"})),
                       experiment(any_task(registry), ""));
  registry.require(roles_of(""), name, {"full"});
  return text;
}

}  // namespace kvlab
