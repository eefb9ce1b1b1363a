// AdaKV: the heads of a layer share one budget; the best scores of all heads decide how much each keeps. Feng et al.
// 2024.
#include <kvlab/plugin.hpp>

namespace {

class AdaKv final : public kvlab::Budget {
 public:
  explicit AdaKv(const kvlab::Params& p) : floor_(p.get<float>("floor")) {}
  void allot(const kvlab::Allotment& a, kvlab::Stream s) override { kvlab::ops::allot_by_score(a, floor_, s); }

 private:
  float floor_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::budget<AdaKv>("adakv", "heads of a layer share a budget by their scores (Feng et al. 2024)")
                 .param("floor", 0.2, 0, 1, "share of the uniform budget that every head keeps; 1 = uniform"))
