// H2O: the tokens with the largest attention accumulated so far, and the newest ones. Zhang et al., NeurIPS 2023.
#include <kvlab/plugin.hpp>
#include <kvlab/step_numbers.hpp>

#include <limits>

namespace {

class H2o final : public kvlab::Scorer, public kvlab::PreparesSteps {
 public:
  explicit H2o(const kvlab::Params& p)
      : heavy_(p.get<bool>("heavy_hitters") ? p.get<double>("heavy") : 0.),
        group_(p.get<kvlab::GroupRule>("group")),
        mean_(p.get<bool>("mean")),
        every_(p.get<int>("every")) {}

  kvlab::Needs needs() const override {
    return kvlab::Needs{}.mass_into("score", group_, kvlab::Mass::all).capturable(true);
  }
  kvlab::Pins pins(int tokens) const override { return {.last = tokens - static_cast<int>(tokens * heavy_)}; }
  const char* column() const override { return mean_ ? nullptr : "score"; }
  bool steady_score() const override { return true; }
  int every() const override { return every_; }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount&, kvlab::Workspace& w) override {
    if (mean_) seen_ = {"seen", shape.max_slots, w};
  }

  void prepare_step(const kvlab::StepCounters& c) override {
    if (mean_) seen_.put(c, c.position, c.rows);
  }

  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    kvlab::ops::read_state(kv.state("score"), out, s);
    if (!mean_) return;
    const kvlab::Scores queries = kv.kv_head_scores("queries");
    const std::int32_t* seen = kv.queries ? seen_.data() : kv.upload("seen", kv.position);
    kvlab::ops::query_counts(kv.pages, seen, std::numeric_limits<int>::max(), queries, s);
    kvlab::ops::divide(out, queries, s);
  }

 private:
  double heavy_;
  kvlab::GroupRule group_;
  bool mean_;
  int every_;
  kvlab::StepNumbers<std::int32_t> seen_;  // [row]
};

}  // namespace

KVLAB_PLUGIN(kvlab::scorer<H2o>("h2o",
                                "keeps heavy hitters and recent tokens, evicts while decoding (Zhang et al. 2023)")
                 .param("heavy", 0.5, 0, 1, "share of the budget for heavy hitters; the rest is recent tokens")
                 .param("group", kvlab::GroupRule::mean, "how a GQA group's attention becomes one")
                 .param("mean", false,
                        "rank by the mean attention of the queries that could see a token, not by their sum (kvpress)")
                 .param("every", 1, 0, kvlab::any, "decode steps between evictions, 0 = the prompt only")
                 .component("heavy_hitters", "off = recent tokens only"))
