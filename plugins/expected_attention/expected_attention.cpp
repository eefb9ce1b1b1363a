// ExpectedAttention: keeps what later queries attend to, if they are distributed like the prompt's. Devoto et al. 2025.
#include <kvlab/plugin.hpp>
#include <kvlab/step_numbers.hpp>

#include <cmath>

namespace {

class ExpectedAttention final : public kvlab::Scorer, public kvlab::PreparesSteps {
 public:
  explicit ExpectedAttention(const kvlab::Params& p)
      : sinks_(p.get<int>("sinks")),
        horizon_(p.get<int>("horizon")),
        epsilon_(p.get<float>("epsilon")),
        covariance_(p.get<bool>("covariance")),
        values_(p.get<bool>("values")) {}

  kvlab::Needs needs() const override { return kvlab::Needs{}.scratch_numbers(6).capturable(true); }
  kvlab::Pins pins(int) const override { return {.first = sinks_}; }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount&, kvlab::Workspace& w) override {
    moments_ = kvlab::ops::take_moments("query moments", shape, w);
    seen_ = {"seen", shape.max_slots, w};
  }
  bool steady_score() const override { return true; }
  void prepare_step(const kvlab::StepCounters& c) override { seen_.put(c, c.position, c.rows); }

  void observe(const kvlab::LayerKv& kv, kvlab::Stream s) override {
    if (!kv.chunk_queries) return;
    kvlab::ops::add_moments(kv.chunk_queries, kv.upload("seen", kv.position), kv.pages, sinks_, moments(kv), s);
  }

  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    const int heads = kv.shape->query_heads, dim = kv.shape->head_dim;
    const auto mean = kv.query_head_vectors("mean");
    const auto covariance = kv.scratch<float>("covariance", {kv.rows(), heads, dim, dim});
    const std::int32_t* seen = kv.queries ? seen_.data() : kv.upload("seen", kv.position);
    kvlab::ops::expected_query(moments(kv), seen, kv.pages, horizon_, mean, covariance, s);

    const kvlab::Scores attention = kv.query_head_scores("expected attention");
    kvlab::ops::row_dot(kv.keys, mean, attention, s);
    kvlab::ops::scale(attention, 1 / std::sqrt(static_cast<float>(dim)), s);
    if (covariance_) {
      const kvlab::Scores spread = kv.query_head_scores("spread");
      kvlab::ops::row_quadratic(kv.keys, covariance, spread, s);
      kvlab::ops::add(attention, spread, 0.5f / static_cast<float>(dim), s);
    }
    kvlab::ops::set_pinned(kv.pages, {.first = sinks_}, -INFINITY, attention, s);
    kvlab::ops::softmax(kv.pages, attention, 1, s);
    kvlab::ops::group_reduce(kv.pages, attention, kvlab::GroupRule::mean, out, s);
    if (!values_) return;
    const kvlab::Scores norm = kv.kv_head_scores("value norms");
    kvlab::ops::row_norm(kv.values, norm, s);
    kvlab::ops::multiply(out, norm, s);
    kvlab::ops::add(out, norm, epsilon_, s);
  }

 private:
  kvlab::ops::Moments moments(const kvlab::LayerKv& kv) const { return moments_[static_cast<std::size_t>(kv.layer)]; }

  int sinks_, horizon_;
  float epsilon_;
  bool covariance_, values_;
  std::vector<kvlab::ops::Moments> moments_;  // [layer]
  kvlab::StepNumbers<std::int32_t> seen_;     // [row]
};

}  // namespace

KVLAB_PLUGIN(kvlab::scorer<ExpectedAttention>(
                 "expected_attention", "keeps what queries like the prompt's will attend to (Devoto et al. 2025)")
                 .param("sinks", 4, 0, 4096, "first tokens that are always kept and whose queries are not counted")
                 .param("horizon", 512, 1, 1 << 20, "text positions that queries to come are spread over")
                 .param("epsilon", 0., 0, kvlab::any, "added to a token's expected attention before its value's norm")
                 .component("covariance", "the queries' spread; off = their mean alone")
                 .component("values", "norms of the values; off = attention alone"))
