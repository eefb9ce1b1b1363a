// The same number of tokens for every layer and head. A policy without a split gets this one.
#include <kvlab/plugin.hpp>
#include <kvlab/steady_budget.hpp>

namespace {

struct Uniform final : kvlab::SteadyBudget {
  bool uniform_heads() const override { return true; }
  void allot(const kvlab::Allotment& a, kvlab::Stream s) override { kvlab::ops::allot_uniform(a, s); }
};

}  // namespace

KVLAB_PLUGIN(kvlab::budget<Uniform>("uniform", "the same budget for every layer and KV head"))
