// The warnings of a cell. A result file keeps them in the column `warnings` of /summary, one per line.
#pragma once
#include <string>
#include <vector>

#include "result/results.hpp"

namespace kvlab::results {

// The column's text. Inside a warning, line ends become blanks and control characters are made visible.
std::string column_of(const std::vector<std::string>& warnings);

// The lines of the row's column, and never_acted where the column does not have it (files of earlier versions).
std::vector<std::string> warnings_of(const SummaryRow& row);

// The warning that a budget below the context changed nothing, or "". Such a row is the full cache under another name.
// full_bytes: K and V of the row's context in the full cache, for one sequence. Without it a budget in bytes is not
// judged. coded: a codec stores the pages, so that fewer bytes are no sign of the method.
std::string never_acted(const SummaryRow& row, double full_bytes = not_measured, bool coded = false);

}  // namespace kvlab::results
