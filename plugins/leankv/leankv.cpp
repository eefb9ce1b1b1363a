// LeanKV: important tokens are stored in more bits than others, keys in more than values, and the rest is dropped. Each
// head decides by itself how many. Zhang et al. 2024, published later as DiffKV. A page has one codec here, so low
// tokens that fill no page yet stay in the high codec. A head has at most page_size - 1 of these, and as many again
// that the prompt left.
#include <kvlab/plugin.hpp>

#include <limits>

namespace {

enum class Unit : std::uint8_t { n, i };
enum class Queries : std::uint8_t { last_64, all };
enum class Greatest : std::uint8_t { mean, score };
enum class Rule : std::uint8_t { merged, algorithm_1 };
enum class Age : std::uint8_t { all_steps, counted };
enum class Bits : std::uint8_t { k8v8, k8v4, k4v8, k4v4, k4v2, k2v4 };

}  // namespace

namespace kvlab {

template <>
struct Choices<Unit> {
  static constexpr std::pair<Unit, const char*> all[] = {{Unit::n, "n"}, {Unit::i, "i"}};
};
template <>
struct Choices<Queries> {
  static constexpr std::pair<Queries, const char*> all[] = {{Queries::last_64, "last_64"}, {Queries::all, "all"}};
};
template <>
struct Choices<Greatest> {
  static constexpr std::pair<Greatest, const char*> all[] = {{Greatest::mean, "mean"}, {Greatest::score, "score"}};
};
template <>
struct Choices<Rule> {
  static constexpr std::pair<Rule, const char*> all[] = {{Rule::merged, "merged"}, {Rule::algorithm_1, "algorithm_1"}};
};
template <>
struct Choices<Age> {
  static constexpr std::pair<Age, const char*> all[] = {{Age::all_steps, "all_steps"}, {Age::counted, "counted"}};
};
template <>
struct Choices<Bits> {
  static constexpr std::pair<Bits, const char*> all[] = {{Bits::k8v8, "k8v8"}, {Bits::k8v4, "k8v4"},
                                                         {Bits::k4v8, "k4v8"}, {Bits::k4v4, "k4v4"},
                                                         {Bits::k4v2, "k4v2"}, {Bits::k2v4, "k2v4"}};
};

}  // namespace kvlab

namespace {

using kvlab::GroupRule;
using kvlab::ops::LevelRule;

constexpr int last_queries = 64;

class LeanKv final : public kvlab::Policy {
 public:
  explicit LeanKv(const kvlab::Params& p)
      : all_queries_(p.get<Queries>("queries") == Queries::all),
        greatest_score_(p.get<Greatest>("greatest") == Greatest::score),
        counted_(p.get<Age>("age") == Age::counted),
        on_device_(p.get<bool>("device_compaction")) {
    const bool differ = p.get<bool>("key_value_differentiation");
    for (const char* name : {"high", "low"}) codecs_.push_back(codec(p.get<Bits>(name), differ));
    rule_.high_from = p.get<float>("high_from");
    rule_.low_from = p.get<float>("low_from");
    rule_.unit = p.get<Unit>("unit") == Unit::n ? LevelRule::of_text : LevelRule::of_token;
    rule_.window = p.get<int>("window");
    rule_.queries = all_queries_ ? 0 : last_queries;
    rule_.same_numbers = !p.get<bool>("per_head_dynamics");
    rule_.leaving_decides = p.get<Rule>("rule") == Rule::algorithm_1;
    if (rule_.low_from > rule_.high_from)
      throw kvlab::Error(kvlab::Errc::config, "got low_from " + std::to_string(rule_.low_from) +
                                                  " above high_from, wanted at most " +
                                                  std::to_string(rule_.high_from));
    if (all_queries_ && greatest_score_)
      throw kvlab::Error(
          kvlab::Errc::config,
          "got greatest: score with queries: all, wanted queries: last_64: the greatest score of each query is "
          "not in the sums that attention leaves of all queries");
    const auto text = [&](const char* name) {
      return std::string(name) + ": " + kvlab::Choices<Bits>::all[static_cast<std::size_t>(p.get<Bits>(name))].second;
    };
    if (!p.get<bool>("token_differentiation"))
      rule_.high_from = rule_.low_from;
    else if (codecs_[1].k.bits > codecs_[0].k.bits || codecs_[1].v.bits > codecs_[0].v.bits)
      throw kvlab::Error(kvlab::Errc::config,
                         "got " + text("low") + " beside " + text("high") + ", wanted no more bits than high has");
  }

  std::vector<kvlab::CodecSpec> codecs() const override { return codecs_; }
  // demand() says nothing: how many tokens a head keeps follows from its scores, and there is one tier.

  kvlab::Needs needs() const override {
    return kvlab::Needs{}
        .mass_into("significance", GroupRule::max, all_queries_ ? kvlab::Mass::all : kvlab::Mass::decode)
        .window_queries(all_queries_ ? 0 : last_queries)
        .own_amount(true)
        .all_layers(true)
        .planned_on_host(!on_device_)
        .capturable(true);
  }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount&, kvlab::Workspace& w) override {
    pending_ = kvlab::KeptNumbers("pending", shape, w);
    if (counted_) first_ = kvlab::KeptNumbers("first counted", shape, w);
  }

  // The column keeps the prompt's sums. A sum of greatest scores costs a pass over the queries, so it takes the last.
  // Each layer stores its tokens behind its own attention, so its old frames serve the next layer. One launch for all
  // layers would reserve frames of both codecs for all of them. In heads of 128 a token has 200 bytes in k8v4 and would
  // reserve 304 more: as much as bf16 takes.
  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    const kvlab::StateColumn column = kv.state("significance");
    if (!kv.last[0]) return;
    const std::int32_t* seen = kv.upload("seen", kv.position);
    const kvlab::Scores sums = kv.kv_head_scores("sums");
    if (all_queries_) {
      kvlab::ops::read_state(column, sums, s);
    } else {
      const kvlab::Scores votes = greatest_score_ ? sums : kv.query_head_scores("votes");
      kvlab::ops::window_votes(kv.window_queries, seen, kv.pages, votes, s);
      if (!greatest_score_) kvlab::ops::group_reduce(kv.pages, votes, GroupRule::max, sums, s);
      kvlab::ops::blend_state(column, 0, sums, 1, s);
    }
    const std::int64_t room = (kv.max_length + 15) / 16 * 16;  // so that kernels read 16 levels at once
    const auto plan = kv.scratch<std::uint8_t>("plan", {kv.rows(), kv.kv_heads(), room});
    kvlab::ops::levels(kv.pages, sums, seen, rule_, plan, {pending_.of(kv), first_.of(kv)}, s);
    edits.store_as(plan);
  }

  void finish_step(const kvlab::Step& step, kvlab::Edits& edits, kvlab::Stream s) override {
    const kvlab::ops::Demotion demotion{step.list<kvlab::TokenList>("pairs", 2), step.list<kvlab::TokenList>("out", 1),
                                        step.list<kvlab::PageList>("full", 1)};
    kvlab::ops::demote(step.state("significance"), rule_, {pending_.of(step), first_.of(step)}, demotion, s);
    edits.for_all_layers();
    edits.move(demotion.pairs);
    edits.evict(demotion.out);
    edits.encode(demotion.full, 1);
  }

 private:
  static kvlab::CodecSpec codec(Bits bits, bool differ) {
    constexpr std::uint8_t keys[] = {8, 8, 4, 4, 4, 2}, values[] = {8, 4, 8, 4, 2, 4};
    const auto i = static_cast<std::size_t>(bits);
    return {{keys[i]}, {differ ? values[i] : keys[i]}};
  }

  bool all_queries_, greatest_score_, counted_, on_device_;
  std::vector<kvlab::CodecSpec> codecs_;
  LevelRule rule_;
  kvlab::KeptNumbers pending_, first_;
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::policy<LeanKv>("leankv", "important tokens in more bits, others in fewer or dropped (Zhang et al. 2024)")
        .param("high", Bits::k8v4, "codec of high tokens: bits of keys, bits of values")
        .param("low", Bits::k4v2, "codec of low tokens, of no more bits than high")
        .param("high_from", 1.0, 0, kvlab::any, "a token is high from so many units of mean score on")
        .param("low_from", 0.02, 0, kvlab::any, "a token is low from so many units on, below it is dropped")
        .param("window", 64, 1, kvlab::any, "newest tokens that are always high")
        .param("unit", Unit::n, "of the prompt's thresholds: 1 / tokens (n) or 1 / number of the token (i)")
        .param("queries", Queries::last_64, "of the prompt that score its tokens")
        .param("greatest", Greatest::mean,
               "of a group's query heads, in the prompt: of their means (the code's order, as the paper reads) "
               "or of their scores for each query, whose mean then counts. Decode steps add the greatest score")
        .param("rule", Rule::merged, "of decode steps: of the released code, or the paper's algorithm 1")
        .param("age", Age::all_steps,
               "steps that a mean in decode steps divides by: all since the token, or scored ones")
        .component("key_value_differentiation", "off = values get the bits of keys")
        .component("token_differentiation", "off = no low tokens; what would be low is high")
        .component("per_head_dynamics", "off = each head of a layer keeps the layer's mean numbers of tokens")
        .component("device_compaction",
                   "off = the CPU's threads plan where tokens go and which frames they take, also on a GPU"))
