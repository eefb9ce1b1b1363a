// Hand vectors of HeteroCache's calibration, and profiles of a bundled model.
#include <catch2/catch.hpp>
#include <cmath>
#include <fstream>
#include <kvlab/error.hpp>

#include "cases/paged_fixture.hpp"
#include "experiment/experiment.hpp"
#include "plugin/loader.hpp"
#include "plugin/parameters.hpp"
#include "result/profile_report.hpp"
#include "run/profile.hpp"
#include "taxonomy.hpp"
#include "test/model/tiny_files.hpp"

using namespace kvlab;
using namespace kvlab::cases;
using heterocache::Tokens;

namespace {

using Edges = std::vector<std::vector<bool>>;
using ParamMap = std::map<std::string, ParamValue>;
using Floats = std::vector<float>;

const std::vector<bool> everyone(5, true);

Edges edges(const std::vector<std::pair<std::size_t, std::size_t>>& list) {
  Edges out(5, std::vector<bool>(5));
  for (const auto& [a, b] : list) out[a][b] = out[b][a] = true;
  return out;
}

Tokens top_of(const Floats& row, std::size_t k) { return heterocache::top(heterocache::pooled(row, 5), k); }

Instance<Profiler> profiler_with(const ParamMap& params) {
  static Registry registry;
  const PluginInfo& info = registry.require(Role::profiler, "heterocache_heads");
  return create<Profiler>(info, resolve(info, params));
}

// A model with one layer and 4 KV heads of 2 query heads. Attention of a head has one peak, and its best 5 of 16 tokens
// are those around the peak.
class Steps {
 public:
  explicit Steps(ParamMap params) {
    params.emplace("k", std::int64_t{5});
    profiler_ = profiler_with(params);
    shape_.layers = 1, shape_.query_heads = 2 * heads, shape_.kv_heads = heads;
    shape_.head_dim = prompt, shape_.page_size = 4, shape_.max_slots = 1, shape_.max_tokens = 64;
    profiler_->attach(shape_, workspace_);
  }

  // Key t is 4 e_t, so component t of a query is the logit of token t.
  void begin(const std::vector<int>& peaks) {
    cache_ = std::make_unique<PagedFixture>(PagedOptions{1, heads, prompt, 4, 16});
    for (int head = 0; head < heads; ++head)
      for (int t = 0; t < prompt; ++t) {
        Floats key(prompt);
        key[static_cast<std::size_t>(t)] = 4;
        cache_->append(0, head, key, Floats(prompt));
      }
    tokens_ = prompt, step_ = 0;
    Floats query(std::size_t{2} * heads * prompt);
    for (std::size_t q = 0; q < 2 * heads; ++q) query[q * prompt + static_cast<std::size_t>(peaks.at(q / 2))] = 6;
    LayerPrefill layer;
    fill(layer);
    const bool last[] = {false, true};
    layer.last = &last[0];
    profiler_->prefill(layer, Stream::cpu());  // a chunk before the last one has no window
    layer.last = &last[1];
    layer.window_queries = View<const float, 4>::dense(query.data(), {1, 2 * heads, 1, prompt});
    profiler_->prefill(layer, Stream::cpu());
  }

  // The second query head looks at the new token alone, which is no token of the prompt.
  void step(const std::vector<int>& peaks) {
    for (int head = 0; head < heads; ++head) cache_->append(0, head, Floats(prompt), Floats(prompt));
    const auto tokens = static_cast<std::size_t>(++tokens_);
    Floats mass(2 * heads * tokens, 0.001f);
    for (std::size_t q = 0; q < 2 * heads; ++q)
      mass[q * tokens + (q % 2 ? tokens - 1 : static_cast<std::size_t>(peaks.at(q / 2)))] = 0.5f;
    LayerStep layer;
    fill(layer);
    layer.mass = View<const float, 3>::dense(mass.data(), {1, 2 * heads, tokens_});
    layer.step = &step_;
    profiler_->observe(layer, Stream::cpu());
    ++step_;
  }
  void release() { profiler_->release(0); }
  Profile profile() {
    Profile out;
    profiler_->finish(out);
    return out;
  }

 private:
  void fill(LayerKv& layer) {
    static constexpr std::int32_t slot = 0;
    pages_ = cache_->view();
    layer.shape = &shape_;
    layer.pages = pages_;
    layer.keys = {&pages_, KvSide::key};
    layer.workspace = &workspace_;
    layer.slots = &slot;
    layer.position = &tokens_;
    layer.max_length = tokens_;
  }

  static constexpr int heads = 4, prompt = 16;
  std::unique_ptr<PagedFixture> cache_;
  PagedKv pages_;
  HeapWorkspace workspace_;
  Shape shape_;
  std::int32_t tokens_ = 0, step_ = 0;
  Instance<Profiler> profiler_;
};

// O with the prompt: 1 1 1; .8 1 0; .8 1 1; 0 0 1. O of heads, by steps: 01 .8 1 0; 02 .6 .8 .8; 12 .8 .8 .2;
// 03 .6 .8 0; 13 .4 .8 .6; 23 .2 .6 0. At the prompt's end 01 has 1, 02 and 12 have .8, the others 0.
Profile three_steps(const ParamMap& params) {
  Steps steps(params);
  steps.begin({4, 4, 5, 11});
  steps.step({4, 5, 6, 2});
  steps.step({4, 4, 5, 3});
  steps.step({4, 9, 5, 11});
  return steps.profile();
}

const Floats& of(const Profile& p, const char* name) { return p.at(name).values; }

void check_near(const Floats& got, const std::vector<double>& wanted) {
  REQUIRE(got.size() == wanted.size());
  for (std::size_t i = 0; i < got.size(); ++i) CHECK(double{got[i]} == Approx(wanted[i]));
}

bool all_nan(const Floats& values) {
  return std::all_of(values.begin(), values.end(), [](float v) { return std::isnan(v); });
}

std::string refusal(const ParamMap& params) {
  return test::message_of([&] { profiler_with(params); });
}

}  // namespace

TEST_CASE("pooling averages 5 neighbours, or another odd number, and counts zeros beyond the ends") {
  check_near(heterocache::pooled(Floats{1, 2, 3, 4, 5, 6}, 5), {1.2, 2, 3, 4, 3.6, 3});
  check_near(heterocache::pooled(Floats{5}, 5), {1});
  check_near(heterocache::pooled(Floats{1, 2, 3}, 5), {1.2, 1.2, 1.2});  // shorter than the window
  CHECK(heterocache::pooled({}, 5).empty());
  check_near(heterocache::pooled(Floats{1, 2, 3, 4, 5, 6}, 3), {1, 2, 3, 4, 5, 11 / 3.});
  CHECK(heterocache::pooled(Floats{1, 2, 3}, 1) == Floats{1, 2, 3});
}

TEST_CASE("the top set has the highest pooled scores, and ties go to the lower position") {
  CHECK(top_of({1, 2, 3, 4, 5, 6}, 2) == Tokens{3, 4});
  CHECK(top_of({0, 0, 9, 0, 0, 0, 0, 8, 0, 0}, 5) == Tokens{0, 1, 2, 3, 4});
  CHECK(top_of(Floats(8, 0.125f), 3) == Tokens{2, 3, 4});  // of a constant row the ends are lowest
  CHECK(top_of(Floats(8, 0.125f), 5) == Tokens{1, 2, 3, 4, 5});
  CHECK(top_of(Floats(8, 0.f), 3) == Tokens{0, 1, 2});
  CHECK(top_of({1, 2, 3}, 1) == Tokens{0});
  CHECK(top_of({1, 2, 3}, 7) == Tokens{0, 1, 2});  // k is all of a shorter prompt
  CHECK(top_of({1, 1, 1, NAN, 0, 0, 0, 0}, 2) == Tokens{0, 6});
  CHECK(heterocache::overlap({1, 2, 3, 4}, {3, 4, 9, 12}) == 0.5);
  CHECK(heterocache::overlap({1, 2, 3, 4}, {4, 9}) == 0.5);  // of the smaller set
  CHECK(heterocache::overlap({1}, {2}) == 0);
}

TEST_CASE("steps become one number by their median or mean") {
  CHECK(heterocache::joined({.5f, .25f, 1}, false) == .5f);
  CHECK(heterocache::joined({.75f, .25f, 1, .5f}, false) == .625f);
  CHECK(heterocache::joined({.75f, .25f, 1, NAN}, true) == Approx(2 / 3.));
  CHECK(std::isnan(heterocache::joined({NAN}, false)));
}

TEST_CASE("the head with most free neighbours is the pivot of a star") {
  const Edges star = edges({{0, 1}, {0, 2}, {0, 3}, {3, 4}});
  CHECK(heterocache::star_clusters(star, everyone, false) == std::vector<int>{0, 0, 0, 0, -1});
  CHECK(heterocache::star_clusters(star, everyone, true) == std::vector<int>{0, 0, 0, 0, 4});
  // Without head 0, the pair 3-4 is left; the lower head is its pivot.
  CHECK(heterocache::star_clusters(star, {false, true, true, true, true}, true) == std::vector<int>{-1, 1, 2, 3, 3});
  CHECK(heterocache::star_clusters(edges({{0, 4}, {1, 2}, {1, 3}}), everyone, false) ==
        std::vector<int>{0, 1, 1, 1, 0});
  CHECK(heterocache::star_clusters(edges({}), everyone, false) == std::vector<int>(5, -1));
}

TEST_CASE("compressed heads divide the budget by inverse stability") {
  // N = 8, two full heads, ratio 0.5: 6 heads share 2 prompts. L_base is cut to 333 of 1000 tokens.
  const std::vector<double> stability{.9, .8, .6, .5, .5, .4};
  std::vector<double> weights;
  for (const double s : stability) weights.push_back(1 / s);
  std::vector<int> tokens;
  for (const double share : heterocache::divided(weights, 6 * .333)) tokens.push_back(static_cast<int>(1000 * share));
  CHECK(tokens == std::vector<int>{210, 237, 316, 379, 379, 474});

  const Floats role{0, 3, 3, 2, 0, 3, 1, 3}, stable{.9f, .8f, .6f, 1, .5f, .5f, .1f, .4f};
  const Floats share = heterocache::shares(role, stable, .05, .5);
  const double unit = 2 / (1 / .9 + 1 / .8 + 1 / .6 + 2 + 2 + 2.5);
  check_near(share, {unit / .9, unit / .8, unit / .6, 1, unit * 2, unit * 2, 1, unit * 2.5});
  // Two of 8 heads are full, so 0.25 of the cache is theirs, and nothing is left for the others.
  for (const double ratio : {.1, .25}) {
    const Floats none = heterocache::shares(role, stable, .05, ratio);
    CHECK((none[3] == 1 && none[6] == 1 && std::isnan(none[0]) && std::isnan(none[7])));
  }
  Floats few(100, heterocache::anchor);
  std::fill_n(few.begin(), 7, heterocache::pivot);  // 0.07 * 100 is a little more than 7
  CHECK(std::isnan(heterocache::shares(few, Floats(100, 1), .05, .07)[99]));
  check_near(heterocache::shares(role, stable, .05, 1), std::vector<double>(8, 1));
  check_near(heterocache::shares({1, 2}, {0, 0}, .05, .5), {1, 1});  // no head is compressed
}

TEST_CASE("no head gets more than its tokens, and the others take the excess") {
  CHECK(heterocache::divided({20, 1, 1}, 2) == std::vector<double>{1, .5, .5});
  CHECK(heterocache::divided({1, 3, 12, 20}, 3) == std::vector<double>{.25, .75, 1, 1});
  CHECK(heterocache::divided({1, 2}, 2) == std::vector<double>{1, 1});
  CHECK(heterocache::divided({}, 0).empty());
  // Stability 0 counts as 0.05.
  check_near(heterocache::shares({0, 0, 0, 0}, {0, 1, 1, 1}, .05, .5), {1, 1 / 3., 1 / 3., 1 / 3.});
}

TEST_CASE("medians of steps, the mean graph and clusters of similar heads are the paper's setting") {
  const Profile p = three_steps({});
  check_near(of(p, "stable"), {1, .8, 1, 0});
  check_near(of(p, "similar"), {.8, .8, .8, .6});
  CHECK(of(p, "role") == Floats{3, 2, 3, 3});  // edges 01, 02, 12, 13
  CHECK(of(p, "pivot_of") == Floats{1, -1, 1, 1});
  CHECK(of(p, "satellite") == Floats{1, 0, 1, 1});
  check_near(of(p, "share"), {1 / 22., 1, 1 / 22., 20 / 22.});
  check_near(of(p, "full_bytes"), {4 * 64});
  check_near(of(p, "device_bytes"), {2 * 64});
  check_near(of(p, "host_bytes"), {3 * 64});
  CHECK(p.at("role").extent == std::vector<std::int64_t>{1, 4});
  // Head 3 takes all its tokens, and the others take the rest.
  check_near(of(three_steps({{"ratio", .75}}), "share"), {.5, 1, .5, 1});
  check_near(of(three_steps({{"ratio", .75}, {"least_stability", .5}}), "share"), {.5, 1, .5, 1});
  CHECK(std::isnan(of(three_steps({{"ratio", .25}}), "device_bytes")[0]));
}

TEST_CASE("each point where paper and code disagree is a parameter") {
  check_near(of(three_steps({{"stability", "mean"}}), "stable"), {1, .6, 2.8 / 3, 1 / 3.});
  check_near(of(three_steps({{"similarity", "mean"}}), "similar"), {2.6 / 3, .8, .8, 2 / 3.});
  check_near(of(three_steps({{"similarity", "one"}, {"step", std::int64_t{3}}}), "similar"), {.8, .6, .8, .6});
  CHECK(of(three_steps({{"graph", "median"}}), "role") == Floats{2, 3, 3, 3});  // 03 too, but not 23
  const Profile paper = three_steps({{"graph", "one"}});
  CHECK(of(paper, "role") == Floats{2, 3, 3, 2});  // head 3 is similar and has no neighbour: a cluster of its own
  CHECK(of(paper, "pivot_of") == Floats{-1, 0, 0, -1});
  const Profile code = three_steps({{"graph", "one"}, {"unique_first", false}});
  CHECK(of(code, "role") == Floats{2, 3, 3, 1});
  const ParamMap anchors{{"graph", "one"}, {"unique_first", false}, {"stability", "mean"}, {"tau_stable", .3}};
  CHECK(of(three_steps(anchors), "role") == Floats{2, 3, 3, 0});
  // Head 3 is not similar from .7 on, and may be a satellite where clusters come first.
  CHECK(of(three_steps({{"tau_sim", .7}}), "role") == Floats{2, 2, 3, 1});  // edge 02
  CHECK(of(three_steps({{"tau_sim", .8}, {"graph", "median"}}), "role") == Floats{2, 3, 3, 1});
  CHECK(of(three_steps({{"group", "max"}}), "stable") == of(three_steps({}), "stable"));
}

// Sets of 3 tokens around each peak. O with the prompt: 1 1 1; 2/3 1 0; 2/3 1 1; 0 0 1.
TEST_CASE("a narrower kernel gives narrower sets, and an even one is refused") {
  const ParamMap three{{"kernel", std::int64_t{3}}, {"k", std::int64_t{3}}};
  check_near(of(three_steps(three), "stable"), {1, 2 / 3., 1, 0});
  CHECK_THAT(refusal({{"kernel", std::int64_t{4}}}), Catch::Contains("got a kernel of 4, wanted an odd one"));
}

TEST_CASE("only the first steps of a prompt count, and several prompts are joined step by step") {
  check_near(of(three_steps({{"steps", std::int64_t{2}}}), "stable"), {1, .9, .9, 0});
  Steps steps({});
  steps.begin({4, 4, 5, 11});
  steps.step({4, 5, 6, 2});
  steps.step({4, 4, 5, 3});
  steps.step({4, 9, 5, 11});
  steps.release();
  steps.begin({4, 4, 5, 11});
  steps.step({4, 9, 5, 11});
  steps.step({4, 4, 5, 11});
  steps.step({4, 4, 5, 11});
  check_near(of(steps.profile(), "stable"), {1, .5, 1, .5});  // head 1: .4 1 .5
}

TEST_CASE("k beyond the prompt is all of it, and without decode steps nobody has a role") {
  const Profile all = three_steps({{"k", std::int64_t{1024}}});
  CHECK(of(all, "stable") == Floats(4, 1));
  CHECK(of(all, "role") == Floats{2, 3, 3, 3});
  Steps steps({});
  steps.begin({4, 4, 5, 11});
  const Profile none = steps.profile();
  for (const char* name : {"stable", "similar", "role", "pivot_of", "share", "satellite", "device_bytes"})
    CHECK(all_nan(of(none, name)));
  // A graph of a step that never came gives no roles either.
  CHECK(all_nan(of(three_steps({{"graph", "one"}, {"step", std::int64_t{4}}}), "role")));
}

TEST_CASE("thresholds outside of (0, 1] and empty sets are refused") {
  for (const char* name : {"tau_stable", "tau_sim", "ratio", "least_stability"})
    for (const double value : {0., -.5, 1.01, double{NAN}}) {
      CAPTURE(name, value);
      CHECK_THAT(refusal({{name, value}}), Catch::Contains(name) && Catch::Contains("wanted"));
    }
  CHECK_NOTHROW(profiler_with({{"tau_stable", 1.}, {"tau_sim", 1.}}));
  for (const char* name : {"k", "steps"}) CHECK_THAT(refusal({{name, std::int64_t{0}}}), Catch::Contains(name));
  CHECK_THAT(refusal({{"steps", std::int64_t{9}}, {"step", std::int64_t{10}}}),
             Catch::Contains("got step 10") && Catch::Contains("at most 9"));
}

TEST_CASE("a bundled model has the same roles every time, and the report draws and counts them") {
  const test::TempDir folder;
  Registry registry;
  const RegistryCatalog catalog(registry);
  const auto profile = [&](const std::string& name) {
    const std::string out = (folder / name).string();
    std::ofstream(folder / "e.yaml") << "model: bundled/recall\nbackend: cpu\n"
                                     << "tasks: [text: {prefix: 300, forced: 20, samples: 2}]\n"
                                     << "profilers: [heterocache_heads: {k: 32, ratio: 0.9}]\noutput: " << out << "\n";
    REQUIRE(run_profile(load_experiment((folder / "e.yaml").string(), {}, catalog), catalog, {"test", false, true}) ==
            0);
    return results::read_profile(out);
  };
  const results::ProfileFile file = profile("a.h5");
  const Profile& p = file.profilers.at(0).profile;
  const auto heads = static_cast<std::size_t>(p.at("role").extent[1]), all = of(p, "role").size();
  double kept = 0;
  for (std::size_t i = 0; i < all; ++i) {
    kept += of(p, "share")[i];
    const bool satellite = of(p, "role")[i] == heterocache::satellite;
    CHECK((of(p, "pivot_of")[i] >= 0) == satellite);
    if (!satellite) continue;
    const std::size_t pivot = i / heads * heads + static_cast<std::size_t>(of(p, "pivot_of")[i]);
    CHECK(of(p, "role")[pivot] == heterocache::pivot);
  }
  CHECK(kept == Approx(.9 * static_cast<double>(all)));
  const Profile again = profile("b.h5").profilers.at(0).profile;
  for (const auto& [name, array] : p) CHECK(again.at(name).values == array.values);
  CHECK_THAT(results::profile_report(file, results::Format::table),
             Catch::Contains("layer  heads  anchor  volatile  pivot  satellite\n") &&
                 Catch::Contains("heterocache_heads share") && Catch::Contains("; * satellite\n"));
}
