// Skews by hand, and of a bundled model on real text.
#include "run/policy_profile.hpp"
#include "support/cell_fixture.hpp"
#include "support/on_text.hpp"
#include "support/recall_profile.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

// One layer, two query heads of one KV head, 4 elements.
struct Sample {
  explicit Sample(int most = 2048) {
    static Registry registry;
    const PluginInfo& info = registry.require(Role::profiler, "infinigen_skew");
    profiler = create<Profiler>(info, resolve(info, {{"queries", std::int64_t{most}}, {"partial_ratio", .25}}));
    shape.layers = shape.kv_heads = shape.max_slots = 1, shape.query_heads = 2, shape.head_dim = 4;
    profiler->attach(shape, workspace);
  }
  // queries: [query head][i][4]
  void prompt(const std::vector<float>& queries, bool last = true) {
    const auto count = static_cast<std::int64_t>(queries.size() / 8);
    LayerPrefill kv;
    kv.shape = &shape, kv.last = &last;
    kv.window_queries = View<const float, 4>::dense(queries.data(), {1, 2, count, 4});
    profiler->prefill(kv, Stream::cpu());
  }
  Profile profile() {
    Profile out;
    profiler->finish(out);
    return out;
  }
  Instance<Profiler> profiler;
  Shape shape;
  HeapWorkspace workspace;
};

}  // namespace

TEST_CASE("infinigen_skew by hand: the longest direction of all queries of a group") {
  Sample s;
  s.prompt({9, 9, 9, 9, 9, 9, 9, 9}, false);  // no end of a prompt
  s.prompt({3, 4, 0, 0, -6, -8, 0, 0});       // (3, 4) and (-6, -8)
  s.prompt({0, 0, 0, 0, 4, -3, 0, 0});        // at a right angle to them, a second prompt
  const Profile p = s.profile();
  const std::vector<float>& skew = p.at("skew").values;
  CHECK(p.at("skew").extent == std::vector<std::int64_t>{1, 1, 4, 4});
  CHECK(double{std::abs(skew[0])} == Approx(.6));
  CHECK(double{skew[1] / skew[0]} == Approx(4. / 3));
  CHECK(double{std::abs(skew[4])} == Approx(.8));
  CHECK(double{skew[5] / skew[4]} == Approx(-.75));
  CHECK(double{p.at("share_of_directions").values[0]} == Approx(125. / 150));
  CHECK(double{p.at("share_of_elements").values[0]} == Approx((16 + 64 + 9) / 150.));
}

TEST_CASE("infinigen_skew: no prompt, and what it refuses") {
  Sample s;
  const Profile nothing = s.profile();
  for (const float x : nothing.at("skew").values) CHECK(std::isnan(x));
  CHECK_THROWS_WITH(s.prompt({0, 0, 0, 0, 0, 0, INFINITY, 0}),
                    Catch::Contains("got inf in a query of layer 0, wanted finite numbers"));
  CHECK_THROWS_WITH(Sample(0), Catch::Contains("queries"));
}

TEST_CASE("infinigen_skew keeps products, and few channels hold more of a query") {
  const TempDir folder;
  const std::string file = (folder / "p.h5").string();
  const Profile profile = recall_profile("infinigen_skew", 300, 1, file);
  OnText run(Role::policy, "infinigen", {{"skew", false}}, 0, 700, 16);  // goes on behind the sample's text
  run.prefill(700);
  const ModelConfig& c = run.config();
  const auto dim = static_cast<std::size_t>(c.head_dim), few = dim / 5;
  const std::vector<float>& skew = profile.at("skew").values;
  REQUIRE(skew.size() == static_cast<std::size_t>(c.layers * c.kv_heads) * dim * dim);
  double plain = 0, skewed = 0;
  for (int layer = 0; layer < c.layers; ++layer)
    for (int head = 0; head < c.kv_heads; ++head) {
      CAPTURE(layer, head);
      const auto at = static_cast<std::size_t>(layer * c.kv_heads + head);
      const float* a = &skew[at * dim * dim];
      const auto turned = [&](const std::vector<double>& x) {
        std::vector<double> y;
        for (std::size_t i = 0; i < dim; ++i) {
          double sum = 0;
          for (std::size_t d = 0; d < dim; ++d) sum += x[d] * double{a[i * dim + d]};
          y.push_back(sum);
        }
        return y;
      };
      double off = 0;
      for (std::size_t i = 0; i < dim; ++i)
        for (std::size_t j = 0; j < dim; ++j) {
          double sum = 0;
          for (std::size_t d = 0; d < dim; ++d) sum += double{a[i * dim + d]} * double{a[j * dim + d]};
          off = std::max(off, std::abs(sum - (i == j ? 1 : 0)));
        }
      CHECK(off < 1e-5);  // each of the dim^2 numbers is rounded to f32
      CHECK(profile.at("share_of_directions").values[at] >= profile.at("share_of_elements").values[at] - 1e-6f);
      // Sums of squares, of text that the profiler has not seen.
      std::vector<double> of_elements(dim), of_channels(dim);
      for (std::size_t t = 300; t < 700; ++t)
        for (int g = head * run.group(); g < (head + 1) * run.group(); ++g) {
          const auto &q = run.layer(layer).queries.at[t][static_cast<std::size_t>(g)],
                     &k = run.layer(layer).keys.at[t / 2][static_cast<std::size_t>(head)];
          const std::vector<double> y = turned(q), x = turned(k);
          const double length = std::sqrt(dot(q, q) * dot(k, k));
          if (std::abs(dot(y, x) - dot(q, k)) > 1e-5 * length) FAIL_CHECK("the product changed");
          for (std::size_t d = 0; d < dim; ++d) of_elements[d] += q[d] * q[d], of_channels[d] += y[d] * y[d];
        }
      const auto share = [&](std::vector<double> x) {
        std::sort(x.rbegin(), x.rend());
        double all = 0, best = 0;
        for (std::size_t i = 0; i < dim; ++i) all += x[i], best += i < few ? x[i] : 0;
        return best / all / (c.layers * c.kv_heads);
      };
      plain += share(of_elements), skewed += share(of_channels);
    }
  CAPTURE(plain, skewed);
  CHECK(skewed > plain);
  CHECK(skewed > .5);

  CHECK_THROWS_WITH(
      read_policy_profile(file, *load_model(*open_checkpoint(golden("tiny/llama-gqa3")), DType::f32, "tiny"), 16,
                          built_catalog()),
      Catch::Contains("got a profile of model"));
}
