#include "run/runner.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>
#include <kvlab/error.hpp>

#include <algorithm>
#include <ctime>
#include <filesystem>
#include <map>
#include <new>
#include <set>
#include <tuple>
#include <utility>

#include "base/backend.hpp"
#include "base/cpu.hpp"
#include "base/log.hpp"
#include "base/memory_reserve.hpp"
#include "base/stop.hpp"
#include "base/stream_memory.hpp"
#include "base/threads.hpp"
#include "base/version.hpp"
#include "experiment/build_policy.hpp"
#include "experiment/variants.hpp"
#include "host/callback.hpp"
#include "model/bundled.hpp"
#include "result/output.hpp"
#include "result/report.hpp"
#include "result/results.hpp"
#include "run/cell.hpp"
#include "run/device.hpp"
#include "run/isolated.hpp"
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
    const log::Timed timed("weights of " + spec.name());
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
  std::shared_ptr<const Model> model(std::size_t model) const { return prepared_.models[model]; }

 private:
  const Experiment& e_;
  Prepared& prepared_;
  std::shared_ptr<const Model> outline_;
  std::map<std::size_t, std::string> no_room_;  // models that did not fit
  std::map<std::size_t, NonFinite> nonfinite_;  // models with such weights
  std::size_t model_ = 0;
};

// Whatever is wrong shows here, before anything is run or written; each message once. only: this cell of the
// experiment, empty = all.
Prepared prepare(const Experiment& e, const PluginCatalog& catalog, const std::string& only = {}) {
  Prepared p;
  for (const ModelSpec& spec : e.models)
    placed(spec.where, [&] {
      p.checkpoints.push_back(open_model(spec.path, spec.adapter, e.folder));
      p.models.push_back(model_outline(*p.checkpoints.back(), spec.dtype, spec.name(), device_of(e)));
      log::debug("model " + spec.name() + ": contents " + p.models.back()->fingerprint);
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
  log::debug(fmt::format("{}: {} cells on {}", e.file.string(), p.cells.size(), e.backend));
  if (!only.empty()) std::erase_if(p.cells, [&](const Cell& c) { return c.id != only; });

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
      attempt(e.tasks[c.task].where, [&] {
        const log::Timed timed("prompts of " + task_label(e.tasks[c.task]));
        p.items[key] = make_items(e.tasks[c.task], catalog, model.tokenizer, model.config, e, c.seed);
      });
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
  if (only.empty())
    attempt("", [&] {  // else the run that asks holds the output
      results::check_output(e.output.string());
      results::check_apart(e.output.string(), inputs);
    });
  if (!wrong.empty()) throw ExperimentError(std::move(wrong));
  return p;
}

// Runs the cell where this process has all it takes.
results::CellResult run_here(const CellInput& in, ModelInUse& models) {
  try {
    models.need(in.cell->model);
  } catch (const NoRoom& no_room) {
    return broken_cell(in, "oom", no_room.what());
  } catch (const NonFinite& weights) {
    return broken_cell(in, weights);
  }
  CellInput with_weights = in;
  with_weights.model = models.model(in.cell->model);
  return run_cell(with_weights);
}

// body(); without memory for what comes before the first cell there is nothing to record.
template <class Body>
auto with_memory(Body body) {
  try {
    return body();
  } catch (const std::bad_alloc& e) {
    throw Error(Errc::config,
                fmt::format("got no memory to prepare the run ({}), wanted more: see ulimit -v", e.what()));
  }
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
  } catch (const std::bad_alloc&) {
    log::error(fmt::format("{} could not be written: got no memory for its file; {}", what, then));
  }
  return false;
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
  info.threads = all_threads();
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
  stop::watch();
  name_callback_at_end();
  const Experiment e = with_backend(given);
  use_threads(e.threads);

  keep_reserve();
  Prepared prepared = with_memory([&] {
    start_threads();
    return prepare(e, catalog);
  });
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
  Progress progress(static_cast<int>(all.size()));
  for (const std::string& warning : before.warnings) log::warn(warning);

  const auto run_one = [&](const Cell& c) {
    CellInput in = input(e, catalog, prepared, c);
    in.references = &references;
    in.progress = [&](const std::string& pass, int done, int total) { progress.item(pass, done, total); };
    if (options.isolate.empty()) return run_here(in, models);
    std::vector<std::string> command = options.isolate;
    command.insert(command.end(), {"--isolated-cell", c.id});
    const CellEnd end = run_cell_process(command, in.progress);
    if (const std::string part = results::part_path(out, c.id); std::filesystem::exists(part))
      return results::read_cell(part, c.id);
    return broken_cell(in, end.status, end.error);
  };
  bool trouble = false;
  int stopped = 0;  // by this signal
  int skipped = 0, written_cells = 0;
  try {
    for (const Cell& c : all) {
      if (const auto done = before.cells.find(c.id); done != before.cells.end()) {
        trouble |= done->second.status != "ok";
        ++skipped;
        progress.skip();
        continue;
      }
      stop::check();
      keep_reserve();
      const std::string name = cell_name(e, c);
      log::debug("cell " + c.id + ": " + name);
      progress.begin(name);
      const results::CellResult result = run_one(c);
      const bool on_disk = !options.isolate.empty() && std::filesystem::exists(results::part_path(out, c.id));
      if (!on_disk && !written(fmt::format("cell {} ({})", c.id, name),
                               "the run stops here, and the same command goes on from there", [&] {
                                 log::debug("cell " + c.id + ": written to " + results::write_part(out, result, info));
                               })) {
        progress.end("not written");
        trouble = true;
        break;
      }
      ++written_cells;
      const auto& s = result.summary;
      trouble |= s.status != "ok";
      progress.end(s.status == "ok" ? "ok" : s.status + ": " + s.error);
    }
    stop::check();
  } catch (const stop::Interrupted& by) {  // what the cell under way has so far is dropped
    stopped = by.signal;
  }
  if (skipped)
    log::info(fmt::format("{} of {} cells were finished already (--fresh runs them again)", skipped, all.size()));
  const bool built = written(
      "the result file",
      fmt::format("its cells are in {}, and the same command makes it of them", results::parts_folder(out)), [&] {
        for (const std::string& warning : results::rebuild(out, info, ids)) log::warn(warning);
      });
  if (stopped) {
    log::info(fmt::format("stopped by {}: {} of {} cells are finished and in {}; the same command goes on from there",
                          stop::name_of(stopped), skipped + written_cells, all.size(), out));
    return stop::exit_code(stopped);
  }
  if (const std::size_t others = cells_of_others(before, ids))
    log::info(fmt::format("{} finished {} of other settings: not in {}, kept in {}", others,
                          others == 1 ? "cell is" : "cells are", out, results::parts_folder(out)));
  if (!options.quiet && (built || skipped + written_cells > 0)) {
    fmt::print("{}", results::report(out, results::Format::table));
    if (built) fmt::print("results: {}\n", out);
  }
  return trouble || !built ? 1 : 0;
}

int run_isolated_cell(const Experiment& given, const PluginCatalog& catalog, const std::string& id,
                      const std::string& command) {
  telling::begin();
  stop::watch();
  try {
    const Experiment e = with_backend(given);
    use_threads(e.threads);
    keep_reserve();
    start_threads();
    Prepared prepared = prepare(e, catalog, id);
    if (prepared.cells.empty())
      throw Error(Errc::data, "got other cells than the run that asks for it: the file or its data has changed", id);
    ModelInUse models(e, prepared);
    ReferenceCache references;
    CellInput in = input(e, catalog, prepared, prepared.cells.front());
    in.references = &references;
    in.progress = telling::progress;
    const results::CellResult result = run_here(in, models);
    results::write_part(e.output.string(), result, run_info(e, command));
    return result.summary.status == "ok" ? 0 : 1;
  } catch (const stop::Interrupted& stopped) {
    return stop::exit_code(stopped.signal);
  } catch (const std::bad_alloc& no_memory) {
    telling::no_memory(no_memory.what());
  } catch (const std::exception& error) {
    telling::failed(error.what());
  }
  return 1;
}

}  // namespace kvlab
