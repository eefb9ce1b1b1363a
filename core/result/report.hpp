// A result file as a table for people: one block per model, task and context, a row per policy and budget.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "result/results.hpp"

namespace kvlab::results {

enum class Format { table, md, csv, latex };

Format parse_format(std::string_view word);  // Errc::config names the four words

struct ReportOptions {
  Format format = Format::table;
  std::vector<std::string> compare{};  // two rows' names (result/compare_report.hpp), in place of the tables
  bool colour = false;                 // for a terminal that takes it
  bool ladder = false;                 // ladders (result/ladder.hpp), in place of the tables
  std::string choose{};                // a policy whose settings stand in place of the tables (result/choice.hpp)
  double lose = 0;                     // see add_choices
};

// A row has the mean ± standard deviation of its n repeats and seeds; '-' = not measured. Under a table of scores
// stands another with the differences to what keeps everything, question by question. Footnotes explain labels and give
// the errors of failed and out-of-memory cells; warnings name policies that never acted. csv has one line per cell:
// every column, exact, then one column per policy parameter. Policies of several files get the file's name in front,
// "cpu:full" for cpu.h5, and rows of one model, task and context share a table.
std::string report(const std::vector<std::string>& paths, const ReportOptions& options);
std::string report(const std::string& path, Format format);
std::string report(const Summary& summary, Format format);  // without samples, so without differences

}  // namespace kvlab::results
