#include "cli/reproduce.hpp"

#include <fmt/format.h>

#include <unistd.h>
#include <algorithm>
#include <filesystem>
#include <functional>
#include <kvlab/error.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <sstream>
#include <string>

#include "base/log.hpp"
#include "base/stop.hpp"
#include "base/terminal.hpp"
#include "base/text.hpp"
#include "cli/loaded.hpp"
#include "cli/shared_files.hpp"
#include "cli/targets.hpp"
#include "experiment/variants.hpp"
#include "papers/beside.hpp"
#include "papers/targets.hpp"
#include "plugin/callback.hpp"
#include "result/profile_report.hpp"
#include "result/report.hpp"
#include "run/profile.hpp"
#include "run/runner.hpp"
#include "run/workers.hpp"

namespace fs = std::filesystem;

namespace kvlab {
namespace {

using papers::Chosen;

constexpr const char* where = "kvlab reproduce";
const std::string profile_word = "profile:";  // begins the word of a process that makes one profile

std::string state_of(const papers::Item& item) {
  if (!item.why_not.empty()) return "no experiment: " + item.why_not;
  std::string out = item.needs.empty() ? "" : "needs " + join(item.needs, "; ");
  if (!item.small.empty()) out += out.empty() ? "also --small" : ". --small does without";
  return out;
}

std::string list_text(const std::vector<papers::Paper>& all, const std::string& only) {
  std::string out;
  for (const papers::Paper& paper : all) {
    if (!only.empty() && paper.name != only) continue;
    out += fmt::format("{}{}: {} ({})\n", out.empty() ? "" : "\n", paper.name, paper.title, paper.source);
    std::size_t width = 0;
    for (const papers::Item& item : paper.items) width = std::max(width, paper.name.size() + 1 + item.name.size());
    for (const papers::Item& item : paper.items) {
      out += fmt::format("  {:<{}}  {:<7}  {}\n", paper.name + "/" + item.name, width, item.kind, item.title);
      if (const std::string state = state_of(item); !state.empty())
        out += fmt::format("  {:<{}}  {:<7}  {}\n", "", width, "", state);
    }
  }
  return out;
}

// The model as `--set` spells it. A path starts at the current folder, as for `kvlab generate`.
std::string model_set(const ReproduceOptions& o) {
  constexpr const char* synthetic = "synthetic/";
  nlohmann::json model;
  const auto absolute = [](const std::string& path) {
    return path.starts_with("bundled/") ? path : fs::absolute(path).string();
  };
  if (o.model.starts_with(synthetic))
    model["synthetic"] = o.model.substr(std::string(synthetic).size());
  else
    model["path"] = absolute(o.model);
  if (!o.adapter.empty()) model["adapter"] = absolute(o.adapter);
  return "model=" + model.dump();
}

// What an experiment's text settles: all but empty lines and lines of comments, of which "# --set" is none.
std::string without_comments(const std::string& text) {
  std::istringstream lines(text);
  std::string out;
  for (std::string line; std::getline(lines, line);) {
    const std::size_t first = line.find_first_not_of(" \t");
    if (first != std::string::npos && (line[first] != '#' || line.starts_with("# --set"))) out += line + "\n";
  }
  return out;
}

class Reproduction {
 public:
  Reproduction(const ReproduceOptions& options, Chosen chosen, const fs::path& tree) : o_(options), chosen_(chosen) {
    const papers::Item& item = *chosen.item;
    if (!item.why_not.empty())
      throw Error(Errc::config, fmt::format("got {}, which has no experiment: {}", chosen.name(), item.why_not), where);
    if (o_.small && item.small.empty())
      throw Error(Errc::config,
                  fmt::format("got {}, which has no small experiment, wanted it without --small", chosen.name()),
                  where);
    sets_ = o_.sets;
    if (!o_.model.empty()) sets_.push_back(model_set(o_));
    std::set<std::string> models;
    // A policy's `../../results` starts from the true folder of its file: in a bundle `experiments` is a link.
    const fs::path above_experiments = fs::weakly_canonical(tree / "experiments").parent_path();
    for (const std::string& file : o_.small ? item.small : item.run) {
      const std::string path = (tree / file).string(), stem = fs::path(file).stem().string();
      runs_.push_back({stem, std::make_unique<Loaded>(path, sets_, o_.plugin_path)});
      if (!o_.model.empty())
        for (const ModelSpec& model : load_experiment(path, o_.sets, *runs_.back().loaded->catalog).models)
          models.insert(model.name());
      Experiment& e = runs_.back().loaded->experiment;
      e.output = is_profile(runs_.back()) ? above_experiments / e.output : file_of(runs_.back());
      if (!is_profile(runs_.back()) && !o_.report) check_spread(o_.run.spread, e);
    }
    // Such a call would end without a table after all its work.
    const auto profile_run = [](const Run& run) { return is_profile(run); };
    if (o_.small && results::parse_format(o_.format) == results::Format::csv &&
        std::all_of(runs_.begin(), runs_.end(), profile_run))
      throw Error(Errc::config,
                  fmt::format("got --format csv for {} --small, which makes profiles, wanted table, md or latex: their "
                              "arrays are in the files",
                              chosen.name()),
                  where);
    // Published rows of other models would stand beside the one of --model.
    if (models.size() > 1 && !o_.run.worker)
      log::warn(fmt::format("--model takes the place of {}: compare the rows of its own model alone",
                            join({models.begin(), models.end()}, " and ")));
  }

  // The profiles that policies read.
  void add_read(std::set<fs::path>& all) const {
    for (const Run& run : runs_)
      for (const PolicySpec& policy : run.loaded->experiment.policies)
        if (!policy.profile.empty()) all.insert(fs::weakly_canonical(run.loaded->experiment.resolve(policy.profile)));
  }

  // Profiles go to the folder of the result files. One that a policy reads stays below the tree, where its experiment
  // writes it and the policy looks for it, and so does one that is there.
  void place_profiles(const std::set<fs::path>& read) {
    for (const Run& run : runs_) {
      Experiment& e = run.loaded->experiment;
      if (!is_profile(run) || read.contains(fs::weakly_canonical(e.output))) continue;
      if (o_.run.fresh || fs::exists(file_of(run)) || !has_profile(run)) e.output = file_of(run);
    }
  }

  // Of runs behind profiles that are still to be made: models and prompts; budgets when the profiles are there.
  enum class When { before_profiles, after_profiles };
  void check(When when) const {
    const bool before = when == When::before_profiles;
    const std::set<fs::path> later = before ? missing_profiles() : std::set<fs::path>();
    for (const Run& run : runs_) {
      const Experiment& e = run.loaded->experiment;
      if (is_profile(run) && !before) continue;
      if (is_profile(run)) {
        const bool made = later.count(fs::weakly_canonical(e.output)) == 0;
        if (!made) check_profile(e, *run.loaded->catalog);
        if (o_.check) fmt::print("{}: {}\n", e.file.string(), made ? there(run) : "makes " + e.output.string());
        continue;
      }
      const Checked checked = check_experiment(e, *run.loaded->catalog, later);
      if (o_.check) fmt::print("{}", checked.table);
      if (checked.absent) throw Error(*checked.absent);
    }
  }

  // Makes the profiles that other experiments read.
  int profiles() const {
    int code = 0;
    for (const Run& run : runs_)
      if (is_profile(run) && !stop::requested()) code = std::max(code, profile(run));
    return code;
  }

  // One of them, as a process of its own makes it.
  struct ProfileRun {
    const Experiment* experiment;
    bool wanted;  // it is not there yet
    std::function<int()> make;
  };
  std::vector<ProfileRun> profile_runs() const {
    std::vector<ProfileRun> all;
    for (const Run& run : runs_)
      if (is_profile(run))
        all.push_back(
            {&run.loaded->experiment, o_.run.fresh || !has_profile(run), [this, &run] { return profile(run); }});
    return all;
  }

  // The experiments with cells.
  std::vector<GivenExperiment> experiments() const {
    std::vector<GivenExperiment> all;
    for (const Run& run : runs_)
      if (!is_profile(run)) all.push_back({run.loaded->experiment, *run.loaded->catalog});
    return all;
  }

  std::string text() const {
    const results::Format format = results::parse_format(o_.format);
    if (o_.small) return small_text(format);
    if (format == results::Format::csv) return papers::beside_csv(*chosen_.item, ours());
    return results::render(papers::beside(chosen_.paper->name, *chosen_.item, ours()), format);
  }

 private:
  struct Run {
    std::string stem;
    std::unique_ptr<Loaded> loaded;
  };

  fs::path file_of(const Run& run) const {
    return fs::path(o_.folder) / (chosen_.paper->name + "-" + run.stem + ".h5");
  }
  static bool is_profile(const Run& run) { return !run.loaded->experiment.profilers.empty(); }

  // Whether its file is there, and of the model that it would be made for.
  static bool has_profile(const Run& run) {
    const Experiment& e = run.loaded->experiment;
    const std::string file = e.output.string();
    return fs::exists(file) && results::is_profile(file) &&
           results::read_profile(file).model == e.models.front().name();
  }
  // Of a profile that is there: whether another text of its experiment made it, for instance by other --set.
  static bool of_other_settings(const Run& run) {
    const Experiment& e = run.loaded->experiment;
    const std::string text = results::experiment_of_profile(e.output.string());
    return !text.empty() && without_comments(text) != without_comments(e.text);
  }
  static std::string there(const Run& run) {
    return run.loaded->experiment.output.string() + " is there" +
           (of_other_settings(run) ? ", made by other settings of its experiment" : "");
  }
  std::set<fs::path> missing_profiles() const {
    std::set<fs::path> missing;
    for (const Run& run : runs_)
      if (is_profile(run) && (o_.run.fresh || !has_profile(run)))
        missing.insert(fs::weakly_canonical(run.loaded->experiment.output));
    return missing;
  }

  int profile(const Run& run) const {
    if (!o_.run.fresh && has_profile(run)) {
      const std::string text = there(run) + "; --fresh makes it anew";
      of_other_settings(run) ? log::warn(text) : log::info(text);
      return 0;
    }
    return run_profile(run.loaded->experiment, *run.loaded->catalog, {o_.run.command, false, true, {}});
  }

  // What the paper has, then the small experiments' own tables. A csv is one table, so it has these alone.
  std::string small_text(results::Format format) const {
    const std::string own = small_tables(format);
    if (format == results::Format::csv) return own;
    return results::render(papers::beside_small(chosen_.paper->name, *chosen_.item, ours()), format) + "\n" + own;
  }

  // Profiles that no run here reads are what the item asks for.
  std::string small_tables(results::Format format) const {
    std::vector<std::string> files, profiles;
    for (const Run& run : runs_) (is_profile(run) ? profiles : files).push_back(run.loaded->experiment.output.string());
    for (const std::string& file : files.empty() ? profiles : files)
      if (!results::is_there(file))
        throw Error(Errc::io,
                    fmt::format("got no such file, wanted what `kvlab reproduce {} --small` leaves there without "
                                "--report",
                                chosen_.name()),
                    file);
    if (!files.empty()) return results::report(files, {format, {}, takes_colour(STDOUT_FILENO)});
    if (profiles.size() == 1) return results::profile_report(results::read_profile(profiles.front()), format);
    return results::head_overlap(profiles, format);
  }

  papers::OurRun read_run(const Run& run, const std::string& file) const {
    std::set<std::string> tasks;
    for (const TaskSpec& task : run.loaded->experiment.tasks) tasks.insert(task_label(task));
    return papers::read_run(file, tasks.size(), papers::extra_of(*chosen_.item));
  }

  papers::Ours ours() const {
    papers::Ours out;
    for (const Run& run : runs_) {
      const std::string file = run.loaded->experiment.output.string();
      if (is_profile(run)) {
        if (fs::exists(file)) out.profiles.emplace(run.stem, results::read_profile(file));
      } else if (results::is_there(file)) {
        out.runs.emplace(run.stem, read_run(run, file));
      }
    }
    return out;
  }

  const ReproduceOptions& o_;
  Chosen chosen_;
  std::vector<std::string> sets_;
  std::vector<Run> runs_;
};

// Items may name the same experiment: its cells are run once.
std::vector<GivenExperiment> each_once(std::vector<GivenExperiment> all) {
  std::set<fs::path> outputs;
  std::vector<GivenExperiment> once;
  for (const GivenExperiment& given : all)
    if (outputs.insert(given.experiment.output).second) once.push_back(given);
  return once;
}

// The items of one call.
class Items {
 public:
  Items(const ReproduceOptions& options, const std::vector<Chosen>& chosen, const fs::path& tree) : o_(options) {
    for (const Chosen& one : chosen) {
      items_.push_back(one);
      reproductions_.emplace_back(o_, one, tree);
    }
    std::set<fs::path> read;
    for (const Reproduction& one : reproductions_) one.add_read(read);
    for (Reproduction& one : reproductions_) one.place_profiles(read);
  }

  int run() {
    name_callback_at_end();
    if (o_.run.worker_of.starts_with(profile_word)) return make_profile();
    if (o_.run.worker) return run_experiments(each_once(experiments()), o_.run);
    if (!o_.check && !o_.report && o_.run.spread.on != WorkersOn::nothing) return run_pool();
    int code = 0;
    for (std::size_t i = 0; i < items_.size(); ++i) {
      with_needs(i, [&] { code = std::max(code, run_one(i)); });
      if (stop::requested()) break;
    }
    return code;
  }

 private:
  // Says what the item needs where something is missing.
  template <class Body>
  void with_needs(std::size_t i, Body body) const {
    try {
      body();
    } catch (const Error&) {
      if (const papers::Item& item = *items_[i].item; !o_.small && !item.needs.empty())
        log::info(fmt::format("{} needs {}{}", items_[i].name(), join(item.needs, "; "),
                              item.small.empty() ? "" : ". --small does without"));
      throw;
    }
  }

  int run_one(std::size_t i) const {
    const Reproduction& one = reproductions_[i];
    int code = 0;
    if (o_.check) return one.check(Reproduction::When::before_profiles), 0;
    if (!o_.report) {
      one.check(Reproduction::When::before_profiles);
      code = one.profiles();
      if (stop::requested()) return code;
      one.check(Reproduction::When::after_profiles);
      for (const GivenExperiment& given : one.experiments()) {
        if (stop::requested()) return code;
        log::info(fmt::format("{}: {}", items_[i].name(), given.experiment.file.string()));
        code = std::max(code, run_experiments({given}, o_.run));
      }
      if (stop::requested()) return code;
    }
    show(one);
    return code;
  }

  // Workers run the cells of all items, so that none is idle while an item has cells left.
  int run_pool() const {
    stop::watch();
    for (std::size_t i = 0; i < items_.size(); ++i)
      with_needs(i, [&] { reproductions_[i].check(Reproduction::When::before_profiles); });
    const std::optional<int> made = profiles_beside();
    int code = made.value_or(0);
    for (std::size_t i = 0; i < items_.size() && !made && !stop::requested(); ++i)
      with_needs(i, [&] { code = std::max(code, reproductions_[i].profiles()); });
    if (code >= 2 || stop::requested()) return code;
    for (std::size_t i = 0; i < items_.size(); ++i)
      with_needs(i, [&] { reproductions_[i].check(Reproduction::When::after_profiles); });
    if (const auto all = each_once(experiments()); !all.empty()) code = std::max(code, run_experiments(all, o_.run));
    if (stop::requested()) return code;
    for (const Reproduction& one : reproductions_) show(one);
    return code;
  }

  std::vector<Reproduction::ProfileRun> profile_runs() const {
    std::vector<Reproduction::ProfileRun> all;
    for (const Reproduction& one : reproductions_)
      for (const auto& run : one.profile_runs()) all.push_back(run);
    return all;
  }

  // On this machine several profiles are made at a time, each by a process with a GPU of its own. Returns the greatest
  // exit code; nothing where this process is to make what is missing.
  std::optional<int> profiles_beside() const {
    const auto all = profile_runs();
    std::vector<std::vector<std::string>> commands;
    std::vector<const Experiment*> experiments;
    std::set<fs::path> outputs;
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (!all[i].wanted || !outputs.insert(all[i].experiment->output).second) continue;
      commands.push_back(o_.run.spread.command);
      commands.back().insert(commands.back().begin() + 2, {"--worker-of", profile_word + std::to_string(i)});
      experiments.push_back(all[i].experiment);
    }
    if (o_.run.spread.on != WorkersOn::here || commands.size() < 2) return std::nullopt;
    log::info(fmt::format("{} profiles, {} at a time", commands.size(),
                          std::min<std::size_t>(commands.size(), static_cast<std::size_t>(o_.run.spread.jobs))));
    return run_beside(o_.run.spread.jobs, commands, experiments);
  }

  // In such a process.
  int make_profile() const {
    const auto all = profile_runs();
    const std::string number = o_.run.worker_of.substr(profile_word.size());
    for (std::size_t i = 0; i < all.size(); ++i)
      if (number == std::to_string(i)) return all[i].make();
    throw Error(Errc::data, "got no profile " + number + ", wanted one of the items: they have changed", where);
  }

  std::vector<GivenExperiment> experiments() const {
    std::vector<GivenExperiment> all;
    for (const Reproduction& one : reproductions_)
      for (const GivenExperiment& given : one.experiments()) all.push_back(given);
    return all;
  }

  void show(const Reproduction& one) const {
    if (o_.report || !o_.quiet) fmt::print("{}", one.text());
  }

  const ReproduceOptions& o_;
  std::vector<Chosen> items_;
  std::vector<Reproduction> reproductions_;
};

}  // namespace

namespace {

constexpr const char* targets_prefix = "targets/";

std::string target_list(const std::vector<papers::TargetTable>& all) {
  std::string out = "targets: what kvlab is to reach\n";
  for (const papers::TargetTable& table : all) {
    double seconds = 0;
    for (const papers::TargetRun& run : table.runs) seconds += run.seconds;
    out += fmt::format("  {:<15}  {} ({} rows, about {:.0f} minutes on {})\n", targets_prefix + table.name, table.title,
                       table.rows.size(), seconds / 60, table.gpu);
  }
  return out;
}

const papers::TargetTable* table_of(const std::vector<papers::TargetTable>& all, const std::string& name) {
  std::vector<std::string> known;
  for (const papers::TargetTable& table : all) {
    known.push_back(targets_prefix + table.name);
    if (known.back() == name) return &table;
  }
  throw Error(Errc::config, fmt::format("got '{}', wanted {}{}", name, join(known, " or "), did_you_mean(name, known)),
              where);
}

}  // namespace

int reproduce(const ReproduceOptions& o) {
  const fs::path papers = "analysis/papers", tree = shared_files(papers, where);
  const std::vector<papers::Paper> all = papers::read_papers(tree / papers);
  const auto is_target = [](const std::string& name) { return name.starts_with(targets_prefix); };
  const bool no_paper = o.items.empty() || o.items == std::vector<std::string>{"targets"};
  if (no_paper || std::any_of(o.items.begin(), o.items.end(), is_target)) {
    const std::vector<papers::TargetTable> targets = papers::read_all_targets(tree / "analysis/targets");
    if (no_paper) {
      fmt::print("{}{}", o.items.empty() ? list_text(all, "") + "\n" : "", target_list(targets));
      return 0;
    }
    std::vector<const papers::TargetTable*> chosen;
    for (const std::string& name : o.items) chosen.push_back(table_of(targets, name));
    return run_targets(o, chosen, tree);
  }
  if (!o.only.empty() || o.within > 0)
    throw Error(Errc::config, "got --only or --within for a paper, wanted them for targets/NAME", where);
  const auto is_paper = [&](const std::string& name) {
    return std::any_of(all.begin(), all.end(), [&](const papers::Paper& p) { return p.name == name; });
  };
  if (o.items.size() == 1 && is_paper(o.items.front())) {
    fmt::print("{}", list_text(all, o.items.front()));
    return 0;
  }
  results::parse_format(o.format);
  if (!o.adapter.empty() && o.model.empty())
    throw Error(Errc::config, "got --adapter, wanted --model beside it", where);
  std::vector<Chosen> chosen;
  for (const std::string& name : o.items) chosen.push_back(papers::choose(all, name, where));
  return Items(o, chosen, tree).run();
}

}  // namespace kvlab
