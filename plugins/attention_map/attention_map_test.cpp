// A map of attention by hand.
#include <catch2/catch.hpp>
#include <cmath>

#include "cases/paged_fixture.hpp"
#include "plugin/loader.hpp"
#include "plugin/parameters.hpp"
#include "plugin/registry.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

// One KV head with two query heads; the cache has a token more in each step.
class Steps {
 public:
  Steps(std::int64_t every, std::int64_t rows, std::int64_t columns) : cache_({1, 1, 16, 4, 4}) {
    static Registry registry;
    const PluginInfo& info = registry.require(Role::profiler, "attention_map");
    profiler_ = create<Profiler>(info, resolve(info, {{"every", every}, {"rows", rows}, {"columns", columns}}));
    shape_.layers = shape_.max_slots = shape_.kv_heads = 1, shape_.query_heads = 2;
    shape_.head_dim = 16, shape_.page_size = 4, shape_.max_tokens = 16;
    profiler_->attach(shape_, workspace_);
  }
  void step(int number, const std::vector<float>& first, const std::vector<float>& second) {
    while (cache_.view().tokens(0, 0) < static_cast<int>(first.size()))
      cache_.append(0, 0, std::vector<float>(16), std::vector<float>(16));
    std::vector<float> mass = first;
    mass.insert(mass.end(), second.begin(), second.end());
    LayerStep step;
    step.shape = &shape_, step.pages = cache_.view(), step.workspace = &workspace_;
    step.mass = View<const float, 3>::dense(mass.data(), {1, 2, static_cast<std::int64_t>(first.size())});
    const std::int32_t slot = 0, at = number;
    step.slots = &slot, step.step = &at, step.max_length = static_cast<int>(first.size());
    profiler_->observe(step, Stream::cpu());
  }
  ProfileArray map() {
    Profile out;
    profiler_->finish(out);
    return out.at("attention_map");
  }

 private:
  Instance<Profiler> profiler_;
  Shape shape_;
  HeapWorkspace workspace_;
  PagedFixture cache_;
};

}  // namespace

TEST_CASE("attention_map: means of steps and sums of tokens, by hand") {
  Steps steps(2, 2, 3);
  steps.step(0, {0.5f, 0.25f, 0.25f}, {1, 0, 0});
  steps.step(1, {0.25f, 0.25f, 0.25f, 0.25f}, {0, 0, 0, 1});
  steps.step(2, {0, 0, 0, 0.5f, 0.5f}, {0, 0, 0, 0, 1});
  steps.step(4, {1, 0, 0, 0, 0, 0}, {1, 0, 0, 0, 0, 0});  // a row too many
  const ProfileArray map = steps.map();
  CHECK(map.extent == std::vector<std::int64_t>{1, 1, 2, 3});
  // Step 0: tokens 0 and 1 have (0.75 + 1) / 2, token 2 has 0.125. Step 1: 0.25, 0.75. The third column is not there
  // yet.
  CHECK(double{map.values[0]} == Approx((0.875 + 0.25) / 2));
  CHECK(double{map.values[1]} == Approx((0.125 + 0.75) / 2));
  CHECK(std::isnan(map.values[2]));
  CHECK(map.values[3] == 0);
  CHECK(map.values[4] == 0.25f);
  CHECK(map.values[5] == 0.75f);
}

TEST_CASE("attention_map: nothing was watched, and what it refuses") {
  for (const float v : Steps(16, 2, 2).map().values) CHECK(std::isnan(v));
  CHECK_THROWS_WITH(Steps(0, 2, 2), Catch::Contains("every"));
  CHECK_THROWS_WITH(Steps(1, 2000, 2), Catch::Contains("rows"));
}
