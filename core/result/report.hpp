// A result file as a table for people: one block per model, task and context, a row per policy and budget.
#pragma once
#include <string>
#include <string_view>

#include "result/results.hpp"

namespace kvlab::results {

enum class Format { table, md, csv, latex };

Format parse_format(std::string_view word);  // Errc::config names the four words

// Repeats and seeds of one row become mean ± standard deviation with n; csv has one line per cell with every column,
// exact, and behind them one column per policy parameter.
// '-' = not measured. Footnotes: labels, failed and out-of-memory cells with their error, policies that never acted.
std::string report(const Summary& summary, Format format);
std::string report(const std::string& path, Format format);  // read_summary, then the above

}  // namespace kvlab::results
