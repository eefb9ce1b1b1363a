// An experiment file as a command gets it, with the plugins that it names.
#pragma once
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "experiment/catalog.hpp"
#include "experiment/experiment.hpp"

namespace kvlab {

struct Loaded {
  // plugin_path: searched before the file's.
  Loaded(const std::string& file, const std::vector<std::string>& sets, const std::vector<std::string>& plugin_path) {
    std::vector<std::filesystem::path> places(plugin_path.begin(), plugin_path.end());
    for (const std::string& place : plugin_path_of(file, sets)) places.emplace_back(place);
    registry.emplace(places);
    catalog.emplace(*registry);
    experiment = load_experiment(file, sets, *catalog);
  }
  std::optional<Registry> registry;
  std::optional<RegistryCatalog> catalog;
  Experiment experiment;
};

}  // namespace kvlab
