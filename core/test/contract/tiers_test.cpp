// Tiers, fidelity where it can be known, and RoPE regimes.
#include <catch2/catch.hpp>
#include <kvlab/page_order.hpp>
#include <limits>
#include <map>

#include "compose/coded.hpp"
#include "compose/forwarding.hpp"
#include "engine/scheduler.hpp"
#include "ops/page/paged.hpp"
#include "plugin/in_prompts.hpp"
#include "run/shadow.hpp"
#include "support/contract.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {
bool on_either_tier(const Subject& s) { return subjects().on_either_tier(s.spec); }
}  // namespace

TEST_CASE("everything on the host and recalled equals everything resident, bit for bit") {
  const auto model = tiny_model("llama-gqa3");
  const auto prompt = test_text(112, model->config.vocab), answer = test_text(10, model->config.vocab, 5);
  const auto asked = about("scorers, selectors, budgets and codecs", on_either_tier);
  if (asked.empty()) return;
  std::vector<PolicySpec> specs{full_spec()};
  for (const Subject& s : asked) specs.push_back(with_budget(s.spec, BudgetAmount::tokens, 48));
  for (const PolicySpec& spec : specs) {
    Play resident(model, spec);
    const Logits expected = resident.run(prompt, answer);
    for (int tokens : {0, 8, 32, 500}) {
      CAPTURE(spec.name, tokens);
      PolicySpec lower = spec;
      lower.placement.tier = Tier::host;
      lower.placement.resident = tokens;
      EngineOptions options;
      options.protect_host = !on_cuda();
      Play p(model, lower, options);
      INFO(
          "usual cause: the policy looks for tokens in kv.pages alone. With placement on the host its pages are in "
          "kv.host_pages until core recalls them; lists name tokens of both.");
      CHECK(p.run(prompt, answer) == expected);
      CHECK(kept_of(p.engine->store(), p.slot) == kept_of(resident.engine->store(), resident.slot));
      const Ledger& ledger = p.engine->ledger();
      const bool all_dense = p.policy->needs().dense_layers() >= model->config.layers;
      if (!all_dense) CHECK(ledger.moved_total(Tier::host) > 0);
      if (!all_dense && tokens == 0) CHECK(ledger.moved_total(Tier::device) > 0);
    }
  }
}

TEST_CASE("forced misses, everything on the host in every step, give the bits of the resident run") {
  const auto model = tiny_model("llama-gqa3");
  const auto prompt = test_text(112, model->config.vocab), answer = test_text(20, model->config.vocab, 5);
  for (const Subject& s : about("policies that place pages on the host", [](const Subject& s) {
         return s.spec.policy && subjects().policy(s.spec)->needs().host_pages();
       })) {
    const PolicySpec spec = with_budget(s.spec, BudgetAmount::tokens, 48);
    // Lists of an overlap of 0 have nothing in common with those of the step before. Not every policy asks the ops
    // that inject replaces.
    for (const bool misses : {false, true}) {
      CAPTURE(s.label, misses);
      const auto play = [&](Spill spill, std::int64_t device_limit = -1) {
        EngineOptions options;
        options.spill = spill;
        options.device_limit = device_limit;
        options.protect_host = !on_cuda();
        auto p = std::make_unique<Play>(model, spec, options);
        if (misses) p->replace(injected(p->policy, s.label, {.overlap = 0, .seed = 3}));
        return p;
      };
      Logits expected;
      const auto resident = play(Spill::pressure);
      try {
        expected = resident->run(prompt, answer);
      } catch (const Error& e) {
        if (misses && e.code() == Errc::config) continue;
        throw;
      }
      const auto forced = play(Spill::always);
      INFO(
          "usual cause: select() reads kv.pages or attends before the pages are there. A place edit for this attention "
          "brings them, and one for the next attention must not be read in this step.");
      CHECK(forced->run(prompt, answer) == expected);
      CHECK(kept_of(forced->engine->store(), forced->slot) == kept_of(resident->engine->store(), resident->slot));
      const Ledger& ledger = forced->engine->ledger();
      CHECK(ledger.moved_total(Tier::host) > 0);
      if (misses) CHECK(ledger.moved_total(Tier::device) > 0);
      // Pages leave a part at a time, as steps need their frames. Others may want more frames from step to step.
      if (s.label != "freekv" && s.label != "flexicache") continue;
      const auto pressed =
          play(Spill::pressure, resident->engine->full_bytes(static_cast<int>(prompt.size()) + spec.page_size));
      CHECK(pressed->run(prompt, answer) == expected);
      CHECK(kept_of(pressed->engine->store(), pressed->slot) == kept_of(resident->engine->store(), resident->slot));
      CHECK(pressed->engine->ledger().moved_total(Tier::host) > 0);
    }
  }
}

// Few tokens, so that their pages are not nearly all of them.
TEST_CASE("pages that hold none of the chosen tokens leave when device memory runs short, and nothing else changes") {
  const auto model = tiny_model("llama-gqa3");
  const auto prompt = test_text(112, model->config.vocab), answer = test_text(20, model->config.vocab, 5);
  for (const Subject& s : about("policies that choose tokens of the prompt and place their pages",
                                [](const Subject& s) { return s.label == "omnikv" || s.label == "clusterkv"; })) {
    CAPTURE(s.label);
    PolicySpec spec = with_budget(s.spec, BudgetAmount::tokens, 10);
    auto values = spec.policy->params.values();
    values["offload"] = true;
    spec.policy->params = Params(values);
    const auto play = [&](std::int64_t device_limit) {
      EngineOptions options;
      options.spill = Spill::pressure;
      options.device_limit = device_limit;
      options.protect_host = !on_cuda();
      return std::make_unique<Play>(model, spec, options);
    };
    const auto resident = play(-1);
    const Logits expected = resident->run(prompt, answer);
    CHECK(resident->engine->ledger().moved_total(Tier::host) == 0);
    const auto pressed = play(resident->engine->full_bytes(static_cast<int>(prompt.size()) + spec.page_size));
    INFO("usual cause: a place edit names a list that does not last, or one that is not the step's any more.");
    CHECK(pressed->run(prompt, answer) == expected);
    CHECK(kept_of(pressed->engine->store(), pressed->slot) == kept_of(resident->engine->store(), resident->slot));
    CHECK(pressed->engine->ledger().moved_total(Tier::host) > 0);
  }
}

TEST_CASE("rows whose pages are under way sit steps out, and have the texts that they have alone") {
  const auto model = tiny_model("llama-gqa3");
  std::vector<Request> requests(5);
  for (std::size_t i = 0; i < requests.size(); ++i)
    requests[i] = {test_text(90 + 7 * static_cast<int>(i), model->config.vocab, static_cast<unsigned>(i) + 1), {}, 16};
  std::vector<Subject> asked;
  for (const Subject& s : about("policies with the parameter `pause`",
                                [](const Subject& s) { return s.spec.policy && s.spec.policy->params.has("pause"); })) {
    asked.push_back(s), asked.push_back(s);
    asked.back().spec.placement.tier = Tier::host;
    asked.back().spec.placement.codec = subjects().codec("k8v8");
  }
  for (const Subject& s : asked) {
    CAPTURE(s.label, s.spec.placement.codec.has_value());
    PolicySpec spec = with_budget(s.spec, BudgetAmount::tokens, 48);
    const auto serve = [&](bool pause, int slots, int reload_steps) {
      auto values = spec.policy->params.values();
      values["pause"] = pause;
      if (values.count("rerank_every")) values["rerank_every"] = std::int64_t{3};
      PolicySpec with = spec;
      with.policy->params = Params(values);
      EngineOptions o;
      o.slots = slots, o.reload_steps = reload_steps;
      o.batch_invariant = on_cuda();
      Play p(model, with, o);
      Scheduler scheduler(*p.engine, requests, {});
      std::pair<std::vector<std::vector<int>>, int> out;
      while (!scheduler.done()) REQUIRE(scheduler.iterate() == Fit::ok);
      for (const Served& one : scheduler.served()) out.first.push_back(one.tokens), out.second += one.pauses;
      p.engine->store().check_invariants();
      return out;
    };
    const auto alone = serve(false, 1, 0);
    INFO(
        "usual cause: a row attends to pages that it has not waited for: select() lists them, and observe() of an "
        "earlier step placed them for Deadline::sequence.");
    CHECK(serve(true, 1, 0) == alone);
    CHECK(serve(true, 4, 0).first == alone.first);
    const auto waiting = serve(true, 4, 2);
    CHECK(waiting.first == alone.first);
    if (!on_cuda()) CHECK(waiting.second > 0);
  }
}

// Frames and counts of tokens are rounded up to pages, as a workload rounds them.
TEST_CASE("a policy's demand is at least what it takes of each tier") {
  const auto model = tiny_model("llama-gqa3");
  const int steps = 40;
  for (const Subject& s : about("policies", [](const Subject& s) { return s.spec.policy.has_value(); }))
    for (const int tokens : {150, 40}) {
      CAPTURE(s.label, tokens);
      const PolicySpec spec = with_budget(s.spec, BudgetAmount::tokens, 96);
      EngineOptions o;
      o.slots = 1, o.max_tokens = 192;
      Play p(model, spec, o);
      const Engine::Demanded says = p.engine->demanded(tokens, steps);
      INFO(
          "usual cause: Policy::demand counts the budget alone. A head may also hold its pins, and a page that a step "
          "opened. The mean over all KV heads counts.");
      const int slot = p.engine->open();
      p.prompt(slot, test_text(tokens, model->config.vocab));
      CHECK(p.engine->used_bytes() <= says.prompt);
      if (says.decode < 0 && says.host < 0) continue;
      for (int i = 0; i < steps; ++i) {
        p.step({slot}, {7});
        if (says.decode >= 0) CHECK(p.engine->used_bytes() <= says.decode);
        if (says.host >= 0) CHECK(p.engine->host_used_bytes() <= says.host);
      }
    }
}

namespace {

// Looks at the order in which a prompt's pages would leave.
class OrderSeen : public ForwardingPolicy {
 public:
  using ForwardingPolicy::ForwardingPolicy;
  int heads = 0;  // that had pages to choose from

  void prefill(const LayerPrefill& kv, Edits& edits, Stream s) override {
    ForwardingPolicy::prefill(kv, edits, s);
    for (const Edit& e : edits.all())
      if (e.verb == Edit::place && e.order && e.list.slots)
        for (int head = 0; head < kv.kv_heads(); ++head) look(kv, e, head);
  }

 protected:
  void look(const LayerKv& kv, const Edit& e, int head) {
    const int slot = kv.slots[0], p = kv.pages.page_size, n = kv.pages.tokens(0, head), pages = (n + p - 1) / p;
    std::vector<bool> listed(static_cast<std::size_t>(pages));
    for (int i = 0; i < e.list.count(slot, head); ++i)
      listed[static_cast<std::size_t>(e.list.index(slot, head, i))] = true;
    float best = -std::numeric_limits<float>::infinity(), least = -best, other = best;
    for (int page = 0; page < pages; ++page) {
      const float x = e.order(slot, head, page);
      best = std::max(best, x);
      if (listed[static_cast<std::size_t>(page)])
        least = std::min(least, x);
      else if (page * p >= e.pins.first && (page + 1) * p <= n - e.pins.last && page < pages - 1)
        other = std::max(other, x);
    }
    CHECK(least >= other);  // equal pages are listed by number
    if (pages < e.order.extent[2]) CHECK(e.order(slot, head, pages) >= best);
    heads += least > other && other > -std::numeric_limits<float>::infinity();
  }
};

}  // namespace

TEST_CASE("the pages that a policy chose are the last to leave by its order, but for those to come") {
  if (on_cuda()) return;  // it reads memory of the host
  const auto model = tiny_model("llama-gqa3");
  const auto prompt = test_text(112, model->config.vocab);
  for (const Subject& s : about("policies with an order that lasts",
                                [](const Subject& s) { return s.label == "freekv" || s.label == "flexicache"; })) {
    CAPTURE(s.label);
    Play p(model, with_budget(s.spec, BudgetAmount::tokens, 48));
    const auto seen = std::make_shared<OrderSeen>(p.policy);
    p.replace(seen);
    p.run(prompt, {});
    CHECK(seen->heads > 0);
  }
}

namespace {

// Looks at the order in each step: it changes in every 32nd, and then ranks what that step chose as the last to leave.
class RenewalSeen final : public OrderSeen {
 public:
  using OrderSeen::OrderSeen;
  int renewed = 0;  // times a layer's order changed

  void observe(const LayerStep& step, Edits& edits, Stream s) override {
    ForwardingPolicy::observe(step, edits, s);
    for (const Edit& e : edits.all()) {
      if (e.verb != Edit::place || !e.order) continue;
      std::vector<float> order;
      for (int head = 0; head < step.kv_heads(); ++head)
        for (int page = 0; page < 8; ++page) order.push_back(e.order(step.slots[0], head, page));
      std::vector<float>& known = known_[step.layer];
      const bool changed = !known.empty() && order != known;
      known = order;
      const bool due = (step.step[0] + 1) % PageOrderRenewal::every == 0;
      CHECK((changed == due || step.step[0] == 0));
      renewed += changed;
      for (int head = 0; due && head < step.kv_heads(); ++head) look(step, e, head);
    }
  }

 private:
  std::map<int, std::vector<float>> known_;  // [layer]
};

}  // namespace

TEST_CASE("the order in which pages leave follows the scores of recent steps") {
  if (on_cuda()) return;  // it reads memory of the host
  const auto model = tiny_model("llama-gqa3");
  const auto prompt = test_text(112, model->config.vocab), answer = test_text(70, model->config.vocab, 5);
  for (const Subject& s : about("policies with an order that lasts",
                                [](const Subject& s) { return s.label == "freekv" || s.label == "flexicache"; })) {
    CAPTURE(s.label);
    PolicySpec spec = with_budget(s.spec, BudgetAmount::tokens, 48);
    auto values = spec.policy->params.values();
    if (values.count("rerank_every")) values["rerank_every"] = std::int64_t{1};  // every step chooses
    spec.policy->params = Params(values);
    EngineOptions o;
    o.max_tokens = 192;
    Play p(model, spec, o);
    const auto seen = std::make_shared<RenewalSeen>(p.policy);
    p.replace(seen);
    p.run(prompt, answer);
    CHECK(seen->renewed > 0);
    CHECK(seen->renewed % 2 == 0);
    CHECK(seen->heads > 0);
  }
}

TEST_CASE("pages that are packed on the host give the same bits") {
  const auto model = tiny_model("llama-gqa3", DType::bf16);
  const auto prompt = test_text(112, model->config.vocab), answer = test_text(10, model->config.vocab, 5);
  for (const Subject& s : about("selectors, and policies that place pages on the host", [](const Subject& s) {
         const Needs needs = subjects().policy(s.spec)->needs();
         return !s.spec.scorer && !s.spec.codec && s.runs_with(DType::bf16) && needs.token_state().empty() &&
                (s.spec.selector ? !needs.oracle() : needs.host_pages());
       })) {
    CAPTURE(s.label);
    PolicySpec spec = with_budget(s.spec, BudgetAmount::tokens, 48);
    spec.placement.tier = Tier::host;
    Play plain(model, spec);
    spec.placement.codec = subjects().codec("lossless");
    Play packed(model, spec);
    INFO("usual cause: an op reads pages of kv.host_pages. A packed page has to come to the device first.");
    CHECK(packed.run(prompt, answer) == plain.run(prompt, answer));
    for (const Tier tier : {Tier::device, Tier::host}) {
      const std::int64_t moved = plain.engine->ledger().moved_total(tier);
      REQUIRE(moved > 0);
      if (tier == Tier::device && plain.policy->needs().rebuilds_keys())
        continue;  // only plain pages leave keys behind
      CHECK(packed.engine->ledger().moved_total(tier) < moved);
    }
    CHECK(kept_of(packed.engine->store(), packed.slot) == kept_of(plain.engine->store(), plain.slot));
  }
}

namespace {

// Keys or values of a head's pages in a tier, by text position.
std::map<std::int32_t, std::vector<float>> rows_of(const Play& p, int layer, int head, KvSide side, Tier tier) {
  const std::vector<std::int32_t> slots{p.slot};
  const Store& store = p.engine->store();
  const PagedKv kv = store.view(layer, slots, tier);
  const std::vector<std::int32_t> positions = store.positions_by_place(layer, p.slot, head);
  std::map<std::int32_t, std::vector<float>> out;
  for (int t = 0; t < kv.tokens(0, head); ++t) {
    const PageEntry& e = kv.entry(0, head, t / kv.page_size);
    if (e.frame == null_frame) continue;
    std::vector<float>& row = out[positions[static_cast<std::size_t>(t)]];
    row.resize(static_cast<std::size_t>(kv.head_dim));
    ops::read_row(kv.frame(e), kv.layout(e), side, t % kv.page_size, row.data());
  }
  return out;
}

// A row of f32 as the codec gives it back.
std::vector<float> coded_row(const std::vector<float>& row, const CodecSpec& codec, KvSide side) {
  const PageLayout l = ops::make_layout(DType::f32, codec, 1, static_cast<int>(row.size()), 0);
  std::vector<std::byte> frame(static_cast<std::size_t>(l.bytes));
  ops::write_token(frame.data(), l, 0, row.data(), row.data(), 0);
  std::vector<float> out(row.size());
  ops::read_row(frame.data(), l, side, 0, out.data());
  return out;
}

// What is on the host is what the codec makes of the exact row. A row on the device is that, or exact. It looks at the
// first layer with pages on the host: those before it are whole and exact, so both runs have its keys and values.
void check_rows(const Play& coded, const Play& plain, const CodecSpec& codec) {
  std::size_t on_host = 0, back = 0;
  for (int layer = 0; layer < coded.model->config.layers && on_host == 0; ++layer)
    for (int head = 0; head < coded.model->config.kv_heads; ++head)
      for (const KvSide side : {KvSide::key, KvSide::value}) {
        auto exact = rows_of(plain, layer, head, side, Tier::host);
        exact.merge(rows_of(plain, layer, head, side, Tier::device));
        for (const Tier tier : {Tier::host, Tier::device})
          for (const auto& [position, row] : rows_of(coded, layer, head, side, tier)) {
            if (!exact.count(position)) continue;  // steps evict by what they read
            CAPTURE(layer, head, position, tier == Tier::host);
            if (tier == Tier::device && row == exact[position]) continue;
            REQUIRE(row == coded_row(exact[position], codec, side));
            ++(tier == Tier::host ? on_host : back);
          }
      }
  CHECK(on_host > 0);
  if (coded.engine->ledger().moved_total(Tier::device) > 0) CHECK(back > 0);
}

}  // namespace

TEST_CASE("a policy's pages on the host may have another codec: its bytes, its rows, whatever memory is left") {
  const auto model = tiny_model("llama-gqa3");
  const auto prompt = test_text(112, model->config.vocab), answer = test_text(10, model->config.vocab, 5),
             second = test_text(30, model->config.vocab, 3);
  for (const Subject& s : about("policies that place pages on the host", [](const Subject& s) {
         return s.spec.policy && subjects().policy(s.spec)->needs().host_pages();
       }))
    for (const char* name : {"k8v8", "k4v2"}) {
      CAPTURE(s.label, name);
      const PolicySpec spec = with_budget(s.spec, BudgetAmount::tokens, 48);
      PolicySpec below = spec;
      below.placement.tier = Tier::host;
      below.placement.codec = subjects().codec(name);
      const CodecSpec codec = subjects().codec_of(*below.placement.codec);
      EngineOptions always;
      always.spill = Spill::always;
      EngineOptions pressure = always;
      pressure.spill = Spill::pressure;
      Play plain(model, spec, always), coded(model, below, always), spare(model, below, pressure);
      const Logits expected = plain.run(prompt, answer), got = coded.run(prompt, answer);
      INFO("usual cause: an op reads pages of kv.host_pages as if they lay like those of kv.pages.");
      // The prompt's own attention is exact, unless it retrieves. What steps choose may differ: rows are compared, one
      // by one, below.
      if (prompt_chunk(*subjects().policy(s.spec)) == 0)
        CHECK((on_cuda() ? worst({got[0]}, {expected[0]}) < 0.03 : got[0] == expected[0]));
      CHECK(finite(got));
      CHECK(spare.run(prompt, answer) == got);
      // Every full page is written once, whatever is read, and in the codec's bytes.
      const auto moved = [](const Play& p, Tag tag) {
        return p.engine->ledger().moved(Tier::host, Stored::host)[static_cast<std::size_t>(tag)];
      };
      const auto layout = [&](const CodecSpec& c) {
        const Shape& shape = plain.engine->store().shape();
        return ops::make_layout(shape.dtype, c, shape.page_size, shape.head_dim, 0);
      };
      const PageLayout wide = layout({}), low = layout(codec);
      const std::int64_t pages = moved(plain, Tag::keys) / (wide.v - wide.k);
      CHECK(pages > 0);
      CHECK(moved(coded, Tag::keys) == pages * (low.v - low.k));
      CHECK(moved(coded, Tag::values) == pages * (low.k_meta - low.v));
      CHECK(moved(coded, Tag::codec_metadata) == pages * (low.positions - low.k_meta));
      if (!on_cuda()) check_rows(coded, plain, codec);
      CHECK(finite({coded.prompt(coded.slot, second)}));
      CHECK(finite(coded.step({coded.slot}, {7})));
      // Beside a codec of the device, the host's is the host's.
      if (takes_no_codec(*subjects().policy(spec))) continue;
      below.codec = subjects().codec("int8");
      Play both(model, below);
      CHECK(finite(both.run(prompt, answer)));
      CHECK(both.engine->store().options().codecs == std::vector{subjects().codec_of(*below.codec)});
      CHECK(both.engine->store().options().host_codec == codec);
      CHECK(moved(both, Tag::keys) == pages * (low.v - low.k));
    }
}

TEST_CASE("a policy that can keep its pages on the device gives the same bits with pages on the host") {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    if (on_cuda() && dtype == DType::f32) continue;  // its models are bf16
    const auto model = tiny_model("llama-gqa3", dtype);
    const auto first = test_text(112, model->config.vocab), second = test_text(30, model->config.vocab, 3),
               answer = test_text(24, model->config.vocab, 5);
    for (const Subject& s : about("policies with the parameter `offload`", [](const Subject& s) {
           return s.spec.policy && s.spec.policy->params.has("offload");
         }))
      for (const int page : {8, 16}) {
        if (!s.runs_with(dtype)) continue;
        CAPTURE(s.label, name_of(dtype), page);
        PolicySpec spec = with_budget(s.spec, BudgetAmount::tokens, 24);  // tokens of more would lie in all pages
        spec.page_size = page;
        const auto with = [&](bool offload) {
          auto values = spec.policy->params.values();
          values["offload"] = offload;
          spec.policy->params = Params(values);
          return spec;
        };
        Play away(model, with(true)), here(model, with(false));
        CHECK(away.run(first, answer) == here.run(first, answer));
        const Ledger& ledger = away.engine->ledger();
        CHECK(ledger.moved_total(Tier::device) > 0);
        CHECK(here.engine->ledger().moved_total(Tier::host) == 0);
        const auto moved = [&](Tag tag) { return ledger.moved(Tier::device)[static_cast<std::size_t>(tag)]; };
        if (away.policy->needs().rebuilds_keys()) CHECK(moved(Tag::keys) < moved(Tag::values));
        CHECK(away.prompt(away.slot, second) == here.prompt(here.slot, second));
        for (const int token : answer) CHECK(away.step({away.slot}, {token}) == here.step({here.slot}, {token}));
        CHECK(kept_of(away.engine->store(), away.slot) == kept_of(here.engine->store(), here.slot));
        away.engine->store().check_invariants();
      }
  }
}

TEST_CASE("a second prompt reads what went to the host after the first") {
  const auto model = tiny_model("llama-gqa3");
  const auto first = test_text(70, model->config.vocab), second = test_text(30, model->config.vocab, 3),
             answer = test_text(6, model->config.vocab, 5);
  const auto asked = about("scorers, selectors, budgets and codecs", on_either_tier);
  if (asked.empty()) return;
  std::vector<PolicySpec> specs{full_spec()};
  for (const Subject& s : asked) specs.push_back(with_budget(s.spec, BudgetAmount::tokens, 48));
  for (const PolicySpec& spec : specs) {
    CAPTURE(spec.name);
    const auto logits = [&](const PolicySpec& of) {
      EngineOptions options;
      options.protect_host = of.placement.tier == Tier::host && !on_cuda();
      Play p(model, of, options);
      Logits all = p.run(first, answer);
      all.push_back(p.prompt(p.slot, second));
      for (int token : answer) all.push_back(p.step({p.slot}, {token})[0]);
      return all;
    };
    PolicySpec lower = spec;
    lower.placement.tier = Tier::host;
    INFO(
        "usual cause: prefill() takes a second prompt for the first one: it starts at kv.position, with a cache that "
        "holds tokens, some of them on the host.");
    CHECK(logits(lower) == logits(spec));
  }
}

TEST_CASE("fidelity is exact where everything is read") {
  const auto asked = about("policies with keys in their own precision and phase", [](const Subject& s) {
    const auto policy = subjects().policy(s.spec);
    return policy->needs().rope() == RopeRegime::original && !s.own_amount && !policy->needs().functional() &&
           policy->codecs() == std::vector<CodecSpec>{CodecSpec{}};
  });
  if (asked.empty()) return;
  for (const std::string& name : group_models()) {
    const auto model = tiny_model(name);
    const auto prompt = test_text(75, model->config.vocab), answer = test_text(6, model->config.vocab, 5);
    std::vector<PolicySpec> specs{full_spec()};
    for (const Subject& s : asked)
      if (!s.composed() || name == "llama-gqa3") specs.push_back(subjects().as_full(s.spec));
    for (const PolicySpec& spec : specs) {
      CAPTURE(name, spec.name);
      Play p(model, spec);
      Shadow shadow(*model, spec.page_size, 192, {.beside = &p.engine->store()});
      p.engine->observe(&shadow);
      p.run(prompt, answer);
      const Shadow::Rows rows = shadow.take();
      INFO("usual cause: without a budget some pages or tokens are not read: look at the lists of select()");
      REQUIRE(rows.mass.size() == answer.size() * static_cast<std::size_t>(model->config.layers));
      for (std::size_t i = 0; i < rows.mass.size(); ++i) {
        REQUIRE(rows.mass[i] == (on_cuda() ? Approx(1).margin(1e-5) : Approx(1).margin(0).epsilon(0)));
        REQUIRE(rows.page_recall[i] == 1.f);
        REQUIRE(rows.output_error[i] <= (on_cuda() ? 0.02f : 0.f));
      }
    }
  }
}

TEST_CASE("re-rotated keys and keys rotated on reading give the same answers") {
  const auto model = tiny_model("llama-gqa3");
  const auto prompt = test_text(112, model->config.vocab), answer = test_text(20, model->config.vocab, 5);
  for (const Subject& s :
       about("scorers with the parameter `rope` and its choices cache_relative and re_rotate", [](const Subject& s) {
         return !s.spec.codec && subjects().with(s.spec, "rope", "cache_relative") &&
                subjects().with(s.spec, "rope", "re_rotate");
       })) {
    const auto a = subjects().with(s.spec, "rope", "cache_relative"), b = subjects().with(s.spec, "rope", "re_rotate");
    CAPTURE(s.label);
    for (bool host : {false, true}) {
      Play x(model, with_budget(*a, BudgetAmount::tokens, 48));
      PolicySpec re = with_budget(*b, BudgetAmount::tokens, 48);
      if (host) re.placement.tier = Tier::host;
      Play y(model, re);
      INFO(
          "usual cause: the `rope` parameter reaches needs().rope() for one regime only, or scores depend on the keys' "
          "phase. Score keys that are not turned, or the same way in both.");
      CHECK(worst(x.run(prompt, answer), y.run(prompt, answer)) < (on_cuda() ? 0.05 : 1e-4));
      CHECK(x.kept == y.kept);
    }
  }
}

// In a model of one layer a token's key and value do not depend on earlier tokens. A cache that counts positions inside
// itself then cannot tell an evicted prefix from a text that never had one.
TEST_CASE("in a one-layer model a cache-relative cache equals the dense run over what it kept") {
  const auto model = fresh_tiny_model("llama-gqa3", DType::f32);
  model->config.layers = 1;
  model->layers.resize(1);
  const auto prompt = test_text(112, model->config.vocab), answer = test_text(20, model->config.vocab, 5);
  for (const Subject& s :
       about("scorers with the parameter `rope` and its choice cache_relative", [](const Subject& s) {
         return !s.spec.codec && !s.spec.split && subjects().with(s.spec, "rope", "cache_relative");
       })) {
    const auto spec = subjects().with(s.spec, "rope", "cache_relative");
    CAPTURE(s.label);
    Play p(model, with_budget(*spec, BudgetAmount::tokens, 48));
    p.run(prompt, {});
    std::vector<int> text = prompt;
    for (int token : answer) {
      const Kept kept = kept_of(p.engine->store(), p.slot);
      if (std::count(kept.begin(), kept.end(), kept[0]) != static_cast<std::ptrdiff_t>(kept.size())) break;
      std::vector<int> dense;
      for (std::int32_t at : kept[0]) dense.push_back(text[static_cast<std::size_t>(at)]);
      Play full(model, full_spec());
      full.run(dense, {});
      const Logits expected = full.step({full.slot}, {token}), got = p.step({p.slot}, {token});
      INFO(
          "usual cause: kept keys have the phase of their old positions. A cache that counts positions inside itself "
          "says rope(RopeRegime::cache_relative) or re_rotate in needs(): core turns the keys then.");
      CHECK(worst(got, expected) < (on_cuda() ? 0.03 : 1e-4));
      text.push_back(token);
    }
  }
}
