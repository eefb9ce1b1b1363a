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
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "base/descriptor.hpp"
#include "base/log.hpp"
#include "base/program.hpp"
#include "base/stop.hpp"
#include "base/text.hpp"
#include "cli/loaded.hpp"
#include "result/report.hpp"
#include "run/profile.hpp"
#include "run/runner.hpp"

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
    std::ofstream(file_) << all_.dump(1) << "\n";
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

  // Returns the exit code of the command.
  int run(const TargetRun& run) {
    fs::create_directories(o_.folder);
    const std::vector<std::string> command = words(run);
    const auto begin = Clock::now();
    const fs::path part = output(run).string() + ".part";
    // The lines of a bench are its standard output. The table of an experiment would hide the progress.
    const Descriptor to(run.experiment.empty() ? open(part.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666)
                                               : open("/dev/null", O_WRONLY | O_CLOEXEC));
    if (to < 0) throw Error(Errc::io, "wanted to write it", part.string());
    int code = 0;
    try {
      code = ended(start_program(command, {.file = run.peers ? command[0] : "/proc/self/exe",
                                           .at_our_end = SIGTERM,
                                           .descriptors = {{to, STDOUT_FILENO}}}));
    } catch (const Error& error) {
      log::error(error.what());
      code = 3;
    }
    if (run.experiment.empty() && code == 0) {
      std::ifstream in(part);
      const auto lines = nlohmann::json::parse(in, nullptr, false);
      if (lines.is_object() && lines.contains("ops"))
        fs::rename(part, output(run));
      else
        code = 1;
    }
    if (run.experiment.empty() && code != 0) fs::remove(part);
    if (stop::requested()) return code;
    endings_.add(identity(run), {code, seconds_since(begin)});
    ran_.insert(run.name);
    return code;
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
      } else if (!is_profile(*run) && (fs::exists(from) || fs::exists(results::parts_folder(from)))) {
        out.ours.runs.emplace(run->name, papers::read_run(from, 1, true));
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
    std::ofstream(file(".md")) << text(results::Format::md);
    std::ofstream(file(".csv")) << text(results::Format::csv);
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

  // Tables that have the same line of `kvlab bench` share its file.
  fs::path output(const TargetRun& run) const {
    const std::string small = o_.small ? "-small" : "";
    return fs::absolute(run.experiment.empty() ? fs::path(o_.folder) / ("targets" + small + "-" + run.name + ".json")
                                               : fs::path(file("-" + run.name + ".h5")));
  }

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

  // Waits for the program's end, and hands a signal on. Returns its exit code.
  static int ended(pid_t program) {
    ProgramEnd end;
    for (int handed_on = 0; !has_ended(program, end); usleep(50'000))
      if (const int signal = stop::requested(); signal && !handed_on) kill(program, handed_on = signal);
    return end.signal ? stop::exit_code(end.signal) : end.code;
  }

  const ReproduceOptions& o_;
  const TargetTable& table_;
  fs::path tree_;
  Endings& endings_;
  std::set<std::string> only_;
  std::vector<const TargetRun*> runs_;
  std::set<std::string> ran_;  // in this call
};

// The runs of all tables, one after another.
int run_all(const ReproduceOptions& o, std::vector<Table>& tables) {
  stop::watch();
  std::size_t count = 0, number = 0, left = 0;
  double estimate = 0;
  for (const Table& table : tables)
    for (const TargetRun* run : table.runs())
      if (!table.done(*run)) ++count, estimate += table.about(*run);
  if (!o.small && count > 0) log::info(fmt::format("{} commands, about {:.0f} s", count, estimate));
  const auto begin = Clock::now();
  bool ran = false;
  int code = 0;
  for (Table& table : tables) {
    for (const TargetRun* run : table.runs()) {
      if (table.done(*run)) continue;
      ++number;
      if (ran && o.within > 0 && seconds_since(begin) + table.about(*run) > o.within) {
        ++left;
        continue;
      }
      log::info(fmt::format("[{}/{}] {}, {}", number, count, table.name_of(*run), table.time_text(*run)));
      const int its = table.run(*run);
      ran = true;
      if (stop::requested()) break;
      if (its != 0) log::error(fmt::format("{} ended with exit code {}; its rows say so", table.name_of(*run), its));
      if (its != 0) code = 1;
      table.write();
    }
    table.write();
    if (stop::requested()) return stop::exit_code(stop::requested());
  }
  if (left > 0) log::info(fmt::format("{} commands are left: the same call goes on with them", left));
  return left > 0 ? 1 : code;
}

}  // namespace

int run_targets(const ReproduceOptions& o, const std::vector<const TargetTable*>& all, const fs::path& tree) {
  if (o.run.spread.on != WorkersOn::nothing)
    throw Error(Errc::config, "got --jobs or --on for targets, wanted neither: times are measured", where);
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
  if (!o.report) code = run_all(o, tables);
  if (code >= 128) return code;
  for (const Table& table : tables) {
    if (o.report || !o.quiet) fmt::print("{}", table.text(format));
    std::fflush(stdout);
    if (!o.report) log::info("the table is in " + table.file(".md") + " and " + table.file(".csv"));
  }
  return code;
}

}  // namespace kvlab
