// Knorm: keys of small L2 norm receive attention, so they stay. Devoto et al., EMNLP 2024. RoPE does not change a norm.
#include <kvlab/plugin.hpp>

namespace {

class Knorm final : public kvlab::Scorer {
 public:
  explicit Knorm(const kvlab::Params& p)
      : dense_(p.get<int>("dense_layers")), recent_(p.get<int>("recent")), every_(p.get<int>("every")) {}

  kvlab::Needs needs() const override { return kvlab::Needs{}.dense_layers(dense_).capturable(true); }
  kvlab::Pins pins(int tokens) const override { return {.last = std::min(recent_, tokens)}; }
  bool steady_score() const override { return true; }
  int every() const override { return every_; }

  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    kvlab::ops::row_norm(kv.keys, out, s);
    kvlab::ops::negate(out, s);
  }

 private:
  int dense_, recent_, every_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::scorer<Knorm>("knorm", "keeps keys with a small L2 norm (Devoto et al. 2024)")
                 .param("dense_layers", 0, 0, kvlab::any, "first layers that keep everything (the authors' code: 2)")
                 .param("recent", 0, 0, kvlab::any, "newest tokens that stay, as many as the budget holds")
                 .param("every", 0, 0, kvlab::any, "decode steps between evictions, 0 = the prompt only"))
