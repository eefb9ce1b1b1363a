// A division by zero in the scores. NaN has no order, so the order of comparisons decides which tokens stay.
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
