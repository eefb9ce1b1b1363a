// A bias on logits that a policy gives.
#include <catch2/catch.hpp>

#include <cmath>
#include <limits>

#include "engine/engine.hpp"
#include "model/checkpoint.hpp"
#include "support/golden.hpp"

using namespace kvlab;
using namespace kvlab::test;

namespace {

struct Biased final : Policy {
  enum Wrong { nothing, twice, with_mass, with_pages, with_logits, too_short, in_observe };
  explicit Biased(Wrong w, std::vector<float> of_places = {}, bool list = false)
      : wrong(w), listed(list), bias_(std::move(of_places)) {}
  Needs needs() const override { return Needs{}.mass(wrong == with_mass ? Mass::decode : Mass::none); }
  void attach(const Shape& s, const BudgetAmount&, Workspace& w) override {
    room_ = static_cast<float*>(w.room("logits", static_cast<std::size_t>(s.query_heads * s.max_tokens) * 4));
  }
  void prefill(const LayerPrefill&, Edits&, Stream) override {}
  void select(const LayerStep& step, Edits& edits, Stream) override {
    if (bias_.empty() && wrong == nothing) return;
    Scores bias = step.query_head_scores("bias");
    for (std::int64_t h = 0; h < bias.extent[1]; ++h)
      for (std::int64_t t = 0; t < bias.extent[2]; ++t)
        bias(0, h, t) = t < std::ssize(bias_) ? bias_[static_cast<std::size_t>(t)] : 0.f;
    if (wrong == too_short) --bias.extent[2];
    for (int i = 0; i < (wrong == twice ? 2 : wrong == in_observe ? 0 : 1); ++i) edits.bias_logits(bias);
    if (wrong == with_pages) {
      const auto pages = step.list<PageList>("pages", step.max_pages);
      for (int h = 0; h < step.kv_heads(); ++h) pages.index(0, h, 0) = 0, pages.count(0, h) = 1;
      edits.attend(pages);
    }
    if (wrong == with_logits)
      edits.keep_logits({View<float, 4>::dense(room_, {1, 1, step.max_length, step.shape->group()})});
    if (!listed) return;
    const auto tokens = step.list<TokenList>("tokens", step.max_length);
    for (int h = 0; h < step.kv_heads(); ++h) {
      for (int t = 0; t < step.pages.tokens(0, h); ++t) tokens.index(0, h, t) = t;
      tokens.count(0, h) = step.pages.tokens(0, h);
    }
    edits.attend(tokens);
  }
  void observe(const LayerStep& step, Edits& edits, Stream) override {
    if (wrong == in_observe) edits.bias_logits(step.query_head_scores("bias"));
    if (step.layer > 0) return;
    const View<const float, 3> out = step.output.f32();
    for (std::int64_t h = 0; h < out.extent[1]; ++h)
      for (std::int64_t d = 0; d < out.extent[2]; ++d) outputs.push_back(out(0, h, d));
  }
  Wrong wrong;
  bool listed;
  std::vector<float> outputs;

 private:
  std::vector<float> bias_;
  float* room_ = nullptr;
};

// The outputs of the first layer's attention to six tokens.
std::vector<float> outputs(Biased::Wrong wrong, std::vector<float> bias = {}, bool listed = false) {
  static const std::shared_ptr<const Model> model =
      load_model(*open_checkpoint(golden("tiny/llama-gqa3")), DType::f32, "tiny");
  const auto policy = std::make_shared<Biased>(wrong, std::move(bias), listed);
  EngineOptions o;
  o.max_tokens = 64;
  Engine engine(model, policy, o);
  const int slot = engine.open(), token = 8;
  REQUIRE(engine.prefill(slot, std::vector<int>{1, 2, 3, 4, 5}, true, {}) == Fit::ok);
  const Fit fit = engine.step({slot}, {&token, 1}, {});  // it may throw
  REQUIRE(fit == Fit::ok);
  return policy->outputs;
}

constexpr float none = -std::numeric_limits<float>::infinity();

}  // namespace

TEST_CASE("attention of steps adds a policy's bias to its logits") {
  const std::vector<float> plain = outputs(Biased::nothing),
                           only = outputs(Biased::nothing, {none, 0, none, none, none, none}),
                           rest = outputs(Biased::nothing, {0, none, 0, 0, 0, 0});
  REQUIRE(plain.size() == only.size());
  for (const bool listed : {false, true}) {
    CAPTURE(listed);
    const std::vector<float> same = outputs(Biased::nothing, {2, 2, 2, 2, 2, 2}, listed),
                             much = outputs(Biased::nothing, {0, 50, 0, 0, 0, 0}, listed);
    for (std::size_t i = 0; i < plain.size(); ++i) {
      CHECK(same[i] == Approx(plain[i]).margin(1e-5));  // one number for all tokens changes nothing
      CHECK(much[i] == Approx(only[i]).margin(1e-5));
    }
  }
  // Attention over all lies between that to the token and that to the others.
  double differs = 0;
  for (std::size_t i = 0; i < plain.size(); ++i) {
    CHECK(plain[i] >= std::min(only[i], rest[i]) - 1e-5f);
    CHECK(plain[i] <= std::max(only[i], rest[i]) + 1e-5f);
    differs = std::max(differs, std::abs(double{only[i]} - rest[i]));
  }
  CHECK(differs > 1e-3);
}

TEST_CASE("a bias is refused twice, beside pages, with mass or logits, too short, and outside of select") {
  for (const auto wrong : {Biased::twice, Biased::with_mass, Biased::with_pages, Biased::with_logits})
    CHECK_THROWS_WITH(outputs(wrong), Catch::Contains("select: got a bias on logits twice, beside a list of pages"));
  CHECK_THROWS_WITH(outputs(Biased::too_short),
                    Catch::Contains("and 5 tokens, wanted") && Catch::Contains("at least 6"));
  CHECK_THROWS_WITH(outputs(Biased::in_observe), Catch::Contains("or a bias, wanted that in select() alone"));
}
