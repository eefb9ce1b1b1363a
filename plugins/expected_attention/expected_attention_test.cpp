#include "support/on_text.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

using Vector = std::vector<double>;

Vector turned(const Vector& x, const RopeTable& rope, double position) {
  Vector y = x;
  const std::size_t half = x.size() / 2;
  for (std::size_t i = 0; i < half; ++i) {
    const double angle = position * rope.inv_freq[i];
    y[i] = x[i] * std::cos(angle) - x[i + half] * std::sin(angle);
    y[i + half] = x[i + half] * std::cos(angle) + x[i] * std::sin(angle);
  }
  return y;
}

// Mean and covariance of the prompt's queries after the sinks. RoPE is undone for each query. The mean of RoPE's turns
// at all positions to come then takes its place.
struct Expected {
  Vector mean;
  std::vector<Vector> covariance;
};
Expected expected(const std::vector<Vector>& queries, int sinks, int horizon, const RopeTable& rope) {
  const std::size_t dim = queries[0].size();
  const int n = static_cast<int>(queries.size());
  std::vector<Vector> plain;
  for (int t = sinks; t < n; ++t) plain.push_back(turned(queries[static_cast<std::size_t>(t)], rope, -t));
  const auto by_mean_turn = [&](const Vector& x) {
    Vector sum(dim);
    for (int p = n; p < n + horizon; ++p) {
      const Vector y = turned(x, rope, p);
      for (std::size_t d = 0; d < dim; ++d) sum[d] += y[d] / horizon;
    }
    return sum;
  };
  Vector centre(dim);
  for (const Vector& x : plain)
    for (std::size_t d = 0; d < dim; ++d) centre[d] += x[d] / static_cast<double>(plain.size());
  Expected e{by_mean_turn(centre), std::vector<Vector>(dim, Vector(dim))};
  for (Vector x : plain) {
    for (std::size_t d = 0; d < dim; ++d) x[d] -= centre[d];
    x = by_mean_turn(x);
    for (std::size_t d = 0; d < dim; ++d)
      for (std::size_t i = 0; i < dim; ++i) e.covariance[d][i] += x[d] * x[i] / static_cast<double>(plain.size());
  }
  return e;
}

}  // namespace

TEST_CASE("expected_attention keeps on real text what a plain implementation keeps") {
  constexpr int prompt = 160, budget = 48, sinks = 4, horizon = 64;
  struct Variant {
    bool covariance, values;
    double epsilon;
  };
  for (const Variant& v : {Variant{true, true, 0}, {false, true, 0.01}, {true, false, 0}}) {
    OnText run("expected_attention",
               {{"horizon", std::int64_t{horizon}},
                {"covariance", v.covariance},
                {"values", v.values},
                {"epsilon", v.epsilon}},
               budget, prompt);
    run.prefill(prompt);
    const double dim = run.config().head_dim;
    for (int layer = 0; layer < run.config().layers; ++layer)
      for (int head = 0; head < run.config().kv_heads; ++head) {
        CAPTURE(v.covariance, v.values, layer, head);
        const auto& seen = run.layer(layer);
        const auto kv = static_cast<std::size_t>(head), group = static_cast<std::size_t>(run.group());
        Vector scores(prompt);
        for (std::size_t q = kv * group; q < (kv + 1) * group; ++q) {
          std::vector<Vector> queries;
          for (const auto& heads : seen.queries.at) queries.push_back(heads[q]);
          const Expected e = expected(queries, sinks, horizon, run.rope());
          Vector z;
          for (std::size_t t = sinks; t < prompt; ++t) {
            const Vector& k = seen.keys.at[t][kv];
            double spread = 0;
            for (std::size_t d = 0; d < k.size(); ++d) spread += k[d] * dot(e.covariance[d], k);
            z.push_back(dot(k, e.mean) / std::sqrt(dim) + (v.covariance ? spread / (2 * dim) : 0));
          }
          z = softmax(z);
          for (std::size_t t = sinks; t < prompt; ++t) scores[t] += z[t - sinks] / static_cast<double>(group);
        }
        for (std::size_t t = 0; t < prompt; ++t) {
          const Vector& x = seen.values.at[t][kv];
          if (v.values) scores[t] = (scores[t] + v.epsilon) * std::sqrt(dot(x, x));
          if (t < sinks) scores[t] = 1e30;
        }
        CHECK(run.kept(layer, head) == best(scores, positions_to(prompt), budget));
      }
  }
}

TEST_CASE("expected_attention: two keys by hand") {
  // The example has head_dim 2 and this cache 8. Larger moments give the same logits, .7071 and .5. RoPE does not turn.
  PagedFixture cache({1, 1, 8, 4, 4});
  for (int t = 0; t < 2; ++t) {
    std::vector<float> k(8), v(8);
    k[static_cast<std::size_t>(t)] = 1, v[0] = static_cast<float>(1 + t);
    cache.append(0, 0, k, v);
  }
  const float no_turn[4] = {};
  std::vector<float> queries(16);
  queries[0] = queries[8] = 2, queries[1] = std::sqrt(8.f), queries[9] = -std::sqrt(8.f);
  const auto scores = [&](bool covariance, bool values) {
    Scored scored(cache, 1);
    scored.kv.pages.rope_table = {no_turn, 8, 1.f};
    scored.kv.chunk_queries = View<const float, 4>::dense(queries.data(), {1, 1, 2, 8});
    return scored.by("expected_attention",
                     {{"sinks", std::int64_t{0}}, {"covariance", covariance}, {"values", values}});
  };
  const auto both = scores(true, true), attention = scores(true, false), mean = scores(false, false);
  CHECK(both[0] == Approx(.5516).margin(1e-4));
  CHECK(both[1] == Approx(.8968).margin(1e-4));
  CHECK(attention[0] == Approx(.5516).margin(1e-4));
  CHECK(attention[1] == Approx(.4484).margin(1e-4));
  CHECK(mean[0] == Approx(std::exp(.7071) / (std::exp(.7071) + 1)).margin(1e-4));
}
