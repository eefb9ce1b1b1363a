// Quest: a step attends to the pages whose key boxes allow the largest dot products with its query. Tang et al., ICML
// 2024.
#include <kvlab/plugin.hpp>

namespace {

class Quest final : public kvlab::Selector {
 public:
  explicit Quest(const kvlab::Params& p)
      : group_(p.get<kvlab::GroupRule>("group")),
        scale_(p.get<float>("scale")),
        dense_(p.get<int>("dense_layers")),
        min_pages_(p.get<int>("min_pages")),
        pins_{.newest_page = p.get<bool>("last_page")},
        summary_(p.get<bool>("page_bounds") ? kvlab::Summary::min_max : kvlab::Summary::mean),
        bits_(p.get<int>("summary_bits")) {}

  kvlab::Needs needs() const override {
    return kvlab::Needs{}.page_summary(summary_, bits_).dense_layers(dense_).min_pages(min_pages_).capturable(true);
  }
  kvlab::Pins pins() const override { return pins_; }
  void select(const kvlab::LayerStep& step, kvlab::PageList out, kvlab::Stream s) override {
    auto score = step.scratch<float>("page score", {step.rows(), step.kv_heads(), step.max_pages});
    kvlab::ops::score_pages(step.queries, step.pages, step.summaries, group_, scale_, step.page_budgets, pins_, score,
                            out, s);
  }

 private:
  kvlab::GroupRule group_;
  float scale_;
  int dense_, min_pages_;
  kvlab::Pins pins_;
  kvlab::Summary summary_;
  int bits_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::selector<Quest>("quest", "page-level query-aware selection (Tang et al. 2024)")
                 .param("group", kvlab::GroupRule::max, "how a GQA group's page scores become one")
                 .param("scale", 1.0, 0, kvlab::any, "factor on page scores before the softmax of group: softmax_mean")
                 .param("dense_layers", 2, 0, kvlab::any, "first layers that attend to everything")
                 .param("min_pages", 3, 1, kvlab::any, "least pages per KV head")
                 .param("last_page", false,
                        "always attend to the newest page (the paper's kernels do, its evaluation does not)")
                 .param("summary_bits", 16, 8, 16,
                        "of a number of a page's summary: 16, in the run's dtype, or 8, in codes")
                 .component("page_bounds", "min-max boxes of the keys; off = the page's mean key"))
