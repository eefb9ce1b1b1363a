// A budget that changes nothing: the method's own default is used instead.
#include "keeps.hpp"

namespace {

class FixedBudget final : public kvlab::broken::KeepNewest {
 public:
  using KeepNewest::KeepNewest;
  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream) override {
    if (over(kv)) edits.evict_rest(kvlab::broken::newest(kv, 32));
  }
};

}  // namespace

KVLAB_PLUGIN(kvlab::policy<FixedBudget>("fixed_budget", "broken: keeps 32 tokens whatever the budget"))
