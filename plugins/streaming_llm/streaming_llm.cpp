// StreamingLLM: a few first tokens (attention sinks) and the newest ones, positions counted inside the cache. Xiao et
// al., ICLR 2024.
#include <kvlab/plugin.hpp>

namespace {

class StreamingLlm final : public kvlab::Scorer {
 public:
  explicit StreamingLlm(const kvlab::Params& p)
      : sinks_(p.get<bool>("attention_sinks") ? p.get<int>("sinks") : 0), rope_(p.get<kvlab::RopeRegime>("rope")) {}

  kvlab::Needs needs() const override { return kvlab::Needs{}.rope(rope_).capturable(true); }
  kvlab::Pins pins(int tokens) const override { return {.first = sinks_, .last = std::max(0, tokens - sinks_)}; }
  int every() const override { return 1; }
  bool by_age() const override { return true; }
  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    kvlab::ops::recency(kv.pages, out, s);
  }

 private:
  int sinks_;
  kvlab::RopeRegime rope_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::scorer<StreamingLlm>("streaming_llm", "attention sinks and the newest tokens (Xiao et al. 2024)")
                 .param("sinks", 4, 0, 1024, "first tokens that are always kept, part of the budget")
                 .param("rope", kvlab::RopeRegime::cache_relative,
                        "positions: the paper's, original ones, or re-rotated keys")
                 .component("attention_sinks", "off = a plain window"))
