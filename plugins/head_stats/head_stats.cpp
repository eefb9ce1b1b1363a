// How a model's heads attend while decoding: the statistics that head classes and reuse of selections rest on.
// RCO: FlexiCache, section 4 (its card, step 2); similarity of heads of a layer: HeteroCache; query cosine: FreeKV.
#include <kvlab/plugin.hpp>

#include <algorithm>
#include <cmath>
#include <deque>
#include <iterator>

namespace {

using Pages = std::vector<std::int32_t>;  // ascending

int common(const Pages& a, const Pages& b) {
  Pages both;
  std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
  return static_cast<int>(both.size());
}

enum class By { mass, bound };

}  // namespace

template <>
struct kvlab::Choices<By> {
  static constexpr std::pair<By, const char*> all[] = {{By::mass, "mass"}, {By::bound, "bound"}};
};

namespace {

// A mean per head of what each decode step adds.
struct Means {
  std::vector<double> sum, count;
  void add(std::size_t i, double value) { sum.at(i) += value, count.at(i) += 1; }
  void resize(std::size_t n) { sum.resize(n), count.resize(n); }
  std::vector<float> values() const {
    std::vector<float> out;
    for (std::size_t i = 0; i < sum.size(); ++i)
      out.push_back(count[i] > 0 ? static_cast<float>(sum[i] / count[i]) : std::nanf(""));
    return out;
  }
};

class HeadStats final : public kvlab::Profiler {
 public:
  explicit HeadStats(const kvlab::Params& p)
      : by_(p.get<By>("by")),
        group_rule_(p.get<kvlab::GroupRule>("group")),
        top_(p.get<int>("top_pages")),
        apart_(static_cast<std::size_t>(p.get<int>("apart"))),
        sinks_(p.get<int>("sinks")),
        thresholds_{p.get<double>("low"), p.get<double>("high")} {}

  kvlab::Needs needs() const override {
    return kvlab::Needs{}.page_summary(kvlab::Summary::min_max).mass(kvlab::Mass::decode);
  }

  void attach(const kvlab::Shape& shape, kvlab::Workspace&) override {
    shape_ = shape;
    const auto kv = static_cast<std::size_t>(shape.layers * shape.kv_heads);
    const auto query = static_cast<std::size_t>(shape.layers * shape.query_heads);
    for (Means* m : {&overlap_1_, &overlap_apart_, &rco_, &top_mass_, &top_mass_between_}) m->resize(kv);
    for (Means* m : {&cosine_, &low_, &high_, &entropy_, &sink_mass_}) m->resize(query);
    similarity_.resize(kv * static_cast<std::size_t>(shape.kv_heads));
    history_.resize(static_cast<std::size_t>(shape.max_slots) * kv);
    last_query_.resize(static_cast<std::size_t>(shape.max_slots) * query);
  }

  void observe(const kvlab::LayerStep& step, kvlab::Stream s) override {
    auto score = step.scratch<float>("page score", {step.rows(), step.kv_heads(), step.max_pages});
    auto budget = step.scratch<std::int32_t>("budget", {step.rows(), step.kv_heads()});
    std::fill_n(budget.data, step.rows() * step.kv_heads(), top_);
    const auto best = step.list<kvlab::PageList>("best pages", step.max_pages);
    if (by_ == By::bound)
      kvlab::ops::page_score(step.queries, step.pages, step.summaries, group_rule_, 1.f, score, s);
    else
      for (int row = 0; row < step.rows(); ++row)
        for (int head = 0; head < step.kv_heads(); ++head)
          for (int page = 0; page < step.pages.pages(row, head); ++page)
            score(row, head, page) = static_cast<float>(page_mass(step, row, head, page));
    kvlab::ops::top_pages(step.pages, score, budget, {}, best, s);
    for (int row = 0; row < step.rows(); ++row) {
      for (int head = 0; head < step.kv_heads(); ++head) pages(step, row, head, best);
      for (int head = 0; head < shape_.query_heads; ++head) attention(step, row, head);
    }
  }

  void release(int slot) override {
    const auto clear = [&](auto& all) {
      const std::size_t n = all.size() / static_cast<std::size_t>(shape_.max_slots),
                        at = static_cast<std::size_t>(slot) * n;
      for (std::size_t i = at; i < at + n; ++i) all[i].clear();
    };
    clear(history_);
    clear(last_query_);
  }

  void finish(kvlab::Profile& out) override {
    const std::int64_t layers = shape_.layers, kv = shape_.kv_heads, query = shape_.query_heads;
    const std::string apart = std::to_string(apart_);
    const auto put = [&](const std::string& name, std::vector<std::int64_t> extent, const Means& m, const char* unit) {
      out[name] = {std::move(extent), m.values(), unit};
    };
    put("overlap_1", {layers, kv}, overlap_1_, "share of the top pages");
    put("overlap_" + apart, {layers, kv}, overlap_apart_, "share of the top pages");
    put("rco_" + apart, {layers, kv}, rco_, "0 to 1, chance is 0");
    put("top_mass", {layers, kv}, top_mass_, "share of attention mass");
    put("top_mass_between", {layers, kv}, top_mass_between_, "share of attention mass, first and newest page left out");
    put("similarity", {layers, kv, kv}, similarity_, "share of the top pages");
    put("sink_mass", {layers, query}, sink_mass_, "share of attention mass");
    put("entropy", {layers, query}, entropy_, "nats");
    put("query_cosine", {layers, query}, cosine_, "cosine");
    put("query_cosine_low", {layers, query}, low_, "share of steps");
    put("query_cosine_high", {layers, query}, high_, "share of steps");
  }

 private:
  std::size_t kv_index(int layer, int head) const { return static_cast<std::size_t>(layer * shape_.kv_heads + head); }
  std::size_t query_index(int layer, int head) const {
    return static_cast<std::size_t>(layer * shape_.query_heads + head);
  }
  std::size_t of_slot(int slot, std::size_t all, std::size_t index) const {
    return static_cast<std::size_t>(slot) * (all / static_cast<std::size_t>(shape_.max_slots)) + index;
  }

  // The top pages of one KV head against its own earlier ones and those of the layer's heads before it.
  void pages(const kvlab::LayerStep& step, int row, int head, const kvlab::PageList& best) {
    const int candidates = step.pages.pages(row, head), slot = step.pages.slots[row];
    if (candidates <= top_) return;  // every page is a top page
    const std::size_t at = kv_index(step.layer, head);
    auto& history = history_[of_slot(slot, history_.size(), at)];
    const std::int32_t* first = &best.index(row, head, 0);
    history.emplace_back(first, first + best.count(row, head));
    const Pages& now = history.back();
    const double k = top_, chance = k / candidates;
    if (history.size() > 1) overlap_1_.add(at, common(now, history[history.size() - 2]) / k);
    if (history.size() > apart_) {
      const double overlap = common(now, history[history.size() - 1 - apart_]) / k;
      overlap_apart_.add(at, overlap);
      rco_.add(at, std::max(0., (overlap - chance) / (1 - chance)));
      history.pop_front();
    }
    for (int other = 0; other <= head; ++other) {
      const auto& theirs = history_[of_slot(slot, history_.size(), kv_index(step.layer, other))];
      if (theirs.empty()) continue;
      const double share = common(now, theirs.back()) / k;
      const auto kv = static_cast<std::size_t>(shape_.kv_heads);
      similarity_.add(at * kv + static_cast<std::size_t>(other), share);
      if (other != head) similarity_.add(kv_index(step.layer, other) * kv + static_cast<std::size_t>(head), share);
    }
    double mass = 0, between = 0;
    for (const std::int32_t page : now) {
      const double here = page_mass(step, row, head, page);
      mass += here;
      if (page != 0 && page != candidates - 1) between += here;
    }
    top_mass_.add(at, mass);
    top_mass_between_.add(at, between);
  }

  // Attention mass of a page, the mean over the group.
  double page_mass(const kvlab::LayerStep& step, int row, int head, int page) const {
    const int begin = page * shape_.page_size, end = std::min(begin + shape_.page_size, step.pages.tokens(row, head));
    double mass = 0;
    for (int q = head * shape_.group(); q < (head + 1) * shape_.group(); ++q)
      for (int t = begin; t < end; ++t) mass += step.mass(row, q, t);
    return mass / shape_.group();
  }

  void attention(const kvlab::LayerStep& step, int row, int head) {
    const std::size_t at = query_index(step.layer, head);
    const int tokens = step.pages.tokens(row, head / shape_.group());
    double entropy = 0, sinks = 0;
    for (int t = 0; t < tokens; ++t) {
      const double p = step.mass(row, head, t);
      if (p > 0) entropy -= p * std::log(p);
      if (t < sinks_) sinks += p;
    }
    entropy_.add(at, entropy);
    sink_mass_.add(at, sinks);

    auto& last = last_query_[of_slot(step.pages.slots[row], last_query_.size(), at)];
    const float* q = &step.queries.f32()(row, head, 0);
    if (!last.empty()) {
      double dot = 0, own = 0, before = 0;
      for (int d = 0; d < shape_.head_dim; ++d) {
        const double x = q[d], y = last[static_cast<std::size_t>(d)];
        dot += x * y, own += x * x, before += y * y;
      }
      const double cosine = dot / std::sqrt(std::max(own * before, 1e-30));
      cosine_.add(at, cosine);
      low_.add(at, cosine < thresholds_[0]);
      high_.add(at, cosine < thresholds_[1]);
    }
    last.assign(q, q + shape_.head_dim);
  }

  By by_;
  kvlab::GroupRule group_rule_;
  int top_;
  std::size_t apart_;
  int sinks_;
  double thresholds_[2];
  kvlab::Shape shape_;
  Means overlap_1_, overlap_apart_, rco_, top_mass_, top_mass_between_, similarity_, sink_mass_, entropy_, cosine_,
      low_, high_;
  std::vector<std::deque<Pages>> history_;      // [slot, layer, kv_head] top pages of the last steps
  std::vector<std::vector<float>> last_query_;  // [slot, layer, query head]
};

}  // namespace

KVLAB_PLUGIN(kvlab::profiler<HeadStats>("head_stats", "stability, similarity, mass and query drift of every head")
                 .param("top_pages", 64, 1, kvlab::any, "pages of a head that count as selected")
                 .param("by", By::mass, "what ranks pages: their attention mass (mean of the group) or Quest's bound")
                 .param("apart", 16, 2, kvlab::any, "decode steps between the selections that are compared")
                 .param("sinks", 4, 0, kvlab::any, "first tokens whose mass is told apart")
                 .param("group", kvlab::GroupRule::max, "how a GQA group's bounds become one")
                 .param("low", 0.8, -1, 1, "query_cosine_low counts steps below this cosine (FreeKV's threshold)")
                 .param("high", 0.9, -1, 1, "query_cosine_high counts steps below this one"))
