// Any bytes are an experiment file or give an Error. A zero byte ends the file; each further line is a --set option.
#include <kvlab/error.hpp>

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>

#include "experiment/experiment.hpp"
#include "test/experiment/fake_catalog.hpp"

using namespace kvlab;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const test::FakeCatalog catalog;
  const std::string all(reinterpret_cast<const char*>(data), size);
  const std::size_t end = all.find('\0');
  try {
    yaml::Document document = yaml::parse_text(all.substr(0, end), "fuzz.yaml");
    std::istringstream rest(end == std::string::npos ? "" : all.substr(end + 1));
    for (std::string line; std::getline(rest, line);) document.sets.push_back(line);
    const Experiment experiment = read_experiment(std::move(document), catalog);
    if (experiment.tasks.size() * experiment.policies.size() * experiment.seeds.size() <= 100)
      cell_table(experiment, cells(experiment, catalog, Fingerprints{}));
  } catch (const Error&) {
  }
  return 0;
}
