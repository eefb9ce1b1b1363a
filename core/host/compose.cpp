#include "host/compose.hpp"

#include <kvlab/error.hpp>
#include <kvlab/ops.hpp>

#include <algorithm>
#include <limits>
#include <vector>

#include "base/part_timer.hpp"
#include "ops/paged.hpp"

namespace kvlab {
namespace {

constexpr int unlimited = std::numeric_limits<int>::max();

// Tokens per KV head in whole pages, perhaps none, when the dense layers hold all of the `seen` tokens.
int byte_budget_tokens(double bytes, int seen, const Shape& s, std::int64_t page_bytes, int dense_layers) {
  const std::int64_t pages_seen = (seen + s.page_size - 1) / s.page_size;
  const std::int64_t dense = std::int64_t{dense_layers} * s.kv_heads * pages_seen * page_bytes;
  const std::int64_t heads = std::int64_t{s.layers - dense_layers} * s.kv_heads;
  if (heads <= 0) return unlimited;
  const double pages = (bytes - static_cast<double>(dense)) / static_cast<double>(heads * page_bytes);
  return static_cast<int>(std::min(1e8 / s.page_size, std::max(0., pages))) * s.page_size;
}

class ComposedPolicy final : public Policy {
 public:
  explicit ComposedPolicy(Composition parts) : parts_(std::move(parts)) {
    if (parts_.scorer) {
      scorer_needs_ = parts_.scorer->needs();
      every_ = parts_.every.value_or(parts_.scorer->every());
    }
    if (parts_.selector) selector_needs_ = parts_.selector->needs();
    const Needs& n = parts_.scorer ? scorer_needs_ : selector_needs_;
    dense_layers_ = n.dense_layers();
  }

  Needs needs() const override { return parts_.scorer ? scorer_needs_ : selector_needs_; }

  CodecSpec codec() const override { return parts_.codec ? parts_.codec->spec() : CodecSpec{}; }
  CodecSpec host_codec() const override { return parts_.host_codec ? parts_.host_codec->spec() : codec(); }

  void attach(const Shape& shape, const BudgetAmount& amount, Workspace&) override {
    shape_ = shape;
    amount_ = amount;
    const Needs n = needs();
    const std::int64_t vectors = n.page_summary() == Summary::none ? 0 : n.page_summary() == Summary::min_max ? 2 : 1;
    page_bytes_ = ops::make_layout(shape.dtype, codec(), shape.page_size, shape.head_dim,
                                   static_cast<int>(n.token_state().size()))
                      .bytes +
                  vectors * shape.head_dim * static_cast<std::int64_t>(size_of(shape.dtype));
    check_amount();
  }

  void prefill(const LayerPrefill& kv, Edits& edits, Stream s) override {
    std::vector<bool> due(static_cast<std::size_t>(kv.rows()));
    bool any_due = false, any_last = false;
    for (int row = 0; row < kv.rows(); ++row) {
      due[static_cast<std::size_t>(row)] = kv.last[row] && parts_.compress_prompt;
      any_due |= due[static_cast<std::size_t>(row)];
      any_last |= kv.last[row];
    }
    pages_after_.clear();
    if (parts_.scorer) {
      parts_.scorer->observe(kv, s);
      if (any_due) compress(kv, due, edits, s);
    }
    if (parts_.host && any_last && kv.layer >= dense_layers_) place_rest(kv, kv.last, edits);
  }

  void select(const LayerStep& step, Edits& edits, Stream s) override {
    if (step.layer < dense_layers_) return;
    if (!parts_.selector && !parts_.host) return;
    PageList list;
    Pins pins;
    if (parts_.selector) {
      const PartTimer timer(Part::select);
      list = step.list<PageList>("selected pages", step.max_pages);
      LayerStep with = step;
      with.page_budgets = page_budgets(step);
      parts_.selector->select(with, list, s);
      pins = parts_.selector->pins();
      edits.attend(list, pins);
    } else {
      list = all_pages(step);
    }
    if (parts_.host) place_step(step, list, pins, edits);
  }

  void observe(const LayerStep& step, Edits& edits, Stream s) override {
    pages_after_.clear();
    if (parts_.scorer) {
      parts_.scorer->observe(step, s);
      evict_when_due(step, edits, s);
    }
    // Everything was recalled for this attention; a selector's pages stay, for the next step may want them again.
    if (parts_.host && !parts_.selector && step.layer >= dense_layers_) place_rest(step, nullptr, edits);
  }

 private:
  // A budget below what is kept anyway would not be obeyed. (A ratio grows with the sequence.)
  void check_amount() const {
    const bool bytes = amount_.kind == BudgetAmount::bytes;
    if (!bytes && (amount_.kind != BudgetAmount::tokens || !parts_.scorer)) return;
    const int tokens = bytes ? byte_budget_tokens(amount_.value, shape_.max_tokens, shape_, page_bytes_, dense_layers_)
                             : static_cast<int>(amount_.value);
    const Pins pins = parts_.scorer ? parts_.scorer->pins(tokens) : Pins{};
    const int pinned = pins.first + pins.last;
    if (pinned <= tokens && tokens > 0) return;
    const std::string budget = bytes ? std::to_string(static_cast<std::int64_t>(amount_.value)) +
                                           " bytes, whole pages of which hold " + std::to_string(tokens) +
                                           " tokens per KV head"
                                     : std::to_string(tokens) + " tokens";
    const std::string wanted = pinned == 0
                                   ? "a page for each KV head"
                                   : "the " + std::to_string(pinned) + " that are always kept (" +
                                         std::to_string(pins.first) + " first, " + std::to_string(pins.last) + " last)";
    throw Error(Errc::config, "got a budget of " + budget + ", wanted at least " + wanted, parts_.name);
  }

  void evict_when_due(const LayerStep& step, Edits& edits, Stream s) {
    if (every_ == 0) return;
    std::vector<bool> due(static_cast<std::size_t>(step.rows()));
    bool any_due = false;
    for (int row = 0; row < step.rows(); ++row) {
      due[static_cast<std::size_t>(row)] = (step.step[row] + 1) % every_ == 0;
      any_due |= due[static_cast<std::size_t>(row)];
    }
    if (any_due) compress(step, due, edits, s);
  }

  int total(int seen) const { return budget_tokens(amount_, seen, shape_, page_bytes_, dense_layers_); }

  void compress(const LayerKv& kv, const std::vector<bool>& due, Edits& edits, Stream s) {
    if (amount_.kind == BudgetAmount::unlimited || kv.layer < dense_layers_) return;
    const int rows = kv.rows();
    std::vector<std::int32_t> totals(static_cast<std::size_t>(rows));
    std::vector<Pins> pins(static_cast<std::size_t>(rows));
    std::vector<bool> keep_all(static_cast<std::size_t>(rows));
    for (int row = 0; row < rows; ++row) {
      const std::size_t r = static_cast<std::size_t>(row);
      totals[r] = due[r] ? std::min(total(kv.position[row]), kv.position[row]) : kv.position[row];
      keep_all[r] = totals[r] == kv.position[row];
      if (!keep_all[r]) pins[r] = parts_.scorer->pins(totals[r]);
    }
    if (std::find(keep_all.begin(), keep_all.end(), false) == keep_all.end()) return;
    const PartTimer timer(Part::score);
    Scores scores = kv.kv_head_scores("scores");
    parts_.scorer->score(kv, scores, s);
    const auto keep = kv.scratch<std::int32_t>("keep", {rows, kv.kv_heads()});
    const auto length = kv.scratch<std::int32_t>("length", {rows, kv.kv_heads()});
    for (int row = 0; row < rows; ++row)
      for (int head = 0; head < kv.kv_heads(); ++head) length(row, head) = kv.pages.tokens(row, head);
    Allotment a;
    a.layer = kv.layer - dense_layers_;
    a.layers = shape_.layers - dense_layers_;
    a.scores = scores;
    a.length = length;
    a.pins = pins.data();
    a.total = totals.data();
    a.keep = keep;
    a.kv = &kv;
    if (parts_.split)
      parts_.split->allot(a, s);
    else
      ops::allot_uniform(a, s);
    // Bytes are held in whole pages, so a split that ends inside one would hold more than was given.
    const int p = shape_.page_size;
    for (int row = 0; row < rows; ++row)
      for (int head = 0; head < kv.kv_heads(); ++head)
        if (keep_all[static_cast<std::size_t>(row)])
          keep(row, head) = length(row, head);
        else if (amount_.kind == BudgetAmount::bytes && keep(row, head) < length(row, head))
          keep(row, head) = keep(row, head) / p * p;  // top_tokens keeps the pins whatever this says
    TokenList kept = kv.list<TokenList>("kept", kv.max_length);
    {
      const PartTimer select_timer(Part::select);
      ops::top_tokens(kv.pages, scores, keep, pins.data(), kept, s);
    }
    edits.evict_rest(kept);
    pages_after_.resize(static_cast<std::size_t>(rows * kv.kv_heads()));
    for (int row = 0; row < rows; ++row)
      for (int head = 0; head < kv.kv_heads(); ++head)
        pages_after_[static_cast<std::size_t>(row * kv.kv_heads() + head)] =
            (kept.count(row, head) + shape_.page_size - 1) / shape_.page_size;
  }

  View<const std::int32_t, 2> page_budgets(const LayerStep& step) const {
    auto budgets = step.scratch<std::int32_t>("page budgets", {step.rows(), step.kv_heads()});
    for (int row = 0; row < step.rows(); ++row) {
      const int tokens = total(step.position[row]);
      const int pages =
          tokens == unlimited ? step.max_pages : std::max({1, selector_needs_.min_pages(), tokens / shape_.page_size});
      for (int head = 0; head < step.kv_heads(); ++head) budgets(row, head) = std::min(pages, step.max_pages);
    }
    return budgets;
  }

  PageList all_pages(const LayerStep& step) const {
    PageList list = step.list<PageList>("all pages", step.max_pages);
    for (int row = 0; row < step.rows(); ++row)
      for (int head = 0; head < step.kv_heads(); ++head) {
        const int pages = step.pages.pages(row, head);
        for (int page = 0; page < pages; ++page) list.index(row, head, page) = page;
        list.count(row, head) = pages;
      }
    return list;
  }

  // All full pages go to the host, the newest `resident` tokens' pages also stay. rows: [row] which; null = all.
  void place_rest(const LayerKv& kv, const bool* rows, Edits& edits) {
    const int p = shape_.page_size, room = (kv.max_length + p - 1) / p;
    PageList down = kv.list<PageList>("offload", room), out = kv.list<PageList>("drop", room);
    const int stay = std::max(1, parts_.resident_tokens / p);
    for (int row = 0; row < kv.rows(); ++row)
      for (int head = 0; head < kv.kv_heads(); ++head) {
        const bool evicted = !pages_after_.empty();
        const int pages = rows && !rows[row] ? 0
                          : evicted          ? pages_after_[static_cast<std::size_t>(row * kv.kv_heads() + head)]
                                             : kv.pages.pages(row, head);
        int offloaded = 0, dropped = 0;
        for (int page = 0; page + 1 < pages; ++page) {
          down.index(row, head, offloaded++) = page;
          if (page < pages - stay) out.index(row, head, dropped++) = page;
        }
        down.count(row, head) = offloaded;
        out.count(row, head) = dropped;
      }
    edits.offload(down);
    edits.drop(Tier::device, out);
  }

  // Before attention: what it reads comes up, what does not fit beside it goes (down first, if it has no copy there
  // yet).
  void place_step(const LayerStep& step, const PageList& list, const Pins& pins, Edits& edits) {
    const int p = shape_.page_size, rows = step.rows(), heads = step.kv_heads();
    PageList down = step.list<PageList>("offload", step.max_pages), out = step.list<PageList>("drop", step.max_pages),
             up = step.list<PageList>("recall", step.max_pages);
    std::vector<char> wanted;
    for (int row = 0; row < rows; ++row)
      for (int head = 0; head < heads; ++head) {
        const int n = step.pages.tokens(row, head), pages = step.pages.pages(row, head);
        wanted.assign(static_cast<std::size_t>(pages), 0);
        int count = 0;
        const auto want = [&](int page) {
          if (!wanted[static_cast<std::size_t>(page)]) ++count;
          wanted[static_cast<std::size_t>(page)] = 1;
        };
        for (int i = 0; i < list.count(row, head); ++i) want(list.index(row, head, i));
        for (int page = 0; page < pages && page * p < pins.first; ++page) want(page);
        for (int page = pages - 1; page >= 0 && pins.last > 0 && (page + 1) * p > n - pins.last; --page) want(page);
        int ups = 0;
        for (int page = 0; page < pages; ++page)
          if (wanted[static_cast<std::size_t>(page)] && step.pages.entry(row, head, page).frame == null_frame)
            up.index(row, head, ups++) = page;
        if (pages > 0) want(pages - 1);  // the page that is being filled is never moved
        const int room = std::max(count, parts_.resident_tokens / p);
        for (int page = pages - 1; page >= 0 && count < room; --page)
          if (step.pages.entry(row, head, page).frame != null_frame) want(page);
        int downs = 0, outs = 0;
        for (int page = 0; page < pages; ++page) {
          if (wanted[static_cast<std::size_t>(page)] || step.pages.entry(row, head, page).frame == null_frame) continue;
          out.index(row, head, outs++) = page;
          if (step.host_pages.entry(row, head, page).frame == null_frame) down.index(row, head, downs++) = page;
        }
        up.count(row, head) = ups;
        out.count(row, head) = outs;
        down.count(row, head) = downs;
      }
    const Deadline now{Deadline::this_attention};
    edits.offload(down, now);
    edits.drop(Tier::device, out, now);
    edits.recall(up, now);
  }

  Composition parts_;
  Needs scorer_needs_, selector_needs_;
  int every_ = 0, dense_layers_ = 0;
  Shape shape_;
  BudgetAmount amount_;
  std::int64_t page_bytes_ = 0;
  std::vector<int> pages_after_;  // [row, kv_head] of this layer's callback, once it has evicted
};

}  // namespace

std::unique_ptr<Policy> compose(Composition parts) {
  auto refuse = [&](const std::string& what) { throw Error(Errc::config, what, parts.name); };
  if (parts.scorer && parts.selector)
    refuse("got a scorer and a selector in one policy, wanted one of them: they would share one budget");
  if (parts.split && !parts.scorer) refuse("got a budget split without a scorer, wanted a scorer that it divides for");
  if (parts.every && *parts.every > 0 && !parts.scorer) refuse("got a schedule without a scorer, wanted a scorer");
  if (parts.scorer && parts.every.value_or(parts.scorer->every()) > 0 && parts.scorer->needs().window_queries() > 0 &&
      parts.scorer->needs().mass() == Mass::none)
    refuse("got schedule.every with a scorer that looks at nothing but the prompt's last queries, wanted every: 0");
  return std::make_unique<ComposedPolicy>(std::move(parts));
}

int budget_tokens(const BudgetAmount& amount, int seen, const Shape& s, std::int64_t page_bytes, int dense_layers) {
  switch (amount.kind) {
    case BudgetAmount::unlimited: return unlimited;
    case BudgetAmount::tokens: return static_cast<int>(amount.value);
    case BudgetAmount::ratio:
      if (amount.value >= 1) return unlimited;
      return std::max(1, static_cast<int>(seen * amount.value));
    case BudgetAmount::bytes:
      return std::max(s.page_size, byte_budget_tokens(amount.value, seen, s, page_bytes, dense_layers));
  }
  return unlimited;
}

}  // namespace kvlab
