// InfLLM: blocks of tokens lie on the host, and each step and each chunk of a prompt fetches the best ones. A few keys
// of a block stand for it, those that near queries attended to most. Xiao et al., NeurIPS 2024.
#include <kvlab/blocks.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/prompt_lists.hpp>
#include <kvlab/takes_no_pruner.hpp>
#include <kvlab/tier_demand.hpp>

#include <algorithm>
#include <string>
#include <vector>

namespace {
enum class Positions { clamped, original };
}

template <>
struct kvlab::Choices<Positions> {
  static constexpr std::pair<Positions, const char*> all[] = {{Positions::clamped, "clamped"},
                                                              {Positions::original, "original"}};
};

namespace {

using kvlab::BudgetAmount;

constexpr int most_tokens = 1 << 24;

class InfLlm final : public kvlab::Policy, public kvlab::ChoosesInPrompts, public kvlab::TakesNoPruner {
 public:
  explicit InfLlm(const kvlab::Params& p)
      : rule_{p.get<int>("sinks"), p.get<int>("block"), p.get<int>("window"), p.get<int>("representatives")},
        top_(p.get<int>("top")),
        chunk_(p.get<bool>("prompt_retrieval") ? p.get<int>("prompt_chunk") : 0),
        clamped_(p.get<Positions>("positions") == Positions::clamped) {
    rule_.unturned = p.get<bool>("clamped_scores");
    if (!p.get<bool>("local_scores")) rule_.representatives = rule_.block;
    if (rule_.representatives > rule_.block)
      throw kvlab::Error(kvlab::Errc::config, "got " + std::to_string(rule_.representatives) +
                                                  " representatives, wanted at most " + std::to_string(rule_.block) +
                                                  ", the tokens of a block");
  }

  kvlab::Needs needs() const override {
    return kvlab::Needs{}.mass(kvlab::Mass::decode).prompt_lse(true).host_pages(true).capturable(true);
  }
  const char* takes_no_pruner() const override { return clamped_ ? "changes what attention computes" : nullptr; }

  // A step may open a page before its oldest one leaves.
  kvlab::Demand demand(int prompt, int max_new) const override {
    return tiers_.of(prompt, max_new, [this](int n, bool decodes) {
      const int budget = tiers_.budget(n);
      return budget == tiers_.everything ? budget : tiers_.whole_pages(budget) + decodes;
    });
  }

  void attach(const kvlab::Shape& shape, const BudgetAmount& budget, kvlab::Workspace& w) override {
    tiers_ = kvlab::TierDemand(shape, budget, 0);
    const auto whole = [&](int tokens) { return (tokens + shape.page_size - 1) / shape.page_size * shape.page_size; };
    if (rule_.block % shape.page_size)
      throw kvlab::Error(kvlab::Errc::config, "got blocks of " + std::to_string(rule_.block) +
                                                  " tokens, wanted whole pages of " + std::to_string(shape.page_size));
    rule_.first = whole(rule_.first);
    read_always_ = rule_.first + whole(rule_.window + rule_.block - 1);
    if (budget.kind == BudgetAmount::bytes || (budget.kind == BudgetAmount::ratio && budget.value < 1))
      throw kvlab::Error(kvlab::Errc::config,
                         std::string("got a budget ") +
                             (budget.kind == BudgetAmount::bytes ? "in bytes" : "as a ratio of the text") +
                             ", wanted tokens: sinks and window take the same however long the text is");
    budget.require(read_always_ + rule_.block, "the sinks, the window, what fills no block yet, and a block");
    const int blocks = budget.kind == BudgetAmount::tokens
                           ? std::min((static_cast<int>(budget.value) - read_always_) / rule_.block, top_)
                           : top_;
    const std::vector<std::int32_t> most(static_cast<std::size_t>(shape.max_slots), blocks);
    most_ = static_cast<const std::int32_t*>(w.constant("blocks to read", most.data(), most.size() * sizeof(most[0])));
    room_ = std::max(1, rule_.blocks(shape.max_tokens));
    kept_ = kvlab::KeptBlocks("blocks", shape, rule_, w);
    pages_ = kvlab::KeptPages("pages to read", shape, shape.max_pages(), w);
  }

  int prompt_chunk() const override { return chunk_; }

  // A text within the window has no blocks and no distances to clamp.
  void select_chunk(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    if (kv.position[0] <= rule_.window) return;
    const auto mean = kv.query_head_vectors("mean query");
    kvlab::ops::mean_query(kv.pages, kv.chunk_queries.f32(), rule_.unturned ? rule_.window : -1, mean, s);
    edits.attend(fetch(kv, mean, {kvlab::Deadline::this_attention}, edits, s));
    if (clamped_) edits.clamp_distance(rule_.window);
  }

  // Blocks that left the window get their vectors while their pages are still here.
  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    kvlab::ops::add_prompt_mass(kv, rule_.window, kept_.of(kv), s);
    kvlab::ops::make_blocks(kv.pages, rule_, kept_.of(kv), s);
    if (kv.last[0]) fetch(kv, at_window_end(kv, kv.last_queries().f32(), s), {}, edits, s);
  }

  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    kvlab::ops::make_blocks(step.pages, rule_, kept_.of(step), s);
    const auto asked = at_window_end(step, step.queries.f32(), s);
    edits.attend(fetch(step, asked, {kvlab::Deadline::this_attention}, edits, s));
    if (clamped_) edits.clamp_distance(rule_.window);
  }

  void observe(const kvlab::LayerStep& step, kvlab::Edits&, kvlab::Stream s) override {
    kvlab::ops::add_block_mass(step.pages, step.mass, rule_.window, kept_.of(step), s);
  }

 private:
  // Every block lies at text position 0, and the query at the window's end.
  kvlab::View<const float, 3> at_window_end(const kvlab::LayerKv& kv, kvlab::View<const float, 3> queries,
                                            kvlab::Stream s) const {
    if (!rule_.unturned) return queries;
    const auto turned = kv.query_head_vectors("queries at the window's end");
    kvlab::ops::turn_queries(kv.pages, queries, rule_.window, turned, s);
    return turned;
  }

  kvlab::PageList fetch(const kvlab::LayerKv& kv, kvlab::View<const float, 3> asked, kvlab::Deadline when,
                        kvlab::Edits& edits, kvlab::Stream s) const {
    const kvlab::PageList list = pages_.of(kv);
    const kvlab::Scores scores = kv.scratch<float>("scores of blocks", {kv.rows(), 1, room_});
    kvlab::ops::block_pages(kv.pages, asked, rule_, most_, kept_.of(kv), scores, list, s);
    edits.place(list, {.room = kvlab::ops::budget_pages(kv, [](int tokens) { return tokens; }).same, .when = when});
    return list;
  }

  kvlab::BlockRule rule_;
  int top_, chunk_, read_always_ = 0, room_ = 1;
  bool clamped_;
  const std::int32_t* most_ = nullptr;
  kvlab::KeptBlocks kept_;
  kvlab::KeptPages pages_;
  kvlab::TierDemand tiers_;
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::policy<InfLlm>("infllm",
                          "blocks of tokens come back from the host when a step, or a chunk of a prompt, ranks them "
                          "high (Xiao et al. 2024)")
        .param("sinks", 128, 0, most_tokens, "first tokens, which are read in any case, in whole pages")
        .param("window", 4096, 1, most_tokens, "newest tokens, which are read in any case and are in no block")
        .param("block", 128, 1, 65536, "tokens of a block, whole pages")
        .param("top", 16, 1, kvlab::any, "blocks that a step reads, if the budget has room for them")
        .param("representatives", 4, 1, 65536, "tokens of a block whose mean key stands for it")
        .param("positions", Positions::clamped,
               "where a step reads what lies before the window: clamped = at the window's end; original = where it is")
        .param("prompt_chunk", 512, 1, most_tokens,
               "tokens of a prompt that choose blocks together, by their mean query")
        .component("prompt_retrieval",
                   "chunks of a prompt read what a step reads, and themselves; off = prompts attend to everything, by "
                   "the positions of the text")
        .component("local_scores", "attention of near queries names the representatives; off = all tokens are")
        .component("clamped_scores",
                   "blocks are scored as if they lay at the window's end; off = by their own positions"))
