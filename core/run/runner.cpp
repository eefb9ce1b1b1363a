#include "run/runner.hpp"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/prctl.h>
#include <unistd.h>
#include <kvlab/error.hpp>

#include <algorithm>
#include <csignal>
#include <ctime>
#include <memory>
#include <new>
#include <optional>
#include <utility>

#include "base/backend.hpp"
#include "base/cpu.hpp"
#include "base/log.hpp"
#include "base/memory_reserve.hpp"
#include "base/stop.hpp"
#include "base/threads.hpp"
#include "base/version.hpp"
#include "experiment/build_policy.hpp"
#include "experiment/variants.hpp"
#include "plugin/callback.hpp"
#include "result/results.hpp"
#include "run/device.hpp"
#include "run/gpus.hpp"
#include "run/one_run.hpp"
#include "run/pool.hpp"
#include "run/prepare.hpp"
#include "run/progress.hpp"
#include "run/run_here.hpp"

namespace kvlab {
namespace {

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

// Known before plugins are loaded, which takes time.
const pid_t parent_at_start = getppid();

// The experiments of one call, as they run here.
struct Members {
  std::vector<Experiment> experiments;
  std::vector<const PluginCatalog*> catalogs;
  std::vector<std::string> worker_of;  // what each one's run said
  std::vector<std::string> folders;    // OUT.parts
};

Members members_of(const std::vector<GivenExperiment>& given, const RunOptions& options) {
  Members all;
  all.worker_of = options.worker_of.empty() ? std::vector<std::string>(given.size()) : words_of_pool(options.worker_of);
  if (all.worker_of.size() != given.size())
    throw Error(Errc::data,
                fmt::format("got {} experiments from the run that started this worker, wanted {}: the item has changed",
                            all.worker_of.size(), given.size()));
  for (std::size_t i = 0; i < given.size(); ++i) {
    all.experiments.push_back(as_run_says(given[i].experiment, all.worker_of[i]));
    const Experiment& e = all.experiments.back();
    if (!e.profilers.empty())
      throw Error(Errc::config, "got an experiment with profilers, wanted policies: `kvlab profile` runs this file",
                  e.file.string());
    all.catalogs.push_back(&given[i].catalog);
    all.folders.push_back(results::parts_folder(e.output.string()));
  }
  return all;
}

// A worker ends with its run, which may have ended already: false.
bool ends_with_run(const std::string& worker_of) {
  if (!worker_of.starts_with("here:")) return true;
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  return getppid() == parent_at_start;
}

Prepared prepared_for(const Experiment& e, const PluginCatalog& catalog, const std::string& worker_of) {
  Prepared prepared = prepare(e, catalog);
  if (!worker_of.empty() && WorkerOf::parse(worker_of).cells != hash_of(prepared.cells))
    throw Error(Errc::data, "got other cells than the run that started this worker: the file or its data has changed",
                e.file.string());
  return prepared;
}

// Does the work, and tells the runs what ended it. CannotStart passes where nothing was run.
template <class Work>
void do_work(const std::vector<Run*>& runs, Work work) {
  try {
    work();
    stop::check();
  } catch (const stop::Interrupted& by) {  // the cell under way leaves no result
    for (Run* run : runs) run->stopped_by(by.signal);
  } catch (const std::exception& e) {
    if (dynamic_cast<const CannotStart*>(&e) &&
        std::all_of(runs.begin(), runs.end(), [](const Run* run) { return run->ran_none(); })) {
      for (const Run* run : runs) run->tidy();
      throw;
    }
    log::error(fmt::format("the run stops here: {}; {}", e.what(), runs.front()->goes_on()));
    for (Run* run : runs) run->cannot_go_on();
  }
}

// This process runs the cells of one experiment.
int run_cells_here(const Members& all, std::size_t which, const RunOptions& given) {
  const Experiment& e = all.experiments[which];
  RunOptions options = given;
  options.worker_of = all.worker_of[which];
  use_threads(e.threads);
  std::optional<Prepared> prepared;
  std::optional<Progress> progress;
  std::optional<Run> run;
  // The cells of a run without workers have no neighbours of another experiment.
  const std::vector<std::string> pool = options.worker ? all.folders : std::vector<std::string>{all.folders[which]};
  with_memory([&] {
    want_reserve();
    start_threads();
    prepared.emplace(prepared_for(e, *all.catalogs[which], options.worker_of));
    progress.emplace(static_cast<int>(prepared->cells.size()), options.worker_of.empty());
    run.emplace(e, *all.catalogs[which], options, *prepared, *progress, pool);
  });
  const bool timed = options.worker ? time_on_gpu(all.experiments) : time_on_gpu({e});
  std::optional<Claim> gpu = timed ? claim_own_gpu(pool.front(), options.worker) : std::nullopt;
  do_work({&*run}, [&] { run->run_cells(); });
  const int code = run->end();
  gpu.reset();
  if (!options.worker && run->whole()) run->tidy();
  return code;
}

// Workers run the cells of all experiments; this process only watches.
int run_pool(const Members& all, const RunOptions& options) {
  const std::size_t count = all.experiments.size();
  std::vector<Prepared> prepared;
  std::optional<Progress> progress;
  std::vector<std::unique_ptr<Run>> runs;
  with_memory([&] {
    want_reserve();
    start_threads();
    std::size_t cells = 0;
    for (std::size_t i = 0; i < count; ++i) {
      check_spread(options.spread, all.experiments[i]);
      prepared.push_back(prepared_for(all.experiments[i], *all.catalogs[i], {}));
      cells += prepared.back().cells.size();
    }
    progress.emplace(static_cast<int>(cells));
    for (std::size_t i = 0; i < count; ++i)
      runs.push_back(
          std::make_unique<Run>(all.experiments[i], *all.catalogs[i], options, prepared[i], *progress, all.folders));
  });
  std::vector<Run*> each;
  for (const auto& run : runs) each.push_back(run.get());
  do_work(each, [&] {
    std::vector<PoolWork> work;
    for (Run* run : each) work.push_back(run->work());
    run_by_workers(options.spread, work, *progress);
    for (std::size_t i = 0; i < count; ++i) each[i]->left_over(work[i].left.size());
  });
  int code = 0;
  for (Run* run : each) code = std::max(code, run->end());
  // What workers need beside the parts serves them all.
  if (std::all_of(each.begin(), each.end(), [](const Run* run) { return run->whole(); }))
    for (const Run* run : each) run->tidy();
  return code;
}

}  // namespace

int run_experiments(const std::vector<GivenExperiment>& given, const RunOptions& options) {
  Members all = members_of(given, options);
  if (options.worker) place_rank(all.experiments);
  if (!ends_with_run(options.worker_of)) return 1;
  stop::watch();
  name_callback_at_end();
  for (Experiment& e : all.experiments) e = with_backend(std::move(e));
  if (options.spread.on != WorkersOn::nothing) return run_pool(all, options);
  int code = 0;
  for (std::size_t i = 0; i < given.size() && !(i > 0 && stop::requested()); ++i)
    code = std::max(code, run_cells_here(all, i, options));
  return code;
}

int run_experiment(const Experiment& experiment, const PluginCatalog& catalog, const RunOptions& options) {
  return run_experiments({{experiment, catalog}}, options);
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

Checked check_experiment(const Experiment& given, const PluginCatalog& catalog,
                         const std::set<std::filesystem::path>& later) {
  const Experiment e = with_backend(given);
  try {
    std::vector<Cell> all = prepare(e, catalog, {}, later).cells;
    const auto waits = [&](const Cell& cell) {
      const std::string& profile = e.policies[cell.policy].profile;
      return !profile.empty() && later.count(std::filesystem::weakly_canonical(e.resolve(profile))) != 0;
    };
    std::size_t waiting = 0;
    for (Cell& cell : all)
      if (waits(cell)) cell.id = "-", ++waiting;  // an id depends on the profile's contents
    const std::string text = cell_table(e, all);
    if (waiting == 0) return {text, {}};
    return {text + fmt::format("not checked: budgets of {} {}, whose profiles are still to be made\n", waiting,
                               waiting == 1 ? "cell" : "cells"),
            {}};
  } catch (const Error& error) {
    if (error.code() != Errc::network) throw;
    for (const PolicySpec& policy : e.policies) placed(policy.where, [&] { build_policy(policy, catalog); });
    std::vector<Cell> all = cells(e, catalog, {});
    for (Cell& cell : all) cell.id = "-";  // an id depends on the model's contents
    return {cell_table(e, all) + "not checked: prompts, budgets and profiles, because the model is not here\n", error};
  }
}

}  // namespace kvlab
