// How many tokens hold most of a prompt's attention, and how far attention scores and norms of values are spread.
// LeanKV, sections 3.1 and 3.3, figures 1, 3 and 4.
#include <kvlab/plugin.hpp>
#include <kvlab/statistics.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

namespace {

constexpr int score_decades = 10, norm_decades = 8, smallest_norm = -4;  // 10^-4

// The mean and the sample standard deviation of what is added.
struct Spread {
  double sum = 0, squares = 0, count = 0;
  void add(double x) { sum += x, squares += x * x, count += 1; }
  float mean() const { return static_cast<float>(sum / count); }  // NaN without numbers
  float deviation() const {
    if (count < 2) return std::numeric_limits<float>::quiet_NaN();
    return static_cast<float>(std::sqrt(std::max(0., (squares - sum * sum / count) / (count - 1))));
  }
};

struct Range {
  double low = std::numeric_limits<double>::infinity(), high = 0;
  void add(double x) {
    if (x > 0) low = std::min(low, x), high = std::max(high, x);
  }
  float orders() const { return high > 0 ? static_cast<float>(std::log10(high / low)) : std::nanf(""); }
};

class CriticalTokens final : public kvlab::Profiler {
 public:
  explicit CriticalTokens(const kvlab::Params& p) : share_(p.get<double>("share")) {}

  kvlab::Needs needs() const override { return kvlab::Needs{}.mass(kvlab::Mass::all); }
  bool by_pages() const override { return false; }

  void attach(const kvlab::Shape& shape, kvlab::Workspace&) override {
    shape_ = shape;
    mass_.resize(shape.max_slots, shape.layers, shape.kv_heads);
    critical_.assign(static_cast<std::size_t>(shape.layers * shape.kv_heads), {});
    of_layer_.assign(static_cast<std::size_t>(shape.layers), {});
    scores_.assign(static_cast<std::size_t>(shape.layers), {});
    norms_ = scores_;
    score_decades_.resize({shape.layers, shape.kv_heads, score_decades});
    norm_decades_.resize({shape.layers, shape.kv_heads, norm_decades});
  }

  // A chunk's mass is that of its own queries.
  void prefill(const kvlab::LayerPrefill& kv, kvlab::Stream s) override {
    const int tokens = kv.position[0];
    for (int q = 0; q < shape_.query_heads; ++q) {
      std::vector<double>& sum = mass_.at(kv.slots[0], kv.layer, q / shape_.group());
      sum.resize(static_cast<std::size_t>(tokens));
      for (int t = 0; t < tokens; ++t) sum[static_cast<std::size_t>(t)] += double{kv.mass(0, q, t)} / shape_.group();
    }
    if (!kv.last[0]) return;
    const kvlab::Scores norm = kv.kv_head_scores("norms of values");
    kvlab::ops::row_norm(kvlab::KvRows{&kv.pages, kvlab::KvSide::value}, norm, s);
    Spread heads;
    for (int head = 0; head < shape_.kv_heads; ++head) {
      std::vector<double>& mass = mass_.at(kv.slots[0], kv.layer, head);
      const double count = critical(mass);
      critical_[static_cast<std::size_t>(kv.layer * shape_.kv_heads + head)].add(count);
      heads.add(count);
      for (int t = 0; t < tokens; ++t) {
        const double score = mass[static_cast<std::size_t>(t)] / (tokens - t);  // so many queries see the token
        spread(kv.layer, head, score, norm(0, head, t));
      }
      mass.clear();
    }
    of_layer_[static_cast<std::size_t>(kv.layer)].add(heads.mean());
  }

  void release(int slot) override { mass_.clear(slot); }

  void finish(kvlab::Profile& out) override {
    const std::int64_t layers = shape_.layers, heads = shape_.kv_heads;
    const auto each = [](const auto& all, auto number) {
      std::vector<float> values;
      for (const auto& one : all) values.push_back(number(one));
      return values;
    };
    const auto mean = [](const Spread& x) { return x.mean(); };
    const auto deviation = [](const Spread& x) { return x.deviation(); };
    const auto orders = [](const Range& x) { return x.orders(); };
    const std::string share = std::to_string(share_).substr(0, 4);
    const std::string few = "fewest tokens with " + share + " of a prompt's attention";
    out["critical_tokens"] = {{layers, heads}, each(critical_, mean), few + ", mean over prompts"};
    out["critical_tokens_deviation"] = {{layers, heads}, each(critical_, deviation), few + ", deviation over prompts"};
    out["layer_critical_tokens"] = {{layers}, each(of_layer_, mean), few + ", mean over heads and prompts, by layer"};
    out["layer_critical_tokens_deviation"] = {
        {layers}, each(of_layer_, deviation), few + ", deviation over prompts, by layer"};
    const std::string span = "orders of magnitude from the smallest to the largest of the layer, by layer";
    out["score_span"] = {{layers}, each(scores_, orders), "a token's mean attention: " + span};
    out["norm_span"] = {{layers}, each(norms_, orders), "a value's norm: " + span};
    out["score_decades"] = score_decades_.array(
        "share of tokens whose mean attention is in 10^-N to 10^(1-N), the last N with all below it, by N");
    out["norm_decades"] = norm_decades_.array(
        "share of tokens whose value has a norm in 10^(N-5) to 10^(N-4), the ends with all beyond them, by N");
  }

 private:
  // The fewest tokens with a share of the sum.
  double critical(std::vector<double> mass) const {
    std::sort(mass.begin(), mass.end(), std::greater<>());
    const double all = std::accumulate(mass.begin(), mass.end(), 0.);
    double sum = 0;
    std::size_t n = 0;
    while (n < mass.size() && sum < share_ * all) sum += mass[n++];
    return static_cast<double>(n);
  }

  void spread(int layer, int head, double score, double norm) {
    scores_[static_cast<std::size_t>(layer)].add(score);
    norms_[static_cast<std::size_t>(layer)].add(norm);
    const auto count = [&](kvlab::Means<3>& decades, int bins, double at) {
      const int own = at >= 0 ? std::min(bins - 1, static_cast<int>(std::min(at, 1e6))) : 0;
      for (int bin = 0; bin < bins; ++bin) decades.add({layer, head, bin}, bin == own);
    };
    count(score_decades_, score_decades, score > 0 ? std::ceil(-std::log10(score)) - 1 : score_decades);
    count(norm_decades_, norm_decades, norm > 0 ? std::floor(std::log10(norm)) - smallest_norm : 0);
  }

  double share_;
  kvlab::Shape shape_;
  kvlab::PerSequence<std::vector<double>> mass_;  // [token] of a KV head, mean over its group
  std::vector<Spread> critical_;                  // [layer, KV head]
  std::vector<Spread> of_layer_;                  // [layer] of a prompt's mean over heads
  std::vector<Range> scores_, norms_;             // [layer]
  kvlab::Means<3> score_decades_, norm_decades_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::profiler<CriticalTokens>("critical_tokens",
                                             "tokens that hold most of a prompt's attention, and spans of scores and "
                                             "norms")
                 .param("share", 0.95, 0.01, 1, "of the attention that a prompt's queries give all tokens"))
