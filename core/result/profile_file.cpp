#include "result/profile_file.hpp"

#include <fmt/format.h>
#include <kvlab/error.hpp>

#include <algorithm>
#include <cmath>

#include "result/cell_file.hpp"
#include "result/report_layout.hpp"
#include "result/rows.hpp"
#include "result/sealed.hpp"

namespace kvlab::results {

void write_profile(const std::string& path, const RunInfo& info, const ProfileFile& profile) {
  const auto lock = h5::lock();
  write_sealed(path, [&](const h5::File& file) {
    write_info(file, info);
    file.set_attribute(".", "kind", "profile");
    file.set_attribute(".", "model", profile.model);
    file.set_attribute(".", "model_fingerprint", profile.model_fingerprint);
    if (!profile.plugins.empty()) file.write_table("plugins", columns_of(profile.plugins));
    for (const ProfilerOutput& one : profile.profilers) {
      const h5::Location group = file.create_group("profilers/" + one.name);
      group.set_attribute(".", "params", one.params);
      for (const auto& [name, array] : one.profile) group.write(name, array.values, array.extent, array.unit);
    }
  });
}

bool is_profile(const std::string& path) try {
  const auto lock = h5::lock();
  return open_sealed(path).has("profilers");
} catch (const Error&) {
  return false;
}

ProfileFile read_profile(const std::string& path) {
  const auto lock = h5::lock();
  const h5::File file = open_sealed(path);
  if (!file.has("profilers"))
    throw Error(Errc::result_file, "got no profilers in it, wanted a file that `kvlab profile` wrote", path);
  ProfileFile out;
  out.model = file.text_attribute(".", "model");
  out.model_fingerprint = file.text_attribute(".", "model_fingerprint");
  if (file.has("plugins")) out.plugins = read_rows<PluginRow>(file, "plugins");
  for (const std::string& name : file.children("profilers")) {
    const h5::Location group = file.group("profilers/" + name);
    ProfilerOutput one{name, group.text_attribute(".", "params"), {}};
    for (const std::string& array : group.children(".")) {
      ProfileArray& a = one.profile[array];
      a.values = group.read_f32(array, group.rank(array), &a.extent);
      a.unit = group.text_attribute(array, "units");
    }
    out.profilers.push_back(std::move(one));
  }
  return out;
}

std::string profile_table(const ProfileFile& profile, Format format) {
  if (format == Format::csv)
    throw Error(Errc::config, "got format csv for a profile, wanted table, md or latex: its arrays are in the file");
  ReportPage page;
  page.head = profile.model;
  for (const ProfilerOutput& one : profile.profilers) {
    ReportTable table;
    table.title = one.name + " " + one.params;
    table.header = {"array", "values", "min", "10%", "25%", "50%", "75%", "90%", "max"};
    for (const auto& [name, array] : one.profile) {
      std::vector<float> values = array.values;
      values.erase(std::remove_if(values.begin(), values.end(), [](float v) { return !std::isfinite(v); }),
                   values.end());
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
    page.tables.push_back(std::move(table));
  }
  return render(page, format);
}

}  // namespace kvlab::results
