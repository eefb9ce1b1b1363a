// Critical tokens, spans and decades by hand, and of a prompt in chunks.
#include <catch2/catch.hpp>
#include <cmath>

#include "cases/paged_fixture.hpp"
#include "plugin/loader.hpp"
#include "plugin/parameters.hpp"
#include "plugin/registry.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

using Vector = std::vector<float>;
constexpr int dim = 16, most = 16;

// One layer of two KV heads with two query heads each.
class Probe {
 public:
  explicit Probe(double share) {
    static Registry registry;
    const PluginInfo& info = registry.require(Role::profiler, "critical_tokens");
    profiler_ = create<Profiler>(info, resolve(info, {{"share", share}}));
    shape_.layers = shape_.max_slots = 1, shape_.query_heads = 4, shape_.kv_heads = 2;
    shape_.head_dim = dim, shape_.page_size = 4, shape_.max_tokens = most;
    profiler_->attach(shape_, workspace_);
  }
  // norms: of each token's value in both heads. chunks: [query head][token] mass of each chunk.
  void prompt(const Vector& norms, const std::vector<std::vector<Vector>>& chunks) {
    PagedFixture cache({1, 2, dim, 4, most / 4});
    std::size_t appended = 0;
    for (std::size_t c = 0; c < chunks.size(); ++c) {
      const auto n = static_cast<std::int32_t>(chunks[c][0].size());
      for (; appended < static_cast<std::size_t>(n); ++appended)
        for (int head = 0; head < 2; ++head) {
          Vector value(dim);
          value[appended] = norms[appended];
          cache.append(0, head, Vector(dim), value);
        }
      Vector mass;
      for (const Vector& head : chunks[c]) mass.insert(mass.end(), head.begin(), head.end());
      const std::int32_t slot = 0;
      const bool last = c + 1 == chunks.size();
      LayerPrefill kv;
      kv.shape = &shape_, kv.pages = cache.view(), kv.workspace = &workspace_;
      kv.slots = &slot, kv.position = &n, kv.last = &last, kv.max_length = n;
      kv.mass = View<const float, 3>::dense(mass.data(), {1, 4, n});
      profiler_->prefill(kv, Stream::cpu());
    }
  }
  Profile profile() {
    Profile out;
    profiler_->finish(out);
    return out;
  }

 private:
  Instance<Profiler> profiler_;
  Shape shape_;
  HeapWorkspace workspace_;
};

// Four tokens; heads 0 and 1 share a KV head.
const std::vector<Vector> peaked{{3, 0, 1, 0}, {3, 0.5f, 0.5f, 0}, {1, 1, 1, 1}, {1, 1, 1, 1}};
const Vector norms{1, 10, 0.1f, 1};

}  // namespace

TEST_CASE("critical_tokens: the fewest tokens of each KV head, by hand") {
  Probe probe(0.75);
  probe.prompt(norms, {peaked});
  // Head 0 has 3, 0.25, 0.75, 0 of 4: the first is 0.75. Head 1 has four equal ones, and three are 0.75.
  Profile p = probe.profile();
  CHECK(p.at("critical_tokens").extent == std::vector<std::int64_t>{1, 2});
  CHECK(p.at("critical_tokens").values == Vector{1, 3});
  CHECK(std::isnan(p.at("critical_tokens_deviation").values[0]));
  CHECK(p.at("layer_critical_tokens").values == Vector{2});
  // Mean attention divides by the queries that see a token: 3 / 4, 0.25 / 3, 0.75 / 2, 0 and 1 / 4, 1 / 3, 1 / 2, 1.
  CHECK(double{p.at("score_span").values[0]} == Approx(std::log10(12.)));  // 1 / (0.25 / 3)
  CHECK(double{p.at("norm_span").values[0]} == Approx(2).epsilon(1e-3));
  const Vector& scores = p.at("score_decades").values;
  CHECK(Vector(scores.begin(), scores.begin() + 10) == Vector{0.5f, 0.25f, 0, 0, 0, 0, 0, 0, 0, 0.25f});
  CHECK(Vector(scores.begin() + 10, scores.end()) == Vector{1, 0, 0, 0, 0, 0, 0, 0, 0, 0});
  const Vector& decades = p.at("norm_decades").values;
  CHECK(decades[3] + decades[4] + decades[5] == 1);  // 0.1, 1 and 10
  CHECK(decades[4] == 0.5f);

  // A second prompt, whose first head needs three tokens and whose second one needs one.
  probe.prompt(norms, {{peaked[2], peaked[3], peaked[0], peaked[1]}});
  p = probe.profile();
  CHECK(p.at("critical_tokens").values == Vector{2, 2});
  CHECK(double{p.at("critical_tokens_deviation").values[0]} == Approx(std::sqrt(2.)));
  CHECK(p.at("layer_critical_tokens").values == Vector{2});
  CHECK(p.at("layer_critical_tokens_deviation").values == Vector{0});
}

TEST_CASE("critical_tokens: chunks add up to the whole prompt") {
  Probe whole(0.9), chunked(0.9);
  whole.prompt(norms, {peaked});
  std::vector<Vector> first, second = peaked;
  for (Vector& head : second) {
    first.push_back({head[0] / 2, head[1]});
    head[0] /= 2, head[1] = 0;
  }
  chunked.prompt(norms, {first, second});
  const Profile a = whole.profile(), b = chunked.profile();
  for (const auto& [name, array] : a) {
    CAPTURE(name);
    for (std::size_t i = 0; i < array.values.size(); ++i)
      if (std::isfinite(array.values[i])) CHECK(double{b.at(name).values[i]} == Approx(double{array.values[i]}));
  }
}

TEST_CASE("critical_tokens: no prompt, and what it refuses") {
  Probe probe(1);
  const Profile nothing = probe.profile();
  for (const char* name : {"critical_tokens", "layer_critical_tokens", "score_span", "score_decades"})
    for (const float v : nothing.at(name).values) CHECK(std::isnan(v));
  probe.prompt(norms, {peaked});
  CHECK(probe.profile().at("critical_tokens").values == Vector{3, 4});  // a token without attention is never needed
  CHECK_THROWS_WITH(Probe(1.5), Catch::Contains("share"));
}
