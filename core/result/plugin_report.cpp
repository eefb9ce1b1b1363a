#include "result/plugin_report.hpp"

#include <cstddef>
#include <map>
#include <vector>

#include "base/text.hpp"
#include "result/profile_file.hpp"
#include "result/report_layout.hpp"

namespace kvlab::results {
namespace {

std::vector<std::string> words_of(const PluginRow& p) { return {p.role, p.name, p.version, p.sha256}; }

std::string counted(std::size_t cells) { return std::to_string(cells) + (cells == 1 ? " cell" : " cells"); }

void fill(ReportPage& page, const ProfileFile& profile) {
  page.origins = {profile.model};
  ReportTable& table = page.tables.front();
  for (const PluginRow& plugin : profile.plugins) table.rows.push_back(words_of(plugin));
  if (profile.plugins.empty())
    page.warnings.emplace_back("the file does not name its plugins: an earlier kvlab wrote it");
}

void fill(ReportPage& page, const std::string& path) {
  const auto by_cell = read_plugins(path);
  page.origins = {counted(by_cell.size())};
  std::map<PluginRow, int> cells;
  std::size_t without = 0;
  for (const auto& [cell, plugins] : by_cell) {
    without += plugins.empty();
    for (const PluginRow& plugin : plugins) ++cells[plugin];
  }
  ReportTable& table = page.tables.front();
  table.header.emplace_back("cells");
  for (const auto& [plugin, count] : cells) {
    table.rows.push_back(words_of(plugin));
    table.rows.back().push_back(std::to_string(count));
  }
  if (without > 0)
    page.warnings.push_back("the file does not name the plugins of " + counted(without) +
                            ": an earlier kvlab ran them");
}

}  // namespace

std::string plugin_report(const std::string& path, Format format) {
  ReportPage page;
  ReportTable& table = page.tables.emplace_back();
  table.title = "plugins";
  table.header = {"role", "name", "version", "sha256"};
  table.text_columns = table.header.size();
  if (is_profile(path))
    fill(page, read_profile(path));
  else
    fill(page, path);
  if (format == Format::csv) return render_csv(table);
  for (auto& row : table.rows)
    for (std::string& word : row) word = word.empty() ? "-" : one_line(word);
  return render(page, format);
}

}  // namespace kvlab::results
