#include "result/memory_report.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "base/text.hpp"
#include "result/report_layout.hpp"

namespace kvlab::results {
namespace {

struct Sums {
  double held = 0, most = 0, unused = 0, moved = 0;
  bool knows_unused = true;
};

// Tier, codec and tag, in the order of the ledger's rows.
using Key = std::tuple<std::string, std::string, std::string>;

std::string text_of(double bytes, Format format) {
  return format == Format::csv ? fmt::format("{:.15g}", bytes) : fmt::format("{:.4g}", bytes / 1e6);
}

ReportTable table_of(const SummaryRow& cell, const std::vector<LedgerRow>& ledger, Format format) {
  std::vector<Key> keys;
  std::map<Key, std::map<std::int64_t, Sums>> by_step;  // two kinds of frames may have one codec
  std::int64_t steps = 0;
  for (const LedgerRow& row : ledger) {
    const Key key{row.tier, row.codec, row.tag};
    if (by_step.find(key) == by_step.end()) keys.push_back(key);
    Sums& of = by_step[key][row.engine_step];
    of.held += static_cast<double>(row.held), of.moved += static_cast<double>(row.moved);
    of.unused += static_cast<double>(row.unused), of.knows_unused = of.knows_unused && row.unused >= 0;
    steps = std::max(steps, row.engine_step + 1);
  }
  const bool csv = format == Format::csv;
  ReportTable table;
  table.title = one_line(cell.model + ", " + cell.task + ": " + cell.policy + " (cell " + cell.cell + ")");
  table.header = {"tier", "codec", "tag"};
  if (csv) table.header.insert(table.header.begin(), {"cell", "policy"});
  table.text_columns = table.header.size();
  for (const char* name : {"held", "most held", "without a token", "moved a step"})
    table.header.emplace_back(std::string(name) + (csv ? "" : ", MB"));
  for (const Key& key : keys) {
    Sums all;
    for (const auto& [step, of] : by_step[key]) {
      all.held += of.held, all.unused += of.unused, all.moved += of.moved;
      all.most = std::max(all.most, of.held), all.knows_unused = all.knows_unused && of.knows_unused;
    }
    const auto n = static_cast<double>(steps);
    const auto& [tier, codec, tag] = key;
    table.rows.push_back({tier, codec.empty() && !csv ? "-" : one_line(codec), tag, text_of(all.held / n, format),
                          text_of(all.most, format), all.knows_unused ? text_of(all.unused / n, format) : "-",
                          text_of(all.moved / n, format)});
    if (csv) table.rows.back().insert(table.rows.back().begin(), {cell.cell, cell.policy});
  }
  return table;
}

}  // namespace

std::string memory_report(const std::string& path, Format format) {
  const Summary summary = read_summary(path);
  const auto ledgers = read_ledgers(path);
  ReportPage page;
  page.origins = {"bytes by tier, codec and tag; means over engine steps"};
  page.warnings = summary.warnings;
  ReportTable rows;
  for (const SummaryRow& cell : summary.rows) {
    const auto found = ledgers.find(cell.cell);
    if (found == ledgers.end() || found->second.empty()) {
      page.warnings.push_back("cell " + cell.cell + " has no ledger");
      continue;
    }
    ReportTable table = table_of(cell, found->second, format);
    rows.header = table.header, rows.text_columns = table.text_columns;
    rows.rows.insert(rows.rows.end(), table.rows.begin(), table.rows.end());
    page.tables.push_back(std::move(table));
  }
  return format == Format::csv ? render_csv(rows) : render(page, format);
}

}  // namespace kvlab::results
