// All pages go to the host, and attention gets only every other one of them back.
#include "keeps.hpp"

namespace {

class HalfRecalled final : public kvlab::broken::KeepNewest {
 public:
  using KeepNewest::KeepNewest;
  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream) override {
    if (!kv.last[0]) return;
    const kvlab::PageList all = pages(kv, 1);
    edits.offload(all);
    edits.drop(kvlab::Tier::device, all);
  }
  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream) override {
    const kvlab::PageList some = pages(step, 2);
    edits.recall(some, {kvlab::Deadline::this_attention});
    edits.attend(some);
  }

 private:
  static kvlab::PageList pages(const kvlab::LayerKv& kv, int stride) {
    const auto list = kv.list<kvlab::PageList>("pages", kv.max_length);
    for (int row = 0; row < kv.rows(); ++row)
      for (int head = 0; head < kv.kv_heads(); ++head) {
        int n = 0;
        for (int page = (kv.pages.pages(row, head) - 1) % stride; page < kv.pages.pages(row, head); page += stride)
          list.index(row, head, n++) = page;
        list.count(row, head) = n;
      }
    return list;
  }
};

}  // namespace

KVLAB_PLUGIN(kvlab::policy<HalfRecalled>("half_recalled", "broken: half of the selected pages stay on the host"))
