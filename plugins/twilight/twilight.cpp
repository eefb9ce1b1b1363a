// Twilight: pages are candidates, and attention reads the fewest of their tokens whose weights make up a share p. Lin
// et al., NeurIPS 2025. Its base selection is Quest's.
#include <kvlab/keeps_tokens.hpp>
#include <kvlab/key_copies.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/step_numbers.hpp>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

namespace {

enum class Estimate : std::uint8_t { exact, int4 };

}  // namespace

template <>
struct kvlab::Choices<Estimate> {
  static constexpr std::pair<Estimate, const char*> all[] = {{Estimate::exact, "exact"}, {Estimate::int4, "int4"}};
};

namespace {

class Twilight final : public kvlab::Policy, public kvlab::KeepsTokens, public kvlab::PreparesSteps {
 public:
  explicit Twilight(const kvlab::Params& p)
      : p_(p.get<bool>("top_p") ? p.get<float>("p") : 1),
        int4_(p.get<Estimate>("estimate") == Estimate::int4),
        tokens_(p.get<int>("tokens")),
        dense_(p.get<int>("dense_layers")),
        bits_(p.get<int>("summary_bits")),
        share_(p.get<double>("share")) {
    choice_.rule = p.get<kvlab::GroupRule>("group");
    choice_.scale = p.get<float>("scale");
    choice_.newest_page = true;
  }

  kvlab::Needs needs() const override {
    return kvlab::Needs{}
        .own_amount(true)
        .page_summary(kvlab::Summary::min_max, bits_)
        .dense_layers(dense_)
        .capturable(true);
  }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount&, kvlab::Workspace& w) override {
    if (tokens_ > 0 && tokens_ < shape.page_size)
      throw kvlab::Error(kvlab::Errc::config, "got tokens " + std::to_string(tokens_) + ", wanted 0 or at least " +
                                                  std::to_string(shape.page_size) + ", those of a page");
    page_ = shape.page_size, kv_heads_ = shape.kv_heads;
    if (tokens_ == 0) counts_ = {"pages of candidates", std::int64_t{shape.max_slots} * kv_heads_, w};
    if (int4_ && dense_ < shape.layers)
      codes_ = kvlab::KeptKeyCodes("keys in 4 bits", shape, kvlab::layers_from(dense_, shape), w);
  }

  void prepare_step(const kvlab::StepCounters& c) override {
    if (tokens_ > 0) return;
    std::vector<std::int32_t>& of_heads = counts_.fresh();
    for (int row = 0; row < c.rows; ++row)
      of_heads.insert(of_heads.end(), static_cast<std::size_t>(kv_heads_), pages_of(candidates_of(c.position[row])));
    counts_.put(c);
  }

  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits&, kvlab::Stream s) override {
    if (!int4_ || kv.layer < dense_) return;
    kvlab::ops::code_keys(kv.pages, static_cast<int>(kv.chunk_queries.extent[2]), codes_.of(kv), s);
  }

  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    if (step.layer < dense_) return;
    const kvlab::ops::PageCounts counts = page_counts(step);
    const auto pages = step.list<kvlab::PageList>("candidates", step.shape->max_pages());
    kvlab::ops::choose_pages(step, step.queries, choice_, counts, pages, s);
    const auto tokens = step.list<kvlab::TokenList>("tokens to read", step.max_length);
    const float temperature = std::sqrt(static_cast<float>(step.pages.head_dim));
    if (int4_) {
      kvlab::ops::code_keys(step.pages, 1, codes_.of(step), s);
      const kvlab::Scores logits =
          step.scratch<float>("logits", {step.rows(), step.shape->query_heads, most_candidates(step)});
      kvlab::ops::coded_row_dot(step.pages, step.queries.f32(), pages, codes_.of(step), logits, s);
      kvlab::ops::top_p_candidates(step.pages, logits, pages, temperature, p_, 1, tokens, s);
    } else {
      const kvlab::Scores weights = step.query_head_scores("weights");
      kvlab::ops::listed_row_dot(step.keys, step.queries.f32(), pages, 0, weights, s);
      kvlab::ops::softmax(step.pages, weights, temperature, s);
      kvlab::ops::top_p_tokens(step.pages, weights, p_, {.last = 1}, tokens, s);
    }
    edits.attend(tokens);
  }

 private:
  // Of a head, in whole pages. No text of the step, and of later steps of its graph, is longer than max_length.
  std::int64_t most_candidates(const kvlab::LayerStep& step) const {
    const int tokens = tokens_ > 0 ? tokens_ : candidates_of(step.max_length);
    return std::min<std::int64_t>(pages_of(tokens), (step.max_length + page_ - 1) / page_) * page_;
  }
  int candidates_of(int text) const { return static_cast<int>(share_ * text); }
  int pages_of(int tokens) const { return std::max(1, tokens / page_); }
  kvlab::ops::PageCounts page_counts(const kvlab::LayerStep& step) const {
    kvlab::ops::PageCounts counts;
    counts.same = tokens_ / page_;
    if (tokens_ == 0)
      counts.each = kvlab::View<const std::int32_t, 2>::dense(counts_.data(), {step.rows(), step.kv_heads()});
    return counts;
  }

  float p_;
  bool int4_;
  int tokens_, dense_, bits_;
  double share_;
  int page_ = 1, kv_heads_ = 0;
  kvlab::PageChoice choice_;
  kvlab::StepNumbers<std::int32_t> counts_;  // [row, kv_head]
  kvlab::KeptKeyCodes codes_;
};

// The fewest of the tokens that any other method lets a step read.
class TopP final : public kvlab::Pruner {
 public:
  explicit TopP(const kvlab::Params& p) : p_(p.get<float>("p")), dense_(p.get<int>("dense_layers")) {}

  kvlab::Needs needs() const override { return kvlab::Needs{}.dense_layers(dense_).capturable(true); }

  void attach(const kvlab::Shape& shape, kvlab::Workspace& w) override {
    if (dense_ < shape.layers)
      codes_ = kvlab::KeptKeyCodes("keys in 4 bits", shape, kvlab::layers_from(dense_, shape), w);
  }

  void appended(const kvlab::LayerKv& kv, int newest, kvlab::Stream s) override {
    kvlab::ops::code_keys(kv.pages, newest, codes_.of(kv), s);
  }

  void prune(const kvlab::LayerStep& step, const kvlab::PageList& pages, kvlab::TokenList out,
             kvlab::Stream s) override {
    take(step, pages, std::min<std::int64_t>(pages.index.extent[2], step.max_pages) * step.pages.page_size, out, s);
  }
  void prune(const kvlab::LayerStep& step, const kvlab::TokenList& tokens, kvlab::TokenList out,
             kvlab::Stream s) override {
    take(step, tokens, std::min<std::int64_t>(tokens.index.extent[2], step.max_length), out, s);
  }

 private:
  template <class List>
  void take(const kvlab::LayerStep& step, const List& candidates, std::int64_t most, kvlab::TokenList out,
            kvlab::Stream s) {
    const kvlab::Scores logits = step.scratch<float>("logits", {step.rows(), step.shape->query_heads, most});
    kvlab::ops::coded_row_dot(step.pages, step.queries.f32(), candidates, codes_.of(step), logits, s);
    kvlab::ops::top_p_candidates(step.pages, logits, candidates, std::sqrt(static_cast<float>(step.pages.head_dim)), p_,
                                 1, out, s);
  }

  float p_;
  int dense_;
  kvlab::KeptKeyCodes codes_;
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::policy<Twilight>("twilight",
                            "reads the fewest tokens of quest's pages whose weights make up a share (Lin et "
                            "al. 2025)")
        .param("p", 0.85, 1e-3, 1,
               "share of a query head's weights that the tokens make up; 1 = every token whose weight is not 0")
        .param("estimate", Estimate::int4,
               "keys that give the weights: exact, or rounded to 4 bits by token. int4 keeps a copy of the keys in 4 "
               "bits: head_dim / 2 + 8 bytes a token and KV head. exact reads whole keys")
        .param("tokens", 0, 0, kvlab::any,
               "tokens of the pages that are candidates, of a KV head, in whole pages; 0 = share")
        .param("share", 0.25, 0, 1, "share of the text so far that the candidates are, where tokens is 0")
        .param("group", kvlab::GroupRule::max, "how a GQA group's page scores become one")
        .param("scale", 1.0, 0, kvlab::any, "factor on page scores before the softmax of group: softmax_mean")
        .param("dense_layers", 2, 0, kvlab::any, "first layers that attend to everything")
        .param("summary_bits", 16, 8, 16, "of a number of a page's summary: 16, in the run's dtype, or 8, in codes")
        .component("top_p", "off = attention reads all candidates whose weight is not 0"),
    kvlab::pruner<TopP>("twilight",
                        "reads the fewest of another method's tokens whose weights make up a share (Lin et al. 2025)")
        .param("p", 0.85, 1e-3, 1,
               "share of a query head's weights that the tokens make up; 1 = every token whose weight is not 0. A "
               "copy of the keys in 4 bits gives the weights: head_dim / 2 + 8 bytes a token and KV head")
        .param("dense_layers", 2, 0, kvlab::any, "first layers that read what the other method says"))
