#include "run/policy_profile.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <kvlab/error.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>

#include "plugin/loader.hpp"
#include "plugin/parameters.hpp"
#include "result/profile_file.hpp"

namespace kvlab {
namespace {

void check_shape(const std::string& file, const std::string& name, const ProfileArray& array, const ModelConfig& c) {
  const auto& extent = array.extent;
  if (extent.size() < 2) return;
  if (extent[0] == c.layers && (extent[1] == c.kv_heads || extent[1] == c.heads)) return;
  throw Error(Errc::result_file,
              fmt::format("got array '{}' of {} numbers, wanted {} layers with {} KV heads or {} query heads", name,
                          fmt::join(extent, " x "), c.layers, c.kv_heads, c.heads),
              file);
}

// Files of earlier versions have a page size whatever their profilers read, so the profiler itself is asked.
bool by_pages(const results::ProfilerOutput& one, const PluginCatalog& catalog) try {
  const PluginInfo* plugin = catalog.find(Role::profiler, one.name);
  return !plugin || create<Profiler>(*plugin, resolve(*plugin, {}))->by_pages();
} catch (const Error&) {
  return true;
}

}  // namespace

Profile read_policy_profile(const std::string& file, const Model& model, int page_size, const PluginCatalog& catalog) {
  if (std::error_code error; !std::filesystem::exists(file, error))
    throw Error(
        Errc::io,
        fmt::format("got no such file, wanted a profile of '{}': `kvlab profile EXPERIMENT.yaml -o {}` writes it, "
                    "with the profiler that the policy's own file names",
                    model.name, file),
        file);
  const results::ProfileFile read = results::read_profile(file);
  if (read.model_fingerprint != model.fingerprint)
    throw Error(Errc::config,
                fmt::format("got a profile of model '{}' (contents {}), wanted one of '{}' (contents {})", read.model,
                            read.model_fingerprint, model.name, model.fingerprint),
                file);
  if (read.page_size > 0 && read.page_size != page_size)
    for (const results::ProfilerOutput& one : read.profilers)
      if (by_pages(one, catalog))
        throw Error(Errc::config,
                    fmt::format("got a profile of page_size {}, wanted one of page_size {}, the policy's: what '{}' "
                                "measures depends on it",
                                read.page_size, page_size, one.name),
                    file);
  Profile all;
  std::map<std::string, std::string> writers;
  for (const results::ProfilerOutput& one : read.profilers)
    for (const auto& [name, array] : one.profile) {
      check_shape(file, name, array, model.config);
      if (std::none_of(array.values.begin(), array.values.end(), [](float v) { return std::isfinite(v); })) continue;
      if (const auto [it, fresh] = writers.emplace(name, one.name); !fresh)
        throw Error(Errc::config,
                    fmt::format("got array '{}' of the profilers '{}' and '{}', wanted it once: profile them apart",
                                name, it->second, one.name),
                    file);
      all[name] = array;
    }
  return all;
}

}  // namespace kvlab
