// A promise that a graph may replay the decode steps, and an upload in each of them: on a GPU every later step would
// read the numbers of the captured one.
#include <kvlab/plugin.hpp>

namespace {

class FrozenUpload final : public kvlab::Selector {
 public:
  explicit FrozenUpload(const kvlab::Params&) {}
  kvlab::Needs needs() const override { return kvlab::Needs{}.page_summary(kvlab::Summary::min_max).capturable(true); }
  void select(const kvlab::LayerStep& step, kvlab::PageList list, kvlab::Stream s) override {
    const auto scores = step.scratch<float>("page scores", {step.rows(), step.kv_heads(), step.max_pages});
    std::vector<std::int32_t> budgets;
    for (int i = 0; i < step.rows() * step.kv_heads(); ++i)
      budgets.push_back(std::max(1, step.budget_tokens(i / step.kv_heads()) / step.shape->page_size));
    kvlab::ops::score_pages(step.queries, step.pages, step.summaries, kvlab::GroupRule::max, 1,
                            step.upload_heads("budgets", budgets.data()), {}, scores, list, s);
  }
};

}  // namespace

KVLAB_PLUGIN(kvlab::selector<FrozenUpload>("frozen_upload", "broken: uploads numbers in steps that a graph replays"))
