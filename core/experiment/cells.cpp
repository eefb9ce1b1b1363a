#include <fmt/format.h>

#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>

#include "base/content_hash.hpp"
#include "base/fingerprint.hpp"
#include "experiment/experiment_keys.hpp"
#include "experiment/variants.hpp"
#include "model/bundled.hpp"

namespace fs = std::filesystem;

namespace kvlab {
namespace {

using Json = nlohmann::ordered_json;

// Hashes of a plugin use's dependencies: its library and the files that its text parameters name.
Json dependencies(const PluginUse& use, const Experiment& experiment, const PluginCatalog& catalog,
                  const Fingerprints& fingerprints) {
  Json json = Json::array();
  if (const PluginInfo* plugin = catalog.find(use.role, use.name); plugin && fingerprints.plugin)
    json.push_back(fingerprints.plugin(*plugin));
  for (const auto& [name, value] : use.params.values()) {
    const auto* text = std::get_if<std::string>(&value);
    if (!text || text->empty() || text->size() > 4096 || !fingerprints.file) continue;
    const fs::path path = resolve_data_path(*text, experiment.folder);
    std::error_code ec;
    if (fs::is_regular_file(path, ec)) json.push_back(fingerprints.file(path));
  }
  return json;
}

// The policy's parameters, and the injection that replaces what it chooses.
Json params_of(const PolicySpec& policy, const Experiment& experiment) {
  Json json = to_json(policy);
  const InjectSpec& inject = experiment.inject;
  if (!inject.used(policy)) return json;
  if (inject.overlap) json["inject"]["overlap"] = *inject.overlap;
  if (inject.rerank_overlap && policy.policy) json["inject"]["rerank_overlap"] = *inject.rerank_overlap;
  if (!inject.trace.empty()) json["inject"]["trace"] = inject.trace;
  if (inject.correction && policy.policy) json["inject"]["correction"] = *inject.correction;
  if (inject.drift && policy.policy) json["inject"]["drift"] = *inject.drift;
  if (!inject.cell.empty()) json["inject"]["cell"] = inject.cell;
  return json;
}

Json describe(const PolicySpec& policy, const Experiment& experiment, const PluginCatalog& catalog,
              const Fingerprints& fingerprints) {
  Json json = {{"name", policy.name}, {"params", params_of(policy, experiment)}, {"depends", Json::array()}};
  for (const std::string& file : {experiment.inject.used(policy) ? experiment.inject.trace : "", policy.profile}) {
    std::error_code ec;
    const fs::path path = experiment.resolve(file);
    if (!file.empty() && fingerprints.file && fs::is_regular_file(path, ec))
      json["depends"].push_back(fingerprints.file(path));
  }
  for_each_use(policy, [&](const PluginUse& use) {
    json["depends"].push_back(dependencies(use, experiment, catalog, fingerprints));
  });
  return json;
}

std::string describe(const WorkloadSpec& w, const Experiment& experiment, const Fingerprints& fingerprints) {
  Json json = {{"requests", w.requests},
               {"arrivals", static_cast<int>(w.arrivals)},
               {"rate", w.rate},
               {"file", w.file},
               {"ignore_eos", w.ignore_eos},
               {"recompute", w.recompute}};
  const fs::path path = resolve_data_path(w.file, experiment.folder);
  std::error_code ec;
  if (!w.file.empty() && fingerprints.file && fs::is_regular_file(path, ec)) json["content"] = fingerprints.file(path);
  return "\n" + json.dump();
}

// Refuses a cell that is there twice: names the entry that is repeated, and its places.
[[noreturn]] void refuse(const Experiment& e, const Cell& first, const Cell& second) {
  const auto differs = [&](std::size_t Cell::*entry) { return first.*entry != second.*entry; };
  const PolicySpec& policy = e.policies[second.policy];
  std::string what = "seed " + std::to_string(second.seed), here = policy.where, there;
  const auto name = [&](const char* kind, const auto& one, const auto& other, const std::string& label) {
    what = fmt::format("{} '{}'", kind, label), here = one.where, there = other.where;
  };
  if (differs(&Cell::policy))
    name("policy", policy, e.policies[first.policy], policy.name);
  else if (differs(&Cell::task))
    name("task", e.tasks[second.task], e.tasks[first.task], e.tasks[second.task].name);
  else if (differs(&Cell::model))
    name("model", e.models[second.model], e.models[first.model], e.models[second.model].name());
  else if (differs(&Cell::workload))
    name("workload", e.workloads[second.workload], e.workloads[first.workload], e.workloads[second.workload].text());
  if (there == here) what += ", whose lists have a value twice";
  throw Error(Errc::config,
              fmt::format("got the same cell twice, wanted it once: {}{}", what,
                          there.empty() || there == here ? "" : " (first at " + there + ")"),
              here);
}

// The settings that all cells of the run share and results depend on.
Json common(const Experiment& experiment) {
  Json metrics = Json::array();
  for (const Metric metric : experiment.metrics) metrics.push_back(name_of(metric));
  Json json = {{"backend", experiment.backend},
               {"metrics", metrics},
               {"device_memory", experiment.device_memory},
               {"fidelity_tokens", experiment.fidelity_tokens}};
  // In the order of names and off their defaults: a new key changes no id.
  std::map<std::string, Json> plain;
  for (const ExperimentKey& key : experiment_keys())
    if (key.in_id && key.get(experiment) != key.plain->value)
      plain[key.name] = std::visit([](const auto& v) { return Json(v); }, key.get(experiment));
  if (experiment.equal_bytes > 0) plain["equal_bytes"] = experiment.equal_bytes;
  if (const SamplingSpec& s = experiment.sampling; s.on())
    plain["sampling"] = {
        {"temperature", s.temperature}, {"top_p", s.top_p}, {"top_k", s.top_k}, {"draws", s.draws}, {"seed", s.seed}};
  if (experiment.host_memory > 0) plain["host_memory"] = experiment.host_memory;
  if (experiment.spill != "pressure") plain["spill"] = experiment.spill;
  if (experiment.page_copies != "kernel") plain["page_copies"] = experiment.page_copies;
  for (const auto& [name, value] : plain) json[name] = value;
  return json;
}

// Limits the number of cells before any is described or hashed.
void check_count(const Experiment& e) {
  double per_model = 0;
  for (const TaskSpec& task : e.tasks) per_model += task.seed ? 1. : static_cast<double>(e.seeds.size());
  const double all = static_cast<double>(e.models.size()) * per_model *
                     static_cast<double>(std::max<std::size_t>(e.workloads.size(), 1)) *
                     static_cast<double>(e.policies.size()) * e.repeats;
  if (all > static_cast<double>(max_cells))
    throw Error(Errc::config, fmt::format("got {:.0f} cells, wanted at most {}", all, max_cells), e.file.string());
}

}  // namespace

std::vector<Cell> cells(const Experiment& experiment, const PluginCatalog& catalog, const Fingerprints& fingerprints) {
  check_count(experiment);
  std::vector<std::string> models, tasks, policies, params;
  for (const ModelSpec& model : experiment.models) {
    Json json = {{"path", model.path}, {"dtype", static_cast<int>(model.dtype)}};
    if (!model.adapter.empty()) json["adapter"] = model.adapter;
    if (fingerprints.model) json["content"] = fingerprints.model(model);
    models.push_back(json.dump());
  }
  for (const TaskSpec& task : experiment.tasks) {
    Json json = {{"name", task.name},
                 {"task", to_json(task)},
                 {"depends", dependencies(task.task, experiment, catalog, fingerprints)}};
    if (task.metric) json["depends"].push_back(dependencies(*task.metric, experiment, catalog, fingerprints));
    tasks.push_back(json.dump());
  }
  for (const PolicySpec& policy : experiment.policies) {
    policies.push_back(describe(policy, experiment, catalog, fingerprints).dump());
    params.push_back(params_of(policy, experiment).dump());
  }
  const std::string shared = common(experiment).dump();
  std::vector<std::string> workloads;
  for (const WorkloadSpec& w : experiment.workloads) workloads.push_back(describe(w, experiment, fingerprints));
  if (workloads.empty()) workloads.emplace_back();

  std::vector<Cell> all;
  std::map<std::string, std::size_t> known;  // by id: place in `all`
  const auto add = [&](Cell cell) {
    Fingerprint id;
    for (const std::string& part : {shared, models[cell.model], tasks[cell.task], policies[cell.policy],
                                    fmt::format("{} {}", cell.seed, cell.repeat), workloads[cell.workload]})
      id.add(part);
    cell.id = id.hex();
    cell.params = params[cell.policy];
    if (const auto [it, fresh] = known.emplace(cell.id, all.size()); !fresh) refuse(experiment, all[it->second], cell);
    all.push_back(std::move(cell));
  };
  for (std::size_t m = 0; m < models.size(); ++m)
    for (std::size_t t = 0; t < tasks.size(); ++t)
      for (std::size_t w = 0; w < workloads.size(); ++w)
        for (std::size_t p = 0; p < policies.size(); ++p) {
          const auto& own = experiment.tasks[t].seed;
          for (const std::int64_t seed : own ? std::vector<std::int64_t>{*own} : experiment.seeds)
            for (int repeat = 0; repeat < experiment.repeats; ++repeat) {
              Cell cell;
              cell.model = m, cell.task = t, cell.workload = w, cell.policy = p;
              cell.seed = seed, cell.repeat = repeat;
              add(std::move(cell));
            }
        }
  return all;
}

Fingerprints content_fingerprints() {
  Fingerprints f;
  f.file = [](const fs::path& path) { return content_hashes().of(path); };
  f.plugin = [](const PluginInfo& plugin) {
    return plugin.library.empty() ? plugin.version : content_hashes().of(plugin.library);
  };
  return f;
}

std::string budget_text(const PolicySpec& policy) {
  const double v = policy.budget.value;
  switch (policy.budget.kind) {
    case BudgetAmount::unlimited: return "-";
    case BudgetAmount::tokens: return fmt::format("{:.0f}", v);
    case BudgetAmount::ratio: return fmt::format("{:g}", v);
    case BudgetAmount::bytes: break;
  }
  if (std::fmod(v, 1048576.0) == 0) return fmt::format("{:.0f} MiB", v / 1048576.0);
  return fmt::format("{:.0f} B", v);
}

namespace {

// The scalar parameters of the task that differ between the experiment's tasks of that name.
std::string task_text(const Experiment& experiment, const TaskSpec& task) {
  std::string varying;
  const auto add = [&](const std::string& word) { varying += (varying.empty() ? "" : ", ") + word; };
  const auto differs = [&](auto same) {
    for (const TaskSpec& other : experiment.tasks)
      if (other.name == task.name && !same(other)) return true;
    return false;
  };
  for (const auto& [name, value] : task.task.params.values())
    if (differs([&, &n = name, &v = value](const TaskSpec& o) {
          const auto& theirs = o.task.params.values();
          const auto it = theirs.find(n);
          return it != theirs.end() && it->second == v;
        }))
      add(name + " " + std::visit([](const auto& v) { return fmt::format("{}", v); }, value));
  if (differs([&](const TaskSpec& o) { return o.question == task.question; }))
    add(task.question == Question::decode ? "question decode" : "question prompt");
  if (differs([&](const TaskSpec& o) { return o.questions == task.questions; }))
    add(fmt::format("questions {}", task.questions));
  if (differs([&](const TaskSpec& o) { return o.turns == task.turns; })) add(fmt::format("turns {}", task.turns));
  const auto metric = [](const TaskSpec& t) { return t.metric ? t.metric->name : "its own"; };
  if (differs([&](const TaskSpec& o) { return metric(o) == metric(task); })) add("metric " + metric(task));
  return varying.empty() ? task.name : task.name + " (" + varying + ")";
}

std::size_t width(std::string_view text) {  // code points
  std::size_t n = 0;
  for (const char c : text) n += (static_cast<unsigned char>(c) & 0xc0) != 0x80;
  return n;
}

}  // namespace

std::string cell_table(const Experiment& experiment, const std::vector<Cell>& all) {
  constexpr std::size_t columns = 7;
  std::vector<std::array<std::string, columns>> rows{{"cell", "model", "task", "policy", "budget", "seed", "repeat"}};
  for (const Cell& cell : all) {
    const PolicySpec& policy = experiment.policies[cell.policy];
    rows.push_back({cell.id, experiment.models[cell.model].name(),
                    task_text(experiment, experiment.tasks[cell.task]) + workload_label(experiment, cell),
                    policy_text(experiment, policy), budget_text(policy), std::to_string(cell.seed),
                    std::to_string(cell.repeat)});
  }
  std::array<std::size_t, columns> widest{};
  for (const auto& row : rows)
    for (std::size_t c = 0; c < columns; ++c) widest[c] = std::max(widest[c], width(row[c]));
  std::string text = fmt::format("{} {}\n", all.size(), all.size() == 1 ? "cell" : "cells");
  for (const auto& row : rows) {
    std::string line;
    for (std::size_t c = 0; c < columns; ++c)
      line += row[c] + (c + 1 < columns ? std::string(widest[c] - width(row[c]) + 2, ' ') : "");
    text += line + "\n";
  }
  return text;
}

}  // namespace kvlab
