// A division by nothing in the scores: NaN has no place in an order, so what is kept follows from the order of
// comparisons.
#include <kvlab/plugin.hpp>

#include <limits>

namespace {

class NotANumber final : public kvlab::Scorer {
 public:
  explicit NotANumber(const kvlab::Params&) {}
  void score(const kvlab::LayerKv& kv, kvlab::Scores out, kvlab::Stream s) override {
    kvlab::ops::row_norm(kv.keys, out, s);
    kvlab::ops::scale(out, std::numeric_limits<float>::quiet_NaN(), s);
  }
};

}  // namespace

KVLAB_PLUGIN(kvlab::scorer<NotANumber>("not_a_number", "broken: scores without an order"))
