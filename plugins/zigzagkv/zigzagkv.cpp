// ZigZagKV: a layer whose attention spreads over many tokens gets more of the budget than one that needs few. Zhong et
// al. 2024.
#include <kvlab/plugin.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>

namespace {

using Counts = std::vector<std::int32_t>;

// Rounds down, within the bounds. What is left of the total goes to those with room, one token each, the largest
// remainders first.
Counts whole(const std::vector<double>& exact, std::int64_t total, int least, const Counts& most) {
  Counts counts, order(exact.size());
  std::iota(order.begin(), order.end(), 0);
  for (std::size_t i = 0; i < exact.size(); ++i)
    counts.push_back(
        static_cast<std::int32_t>(std::min<double>(std::max<double>(std::trunc(exact[i]), least), most[i])));
  const auto remainder = [&](std::int32_t i) {
    const double x = exact[static_cast<std::size_t>(i)];
    return x - std::trunc(x);
  };
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return remainder(a) > remainder(b); });
  std::int64_t missing = total - std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  if (missing < 0) std::reverse(order.begin(), order.end());
  for (bool any = true; missing != 0 && any;) {
    any = false;
    const int step = missing > 0 ? 1 : -1;
    for (const std::int32_t i : order) {
      std::int32_t& count = counts[static_cast<std::size_t>(i)];
      if (missing == 0 || count + step < least || count + step > most[static_cast<std::size_t>(i)]) continue;
      count += step, missing -= step, any = true;
    }
  }
  return counts;
}

class ZigZagKv final : public kvlab::Budget {
 public:
  explicit ZigZagKv(const kvlab::Params& p)
      : mass_(p.get<float>("mass")),
        floor_(p.get<double>("floor")),
        each_head_(p.get<bool>("each_head")),
        window_counts_(p.get<bool>("window_counts")) {}

  bool uniform_heads() const override { return !each_head_; }
  // How many tokens a head needs. With the window's tokens a second number is the need without them: it is 0 where no
  // score is a share of attention.
  int numbers() const override { return window_counts_ ? 2 : 1; }
  void measure(const kvlab::LayerKv& kv, kvlab::Scores scores, kvlab::Pins pins, kvlab::View<float, 3> out,
               kvlab::Stream s) override {
    const auto number = [&](int i) {
      return kvlab::View<float, 2>{
          out.data + i * out.stride[2], {out.extent[0], out.extent[1]}, {out.stride[0], out.stride[1]}};
    };
    kvlab::ops::tokens_of_share(kv.pages, scores, mass_, pins, number(numbers() - 1), s);
    if (window_counts_)
      kvlab::ops::tokens_of_share(kv.pages, with_window(kv, scores, pins, s), mass_, {}, number(0), s);
  }

  Counts divide(const kvlab::Division& d) const override {
    check_scores(d);
    const auto heads = static_cast<std::size_t>(d.kv_heads);
    std::vector<float> measured;  // [layer][kv_head]
    for (std::size_t at = 0; at < d.measured.size(); at += static_cast<std::size_t>(numbers()))
      measured.push_back(d.measured[at]);
    std::vector<double> needs;
    Counts shortest;
    for (std::size_t at = 0; at < measured.size(); at += heads) {
      const auto first = static_cast<std::ptrdiff_t>(at), last = first + d.kv_heads;
      needs.push_back(std::accumulate(measured.begin() + first, measured.begin() + last, 0.) / d.kv_heads);
      shortest.push_back(*std::min_element(d.length.begin() + first, d.length.begin() + last));
    }
    const double floor = floor_ * d.tokens;
    const Counts layers = whole(shares(needs, floor, (d.tokens - floor) * d.layers), std::int64_t{d.layers} * d.tokens,
                                d.pinned, shortest);
    Counts keep;
    for (std::size_t l = 0; l < layers.size(); ++l) {
      if (!each_head_) {
        keep.insert(keep.end(), heads, layers[l]);
        continue;
      }
      const auto first = static_cast<std::ptrdiff_t>(l * heads), last = first + d.kv_heads;
      const std::vector<double> of_heads(measured.begin() + first, measured.begin() + last);
      const std::int64_t total = std::int64_t{layers[l]} * d.kv_heads;
      const Counts counts = whole(shares(of_heads, 0, static_cast<double>(total)), total, d.pinned,
                                  Counts(d.length.begin() + first, d.length.begin() + last));
      keep.insert(keep.end(), counts.begin(), counts.end());
    }
    return keep;
  }

 private:
  // Every layer would get the same where all scores are 0 or below, as if there were no split.
  void check_scores(const kvlab::Division& d) const {
    const bool binds = d.tokens > d.pinned && std::any_of(d.length.begin(), d.length.end(),
                                                          [&](std::int32_t length) { return length > d.tokens; });
    if (!binds || (floor_ == 1 && !each_head_)) return;
    for (auto i = static_cast<std::size_t>(numbers()) - 1; i < d.measured.size();
         i += static_cast<std::size_t>(numbers()))
      if (d.measured[i] > 0) return;
    throw kvlab::Error(kvlab::Errc::config,
                       "got a scorer whose scores are all 0 or below with the split zigzagkv, wanted scores that are "
                       "shares of attention, e.g. of snapkv");
  }

  // The scores, where a pinned token has the head's highest one and a vote of 1 by each query of the window. A head's
  // scores are divided by that number, so that the same number can be pinned in all heads. Shares stay as they are.
  static kvlab::Scores with_window(const kvlab::LayerKv& kv, kvlab::Scores scores, kvlab::Pins pins, kvlab::Stream s) {
    const kvlab::Scores all = kv.kv_head_scores("scores with the window"),
                        at_most = kv.kv_head_scores("at the highest");
    const auto sum_of_heads = [&](const char* tag) {
      const auto sum = kv.scratch<float>(tag, {kv.rows(), kv.kv_heads()});
      kvlab::ops::head_sum(kv.pages, at_most, {}, sum, s);
      return kvlab::Scores::dense(sum.data, {kv.rows(), kv.kv_heads(), 1});
    };
    kvlab::ops::copy(all, scores, s);
    kvlab::ops::set_pinned(kv.pages, pins, 0, all, s);
    kvlab::ops::copy(at_most, all, s);
    kvlab::ops::softmax(kv.pages, at_most, 1e-20f, s);  // 1 at the highest score, 0 elsewhere
    const kvlab::Scores one = sum_of_heads("one");
    kvlab::ops::multiply(at_most, all, s);
    const kvlab::Scores highest = sum_of_heads("highest scores");
    kvlab::ops::add(highest, one, static_cast<float>(std::max(1, pins.last)), s);
    constexpr std::int64_t block = 1 << 15;  // tokens that a launch takes in place of rows
    for (std::int64_t row = 0; row < kv.rows(); ++row)
      for (std::int64_t t = 0; t < kv.max_length; t += block) {
        const std::int64_t tokens = std::min<std::int64_t>(block, kv.max_length - t), heads = kv.kv_heads();
        kvlab::ops::divide({&all(row, 0, t), {tokens, heads, 1}, {1, all.stride[1], 1}},
                           {&highest(row, 0, 0), {tokens, heads, 1}, {0, 1, 1}}, s);
      }
    kvlab::ops::set_pinned(kv.pages, pins, 1, all, s);
    return all;
  }

  // floor + what each gets of `rest` in proportion to its need. Heads of a layer that needs nothing get the same.
  static std::vector<double> shares(const std::vector<double>& needs, double floor, double rest) {
    const double sum = std::accumulate(needs.begin(), needs.end(), 0.);
    std::vector<double> out;
    for (const double need : needs)
      out.push_back(floor + rest * (sum > 0 ? need / sum : 1 / static_cast<double>(needs.size())));
    return out;
  }

  float mass_;
  double floor_;
  bool each_head_, window_counts_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::budget<ZigZagKv>("zigzagkv",
                                     "layers get tokens by how many of them hold most of the attention (Zhong et al. "
                                     "2024)")
                 .param("mass", 0.9, 1e-6, 1, "a head needs as many tokens as hold this share of its scores")
                 .param("floor", 0.2, 0, 1, "share of the mean budget that every layer keeps; 1 = uniform")
                 .param("each_head", false,
                        "heads of a layer share its tokens by what they need; off = they keep the same number")
                 .param("window_counts", false,
                        "tokens that are always kept count, each with more than the highest score, so budgets are "
                        "nearly uniform; off = they count for nothing"))
