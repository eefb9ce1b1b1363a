#include "cli/targets.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <kvlab/error.hpp>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "base/descriptor.hpp"
#include "base/log.hpp"
#include "base/new_file.hpp"
#include "base/program.hpp"
#include "base/stop.hpp"
#include "base/text.hpp"
#include "cli/loaded.hpp"
#include "result/report.hpp"
#include "run/gpus.hpp"
#include "run/profile.hpp"
#include "run/runner.hpp"
#include "run/workers.hpp"

namespace fs = std::filesystem;

namespace kvlab {
namespace {

using papers::TargetRun;
using papers::TargetTable;
using Clock = std::chrono::steady_clock;

constexpr const char* where = "kvlab reproduce";
constexpr const char* peers_script = "analysis/targets/peers.py";

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

// How commands ended, in this call and in earlier ones.
class Endings {
 public:
  struct Ending {
    int code;
    double seconds;
  };
  explicit Endings(const fs::path& folder) : file_(folder / "targets.json") {
    std::ifstream in(file_);
    if (in) all_ = nlohmann::json::parse(in, nullptr, false);
    if (!all_.is_object()) all_ = nlohmann::json::object();
  }
  std::optional<Ending> of(const std::string& command) const {  // an identity
    const auto found = all_.find(command);
    if (found == all_.end()) return std::nullopt;
    return Ending{(*found).value("code", 1), (*found).value("seconds", 0.)};
  }
  void add(const std::string& command, const Ending& end) {
    all_[command] = {{"code", end.code}, {"seconds", end.seconds}};
    write_text(file_.string(), all_.dump(1) + "\n");
  }

 private:
  fs::path file_;
  nlohmann::json all_;
};

class Table {
 public:
  Table(const ReproduceOptions& o, const TargetTable& table, const fs::path& tree, Endings& endings)
      : o_(o),
        table_(table),
        tree_(tree),
        endings_(endings),
        only_(o.only.begin(), o.only.end()),
        runs_(table.runs_of(o.only)) {
    for (const std::string& name : o.only) {
      std::vector<std::string> known;
      for (const papers::TargetRow& row : table.rows) known.push_back(row.name);
      if (std::find(known.begin(), known.end(), name) == known.end())
        throw Error(
            Errc::config,
            fmt::format("--only: got '{}', wanted a row of targets/{}{}", name, table.name, did_you_mean(name, known)),
            where);
    }
  }

  const std::vector<const TargetRun*>& runs() const { return runs_; }
  std::string name_of(const TargetRun& run) const { return "targets/" + table_.name + ": " + run.name; }

  void check(const TargetRun& run) const {
    fmt::print("{}: {} ({})\n", run.name, joined_words(words(run)), time_text(run));
    if (run.peers && !fs::exists(tree_ / peers_script))
      throw Error(Errc::io, "got no such file, wanted the script", (tree_ / peers_script).string());
    if (run.experiment.empty()) return;
    const std::unique_ptr<const Loaded> loaded = load(run);
    const Experiment& e = loaded->experiment;
    try {
      if (!e.profilers.empty()) {
        check_profile(e, *loaded->catalog);
        return;
      }
      std::set<fs::path> later;
      for (const auto& [policy, from] : run.profiles) later.insert(fs::weakly_canonical(output(*table_.run(from))));
      const Checked checked = check_experiment(e, *loaded->catalog, later);
      fmt::print("{}", checked.table);
      if (checked.absent) throw Error(*checked.absent);
    } catch (const Error& error) {
      if (error.code() != Errc::device) throw;
      fmt::print("  only the file is checked: {}\n", error.what());
    }
  }

  // The same command has left all that it can; with --fresh, in this call.
  bool done(const TargetRun& run) const {
    const auto end = ending(run);
    return end && end->code == 0 && fs::exists(output(run)) && (!o_.run.fresh || ran_.count(run.name));
  }
  double about(const TargetRun& run) const {
    const auto end = ending(run);
    return end && end->code == 0 ? end->seconds : run.seconds;
  }
  std::string time_text(const TargetRun& run) const {
    if (done(run)) return fmt::format("ended, took {:.0f} s", about(run));
    return o_.small ? "small" : fmt::format("about {:.0f} s on {}", run.seconds, table_.gpu);
  }

  // A command under way.
  struct Begun {
    pid_t program = -1;
    Clock::time_point at;
  };
  // set: its GPU and cores. own_log: its messages go to a file beside the results, not to this process's.
  Begun begin(const TargetRun& run, const Environment& set, bool own_log) {
    fs::create_directories(o_.folder);
    const std::vector<std::string> command = words(run);
    // The lines of a bench are its standard output. The table of an experiment would hide the progress.
    const Descriptor out(new_file(run.experiment.empty() ? part(run) : "/dev/null"));
    std::vector<std::pair<int, int>> descriptors{{out, STDOUT_FILENO}};
    std::optional<Descriptor> log;
    if (own_log) descriptors.emplace_back(log.emplace(new_file(log_of(run))), STDERR_FILENO);
    const Begun begun{start_program(command, {.file = run.peers ? command[0] : "/proc/self/exe",
                                              .set = set,
                                              .at_our_end = SIGTERM,
                                              .descriptors = descriptors}),
                      Clock::now()};
    under_way_.insert(run.name);
    return begun;
  }
  // Returns its exit code.
  int ended(const TargetRun& run, const Begun& begun, const ProgramEnd& end) {
    under_way_.erase(run.name);
    int code = end.signal ? stop::exit_code(end.signal) : end.code;
    if (run.experiment.empty() && code == 0) {
      std::ifstream in(part(run));
      const auto lines = nlohmann::json::parse(in, nullptr, false);
      if (lines.is_object() && lines.contains("ops"))
        fs::rename(part(run), output(run));
      else
        code = 1;
    }
    if (run.experiment.empty() && code != 0) fs::remove(part(run));
    if (stop::requested()) return code;
    endings_.add(identity(run), {code, seconds_since(begun.at)});
    ran_.insert(run.name);
    return code;
  }

  // Tables that have the same line of `kvlab bench` share its file.
  fs::path output(const TargetRun& run) const {
    const std::string small = o_.small ? "-small" : "";
    return fs::absolute(run.experiment.empty() ? fs::path(o_.folder) / ("targets" + small + "-" + run.name + ".json")
                                               : fs::path(file("-" + run.name + ".h5")));
  }

  // Messages of a command beside which others run.
  fs::path log_of(const TargetRun& run) const { return output(run).replace_extension(".log"); }

  // What must be timed on one GPU, one after another: runs that a row compares, with the profiles that they read. Runs
  // of several tables that write one file are one here, too.
  void tie(std::map<fs::path, fs::path>& ties) const {
    const auto tie = [&](const std::string& one, const std::string& other) {
      const fs::path a = root(ties, output(*table_.run(one))), b = root(ties, output(*table_.run(other)));
      if (a != b) ties[a] = b;
    };
    for (const papers::TargetRow& row : table_.rows) {
      if (!row.why_not.empty()) continue;
      for (const auto& other : {row.against, row.without})
        if (other) tie(row.of.run, other->run);
    }
    for (const TargetRun& run : table_.runs)
      for (const auto& [policy, from] : run.profiles) tie(run.name, from);
    if (table_.beside) tie(table_.beside->ours, table_.beside->peers);
  }
  fs::path tied(const std::map<fs::path, fs::path>& ties, const TargetRun& run) const {
    return root(ties, output(run));
  }

  papers::TargetResults results() const {
    papers::TargetResults out;
    for (const TargetRun* run : runs_) {
      const std::string from = output(*run).string();
      if (const auto end = ending(*run); end && end->code != 0)
        out.failed[run->name] = fmt::format("ended with exit code {}", end->code);
      if (run->experiment.empty()) {
        std::ifstream in(from);
        if (auto lines = nlohmann::json::parse(in, nullptr, false); lines.is_object()) out.lines[run->name] = lines;
      } else if (!is_profile(*run) && !under_way_.count(run->name) && results::is_there(from)) {
        out.ours.runs.emplace(run->name, papers::read_run(from, 1, {.parts = true}));
      }
    }
    if (o_.small)
      out.not_judged = "small";
    else if (!papers::on_its_gpu(table_, out))
      out.not_judged = "another GPU";
    return out;
  }

  std::string text(results::Format format) const {
    if (format == results::Format::csv) return papers::target_csv(table_, results(), only_);
    return results::render(papers::target_page(table_, results(), only_), format);
  }
  // The table so far, beside the results.
  void write() const {
    fs::create_directories(o_.folder);
    write_text(file(".md"), text(results::Format::md));
    write_text(file(".csv"), text(results::Format::csv));
  }
  std::string file(const std::string& end) const {
    return (fs::path(o_.folder) / ("targets-" + table_.name + (o_.small ? "-small" : "") + end)).string();
  }

 private:
  bool is_profile(const TargetRun& run) const {
    return std::any_of(table_.runs.begin(), table_.runs.end(), [&](const TargetRun& other) {
      return std::any_of(other.profiles.begin(), other.profiles.end(),
                         [&](const auto& p) { return p.second == run.name; });
    });
  }

  // What makes a command another one. It names no folder, so results may be moved.
  std::string identity(const TargetRun& run) const {
    std::vector<std::string> out{o_.small ? "small" : "whole"};
    if (run.experiment.empty()) {
      const auto all = words(run);
      out.insert(out.end(), run.peers ? peers_script : "kvlab");
      out.insert(out.end(), all.begin() + (run.peers ? 2 : 1), all.end());
    } else {
      out.push_back(run.experiment);
      const auto all = sets(run, [](const TargetRun& profile) { return profile.name; });
      out.insert(out.end(), all.begin(), all.end());
    }
    return shell_quoted(out);
  }
  std::optional<Endings::Ending> ending(const TargetRun& run) const { return endings_.of(identity(run)); }

  // name: how a profile is named.
  template <class Name>
  std::vector<std::string> sets(const TargetRun& run, Name name) const {
    std::vector<std::string> out = run.sets;
    for (const auto& [policy, from] : run.profiles)
      out.push_back(policy + ".profile=" + nlohmann::json(name(*table_.run(from))).dump());
    if (o_.small) {
      out.insert(out.end(), table_.small.begin(), table_.small.end());
      out.insert(out.end(), run.small_sets.begin(), run.small_sets.end());
    }
    out.insert(out.end(), o_.sets.begin(), o_.sets.end());
    return out;
  }

  std::vector<std::string> sets(const TargetRun& run) const {
    return sets(run, [&](const TargetRun& profile) { return output(profile).string(); });
  }

  std::unique_ptr<Loaded> load(const TargetRun& run) const {
    auto loaded = std::make_unique<Loaded>((tree_ / run.experiment).string(), sets(run), o_.plugin_path);
    loaded->experiment.output = output(run);
    return loaded;
  }

  std::vector<std::string> words(const TargetRun& run) const {
    std::vector<std::string> out;
    if (run.peers) {
      const char* python = std::getenv("KVLAB_PYTHON");
      out = {python ? python : "python3", (tree_ / peers_script).string()};
      if (o_.small) out.push_back("--small");
      return out;
    }
    if (!run.bench.empty()) {
      out = {"kvlab", "bench"};
      out.insert(out.end(), run.bench.begin(), run.bench.end());
      out.insert(out.end(), {"--backend", o_.small ? "cpu" : "cuda", "--json"});
      if (o_.small)
        out.insert(out.end(), {"--model", "synthetic/tiny", "--batch", "1", "--context", "64"});
      else
        out.insert(out.end(), run.options.begin(), run.options.end());
      return out;
    }
    out = {"kvlab", is_profile(run) ? "profile" : "run", (tree_ / run.experiment).string(), "-o", output(run).string()};
    for (const std::string& set : sets(run)) out.insert(out.end(), {"--set", set});
    for (const std::string& place : o_.plugin_path) out.insert(out.end(), {"--plugin-path", place});
    if (is_profile(run)) return out;
    if (o_.run.fresh) out.push_back("--fresh");
    if (o_.run.strict) out.push_back("--strict");
    return out;
  }

  static std::string joined_words(const std::vector<std::string>& words) {
    std::string out;
    for (const std::string& word : words) {
      const bool plain = word.find_first_of(" '\"{}[]$*;&|<>()") == word.npos;
      out += (out.empty() ? "" : " ") + (plain ? word : shell_quoted(word));
    }
    return out;
  }

  static fs::path root(const std::map<fs::path, fs::path>& ties, fs::path of) {
    for (auto found = ties.find(of); found != ties.end(); found = ties.find(of)) of = found->second;
    return of;
  }

  fs::path part(const TargetRun& run) const { return output(run).string() + ".part"; }

  static int new_file(const fs::path& path) {
    const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (file < 0) throw Error(Errc::io, "wanted to write it", path.string());
    return file;
  }

  const ReproduceOptions& o_;
  const TargetTable& table_;
  fs::path tree_;
  Endings& endings_;
  std::set<std::string> only_;
  std::vector<const TargetRun*> runs_;
  std::set<std::string> ran_;  // in this call
  std::set<std::string> under_way_;
};

// The commands of all tables. One at a time they run in the files' order; several at a time, each on a GPU of its own,
// the longest chain first.
class Commands {
 public:
  Commands(const ReproduceOptions& o, std::vector<Table>& tables)
      : o_(o), jobs_(std::max(1, o.run.spread.jobs)), slots_(static_cast<std::size_t>(jobs_)) {
    std::map<fs::path, fs::path> ties;
    for (const Table& table : tables) table.tie(ties);
    std::map<fs::path, std::size_t> places;
    std::set<fs::path> outputs;
    for (Table& table : tables)
      for (const TargetRun* run : table.runs()) {
        if (table.done(*run) || !outputs.insert(table.output(*run)).second) continue;  // tables may share a file
        ++count_, estimate_ += table.about(*run);
        const auto [place, is_new] = places.emplace(jobs_ > 1 ? table.tied(ties, *run) : "", chains_.size());
        if (is_new) chains_.emplace_back();
        Chain& chain = chains_[place->second];
        chain.commands.push_back({&table, run}), chain.seconds += table.about(*run);
      }
    std::stable_sort(chains_.begin(), chains_.end(),
                     [](const Chain& a, const Chain& b) { return a.seconds > b.seconds; });
  }

  int run() {
    stop::watch();
    if (!o_.small && count_ > 0)
      log::info(fmt::format("{} commands, about {:.0f} s{}", count_, estimate_,
                            jobs_ > 1 ? fmt::format(" of one GPU, {} at a time", jobs_) : ""));
    for (int handed_on = 0; advance(); usleep(50'000))
      if (const int signal = stop::requested(); signal && !handed_on) {
        for (const Slot& slot : slots_)
          if (slot.begun.program > 0) kill(slot.begun.program, signal);
        handed_on = signal;
      }
    if (stop::requested()) return stop::exit_code(stop::requested());
    if (left_ > 0) log::info(fmt::format("{} commands are left: the same call goes on with them", left_));
    return left_ > 0 ? 1 : code_;
  }

 private:
  struct Command {
    Table* table;
    const TargetRun* run;
  };
  struct Chain {
    std::vector<Command> commands;
    double seconds = 0;
    std::size_t next = 0;
  };
  struct Slot {
    Chain* chain = nullptr;
    Command command{};
    Table::Begun begun{};
  };

  // Begins what can begin, and takes what has ended. False: nothing is under way.
  bool advance() {
    bool some = false;
    for (std::size_t i = 0; i < slots_.size(); ++i) {
      Slot& slot = slots_[i];
      ProgramEnd end;
      if (slot.begun.program > 0 && has_ended(slot.begun.program, end)) ended(slot, end);
      while (slot.begun.program <= 0 && !stop::requested() && next(slot)) begin(slot, static_cast<int>(i));
      some |= slot.begun.program > 0;
    }
    return some;
  }

  // The slot's next command: of its chain, else of one that no slot has begun.
  bool next(Slot& slot) {
    for (;;) {
      if (!slot.chain || slot.chain->next == slot.chain->commands.size()) {
        if (next_chain_ == chains_.size()) return false;
        slot.chain = &chains_[next_chain_++];
      }
      slot.command = slot.chain->commands[slot.chain->next++];
      const auto [table, run] = slot.command;
      ++number_;
      if (!began_ || o_.within <= 0 || seconds_since(begin_) + table->about(*run) <= o_.within) return true;
      ++left_;
    }
  }

  void begin(Slot& slot, int index) {
    const auto [table, run] = slot.command;
    log::info(fmt::format("[{}/{}] {}, {}", number_, count_, table->name_of(*run), table->time_text(*run)));
    began_ = true;
    try {
      const bool beside = jobs_ > 1;
      slot.begun = table->begin(*run, beside ? share_of_machine(!o_.small, true, index, jobs_) : Environment(), beside);
    } catch (const std::exception& error) {
      log::error(error.what());
      slot.begun = {-1, Clock::now()};
      ProgramEnd end;
      end.code = 3;
      ended(slot, end);
    }
  }

  void ended(Slot& slot, const ProgramEnd& end) {
    const auto [table, run] = slot.command;
    slot.begun.program = -1;
    const int code = table->ended(*run, slot.begun, end);
    if (!stop::requested() && code != 0) {
      log::error(fmt::format(
          "{} ended with exit code {}; its rows say so{}", table->name_of(*run), code,
          jobs_ > 1 && fs::exists(table->log_of(*run)) ? "; its messages are in " + table->log_of(*run).string() : ""));
      code_ = 1;
    }
    if (jobs_ > 1 && code == 0) log::info(fmt::format("{}, {}", table->name_of(*run), table->time_text(*run)));
    table->write();
  }

  const ReproduceOptions& o_;
  int jobs_;
  std::vector<Chain> chains_;
  std::vector<Slot> slots_;
  std::size_t count_ = 0, number_ = 0, left_ = 0, next_chain_ = 0;
  double estimate_ = 0;
  bool began_ = false;
  int code_ = 0;
  const Clock::time_point begin_ = Clock::now();
};

void check_jobs(const ReproduceOptions& o) {
  if (o.run.spread.on == WorkersOn::mpi || o.run.spread.on == WorkersOn::slurm)
    throw Error(Errc::config, "got --on for targets, wanted --jobs: runs that a row compares share a GPU", where);
  const int jobs = o.run.spread.jobs, gpus = static_cast<int>(gpu_names().size());
  if (jobs > 1 && !o.small && !o.check && !o.report && jobs > gpus)
    throw Error(Errc::config,
                fmt::format("got {} jobs and {} GPU{}, wanted a GPU for each: times are measured", jobs, gpus,
                            gpus == 1 ? "" : "s"),
                "--jobs");
}

}  // namespace

int run_targets(const ReproduceOptions& o, const std::vector<const TargetTable*>& all, const fs::path& tree) {
  check_jobs(o);
  if (!o.only.empty() && all.size() != 1)
    throw Error(Errc::config, fmt::format("got --only with {} tables, wanted one", all.size()), where);
  const results::Format format = results::parse_format(o.format);
  Endings endings(o.folder);
  std::vector<Table> tables;
  for (const TargetTable* table : all) tables.emplace_back(o, *table, tree, endings);
  int code = 0;
  if (o.check) {
    for (const Table& table : tables)
      for (const TargetRun* run : table.runs()) table.check(*run);
    return 0;
  }
  if (!o.report) code = Commands(o, tables).run();
  if (code >= 128) return code;
  for (const Table& table : tables) {
    if (o.report || !o.quiet) fmt::print("{}", table.text(format));
    std::fflush(stdout);
    if (!o.report) log::info("the table is in " + table.file(".md") + " and " + table.file(".csv"));
  }
  return code;
}

}  // namespace kvlab
