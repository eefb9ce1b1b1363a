// KeyDiff: keys unlike the others stay, by their cosine with the mean of the normalised keys. Park et al. 2025.
#include <kvlab/plugin.hpp>

namespace {

class KeyDiff final : public kvlab::Scorer {
 public:
  explicit KeyDiff(const kvlab::Params& p) : every_(p.get<int>("every")) {}

  kvlab::Needs needs() const override { return kvlab::Needs{}.capturable(true); }
  bool steady_score() const override { return true; }
  int every() const override { return every_; }

  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    const auto anchor = kv.kv_head_vectors("anchor");
    kvlab::ops::normalised_mean(kv.keys, anchor, s);
    kvlab::ops::row_cosine(kv.keys, anchor, out, s);
    kvlab::ops::negate(out, s);
  }

 private:
  int every_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::scorer<KeyDiff>("keydiff", "keeps keys that are unlike the others (Park et al. 2025)")
                 .param("every", 0, 0, kvlab::any, "decode steps between evictions, 0 = the prompt only"))
