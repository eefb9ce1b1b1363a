// Promises of every profiler, whatever it measures.
#include <catch2/catch.hpp>
#include <fstream>

#include "experiment/experiment.hpp"
#include "result/profile_file.hpp"
#include "run/profile.hpp"
#include "support/contract.hpp"
#include "test/model/tiny_files.hpp"

using namespace kvlab;

namespace {

Profile profile(const std::string& profiler, const std::string& model, const std::string& text) {
  Registry registry(test::library_under_test());
  const RegistryCatalog catalog(registry);
  const test::TempDir folder;
  const std::string out = (folder / "p.h5").string();
  std::ofstream(folder / "e.yaml") << "model: {path: " << test::golden("tiny/" + model).string()
                                   << (test::on_cuda() ? ", dtype: bf16}\nbackend: cuda" : ", dtype: f32}")
                                   << "\ntasks: [text: {file: " << test::golden("text/english.txt").string() << ", "
                                   << text << "}]\nprofilers: [" << profiler << "]\npage_size: 8\noutput: " << out
                                   << "\n";
  REQUIRE(run_profile(load_experiment(folder / "e.yaml", {}, catalog), catalog, {"test", false, true}) == 0);
  return results::read_profile(out).profilers.at(0).profile;
}

bool same(const Profile& a, const Profile& b) {
  const auto bytes = [](const std::vector<float>& v) {
    return std::string(reinterpret_cast<const char*>(v.data()), v.size() * sizeof(float));
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](const auto& p, const auto& q) {
    return p.first == q.first && p.second.extent == q.second.extent && bytes(p.second.values) == bytes(q.second.values);
  });
}

}  // namespace

TEST_CASE("a profiler leaves the same arrays every time, whatever the GQA group and however short the text") {
  Registry registry(test::library_under_test());
  auto asked = registry.list(Role::profiler);
  std::erase_if(asked, [](const PluginInfo* p) { return !test::under_test(*p); });
  if (asked.empty()) test::skip("about profilers: the library has none");
  for (const PluginInfo* p : asked) {
    for (const std::string& model : test::group_models())
      for (const char* text : {"prefix: 150, forced: 20, samples: 2", "prefix: 1, forced: 1"}) {
        CAPTURE(p->name, model, text);
        INFO(
            "usual cause: an array's extent counts samples or steps that did not come, or its values are scratch "
            "memory "
            "that nobody wrote. A text of one token leaves arrays too.");
        const Profile once = profile(p->name, model, text);
        CHECK_FALSE(once.empty());
        for (const auto& [name, array] : once) {
          std::int64_t count = 1;
          for (const std::int64_t e : array.extent) count *= e;
          CHECK(count == static_cast<std::int64_t>(array.values.size()));
        }
        CHECK(same(profile(p->name, model, text), once));
      }
  }
}
