// A cell of an experiment, made by hand of a model, a policy and prompts. It runs as the runner runs one.
#pragma once
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "run/cell.hpp"
#include "support/contract.hpp"

namespace kvlab::test {

inline const RegistryCatalog& built_catalog() {
  static Registry registry;
  static const RegistryCatalog catalog(registry);
  return catalog;
}

inline PolicySpec policy_of(const std::string& yaml, int page_size) {
  const yaml::Document document = yaml::parse_text(yaml, "policy");
  Problems problems(document);
  const auto spec = read_policy(document.root, page_size, built_catalog(), problems);
  problems.raise();
  return *spec;
}

struct CellFixture {
  std::shared_ptr<const Model> model;
  Experiment experiment;
  Cell cell;
  TaskItems items;
  ReferenceCache references;
  std::shared_ptr<const RecordedTrace> recorded;

  CellFixture(std::shared_ptr<const Model> m, const PolicySpec& policy, std::set<Metric> metrics)
      : model(std::move(m)) {
    experiment.tasks.resize(1);
    experiment.policies = {policy};
    experiment.metrics = std::move(metrics);
    cell.id = "cell";
    items.metric = "contains";
    items.plugin = create<AnswerMetric>(*built_catalog().find(Role::metric, items.metric), {});
  }

  // follows: this item is a further turn of the item before it, in the same sample.
  void add(std::vector<int> prompt, std::vector<int> fed, int max_new, bool follows = false) {
    Item item;
    item.sample = items.items.empty() ? 0 : items.items.back().sample + !follows;
    item.max_new = max_new;
    item.follows = follows;
    item.prompt = std::move(prompt);
    item.fed = std::move(fed);
    item.references = {"x"};
    item.sha256 = std::to_string(items.items.size());
    if (follows) {
      const Item& last = items.items.back();
      item.question = last.question + 1;
      item.prompt = last.prompt;
      item.before = last.most_tokens() - static_cast<int>(last.prompt.size());
    }
    items.items.push_back(std::move(item));
  }

  CellInput input() {
    CellInput in;
    in.experiment = &experiment;
    in.cell = &cell;
    in.model = model;
    in.items = &items;
    in.catalog = &built_catalog();
    in.references = &references;
    in.recorded = recorded;
    return in;
  }
  results::CellResult run() {
    const CellInput in = input();
    check_cell(in);
    return run_cell(in);
  }
  // Sets a device_memory that leaves `bytes` for the pages of so many slots.
  void leave_for_pages(std::int64_t bytes, int slots) {
    const CellInput in = input();
    experiment.device_memory =
        Engine::memory(*model, *cell_policy(in), engine_options(in, slots)).beside_pages() + bytes;
  }
};

}  // namespace kvlab::test
