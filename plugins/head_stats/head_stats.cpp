// Statistics of a model's heads while decoding, for head classes and reuse of selections. RCO: FlexiCache, section 4
// (its card, step 2); similarity of a layer's heads: HeteroCache; query cosine: FreeKV.
#include <kvlab/plugin.hpp>
#include <kvlab/statistics.hpp>

#include <algorithm>
#include <deque>
#include <numeric>
#include <span>

namespace {

using Pages = std::vector<std::int32_t>;  // page indices, ascending

class HeadStats final : public kvlab::Profiler {
 public:
  explicit HeadStats(const kvlab::Params& p)
      : by_(p.get<kvlab::RankPages>("by")),
        group_rule_(p.get<kvlab::GroupRule>("group")),
        top_(p.get<int>("top_pages")),
        apart_(static_cast<std::size_t>(p.get<int>("apart"))),
        sinks_(static_cast<std::size_t>(p.get<int>("sinks"))),
        thresholds_{p.get<double>("low"), p.get<double>("high")} {}

  kvlab::Needs needs() const override {
    return kvlab::Needs{}.page_summary(kvlab::Summary::min_max).mass(kvlab::Mass::decode);
  }

  void attach(const kvlab::Shape& shape, kvlab::Workspace&) override {
    shape_ = shape;
    for (auto* m : {&overlap_1_, &overlap_apart_, &rco_, &top_mass_, &top_mass_between_})
      m->resize({shape.layers, shape.kv_heads});
    for (auto* m : {&cosine_, &low_, &high_, &entropy_, &sink_mass_}) m->resize({shape.layers, shape.query_heads});
    similarity_.resize({shape.layers, shape.kv_heads, shape.kv_heads});
    history_.resize(shape.max_slots, shape.layers, shape.kv_heads);
    last_query_.resize(shape.max_slots, shape.layers, shape.query_heads);
  }

  void observe(const kvlab::LayerStep& step, kvlab::Stream s) override {
    const kvlab::PageList best = kvlab::best_pages(step, by_, group_rule_, top_, s);
    for (int row = 0; row < step.rows(); ++row) {
      for (int head = 0; head < step.kv_heads(); ++head) pages(step, row, head, best);
      for (int head = 0; head < shape_.query_heads; ++head) attention(step, row, head);
    }
  }

  void release(int slot) override {
    history_.clear(slot);
    last_query_.clear(slot);
  }

  void finish(kvlab::Profile& out) override {
    const std::string apart = std::to_string(apart_);
    out["overlap_1"] = overlap_1_.array("share of the top pages");
    out["overlap_" + apart] = overlap_apart_.array("share of the top pages");
    out["rco_" + apart] = rco_.array("0 to 1, chance is 0");
    out["top_mass"] = top_mass_.array("share of attention mass");
    out["top_mass_between"] = top_mass_between_.array("share of attention mass, first and newest page left out");
    out["similarity"] = similarity_.array("share of the top pages");
    out["sink_mass"] = sink_mass_.array("share of attention mass");
    out["entropy"] = entropy_.array("nats");
    out["query_cosine"] = cosine_.array("cosine");
    out["query_cosine_low"] = low_.array("share of steps");
    out["query_cosine_high"] = high_.array("share of steps");
  }

 private:
  // Compares the top pages of one KV head with its earlier ones and with those of the layer's heads before it.
  void pages(const kvlab::LayerStep& step, int row, int head, const kvlab::PageList& best) {
    const int candidates = step.pages.pages(row, head), slot = step.slots[row];
    if (candidates <= top_) return;  // every page is a top page
    auto& history = history_.at(slot, step.layer, head);
    const std::int32_t* first = &best.index(row, head, 0);
    history.emplace_back(first, first + best.count(row, head));
    const Pages& now = history.back();
    const auto share = [&](const Pages& then) { return kvlab::overlap(now, then) / double(top_); };
    if (history.size() > 1) overlap_1_.add({step.layer, head}, share(history[history.size() - 2]));
    if (history.size() > apart_) {
      const double of_top = share(history[history.size() - 1 - apart_]);
      overlap_apart_.add({step.layer, head}, of_top);
      rco_.add({step.layer, head}, kvlab::above_chance(of_top, double(top_) / candidates));
      history.pop_front();
    }
    for (int other = 0; other <= head; ++other) {
      const auto& theirs = history_.at(slot, step.layer, other);
      if (theirs.empty()) continue;
      const double alike = share(theirs.back());
      similarity_.add({step.layer, head, other}, alike);
      if (other != head) similarity_.add({step.layer, other, head}, alike);
    }
    double mass = 0, between = 0;
    for (const std::int32_t page : now) {
      const double here = kvlab::page_mass(step, row, head, page);
      mass += here;
      if (page != 0 && page != candidates - 1) between += here;
    }
    top_mass_.add({step.layer, head}, mass);
    top_mass_between_.add({step.layer, head}, between);
  }

  void attention(const kvlab::LayerStep& step, int row, int head) {
    const auto tokens = static_cast<std::size_t>(step.pages.tokens(row, head / shape_.group()));
    const std::span<const float> mass{&step.mass(row, head, 0), tokens};
    entropy_.add({step.layer, head}, kvlab::entropy(mass));
    const auto sinks = mass.first(std::min(tokens, sinks_));
    sink_mass_.add({step.layer, head}, std::accumulate(sinks.begin(), sinks.end(), 0.));

    auto& last = last_query_.at(step.slots[row], step.layer, head);
    const float* q = &step.queries.f32()(row, head, 0);
    const std::span<const float> query{q, q + shape_.head_dim};
    if (!last.empty()) {
      const double cosine = kvlab::cosine(query, last);
      cosine_.add({step.layer, head}, cosine);
      low_.add({step.layer, head}, cosine < thresholds_[0]);
      high_.add({step.layer, head}, cosine < thresholds_[1]);
    }
    last.assign(query.begin(), query.end());
  }

  kvlab::RankPages by_;
  kvlab::GroupRule group_rule_;
  int top_;
  std::size_t apart_, sinks_;
  double thresholds_[2];
  kvlab::Shape shape_;
  kvlab::Means<2> overlap_1_, overlap_apart_, rco_, top_mass_, top_mass_between_;  // [layer, KV head]
  kvlab::Means<2> sink_mass_, entropy_, cosine_, low_, high_;                      // [layer, query head]
  kvlab::Means<3> similarity_;                                                     // [layer, KV head, KV head]
  kvlab::PerSequence<std::deque<Pages>> history_;      // top pages of a KV head's last steps
  kvlab::PerSequence<std::vector<float>> last_query_;  // of a query head
};

}  // namespace

KVLAB_PLUGIN(kvlab::profiler<HeadStats>("head_stats", "stability, similarity, mass and query drift of every head")
                 .param("top_pages", 64, 1, kvlab::any, "pages of a head that count as selected")
                 .param("by", kvlab::RankPages::mass,
                        "what ranks pages: their attention mass (mean of the group) or Quest's bound")
                 .param("apart", 16, 2, kvlab::any, "decode steps between the selections that are compared")
                 .param("sinks", 4, 0, kvlab::any, "first tokens whose mass is told apart")
                 .param("group", kvlab::GroupRule::max, "how a GQA group's bounds become one")
                 .param("low", 0.8, -1, 1, "query_cosine_low counts steps below this cosine (FreeKV's threshold)")
                 .param("high", 0.9, -1, 1, "query_cosine_high counts steps below this one"))
