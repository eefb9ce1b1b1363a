// A policy that chooses what each chunk of a prompt attends to.
#include <kvlab/prompt_lists.hpp>

#include <catch2/catch.hpp>
#include <functional>
#include <memory>

#include "engine/engine.hpp"
#include "model/bundled.hpp"
#include "model/synthetic.hpp"

using namespace kvlab;

namespace {

constexpr int tokens = 90;

std::shared_ptr<const Model> model() {
  static const auto loaded = load_model(*open_model("synthetic/tiny", "", ""), DType::f32, "tiny");
  return loaded;
}

// Notes each chunk of layer 0, and edits as a test says.
struct Chooses final : Policy, ChoosesInPrompts {
  using Edit = std::function<void(const LayerPrefill&, Edits&)>;

  int chunk = 16;
  Edit edit;
  Needs wants;
  std::vector<PromptMask> masks;
  std::vector<int> ends;       // of chunks
  std::vector<bool> with_lse;  // of the chunks, behind their attention

  Needs needs() const override { return wants; }
  int prompt_chunk() const override { return chunk; }
  std::vector<PromptMask> prompt_masks() const override { return masks; }
  void select_chunk(const LayerPrefill& kv, Edits& edits, Stream) override {
    if (kv.layer == 0) ends.push_back(kv.position[0]);
    REQUIRE(kv.pages.tokens(0, 0) == kv.position[0]);
    REQUIRE(!kv.lse);
    if (edit) edit(kv, edits);
  }
  void prefill(const LayerPrefill& kv, Edits&, Stream) override {
    if (kv.layer == 0) with_lse.push_back(static_cast<bool>(kv.lse));
  }
};

std::vector<float> run(const std::shared_ptr<Policy>& policy, int prefill_chunk = 0, EngineOptions o = {}) {
  o.max_tokens = tokens;
  o.page_size = 8;
  o.prefill_chunk = prefill_chunk;
  Engine engine(model(), policy, o);
  std::vector<int> text(tokens - 1);
  for (std::size_t t = 0; t < text.size(); ++t) text[t] = (static_cast<int>(t) * 7 + 3) % model()->config.vocab;
  std::vector<float> logits(static_cast<std::size_t>(model()->config.vocab));
  const Fit fit =
      engine.prefill(engine.open(), text, true, View<float, 2>::dense(logits.data(), {1, model()->config.vocab}));
  REQUIRE(fit == Fit::ok);  // what it throws is the test's
  engine.store().check_invariants();
  return logits;
}

// Every `skip`-th page, and the newest ones; 1 = all.
PageList pages(const LayerPrefill& kv, int skip) {
  const auto list = kv.list<PageList>("pages", kv.shape->max_pages());
  for (int h = 0; h < kv.kv_heads(); ++h) {
    int count = 0;
    for (int p = 0; p < kv.pages.pages(0, h); ++p)
      if (p % skip == 0 || p + 3 > kv.pages.pages(0, h)) list.index(0, h, count++) = p;
    list.count(0, h) = count;
  }
  return list;
}

std::vector<float> run(const Chooses::Edit& edit) {
  auto policy = std::make_shared<Chooses>();
  policy->edit = edit;
  return run(policy);
}

double apart(const std::vector<float>& a, const std::vector<float>& b) {
  double most = 0;
  for (std::size_t i = 0; i < a.size(); ++i) most = std::max(most, std::abs(double{a[i]} - double{b[i]}));
  return most;
}

}  // namespace

TEST_CASE("a prompt comes in the chunks of a policy that chooses in it, whatever the run says") {
  for (const int chunk : {0, 7, 1000}) {
    auto policy = std::make_shared<Chooses>();
    run(policy, chunk);
    CHECK(policy->ends == std::vector<int>{16, 32, 48, 64, 80, 89});
  }
  auto none = std::make_shared<Chooses>();
  none->chunk = 0;
  run(none);
  CHECK(none->ends.empty());
}

TEST_CASE("a list of all pages and no list give what full attention gives, and fewer pages do not") {
  auto plain = std::make_shared<Chooses>();
  plain->chunk = 0;
  const auto full = run(plain), without = run(Chooses::Edit());
  CHECK(apart(full, without) < 1e-4);
  auto listed = std::make_shared<Chooses>();
  listed->edit = [](const LayerPrefill& kv, Edits& e) {
    if (kv.position[0] > 16) e.attend(pages(kv, 1));
  };
  CHECK(run(listed) == without);
  CHECK(std::vector<bool>(listed->with_lse.begin() + 1, listed->with_lse.end()) == std::vector<bool>(5, true));
  const auto fewer = run([](const LayerPrefill& kv, Edits& e) { e.attend(pages(kv, 3)); });
  CHECK(apart(full, fewer) > 1e-3);
  const auto near = run([](const LayerPrefill&, Edits& e) { e.clamp_distance(5); });
  CHECK(apart(full, near) > 1e-3);
  CHECK(run([](const LayerPrefill&, Edits& e) { e.clamp_distance(tokens); }) == without);
}

TEST_CASE("what a choice in a prompt cannot be is refused") {
  const auto refused = [](const Chooses::Edit& edit, const std::string& text) {
    CHECK_THROWS_WITH(run(edit), Catch::Contains(text));
  };
  const std::string edits = "select_chunk: got an edit that is neither its one list of pages";
  refused(
      [](const LayerPrefill& kv, Edits& e) {
        e.attend(pages(kv, 1));
        e.attend(pages(kv, 1));
      },
      edits);
  refused([](const LayerPrefill& kv, Edits& e) { e.attend_resident(pages(kv, 1)); }, edits);
  refused([](const LayerPrefill& kv, Edits& e) { e.recall(pages(kv, 1)); }, edits);  // not for this attention
  refused([](const LayerPrefill& kv, Edits& e) { e.attend(kv.list<TokenList>("tokens", 4)); }, edits);
  refused([](const LayerPrefill&, Edits& e) { e.clamp_distance(0); }, "two distances or one below 1");
  refused(
      [](const LayerPrefill&, Edits& e) {
        e.clamp_distance(3);
        e.clamp_distance(4);
      },
      "two distances or one below 1");
  refused([](const LayerPrefill&, Edits& e) { e.rewrite(KvSide::key, {}); }, "got a rewrite");
  const auto needs = [](const Needs& n) {
    auto policy = std::make_shared<Chooses>();
    policy->wants = n;
    CHECK_THROWS_WITH(run(policy), Catch::Contains("got a policy that chooses what prompts attend to, with the mass"));
  };
  needs(Needs{}.mass(Mass::all));
  needs(Needs{}.rope(RopeRegime::re_rotate));
  needs(Needs{}.finish_prompt(true));
  auto masked = std::make_shared<Chooses>();
  const ModelConfig& c = model()->config;
  masked->masks.assign(static_cast<std::size_t>(c.layers * c.kv_heads), PromptMask{1, 4});
  CHECK_THROWS_WITH(run(masked), Catch::Contains("got masks of prompts of a policy that chooses what they attend to"));
}
