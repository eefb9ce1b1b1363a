#include "result/profile_file.hpp"

#include <kvlab/error.hpp>

#include "result/cell_file.hpp"
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
    file.set_attribute(".", "page_size", profile.page_size);
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
  refuse_recording(file);
  if (!file.has("profilers"))
    throw Error(Errc::result_file, "got no profilers in it, wanted a file that `kvlab profile` wrote", path);
  ProfileFile out;
  out.model = file.text_attribute(".", "model");
  out.model_fingerprint = file.text_attribute(".", "model_fingerprint");
  if (file.has_attribute(".", "page_size")) out.page_size = file.integer_attribute(".", "page_size");
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

std::string experiment_of_profile(const std::string& path) {
  const auto lock = h5::lock();
  const h5::File file = open_sealed(path);
  try {
    return read_info(file).experiment_yaml;
  } catch (const Error& e) {
    if (e.code() != Errc::result_file) throw;
    return "";
  }
}

}  // namespace kvlab::results
