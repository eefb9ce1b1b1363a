// An engine beside busy processes.
#include <omp.h>

#include <catch2/catch.hpp>
#include <chrono>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <vector>

#include "base/cpu_use.hpp"
#include "base/threads.hpp"
#include "compose/compose.hpp"
#include "engine/engine.hpp"
#include "support/child.hpp"
#include "support/golden.hpp"

using namespace kvlab;

TEST_CASE("an engine's calls leave to busy processes the cores that they use") {
  // A quota below the affinity leaves cores idle that are not free to us.
  if (std::getenv("OMP_NUM_THREADS") || usable_cores() < 2 || usable_cores() < std::ssize(allowed_cpus())) return;
  const auto model = load_model(*open_checkpoint(test::golden("tiny/llama-gqa3")), DType::f32, "tiny");
  EngineOptions options;
  options.max_tokens = 512;
  std::vector<std::unique_ptr<test::Child>> busy;
  for (int i = 0; i < usable_cores(); ++i)
    busy.push_back(std::make_unique<test::Child>(std::vector<std::string>{"/bin/sh", "-c", "while :; do :; done"}));
  const int before = omp_get_max_threads();
  const auto seconds = [begin = std::chrono::steady_clock::now()] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  const int token = 5;
  for (const bool prompts : {true, false}) {
    CAPTURE(prompts);
    Engine engine(model, compose({}), options);
    int slot = engine.open(), calls = 0;
    use_threads(0);
    REQUIRE(omp_get_max_threads() == usable_cores());
    const double begin = seconds();
    while (omp_get_max_threads() == usable_cores() && seconds() < begin + 60) {
      if (++calls % 500 == 0) {
        engine.close(slot);
        slot = engine.open();
      }
      if (prompts)
        engine.prefill(slot, {&token, 1}, false, {});
      else
        engine.step({slot}, {&token, 1}, {});
    }
    CHECK(omp_get_max_threads() < usable_cores());
  }
  use_threads(before);
}
