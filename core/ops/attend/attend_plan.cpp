#include "ops/attend/attend_plan.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "ops/page/check.hpp"

namespace kvlab::ops {
namespace {

constexpr int chunk_tokens = 256;
constexpr const char* op = "attend";

}  // namespace

void AttendPlan::add_list(const PagedKv& kv, int row, int head, const IndexList* list) {
  const int pages = kv.pages(row, head), entries = of_tokens_ ? kv.tokens(row, head) : pages;
  Span span{static_cast<std::int64_t>(lists_.size()), entries};
  if (!list) {
    for (int page = 0; page < pages; ++page) check_page(kv, row, head, page, op);
    spans_.push_back(span);
    return;
  }
  const char *one = of_tokens_ ? "token " : "page ", *several = of_tokens_ ? " tokens" : " pages";
  span.count = list->count(row, head);
  if (span.count < 0 || span.count > list->index.extent[2] || span.count > entries)
    fail(Errc::internal, op,
         "got a list of " + std::to_string(span.count) + several + ", wanted at most " + std::to_string(entries));
  int checked = -1;
  for (int i = 0; i < span.count; ++i) {
    const int entry = list->index(row, head, i);
    if (entry < 0 || entry >= entries || (i > 0 && entry <= lists_.back()))
      fail(Errc::internal, op,
           std::string("got ") + one + std::to_string(entry) + " of " + std::to_string(entries) + ", wanted ascending" +
               several + " of the head");
    lists_.push_back(entry);
    const int page = of_tokens_ ? entry / kv.page_size : entry;
    if (page != checked) check_page(kv, row, head, checked = page, op);
  }
  spans_.push_back(span);
}

void AttendPlan::fill(const AttendArgs& a, int group) {
  const PagedKv& kv = a.kv;
  const IndexList* list = a.pages ? static_cast<const IndexList*>(a.pages) : a.tokens;
  listed_ = list != nullptr;
  of_tokens_ = a.tokens != nullptr;
  kv_heads_ = kv.kv_heads;
  chunk_entries_ = of_tokens_ ? chunk_tokens : std::max(1, chunk_tokens / kv.page_size);
  lists_.clear();
  spans_.clear();
  tasks_.clear();
  first_task_.assign(1, 0);
  for (int r = 0; r < kv.rows; ++r)
    for (int h = 0; h < kv.kv_heads; ++h) {
      add_list(kv, r, h, list);
      for (int c = 0; c * chunk_entries_ < spans_.back().count; ++c)
        tasks_.push_back({r, h, c, static_cast<std::int64_t>(tasks_.size()) * group});
      first_task_.push_back(static_cast<int>(tasks_.size()));
    }
  a.most_distance > 0 ? ranks_.fill_beyond(kv, a.last, a.most_distance) : ranks_.fill(kv);
}

void AttendPlan::pieces(const PagedKv& kv, int row, int head, int chunk, int most, std::vector<Piece>& out) const {
  const Span& span = spans_[at(row, head)];
  const int p = kv.page_size, tokens = kv.tokens(row, head);
  const int first = chunk * chunk_entries_, end = std::min(span.count, first + chunk_entries_);
  const std::int32_t* list = listed_ ? lists_.data() + span.begin : nullptr;
  const std::size_t room = out.size() + static_cast<std::size_t>(most);
  if (!of_tokens_) {
    for (int i = first; i < end && out.size() < room; ++i) {
      const int page = list ? list[i] : i;
      out.push_back({page, 0, std::min(p, tokens - page * p)});
    }
    return;
  }
  for (int i = first; i < end && out.size() < room;) {
    Piece x{list[i] / p, list[i] % p, 1};
    while (++i < end && list[i] == list[i - 1] + 1 && x.begin + x.count < p) ++x.count;
    out.push_back(x);
  }
}

}  // namespace kvlab::ops
