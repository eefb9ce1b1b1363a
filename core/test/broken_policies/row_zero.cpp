// kvpress pull request 25, KVCache-Factory issue 46: the code assumes a batch of one.
#include <kvlab/plugin.hpp>

namespace {

class RowZero final : public kvlab::Scorer {
 public:
  explicit RowZero(const kvlab::Params&) {}
  int every() const override { return 1; }
  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    kvlab::ops::row_norm(kv.keys, out, s);
    for (int row = 1; row < kv.rows(); ++row)
      for (int head = 0; head < kv.kv_heads(); ++head)
        for (int t = 0; t < kv.pages.tokens(row, head); ++t) out(row, head, t) = 0;
  }
};

}  // namespace

KVLAB_PLUGIN(kvlab::scorer<RowZero>("row_zero", "broken: scores the first row of a batch only"))
