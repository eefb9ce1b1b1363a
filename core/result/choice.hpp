// `kvlab report --choose POLICY`: which of a policy's settings to take, such as leankv's thresholds for a model. Its
// paper sweeps them on texts that are not those of its tables, and takes the pair of the best answers.
#pragma once
#include <string>
#include <vector>

#include "result/compare_report.hpp"
#include "result/report_blocks.hpp"
#include "result/report_layout.hpp"

namespace kvlab::results {

// Adds a table for each model: the settings of the rows with this policy's name, without ablations, each with the mean
// of its scores over the tasks and its compression. A line below names the chosen one, as `--set` takes it: of the
// settings that lose at most `lose` against the best mean score, the one that holds the fewest bytes, then the first. A
// setting that has not finished in every task is not chosen; a warning says why. Errc::config if no row has the name,
// or if its tasks are texts, which have no score. Random weights have scores that say nothing, and no table.
void add_choices(const std::string& policy, double lose, const std::vector<Block>& blocks, const Samples& samples,
                 ReportPage& page);

}  // namespace kvlab::results
