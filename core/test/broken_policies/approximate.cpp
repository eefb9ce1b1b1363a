// An approximate top-k: the pages are dealt into as many bins as may be read, and every bin sends its best one.
#include <kvlab/plugin.hpp>

namespace {

class Approximate final : public kvlab::Selector {
 public:
  explicit Approximate(const kvlab::Params&) {}
  kvlab::Needs needs() const override { return kvlab::Needs{}.page_summary(kvlab::Summary::min_max); }
  void select(const kvlab::LayerStep& step, kvlab::PageList out, kvlab::Stream s) override {
    auto score = step.scratch<float>("page score", {step.rows(), step.kv_heads(), step.max_pages});
    kvlab::ops::page_score(step.queries, step.pages, step.summaries, kvlab::GroupRule::max, 1.f, score, s);
    for (int row = 0; row < step.rows(); ++row)
      for (int head = 0; head < step.kv_heads(); ++head) {
        const int pages = step.pages.pages(row, head), bins = std::min(pages, step.page_budgets(row, head));
        for (int bin = 0; bin < bins; ++bin) {
          int best = pages * bin / bins;
          for (int page = best; page < pages * (bin + 1) / bins; ++page)
            if (score(row, head, page) > score(row, head, best)) best = page;
          out.index(row, head, bin) = best;
        }
        out.count(row, head) = bins;
      }
  }
};

}  // namespace

KVLAB_PLUGIN(kvlab::selector<Approximate>("approximate", "broken: the best page of every bin"))
