#include "run/runner.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <omp.h>
#include <unistd.h>
#include <kvlab/error.hpp>

#include <algorithm>
#include <ctime>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "base/backend.hpp"
#include "base/cpu.hpp"
#include "base/log.hpp"
#include "base/stream_memory.hpp"
#include "base/version.hpp"
#include "experiment/build_policy.hpp"
#include "experiment/variants.hpp"
#include "model/bundled.hpp"
#include "result/output.hpp"
#include "result/report.hpp"
#include "result/results.hpp"
#include "run/cell.hpp"
#include "run/device.hpp"
#include "run/progress.hpp"
#include "run/recorded.hpp"
#include "run/requests.hpp"

namespace kvlab {
namespace {

using ItemsKey = std::tuple<std::size_t, std::size_t, std::int64_t>;  // model, task, seed

std::string cell_name(const Experiment& e, const Cell& c) {
  const PolicySpec& p = e.policies[c.policy];
  std::string name = task_label(e.tasks[c.task]) + workload_label(e, c) + " " + policy_text(e, p);
  if (p.budget.kind != BudgetAmount::unlimited) name += " " + budget_text(p);
  if (e.seeds.size() > 1) name += " seed " + std::to_string(c.seed);
  if (e.repeats > 1) name += " repeat " + std::to_string(c.repeat);
  return name;
}

// body(); an error that does not say where in the experiment file it belongs says so now.
template <class Body>
void placed(const std::string& where, Body body) {
  try {
    body();
  } catch (const Error& error) {
    if (error.where().starts_with(where)) throw;
    throw Error(error.code(), error.message(), error.where().empty() ? where : where + ": " + error.where());
  }
}

// An experiment that has passed every check.
struct Prepared {
  std::vector<std::unique_ptr<Checkpoint>> checkpoints;
  std::vector<std::shared_ptr<const Model>> models;  // without weights, all but the one in use
  std::vector<Cell> cells;
  std::map<ItemsKey, TaskItems> items;
  std::shared_ptr<const RecordedTrace> recorded;
};

CellInput input(const Experiment& e, const PluginCatalog& catalog, const Prepared& p, const Cell& cell) {
  CellInput in;
  in.experiment = &e;
  in.cell = &cell;
  in.model = p.models[cell.model];
  in.items = &p.items.at({cell.model, cell.task, cell.seed});
  in.catalog = &catalog;
  in.recorded = p.recorded;
  return in;
}

// One model at a time holds its weights, and its files' pages are given back once they are read.
class ModelInUse {
 public:
  ModelInUse(const Experiment& e, Prepared& prepared) : e_(e), prepared_(prepared) {}

  // std::bad_alloc where the weights do not fit, NonFinite where some are not; again at the next call without another
  // try.
  void need(std::size_t model) {
    if (no_room_.count(model)) throw NoRoom(no_room_.at(model));
    if (nonfinite_.count(model)) throw nonfinite_.at(model);
    if (outline_ && model_ == model) return;
    if (outline_) prepared_.models[model_] = std::exchange(outline_, nullptr);
    const ModelSpec& spec = e_.models[model];
    auto checkpoint = std::move(prepared_.checkpoints[model]);
    if (!checkpoint) checkpoint = open_model(spec.path, spec.adapter, e_.folder);
    try {
      outline_ =
          std::exchange(prepared_.models[model], load_model(*checkpoint, spec.dtype, spec.name(), device_of(e_)));
    } catch (const std::bad_alloc& e) {
      throw NoRoom(no_room_[model] = std::string("weights of ") + spec.name() + ": " + e.what());
    } catch (const NonFinite& e) {
      nonfinite_.emplace(model, e);
      throw;
    }
    model_ = model;
  }

 private:
  const Experiment& e_;
  Prepared& prepared_;
  std::shared_ptr<const Model> outline_;
  std::map<std::size_t, std::string> no_room_;  // models that did not fit
  std::map<std::size_t, NonFinite> nonfinite_;  // models with such weights
  std::size_t model_ = 0;
};

// Whatever is wrong shows here, before anything is run or written; each message once.
Prepared prepare(const Experiment& e, const PluginCatalog& catalog) {
  Prepared p;
  for (const ModelSpec& spec : e.models)
    placed(spec.where, [&] {
      p.checkpoints.push_back(open_model(spec.path, spec.adapter, e.folder));
      p.models.push_back(model_outline(*p.checkpoints.back(), spec.dtype, spec.name(), device_of(e)));
    });
  Fingerprints prints = content_fingerprints();
  prints.model = [&](const ModelSpec& spec) {
    return p.models[static_cast<std::size_t>(&spec - e.models.data())]->fingerprint;
  };
  std::vector<std::string> inputs;
  prints.file = [&, hash = prints.file](const std::filesystem::path& file) {
    inputs.push_back(file.string());
    return hash(file);
  };
  p.cells = cells(e, catalog, prints);

  if (!e.inject.trace.empty())
    placed(e.inject.where, [&] {
      inputs.push_back(e.resolve(e.inject.trace).string());
      p.recorded = std::make_shared<RecordedTrace>(read_recorded(inputs.back(), e.inject.cell));
    });

  std::vector<Error> wrong;
  std::set<std::string> seen;
  const auto attempt = [&](const std::string& where, auto body) {
    try {
      placed(where, body);
      return true;
    } catch (const Error& error) {
      if (seen.insert(error.what()).second) wrong.push_back(error);
      return false;
    }
  };
  std::set<ItemsKey> tried;
  for (const Cell& c : p.cells) {
    const ItemsKey key{c.model, c.task, c.seed};
    const Model& model = *p.models[c.model];
    if (tried.insert(key).second)
      attempt(e.tasks[c.task].where,
              [&] { p.items[key] = make_items(e.tasks[c.task], catalog, model.tokenizer, model.config, e, c.seed); });
    const std::string& where = e.policies[c.policy].where;
    if (p.items.count(key) && !e.workloads.empty())
      attempt(e.workloads[c.workload].where,
              [&] { make_requests(e.workloads[c.workload], p.items[key].items, c.seed, e.folder); });
    const bool followed = !p.items.count(key) || !p.recorded || !e.inject.used(e.policies[c.policy]) ||
                          attempt(e.inject.where, [&] { follow(*p.recorded, p.items[key].items); });
    if (p.items.count(key) && followed)
      attempt(where, [&] { check_cell(input(e, catalog, p, c)); });
    else
      attempt(where, [&] { build_policy(e.policies[c.policy], catalog); });
  }
  attempt("", [&] {
    results::check_output(e.output.string());
    results::check_apart(e.output.string(), inputs);
  });
  if (!wrong.empty()) throw ExperimentError(std::move(wrong));
  return p;
}

// Finished cells of this output that the experiment no longer names.
std::size_t cells_of_others(const results::Finished& before, const std::vector<std::string>& ids) {
  const std::set<std::string> own(ids.begin(), ids.end());
  return static_cast<std::size_t>(
      std::count_if(before.cells.begin(), before.cells.end(), [&](const auto& c) { return !own.count(c.first); }));
}

// A disk that is full, or away, ends a run but no finished cell: whether `write` wrote, else what is lost is told.
template <class Write>
bool written(const std::string& what, const std::string& then, Write write) {
  try {
    write();
    return true;
  } catch (const Error& error) {
    log::error(fmt::format("{} could not be written: {}; {}", what, error.what(), then));
    return false;
  }
}

}  // namespace

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
  info.backend = e.backend;
  info.gpu = device_of(e) == Device::cuda ? require_cuda("run").device_name : "none";
  info.threads = omp_get_max_threads();
  return info;
}

Checked check_experiment(const Experiment& given, const PluginCatalog& catalog) {
  const Experiment e = with_backend(given);
  try {
    return {cell_table(e, prepare(e, catalog).cells), {}};
  } catch (const Error& error) {
    if (error.code() != Errc::network) throw;
    for (const PolicySpec& policy : e.policies) placed(policy.where, [&] { build_policy(policy, catalog); });
    std::vector<Cell> all = cells(e, catalog, {});
    for (Cell& cell : all) cell.id = "-";  // the model's contents are part of it
    return {cell_table(e, all) + "not checked: prompts and budgets, because the model is not here\n", error};
  }
}

int run_experiment(const Experiment& given, const PluginCatalog& catalog, const RunOptions& options) {
  if (!given.profilers.empty())
    throw Error(Errc::config, "got an experiment with profilers, wanted policies: `kvlab profile` runs this file",
                given.file.string());
  const Experiment e = with_backend(given);
  if (e.threads > 0) omp_set_num_threads(e.threads);

  Prepared prepared = prepare(e, catalog);
  ModelInUse models(e, prepared);
  const std::vector<Cell>& all = prepared.cells;
  ReferenceCache references;

  const std::string out = e.output.string();
  std::vector<std::string> ids;
  for (const Cell& c : all) ids.push_back(c.id);
  const auto held = results::open_output(out, options.command, results::OutputKind::results, ids);
  results::RunInfo info = run_info(e, options.command);
  if (options.fresh) results::forget(out, ids);
  const results::Finished before = results::finished(out);
  Progress progress(static_cast<int>(all.size()), options.quiet);
  for (const std::string& warning : before.warnings) progress.note("warning: " + warning);

  const auto run_one = [&](const Cell& c) {
    try {
      models.need(c.model);
    } catch (const NoRoom& no_room) {
      return broken_cell(input(e, catalog, prepared, c), "oom", no_room.what());
    } catch (const NonFinite& weights) {
      return broken_cell(input(e, catalog, prepared, c), weights);
    }
    CellInput in = input(e, catalog, prepared, c);
    in.references = &references;
    in.progress = [&](const std::string& pass, int done, int total) { progress.item(pass, done, total); };
    return run_cell(in);
  };
  bool trouble = false;
  int skipped = 0, written_cells = 0;
  for (const Cell& c : all) {
    if (const auto done = before.cells.find(c.id); done != before.cells.end()) {
      trouble |= done->second.status != "ok";
      ++skipped;
      progress.skip();
      continue;
    }
    progress.begin(cell_name(e, c));
    const results::CellResult result = run_one(c);
    if (!written(fmt::format("cell {} ({})", c.id, cell_name(e, c)),
                 "the run stops here, and the same command goes on from there",
                 [&] { results::write_part(out, result, info); })) {
      trouble = true;
      break;
    }
    ++written_cells;
    const auto& s = result.summary;
    trouble |= s.status != "ok";
    progress.end(s.status == "ok" ? "ok" : s.status + ": " + s.error);
  }
  if (skipped)
    progress.note(fmt::format("{} of {} cells were finished already (--fresh runs them again)", skipped, all.size()));
  const bool built = written(
      "the result file",
      fmt::format("its cells are in {}, and the same command makes it of them", results::parts_folder(out)), [&] {
        for (const std::string& warning : results::rebuild(out, info, ids)) progress.note("warning: " + warning);
      });
  if (const std::size_t others = cells_of_others(before, ids))
    progress.note(fmt::format("{} finished {} of other settings: not in {}, kept in {}", others,
                              others == 1 ? "cell is" : "cells are", out, results::parts_folder(out)));
  if (!options.quiet && (built || skipped + written_cells > 0)) {
    fmt::print("{}", results::report(out, results::Format::table));
    if (built) fmt::print("results: {}\n", out);
  }
  return trouble || !built ? 1 : 0;
}

}  // namespace kvlab
