// The pages of a head that score_pages may choose from.
#pragma once
#include <kvlab/kv.hpp>

#include <algorithm>

namespace kvlab::ops {

// Pages [first, last) of a head: all but those that hold one of the left out tokens.
struct Candidates {
  int first = 0, last = 0;
  constexpr int count() const { return last - first; }
};
constexpr int first_candidate(const Pins& leave_out, int page_size) {
  return leave_out.first > 0 ? (leave_out.first + page_size - 1) / page_size : 0;
}
constexpr Candidates candidates(int tokens, int page_size, const Pins& leave_out) {
  const int pages = (tokens + page_size - 1) / page_size, first = first_candidate(leave_out, page_size);
  int last = pages;
  if (leave_out.last > 0) last = tokens > leave_out.last ? (tokens - leave_out.last) / page_size : 0;
  return {first, last > first ? last : first};
}

}  // namespace kvlab::ops
