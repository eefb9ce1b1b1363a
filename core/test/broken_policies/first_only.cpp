// KVCache-Factory issues 15 and 54: a length that is not reset, so that only the first sample is compressed.
#include "keeps.hpp"

namespace {

class FirstOnly final : public kvlab::broken::KeepNewest {
 public:
  using KeepNewest::KeepNewest;
  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream) override {
    if (over(kv) && done_ < kv.shape->layers) edits.evict_rest(kvlab::broken::newest(kv, budget_)), ++done_;
  }

 private:
  int done_ = 0;
};

}  // namespace

KVLAB_PLUGIN(kvlab::policy<FirstOnly>("first_only", "broken: compresses the first sequence only"))
