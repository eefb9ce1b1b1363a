#include "result/profile_report.hpp"

#include <fmt/format.h>
#include <kvlab/error.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>

#include "base/text.hpp"
#include "result/report_layout.hpp"

namespace kvlab::results {
namespace {

void refuse_csv(Format format) {
  if (format == Format::csv)
    throw Error(Errc::config, "got format csv for a profile, wanted table, md or latex: its arrays are in the file");
}

// A word for a number between low and high.
const char* shade(double value, double low, double high) {
  static constexpr const char* shades[] = {"··", "░░", "▒▒", "▓▓", "██"};
  if (!std::isfinite(value)) return "  ";
  const double share = high > low ? (value - low) / (high - low) : 1;
  return shades[static_cast<int>(std::lround(share * 4))];
}

ReportTable map_table(const std::string& title, const ProfileArray& array, Format format) {
  const auto layers = static_cast<std::size_t>(array.extent[0]), heads = static_cast<std::size_t>(array.extent[1]);
  double low = std::numeric_limits<double>::infinity(), high = -low;
  for (const float v : array.values)
    if (std::isfinite(v)) low = std::min(low, double{v}), high = std::max(high, double{v});
  ReportTable table;
  table.title = title;
  table.header = {"layer"};
  if (format != Format::latex) table.header.emplace_back("heads"), table.text_columns = 2;
  for (std::size_t head = 0; head < heads; ++head) table.header.push_back(std::to_string(head));
  for (std::size_t layer = 0; layer < layers; ++layer) {
    const float* values = array.values.data() + layer * heads;
    std::vector<std::string> row{std::to_string(layer)};
    if (format != Format::latex) {
      std::string& map = row.emplace_back();
      for (std::size_t head = 0; head < heads; ++head) map += shade(values[head], low, high);
    }
    for (std::size_t head = 0; head < heads; ++head)
      row.push_back(std::isfinite(values[head]) ? fmt::format("{:.4g}", values[head]) : "-");
    table.rows.push_back(std::move(row));
  }
  return table;
}

const ProfileArray* find(const ProfileFile& profile, const std::string& profiler, const std::string& name) {
  for (const ProfilerOutput& one : profile.profilers)
    if (const auto it = one.profile.find(name); one.name == profiler && it != one.profile.end()) return &it->second;
  return nullptr;
}

bool is_set(const ProfileArray* array, const std::vector<std::int64_t>& extent) {
  return array && array->extent == extent && extent.size() > 1 &&
         std::all_of(array->values.begin(), array->values.end(), [](float v) { return v == 0 || v == 1; });
}

// |a and b| / |a|; NaN where a is empty.
double common_share(const ProfileArray& a, const ProfileArray& b) {
  double both = 0, all = 0;
  for (std::size_t i = 0; i < a.values.size(); ++i) both += a.values[i] * b.values[i], all += a.values[i];
  return all > 0 ? both / all : std::numeric_limits<double>::quiet_NaN();
}

std::string number(double value) { return std::isfinite(value) ? fmt::format("{:.2f}", value) : "-"; }

ReportTable overlap_table(const std::string& title, const std::vector<std::string>& names,
                          const std::vector<const ProfileArray*>& sets) {
  ReportTable table;
  table.title = title;
  table.header = {"heads of"};
  table.header.insert(table.header.end(), names.begin(), names.end());
  table.header.emplace_back("mean of the others");
  for (std::size_t a = 0; a < sets.size(); ++a) {
    std::vector<std::string> row{names[a]};
    double others = 0;
    for (std::size_t b = 0; b < sets.size(); ++b) {
      const double share = common_share(*sets[a], *sets[b]);
      row.push_back(number(share));
      if (b != a) others += share;
    }
    row.push_back(number(others / static_cast<double>(sets.size() - 1)));
    table.rows.push_back(std::move(row));
  }
  return table;
}

}  // namespace

std::string head_map(const ProfileFile& profile, const std::string& name, Format format) {
  refuse_csv(format);
  ReportPage page;
  page.head = profile.model;
  std::vector<std::string> known;
  for (const ProfilerOutput& one : profile.profilers)
    for (const auto& [array_name, array] : one.profile) {
      if (array.extent.size() != 2) continue;
      known.push_back(array_name);
      if (array_name == name)
        page.tables.push_back(map_table(one.name + " " + name + ": " + array.unit, array, format));
    }
  if (page.tables.empty())
    throw Error(Errc::config,
                "got array '" + name + "', wanted one of layers and heads: " + join(known) + did_you_mean(name, known));
  return render(page, format);
}

std::string head_overlap(const std::vector<std::string>& paths, Format format) {
  refuse_csv(format);
  std::vector<ProfileFile> files;
  std::vector<std::string> names;
  for (const std::string& path : paths) {
    files.push_back(read_profile(path));
    names.push_back(std::filesystem::path(path).stem().string());
    if (files.back().model_fingerprint != files.front().model_fingerprint)
      throw Error(Errc::config,
                  fmt::format("got a profile of '{}' (contents {}), wanted one of '{}' (contents {}) as in {}",
                              files.back().model, files.back().model_fingerprint, files.front().model,
                              files.front().model_fingerprint, paths.front()),
                  path);
  }
  ReportPage page;
  page.head = files.front().model;
  for (const ProfilerOutput& one : files.front().profilers)
    for (const auto& [name, array] : one.profile) {
      std::vector<const ProfileArray*> sets;
      for (const ProfileFile& file : files)
        if (const ProfileArray* set = find(file, one.name, name); is_set(set, array.extent)) sets.push_back(set);
      if (sets.size() == files.size())
        page.tables.push_back(
            overlap_table(one.name + " " + name + ": share that the column's file has too", names, sets));
    }
  if (page.tables.empty())
    throw Error(Errc::config, "got profiles without a common set of heads, wanted an array of zeros and ones in each",
                paths.front());
  return render(page, format);
}

}  // namespace kvlab::results
