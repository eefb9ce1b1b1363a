// A policy that attends to tokens, not pages: the newest of each head and the two oldest, which are pinned.
#pragma once
#include <kvlab/fill_heads.hpp>
#include <kvlab/ops.hpp>
#include <kvlab/policy.hpp>

#include <vector>

namespace kvlab::test {

class TokenReader final : public Policy {
 public:
  explicit TokenReader(int newest, bool notes_mass = false) : newest_(newest), notes_mass_(notes_mass) {}
  Needs needs() const override {
    return Needs{}.mass(notes_mass_ ? Mass::decode : Mass::none).capturable(!notes_mass_);
  }
  void select(const LayerStep& step, Edits& edits, Stream s) override {
    const Scores score = step.kv_head_scores("recency");
    ops::recency(step.pages, score, s);
    const auto keep = step.scratch<std::int32_t>("newest", {step.rows(), step.kv_heads()});
    ops::fill_heads(keep, newest_, s);
    const auto list = step.list<TokenList>("tokens", newest_);
    ops::top_tokens(step.pages, score, keep, nullptr, list, s);
    edits.attend(list, {.first = 2});
  }
  // Notes the mass of row 0, query head 0, which must be host memory.
  void observe(const LayerStep& step, Edits&, Stream) override {
    if (!notes_mass_) return;
    mass.emplace_back();
    for (int t = 0; t < step.pages.tokens(0, 0); ++t) mass.back().push_back(step.mass(0, 0, t));
  }
  std::vector<std::vector<float>> mass;  // [step and layer][place]

 private:
  int newest_;
  bool notes_mass_;
};

}  // namespace kvlab::test
