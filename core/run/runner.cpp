#include "run/runner.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <unistd.h>
#include <kvlab/error.hpp>

#include <algorithm>
#include <ctime>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <set>
#include <utility>

#include "base/backend.hpp"
#include "base/cpu.hpp"
#include "base/log.hpp"
#include "base/memory_reserve.hpp"
#include "base/stop.hpp"
#include "base/stream_memory.hpp"
#include "base/terminal.hpp"
#include "base/threads.hpp"
#include "base/version.hpp"
#include "experiment/build_policy.hpp"
#include "experiment/variants.hpp"
#include "model/bundled.hpp"
#include "plugin/callback.hpp"
#include "result/output.hpp"
#include "result/report.hpp"
#include "result/results.hpp"
#include "run/cannot_go_on.hpp"
#include "run/cell.hpp"
#include "run/device.hpp"
#include "run/isolated.hpp"
#include "run/model_record.hpp"
#include "run/prepare.hpp"
#include "run/progress.hpp"

namespace kvlab {
namespace {

std::string cell_name(const Experiment& e, const Cell& c) {
  const PolicySpec& p = e.policies[c.policy];
  std::string name = task_label(e.tasks[c.task]) + workload_label(e, c) + " " + policy_text(e, p);
  if (p.budget.kind != BudgetAmount::unlimited) name += " " + budget_text(p);
  if (e.seeds.size() > 1) name += " seed " + std::to_string(c.seed);
  if (e.repeats > 1) name += " repeat " + std::to_string(c.repeat);
  return name;
}

std::vector<std::string> ids_of(const std::vector<Cell>& cells) {
  std::vector<std::string> ids;
  for (const Cell& c : cells) ids.push_back(c.id);
  return ids;
}

// One model at a time holds its weights. Its files are closed once they are read.
class ModelInUse {
 public:
  ModelInUse(const Experiment& e, Prepared& prepared) : e_(e), prepared_(prepared) {}

  // Throws NoRoom where the weights do not fit and NonFinite where some are not finite. Later calls throw the same
  // without another try.
  void need(std::size_t model) {
    if (no_room_.count(model)) throw NoRoom(no_room_.at(model));
    if (nonfinite_.count(model)) throw nonfinite_.at(model);
    if (outline_ && model_ == model) return;
    if (outline_) prepared_.models[model_] = std::exchange(outline_, nullptr);
    const ModelSpec& spec = e_.models[model];
    const log::Timed timed("weights of " + spec.name());
    auto checkpoint = std::move(prepared_.checkpoints[model]);
    try {
      if (!checkpoint) checkpoint = open_model(spec.path, spec.adapter, e_.folder);
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

// Loads the cell's model and runs the cell in this process.
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

// Returns whether `write` succeeded and logs what is lost if not. A disk that is full or away ends a run, but finished
// cells stay.
template <class Write>
bool written(const std::string& what, const std::string& then, Write write) {
  try {
    on_own_file(what + " could not be written", write);
    return true;
  } catch (const CannotGoOn& error) {
    log::error(fmt::format("{}; {}", error.what(), then));
    return false;
  }
}

void put_on_disk(const std::string& out, const results::CellResult& result, const results::RunInfo& info) {
  const std::string part =
      on_own_file("its part could not be written", [&] { return results::write_part(out, result, info); });
  log::debug("cell " + result.id + ": written to " + part);
}

// A cell's result.
struct Ran {
  results::CellResult result;
  bool on_disk = false;  // whether its part is
};

// One run of an experiment: it runs the cells that are not finished, in order, then reports.
class Run {
 public:
  // Locks the output until this object ends.
  Run(const Experiment& e, const PluginCatalog& catalog, const RunOptions& options, Prepared& prepared);
  int run();  // the exit code

 private:
  const std::vector<Cell>& all() const { return prepared_.cells; }
  results::Finished finished_before() const;
  std::size_t finished() const;  // of this experiment's cells, by earlier runs or this one
  std::string goes_on() const;

  void run_cells();
  bool finished_already(const Cell& cell);
  bool run_and_write(const Cell& cell);
  Ran run_one(const Cell& cell);
  Ran run_apart(const Cell& cell, const CellInput& in) const;
  void stop_at(const Cell& cell, const std::string& name, const std::string& why);

  int end();
  bool make_output() const;
  int say_stopped() const;
  void say_others() const;
  void print_report(bool made) const;

  const Experiment& e_;
  const PluginCatalog& catalog_;
  const RunOptions& options_;
  Prepared& prepared_;
  ModelInUse models_{e_, prepared_};
  ReferenceCache references_;
  std::string out_;
  std::vector<std::string> ids_;  // of the experiment's cells
  std::unique_ptr<results::OutputLock> held_;
  results::RunInfo info_;
  results::Finished before_;   // by earlier runs
  std::set<std::string> new_;  // cells that this run has finished
  Progress progress_;
  bool trouble_ = false;  // a cell failed, did not fit or could not be written
  int stopped_ = 0;       // by this signal
  int skipped_ = 0;       // cells
};

Run::Run(const Experiment& e, const PluginCatalog& catalog, const RunOptions& options, Prepared& prepared)
    : e_(e),
      catalog_(catalog),
      options_(options),
      prepared_(prepared),
      out_(e.output.string()),
      ids_(ids_of(prepared.cells)),
      held_(results::open_output(out_, options.command, results::OutputKind::results, ids_)),
      info_(run_info(e, options.command, models_text(prepared.models))),
      before_(finished_before()),
      progress_(static_cast<int>(all().size())) {
  for (const std::string& warning : before_.warnings) log::warn(warning);
}

results::Finished Run::finished_before() const {
  const FreedReserve room;
  return results::finished(out_);
}

std::size_t Run::finished() const {
  return static_cast<std::size_t>(std::count_if(
      ids_.begin(), ids_.end(), [&](const std::string& id) { return before_.cells.count(id) || new_.count(id); }));
}

std::string Run::goes_on() const {
  if (!options_.fresh) return "the same command goes on from there";
  return "the same command without --fresh goes on from there and keeps the cells of earlier runs";
}

int Run::run() {
  try {
    run_cells();
    stop::check();
  } catch (const stop::Interrupted& by) {  // the cell under way leaves no result
    stopped_ = by.signal;
  } catch (const std::exception& e) {
    log::error(fmt::format("the run stops here: {}; {}", e.what(), goes_on()));
    trouble_ = true;
  }
  return end();
}

void Run::run_cells() {
  for (const Cell& c : all()) {
    if (finished_already(c)) continue;
    stop::check();
    keep_reserve();
    if (!run_and_write(c)) return;
  }
}

bool Run::finished_already(const Cell& c) {
  if (options_.fresh) return false;  // its part stays until the new one replaces it
  const auto done = before_.cells.find(c.id);
  if (done == before_.cells.end()) return false;
  trouble_ |= done->second.status != "ok";
  ++skipped_;
  progress_.skip();
  return true;
}

// Returns false, which ends the run, where kvlab cannot write its own files.
bool Run::run_and_write(const Cell& c) {
  const std::string name = cell_name(e_, c);
  log::debug("cell " + c.id + ": " + name);
  progress_.begin(name);
  try {
    const Ran ran = run_one(c);
    if (!ran.on_disk) put_on_disk(out_, ran.result, info_);
    const results::SummaryRow& s = ran.result.summary;
    trouble_ |= s.status != "ok";
    new_.insert(c.id);
    progress_.end(s.status == "ok" ? "ok" : s.status + ": " + s.error);
    return true;
  } catch (const CannotGoOn& e) {
    stop_at(c, name, e.what());
    return false;
  }
}

void Run::stop_at(const Cell& c, const std::string& name, const std::string& why) {
  trouble_ = true;
  progress_.end("not finished");
  log::error(fmt::format("cell {} ({}): {}; the run stops here, and {}", c.id, name, why, goes_on()));
}

Ran Run::run_one(const Cell& c) {
  CellInput in = input(e_, catalog_, prepared_, c);
  in.references = &references_;
  in.progress = [this](const std::string& pass, int done, int total) { progress_.item(pass, done, total); };
  try {
    return options_.isolate.empty() ? Ran{run_here(in, models_)} : run_apart(c, in);
  } catch (const std::bad_alloc& e) {  // outside the cell's own passes
    return {broken_cell(in, "oom", e.what())};
  }
}

// --isolate: returns the part that the cell's process wrote, else a result that says how the process ended.
Ran Run::run_apart(const Cell& c, const CellInput& in) const {
  std::vector<std::string> command = options_.isolate;
  command.insert(command.begin() + 2, {"--isolated-cell", c.id});
  const CellEnd end = run_cell_process(command, in.progress);
  if (!end.written) return {broken_cell(in, end.status, end.error)};
  return {on_own_file("its part could not be read",
                      [&] { return results::read_cell(results::part_path(out_, c.id), c.id); }),
          true};
}

int Run::end() {
  if (skipped_)
    log::info(fmt::format("{} of {} cells were finished already (--fresh runs them again)", skipped_, all().size()));
  const bool made = make_output();
  if (stopped_) return say_stopped();
  say_others();
  if (!options_.quiet && (made || finished() > 0))
    trouble_ |= !written("the table", "kvlab report prints it", [&] { print_report(made); });
  return trouble_ || !made ? 1 : 0;
}

bool Run::make_output() const {
  const std::string then = finished() == 0
                               ? "there is no finished cell yet"
                               : fmt::format("its cells are in {}, and the same command{} makes it of them",
                                             results::parts_folder(out_), options_.fresh ? " without --fresh" : "");
  return written("the result file", then, [&] {
    for (const std::string& warning : results::rebuild(out_, info_, ids_)) log::warn(warning);
  });
}

int Run::say_stopped() const {
  const std::string earlier =
      options_.fresh ? fmt::format(" ({} of them by earlier runs)", finished() - new_.size()) : "";
  log::info(fmt::format("stopped by {}: {} of {} cells are finished{} and in {}; {}", stop::name_of(stopped_),
                        finished(), all().size(), earlier, out_, goes_on()));
  return stop::exit_code(stopped_);
}

// Reports finished cells of this output that the experiment no longer names.
void Run::say_others() const {
  const std::set<std::string> own(ids_.begin(), ids_.end());
  const auto others =
      std::count_if(before_.cells.begin(), before_.cells.end(), [&](const auto& c) { return !own.count(c.first); });
  if (others == 0) return;
  log::info(fmt::format("{} finished {} of other settings: not in {}, kept in {}", others,
                        others == 1 ? "cell is" : "cells are", out_, results::parts_folder(out_)));
}

void Run::print_report(bool made) const {
  fmt::print("{}", results::report({out_}, {results::Format::table, {}, takes_colour(STDOUT_FILENO)}));
  if (made) fmt::print("results: {}\n", out_);
}

void want_reserve() {
  if (!keep_reserve()) throw NoRoom("got none for what ends a run in order, wanted 16 MiB");
}

// Runs body(). Without memory to prepare the first cell there is no cell that could record the error.
template <class Body>
void with_memory(Body body) {
  try {
    body();
  } catch (const std::bad_alloc& e) {
    throw Error(Errc::config,
                fmt::format("got no memory to prepare the run ({}), wanted more: see ulimit -v", e.what()));
  }
}

}  // namespace

int run_experiment(const Experiment& given, const PluginCatalog& catalog, const RunOptions& options) {
  if (!given.profilers.empty())
    throw Error(Errc::config, "got an experiment with profilers, wanted policies: `kvlab profile` runs this file",
                given.file.string());
  stop::watch();
  name_callback_at_end();
  const Experiment e = with_backend(given);
  use_threads(e.threads);
  std::optional<Prepared> prepared;
  std::optional<Run> run;
  with_memory([&] {
    want_reserve();
    start_threads();
    prepared.emplace(prepare(e, catalog));
    run.emplace(e, catalog, options, *prepared);
  });
  return run->run();
}

int run_isolated_cell(const Experiment& given, const PluginCatalog& catalog, const std::string& id,
                      const std::string& command) {
  telling::begin();
  stop::watch();
  bool begun = false;  // the cell has begun: missing memory is then its result, as in a run without --isolate
  try {
    const Experiment e = with_backend(given);
    use_threads(e.threads);
    want_reserve();
    start_threads();
    Prepared prepared = prepare(e, catalog, id);
    if (prepared.cells.empty())
      throw Error(Errc::data, "got other cells than the run that asks for it: the file or its data has changed", id);
    const std::string written_models = models_text(prepared.models);
    ModelInUse models(e, prepared);
    ReferenceCache references;
    CellInput in = input(e, catalog, prepared, prepared.cells.front());
    in.references = &references;
    in.progress = telling::progress;
    telling::begun();
    begun = true;
    const results::CellResult result = run_here(in, models);
    put_on_disk(e.output.string(), result, run_info(e, command, written_models));
    telling::written();
    return result.summary.status == "ok" ? 0 : 1;
  } catch (const stop::Interrupted& stopped) {
    telling::cannot_go_on(fmt::format("the cell's process was stopped by {}", stop::name_of(stopped.signal)));
    return stop::exit_code(stopped.signal);
  } catch (const std::bad_alloc& no_memory) {
    if (begun)
      telling::no_memory(no_memory.what());
    else
      telling::cannot_go_on(fmt::format("got no memory to prepare the cell: {}", no_memory.what()));
  } catch (const std::exception& error) {
    telling::cannot_go_on(error.what());
  }
  return 1;
}

results::RunInfo run_info(const Experiment& e, const std::string& command, const std::string& models) {
  results::RunInfo info;
  info.kvlab_version = version();
  info.git_commit = git_commit();
  info.created_utc = fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
  info.command = command;
  info.experiment_yaml = e.text;
  info.experiment_file = e.file.empty() ? "" : std::filesystem::absolute(e.file).lexically_normal().string();
  info.models = models;
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
    for (Cell& cell : all) cell.id = "-";  // an id depends on the model's contents
    return {cell_table(e, all) + "not checked: prompts, budgets and profiles, because the model is not here\n", error};
  }
}

}  // namespace kvlab
