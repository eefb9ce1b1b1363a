// AdaKV: the heads of a layer share one budget. The best scores of all heads give each head's count. Feng et al. 2024.
#include <kvlab/plugin.hpp>
#include <kvlab/steady_budget.hpp>

#include <cmath>

namespace {

enum class Floor : std::uint8_t { share, minimum };

}  // namespace

namespace kvlab {

template <>
struct Choices<Floor> {
  static constexpr std::pair<Floor, const char*> all[] = {{Floor::share, "share"}, {Floor::minimum, "minimum"}};
};

}  // namespace kvlab

namespace {

class AdaKv final : public kvlab::SteadyBudget {
 public:
  explicit AdaKv(const kvlab::Params& p)
      : floor_(p.get<double>("floor")),
        minimum_(p.get<Floor>("floor_is") == Floor::minimum),
        exact_total_(p.get<bool>("exact_total")) {}

  void allot(const kvlab::Allotment& a, kvlab::Stream s) override {
    if (minimum_) protect(a, s);
    kvlab::ops::allot_by_score(a, minimum_ ? 0 : floor_, exact_total_, s);
  }

 private:
  // Each head's best tokens outrank every other's. They stay in any case, so their order among them is no matter.
  void protect(const kvlab::Allotment& a, kvlab::Stream s) const {
    const kvlab::LayerKv& kv = *a.kv;
    const kvlab::View<const std::int32_t, 2> total{a.total, {kv.rows(), kv.kv_heads()}, {1, 0}};
    const auto safe = kv.scratch<std::int32_t>("safe tokens", {kv.rows(), kv.kv_heads()});
    kvlab::ops::share_of_keep(total, 0, floor_, safe, s);
    const auto best = kv.list<kvlab::TokenList>("best of each head", kv.max_length);
    kvlab::ops::top_tokens(kv.pages, a.scores, safe, a.pins, best, s);
    kvlab::ops::set_listed(best, INFINITY, a.scores, s);
  }

  double floor_;
  bool minimum_, exact_total_;
};

}  // namespace

KVLAB_PLUGIN(
    kvlab::budget<AdaKv>("adakv", "heads of a layer share a budget by their scores (Feng et al. 2024)")
        .param("floor", 0.2, 0, 1, "share of the uniform budget that every head keeps; 1 = uniform")
        .param("floor_is", Floor::share,
               "share: so much of a head's budget is the uniform one, and the rest goes by scores (the authors). "
               "minimum: so many of its best tokens stay, and the best of all others (kvpress)")
        .param("exact_total", true,
               "repair the rounding so that the budgets of a layer add up; the authors' code does not"))
