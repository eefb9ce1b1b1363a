// The common part of the broken policies that keep the newest tokens at the prompt's end.
#pragma once
#include <kvlab/plugin.hpp>

#include <algorithm>

namespace kvlab::broken {

// The newest `keep` tokens of every head, ascending. At the prompt's end places are in text order.
inline TokenList newest(const LayerKv& kv, int keep) {
  const auto list = kv.list<TokenList>("kept", kv.max_length);
  for (int row = 0; row < kv.rows(); ++row)
    for (int head = 0; head < kv.kv_heads(); ++head) {
      const int tokens = kv.pages.tokens(row, head), n = std::min(keep, tokens);
      list.count(row, head) = n;
      for (int i = 0; i < n; ++i) list.index(row, head, i) = tokens - n + i;
    }
  return list;
}

class KeepNewest : public Policy {
 public:
  explicit KeepNewest(const Params&) {}
  Needs needs() const override { return {}; }
  void attach(const Shape&, const BudgetAmount& budget, Workspace&) override {
    budget_ = budget.kind == BudgetAmount::tokens ? static_cast<int>(budget.value) : 1 << 30;
  }

 protected:
  bool over(const LayerPrefill& kv) const { return kv.last[0] && kv.max_length > budget_; }
  int budget_ = 0;
};

}  // namespace kvlab::broken
