#include "result/warnings.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/text.hpp"

namespace kvlab::results {

std::string column_of(const std::vector<std::string>& warnings) {
  std::vector<std::string> lines;
  for (std::string line : warnings) {
    std::replace(line.begin(), line.end(), '\n', ' ');
    lines.push_back(printable(line));
  }
  return join(lines, "\n");
}

std::vector<std::string> warnings_of(const SummaryRow& row) {
  std::vector<std::string> all;
  for (std::size_t at = 0; at < row.warnings.size();) {
    const std::size_t end = std::min(row.warnings.find('\n', at), row.warnings.size());
    if (end > at) all.push_back(row.warnings.substr(at, end - at));
    at = end + 1;
  }
  const std::string idle = never_acted(row);
  if (!idle.empty() && std::find(all.begin(), all.end(), idle) == all.end()) all.push_back(idle);
  return all;
}

std::string never_acted(const SummaryRow& row, double full_bytes, bool coded) {
  // Without a decode step only a scorer can act. by_age is -1 for other policies.
  const bool may_act = row.by_age >= 0 || row.output_tokens < 0 || row.output_tokens > row.samples;
  const bool in_bytes = row.budget_bytes >= 0 && std::isnan(row.budget_tokens);
  const bool binds = in_bytes
                         ? static_cast<double>(row.budget_bytes) < 0.95 * full_bytes
                         : row.budget_tokens >= 0 && row.budget_tokens < 0.95 * static_cast<double>(row.context_tokens);
  if (row.status != "ok" || !may_act || row.fired != 0 || !binds || (!coded && row.compression >= 1.05)) return "";
  const std::string budget = in_bytes ? fmt::format("{} of {:.0f} bytes", row.budget_bytes, full_bytes)
                                      : fmt::format("{:.4g} of {} tokens", row.budget_tokens, row.context_tokens);
  const std::string compression = std::isnan(row.compression) ? "-" : fmt::format("{:.4g}", row.compression);
  return fmt::format("{} never acted in {}, {}, context {}{}: fired 0, budget {}, compression {}", row.policy,
                     row.model, row.task, row.context_tokens, row.workload.empty() ? "" : ", " + row.workload, budget,
                     compression);
}

}  // namespace kvlab::results
