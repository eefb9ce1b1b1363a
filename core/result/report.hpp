// A result file as a table for people: one block per model, task and context, a row per policy and budget.
#pragma once
#include <string>
#include <string_view>

#include "result/results.hpp"

namespace kvlab::results {

enum class Format { table, md, csv, latex };

Format parse_format(std::string_view word);  // Errc::config names the four words

// A row has the mean ± standard deviation of its n repeats and seeds; '-' = not measured. Footnotes explain labels and
// give the errors of failed and out-of-memory cells; warnings name policies that never acted. csv has one line per
// cell: every column, exact, then one column per policy parameter.
std::string report(const Summary& summary, Format format);
std::string report(const std::string& path, Format format);  // read_summary, then the above

}  // namespace kvlab::results
