// A policy must reach its views through ops only. It then runs unchanged where the host cannot reach them.
#include <catch2/catch.hpp>

#include "plugin/before_step.hpp"
#include "plugin/in_prompts.hpp"
#include "support/contract.hpp"
#include "support/guarded_device.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

// The policy under test. Before every callback its views are copied to a guarded device; afterwards token state and
// edits are copied back.
class OnGuardedDevice final : public Policy, public BeforeStep, public ChoosesInPrompts {
 public:
  explicit OnGuardedDevice(std::shared_ptr<Policy> inner) : inner_(std::move(inner)) {}
  Needs needs() const override { return inner_->needs(); }
  std::vector<CodecSpec> codecs() const override { return inner_->codecs(); }
  CodecSpec host_codec() const override { return inner_->host_codec(); }
  void attach(const Shape& s, const BudgetAmount& b, Workspace&) override {
    device_.call([&] { inner_->attach(s, b, device_); });
  }
  int before_step(const StepCounters& c) override {
    StepCounters there = c;
    there.stream = device_.stream();
    int variant = 0;
    device_.call([&] { variant = tell_before_step(inner_.get(), there); });
    return variant;
  }
  void prefill(const LayerPrefill& from, Edits& edits, Stream) override {
    run(from, edits, [&](LayerPrefill& kv, Edits& to, Stream s) { inner_->prefill(kv, to, s); });
  }
  int prompt_chunk() const override { return kvlab::prompt_chunk(*inner_); }
  void select_chunk(const LayerPrefill& from, Edits& edits, Stream) override {
    run(from, edits, [&](LayerPrefill& kv, Edits& to, Stream s) {
      dynamic_cast<ChoosesInPrompts&>(*inner_).select_chunk(kv, to, s);
    });
  }
  std::vector<PromptMask> prompt_masks() const override { return inner_->prompt_masks(); }
  void finish_prompt(const LayerKv& from, Edits& edits, Stream) override {
    run(from, edits, [&](LayerKv& kv, Edits& to, Stream s) { inner_->finish_prompt(kv, to, s); });
  }
  void select(const LayerStep& from, Edits& edits, Stream) override {
    run(from, edits, [&](LayerStep& step, Edits& to, Stream s) { inner_->select(step, to, s); });
  }
  void observe(const LayerStep& from, Edits& edits, Stream) override {
    if (wanted_.out) {  // attention left these
      const GuardedDevice::Open open;
      std::ranges::copy(logits_, wanted_.out.data);
      wanted_ = {};
    }
    run(from, edits, [&](LayerStep& step, Edits& to, Stream s) {
      step.output = device_.put(from.output.f32());
      inner_->observe(step, to, s);
    });
  }
  void finish_step(const Step& from, Edits& edits, Stream) override {
    Step step = from;
    step.workspace = &device_;
    if (from.pages.rows > 0) step.pages = put(from.pages);
    Edits made;
    device_.in_graph = inner_->needs().capturable();
    device_.call([&] { inner_->finish_step(step, made, device_.stream()); });
    if (from.pages.rows > 0) take_back(from.pages, step.pages);
    hand_over(made, edits, *from.workspace, from.slots, *from.shape);
    device_.reset();
  }
  void release(int slot) override { inner_->release(slot); }

 private:
  // The executor is the CPU's.
  class Opened final : public OutputProjection {
   public:
    explicit Opened(const OutputProjection* inner) : inner_(inner) {}
    void norms(const LayerKv& kv, Scores out, Stream) const override {
      const GuardedDevice::Open open;
      inner_->norms(kv, out, Stream::cpu());
    }

   private:
    const OutputProjection* inner_;
  };

  class OpenedAhead final : public QueriesAhead {
   public:
    explicit OpenedAhead(const QueriesAhead* inner) : inner_(inner) {}
    void of(const LayerStep& step, View<float, 3> out, Stream) const override {
      const GuardedDevice::Open open;
      inner_->of(step, out, Stream::cpu());
    }

   private:
    const QueriesAhead* inner_;
  };

  // The store is the CPU's, too, and puts numbers in the order of its places.
  class OpenedFuture final : public FutureMass {
   public:
    explicit OpenedFuture(const FutureMass* inner) : inner_(inner) {}
    View<const float, 3> of(const LayerKv& kv) const override {
      const GuardedDevice::Open open;
      return inner_->of(kv);
    }

   private:
    const FutureMass* inner_;
  };

  template <class Kv, class Callback>
  void run(const Kv& from, Edits& edits, const Callback& callback) {
    Kv kv = from;
    kv.workspace = &device_;
    kv.pages = put(from.pages);
    kv.host_pages = put(from.host_pages);
    PagedKv pages = kv.pages;
    kv.keys.kv = kv.values.kv = &pages;
    if (from.summaries.data)
      kv.summaries.data = device_
                              .put(View<const std::byte, 1>::dense(
                                  from.summaries.data, {from.summaries.slot_stride * from.shape->max_slots}))
                              .data;
    kv.mass = device_.put(from.mass);
    const Opened projection(from.projection);
    if (from.projection) kv.projection = &projection;
    const OpenedFuture future(from.future);
    if (from.future) kv.future = &future;
    const OpenedAhead ahead([&]() -> const QueriesAhead* {
      if constexpr (std::is_same_v<Kv, LayerStep>) return from.ahead;
      return nullptr;
    }());
    if constexpr (std::is_same_v<Kv, LayerStep>)
      if (from.ahead) kv.ahead = &ahead;
    if (from.queries) kv.queries = device_.put(from.queries.f32());
    if (from.chunk_queries) kv.chunk_queries = device_.put(from.chunk_queries.f32());
    if constexpr (std::is_same_v<Kv, LayerPrefill>)
      if (from.lse) kv.lse = device_.put(from.lse);
    if (from.window_queries) kv.window_queries = device_.put(from.window_queries.f32());
    if (from.steps)
      kv.steps = device_.put(View<const std::int32_t, 1>::dense(from.steps, {from.shape->max_slots})).data;
    Edits made(from.layer);
    device_.in_graph = std::is_same_v<Kv, LayerStep> && inner_->needs().capturable();
    device_.call([&] { callback(kv, made, device_.stream()); });
    take_back(from.pages, kv.pages);
    hand_over(made, edits, *from.workspace, from.slots, *from.shape);
    for (const HeadLogits& logits : made.logits()) edits.keep_logits(copy_of(logits, *from.shape));
    for (const MadeUpTokens& tokens : made.made_up()) edits.read_made_up(copy_of(tokens, *from.workspace));
    for (const int most : made.distances()) edits.clamp_distance(most);
    for (const View<const float, 3>& bias : made.biases()) edits.bias_logits(copy_of_bias(bias, *from.workspace));
    for (const LeftOut& left_out : made.left_out()) edits.fill_left_out(copy_of(left_out, *from.workspace));
    device_.reset();
  }

  // Attention writes to memory of the host, which observe copies.
  HeadLogits copy_of(const HeadLogits& logits, const Shape& s) {
    const GuardedDevice::Open open;
    const auto& extent = logits.out.extent;
    wanted_ = logits;
    logits_.assign(logits.out.data, logits.out.data + extent[0] * extent[1] * extent[2] * extent[3]);
    index_.assign(logits.index, logits.index + s.kv_heads);
    on_.clear();
    for (int slot = 0; slot < s.max_slots; ++slot)
      for (int head = 0; head < s.kv_heads; ++head) on_.push_back(logits.heads.on(slot, head));
    return {View<float, 4>::dense(logits_.data(), extent), index_.data(),
            Heads::flagged(View<const std::uint8_t, 2>::dense(on_.data(), {s.max_slots, s.kv_heads}))};
  }

  // Attention reads memory of the host.
  static MadeUpTokens copy_of(const MadeUpTokens& from, Workspace& w) {
    const GuardedDevice::Open open;
    const auto [slots, heads, count] = from.weights.extent;
    const std::int64_t dim = from.keys.extent[3];
    const MadeUpTokens to{take_scratch<float>(w, "made-up keys", {slots, heads, count, dim}),
                          take_scratch<float>(w, "made-up values", {slots, heads, count, dim}),
                          take_scratch<float>(w, "made-up weights", {slots, heads, count})};
    for (std::int64_t slot = 0; slot < slots; ++slot)
      for (std::int64_t head = 0; head < heads; ++head)
        for (std::int64_t i = 0; i < count; ++i) {
          to.weights(slot, head, i) = from.weights(slot, head, i);
          std::copy_n(&from.keys(slot, head, i, 0), dim, &to.keys(slot, head, i, 0));
          std::copy_n(&from.values(slot, head, i, 0), dim, &to.values(slot, head, i, 0));
        }
    return to;
  }

  static LeftOut copy_of(const LeftOut& from, Workspace& w) {
    const View<const float, 3> mean = copy_of_bias(from.mean, w);
    const GuardedDevice::Open open;
    return {copy_of(from.share, w), mean};
  }

  static View<const float, 3> copy_of_bias(const View<const float, 3>& from, Workspace& w) {
    const GuardedDevice::Open open;
    const auto [rows, heads, tokens] = from.extent;
    const auto to = take_scratch<float>(w, "bias", {rows, heads, tokens});
    for (std::int64_t row = 0; row < rows; ++row)
      for (std::int64_t head = 0; head < heads; ++head) std::copy_n(&from(row, head, 0), tokens, &to(row, head, 0));
    return to;
  }

  template <class Visit>
  static void for_frames(const PagedKv& kv, const Visit& visit) {
    for (int row = 0; row < kv.rows; ++row)
      for (int head = 0; head < kv.kv_heads; ++head)
        for (int page = 0; page < kv.pages(row, head); ++page)
          if (const PageEntry& e = kv.entry(row, head, page); e.frame != null_frame)
            visit(e.frame * granule_bytes, kv.layout(e).bytes);
  }

  // Copies the frames; they keep their numbers.
  PagedKv put(const PagedKv& from) {
    std::int64_t end = 0;
    for_frames(from, [&](std::int64_t at, std::int64_t bytes) { end = std::max(end, at + bytes); });
    PagedKv kv = from;
    kv.base = static_cast<std::byte*>(device_.scratch("", static_cast<std::size_t>(end)));
    {
      const GuardedDevice::Open open;
      for_frames(from, [&](std::int64_t at, std::int64_t bytes) {
        std::memcpy(kv.base + at, from.base + at, static_cast<std::size_t>(bytes));
      });
    }
    kv.table = device_.put(from.table);
    kv.length = device_.put(from.length);
    if (from.lower_pages) kv.lower_pages = device_.put(from.lower_pages);
    kv.slots = device_.put(View<const std::int32_t, 1>::dense(from.slots, {from.rows})).data;
    if (from.rope_table.inv_freq)
      kv.rope_table.inv_freq =
          device_.put(View<const float, 1>::dense(from.rope_table.inv_freq, {from.head_dim / 2})).data;
    return kv;
  }

  // Copies back the frames, in which ops wrote token state.
  static void take_back(const PagedKv& to, const PagedKv& from) {
    const GuardedDevice::Open open;
    for_frames(to, [&](std::int64_t at, std::int64_t bytes) {
      std::memcpy(to.base + at, from.base + at, static_cast<std::size_t>(bytes));
    });
  }

  static Surplus copy_of(Surplus s, Workspace& w) {
    const auto keep = take_scratch<std::int32_t>(w, "keep", {s.keep.extent[0], s.keep.extent[1]});
    std::copy_n(s.keep.data, s.keep.extent[0] * s.keep.extent[1], keep.data);
    s.keep = keep;
    if (s.pins) {
      const auto pins = take_scratch<Pins>(w, "pins", {s.keep.extent[0]});
      std::copy_n(s.pins, s.keep.extent[0], pins.data);
      s.pins = pins.data;
    }
    if (s.scores) {
      const auto scores =
          take_scratch<float>(w, "scores", {s.scores.extent[0], s.scores.extent[1], s.scores.extent[2]});
      std::copy_n(s.scores.data, s.scores.extent[0] * s.scores.extent[1] * s.scores.extent[2], scores.data);
      s.scores = scores;
    }
    return s;
  }

  template <class T, int Rank>
  static View<const T, Rank> copy_of(const View<const T, Rank>& from, Workspace& w) {
    std::int64_t count = 1;
    for (const std::int64_t e : from.extent) count *= e;
    if (!from) return {};
    auto* to = take_scratch<T>(w, "copy", {count}).data;
    std::copy_n(from.data, count, to);
    return View<const T, Rank>::dense(to, from.extent);
  }

  // The same heads of all slots.
  static Heads copy_of(const Heads& heads, Workspace& w, const Shape& s) {
    const auto flags = take_scratch<std::uint8_t>(w, "heads", {s.max_slots, s.kv_heads});
    for (int slot = 0; slot < s.max_slots; ++slot)
      for (int head = 0; head < s.kv_heads; ++head) flags(slot, head) = heads.on(slot, head);
    return Heads::flagged(flags);
  }

  // slots: of the callback's rows, in memory of the host.
  static void hand_over(const Edits& made, Edits& edits, Workspace& w, const std::int32_t* slots, const Shape& s) {
    const GuardedDevice::Open open;
    for (const Edit& e : made.all()) {
      // A list that lasts has all slots.
      const std::int64_t rows = e.list.count.extent[0], heads = e.list.count.extent[1], room = e.list.index.extent[2];
      IndexList list;
      list.index = take_scratch<std::int32_t>(w, "list", {rows, heads, room});
      list.count = take_scratch<std::int32_t>(w, "list", {rows, heads});
      for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t h = 0; h < heads; ++h) {
          list.count(r, h) = e.list.count(r, h);
          std::copy_n(&e.list.index(r, h, 0), room, &list.index(r, h, 0));
        }
      if (e.list.slots) list.slots = slots;
      edits.for_layer(e.layer);
      switch (e.verb) {
        case Edit::attend:
          e.resident ? edits.attend_resident(PageList{list}, e.pins) : edits.attend(PageList{list}, e.pins);
          break;
        case Edit::attend_tokens: edits.attend(TokenList{list}, e.pins); break;
        case Edit::evict: edits.evict(TokenList{list}, e.when); break;
        case Edit::evict_rest: edits.evict_rest(TokenList{list}, e.when); break;
        case Edit::offload: edits.offload(PageList{list}, e.when); break;
        case Edit::drop: edits.drop(e.tier, PageList{list}, e.when); break;
        case Edit::recall: edits.recall(PageList{list}, e.when); break;
        case Edit::evict_surplus: edits.evict_surplus(copy_of(e.surplus, w)); break;
        case Edit::encode: edits.encode(PageList{list}, e.codec, e.when); break;
        case Edit::store_as: edits.store_as(copy_of(e.levels, w)); break;
        case Edit::move: edits.move(TokenList{list}, e.when); break;
        case Edit::place:  // without factors of keys: pages come whole, and have the same bits
          edits.place(PageList{list}, {.heads = copy_of(e.heads, w, s),
                                       .pins = e.pins,
                                       .room = e.room,
                                       .reuse = e.reuse,
                                       .when = e.when,
                                       .rooms = copy_of(e.rooms, w),
                                       .order = copy_of(e.order, w)});
          break;
        case Edit::archive: edits.archive(copy_of(e.heads, w, s)); break;
        case Edit::rewrite:
          edits.rewrite(e.side, copy_of(e.rows, w), {copy_of(e.range.first, w), copy_of(e.range.count, w)});
          break;
        case Edit::fetch: edits.fetch(TokenList{list}, {copy_of(e.heads, w, s), e.when}); break;
      }
    }
  }

  GuardedDevice device_;
  std::shared_ptr<Policy> inner_;
  HeadLogits wanted_;  // where the policy wants those of this step
  std::vector<float> logits_;
  std::vector<std::int32_t> index_;
  std::vector<std::uint8_t> on_;
};

Logits on_guarded_device(const std::shared_ptr<const Model>& model, const PolicySpec& spec,
                         const std::vector<int>& prompt, const std::vector<int>& answer, Kept& kept) {
  Play p(model, spec);
  EngineOptions options;
  options.recorded = made_up_future();
  options.page_size = spec.page_size;
  options.budget = spec.budget;
  options.max_tokens = 192;
  p.policy = std::make_shared<OnGuardedDevice>(p.policy);
  p.engine = std::make_unique<Engine>(model, p.policy, options);
  const Logits got = p.run(prompt, answer);
  kept = kept_of(p.engine->store(), p.slot);
  return got;
}

}  // namespace

TEST_CASE("a policy touches device memory through ops only", "[cpu]") {
  if (skip_on_cuda()) return;
  const auto asked = about_all();
  if (asked.empty()) return;
  const auto model = tiny_model("llama-gqa3");
  const auto prompt = test_text(112, model->config.vocab), answer = test_text(6, model->config.vocab, 5);
  Play full(model, full_spec());
  full.run(prompt, {});
  const auto half = static_cast<double>(full.engine->store().page_bytes(Tier::device)) / 2;
  std::vector<PolicySpec> specs;
  for (const Subject& s : asked) {
    specs.push_back(with_budget(s.spec, BudgetAmount::tokens, 64));
    if (s.composed()) continue;
    if (!s.spec.policy) specs.push_back(with_budget(s.spec, BudgetAmount::bytes, half));
  }
  for (const PolicySpec& spec : specs)
    for (const Tier tier : {Tier::device, Tier::host}) {
      CAPTURE(spec.name, static_cast<int>(spec.budget.kind), tier == Tier::host);
      if (tier == Tier::host && (spec.codec || !subjects().on_either_tier(spec))) continue;
      PolicySpec placed = spec;
      placed.placement.tier = tier;
      placed.placement.resident = tier == Tier::host ? 16 : 0;
      if (placed.scorer && !subjects().keeps_tokens(spec) && subjects().policy(placed)->needs().window_queries() == 0)
        placed.schedule.every = 2;
      Play plain(model, placed);
      const Logits expected = plain.run(prompt, answer);
      Kept kept;
      INFO(
          "usual cause: the host reads or writes a view: kv.pages.tokens(), a score or a list in a loop of the "
          "policy's "
          "own. That crashes on a GPU. Use ops, and upload() for numbers of the host.");
      CHECK(on_guarded_device(model, placed, prompt, answer, kept) == expected);
      CHECK(kept == kept_of(plain.engine->store(), plain.slot));
    }
}
