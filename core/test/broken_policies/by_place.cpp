// VeloxQuant-MLX issues 370 and 137: the code takes a token's place in the cache for its position.
#include <kvlab/plugin.hpp>

namespace {

class ByPlace final : public kvlab::Scorer {
 public:
  explicit ByPlace(const kvlab::Params&) {}
  int every() const override { return 1; }
  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream) override {
    for (int row = 0; row < kv.rows(); ++row)
      for (int head = 0; head < kv.kv_heads(); ++head)
        for (int t = 0; t < kv.pages.tokens(row, head); ++t) out(row, head, t) = static_cast<float>(t);
  }
};

}  // namespace

KVLAB_PLUGIN(kvlab::scorer<ByPlace>("by_place", "broken: a window by place instead of position"))
