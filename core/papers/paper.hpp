// What papers publish: files of analysis/papers, whose README describes them.
#pragma once
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace kvlab::papers {

// Which cells of a result a published value belongs to, and what is read of them.
struct Reading {
  std::string policy, task, model, run;  // names, and the stem of an experiment's file; empty: there is only one
  std::optional<double> context, budget;
  std::string read = "score", as = "value", against = "full", unit;
  bool over_tasks = false;                       // the mean over tasks: of these groups, or all of the run's
  std::vector<std::vector<std::string>> groups;  // of task names; several: the mean of their means
  std::vector<std::string> pair;                 // of shared_heads: the stems of two profile experiments
  std::string array;                             // their set of heads; of array_...: what a profile holds
  std::vector<std::string> parts;                // of part_ms and part_share: the parts of a step
};

struct Published {
  double value = std::numeric_limits<double>::quiet_NaN();  // NaN: nobody printed it
  Reading reading;
};

struct PublishedRow {
  std::string name, missing;      // missing: why it cannot run here; empty: it can
  std::vector<Published> values;  // as many as there are columns
};

struct Item {
  std::string name, title, kind, where;  // "table2"; where: file and line
  std::vector<std::pair<std::string, std::string>> setting;
  std::vector<std::string> needs, run, small, notes;  // run, small: paths from the folder that has analysis/
  std::string why_not;                                // why there is no experiment
  std::vector<std::string> columns;
  std::vector<PublishedRow> rows;
};

struct Paper {
  std::string name, title, source;  // name: the file's stem
  std::vector<Item> items;
};

// ExperimentError with every error found; Errc::io when the file cannot be read.
Paper read_paper(const std::filesystem::path& file);
// All papers of the folder, by name. Errc::io when there is none.
std::vector<Paper> read_papers(const std::filesystem::path& folder);

// An item with its paper. It points into a list of papers.
struct Chosen {
  const Paper* paper;
  const Item* item;
  std::string name() const { return paper->name + "/" + item->name; }
};

// The item of a name such as "leankv/table1". Errc::config from `where` for any other name.
Chosen choose(const std::vector<Paper>& papers, const std::string& name, const char* where);
// The items that run the experiment of this file: its path ends with theirs, so the tree's place does not matter.
std::vector<Chosen> items_of(const std::vector<Paper>& papers, const std::string& experiment_file);

}  // namespace kvlab::papers
