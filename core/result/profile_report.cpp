#include "result/profile_report.hpp"

#include <fmt/format.h>
#include <kvlab/error.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <limits>
#include <string_view>

#include "base/text.hpp"
#include "result/report_layout.hpp"

namespace kvlab::results {
namespace {

constexpr const char* shades[] = {"·", "░", "▒", "▓", "█"};
constexpr const char* mark = "*";
constexpr double longest_bar = 32;  // characters

void refuse_csv(Format format) {
  if (format == Format::csv)
    throw Error(Errc::config, "got format csv for a profile, wanted table, md or latex: its arrays are in the file");
}

// What the lightest and the darkest shade stand for.
struct Scale {
  double low, high;
  std::string text() const {
    return low <= high ? fmt::format("; {0}{0} {1:.4g} to {2}{2} {3:.4g}", shades[0], low, shades[4], high) : "";
  }
};

Scale scale_of(const ProfileArray& array) {
  Scale scale{std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()};
  for (const float v : array.values)
    if (std::isfinite(v)) scale = {std::min(scale.low, double{v}), std::max(scale.high, double{v})};
  return scale;
}

// Two characters. The second one is the mark of a marked head.
std::string shade(double value, const Scale& scale, bool marked = false) {
  const double share = scale.high > scale.low ? (value - scale.low) / (scale.high - scale.low) : 1;
  const std::string one = std::isfinite(value) ? shades[std::lround(share * 4)] : " ";
  return one + (marked ? mark : one);
}

std::string number(double value) { return std::isfinite(value) ? fmt::format("{:.4g}", value) : "-"; }
std::string share_text(double value) { return std::isfinite(value) ? fmt::format("{:.2f}", value) : "-"; }

// The classes that an array's unit names; none for an array of numbers.
std::vector<std::string> classes_of(const ProfileArray& array) {
  constexpr std::string_view before = ", one of ", between = ", ";
  std::vector<std::string> classes;
  std::size_t at = array.unit.rfind(before);
  if (at == std::string::npos || array.extent.size() != 2) return classes;
  for (at += before.size(); at <= array.unit.size();) {
    const std::size_t end = std::min(array.unit.find(between, at), array.unit.size());
    classes.push_back(array.unit.substr(at, end - at));
    at = end + between.size();
  }
  return classes;
}

bool is_set(const ProfileArray* array, const std::vector<std::int64_t>& extent) {
  return array && array->extent == extent && extent.size() > 1 && classes_of(*array).empty() &&
         std::all_of(array->values.begin(), array->values.end(), [](float v) { return v == 0 || v == 1; });
}

struct HeadSet {
  std::string name;
  const ProfileArray* array = nullptr;  // null: no set
  bool has(std::size_t head) const { return array->values[head] == 1; }
  bool marks(const ProfileArray& other) const {
    return array && array != &other && other.extent.size() > 1 && other.extent[0] == array->extent[0] &&
           other.extent[1] == array->extent[1];
  }
};

// A profiler's set of heads. Of several it is the first by name.
HeadSet set_of(const Profile& profile) {
  for (const auto& [name, array] : profile)
    if (array.extent.size() == 2 && is_set(&array, array.extent)) return {name, &array};
  return {};
}

ReportTable quantile_table(const ProfilerOutput& one) {
  ReportTable table;
  table.title = one.name + " " + one.params;
  table.header = {"array", "values", "min", "10%", "25%", "50%", "75%", "90%", "max"};
  for (const auto& [name, array] : one.profile) {
    std::vector<float> values = array.values;
    values.erase(std::remove_if(values.begin(), values.end(), [](float v) { return !std::isfinite(v); }), values.end());
    std::sort(values.begin(), values.end());
    std::vector<std::string> row{name, std::to_string(values.size())};
    for (const double q : {0., 0.1, 0.25, 0.5, 0.75, 0.9, 1.}) {
      if (values.empty()) {
        row.emplace_back("-");
        continue;
      }
      const double at = q * static_cast<double>(values.size() - 1);
      const auto low = static_cast<std::size_t>(at), high = std::min(low + 1, values.size() - 1);
      const double share = at - static_cast<double>(low);
      row.push_back(fmt::format("{:.3f}", values[low] * (1 - share) + values[high] * share));
    }
    table.rows.push_back(std::move(row));
  }
  return table;
}

ReportTable map_table(const std::string& title, const ProfileArray& array, const Scale& scale, const HeadSet& set,
                      Format format) {
  const auto layers = static_cast<std::size_t>(array.extent[0]), heads = static_cast<std::size_t>(array.extent[1]);
  ReportTable table;
  table.title = title;
  table.header = {"layer"};
  if (format != Format::latex) {
    table.title += scale.text();
    table.header.emplace_back("heads"), table.text_columns = 2;
  }
  if (set.marks(array)) table.title += fmt::format("; {} {}", mark, set.name);
  for (std::size_t head = 0; head < heads; ++head) table.header.push_back(std::to_string(head));
  for (std::size_t layer = 0; layer < layers; ++layer) {
    std::vector<std::string> row{std::to_string(layer)};
    std::string map;
    if (format != Format::latex) row.emplace_back();
    for (std::size_t at = layer * heads; at < (layer + 1) * heads; ++at) {
      const bool marked = set.marks(array) && set.has(at);
      map += shade(array.values[at], scale, marked);
      row.push_back((marked ? mark : "") + number(array.values[at]));
    }
    if (format != Format::latex) row[1] = map;
    table.rows.push_back(std::move(row));
  }
  return table;
}

// Each head as the first letter of its class, and the number of heads in each class.
ReportTable class_table(const std::string& title, const ProfileArray& array) {
  const std::vector<std::string> classes = classes_of(array);
  const auto heads = static_cast<std::size_t>(array.extent[1]);
  ReportTable table;
  table.title = title;
  table.header = {"layer", "heads"};
  table.header.insert(table.header.end(), classes.begin(), classes.end());
  table.text_columns = 2;
  std::vector<int> all(classes.size());
  const auto add_row = [&](const std::string& name, const std::string& map, const std::vector<int>& counts) {
    std::vector<std::string> row{name, map};
    for (const int count : counts) row.push_back(std::to_string(count));
    table.rows.push_back(std::move(row));
  };
  for (std::size_t first = 0; first < array.values.size(); first += heads) {
    std::string map;
    std::vector<int> counts(classes.size());
    for (std::size_t head = first; head < first + heads; ++head) {
      const float v = array.values[head];
      const bool known = v >= 0 && v < static_cast<float>(classes.size());
      map += known ? classes[static_cast<std::size_t>(v)].substr(0, 1) : "-";
      if (known) ++counts[static_cast<std::size_t>(v)], ++all[static_cast<std::size_t>(v)];
    }
    add_row(std::to_string(first / heads), map, counts);
  }
  add_row("all", "", all);
  return table;
}

std::string third_axis(const std::string& unit) {
  const std::size_t at = unit.rfind(", by ");
  return at == std::string::npos ? "entry" : unit.substr(at + 5);
}

// Whether the unit names an axis of entries that are no heads.
bool by_entry(const ProfileArray& array) { return array.unit.find(", by ") != std::string::npos; }

// The mean over the other heads and over those of the set, for each entry of an array [layer, head, entry]. Without a
// set all heads are others.
std::vector<std::array<double, 2>> means_by_entry(const ProfileArray& array, const HeadSet& set) {
  const auto entries = static_cast<std::size_t>(array.extent[2]);
  std::vector<std::array<double, 2>> means(entries);
  for (std::size_t entry = 0; entry < entries; ++entry) {
    double sum[2] = {}, count[2] = {};
    for (std::size_t head = 0; head < array.values.size() / entries; ++head)
      if (const float v = array.values[head * entries + entry]; std::isfinite(v)) {
        const bool in = set.array && set.has(head);
        sum[in] += v, ++count[in];
      }
    for (const std::size_t in : {0, 1})
      means[entry][in] = count[in] > 0 ? sum[in] / count[in] : std::numeric_limits<double>::quiet_NaN();
  }
  return means;
}

std::string bar(double value, double high) {
  std::string text;
  for (auto left = value > 0 ? std::lround(longest_bar * value / high) : 0; left > 0; --left) text += shades[4];
  return text.empty() ? text : text + " ";
}

// A bar for each layer of an array [layer].
ReportTable layer_table(const std::string& title, const ProfileArray& array, Format format) {
  double high = 0;
  for (const float v : array.values)
    if (double{v} > high) high = double{v};
  ReportTable table;
  table.title = title;
  table.header = {"layer", "value"};
  if (format != Format::latex) table.title += fmt::format("; bars from 0 to {:.4g}", high), table.text_columns = 2;
  for (std::size_t layer = 0; layer < array.values.size(); ++layer) {
    const double v = array.values[layer];
    table.rows.push_back({std::to_string(layer), (format != Format::latex ? bar(v, high) : "") + number(v)});
  }
  return table;
}

// An array [layer, head, row, column] of shares as a map, the mean over the heads; a character for each column.
ReportTable entry_map(const std::string& title, const ProfileArray& array) {
  constexpr double from[] = {0.001, 0.01, 0.05, 0.2};  // each shade but the lightest
  const auto rows = static_cast<std::size_t>(array.extent[2]), columns = static_cast<std::size_t>(array.extent[3]);
  ReportTable table;
  table.title = title + "; mean of heads;";
  for (std::size_t i = 0; i < std::size(from); ++i) table.title += fmt::format(" {} from {}", shades[i + 1], from[i]);
  table.header = {"row", "columns"};
  table.text_columns = 2;
  for (std::size_t row = 0; row < rows; ++row) {
    std::string line;
    bool any = false;
    for (std::size_t column = 0; column < columns; ++column) {
      double sum = 0, count = 0;
      for (std::size_t at = row * columns + column; at < array.values.size(); at += rows * columns)
        if (std::isfinite(array.values[at])) sum += double{array.values[at]}, ++count;
      any |= count > 0;
      line += count == 0 ? " " : shades[std::upper_bound(std::begin(from), std::end(from), sum / count) - from];
    }
    if (any) table.rows.push_back({std::to_string(row), line});
  }
  return table;
}

ReportTable curve_table(const std::string& title, const ProfileArray& array, const HeadSet& set, Format format) {
  const auto means = means_by_entry(array, set);
  double high = 0;
  for (const auto& both : means)
    for (const double mean : both)
      if (mean > high) high = mean;
  ReportTable table;
  table.title = title + "; mean of heads";
  if (format != Format::latex) {
    table.title += fmt::format("; bars from 0 to {:.4g}", high);
    table.text_columns = set.array ? 3 : 2;
  }
  table.header = {third_axis(array.unit)};
  if (set.array) table.header.push_back(set.name);
  table.header.emplace_back(set.array ? "other heads" : "all heads");
  for (std::size_t entry = 0; entry < means.size(); ++entry) {
    std::vector<std::string> row{std::to_string(entry + 1)};
    for (const bool in : {true, false})
      if (const double mean = means[entry][in]; set.array || !in)
        row.push_back((format != Format::latex ? bar(mean, high) : "") + number(mean));
    table.rows.push_back(std::move(row));
  }
  return table;
}

const ProfileArray* find(const ProfileFile& profile, const std::string& profiler, const std::string& name) {
  for (const ProfilerOutput& one : profile.profilers)
    if (const auto it = one.profile.find(name); one.name == profiler && it != one.profile.end()) return &it->second;
  return nullptr;
}

// The mean over the sets other than `own`.
template <class Get>
double mean_of_others(const std::vector<const ProfileArray*>& sets, std::size_t own, Get get) {
  double sum = 0;
  for (std::size_t i = 0; i < sets.size(); ++i)
    if (i != own) sum += get(*sets[i]);
  return sum / static_cast<double>(sets.size() - 1);
}

ReportTable overlap_table(const std::string& title, const std::vector<std::string>& names,
                          const std::vector<const ProfileArray*>& sets, Format format) {
  constexpr Scale shares{0, 1};
  ReportTable table;
  table.title = title + ": share of the row's heads that the column's file has too";
  table.header = {"heads of"};
  if (format != Format::latex) {
    table.title += shares.text();
    table.header.emplace_back("files"), table.text_columns = 2;
  }
  table.header.insert(table.header.end(), names.begin(), names.end());
  table.header.insert(table.header.end(), {"mean of the others", "by chance"});
  for (std::size_t a = 0; a < sets.size(); ++a) {
    std::vector<std::string> row{names[a]};
    std::string map;
    if (format != Format::latex) row.emplace_back();
    for (const ProfileArray* set : sets) {
      const double share = shared_heads(*sets[a], *set);
      map += shade(share, shares);
      row.push_back(share_text(share));
    }
    if (format != Format::latex) row[1] = map;
    row.push_back(
        share_text(mean_of_others(sets, a, [&](const ProfileArray& b) { return shared_heads(*sets[a], b); })));
    row.push_back(share_text(mean_of_others(sets, a, [](const ProfileArray& b) {
      const ProfileArray all{b.extent, std::vector<float>(b.values.size(), 1), {}};
      return shared_heads(all, b);
    })));
    table.rows.push_back(std::move(row));
  }
  return table;
}

ProfileArray files_of_heads(const std::vector<const ProfileArray*>& sets) {
  ProfileArray sum{sets.front()->extent, std::vector<float>(sets.front()->values.size()), {}};
  for (const ProfileArray* set : sets)
    for (std::size_t i = 0; i < sum.values.size(); ++i) sum.values[i] += set->values[i];
  return sum;
}

}  // namespace

double shared_heads(const ProfileArray& a, const ProfileArray& b) {
  double both = 0, all = 0;
  for (std::size_t i = 0; i < a.values.size(); ++i) both += a.values[i] * b.values[i], all += a.values[i];
  return all > 0 ? both / all : std::numeric_limits<double>::quiet_NaN();
}

std::string profile_report(const ProfileFile& profile, Format format) {
  refuse_csv(format);
  ReportPage page;
  page.origins = {profile.model};
  for (const ProfilerOutput& one : profile.profilers) {
    page.tables.push_back(quantile_table(one));
    const HeadSet set = set_of(one.profile);
    for (const auto& [name, array] : one.profile) {
      const std::string title = one.name + " " + name + ": " + array.unit;
      if (!classes_of(array).empty()) {
        page.tables.push_back(class_table(title, array));
        continue;
      }
      if (array.extent.size() == 1 && by_entry(array)) page.tables.push_back(layer_table(title, array, format));
      if (array.extent.size() == 4 && by_entry(array) && format != Format::latex)
        page.tables.push_back(entry_map(title, array));
      if (array.extent.size() == 3 && by_entry(array) && !set.array)
        page.tables.push_back(curve_table(title, array, set, format));
      if (!set.marks(array)) continue;
      if (array.extent.size() == 2) page.tables.push_back(map_table(title, array, scale_of(array), set, format));
      if (array.extent.size() == 3) page.tables.push_back(curve_table(title, array, set, format));
    }
  }
  return render(page, format);
}

std::string head_map(const ProfileFile& profile, const std::string& name, Format format) {
  refuse_csv(format);
  ReportPage page;
  page.origins = {profile.model};
  std::vector<std::string> known;
  for (const ProfilerOutput& one : profile.profilers)
    for (const auto& [array_name, array] : one.profile) {
      if (array.extent.size() != 2) continue;
      known.push_back(array_name);
      if (array_name != name) continue;
      const std::string title = one.name + " " + name + ": " + array.unit;
      page.tables.push_back(classes_of(array).empty()
                                ? map_table(title, array, scale_of(array), set_of(one.profile), format)
                                : class_table(title, array));
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
  page.origins = {files.front().model};
  for (const ProfilerOutput& one : files.front().profilers)
    for (const auto& [name, array] : one.profile) {
      std::vector<const ProfileArray*> sets;
      for (const ProfileFile& file : files)
        if (const ProfileArray* set = find(file, one.name, name); is_set(set, array.extent)) sets.push_back(set);
      if (sets.size() != files.size()) continue;
      const std::string title = one.name + " " + name;
      page.tables.push_back(overlap_table(title, names, sets, format));
      if (array.extent.size() == 2)
        page.tables.push_back(map_table(title + ": files that have the head", files_of_heads(sets),
                                        {0, static_cast<double>(sets.size())}, {}, format));
    }
  if (page.tables.empty())
    throw Error(Errc::config, "got profiles without a common set of heads, wanted an array of zeros and ones in each",
                paths.front());
  return render(page, format);
}

}  // namespace kvlab::results
