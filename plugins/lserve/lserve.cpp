// LServe: streaming heads keep attention sinks and the newest tokens. Retrieval heads keep every token, and a choice of
// pages that they attend to serves several steps. The best of a page's parts is its score: parts are pages of the
// cache, and a page of the paper is a group of them. Yang et al., MLSys 2025.
#include <kvlab/page_groups.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/statistics.hpp>
#include <kvlab/streaming_heads.hpp>
#include <kvlab/takes_no_pruner.hpp>

#include <algorithm>
#include <string>
#include <vector>

namespace {

using kvlab::StreamingHeads;

class LServe final : public kvlab::Policy, public kvlab::TakesNoPruner {
 public:
  explicit LServe(const kvlab::Params& p)
      : pins_{.first = p.get<int>("sinks"), .last = p.get<int>("window")},
        sparsity_(p.get<bool>("retrieval_heads") ? p.get<double>("sparsity") : 1),
        reads_gates_(p.get<bool>("retrieval_heads")),
        tokens_(p.get<int>("tokens")),
        bits_(p.get<int>("summary_bits")),
        prompt_window_(p.get<int>("prompt_window")),
        period_(p.get<bool>("reuse") ? p.get<int>("choose_every") : 1) {
    rule_.rule = p.get<kvlab::GroupRule>("group");
    rule_.scale = p.get<float>("scale");
    choice_.parts = p.get<int>("parts");
    choice_.newest_group = true;
    choice_.whole = std::min(tokens_, StreamingHeads::everything - 1) + 1;  // the step's token is there, too
  }

  kvlab::Needs needs() const override {
    return kvlab::Needs{}
        .own_amount(true)
        .page_summary(kvlab::Summary::min_max, bits_)
        .profile(reads_gates_)
        .capturable(true);
  }
  const char* takes_no_pruner() const override { return "evicts tokens"; }

  void load_profile(const kvlab::Profile& profile) override { gates_ = profile.at("gate").values; }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount&, kvlab::Workspace& w) override {
    const std::int64_t of_group = std::int64_t{choice_.parts} * shape.page_size;
    refuse_what_is_not_there(shape.page_size, of_group);
    if (!reads_gates_) gates_.assign(static_cast<std::size_t>(shape.layers * shape.kv_heads), 0);
    std::vector<std::int32_t> groups;
    std::vector<std::uint8_t> streaming;
    retrieval_ = kvlab::retrieval_heads(gates_, sparsity_, shape);
    for (const bool retrieval : retrieval_) {
      groups.push_back(retrieval ? static_cast<std::int32_t>(tokens_ / of_group) : StreamingHeads::everything);
      streaming.push_back(!retrieval);
    }
    held_ = StreamingHeads(shape, retrieval_, pins_, w);
    groups_ = kvlab::HeadConstants<std::int32_t>("groups to read", shape, groups, w);
    streaming_ = kvlab::HeadClass("streaming heads", shape, streaming, w);
    chosen_ = kvlab::KeptPages("chosen", shape, shape.max_pages(), w);
    periods_ = kvlab::KeptNumbers("begun periods", shape, w);
    due_ = kvlab::KeptFlags("heads that choose", shape, w);
  }

  std::vector<kvlab::PromptMask> prompt_masks() const override {
    if (prompt_window_ == 0) return {};
    return StreamingHeads::prompt_masks(retrieval_, {.first = pins_.first, .last = prompt_window_});
  }

  kvlab::Demand demand(int prompt, int max_new) const override { return held_.demand(prompt, max_new); }

  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream) override {
    if (kv.last[0]) edits.evict_surplus(held_.surplus(kv));
  }

  // Periods of a choice end where pages do. So a page that opens is listed at once.
  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    kvlab::Heads due;
    if (period_ > 1) {
      kvlab::ops::begun_periods(step.pages, period_, periods_.of(step), due_.of(step), s);
      due = kvlab::Heads::flagged(due_.of(step));
    }
    kvlab::GroupChoice choice = choice_;
    choice.most = groups_.of(step);
    choice.heads = due.or_of(streaming_.of(step));
    kvlab::ops::choose_page_groups(step, step.queries, rule_, due.except(streaming_.of(step)), choice, chosen_.of(step),
                                   s);
    edits.attend(chosen_.of(step));
  }

  void observe(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream) override {
    edits.evict_surplus(held_.surplus(step));
  }

 private:
  void refuse_what_is_not_there(int page_size, std::int64_t of_group) const {
    const auto refuse = [&](const std::string& what) { throw kvlab::Error(kvlab::Errc::config, "got " + what); };
    if (period_ < 1 || page_size % period_)
      refuse("choose_every " + std::to_string(period_) + ", wanted a divisor of the page size " +
             std::to_string(page_size) + ": else pages open that no step reads");
    if (prompt_window_ > 0 && prompt_window_ < pins_.last)
      refuse("prompt_window " + std::to_string(prompt_window_) + ", wanted 0 or at least the window of " +
             std::to_string(pins_.last));
    if (tokens_ < 2 * of_group)
      refuse("tokens " + std::to_string(tokens_) + ", wanted at least 2 groups of " + std::to_string(of_group) +
             ", one of them the newest: " + std::to_string(choice_.parts) + " pages of " + std::to_string(page_size));
  }

  kvlab::Pins pins_;  // of streaming heads
  double sparsity_;
  bool reads_gates_;
  int tokens_, bits_, prompt_window_, period_;
  kvlab::PageChoice rule_;
  kvlab::GroupChoice choice_;
  std::vector<float> gates_;     // [layer, kv_head]
  std::vector<bool> retrieval_;  // [layer, kv_head]
  StreamingHeads held_;
  kvlab::HeadConstants<std::int32_t> groups_;
  kvlab::HeadClass streaming_;
  kvlab::KeptPages chosen_;
  kvlab::KeptNumbers periods_;
  kvlab::KeptFlags due_;
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::policy<LServe>("lserve",
                          "streaming heads keep sinks and the newest tokens; retrieval heads keep all and read pages "
                          "that serve several steps (Yang et al. 2025)")
        .param("sinks", 128, 0, kvlab::any, "first tokens that a streaming head keeps")
        .param("window", 256, 1, kvlab::any, "newest tokens that a streaming head keeps")
        .param("prompt_window", 8192, 0, kvlab::any,
               "newest tokens that a streaming head's tokens of a prompt attend to, beside the sinks; 0 = all")
        .param("sparsity", 0.5, 0, 1, "share of the KV heads that are streaming heads, those of lowest gates")
        .param("tokens", 4096, 1, kvlab::any, "tokens that a retrieval head reads, in whole groups of pages")
        .param("parts", 4, 1, 65536,
               "neighbouring pages that are read together; the best of their scores is the group's")
        .param("choose_every", 4, 1, kvlab::any,
               "tokens of the text that a choice of pages serves; a divisor of the page size")
        .param("group", kvlab::GroupRule::max, "how the page scores of the query heads of a KV head become one")
        .param("scale", 1.0, 0, kvlab::any, "factor on page scores before the softmax of group: softmax_mean")
        .param("summary_bits", 16, 8, 16, "of a number of a page's summary: 16, in the run's dtype, or 8, in codes")
        .component("reuse", "a choice serves choose_every steps; off = each step chooses")
        .component("retrieval_heads", "the profile's gates decide; off = every head is a streaming head"))
