// RaaS: a token that mattered gets the time as its stamp, and the oldest stamps leave. A prompt stays. Hu et al. 2025.
#include <kvlab/plugin.hpp>

namespace {

constexpr float far = 1e30f;  // beyond all ages

class Raas final : public kvlab::Scorer {
 public:
  explicit Raas(const kvlab::Params& p)
      : threshold_(p.get<float>("threshold")),
        sinks_(p.get<int>("sinks")),
        window_(p.get<int>("window")),
        every_(p.get<int>("every")),
        group_(p.get<kvlab::GroupRule>("group")),
        keeps_prompt_(p.get<bool>("keep_prompt")),
        stamps_(p.get<bool>("stamps")) {
    if (group_ != kvlab::GroupRule::mean && group_ != kvlab::GroupRule::max)
      throw kvlab::Error(kvlab::Errc::config, std::string("got group ") +
                                                  (group_ == kvlab::GroupRule::sum ? "sum" : "softmax_mean") +
                                                  ", wanted mean or max: the threshold is one of a share of attention");
  }

  kvlab::Needs needs() const override {
    return kvlab::Needs{}
        .token_state("stamp")
        .window_queries(1)
        .mass(kvlab::Mass::decode)
        .scratch_numbers(8)
        .capturable(true);
  }
  kvlab::Pins pins(int) const override { return {.first = sinks_, .last = window_}; }
  bool steady_score() const override { return true; }
  int every() const override { return every_; }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount&, kvlab::Workspace&) override {
    newer_ = 1;
    for (int n = shape.max_tokens; n > 0; n /= 2) newer_ /= 2;
  }

  // A stamp is 0 in the step that gives it and falls by 1 a step, so no op needs the time.
  void observe(const kvlab::LayerKv& kv, kvlab::Stream s) override {
    const kvlab::StateColumn stamp = kv.state("stamp");
    if (kv.window_queries) {
      const bool fits = kv.position[0] <= kv.budget_tokens(0);
      kvlab::ops::blend_state(stamp, 0, {}, keeps_prompt_ && fits ? far : 0, s);
    }
    if (!kv.mass) return;
    const kvlab::Pins all{.last = kv.max_length};
    const kvlab::Scores value = kv.kv_head_scores("value"), fixed = kv.kv_head_scores("fixed");
    const kvlab::Scores pairs = kv.scratch<float>("pairs", {kv.rows(), 2 * kv.kv_heads(), kv.max_length});
    kvlab::Scores one = pairs, other = pairs;
    one.extent[1] /= 2, one.stride[1] *= 2;
    other.data += other.stride[1], other.extent[1] /= 2, other.stride[1] *= 2;

    kvlab::ops::group_reduce(kv.pages, kv.mass, group_, other, s);
    kvlab::ops::above(other, threshold_, s);

    // The greater of the stamp less 1, and of 0 for what mattered or a number below all stamps.
    kvlab::ops::set_pinned(kv.pages, all, 1, fixed, s);
    kvlab::ops::add(other, fixed, -1, s);
    kvlab::ops::scale(other, far, s);
    if (!stamps_) kvlab::ops::set_pinned(kv.pages, all, -far, pairs, s);
    kvlab::ops::read_state(stamp, one, s);
    kvlab::ops::add(one, fixed, -1, s);
    kvlab::ops::group_reduce(kv.pages, pairs, kvlab::GroupRule::max, value, s);
    kvlab::ops::set_pinned(kv.pages, {.last = 1}, 0, value, s);  // the step's own token
    kvlab::ops::blend_state(stamp, 0, value, 1, s);
  }

  // Stamps are whole numbers. Text positions add less than 1, so that of equal stamps the oldest token leaves.
  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    if (kv.window_queries) {
      const kvlab::Scores votes = kv.query_head_scores("last query's attention");
      kvlab::ops::window_votes(kv.window_queries, kv.upload("seen", kv.position), kv.pages, votes, s);
      return kvlab::ops::group_reduce(kv.pages, votes, group_, out, s);
    }
    const kvlab::Scores position = kv.kv_head_scores("position");
    kvlab::ops::read_state(kv.state("stamp"), out, s);
    kvlab::ops::recency(kv.pages, position, s);
    kvlab::ops::add(out, position, newer_, s);
  }

 private:
  float threshold_;
  int sinks_, window_, every_;
  kvlab::GroupRule group_;
  bool keeps_prompt_, stamps_;
  float newer_ = 0;  // a text position's part of a score
};

}  // namespace

KVLAB_PLUGIN(kvlab::scorer<Raas>("raas",
                                 "drops what has not mattered for the longest time; prompts stay (Hu et al. 2025)")
                 .param("threshold", 1e-4, 0, 1, "a token matters in a step that gives it a greater share of attention")
                 .param("group", kvlab::GroupRule::mean, "how a GQA group's attention becomes one: mean or max")
                 .param("sinks", 0, 0, kvlab::any, "first tokens that are always kept, part of the budget")
                 .param("window", 0, 0, kvlab::any, "newest tokens that are always kept, part of the budget")
                 .param("every", 1, 0, kvlab::any, "decode steps between evictions, 0 = the prompt only")
                 .component("keep_prompt",
                            "a prompt that fits in the budget is never evicted; off = it is as other tokens")
                 .component("stamps", "a token that matters gets a new stamp; off = the first in is the first out"))
