// What a profiler leaves of the bundled model `recall`, on real text.
#pragma once
#include <catch2/catch.hpp>
#include <fstream>
#include <string>

#include "experiment/experiment.hpp"
#include "result/profile_file.hpp"
#include "run/profile.hpp"
#include "support/golden.hpp"
#include "test/model/tiny_files.hpp"

namespace kvlab::test {

// `file` becomes a profile file of one profiler. It sees samples of `tokens` tokens of the text.
inline Profile recall_profile(const std::string& profiler, int tokens, int samples, const std::string& file) {
  Registry registry;
  const RegistryCatalog catalog(registry);
  const TempDir folder;
  std::ofstream(folder / "e.yaml") << "model: {path: bundled/recall, dtype: f32}\nbackend: cpu\ntasks: [text: {file: "
                                   << golden("text/english.txt").string() << ", prefix: " << tokens
                                   << ", forced: 1, samples: " << samples << "}]\nprofilers: [" << profiler
                                   << "]\noutput: " << file << "\n";
  REQUIRE(run_profile(load_experiment((folder / "e.yaml").string(), {}, catalog), catalog, {"test", false, true}) == 0);
  return results::read_profile(file).profilers.at(0).profile;
}

}  // namespace kvlab::test
