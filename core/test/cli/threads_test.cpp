// How the program's threads wait for each other.
#include <catch2/catch.hpp>
#include <cstdlib>
#include <fstream>
#include <iterator>

#include "support/child.hpp"

using namespace kvlab;

TEST_CASE("kvlab's waiting threads spin briefly, unless the user says how") {
  const test::Folder folder;
  const std::string file = folder.write("e.yaml",
                                        "model: {path: bundled/recall}\n"
                                        "tasks: [niah: {context: 256, samples: 50, max_new_tokens: 8}]\n"
                                        "policies: [full]\nmetrics: [score]\nbackend: cpu\n");
  for (const bool chosen : {false, true}) {
    CAPTURE(chosen);
    test::Child child(test::kvlab_command({"run", file, "-o", folder / (chosen ? "a.h5" : "b.h5")}), [=] {
      unsetenv("OMP_WAIT_POLICY");
      unsetenv("GOMP_SPINCOUNT");
      if (chosen) setenv("OMP_WAIT_POLICY", "passive", 1);
    });
    std::string environment;
    const auto has = [&](const char* text) { return environment.find(text) != std::string::npos; };
    const bool found = child.reaches([&] {
      std::ifstream in("/proc/" + std::to_string(child.pid()) + "/environ", std::ios::binary);
      environment.assign(std::istreambuf_iterator<char>(in), {});
      return has(chosen ? "OMP_WAIT_POLICY=passive" : "GOMP_SPINCOUNT=10000");
    });
    child.kill(SIGKILL);
    INFO(child.said());
    CHECK(found);
    CHECK(!has(chosen ? "GOMP_SPINCOUNT" : "OMP_WAIT_POLICY"));
  }
}
