#include "run/runner.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <omp.h>
#include <unistd.h>
#include <kvlab/error.hpp>

#include <ctime>
#include <map>
#include <tuple>

#include "base/cpu.hpp"
#include "base/version.hpp"
#include "model/bundled.hpp"
#include "run/cell.hpp"
#include "run/progress.hpp"
#include "run/report.hpp"
#include "run/results.hpp"

namespace kvlab {
namespace {

results::RunInfo run_info(const Experiment& e, const std::string& command) {
  results::RunInfo info;
  info.kvlab_version = version();
  info.git_commit = git_commit();
  info.created_utc = fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
  info.command = command;
  info.experiment_yaml = e.text;
  char host[256] = "";
  gethostname(host, sizeof host - 1);
  info.host = host;
  info.cpu = cpu_name();
  info.gpu = "none";
  info.backend = "cpu";
  info.threads = omp_get_max_threads();
  return info;
}

using ItemsKey = std::tuple<std::size_t, std::size_t, std::int64_t>;  // model, task, seed

std::string cell_name(const Experiment& e, const Cell& c) {
  const PolicySpec& p = e.policies[c.policy];
  std::string name = e.tasks[c.task].name + " " + p.name;
  if (p.budget.kind != BudgetAmount::unlimited) name += " " + budget_text(p);
  if (e.seeds.size() > 1) name += " seed " + std::to_string(c.seed);
  if (e.repeats > 1) name += " repeat " + std::to_string(c.repeat);
  return name;
}

}  // namespace

int run_experiment(const Experiment& e, const PluginCatalog& catalog, const RunOptions& options) {
  if (e.threads > 0) omp_set_num_threads(e.threads);

  std::vector<std::shared_ptr<const Model>> models;
  for (const ModelSpec& spec : e.models) {
    const auto path = resolve_model_path(spec.path, e.folder);
    models.push_back(load_model(*open_checkpoint(path), spec.dtype, spec.path));
  }
  Fingerprints prints = content_fingerprints();
  prints.model = [&](const ModelSpec& spec) {
    return models[static_cast<std::size_t>(&spec - e.models.data())]->fingerprint;
  };
  const std::vector<Cell> all = cells(e, catalog, prints);

  // Whatever is wrong shows here, before anything is run or written.
  std::map<ItemsKey, TaskItems> items;
  ReferenceCache references;
  const auto input = [&](const Cell& c) {
    CellInput in;
    in.experiment = &e;
    in.cell = &c;
    in.model = models[c.model];
    in.items = &items.at({c.model, c.task, c.seed});
    in.catalog = &catalog;
    in.references = &references;
    return in;
  };
  for (const Cell& c : all) {
    const ItemsKey key{c.model, c.task, c.seed};
    if (!items.count(key))
      items[key] = make_items(e.tasks[c.task], catalog, models[c.model]->tokenizer, models[c.model]->config, e, c.seed);
    check_cell(input(c));
  }

  const std::string out = e.output.string();
  results::RunInfo info = run_info(e, options.command);
  std::vector<std::string> ids;
  for (const Cell& c : all) ids.push_back(c.id);
  if (options.fresh) results::forget(out, ids);
  const results::Finished before = results::finished(out);
  Progress progress(static_cast<int>(all.size()), options.quiet);
  for (const std::string& warning : before.warnings) progress.note("warning: " + warning);

  bool trouble = false;
  int skipped = 0;
  for (const Cell& c : all) {
    if (const auto done = before.cells.find(c.id); done != before.cells.end()) {
      trouble |= done->second.status != "ok";
      ++skipped;
      progress.skip();
      continue;
    }
    CellInput in = input(c);
    in.progress = [&](const std::string& pass, int done, int total) { progress.item(pass, done, total); };
    progress.begin(cell_name(e, c));
    const results::CellResult result = run_cell(in);
    results::write_part(out, result, info);
    const auto& s = result.summary;
    trouble |= s.status != "ok";
    progress.end(s.status == "ok" ? "ok" : s.status + ": " + s.error);
  }
  if (skipped)
    progress.note(fmt::format("{} of {} cells were finished already (--fresh runs them again)", skipped, all.size()));
  for (const std::string& warning : results::rebuild(out, info, ids)) progress.note("warning: " + warning);
  if (!options.quiet) {
    fmt::print("{}", results::report(out, results::Format::table));
    fmt::print("results: {}\n", out);
  }
  return trouble ? 1 : 0;
}

}  // namespace kvlab
