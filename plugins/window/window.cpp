// Window attention: the newest tokens only. It is the negative control of StreamingLLM (Xiao et al., ICLR 2024).
// Attention reads the whole prompt before the cache is cut, and a decode step sees the budget and itself (post-trim).
#include <kvlab/plugin.hpp>

namespace {

class Window final : public kvlab::Scorer {
 public:
  explicit Window(const kvlab::Params& p) : rope_(p.get<kvlab::RopeRegime>("rope")) {}

  kvlab::Needs needs() const override { return kvlab::Needs{}.rope(rope_).capturable(true); }
  kvlab::Pins pins(int tokens) const override { return {.last = tokens}; }
  int every() const override { return 1; }
  bool by_age() const override { return true; }
  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    kvlab::ops::recency(kv.pages, out, s);
  }

 private:
  kvlab::RopeRegime rope_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::scorer<Window>("window", "the newest tokens only")
                 .param("rope", kvlab::RopeRegime::original, "positions of the cached keys"))
