// MagicPIG: each query head samples keys of the prompt by collisions of hashes, and attention corrects for the chance
// that a key had. Chen et al., ICLR 2025. Nothing is evicted, and nothing leaves the device.
#include <kvlab/hashes.hpp>
#include <kvlab/keeps_tokens.hpp>
#include <kvlab/layer_list.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/takes_no_pruner.hpp>

#include <algorithm>
#include <string>
#include <vector>

namespace {

class MagicPig final : public kvlab::Policy, public kvlab::KeepsTokens, public kvlab::TakesNoPruner {
 public:
  explicit MagicPig(const kvlab::Params& p)
      : rule_{p.get<int>("bits"), p.get<int>("tables"), static_cast<std::uint64_t>(p.get<int>("seed"))},
        collisions_{.least = p.get<int>("collisions")},
        sinks_(p.get<int>("sinks")),
        window_(p.get<int>("window")),
        full_(kvlab::layer_list(p, "full_layers")),
        corrects_(p.get<bool>("correction")) {}

  kvlab::Needs needs() const override { return kvlab::Needs{}.own_amount(true).capturable(true); }
  const char* takes_no_pruner() const override { return rule_.bits > 0 ? "changes what attention computes" : nullptr; }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount&, kvlab::Workspace& w) override {
    if (collisions_.least > rule_.tables)
      throw kvlab::Error(kvlab::Errc::config, "got collisions " + std::to_string(collisions_.least) +
                                                  ", wanted at most " + std::to_string(rule_.tables) + ", the tables");
    samples_.assign(static_cast<std::size_t>(shape.layers), rule_.bits > 0);
    for (const int layer : full_)  // those of a deeper model count for nothing
      if (layer < shape.layers) samples_[static_cast<std::size_t>(layer)] = false;
    std::vector<int> hashed;
    for (int layer = 0; layer < shape.layers; ++layer)
      if (samples(layer)) hashed.push_back(layer);
    if (rule_.bits > 0 && hashed.empty())
      throw kvlab::Error(kvlab::Errc::config, "got full_layers that are all " + std::to_string(shape.layers) +
                                                  " layers, wanted at least one layer that samples");
    if (!hashed.empty()) hashes_ = kvlab::KeptHashes("hashes", shape, rule_, hashed, w);
  }

  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits&, kvlab::Stream s) override {
    if (!kv.last[0] || !samples(kv.layer)) return;
    kvlab::ops::hash_keys(kv.pages, std::min(sinks_, kv.position[0]), kv.position[0] - window_, hashes_.of(kv), s);
  }

  // The paper's logits of sampled tokens are those of centred keys. Taking the mean off all keys shifts the logits of a
  // query by one number, which the softmax takes out again. The cache keeps the keys as they are.
  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    if (!samples(step.layer)) return;
    const kvlab::Scores weights = step.query_head_scores("weights");
    kvlab::ops::collision_weights(step.pages, step.queries.f32(), collisions_, hashes_.of(step), weights,
                                  *step.workspace, s);
    const auto tokens = step.list<kvlab::TokenList>("sampled tokens", step.max_length);
    kvlab::ops::top_p_tokens(step.pages, weights, 1, {}, tokens, s);  // of any query head of the group
    if (!corrects_) kvlab::ops::above(weights, 0, s);
    kvlab::ops::logarithm(weights, 0, s);
    edits.attend(tokens);
    edits.bias_logits(weights);
  }

 private:
  bool samples(int layer) const { return samples_[static_cast<std::size_t>(layer)]; }

  kvlab::HashRule rule_;
  kvlab::Collisions collisions_;
  int sinks_, window_;
  std::vector<int> full_;
  bool corrects_;
  std::vector<bool> samples_;
  kvlab::KeptHashes hashes_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::policy<MagicPig>("magicpig",
                                     "query heads sample keys of the prompt by collisions of hashes, and attention "
                                     "corrects for their chances (Chen et al. 2024). Every token stays on the device")
                 .param("bits", 10, 0, 15, "of a table's code, the paper's K; 0 = every layer attends to everything")
                 .param("tables", 150, 1, 4096,
                        "of codes, the paper's L. Eight of them cost 16 bytes a token and KV head")
                 .param("collisions", 2, 1, 64, "tables whose codes must be the query's, at most all of them")
                 .param("sinks", 4, 0, kvlab::any, "first tokens, which are read in any case")
                 .param("window", 64, 1, kvlab::any,
                        "newest tokens of the prompt, which are read in any case, as all are that come after them")
                 .param("full_layers", std::string("0,16,32,48"),
                        "layers that attend to everything, from 0 on, of those that the model has; '' = none")
                 .param("seed", 0, 0, kvlab::any, "of the planes that hash keys and queries")
                 .component("correction", "off = sampled tokens count as they are, whatever their chance was"))
