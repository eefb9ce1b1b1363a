#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <kvlab/error.hpp>
#include <map>
#include <sstream>

#include "base/new_file.hpp"
#include "result/output.hpp"
#include "result/profile_file.hpp"
#include "run/profile.hpp"
#include "run/runner.hpp"
#include "support/full_disk.hpp"
#include "support/golden.hpp"
#include "support/temporary_folder.hpp"

using namespace kvlab;
namespace fs = std::filesystem;

namespace {

std::string bytes_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::ostringstream out;
  out << in.rdbuf();
  return out.str();
}

struct Outcome {
  int code = 0;
  std::string said;  // on stderr
};

struct Scene {
  test::TemporaryFolder folder;
  Registry registry;
  RegistryCatalog catalog{registry};
  std::string out = folder / "o.h5";

  Experiment experiment(const std::string& what) const {
    std::ofstream(folder / "e.yaml") << "model: {path: " << test::golden("tiny/llama-gqa3").string()
                                     << ", dtype: f32}\n"
                                     << "tasks: [text: {prefix: 40, forced: 8}]\n"
                                     << "output: " << out << "\n"
                                     << what << "\n";
    return load_experiment(folder / "e.yaml", {}, catalog);
  }
  const Experiment cells = experiment("policies: [full, window: {budget: {tokens: 24}}]\nmetrics: [score]");

  template <class Body>
  Outcome watched(Body body) const {
    const std::string log = folder / "stderr";
    std::fflush(stderr);
    const int before = dup(2), file = open(log.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
    dup2(file, 2);
    close(file);
    Outcome outcome;
    try {
      outcome.code = body();
    } catch (...) {
      std::fflush(stderr);
      dup2(before, 2);
      close(before);
      throw;
    }
    std::fflush(stderr);
    dup2(before, 2);
    close(before);
    outcome.said = bytes_of(log);
    return outcome;
  }
  Outcome run(bool fresh = false) const {
    return watched([&] { return run_experiment(cells, catalog, {"kvlab run test", fresh, true}); });
  }
  // [name] = bytes
  std::map<std::string, std::string> parts() const {
    std::map<std::string, std::string> found;
    for (const auto& entry : fs::directory_iterator(out + ".parts"))
      found[entry.path().filename().string()] = bytes_of(entry.path().string());
    return found;
  }
  bool tidy() const {
    for (const auto& entry : fs::recursive_directory_iterator(folder / ""))
      if (const auto e = entry.path().extension(); e == ".tmp" || e == ".lock") return false;
    return true;
  }
};

}  // namespace

TEST_CASE("a run on a full disk names what it could not write, returns 1, and goes on when there is room") {
  const Scene scene;
  {
    const test::FileSizeLimit limit(5000);  // room for the lock and the check of the folders
    const Outcome outcome = scene.run();
    CHECK(outcome.code == 1);
    CHECK_THAT(outcome.said, Catch::Contains("could not be written") && Catch::Contains("full") &&
                                 Catch::Contains("after 5000 of") && Catch::Contains("the same command goes on"));
  }
  CHECK(scene.parts().empty());
  CHECK_FALSE(fs::exists(scene.out));
  CHECK(scene.tidy());
  CHECK(scene.run().code == 0);
  const auto whole = scene.parts();
  REQUIRE(whole.size() == 2);

  // There is room for each part, but not for OUT, which holds both.
  fs::remove(scene.out);
  std::uint64_t largest = 0;
  for (const auto& [name, bytes] : whole) largest = std::max<std::uint64_t>(largest, bytes.size());
  {
    const test::FileSizeLimit limit(largest);
    const Outcome outcome = scene.run();
    CHECK(outcome.code == 1);
    CHECK_THAT(outcome.said,
               Catch::Contains("the result file could not be written: " + scene.out) && Catch::Contains("o.h5.parts"));
  }
  CHECK((scene.parts() == whole));
  CHECK_FALSE(fs::exists(scene.out));
  CHECK(scene.tidy());
  CHECK(results::read_summary(scene.out).rows.size() == 2);
  CHECK(scene.run().code == 0);
  CHECK((scene.parts() == whole));  // no cell ran again
  CHECK(fs::exists(scene.out));

  // The run finds it out before the first cell. It writes nothing and loses nothing.
  {
    const test::FileSizeLimit limit(100);
    CHECK_THROWS_WITH(scene.run(true), Catch::Contains("no file can be written"));
  }
  CHECK((scene.parts() == whole));
}

TEST_CASE("a profile on a full disk is an error of the run") {
  const Scene scene;
  const Experiment e = scene.experiment("profilers: [head_stats: {top_pages: 2, apart: 2}]");
  const auto profile = [&] { return run_profile(e, scene.catalog, {"kvlab profile test", false, true}); };
  {
    const test::FileSizeLimit limit(5000);
    const Outcome outcome = scene.watched(profile);
    CHECK(outcome.code == 1);
    CHECK_THAT(outcome.said, Catch::Contains("the profile could not be written") && Catch::Contains("after 5000 of"));
  }
  CHECK_FALSE(fs::exists(scene.out));
  CHECK(scene.tidy());
  CHECK(scene.watched(profile).code == 0);
  CHECK(results::is_profile(scene.out));
  CHECK(scene.tidy());
  CHECK_FALSE(fs::exists(scene.out + ".parts"));
  // A run does not replace it.
  const std::string before = bytes_of(scene.out);
  CHECK_THROWS_WITH(scene.run(), Catch::Contains("got a profile file"));
  CHECK((bytes_of(scene.out) == before));
}

TEST_CASE("a run does not replace a trace that it reads, its own file or its model") {
  const Scene scene;
  const std::string selects = "policies: [quest: {budget: {tokens: 24}}]\nmetrics: [score, trace]\npage_size: 8\n";
  const auto run = [&](const std::string& what, const std::string& output) {
    Experiment e = scene.experiment(what);
    e.output = output;
    return run_experiment(e, scene.catalog, {"test", false, true});
  };
  REQUIRE(run(selects, scene.out) == 0);
  const std::string before = bytes_of(scene.out), injected = selects + "inject: {trace: " + scene.out + "}";
  CHECK_THROWS_WITH(run(injected, scene.out), Catch::Contains("the run reads"));
  fs::create_symlink(scene.out, scene.folder / "link.h5");
  CHECK_THROWS_WITH(run(injected, scene.folder / "link.h5"), Catch::Contains("the run reads"));
  CHECK((bytes_of(scene.out) == before));
  CHECK(run(injected, scene.folder / "other.h5") == 0);
  const std::string yaml = scene.folder / "e.yaml";
  CHECK_THROWS_WITH(run(selects, yaml), Catch::Contains("would be overwritten"));
  for (const auto& entry : fs::directory_iterator(test::golden("tiny/llama-gqa3")))
    if (entry.is_regular_file())
      CHECK_THROWS_WITH(run(selects, entry.path().string()), Catch::Contains("would be overwritten"));
}

TEST_CASE("a second run into an output that is held is refused and changes nothing") {
  const Scene scene;
  REQUIRE(scene.run().code == 0);
  const auto parts = scene.parts();
  const std::string before = bytes_of(scene.out);
  const auto held = results::open_output(scene.out, "kvlab run first.yaml");
  const std::string wanted = "process " + std::to_string(getpid());
  CHECK_THROWS_WITH(scene.run(true), Catch::Contains(wanted) && Catch::Contains("kvlab run first.yaml") &&
                                         Catch::Contains("host " + host_name()));
  CHECK((scene.parts() == parts));
  CHECK((bytes_of(scene.out) == before));
}
