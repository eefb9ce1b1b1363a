#include "experiment/experiment.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/text.hpp"
#include "experiment/build_policy.hpp"
#include "experiment/entry.hpp"
#include "experiment/experiment_keys.hpp"
#include "experiment/override_lines.hpp"
#include "experiment/overrides.hpp"
#include "model/bundled.hpp"
#include "model/synthetic.hpp"
#include "plugin/parameters.hpp"

namespace fs = std::filesystem;

namespace kvlab {
namespace {

using yaml::Node;

constexpr std::size_t most_expansions = 10'000;
constexpr int workload_batch = 64;  // batch of a workload whose file names none

constexpr std::pair<const char*, Metric> metric_words[] = {{"score", Metric::score},   {"fidelity", Metric::fidelity},
                                                           {"memory", Metric::memory}, {"latency", Metric::latency},
                                                           {"trace", Metric::trace},   {"parts", Metric::parts}};

// The nodes of a list of values, or a single value.
std::vector<const Node*> one_or_list(const Node& node) {
  if (!node.is(Node::Kind::list)) return {&node};
  std::vector<const Node*> all;
  for (const Node& item : node.items) all.push_back(&item);
  return all;
}

class ExperimentReader {
 public:
  ExperimentReader(const yaml::Document& document, const PluginCatalog& catalog, Problems& problems)
      : document_(document), catalog_(catalog), problems_(problems) {}

  Experiment read() {
    const Node& root = document_.root;
    if (!root.is(Node::Kind::map)) {
      problems_.add(root.place,
                    "got " + yaml::describe(root) + ", wanted an experiment: a map with model, tasks and policies");
      return std::move(out_);
    }
    MapReader map(root, "experiment", problems_);
    for (const ExperimentKey& key : experiment_keys()) map.take(key.name);  // in the order of messages
    out_.file = document_.file;
    out_.folder = out_.file.parent_path();
    scalars(map);
    models(map);
    metrics(map);
    workloads(map);
    seeds(map);
    paths(map);
    tasks(map);
    policies(map);
    inject(map);
    map.take("sweep");
    map.finish();
    return std::move(out_);
  }

 private:
  void scalars(MapReader& map) {
    out_.name = map.get<std::string>(make_param("experiment", out_.file.stem().string(), "name of the run"));
    if (out_.name.empty() || out_.name.find('/') != std::string::npos)
      problems_.add(map.take("experiment")->place,
                    "got '" + out_.name + "' for 'experiment', wanted a name without '/'");
    const Node* backend = map.take("backend");
    if (backend && backend->text == "gpu")
      problems_.add(backend->place, "got 'gpu' for 'backend', wanted cuda, cpu or auto (a GPU where one is usable)");
    else
      out_.backend = map.word("backend", {"auto", "cpu", "cuda"}, {}, "where the model runs");
    out_.backend_where = backend ? document_.where(backend->place) : out_.file.string();
    for (const ExperimentKey& key : experiment_keys())
      if (key.plain) key.set(out_, map.params({*key.plain}));
    if (const Node* n = map.take("equal_bytes")) out_.equal_bytes = read_bytes(*n, problems_).value_or(0);
    if (const Node* n = map.take("device_memory")) out_.device_memory = read_bytes(*n, problems_).value_or(0);
    out_.spill = map.word("spill", {"pressure", "always"}, {}, "when pages leave the device for the host");
    out_.page_copies = map.word("page_copies", {"kernel", "memcpy"}, {}, "what a GPU copies pages with");
    if (const Node* n = map.take("host_memory")) out_.host_memory = read_bytes(*n, problems_).value_or(0);
    if (const Node* n = map.take("sampling")) out_.sampling = read_sampling(*n, problems_);
    if (const Node* n = map.take("fidelity")) {
      MapReader fidelity(*n, "fidelity", problems_);
      out_.fidelity_tokens = fidelity.get<int>(make_param("tokens", 32, 1, 1 << 20, "forced tokens per sample"));
      fidelity.finish();
    }
  }

  void model(const Node& node) {
    ModelSpec model;
    model.where = document_.where(node.place);
    if (node.is(Node::Kind::scalar)) {
      model.path = node.text;
    } else if (node.is(Node::Kind::map)) {
      MapReader map(node, "model", problems_);
      const Node* path = map.take("path");
      const std::string dtype = map.get<std::string>(make_choice("dtype", {"bf16", "f32", "fp16"}, "the run's dtype"));
      if (dtype == "fp16" && out_.backend == "cpu")
        problems_.add(map.take("dtype")->place, "got dtype fp16 on the CPU, wanted bf16 or f32 (fp16 needs a GPU)",
                      Errc::unsupported);
      model.dtype = dtype == "f32" ? DType::f32 : dtype == "fp16" ? DType::f16 : DType::bf16;
      const Node *adapter = map.take("adapter"), *synthetic = map.take("synthetic");
      if (synthetic) {
        const auto value = read_value(
            *synthetic, make_choice("synthetic", synthetic_names(), "a shape with random weights"), problems_);
        model.path = synthetic_prefix + (value ? std::get<std::string>(*value) : "");
        if (path) problems_.add(path->place, "got a path beside synthetic, wanted one of them");
        if (adapter) problems_.add(adapter->place, "got an adapter of a synthetic model, wanted a model from files");
      }
      if (adapter) model.adapter = read_text(*adapter, "adapter");
      map.finish();
      if (path && !synthetic)
        model.path = read_text(*path, "path");
      else if (!synthetic)
        problems_.add(node.place, "got a model without a path, wanted path: FILE or FOLDER");
    } else {
      problems_.add(node.place, "got " + yaml::describe(node) + " for 'model', wanted {path: ..., dtype: ...}");
    }
    out_.models.push_back(std::move(model));
  }

  void models(MapReader& map) {
    const Node* node = map.take("model");
    if (!node) {
      missing("model: {path: bundled/recall}");
    } else if (node->is(Node::Kind::list)) {
      if (node->items.empty()) problems_.add(node->place, "got an empty list for 'model', wanted a model");
      note_repeats(*node, problems_);
      for (const Node& item : node->items) model(item);
    } else {
      for (const Node& one : expand_axes(*node, 100, problems_)) model(one);
    }
  }

  void metrics(MapReader& map) {
    const Node* node = map.take("metrics");
    if (!node) {
      out_.metrics = {Metric::score, Metric::fidelity, Metric::memory, Metric::latency};
      return;
    }
    std::vector<std::string> words;
    for (const auto& [word, metric] : metric_words) words.emplace_back(word);
    const ParamSpec spec = make_choice("metrics", words, "what is measured");
    for (const Node* item : one_or_list(*node))
      if (const auto value = read_value(*item, spec, problems_))
        for (const auto& [word, metric] : metric_words)
          if (std::get<std::string>(*value) == word) out_.metrics.insert(metric);
    if (out_.metrics.count(Metric::parts)) out_.metrics.insert(Metric::latency);
    if (node->is(Node::Kind::list) && node->items.empty())
      problems_.add(node->place, "got an empty list for 'metrics', wanted some of " + join(words));
  }

  void workloads(MapReader& map) {
    const yaml::Entry* entry = map.take_entry("workload");
    if (!entry) return;
    for (const Node& one : expand_axes(entry->value, 100, problems_))
      out_.workloads.push_back(read_workload(one, problems_));
    if (!map.take("batch")) out_.batch = workload_batch;
    if (map.take("profilers")) problems_.add(entry->key.place, "got a workload beside profilers, wanted one of them");
    if (const yaml::Entry* bytes = map.take_entry("equal_bytes"))
      problems_.add(bytes->key.place,
                    "got equal_bytes with a workload, wanted batches of samples: requests hold bytes together",
                    Errc::unsupported);
    const Node* metrics = map.take("metrics");
    if (!metrics) {
      out_.metrics.erase(Metric::fidelity);
      return;
    }
    for (const Node* item : one_or_list(*metrics))
      if (item->text == "fidelity" || item->text == "trace")
        problems_.add(item->place, "got '" + item->text + "' with a workload, wanted score, memory, latency or parts",
                      Errc::unsupported);
  }

  void seeds(MapReader& map) {
    const Node* node = map.take("seed");
    if (!node) return;
    out_.seeds.clear();
    note_repeats(*node, problems_);
    for (const Node* item : one_or_list(*node))
      if (const auto value = read_value(*item, make_param("seed", 0, 0, 9e15, "seed"), problems_))
        out_.seeds.push_back(std::get<std::int64_t>(*value));
    if (node->is(Node::Kind::list) && node->items.empty())
      problems_.add(node->place, "got an empty list for 'seed', wanted a seed");
  }

  void paths(MapReader& map) {
    const Node* output = map.take("output");
    out_.output = output ? read_text(*output, "output") : "results/" + out_.name + ".h5";
    if (const Node* node = map.take("plugin_path"))
      for (const Node* item : one_or_list(*node))
        out_.plugin_path.push_back(out_.resolve(read_text(*item, "plugin_path")).string());
  }

  const Node* section(MapReader& map, const char* key, const char* example) {
    const Node* node = map.take(key);
    if (!node) {
      missing(example);
    } else if (!node->is(Node::Kind::list) || node->items.empty()) {
      const bool empty = node->is(Node::Kind::list);
      problems_.add(node->place, fmt::format("got {} for '{}', wanted a list: each line begins with '- '",
                                             empty ? "an empty list" : yaml::describe(*node), key));
      return nullptr;
    }
    return node;
  }

  // have: entries of this kind so far. Their number is limited, because each is resolved against its plugin.
  std::vector<Node> entry_axes(const Node& entry, const char* kind, std::size_t have) {
    if (have >= most_expansions) {
      problems_.add(entry.place,
                    fmt::format("got another {} after {}, wanted at most {}, combinations of lists counted", kind, have,
                                most_expansions));
      return {};
    }
    if (!entry.is(Node::Kind::list)) return expand_axes(entry, most_expansions, problems_);
    problems_.add(entry.place, fmt::format("got a list as a {}, wanted NAME or {{NAME: {{...}}}}", kind));
    return {};
  }

  void tasks(MapReader& map) {
    const Node* node = section(map, "tasks", "tasks: [NAME: {...}]");
    if (!node) return;
    for (const Node& entry : node->items)
      for (const Node& one : entry_axes(entry, "task", out_.tasks.size()))
        if (auto task = read_task(one, catalog_, problems_)) out_.tasks.push_back(std::move(*task));
  }

  void policies(MapReader& map) {
    const yaml::Entry* ablate = map.take_entry("ablate");
    if (ablate && !ablate->value.is(Node::Kind::map) && !ablate->value.is(Node::Kind::null))
      problems_.add(ablate->value.place,
                    "got " + yaml::describe(ablate->value) + " for 'ablate', wanted {NAME: [...]} or {NAME: all}");
    if (const Node* node = map.take("profilers")) return profilers(map, *node);
    const Node* node = section(map, "policies", "policies: [full]");
    if (!node) return;
    std::vector<std::string> labels;
    for (const Node& entry : node->items) {
      const Node* list = nullptr;
      std::vector<std::string> own;
      for (const Node& one : entry_axes(entry, "policy", out_.policies.size())) {
        auto policy = read_policy(one, out_.page_size, catalog_, problems_, out_.equal_bytes > 0);
        own.push_back(entry_label(one));
        if (!policy) continue;
        if (out_.equal_bytes > 0) equal_budget(one, *policy);
        if (ablate)
          if (const yaml::Entry* e = ablate->value.find(policy->name)) list = &e->value;
        const PolicySpec base = *policy;
        out_.policies.push_back(std::move(*policy));
        if (list) variants(base, *list);
        list = nullptr;
      }
      labels.insert(labels.end(), own.begin(), own.end());
    }
    if (ablate)
      for (const yaml::Entry& e : ablate->value.entries)
        if (std::find(labels.begin(), labels.end(), e.key.text) == labels.end())
          problems_.add(e.key.place, fmt::format("got '{}', wanted a name under policies: {}{}", e.key.text,
                                                 join(labels), did_you_mean(e.key.text, labels)));
  }

  void equal_budget(const Node& entry, PolicySpec& policy) {
    if (policy.budget.kind != BudgetAmount::unlimited)
      problems_.add(entry.place, "got a budget of '" + policy.name +
                                     "' beside equal_bytes, wanted one of them: equal_bytes gives each policy its own");
    else if (takes_budget(policy, catalog_))
      policy.budget = {BudgetAmount::bytes, static_cast<double>(out_.equal_bytes)};
  }

  void profilers(MapReader& map, const Node& node) {
    if (const yaml::Entry* bytes = map.take_entry("equal_bytes"))
      problems_.add(bytes->key.place, "got equal_bytes beside profilers, wanted policies: profilers have no budget");
    if (const yaml::Entry* policies = map.take_entry("policies"))
      problems_.add(policies->key.place,
                    "got policies beside profilers, wanted one of them: a profile is of the full cache");
    if (!node.is(Node::Kind::list) || node.items.empty()) {
      problems_.add(node.place, "got " + yaml::describe(node) + " for 'profilers', wanted a list: [NAME, ...]");
      return;
    }
    for (const Node& entry : node.items)
      if (auto use = read_profiler(entry, catalog_, problems_)) out_.profilers.push_back(std::move(*use));
  }

  // `list`: names of components, or `all`.
  void variants(const PolicySpec& base, const Node& list) {
    const std::vector<std::string> declared = components(base, catalog_);
    const std::string policy = fmt::format("'{}' ({})", base.name, base.where);
    if (declared.empty()) {
      problems_.add(list.place, fmt::format("got an ablation of {}, which declares no components", policy));
      return;
    }
    note_repeats(list, problems_);
    if (list.is(Node::Kind::list) && list.items.empty())
      problems_.add(list.place,
                    fmt::format("got an empty list, wanted all or components of {}: {}", policy, join(declared)));
    if (list.is(Node::Kind::scalar) && list.text == "all") {
      for (const std::string& component : declared)
        if (auto variant = without(base, component, catalog_)) out_.policies.push_back(std::move(*variant));
      return;
    }
    for (const Node* item : one_or_list(list)) {
      const std::string word = item->is(Node::Kind::scalar) ? item->text : "";
      if (std::find(declared.begin(), declared.end(), word) == declared.end())
        problems_.add(item->place, fmt::format("got {}{}, wanted all or components of {}: {}{}", yaml::describe(*item),
                                               word == "all" ? " inside a list" : "", policy, join(declared),
                                               did_you_mean(word, declared)));
      else if (auto variant = without(base, word, catalog_))
        out_.policies.push_back(std::move(*variant));
      else
        problems_.add(item->place, fmt::format("got '{}', but {} has it switched off already", word, policy));
    }
  }

  void inject(MapReader& map) {
    const Node* node = map.take("inject");
    if (!node) return;
    InjectSpec& inject = out_.inject;
    inject.where = document_.where(node->place);
    MapReader keys(*node, "inject", problems_);
    const Node *overlap = keys.take("overlap"), *rerank = keys.take("rerank_overlap"), *trace = keys.take("trace"),
               *cell = keys.take("cell"), *correction = keys.take("correction"), *drift = keys.take("drift");
    keys.finish();
    const std::string wanted = " 'inject', wanted {overlap: X}, {trace: FILE}, {correction: X} or {drift: X}";
    if (!node->is(Node::Kind::map)) {
      if (node->is(Node::Kind::null)) problems_.add(node->place, "got an empty" + wanted);
      return;
    }
    if (overlap && trace)
      problems_.add(node->place, "got overlap and trace for 'inject', wanted one of them: both give the page lists");
    if (rerank && !overlap)
      problems_.add(
          rerank->place,
          "got rerank_overlap without overlap, wanted overlap: X beside it, for heads that choose in each step");
    if (!overlap && !rerank && !trace && !correction && !drift)
      problems_.add(node->place, "got neither overlap, trace, correction nor drift for" + wanted);
    const auto share = [&](const Node* of, const char* key, const char* help, std::optional<double>& to) {
      if (!of) return;
      if (const auto value = read_value(*of, make_param(key, 0., 0, 1, help), problems_)) to = std::get<double>(*value);
    };
    share(overlap, "overlap", "pages that the list before had", inject.overlap);
    share(rerank, "rerank_overlap", "pages that the list before had, of a head that paused", inject.rerank_overlap);
    share(correction, "correction", "heads that choose again before attention", inject.correction);
    share(drift, "drift", "leaders that a check finds drifted", inject.drift);
    if (trace) inject.trace = read_text(*trace, "trace");
    if (cell) inject.cell = read_text(*cell, "cell");
    if (cell && !trace) problems_.add(cell->place, "got a cell without a trace, wanted trace: FILE beside it");
    if (problems_.empty() &&
        std::none_of(out_.policies.begin(), out_.policies.end(), [&](const PolicySpec& p) { return inject.used(p); }))
      problems_.add(node->place, inject.lists() ? "got inject without a policy that selects pages, wanted one whose "
                                                  "lists it replaces"
                                                : "got a correction or drift in inject without a policy, wanted one "
                                                  "whose heads can turn or drift");
  }

  std::string read_text(const Node& node, const char* key) {
    const auto value = read_value(node, make_param(key, std::string(), ""), problems_);
    if (value && std::get<std::string>(*value).empty())
      problems_.add(node.place, fmt::format("got empty text for '{}', wanted a path", key));
    return value ? std::get<std::string>(*value) : "";
  }

  void missing(const std::string& example) {
    problems_.add(document_.root.place,
                  "got no '" + example.substr(0, example.find(':')) + "', wanted e.g. " + example);
  }

  const yaml::Document& document_;
  const PluginCatalog& catalog_;
  Problems& problems_;
  Experiment out_;
};

}  // namespace

fs::path Experiment::resolve(const std::string& path) const { return resolve_data_path(path, folder); }

const char* name_of(Metric metric) {
  for (const auto& [word, m] : metric_words)
    if (m == metric) return word;
  return "?";
}

Experiment read_experiment(yaml::Document document, const PluginCatalog& catalog) {
  Problems problems(document);
  apply_sets(document, problems);
  apply_sweep(document.root, problems);
  Experiment experiment = ExperimentReader(document, catalog, problems).read();
  problems.raise();
  experiment.text = add_overrides(document.text, document.sets);
  return experiment;
}

Experiment load_experiment(const std::string& path, const std::vector<std::string>& sets,
                           const PluginCatalog& catalog) {
  yaml::Document document = yaml::parse_file(path);
  document.sets = sets;
  return read_experiment(std::move(document), catalog);
}

std::vector<std::string> plugin_path_of(const std::string& path, const std::vector<std::string>& sets) {
  yaml::Document document = yaml::parse_file(path);
  document.sets = sets;
  return plugin_path_of(std::move(document));
}

std::vector<std::string> plugin_path_of(yaml::Document document) {
  Problems ignored(document), problems(document);
  apply_sets(document, ignored);
  std::vector<std::string> places;
  const yaml::Entry* found = document.root.find("plugin_path");
  if (!found) return places;
  for (const Node* item : one_or_list(found->value)) {
    if (!item->is(Node::Kind::scalar) || item->text.empty()) continue;
    const fs::path place(item->text);
    places.push_back((place.is_absolute() ? place : fs::path(document.file).parent_path() / place).string());
    std::error_code error;
    if (!fs::exists(places.back(), error))
      problems.add(item->place, "got no file or folder " + places.back() +
                                    ", wanted a folder with lib*.so or a library; "
                                    "build the plugin or correct plugin_path");
  }
  problems.raise();
  return places;
}

}  // namespace kvlab
