// kvpress issue 16: the policy counts positions inside the cache, but keys keep the phase of their text position.
#include <kvlab/plugin.hpp>

namespace {

class OldPhase final : public kvlab::Scorer {
 public:
  explicit OldPhase(const kvlab::Params&) {}
  kvlab::Pins pins(int tokens) const override { return {.first = 4, .last = std::max(0, tokens - 4)}; }
  int every() const override { return 1; }
  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    kvlab::ops::recency(kv.pages, out, s);
  }
};

}  // namespace

KVLAB_PLUGIN(kvlab::scorer<OldPhase>("old_phase", "broken: the declared RoPE regime is not asked for")
                 .param("rope", kvlab::RopeRegime::cache_relative, "ignored"))
