// Pages become codes of a second codec when they are full and hold none of the newest tokens.
#pragma once
#include <kvlab/ops.hpp>
#include <kvlab/policy.hpp>

namespace kvlab {

// Of a prompt's last chunk. left: [row, kv_head] tokens after the callback's eviction, empty without one.
inline void encode_aged(const LayerKv& kv, View<const std::int32_t, 2> left, int residual, Edits& edits, Stream s) {
  const PageList aged = kv.list<PageList>("aged pages", kv.shape->max_pages());
  ops::aged_pages(kv.pages, left, residual, aged, s);
  edits.encode(aged, 1);
}

// Of a step, which adds one token to a head. So at most one page ages.
inline void encode_aged(const Step& step, int residual, Edits& edits, Stream s) {
  const PageList aged = step.list<PageList>("aged pages", 1);
  ops::aged_pages(step.pages, {}, residual, aged, s);
  edits.for_all_layers();
  edits.encode(aged, 1);
}

}  // namespace kvlab
