// A policy that edits pages with a deadline and notes what each callback of a step finds, on either device.
#pragma once
#include <kvlab/ops.hpp>
#include <kvlab/policy.hpp>

#include <catch2/catch.hpp>
#include <cstring>
#include <vector>

#include "base/stream_memory.hpp"

namespace kvlab::test {

// Each step it recalls, drops or offloads page 1 of each head of layer 0, or encodes the first page that is not
// encoded. What the step before did is undone before attention. Attention to layer 0 reads the pages on the device.
class PageEditor final : public Policy {
 public:
  enum class From { nowhere, select, observe, finish_step };
  // What is found by select of layer 0, before the undoing, by observe, by both of layer 1, and by finish_step.
  static constexpr int notes = 5;

  PageEditor(Edit::Verb verb, From from, Deadline when) : verb_(verb), from_(from), when_(when) {}

  Needs needs() const override { return Needs{}.host_pages(verb_ != Edit::encode).capturable(true); }
  std::vector<CodecSpec> codecs() const override {
    return verb_ == Edit::encode ? std::vector{CodecSpec{}, CodecSpec{{8}, {4}}} : std::vector{CodecSpec{}};
  }
  void attach(const Shape& s, const BudgetAmount&, Workspace& w) override {
    const auto constant = [&](const char* tag, std::int32_t x) {
      const std::vector<std::int32_t> of(static_cast<std::size_t>(s.kv_heads), x);
      return View<std::int32_t, 2>::dense(
          static_cast<std::int32_t*>(const_cast<void*>(w.constant(tag, of.data(), of.size() * sizeof of[0]))),
          {1, s.kv_heads});
    };
    const auto list = [&](std::int32_t page) {
      PageList l;
      l.index = View<std::int32_t, 3>::dense(constant("page", page).data, {1, s.kv_heads, 1});
      l.count = constant("pages", 1);
      return l;
    };
    edited_ = list(1), read_ = list(0);
    heads_ = s.kv_heads, pages_ = s.max_pages();
    found_ = static_cast<float*>(w.room("found", sizeof(float) * 2 * static_cast<std::size_t>(notes * of_note())));
  }
  void prefill(const LayerPrefill& kv, Edits& edits, Stream) override {
    if (kv.layer == 0 && kv.last[0] && verb_ == Edit::drop) edits.offload(edited_);
    if (kv.layer == 0 && kv.last[0] && verb_ == Edit::recall) {
      edits.offload(edited_);
      edits.drop(Tier::device, edited_);
    }
  }
  void select(const LayerStep& step, Edits& edits, Stream s) override {
    if (step.layer == 0) tables_[0] = floats(step.pages), tables_[1] = floats(step.host_pages);
    if (step.layer < 2) note(2 * step.layer, s);
    if (step.layer > 0) return;
    const Deadline now{Deadline::this_attention};
    if (verb_ == Edit::recall) edits.drop(Tier::device, edited_, now);
    if (verb_ == Edit::drop) edits.recall(edited_, now);
    if (verb_ == Edit::offload) edits.drop(Tier::host, edited_, now);
    if (from_ == From::select) edit(step, edits, s);
    if (verb_ != Edit::encode) edits.attend_resident(read_);
  }
  void observe(const LayerStep& step, Edits& edits, Stream s) override {
    if (step.layer < 2) note(2 * step.layer + 1, s);
    if (step.layer == 0 && from_ == From::observe) edit(step, edits, s);
  }
  void finish_step(const Step&, Edits& edits, Stream s) override {
    note(4, s);
    edits.for_layer(0);
    if (from_ == From::finish_step && verb_ != Edit::encode) change(edited_, edits);
  }

  // Of the latest step: whether page 1 is on the edited tier, or how many pages are encoded. All heads are alike.
  std::vector<int> found(Stream s) const {
    std::vector<PageEntry> all(static_cast<std::size_t>(2 * notes * heads_ * pages_));
    copy_memory(all.data(), found_, all.size() * sizeof(PageEntry), s);
    synchronize(s);
    std::vector<int> out;
    for (int n = 0; n < notes; ++n) {
      std::vector<int> of_heads;
      for (int head = 0; head < heads_; ++head) {
        const PageEntry* entries = all.data() + ((2 * n + (verb_ == Edit::offload)) * heads_ + head) * pages_;
        int encoded = 0;
        for (int page = 0; page < pages_; ++page) encoded += entries[page].frame != null_frame && entries[page].codec;
        of_heads.push_back(verb_ == Edit::encode ? encoded : entries[1].frame != null_frame);
      }
      for (const int of_head : of_heads) CHECK(of_head == of_heads[0]);
      out.push_back(of_heads[0]);
    }
    return out;
  }

 private:
  static_assert(sizeof(PageEntry) == 2 * sizeof(float));

  // The table of layer 0 as numbers that an op copies.
  View<const float, 3> floats(const PagedKv& kv) const {
    return {reinterpret_cast<const float*>(kv.table.data),
            {1, heads_, 2 * pages_},
            {2 * kv.table.stride[0], 2 * kv.table.stride[1], 1}};
  }
  std::int64_t of_note() const { return std::int64_t{2} * heads_ * pages_; }
  void note(int at, Stream s) const {
    for (int tier = 0; tier < 2; ++tier)
      if (tables_[tier].data)
        ops::copy(View<float, 3>::dense(found_ + (2 * at + tier) * of_note(), {1, heads_, 2 * pages_}), tables_[tier],
                  s);
  }
  void edit(const LayerStep& step, Edits& edits, Stream s) const {
    PageList list = edited_;
    if (verb_ == Edit::encode) {
      list = step.list<PageList>("next", 1);
      ops::aged_pages(step.pages, {}, 0, list, s);
    }
    change(list, edits);
  }
  void change(const PageList& list, Edits& edits) const {
    if (verb_ == Edit::recall) edits.recall(list, when_);
    if (verb_ == Edit::drop) edits.drop(Tier::device, list, when_);
    if (verb_ == Edit::offload) edits.offload(list, when_);
    if (verb_ == Edit::encode) edits.encode(list, 1, when_);
  }

  Edit::Verb verb_;
  From from_;
  Deadline when_;
  PageList edited_, read_;
  std::int64_t heads_ = 0, pages_ = 0;
  float* found_ = nullptr;
  View<const float, 3> tables_[2];
};

// Checks what the callbacks of each step found against what the deadline says.
inline void check_deadline(Edit::Verb verb, PageEditor::From from, Deadline when,
                           const std::vector<std::vector<int>>& found) {
  for (std::size_t step = 0; step < found.size(); ++step) {
    CAPTURE(step);
    const int i = static_cast<int>(step), done = verb == Edit::encode ? i + 1 : verb != Edit::drop,
              undone = verb == Edit::encode ? i : verb == Edit::drop;
    const bool by_select = from == PageEditor::From::select, by_observe = from == PageEditor::From::observe;
    const bool ends = when.kind == Deadline::next_step;
    // What select finds first is what the step before left.
    const int first = verb == Edit::encode ? i : step > 0 ? done : undone;
    const int behind = by_select && !ends ? done : undone, next = (by_select || by_observe) && !ends ? done : undone;
    CHECK(found[step] == std::vector{first, behind, next, next, next});
  }
}

// Runs each way in which an edit of pages may come, and checks what attention read. run(verb, from, when) gives the
// logits of five steps and checks what their callbacks found.
template <class Run>
void check_page_deadlines(const Run& run) {
  using From = PageEditor::From;
  struct Way {
    From from;
    Deadline::Kind kind;
  };
  for (const Edit::Verb verb : {Edit::recall, Edit::drop, Edit::offload, Edit::encode}) {
    CAPTURE(static_cast<int>(verb));
    const auto none = run(verb, From::nowhere, Deadline{});
    for (const auto& [from, kind] :
         {Way{From::select, Deadline::this_attention}, Way{From::select, Deadline::next_attention},
          Way{From::select, Deadline::next_step}, Way{From::observe, Deadline::next_attention},
          Way{From::observe, Deadline::next_step}, Way{From::finish_step, Deadline::next_attention},
          Way{From::finish_step, Deadline::next_step}}) {
      if (verb == Edit::encode && from == From::finish_step) continue;
      CAPTURE(static_cast<int>(from), static_cast<int>(kind));
      const auto logits = run(verb, from, Deadline{kind});
      for (std::size_t step = 0; step < none.size(); ++step) {
        CAPTURE(step);
        const bool seen = verb != Edit::offload && kind == Deadline::this_attention;
        // What is encoded stays so.
        CHECK((logits[step] != none[step]) == (seen || (verb == Edit::encode && step > 0)));
      }
    }
  }
}

}  // namespace kvlab::test
