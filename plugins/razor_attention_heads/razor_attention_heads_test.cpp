#include <catch2/catch.hpp>
#include <cmath>
#include <random>

#include "cases/paged_fixture.hpp"
#include "plugin/loader.hpp"
#include "plugin/parameters.hpp"
#include "plugin/registry.hpp"

using namespace kvlab;
using namespace kvlab::cases;

namespace {

constexpr int dim = 16, kv_heads = 2, query_heads = 4;
using Vector = std::vector<float>;

// Scores of one layer by prompts of these keys [KV head][token] and queries [query head][token].
class Probe {
 public:
  explicit Probe(std::int64_t repeats) {
    static Registry registry;
    const PluginInfo& info = registry.require(Role::profiler, "razor_attention_heads");
    profiler_ = create<Profiler>(info, resolve(info, {{"repeats", repeats}}));
    shape_.layers = shape_.max_slots = 1, shape_.query_heads = query_heads, shape_.kv_heads = kv_heads;
    shape_.head_dim = dim, shape_.page_size = 4, shape_.max_tokens = 64;
    profiler_->attach(shape_, workspace_);
  }
  void prompt(const std::vector<std::vector<Vector>>& keys, const std::vector<std::vector<Vector>>& queries) {
    PagedFixture cache({1, kv_heads, dim, 4, 16});
    const auto n = static_cast<std::int32_t>(keys[0].size());
    for (int head = 0; head < kv_heads; ++head)
      for (const Vector& key : keys[static_cast<std::size_t>(head)]) cache.append(0, head, key, Vector(dim));
    Vector flat;
    for (const auto& head : queries)
      for (const Vector& q : head) flat.insert(flat.end(), q.begin(), q.end());
    const std::int32_t slot = 0;
    const bool last = true;
    LayerPrefill kv;
    kv.shape = &shape_, kv.pages = cache.view(), kv.workspace = &workspace_;
    kv.slots = &slot, kv.position = &n, kv.last = &last, kv.max_length = n;
    kv.window_queries = View<const float, 4>::dense(flat.data(), {1, query_heads, n, dim});
    profiler_->prefill(kv, Stream::cpu());
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

Vector at(int d, float value) {
  Vector v(dim);
  v[static_cast<std::size_t>(d)] = value;
  return v;
}

}  // namespace

// The card's case: a b c a b c. Query 4 (b) has its copy at 1 and the token behind it at 2, query 3 has 0 and 1.
TEST_CASE("razor_attention_heads: queries that look at one token each, by hand") {
  const auto looks_at = [](std::vector<int> tokens) {
    std::vector<Vector> queries;
    for (const int t : tokens) queries.push_back(at(t, 400));
    return queries;
  };
  std::vector<Vector> keys;
  for (int t = 0; t < 6; ++t) keys.push_back(at(t, 1));
  Probe probe(2);
  probe.prompt({keys, keys}, {looks_at({0, 0, 0, 1, 1, 0}), looks_at({0, 0, 0, 0, 1, 0}), looks_at({0, 1, 2, 1, 2, 3}),
                              looks_at({0, 0, 0, 2, 3, 2})});
  const Profile p = probe.profile();
  CHECK(p.at("echo").extent == std::vector<std::int64_t>{1, kv_heads});
  // Query head 1 looks at two copies with its three queries, and head 0 at one. All three of head 2 look behind copies.
  CHECK(p.at("echo").values[0] == Approx(2 / 3.));
  CHECK(p.at("echo").values[1] == Approx(1 / 3.));
  CHECK(p.at("induction").values[0] == Approx(1 / 3.));
  CHECK(p.at("induction").values[1] == Approx(1));
}

TEST_CASE("razor_attention_heads: three copies behind BOS, by whole rows of attention, the mean of two prompts") {
  constexpr int period = 4, first = 1, n = first + 3 * period;
  std::mt19937 random(3);
  std::normal_distribution<float> normal;
  const auto vectors = [&](int heads) {
    std::vector<std::vector<Vector>> out(static_cast<std::size_t>(heads), std::vector<Vector>(n, Vector(dim)));
    for (auto& head : out)
      for (Vector& v : head)
        for (float& x : v) x = normal(random);
    return out;
  };
  Probe probe(3);
  std::vector<double> echo(query_heads), induction(query_heads);
  int queries_seen = 0;
  for (int prompt = 0; prompt < 2; ++prompt) {
    const auto keys = vectors(kv_heads), queries = vectors(query_heads);
    probe.prompt(keys, queries);
    for (int i = 0; i < n; ++i) {
      if (i < first + period) continue;
      ++queries_seen;
      for (std::size_t h = 0; h < query_heads; ++h) {
        std::vector<double> row;
        double sum = 0;
        for (int j = 0; j <= i; ++j) {
          double dot = 0;
          for (std::size_t d = 0; d < dim; ++d)
            dot += double{queries[h][static_cast<std::size_t>(i)][d]} * keys[h / 2][static_cast<std::size_t>(j)][d];
          row.push_back(std::exp(dot / 4));
          sum += row.back();
        }
        for (int j = first; j < i; ++j)
          if ((i - j) % period == 0)
            echo[h] += row[static_cast<std::size_t>(j)] / sum,
                induction[h] += row[static_cast<std::size_t>(j + 1)] / sum;
      }
    }
  }
  const Profile p = probe.profile();
  for (std::size_t head = 0; head < kv_heads; ++head) {
    CHECK(p.at("echo").values[head] == Approx(std::max(echo[2 * head], echo[2 * head + 1]) / queries_seen));
    CHECK(p.at("induction").values[head] ==
          Approx(std::max(induction[2 * head], induction[2 * head + 1]) / queries_seen));
  }
}

TEST_CASE("razor_attention_heads: a prompt shorter than its copies leaves no score") {
  Probe probe(4);
  probe.prompt({{at(0, 1)}, {at(0, 1)}}, {{at(0, 1)}, {at(0, 1)}, {at(0, 1)}, {at(0, 1)}});
  const Profile p = probe.profile();
  CHECK(std::isnan(p.at("echo").values[0]));
  CHECK(std::isnan(p.at("induction").values[1]));
}
