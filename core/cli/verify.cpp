#include "cli/verify.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <kvlab/error.hpp>
#include <set>

#include "base/log.hpp"
#include "base/sha256.hpp"
#include "base/stop.hpp"
#include "base/text.hpp"
#include "cli/shared_files.hpp"
#include "experiment/document.hpp"
#include "experiment/variants.hpp"
#include "papers/beside.hpp"
#include "plugin/callback.hpp"
#include "result/profile_file.hpp"
#include "result/report_layout.hpp"
#include "run/verify.hpp"

namespace fs = std::filesystem;

namespace kvlab {
namespace {

// The experiment's file: the one that the user names, else the one that was recorded, where its folder is here.
std::string place_of(const VerifyOptions& options, const results::RunInfo& info) {
  if (!options.experiment.empty()) return options.experiment;
  std::error_code error;
  if (!info.experiment_file.empty() && fs::is_directory(fs::path(info.experiment_file).parent_path(), error))
    return info.experiment_file;
  log::info(fmt::format("{}: relative paths start at the current folder; --experiment FILE gives another one",
                        info.experiment_file.empty() ? "the file does not name its experiment's folder"
                                                     : "got no folder of " + info.experiment_file));
  return (fs::current_path() /
          (info.experiment_file.empty() ? "experiment.yaml" : fs::path(info.experiment_file).filename().string()))
      .string();
}

// A text with overrides was given a final newline.
std::string hash_of(const std::string& text) {
  return sha256_hex(text.ends_with('\n') ? text.substr(0, text.size() - 1) : text);
}

// The text of the file that the experiment came from, as it is now.
Compared compare_text(const yaml::Document& recorded, bool named) {
  Compared out{"experiment " + fs::path(recorded.file).filename().string(), hash_of(recorded.text), "",
               Finding::not_here};
  std::error_code error;
  if (!named && !fs::exists(recorded.file, error)) return out;
  out.here = hash_of(yaml::parse_file(recorded.file).text);
  out.finding = out.here == out.recorded ? Finding::same : Finding::differs;
  return out;
}

// Hashes that are the same are shown by their first digits.
std::string shown(const Compared& line, const std::string& text) {
  constexpr std::size_t digits = 12;
  if (text.empty()) return "-";
  const bool hash = text.size() == 64 && text.find_first_not_of("0123456789abcdef") == text.npos;
  return hash && line.finding != Finding::differs ? text.substr(0, digits) : one_line(text);
}

// A paper's values beside what the file has.
struct Published {
  std::string item;
  results::ReportPage page;
};

// Those of the experiment that made the file, or of the item that the user names.
std::vector<Published> published_of(const VerifyOptions& options, const std::string& experiment_file,
                                    const Experiment& experiment) {
  const fs::path folder = "analysis/papers";
  std::vector<papers::Paper> all;
  try {
    all = papers::read_papers(shared_files(folder, "kvlab verify") / folder);
  } catch (const Error&) {
    if (!options.paper.empty()) throw;
    return {};  // an installation without papers
  }
  std::vector<papers::Chosen> chosen = papers::items_of(all, experiment_file);
  if (!options.paper.empty()) chosen = {papers::choose(all, options.paper, "--paper")};
  std::set<std::string> tasks;
  for (const TaskSpec& task : experiment.tasks) tasks.insert(task_label(task));
  std::vector<Published> out;
  for (const papers::Chosen& one : chosen) {
    const papers::OurRun run = papers::read_run(options.file, tasks.size(), papers::extra_of(*one.item));
    results::ReportPage page = papers::beside_run(one, fs::path(experiment_file).stem().string(), run);
    if (page.tables.size() > 1)
      out.push_back({one.name(), std::move(page)});
    else if (!options.paper.empty())
      throw Error(Errc::config,
                  fmt::format("got the result of '{}', wanted that of {}: {} has no value for another one",
                              experiment_file, join(one.item->run, " or "), one.name()),
                  options.file);
  }
  return out;
}

std::string table_of(const std::vector<Compared>& lines, const std::vector<Published>& published,
                     const std::string& title, results::Format format) {
  results::ReportPage page;
  results::ReportTable table;
  table.title = title;
  table.header = {"what", "recorded", "here", "finding"};
  table.text_columns = table.header.size();
  const bool csv = format == results::Format::csv;
  for (const Compared& line : lines)
    table.rows.push_back({one_line(line.what), csv ? line.recorded : shown(line, line.recorded),
                          csv ? line.here : shown(line, line.here), name_of(line.finding)});
  if (!csv) {
    page.tables.push_back(std::move(table));
    std::string out = results::render(page, format);
    for (const Published& one : published) out += "\n" + results::render(one.page, format);
    return out;
  }
  for (const Published& one : published)  // row, column, published, ours, interval, verdict
    for (const std::vector<std::string>& cells : one.page.tables.back().rows)
      table.rows.push_back({fmt::format("{}: {}, {}", one.item, cells[0], cells[1]),
                            cells[4] == "-" ? cells[3] : fmt::format("{} ({})", cells[3], cells[4]), cells[2],
                            cells[5]});
  return results::render_csv(table);
}

}  // namespace

void add_verify_options(CLI::App* command, VerifyOptions& options) {
  command->add_option("FILE", options.file, "result file (HDF5), also of a run under way")->required();
  command->add_option("--experiment", options.experiment,
                      "the experiment's file here: relative paths start at its folder, and its text is compared");
  command->add_option("--paper", options.paper,
                      "PAPER/ITEM: the published values to set beside the file's, in place of its experiment's");
  command->add_option("--format", options.format, "table, md, csv or latex")->capture_default_str();
  command->add_option("--plugin-path", options.plugin_path, "folder or library of plugins, searched first; repeatable")
      ->allow_extra_args(false);
}

int verify(const VerifyOptions& options) {
  const results::Format format = results::parse_format(options.format);
  stop::watch();
  name_callback_at_end();
  if (results::is_profile(options.file))
    throw Error(Errc::result_file, "got a profile file, wanted a result file", options.file);
  const results::Summary summary = results::read_summary(options.file);
  const results::RunInfo& info = summary.info;
  if (std::any_of(summary.rows.begin(), summary.rows.end(),
                  [](const results::SummaryRow& row) { return row.labels.find("replayed") != std::string::npos; }))
    throw Error(Errc::config, "got the result of a replay, wanted that of a run: its prompts are in a recording",
                options.file);
  const yaml::Document document = recorded_experiment(info.experiment_yaml, place_of(options, info));
  std::vector<fs::path> places(options.plugin_path.begin(), options.plugin_path.end());
  for (const std::string& place : plugin_path_of(document)) places.emplace_back(place);
  Registry registry(places);
  const RegistryCatalog catalog(registry);
  const Experiment experiment = read_experiment(document, catalog);
  const std::vector<Published> values = published_of(
      options, options.experiment.empty() ? info.experiment_file : fs::absolute(options.experiment).string(),
      experiment);
  std::vector<Compared> lines{compare_text(document, !options.experiment.empty())};
  const std::vector<Compared> others = compare_with_tree(options.file, experiment, catalog);
  lines.insert(lines.end(), others.begin(), others.end());
  fmt::print("{}", table_of(lines, values, options.file + " against this tree", format));
  const auto differs = [](const Compared& line) { return line.counts && line.finding == Finding::differs; };
  return std::ranges::any_of(lines, differs) ? 1 : 0;
}

}  // namespace kvlab
