// kvpress issue 173: top-k leaves the kept tokens in the order of their scores.
#include "keeps.hpp"

namespace {

class Unsorted final : public kvlab::broken::KeepNewest {
 public:
  using KeepNewest::KeepNewest;
  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream) override {
    if (!over(kv)) return;
    const kvlab::TokenList list = kvlab::broken::newest(kv, budget_);
    for (int head = 0; head < kv.kv_heads(); ++head)
      std::reverse(&list.index(0, head, 0), &list.index(0, head, 0) + list.count(0, head));
    edits.evict_rest(list);
  }
};

}  // namespace

KVLAB_PLUGIN(kvlab::policy<Unsorted>("unsorted", "broken: kept tokens are not ascending"))
