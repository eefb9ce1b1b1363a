// LServe: streaming heads keep attention sinks and the newest tokens. Retrieval heads keep every token, and a choice of
// pages that they attend to serves several steps. Yang et al., MLSys 2025.
#include <kvlab/plugin.hpp>
#include <kvlab/statistics.hpp>
#include <kvlab/streaming_heads.hpp>

#include <algorithm>
#include <string>
#include <vector>

namespace {

using kvlab::Heads;

class LServe final : public kvlab::Policy {
 public:
  explicit LServe(const kvlab::Params& p)
      : pins_{.first = p.get<int>("sinks"), .last = p.get<int>("window")},
        sparsity_(p.get<bool>("retrieval_heads") ? p.get<double>("sparsity") : 1),
        reads_gates_(p.get<bool>("retrieval_heads")),
        tokens_(p.get<int>("tokens")),
        period_(p.get<bool>("reuse") ? p.get<int>("choose_every") : 1),
        logical_page_(p.get<int>("logical_page")) {
    choice_.rule = p.get<kvlab::GroupRule>("group");
    choice_.scale = p.get<float>("scale");
    choice_.newest_page = true;
  }

  kvlab::Needs needs() const override {
    return kvlab::Needs{}
        .own_amount(true)
        .page_summary(kvlab::Summary::min_max)
        .steps(true)
        .profile(reads_gates_)
        .capturable(true);
  }

  void load_profile(const kvlab::Profile& profile) override { gates_ = profile.at("gate").values; }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount&, kvlab::Workspace& w) override {
    refuse_what_is_not_there(shape.page_size);
    if (!reads_gates_) gates_.assign(static_cast<std::size_t>(shape.layers * shape.kv_heads), 0);
    std::vector<std::int32_t> pages;
    std::vector<std::uint8_t> streaming;
    // A page is spared for one that opens before the next choice.
    const int chosen = tokens_ / shape.page_size - (period_ > 1);
    const std::vector<bool> marks = kvlab::retrieval_heads(gates_, sparsity_, shape);
    for (const bool retrieval : marks) {
      pages.push_back(retrieval ? chosen : shape.max_pages());
      streaming.push_back(!retrieval);
    }
    held_ = kvlab::StreamingHeads(shape, marks, pins_, w);
    pages_ = kvlab::HeadConstants<std::int32_t>("pages to read", shape, pages, w);
    streaming_ = kvlab::HeadClass("streaming heads", shape, streaming, w);
    chosen_ = kvlab::KeptPages("chosen", shape, shape.max_pages(), w);
  }

  kvlab::Demand demand(int prompt, int max_new) const override {
    return kvlab::StreamingHeads::demand(pins_, sparsity_, prompt, max_new);
  }

  // A step that does not choose reads what the end of the last prompt chose.
  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    if (!kv.last[0]) return;
    choose(kv, kv.last_queries(), {}, s);
    edits.evict_surplus(held_.surplus(kv));
  }

  // Streaming heads list all pages in each step. A page that was opened after the choice holds the newest token.
  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    choose(step, step.queries, Heads::every(step.steps, period_).or_of(streaming_.of(step)), s);
    edits.attend(chosen_.of(step), {.last = 1});
  }

  void observe(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream) override {
    edits.evict_surplus(held_.surplus(step));
  }

 private:
  void refuse_what_is_not_there(int page_size) const {
    const auto refuse = [&](const std::string& what, const std::string& why) {
      throw kvlab::Error(kvlab::Errc::config, "got " + what + std::to_string(page_size) + ", " + why);
    };
    if (logical_page_ != 0 && logical_page_ != page_size)
      refuse("logical_page " + std::to_string(logical_page_) + ", wanted 0 or ",
             "the page size: core keeps no summaries of parts of a page");
    if (period_ > page_size)
      refuse("choose_every " + std::to_string(period_) + ", wanted at most ",
             "the page size: else pages open that no step reads");
    if (tokens_ < 2 * page_size)
      refuse("tokens " + std::to_string(tokens_) + ", wanted at least 2 pages of ", "one of them the newest");
  }

  void choose(const kvlab::LayerKv& kv, const kvlab::Tensor<3>& queries, const Heads& heads, kvlab::Stream s) const {
    kvlab::ops::PageCounts counts;
    counts.each = {pages_.of(kv), {kv.rows(), kv.kv_heads()}, {0, 1}};
    kvlab::ops::choose_pages(kv, queries, choice_.among(heads), counts, chosen_.of(kv), s);
  }

  kvlab::Pins pins_;  // of streaming heads
  double sparsity_;
  bool reads_gates_;
  int tokens_, period_, logical_page_;
  kvlab::PageChoice choice_;
  std::vector<float> gates_;  // [layer, kv_head]
  kvlab::StreamingHeads held_;
  kvlab::HeadConstants<std::int32_t> pages_;
  kvlab::HeadClass streaming_;
  kvlab::KeptPages chosen_;
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::policy<LServe>("lserve",
                          "streaming heads keep sinks and the newest tokens; retrieval heads keep all and read pages "
                          "that serve several steps (Yang et al. 2025). Pages are scored as a whole")
        .param("sinks", 128, 0, kvlab::any, "first tokens that a streaming head keeps")
        .param("window", 256, 1, kvlab::any, "newest tokens that a streaming head keeps")
        .param("sparsity", 0.5, 0, 1, "share of the KV heads that are streaming heads, those of lowest gates")
        .param("tokens", 4096, 1, kvlab::any, "tokens of the pages that a retrieval head reads, in whole pages")
        .param("choose_every", 4, 1, kvlab::any, "decode steps that a choice of pages serves; at most the page size")
        .param("logical_page", 0, 0, kvlab::any,
               "tokens of the parts of a page that are scored; 0 or the page size, because pages have one summary")
        .param("group", kvlab::GroupRule::max, "how a GQA group's page scores become one")
        .param("scale", 1.0, 0, kvlab::any, "factor on page scores before the softmax of group: softmax_mean")
        .component("reuse", "a choice serves choose_every steps; off = each step chooses")
        .component("retrieval_heads", "the profile's gates decide; off = every head is a streaming head"))
