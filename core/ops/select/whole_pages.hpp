// References of the ops on whole pages, and what both devices share.
#pragma once
#include <kvlab/whole_pages.hpp>

#include "base/on_both.hpp"

namespace kvlab::ops {

KVLAB_ON_BOTH constexpr std::int32_t kept_beside_page(int tokens, int most, int page) {
  const int whole = most / page * page;
  return tokens <= whole - page || (tokens <= whole && tokens % page) ? tokens : whole - page;
}

void spread_pages_reference(const PagedKv& kv, View<const float, 3> pages, Scores out);
void page_greatest_reference(const PagedKv& kv, View<const float, 3> in, Scores out);
void room_for_page_reference(const PagedKv& kv, const std::int32_t* most, View<std::int32_t, 2> keep);

}  // namespace kvlab::ops
