// H2O: the tokens with the largest attention accumulated so far, and the newest ones. Zhang et al., NeurIPS 2023.
#include <kvlab/plugin.hpp>

namespace {

class H2o final : public kvlab::Scorer {
 public:
  explicit H2o(const kvlab::Params& p)
      : heavy_(p.get<bool>("heavy_hitters") ? p.get<double>("heavy") : 0.),
        group_(p.get<kvlab::GroupRule>("group")),
        every_(p.get<int>("every")) {}

  kvlab::Needs needs() const override {
    return kvlab::Needs{}.mass_into("score", group_, kvlab::Mass::all).capturable(true);
  }
  kvlab::Pins pins(int tokens) const override { return {.last = tokens - static_cast<int>(tokens * heavy_)}; }
  const char* column() const override { return "score"; }
  int every() const override { return every_; }

  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    kvlab::ops::read_state(kv.state("score"), out, s);
  }

 private:
  double heavy_;
  kvlab::GroupRule group_;
  int every_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::scorer<H2o>("h2o",
                                "keeps heavy hitters and recent tokens, evicts while decoding (Zhang et al. 2023)")
                 .param("heavy", 0.5, 0, 1, "share of the budget for heavy hitters; the rest is recent tokens")
                 .param("group", kvlab::GroupRule::mean, "how a GQA group's attention becomes one")
                 .param("every", 1, 0, kvlab::any, "decode steps between evictions, 0 = the prompt only")
                 .component("heavy_hitters", "off = recent tokens only"))
