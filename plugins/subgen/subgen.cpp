// SubGen: tokens that leave a window join a sketch. Sampled keys of clusters estimate the denominator of the softmax.
// Tokens that are drawn by the squared size of their values estimate its numerator. Zandieh et al. 2024.
#include <kvlab/centres.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/random.hpp>
#include <kvlab/sketch.hpp>
#include <kvlab/streaming_heads.hpp>
#include <kvlab/takes_no_pruner.hpp>

#include <algorithm>
#include <limits>
#include <vector>

namespace {

// The deterministic relative of the paper's experiments: greedy k-center over keys, and the newest tokens.
class KCenter final : public kvlab::Scorer {
 public:
  explicit KCenter(const kvlab::Params& p)
      : sinks_(p.get<int>("sinks")), recent_(p.get<double>("recent")), every_(p.get<int>("every")) {}

  kvlab::Needs needs() const override { return kvlab::Needs{}.capturable(true); }
  kvlab::Pins pins(int tokens) const override {
    return {.first = sinks_, .last = std::clamp(static_cast<int>(recent_ * tokens), 0, std::max(0, tokens - sinks_))};
  }
  int every() const override { return every_; }

  // Centres rank by the order in which they are found, and all other tokens below them.
  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    const kvlab::Scores nearest = kv.kv_head_scores("squared distances");
    kvlab::ops::recency(kv.pages, nearest, s);
    kvlab::ops::negate(nearest, s);              // the oldest token is the first centre
    for (int row = 0; row < kv.rows(); ++row) {  // sequences have budgets of their own
      const int most = std::max(1, std::min(kv.max_length, kv.budget_tokens(row)));
      kvlab::PagedKv one = kv.pages;
      one.slots += row, one.rows = 1;
      const auto of_row = [&](kvlab::Scores x) {
        x.data += row * x.stride[0], x.extent[0] = 1;
        return x;
      };
      kvlab::ops::set_pinned(one, pins(most), -std::numeric_limits<float>::infinity(), of_row(nearest), s);
      kvlab::ops::farthest_first({&one, kvlab::KvSide::key}, most, of_row(nearest), of_row(out), s);
    }
  }

 private:
  int sinks_;
  double recent_;
  int every_;
};

class SubGen final : public kvlab::Policy, public kvlab::TakesNoPruner {
 public:
  explicit SubGen(const kvlab::Params& p)
      : rule_{p.get<float>("radius"), p.get<int>("clusters"), p.get<int>("samples"), p.get<int>("values")},
        pins_{.first = p.get<int>("sinks"), .last = p.get<int>("window")},
        seed_(p.get<std::uint64_t>("seed")),
        sketches_(p.get<bool>("sketch")) {}

  kvlab::Needs needs() const override { return kvlab::Needs{}.own_amount(true).capturable(true); }
  const char* takes_no_pruner() const override { return "evicts tokens"; }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount&, kvlab::Workspace& w) override {
    if (sketches_) kept_ = kvlab::KeptSketch("sketches", shape, rule_, w);
    const auto heads = static_cast<std::size_t>(shape.layers) * static_cast<std::size_t>(shape.kv_heads);
    heads_ = kvlab::StreamingHeads(shape, std::vector<bool>(heads, false), pins_, w);
  }

  kvlab::Demand demand(int prompt, int max_new) const override { return heads_.demand(prompt, max_new); }

  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    if (!kv.last[0]) return;
    const std::uint64_t sequence = kvlab::Random(seed_, kv.sequence[0]).next();
    const std::uint64_t key = kvlab::Random(sequence, static_cast<std::uint32_t>(kv.layer)).next();
    evict(kv, kv.upload("keys of draws", &key), edits, s);
  }
  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream) override {
    if (sketches_) edits.read_made_up(kept_.of(step).tokens);
  }
  void observe(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    evict(step, nullptr, edits, s);
  }

 private:
  // keys: null = those of the prompt's end.
  void evict(const kvlab::LayerKv& kv, const std::uint64_t* keys, kvlab::Edits& edits, kvlab::Stream s) const {
    const kvlab::Surplus surplus = heads_.surplus(kv);
    if (sketches_) kvlab::ops::sketch_surplus(kv.pages, surplus, rule_, keys, kept_.of(kv), s);
    edits.evict_surplus(surplus);
  }

  kvlab::SketchRule rule_;
  kvlab::Pins pins_;
  std::uint64_t seed_;
  bool sketches_;
  kvlab::KeptSketch kept_;
  kvlab::StreamingHeads heads_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::policy<SubGen>("subgen",
                                   "sinks and a window stay exact; a sketch with random samples stands for what left "
                                   "(Zandieh et al. 2024). Its estimates vary much: for research")
                 .param("radius", 10., 0, 1e6,
                        "a key opens a cluster where it is farther than this from every centre, while there is room")
                 .param("clusters", 64, 1, 4096, "most clusters of a KV head")
                 .param("samples", 4, 1, 1024, "keys that stand for a cluster")
                 .param("values", 256, 1, 65536, "tokens that stand for the sum of values")
                 .param("sinks", 4, 0, kvlab::any, "first tokens that stay")
                 .param("window", 256, 1, kvlab::any, "newest tokens that stay")
                 .param("seed", std::uint64_t{0}, 0, kvlab::any, "of the samples")
                 .component("sketch", "off = what leaves is gone, as in streaming_llm"),
             kvlab::scorer<KCenter>("k_center",
                                    "keeps tokens whose keys lie far apart, and the newest: greedy k-center, as in "
                                    "SubGen's experiments (Zandieh et al. 2024)")
                 .param("sinks", 0, 0, kvlab::any, "first tokens that stay, part of the budget")
                 .param("recent", 0.5, 0, 1, "newest tokens that stay, as a share of the budget")
                 .param("every", 0, 0, kvlab::any, "decode steps between evictions, 0 = the prompt only"))
