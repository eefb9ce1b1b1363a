// A budget that changes nothing, in a policy that keeps everything: attention reads four pages whatever the budget.
#include "keeps.hpp"

namespace {

class FixedPages final : public kvlab::broken::KeepNewest {
 public:
  using KeepNewest::KeepNewest;
  kvlab::Needs needs() const override { return kvlab::Needs{}.page_summary(kvlab::Summary::min_max); }
  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    if (step.max_length <= budget_) return;
    const auto score = step.scratch<float>("page score", {step.rows(), step.kv_heads(), step.max_pages});
    const auto list = step.list<kvlab::PageList>("pages", step.max_pages);
    const std::vector<std::int32_t> four(static_cast<std::size_t>(step.rows() * step.kv_heads()), 4);
    kvlab::ops::score_pages(step.queries, step.pages, step.summaries, kvlab::GroupRule::max, 1.f,
                            step.upload_heads("four", four.data()), {}, score, list, s);
    edits.attend(list);
  }
};

}  // namespace

KVLAB_PLUGIN(kvlab::policy<FixedPages>("fixed_pages", "broken: reads four pages whatever the budget"))
