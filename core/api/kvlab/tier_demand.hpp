// Policy::demand where heads keep some pages on the device: the others lie on the host, or are gone.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "kvlab/policy.hpp"

namespace kvlab {

class TierDemand {
 public:
  static constexpr int everything = std::numeric_limits<int>::max();
  static constexpr int unknown = -1;

  TierDemand() = default;
  // For attach. whole: share of the KV heads of all layers that keep all pages on the device.
  TierDemand(const Shape& shape, const BudgetAmount& budget, double whole)
      : page_(shape.page_size), budget_(budget), whole_(whole) {}

  // The budget's tokens of a KV head after n tokens of text. `everything` without a budget, `unknown` of one in bytes:
  // only core knows the bytes of a page.
  int budget(int n) const {
    switch (budget_.kind) {
      case BudgetAmount::tokens: return static_cast<int>(budget_.value);
      case BudgetAmount::ratio:
        return budget_.value >= 1 ? everything : std::max(1, static_cast<int>(n * budget_.value));
      case BudgetAmount::bytes: return unknown;
      default: return everything;
    }
  }

  // Pages that `tokens` tokens in a row may lie in, wherever they begin.
  int pages_of_run(int tokens) const { return tokens > 0 ? (tokens + page_ - 2) / page_ + 1 : 0; }
  int whole_pages(int tokens) const { return (tokens + page_ - 1) / page_; }

  // Where the host has all full pages of the other heads. pages(n, decodes): most pages of such a head that the device
  // holds of n tokens, at its prompt's end or, with `decodes`, after any decode step up to then. `unknown` = the policy
  // does not say. A head holds no more than all.
  template <class Pages>
  Demand of(int prompt, int max_new, Pages pages) const {
    const int all = prompt + max_new;
    return {.device_prefill = on_device(prompt, pages(prompt, false)),
            .device_decode = on_device(all, pages(all, true)),
            .host = tokens((1 - whole_) * (all / page_))};
  }

  // Where what the others do not keep is gone. held(n, decodes): most tokens of such a head, as above.
  template <class Held>
  Demand of_device(int prompt, int max_new, Held held) const {
    Demand demand = of(prompt, max_new, [&](int n, bool decodes) {
      return whole_pages(static_cast<int>(std::min<std::int64_t>(n, held(n, decodes))));
    });
    demand.host = -1;
    return demand;
  }

 private:
  std::int64_t on_device(int n, int pages) const {
    const int all = whole_pages(n);
    return pages == unknown ? -1 : tokens(whole_ * all + (1 - whole_) * std::min(all, pages));
  }
  // A mean over heads, rounded up. Shares of heads are sums of 1 / heads, whose errors must not add a token.
  std::int64_t tokens(double pages) const { return static_cast<std::int64_t>(std::ceil(pages * page_ - 1e-6)); }

  int page_ = 1;
  BudgetAmount budget_;
  double whole_ = 0;
};

}  // namespace kvlab
