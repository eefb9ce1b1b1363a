// Attention to pages that the same launch scores and chooses. It must give what score_pages and attend give apart.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <tuple>

#include "base/half.hpp"
#include "cases/attend_scene.hpp"
#include "cases/case.hpp"
#include "cases/relative_error.hpp"
#include "ops/retrieve/attend_chosen.hpp"
#include "store/workspace.hpp"

namespace kvlab::cases {
namespace {

constexpr double most_error = 4e-3;  // of sums whose probabilities are rounded to 16 bits

struct ChosenShape {
  AttendShape cache;
  Summary kind = Summary::min_max;
  int bits = 16;  // of the summaries
  GroupRule rule = GroupRule::max;
  std::vector<int> budget = {4};  // pages of heads, cycled
  bool newest = false, ties = false;
  int nans = 0;            // the first pages of a head whose summaries are NaN
  Pins leave_out, pins;    // of the choice, and of attention
  bool some = false;       // some heads choose; the others have a list from before
  bool turns = false;      // those choose whose queries turned
  bool unflagged = false;  // or the others
  bool chooses = true;     // false: all have

  std::string text() const {
    const PagedOptions& o = cache.options;
    return fmt::format("{} rows of {} KV heads in groups of {}, dim {}, pages of {}, {} tokens, {} pages, {}{}{}{}{}",
                       o.rows, o.kv_heads, cache.group, o.head_dim, o.page_size, fmt::join(cache.lengths, " "),
                       fmt::join(budget, " "),
                       kind == Summary::mean ? "means"
                       : bits == 8           ? "boxes in codes"
                                             : "boxes",
                       rule == GroupRule::max    ? ""
                       : rule == GroupRule::mean ? ", mean"
                                                 : ", softmax_mean",
                       newest ? ", newest" : "", ties ? ", ties" : "", nans ? ", NaN" : "") +
           fmt::format(", left out {} and {}, pins {} and {}{}{}", leave_out.first, leave_out.last, pins.first,
                       pins.last, pins.newest_page ? " and newest page" : "",
                       !chooses ? ", no choice"
                       : turns  ? ", heads whose queries turned"
                       : some   ? ", some heads"
                                : "");
  }
};

// The inputs at a place: a cache, summaries of its pages and queries.
class ChosenScene final : public Scene {
 public:
  ChosenScene(Place& place, const ChosenShape& shape, int copies, bool together)
      : place_(place), shape_(shape), together_(together), scene_(shape.cache, 5), workspace_(ledger_, place.stream()) {
    const PagedOptions& o = scene_.cache.options();
    const PagedKv kv = scene_.cache.view();
    const std::int64_t page_bytes = summary_bytes(shape.kind, shape.bits, DType::bf16, o.head_dim);
    summaries_ = {shape.kind, DType::bf16, nullptr, o.kv_heads * o.max_pages * page_bytes, o.max_pages * page_bytes,
                  page_bytes, shape.bits};
    std::vector<std::byte> data(static_cast<std::size_t>(o.rows * summaries_.slot_stride));
    for (int r = 0; r < o.rows; ++r)
#pragma omp parallel for
      for (int i = 0; i < o.kv_heads * o.max_pages; ++i) {
        const int h = i / o.max_pages, p = i % o.max_pages;
        if (p >= kv.pages(r, h)) continue;
        const PageEntry& e = kv.entry(r, h, shape.ties ? std::min(p, 1) : p);
        std::byte* to = data.data() + (summaries_.at(kv.slots[r], h, p) - summaries_.data);
        ops::summarize_page(kv.frame(e), kv.layout(e), e.tokens, shape.kind, DType::bf16, to, shape.bits);
        if (p < shape.nans) std::fill_n(reinterpret_cast<bf16*>(to), page_bytes / 2, bf16(NAN));  // scale and zero, too
      }
    std::vector<std::int32_t> budget;
    for (int i = 0; i < o.rows * o.kv_heads; ++i)
      budget.push_back(shape.budget[static_cast<std::size_t>(i) % shape.budget.size()]);
    args_ = scene_.put(place);
    for (int c = 0; c < copies; ++c) {
      layers_.push_back(c == 0 ? args_.kv.base : place.put(kv.base, scene_.cache.arena_bytes()));
      data_.push_back(place.put(data));
    }
    args_.out = place.unwritten(args_.queries.extent);
    rounded_ = place.put(std::vector<std::uint16_t>(scene_.q.size(), 0xffff));
    args_.rounded = rounded_;
    args_.lse = place.unwritten<2>({o.rows, scene_.heads()});
    choice_.rule = shape.rule;
    choice_.scale = 0.125f;
    choice_.newest_page = shape.newest;
    choice_.leave_out = shape.leave_out;
    choice_.budgets = place.put(View<const std::int32_t, 2>::dense(budget.data(), {o.rows, o.kv_heads}));
    scores_ = place.unwritten<3>({o.rows, o.kv_heads, o.max_pages});
    std::mt19937 rng(3);
    if (shape.some) {
      std::vector<std::uint8_t> flags(static_cast<std::size_t>(o.rows * o.kv_heads));
      for (auto& x : flags) x = rng() % 2;
      choice_.heads = Heads::flagged(place.put(View<const std::uint8_t, 2>::dense(flags.data(), {o.rows, o.kv_heads})));
    }
    if (shape.turns) {
      turns_.queries = args_.queries, turns_.kv = args_.kv, turns_.threshold = 0.3f, turns_.stream = place.stream();
      // Some heads ask as before, some the opposite, and some have not asked before.
      for (std::size_t i = 0; i < scene_.q.size(); ++i) {
        const std::size_t head = i / static_cast<std::size_t>(o.head_dim * shape.cache.group);
        last_.push_back(head % 3 == 0 ? 2 * scene_.q[i] : head % 3 == 1 ? -scene_.q[i] : 0);
      }
    }
    // A list of each slot, from before.
    ListMemory memory;
    before_ = memory.empty({o.rows, o.kv_heads, o.max_pages});
    for (int r = 0; r < o.rows; ++r)
      for (int h = 0; h < o.kv_heads; ++h) {
        int& count = before_.count(kv.slots[r], h);
        count = 0;
        for (int p = 0; p < kv.pages(r, h); ++p)
          if (rng() % 3 == 0) before_.index(kv.slots[r], h, count++) = p;
      }
    list_before_ = memory.index, count_before_ = memory.count;
    reset();
  }

  // Lists as before, and no outputs.
  void reset() {
    const PagedOptions& o = scene_.cache.options();
    list_.index = place_.put(View<std::int32_t, 3>::dense(list_before_.data(), {o.rows, o.kv_heads, o.max_pages}));
    list_.count = place_.put(View<std::int32_t, 2>::dense(count_before_.data(), {o.rows, o.kv_heads}));
    list_.slots = args_.kv.slots;
    ListMemory poison;
    read_ = {place_.put(poison.empty({o.rows, o.kv_heads, o.max_pages}))};
    scores_ = place_.unwritten(scores_.extent);
    args_.out = place_.unwritten(args_.out.extent);
    if (shape_.turns) {
      flags_ = place_.put(std::vector<std::uint8_t>(static_cast<std::size_t>(o.rows * o.kv_heads), 7));
      turns_.turned = HeadFlags::dense(flags_, {o.rows, o.kv_heads});
      choice_.heads = Heads::flagged(turns_.turned, !shape_.unflagged);
      turns_.last = View<float, 3>::dense(place_.put(last_), {o.rows, scene_.heads(), o.head_dim});
    }
  }

  void run(int copy) override {
    const auto i = static_cast<std::size_t>(copy);
    args_.kv.base = layers_[i];
    summaries_.data = data_[i];
    const Stream s = place_.stream();
    if (together_) {
      const ops::PutOffChoice choice{args_.queries, args_.kv, summaries_, choice_, scores_, list_, s};
      args_.pages = &read_;
      ops::ChosenRead read{shape_.chooses ? &choice : nullptr, list_};
      read.pins = shape_.pins, read.out = read_;
      if (shape_.turns) read.turns = &turns_;
      if (!ops::attend_chosen(args_, read, s))
        throw Error(Errc::internal, "got no kernel, wanted one", "attend_chosen");
    } else {
      if (shape_.turns) ops::turned_heads(args_.queries, args_.kv, turns_.last, turns_.threshold, turns_.turned, s);
      if (shape_.chooses) ops::score_pages(args_.queries, args_.kv, summaries_, choice_, scores_, list_, s);
      PageList chosen = list_;
      chosen.slots = nullptr;  // a timed scene has one row for each slot, and no pins
      args_.pages = &chosen;
      if (listing_) list_pages(), args_.pages = &read_;
      ops::attend(args_, workspace_, s);
    }
    workspace_.reset();
  }

  // read_ = the pages of list_ and those of the pins.
  void list_pages() {
    const PagedKv kv = scene_.cache.view();
    const PagedOptions& o = scene_.cache.options();
    std::vector<std::int32_t> index = place_.get(list_.index), count = place_.get(list_.count);
    const auto all = View<std::int32_t, 3>::dense(index.data(), list_.index.extent);
    ListMemory memory;
    const IndexList read = memory.empty(read_.index.extent);
    for (int r = 0; r < o.rows; ++r)
      for (int h = 0; h < o.kv_heads; ++h) {
        const int slot = kv.slots[r], n = kv.tokens(r, h), p = o.page_size;
        read.count(r, h) = 0;
        for (int page = 0; page < kv.pages(r, h); ++page) {
          bool reads = page * p < shape_.pins.first ||
                       (shape_.pins.last > 0 && (page + 1) * p > n - shape_.pins.last) ||
                       (shape_.pins.newest_page && page == kv.pages(r, h) - 1);
          for (int i = 0; i < count[static_cast<std::size_t>(slot * o.kv_heads + h)]; ++i)
            reads = reads || all(slot, h, i) == page;
          if (reads) read.index(r, h, read.count(r, h)++) = page;
        }
      }
    read_ = {place_.put(read)};
  }

  void check(Check& check) override {
    listing_ = true;
    struct Outputs {
      std::vector<float> out, lse, scores;
      std::vector<std::int32_t> index, count, read, read_count;
      std::vector<std::uint16_t> rounded;
      std::vector<std::uint8_t> turned;
      std::vector<float> last;
    };
    const auto outputs = [&](bool together) {
      together_ = together;
      reset();
      run(0);
      Outputs o{place_.get(args_.out),   place_.get(args_.lse),
                place_.get(scores_),     place_.get(list_.index),
                place_.get(list_.count), place_.get(read_.index),
                place_.get(read_.count), place_.get(View<const std::uint16_t, 3>::dense(rounded_, args_.out.extent))};
      if (shape_.turns) o.turned = place_.get(turns_.turned), o.last = place_.get(turns_.last);
      return o;
    };
    const Outputs apart = outputs(false);
    for (const char* time : {"first", "again, with the counters that the first run left"}) {
      const auto scope = check.in(time);
      const Outputs got = outputs(true);
      if (shape_.rule == GroupRule::softmax_mean)
        check.equal("scores", got.scores, apart.scores, 1e-6);
      else
        check.that("scores have the bits of score_pages", same_bits(got.scores, apart.scores));
      check.that("flags", got.turned == apart.turned);
      check.that("kept queries", got.last == apart.last);
      check.equal("counts", got.count, apart.count);
      check.equal("entries", got.index, apart.index);
      check.equal("counts of pages that were read", got.read_count, apart.read_count);
      check.equal("pages that were read", got.read, apart.read);
      check.within("relative error of out", relative(got.out, apart.out), most_error);
      check.equal("lse", got.lse, apart.lse, 2e-3);
      check.that("the rounded output is the output, rounded", got.rounded == rounded(got.out));
    }
    if (shape_.nans) return;
    ListMemory memory;
    const IndexList there = memory.empty(read_.index.extent);
    memory.index = apart.read, memory.count = apart.read_count;
    const PageList chosen{there};
    std::vector<float> wanted(apart.out.size());
    ops::AttendArgs a = scene_.inputs();
    a.pages = &chosen;
    a.out = View<float, 3>::dense(wanted.data(), a.queries.extent);
    attend_reference_of_rows(a);
    check.within("relative error of out against the reference", relative(outputs(true).out, wanted), most_error);
  }

 private:
  static std::vector<std::uint16_t> rounded(const std::vector<float>& x) {
    std::vector<std::uint16_t> out;
    for (const float y : x) out.push_back(bf16(y).bits);
    return out;
  }
  static bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
  }

  Place& place_;
  ChosenShape shape_;
  bool together_;
  AttendScene scene_;
  Ledger ledger_;
  StoreWorkspace workspace_;
  ops::AttendArgs args_;
  Summaries summaries_;
  PageChoice choice_;
  Scores scores_;
  PageList list_, read_;
  IndexList before_;
  std::vector<std::int32_t> list_before_, count_before_;
  bool listing_ = false;
  std::uint16_t* rounded_;
  ops::PutOffTurns turns_{};
  std::uint8_t* flags_ = nullptr;
  std::vector<float> last_;  // queries of the step before
  std::vector<std::byte*> layers_, data_;
};

std::vector<ChosenShape> shapes() {
  std::vector<ChosenShape> v;
  const auto add = [&](int rows, int kv_heads, int group, int dim, int page, std::vector<int> lengths,
                       std::vector<int> budget) -> ChosenShape& {
    ChosenShape c;
    c.cache.options.rows = rows, c.cache.options.kv_heads = kv_heads, c.cache.options.head_dim = dim;
    c.cache.options.page_size = page, c.cache.options.dtype = DType::bf16;
    c.cache.options.max_pages = (*std::ranges::max_element(lengths) + page - 1) / page + 1;
    c.cache.group = group, c.cache.lengths = std::move(lengths);
    c.budget = std::move(budget);
    v.push_back(c);
    return v.back();
  };
  add(1, 2, 4, 128, 16, {4000, 3999}, {16, 40});
  add(3, 2, 4, 128, 16, {700, 0, 1, 16, 17, 901}, {8, 1, 0, 300, 2}).newest = true;
  add(2, 1, 8, 128, 32, {1500, 1483}, {9}).newest = true;
  add(2, 3, 5, 64, 16, {333, 650, 40}, {7, 3}).rule = GroupRule::mean;
  add(1, 2, 2, 64, 64, {2100, 65}, {5}).kind = Summary::mean;
  add(2, 2, 1, 128, 16, {1200, 500}, {33, 4}).kind = Summary::mean;
  add(1, 1, 4, 64, 16, {18000}, {500}).newest = true;  // more pages than one thread holds two fours of
  add(1, 1, 4, 64, 16, {9000}, {40}).kind = Summary::centre_radius;
  add(30, 2, 1, 64, 16, {90, 300, 0, 20}, {3, 6});  // more heads than blocks
  add(2, 2, 4, 128, 16, {5000, 1000}, {100}).ties = true;
  add(1, 2, 4, 64, 16, {5000, 4100}, {290}).nans = 40;
  for (const GroupRule rule : {GroupRule::max, GroupRule::softmax_mean}) {
    ChosenShape& c = add(3, 2, 4, 128, 16, {1700, 0, 1, 40, 333, 2900}, {5, 0, 9});
    c.rule = rule, c.leave_out = c.pins = {40, 33, false}, c.some = true;
    ChosenShape& d = add(2, 2, 7, 64, 16, {3000, 1000, 17}, {12, 3});
    d.rule = rule, d.pins = {0, 20, true}, d.newest = true, d.some = rule == GroupRule::max;
  }
  for (const bool unflagged : {false, true})
    for (const GroupRule rule : {GroupRule::max, GroupRule::softmax_mean}) {
      ChosenShape& c = add(3, 2, 4, 128, 16, {1700, 0, 1, 40, 333, 2900}, {5, 0, 9});
      c.rule = rule, c.leave_out = c.pins = {40, 33, false}, c.turns = true, c.unflagged = unflagged;
    }
  add(2, 2, 7, 64, 16, {3000, 1000, 17}, {12, 3}).turns = true;
  add(30, 2, 1, 64, 16, {90, 300, 0, 20}, {3, 6}).turns = true;  // more heads than blocks
  add(20, 2, 3, 64, 32, {90, 700, 0, 20}, {3, 6}).rule = GroupRule::softmax_mean;
  for (const ChosenShape& of : std::vector<ChosenShape>(v))
    if (of.kind != Summary::mean) {
      v.push_back(of);
      v.back().bits = 8;
    }
  ChosenShape& kept = add(3, 2, 4, 128, 16, {1700, 16, 1, 40, 333, 0}, {5});
  kept.chooses = false, kept.pins = {17, 100, true};
  add(2, 1, 8, 64, 64, {1500, 200}, {5}).chooses = false;
  return v;
}

std::vector<Case> list() {
  std::vector<Case> v;
  for (const ChosenShape& s : shapes()) {
    v.push_back(checked("attend_chosen", s.text(),
                        [s](Place& place, Check& check) { ChosenScene(place, s, 1, true).check(check); }));
    v.back().cpu = false;
  }
  for (const auto& [together, bits] : {std::pair{false, 16}, {true, 16}, {true, 8}})
    for (const auto& [rows, context, chosen] : {std::tuple{1, 32768, 128},
                                                {4, 32768, 128},
                                                {8, 32768, 128},
                                                {16, 16384, 64},
                                                {40, 10240, 64},
                                                {64, 8192, 64}}) {
      ChosenShape s;
      s.cache.options.rows = rows, s.cache.options.kv_heads = 8, s.cache.options.head_dim = 128;
      s.cache.options.page_size = 16, s.cache.options.dtype = DType::bf16;
      s.cache.options.max_pages = context / 16;
      s.cache.group = 4, s.cache.lengths = {context};
      s.budget = {chosen};
      s.bits = bits;
      Case c{"attend_chosen", fmt::format("{} of {} pages of 16, {} x {}{}", chosen, context / 16, rows, context,
                                          bits == 8 ? ", summaries in codes" : "")};
      c.make = [s, together = together](Place& place, int copies) {
        return std::make_unique<ChosenScene>(place, s, copies, together);
      };
      c.timed_cuda = true;
      c.kernel = together ? "one launch" : "two launches";
      const auto summary = static_cast<double>(summary_bytes(Summary::min_max, bits, DType::bf16, 128));
      c.work.bytes = rows * 8. * (summary * (context / 16) + 512. * 16 * chosen);
      c.copies = copies_beyond(c.work.bytes, 300e6, 12);
      v.push_back(c);
    }
  return v;
}

const Announced announced{list};

}  // namespace
}  // namespace kvlab::cases
