#include <fmt/format.h>

#include "experiment/entry.hpp"
#include "experiment/policy_spec.hpp"
#include "plugin/loader.hpp"
#include "plugin/parameters.hpp"

namespace kvlab {

using yaml::Node;

namespace {

// The plugin that the task names as its metric; nothing where the metric is the task's own. A task that cannot be made
// says why when its prompts are.
std::optional<PluginUse> metric_of(const PluginInfo& plugin, const Params& params, const PluginCatalog& catalog) {
  if (!plugin.create) return std::nullopt;
  try {
    return metric_named(create<Task>(plugin, params)->metric(), catalog);
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace

std::optional<PluginUse> metric_named(const std::string& name, const PluginCatalog& catalog) {
  const PluginInfo* plugin = catalog.find(Role::metric, name);
  if (!plugin) return std::nullopt;
  return PluginUse{Role::metric, name, resolve(*plugin, {})};
}

std::optional<TaskSpec> read_task(const Node& entry, const PluginCatalog& catalog, Problems& problems) {
  UseReader uses(catalog, problems);
  const std::size_t before = problems.size();
  auto parts = split_entry(entry, "task", problems);
  if (!parts) return std::nullopt;
  auto& [name, body, named] = *parts;
  TaskSpec task;
  task.where = problems.document().where(entry.place);
  MapReader map(body, name.text, problems);
  task.name = name.text;
  if (!named) {
    map.take("name");
    const Node* plugin = map.take("task");
    if (plugin) name = *plugin;
    if (!name.is(Node::Kind::scalar) || name.text.empty()) {
      problems.add(entry.place, "got a task without a name, wanted {TASK: {...}} or {name: NAME, task: TASK, ...}");
      return std::nullopt;
    }
    if (task.name.empty()) task.name = name.text;
  }
  const PluginInfo* plugin = uses.find(Role::task, name.text, name.place);
  if (!plugin) {
    uses.unknown("task", name.text, catalog.names(Role::task), name.place);
    return std::nullopt;
  }
  uses.check_names(*plugin, task_keys(), name.place);
  const ParamSpec question = make_choice("question", {"prompt", "decode"}, "when the policy sees the question");
  task.question = map.get<std::string>(question) == "decode" ? Question::decode : Question::prompt;
  task.questions = map.get<int>(make_param("questions", 1, 1, 100000, "questions over one context"));
  task.turns = map.get<int>(make_param("turns", 1, 1, 100000, "turns of a conversation"));
  if (constexpr int most = 100000; std::int64_t{task.questions} * task.turns > most)
    problems.add(entry.place, fmt::format("got {} questions of {} turns, wanted at most {} in all", task.questions,
                                          task.turns, most));
  if (map.node().find("seed"))
    task.seed = map.get<std::int64_t>(make_param("seed", 0, 0, 9e15, "seed of the samples"));
  else
    map.take("seed");
  const Node* metric = map.take("metric");
  task.names_metric = metric != nullptr;
  if (metric) task.metric = uses.use(*metric, Role::metric);
  task.task = {Role::task, name.text, uses.params(*plugin, map.rest(), names_of(task_keys()))};
  if (problems.size() != before) return std::nullopt;
  if (!metric) task.metric = metric_of(*plugin, task.task.params, catalog);
  return task;
}

}  // namespace kvlab
