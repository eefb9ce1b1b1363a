// Hand vectors of FlexiCache's calibration, and profiles of two task sets.
#include <kvlab/statistics.hpp>

#include <catch2/catch.hpp>
#include <cmath>
#include <fstream>

#include "cases/paged_fixture.hpp"
#include "experiment/experiment.hpp"
#include "plugin/loader.hpp"
#include "plugin/parameters.hpp"
#include "result/profile_report.hpp"
#include "run/profile.hpp"
#include "test/model/tiny_files.hpp"
#include "votes.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

using Pages = std::vector<int>;

// Steps of a model with 2 layers and 2 KV heads over 16 pages of 4 tokens. Attention mass says which 4 pages are best.
class Steps {
 public:
  explicit Steps(std::map<std::string, ParamValue> params) : cache_({1, heads, 16, tokens_of_page, pages}) {
    params["by"] = std::string("mass");
    static Registry registry;
    const PluginInfo& info = registry.require(Role::profiler, "flexicache_heads");
    profiler_ = create<Profiler>(info, resolve(info, params));
    for (int head = 0; head < heads; ++head)
      for (int t = 0; t < tokens; ++t) cache_.append(0, head, std::vector<float>(16), std::vector<float>(16));
    shape_.layers = layers, shape_.query_heads = shape_.kv_heads = heads;
    shape_.head_dim = 16, shape_.page_size = tokens_of_page, shape_.max_slots = 1, shape_.max_tokens = tokens;
    profiler_->attach(shape_, workspace_);
  }

  // best: of layer 0, head 0, then head 1, then layer 1.
  void step(const std::vector<Pages>& best) {
    for (int layer = 0; layer < layers; ++layer) {
      std::vector<float> mass(heads * tokens);
      for (int head = 0; head < heads; ++head)
        for (const int page : best.at(static_cast<std::size_t>(layer * heads + head)))
          mass[static_cast<std::size_t>(head * tokens + page * tokens_of_page)] = 0.25f;
      LayerStep step;
      step.layer = layer;
      step.shape = &shape_;
      step.pages = cache_.view();
      step.mass = View<const float, 3>::dense(mass.data(), {1, heads, tokens});
      step.workspace = &workspace_;
      const std::int32_t slot = 0;
      step.slots = &slot;
      step.max_length = tokens, step.max_pages = pages;
      profiler_->observe(step, Stream::cpu());
    }
  }
  void release() { profiler_->release(0); }
  Profile profile() {
    Profile out;
    profiler_->finish(out);
    return out;
  }

 private:
  static constexpr int layers = 2, heads = 2, tokens_of_page = 4, pages = 16, tokens = pages * tokens_of_page;
  PagedFixture cache_;
  HeapWorkspace workspace_;
  Shape shape_;
  Instance<Profiler> profiler_;
};

const Pages first{0, 1, 2, 3}, three{0, 1, 2, 4}, two{0, 1, 4, 5}, one{0, 4, 5, 6}, none{4, 5, 6, 7};

}  // namespace

TEST_CASE("rank-change overlap of 4 pages of 16") {
  const auto rco = [](const std::vector<int>& now) {
    return above_chance(overlap(std::vector<int>{0, 1, 2, 3}, now) / 4., 4. / 16);
  };
  CHECK(rco(first) == 1);
  CHECK(rco(two) == Approx(1 / 3.));
  CHECK(rco(one) == 0);
  CHECK(rco(none) == 0);  // less than chance
}

TEST_CASE("each window votes for its bottom quartile, and the heads with most votes are unstable") {
  flexicache::Votes votes(4);
  votes.add({.9, .2, .6, .5});
  votes.add({.8, .3, .1, .5});
  votes.add({.9, .1, .4, .4});
  CHECK(votes.votes() == std::vector<int>{0, 2, 1, 0});
  CHECK(votes.windows() == 3);
  CHECK(votes.unstable(0.25) == std::vector<float>{0, 1, 0, 0});
  CHECK(votes.unstable(0.5) == std::vector<float>{0, 1, 1, 0});
  CHECK(votes.unstable(0.75) == std::vector<float>{1, 1, 1, 0});  // heads 0 and 3 have none: the first
  CHECK(votes.unstable(0) == std::vector<float>(4, 0));
  CHECK(votes.unstable(1) == std::vector<float>(4, 1));
  votes.add({.5, .5, .5, .5});
  CHECK(votes.votes() == std::vector<int>{1, 2, 1, 0});
}

TEST_CASE("windows follow each other, and their first step is what later ones are compared with") {
  Steps steps({{"top_pages", std::int64_t{4}}, {"window", std::int64_t{3}}});
  steps.step({first, first, first, first});
  steps.step({first, two, two, none});
  steps.step({first, one, first, two});
  // TS: 1, 1/6, 2/3, 1/6. The lower of two equal heads has the vote.
  CHECK(steps.profile().at("votes").values == std::vector<float>{0, 1, 0, 0});
  for (int window = 0; window < 2; ++window) {
    steps.step({first, none, none, none});
    steps.step({none, none, none, none});
    steps.step({three, none, none, none});
  }
  steps.step({first, first, first, first});
  steps.step({first, none, first, first});
  steps.release();  // this window has two steps of three
  steps.step({none, none, none, none});
  Profile p = steps.profile();
  CHECK(p.at("votes").values == std::vector<float>{2, 1, 0, 0});
  CHECK(p.at("windows").values == std::vector<float>{3});
  CHECK(p.at("unstable").values == std::vector<float>{1, 0, 0, 0});
  CHECK(p.at("unstable").extent == std::vector<std::int64_t>{2, 2});
  CHECK(p.at("rank_change_overlap").extent == std::vector<std::int64_t>{2, 2, 2});
  // RCO of 3 common pages: (3/4 - 1/4) / (3/4) = 2/3.
  const double stability[] = {(1 + 1 / 3. + 1 / 3.) / 3, (1 / 6. + 2) / 3, (2 / 3. + 2) / 3, (1 / 6. + 2) / 3};
  const double rco[] = {1 / 3., (1 + 4 / 3.) / 3, (1 / 3. + 2) / 3, 2 / 3., (1 / 3. + 2) / 3,
                        1,      2 / 3.,           (1 / 3. + 2) / 3};
  for (std::size_t i = 0; i < 4; ++i) CHECK(p.at("stability").values[i] == Approx(stability[i]));
  for (std::size_t i = 0; i < 8; ++i) CHECK(p.at("rank_change_overlap").values[i] == Approx(rco[i]));
}

TEST_CASE("where every page is a best page there is no window and no unstable set") {
  Steps steps({{"top_pages", std::int64_t{16}}, {"window", std::int64_t{2}}});
  for (int i = 0; i < 4; ++i) steps.step({first, two, one, none});
  const Profile p = steps.profile();
  CHECK(p.at("windows").values == std::vector<float>{0});
  CHECK(p.at("votes").values == std::vector<float>(4, 0));
  for (const float v : p.at("unstable").values) CHECK(std::isnan(v));
  for (const float v : p.at("stability").values) CHECK(std::isnan(v));
}

TEST_CASE("two task sets give two profiles of a bundled model, the same ones every time, and their overlap") {
  const test::TempDir folder;
  Registry registry;
  const RegistryCatalog catalog(registry);
  const auto profile = [&](const std::string& tasks, const std::string& name) {
    const std::string out = (folder / name).string();
    std::ofstream(folder / "e.yaml") << "model: bundled/recall\nbackend: cpu\ntasks: [" << tasks << "]\n"
                                     << "profilers: [flexicache_heads: {top_pages: 8, window: 8}]\noutput: " << out
                                     << "\n";
    REQUIRE(run_profile(load_experiment((folder / "e.yaml").string(), {}, catalog), catalog, {"test", false, true}) ==
            0);
    return results::read_profile(out).profilers.at(0).profile;
  };
  const Profile text = profile("text: {prefix: 300, forced: 40, samples: 2}", "text.h5");
  // Each sample feeds 40 tokens: 5 windows of 8.
  CHECK(text.at("windows").values == std::vector<float>{10});
  const auto& unstable = text.at("unstable");
  const auto heads = static_cast<double>(unstable.values.size());
  CHECK(std::count(unstable.values.begin(), unstable.values.end(), 1.f) == std::lround(heads / 4));
  double votes = 0;
  for (const float v : text.at("votes").values) votes += v;
  CHECK(votes == 10 * std::lround(heads / 4));
  const Profile again = profile("text: {prefix: 300, forced: 40, samples: 2}", "again.h5");
  for (const auto& [name, array] : text) CHECK(again.at(name).values == array.values);
  profile("ordered_list: {context: 1024, samples: 1}", "list.h5");
  const std::string matrix = results::head_overlap(
      {(folder / "text.h5").string(), (folder / "again.h5").string(), (folder / "list.h5").string()},
      results::Format::md);
  CHECK_THAT(matrix, Catch::Contains("### flexicache\\_heads unstable") && Catch::Contains(" | 1.00 | 1.00 |"));
}
