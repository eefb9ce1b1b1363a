// The offline calibration of FlexiCache: which heads change their best pages quickly? RCO and TS follow its
// section 2.2. The votes and the unstable set follow section 2.3.
#include <kvlab/plugin.hpp>
#include <kvlab/statistics.hpp>

#include <limits>
#include <numeric>

#include "votes.hpp"

namespace {

// The steps of one window so far: the best pages of the first step, and the RCO of each later step with it.
struct Window {
  std::vector<std::int32_t> first;
  std::vector<double> rco;
};

class FlexicacheHeads final : public kvlab::Profiler {
 public:
  explicit FlexicacheHeads(const kvlab::Params& p)
      : by_(p.get<kvlab::RankPages>("by")),
        group_(p.get<kvlab::GroupRule>("group")),
        top_(p.get<int>("top_pages")),
        later_(static_cast<std::size_t>(p.get<int>("window") - 1)),
        share_(p.get<double>("unstable")) {}

  kvlab::Needs needs() const override {
    return by_ == kvlab::RankPages::bound ? kvlab::Needs{}.page_summary(kvlab::Summary::min_max)
                                          : kvlab::Needs{}.mass(kvlab::Mass::decode);
  }

  void attach(const kvlab::Shape& shape, kvlab::Workspace&) override {
    shape_ = shape;
    votes_ = flexicache::Votes(static_cast<std::size_t>(shape.layers) * static_cast<std::size_t>(shape.kv_heads));
    windows_.resize(shape.max_slots, shape.layers, shape.kv_heads);
    stability_.resize({shape.layers, shape.kv_heads});
    rco_.resize({shape.layers, shape.kv_heads, static_cast<std::int64_t>(later_)});
  }

  void observe(const kvlab::LayerStep& step, kvlab::Stream s) override {
    const kvlab::PageList best = kvlab::best_pages(step, by_, group_, top_, s);
    for (int row = 0; row < step.rows(); ++row) {
      for (int head = 0; head < step.kv_heads(); ++head) {
        const int candidates = step.pages.pages(row, head);
        if (candidates <= top_) continue;  // every page is a best page, and RCO is 0 / 0
        const std::int32_t* pages = &best.index(row, head, 0);
        Window& window = windows_.at(step.slots[row], step.layer, head);
        if (window.first.empty())
          window.first.assign(pages, pages + top_);
        else
          window.rco.push_back(
              kvlab::above_chance(kvlab::overlap(window.first, {pages, static_cast<std::size_t>(top_)}) / double(top_),
                                  double(top_) / candidates));
      }
      if (step.layer == shape_.layers - 1) vote(step.slots[row]);
    }
  }

  void release(int slot) override { windows_.clear(slot); }  // the steps of a window that did not end count nowhere

  void finish(kvlab::Profile& out) override {
    out["unstable"] = of_heads(votes_.unstable(share_), "1 = an unstable KV head");
    out["votes"] = of_heads({votes_.votes().begin(), votes_.votes().end()},
                            "windows that have the KV head in their bottom quartile");
    out["windows"] = {{1}, {static_cast<float>(votes_.windows())}, "windows"};
    out["stability"] = stability_.array("mean RCO of a KV head's windows, 0 to 1, chance is 0");
    out["rank_change_overlap"] = rco_.array("RCO with a window's first step, by steps after the first");
    if (votes_.windows() == 0)
      out["unstable"].values.assign(out["unstable"].values.size(), std::numeric_limits<float>::quiet_NaN());
  }

 private:
  // After the last layer of a step. All heads of the full cache are equally long, so their windows end together.
  void vote(int slot) {
    if (windows_.at(slot, 0, 0).rco.size() < later_) return;
    std::vector<double> stability;
    for (int layer = 0; layer < shape_.layers; ++layer)
      for (int head = 0; head < shape_.kv_heads; ++head) {
        const std::vector<double>& rco = windows_.at(slot, layer, head).rco;
        for (std::size_t i = 0; i < later_; ++i) rco_.add({layer, head, static_cast<int>(i)}, rco[i]);
        stability.push_back(std::accumulate(rco.begin(), rco.end(), 0.) / static_cast<double>(later_));
        stability_.add({layer, head}, stability.back());
      }
    votes_.add(stability);
    windows_.clear(slot);
  }

  kvlab::ProfileArray of_heads(std::vector<float> values, const char* unit) const {
    return {{shape_.layers, shape_.kv_heads}, std::move(values), unit};
  }

  kvlab::RankPages by_;
  kvlab::GroupRule group_;
  int top_;
  std::size_t later_;  // steps of a window after its first
  double share_;
  kvlab::Shape shape_;
  kvlab::PerSequence<Window> windows_;
  flexicache::Votes votes_;  // of all heads, layer by layer
  kvlab::Means<2> stability_;
  kvlab::Means<3> rco_;  // [layer, KV head, steps after the window's first - 1]
};

}  // namespace

KVLAB_PLUGIN(kvlab::profiler<FlexicacheHeads>("flexicache_heads",
                                              "the unstable heads of FlexiCache, by votes of windows")
                 .param("top_pages", 64, 1, kvlab::any, "pages of a head that a step selects")
                 .param("by", kvlab::RankPages::bound,
                        "what ranks pages: attention mass (mean of the group) or Quest's bound")
                 .param("group", kvlab::GroupRule::max, "how a GQA group's bounds become one")
                 .param("window", 16, 2, kvlab::any, "decode steps of a window, which the paper does not give")
                 .param("unstable", 0.25, 0, 1, "share of all heads that is unstable"))
