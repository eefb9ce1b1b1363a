#include "ops/select/inject.hpp"

#include <algorithm>
#include <vector>

#include "base/device_op.hpp"
#include "ops/page/check.hpp"

namespace kvlab::ops {
namespace {

constexpr const char* op = "inject_pages";

class Head {
 public:
  Head(const InjectArgs& a, int row, int head)
      : a_(a), row_(row), head_(head), slot_(a.pages.slots[row]), at_row_(a.list.at(row)) {
    pages_ = a.pages.pages(row, head);
    state_ = &a.state(slot_, head, 0);
    pinned_.resize(static_cast<std::size_t>(pages_)), was_.resize(pinned_.size()), now_.resize(pinned_.size());
  }

  void run() {
    const std::uint32_t question = a_.asked(slot_), kept = state_[1] == question ? state_[0] : 0;
    const InjectTurn turn = inject_turn(kept, a_.steps, slot_);
    if (a_.steps || a_.heads.on(slot_, head_)) state_[0] = turn.keep, state_[1] = question;
    if (!a_.heads.on(slot_, head_)) return;
    for (int page = 0; page < pages_; ++page) was_[at(page)] = state_[inject_header + page / 32] >> (page % 32) & 1;
    mark_pinned();
    const int n = a_.list.count(at_row_, head_);
    for (int i = 0; i < n; ++i) now_[at(checked(a_.list.index(at_row_, head_, i)))] = 1;
    if (a_.recorded.first) {
      was_.assign(was_.size(), 0);
      if (const std::int64_t list = a_.recorded.list(question, turn.list, head_); list >= 0) {
        for (std::int64_t i = a_.recorded.begin[list]; i < a_.recorded.begin[list + 1]; ++i)
          if (const int page = a_.recorded.page[i]; page >= 0 && page < pages_) was_[at(page)] = 1;
        draw(n, n, 0);
      }
    } else if (turn.list > 0) {
      const bool reranks = inject_reranks(state_[2], a_.clock, slot_);
      draw(n, inject_kept(reranks ? a_.rerank_overlap : a_.overlap, n), turn.list);
    }
    state_[2] = inject_now(a_.clock, slot_);
    write();
  }

 private:
  static std::size_t at(int page) { return static_cast<std::size_t>(page); }

  int checked(int page) const {
    if (page < 0 || page >= pages_)
      fail(Errc::plugin, op,
           "got page " + std::to_string(page) + " in a list, wanted 0 to " + std::to_string(pages_ - 1));
    return page;
  }

  void mark_pinned() {
    const int p = a_.pages.page_size, n = a_.pages.tokens(row_, head_);
    const auto pin = [&](int page) { pinned_[at(page)] = 1; };
    for (int page = 0; page < pages_ && std::int64_t{page} * p < a_.pins.first; ++page) pin(page);
    for (int page = pages_ - 1; page >= 0 && a_.pins.last > 0 && (page + 1) * p > n - a_.pins.last; --page) pin(page);
    if (a_.pins.newest_page && pages_ > 0) pin(pages_ - 1);
  }

  // Draws `now_` anew with n pages. Chosen pinned pages stay, `kept` pages come from `was_`, the others do not.
  void draw(int n, int kept, std::uint32_t number) {
    const std::uint64_t stream = inject_stream(a_.seed, a_.layer, a_.sequence[slot_], head_, number);
    old_.clear(), other_.clear();
    int wanted = n;
    for (int page = 0; page < pages_; ++page) {
      if (!pinned_[at(page)]) {
        now_[at(page)] = 0;
        (was_[at(page)] ? old_ : other_).push_back(inject_key(stream, static_cast<std::uint32_t>(page)));
      } else if (now_[at(page)]) {
        --wanted;
        kept -= was_[at(page)];
      }
    }
    const auto room = [](const auto& keys) { return static_cast<int>(keys.size()); };
    const int some = std::min({std::max(0, kept), wanted, room(old_)}), rest = std::min(wanted - some, room(other_));
    take(old_, wanted - rest);
    take(other_, rest);
  }

  void take(std::vector<std::uint64_t>& keys, int count) {
    if (count < static_cast<int>(keys.size()))
      std::nth_element(keys.begin(), keys.begin() + count, keys.end(), std::greater<>());
    for (int i = 0; i < count; ++i)
      now_[at(static_cast<int>(0xffffffffu - static_cast<std::uint32_t>(keys[static_cast<std::size_t>(i)])))] = 1;
  }

  void write() {
    std::fill(state_ + inject_header, state_ + a_.state.extent[2], 0u);
    int count = 0;
    for (int page = 0; page < pages_; ++page) {
      if (!now_[at(page)]) continue;
      a_.list.index(at_row_, head_, count++) = page;
      state_[inject_header + page / 32] |= 1u << (page % 32);
    }
    a_.list.count(at_row_, head_) = count;
  }

  const InjectArgs& a_;
  int row_, head_, slot_, pages_;
  std::int64_t at_row_;
  std::uint32_t* state_;
  std::vector<char> pinned_, was_, now_;
  std::vector<std::uint64_t> old_, other_;
};

}  // namespace

void inject_pages(const InjectArgs& a, Stream s) {
  check_kv(a.pages, op, s);
  check_list(a.pages, a.list, op);
  for (const std::int32_t overlap : {a.overlap, a.rerank_overlap})
    if (overlap < 0 || overlap > 1'000'000)
      fail(Errc::internal, op, "got an overlap of " + std::to_string(overlap) + " millionths, wanted 0 to 1000000");
  if (a.state.extent[1] < a.pages.kv_heads || a.state.extent[2] < inject_words(a.pages.table.extent[2]) ||
      a.state.extent[0] < a.pages.table.extent[0])
    fail(Errc::internal, op, "got too small a state, wanted [slot, kv_head, words for every page]");
  if (s.device() == Device::cuda) return on_cuda<inject_pages>(a, s);
  for (int r = 0; r < a.pages.rows; ++r)
    for (int h = 0; h < a.pages.kv_heads; ++h) Head(a, r, h).run();
}

}  // namespace kvlab::ops
