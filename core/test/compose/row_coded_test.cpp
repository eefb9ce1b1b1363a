#include "compose/row_coded.hpp"

#include <kvlab/ops.hpp>
#include <kvlab/row_codec.hpp>

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "compose/coded.hpp"
#include "compose/compose.hpp"
#include "compose/forwarding.hpp"
#include "engine/engine.hpp"
#include "model/checkpoint.hpp"
#include "plugin/tokens_stay.hpp"
#include "support/golden.hpp"
#include "support/store_fixture.hpp"
#include "support/stored_rows.hpp"

using namespace kvlab;

namespace {

using Rows = std::vector<std::vector<float>>;  // [token][d]

struct Asked {
  int head_dim = 0;
  std::vector<std::int64_t> tokens[2];  // of each call of encode, keys and values
};

// A format that no CodecSpec has: a bit for the sign of each number, and the mean of a token's magnitudes in f32. Keys
// wait until three of them are due.
class Signs final : public RowCodec {
 public:
  explicit Signs(Asked& asked, bool keys = true) : asked_(asked), keys_(keys) {}
  int residual() const override { return 4; }
  void attach(const Shape& s) override { asked_.head_dim = s.head_dim; }
  int coded(KvSide side, int tokens) const override {
    const int due = RowCodec::coded(side, tokens);
    return side == KvSide::value ? due : keys_ ? due - due % 3 : 0;
  }
  std::vector<std::byte> encode(KvSide side, View<const float, 2> rows) const override {
    asked_.tokens[side == KvSide::value].push_back(rows.extent[0]);
    std::vector<std::byte> out;
    for (std::int64_t t = 0; t < rows.extent[0]; ++t) {
      const float size = mean(&rows(t, 0), rows.extent[1]);
      const auto* bytes = reinterpret_cast<const std::byte*>(&size);
      out.insert(out.end(), bytes, bytes + sizeof size);
      for (std::int64_t d = 0; d < rows.extent[1]; ++d) {
        if (d % 8 == 0) out.emplace_back();
        if (rows(t, d) < 0) out.back() |= std::byte{1} << d % 8;
      }
    }
    return out;
  }
  void decode(KvSide, const std::vector<std::byte>& codes, View<float, 2> rows) const override {
    const std::byte* at = codes.data();
    for (std::int64_t t = 0; t < rows.extent[0]; ++t) {
      float size;
      std::memcpy(&size, at, sizeof size);
      at += sizeof size;
      for (std::int64_t d = 0; d < rows.extent[1]; ++d)
        rows(t, d) = std::to_integer<int>(at[d / 8] >> d % 8 & std::byte{1}) ? -size : size;
      at += rows.extent[1] / 8;
    }
  }
  static float mean(const float* x, std::int64_t n) {
    float sum = 0;
    for (std::int64_t d = 0; d < n; ++d) sum += std::abs(x[d]);
    return sum / static_cast<float>(n);
  }

 private:
  Asked& asked_;
  bool keys_;  // else they stay as they are
};

Instance<Codec> instance(Codec* made) {
  return Instance<Codec>(made, PluginDeleter{nullptr, [](void* p) { delete static_cast<Codec*>(p); }});
}

std::shared_ptr<const Model> tiny() {
  static const auto model = load_model(*open_checkpoint(test::golden("tiny/llama-gqa3")), DType::f32, "tiny");
  return model;
}

std::shared_ptr<Policy> signed_full(Asked& asked) { return row_coded(compose({}), instance(new Signs(asked))); }

struct Run {
  explicit Run(std::shared_ptr<Policy> policy, int slots = 1, int budget = 0) {
    EngineOptions o;
    if (budget > 0) o.budget = {BudgetAmount::tokens, static_cast<double>(budget)};
    o.max_tokens = 64, o.page_size = 8, o.slots = slots;
    engine = std::make_unique<Engine>(tiny(), std::move(policy), o);
  }
  int open(int tokens, int seed) {
    const int slot = engine->open();
    prompt(slot, tokens, seed);
    return slot;
  }
  void prompt(int slot, int tokens, int seed) {
    std::vector<int> ids;
    for (int t = 0; t < tokens; ++t) ids.push_back((seed * 31 + t * t * 7) % 300);
    logits.resize(static_cast<std::size_t>(tiny()->config.vocab));
    const Fit fit = engine->prefill(slot, ids, true, View<float, 2>::dense(logits.data(), {1, tiny()->config.vocab}));
    REQUIRE(fit == Fit::ok);
  }
  void step(const std::vector<std::int32_t>& slots) {
    const std::vector<int> tokens(slots.size(), 5);
    stepped.resize(slots.size() * static_cast<std::size_t>(tiny()->config.vocab));
    const Fit fit =
        engine->step(slots, tokens, View<float, 2>::dense(stepped.data(), {std::ssize(slots), tiny()->config.vocab}));
    REQUIRE(fit == Fit::ok);
  }
  const std::vector<float>& last() const { return stepped; }  // logits of the latest step
  // Of layer 0, whose keys and values follow from the text alone.
  Rows rows(int slot, int head, KvSide side) const { return test::stored_rows(engine->store(), 0, slot, head, side); }
  std::unique_ptr<Engine> engine;
  std::vector<float> logits, stepped;
};

// Whether the first `coded` tokens are what their signs give back, and the others what the model made.
bool holds(const Run& run, const Run& plain, int slot, std::size_t keys, std::size_t values) {
  bool all = true;
  for (int head = 0; head < tiny()->config.kv_heads; ++head)
    for (const KvSide side : {KvSide::key, KvSide::value}) {
      const Rows got = run.rows(slot, head, side);
      Rows wanted = plain.rows(slot, head, side);
      for (std::size_t t = 0; t < (side == KvSide::key ? keys : values); ++t) {
        const float size = Signs::mean(wanted[t].data(), static_cast<std::int64_t>(wanted[t].size()));
        for (float& x : wanted[t]) x = x < 0 ? -size : size;
      }
      all = all && got == wanted;
    }
  return all;
}

}  // namespace

TEST_CASE("row codec: attention sees what its codes give back, behind the prompt and behind each step") {
  Asked asked;
  Run run(signed_full(asked)), plain(compose({}));
  CHECK(asked.head_dim == 16);
  const int slot = run.open(20, 1);
  REQUIRE(plain.open(20, 1) == slot);
  CHECK(run.logits == plain.logits);  // the prompt's own attention is exact
  CHECK(holds(run, plain, slot, 15, 16));
  for (int i = 1; i <= 5; ++i) {
    run.step({slot}), plain.step({slot});
    CAPTURE(i);
    CHECK(holds(run, plain, slot, static_cast<std::size_t>(16 + i - (16 + i) % 3), static_cast<std::size_t>(16 + i)));
  }
  run.prompt(slot, 9, 2), plain.prompt(slot, 9, 2);
  CHECK(holds(run, plain, slot, 30, 30));
  CHECK(run.logits != plain.logits);  // it reads the codes of the first prompt
  // Each token becomes a code once, and those of a call do so together.
  const std::size_t heads = static_cast<std::size_t>(tiny()->config.kv_heads * tiny()->config.layers);
  std::int64_t sum[2] = {};
  for (int side : {0, 1})
    for (const std::int64_t n : asked.tokens[side]) sum[side] += n;
  CHECK(sum[0] == static_cast<std::int64_t>(30 * heads));
  CHECK(sum[1] == static_cast<std::int64_t>(30 * heads));
  CHECK(asked.tokens[0].size() == 4 * heads);
  CHECK(asked.tokens[1].size() == 7 * heads);
  run.engine->store().check_invariants();
}

TEST_CASE("row codec: sequences of different lengths share a step") {
  Asked asked;
  Run run(signed_full(asked), 2), plain(compose({}), 2);
  for (Run* r : {&run, &plain}) {
    REQUIRE(r->open(3, 1) == 0);
    REQUIRE(r->open(17, 2) == 1);
    for (int i = 0; i < 4; ++i) r->step({0, 1});
    r->step({1});
  }
  CHECK(holds(run, plain, 0, 3, 3));
  CHECK(holds(run, plain, 1, 18, 18));
}

TEST_CASE("row codec: a step takes no more rows than become codes in it") {
  struct Watched final : ForwardingPolicy {
    using ForwardingPolicy::ForwardingPolicy;
    void observe(const LayerStep& step, Edits& edits, Stream s) override {
      ForwardingPolicy::observe(step, edits, s);
      for (const Edit& e : edits.all()) {
        std::vector<int>& to = rows[e.side == KvSide::value];
        if (step.layer == 0) to.push_back(static_cast<int>(e.rows.extent[2]));
        CHECK(e.range.count(0, 1) == e.rows.extent[2]);
        CHECK(e.range.first(0, 1) == (e.side == KvSide::key ? step.position[0] - 5 - 2 : step.position[0] - 5));
      }
    }
    std::vector<int> rows[2];
  };
  Asked asked;
  const auto watched = std::make_shared<Watched>(signed_full(asked));
  Run run(watched);
  const int slot = run.open(22, 1);  // 18 keys and values are codes
  for (int i = 0; i < 6; ++i) run.step({slot});
  CHECK(watched->rows[0] == std::vector<int>{3, 3});
  CHECK(watched->rows[1] == std::vector<int>{1, 1, 1, 1, 1, 1});
}

TEST_CASE("row codec: pages on the host hold what its codes give back, and steps see the same") {
  Asked asked;
  Run run(signed_full(asked));
  Composition parts;
  parts.host = true;
  parts.resident_tokens = GENERATE(0, 8, 24);
  CAPTURE(parts.resident_tokens);
  Run below(row_coded(compose(std::move(parts)), instance(new Signs(asked))));
  std::vector<float> logits[2];
  for (Run* r : {&run, &below}) {
    const int slot = r->open(29, 1);
    for (int i = 0; i < 12; ++i) r->step({slot});
    r->prompt(slot, 13, 2);
    for (int i = 0; i < 5; ++i) r->step({slot});
    logits[r == &below] = r->last();
    r->engine->store().check_invariants();
  }
  CHECK(logits[0] == logits[1]);
  CHECK(below.engine->store().page_bytes(Tier::host) > 0);
  CHECK(below.engine->store().page_bytes(Tier::device) < run.engine->store().page_bytes(Tier::device));
}

// Each step reads a head's first page. The device keeps two pages, and those of tokens that are no codes yet.
TEST_CASE("row codec: pages of a selector that wait for their codes stay on the device") {
  struct First final : Selector {
    void select(const LayerStep& step, PageList out, Stream) override {
      for (int row = 0; row < step.rows(); ++row)
        for (int h = 0; h < step.kv_heads(); ++h) out.count(row, h) = 1, out.index(row, h, 0) = 0;
    }
  };
  Asked asked;
  const bool keys = GENERATE(true, false);
  CAPTURE(keys);
  const auto made = [&](bool host) {
    Composition parts;
    parts.host = host;
    parts.selector =
        Instance<Selector>(new First, PluginDeleter{nullptr, [](void* p) { delete static_cast<Selector*>(p); }});
    return row_coded(compose(std::move(parts)), instance(new Signs(asked, keys)));
  };
  {  // a prompt's end, before the first step: with both sides 21 of 27 tokens are codes
    Run ends(made(true), 1, 8);
    REQUIRE(ends.open(27, 3) == 0);
    for (int head = 0; head < tiny()->config.kv_heads; ++head)
      for (const int page : {0, 1, 2, 3}) {
        CAPTURE(head, page);
        CHECK(test::on(ends.engine->store(), Tier::device, 0, 0, head, page) == (page >= 2));
      }
  }
  Run run(made(false), 2, 16), below(made(true), 2, 16);
  for (Run* r : {&run, &below}) {
    REQUIRE(r->open(29, 1) == 0);
    REQUIRE(r->open(12, 2) == 1);
  }
  for (int i = 0; i < 20; ++i) {
    CAPTURE(i);
    run.step({0, 1}), below.step({0, 1});
    CHECK(run.last() == below.last());
  }
  for (const int slot : {0, 1})
    for (int head = 0; head < tiny()->config.kv_heads; ++head) {
      CHECK(test::on(below.engine->store(), Tier::host, 0, slot, head, 1));
      CHECK_FALSE(test::on(below.engine->store(), Tier::device, 0, slot, head, 1));
      CHECK_FALSE(test::on(run.engine->store(), Tier::host, 0, slot, head, 1));
    }
  for (Run* r : {&run, &below}) {
    r->prompt(1, 11, 3);
    r->step({0, 1});
  }
  CHECK(run.logits == below.logits);
  CHECK(run.last() == below.last());
  below.engine->store().check_invariants();
}

TEST_CASE("row codec: it is functional, and no graph holds its steps") {
  Asked asked;
  const Needs needs = signed_full(asked)->needs();
  CHECK(needs.functional());
  CHECK_FALSE(needs.capturable());
  CHECK_FALSE(needs.chunked_prompts());
  CHECK(signed_full(asked)->codecs() == std::vector<CodecSpec>{CodecSpec{}});
  const auto signs = instance(new Signs(asked));
  CHECK(codes_rows(*signs));
}

TEST_CASE("a rewrite in a step is refused where a graph might hold the step") {
  struct Rewrites final : Policy {
    bool promises = true;
    Needs needs() const override { return Needs{}.functional(true).capturable(promises); }
    void observe(const LayerStep& step, Edits& edits, Stream s) override {
      const auto rows = step.scratch<float>("rows", {step.rows(), step.kv_heads(), step.max_length, 16});
      ops::read_rows(step.keys, rows, s);
      edits.rewrite(KvSide::key, rows);
    }
  };
  const auto policy = std::make_shared<Rewrites>();
  for (const bool promises : {true, false}) {
    policy->promises = promises;
    Run run(policy);
    const int slot = run.open(20, 1);
    if (promises)
      CHECK_THROWS_WITH(run.step({slot}), Catch::Contains("observe: got a rewrite, wanted it in prefill()"));
    else
      run.step({slot});
  }
}

namespace {

// Promises that tokens stay.
struct Keeper : Policy, KeepsTokens {
  void (*first)(Edits&) = nullptr;  // of select
  void (*edit)(Edits&) = nullptr;   // of observe
  Needs needs() const override { return {}; }
  void select(const LayerStep&, Edits& edits, Stream) override {
    if (first) first(edits);
  }
  void observe(const LayerStep&, Edits& edits, Stream) override {
    if (edit) edit(edits);
  }
};
struct Plain final : Codec {
  CodecSpec spec() const override { return {{4, CodeKind::integer, CodeAxis::channel, 8}, {4}}; }
  int residual() const override { return 8; }
};
struct Free final : Policy {
  Needs needs() const override { return {}; }
};

}  // namespace

TEST_CASE("a policy that promises to keep its tokens takes codecs of old pages, and is held to it") {
  const Plain codec;
  CHECK(tokens_stay(Keeper()));
  CHECK_FALSE(tokens_stay(Free()));
  CHECK_THROWS_WITH(coded(std::make_shared<Free>(), &codec, nullptr, "mine"),
                    Catch::Contains("mine: got a codec with a residual or with groups beside a policy plugin"));
  const auto codes = [](const Run& run, int slot) {
    const std::vector<std::int32_t> slots{slot};
    return run.engine->store().view(1, slots).lower_pages(slot, 0);
  };
  const auto keeper = std::make_shared<Keeper>();
  Run run(coded(keeper, &codec, nullptr, "mine"));
  const int slot = run.open(33, 1);
  CHECK(codes(run, slot) == 3);
  for (int i = 0; i < 7; ++i) run.step({slot});
  CHECK(codes(run, slot) == 4);
  keeper->edit = [](Edits& edits) { edits.evict_surplus({}); };
  CHECK_THROWS_WITH(run.step({slot}), Catch::Contains("got an edit of a policy that promises KeepsTokens"));
  Asked asked;
  Run rows(row_coded(keeper, instance(new Signs(asked))));
  const int other = rows.open(20, 1);
  CHECK_THROWS_WITH(rows.step({other}), Catch::Contains("got an edit of a policy that promises KeepsTokens"));
  keeper->edit = nullptr, keeper->first = [](Edits& edits) { edits.evict_surplus({}); };
  Run begins(row_coded(keeper, instance(new Signs(asked))));
  const int last = begins.open(20, 1);
  CHECK_THROWS_WITH(begins.step({last}), Catch::Contains("got an edit of a policy that promises KeepsTokens"));
}
