// DuoAttention: retrieval heads keep every token. Streaming heads keep attention sinks and the newest tokens. A gate of
// each KV head, from a profile, says which is which. Xiao et al., ICLR 2025.
#include <kvlab/plugin.hpp>
#include <kvlab/statistics.hpp>
#include <kvlab/streaming_heads.hpp>
#include <kvlab/takes_no_pruner.hpp>

namespace {

class DuoAttention final : public kvlab::Policy, public kvlab::TakesNoPruner {
 public:
  explicit DuoAttention(const kvlab::Params& p)
      : pins_{.first = p.get<bool>("attention_sinks") ? p.get<int>("sinks") : 0, .last = p.get<int>("window")},
        sparsity_(p.get<bool>("retrieval_heads") ? p.get<double>("sparsity") : 1),
        reads_gates_(p.get<bool>("retrieval_heads")),
        masks_prompts_(p.get<bool>("prompt_mask")) {}

  kvlab::Needs needs() const override { return kvlab::Needs{}.own_amount(true).profile(reads_gates_).capturable(true); }
  const char* takes_no_pruner() const override { return "evicts tokens"; }

  void load_profile(const kvlab::Profile& profile) override { gates_ = profile.at("gate").values; }

  void attach(const kvlab::Shape& shape, const kvlab::BudgetAmount&, kvlab::Workspace& w) override {
    if (!reads_gates_) gates_.assign(static_cast<std::size_t>(shape.layers * shape.kv_heads), 0);
    retrieval_ = kvlab::retrieval_heads(gates_, sparsity_, shape);
    streaming_ = kvlab::StreamingHeads(shape, retrieval_, pins_, w);
  }

  std::vector<kvlab::PromptMask> prompt_masks() const override {
    if (!masks_prompts_) return {};
    return kvlab::StreamingHeads::prompt_masks(retrieval_, pins_);
  }

  kvlab::Demand demand(int prompt, int max_new) const override { return streaming_.demand(prompt, max_new); }

  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream) override {
    if (kv.last[0] || masks_prompts_) edits.evict_surplus(streaming_.surplus(kv));
  }
  void observe(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream) override {
    edits.evict_surplus(streaming_.surplus(step));
  }

 private:
  kvlab::Pins pins_;
  double sparsity_;
  bool reads_gates_, masks_prompts_;
  std::vector<float> gates_;     // [layer, kv_head]
  std::vector<bool> retrieval_;  // [layer, kv_head]
  kvlab::StreamingHeads streaming_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::policy<DuoAttention>("duo_attention",
                                         "retrieval heads keep everything, the others sinks and the newest tokens "
                                         "(Xiao et al. 2025)")
                 .param("sinks", 64, 0, kvlab::any, "first tokens that a streaming head keeps")
                 .param("window", 256, 1, kvlab::any, "newest tokens that a streaming head keeps")
                 .param("sparsity", 0.5, 0, 1, "share of the KV heads that are streaming heads, those of lowest gates")
                 .component("attention_sinks", "off = streaming heads keep the newest tokens alone")
                 .component("prompt_mask", "off = prompts attend to everything in all heads, and are cut at their end")
                 .component("retrieval_heads", "the profile's gates decide; off = every head is a streaming head"))
