#include "gates.hpp"

#include <catch2/catch.hpp>
#include <cmath>
#include <fstream>

#include "cases/paged_fixture.hpp"
#include "plugin/loader.hpp"
#include "plugin/parameters.hpp"
#include "plugin/registry.hpp"
#include "test/model/tiny_files.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

constexpr int layers = 2, kv_heads = 2, query_heads = 4, tokens = 8;

Shape shape() {
  Shape s;
  s.layers = layers, s.query_heads = query_heads, s.kv_heads = kv_heads;
  s.head_dim = 16, s.page_size = 4, s.max_slots = 1, s.max_tokens = tokens;
  return s;
}

Instance<Profiler> profiler(const std::map<std::string, ParamValue>& params) {
  static Registry registry;
  const PluginInfo& info = registry.require(Role::profiler, "duo_attention_heads");
  return create<Profiler>(info, resolve(info, params));
}

std::string written(const test::TempDir& folder, const std::string& text) {
  const auto path = folder / "gates.tsv";
  std::ofstream(path) << text;
  return path.string();
}

}  // namespace

TEST_CASE("duo_attention_heads: attention beyond sinks and window, the greatest of the group, the mean of the steps") {
  const auto heads = profiler({{"sinks", std::int64_t{1}}, {"window", std::int64_t{3}}});
  const Shape s = shape();
  HeapWorkspace workspace;
  heads->attach(s, workspace);
  PagedFixture cache({1, kv_heads, 16, 4, 2});
  const auto step = [&](int length, int layer, const std::vector<std::vector<float>>& of_heads) {
    while (cache.view().tokens(0, 0) < length)
      for (int head = 0; head < kv_heads; ++head) cache.append(0, head, std::vector<float>(16), std::vector<float>(16));
    std::vector<float> mass;
    for (const auto& row : of_heads) {
      REQUIRE(static_cast<int>(row.size()) == length);
      mass.insert(mass.end(), row.begin(), row.end());
    }
    LayerStep now;
    now.layer = layer;
    now.shape = &s;
    now.pages = cache.view();
    now.mass = View<const float, 3>::dense(mass.data(), {1, query_heads, length});
    now.workspace = &workspace;
    now.max_length = length;
    heads->observe(now, Stream::cpu());
  };
  // Four tokens are sinks and window. The tokens 1 and 2 of six lie beyond.
  step(4, 0, {{.25f, .25f, .25f, .25f}, {1, 0, 0, 0}, {0, 1, 0, 0}, {0, 0, 1, 0}});
  step(6, 0, {{.5f, .25f, .125f, .125f, 0, 0}, {0, .5f, 0, 0, 0, .5f}, {1, 0, 0, 0, 0, 0}, {0, 0, 0, 1, 0, 0}});
  step(6, 0, {{0, 0, .75f, .25f, 0, 0}, {0, 0, 0, 0, 0, 1}, {.5f, 0, .25f, 0, 0, .25f}, {.5f, .5f, 0, 0, 0, 0}});
  Profile out;
  heads->finish(out);
  const ProfileArray& gate = out.at("gate");
  CHECK(gate.extent == std::vector<std::int64_t>{layers, kv_heads});
  CHECK(gate.values[0] == Approx((.5 + .75) / 2));
  CHECK(gate.values[1] == Approx((0 + .5) / 2));
  CHECK(std::isnan(gate.values[2]));
  CHECK_THAT(gate.unit, Catch::Contains("in place of a trained gate"));
}

TEST_CASE("duo_attention_heads: gates of a file") {
  const test::TempDir folder;
  const auto heads = profiler({{"gates", written(folder, "0.5\t1e-3\n\n1.25\t0\n")}});
  CHECK(heads->needs().mass() == Mass::none);
  HeapWorkspace workspace;
  heads->attach(shape(), workspace);
  Profile out;
  heads->finish(out);
  CHECK(out.at("gate").values == std::vector<float>{.5f, 1e-3f, 1, 0});
  CHECK_THAT(out.at("gate").unit, Catch::Contains("trained gate") && Catch::Contains("gates.tsv"));
}

TEST_CASE("duo_attention_heads: a file that is not of the model is refused, and the line is named") {
  const test::TempDir folder;
  const auto error = [&](const std::string& text) -> std::string {
    try {
      duo_attention::read_gates(written(folder, text), layers, kv_heads);
    } catch (const Error& e) {
      return e.what();
    }
    return "no error";
  };
  CHECK(error("1 0\n0 1\n") == "no error");
  CHECK_THAT(error("1 0\n0 1 1\n"), Catch::Contains("gates.tsv:2") && Catch::Contains("got 3 gates in layer 1"));
  CHECK_THAT(error("1 0\n0 1\n1 1\n"), Catch::Contains("gates.tsv:3") && Catch::Contains("the model's 2 layers"));
  CHECK_THAT(error("1 0\n"), Catch::Contains("got gates of 1 layers, wanted the model's 2"));
  CHECK_THAT(error("1 0\nx 1\n"), Catch::Contains("gates.tsv:2") && Catch::Contains("got 'x'"));
  CHECK_THAT(error("1 0\n0.5z 1\n"), Catch::Contains("got '0.5z'"));
  CHECK_THAT(error("1 nan\n0 1\n"), Catch::Contains("got 'nan'"));
  CHECK_THROWS_WITH(duo_attention::read_gates((folder / "none.tsv").string(), layers, kv_heads),
                    Catch::Contains("got no such file"));
}
