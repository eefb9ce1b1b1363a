#include "cli/cli.hpp"

#include <sys/stat.h>

#include <catch2/catch.hpp>
#include <cstdlib>

#include "test/model/tiny_models.hpp"
#include "test/support/places.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

int exit_code_of(std::vector<std::string> words) {
  words.insert(words.begin(), "kvlab");
  std::vector<char*> arguments;
  for (std::string& w : words) arguments.push_back(w.data());
  return run_cli(static_cast<int>(arguments.size()), arguments.data());
}

int check(const TempDir& dir, const std::string& model) {
  const auto file = write_file(dir / "exp.yaml", "model: " + model +
                                                     "\ntasks: [niah: {context: 512}]\npolicies: [full]\n"
                                                     "backend: cpu\n");
  return exit_code_of({"check", file.string()});
}

}  // namespace

TEST_CASE("check of a model that is not there is not 0") {
  ::setenv("KVLAB_PLUGIN_PATH", plugin_folder().c_str(), 1);
  const TempDir dir;
  ::setenv("XDG_CACHE_HOME", dir.path().c_str(), 1);
  CHECK(check(dir, "bundled/smollm2") == 3);  // it can be fetched
  ::unsetenv("XDG_CACHE_HOME");
  CHECK(check(dir, "bundled/none") == 2);
  CHECK(check(dir, "none.gguf") == 2);
  CHECK(check(dir, std::string(5000, 'x')) == 2);
  CHECK(check(dir, "bundled/recall") == 0);
  REQUIRE(::mkfifo((dir / "fifo.gguf").c_str(), 0600) == 0);
  CHECK(check(dir, "fifo.gguf") == 2);
  CHECK(check(dir, "/dev/zero") == 2);
  ::unsetenv("KVLAB_PLUGIN_PATH");
}

TEST_CASE("check and run end with the same code where a file is not there: 2 for a path, 3 for what can be fetched") {
  ::setenv("KVLAB_PLUGIN_PATH", plugin_folder().c_str(), 1);
  const TempDir dir;
  ::setenv("XDG_CACHE_HOME", dir.path().c_str(), 1);
  const auto code = [&](const char* command, const std::string& model, const std::string& task,
                        const std::string& policy) {
    const auto file = write_file(dir / "exp.yaml", "model: " + model + "\ntasks: [" + task + "]\npolicies: [" + policy +
                                                       "]\nbackend: cpu\noutput: " + (dir / "out.h5").string() + "\n");
    return exit_code_of({command, file.string()});
  };
  const std::string recall = "bundled/recall", niah = "niah: {context: 256, samples: 1}",
                    profile = (dir / "none.h5").string();
  for (const char* command : {"check", "run"}) {
    CAPTURE(command);
    CHECK(code(command, "none.gguf", niah, "full") == 2);
    CHECK(code(command, "folder/none", niah, "full") == 2);
    CHECK(code(command, recall, "{name: own, task: jsonl, data: none.jsonl}", "full") == 2);
    CHECK(code(command, recall, niah, "heterocache: {budget: {ratio: 0.5}, profile: " + profile + "}") == 2);
    CHECK(code(command, "{path: bundled/recall, adapter: none}", niah, "full") == 2);
    CHECK(code(command, "bundled/smollm2", niah, "full") == 3);
  }
  CHECK_FALSE(std::filesystem::exists(dir / "out.h5"));
  ::unsetenv("XDG_CACHE_HOME");
  ::unsetenv("KVLAB_PLUGIN_PATH");
}

TEST_CASE("an experiment file that is none ends at once") {
  const TempDir dir;
  REQUIRE(::mkfifo((dir / "fifo.yaml").c_str(), 0600) == 0);
  for (const std::string& file :
       {(dir / "fifo.yaml").string(), dir.path().string(), std::string("/dev/zero"), (dir / "none.yaml").string()})
    for (const char* command : {"check", "run", "profile"}) CHECK(exit_code_of({command, file}) == 2);
}
