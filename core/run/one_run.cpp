#include "run/one_run.hpp"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <new>
#include <optional>

#include "base/log.hpp"
#include "base/memory_reserve.hpp"
#include "base/stop.hpp"
#include "base/terminal.hpp"
#include "experiment/variants.hpp"
#include "result/report.hpp"
#include "run/cannot_go_on.hpp"
#include "run/cell.hpp"
#include "run/disturbance.hpp"
#include "run/isolated.hpp"
#include "run/model_record.hpp"

namespace kvlab {
namespace {

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

}  // namespace

Run::Run(const Experiment& e, const PluginCatalog& catalog, const RunOptions& options, Prepared& prepared,
         Progress& progress, const std::vector<std::string>& pool)
    : e_(e),
      catalog_(catalog),
      options_(options),
      prepared_(prepared),
      progress_(progress),
      out_(e.output.string()),
      ids_(ids_of(prepared.cells)),
      held_(options.worker ? nullptr : results::open_output(out_, options.command, results::OutputKind::results, ids_)),
      info_(run_info(e, options.command, models_text(prepared.models))),
      shared_(out_, options.worker, ids_),
      folders_{shared_.folder()},
      before_(finished_before()) {
  std::copy_if(pool.begin(), pool.end(), std::back_inserter(folders_),
               [&](const std::string& folder) { return folder != shared_.folder(); });
  for (const std::string& warning : before_.warnings) log::warn(warning);
  if (!options.worker_of.empty()) shared_.ask_run();
  if (options.worker) return;
  forget_ended(shared_.folder());
  for (const Cell& c : all())
    if (runs_again(c) || !before_.cells.count(c.id)) shared_.replaces(c.id, before_.cells.count(c.id));
}

results::Finished Run::finished_before() const {
  if (options_.worker) return {};  // the run that it works for has looked
  const FreedReserve room;
  return results::finished(out_);
}

std::size_t Run::finished_cells() const {
  return static_cast<std::size_t>(std::count_if(
      ids_.begin(), ids_.end(), [&](const std::string& id) { return before_.cells.count(id) || new_.count(id); }));
}

std::string Run::goes_on() const {
  if (!options_.fresh) return "the same command goes on from there";
  return "the same command without --fresh goes on from there and keeps the cells of earlier runs";
}

std::string Run::name_of(const Cell& c) const {
  const Experiment& e = e_;
  const PolicySpec& p = e.policies[c.policy];
  std::string name = folders_.size() > 1 ? e.file.stem().string() + ": " : "";
  name += task_label(e.tasks[c.task]) + workload_label(e, c) + " " + policy_text(e, p);
  if (p.budget.kind != BudgetAmount::unlimited) name += " " + budget_text(p);
  if (e.seeds.size() > 1) name += " seed " + std::to_string(c.seed);
  if (e.repeats > 1) name += " repeat " + std::to_string(c.repeat);
  return name;
}

void Run::run_cells() {
  std::vector<const Cell*> left = unfinished();
  for (bool said = options_.worker; !left.empty();) {
    std::vector<const Cell*> others;  // whose claims other processes hold
    for (const Cell* c : left) {
      stop::check();
      keep_reserve();
      const auto claim = shared_.finished(c->id) ? std::nullopt : shared_.claim(c->id);
      if (shared_.finished(c->id))
        finished(*c);
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

PoolWork Run::work() { return {&e_, hash_of(all()), &shared_, unfinished(), this}; }

void Run::left_over(std::size_t cells) {
  left_to_workers_ = cells > 0 && !options_.spread.wait;
  if (cells == 0 || left_to_workers_ || stop::requested()) return;
  trouble_ = true;
  log::error(
      fmt::format("{}: got the end of all workers and {} unfinished cells, wanted none; {}", out_, cells, goes_on()));
}

void Run::finished(const Cell& c) {
  new_.insert(c.id);
  if (options_.worker) return progress_.skip();
  const results::SummaryRow s =
      on_own_file("a part could not be read", [&] { return results::read_new_part(out_, c.id); });
  say_ended(s, name_of(c));
}

// elsewhere: the name of a cell that another process ran.
void Run::say_ended(const results::SummaryRow& s, const std::string& elsewhere) {
  const bool ok = s.status == "ok";
  trouble_ |= !ok;
  still_disturbed_ += ok && s.reruns == most_reruns && results::has_label(s, "disturbed");
  const std::string outcome = ok ? "ok" + reruns_text(s) : s.status + ": " + s.error;
  elsewhere.empty() ? progress_.end(outcome) : progress_.ended_elsewhere(elsewhere, outcome);
}

bool Run::runs_again(const Cell& c) const {
  if (options_.fresh) return true;
  const auto done = before_.cells.find(c.id);
  return options_.strict && done != before_.cells.end() && done->second.reruns < 0 &&
         results::has_label(done->second, "disturbed");
}

bool Run::finished_already(const Cell& c) {
  if (runs_again(c)) return false;  // its part stays until the new one replaces it
  const auto done = before_.cells.find(c.id);
  if (done == before_.cells.end()) return false;
  trouble_ |= done->second.status != "ok";
  ++skipped_;
  progress_.skip();
  return true;
}

// Returns false, which ends the run, where kvlab cannot write its own files.
bool Run::run_and_write(const Cell& c, const Claim& claim) {
  const std::string name = name_of(c);
  log::debug("cell " + c.id + ": " + name);
  progress_.begin(name);
  try {
    const Ran ran = run_one(c, claim);
    if (!ran.on_disk) put_on_disk(out_, ran.result, info_);
    new_.insert(c.id);
    say_ended(ran.result.summary, "");
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

Run::Ran Run::run_one(const Cell& c, const Claim& claim) {
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
    return {run_here(in, models_, folders_, options_.strict)};
  } catch (const std::bad_alloc& e) {  // outside the cell's own passes
    return {broken_cell(in, "oom", e.what())};
  }
}

// --isolate: returns the part that the cell's process wrote, else a result that says how the process ended.
Run::Ran Run::run_apart(const Cell& c, const CellInput& in) const {
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
  if (still_disturbed_)
    log::warn(fmt::format("{} {} disturbed in each of {} runs: other processes took cores, and the times are too long",
                          still_disturbed_, still_disturbed_ == 1 ? "cell was" : "cells were", most_reruns + 1));
  const bool made = make_output();
  if (stopped_) return say_stopped();
  say_others();
  if (!options_.quiet && (made || finished_cells() > 0))
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
  const std::string then = finished_cells() == 0
                               ? "there is no finished cell yet"
                               : fmt::format("its cells are in {}, and the same command{} makes it of them",
                                             results::parts_folder(out_), options_.fresh ? " without --fresh" : "");
  return written("the result file", then, [&] {
    for (const std::string& warning : results::rebuild(out_, info_of_cells(), ids_)) log::warn(warning);
  });
}

int Run::say_stopped() const {
  const std::string earlier =
      options_.fresh ? fmt::format(" ({} of them by earlier runs)", finished_cells() - new_.size()) : "";
  log::info(fmt::format("stopped by {}: {} of {} cells are finished{} and in {}; {}", stop::name_of(stopped_),
                        finished_cells(), all().size(), earlier, out_, goes_on()));
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

}  // namespace kvlab
