// Promises of every profiler, whatever it measures.
#include <catch2/catch.hpp>

#include "support/contract.hpp"
#include "support/profiled.hpp"

using namespace kvlab;

namespace {

bool same(const Profile& a, const Profile& b) {
  const auto bytes = [](const std::vector<float>& v) {
    return std::string(reinterpret_cast<const char*>(v.data()), v.size() * sizeof(float));
  };
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](const auto& p, const auto& q) {
    return p.first == q.first && p.second.extent == q.second.extent && bytes(p.second.values) == bytes(q.second.values);
  });
}

}  // namespace

TEST_CASE("a profiler that does not go by pages leaves the same arrays for every page size", "[cpu]") {
  Registry registry(test::library_under_test());
  auto asked = registry.list(Role::profiler);
  std::erase_if(asked, [](const PluginInfo* p) {
    return !test::under_test(*p) || create<Profiler>(*p, resolve(*p, {}))->by_pages();
  });
  if (test::skip_on_cuda()) return;
  if (asked.empty()) test::skip("about profilers that do not go by pages: the library has none");
  for (const PluginInfo* p : asked) {
    CAPTURE(p->name);
    const auto of = [&](int page_size) {
      return test::profiled(p->name, "llama-gqa3", "prefix: 150, forced: 20, samples: 2", Device::cpu, page_size);
    };
    CHECK_CAUSE("it asks for page summaries or counts pages: leave by_pages() as it is", same(of(32), of(8)));
  }
}

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
        const Profile once = test::profiled(p->name, model, text, test::contract_device());
        CHECK_FALSE(once.empty());
        for (const auto& [name, array] : once) {
          std::int64_t count = 1;
          for (const std::int64_t e : array.extent) count *= e;
          CHECK(count == static_cast<std::int64_t>(array.values.size()));
          if (array.extent.size() < 2) continue;
          const ModelConfig& config = test::tiny_model(model)->config;
          CHECK_CAUSE("an array with two or more extents begins with [layer, KV head] or [layer, query head]",
                      (array.extent[0] == config.layers &&
                       (array.extent[1] == config.kv_heads || array.extent[1] == config.heads)));
        }
        CHECK(same(test::profiled(p->name, model, text, test::contract_device()), once));
      }
  }
}
