// A budget that changes nothing, unless it is in tokens.
#include "keeps.hpp"

namespace {

class TokensOnly final : public kvlab::broken::KeepNewest {
 public:
  using KeepNewest::KeepNewest;
  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream) override {
    if (over(kv)) edits.evict_rest(kvlab::broken::newest(kv, budget_));
  }
};

}  // namespace

KVLAB_PLUGIN(kvlab::policy<TokensOnly>("tokens_only", "broken: keeps everything under a ratio or bytes"))
