// FastGen: at the prompt's end each head gets the first of five nested rules whose tokens recover enough of the head's
// attention: special tokens; punctuation too; tokens of frequent attention too; a local window too; everything. The
// rule stays. Ge et al., ICLR 2024.
#include <kvlab/kinds.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/step_numbers.hpp>
#include <kvlab/takes_no_pruner.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace {

enum class Recovered : std::uint8_t { mean, min };

}  // namespace

template <>
struct kvlab::Choices<Recovered> {
  static constexpr std::pair<Recovered, const char*> all[] = {{Recovered::mean, "mean"}, {Recovered::min, "min"}};
};

namespace {

namespace ops = kvlab::ops;
using kvlab::KeepRule;

class FastGen final : public kvlab::Policy, public kvlab::PreparesSteps, public kvlab::TakesNoPruner {
 public:
  explicit FastGen(const kvlab::Params& p)
      : recovery_(static_cast<float>(p.get<double>("recovery"))),
        frequent_(p.get<bool>("frequency") ? p.get<double>("frequent_share") : 0),
        local_(p.get<bool>("local") ? p.get<double>("window_share") : 0),
        sinks_(p.get<int>("sinks")),
        queries_(p.get<int>("queries")),
        whole_(p.get<int>("whole")),
        least_(p.get<Recovered>("group") == Recovered::min),
        special_(p.get<bool>("special") ? kvlab::kind_bit(kvlab::TokenKind::special) : 0),
        punctuation_(p.get<bool>("punctuation") ? kvlab::kind_bit(kvlab::TokenKind::punctuation) : 0) {}

  kvlab::Needs needs() const override {
    auto needs = kvlab::Needs{}.own_amount(true).token_ids(true).scratch_numbers(16).capturable(true);
    if (frequent_ > 0) needs.mass_into("attention", kvlab::GroupRule::mean, kvlab::Mass::decode);
    return queries_ > 0 ? needs.window_queries(queries_) : needs.chunked_prompts(false);
  }
  const char* takes_no_pruner() const override { return "evicts tokens"; }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount&, kvlab::Workspace& w) override {
    recovered_ = kvlab::KeptSeries("recovered attention", shape, rules - 1, w);
    const std::vector<std::int32_t> ones(static_cast<std::size_t>(shape.max_slots * shape.kv_heads), 1);
    if (least_)
      one_ = kvlab::View<const std::int32_t, 2>::dense(
          static_cast<const std::int32_t*>(w.constant("one", ones.data(), ones.size() * sizeof(ones[0]))),
          {shape.max_slots, shape.kv_heads});
    seen_ = {"seen", shape.max_slots, w};
    rules_ = {"rules", std::int64_t{shape.max_slots} * rules, w};
  }

  void prepare_step(const kvlab::StepCounters& c) override {
    seen_.put(c, c.position, c.rows);
    list_rules(c.position, c.rows, rules_.fresh());
    rules_.put(c);
  }

  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    // A head whose rules have recovered nothing keeps everything.
    if (!kv.last[0] || kv.position[0] <= whole_) return;
    const kvlab::View<const float, 4> queries = (queries_ > 0 ? kv.window_queries : kv.chunk_queries).f32();
    const auto count = static_cast<int>(queries.extent[2]);
    const auto all = attention(kv, queries, "attention", 0, s);
    const auto near = local_ > 0 ? attention(kv, queries, "attention of windows", window(kv.position[0]), s) : all;
    const auto mean = means(kv, of_groups(kv, all, s), count, s);
    choose(kv, all, near, mean, count, s);
    keep(kv, mean, edits, s);
    if (frequent_ == 0) return;
    // As if every query since a token came had given it the mean.
    const auto history = kv.kv_head_scores("history");
    ops::query_counts(kv.pages, kv.upload("seen", kv.position), no_limit, history, s);
    ops::multiply(history, mean, s);
    ops::blend_state(kv.state("attention"), 0, history, 1, s);
  }

  void observe(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    const auto sums = step.kv_head_scores("attention");
    if (frequent_ > 0)
      ops::read_state(step.state("attention"), sums, s);
    else
      ops::recency(step.pages, sums, s);  // no rule ranks tokens then
    keep(step, means(step, sums, no_limit, s), edits, s);
  }

 private:
  static constexpr int rules = 5, block = 128, no_limit = std::numeric_limits<int>::max();

  int window(int tokens) const { return std::max(1, static_cast<int>(local_ * tokens)); }

  // [row, rule] for texts of so many tokens.
  void list_rules(const std::int32_t* position, int rows, std::vector<KeepRule>& all) const {
    for (int row = 0; row < rows; ++row) {
      const int tokens = position[row];
      KeepRule rule{.kinds = special_, .first = sinks_};
      all.push_back(rule);
      rule.kinds |= punctuation_;
      all.push_back(rule);
      rule.best = static_cast<int>(std::ceil(frequent_ * tokens));
      all.push_back(rule);
      if (local_ > 0) rule.from = tokens - window(tokens);
      all.push_back(rule);
      all.push_back({.best = KeepRule::all});
    }
  }
  kvlab::View<const KeepRule, 2> rules_of(const kvlab::LayerKv& kv) const {
    if (kv.queries) return kvlab::View<const KeepRule, 2>::dense(rules_.data(), {kv.rows(), rules});
    std::vector<KeepRule> of_prompt;
    list_rules(kv.position, kv.rows(), of_prompt);
    return kvlab::upload(*kv.workspace, "rules", of_prompt.data(), {kv.rows(), rules});
  }

  // Of query heads where the least of a group counts, else of KV heads.
  kvlab::Scores scores(const kvlab::LayerKv& kv, const char* tag) const {
    return least_ ? kv.query_head_scores(tag) : kv.kv_head_scores(tag);
  }
  kvlab::Scores of_groups(const kvlab::LayerKv& kv, const kvlab::Scores& all, kvlab::Stream s) const {
    if (!least_) return all;
    const auto mean = kv.kv_head_scores("attention of groups");
    ops::group_reduce(kv.pages, all, kvlab::GroupRule::mean, mean, s);
    return mean;
  }

  // The attention of these queries to each token, summed over them, of the heads of scores(): those of a KV head are
  // the mean over the group. newest: ops::window_votes.
  kvlab::Scores attention(const kvlab::LayerPrefill& kv, kvlab::View<const float, 4> queries, const char* tag,
                          int newest, kvlab::Stream s) const {
    const auto count = static_cast<int>(queries.extent[2]);
    std::vector<std::int32_t> seen;
    for (int first = 0; first < count; first += block)
      seen.push_back(kv.position[0] - count + std::min(first + block, count));
    const std::int32_t* seen_by = kvlab::upload(*kv.workspace, "seen by", seen.data(), {std::ssize(seen)}).data;
    const auto sum = scores(kv, tag), part = scores(kv, "attention of a block");
    const auto votes = least_ ? part : kv.query_head_scores("votes");
    for (int first = 0, i = 0; first < count; first += block, ++i) {
      kvlab::View<const float, 4> some = queries;
      some.data += first * queries.stride[2];
      some.extent[2] = std::min(block, count - first);
      ops::window_votes(some, seen_by + i, kv.pages, least_ && first == 0 ? sum : votes, s, {}, newest);
      if (!least_) ops::group_reduce(kv.pages, votes, kvlab::GroupRule::mean, first == 0 ? sum : part, s);
      if (first > 0) ops::add(sum, part, 1, s);
    }
    return sum;
  }

  // Sums over the last `queries` queries become means over those of them that see the token.
  kvlab::Scores means(const kvlab::LayerKv& kv, const kvlab::Scores& sums, int queries, kvlab::Stream s) const {
    const auto mean = kv.kv_head_scores("mean attention"), counts = kv.kv_head_scores("queries");
    const std::int32_t* seen = kv.queries ? seen_.data() : kv.upload("seen", kv.position);
    ops::query_counts(kv.pages, seen, queries, counts, s);
    ops::copy(mean, sums, s);
    ops::divide(mean, counts, s);
    return mean;
  }

  // Writes what each rule but the last recovers. The rule of a head follows from these numbers, on the device.
  void choose(const kvlab::LayerPrefill& kv, const kvlab::Scores& all, const kvlab::Scores& near,
              const kvlab::Scores& mean, int queries, kvlab::Stream s) const {
    const auto rules_here = rules_of(kv);
    const auto kept = kv.kv_head_scores("kept"), recovered = scores(kv, "attention recovered");
    for (int rule = 0; rule + 1 < rules; ++rule) {
      const bool windows = rule == 3 && local_ > 0;  // each query has a window of its own: `near`
      auto one = rules_here;
      one.data += rule;
      one.extent[1] = 1;
      ops::keep_by_class(kv.pages, kv.text, mean, {}, one, kept, counts(kv), s);
      ops::copy(recovered, all, s);
      if (windows) ops::add(recovered, near, -1, s);
      ops::multiply(recovered, kept, s);
      if (windows) ops::add(recovered, near, 1, s);
      ops::scale(recovered, 1.f / static_cast<float>(queries), s);
      const auto all_rules = recovered_.of(kv);
      const kvlab::View<float, 2> to{
          all_rules.data + kv.slots[0] * all_rules.stride[0] + rule, {1, kv.kv_heads()}, {0, all_rules.stride[1]}};
      if (least_)
        least_of_groups(kv, recovered, to, s);
      else
        ops::head_sum(kv.pages, recovered, {}, to, s);
    }
  }

  // to[KV head] = the least sum of the group's query heads. Sums are scores of one token, and the least one is the
  // greatest with the other sign.
  void least_of_groups(const kvlab::LayerKv& kv, const kvlab::Scores& recovered, const kvlab::View<float, 2>& to,
                       kvlab::Stream s) const {
    const auto sums = kv.scratch<float>("recovered by query heads", {1, kv.shape->query_heads});
    const auto least = kv.scratch<float>("recovered by the least", {1, kv.kv_heads(), 1});
    const auto of_heads = kvlab::Scores::dense(sums.data, {1, kv.shape->query_heads, 1});
    kvlab::PagedKv numbers = kv.pages;
    numbers.length = one_;
    ops::head_sum(kv.pages, recovered, {}, sums, s);
    ops::negate(of_heads, s);
    ops::group_reduce(numbers, of_heads, kvlab::GroupRule::max, least, s);
    ops::negate(least, s);
    ops::copy({to.data, {1, kv.kv_heads(), 1}, {0, to.stride[1], 1}}, least, s);
  }

  void keep(const kvlab::LayerKv& kv, const kvlab::Scores& mean, kvlab::Edits& edits, kvlab::Stream s) const {
    const auto kept = kv.kv_head_scores("kept");
    const auto number = counts(kv);
    ops::keep_by_class(kv.pages, kv.text, mean, {recovered_.of(kv), recovery_}, rules_of(kv), kept, number, s);
    edits.evict_surplus({.keep = number, .scores = kept});
  }

  static kvlab::View<std::int32_t, 2> counts(const kvlab::LayerKv& kv) {
    return kv.scratch<std::int32_t>("tokens kept", {kv.rows(), kv.kv_heads()});
  }

  float recovery_;
  double frequent_, local_;
  int sinks_, queries_, whole_;
  bool least_;
  std::uint32_t special_, punctuation_;
  kvlab::View<const std::int32_t, 2> one_;  // [slot, kv_head]
  kvlab::KeptSeries recovered_;
  kvlab::StepNumbers<std::int32_t> seen_;  // [row]
  kvlab::StepNumbers<KeepRule> rules_;     // [row, rule]
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::policy<FastGen>("fastgen",
                           "gives each head the first of five nested rules that recovers enough of its attention to "
                           "the prompt (Ge et al. 2024)")
        .param("recovery", 0.85, 0.01, 1, "least share of the attention that a head's rule recovers, mean over queries")
        .param("frequent_share", 0.3, 0, 1, "tokens of most attention that the third rule adds, as a share of the text")
        .param("window_share", 0.3, 0, 1, "newest tokens that the fourth rule adds, as a share of the text")
        .param("sinks", 4, 0, kvlab::any, "first tokens that every rule keeps")
        .param("queries", 0, 0, kvlab::any,
               "queries at the prompt's end that the attention is measured by; 0 = all of them, in one chunk")
        .param("whole", 0, 0, kvlab::any, "prompts of at most so many tokens keep everything, and so do their answers")
        .param("group", Recovered::mean, "recovery of a KV head: the mean over its query heads, or the least of them")
        .component("special", "rules keep special tokens; off = they are tokens like others")
        .component("punctuation", "the second rule adds punctuation; off = it is the first rule once more")
        .component("frequency", "the third rule adds tokens of frequent attention; off = it adds none")
        .component("local", "the fourth rule adds a local window; off = it adds none"))
