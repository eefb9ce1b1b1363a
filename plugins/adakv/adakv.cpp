// AdaKV: the heads of a layer share one budget. The best scores of all heads give each head's count. Feng et al. 2024.
#include <kvlab/plugin.hpp>

namespace {

class AdaKv final : public kvlab::Budget {
 public:
  explicit AdaKv(const kvlab::Params& p) : floor_(p.get<double>("floor")), exact_total_(p.get<bool>("exact_total")) {}
  void allot(const kvlab::Allotment& a, kvlab::Stream s) override {
    kvlab::ops::allot_by_score(a, floor_, exact_total_, s);
  }

 private:
  double floor_;
  bool exact_total_;
};

}  // namespace

KVLAB_PLUGIN(kvlab::budget<AdaKv>("adakv", "heads of a layer share a budget by their scores (Feng et al. 2024)")
                 .param("floor", 0.2, 0, 1, "share of the uniform budget that every head keeps; 1 = uniform")
                 .param("exact_total", true,
                        "repair the rounding so that the budgets of a layer add up; the authors' code does not"))
