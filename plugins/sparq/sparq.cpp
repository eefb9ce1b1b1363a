// SparQ: a few components of the query, the largest of its group, score all keys. Attention reads the best tokens.
// Ribar et al., ICML 2024. Missing mass is not filled with the mean value, as the paper leaves it out with GQA.
#include <kvlab/plugin.hpp>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

namespace {

using kvlab::BudgetAmount;
using kvlab::Scores;

// The same memory with other extents.
Scores shaped(const Scores& x, std::int64_t heads, std::int64_t entries) {
  return Scores::dense(x.data, {x.extent[0], heads, entries});
}

class SparQ final : public kvlab::Policy {
 public:
  explicit SparQ(const kvlab::Params& p)
      : rank_(p.get<int>("rank")),
        local_(p.get<double>("local")),
        dense_(p.get<int>("dense_layers")),
        norm_scale_(p.get<bool>("norm_scale")) {}

  kvlab::Needs needs() const override {
    return kvlab::Needs{}.dense_layers(dense_).scratch_numbers(8).capturable(steady_);
  }

  void attach(const kvlab::Shape& shape, const BudgetAmount& budget, kvlab::Workspace& w) override {
    if (budget.kind == BudgetAmount::bytes)
      throw kvlab::Error(kvlab::Errc::config, "got a budget in bytes, wanted tokens or a ratio: nothing leaves");
    budget.require(1, "the step's own");
    const int rank = rank_ > 0 ? rank_ : std::max(1, shape.head_dim / 4);
    if (rank > shape.head_dim)
      throw kvlab::Error(kvlab::Errc::config, "got rank " + std::to_string(rank) + ", wanted at most head_dim, " +
                                                  std::to_string(shape.head_dim));
    limited_ = budget.kind != BudgetAmount::unlimited, steady_ = budget.kind != BudgetAmount::ratio;
    const int tokens = limited_ && steady_ ? static_cast<int>(budget.value) : 1;
    const auto numbers = [&](const char* tag, std::int32_t value) {
      const std::vector<std::int32_t> all(
          static_cast<std::size_t>(shape.max_slots) * static_cast<std::size_t>(shape.kv_heads), value);
      return static_cast<const std::int32_t*>(w.constant(tag, all.data(), all.size() * sizeof(all[0])));
    };
    rank_of_heads_ = numbers("rank", rank), keep_ = numbers("tokens to read", tokens);
    channels_ = numbers("channels", shape.head_dim), group_ = numbers("group", shape.group());
    rank_ = rank;
    const std::vector<kvlab::Pins> pins(static_cast<std::size_t>(shape.max_slots), newest(tokens));
    pins_ = static_cast<const kvlab::Pins*>(w.constant("pins", pins.data(), pins.size() * sizeof(pins[0])));
  }

  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    if (!limited_ || step.layer < dense_) return;
    const Scores scores = step.kv_head_scores("scores");
    kvlab::ops::row_dot(step.keys, sparse_query(step, s), scores, s);
    const auto best = step.list<kvlab::TokenList>("best", step.max_length);
    if (steady_) {
      kvlab::ops::top_tokens(step.pages, scores, of_heads(step, keep_), pins_, best, s);
    } else {
      std::vector<std::int32_t> keep;
      std::vector<kvlab::Pins> pins;
      for (int row = 0; row < step.rows(); ++row) {
        const int tokens = std::max(1, step.budget_tokens(row));
        keep.insert(keep.end(), static_cast<std::size_t>(step.kv_heads()), tokens);
        pins.push_back(newest(tokens));
      }
      kvlab::ops::top_tokens(step.pages, scores, step.upload_heads("tokens to read", keep.data()),
                             step.upload("pins", pins.data()), best, s);
    }
    edits.attend(best);
  }

 private:
  kvlab::Pins newest(int tokens) const { return {.last = 1 + static_cast<int>(local_ * (tokens - 1))}; }

  // A group's scores add up, so its queries do. Each is divided by the root of the share that its large components have
  // of all. Only ratios of these numbers matter: softmax gives them, of -1/2 ln(share).
  Scores sparse_query(const kvlab::LayerStep& step, kvlab::Stream s) const {
    const std::int64_t rows = step.rows(), heads = step.kv_heads(), all = step.shape->query_heads,
                       dim = step.pages.head_dim;
    const kvlab::View<const float, 3> q = step.queries.f32();
    const kvlab::PagedKv channels = of_length(step, channels_);
    const Scores query = step.query_head_vectors("query"), size = step.query_head_vectors("size");
    const Scores sum = step.kv_head_vectors("sum"), mask = step.kv_head_vectors("mask");

    // |q| = 2 max(q, 0) - q
    kvlab::ops::copy(size, q, s);
    kvlab::ops::above(size, 0, s);
    kvlab::ops::multiply(size, q, s);
    kvlab::ops::scale(size, 2, s);
    kvlab::ops::add(size, q, -1, s);
    kvlab::ops::group_reduce(channels, size, kvlab::GroupRule::sum, sum, s);
    const auto largest = step.list<kvlab::TokenList>("largest", dim);
    kvlab::ops::top_tokens(channels, sum, of_heads(step, rank_of_heads_), nullptr, largest, s);
    kvlab::ops::copy(mask, sum, s);
    kvlab::ops::above(mask, std::numeric_limits<float>::infinity(), s);
    kvlab::ops::set_listed(largest, 1, mask, s);
    kvlab::ops::copy(query, q, s);
    kvlab::ops::multiply(query, mask, s);
    if (norm_scale_) {
      const auto total = step.scratch<float>("total", {rows, all}), large = step.scratch<float>("large", {rows, all});
      kvlab::ops::head_sum(channels, size, {}, total, s);
      kvlab::ops::multiply(size, mask, s);
      kvlab::ops::head_sum(channels, size, {}, large, s);
      const Scores share = Scores::dense(large.data, {rows, all, 1});
      kvlab::ops::divide(share, Scores::dense(total.data, {rows, all, 1}), s);
      kvlab::ops::logarithm(share, 1e-30f, s);
      kvlab::ops::scale(share, -.5f, s);
      kvlab::ops::softmax(of_length(step, group_), shaped(share, heads, all / heads), 1, s);
      kvlab::ops::multiply(shaped(query, all * dim, 1), share, s);  // a head's number serves all its components
    }
    kvlab::ops::group_reduce(channels, query, kvlab::GroupRule::sum, sum, s);
    return sum;
  }

  // A view whose heads have as many entries as `numbers` says, one page each.
  static kvlab::PagedKv of_length(const kvlab::LayerStep& step, const std::int32_t* numbers) {
    kvlab::PagedKv kv = step.pages;
    kv.length = kvlab::View<const std::int32_t, 2>::dense(numbers, {step.shape->max_slots, kv.kv_heads});
    kv.page_size = 256;
    return kv;
  }
  static kvlab::View<const std::int32_t, 2> of_heads(const kvlab::LayerKv& kv, const std::int32_t* numbers) {
    return kvlab::View<const std::int32_t, 2>::dense(numbers, {kv.rows(), kv.kv_heads()});
  }

  int rank_;
  double local_;
  int dense_;
  bool norm_scale_, limited_ = false, steady_ = true;
  const std::int32_t *rank_of_heads_ = nullptr, *keep_ = nullptr, *channels_ = nullptr, *group_ = nullptr;
  const kvlab::Pins* pins_ = nullptr;
};

}  // namespace

KVLAB_PLUGIN(kvlab::policy<SparQ>("sparq", "the query's largest components choose a step's tokens (Ribar et al. 2024)")
                 .param("rank", 0, 0, 256, "components of a query that score keys; 0 = a quarter of head_dim")
                 .param("local", 0.25, 0, 1, "newest tokens that are read in any case, as a share of the budget")
                 .param("dense_layers", 0, 0, kvlab::any, "first layers that attend to everything")
                 .component("norm_scale",
                            "a query's scores are divided by the root of its components' share; off = not"))
