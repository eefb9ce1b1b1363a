#include "cli/cli.hpp"

#include <fmt/format.h>

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <system_error>

#include "base/backend.hpp"
#include "base/log.hpp"
#include "base/memory_reserve.hpp"
#include "base/program.hpp"
#include "base/stop.hpp"
#include "base/terminal.hpp"
#include "base/text.hpp"
#include "base/version.hpp"
#include "bench/bench.hpp"
#include "cli/conform.hpp"
#include "cli/doctor.hpp"
#include "cli/html_report.hpp"
#include "cli/loaded.hpp"
#include "cli/replay.hpp"
#include "cli/reproduce.hpp"
#include "cli/score.hpp"
#include "cli/spread.hpp"
#include "cli/verify.hpp"
#include "experiment/describe.hpp"
#include "experiment/schema.hpp"
#include "model/bundled.hpp"
#include "model/synthetic.hpp"
#include "plugin/callback.hpp"
#include "result/attempts.hpp"
#include "result/memory_report.hpp"
#include "result/plugin_report.hpp"
#include "result/profile_file.hpp"
#include "result/profile_report.hpp"
#include "result/report.hpp"
#include "run/codec_matrix.hpp"
#include "run/device.hpp"
#include "run/generate.hpp"
#include "run/profile.hpp"
#include "run/runner.hpp"

namespace kvlab {
namespace {

constexpr const char* top_help =
    "kvlab: KV-cache compression experiments. A YAML file names a model, tasks and policies; kvlab runs every\n"
    "combination and writes what happened to an HDF5 file.\n\n"
    "  kvlab check experiments/quickstart.yaml          what would run\n"
    "  kvlab run experiments/quickstart.yaml            run it; again = only what is not finished\n"
    "  kvlab report results/quickstart.h5               the result as a table\n"
    "  kvlab list policies                              what there is; kvlab describe NAME = its parameters\n"
    "  kvlab run F.yaml --set POLICY.budget.tokens=[128,256] --set model.dtype=f32\n";

int exit_code(Errc code) {
  if (code == Errc::network || code == Errc::device) return 3;
  return code == Errc::internal ? 1 : 2;
}

// Quotes the words for a shell.
std::string joined(const std::vector<std::string>& words) {
  std::string text = "kvlab";
  for (std::size_t i = 1; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (!word.empty() && word.find_first_of(" \t\n\"'$&|;<>(){}[]*?#`\\~!") == std::string::npos) {
      text += " " + word;
      continue;
    }
    text += " " + shell_quoted(word);
  }
  return text;
}

class CommandLine {
 public:
  CommandLine(int argc, char** argv);
  int run();

 private:
  CLI::App* add(const char* name, const char* help, const char* examples, std::function<int()> action) {
    CLI::App* command = app_.add_subcommand(name, help);
    command->footer(examples);
    command->callback([this, action = std::move(action)] { action_ = action; });
    CLI::Option* quiet = command->add_flag("-q,--quiet", quiet_, "errors and warnings only; no table of what was run");
    command->add_flag("-v,--verbose", verbose_, "debug messages too: what was loaded, and where the time goes")
        ->excludes(quiet);
    command->add_option("--log", log_file_, "file that all messages are appended to, with times and levels");
    names_.emplace_back(name);
    return command;
  }
  void start_log() const;
  void add_experiment(CLI::App* command) {
    command->add_option("FILE", file_, "experiment file (YAML)")->required();
    command->add_option("--set", sets_, "key=value in place of the file's, e.g. POLICY.budget.tokens=256; repeatable")
        ->allow_extra_args(false);
    add_plugin_path(command);
  }
  void add_plugin_path(CLI::App* command) {
    command->add_option("--plugin-path", plugin_path_, "folder or library of plugins, searched first; repeatable")
        ->allow_extra_args(false);
  }
  Registry registry() const {
    return Registry(std::vector<std::filesystem::path>(plugin_path_.begin(), plugin_path_.end()));
  }
  void add_strict(CLI::App* command) {
    command->add_flag("--strict", strict_,
                      "run a cell again, at most 3 times, whose times other programs disturbed, also one that a run "
                      "without --strict finished; the column `reruns` counts");
  }
  void add_run();
  void add_profile();
  void add_record();
  void add_generate();
  void add_reproduce();
  void add_rest();
  std::string report_text() const;
  // The words that the user typed, also in the process of a worker or of an isolated cell.
  std::vector<std::string> typed() const { return as_typed({argv_, argv_ + argc_}); }

  int argc_;
  char** argv_;
  CLI::App app_{top_help, "kvlab"};
  std::function<int()> action_;
  std::vector<std::string> names_;
  std::string file_, output_, isolated_cell_, word_, array_, format_ = "table", html_, choose_, backend_ = "auto";
  double lose_ = 0;
  std::vector<std::string> files_, compare_;
  std::vector<std::string> sets_, words_, plugin_path_;
  std::optional<std::string> log_file_;
  CLI::Option* report_html_ = nullptr;
  bool fresh_ = false, resume_ = false, quiet_ = false, verbose_ = false, isolate_ = false, json_ = false,
       check_ = false, plugins_ = false, attempts_ = false, memory_ = false, matrix_ = false, ladder_ = false,
       strict_ = false;
  SpreadWords spread_;
  GenerateOptions generate_;
  ConformOptions conform_;
  ReproduceOptions reproduce_;
  RecordOptions record_;
  ReplayWords replay_;
  VerifyOptions verify_;
  ScoreOptions score_;
  bench::ModelChoice choice_;
  std::string only_;
};

CommandLine::CommandLine(int argc, char** argv) : argc_(argc), argv_(argv) {
  app_.require_subcommand(1);
  app_.set_version_flag("--version", fmt::format("kvlab {} ({})", version(), git_commit()));
  app_.footer(
      "kvlab COMMAND --help says more. Exit codes: 0 done; 1 a cell failed or did not fit in memory, or the run had to "
      "stop\n"
      "before its end; 2 something is wrong with what was given, a missing file too, or there is no memory to prepare "
      "it, and\n"
      "nothing was run; 3 no network, device, driver or Python package; 129, 130, 143 stopped by SIGHUP, SIGINT, "
      "SIGTERM.");
  add_run();
  add_profile();
  add_record();
  add_generate();
  add_reproduce();
  add_rest();
}

void CommandLine::add_run() {
  CLI::App* run =
      add("run", "run an experiment; cells that are finished are not run again",
          "kvlab run exp.yaml --set POLICY.budget.tokens=256 -o results/tokens256.h5\n"
          "kvlab run exp.yaml --set 'sampling={temperature: 0.6, top_p: 0.95, draws: 8}'  eight drawn answers "
          "to each question",
          [this] {
            Loaded loaded(file_, sets_, plugin_path_);
            if (!output_.empty()) loaded.experiment.output = output_;
            RunOptions options{joined(typed()), fresh_, quiet_};
            options.strict = strict_;
            if (isolate_) options.isolate.assign(argv_, argv_ + argc_);
            spread_.apply(options, typed());
            if (!isolated_cell_.empty())
              return run_isolated_cell(loaded.experiment, *loaded.catalog, isolated_cell_, options);
            return run_experiment(loaded.experiment, *loaded.catalog, options);
          });
  add_experiment(run);
  run->add_option("-o,--output", output_, "result file in place of the experiment's");
  CLI::Option* fresh = run->add_flag("--fresh", fresh_,
                                     "run finished cells again; each stays until its new result is on disk, so after a "
                                     "--fresh that was stopped all of them count as finished");
  run->add_flag("--resume", resume_, "keep finished cells (the default)")->excludes(fresh);
  run->add_flag("--isolate", isolate_,
                "each cell in a process of its own, so that a plugin that ends it costs that cell only; the model is "
                "loaded and the full cache's reference made anew for each cell");
  add_strict(run);
  run->add_option("--isolated-cell", isolated_cell_, "what --isolate starts")->group("");
  spread_.add_to(run);

  CLI::App* check = add("check", "everything that `run` checks before its first cell, and the cells; runs nothing",
                        "kvlab check exp.yaml", [this] {
                          const Loaded loaded(file_, sets_, plugin_path_);
                          name_callback_at_end();
                          const Checked checked = check_experiment(loaded.experiment, *loaded.catalog);
                          fmt::print("{}", checked.table);
                          if (!checked.absent) return 0;
                          log::error(checked.absent->what());
                          return exit_code(checked.absent->code());
                        });
  add_experiment(check);
}

void CommandLine::add_profile() {
  CLI::App* profile =
      add("profile", "let profilers watch the full cache: head statistics and calibration, as a file",
          "kvlab profile exp.yaml      where exp.yaml has profilers: [NAME] in place of policies", [this] {
            Loaded loaded(file_, sets_, plugin_path_);
            if (!output_.empty()) loaded.experiment.output = output_;
            return run_profile(loaded.experiment, *loaded.catalog, {joined(typed()), false, quiet_});
          });
  add_experiment(profile);
  profile->add_option("-o,--output", output_, "profile file (HDF5), in place of the experiment's");
}

void CommandLine::add_record() {
  CLI::App* record = add("record", record_help, record_examples, [this] {
    const Loaded loaded(file_, sets_, plugin_path_);
    record_.command = joined(typed());
    record_.quiet = quiet_;
    return run_record(loaded.experiment, *loaded.catalog, record_);
  });
  add_experiment(record);
  add_record_options(record, record_);

  CLI::App* replay = add("replay", replay_help, replay_examples, [this] {
    RunOptions options{joined(typed()), fresh_, quiet_};
    spread_.apply(options, typed());
    return replay_recording(replay_, options);
  });
  add_replay_options(replay, replay_);
  replay->add_flag("--fresh", fresh_, "run finished cells again");
  spread_.add_starters_to(replay);
}

void CommandLine::add_generate() {
  CLI::App* command = add("generate", "answer one prompt under a policy",
                          "kvlab generate 'Why is the sky blue?' --policy '{POLICY: {budget: {tokens: 64}}}'", [this] {
                            Registry plugins = registry();
                            stop::watch();
                            name_callback_at_end();
                            return generate(generate_, RegistryCatalog(plugins));
                          });
  command->add_option("PROMPT", generate_.prompt, "what the user says")->required();
  command->add_option("--model", generate_.model, "GGUF file, safetensors folder or bundled/NAME")
      ->capture_default_str();
  command->add_option("--adapter", generate_.adapter, "PEFT folder merged into the model");
  command->add_option("--dtype", generate_.dtype, "of weights and cache")
      ->check(CLI::IsMember({"bf16", "f32", "fp16"}))
      ->capture_default_str();
  command->add_option("--backend", generate_.backend, "auto: the GPU where there is one")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  command->add_option("--policy", generate_.policy, "as under `policies:` in an experiment")->capture_default_str();
  command->add_option("--max-new", generate_.max_new, "longest answer in tokens")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--temperature", generate_.temperature, "0 = greedy")
      ->check(CLI::Range(0.0, 100.0))
      ->capture_default_str();
  command->add_option("--top-p", generate_.top_p, "share of probability sampled from")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--top-k", generate_.top_k, "most likely tokens sampled from; 0 = all")
      ->check(CLI::Range(0, 1 << 24))
      ->capture_default_str();
  command->add_option("--seed", generate_.seed, "of the sampling")->capture_default_str();
  command->add_flag("--raw", generate_.raw, "the prompt as it is, without the chat template");
  add_plugin_path(command);
}

void CommandLine::add_reproduce() {
  CLI::App* command =
      add("reproduce", "tables and figures of papers: what they publish beside what runs here",
          "kvlab reproduce                          every table and figure, and what it needs\n"
          "kvlab reproduce PAPER/table2 --model DIR  its experiment, then the paper's values beside ours\n"
          "kvlab reproduce PAPER/table2 --small      the same question to a model that is at hand\n"
          "kvlab reproduce targets/edits             what kvlab is to reach on a GPU, and what it reaches",
          [this] {
            reproduce_.sets = sets_;
            reproduce_.plugin_path = plugin_path_;
            reproduce_.quiet = quiet_;
            reproduce_.run = {joined(typed()), fresh_, true};
            reproduce_.run.strict = strict_;
            spread_.apply(reproduce_.run, typed());
            return reproduce(reproduce_);
          });
  command->add_option("ITEM", reproduce_.items,
                      "PAPER/ITEM or targets/NAME to run; PAPER, targets or nothing = a list");
  command->add_option("--model", reproduce_.model,
                      "in place of the experiments': GGUF file, safetensors folder, "
                      "bundled/NAME or synthetic/NAME");
  command->add_option("--adapter", reproduce_.adapter, "PEFT folder merged into that model");
  command->add_flag("--small", reproduce_.small, "experiments that need no weights and data but kvlab's own");
  CLI::Option* check = command->add_flag("--check", reproduce_.check, "only check what would run");
  command->add_flag("--report", reproduce_.report, "run nothing, show what earlier calls left")->excludes(check);
  command->add_flag("--fresh", fresh_, "run finished cells and profiles again");
  command->add_option("--only", reproduce_.only, "of targets/NAME: a row; repeatable")->allow_extra_args(false);
  command
      ->add_option("--within", reproduce_.within,
                   "of targets/NAME: begin no command that may end after so many seconds; the next call goes on")
      ->check(CLI::PositiveNumber);
  add_strict(command);
  command
      ->add_option("-o,--output", reproduce_.folder,
                   "folder of the result files; a profile that policies read is made where they look for it")
      ->capture_default_str();
  command->add_option("--format", reproduce_.format, "table, md, csv or latex")->capture_default_str();
  command->add_option("--set", sets_, "key=value in place of the experiments'; repeatable")->allow_extra_args(false);
  spread_.add_starters_to(command);
  add_plugin_path(command);
}

// Its rows would stand beside themselves as another run's.
void refuse_twice(const std::vector<std::string>& files) {
  std::set<std::filesystem::path> seen;
  for (const std::string& file : files)
    if (!seen.insert(std::filesystem::weakly_canonical(file)).second)
      throw Error(Errc::config, "got this file twice, wanted each file once", file);
}

std::string CommandLine::report_text() const {
  const results::Format format = results::parse_format(format_);
  const std::string& file = files_.front();
  const bool several = files_.size() > 1, profiles = results::is_profile(file);
  if (ladder_ && profiles) throw Error(Errc::config, "got --ladder, wanted a result file", "kvlab report");
  if (!choose_.empty() && profiles) throw Error(Errc::config, "got --choose, wanted a result file", "kvlab report");
  if (several && (plugins_ || attempts_ || memory_ || !array_.empty()))
    throw Error(Errc::config, "got several files, wanted one with --plugins, --attempts, --memory or --array",
                "kvlab report");
  if (memory_ && profiles) throw Error(Errc::config, "got --memory, wanted a result file", "kvlab report");
  if (!compare_.empty() && (plugins_ || attempts_ || !array_.empty() || profiles))
    throw Error(Errc::config, "got --compare, wanted a result file, without --plugins, --attempts and --array",
                "kvlab report");
  if (plugins_) return results::plugin_report(file, format);
  if (attempts_) return results::attempts_report(file, format);
  if (memory_) return results::memory_report(file, format);
  if (!array_.empty()) return results::head_map(results::read_profile(file), array_, format);
  if (profiles)
    return several ? results::head_overlap(files_, format)
                   : results::profile_report(results::read_profile(file), format);
  return results::report(files_, {format, compare_, takes_colour(STDOUT_FILENO), ladder_, choose_, lose_});
}

void CommandLine::add_rest() {
  CLI::App* list = add("list", "what there is: plugins of every role, among them tasks and metrics; models",
                       "kvlab list policies", [this] {
                         if (word_ == "models") {
                           fmt::print("{}", models_text());
                           return 0;
                         }
                         Registry r = registry();
                         if (matrix_) {
                           const auto model = model_outline(*open_model(usual_synthetic, "", {}), DType::bf16,
                                                            usual_synthetic, Device::cpu);
                           const RegistryCatalog catalog(r);
                           fmt::print("{}", codec_page(catalog, codec_tables(catalog, *model, Device::cpu, 16),
                                                       "for pages of 16 tokens in bf16 with a head dimension of 128"));
                           return 0;
                         }
                         fmt::print("{}", json_ ? list_json(r, word_) : list_text(r, word_));
                         return 0;
                       });
  list->add_option(
      "KIND", word_,
      "policies, scorers, selectors, pruners, rescorers, budgets, codecs, profilers, tasks, metrics or models; "
      "nothing = all plugins");
  list->add_flag("--json", json_, "plugins with their parameters, for programs");
  list->add_flag("--matrix", matrix_, "which codec goes with which method, as a Markdown page");
  add_plugin_path(list);

  CLI::App* describe = add("describe", "a plugin's parameters, with an example to copy", "kvlab describe NAME", [this] {
    Registry r = registry();
    fmt::print("{}", describe_text(r, word_));
    return 0;
  });
  describe->add_option("NAME", word_, "name of a plugin")->required();
  add_plugin_path(describe);

  CLI::App* inspect = add("inspect", "what a plugin library was built for and offers, read without running it",
                          "kvlab inspect build/libmine.so", [this] {
                            fmt::print("{}", json_ ? inspect_json(file_) : inspect_text(file_));
                            return 0;
                          });
  inspect->add_option("LIBRARY", file_, "plugin library, also one of another build of kvlab")->required();
  inspect->add_flag("--json", json_, "for programs");

  CLI::App* conformance = add(
      "conform", "what every plugin promises, looked at on one library: pass, FAIL with the cause, or skip",
      "kvlab conform build/libmine.so --case budget      with --verbose: also the names of what is skipped\n\n"
      "Exit codes: 0 nothing failed; 1 a promise is broken; 2 the library does not load, or no promise has the name "
      "of --case.",
      [this] {
        conform_.verbose = verbose_;
        return conform(conform_);
      });
  conformance->add_option("LIBRARY", conform_.library, "plugin library");
  conformance->add_option("--case", conform_.part, "only the promises with this in their names");
  conformance->add_flag("--list", conform_.list, "name the promises, look at none");
  conformance->add_option("--backend", conform_.backend, "auto: the CPU, then the GPU where there is one")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();

  CLI::App* schema =
      add("schema", "JSON schema of experiment files, for editors", "kvlab schema > kvlab.schema.json", [this] {
        Registry r = registry();
        fmt::print("{}", schema_text(r));
        return 0;
      });
  add_plugin_path(schema);

  CLI::App* report =
      add("report", "a result file as tables, a profile as tables and pictures",
          "kvlab report results/quickstart.h5 --format md\n"
          "kvlab report results/mine.h5 --compare 'POLICY 64' OTHER\n"
          "kvlab report results/controls.h5 --ladder\n"
          "kvlab report results/sweep.h5 --choose POLICY\n"
          "kvlab report profile.h5                 quantiles; maps and curves where a profiler tells heads apart\n"
          "kvlab report one.h5 other.h5            the share of one profile's heads that the other has too\n"
          "kvlab report results/*.h5 --html page/  one HTML page with figures; needs Python",
          [this] {
            if (report_html_->count()) return html_report(files_, html_);
            refuse_twice(files_);
            fmt::print("{}", report_text());
            return 0;
          });
  report
      ->add_option(
          "FILE", files_,
          "result or profile file (HDF5), also of a run under way; several result files: their rows in one "
          "table, as FILE:POLICY; several profile files: the heads that they have in common, and a map of them")
      ->required();
  CLI::Option* compare =
      report
          ->add_option("--compare", compare_, "in place of the tables: two rows of them by name, question by question")
          ->expected(2);
  CLI::Option* array =
      report->add_option("--array", array_, "in place of a profile's tables: this array as a map of layers and heads");
  CLI::Option* format = report->add_option("--format", format_, "table, md, csv or latex")->capture_default_str();
  CLI::Option* plugins =
      report->add_flag("--plugins", plugins_, "in place of the tables: the plugins that wrote the file, with SHA-256");
  CLI::Option* attempts = report->add_flag(
      "--attempts", attempts_, "in place of the tables: pass@k and avg@k of questions with several answers");
  CLI::Option* memory = report->add_flag(
      "--memory", memory_, "in place of the tables: bytes held and moved by tier, codec and tag, of each cell");
  memory->excludes(array)->excludes(plugins)->excludes(attempts)->excludes(compare);
  CLI::Option* ladder = report->add_flag(
      "--ladder", ladder_,
      "in place of the tables: where each policy stands between random eviction and an oracle of the same budget");
  ladder->excludes(array)->excludes(plugins)->excludes(attempts)->excludes(compare)->excludes(memory);
  CLI::Option* choose = report->add_option(
      "--choose", choose_, "in place of the tables: which of the settings of this policy to take, over all tasks");
  choose->excludes(array)->excludes(plugins)->excludes(attempts)->excludes(compare)->excludes(ladder)->excludes(memory);
  report
      ->add_option("--lose", lose_,
                   "with --choose: take the fewest bytes of the settings whose mean score is so far below the best")
      ->needs(choose)
      ->check(CLI::Range(0., 1.))
      ->capture_default_str();
  report_html_ = report->add_option("--html", html_,
                                    "in place of the tables: a page with tables and figures of all FILEs, as a folder "
                                    "or a file *.html");
  report_html_->excludes(array)->excludes(format)->excludes(plugins)->excludes(compare)->excludes(attempts);
  report_html_->excludes(ladder)->excludes(choose)->excludes(memory);

  add_verify_options(add("verify", verify_help, verify_examples, [this] { return verify(verify_); }), verify_);
  add_score_options(add("score", score_help, score_examples, [this] { return score_answers(score_); }), score_);

  CLI::App* bench =
      add("bench", "speed of the ops against what this machine can do", "kvlab bench attend --json", [this] {
        stop::watch();
        const bool cuda = choose_device(backend_, {}, "kvlab bench") == Device::cuda;
        if (check_)
          return bench::check(
                     words_, cuda,
                     [](const std::string& op, const std::string& shape, const std::string& differs) {
                       fmt::print("{:<18} {:<56} {}\n", op, shape,
                                  differs.empty() ? "equals its reference" : "DIFFERS\n" + differs);
                       std::fflush(stdout);
                     },
                     only_)
                     ? 0
                     : 1;
        const bench::Report r = bench::run(words_, cuda, choice_, only_);
        fmt::print("{}", json_ ? bench::to_json(r).dump(2) + "\n" : bench::table(r));
        return 0;
      });
  bench->add_option("OP", words_, join(bench::op_names(), ", ") + "; nothing = all");
  bench->add_option("--backend", backend_, "auto: the GPU where there is one")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  bench->add_option("--model", choice_.model,
                    "of decode, prefill and the steps beside copies: as an experiment names it, or synthetic/NAME");
  bench->add_option("--batch", choice_.batch, "sequences of decode steps")->check(CLI::Range(1, 4096));
  bench->add_option("--context", choice_.context, "tokens of decode's cache or of the prompt")
      ->check(CLI::Range(1, 1 << 24));
  bench->add_option("--only", only_, "cases with this text in their shape or kernel, e.g. '8 x 32768'");
  bench->add_flag("--check", check_, "compare each case with the op's reference, do not time it (takes minutes)");
  bench->add_flag("--json", json_, "for programs");

  CLI::App* doctor =
      add("doctor", "what this machine can do, which models and plugins are there", "kvlab doctor", [this] {
        Registry r = registry();
        fmt::print("{}", doctor_text(r));
        return 0;
      });
  add_plugin_path(doctor);
}

void CommandLine::start_log() const {
  log::Settings settings;
  settings.level = log::level_of_environment();
  if (quiet_) settings.level = std::max(settings.level, log::Level::warning);
  if (verbose_) settings.level = log::Level::debug;
  if (log_file_ && log_file_->empty()) throw Error(Errc::config, "got an empty name, wanted a file", "--log");
  settings.file = log_file_.value_or("");
  log::start(settings);
  log::debug(fmt::format("kvlab {} ({}): {}", version(), git_commit(), joined(typed())));
}

int CommandLine::run() {
  if (argc_ > 1 && argv_[1][0] != '-' && std::find(names_.begin(), names_.end(), argv_[1]) == names_.end())
    throw Error(Errc::config,
                fmt::format("got unknown command '{}', wanted one of: {}{}", argv_[1], join(names_),
                            did_you_mean(argv_[1], names_)),
                "kvlab");
  if (argc_ <= 1) {
    fmt::print("{}", app_.help());
    return 2;
  }
  try {
    app_.parse(argc_, argv_);
  } catch (const CLI::ParseError& e) {
    if (e.get_exit_code() == 0) return app_.exit(e);
    throw Error(Errc::config, fmt::format("{} (see kvlab {} --help)", e.what(), argv_[1]), "kvlab");
  }
  start_log();
  return action_();
}

}  // namespace

int run_cli(int argc, char** argv) {
  if (!keep_reserve()) {  // an exception or a plugin would end the process without a message
    std::fputs("error: got no 16 MiB of memory to begin with, wanted more: see ulimit -v\n", stderr);
    return 2;
  }
  log::start({});                 // the options set it anew
  std::signal(SIGXFSZ, SIG_IGN);  // write(2) then reports a file beyond `ulimit -f` as an error, like a full disk
  try {
    const int code = CommandLine(argc, argv).run();
    if (std::fflush(stdout) != 0) throw std::system_error(errno, std::generic_category(), "standard output");
    return code;
  } catch (const stop::Interrupted& stopped) {
    log::info(std::string("stopped by ") + stop::name_of(stopped.signal));
    return stop::exit_code(stopped.signal);
  } catch (const ExperimentError& e) {
    int code = 0;
    for (const Error& one : e.errors()) {
      log::error(one.what());
      code = code ? code : exit_code(one.code());
    }
    return code;
  } catch (const Error& e) {
    log::error(e.what());
    return exit_code(e.code());
  } catch (const std::filesystem::filesystem_error& e) {  // a name too long, a folder that may not be searched
    const Error error(Errc::io, "got '" + e.code().message() + "', wanted a file or folder", e.path1().string());
    log::error(error.what());
    return exit_code(error.code());
  } catch (const std::bad_alloc&) {
    log::error("got no memory from the system, wanted more: see ulimit -v");  // inside a cell it is the cell's result
    return 2;
  } catch (const std::system_error& e) {  // a pipe that was closed, a full disk
    log::error(e.what());
  } catch (const std::exception& e) {
    log::error(std::string(e.what()) + " (a bug in kvlab: please report it)");
  }
  return 1;
}

}  // namespace kvlab
