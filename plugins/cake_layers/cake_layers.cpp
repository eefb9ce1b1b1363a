// CAKE's division of a budget: layers get tokens by how widely their attention spreads and by how much it shifts from
// query to query. Qin et al., ICLR 2025. plugins/cake has the scores of its tokens.
#include <kvlab/plugin.hpp>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <numeric>

namespace {

using Counts = std::vector<std::int32_t>;

class CakeLayers final : public kvlab::Budget {
 public:
  explicit CakeLayers(const kvlab::Params& p)
      : window_(p.get<int>("window")), tau1_(p.get<double>("tau1")), tau2_(p.get<double>("tau2")) {}

  bool uniform_heads() const override { return true; }
  int numbers() const override { return 2; }
  int window_queries() const override { return window_; }

  // Of the attention to the tokens before the window, a group's heads added up: the sum of p ln(p + 1e-10), and the
  // sum of the variances over the window's queries.
  void measure(const kvlab::LayerKv& kv, kvlab::Scores, kvlab::Pins, kvlab::View<float, 3> out,
               kvlab::Stream s) override {
    namespace ops = kvlab::ops;
    kvlab::View<const float, 4> query = kv.window_queries.f32();
    const int queries = static_cast<int>(query.extent[2]);
    query.extent[2] = 1;
    std::vector<std::int32_t> ends;
    for (int i = 1; i <= queries; ++i) ends.push_back(kv.position[0] - queries + i);
    const std::int32_t* seen = kvlab::upload(*kv.workspace, "seen by", ends.data(), {queries}).data;
    const kvlab::Scores share = kv.query_head_scores("share"), mean = kv.query_head_scores("mean"),
                        sum = kv.query_head_scores("sum"), logarithm = kv.query_head_scores("logarithm");
    const auto each = [&](const auto& use) {
      for (int i = 0; i < queries; ++i) {
        kvlab::View<const float, 4> one = query;
        one.data += i * query.stride[2];
        ops::window_votes(one, seen + i, kv.pages, share, s);
        use(i);
      }
    };
    const auto add = [&](int i, kvlab::Scores to, kvlab::Scores x) {
      if (i == 0)
        ops::copy(to, x, s);
      else
        ops::add(to, x, 1, s);
    };
    // The group's numbers lie in `share`, which is free then.
    const auto write = [&](std::int64_t number, kvlab::Scores of_heads) {
      const auto group = kvlab::Scores::dense(share.data, {1, kv.kv_heads(), kv.max_length});
      ops::group_reduce(kv.pages, of_heads, kvlab::GroupRule::sum, group, s);
      ops::head_sum(kv.pages, group, {.last = window_},
                    {out.data + number * out.stride[2], {1, out.extent[1]}, {out.stride[0], out.stride[1]}}, s);
    };
    each([&](int i) {
      ops::copy(logarithm, share, s);
      ops::logarithm(logarithm, 1e-10f, s);
      ops::multiply(logarithm, share, s);
      add(i, sum, logarithm);
      add(i, mean, share);
    });
    write(0, sum);
    ops::scale(mean, 1.f / static_cast<float>(queries), s);
    each([&](int i) {
      ops::add(share, mean, -1, s);
      ops::multiply(share, share, s);
      add(i, sum, share);
    });
    ops::scale(sum, 1.f / static_cast<float>(std::max(1, queries - 1)), s);
    write(1, sum);
  }

  Counts divide(const kvlab::Division& d) const override {
    const auto heads = static_cast<std::size_t>(d.kv_heads);
    std::vector<double> preference;
    Counts most;
    for (std::size_t at = 0; at < d.length.size(); at += heads) {
      double spread = 0, shift = 0;
      for (std::size_t h = at; h < at + heads; ++h) spread -= d.measured[2 * h], shift += d.measured[2 * h + 1];
      const double p = std::pow(std::max(0., spread), 1 / tau1_) * std::pow(std::max(0., shift), 1 / tau2_);
      preference.push_back(std::isfinite(p) ? p : 0);
      const auto first = d.length.begin() + static_cast<std::ptrdiff_t>(at);
      most.push_back(std::max(0, *std::min_element(first, first + d.kv_heads) - d.pinned));
    }
    Counts keep;
    const std::int64_t total = std::int64_t{std::max(0, d.tokens - d.pinned)} * d.layers;
    const Counts layers = tokens(preference, total, most);
    for (std::size_t l = 0; l < layers.size(); ++l)
      keep.insert(keep.end(), heads, std::min(layers[l] + d.pinned, d.length[l * heads]));
    return keep;
  }

 private:
  // In proportion to the preferences, rounded down, and at most `most`. What a layer has no room for goes to the others
  // evenly, and what the rounding lost goes to the first layers.
  static Counts tokens(const std::vector<double>& preference, std::int64_t total, const Counts& most) {
    const double sum = std::accumulate(preference.begin(), preference.end(), 0.);
    const std::size_t layers = preference.size();
    std::vector<std::int64_t> counts;
    std::int64_t excess = 0;
    const auto cut = [&](std::size_t l) {
      const std::int64_t over = std::max<std::int64_t>(0, counts[l] - most[l]);
      counts[l] -= over;
      return over;
    };
    for (std::size_t l = 0; l < layers; ++l) {
      const double share = sum > 0 ? preference[l] / sum : 1 / static_cast<double>(layers);
      counts.push_back(static_cast<std::int64_t>(share * static_cast<double>(total)));
      excess += cut(l);
    }
    std::vector<std::size_t> room;
    while (excess > 0) {
      room.clear();
      for (std::size_t l = 0; l < layers; ++l)
        if (counts[l] < most[l]) room.push_back(l);
      if (room.empty()) break;
      const auto share = std::div(excess, static_cast<std::int64_t>(room.size()));
      excess = 0;
      for (std::size_t i = 0; i < room.size(); ++i) {
        counts[room[i]] += share.quot + (static_cast<std::int64_t>(i) < share.rem);
        excess += cut(room[i]);
      }
    }
    std::int64_t missing = std::min(total, std::accumulate(most.begin(), most.end(), std::int64_t{0})) -
                           std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
    for (std::size_t l = 0; missing > 0; l = (l + 1) % layers)
      if (counts[l] < most[l]) ++counts[l], --missing;
    return {counts.begin(), counts.end()};
  }

  int window_;
  double tau1_, tau2_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::budget<CakeLayers>(
                 "cake_layers", "layers get tokens by the spread and the shift of their attention (Qin et al. 2025)")
                 .param("window", 32, 2, 4096, "prompt's last queries whose attention counts")
                 .param("tau1", 1., 1e-2, 100, "temperature of the spread: layers differ less where it is high")
                 .param("tau2", 1., 1e-2, 100, "temperature of the shift"))
