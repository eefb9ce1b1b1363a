// Tables of what kvlab is to reach on a GPU: files of analysis/targets, whose README describes them.
#pragma once
#include <cstdint>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "papers/beside.hpp"
#include "papers/paper.hpp"
#include "result/report_layout.hpp"

namespace kvlab::papers {

// One command whose result rows read: an experiment or profile, ops of `kvlab bench`, or the script of other libraries.
struct TargetRun {
  std::string name, where;                      // where: file and line
  std::string experiment;                       // a path from the folder that has analysis/; empty: none
  std::vector<std::string> sets, small_sets;    // key=value in place of the experiment's; and for the tiny model
  std::map<std::string, std::string> profiles;  // by a policy's name: the run that makes the profile it reads
  std::vector<std::string> bench;               // ops; empty: none
  std::vector<std::string> options;             // of `kvlab bench` on a GPU
  bool peers = false;
  double seconds = 0;  // about how long it takes on the table's GPU: an estimate, for planning
};

// One number of a run: of a cell, or of a line of `kvlab bench`.
struct TargetTerm {
  std::string run;
  Reading reading;                // of a cell
  std::string op, shape, kernel;  // of a line; op empty: of a cell. kernel empty: the only one
};

struct TargetRow {
  std::string name, title, as = "value", unit, why_not, where;
  TargetTerm of;
  std::optional<TargetTerm> against, without;
  std::optional<double> at_most, at_least;  // one of them, or why_not
};

// Attention of other libraries beside ours, without a target.
struct PeerTable {
  std::string title, ours, peers;  // names of the runs
  std::vector<std::pair<std::string, std::string>>
      shapes;  // as the script names them, and as `kvlab bench attend` does
};

struct TargetTable {
  std::string name, title, gpu;
  std::vector<std::pair<std::string, std::string>> setting;
  std::vector<std::string> notes;
  std::vector<std::string> small;  // key=value that makes every experiment a small one
  std::vector<TargetRun> runs;
  std::vector<TargetRow> rows;
  std::optional<PeerTable> beside;

  const TargetRun* run(const std::string& name) const;  // null: there is none
  // The runs that the named rows read, with the profiles that those need, in the file's order. None named: all.
  std::vector<const TargetRun*> runs_of(const std::vector<std::string>& rows) const;
};

// ExperimentError with every error found; Errc::io when the file cannot be read.
TargetTable read_targets(const std::filesystem::path& file);
std::vector<TargetTable> read_all_targets(const std::filesystem::path& folder);

// What runs left, by their names.
struct TargetResults {
  Ours ours;
  std::map<std::string, nlohmann::json> lines;  // `kvlab bench --json`; the script writes the same
  std::map<std::string, std::string> failed;    // how a run ended that left nothing, or not all
  std::string not_judged;                       // why no verdict is given; empty: they are
};

struct Measured {
  double value, of, against;  // not_measured where there is none
  std::string why;            // there is no value
};
Measured measure(const TargetRow& row, const TargetResults& results);
std::string verdict(const TargetRow& row, const Measured& measured, const TargetResults& results);

// Whether all results are of the table's GPU, as far as there are any.
bool on_its_gpu(const TargetTable& table, const TargetResults& results);

// One line of the run that a term reads, or null and why.
const nlohmann::json* line_of(const TargetTerm& term, const nlohmann::json& bench, std::string& why);

// only: names of rows; empty: all.
results::ReportPage target_page(const TargetTable& table, const TargetResults& results,
                                const std::set<std::string>& only);
std::string target_csv(const TargetTable& table, const TargetResults& results, const std::set<std::string>& only);

}  // namespace kvlab::papers
