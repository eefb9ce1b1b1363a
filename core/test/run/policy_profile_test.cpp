// Profile files that policies read: what reaches a plugin, and what is refused before any work.
#include "run/policy_profile.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <fstream>

#include "base/content_hash.hpp"
#include "model/bundled.hpp"
#include "result/profile_file.hpp"
#include "run/runner.hpp"
#include "support/golden.hpp"
#include "support/places.hpp"
#include "test/model/tiny_files.hpp"

using namespace kvlab;

namespace {

// bad_scorer reads a profile if `in` is load_profile. With the deed absent it asks for an array of that name.
const std::string reads = "bad_scorer: {budget: {tokens: 16}, in: load_profile";

struct Files {
  test::TempDir folder;
  Registry registry{{test::build_root() / "lib" / "bad_plugins" / "libmisbehaving.so",
                     test::plugin_folder() / "libheterocache_heads.so",
                     test::plugin_folder() / "libflexicache_heads.so"}};
  RegistryCatalog catalog{registry};
  results::ProfileFile profile;

  explicit Files(const std::string& of = "llama-gqa3") {
    profile.model = "tiny/" + of;
    profile.model_fingerprint = open_model(test::golden("tiny/" + of).string(), "", "")->fingerprint();
    profile.profilers = {
        {"counts", "{}", {{"votes", {{3, 2}, {1, 2, 3, 4, 5, 6}, "votes"}}, {"windows", {{1}, {9}, ""}}}}};
  }
  void write(const std::string& name = "p.h5") {
    results::RunInfo info;
    info.created_utc = "2026-01-01T00:00:00Z";
    results::write_profile((folder / name).string(), info, profile);
  }
  // Policies begin in line 3.
  Experiment experiment(const std::string& policies) {
    std::ofstream(folder / "e.yaml") << "model: {path: " << test::golden("tiny/llama-gqa3").string()
                                     << ", dtype: f32}\npolicies:\n"
                                     << policies
                                     << "\ntasks: [text: {prefix: 40, forced: 4, samples: 1}]\nmetrics: [score]\n"
                                     << "output: " << (folder / "r.h5").string() << "\n";
    return load_experiment((folder / "e.yaml").string(), {}, catalog);
  }
  std::string refusal(const std::string& policies) {
    return test::message_of([&] { check_experiment(experiment(policies), catalog); });
  }
};

}  // namespace

TEST_CASE("a policy runs with the profile of its model, and the result names the file") {
  Files f;
  f.write();
  f.profile.profilers[0].profile["votes"].values[0] = 7;
  f.write("q.h5");
  const Experiment e =
      f.experiment("  - " + reads + ", profile: [p.h5, q.h5]}\n  - full\nablate: {bad_scorer: [reads]}");
  CHECK_THAT(check_experiment(e, f.catalog).table, Catch::Contains("5 cells"));
  REQUIRE(run_experiment(e, f.catalog, {"test", false, true}) == 0);
  const auto summary = results::read_summary((f.folder / "r.h5").string());
  REQUIRE(summary.rows.size() == 5);
  std::map<std::string, int> files;
  for (const auto& row : summary.rows) {
    const auto cell = results::read_cell((f.folder / "r.h5").string(), row.cell);
    for (const results::PluginRow& p : cell.plugins)
      if (p.role == "profile") {
        ++files[p.name];
        CHECK(p.sha256 == content_hashes().sha256_of(f.folder / p.name));
        CHECK_THAT(row.params, Catch::Contains("\"profile\":\"" + p.name + "\""));
      }
  }
  CHECK(files == std::map<std::string, int>{{"p.h5", 2}, {"q.h5", 2}});  // each with and without the component
}

TEST_CASE("a profile that is missing, damaged or of another model is refused with the file and both names") {
  Files f;
  const std::string entry = "  - " + reads + ", profile: p.h5}", at = (f.folder / "e.yaml").string() + ":3:";
  const std::string file = (f.folder / "p.h5").string();
  CHECK_THAT(f.refusal(entry), Catch::StartsWith(at) &&
                                   Catch::Contains(file + ": got no such file, wanted a profile of") &&
                                   Catch::Contains("kvlab profile EXPERIMENT.yaml -o"));
  f.write();
  CHECK(f.refusal(entry) == "no error");
  std::filesystem::resize_file(file, std::filesystem::file_size(file) / 2);
  CHECK_THAT(f.refusal(entry), Catch::StartsWith(at) && Catch::Contains(file));
  std::ofstream(file) << "votes";
  CHECK_THAT(f.refusal(entry), Catch::StartsWith(at) && Catch::Contains(file));

  std::filesystem::remove(file);
  Files other("llama-mha");
  other.write();
  std::filesystem::copy_file(other.folder / "p.h5", file);
  CHECK_THAT(f.refusal(entry),
             Catch::StartsWith(at) && Catch::Contains(file) && Catch::Contains("profile of model 'tiny/llama-mha'") &&
                 Catch::Contains("wanted one of '" + test::golden("tiny/llama-gqa3").string()) &&
                 Catch::Contains(f.profile.model_fingerprint) && Catch::Contains(other.profile.model_fingerprint));
}

TEST_CASE("a profile of another page size is refused with the file and both numbers") {
  Files f;
  const auto refusal = [&](std::int64_t of_file, const std::string& entry) {
    std::filesystem::remove(f.folder / "p.h5");
    f.profile.page_size = of_file;
    f.write();
    return f.refusal("  - " + reads + ", profile: p.h5" + entry + "}");
  };
  CHECK(refusal(16, "") == "no error");  // an entry's default
  CHECK(refusal(32, ", page_size: 32") == "no error");
  CHECK(refusal(0, ", page_size: 32") == "no error");  // a file that does not say
  CHECK_THAT(refusal(16, ", page_size: 32"),
             Catch::StartsWith((f.folder / "e.yaml").string() + ":3:") &&
                 Catch::Contains((f.folder / "p.h5").string()) &&
                 Catch::Contains("got a profile of page_size 16, wanted one of page_size 32"));
  // Two entries of one file: each is held against its own pages.
  f.profile.page_size = 16;
  CHECK_THAT(f.refusal("  - " + reads +
                       ", profile: p.h5}\n  - {name: wide, scorer: bad_scorer, in: load_profile, "
                       "budget: {tokens: 32}, page_size: 32, profile: p.h5}"),
             Catch::StartsWith((f.folder / "e.yaml").string() + ":4:") && Catch::Contains("page_size 32"));
}

TEST_CASE("a profile with a page size is taken for every other one if its profilers do not go by pages") {
  Files f;
  const auto refusal = [&](const std::vector<std::string>& profilers) {
    std::filesystem::remove(f.folder / "p.h5");
    f.profile.page_size = 16;
    f.profile.profilers.resize(1);
    f.profile.profilers[0].name = profilers.front();
    for (std::size_t i = 1; i < profilers.size(); ++i)
      f.profile.profilers.push_back({profilers[i], "{}", {{"more", {{1}, {1}, ""}}}});
    f.write();
    return f.refusal("  - " + reads + ", profile: p.h5, page_size: 32}");
  };
  CHECK(refusal({"heterocache_heads"}) == "no error");
  for (const std::vector<std::string>& some :
       {std::vector<std::string>{"flexicache_heads"}, {"heterocache_heads", "flexicache_heads"}})
    CHECK_THAT(refusal(some), Catch::Contains("wanted one of page_size 32, the policy's: what 'flexicache_heads' "
                                              "measures depends on it"));
  CHECK_THAT(refusal({"heterocache_heads", "unknown"}), Catch::Contains("what 'unknown' measures depends on it"));
}

TEST_CASE("arrays that do not fit the model are refused by name, query heads fit too") {
  const auto refusal = [](std::vector<std::int64_t> extent) {
    Files f;
    std::size_t count = 1;
    for (const std::int64_t e : extent) count *= static_cast<std::size_t>(e);
    f.profile.profilers[0].profile["votes"] = {extent, std::vector<float>(count), ""};
    f.write();
    return f.refusal("  - " + reads + ", profile: p.h5}");
  };
  CHECK_THAT(refusal({4, 2}), Catch::Contains("'votes' of 4 x 2") && Catch::Contains("3 layers with 2 KV heads"));
  CHECK_THAT(refusal({3, 3}), Catch::Contains("'votes' of 3 x 3"));
  CHECK_THAT(refusal({3, 1, 2}), Catch::Contains("'votes' of 3 x 1 x 2"));
  CHECK(refusal({3, 6}) == "no error");
  CHECK(refusal({3, 2, 2}) == "no error");
  CHECK(refusal({5}) == "no error");
}

TEST_CASE("an array of two profilers, one that is not there and one without numbers are refused") {
  Files f;
  f.write();
  CHECK_THAT(f.refusal("  - " + reads + ", deed: absent, profile: p.h5}"),
             Catch::Contains(":3:") && Catch::Contains("bad_scorer") && Catch::Contains("measured votes, windows"));
  const auto with = [&](float first) {
    std::filesystem::remove(f.folder / "p.h5");
    f.profile.profilers[0].profile["absent"] = {{3, 2}, std::vector<float>(6, NAN), ""};
    f.profile.profilers[0].profile["absent"].values[0] = first;
    f.write();
    return f.refusal("  - " + reads + ", deed: absent, profile: p.h5}");
  };
  CHECK(with(0) == "no error");
  CHECK_THAT(with(NAN), Catch::Contains("measured votes, windows"));
  f.profile.profilers.push_back({"again", "{}", {{"votes", {{3, 2}, {1, 2, 3, 4, 5, 6}, "votes"}}}});
  std::filesystem::remove(f.folder / "p.h5");
  f.write();
  CHECK_THAT(f.refusal("  - " + reads + ", profile: p.h5}"),
             Catch::Contains("'votes'") && Catch::Contains("'counts'") && Catch::Contains("'again'"));
}

TEST_CASE("the key profile is refused where nothing reads it, and where it is missing") {
  Files f;
  f.write();
  const std::string at = (f.folder / "e.yaml").string() + ":3:";
  CHECK_THAT(f.refusal("  - " + reads + "}"),
             Catch::StartsWith(at) && Catch::Contains("got no profile for 'bad_scorer', wanted profile: FILE"));
  for (const char* entry : {"bad_scorer: {profile: p.h5, budget: {tokens: 16}}", "quest: {profile: p.h5}",
                            "full: {profile: p.h5}", "{name: x, policy: full, profile: p.h5}"})
    CHECK_THAT(f.refusal(std::string("  - ") + entry), Catch::StartsWith(at) && Catch::Contains("got a profile for '"));
  // A split reads one, too.
  const std::string split = "knorm: {budget: {tokens: 16, split: {bad_budget: {in: load_profile}}}";
  CHECK_THAT(f.refusal("  - " + split + "}"), Catch::StartsWith(at) && Catch::Contains("got no profile for 'knorm'"));
  CHECK(f.refusal("  - " + split + ", profile: p.h5}") == "no error");
  CHECK_THAT(f.refusal("  - knorm: {budget: {tokens: 16, split: bad_budget}, profile: p.h5}"),
             Catch::StartsWith(at) && Catch::Contains("got a profile for 'knorm', wanted none"));
  // A profile is an input, so the run may not write over it.
  Experiment e = f.experiment("  - " + reads + ", profile: p.h5}");
  e.output = f.folder / "p.h5";
  CHECK(test::message_of([&] { check_experiment(e, f.catalog); }) != "no error");
}
