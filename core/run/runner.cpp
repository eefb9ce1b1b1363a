#include "run/runner.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <unistd.h>
#include <kvlab/error.hpp>

#include <algorithm>
#include <csignal>
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
#include "run/gpus.hpp"
#include "run/isolated.hpp"
#include "run/model_record.hpp"
#include "run/prepare.hpp"
#include "run/progress.hpp"
#include "run/run_here.hpp"
#include "run/shared_cells.hpp"

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

// Two workers that ended may be a coincidence, but then the cell costs a third one.
constexpr int most_ends = 2;

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
  int run();          // the exit code; CannotStart where nothing was run for lack of workers
  void tidy() const;  // once no claim is held any more

 private:
  const std::vector<Cell>& all() const { return prepared_.cells; }
  results::Finished finished_before() const;
  std::size_t finished() const;  // of this experiment's cells, by earlier runs or this one
  std::string goes_on() const;

  void run_cells();
  std::vector<const Cell*> unfinished();
  void run_by_others(std::vector<const Cell*> left);
  bool finished_already(const Cell& cell);
  void note_finished_elsewhere(const Cell& cell);
  bool run_and_write(const Cell& cell, const Claim& claim);
  Ran run_one(const Cell& cell, const Claim& claim);
  Ran run_apart(const Cell& cell, const CellInput& in) const;
  void stop_at(const Cell& cell, const std::string& name, const std::string& why);

  int end();
  bool make_output() const;
  results::RunInfo info_of_cells() const;
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
  SharedCells shared_;         // looks at the parts before `before_` does: one that appears in between is new
  results::Finished before_;   // by earlier runs
  std::set<std::string> new_;  // cells that this run has finished
  Progress progress_;
  bool trouble_ = false;  // a cell failed, did not fit or could not be written
  bool cannot_go_on_ = false, left_to_workers_ = false;
  int stopped_ = 0;  // by this signal
  int skipped_ = 0;  // cells
};

Run::Run(const Experiment& e, const PluginCatalog& catalog, const RunOptions& options, Prepared& prepared)
    : e_(e),
      catalog_(catalog),
      options_(options),
      prepared_(prepared),
      out_(e.output.string()),
      ids_(ids_of(prepared.cells)),
      held_(options.worker ? nullptr : results::open_output(out_, options.command, results::OutputKind::results, ids_)),
      info_(run_info(e, options.command, models_text(prepared.models))),
      shared_(out_, options.worker, ids_),
      before_(finished_before()),
      progress_(static_cast<int>(all().size()), options.worker_of.empty()) {
  for (const std::string& warning : before_.warnings) log::warn(warning);
  if (!options.worker_of.empty()) shared_.ask_run();
  if (options.worker) return;
  forget_ended(shared_.folder());
  for (const Cell& c : all())
    if (options.fresh || !before_.cells.count(c.id)) shared_.replaces(c.id, before_.cells.count(c.id));
}

results::Finished Run::finished_before() const {
  if (options_.worker) return {};  // the run that it works for has looked
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
    if (dynamic_cast<const CannotStart*>(&e) && new_.empty()) {
      shared_.tidy();
      throw;
    }
    log::error(fmt::format("the run stops here: {}; {}", e.what(), goes_on()));
    trouble_ = cannot_go_on_ = true;
  }
  return end();
}

void Run::tidy() const {
  if (!options_.worker && finished() == all().size()) shared_.tidy();
}

void Run::run_cells() {
  std::vector<const Cell*> left = unfinished();
  if (options_.spread.on != WorkersOn::nothing) return run_by_others(std::move(left));
  for (bool said = options_.worker; !left.empty();) {
    std::vector<const Cell*> others;  // whose claims other processes hold
    for (const Cell* c : left) {
      stop::check();
      keep_reserve();
      const auto claim = shared_.finished(c->id) ? std::nullopt : shared_.claim(c->id);
      if (shared_.finished(c->id))
        note_finished_elsewhere(*c);
      else if (!claim)
        others.push_back(c);
      else if (!run_and_write(*c, *claim))
        return;
    }
    if (options_.worker) return;
    if (!others.empty() && !std::exchange(said, true))
      log::info(fmt::format("other workers run {} of the cells; this run waits for them", others.size()));
    if (others.size() == left.size()) usleep(200'000);
    left = std::move(others);
  }
}

std::vector<const Cell*> Run::unfinished() {
  std::vector<const Cell*> left;
  for (const Cell& c : all())
    if (!finished_already(c)) left.push_back(&c);
  return left;
}

// --jobs, --on: this process only watches.
void Run::run_by_others(std::vector<const Cell*> left) {
  struct Heard final : WorkersHeard {
    explicit Heard(Run& run) : run_(run) {}
    void finished(const Cell& cell) override { run_.note_finished_elsewhere(cell); }
    void waiting(std::size_t running, const std::string& where) override { run_.progress_.waiting(running, where); }
    Run& run_;
  } heard(*this);
  left = run_by_workers(options_.spread, e_, hash_of(all()), std::move(left), shared_, heard);
  left_to_workers_ = !left.empty() && !options_.spread.wait;
  if (left.empty() || left_to_workers_ || stop::requested()) return;
  trouble_ = true;
  log::error(
      fmt::format("got the end of all workers and {} unfinished cells, wanted none; {}", left.size(), goes_on()));
}

void Run::note_finished_elsewhere(const Cell& c) {
  new_.insert(c.id);
  if (options_.worker) return progress_.skip();
  const results::SummaryRow s =
      on_own_file("a part could not be read", [&] { return results::read_new_part(out_, c.id); });
  trouble_ |= s.status != "ok";
  progress_.ended_elsewhere(cell_name(e_, c), s.status == "ok" ? "ok" : s.status + ": " + s.error);
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
bool Run::run_and_write(const Cell& c, const Claim& claim) {
  const std::string name = cell_name(e_, c);
  log::debug("cell " + c.id + ": " + name);
  progress_.begin(name);
  try {
    const Ran ran = run_one(c, claim);
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
  trouble_ = cannot_go_on_ = true;
  progress_.end("not finished");
  log::error(fmt::format("cell {} ({}): {}; the run stops here, and {}", c.id, name, why, goes_on()));
}

Ran Run::run_one(const Cell& c, const Claim& claim) {
  CellInput in = input(e_, catalog_, prepared_, c);
  in.references = &references_;
  in.progress = [this](const std::string& pass, int done, int total) { progress_.item(pass, done, total); };
  if (claim.ended() >= most_ends)
    return {broken_cell(in, "failed",
                        fmt::format("got the end of {} workers while they ran this cell, the last of them {}; wanted "
                                    "a result",
                                    claim.ended(), claim.last()))};
  try {
    if (!options_.isolate.empty()) return run_apart(c, in);
    return {run_here(in, models_, shared_.folder())};
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
  if (options_.worker) return stopped_ ? stop::exit_code(stopped_) : cannot_go_on_ ? 1 : 0;
  if (left_to_workers_) return 0;
  if (skipped_)
    log::info(fmt::format("{} of {} cells were finished already (--fresh runs them again)", skipped_, all().size()));
  const bool made = make_output();
  if (stopped_) return say_stopped();
  say_others();
  if (!options_.quiet && (made || finished() > 0))
    trouble_ |= !written("the table", "kvlab report prints it", [&] { print_report(made); });
  return trouble_ || !made ? 1 : 0;
}

// The machine of the first cell that workers ran, which may be another one than this.
results::RunInfo Run::info_of_cells() const {
  results::RunInfo info = info_;
  if (options_.spread.on == WorkersOn::nothing || new_.empty()) return info;
  const results::RunInfo there = results::read_summary(shared_.part(*new_.begin())).info;
  info.host = there.host, info.cpu = there.cpu, info.gpu = there.gpu, info.threads = there.threads;
  return info;
}

bool Run::make_output() const {
  const std::string then = finished() == 0
                               ? "there is no finished cell yet"
                               : fmt::format("its cells are in {}, and the same command{} makes it of them",
                                             results::parts_folder(out_), options_.fresh ? " without --fresh" : "");
  return written("the result file", then, [&] {
    for (const std::string& warning : results::rebuild(out_, info_of_cells(), ids_)) log::warn(warning);
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

// Known before plugins are loaded, which takes time.
static const pid_t parent_at_start = getppid();

int run_experiment(const Experiment& file, const PluginCatalog& catalog, const RunOptions& options) {
  const Experiment given = as_run_says(file, options.worker_of);
  if (!given.profilers.empty())
    throw Error(Errc::config, "got an experiment with profilers, wanted policies: `kvlab profile` runs this file",
                given.file.string());
  if (options.worker) place_rank(given);
  if (options.worker_of.starts_with("here:")) {  // a worker ends with its run, which may have ended already
    prctl(PR_SET_PDEATHSIG, SIGTERM);
    if (getppid() != parent_at_start) return 1;
  }
  stop::watch();
  name_callback_at_end();
  const Experiment e = with_backend(given);
  check_spread(options.spread, e);
  use_threads(e.threads);
  std::optional<Prepared> prepared;
  std::optional<Run> run;
  with_memory([&] {
    want_reserve();
    start_threads();
    prepared.emplace(prepare(e, catalog));
    if (!options.worker_of.empty() && WorkerOf::parse(options.worker_of).cells != hash_of(prepared->cells))
      throw Error(Errc::data, "got other cells than the run that started this worker: the file or its data has changed",
                  e.file.string());
    run.emplace(e, catalog, options, *prepared);
  });
  const std::string folder = results::parts_folder(e.output.string());
  const bool runs_cells = options.worker || options.spread.on == WorkersOn::nothing;
  std::optional<Claim> gpu = runs_cells ? claim_gpu(e, folder, options.worker) : std::nullopt;
  const int code = run->run();
  gpu.reset();
  run->tidy();
  return code;
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
