// Scissorhands: a token that the last queries found unimportant stays unimportant. Many tokens leave at once, now and
// then. Liu et al., NeurIPS 2023.
#include <kvlab/plugin.hpp>
#include <kvlab/query_shares.hpp>

#include <algorithm>

namespace {

constexpr int most_blocks = 64;

class Scissorhands final : public kvlab::Scorer {
 public:
  explicit Scissorhands(const kvlab::Params& p)
      : window_(p.get<int>("window")),
        recent_(p.get<int>("recent")),
        drop_(p.get<int>("drop")),
        each_head_(p.get<bool>("each_head")) {
    const int blocks = drop_ > 0 && window_ > drop_ ? window_ / drop_ : 1;
    if ((blocks > 1 && window_ % drop_ != 0) || blocks > most_blocks)
      throw kvlab::Error(kvlab::Errc::config,
                         "got window " + std::to_string(window_) + " with drop " + std::to_string(drop_) +
                             ", wanted a window of at most drop, or of 2 to " + std::to_string(most_blocks) +
                             " times drop: each drop in the window takes a count of its own per token");
    for (int i = 0; i < blocks; ++i) blocks_.push_back("unimportant, block " + std::to_string(i));
  }

  kvlab::Needs needs() const override {
    kvlab::Needs n;
    for (const std::string& block : blocks_) n.token_state(block);
    return n.window_queries(window_)
        .mass(drop_ > 0 ? kvlab::Mass::decode : kvlab::Mass::none)
        .steps(true)
        .capturable(true);
  }
  kvlab::Pins pins(int) const override { return {.last = recent_}; }
  bool steady_score() const override { return true; }
  int every() const override { return drop_; }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount&, kvlab::Workspace&) override {
    newer_ = 1;
    for (int n = shape.max_tokens; n > 0; n /= 2) newer_ /= 2;
  }

  void observe(const kvlab::LayerKv& kv, kvlab::Stream s) override {
    if (kv.window_queries) return count_prompt(kv, s);
    if (!kv.mass) return;
    begin_block(kv, s);
    count(kv, s);
  }

  // The counts are whole numbers. Text positions add less than 1, so that of equal counts the newer token stays.
  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    const kvlab::Scores more = kv.kv_head_scores("more");
    kvlab::ops::read_state(kv.state(blocks_[0]), out, s);
    for (std::size_t i = 1; i < blocks_.size(); ++i) {
      kvlab::ops::read_state(kv.state(blocks_[i]), more, s);
      kvlab::ops::add(out, more, 1, s);
    }
    kvlab::ops::negate(out, s);
    kvlab::ops::recency(kv.pages, more, s);
    kvlab::ops::add(out, more, newer_, s);
  }

 private:
  // A step's attention: adds 1 to the newest block's count of each token whose share is below 1 / tokens.
  void count(const kvlab::LayerKv& kv, kvlab::Stream s) const {
    const int heads = each_head_ ? kv.shape->query_heads : kv.kv_heads();
    const kvlab::Scores counts = kv.kv_head_scores("counts");
    kvlab::Scores below = kv.scratch<float>("below", {kv.rows(), heads, kv.max_length});
    kvlab::View<const float, 3> attention = kv.mass;
    if (!each_head_) {
      kvlab::ops::group_reduce(kv.pages, attention, kvlab::GroupRule::mean, counts, s);
      attention = counts;
    }
    kvlab::ops::set_pinned(kv.pages, {.last = kv.max_length}, 0, below, s);
    kvlab::ops::softmax(kv.pages, below, 1, s);
    kvlab::ops::add(below, attention, -1, s);
    kvlab::ops::above(below, 0, s);
    if (each_head_) {
      kvlab::ops::group_reduce(kv.pages, below, kvlab::GroupRule::sum, counts, s);
      below = counts;
    }
    kvlab::ops::blend_state(kv.state(blocks_[0]), 1, below, 1, s);
  }

  // The prompt's last queries, those of a block at once. A prompt has one row.
  void count_prompt(const kvlab::LayerKv& kv, kvlab::Stream s) const {
    const kvlab::View<const float, 4> query = kv.window_queries.f32();
    const int queries = static_cast<int>(query.extent[2]), of_block = blocks_.size() > 1 ? drop_ : queries;
    std::vector<std::int32_t> ends;  // text tokens that the newest query of each block sees
    for (int newer = 0; newer < queries; newer += of_block) ends.push_back(kv.position[0] - newer);
    const auto blocks = static_cast<std::int64_t>(ends.size());
    const std::int32_t* seen = kvlab::upload(*kv.workspace, "seen", ends.data(), {blocks}).data;
    const kvlab::Scores counts = kv.kv_head_scores("counts");
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      const int end = queries - static_cast<int>(i) * of_block, first = std::max(0, end - of_block);
      kvlab::View<const float, 3> numbers;  // none count as 1, so a factor of 0 clears
      if (end > 0) {
        kvlab::View<const float, 4> part = query;
        part.data += first * query.stride[2], part.extent[2] = end - first;
        kvlab::QueryShares how{.rule = each_head_ ? kvlab::ShareRule::below_each : kvlab::ShareRule::below_mean};
        how.seen = seen + i;
        kvlab::ops::query_shares(part, kv.pages, how, counts, s);
        numbers = counts;
      }
      kvlab::ops::blend_state(kv.state(blocks_[i]), 0, numbers, end > 0 ? 1.f : 0.f, s);
    }
  }

  // Before a step counts: in the first step after a drop the blocks grow older. A window that is shorter than the steps
  // between drops is a single block, which begins `window` steps before the drop.
  void begin_block(const kvlab::LayerKv& kv, kvlab::Stream s) const {
    const bool one = blocks_.size() == 1;
    const kvlab::Heads due = kvlab::Heads::every(kv.steps, drop_, one ? window_ : 0);
    const kvlab::Scores older = kv.kv_head_scores("older");
    for (std::size_t i = blocks_.size() - 1; i > 0; --i) {
      kvlab::ops::read_state(kv.state(blocks_[i - 1]), older, s, due);
      kvlab::ops::blend_state(kv.state(blocks_[i]), 0, older, 1, s, due);
    }
    kvlab::ops::blend_state(kv.state(blocks_[0]), 0, {}, 0, s, due);
  }

  int window_, recent_, drop_;
  bool each_head_;
  float newer_ = 0;                  // a text position's part of a score
  std::vector<std::string> blocks_;  // token state, newest first
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::scorer<Scissorhands>(
        "scissorhands", "drops what most of the last queries attended to less than to the mean (Liu et al. 2023)")
        .param("window", 400, 1, 4096, "last queries that count: each finds tokens below 1 / tokens unimportant")
        .param("recent", 10, 0, kvlab::any, "newest tokens that are always kept, part of the budget")
        .param("drop", 400, 0, kvlab::any,
               "tokens that leave at once, so decode steps between evictions; 0 = the prompt only. The budget is what "
               "stays: the paper's buffer is the budget and this")
        .param("each_head", false,
               "query heads of a GQA group count for themselves; off = their mean attention counts"))
