// The example of core/api/README.md; a test holds the two together.
#pragma once
// begin
#include <kvlab/fill_heads.hpp>
#include <kvlab/plugin.hpp>
#include <kvlab/takes_no_pruner.hpp>

// Heads keep their newest 64 tokens. All pages but the newest live on the host. A step brings its best four.
class EvictAndRecall final : public kvlab::Policy, public kvlab::TakesNoPruner {
 public:
  kvlab::Needs needs() const override {
    return kvlab::Needs{}.page_summary(kvlab::Summary::min_max).host_pages(true).capturable(true);
  }
  const char* takes_no_pruner() const override { return "evicts tokens"; }
  void prefill(const kvlab::LayerPrefill& kv, kvlab::Edits& edits, kvlab::Stream s) override {
    if (kv.last[0]) leave(kv, edits, s);
  }
  void select(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    const auto best = step.list<kvlab::PageList>("best", 4);
    kvlab::ops::choose_pages(step, step.queries, {}, kvlab::ops::PageCounts{.same = 4}, best, s);
    edits.recall(best, {kvlab::Deadline::this_attention});
    edits.attend(best, {.last = 1});
  }
  void observe(const kvlab::LayerStep& step, kvlab::Edits& edits, kvlab::Stream s) override {
    const auto keep = step.scratch<std::int32_t>("keep", {step.rows(), step.kv_heads()});
    kvlab::ops::fill_heads(keep, 64, s);
    edits.evict_surplus({.keep = keep});
    leave(step, edits, s);
  }

 private:
  static void leave(const kvlab::LayerKv& kv, kvlab::Edits& edits, kvlab::Stream s) {
    const auto tokens = kv.scratch<std::int32_t>("tokens", {kv.rows(), kv.kv_heads()});
    kvlab::ops::lengths(kv.pages, tokens, s);
    const auto old = kv.list<kvlab::PageList>("old", kv.shape->max_pages());
    kvlab::ops::older_pages(tokens, nullptr, kv.shape->page_size, 1, old, s);
    edits.offload(old, {kvlab::Deadline::next_step});
    edits.drop(kvlab::Tier::device, old, {kvlab::Deadline::next_step});
  }
};
// end
