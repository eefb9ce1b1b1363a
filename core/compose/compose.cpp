#include "compose/compose.hpp"

#include <fmt/format.h>
#include <kvlab/error.hpp>
#include <kvlab/fill_heads.hpp>
#include <kvlab/ops.hpp>
#include <kvlab/step_numbers.hpp>
#include <kvlab/tier_demand.hpp>

#include <algorithm>
#include <array>
#include <cstddef>
#include <iterator>
#include <limits>
#include <vector>

#include "base/log.hpp"
#include "base/part_timer.hpp"
#include "compose/aged.hpp"
#include "compose/over_layers.hpp"
#include "compose/row_coded.hpp"
#include "compose/second_stage.hpp"
#include "ops/page/final_list.hpp"
#include "ops/select/allot.hpp"
#include "plugin/before_step.hpp"
#include "plugin/budget_tokens.hpp"
#include "plugin/edits_author.hpp"
#include "plugin/offloads.hpp"
#include "plugin/steady_split.hpp"
#include "plugin/takes_mass_late.hpp"
#include "plugin/verified.hpp"

namespace kvlab {
namespace {

constexpr int unlimited = std::numeric_limits<int>::max();

// Passes calls on to a workspace and counts the state that they take, in bytes per slot.
class CountedWorkspace final : public Workspace {
 public:
  explicit CountedWorkspace(Workspace& w) : w_(w) {}
  void* scratch(const char* tag, std::size_t bytes) override { return w_.scratch(tag, bytes); }
  void* state(const char* tag, std::size_t bytes_per_slot, int slots) override {
    bytes_per_slot_ += bytes_per_slot;
    return w_.state(tag, bytes_per_slot, slots);
  }
  const void* upload(const char* tag, const void* from, std::size_t bytes) override {
    return w_.upload(tag, from, bytes);
  }
  const void* constant(const char* tag, const void* from, std::size_t bytes) override {
    return w_.constant(tag, from, bytes);
  }
  void* room(const char* tag, std::size_t bytes) override { return w_.room(tag, bytes); }
  std::size_t bytes_per_slot() const { return bytes_per_slot_; }

 private:
  Workspace& w_;
  std::size_t bytes_per_slot_ = 0;
};

class ComposedPolicy final : public Policy,
                             public EditsAuthor,
                             public Verified,
                             public BeforeStep,
                             public Offloads,
                             public TakesMassLate {
 public:
  explicit ComposedPolicy(Composition parts) : parts_(std::move(parts)) {
    if (parts_.scorer) {
      scorer_needs_ = parts_.scorer->needs();
      every_ = parts_.every.value_or(parts_.scorer->every());
      if (parts_.split)
        scorer_needs_
            .scratch_numbers(scorer_needs_.scratch_numbers() + 1)  // a list of its own
            .profile(scorer_needs_.profile() || parts_.split->reads_profile());
    }
    if (parts_.rescorer)
      scorer_needs_ = with_second_stage(scorer_needs_, parts_.rescorer->needs(), Role::rescorer, parts_.name);
    if (parts_.scorer && parts_.split && parts_.split->numbers() > 0) {
      over_layers_.emplace(*parts_.split, *parts_.scorer, scorer_needs_);
      scorer_needs_ = over_layers_->needs();
    }
    if (parts_.selector) selector_needs_ = parts_.selector->needs();
    if (parts_.selector && parts_.host) selector_needs_.host_pages(true);
    ages_ = parts_.codec && pages_age(*parts_.codec);
    for (Needs* n : {&scorer_needs_, &selector_needs_})
      if (ages_) n->all_layers(true);
    const Needs& n = parts_.scorer ? scorer_needs_ : selector_needs_;
    dense_layers_ = n.dense_layers();
  }

  std::string author() const override {
    return parts_.selector ? author_of(*parts_.selector) : parts_.scorer ? author_of(*parts_.scorer) : std::string();
  }

  bool offloads() const override { return parts_.host && !parts_.selector; }

  // Under re_rotate, and with numbers that a split gives in scratch, each layer evicts by itself.
  bool takes_mass_late() const override {
    const char* column = steady_ && !parts_.split && !parts_.scorer->by_age() ? parts_.scorer->column() : nullptr;
    return column && scorer_needs_.mass_into().state == column && scorer_needs_.rope() != RopeRegime::re_rotate;
  }

  void verify() override {
    for (Verified* part : verified_parts())
      if (part) part->verify();
  }
  void forget() override {
    for (Verified* part : verified_parts())
      if (part) part->forget();
  }

  ops::Finding* finding(Stream s) override {
    Verified* guard = verified(parts_.scorer.get());
    return guard ? guard->finding(s) : nullptr;
  }

  Needs needs() const override { return parts_.scorer ? scorer_needs_ : selector_needs_; }

  std::vector<CodecSpec> codecs() const override {
    const CodecSpec spec = parts_.codec ? parts_.codec->spec() : CodecSpec{};
    return ages_ ? std::vector<CodecSpec>{{}, spec} : std::vector<CodecSpec>{spec};
  }
  CodecSpec host_codec() const override { return parts_.host_codec ? parts_.host_codec->spec() : codecs().front(); }

  void load_profile(const Profile& profile) override {
    if (parts_.scorer) parts_.scorer->load_profile(profile);
    if (parts_.split) parts_.split->load_profile(profile);
    if (parts_.selector) parts_.selector->load_profile(profile);
  }

  // A prompt leaves a step's room of pages. A step holds its choice and pins too, and the page that its token opened.
  Demand demand(int prompt, int max_new) const override {
    if (!parts_.host || !parts_.selector || parts_.scorer) return {};
    const Pins pins = parts_.selector->pins();
    const TierDemand tiers(shape_, amount_, std::min(1., static_cast<double>(dense_layers_) / shape_.layers));
    const int pinned = tiers.whole_pages(pins.first) + std::max(1, tiers.pages_of_run(pins.last));
    return tiers.of(prompt, max_new, [&](int n, bool decodes) {
      const int chosen = pages_of_budget(n), room = std::max(resident_pages(), chosen);
      return decodes ? std::max(room, chosen + pinned) + 1 : room;
    });
  }

  void attach(const Shape& shape, const BudgetAmount& amount, Workspace& w) override {
    shape_ = shape;
    amount_ = amount;
    told_ = false;
    page_bytes_ = page_bytes(shape, codecs().front(), needs());
    CountedWorkspace counted(w);
    if (parts_.scorer) parts_.scorer->attach(shape, amount, counted);
    if (parts_.split) parts_.split->attach(shape);
    if (parts_.selector) parts_.selector->attach(shape, amount, counted);
    if (over_layers_) over_layers_->attach(shape, dense_layers_, counted);
    state_bytes_ = static_cast<std::int64_t>(counted.bytes_per_slot());
    for_pages_ = amount_for_pages(amount, counted.bytes_per_slot());
    check_amount();
    if (parts_.injection && parts_.selector) injector_.emplace(*parts_.injection, shape, w);
    // before_step gives a graph the numbers that change from step to step. Without a selector all pages come and go in
    // each step (core/GPU.md says why such steps run without a graph).
    split_ = dynamic_cast<SteadySplit*>(parts_.split.get());
    const bool evicts = parts_.scorer && every_ > 0 && amount_.kind != BudgetAmount::unlimited;
    steady_ = evicts && !parts_.host && ranks_steadily(*parts_.scorer) && divides_steadily();
    take_numbers(w);
    scorer_needs_.capturable(scorer_needs_.capturable() && (!evicts || steady_) && !parts_.host);
    selector_needs_.capturable((!parts_.selector || selector_needs_.capturable()) && (parts_.selector || !parts_.host));
  }

  void prefill(const LayerPrefill& kv, Edits& edits, Stream s) override {
    const std::size_t rows = static_cast<std::size_t>(kv.rows());
    last_.assign(kv.last, kv.last + rows);
    due_.assign(rows, 0);
    if (parts_.compress_prompt) due_ = last_;
    if (parts_.selector) parts_.selector->prefill(kv, s);
    const int least = parts_.selector ? selector_needs_.min_pages() * shape_.page_size : 0;
    for (std::size_t r = 0; kv.layer == 0 && r < rows; ++r)
      if (last_[r] && kv.position[r] >= least) warn_of_short(total(kv.position[r]), least, "reads");
    if (injector_) injector_->begin(kv, s);
    if (over_layers_) {
      parts_.scorer->observe(over_layers_->for_scorer(kv), s);
      return measure(kv, s);
    }
    View<const std::int32_t, 2> left;
    if (parts_.scorer) {
      parts_.scorer->observe(kv, s);
      left = compress(kv, edits, s);
    }
    if (any(last_)) end_prompt(kv, left, edits, s);
  }

  void finish_prompt(const LayerKv& kv, Edits& edits, Stream s) override {
    if (!over_layers_) return;
    if (kv.layer == 0) over_layers_->divide(kv, unit(), total(kv.position[0]), s);
    View<const std::int32_t, 2> left;
    if (over_layers_->divided() && kv.layer >= dense_layers_) {
      const View<const std::int32_t, 2> keep = over_layers_->keep(kv);
      rescore(kv, over_layers_->pins(), keep, over_layers_->scores(kv), s);
      left = keep_best(kv, over_layers_->scores(kv), keep, over_layers_->pins(kv), edits, s);
    }
    end_prompt(kv, left, edits, s);
  }

  void select(const LayerStep& step, Edits& edits, Stream s) override {
    if (step.layer < dense_layers_) return;
    if (!parts_.selector && !parts_.host) return;
    PageList list;
    Pins pins;
    if (parts_.selector) {
      list = step.list<PageList>("selected pages", step.max_pages);
      pins = parts_.selector->pins();
      if (step.final_list && !injector_) {
        list.final = step.final_list;
        list.final->pins = pins;
      }
      LayerStep with = step;
      with.page_budgets = page_budgets(step, s);
      parts_.selector->select(with, list, s);
      if (injector_) {
        const PartTimer timer(Part::other);
        injector_->replace(step, list, pins, s);
      }
      edits.attend(list, pins);
      if (parts_.host)
        edits.place(list, {.pins = pins,
                           .room = constant() ? room_of(step) : 0,
                           .when = {Deadline::this_attention},
                           .rooms = constant() ? View<const std::int32_t, 2>{} : of_heads(of_rows_.rooms, step)});
    } else {
      recall_all(step, edits, s);
    }
  }

  void observe(const LayerStep& step, Edits& edits, Stream s) override {
    View<const std::int32_t, 2> left;
    if (parts_.selector) parts_.selector->observe(step, s);
    if (parts_.scorer) {
      {
        const PartTimer timer(Part::score);
        parts_.scorer->observe(step, s);
      }
      if (steady_) {
        compress_steadily(step, edits, s);
      } else {
        due_.assign(static_cast<std::size_t>(step.rows()), 0);
        for (int row = 0; every_ > 0 && row < step.rows(); ++row)
          due_[static_cast<std::size_t>(row)] = (step.step[row] + 1) % every_ == 0;
        left = compress(step, edits, s);
      }
    }
    // Without a selector, all pages were recalled for this attention. A selector's pages stay: the next step may want
    // them again.
    if (parts_.host && !parts_.selector && step.layer >= dense_layers_) place_rest(step, left, nullptr, edits, s);
  }

  void finish_step(const Step& step, Edits& edits, Stream s) override {
    if (ages_) encode_aged(step, parts_.codec->residual(), edits, s);
  }

  int before_step(const StepCounters& c) override {
    const int of_parts = tell_before_step(parts_.scorer.get(), c) + tell_before_step(parts_.selector.get(), c);
    tell(c);
    told_ = true;
    return variant_ + 2 * of_parts;
  }

  void release(int slot) override {
    if (parts_.scorer) parts_.scorer->release(slot);
    if (parts_.selector) parts_.selector->release(slot);
  }

 private:
  std::array<Verified*, 3> verified_parts() const {
    return {verified(parts_.scorer.get()), verified(parts_.rescorer.get()), verified(parts_.split.get())};
  }

  static bool ranks_steadily(const Scorer& scorer) {
    return scorer.by_age() || scorer.column() || scorer.steady_score();
  }
  bool divides_steadily() const {
    return !parts_.split || over_layers_ || (split_ && (split_->steady() || split_->counted()));
  }

  void take_numbers(Workspace& w) {
    const std::int64_t rows = shape_.max_slots, heads = rows * shape_.kv_heads;
    of_rows_ = {};
    if (parts_.selector) of_rows_.pages = {"pages to attend to", heads, w};
    if (parts_.selector && parts_.host && !constant()) of_rows_.rooms = {"pages on the device", heads, w};
    if (!steady_) return;
    of_rows_.pins = {"pins of rows", rows, w}, of_rows_.keep_all = {"rows that keep all", rows, w};
    if (!parts_.split)
      of_rows_.keep = {"tokens to keep", heads, w};
    else
      of_rows_.totals = {"totals of rows", rows, w};
    if (split_ && split_->counted()) of_rows_.layers = {"tokens of layers", rows * shape_.layers, w};
  }

  // Refuses a budget below the tokens that a scorer always keeps or a selector always reads: it would not be obeyed. A
  // ratio is judged by the longest sequence. A text that is not longer than what is always read is read as a whole.
  void check_amount() const {
    const bool bytes = amount_.kind == BudgetAmount::bytes, ratio = amount_.kind == BudgetAmount::ratio;
    if (amount_.kind == BudgetAmount::unlimited) return;
    const int tokens = bytes
                           ? byte_budget_tokens(for_pages_.value, shape_.max_tokens, shape_, page_bytes_, dense_layers_)
                           : total(shape_.max_tokens);
    const Pins pins = parts_.scorer ? parts_.scorer->pins(tokens) : Pins{};
    const int pages = parts_.selector ? selector_needs_.min_pages() : 0,  // no scorer stands beside a selector
        least = parts_.selector ? std::min(pages * shape_.page_size, shape_.max_tokens) : pins.first + pins.last;
    if (least <= tokens && tokens > 0) return;
    std::string budget = std::to_string(tokens) + " tokens";
    if (bytes)
      budget = std::to_string(static_cast<std::int64_t>(amount_.value)) + " bytes, " +
               (for_pages_.value < amount_.value ? "state taken off, " : "") + "whole pages of which hold " +
               std::to_string(tokens) + " tokens per KV head";
    else if (ratio)
      budget += " per KV head in the longest sequence, of " + std::to_string(shape_.max_tokens);
    const std::string wanted =
        least == 0  ? "a page for each KV head"
        : pages > 0 ? fmt::format("the {} that are always read, {} pages of {}", least, pages, shape_.page_size)
                    : fmt::format("the {} that are always kept ({} first, {} last)", least, pins.first, pins.last);
    throw Error(Errc::config,
                "got a budget of " + budget + ", wanted at least " + wanted + (bytes ? least_bytes(least) : ""),
                parts_.name);
  }

  // What a budget in bytes must be in the longest sequence for so many tokens of each KV head.
  std::string least_bytes(int tokens) const {
    const std::int64_t dense = bytes_of_layers(dense_layers_, shape_.max_tokens, shape_, page_bytes_),
                       others =
                           bytes_of_layers(shape_.layers - dense_layers_, std::max(tokens, 1), shape_, page_bytes_);
    const std::string layers = dense_layers_ == 0 ? ""
                               : dense_layers_ == 1
                                   ? fmt::format("the first dense layer takes {}; ", dense)
                                   : fmt::format("the first {} dense layers take {}; ", dense_layers_, dense);
    return fmt::format(": {}at least {} bytes", layers, state_bytes_ + dense + others);
  }

  // Says that a ratio is not obeyed in a sequence that is shorter than the longest one. All have one text.
  void warn_of_short(int tokens, int least, const char* does) const {
    if (amount_.kind == BudgetAmount::ratio && least > tokens)
      log::warn(fmt::format("got a ratio that gives a sequence less than the {} tokens that '{}' always {}", least,
                            parts_.name, does));
  }
  void warn_of_short(int tokens, Pins pins) const { warn_of_short(tokens, pins.first + pins.last, "keeps"); }

  static bool any(const std::vector<std::uint8_t>& mask) {
    return std::count(mask.begin(), mask.end(), 0) < std::ssize(mask);
  }

  // A prompt's layer, for the division over all of them.
  void measure(const LayerPrefill& kv, Stream s) {
    if (kv.layer == 0) over_layers_->begin();
    const int tokens = std::min(total(kv.position[0]), kv.position[0]);
    if (!due_[0] || tokens == kv.position[0] || kv.layer < dense_layers_) return;
    warn_of_short(tokens, parts_.scorer->pins(tokens));
    const PartTimer timer(Part::score);
    over_layers_->measure(kv, tokens, s);
  }

  // Of a prompt's last chunk. left: tokens after this callback's eviction, empty without one.
  void end_prompt(const LayerKv& kv, View<const std::int32_t, 2> left, Edits& edits, Stream s) {
    if (ages_) encode_aged(kv, left, parts_.codec->residual(), edits, s);
    if (!parts_.host || kv.layer < dense_layers_) return;
    if (parts_.selector)
      edits.place(no_pages(kv, s), {.room = room_of(kv)});
    else
      place_rest(kv, left, kv.upload("prompts that end", last_.data()), edits, s);
  }

  // Evicts all but the best. Returns the tokens that are left, [row, kv_head].
  static View<const std::int32_t, 2> keep_best(const LayerKv& kv, View<const float, 3> scores,
                                               View<const std::int32_t, 2> keep, const Pins* pins, Edits& edits,
                                               Stream s) {
    const TokenList kept = kv.list<TokenList>("kept", kv.max_length);
    {
      const PartTimer timer(Part::select);
      ops::top_tokens(kv.pages, scores, keep, pins, kept, s);
    }
    edits.evict_rest(kept);
    return kept.count;
  }

  int total(int seen) const { return budget_tokens(for_pages_, seen, shape_, page_bytes_, dense_layers_); }

  // Evicts in the rows that are due. Returns the tokens that are left, [row, kv_head]; empty if nothing was evicted.
  View<const std::int32_t, 2> compress(const LayerKv& kv, Edits& edits, Stream s) {
    if (!any(due_) || amount_.kind == BudgetAmount::unlimited || kv.layer < dense_layers_) return {};
    const std::size_t rows = static_cast<std::size_t>(kv.rows());
    totals_.resize(rows), pins_.assign(rows, {}), keep_all_.resize(rows);
    for (std::size_t r = 0; r < rows; ++r) {
      totals_[r] = due_[r] ? std::min(total(kv.position[r]), kv.position[r]) : kv.position[r];
      keep_all_[r] = totals_[r] == kv.position[r];
      if (keep_all_[r]) continue;
      pins_[r] = parts_.scorer->pins(totals_[r]);
      warn_of_short(totals_[r], pins_[r]);
    }
    if (std::find(keep_all_.begin(), keep_all_.end(), 0) == keep_all_.end()) return {};
    const PartTimer timer(Part::score);
    Scores scores = kv.kv_head_scores("scores");
    parts_.scorer->score(kv, scores, s);
    const auto keep = kv.scratch<std::int32_t>("keep", {kv.rows(), kv.kv_heads()});
    Allotment a;
    a.layer = kv.layer - dense_layers_;
    a.layers = shape_.layers - dense_layers_;
    a.scores = scores;
    a.length = head_lengths(kv, s);
    a.pins = kv.upload("pins", pins_.data());
    a.total = kv.upload("totals", totals_.data());
    a.keep = keep;
    a.kv = &kv;
    a.host_pins = pins_.data();
    a.host_total = totals_.data();
    if (over_layers_)
      over_layers_->keep_of_rows(kv, keep, s);
    else if (parts_.split)
      parts_.split->allot(a, s);
    else
      ops::allot_uniform(a, s);
    // A budget in bytes pays for whole pages, so a split that ended inside a page would hold more than the budget.
    // (top_tokens keeps the pins in any case.)
    ops::round_allotment(a.length, kv.upload("keep all", keep_all_.data()), unit(), keep, s);
    if (kv.chunk_queries) rescore(kv, pins_[0], keep, scores, s);
    return keep_best(kv, scores, keep, a.pins, edits, s);
  }

  // Of a prompt, which has one row.
  void rescore(const LayerKv& kv, Pins pins, View<const std::int32_t, 2> keep, Scores scores, Stream s) {
    if (!parts_.rescorer) return;
    const PartTimer timer(Part::score);
    LayerKv own = kv;
    own.window_queries = own.chunk_queries = {};
    own.mass = {};
    parts_.rescorer->rescore(own, pins, keep, scores, s);
  }

  // The same for a decode step that a graph may hold: before_step has told the numbers of the step. Rows that are not
  // due keep everything, and cost neither scores nor a division.
  void compress_steadily(const LayerStep& kv, Edits& edits, Stream s) {
    if (kv.layer < dense_layers_) return;
    if (!told_) tell(counters_of(kv, s));
    // No graph holds a CPU's step, so the host may look.
    if (s.device() == Device::cpu ? !any_due_ : variant_ == 0) return;
    const PartTimer timer(Part::score);
    const bool divides_by_score = parts_.split && !over_layers_ && !split_->counted(), by_age = parts_.scorer->by_age();
    Surplus surplus;
    surplus.pins = of_rows_.pins.data();
    Scores scores;
    LayerKv due = kv;
    PagedKv pages = kv.pages;
    if (divides_by_score || !(by_age || parts_.scorer->column())) {
      if (every_ > 1) leave_out_others(due, pages, s);
      scores = kv.kv_head_scores("scores");
      if (by_age)
        ops::recency(due.pages, scores, s);
      else
        parts_.scorer->score(due, scores, s);
      surplus.scores = scores;
    } else if (!by_age) {
      surplus.column = kv.state(parts_.scorer->column()).column;
    }
    surplus.keep = parts_.split ? divided(kv, due, scores, s) : of_heads(of_rows_.keep, kv);
    edits.evict_surplus(surplus);
  }

  // Makes `due` a view of the same layer in which the rows that are not due hold no token. Borrows `pages`.
  void leave_out_others(LayerKv& due, PagedKv& pages, Stream s) {
    const auto length = due.scratch<std::int32_t>("tokens of rows that are due", {shape_.max_slots, due.kv_heads()});
    ops::lengths_of_rows(due.pages, of_rows_.keep_all.data(), length, s);
    pages.length = due.pages.length = due.host_pages.length = length;
    due.keys.kv = due.values.kv = &pages;
  }

  // The tokens that a split lets each head keep, [row, kv_head]. due: as leave_out_others leaves it.
  View<const std::int32_t, 2> divided(const LayerKv& kv, const LayerKv& due, Scores scores, Stream s) {
    const auto keep = kv.scratch<std::int32_t>("keep", {kv.rows(), kv.kv_heads()});
    const View<const std::int32_t, 2> length = head_lengths(kv, s);
    if (over_layers_) {
      over_layers_->keep_of_rows(kv, keep, s);
    } else {
      Allotment a;
      a.layer = kv.layer - dense_layers_;
      a.layers = shape_.layers - dense_layers_;
      a.scores = scores;
      a.length = split_->counted() ? length : head_lengths(due, s);
      a.pins = of_rows_.pins.data();
      a.total = of_rows_.totals.data();
      a.keep = keep;
      a.kv = &due;
      a.host_pins = pins_.data();
      a.host_total = totals_.data();
      if (split_->counted())
        ops::allot_tokens(a, of_rows_.layers.data() + std::int64_t{a.layer} * shape_.max_slots, s);
      else
        parts_.split->allot(a, s);
    }
    ops::round_allotment(length, of_rows_.keep_all.data(), unit(), keep, s);
    return keep;
  }

  // Tokens that a head keeps come in multiples of these: a budget in bytes pays for whole pages.
  int unit() const { return amount_.kind == BudgetAmount::bytes ? shape_.page_size : 1; }

  // Of a step that nobody told of.
  static StepCounters counters_of(const LayerKv& kv, Stream s) {
    StepCounters c;
    c.rows = kv.rows(), c.position = kv.position, c.step = kv.step, c.stream = s;
    return c;
  }
  View<const std::int32_t, 2> of_heads(const StepNumbers<std::int32_t>& numbers, const LayerKv& kv) const {
    return View<const std::int32_t, 2>::dense(numbers.data(), {kv.rows(), kv.kv_heads()});
  }

  // Copies a step's numbers to where graphs read them.
  void tell(const StepCounters& c) {
    if (parts_.selector) {
      for_all_heads(c, of_rows_.pages, [&](int n) { return pages_of_budget(n); });
      if (parts_.host && !constant())
        for_all_heads(c, of_rows_.rooms, [&](int n) { return std::max(resident_pages(), pages_of_budget(n)); });
    }
    if (steady_) tell_evictions(c);
  }

  void tell_evictions(const StepCounters& c) {
    const auto rows = static_cast<std::size_t>(c.rows);
    totals_.resize(static_cast<std::size_t>(shape_.max_slots));
    keep_all_.assign(totals_.size(), 1);
    any_due_ = false;
    for (std::size_t r = 0; r < totals_.size(); ++r) totals_[r] = total(seen_by(c, r));
    for (std::size_t r = 0; r < rows; ++r) {
      keep_all_[r] = (c.step[r] + 1) % every_ != 0 || totals_[r] >= c.position[r];
      any_due_ = any_due_ || !keep_all_[r];
    }
    // Where each step evicts, short rows are so few that steps without an eviction are no variant of their own.
    variant_ = every_ == 1 || any_due_ ? 1 : 0;
    if (variant_ == 0) return;
    pins_.assign(totals_.size(), {});
    std::vector<std::int32_t>& keep = of_rows_.keep.fresh();
    for (std::size_t r = 0; r < totals_.size(); ++r) {
      const bool stays = every_ > 1 && keep_all_[r];
      if (!stays) pins_[r] = parts_.scorer->pins(totals_[r]);
      const int least = stays ? unlimited : std::max(totals_[r], pins_[r].first + pins_[r].last);
      if (!parts_.split) keep.insert(keep.end(), static_cast<std::size_t>(shape_.kv_heads), least - least % unit());
    }
    of_rows_.pins.put(c, pins_.data(), std::ssize(pins_));
    of_rows_.keep_all.put(c, keep_all_.data(), std::ssize(keep_all_));
    if (!parts_.split) return of_rows_.keep.put(c);
    for (std::size_t r = 0; r < rows; ++r) totals_[r] = std::min(totals_[r], c.position[r]);
    of_rows_.totals.put(c, totals_.data(), std::ssize(totals_));
    if (!split_ || !split_->counted()) return;
    CountedBudget::Counters counters;
    counters.layers = shape_.layers - dense_layers_;
    std::vector<std::int32_t>& of_layers = of_rows_.layers.fresh();
    for (counters.layer = 0; counters.layer < counters.layers; ++counters.layer)
      for (std::size_t r = 0; r < totals_.size(); ++r) {
        counters.total = totals_[r], counters.position = r < rows ? c.position[r] : totals_[r];
        counters.pinned = pins_[r].first + pins_[r].last;
        of_layers.push_back(keep_all_[r] ? unlimited : split_->tokens(counters));
      }
    of_rows_.layers.put(c);
  }

  // The text of a row. Other steps may have more rows than this one, so there are numbers for each slot. All rows of a
  // constant budget have one.
  static int seen_by(const StepCounters& c, std::size_t row) {
    return c.rows == 0 ? 1 : c.position[row < static_cast<std::size_t>(c.rows) ? row : 0];
  }

  // of(tokens of text) for each head of each row.
  template <class Of>
  void for_all_heads(const StepCounters& c, StepNumbers<std::int32_t>& numbers, Of of) const {
    std::vector<std::int32_t>& all = numbers.fresh();
    for (std::size_t row = 0; row < static_cast<std::size_t>(shape_.max_slots); ++row)
      all.insert(all.end(), static_cast<std::size_t>(shape_.kv_heads), of(seen_by(c, row)));
    numbers.put(c);
  }

  static View<const std::int32_t, 2> head_lengths(const LayerKv& kv, Stream s) {
    const auto length = kv.scratch<std::int32_t>("length", {kv.rows(), kv.kv_heads()});
    ops::lengths(kv.pages, length, s);
    return length;
  }

  bool constant() const { return amount_.kind == BudgetAmount::unlimited || amount_.kind == BudgetAmount::tokens; }

  int pages_of_budget(int seen) const {
    const int tokens = total(seen), all = shape_.max_pages();
    return tokens == unlimited ? all
                               : std::min(all, std::max({1, selector_needs_.min_pages(), tokens / shape_.page_size}));
  }

  View<const std::int32_t, 2> page_budgets(const LayerStep& step, Stream s) {
    if (step.rows() == 0) return {};
    if (!told_) tell(counters_of(step, s));
    return of_heads(of_rows_.pages, step);
  }

  // All pages but the newest go to the host; those of the newest resident_tokens also stay on the device. left: tokens
  // after this callback's eviction, empty without one. rows: [row] mask, null = all.
  void place_rest(const LayerKv& kv, View<const std::int32_t, 2> left, const std::uint8_t* rows, Edits& edits,
                  Stream s) {
    const int p = shape_.page_size, room = (kv.max_length + p - 1) / p;
    if (!left) left = head_lengths(kv, s);
    PageList down = kv.list<PageList>("offload", room), out = kv.list<PageList>("drop", room);
    ops::older_pages(left, rows, p, 1, down, s);
    ops::older_pages(left, rows, p, resident_pages(), out, s);
    edits.offload(down);
    edits.drop(Tier::device, out);
  }

  int resident_pages() const { return std::max(1, parts_.resident_tokens / shape_.page_size); }

  // The pages that a head keeps on the device. What steps choose takes so many frames anyway: a head that kept fewer
  // would ask for them all at once.
  int room_of(const LayerKv& kv) const {
    int room = resident_pages();
    for (int row = 0; row < kv.rows(); ++row) room = std::max(room, pages_of_budget(kv.position[row]));
    return room;
  }

  static PageList no_pages(const LayerKv& kv, Stream s) {
    PageList list = kv.list<PageList>("no pages", 1);
    ops::fill_heads(list.count, 0, s);
    return list;
  }

  // Before attention over all pages.
  void recall_all(const LayerStep& step, Edits& edits, Stream s) {
    PageList all = step.list<PageList>("recall", step.max_pages);
    ops::older_pages(head_lengths(step, s), nullptr, shape_.page_size, 0, all, s);
    edits.recall(all, {Deadline::this_attention});
  }

  Composition parts_;
  Needs scorer_needs_, selector_needs_;
  int every_ = 0, dense_layers_ = 0;
  bool ages_ = false;             // appended tokens are exact, and pages of older ones have the codec
  SteadySplit* split_ = nullptr;  // what the split promises; null = nothing
  bool steady_ = false;           // decode steps evict, and a graph may hold them
  bool told_ = false;             // the engine tells of each step
  bool any_due_ = false;          // a row of the step evicts
  int variant_ = 0;               // 1 = of a step that evicts
  // Numbers of a step's rows, memory of the device.
  struct {
    StepNumbers<std::int32_t> pages, rooms;    // [row, kv_head] to attend to, and that may be on the device
    StepNumbers<Pins> pins;                    // [row] what evictions leave, like the next two
    StepNumbers<std::int32_t> keep;            // [row, kv_head]
    StepNumbers<std::uint8_t> keep_all;        // [row]
    StepNumbers<std::int32_t> totals, layers;  // [row], [layer, row]: of a split
  } of_rows_;
  Shape shape_;
  BudgetAmount amount_, for_pages_;                // the experiment's; the same less the state of scorer and selector
  std::int64_t page_bytes_ = 0, state_bytes_ = 0;  // state: of scorer and selector, for a sequence
  std::optional<Injector> injector_;
  std::optional<OverLayers> over_layers_;  // where the split divides over them
  // Buffers of one callback; they outlive it so that a decode step allocates nothing.
  std::vector<std::uint8_t> last_, due_, keep_all_;  // [row]
  std::vector<std::int32_t> totals_;                 // [row]
  std::vector<Pins> pins_;                           // [row]
};

}  // namespace

bool codes_nothing(const Codec& codec) {
  const CodecSpec spec = codec.spec();
  return !spec.k.bits && !spec.v.bits && !spec.packs && !codes_rows(codec);
}

const char* no_host_codec(const Codec& codec) {
  if (codes_rows(codec))
    return "got a codec with a format of its own for pages on the host, wanted one that core stores as codes";
  if (pages_age(codec))
    return "got a codec with a residual or with groups for pages on the host, wanted one that encodes token by token";
  return nullptr;
}

std::unique_ptr<Policy> compose(Composition parts) {
  auto refuse = [&](const std::string& what) { throw Error(Errc::config, what, parts.name); };
  if (parts.scorer && parts.selector)
    refuse("got a scorer and a selector in one policy, wanted one of them: they would share one budget");
  if (parts.split && parts.scorer && parts.scorer->needs().uniform_heads() && !parts.split->uniform_heads())
    refuse(
        "got a budget split that gives the KV heads of a layer different numbers, wanted one that gives them the "
        "same: the scorer needs heads that hold the same tokens");
  if (const char* why = parts.host_codec ? no_host_codec(*parts.host_codec) : nullptr) refuse(why);
  if (parts.codec && parts.codec->spec().packs)
    refuse("got a codec that packs pages for those on the device, wanted placement: {tier: host, codec: NAME}");
  if (parts.host_codec && parts.host_codec->spec().packs) {
    if (parts.codec) refuse(packs_beside_codes);
    if (parts.scorer)
      refuse(
          "got a scorer and a codec that packs pages on the host, wanted a selector: packed pages keep their tokens");
  }
  if (parts.codec && pages_age(*parts.codec)) {
    const std::string codec = "got a codec with a residual or with groups ";
    if (parts.host) refuse(codec + "and placement on the host, wanted one of the two");
    if (parts.scorer && parts.every.value_or(parts.scorer->every()) > 0)
      refuse(codec + "and evictions in decode steps, wanted schedule.every: 0: encoded pages keep their tokens");
    const Needs needs = parts.scorer ? parts.scorer->needs() : parts.selector ? parts.selector->needs() : Needs{};
    if (needs.rope() != RopeRegime::original)
      refuse(codec + "and keys that rotate with their rank, wanted keys at their text positions");
  }
  if (parts.host && parts.selector && parts.selector->needs().oracle())
    refuse("got an oracle and placement on the host, wanted pages on the device: it reads all of them in each step");
  if (parts.split && !parts.scorer) refuse("got a budget split without a scorer, wanted a scorer that it divides for");
  if (parts.every && *parts.every > 0 && !parts.scorer) refuse("got a schedule without a scorer, wanted a scorer");
  // A scorer with a schedule of its own knows what to do in decode steps.
  if (parts.scorer && parts.every.value_or(0) > 0 && parts.scorer->every() == 0 &&
      parts.scorer->needs().window_queries() > 0 && parts.scorer->needs().any_mass() == Mass::none)
    refuse("got schedule.every with a scorer that looks at nothing but the prompt's last queries, wanted every: 0");
  return std::make_unique<ComposedPolicy>(std::move(parts));
}

}  // namespace kvlab
