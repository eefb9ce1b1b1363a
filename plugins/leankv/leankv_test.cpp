#include <kvlab/ops.hpp>

#include <array>
#include <catch2/catch.hpp>
#include <map>
#include <memory>
#include <numeric>

#include "ops/score/reference.hpp"
#include "plugin/loader.hpp"
#include "plugin/parameters.hpp"
#include "plugin/registry.hpp"
#include "support/store_fixture.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

using Ints = std::vector<std::int32_t>;

// A sequence of two layers with two KV heads of two query heads each. Head 0 of layer 0 gets scores of the test's. All
// tokens of the other heads are important.
class Sequence {
 public:
  explicit Sequence(std::map<std::string, ParamValue> given, int max_tokens = 64)
      : info_(registry_.require(Role::policy, "leankv")), policy_(create<Policy>(info_, resolve(info_, given))) {
    StoreOptions& o = fixture_.options;
    o.shape.head_dim = 16;
    o.shape.max_tokens = max_tokens;
    o.codecs = policy_->codecs();
    o.token_state = policy_->needs().token_state();
    o.all_layers = policy_->needs().all_layers();
    store_ = std::make_unique<CpuStore>(o);
    policy_->attach(o.shape, {}, store_->workspace());
    slot_ = store_->open();
  }

  // sums: of each token, over all queries since it. With `queries` they are the votes of these.
  void prefill(const std::vector<float>& sums, const View<const float, 4>& queries = {}) {
    const int n = static_cast<int>(sums.size());
    REQUIRE(fixture_.fill(*store_, slot_, n) == Fit::ok);
    const bool last = true;
    for (int layer = 0; layer < 2; ++layer) {
      LayerPrefill kv;
      kv.last = &last;
      const auto mass = begin(kv, layer, sums);
      add_mass(kv);
      kv.window_queries = queries;
      Edits edits(layer);
      policy_->prefill(kv, edits, Stream::cpu());
      REQUIRE(store_->apply(edits.all(), {slot_}).fit == Fit::ok);
    }
    store_->check_invariants();
  }

  // Scores a prompt by its last queries. Returns the significance of head 0's tokens.
  std::vector<float> scored(int n, const View<const float, 4>& queries) {
    REQUIRE(fixture_.fill(*store_, slot_, n) == Fit::ok);
    const bool last = true;
    LayerPrefill kv;
    kv.last = &last;
    const auto mass = begin(kv, 0, {});
    kv.window_queries = queries;
    Edits edits(0);
    policy_->prefill(kv, edits, Stream::cpu());
    const Scores out = kv.kv_head_scores("test");
    ops::read_state(kv.state("significance"), out, Stream::cpu());
    return {&out(0, 0, 0), &out(0, 0, 0) + n};
  }
  // The plain votes of head 0's two query heads.
  std::vector<float> plain_votes(int n, const View<const float, 4>& queries, std::int32_t seen, int query_head) {
    const PagedKv kv = store_->view(0, slots_);
    std::vector<float> out(static_cast<std::size_t>(4 * n));
    const auto votes = Scores::dense(out.data(), {1, 4, n});
    ops::window_votes_reference(queries, &seen, kv, votes);
    return {&votes(0, query_head, 0), &votes(0, query_head, 0) + n};
  }

  // The new token gets this score, and no other gets any.
  void step(float score) {
    REQUIRE(fixture_.fill(*store_, slot_, 1, true) == Fit::ok);
    for (int layer = 0; layer < 2; ++layer) {
      LayerStep kv;
      std::vector<float> scores(static_cast<std::size_t>(store_->length(layer, slot_, 0)));
      scores.back() = score;
      const auto mass = begin(kv, layer, scores);
      add_mass(kv);
    }
    const Ints slots{slot_};
    Step all;
    all.shape = &store_->shape(), all.rows = 1, all.slots = slots.data(), all.workspace = &store_->workspace();
    all.state_names = &fixture_.options.token_state;
    all.pages = store_->view_all(slots);
    all.max_length = store_->shape().max_tokens;
    Edits edits;
    policy_->finish_step(all, edits, Stream::cpu());
    REQUIRE(store_->apply(edits.all(), slots).fit == Fit::ok);
    store_->check_invariants();
  }

  void start_again() {
    store_->close(slot_);
    policy_->release(slot_);
    slot_ = store_->open();
  }

  Ints places(int layer = 0, int head = 0) const { return store_->positions_by_place(layer, slot_, head); }
  int lower_pages() const { return store_->view(0, {slot_}).lower_pages(slot_, 0); }

 private:
  void add_mass(const LayerKv& kv) {
    const MassState into = policy_->needs().mass_into();
    ops::add_mass(kv.mass, into.rule, kv.state(into.state), Stream::cpu());
  }
  std::vector<float> begin(LayerKv& kv, int layer, const std::vector<float>& own) {
    slots_ = {slot_}, position_ = {store_->position(slot_)};
    kv.layer = layer;
    kv.shape = &store_->shape();
    pages_ = store_->view(layer, slots_);
    kv.pages = pages_;
    kv.keys = {&pages_, KvSide::key}, kv.values = {&pages_, KvSide::value};
    kv.state_names = &fixture_.options.token_state;
    kv.workspace = &store_->workspace();
    kv.slots = slots_.data(), kv.position = position_.data();
    for (int h = 0; h < 2; ++h) kv.max_length = std::max(kv.max_length, store_->length(layer, slot_, h));
    // The greater score of a group's two query heads counts.
    std::vector<float> mass(static_cast<std::size_t>(4 * kv.max_length), 10.f);
    const auto of = View<float, 3>::dense(mass.data(), {1, 4, kv.max_length});
    for (std::size_t t = 0; layer == 0 && t < own.size(); ++t) of(0, 0, t) = own[t] / 2, of(0, 1, t) = own[t];
    kv.mass = of;
    return mass;
  }

  Registry registry_;
  const PluginInfo& info_;
  Instance<Policy> policy_;
  StoreFixture fixture_;
  std::unique_ptr<CpuStore> store_;
  int slot_ = 0;
  Ints slots_, position_;
  PagedKv pages_;
};

std::map<std::string, ParamValue> with(std::map<std::string, ParamValue> more) {
  more["queries"] = std::string("all");
  return more;
}

Ints counted(int first, int last) {
  Ints out(static_cast<std::size_t>(last - first));
  std::iota(out.begin(), out.end(), first);
  return out;
}

Ints operator+(Ints a, const Ints& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

}  // namespace

// The card's first hand test: 1/100 is the threshold of high tokens, .02/100 that of low ones.
TEST_CASE("leankv: a prompt of 100 tokens is stored high, low or not at all") {
  const auto [unit, low_tokens] = GENERATE(std::pair{"n", 3}, std::pair{"i", 4});
  CAPTURE(unit);
  Sequence s(with({{"unit", std::string(unit)}, {"window", std::int64_t{64}}}), 128);
  std::vector<float> sums(100, 1000.f);
  const auto mean = [&](int t, float x) { sums[static_cast<std::size_t>(t)] = x * static_cast<float>(100 - t); };
  mean(9, .012f);  // high, but low where the threshold is 1/10
  for (const int t : {19, 20, 21}) mean(t, .004f);
  mean(29, .0001f);
  for (const int t : {40, 90}) mean(t, 0);  // of the window
  s.prefill(sums);
  // Three low tokens fill no page of four, so they stay in the high codec.
  if (low_tokens == 3)
    CHECK(s.places() == counted(0, 29) + counted(30, 100));
  else
    CHECK(s.places() == Ints{9, 19, 20, 21} + counted(0, 9) + counted(10, 19) + counted(22, 29) + counted(30, 100));
  CHECK(s.lower_pages() == low_tokens / 4);
  CHECK(s.places(1, 1) == counted(0, 100));
}

TEST_CASE("leankv: a prompt that is not longer than the window stays high, whatever its scores") {
  Sequence s(with({{"window", std::int64_t{16}}}));
  s.prefill(std::vector<float>(16, 0.f));
  CHECK(s.places() == counted(0, 16));
  CHECK(s.lower_pages() == 0);
}

TEST_CASE("leankv: each outcome of a decode step, and a page of low tokens that is full") {
  Sequence s(with({{"window", std::int64_t{4}}}));  // pages of 4 tokens
  std::vector<float> sums(20, 10.f);
  const auto mean = [&](int t, float x) { sums[static_cast<std::size_t>(t)] = x * static_cast<float>(20 - t); };
  for (const int t : {0, 2, 4, 8}) mean(t, .01f);
  mean(6, .00105f);  // .02/20 is .001
  for (const int t : {1, 3}) mean(t, .0001f);
  s.prefill(sums);
  CHECK(s.places() == Ints{0, 2, 4, 6, 5, 7, 8, 9} + counted(10, 20));
  CHECK(s.lower_pages() == 1);

  s.step(0);  // token 8, which the prompt left high, becomes low
  CHECK(s.places() == Ints{0, 2, 4, 6, 8, 7, 5, 9} + counted(10, 21));
  s.step(.1f), s.step(.1f);  // nothing
  CHECK(s.places() == Ints{0, 2, 4, 6, 8, 7, 5, 9} + counted(10, 23));
  s.step(.1f);  // token 20 leaves the window with a mean of 0: it is out, and the last token takes its place
  CHECK(s.places() == Ints{0, 2, 4, 6, 8, 7, 5, 9} + counted(10, 20) + Ints{23, 21, 22});
  // Token 21 has a mean of .1/4. Token 6 has .0147/19, which is below .02/25.
  s.step(.1f);
  CHECK(s.places() == Ints{0, 2, 4, 21, 8, 7, 5, 9} + counted(10, 20) + Ints{23, 24, 22});
  CHECK(s.lower_pages() == 1);
  s.step(0), s.step(0);  // tokens 22 and 23 become low
  CHECK(s.places() == Ints{0, 2, 4, 21, 8, 22, 23, 9} + counted(10, 20) + Ints{5, 24, 7, 25, 26});
  CHECK(s.lower_pages() == 1);
  s.step(0);  // token 24 fills a page
  CHECK(s.places() == Ints{0, 2, 4, 21, 8, 22, 23, 24} + counted(10, 20) + Ints{5, 9, 7, 25, 26, 27});
  CHECK(s.lower_pages() == 2);
  CHECK(s.places(0, 1) == counted(0, 28));
  CHECK(s.places(1, 0) == counted(0, 28));
}

// The paper's algorithm 1: the token that leaves the window decides. The merged rule would take token 8 in the first
// step.
TEST_CASE("leankv: by algorithm 1 the token that leaves the window steps down, or an older one behind it") {
  Sequence s(with({{"window", std::int64_t{4}}, {"rule", std::string("algorithm_1")}}));
  std::vector<float> sums(20, 10.f);
  const auto mean = [&](int t, float x) { sums[static_cast<std::size_t>(t)] = x * static_cast<float>(20 - t); };
  for (const int t : {0, 2, 4, 8}) mean(t, .01f);
  mean(6, .00105f);
  for (const int t : {1, 3}) mean(t, .0001f);
  mean(17, .02f);
  s.prefill(sums);
  CHECK(s.places() == Ints{0, 2, 4, 6, 5, 7, 8, 9} + counted(10, 20));
  s.step(0);  // token 17 has a mean of .06/4, between .02/21 and 1/21: it becomes low
  CHECK(s.places() == Ints{0, 2, 4, 6, 17, 7, 8, 9} + counted(10, 17) + Ints{5, 18, 19, 20});
  s.step(.1f);  // token 18 stays, and token 8, which the prompt left high, becomes low
  CHECK(s.places() == Ints{0, 2, 4, 6, 17, 8, 7, 9} + counted(10, 17) + Ints{5, 18, 19, 20, 21});
  s.step(.1f);  // token 19 stays, and so do all others
  CHECK(s.places() == Ints{0, 2, 4, 6, 17, 8, 7, 9} + counted(10, 17) + Ints{5, 18, 19, 20, 21, 22});
  s.step(.1f);  // token 20 has nothing, so it is out
  CHECK(s.places() == Ints{0, 2, 4, 6, 17, 8, 7, 9} + counted(10, 17) + Ints{5, 18, 19, 23, 21, 22});
  s.step(.1f);  // token 21 has .1/4 and takes the place of token 6, whose mean is .0147/19
  CHECK(s.places() == Ints{0, 2, 4, 21, 17, 8, 7, 9} + counted(10, 17) + Ints{5, 18, 19, 23, 24, 22});
  CHECK(s.places(0, 1) == counted(0, 25));
}

// Queries of zeros attend evenly. Of 64 queries, each of the first 36 tokens gets 1/37 + ... + 1/100 = 1.013. The 101
// steps since token 0 give a mean of 1.013/101, and the 65 queries that count one of 1.013/65. The threshold
// is 1.2/101.
TEST_CASE("leankv: a mean in decode steps is over all steps since the token, or over those that counted") {
  const bool all_steps = GENERATE(true, false);
  CAPTURE(all_steps);
  Sequence s({{"high_from", 1.2}, {"low_from", 0.}, {"age", std::string(all_steps ? "all_steps" : "counted")}}, 128);
  const std::vector<float> zeros(std::size_t{4} * 64 * 16);
  s.prefill(std::vector<float>(100), View<const float, 4>::dense(zeros.data(), {1, 4, 64, 16}));
  CHECK(s.places() == counted(0, 100));
  CHECK(s.lower_pages() == 0);
  for (int i = 0; i < 4; ++i) s.step(0);  // one by one tokens 0 to 3 become low, and fill a page
  CHECK(s.places() == counted(0, 104));
  CHECK(s.lower_pages() == (all_steps ? 1 : 0));
}

// Head 0 alone has 6 high and 8 low tokens outside of the window, head 1 has 16 and none. The means are 11 and 4.
TEST_CASE("leankv: without per_head_dynamics the heads of a layer keep the same numbers") {
  const bool per_head = GENERATE(true, false);
  CAPTURE(per_head);
  Sequence s(with({{"window", std::int64_t{4}}, {"per_head_dynamics", per_head}}));
  std::vector<float> sums(20, 10.f);
  for (int t = 0; t < 10; ++t)
    sums[static_cast<std::size_t>(t)] =
        (t < 8 ? .01f - .001f * static_cast<float>(t) : .0002f) * static_cast<float>(20 - t);
  s.prefill(sums);
  if (per_head) {
    CHECK(s.places() == counted(0, 8) + counted(10, 20));
    CHECK(s.places(0, 1) == counted(0, 20));
    s.step(0);
    CHECK(s.places() == counted(0, 8) + counted(10, 21));
  } else {
    CHECK(s.places() == counted(5, 9) + counted(0, 5) + counted(10, 20));
    CHECK(s.places(0, 1) == counted(1, 20));  // its tokens 1 to 4 are low: they have the same sum over more queries
    CHECK(s.lower_pages() == 1);
    s.step(0);  // token 4 alone would become low, but the mean of both heads' lowest is far above 1/21
    CHECK(s.places() == counted(5, 9) + counted(0, 5) + counted(10, 21));
  }
  CHECK(s.places(1, 0) == counted(0, 21));
}

TEST_CASE("leankv: the greatest mean of a prompt's query heads, or the mean of their greatest scores") {
  const bool of_means = GENERATE(true, false);
  CAPTURE(of_means);
  Sequence s({{"greatest", std::string(of_means ? "mean" : "score")}});
  constexpr int n = 12, window = 5, dim = 16;
  std::vector<float> q(std::size_t{4} * window * dim);
  for (std::size_t i = 0; i < q.size(); ++i) q[i] = static_cast<float>(i * 2654435761u % 97) / 48 - 1;
  const auto queries = View<const float, 4>::dense(q.data(), {1, 4, window, dim});
  const std::vector<float> got = s.scored(n, queries);
  std::vector<float> wanted(n);
  const auto add_greatest = [&](const View<const float, 4>& some, int seen) {
    const auto a = s.plain_votes(n, some, seen, 0), b = s.plain_votes(n, some, seen, 1);
    for (std::size_t t = 0; t < n; ++t) wanted[t] += std::max(a[t], b[t]);
  };
  if (of_means) add_greatest(queries, n);
  for (int i = 0; !of_means && i < window; ++i) {  // a window of one query
    View<const float, 4> one = queries;
    one.data += i * one.stride[2];
    one.extent[2] = 1;
    add_greatest(one, n - window + 1 + i);
  }
  for (std::size_t t = 0; t < n; ++t) {
    CAPTURE(t);
    CHECK(got[t] == Approx(wanted[t]).margin(1e-5));
  }
}

TEST_CASE("leankv: a fresh sequence has no low tokens of the one before") {
  Sequence s(with({{"window", std::int64_t{4}}}));
  std::vector<float> sums(20, 10.f);
  sums[6] = .1f, sums[7] = .1f;
  s.prefill(sums);
  s.step(0);  // of two low tokens, one waits at the front of the first page
  CHECK(s.places()[0] == 6);
  s.start_again();
  s.prefill(sums);
  CHECK(s.places() == counted(0, 20));
  s.step(0);
  CHECK(s.places()[0] == 6);
  CHECK(s.places()[6] == 0);
}

TEST_CASE("leankv: without token differentiation nothing is low, and what would be low is high") {
  Sequence s(with({{"window", std::int64_t{4}}, {"token_differentiation", false}}));
  std::vector<float> sums(20, .1f);
  sums[3] = 0;
  s.prefill(sums);
  CHECK(s.places() == counted(0, 3) + counted(4, 20));
  for (int i = 0; i < 4; ++i) s.step(0);
  CHECK(s.places() == counted(0, 3) + counted(4, 20) + Ints{23, 21, 22});
  CHECK(s.lower_pages() == 0);
}

TEST_CASE("leankv: codecs, and codecs and thresholds that are refused") {
  Registry registry;
  const PluginInfo& info = registry.require(Role::policy, "leankv");
  const auto codecs = [&](const std::map<std::string, ParamValue>& given) {
    return create<Policy>(info, resolve(info, given))->codecs();
  };
  CHECK(codecs({}) == std::vector<CodecSpec>{{{8}, {4}}, {{4}, {2}}});
  CHECK(codecs({{"key_value_differentiation", false}}) == std::vector<CodecSpec>{{{8}, {8}}, {{4}, {4}}});
  CHECK(codecs({{"high", std::string("k4v8")}, {"low", std::string("k2v4")}}) ==
        std::vector<CodecSpec>{{{4}, {8}}, {{2}, {4}}});
  using Bits = std::array<const char*, 2>;  // high, low
  const auto given = [](const Bits& b) {
    return std::map<std::string, ParamValue>{{"high", std::string(b[0])}, {"low", std::string(b[1])}};
  };
  for (const Bits& bits : {Bits{"k4v2", "k8v8"}, Bits{"k4v4", "k8v4"}, Bits{"k8v4", "k8v8"}, Bits{"k4v2", "k2v4"}}) {
    CAPTURE(bits[0], bits[1]);
    CHECK_THROWS_WITH(codecs(given(bits)),
                      Catch::Contains(std::string("got low: ") + bits[1] + " beside high: " + bits[0]));
    auto all_high = given(bits);
    all_high["token_differentiation"] = false;
    CHECK(codecs(all_high).size() == 2);
  }
  CHECK(codecs(given({"k4v4", "k4v4"})) == std::vector<CodecSpec>{{{4}, {4}}, {{4}, {4}}});
  CHECK_THROWS_WITH(codecs({{"low_from", 1.5}}), Catch::Contains("got low_from 1.5"));
  CHECK_THROWS_WITH(codecs(with({{"greatest", std::string("score")}})), Catch::Contains("wanted queries: last_64"));
}
