// Scores from memory that nobody wrote, or from a clock: here a counter that no seed resets.
#include <kvlab/plugin.hpp>

namespace {

class Restless final : public kvlab::Scorer {
 public:
  explicit Restless(const kvlab::Params&) {}
  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream) override {
    static unsigned counter = 0;
    for (int row = 0; row < kv.rows(); ++row)
      for (int head = 0; head < kv.kv_heads(); ++head)
        for (int t = 0; t < kv.pages.tokens(row, head); ++t)
          out(row, head, t) = static_cast<float>((counter = counter * 1664525u + 1013904223u) >> 8);
  }
};

}  // namespace

KVLAB_PLUGIN(kvlab::scorer<Restless>("restless", "broken: every run scores something else"))
