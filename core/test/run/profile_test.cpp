#include "run/profile.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <fstream>
#include <tuple>

#include <kvlab/build_id.hpp>

#include "base/content_hash.hpp"
#include "result/profile_report.hpp"
#include "support/golden.hpp"
#include "support/places.hpp"
#include "test/model/tiny_files.hpp"

using namespace kvlab;

namespace {

struct Run {
  test::TempDir folder;
  Registry registry;
  RegistryCatalog catalog{registry};

  Experiment experiment(const std::string& profilers, const std::string& task = "prefix: 150, forced: 40, samples: 2") {
    std::ofstream(folder / "e.yaml") << "model: {path: " << test::golden("tiny/llama-gqa3").string()
                                     << ", dtype: f32}\n"
                                     << "tasks: [text: {" << task << "}]\n"
                                     << "page_size: 8\noutput: " << (folder / "new" / "p.h5").string() << "\n"
                                     << profilers << "\n";
    return load_experiment(folder / "e.yaml", {}, catalog);
  }
  Profile profile(const std::string& params) {
    const Experiment e = experiment("profilers: [head_stats: " + params + "]");
    REQUIRE(run_profile(e, catalog, {"test", false, true}) == 0);
    const results::ProfileFile file = results::read_profile(folder / "new" / "p.h5");
    CHECK(file.model_fingerprint.size() == 16);
    CHECK(file.page_size == 8);
    REQUIRE(file.profilers.size() == 1);
    CHECK_THAT(results::profile_report(file, results::Format::table),
               Catch::Contains("overlap_4") && Catch::Contains("query_cosine"));
    REQUIRE(file.plugins.size() == 2);
    for (const auto& [i, role, name] : {std::tuple{0, "task", "text"}, {1, "profiler", "head_stats"}}) {
      const results::PluginRow& plugin = file.plugins[static_cast<std::size_t>(i)];
      CHECK(plugin.role == role);
      CHECK(plugin.name == name);
      CHECK(plugin.version == KVLAB_VERSION);
      CHECK(plugin.sha256 == content_hashes().sha256_of(test::plugin_folder() / ("lib" + plugin.name + ".so")));
    }
    return file.profilers[0].profile;
  }
};

}  // namespace

TEST_CASE("a profile names its page size only if a profiler of it goes by pages") {
  Run run;
  const auto page_size = [&](const std::string& profilers) {
    REQUIRE(run_profile(run.experiment("profilers: [" + profilers + "]"), run.catalog, {"test", false, true}) == 0);
    return results::read_profile(run.folder / "new" / "p.h5").page_size;
  };
  CHECK(page_size("attention_map") == 0);
  CHECK(page_size("attention_map, flexicache_heads: {top_pages: 4}") == 8);
}

TEST_CASE("head statistics of the tiny model are what their definitions allow") {
  Run run;
  const std::string by = GENERATE(as<std::string>{}, "mass", "bound");
  Profile p = run.profile("{top_pages: 6, apart: 4, by: " + by + "}");
  CHECK(p["overlap_1"].extent == std::vector<std::int64_t>{3, 2});
  CHECK(p["entropy"].extent == std::vector<std::int64_t>{3, 6});
  CHECK(p["similarity"].extent == std::vector<std::int64_t>{3, 2, 2});
  for (const auto& [name, array] : p)
    for (const float v : array.values) {
      CAPTURE(name, v);
      CHECK(v >= (name == "query_cosine" ? -1.f : 0.f));
      CHECK(v <= (name == "entropy" ? std::log(190.f) : 1.0001f));
    }
  for (std::size_t i = 0; i < p["rco_4"].values.size(); ++i) {
    CHECK(p["rco_4"].values[i] <= p["overlap_4"].values[i]);
    CHECK(p["top_mass_between"].values[i] <= p["top_mass"].values[i]);
    // Of at most 24 pages the 6 with the most mass hold at least 6/24 of it.
    if (by == "mass") CHECK(p["top_mass"].values[i] >= 6.f / 24);
  }
  for (std::size_t layer = 0; layer < 3; ++layer) {
    const float* s = p["similarity"].values.data() + layer * 4;
    CHECK(s[0] == 1);
    CHECK(s[3] == 1);
    CHECK(s[1] == s[2]);
  }
  for (std::size_t i = 0; i < p["query_cosine_low"].values.size(); ++i)
    CHECK(p["query_cosine_low"].values[i] <= p["query_cosine_high"].values[i]);
  CHECK(run.profile("{top_pages: 6, apart: 4, by: " + by + "}")["overlap_4"].values == p["overlap_4"].values);
}

TEST_CASE("where every page is a top page there is nothing to compare") {
  Run run;
  const Profile p = run.profile("{top_pages: 24, apart: 4}");
  for (const float v : p.at("overlap_1").values) CHECK(std::isnan(v));
  for (const float v : p.at("entropy").values) CHECK(v > 0);
}

TEST_CASE("profilers and policies exclude each other, and each has its command") {
  Run run;
  CHECK_THAT(test::message_of([&] { run.experiment("policies: [full]\nprofilers: [head_stats]"); }),
             Catch::Contains("policies beside profilers"));
  CHECK_THAT(test::message_of([&] { run.experiment("profilers: [head_stat]"); }),
             Catch::Contains("did you mean 'head_stats'"));
  CHECK_THAT(test::message_of([&] { run.experiment("profilers: []"); }), Catch::Contains("wanted a list"));
  const Experiment profilers = run.experiment("profilers: [head_stats]");
  CHECK_THAT(test::message_of([&] {
               run_experiment(profilers, run.catalog, {"test", false, true});
             }),
             Catch::Contains("kvlab profile"));
  const Experiment policies = run.experiment("policies: [full]");
  CHECK_THAT(test::message_of([&] {
               run_profile(policies, run.catalog, {"test", false, true});
             }),
             Catch::Contains("list profilers"));
  const Experiment twice = run.experiment("profilers: [head_stats, head_stats: {by: bound}]");
  CHECK_THAT(test::message_of([&] {
               run_profile(twice, run.catalog, {"test", false, true});
             }),
             Catch::Contains("'head_stats' twice"));
  CHECK_FALSE(std::filesystem::exists(run.folder / "new"));
}

TEST_CASE("a profile that could not be written is refused before any work") {
  Run run;
  Experiment e = run.experiment("profilers: [head_stats]");
  e.output = run.folder / "e.yaml";
  CHECK_THAT(test::message_of([&] {
               run_profile(e, run.catalog, {"test", false, true});
             }),
             Catch::Contains("no result of this kvlab"));
}
