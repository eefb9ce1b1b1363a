// Profiles of the tiny golden models.
#pragma once
#include <catch2/catch.hpp>
#include <fstream>
#include <string>

#include "experiment/experiment.hpp"
#include "result/profile_file.hpp"
#include "run/profile.hpp"
#include "support/golden.hpp"
#include "support/library_under_test.hpp"
#include "test/model/tiny_files.hpp"

namespace kvlab::test {

// What a profiler, an entry of `profilers:`, leaves of a text. `text` has parameters of that task.
inline Profile profiled(const std::string& profiler, const std::string& model, const std::string& text, Device device,
                        int page_size = 8) {
  Registry registry(library_under_test());
  const RegistryCatalog catalog(registry);
  const TempDir folder;
  const std::string out = (folder / "p.h5").string();
  std::ofstream(folder / "e.yaml") << "model: {path: " << golden("tiny/" + model).string()
                                   << (device == Device::cuda ? ", dtype: bf16}\nbackend: cuda" : ", dtype: f32}")
                                   << "\ntasks: [text: {file: " << golden("text/english.txt").string() << ", " << text
                                   << "}]\nprofilers: [" << profiler << "]\npage_size: " << page_size
                                   << "\noutput: " << out << "\n";
  REQUIRE(run_profile(load_experiment(folder / "e.yaml", {}, catalog), catalog, {"test", false, true}) == 0);
  return results::read_profile(out).profilers.at(0).profile;
}

}  // namespace kvlab::test
